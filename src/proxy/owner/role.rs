//! Whether the owner serves Services: looked at when they come, every 20 s, and when somebody
//! makes a kube-proxy's table.
//!
//! Invariant: Services that are not served are in no table of ours, and are kept so that they can
//! be at once when the other proxy is gone; where that can never be, they are not kept.

use std::mem::take;

use super::{Owner, ServiceChange};
use crate::proxy::ProxyError;
use crate::proxy::layout::Ground;
use crate::proxy::mode::{Mode, Role};
use crate::proxy::observe;
use crate::proxy::table::needs::Need;
use crate::sys::chain::chain;
use crate::sys::nftables;

impl Owner {
    /// Sees who else is there, and takes up or gives up Services accordingly.
    pub(super) fn take_role(&mut self) {
        let foreign = match nftables::open().and_then(|mut socket| observe::foreign(&mut socket)) {
            Ok(foreign) => foreign,
            Err(e) => {
                tracing::debug!(error = %chain(&e), "cannot look at other nftables tables");
                let last = self.shared().foreign.clone();
                return self.become_of(Role::of(self.options.mode, &last));
            }
        };
        let role = Role::of(self.options.mode, &foreign);
        let known = self.shared().foreign.kube_proxy_seen();
        if let (None, true, Some(seen)) = (known, role.serves(), foreign.kube_proxy_seen()) {
            tracing::warn!(seen, "another kube-proxy serves Services here too; --proxy=on says that we do all the same");
        }
        self.shared().foreign = foreign;
        self.become_of(role);
    }

    /// Before the first order. Who is told to serve anyway need not look first.
    pub(super) fn begin(&mut self) {
        match self.options.mode {
            Mode::On => self.become_of(Role::Serving),
            Mode::Off | Mode::Auto => self.take_role(),
        }
        self.follow();
        self.tell_where();
    }

    fn become_of(&mut self, role: Role) {
        if role == self.role {
            return;
        }
        let (before, now, known) = (self.role.serves(), role.serves(), self.role != Role::Unknown);
        match &role {
            Role::Yielding(seen) => {
                tracing::warn!(
                    seen,
                    "another kube-proxy serves Services here: ours are off; --proxy=on serves them all the same"
                );
            }
            Role::Off => tracing::info!("Services are off, as --proxy=off says"),
            Role::Serving if known => tracing::info!("the other kube-proxy is gone: Services are served"),
            Role::Serving | Role::Unknown => {}
        }
        self.role = role.clone();
        self.shared().role = role;
        if before == now && known {
            return;
        }
        for at in 0..self.families.len() {
            let ground = self.ground_of(at);
            let Some(of) = self.families.get_mut(at) else { continue };
            if now {
                of.layout.load(take(&mut of.waiting).into_values());
            } else {
                of.waiting = of.layout.services().map(|s| (s.name.clone(), s.clone())).collect();
                let names: Vec<_> = of.waiting.keys().cloned().collect();
                // The whole table is compared below.
                drop(of.layout.change(&names, []));
                if self.options.mode == Mode::Off {
                    of.waiting.clear();
                }
            }
            if let Some(ground) = ground {
                of.layout.move_to(ground);
            }
        }
        self.count_all();
        // Before anybody has said which Services there are, nothing is written for them.
        if !self.services_known || self.removed {
            return;
        }
        for at in 0..self.families.len() {
            let wanted = self.families.get(at).is_some_and(|of| of.was_whole || of.layout.services().next().is_some());
            if wanted && let Err(error) = self.bring(at) {
                tracing::warn!(error = %chain(&error), "cannot write our nftables table; trying again");
            }
        }
        self.tune();
    }

    /// Services that come while somebody else serves them.
    pub(super) fn put_aside(&mut self, v4: ServiceChange, v6: ServiceChange, first: bool) -> Result<(), ProxyError> {
        let keeps = self.options.mode != Mode::Off;
        let mut result = Ok(());
        for (is_v4, change) in [(true, v4), (false, v6)] {
            let Some(at) = self.families.iter().position(|of| of.is_v4() == is_v4) else { continue };
            if let Some(of) = self.families.get_mut(at).filter(|_| keeps) {
                change.gone.iter().for_each(|name| drop(of.waiting.remove(name)));
                of.waiting.extend(change.come.into_iter().map(|s| (s.name.clone(), s)));
            }
            // What an earlier agent served goes.
            if first && self.is_there(at)? {
                result = result.and(self.bring(at).map(drop));
            }
        }
        result
    }

    /// What rules stand on; a Service range is nobody's while Services are not ours.
    pub(super) fn ground_of(&self, at: usize) -> Option<Ground> {
        let of = self.families.get(at)?;
        let serves = matches!(self.role, Role::Serving | Role::Unknown);
        let fib = !of.needs.contains(&Need::Fib);
        let ranges: &[_] = if serves { &self.config.service_cidrs } else { &[] };
        Some(Ground::of(of.family, &self.config.table, &self.config.node, ranges, fib))
    }
}
