//! What all of a family's table stands on: the node, as far as rules hold it, and the words by
//! which rules tell pods from others.
//!
//! Invariant: of one family only. Pods are told by the interface that they come in by, since an
//! address can be forged from outside (and the index of an interface changes when it is made
//! anew, so by name). Where another CNI made the pods' interfaces, by the pods' range instead.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::super::model::{Cidr, NodeFacts, NodePortAddresses};
use super::super::table::ir::{Family, Name, Step};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ground {
    pub family: Family,
    pub table: Name,
    /// None: a CNI plugin connects the pods.
    pub bridge: Option<Name>,
    pub pod_cidrs: Vec<Cidr>,
    /// The node's, its InternalIPs first.
    pub addresses: Vec<IpAddr>,
    pub node_ports: NodePorts,
    pub service_cidrs: Vec<Cidr>,
    /// The kernel can tell whether an address is this host's (nft_fib). Without it there are no
    /// host ports, and NodePorts only on addresses that we know.
    pub fib: bool,
    pub resolvers: Vec<IpAddr>,
}

/// Where connections to NodePorts are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePorts {
    /// On every address of the host but loopback ones.
    EveryLocal,
    On(BTreeSet<IpAddr>),
}

impl Ground {
    pub fn of(family: Family, table: &str, node: &NodeFacts, service_cidrs: &[Cidr], fib: bool) -> Ground {
        let v4 = family == Family::Ip;
        let of_family = |cidrs: &[Cidr]| -> Vec<Cidr> { cidrs.iter().filter(|c| c.is_v4() == v4).copied().collect() };
        let addresses: Vec<IpAddr> = node.addresses.iter().filter(|ip| ip.is_ipv4() == v4).copied().collect();
        let outward = addresses.iter().filter(|ip| !ip.is_loopback());
        let every = || match fib {
            true => NodePorts::EveryLocal,
            false => NodePorts::On(outward.clone().copied().collect()),
        };
        let node_ports = match &node.node_port_addresses {
            NodePortAddresses::All => every(),
            NodePortAddresses::Primary => NodePorts::On(outward.clone().take(1).copied().collect()),
            NodePortAddresses::Cidrs(cidrs) if of_family(cidrs).iter().any(|c| c.prefix == 0) => every(),
            NodePortAddresses::Cidrs(cidrs) => {
                NodePorts::On(outward.clone().filter(|ip| cidrs.iter().any(|c| c.contains(**ip))).copied().collect())
            }
        };
        Ground {
            family,
            table: table.into(),
            bridge: (!node.bridge.is_empty()).then(|| node.bridge.as_str().into()),
            pod_cidrs: of_family(&node.pod_cidrs),
            addresses,
            node_ports,
            service_cidrs: of_family(service_cidrs),
            fib,
            resolvers: node.resolvers.iter().filter(|ip| ip.is_ipv4() == v4).copied().collect(),
        }
    }

    pub fn has(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == (self.family == Family::Ip)
    }

    /// Matches of what a pod of this node sends; any of them.
    pub(super) fn sent_by_pods(&self) -> Vec<Step> {
        match &self.bridge {
            Some(bridge) => vec![Step::InInterface { name: Name::clone(bridge), not: false }],
            None => self.pod_cidrs.iter().map(|cidr| Step::SourceIn { cidr: *cidr, not: false }).collect(),
        }
    }

    /// Matches of what others send; each rule of them that fits. None where nothing tells.
    pub(super) fn sent_by_others(&self) -> Vec<Vec<Step>> {
        match &self.bridge {
            // What the node itself sends comes in nowhere: older kernels match no name then.
            Some(bridge) => {
                let elsewhere = vec![Step::InInterface { name: Name::clone(bridge), not: true }];
                let own = self.fib.then(|| vec![Step::SourceIsLocal { not: false }]);
                std::iter::once(elsewhere).chain(own).collect()
            }
            None if self.pod_cidrs.is_empty() => Vec::new(),
            None => vec![self.pod_cidrs.iter().map(|cidr| Step::SourceIn { cidr: *cidr, not: true }).collect()],
        }
    }

    /// Matches of what the node itself sends, no pod's; None where nothing tells.
    pub(super) fn sent_by_node(&self) -> Option<Vec<Step>> {
        let own = self.fib.then_some(Step::SourceIsLocal { not: false })?;
        // A plugin's gateway has an address of the pods' range.
        let no_pod = self.pod_cidrs.iter().filter(|_| self.bridge.is_none());
        Some(no_pod.map(|cidr| Step::SourceIn { cidr: *cidr, not: true }).chain([own]).collect())
    }

    /// `127.0.0.0/8` or `::1`.
    pub(super) fn loopback(&self) -> Cidr {
        match self.family {
            Family::Ip => Cidr { address: IpAddr::from([127, 0, 0, 0]), prefix: 8 },
            Family::Ip6 => Cidr::only(std::net::Ipv6Addr::LOCALHOST.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(node_port_addresses: NodePortAddresses) -> NodeFacts {
        let ip = |text: &str| text.parse().unwrap();
        NodeFacts {
            addresses: ["192.0.2.1", "127.0.0.1", "198.51.100.1", "2001:db8::1"].map(ip).to_vec(),
            pod_cidrs: vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()],
            node_port_addresses,
            bridge: "coracle0".into(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn node_ports_are_where_the_node_says_and_never_on_loopback() {
        let on = |addresses, family, fib| match Ground::of(family, "t", &node(addresses), &[], fib).node_ports {
            NodePorts::EveryLocal => vec!["all".to_owned()],
            NodePorts::On(some) => some.iter().map(IpAddr::to_string).collect(),
        };
        let cidrs = |all: &[&str]| NodePortAddresses::Cidrs(all.iter().map(|c| c.parse().unwrap()).collect());
        assert_eq!(on(NodePortAddresses::Primary, Family::Ip, true), ["192.0.2.1"]);
        assert_eq!(on(NodePortAddresses::Primary, Family::Ip6, true), ["2001:db8::1"]);
        assert_eq!(on(NodePortAddresses::All, Family::Ip, true), ["all"]);
        assert_eq!(on(NodePortAddresses::All, Family::Ip, false), ["192.0.2.1", "198.51.100.1"]);
        assert_eq!(on(cidrs(&["198.51.100.0/24", "127.0.0.0/8"]), Family::Ip, true), ["198.51.100.1"]);
        assert_eq!(on(cidrs(&["198.51.100.0/24"]), Family::Ip6, true), [""; 0]);
        assert_eq!(on(cidrs(&["0.0.0.0/0"]), Family::Ip, true), ["all"]);
        assert_eq!(on(cidrs(&["0.0.0.0/0"]), Family::Ip6, true), [""; 0], "that range is IPv4's");
    }
}
