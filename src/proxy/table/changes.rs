//! What lies between two states of one table: of each set, chain and element that differs, what
//! it was and what it is to be.
//!
//! Invariant: nothing that stays is in it, so that an unchanged world gives no changes; put on the
//! first table it gives the second. [`between`] compares whole tables; the layout makes the same
//! out of one Service without looking at the others.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use super::ir::{Chain, Element, Elements, Key, Name, SetSpec, Table};

/// `None` before: it is new. `None` after: it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<T> {
    pub before: Option<T>,
    pub after: Option<T>,
}

/// Chains and sets that go were in use by elements until this change: kernels before 6.2 refuse to
/// delete a chain together with the last map element that led to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// A set with both sides is made anew: its elements of before go with it, those that it is to
    /// hold are all among `elements`.
    pub sets: BTreeMap<Name, Change<SetSpec>>,
    /// A chain with both sides keeps its place and gets other rules.
    pub chains: BTreeMap<Name, Change<Chain>>,
    pub elements: BTreeMap<Name, BTreeMap<Key, Change<Element>>>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty() && self.chains.is_empty() && self.elements.is_empty()
    }
    /// Elements only: neither chains nor sets come, go or differ.
    pub fn keeps_structure(&self) -> bool {
        self.sets.is_empty() && self.chains.is_empty()
    }
    /// How many elements come, go or get other data.
    pub fn element_count(&self) -> usize {
        self.elements.values().map(BTreeMap::len).sum()
    }

    /// Both, of chains and sets with other names.
    pub fn and(mut self, other: Changes) -> Changes {
        self.sets.extend(other.sets);
        self.chains.extend(other.chains);
        self.elements.extend(other.elements);
        self
    }

    /// Makes the second table of the first.
    pub fn apply_to(&self, table: &mut Table) {
        for (name, change) in &self.sets {
            table.elements.remove(name);
            put(&mut table.sets, name, change);
        }
        for (name, change) in &self.chains {
            put(&mut table.chains, name, change);
        }
        for (set, changes) in &self.elements {
            let elements = table.elements.entry(Name::clone(set)).or_default();
            for (key, change) in changes {
                put(elements, key, change);
            }
            if elements.is_empty() {
                table.elements.remove(set);
            }
        }
    }
}

fn put<K: Ord + Clone, T: Clone>(into: &mut BTreeMap<K, T>, key: &K, change: &Change<T>) {
    match &change.after {
        Some(after) => into.insert(key.clone(), after.clone()),
        None => into.remove(key),
    };
}

/// What makes `after` of `before`. Family and name are those of both.
pub fn between(before: &Table, after: &Table) -> Changes {
    let sets = differing(&before.sets, &after.sets, PartialEq::eq);
    let chains = differing(&before.chains, &after.chains, PartialEq::eq);
    let none = Elements::new();
    let mut elements = BTreeMap::new();
    for name in before.elements.keys().chain(after.elements.keys()) {
        if elements.contains_key(name) {
            continue;
        }
        // Of a set that goes or is made anew nothing is there to be changed.
        let gone = sets.get(name).is_some_and(|change| change.before.is_some());
        let old = if gone { &none } else { before.elements.get(name).unwrap_or(&none) };
        let changes = differing(old, after.elements.get(name).unwrap_or(&none), |a, b| a.data == b.data);
        elements.insert(Name::clone(name), changes);
    }
    elements.retain(|_, changes| !changes.is_empty());
    Changes { sets, chains, elements }
}

/// In one walk over both.
fn differing<K: Ord + Clone, T: Clone>(
    before: &BTreeMap<K, T>,
    after: &BTreeMap<K, T>,
    same: impl Fn(&T, &T) -> bool,
) -> BTreeMap<K, Change<T>> {
    let mut changes = BTreeMap::new();
    let (mut old, mut new) = (before.iter().peekable(), after.iter().peekable());
    loop {
        let order = match (old.peek(), new.peek()) {
            (None, None) => return changes,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some((a, _)), Some((b, _))) => a.cmp(b),
        };
        let gone = if order.is_le() { old.next() } else { None };
        let come = if order.is_ge() { new.next() } else { None };
        let (Some((key, _)), before, after) = (gone.or(come), gone.map(|(_, v)| v), come.map(|(_, v)| v)) else {
            return changes;
        };
        if before.zip(after).is_none_or(|(b, a)| !same(b, a)) {
            changes.insert(key.clone(), Change { before: before.cloned(), after: after.cloned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ir::{Data, Family, Rule, Step, Type, Value, Verdict};
    use super::*;

    fn port(n: u16) -> Key {
        Key::of(&[Value::Port(n)])
    }

    fn table() -> Table {
        let mut table = Table::new(Family::Ip, "t");
        for (set, numbers) in [("a", &[1, 2, 3][..]), ("b", &[1]), ("c", &[7])] {
            table.sets.insert(set.into(), SetSpec::verdict_map(&[Type::Port]));
            let elements = numbers.iter().map(|n| (port(*n), Element::verdict(Verdict::Drop))).collect();
            table.elements.insert(set.into(), elements);
        }
        for chain in ["x", "y"] {
            let rules = vec![Rule::new("all", vec![Step::Verdict(Verdict::Accept)])];
            table.chains.insert(chain.into(), Chain { base: None, rules });
        }
        table
    }

    #[test]
    fn changes_put_on_the_first_table_give_the_second_and_name_nothing_that_stays() {
        let before = table();
        assert!(between(&before, &before).is_empty());
        let mut after = table();
        let a = after.elements.get_mut("a").unwrap();
        a.remove(&port(1));
        a.insert(port(2), Element::verdict(Verdict::Accept));
        a.insert(port(9), Element::verdict(Verdict::Drop));
        after.sets.remove("b");
        after.elements.remove("b");
        after.sets.insert("c".into(), SetSpec::set(&[Type::Port]));
        after.elements.insert("c".into(), [(port(7), Element::bare())].into());
        after.chains.remove("x");
        after.chains.insert("z".into(), Chain::default());
        let changes = between(&before, &after);
        assert_eq!(changes.sets.keys().map(|n| &**n).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(changes.chains.keys().map(|n| &**n).collect::<Vec<_>>(), ["x", "z"]);
        assert_eq!(changes.elements["a"].keys().cloned().collect::<Vec<_>>(), [port(1), port(2), port(9)]);
        assert!(!changes.elements.contains_key("b"), "its elements go with the set");
        assert_eq!(changes.elements["c"][&port(7)].after.as_ref().map(|e| e.data.clone()), Some(Data::None));
        let mut made = before.clone();
        changes.apply_to(&mut made);
        assert_eq!(made, after);
        between(&after, &before).apply_to(&mut made);
        assert_eq!(made, before);
    }

    #[test]
    fn another_comment_alone_is_no_change_of_an_element() {
        let mut after = table();
        for element in after.elements.get_mut("a").unwrap().values_mut() {
            element.comment = Some("shop/web".into());
        }
        assert!(between(&table(), &after).is_empty());
    }
}
