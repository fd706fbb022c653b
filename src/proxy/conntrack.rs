//! Which flows have to be forgotten when Services, host ports and policies change, and doing it.
//!
//! Connection tracking remembers a translation for as long as packets come, so UDP clients would
//! go on to an endpoint that is gone, or to nobody where there was none when they began
//! (kubernetes#139628, #105657). TCP and SCTP end by themselves. Never all of them at a restart
//! (kubernetes#122740): what a change names goes ([`stale`]), and where nobody knows what was
//! before, what leads elsewhere than it should ([`Right`]). Both are pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::model::{Endpoint, HostPortWant, L4, ServicePort};
use super::policy::{self, PolicyModel};
use super::table::ir::Family;
use crate::sys::conntrack::{self, Filter};
use crate::sys::netlink::NetlinkError;

/// Flows to an address or port of the node, maybe those only that somebody answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stale {
    pub to: To,
    pub protocol: L4,
    pub port: u16,
    /// None: whoever does.
    pub answering: Option<(IpAddr, u16)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum To {
    Address(IpAddr),
    /// Any address of this host of the family: `v4`.
    Node {
        v4: bool,
    },
}

impl Stale {
    pub fn is_v4(&self) -> bool {
        match self.to {
            To::Address(ip) => ip.is_ipv4(),
            To::Node { v4 } => v4,
        }
    }
}

/// The flows that are wrong once `new` is in place of `old`; of one family, as the ports are.
pub fn stale(old: Option<&ServicePort>, new: Option<&ServicePort>, into: &mut BTreeSet<Stale>) {
    let (before, after) = (old.filter(|s| s.protocol == L4::Udp), new.filter(|s| s.protocol == L4::Udp));
    let (fronts_before, fronts_after) = (before.map(fronts).unwrap_or_default(), after.map(fronts).unwrap_or_default());
    let (ends_before, ends_after) = (before.map(ends).unwrap_or_default(), after.map(ends).unwrap_or_default());
    let flow = |(to, port): (To, u16), answering| Stale { to, protocol: L4::Udp, port, answering };
    // What leads nowhere any more.
    into.extend(fronts_before.difference(&fronts_after).map(|front| flow(*front, None)));
    for front in &fronts_after {
        // Whoever asked while nobody served was led nowhere, and still would be.
        if !ends_after.is_empty() && (ends_before.is_empty() || !fronts_before.contains(front)) {
            into.insert(flow(*front, None));
            continue;
        }
        into.extend(ends_before.difference(&ends_after).map(|end| flow(*front, Some(*end))));
    }
}

/// Flows to a host port that was opened, begun when nobody was behind it.
pub fn opened(want: &HostPortWant, into: &mut BTreeSet<Stale>) {
    if want.protocol == L4::Udp {
        let to = match want.host_ip.filter(|ip| !ip.is_unspecified()) {
            Some(ip) => To::Address(ip),
            None => To::Node { v4: want.ip.is_ipv4() },
        };
        into.insert(Stale { to, protocol: L4::Udp, port: want.host_port, answering: None });
    }
}

/// Those to one that was closed.
pub fn closed(want: &HostPortWant, into: &mut BTreeSet<Stale>) {
    let mut flows = BTreeSet::new();
    opened(want, &mut flows);
    into.extend(flows.into_iter().map(|flow| Stale { answering: Some((want.ip, want.port)), ..flow }));
}

/// Where UDP flows of one family may lead, for when changes were missed: an agent that was away, a
/// table that was not there for a while.
#[derive(Debug, Default)]
pub struct Right {
    ends: BTreeMap<(To, u16), BTreeSet<(IpAddr, u16)>>,
}

impl Right {
    pub fn of<'a>(services: impl Iterator<Item = &'a ServicePort>, host_ports: impl Iterator<Item = &'a HostPortWant>) -> Right {
        let mut right = Right::default();
        for service in services.filter(|s| s.protocol == L4::Udp) {
            for front in fronts(service) {
                right.ends.entry(front).or_default().extend(ends(service));
            }
        }
        for want in host_ports {
            let mut flows = BTreeSet::new();
            opened(want, &mut flows);
            for flow in flows {
                right.ends.entry((flow.to, flow.port)).or_default().insert((want.ip, want.port));
            }
        }
        right
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// It leads to nobody who serves what was asked for. What was led nowhere because nobody serves
    /// is right.
    fn forbids(&self, flow: &conntrack::Flow, own: &BTreeSet<IpAddr>) -> bool {
        let (asked, answering) = (flow.original, (flow.reply.source, flow.reply.source_port));
        let of = |to| self.ends.get(&(to, asked.destination_port));
        let node = || of(To::Node { v4: asked.destination.is_ipv4() }).filter(|_| own.contains(&asked.destination));
        let Some(ends) = of(To::Address(asked.destination)).or_else(node) else { return false };
        let untouched = answering == (asked.destination, asked.destination_port);
        asked.protocol == L4::Udp.number() && !ends.contains(&answering) && !(untouched && ends.is_empty())
    }
}

/// Forgets the flows that lead elsewhere than they should; how many there were.
pub fn forget_wrong(right: &Right, family: Family, own: &BTreeSet<IpAddr>) -> Result<usize, NetlinkError> {
    if right.is_empty() {
        return Ok(0);
    }
    conntrack::forget_where(&mut conntrack::open()?, family.number(), |flow| right.forbids(flow, own))
}

fn fronts(service: &ServicePort) -> BTreeSet<(To, u16)> {
    let addresses = service.cluster_ip.iter().chain(&service.external_ips).chain(&service.load_balancer_ips);
    let mut fronts: BTreeSet<(To, u16)> = addresses.map(|ip| (To::Address(*ip), service.port)).collect();
    // Which family a Service without any address is of shows in its endpoints.
    let mut known = service.cluster_ip.into_iter().chain(service.cluster.iter().chain(&service.local).map(|e| e.ip));
    if let (Some(port), Some(ip)) = (service.node_port, known.next()) {
        fronts.insert((To::Node { v4: ip.is_ipv4() }, port));
    }
    fronts
}

fn ends(service: &ServicePort) -> BTreeSet<(IpAddr, u16)> {
    service.cluster.iter().chain(&service.local).map(|Endpoint { ip, port, .. }| (*ip, *port)).collect()
}

/// Forgets them; how many there were, of those that were counted (see [`conntrack::forget`]).
/// `own` are this host's addresses.
pub fn forget(flows: &BTreeSet<Stale>, own: &[IpAddr]) -> Result<usize, NetlinkError> {
    if flows.is_empty() {
        return Ok(0);
    }
    conntrack::forget(&mut conntrack::open()?, &filters(flows, own))
}

/// Ends the flows of isolated pods that policies deny; how many there were.
pub fn end_denied(model: &PolicyModel, family: Family, own: &BTreeSet<IpAddr>) -> Result<usize, NetlinkError> {
    conntrack::forget_where(&mut conntrack::open()?, family.number(), |flow| is_denied(model, flow, own))
}

fn is_denied(model: &PolicyModel, flow: &conntrack::Flow, own: &BTreeSet<IpAddr>) -> bool {
    // Whoever answers is the destination after translation; what masquerading made of the source
    // comes behind policies.
    let judged = policy::Flow {
        source: flow.original.source,
        destination: flow.reply.source,
        protocol: flow.original.protocol,
        port: flow.reply.source_port,
    };
    let concerned = [judged.source, judged.destination].iter().any(|ip| model.subjects.contains_key(ip));
    concerned && model.verdict(&judged, own.contains(&judged.source)) != policy::Verdict::Allowed
}

fn filters(flows: &BTreeSet<Stale>, own: &[IpAddr]) -> Vec<Filter> {
    let mut filters = Vec::new();
    for flow in flows {
        let filter = Filter {
            protocol: Some(flow.protocol.number()),
            destination: None,
            destination_port: Some(flow.port),
            answering: flow.answering.map(|(ip, _)| ip),
            answering_port: flow.answering.map(|(_, port)| port),
        };
        match (flow.to, flow.answering) {
            (To::Address(ip), _) => filters.push(Filter { destination: Some(ip), ..filter }),
            // The endpoint names the flows well enough, whatever the node's addresses are.
            (To::Node { .. }, Some(_)) => filters.push(filter),
            (To::Node { v4 }, None) => {
                filters.extend(own.iter().filter(|ip| ip.is_ipv4() == v4).map(|ip| Filter { destination: Some(*ip), ..filter }))
            }
        }
    }
    filters
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::proxy::model::ServicePortName;

    fn udp(cluster_ip: &str, ends: &[&str]) -> ServicePort {
        let end = |ip: &&str| Endpoint { ip: ip.parse().unwrap(), port: 5353, local: false };
        ServicePort {
            name: ServicePortName { namespace: "kube-system".into(), service: "dns".into(), port: "dns".into() },
            protocol: L4::Udp,
            port: 53,
            cluster_ip: cluster_ip.parse().ok(),
            cluster: ends.iter().map(end).collect(),
            has_any: !ends.is_empty(),
            ..ServicePort::default()
        }
    }

    fn found(old: Option<&ServicePort>, new: Option<&ServicePort>) -> Vec<String> {
        let mut flows = BTreeSet::new();
        stale(old, new, &mut flows);
        let text =
            |f: &Stale| format!("{:?}:{} {}", f.to, f.port, f.answering.map_or("any".into(), |(ip, p)| format!("{ip}:{p}")));
        flows.iter().map(text).collect()
    }

    #[test]
    fn an_endpoint_that_went_takes_its_flows_along_and_the_others_stay() {
        let (old, new) = (udp("10.96.0.10", &["10.1.0.1", "10.1.0.2"]), udp("10.96.0.10", &["10.1.0.2", "10.1.0.3"]));
        assert_eq!(found(Some(&old), Some(&new)), ["Address(10.96.0.10):53 10.1.0.1:5353"]);
        assert_eq!(found(Some(&old), Some(&old)), [""; 0]);
        // The last endpoint went (kubernetes#139628).
        let none = udp("10.96.0.10", &[]);
        assert_eq!(found(Some(&new), Some(&none)).len(), 2);
    }

    #[test]
    fn flows_begun_while_nobody_served_are_forgotten_when_somebody_does() {
        let (none, some) = (udp("10.96.0.10", &[]), udp("10.96.0.10", &["10.1.0.1"]));
        assert_eq!(found(Some(&none), Some(&some)), ["Address(10.96.0.10):53 any"]);
        assert_eq!(found(None, Some(&some)), ["Address(10.96.0.10):53 any"]);
        assert_eq!(found(None, Some(&none)), [""; 0]);
        // Another address of the same Service, a port of the node.
        let more = ServicePort { external_ips: vec!["192.0.2.9".parse().unwrap()], node_port: Some(30053), ..some.clone() };
        assert_eq!(found(Some(&some), Some(&more)), ["Address(192.0.2.9):53 any", "Node { v4: true }:30053 any"]);
        assert_eq!(found(Some(&more), Some(&some)).len(), 2);
        assert_eq!(found(Some(&more), None).len(), 3);
    }

    #[test]
    fn after_an_absence_flows_go_that_lead_to_nobody_who_serves() {
        let some = ServicePort { node_port: Some(30053), ..udp("10.96.0.10", &["10.1.0.1", "10.1.0.2"]) };
        let none = udp("10.96.0.11", &[]);
        let pod = HostPortWant {
            pod: "p".into(),
            protocol: L4::Udp,
            host_ip: None,
            host_port: 5000,
            ip: "10.1.0.9".parse().unwrap(),
            port: 50,
        };
        let right = Right::of([&some, &none].into_iter(), [&pod].into_iter());
        let own: BTreeSet<IpAddr> = ["192.0.2.1".parse().unwrap()].into();
        let flow = |protocol, to: &str, answering: &str| {
            let (to, from): (SocketAddr, SocketAddr) = (to.parse().unwrap(), answering.parse().unwrap());
            let tuple = |source: SocketAddr, destination: SocketAddr| conntrack::Tuple {
                source: source.ip(),
                destination: destination.ip(),
                protocol,
                source_port: source.port(),
                destination_port: destination.port(),
            };
            let client = "10.1.0.77:4000".parse().unwrap();
            conntrack::Flow { original: tuple(client, to), reply: tuple(from, client) }
        };
        for (wrong, to, answering) in [
            (false, "10.96.0.10:53", "10.1.0.2:5353"),
            (true, "10.96.0.10:53", "10.1.0.3:5353"),
            (true, "10.96.0.10:53", "10.1.0.2:5354"),
            (true, "10.96.0.10:53", "10.96.0.10:53"),
            (false, "10.96.0.11:53", "10.96.0.11:53"),
            (true, "10.96.0.11:53", "10.1.0.1:5353"),
            (false, "192.0.2.1:30053", "10.1.0.1:5353"),
            (true, "192.0.2.1:30053", "10.1.0.3:5353"),
            (true, "192.0.2.1:30053", "192.0.2.1:30053"),
            (false, "192.0.2.9:30053", "192.0.2.9:30053"),
            (false, "192.0.2.1:5000", "10.1.0.9:50"),
            (true, "192.0.2.1:5000", "10.1.0.8:50"),
            (false, "203.0.113.5:53", "203.0.113.5:53"),
        ] {
            assert_eq!(right.forbids(&flow(17, to, answering), &own), wrong, "{to} {answering}");
            assert!(!right.forbids(&flow(6, to, answering), &own), "TCP: {to} {answering}");
        }
    }

    #[test]
    fn tcp_ends_by_itself() {
        let tcp = |ends: &[&str]| ServicePort { protocol: L4::Tcp, ..udp("10.96.0.10", ends) };
        assert_eq!(found(Some(&tcp(&["10.1.0.1"])), Some(&tcp(&[]))), [""; 0]);
        assert_eq!(found(None, Some(&tcp(&["10.1.0.1"]))), [""; 0]);
    }

    #[test]
    fn a_port_of_the_node_means_each_of_its_addresses() {
        let own: Vec<IpAddr> = ["192.0.2.1", "10.0.0.1", "fd00::1"].iter().map(|t| t.parse().unwrap()).collect();
        let flow = Stale { to: To::Node { v4: true }, protocol: L4::Udp, port: 53, answering: None };
        let all = filters(&[flow].into(), &own);
        assert_eq!(all.iter().filter_map(|f| f.destination).collect::<Vec<_>>(), own[..2]);
        let ended = Stale { answering: Some(("10.1.0.1".parse().unwrap(), 5353)), ..flow };
        assert_eq!(filters(&[ended].into(), &own).len(), 1);
    }
}
