//! What the kernel shows, held against what a table is to be.
//!
//! Pure. Invariants: a chain counts as ours only if its place, the comments of all of its rules,
//! fingerprints included, and the chains that they lead to are what we would write; elements are compared one by one as
//! they come and only those that are wrong are kept, so that a look at 30,000 costs no memory.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};

use super::acts::{Acts, Difference, plan_with};
use super::encode::{comment, fingerprint, length, set, single_range};
use super::ir::{Base, Bytes, Chain, ChainType, Data, DataSpec, Elements, Family, Hook, Key, Name, Rule, SetSpec, Table, Type};
use crate::sys::nftables::{BaseSeen, ChainSeen, ContentSeen, ElementSeen, RuleSeen, SetSeen};

/// Chains, rules and sets of a table as the kernel told of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub chains: Vec<ChainSeen>,
    pub rules: Vec<RuleSeen>,
    pub sets: Vec<SetSeen>,
}

/// A table of the kernel in our terms, elements left out. What is just as wanted is equal to it;
/// anything else is equal to nothing that is ever wanted. None: there is nothing.
pub fn structure(wanted: &Table, seen: &Seen) -> Option<Table> {
    if seen.chains.is_empty() && seen.sets.is_empty() {
        return None;
    }
    let mut table = Table::new(wanted.family, &wanted.name);
    let mut rules: BTreeMap<&str, Vec<&RuleSeen>> = BTreeMap::new();
    for rule in &seen.rules {
        rules.entry(&rule.chain).or_default().push(rule);
    }
    for chain in &seen.chains {
        let rules = rules.get(chain.name.as_str()).map(Vec::as_slice).unwrap_or_default();
        let base = chain.base.as_ref().map(base);
        let ours =
            wanted.chains.get(chain.name.as_str()).filter(|want| want.base == base && is_written(wanted.family, want, rules));
        let chain_is =
            ours.cloned().unwrap_or_else(|| Chain { base, rules: rules.iter().map(|_| Rule::new("?", Vec::new())).collect() });
        table.chains.insert(chain.name.as_str().into(), chain_is);
    }
    for seen in &seen.sets {
        let ours = wanted.sets.get(seen.name.as_str()).filter(|spec| set(wanted.family, &seen.name, spec).expected() == *seen);
        let spec = ours.cloned().unwrap_or_else(|| SetSpec::set(&[]));
        table.sets.insert(seen.name.as_str().into(), spec);
    }
    Some(table)
}

fn is_written(family: Family, chain: &Chain, seen: &[&RuleSeen]) -> bool {
    let print = fingerprint(family, chain);
    let leads = |rule: &Rule, seen: &RuleSeen| rule.leads_to().eq(seen.leads_to.iter().map(String::as_str));
    let same = |(rule, seen): (&Rule, &&RuleSeen)| comment(rule, &print) == seen.comment && leads(rule, seen);
    chain.rules.len() == seen.len() && chain.rules.iter().zip(seen).all(same)
}

/// A priority that no chain of ours has: such a place is made anew.
const FOREIGN: i32 = i32::MIN;

fn base(seen: &BaseSeen) -> Base {
    let hook = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting]
        .into_iter()
        .find(|hook| *hook as u32 == seen.hook);
    let kind = [ChainType::Filter, ChainType::Nat, ChainType::Route].into_iter().find(|kind| kind.name() == seen.kind);
    match (hook, kind, seen.drops) {
        (Some(hook), Some(kind), false) => Base { kind, hook, priority: seen.priority },
        _ => Base { kind: ChainType::Filter, hook: Hook::Forward, priority: FOREIGN },
    }
}

/// What is wrong with the elements of one set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// In the kernel, and not to be, or not with that data.
    pub gone: Vec<Key>,
    /// To be, and not in the kernel with that data.
    pub new: Vec<Key>,
}

/// The comparison of one set, element by element.
#[derive(Debug)]
pub struct Comparison<'a> {
    family: Family,
    spec: &'a SetSpec,
    wanted: &'a Elements,
    right: usize,
    wrong: Vec<Key>,
    /// Ranges of one field come as beginnings and ends in no order.
    edges: Vec<(Vec<u8>, bool, Option<Data>)>,
}

static NONE: Elements = Elements::new();

impl<'a> Comparison<'a> {
    pub fn new(wanted: &'a Table, name: &str, spec: &'a SetSpec) -> Comparison<'a> {
        let of_set = wanted.elements.get(name).unwrap_or(&NONE);
        Comparison { family: wanted.family, spec, wanted: of_set, right: 0, wrong: Vec::new(), edges: Vec::new() }
    }

    pub fn take(&mut self, element: &ElementSeen) {
        if single_range(self.spec) {
            self.edges.push((element.key.to_vec(), element.is_end, self.data(&element.content)));
            return;
        }
        let end = element.key_end.map(|end| Box::new(self.key(end)));
        let key = Key { start: self.key(element.key), end };
        let data = self.data(&element.content);
        self.judge(key, data);
    }

    fn judge(&mut self, key: Key, data: Option<Data>) {
        match self.wanted.get(&key) {
            Some(wanted) if Some(&wanted.data) == data.as_ref() => self.right += 1,
            _ => self.wrong.push(key),
        }
    }

    /// Some: nothing is missing, these are wrong. None: what is missing takes a second look, with
    /// [`Present`].
    pub fn end(mut self) -> Result<Wrong, Incomplete> {
        for (key, data) in ranges(std::mem::take(&mut self.edges), self.spec, self.family) {
            self.judge(key, data);
        }
        match self.right == self.wanted.len() {
            true => Ok(Wrong { gone: self.wrong, new: Vec::new() }),
            false => Err(Incomplete { gone: self.wrong }),
        }
    }

    fn key(&self, bytes: &[u8]) -> Bytes {
        padded(bytes, &self.spec.key, self.family)
    }

    /// None: nothing that we write.
    fn data(&self, content: &ContentSeen) -> Option<Data> {
        match (content, &self.spec.data) {
            (ContentSeen::None, DataSpec::None) => Some(Data::None),
            (ContentSeen::Data(bytes), DataSpec::Fields(types)) => Some(Data::Fields(padded(bytes, types, self.family))),
            (ContentSeen::Verdict(..), DataSpec::Verdict) => content.verdict().map(Data::Verdict),
            _ => None,
        }
    }
}

/// Elements are missing; which ones is still to be found.
#[derive(Debug)]
pub struct Incomplete {
    gone: Vec<Key>,
}

impl Incomplete {
    /// `present`: keys of all elements that the kernel has.
    pub fn end(self, wanted: &Table, name: &str, present: &BTreeSet<Key>) -> Wrong {
        let of_set = wanted.elements.get(name).unwrap_or(&NONE);
        let wrong: BTreeSet<&Key> = self.gone.iter().collect();
        let missing = |key: &&Key| !present.contains(*key) || wrong.contains(*key);
        let new = of_set.keys().filter(missing).cloned().collect();
        Wrong { new, gone: self.gone }
    }
}

/// The keys of a set, gathered.
pub struct Present<'a> {
    comparison: Comparison<'a>,
    keys: BTreeSet<Key>,
}

impl<'a> Present<'a> {
    pub fn new(wanted: &'a Table, name: &str, spec: &'a SetSpec) -> Present<'a> {
        Present { comparison: Comparison::new(wanted, name, spec), keys: BTreeSet::new() }
    }
    pub fn take(&mut self, element: &ElementSeen) {
        if single_range(self.comparison.spec) {
            self.comparison.take(element);
            return;
        }
        let end = element.key_end.map(|end| Box::new(self.comparison.key(end)));
        self.keys.insert(Key { start: self.comparison.key(element.key), end });
    }
    pub fn end(mut self) -> BTreeSet<Key> {
        let edges = std::mem::take(&mut self.comparison.edges);
        self.keys.extend(ranges(edges, self.comparison.spec, self.comparison.family).into_iter().map(|(key, _)| key));
        self.keys
    }
}

/// The acts from what was seen to what is wanted; `wrong` by set.
pub fn plan<'a>(structure: Option<&'a Table>, wanted: &'a Table, wrong: &'a BTreeMap<Name, Wrong>) -> Acts<'a> {
    plan_with(structure, wanted, |set| {
        let (Some(wrong), Some(elements)) = (wrong.get(set), Some(wanted.elements.get(set).unwrap_or(&NONE))) else {
            return Difference::default();
        };
        // What the kernel has with other data is there once more: taken out, put in.
        let again = wrong.gone.iter().filter(|key| !wrong.new.contains(key));
        let new = wrong.new.iter().chain(again).filter_map(|key| elements.get_key_value(key)).collect();
        Difference { gone: wrong.gone.iter().collect(), new }
    })
}

fn padded(bytes: &[u8], types: &[Type], family: Family) -> Bytes {
    match length(types, family) {
        Some(length) if length % 4 != 0 && bytes.len() == length => {
            let mut padded = bytes.to_vec();
            padded.resize(length.next_multiple_of(4), 0);
            Bytes::from(padded.as_slice())
        }
        _ => Bytes::from(bytes),
    }
}

/// Beginnings and ends, put together.
fn ranges(mut edges: Vec<(Vec<u8>, bool, Option<Data>)>, spec: &SetSpec, family: Family) -> Vec<(Key, Option<Data>)> {
    // Where one ends and the next begins, the end comes first.
    edges.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    let mut ranges = Vec::new();
    let mut open: Option<(Vec<u8>, Option<Data>)> = None;
    let mut close = |open: Option<(Vec<u8>, Option<Data>)>, last: Vec<u8>| {
        if let Some((first, data)) = open {
            let key = |bytes: &[u8]| padded(bytes, &spec.key, family);
            ranges.push((Key { start: key(&first), end: Some(Box::new(key(&last))) }, data));
        }
    };
    for (key, is_end, data) in edges {
        close(open.take(), before(&key));
        if !is_end {
            open = Some((key, data));
        }
    }
    let last = open.as_ref().map(|(first, _)| vec![0xff; first.len()]).unwrap_or_default();
    close(open, last);
    ranges
}

fn before(key: &[u8]) -> Vec<u8> {
    let mut bytes = key.to_vec();
    for byte in bytes.iter_mut().rev() {
        let (less, borrow) = byte.overflowing_sub(1);
        *byte = less;
        if !borrow {
            break;
        }
    }
    bytes
}
