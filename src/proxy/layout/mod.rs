//! Services, host ports and hairpin as one family's table, and what a change of one of them
//! changes in it.
//!
//! [`Layout`] keeps what is wanted, not the table: [`Layout::table`] makes it where the whole is
//! needed (first load, comparison with the kernel). Invariant: the table follows from what is
//! wanted alone, not from the order in which it came, and the changes that a call returns are just
//! what lies between the tables before and after it. A call costs what the named Services hold,
//! however many others there are. Network policies have chains of their own beside these.

mod affinity;
mod dispatch;
mod draft;
pub mod entries;
pub mod frame;
mod fronts;
mod ground;
mod hosts;
mod parts;

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::model::{HostPortWant, ServicePort, ServicePortName};
use super::table::changes::Changes;
use super::table::ir::{Element, Elements, Family, Key, Table, Value};
use draft::{Draft, Side};
use entries::{Entry, Place};
pub use ground::{Ground, NodePorts};
use parts::{Part, SetName};

#[derive(Debug)]
pub struct Layout {
    ground: Ground,
    services: BTreeSet<Named>,
    shared: Shared,
    host_ports: Vec<HostPortWant>,
    pods: Vec<IpAddr>,
}

/// What several Services need.
#[derive(Debug, Default)]
struct Shared {
    /// How many places lead to each chain.
    entries: BTreeMap<Entry, u64>,
    /// How many places have the address, by the set that it is in.
    addresses: BTreeMap<(&'static str, IpAddr), u64>,
    /// How many places have source ranges.
    restricted: u64,
}

impl Layout {
    pub fn new(ground: Ground) -> Layout {
        let (services, shared, host_ports, pods) = Default::default();
        Layout { ground, services, shared, host_ports, pods }
    }

    pub fn ground(&self) -> &Ground {
        &self.ground
    }
    /// In the order of their names.
    pub fn services(&self) -> impl Iterator<Item = &ServicePort> {
        self.services.iter().map(|named| &named.0)
    }
    pub fn service(&self, name: &ServicePortName) -> Option<&ServicePort> {
        self.services.get(name).map(|named| &named.0)
    }

    /// The same wishes on another ground. Most of the table differs: compare whole tables.
    pub fn move_to(&mut self, ground: Ground) {
        self.ground = ground;
    }

    /// Puts Services in place of those of the same names, as [`Layout::change`] without telling
    /// what changes. Those of the other family are left out.
    pub fn load(&mut self, services: impl IntoIterator<Item = ServicePort>) {
        for service in services {
            if self.is_of_family(&service) {
                self.services.replace(Named(service));
            }
        }
        let mut shared = Shared::default();
        for part in self.services().flat_map(|service| self.parts(service)) {
            for (set, ..) in &part.elements {
                if let SetName::Of(entry) = set {
                    *shared.entries.entry(*entry).or_default() += 1;
                }
            }
            if let Some(address) = part.address {
                *shared.addresses.entry(address).or_default() += 1;
            }
            shared.restricted += u64::from(part.restricts);
        }
        self.shared = shared;
    }

    /// Some ports go, others come or are put in the place of those of the same names. All that
    /// change together belong into one call: an address may go from one to another.
    pub fn change<'a>(
        &mut self,
        gone: impl IntoIterator<Item = &'a ServicePortName>,
        come: impl IntoIterator<Item = ServicePort>,
    ) -> Changes {
        let come = come.into_iter().filter(|s| self.is_of_family(s));
        let mut come: BTreeMap<ServicePortName, ServicePort> = come.map(|s| (s.name.clone(), s)).collect();
        let gone: Vec<&ServicePortName> = gone.into_iter().filter(|name| !come.contains_key(*name)).collect();
        come.retain(|name, new| self.service(name) != Some(new));
        let mut draft = Draft::default();
        for name in come.keys().chain(gone) {
            if let Some(Named(old)) = self.services.take(name) {
                self.draw(&mut draft, &old, Side::Before);
            }
        }
        for new in come.into_values() {
            self.draw(&mut draft, &new, Side::After);
            self.services.insert(Named(new));
        }
        self.count(&mut draft);
        draft.finish()
    }

    /// All of it.
    pub fn table(&self) -> Table {
        let mut table = frame::frame(&self.ground);
        let mut elements: BTreeMap<SetName, Vec<(Key, Element)>> = BTreeMap::new();
        for service in self.services() {
            for part in self.parts(service) {
                for (set, key, element) in part.elements {
                    elements.entry(set).or_default().push((key, element));
                }
            }
            let own = affinity::own(&self.ground, service);
            table.sets.extend(own.sets);
            table.chains.extend(own.chains);
            table.elements.extend(own.elements);
        }
        for (set, ip) in self.shared.addresses.keys() {
            elements.entry(SetName::Fixed(set)).or_default().push(address(*ip));
        }
        let hosts = hosts::host_ports(&self.ground, &self.host_ports).into_iter();
        for (set, some) in hosts.chain(hosts::hairpin(&self.ground, &self.pods)) {
            elements.entry(SetName::Fixed(set)).or_default().extend(some);
        }
        for (set, some) in elements {
            // Sorted at once they lie closer than put in one by one.
            table.elements.insert(set.name(), some.into_iter().collect::<Elements>());
        }
        for entry in self.shared.entries.keys() {
            table.sets.insert(entry.name(), entry.set());
            table.sets.extend(entry.map().map(|map| (entry.endpoints(), map)));
            table.chains.extend(entry.chain(&self.ground).map(|chain| (entry.name(), chain)));
        }
        for place in Place::ALL {
            table.chains.extend(dispatch::chains(&self.ground, place, self.shared.entries.keys().copied()));
        }
        if self.shared.restricted > 0 {
            let frame::Firewall { sets, chains } = frame::firewall();
            table.sets.extend(sets);
            table.chains.extend(chains);
        }
        table
    }

    /// All host ports of this node's pods.
    pub fn open(&mut self, host_ports: Vec<HostPortWant>) -> Changes {
        let before = hosts::host_ports(&self.ground, &self.host_ports);
        self.host_ports = host_ports;
        swap(before, hosts::host_ports(&self.ground, &self.host_ports))
    }

    /// The addresses of this node's pods that have their own.
    pub fn house(&mut self, pods: Vec<IpAddr>) -> Changes {
        let before = hosts::hairpin(&self.ground, &self.pods);
        self.pods = pods;
        swap(before, hosts::hairpin(&self.ground, &self.pods))
    }

    fn is_of_family(&self, service: &ServicePort) -> bool {
        service.is_v4() == Some(self.ground.family == Family::Ip)
    }

    /// What a Service has at each place where it is reached.
    fn parts(&self, service: &ServicePort) -> Vec<Part> {
        let fronts = fronts::fronts(service).into_iter();
        fronts.map(|(front, kind)| parts::part(&self.ground, service, (&front, kind))).collect()
    }

    fn draw(&self, draft: &mut Draft, service: &ServicePort, side: Side) {
        self.parts(service).into_iter().for_each(|part| draft.part(part, side));
        draft.own(affinity::own(&self.ground, service), side);
    }

    /// What is shared comes with the first that needs it and goes with the last.
    fn count(&mut self, draft: &mut Draft) {
        let Shared { entries, addresses, restricted } = &mut self.shared;
        let old: Vec<Entry> = entries.keys().copied().collect();
        let mut changed = BTreeSet::new();
        for (entry, more) in std::mem::take(&mut draft.entries) {
            let sides = counted(entries, entry, more);
            if let [side] = sides[..] {
                changed.insert(entry.place);
                draft.set(entry.name(), entry.set(), side);
                entry.map().into_iter().for_each(|map| draft.set(entry.endpoints(), map, side));
                entry.chain(&self.ground).into_iter().for_each(|chain| draft.chain(entry.name(), chain, side));
            }
        }
        for place in changed {
            for (side, entries) in [(Side::Before, old.clone()), (Side::After, entries.keys().copied().collect())] {
                let chains = dispatch::chains(&self.ground, place, entries);
                chains.into_iter().for_each(|(name, chain)| draft.chain(name, chain, side));
            }
        }
        for ((set, ip), more) in std::mem::take(&mut draft.addresses) {
            let (key, element) = address(ip);
            for side in counted(addresses, (set, ip), more) {
                draft.element(set, key.clone(), element.clone(), side);
            }
        }
        let mut one = BTreeMap::from([((), *restricted)]);
        for side in counted(&mut one, (), draft.restricted) {
            let frame::Firewall { sets, chains } = frame::firewall();
            sets.into_iter().for_each(|(name, spec)| draft.set(name, spec, side));
            chains.into_iter().for_each(|(name, chain)| draft.chain(name, chain, side));
        }
        *restricted = one.get(&()).copied().unwrap_or(0);
    }
}

/// On which sides of a change somebody needs it.
fn counted<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K, more: i64) -> Vec<Side> {
    let before = counts.remove(&key).unwrap_or(0);
    let after = before.saturating_add_signed(more);
    if after > 0 {
        counts.insert(key, after);
    }
    [(before, Side::Before), (after, Side::After)].into_iter().filter(|(n, _)| *n > 0).map(|(_, side)| side).collect()
}

/// A Service's port, told from others by its name.
#[derive(Debug)]
struct Named(ServicePort);

impl PartialEq for Named {
    fn eq(&self, other: &Named) -> bool {
        self.0.name == other.0.name
    }
}
impl Eq for Named {}
impl PartialOrd for Named {
    fn partial_cmp(&self, other: &Named) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Named {
    fn cmp(&self, other: &Named) -> std::cmp::Ordering {
        self.0.name.cmp(&other.0.name)
    }
}
impl Borrow<ServicePortName> for Named {
    fn borrow(&self) -> &ServicePortName {
        &self.0.name
    }
}

fn swap(before: BTreeMap<&'static str, Elements>, after: BTreeMap<&'static str, Elements>) -> Changes {
    let mut draft = Draft::default();
    for (all, side) in [(before, Side::Before), (after, Side::After)] {
        all.into_iter().for_each(|(set, elements)| draft.elements(set, elements, side));
    }
    draft.finish()
}

fn address(ip: IpAddr) -> (Key, Element) {
    (Key::of(&[Value::Address(ip)]), Element::bare())
}

#[cfg(test)]
mod tests;
