//! The node's addresses, followed: a lease that is renewed with another address moves NodePorts.
//!
//! Invariant: the addresses by which others know the node come first, one a family; then every
//! other one of the host that is routed, without those of the pods' own bridge. rtnetlink(7).

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::Owner;
use crate::proxy::service::address;
use crate::proxy::tuning;
use crate::sys::chain::chain;
use crate::sys::netlink::Socket;
use crate::sys::{inet, rtnl};

/// Addresses come in bursts, and each pod that starts makes some.
const CALM: Duration = Duration::from_millis(300);

pub(super) fn listen() -> Option<Socket> {
    match rtnl::listen_to_addresses() {
        Ok(socket) => Some(socket),
        Err(e) => {
            tracing::warn!(error = %chain(&e), "no word of this host's addresses; changes are seen within 20 s");
            None
        }
    }
}

/// `known`: what others call this node, where somebody has said it.
fn addresses(known: &[IpAddr], bridge: &str) -> std::io::Result<Vec<IpAddr>> {
    let mut all = if known.is_empty() { inet::outward() } else { known.to_vec() };
    let mut more: Vec<IpAddr> = inet::addresses()?
        .into_iter()
        .filter(|(name, ip)| name != bridge && address::unfit(*ip).is_none())
        .map(|(_, ip)| ip)
        .collect();
    more.sort();
    more.dedup();
    more.retain(|ip| !all.contains(ip));
    all.extend(more);
    Ok(all)
}

impl Owner {
    /// Reads all that was told; what it was is looked at when it has calmed down.
    pub(super) fn hear_moves(&mut self) {
        while let Some(socket) = &self.moves {
            match socket.receive_now("hear of addresses") {
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(e) if e.errno() == Errno::ENOBUFS => {}
                Err(e) => {
                    tracing::warn!(error = %chain(&e), "no word of this host's addresses any more; changes are seen within 20 s");
                    self.moves = None;
                }
            }
            self.moved.get_or_insert_with(|| Instant::now() + CALM);
        }
    }

    pub(super) fn follow(&mut self) {
        let Some(known) = &self.options.follow else { return };
        let addresses = match addresses(known, &self.config.node.bridge) {
            Ok(addresses) => addresses,
            Err(e) => return tracing::debug!(error = %e, "cannot list this host's addresses"),
        };
        if addresses == self.config.node.addresses {
            return;
        }
        self.config.node.addresses = addresses;
        let different = self.move_ground();
        if self.idle {
            return;
        }
        for at in different {
            tracing::info!(addresses = ?self.config.node.addresses, "the node's addresses are others: NodePorts follow");
            if let Err(error) = self.bring(at) {
                tracing::warn!(error = %chain(&error), "cannot write our nftables table; trying again");
            }
        }
    }

    /// What rules stand on is what the node is now. Gives the families whose rules are others then.
    pub(super) fn move_ground(&mut self) -> Vec<usize> {
        let mut different = Vec::new();
        for at in 0..self.families.len() {
            let Some(new) = self.ground_of(at) else { continue };
            let Some(of) = self.families.get_mut(at) else { continue };
            let old = of.layout.ground();
            // Of the addresses only the first is in rules.
            let bare = |ground: &crate::proxy::layout::Ground| {
                let first = ground.addresses.iter().take(1).copied().collect();
                crate::proxy::layout::Ground { addresses: first, ..ground.clone() }
            };
            if bare(old) != bare(&new) {
                different.push(at);
            }
            of.layout.move_to(new);
        }
        self.tell_where();
        different
    }

    /// Once, as soon as we serve: connection tracking for many connections.
    pub(super) fn tune(&mut self) {
        let Some(limits) = self.options.conntrack.filter(|_| self.role.serves() && !self.tuned && !self.idle) else { return };
        self.tuned = true;
        tuning::apply(&limits);
    }
}
