//! What Kubernetes says becomes of a connection, written down without a thought of tables: the
//! naive half of the property test.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use super::world::{World, is_here, is_node, route};
use crate::proxy::model::{Cidr, Endpoint, L4, NodePortAddresses, ServicePort};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    Dropped,
    Rejected,
    /// To each of these as often, with whether its source is hidden.
    To(Vec<(IpAddr, u16, bool)>),
}

#[derive(Clone, Debug)]
pub struct Sent {
    pub from: IpAddr,
    pub to: IpAddr,
    pub protocol: L4,
    pub port: u16,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    ClusterIp,
    LoadBalancer,
    External,
    NodePort,
}

pub fn expected(world: &World, sent: &Sent) -> Expected {
    let from_pod = match world.node.bridge.is_empty() {
        false => is_here(sent.from),
        true => world.node.pod_cidrs.iter().any(|c| c.contains(sent.from)),
    };
    let from_node = is_node(sent.from) || sent.from.is_loopback();
    if sent.to.is_loopback() {
        return untouched(world, sent, from_node);
    }
    let owner = owner(world, sent);
    if let Some((service, How::LoadBalancer)) = owner
        && !service.source_ranges.is_empty()
        && !may_use(world, service, sent.from)
    {
        return Expected::Dropped;
    }
    // The Service's address, then the host's ports, host ports first.
    let mut refusal = None;
    if let Some((service, how)) = owner {
        match ask(world, sent, service, how, (from_pod, from_node)) {
            Asked::Answered(answer) => return answer,
            Asked::Nobody(said) => refusal = Some(said),
        }
    }
    if let Some(found) = host_port(world, sent) {
        return Expected::To(vec![to(world, sent, found, true, false, from_node)]);
    }
    if let Some(service) = at_node_port(world, sent) {
        match ask(world, sent, service, How::NodePort, (from_pod, from_node)) {
            Asked::Answered(answer) => return answer,
            // The address was asked first.
            Asked::Nobody(said) => refusal = refusal.or(Some(said)),
        }
    }
    if let Some(refusal) = refusal {
        return refusal;
    }
    if world.services.iter().any(|s| s.cluster_ip == Some(sent.to)) && !is_node(sent.to) {
        return Expected::Rejected;
    }
    if world.service_cidrs.iter().any(|c| c.parse::<Cidr>().unwrap().contains(sent.to)) && !is_node(sent.to) {
        return Expected::Dropped;
    }
    untouched(world, sent, from_node)
}

enum Asked {
    Answered(Expected),
    /// Nobody is there for anyone.
    Nobody(Expected),
}

fn ask(world: &World, sent: &Sent, service: &ServicePort, how: How, (from_pod, from_node): (bool, bool)) -> Asked {
    let (list, hidden) = choice(service, how, from_pod, from_node);
    if !list.is_empty() {
        let all = list.iter().map(|e| to(world, sent, (e.ip, e.port), true, hidden, from_node));
        return Asked::Answered(Expected::To(all.collect()));
    }
    let local = if how == How::ClusterIp { service.internal_local } else { service.external_local };
    let said = if local && service.has_any { Expected::Dropped } else { Expected::Rejected };
    match how != How::ClusterIp && !service.cluster.is_empty() {
        true => Asked::Answered(said),
        false => Asked::Nobody(said),
    }
}

/// Who is asked by this address and port.
fn owner<'a>(world: &'a World, sent: &Sent) -> Option<(&'a ServicePort, How)> {
    let mut asked = world.services.iter().filter(|s| s.protocol == sent.protocol && s.port == sent.port);
    asked.find_map(|service| match service {
        s if s.cluster_ip == Some(sent.to) => Some((s, How::ClusterIp)),
        s if s.load_balancer_ips.contains(&sent.to) => Some((s, How::LoadBalancer)),
        s if s.external_ips.contains(&sent.to) => Some((s, How::External)),
        _ => None,
    })
}

fn at_node_port<'a>(world: &'a World, sent: &Sent) -> Option<&'a ServicePort> {
    let mut own = world.node.addresses.iter().filter(|ip| ip.is_ipv4() == sent.to.is_ipv4());
    let taken = match &world.node.node_port_addresses {
        NodePortAddresses::All => is_node(sent.to),
        NodePortAddresses::Primary => own.next() == Some(&sent.to),
        NodePortAddresses::Cidrs(cidrs) => own.any(|ip| *ip == sent.to) && cidrs.iter().any(|c| c.contains(sent.to)),
    };
    let mut all = world.services.iter().filter(|s| s.node_port == Some(sent.port) && s.protocol == sent.protocol);
    all.next().filter(|_| taken)
}

fn may_use(world: &World, service: &ServicePort, from: IpAddr) -> bool {
    let node_may = service.source_ranges.iter().any(|c| {
        let first = world.node.addresses.iter().find(|ip| ip.is_ipv4() == from.is_ipv4());
        first.is_some_and(|ip| c.contains(*ip))
    });
    service.source_ranges.iter().any(|c| c.contains(from)) || (node_may && service.load_balancer_ips.contains(&from))
}

/// The endpoints of the policy that counts, and whether the policy hides the source.
fn choice(service: &ServicePort, how: How, from_pod: bool, from_node: bool) -> (&[Endpoint], bool) {
    match how {
        How::ClusterIp if service.internal_local => (&service.local, !from_pod),
        How::ClusterIp => (&service.cluster, !from_pod),
        _ if !service.external_local => (&service.cluster, true),
        _ if from_pod => (&service.cluster, false),
        _ if from_node => (&service.cluster, true),
        _ => (&service.local, false),
    }
}

fn host_port(world: &World, sent: &Sent) -> Option<(IpAddr, u16)> {
    let mut wants = world.host_ports.clone();
    wants.sort();
    let fits = |named: bool| {
        wants.iter().find(|w| {
            let any = w.host_ip.is_none_or(|ip| ip.is_unspecified());
            let here = if named { w.host_ip == Some(sent.to) } else { any };
            w.protocol == sent.protocol && w.host_port == sent.port && w.ip.is_ipv4() == sent.to.is_ipv4() && here
        })
    };
    fits(true).or_else(|| fits(false)).filter(|_| is_node(sent.to)).map(|w| (w.ip, w.port))
}

fn untouched(world: &World, sent: &Sent, from_node: bool) -> Expected {
    Expected::To(vec![to(world, sent, (sent.to, sent.port), false, false, from_node)])
}

/// Whether the source is hidden in the end: by policy; since the answer would never come back; or
/// since nobody outside knows a pod's address.
fn to(
    world: &World,
    sent: &Sent,
    (ip, port): (IpAddr, u16),
    translated: bool,
    hidden: bool,
    from_node: bool,
) -> (IpAddr, u16, bool) {
    let own = [super::world::POD, super::world::POD2, "fd88::2"].map(super::world::ip);
    let itself = translated && ip == sent.from && own.contains(&ip);
    let pods = world.node.pod_cidrs.iter().find(|c| c.contains(sent.from));
    let outside = !world.node.bridge.is_empty() && pods.is_some_and(|range| !range.contains(ip)) && &*route(ip) != "coracle0";
    // What ends on this node and did not begin on it never leaves.
    let leaves = from_node || !(is_node(ip) || ip.is_loopback());
    (ip, port, leaves && (hidden || itself || outside))
}
