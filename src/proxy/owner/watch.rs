//! The owner's eyes: who changed our tables, what has to be tried again, who else is there.
//!
//! Invariant: only an event that names a table of ours and did not come through our own sockets, or
//! the loss of events that were not all our own, makes us look at all of it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::{Owner, RESTORE, Touched, note};
use crate::proxy::ProxyError;
use crate::proxy::apply::Keeper;
use crate::proxy::lacks::{self, Feature};
use crate::sys::chain::chain;
use crate::sys::nftables;

/// What is told of by notifications is compared all the same, this often.
const COMPARE: Duration = Duration::from_secs(600);
const SAY_AGAIN: Duration = Duration::from_secs(60);

impl Owner {
    /// Reads all notifications that are there.
    pub(super) fn hear(&mut self) {
        let ours: Vec<u32> = self.families.iter().filter_map(|of| of.keeper.as_ref()?.port().ok()).collect();
        // Somebody's transaction has begun: its end, which names him, may come in another datagram.
        let mut foreign = false;
        let (mut lost, mut any, mut by) = (false, false, None);
        let mut touched = BTreeSet::new();
        while let Some(socket) = &self.notices {
            let datagram = match socket.receive_now("hear of changes") {
                Ok(Some(datagram)) => datagram,
                Ok(None) => break,
                Err(e) if e.errno() == Errno::ENOBUFS => {
                    (lost, foreign) = (true, false);
                    continue;
                }
                Err(e) => {
                    tracing::warn!(
                        error = %chain(&e),
                        "no word of changes to our nftables tables any more; they are seen within 20 s"
                    );
                    self.notices = None;
                    lost = true;
                    break;
                }
            };
            any = true;
            for event in nftables::events(&datagram) {
                match event {
                    nftables::Event::Table { family, table, port } if table == self.config.table && !ours.contains(&port) => {
                        let of = self.families.iter().map(|of| of.family).find(|f| f.number() == family);
                        touched.extend(of);
                        foreign |= of.is_some();
                    }
                    nftables::Event::Table { table, .. } if table == "kube-proxy" => {
                        let new = self.shared().foreign.kube_proxy.is_empty();
                        self.glance |= new;
                    }
                    nftables::Event::Table { .. } => {}
                    nftables::Event::Transaction { pid, program } => {
                        if std::mem::take(&mut foreign) && by.is_none() {
                            by = Some(format!("{program} (process {pid})"));
                        }
                    }
                }
            }
        }
        if self.idle || !(any || lost) {
            return;
        }
        // What was lost may have been our own: then the tables' generation went up by our
        // transactions and no more.
        let now = self.foreign_generation();
        if lost && now != Some(self.generation) {
            touched.extend(self.families.iter().map(|of| of.family));
        }
        self.generation = now.unwrap_or(self.generation);
        self.touched.families.extend(touched);
        if let Some(by) = by {
            self.touched.by = by;
        }
    }

    /// The generation of all tables, less our own transactions.
    pub(super) fn foreign_generation(&self) -> Option<u32> {
        let ours = self.families.iter().filter_map(|of| of.keeper.as_ref()).map(Keeper::transactions);
        let ours = ours.fold(0, u32::wrapping_add);
        let generation = nftables::open().and_then(|mut socket| nftables::generation(&mut socket)).ok()?;
        Some(generation.wrapping_sub(ours))
    }

    /// Brings back what somebody changed; not more often than once a second.
    pub(super) fn restore(&mut self) {
        let now = Instant::now();
        if self.touched.families.is_empty() || self.restored.is_some_and(|at| at + RESTORE > now) {
            return;
        }
        let Touched { families, by } = std::mem::take(&mut self.touched);
        self.restored = Some(now);
        for at in 0..self.families.len() {
            let Some(of) = self.families.get(at).filter(|of| families.contains(&of.family)) else { continue };
            let (family, was_whole) = (of.family.name(), of.was_whole);
            match self.bring(at) {
                Ok(done) if done.acts > 0 && was_whole => {
                    let table = &self.config.table;
                    if self.said.is_some_and(|at| at + SAY_AGAIN > now) {
                        tracing::debug!(family, table, by, acts = done.acts, "restored our nftables table again");
                    } else {
                        self.said = Some(now);
                        tracing::warn!(family, table, by, acts = done.acts, "somebody changed our nftables table: restored");
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(family, error = %chain(&error), "cannot restore our nftables table; trying again"),
            }
        }
    }

    pub(super) fn retry(&mut self) {
        let now = Instant::now();
        for at in 0..self.families.len() {
            let Some(of) = self.families.get(at) else { continue };
            let failed = of.failure.as_ref().is_some_and(|f| f.again <= now);
            let refused = of.keeper.as_ref().and_then(Keeper::next).is_some_and(|at| at <= now);
            if self.idle || !(failed || refused) {
                continue;
            }
            let said = of.failure.as_ref().map(|f| f.said.clone());
            if let Err(error) = self.bring(at)
                && said != Some(chain(&error).to_string())
            {
                tracing::warn!(error = %chain(&error), "cannot write our nftables table; trying again");
            }
        }
    }

    /// For who asks again and again: a comparison costs what the table holds.
    pub(super) fn tend(&mut self) -> Result<(), ProxyError> {
        self.hear();
        let whole = self.families.iter().all(|of| of.was_whole && of.failure.is_none());
        let told = self.notices.is_some() && !self.idle && self.touched.families.is_empty();
        let recent = self.compared.is_some_and(|at| at.elapsed() < COMPARE);
        if !(whole && told && recent && self.foreign_generation() == Some(self.generation)) {
            self.bring_all()?;
            self.compared = Some(Instant::now());
        }
        self.look();
        Ok(())
    }

    /// Who else is there, where we are, and, where no notification tells, whether our tables are whole.
    pub(super) fn look(&mut self) {
        self.follow();
        self.take_role();
        if self.idle {
            return;
        }
        let now = self.foreign_generation();
        if now.is_some_and(|now| now != self.generation) && self.notices.is_none() {
            self.touched.families.extend(self.families.iter().map(|of| of.family));
            self.restore();
        }
        self.generation = now.unwrap_or(self.generation);
        let mut shared = self.shared();
        match shared.foreign.drops_forwarded.clone() {
            Some(chain) => {
                let said = format!("chain {} of nftables table {} drops what it does not accept", chain.name, chain.table);
                note(&mut shared.lacks, lacks::lack(Feature::Forwarding, said));
            }
            None => drop(shared.lacks.remove(&Feature::Forwarding)),
        }
    }
}
