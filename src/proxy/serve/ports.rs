//! Where we listen, and for what. Pure.
//!
//! Invariant: nothing is listened on while Services are another's to serve: the ports are his.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::{Check, ServeConfig};
use crate::proxy::layout::NodePorts;
use crate::proxy::mode::Role;
use crate::proxy::service::Name;
use crate::proxy::table::ir::Family;

/// What is answered at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// kube-proxy's :10249
    Metrics,
    /// kube-proxy's :10256
    Health,
    /// A Service's healthCheckNodePort.
    Service(Name),
}

impl Room {
    /// What moves it away from a port that somebody else has.
    pub fn cure(&self) -> String {
        match self {
            Room::Metrics => "--metrics-bind-address takes another port, or \"\" to do without".to_owned(),
            Room::Health => "--healthz-bind-address takes another port, or \"\" to do without".to_owned(),
            Room::Service(name) => format!("give Service {name} another healthCheckNodePort, or end what has this one"),
        }
    }

    /// Connections at once. Anybody may come to the others.
    pub fn most(&self) -> usize {
        match self {
            Room::Metrics | Room::Service(_) => 64,
            Room::Health => 256,
        }
    }
}

pub fn wanted(
    config: &ServeConfig,
    role: &Role,
    checks: &BTreeMap<Name, Check>,
    node_ports: &[(Family, NodePorts)],
) -> BTreeMap<SocketAddr, Room> {
    let mut wanted = BTreeMap::new();
    if !role.serves() {
        return wanted;
    }
    wanted.extend(config.metrics.map(|at| (at, Room::Metrics)));
    wanted.extend(config.healthz.map(|at| (at, Room::Health)));
    let everywhere = node_ports.iter().any(|(_, on)| *on == NodePorts::EveryLocal);
    let mut addresses: Vec<IpAddr> = match everywhere {
        true => vec![Ipv4Addr::UNSPECIFIED.into()],
        false => Vec::new(),
    };
    for (_, on) in node_ports.iter().filter(|_| !everywhere) {
        if let NodePorts::On(some) = on {
            addresses.extend(some);
        }
    }
    for (name, check) in checks {
        for ip in &addresses {
            // Whoever is there already was there first.
            wanted.entry(SocketAddr::new(*ip, check.port)).or_insert_with(|| Room::Service(name.clone()));
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn checks_are_where_node_ports_are_and_nothing_is_while_another_serves() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let config = ServeConfig { metrics: Some(at("127.0.0.1:10249")), healthz: None, configz: String::new() };
        let checks = BTreeMap::from([(Name::new("shop", "web"), Check { port: 31000, ready: 1 })]);
        let on = |ips: &[&str]| NodePorts::On(ips.iter().map(|ip| ip.parse().unwrap()).collect::<BTreeSet<IpAddr>>());
        let asked = |role: &Role, node_ports: &[(Family, NodePorts)]| {
            wanted(&config, role, &checks, node_ports).into_keys().map(|at| at.to_string()).collect::<Vec<_>>()
        };
        let both = [(Family::Ip, on(&["192.0.2.1"])), (Family::Ip6, on(&["2001:db8::1"]))];
        let expected = ["127.0.0.1:10249", "192.0.2.1:31000", "[2001:db8::1]:31000"];
        assert_eq!(asked(&Role::Serving, &both), expected);
        let all = [(Family::Ip, NodePorts::EveryLocal), (Family::Ip6, on(&["2001:db8::1"]))];
        assert_eq!(asked(&Role::Serving, &all), ["0.0.0.0:31000", "127.0.0.1:10249"]);
        for role in [Role::Unknown, Role::Off, Role::Yielding("x".into())] {
            assert_eq!(asked(&role, &both), [""; 0]);
        }
    }
}
