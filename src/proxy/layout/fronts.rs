//! Where a Service's port is reached.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::model::{L4, ServicePort};

/// No two Services have the same one: `proxy/service` settles that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Front {
    Address(IpAddr, L4, u16),
    NodePort(L4, u16),
}

/// As what. An address that is several of a Service's is the first of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    ClusterIp,
    LoadBalancer,
    External,
    NodePort,
}

/// Each place once.
pub(super) fn fronts(service: &ServicePort) -> BTreeMap<Front, Kind> {
    let mut fronts = BTreeMap::new();
    let kinds = service.cluster_ip.iter().map(|ip| (ip, Kind::ClusterIp));
    let kinds = kinds.chain(service.load_balancer_ips.iter().map(|ip| (ip, Kind::LoadBalancer)));
    let kinds = kinds.chain(service.external_ips.iter().map(|ip| (ip, Kind::External)));
    for (ip, kind) in kinds.filter(|(ip, _)| usable(ip)) {
        fronts.entry(Front::Address(*ip, service.protocol, service.port)).or_insert(kind);
    }
    if let Some(port) = service.node_port {
        fronts.insert(Front::NodePort(service.protocol, port), Kind::NodePort);
    }
    fronts
}

/// Addresses that no Service can have, whatever it says.
fn usable(ip: &IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}
