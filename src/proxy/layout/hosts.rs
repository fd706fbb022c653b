//! Elements of this node's pods: their host ports, and their addresses for hairpin.
//!
//! Invariant: two pods never share a host port; should two want one (admission refuses that), the
//! first by name has it, whoever came first.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::model::HostPortWant;
use super::super::table::ir::{Element, Elements, Key, Value};
use super::frame::{HAIRPIN, HOST_IP_PORTS, HOST_PORTS};
use super::ground::Ground;

/// By set. A want of the other family is left to the other table; 0.0.0.0 means every IPv4
/// address, `::` every IPv6 one.
pub(super) fn host_ports(ground: &Ground, wants: &[HostPortWant]) -> BTreeMap<&'static str, Elements> {
    let mut all: BTreeMap<&'static str, Elements> = BTreeMap::new();
    if !ground.fib {
        return all;
    }
    let mut wants: Vec<&HostPortWant> =
        wants.iter().filter(|w| ground.has(w.ip) && w.host_ip.is_none_or(|ip| ground.has(ip))).collect();
    wants.sort();
    for want in wants {
        let (protocol, port) = (Value::Protocol(want.protocol.number()), Value::Port(want.host_port));
        let (set, key) = match want.host_ip.filter(|ip| !ip.is_unspecified()) {
            Some(ip) => (HOST_IP_PORTS, Key::of(&[protocol, Value::Address(ip), port])),
            None => (HOST_PORTS, Key::of(&[protocol, port])),
        };
        let to = Element::values(&[Value::Address(want.ip), Value::Port(want.port)]);
        all.entry(set).or_default().entry(key).or_insert_with(|| to.with(&want.pod.as_str().into()));
    }
    all
}

pub(super) fn hairpin(ground: &Ground, pods: &[IpAddr]) -> BTreeMap<&'static str, Elements> {
    let twice = |ip: &IpAddr| (Key::of(&[Value::Address(*ip), Value::Address(*ip)]), Element::bare());
    let elements: Elements = pods.iter().filter(|ip| ground.has(**ip)).map(twice).collect();
    if elements.is_empty() { BTreeMap::new() } else { [(HAIRPIN, elements)].into() }
}
