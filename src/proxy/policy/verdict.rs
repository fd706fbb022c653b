//! What policies say to the first packet of a flow: the plain meaning, which the chains have to have.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use super::super::model::L4;
use super::model::{Direction, PolicyModel, Rule};

/// The port of the node's DNS server.
pub const DNS: u16 = 53;

/// As it is after translation of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// IPPROTO_*.
    pub protocol: u8,
    /// The destination's; 0 where the protocol has none.
    pub port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Allowed,
    /// By the policies that isolate that side.
    Denied(Direction),
}

impl PolicyModel {
    /// `from_node`: an address of this host sends it.
    pub fn verdict(&self, flow: &Flow, from_node: bool) -> Verdict {
        if from_node || flow.source == flow.destination {
            return Verdict::Allowed;
        }
        for (direction, subject, peer) in
            [(Direction::Egress, flow.source, flow.destination), (Direction::Ingress, flow.destination, flow.source)]
        {
            let isolating = self.subjects.get(&subject).and_then(|s| s.policies(direction));
            let mut rules = isolating.into_iter().flat_map(|names| names.iter()).filter_map(|name| self.policies.get(name));
            if isolating.is_some() && !rules.any(|policy| policy.rules(direction).iter().any(|r| self.allows(r, peer, flow))) {
                return Verdict::Denied(direction);
            }
        }
        Verdict::Allowed
    }

    fn allows(&self, rule: &Rule, peer: IpAddr, flow: &Flow) -> bool {
        let of_peer = rule.peers.contain(peer) && rule.ports.contain(flow.destination, flow.protocol, flow.port);
        let asks = |l4: &L4| l4.number() == flow.protocol && flow.port == DNS && self.servers.contains(&flow.destination);
        of_peer || rule.resolves.iter().any(asks)
    }
}
