//! What one Service's port puts into the table at one place where it is reached.
//!
//! Invariants: a place leads to a chain, or is refused, or both: external traffic of policy Local
//! without local endpoints is dropped, yet pods and the node itself reach the others
//! (kubernetes#131765). Endpoints stand in the order of the Service's list, so that a restart
//! finds every element as it left it.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;
use std::sync::Arc;

use super::super::model::{Endpoint, ServicePort};
use super::super::table::ir::{Element, Key, Name, Value, Verdict};
use super::super::table::ranges;
use super::affinity;
use super::entries::{Among, Entry, MOST, Place};
use super::frame;
use super::fronts::{Front, Kind};
use super::ground::Ground;
use crate::api::cidr::Cidr;

/// A set that Services share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SetName {
    /// There while something is in it.
    Of(Entry),
    /// Its endpoints.
    Endpoints(Entry),
    /// Always there, or while the firewall is.
    Fixed(&'static str),
}

impl SetName {
    pub fn name(self) -> Name {
        match self {
            SetName::Of(entry) => entry.name(),
            SetName::Endpoints(entry) => entry.endpoints(),
            SetName::Fixed(name) => name.into(),
        }
    }
}

/// One element and the set that it is in.
pub(super) type Placed = (SetName, Key, Element);

#[derive(Debug, Default)]
pub(super) struct Part {
    pub elements: Vec<Placed>,
    /// An address that is looked for first, and in which set. Several places may have it.
    pub address: Option<(&'static str, IpAddr)>,
    /// Needs the firewall's chains.
    pub restricts: bool,
}

pub(super) fn part(ground: &Ground, service: &ServicePort, (front, kind): (&Front, Kind)) -> Part {
    let internal = kind == Kind::ClusterIp;
    let place = match kind {
        Kind::ClusterIp => Place::ClusterIp,
        Kind::LoadBalancer | Kind::External => Place::External,
        Kind::NodePort => Place::NodePort,
    };
    let is_local = if internal { service.internal_local } else { service.external_local };
    let list = if is_local { &service.local } else { &service.cluster };
    let beside: &[Endpoint] = if is_local && !internal { &service.cluster } else { &[] };
    let comment: Arc<str> = service.name.to_string().into();
    let named = || Element::bare().with(&comment);
    let mut part = Part { address: front.address(internal), ..Part::default() };
    let mut put = |set, key, element| part.elements.push((set, key, element));
    if !(list.is_empty() && beside.is_empty()) {
        match service.affinity {
            Some(_) => {
                let to = Element::verdict(Verdict::Goto(affinity::entry_name(service, internal)));
                put(SetName::Of(Entry::own(place)), front.key(), to.with(&comment));
            }
            None => {
                let among = if is_local && !internal { Among::Here } else { Among::Any };
                let inside = (!beside.is_empty()).then_some((Among::Inside, beside));
                for (among, list) in [(among, list.as_slice())].into_iter().chain(inside) {
                    let entry = Entry::of(place, among, list.len());
                    put(SetName::Of(entry), front.key(), named());
                    endpoints(front, list).for_each(|(key, element)| put(SetName::Endpoints(entry), key, element));
                }
            }
        }
        if place == Place::NodePort {
            put(SetName::Fixed(frame::NODE_PORTS), front.key(), Element::bare());
        }
    }
    if list.is_empty() {
        let set = match (place, is_local && service.has_any) {
            (Place::NodePort, false) => frame::NODE_PORTS_WITHOUT,
            (Place::NodePort, true) => frame::NODE_PORTS_DROPPED,
            (_, false) => frame::WITHOUT,
            (_, true) => frame::DROPPED,
        };
        put(SetName::Fixed(set), front.key(), named());
    }
    if kind == Kind::LoadBalancer && !service.source_ranges.is_empty() {
        part.restricts = true;
        part.elements.push((SetName::Fixed(frame::RESTRICTED), front.key(), Element::bare().with(&comment)));
        part.elements.extend(sources(ground, service).into_iter().map(|(first, last)| {
            let with = |ip| front.values().into_iter().chain([Value::Address(ip)]).collect::<Vec<_>>();
            (SetName::Fixed(frame::SOURCES), Key::range(&with(first), &with(last)), Element::bare())
        }));
    }
    part
}

fn endpoints(front: &Front, list: &[Endpoint]) -> impl Iterator<Item = (Key, Element)> {
    let values = front.values();
    list.iter().take(MOST).zip(0..).map(move |(endpoint, index)| {
        let key: Vec<Value> = values.iter().copied().chain([Value::Index(index)]).collect();
        (Key::of(&key), Element::values(&[Value::Address(endpoint.ip), Value::Port(endpoint.port)]))
    })
}

/// A node that is allowed may find the load balancer's address on one of its own interfaces and
/// use it as source: then that is allowed too.
fn sources(ground: &Ground, service: &ServicePort) -> Vec<ranges::Range> {
    let allowed = service.source_ranges.iter().filter(|c| ground.has(c.address)).copied();
    let from_node = ground.addresses.first().is_some_and(|ip| service.source_ranges.iter().any(|c| c.contains(*ip)));
    let own = service.load_balancer_ips.iter().filter(|_| from_node).map(|ip| Cidr::only(*ip));
    ranges::merged(allowed.chain(own))
}

impl Front {
    fn values(&self) -> Vec<Value> {
        match self {
            Front::Address(ip, protocol, port) => {
                vec![Value::Address(*ip), Value::Protocol(protocol.number()), Value::Port(*port)]
            }
            Front::NodePort(protocol, port) => vec![Value::Protocol(protocol.number()), Value::Port(*port)],
        }
    }
    fn address(&self, internal: bool) -> Option<(&'static str, IpAddr)> {
        match self {
            Front::Address(ip, ..) => Some((if internal { frame::CLUSTER_IPS } else { frame::EXTERNAL_IPS }, *ip)),
            Front::NodePort(..) => None,
        }
    }
    fn key(&self) -> Key {
        Key::of(&self.values())
    }
}
