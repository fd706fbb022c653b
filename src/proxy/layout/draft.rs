//! Changes while they are being found: what was there before, what is after.
//!
//! Invariant: what is the same on both sides is in no change.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::table::changes::{Change, Changes};
use super::super::table::ir::{Chain, Element, Elements, Key, Name, SetSpec};
use super::affinity::Own;
use super::entries::Entry;
use super::parts::{Part, SetName};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Before,
    After,
}

impl Side {
    /// What one thing on this side adds to how many there are.
    pub fn sign(self) -> i64 {
        match self {
            Side::Before => -1,
            Side::After => 1,
        }
    }
}

#[derive(Default)]
pub(super) struct Draft {
    sets: BTreeMap<Name, Change<SetSpec>>,
    chains: BTreeMap<Name, Change<Chain>>,
    elements: BTreeMap<Name, BTreeMap<Key, Change<Element>>>,
    /// How many places more are in the set that leads to the shared chain.
    pub entries: BTreeMap<Entry, i64>,
    /// … places have the address, by the set that it is in.
    pub addresses: BTreeMap<(&'static str, IpAddr), i64>,
    /// … places need the firewall.
    pub restricted: i64,
}

fn put<K: Ord, T>(into: &mut BTreeMap<K, Change<T>>, key: K, value: T, side: Side) {
    let change = into.entry(key).or_insert(Change { before: None, after: None });
    match side {
        Side::Before => change.before = Some(value),
        Side::After => change.after = Some(value),
    }
}

impl Draft {
    pub fn set(&mut self, name: Name, spec: SetSpec, side: Side) {
        put(&mut self.sets, name, spec, side);
    }
    pub fn chain(&mut self, name: Name, chain: Chain, side: Side) {
        put(&mut self.chains, name, chain, side);
    }
    pub fn element(&mut self, set: &str, key: Key, element: Element, side: Side) {
        match self.elements.get_mut(set) {
            Some(changes) => put(changes, key, element, side),
            None => put(self.elements.entry(set.into()).or_default(), key, element, side),
        }
    }
    pub fn elements(&mut self, set: &str, elements: Elements, side: Side) {
        for (key, element) in elements {
            self.element(set, key, element, side);
        }
    }
    pub fn part(&mut self, part: Part, side: Side) {
        let more = side.sign();
        if let Some(address) = part.address {
            *self.addresses.entry(address).or_default() += more;
        }
        self.restricted += if part.restricts { more } else { 0 };
        for (set, key, element) in part.elements {
            if let SetName::Of(entry) = set {
                *self.entries.entry(entry).or_default() += more;
            }
            self.element(&set.name(), key, element, side);
        }
    }
    pub fn own(&mut self, own: Own, side: Side) {
        for (name, spec) in own.sets {
            self.set(name, spec, side);
        }
        for (name, chain) in own.chains {
            self.chain(name, chain, side);
        }
        for (set, elements) in own.elements {
            self.elements(&set, elements, side);
        }
    }

    pub fn finish(self) -> Changes {
        let Draft { mut sets, mut chains, mut elements, .. } = self;
        sets.retain(|_, change| change.before != change.after);
        chains.retain(|_, change| change.before != change.after);
        elements.retain(|set, changes| {
            // Elements go with their set; those of a set made anew are all new.
            let gone = sets.get(set).is_some_and(|set| set.before.is_some());
            changes.retain(|_, change| {
                if gone {
                    change.before = None;
                }
                let data = |element: &Option<Element>| element.as_ref().map(|e| e.data.clone());
                data(&change.before) != data(&change.after)
            });
            !changes.is_empty()
        });
        Changes { sets, chains, elements }
    }
}
