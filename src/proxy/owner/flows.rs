//! The owner's hand on connection tracking: UDP flows that lead where nobody serves.
//!
//! Invariant: what was in the kernel when a change was made, and is wrong since, is forgotten right
//! after it; what an agent missed that was away or killed in between, at the next one's first word.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Instant;

use super::Owner;
use crate::proxy::conntrack::{self, Right, Stale};
use crate::sys::chain::chain;
use crate::sys::inet;

impl Owner {
    /// Flows that lead nowhere are a nuisance, not a reason to fail.
    pub(super) fn forget(&mut self, stale: &BTreeSet<Stale>) {
        if stale.is_empty() {
            return;
        }
        let own = own_addresses();
        for v4 in [true, false] {
            let of_family: BTreeSet<Stale> = stale.iter().filter(|s| s.is_v4() == v4).copied().collect();
            if of_family.is_empty() {
                continue;
            }
            let begun = Instant::now();
            match conntrack::forget(&of_family, &own) {
                Ok(count) => self.forgotten(v4, count, begun.elapsed()),
                Err(e) => tracing::warn!(
                    error = %chain(&e),
                    flows = of_family.len(),
                    "clients of a UDP port that changed may reach nobody until their flow times out"
                ),
            }
        }
    }

    /// After changes that nobody told of: what leads elsewhere than the table says.
    pub(super) fn forget_wrong(&mut self, at: usize) {
        let Some(of) = self.families.get(at) else { return };
        let (v4, family) = (of.is_v4(), of.family);
        let host_ports = self.pods.values().flat_map(|pod| &pod.host_ports).filter(|port| port.ip.is_ipv4() == v4);
        let right = Right::of(of.layout.services(), host_ports);
        if right.is_empty() {
            return;
        }
        let own: BTreeSet<IpAddr> = own_addresses().into_iter().collect();
        let begun = Instant::now();
        match conntrack::forget_wrong(&right, family, &own) {
            Ok(count) => self.forgotten(v4, count, begun.elapsed()),
            Err(e) => tracing::warn!(
                error = %chain(&e),
                family = family.name(),
                "clients of UDP ports that changed while we were away may reach nobody until their flows time out"
            ),
        }
    }
}

/// This host's addresses; none where they cannot be read: flows to them time out then.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    let all = inet::addresses().inspect_err(|e| tracing::debug!(error = %e, "cannot list this host's addresses"));
    all.unwrap_or_default().into_iter().map(|(_, ip)| ip).collect()
}
