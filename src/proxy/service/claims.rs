//! Who owns an address and port, or a node port, that more than one Service wants.
//!
//! Invariant: of each there is one owner, whatever the order of arrival: a ClusterIP goes before
//! a load balancer's address and that before an external IP (a Service cannot take over the
//! cluster's DNS by `externalIPs`: CVE-2020-8554), then the older Service, then the first name.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::Name;
use crate::proxy::model::{L4, ServicePort, Skipped};

/// Something that only one Service can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claim {
    Address(IpAddr, L4, u16),
    NodePort(L4, u16),
}

/// Stronger first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    ClusterIp,
    LoadBalancer,
    ExternalIp,
    NodePort,
    HealthCheck,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    pub rank: Rank,
    pub created: u64,
    pub service: Arc<Name>,
}

impl Claim {
    /// What one port wants, strongest first.
    pub fn of(port: &ServicePort) -> Vec<(Claim, Rank)> {
        let at = |ip: &IpAddr, rank| (Claim::Address(*ip, port.protocol, port.port), rank);
        let mut claims: Vec<(Claim, Rank)> = port.cluster_ip.iter().map(|ip| at(ip, Rank::ClusterIp)).collect();
        claims.extend(port.load_balancer_ips.iter().map(|ip| at(ip, Rank::LoadBalancer)));
        claims.extend(port.external_ips.iter().map(|ip| at(ip, Rank::ExternalIp)));
        claims.extend(port.node_port.map(|number| (Claim::NodePort(port.protocol, number), Rank::NodePort)));
        claims.extend(port.health_check_node_port.iter().map(|h| (Claim::NodePort(L4::Tcp, h.port), Rank::HealthCheck)));
        claims
    }
}

impl std::fmt::Display for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Claim::Address(ip, protocol, port) => write!(f, "{}/{protocol}", std::net::SocketAddr::new(*ip, *port)),
            Claim::NodePort(protocol, port) => write!(f, "{port}/{protocol}"),
        }
    }
}

/// Nearly every claim has one holder.
enum Held {
    One(Holder),
    /// Sorted, the owner first; two at least.
    Many(Vec<Holder>),
}

impl Held {
    fn owner(&self) -> Option<&Holder> {
        match self {
            Held::One(holder) => Some(holder),
            Held::Many(holders) => holders.first(),
        }
    }
}

#[derive(Default)]
pub struct Claims(BTreeMap<Claim, Held>);

impl Claims {
    pub fn take(&mut self, claim: Claim, holder: Holder) {
        match self.0.remove(&claim) {
            None => drop(self.0.insert(claim, Held::One(holder))),
            Some(Held::One(other)) => {
                let mut both = vec![other, holder];
                both.sort();
                self.0.insert(claim, Held::Many(both));
            }
            Some(Held::Many(mut holders)) => {
                let at = holders.partition_point(|other| *other < holder);
                holders.insert(at, holder);
                self.0.insert(claim, Held::Many(holders));
            }
        }
    }

    pub fn release(&mut self, claim: &Claim, holder: &Holder) {
        if let Some(Held::Many(mut holders)) = self.0.remove(claim) {
            holders.retain(|other| other != holder);
            let left = if holders.len() == 1 { holders.pop().map(Held::One) } else { Some(Held::Many(holders)) };
            self.0.extend(left.map(|held| (*claim, held)));
        }
    }

    /// The other Services that want it and would feel it if `holder` came or went: the owner,
    /// and who is next to it.
    pub fn rivals(&self, claim: &Claim, holder: &Holder) -> Vec<Arc<Name>> {
        let near: &[Holder] = match self.0.get(claim) {
            None => &[],
            Some(Held::One(other)) => std::slice::from_ref(other),
            Some(Held::Many(holders)) => holders.get(..2).unwrap_or(holders),
        };
        near.iter().filter(|other| other.service != holder.service).map(|other| other.service.clone()).collect()
    }

    fn owner(&self, claim: &Claim) -> Option<&Holder> {
        self.0.get(claim).and_then(Held::owner)
    }

    fn is_own(&self, claim: &Claim, name: &Name) -> bool {
        self.owner(claim).is_none_or(|owner| *owner.service == *name)
    }

    /// Takes from a port what others own; false: nothing of it is left to serve.
    pub fn settle(&self, port: &mut ServicePort, name: &Name) -> bool {
        let (protocol, number) = (port.protocol, port.port);
        let own = |ip: &IpAddr| self.is_own(&Claim::Address(*ip, protocol, number), name);
        // Without its ClusterIP a Service's port is not served at all, as before it had one.
        if !port.cluster_ip.as_ref().is_some_and(own) {
            return false;
        }
        port.load_balancer_ips.retain(own);
        port.external_ips.retain(own);
        port.node_port = port.node_port.filter(|n| self.is_own(&Claim::NodePort(protocol, *n), name));
        let checked = port.health_check_node_port.take();
        port.health_check_node_port = checked.filter(|h| self.is_own(&Claim::NodePort(L4::Tcp, h.port), name));
        true
    }

    /// What others own of a port that is not settled yet.
    pub fn lost(&self, port: &ServicePort, name: &Name) -> Vec<Skipped> {
        let lost = Claim::of(port).into_iter().filter(|(claim, _)| !self.is_own(claim, name));
        lost.filter_map(|(claim, rank)| {
            let owner = self.owner(&claim)?;
            let field = match rank {
                Rank::ClusterIp => "spec.clusterIPs",
                Rank::LoadBalancer => "status.loadBalancer.ingress",
                Rank::ExternalIp => "spec.externalIPs",
                Rank::NodePort => "spec.ports.nodePort",
                Rank::HealthCheck => "spec.healthCheckNodePort",
            };
            let whole = if rank == Rank::ClusterIp { ", so this port is not served at all" } else { "" };
            let why = format!("{claim} belongs to Service {}{whole}: use another", owner.service);
            Some(Skipped { object: format!("Service {name}"), field: field.to_owned(), why })
        })
        .collect()
    }
}
