//! A node with two addresses, its pods, pods of another node, the outside: what tests send from.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::super::{Ground, Layout};
use crate::proxy::model::{Endpoint, HostPortWant, L4, NodeFacts, NodePortAddresses, ServicePort, ServicePortName};
use crate::proxy::table::ir::{Family, Key, Name, Table};
use crate::proxy::table::trace::{End, Flow, Nameless, Origin, Packet, Scene, Trace, trace};

pub const POD: &str = "10.88.0.2";
pub const POD2: &str = "10.88.0.3";
/// A pod of another node.
pub const FAR: &str = "10.88.1.2";
pub const FAR2: &str = "10.88.1.3";
pub const NODE: &str = "192.0.2.1";
pub const NODE2: &str = "198.51.100.1";
pub const GATEWAY: &str = "10.88.0.1";
pub const OUTSIDE: &str = "203.0.113.9";
pub const VIP: &str = "10.96.0.10";
pub const LB: &str = "203.0.113.200";

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[derive(Clone, Debug)]
pub struct World {
    pub node: NodeFacts,
    pub services: Vec<ServicePort>,
    pub host_ports: Vec<HostPortWant>,
    pub service_cidrs: Vec<&'static str>,
    pub fib: bool,
    pub nameless: Nameless,
    pub remembered: BTreeMap<Name, BTreeSet<Key>>,
    pub flow: Flow,
}

/// The world of most cases, in IPv4.
pub fn world(services: &[ServicePort]) -> World {
    World {
        node: NodeFacts {
            name: "here".into(),
            addresses: [NODE, NODE2, "2001:db8::1"].map(ip).to_vec(),
            pod_cidrs: vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()],
            node_port_addresses: NodePortAddresses::All,
            bridge: "coracle0".into(),
            ..NodeFacts::default()
        },
        services: services.to_vec(),
        host_ports: Vec::new(),
        service_cidrs: vec!["10.96.0.0/16", "fd96::/112"],
        fib: true,
        nameless: Nameless::Fails,
        remembered: BTreeMap::new(),
        flow: Flow::New,
    }
}

pub fn endpoint(text: &str) -> Endpoint {
    let ip = ip(text);
    Endpoint { ip, port: 8080, local: is_here(ip) || is_node(ip) }
}

/// A Service with a ClusterIP, port 80, these endpoints.
pub fn service(endpoints: &[&str]) -> ServicePort {
    let all: Vec<Endpoint> = endpoints.iter().map(|e| endpoint(e)).collect();
    ServicePort {
        name: ServicePortName { namespace: "shop".into(), service: "web".into(), port: "http".into() },
        port: 80,
        cluster_ip: Some(ip(VIP)),
        local: all.iter().filter(|e| e.local).copied().collect(),
        has_any: !all.is_empty(),
        cluster: all,
        ..ServicePort::default()
    }
}

/// … and everything else by which it can be reached.
pub fn exposed(endpoints: &[&str]) -> ServicePort {
    ServicePort {
        node_port: Some(30080),
        load_balancer_ips: vec![ip(LB)],
        external_ips: vec![ip("203.0.113.201")],
        ..service(endpoints)
    }
}

pub fn sticky(service: ServicePort) -> ServicePort {
    ServicePort { affinity: Some(Duration::from_secs(10_800)), ..service }
}

pub fn is_here(ip: IpAddr) -> bool {
    ip != self::ip(GATEWAY)
        && ip != self::ip("fd88::1")
        && ["10.88.0.0/24", "fd88::/64"].iter().any(|c| c.parse::<crate::api::cidr::Cidr>().unwrap().contains(ip))
}

/// One of the host's own.
pub fn is_node(ip: IpAddr) -> bool {
    [NODE, NODE2, GATEWAY, "2001:db8::1", "fd88::1"].iter().any(|own| self::ip(own) == ip)
}

pub fn route(ip: IpAddr) -> Name {
    if is_node(ip) || ip.is_loopback() {
        "lo".into()
    } else if is_here(ip) {
        "coracle0".into()
    } else {
        "eth0".into()
    }
}

impl World {
    pub fn ground(&self, family: Family) -> Ground {
        let cidrs: Vec<_> = self.service_cidrs.iter().map(|c| c.parse().unwrap()).collect();
        Ground::of(family, "t", &self.node, &cidrs, self.fib)
    }

    pub fn layout(&self, family: Family) -> Layout {
        let mut layout = Layout::new(self.ground(family));
        layout.open(self.host_ports.clone());
        layout.house([POD, POD2, "fd88::2"].map(ip).to_vec());
        layout.load(self.services.iter().cloned());
        layout
    }

    pub fn table(&self, family: Family) -> Table {
        self.layout(family).table()
    }

    pub fn packet(&self, from: &str, to: &str, protocol: L4, port: u16) -> Packet {
        let (source, destination) = (ip(from), ip(to));
        Packet { source, destination, protocol: protocol.number(), source_port: 40_000, destination_port: port }
    }

    /// The first packet of a flow, in a given table, at a given throw of the dice.
    pub fn walk(&self, table: &Table, packet: Packet, dice: u32) -> Trace {
        self.walk_counted(table, packet, dice).0
    }

    /// … and the numbers of which the die had to throw one, each time that it was thrown.
    pub fn walk_counted(&self, table: &Table, packet: Packet, dice: u32) -> (Trace, Vec<u32>) {
        let asked = std::cell::RefCell::new(Vec::new());
        let from = match packet.source {
            ip if is_node(ip) || ip.is_loopback() => Origin::Host,
            ip if is_here(ip) => Origin::Interface("coracle0".into()),
            _ => Origin::Interface("eth0".into()),
        };
        let scene = Scene {
            from,
            flow: self.flow,
            is_local: &is_node,
            route: &route,
            random: &|modulus| {
                asked.borrow_mut().push(modulus);
                dice % modulus
            },
            remembered: &self.remembered,
            nameless: self.nameless,
        };
        (trace(table, &scene, packet).unwrap(), asked.into_inner())
    }

    /// Where TCP connections go, as words: the endpoints in the order of the dice, `masq` where the
    /// source is not kept.
    pub fn send(&self, from: &str, to: &str, port: u16) -> String {
        self.send_by(from, to, L4::Tcp, port)
    }

    pub fn send_by(&self, from: &str, to: &str, protocol: L4, port: u16) -> String {
        let packet = self.packet(from, to, protocol, port);
        let table = self.table(if packet.destination.is_ipv4() { Family::Ip } else { Family::Ip6 });
        let mut words: Vec<String> = Vec::new();
        // Lists of cases are no longer than six; each number comes as often.
        for dice in 0..60 {
            let word = told(&self.walk(&table, packet, dice), packet);
            if words.first() == Some(&word) {
                break;
            }
            words.push(word);
        }
        words.join(", ")
    }
}

pub fn told(trace: &Trace, sent: Packet) -> String {
    let to = (trace.packet.destination, trace.packet.destination_port);
    let mut text = match &trace.end {
        End::Dropped => return "dropped".into(),
        End::Rejected(_) => return "rejected".into(),
        _ if to == (sent.destination, sent.destination_port) => "as it is".to_owned(),
        End::Delivered | End::Sent(_) if to.1 == 8080 => to.0.to_string(),
        End::Delivered | End::Sent(_) => format!("{} {}", to.0, to.1),
    };
    if trace.masqueraded {
        text += " masq";
    }
    text
}
