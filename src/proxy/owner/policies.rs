//! Policies among what the owner keeps: who is isolated follows from the objects that were told and
//! the addresses that pods hold, thought through whole and compared with what is there.
//!
//! Invariants: a pod's verdicts change in the transaction in which its addresses do; a change that
//! may deny what was allowed ends the flows that it denies before it is answered.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::flows::own_addresses;
use super::{OfFamily, Owner};
use crate::proxy::ProxyError;
use crate::proxy::conntrack;
use crate::proxy::policy::part::{PREFIX, part};
use crate::proxy::policy::{self, PolicyModel, World, may_tighten};
use crate::proxy::table::changes::{Changes, between};
use crate::proxy::table::ir::Table;
use crate::sys::chain::chain;
use crate::sys::nftables;

#[derive(Default)]
pub(super) struct Policies {
    /// Somebody has said which there are.
    pub known: bool,
    /// Its pods have the addresses that they hold.
    world: World,
    model: PolicyModel,
}

impl Policies {
    pub fn isolate(&self, ip: IpAddr) -> bool {
        self.model.subjects.contains_key(&ip)
    }
}

impl OfFamily {
    /// All that is to be in the kernel, as far as it can be.
    pub(super) fn wanted(&self) -> Table {
        let mut table = self.layout.table();
        let Table { sets, chains, elements, .. } = self.policy.clone();
        table.sets.extend(sets);
        table.chains.extend(chains);
        table.elements.extend(elements);
        table.without(&self.needs)
    }
}

impl Owner {
    pub(super) fn policies(&mut self, world: World) -> Result<(), ProxyError> {
        let first = !std::mem::replace(&mut self.policies.known, true);
        self.policies.world = world;
        let (was, changes) = self.lay_out_policies();
        let mut result = Ok(());
        for (at, changes) in changes.iter().enumerate() {
            let done = match first {
                true => self.first_policies(at),
                false if changes.is_empty() => Ok(()),
                false => self.change(at, changes),
            };
            result = result.and(done);
        }
        self.end_denied(&was);
        result
    }

    /// An earlier agent may have left chains. No table is made in order to say that there are no policies.
    fn first_policies(&mut self, at: usize) -> Result<(), ProxyError> {
        let Some(of) = self.families.get(at) else { return Ok(()) };
        if of.policy.chains.is_empty() {
            if !self.is_there(at)? {
                return Ok(());
            }
            let chains = nftables::open().and_then(|mut socket| nftables::chains(&mut socket, of.family, &self.config.table));
            // Where they cannot be looked at, the whole table is, and says why.
            if chains.is_ok_and(|chains| chains.iter().all(|chain| !chain.name.starts_with(PREFIX))) {
                return Ok(());
            }
        }
        self.bring(at).map(drop)
    }

    /// Thinks policies through; what they were, and the changes of each family's table.
    pub(super) fn lay_out_policies(&mut self) -> (PolicyModel, Vec<Changes>) {
        let pods = &self.pods;
        for pod in self.policies.world.pods.iter_mut().filter(|pod| !pod.host_network) {
            pod.addresses = pods.get(&pod.uid).map(|held| held.addresses.clone()).unwrap_or_default();
        }
        // What could not be read is told by whoever reads the objects.
        let (model, _) = policy::model(&self.policies.world);
        let was = std::mem::replace(&mut self.policies.model, model);
        let same = was == self.policies.model;
        let changes = self.families.iter_mut().map(|of| {
            if same {
                return Changes::default();
            }
            let after = part(&self.policies.model, of.family, &self.config.table, &self.config.node.bridge);
            let changes = between(&of.policy, &after);
            of.policy = after;
            changes
        });
        (was, changes.collect())
    }

    /// Flows that are denied now, and were not for sure before.
    pub(super) fn end_denied(&self, was: &PolicyModel) {
        if may_tighten(was, &self.policies.model) {
            (0..self.families.len()).for_each(|at| self.end_denied_of(at));
        }
    }

    /// Whatever began while our rules were not there, too. One that cannot be ended is told, no
    /// reason to fail: no new one is let through.
    pub(super) fn end_denied_of(&self, at: usize) {
        let Some(of) = self.families.get(at).filter(|of| !of.policy.chains.is_empty()) else { return };
        let own: BTreeSet<IpAddr> = own_addresses().into_iter().collect();
        match conntrack::end_denied(&self.policies.model, of.family, &own) {
            Ok(0) => {}
            Ok(flows) => tracing::info!(family = of.family.name(), flows, "policies ended connections that they deny"),
            Err(e) => tracing::warn!(
                family = of.family.name(),
                error = %chain(&e),
                cure = "where the kernel does not know the request: modprobe nf_conntrack_netlink, or CONFIG_NF_CT_NETLINK",
                "connections that a policy denies now go on until they end by themselves"
            ),
        }
    }
}
