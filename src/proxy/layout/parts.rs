//! What one Service's port puts into the table at one place where it is reached.
//!
//! Invariants: a place leads to a chain, or is refused, or both: external traffic of policy Local
//! without local endpoints is dropped, yet pods and the node itself reach the others
//! (kubernetes#131765). Endpoints stand in the order of the Service's list, so that a restart
//! finds every element as it left it.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::model::{Endpoint, ServicePort};
use super::super::table::ir::{Element, Key, Name, Value, Verdict};
use super::super::table::ranges;
use super::affinity;
use super::entries::{By, CLUSTER_AT, Entry};
use super::frame;
use super::fronts::{Front, Kind};
use super::ground::Ground;
use crate::api::cidr::Cidr;

/// One element and the set that it is in.
pub(super) type Placed = (&'static str, Key, Element);

#[derive(Debug, Default)]
pub(super) struct Part {
    /// The shared chain that it needs.
    pub entry: Option<Entry>,
    pub elements: Vec<Placed>,
    /// Needs the firewall's chains.
    pub restricts: bool,
}

/// Names of chains that elements lead to, each made once.
#[derive(Debug)]
pub(super) struct Names {
    entries: BTreeMap<Entry, Name>,
    reject: Name,
}

impl Default for Names {
    fn default() -> Names {
        Names { entries: BTreeMap::new(), reject: frame::REJECT.into() }
    }
}

impl Names {
    fn of(&mut self, entry: Entry) -> Name {
        Name::clone(self.entries.entry(entry).or_insert_with(|| entry.name()))
    }
}

pub(super) fn part(ground: &Ground, service: &ServicePort, (front, kind): (&Front, Kind), names: &mut Names) -> Part {
    let by = match front {
        Front::Address(..) => By::Address,
        Front::NodePort(..) => By::NodePort,
    };
    let internal = kind == Kind::ClusterIp;
    let is_local = if internal { service.internal_local } else { service.external_local };
    let list = if is_local { &service.local } else { &service.cluster };
    let beside: &[Endpoint] = if is_local && !internal { &service.cluster } else { &[] };
    let count = |list: &[Endpoint]| u32::try_from(list.len()).unwrap_or(u32::MAX).min(CLUSTER_AT);
    let comment: Arc<str> = service.name.to_string().into();
    let mut part = Part::default();
    if !(list.is_empty() && beside.is_empty()) {
        let target = match service.affinity {
            Some(_) => affinity::entry_name(service, internal),
            None => {
                let entry = match (internal, is_local) {
                    (true, _) => Entry::ClusterIp { count: count(list) },
                    (false, false) => Entry::External { count: count(list), by },
                    (false, true) => Entry::ExternalLocal { cluster: count(beside), local: count(list), by },
                };
                part.entry = Some(entry);
                part.elements.extend(endpoints(front, list, 0));
                part.elements.extend(endpoints(front, beside, CLUSTER_AT));
                names.of(entry)
            }
        };
        let map = if by == By::Address { frame::SERVICES } else { frame::NODE_PORTS };
        part.elements.push((map, front.key(), Element::verdict(Verdict::Goto(target)).with(&comment)));
    }
    if list.is_empty() {
        let map = if by == By::Address { frame::WITHOUT } else { frame::NODE_PORTS_WITHOUT };
        let verdict = match is_local && service.has_any {
            true => Verdict::Drop,
            false => Verdict::Goto(Name::clone(&names.reject)),
        };
        part.elements.push((map, front.key(), Element::verdict(verdict).with(&comment)));
    }
    if kind == Kind::LoadBalancer && !service.source_ranges.is_empty() {
        part.restricts = true;
        part.elements.push((frame::RESTRICTED, front.key(), Element::bare().with(&comment)));
        part.elements.extend(sources(ground, service).into_iter().map(|(first, last)| {
            let with = |ip| front.values().into_iter().chain([Value::Address(ip)]).collect::<Vec<_>>();
            (frame::SOURCES, Key::range(&with(first), &with(last)), Element::bare())
        }));
    }
    part
}

fn endpoints(front: &Front, list: &[Endpoint], first: u32) -> impl Iterator<Item = Placed> {
    let values = front.values();
    let map = match front {
        Front::Address(..) => frame::ENDPOINTS,
        Front::NodePort(..) => frame::NODE_PORT_ENDPOINTS,
    };
    list.iter().take(CLUSTER_AT as usize).zip(first..).map(move |(endpoint, index)| {
        let key: Vec<Value> = values.iter().copied().chain([Value::Index(index)]).collect();
        (map, Key::of(&key), Element::values(&[Value::Address(endpoint.ip), Value::Port(endpoint.port)]))
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
    fn key(&self) -> Key {
        Key::of(&self.values())
    }
}
