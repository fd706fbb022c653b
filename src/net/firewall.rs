//! Our tables in the kernel: installed, compared, repaired; host ports opened and closed.
//!
//! Invariant: transactions and the comparison of what is wanted with what is there happen in one
//! order (`tables`), so a comparison never sees a pod half way. What is not our table is not read
//! for more than its name and never written.

use std::sync::{MutexGuard, PoisonError};

use nix::errno::Errno;

use super::apply::{journal, reached};
use super::lacks::{self, Refusal};
use super::leases::Lease;
use super::model::{Cidr, Feature, L4, NetError};
use super::plan::Names;
use super::tables::{Element, Elements, Layout, SETS, difference, written};
use super::{Inner, note_lack};
use crate::store::effects::Effect;
use crate::sys::chain::chain;
use crate::sys::conntrack;
use crate::sys::netlink::Socket;
use crate::sys::nftables::{self, Batch};

/// One family's table, as far as this kernel can have it.
#[derive(Clone, Debug)]
pub struct Table {
    layout: Layout,
    /// False once the kernel has shown that it cannot have one.
    possible: bool,
    /// We have seen it whole: missing it now is somebody's doing.
    was_whole: bool,
}

impl Table {
    pub fn all(names: &Names, cidrs: &[Cidr]) -> Vec<Table> {
        let layout =
            |cidr: &Cidr| Layout { table: names.table.clone(), bridge: names.bridge.clone(), cidr: *cidr, host_ports: true };
        cidrs.iter().map(|c| Table { layout: layout(c), possible: true, was_whole: false }).collect()
    }
    pub fn serves_host_ports(&self) -> bool {
        self.possible && self.layout.host_ports
    }
}

impl Inner {
    fn tables(&self) -> MutexGuard<'_, ()> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nft_socket(&self) -> Result<Socket, NetError> {
        nftables::open().map_err(|source| NetError::Kernel { operation: "open", object: "an nf_tables socket".into(), source })
    }

    /// Compares both tables with what they have to be and repairs them.
    pub(super) fn ensure_tables(&self) -> Result<(), NetError> {
        let _order = self.tables();
        let count = self.state().tables.len();
        (0..count).try_for_each(|at| self.ensure_table(at))?;
        if count > 0 { self.look_at_others() } else { Ok(()) }
    }

    /// An accept of ours cannot overrule a drop of theirs (docker, ufw and firewalld have one), so
    /// it is named instead. Whether their rules let pods through is more than we can tell.
    fn look_at_others(&self) -> Result<(), NetError> {
        let look = |source| NetError::Kernel { operation: "look at", object: "other firewalls".into(), source };
        let first = |first: &mut Option<nftables::ChainSeen>, chain: nftables::ChainSeen| {
            if first.is_none() && chain.drops_forwarded() {
                *first = Some(chain);
            }
        };
        let drop = match nftables::open().and_then(|mut socket| nftables::for_each_chain(&mut socket, || None, first)) {
            // Without nf_tables nobody has such chains.
            Err(e) if matches!(e.errno(), Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EINVAL) => None,
            other => other.map_err(look)?,
        };
        let mut state = self.state();
        match drop {
            Some(chain) => {
                let said = format!("chain {} of nftables table {} drops what it does not accept", chain.name, chain.table);
                note_lack(&mut state.lacks, lacks::lack(Feature::Forwarding, said));
            }
            None => {
                state.lacks.remove(&Feature::Forwarding);
            }
        }
        Ok(())
    }

    /// Elements of all pods that stay.
    fn wanted_elements(&self, layout: &Layout) -> Elements {
        let state = self.state();
        let mut all = Elements::new();
        for pod in state.pods.values().filter(|p| !p.leaving) {
            for (set, elements) in layout.elements(&pod.lease.pod, &pod.lease.addresses, &pod.lease.host_ports) {
                all.entry(set).or_default().extend(elements);
            }
        }
        all
    }

    /// With `tables` held.
    fn ensure_table(&self, at: usize) -> Result<(), NetError> {
        // A feature that is missing makes the layout smaller, at most twice.
        while let Some(table) = self.possible_table(at) {
            let wanted = self.wanted_elements(&table.layout);
            let family = table.layout.family().name();
            let effect = Effect::NftTable { family: family.to_owned(), name: table.layout.table.clone() };
            if self.is_whole(&table.layout)? {
                // What we keep is in the journal, also after that was lost.
                journal(self.effects.done(&effect))?;
                self.repair_elements(&table.layout, &wanted)?;
                break;
            }
            journal(self.effects.intent(&effect))?;
            reached("net.table.intent", family)?;
            match lacks::install(&table.layout, &wanted) {
                Ok(()) => {
                    reached("net.table.install", family)?;
                    journal(self.effects.done(&effect))?;
                    match table.was_whole {
                        true => tracing::warn!(
                            family,
                            table = table.layout.table,
                            "somebody changed or removed our nftables table: restored"
                        ),
                        false => tracing::info!(family, table = table.layout.table, "installed our nftables table"),
                    }
                    break;
                }
                Err(Refusal::Failure(source)) => {
                    return Err(NetError::Kernel {
                        operation: "install the nftables table",
                        object: format!("{family} {}", table.layout.table),
                        source,
                    });
                }
                Err(Refusal::Lack(lack)) => {
                    journal(self.effects.undone(&effect))?;
                    let mut state = self.state();
                    let fib = matches!(lack.feature, Feature::FibIpv4 | Feature::FibIpv6);
                    if let Some(table) = state.tables.get_mut(at) {
                        table.possible = fib && table.layout.host_ports;
                        table.layout.host_ports = false;
                    }
                    note_lack(&mut state.lacks, lack);
                }
            }
        }
        if let Some(table) = self.state().tables.get_mut(at) {
            table.was_whole = table.possible;
        }
        Ok(())
    }

    fn possible_table(&self, at: usize) -> Option<Table> {
        self.state().tables.get(at).filter(|t| t.possible).cloned()
    }

    fn is_whole(&self, layout: &Layout) -> Result<bool, NetError> {
        let object = || format!("{} {}", layout.family().name(), layout.table);
        let look = |source| NetError::Kernel { operation: "look at nftables table", object: object(), source };
        let mut socket = match nftables::open() {
            // Installing says what is lacking.
            Err(e) if e.errno() == Errno::EPROTONOSUPPORT => return Ok(false),
            other => other.map_err(look)?,
        };
        match nftables::rules(&mut socket, layout.family(), &layout.table) {
            Err(e) if matches!(e.errno(), Errno::EOPNOTSUPP | Errno::EINVAL) => Ok(false),
            other => Ok(layout.is_installed(&other.map_err(look)?)),
        }
    }

    /// With `tables` held: makes each set hold exactly what is wanted.
    fn repair_elements(&self, layout: &Layout, wanted: &Elements) -> Result<(), NetError> {
        let object = || format!("{} {}", layout.family().name(), layout.table);
        let kernel = |operation| move |source| NetError::Kernel { operation, object: object(), source };
        let mut socket = self.nft_socket()?;
        let mut batch = Batch::new(layout.family(), &layout.table);
        for set in SETS {
            let take = |all: &mut Vec<Element>, e: nftables::ElementSeen| {
                let data = if let nftables::ContentSeen::Data(data) = e.content { data } else { &[] };
                all.push(Element { key: e.key.to_vec(), data: data.to_vec(), comment: e.comment() });
            };
            let seen = nftables::elements(&mut socket, layout.family(), &layout.table, set, Vec::new, take);
            let Some(seen) = seen.map_err(kernel("look at the elements of nftables table"))? else { continue };
            let (gone, new) = difference(wanted.get(set).map(Vec::as_slice).unwrap_or_default(), &seen);
            remove(&mut batch, set, &gone);
            insert(&mut batch, set, &new);
        }
        let changed = batch.len();
        nftables::commit(&mut socket, "repair elements", &mut batch)
            .map_err(|refused| kernel("repair the elements of nftables table")(refused.error))?;
        if changed > 0 {
            tracing::info!(table = object(), "elements of host ports were not as they should be: repaired");
        }
        Ok(())
    }

    /// The layouts that this kernel can have.
    fn layouts(&self) -> Vec<Layout> {
        self.state().tables.iter().filter(|t| t.possible).map(|t| t.layout.clone()).collect()
    }

    pub(super) fn open_host_ports(&self, lease: &Lease) -> Result<(), NetError> {
        self.change_host_ports(lease, "open host ports", insert)
    }

    pub(super) fn close_host_ports(&self, lease: &Lease) -> Result<(), NetError> {
        self.change_host_ports(lease, "close host ports", remove)
    }

    /// Elements of one pod only. A kernel that refuses them (no table, not there, there with
    /// other data) does not have what we think: then all is compared.
    fn change_host_ports(
        &self,
        lease: &Lease,
        what: &'static str,
        change: fn(&mut Batch, &str, &[Element]),
    ) -> Result<(), NetError> {
        if lease.host_ports.is_empty() {
            return Ok(());
        }
        let _order = self.tables();
        for layout in self.layouts() {
            let mut batch = Batch::new(layout.family(), &layout.table);
            for (set, elements) in layout.elements(&lease.pod, &lease.addresses, &lease.host_ports) {
                change(&mut batch, set, &elements);
            }
            if batch.is_empty() {
                continue;
            }
            let mut socket = self.nft_socket()?;
            match nftables::commit(&mut socket, what, &mut batch) {
                Ok(()) => {}
                Err(refused) if matches!(refused.error.errno(), Errno::ENOENT | Errno::EEXIST) => {
                    let at = self.state().tables.iter().position(|t| t.layout == layout);
                    at.map_or(Ok(()), |at| self.ensure_table(at))?;
                }
                Err(refused) => {
                    return Err(NetError::Kernel {
                        operation: what,
                        object: format!("of pod {}", lease.pod),
                        source: refused.error,
                    });
                }
            }
        }
        Ok(())
    }

    /// Connection tracking remembers a translation for as long as packets come, so a client of a
    /// UDP hostPort would go on to the removed pod's address and to whoever has it next. TCP ends
    /// by itself. The kernel walks its whole table for this (11 ms at 262,144 buckets), so only
    /// where there is something to forget.
    pub(super) fn forget_flows(&self, lease: &Lease) -> Result<(), NetError> {
        if lease.host_ports.iter().all(|p| p.protocol == L4::Tcp) {
            return Ok(());
        }
        for ip in &lease.addresses {
            if self.state().lacks.contains_key(&Feature::Conntrack) {
                return Ok(());
            }
            match conntrack::open().and_then(|mut socket| {
                let filter = conntrack::Filter { answering: Some(*ip), ..conntrack::Filter::default() };
                conntrack::forget(&mut socket, &[filter])
            }) {
                Ok(()) => {}
                Err(e) if matches!(e.errno(), Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EINVAL) => {
                    let lack = lacks::lack(Feature::Conntrack, chain(&e).to_string());
                    note_lack(&mut self.state().lacks, lack);
                }
                Err(source) => {
                    return Err(NetError::Kernel {
                        operation: "forget the flows of",
                        object: format!("pod {}", lease.pod),
                        source,
                    });
                }
            }
        }
        Ok(())
    }
}

fn insert(batch: &mut Batch, set: &str, elements: &[Element]) {
    if !elements.is_empty() {
        batch.add_elements(set, &mut written(elements), usize::MAX);
    }
}

fn remove(batch: &mut Batch, set: &str, elements: &[Element]) {
    if !elements.is_empty() {
        batch.delete_elements(set, &mut written(elements), usize::MAX);
    }
}
