//! How one table becomes another: acts in an order that the kernel takes in one transaction.
//!
//! Pure. Invariants: where chains and sets are what they were, only elements change, and none
//! that stays is touched; else the chains that differ (and those that name a set made anew) are
//! emptied and filled again inside of the transaction, so that no packet meets a half of them.
//! Chains that nobody leads to any more are emptied in it and removed in a second one
//! ([`Acts::sweep`]): kernels before 6.2 hold on to them for a moment.
//!
//! ```text
//! table ─> empty chains ─> elements out ─> sets out ─> chains out ─> chains in ─> sets in ─> elements in ─> rules in
//! ```
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};

use super::changes::Changes;
use super::ir::{Base, Chain, Element, Elements, Key, Name, SetSpec, Step, Table, Verdict};

/// One step; what it names lives in one of the two tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act<'a> {
    AddTable,
    FlushChain(&'a Name),
    DeleteElements {
        set: &'a Name,
        spec: &'a SetSpec,
        keys: Vec<&'a Key>,
    },
    DeleteSet(&'a Name),
    DeleteChain(&'a Name),
    AddChain(&'a Name, Option<Base>),
    AddSet(&'a Name, &'a SetSpec),
    AddElements {
        set: &'a Name,
        spec: &'a SetSpec,
        elements: Vec<(&'a Key, &'a Element)>,
    },
    /// All of the chain's rules, into an empty chain.
    AddRules(&'a Name, &'a Chain),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acts<'a> {
    pub main: Vec<Act<'a>>,
    /// After `main` is in place, and no harm if it waits: removes chains that are empty and unused.
    pub sweep: Vec<Act<'a>>,
}

/// What one set gains and loses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference<'a> {
    pub gone: Vec<&'a Key>,
    pub new: Vec<(&'a Key, &'a Element)>,
}

/// `from` None: there is no such table.
pub fn plan<'a>(from: Option<&'a Table>, to: &'a Table) -> Acts<'a> {
    let none = &EMPTY;
    plan_with(from, to, |set| {
        let before = from.and_then(|from| from.elements.get(set)).unwrap_or(none);
        difference(before, to.elements.get(set).unwrap_or(none))
    })
}

/// The acts of changes that somebody made without looking at whole tables. `before` is the table,
/// `after` what it becomes, of which only chains and sets are looked at.
pub fn plan_changes<'a>(before: &'a Table, after: &'a Table, changes: &'a Changes) -> Acts<'a> {
    let mut acts = match changes.keeps_structure() {
        false => plan_with(Some(before), after, |_| Difference::default()),
        true => Acts::default(),
    };
    // Elements of sets made anew are no others than those among the changes.
    acts.main.retain(|act| !matches!(act, Act::AddElements { .. }));
    let (mut gone, mut new) = (Vec::new(), Vec::new());
    for (set, elements) in &changes.elements {
        let Some(spec) = after.sets.get(set) else { continue };
        let keys: Vec<&Key> = elements.iter().filter(|(_, c)| c.before.is_some()).map(|(k, _)| k).collect();
        if !keys.is_empty() {
            gone.push(Act::DeleteElements { set, spec, keys });
        }
        let elements: Vec<_> = elements.iter().filter_map(|(k, c)| Some((k, c.after.as_ref()?))).collect();
        if !elements.is_empty() {
            new.push(Act::AddElements { set, spec, elements });
        }
    }
    let taken_out =
        acts.main.iter().position(|act| !matches!(act, Act::AddTable | Act::FlushChain(_))).unwrap_or(acts.main.len());
    acts.main.splice(taken_out..taken_out, gone);
    let put_in = acts.main.iter().position(|act| matches!(act, Act::AddRules(..))).unwrap_or(acts.main.len());
    acts.main.splice(put_in..put_in, new);
    acts
}

static EMPTY: Elements = Elements::new();

/// As [`plan`], where somebody else knows what differs in a set that stays.
pub fn plan_with<'a>(from: Option<&'a Table>, to: &'a Table, mut elements: impl FnMut(&'a Name) -> Difference<'a>) -> Acts<'a> {
    let plan = Structure::new(from, to);
    let mut main = Vec::new();
    let mut adding = Vec::new();
    if from.is_none() {
        main.push(Act::AddTable);
    }
    main.extend(plan.emptied.iter().map(|name| Act::FlushChain(name)));
    for (set, spec) in to.sets.iter().filter(|(_, spec)| spec.dynamic.is_none()) {
        let stays = !plan.sets_out.contains(set) && from.is_some_and(|from| from.sets.contains_key(set));
        let Difference { gone, new } = match stays {
            true => elements(set),
            false => difference(&EMPTY, to.elements.get(set).unwrap_or(&EMPTY)),
        };
        if !gone.is_empty() {
            main.push(Act::DeleteElements { set, spec, keys: gone });
        }
        if !new.is_empty() {
            adding.push(Act::AddElements { set, spec, elements: new });
        }
    }
    main.extend(plan.sets_out.iter().map(|name| Act::DeleteSet(name)));
    main.extend(plan.chains_out.iter().map(|name| Act::DeleteChain(name)));
    main.extend(plan.chains_in.iter().map(|(name, chain)| Act::AddChain(name, chain.base)));
    main.extend(plan.sets_in.iter().map(|(name, spec)| Act::AddSet(name, spec)));
    main.append(&mut adding);
    main.extend(plan.filled.iter().map(|(name, chain)| Act::AddRules(name, chain)));
    Acts { main, sweep: plan.swept.iter().map(|name| Act::DeleteChain(name)).collect() }
}

/// Elements that go and come; one with other data does both. Comments say nothing.
pub fn difference<'a>(from: &'a Elements, to: &'a Elements) -> Difference<'a> {
    let mut difference = Difference::default();
    let (mut old, mut new) = (from.iter().peekable(), to.iter().peekable());
    loop {
        match (old.peek(), new.peek()) {
            (None, None) => return difference,
            (Some((a, _)), Some((b, _))) if a < b => difference.gone.extend(old.next().map(|(k, _)| k)),
            (Some((a, _)), Some((b, _))) if a > b => difference.new.extend(new.next()),
            (Some((_, before)), Some((_, after))) => {
                if before.data != after.data {
                    difference.gone.extend(old.peek().map(|(k, _)| *k));
                    difference.new.extend(new.peek().copied());
                }
                old.next();
                new.next();
            }
            (Some(_), None) => difference.gone.extend(old.next().map(|(k, _)| k)),
            (None, Some(_)) => difference.new.extend(new.next()),
        }
    }
}

/// What becomes of chains and sets.
struct Structure<'a> {
    emptied: BTreeSet<&'a Name>,
    filled: BTreeMap<&'a Name, &'a Chain>,
    chains_in: BTreeMap<&'a Name, &'a Chain>,
    chains_out: BTreeSet<&'a Name>,
    swept: BTreeSet<&'a Name>,
    sets_in: BTreeMap<&'a Name, &'a SetSpec>,
    sets_out: BTreeSet<&'a Name>,
}

impl<'a> Structure<'a> {
    fn new(from: Option<&'a Table>, to: &'a Table) -> Structure<'a> {
        let old_chains = || from.into_iter().flat_map(|from| from.chains.iter());
        let old_sets = || from.into_iter().flat_map(|from| from.sets.iter());
        let sets_out: BTreeSet<&Name> = old_sets().filter(|(n, spec)| to.sets.get(*n) != Some(*spec)).map(|(n, _)| n).collect();
        let stays = |name: &Name| from.is_some_and(|from| from.sets.contains_key(name)) && !sets_out.contains(name);
        let sets_in: BTreeMap<&Name, &SetSpec> = to.sets.iter().filter(|(n, _)| !stays(n)).collect();
        // A chain whose place in the kernel changes is another one.
        let moved = |(name, chain): &(&'a Name, &'a Chain)| to.chains.get(*name).is_some_and(|new| new.base != chain.base);
        let chains_out: BTreeSet<&Name> = old_chains().filter(moved).map(|(n, _)| n).collect();
        let swept: BTreeSet<&Name> = old_chains().filter(|(n, _)| !to.chains.contains_key(*n)).map(|(n, _)| n).collect();
        let there = |name: &Name| from.is_some_and(|from| from.chains.contains_key(name)) && !chains_out.contains(name);
        let chains_in: BTreeMap<&Name, &Chain> = to.chains.iter().filter(|(n, _)| !there(n)).collect();
        let touched = |(name, chain): &(&'a Name, &'a Chain)| {
            to.chains.get(*name) != Some(*chain) || names(chain).any(|n| sets_out.contains(n) || chains_out.contains(n))
        };
        let emptied: BTreeSet<&Name> =
            old_chains().filter(touched).filter(|(_, c)| !c.rules.is_empty()).map(|(n, _)| n).collect();
        let changed = |name: &Name, chain: &Chain| {
            !there(name)
                || emptied.contains(name)
                || from.and_then(|f| f.chains.get(name)).is_some_and(|old| old.rules != chain.rules)
        };
        let filled = to.chains.iter().filter(|(n, c)| !c.rules.is_empty() && changed(n, c)).collect();
        Structure { emptied, filled, chains_in, chains_out, swept, sets_in, sets_out }
    }
}

/// Sets and chains that a chain's rules name.
fn names(chain: &Chain) -> impl Iterator<Item = &Name> {
    chain.rules.iter().flat_map(|rule| &rule.steps).filter_map(|step| match step {
        Step::InSet { set, .. } | Step::Update { set, .. } | Step::Delete { set, .. } => Some(set),
        Step::VerdictMap { map, .. } | Step::DnatMap { map, .. } => Some(map),
        Step::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(chain),
        _ => None,
    })
}

impl Table {
    /// Chains and sets, without elements.
    pub fn clone_structure(&self) -> Table {
        let (name, sets, chains) = (Name::clone(&self.name), self.sets.clone(), self.chains.clone());
        Table { family: self.family, name, sets, chains, elements: BTreeMap::new() }
    }

    /// What the table is after the changes; the kernel's part, for tests and for what is held.
    pub fn apply(&mut self, changes: &Acts) {
        for change in changes.main.iter().chain(&changes.sweep) {
            match change {
                Act::AddTable => {}
                Act::FlushChain(name) => {
                    if let Some(chain) = self.chains.get_mut(*name) {
                        chain.rules.clear();
                    }
                }
                Act::DeleteChain(name) => drop(self.chains.remove(*name)),
                Act::AddChain(name, base) => {
                    self.chains.insert(Name::clone(name), Chain { base: *base, rules: Vec::new() });
                }
                Act::AddRules(name, chain) => {
                    self.chains.entry(Name::clone(name)).or_default().rules.extend(chain.rules.iter().cloned());
                }
                Act::DeleteSet(name) => {
                    self.sets.remove(*name);
                    self.elements.remove(*name);
                }
                Act::AddSet(name, spec) => drop(self.sets.insert(Name::clone(name), SetSpec::clone(spec))),
                Act::DeleteElements { set, keys, .. } => {
                    if let Some(elements) = self.elements.get_mut(*set) {
                        keys.iter().for_each(|key| drop(elements.remove(*key)));
                    }
                }
                Act::AddElements { set, elements, .. } => {
                    let of_set = self.elements.entry(Name::clone(set)).or_default();
                    of_set.extend(elements.iter().map(|(k, e)| (Key::clone(k), Element::clone(e))));
                }
            }
        }
        self.elements.retain(|_, elements| !elements.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::super::ir::{Cidr, Data, Family, Hook, Rule, Type, Value};
    use super::*;
    use crate::sys::nftables::ChainType;
    use proptest::prelude::*;

    fn base(priority: i32) -> Option<Base> {
        Some(Base { kind: ChainType::Filter, hook: Hook::Forward, priority })
    }

    /// A few chains and sets with a few contents, each of which may be missing.
    fn table(choices: &[u8]) -> Table {
        let mut table = Table::new(Family::Ip, "t");
        let mut choice = choices.iter().copied().cycle();
        let mut next = |of: u8| choice.next().unwrap_or(0) % of;
        for name in ["addresses", "more"] {
            let spec = match next(3) {
                0 => continue,
                1 => SetSpec::set(&[Type::Address]),
                _ => SetSpec::set(&[Type::Address]).of_ranges(),
            };
            let elements = (0..next(4)).map(|n| {
                let value = [Value::Address([10, 0, 0, n * next(3)].into())];
                (if spec.interval { Key::range(&value, &value) } else { Key::of(&value) }, Element::bare())
            });
            table.elements.insert(name.into(), elements.collect());
            table.sets.insert(name.into(), spec);
        }
        for name in ["leaf", "twig"] {
            let port = u16::from(next(3));
            if port > 0 {
                let steps = vec![Step::DestinationPorts { first: port, last: port, not: false }, Step::Verdict(Verdict::Drop)];
                table.chains.insert(name.into(), Chain { base: None, rules: vec![Rule::new(name, steps)] });
            }
        }
        let mut map = Elements::new();
        for port in 0..next(4) {
            let to = if next(2) == 0 { "leaf" } else { "twig" };
            let verdict = if table.chains.contains_key(to) { Verdict::Goto(to.into()) } else { Verdict::Accept };
            map.insert(Key::of(&[Value::Port(port.into())]), Element::verdict(verdict));
        }
        table.sets.insert("ports".into(), SetSpec::verdict_map(&[Type::Port]));
        table.elements.insert("ports".into(), map);
        let mut rules = vec![Rule::new("ports", vec![Step::VerdictMap { key: Vec::new(), map: "ports".into() }])];
        if table.sets.contains_key("addresses") {
            let key = vec![super::super::ir::Field::Source];
            rules.push(Rule::new("known", vec![Step::InSet { key, set: "addresses".into(), not: false }]));
        }
        if table.chains.contains_key("leaf") {
            rules.push(Rule::new("leaf", vec![Step::Verdict(Verdict::Jump("leaf".into()))]));
        }
        rules.truncate(usize::from(next(4)));
        table.chains.insert("forward".into(), Chain { base: base(next(2).into()), rules });
        let cidr = Cidr::around([10, 0, 0, 0].into(), 8).unwrap();
        let local = vec![Rule::new("x", vec![Step::SourceIn { cidr, not: false }])];
        if next(2) == 1 {
            table.chains.insert("input".into(), Chain { base: base(0), rules: local });
        }
        table.elements.retain(|_, e| !e.is_empty());
        table
    }

    /// The kernel's rules about what may be done when, on top of [`Table::apply`].
    fn check_order(from: Option<&Table>, changes: &Acts) {
        let mut now = from.cloned().unwrap_or_else(|| Table::new(Family::Ip, "t"));
        for change in changes.main.iter().chain(&changes.sweep) {
            match change {
                Act::DeleteSet(name) => {
                    assert!(!now.chains.values().any(|c| names(c).any(|n| n == *name)), "{name} is still named");
                }
                Act::DeleteChain(name) => {
                    assert!(!now.chains.values().any(|c| names(c).any(|n| n == *name)), "{name} is still jumped to");
                    let leads =
                        |e: &Element| matches!(&e.data, Data::Verdict(Verdict::Goto(to) | Verdict::Jump(to)) if to == *name);
                    assert!(!now.elements.values().flat_map(|e| e.values()).any(leads), "{name} is still an element's");
                    assert!(now.chains[*name].rules.is_empty());
                }
                Act::AddSet(name, _) => assert!(!now.sets.contains_key(*name), "{name} is there"),
                Act::AddChain(name, _) => assert!(!now.chains.contains_key(*name), "{name} is there"),
                Act::DeleteElements { set, keys, .. } => {
                    assert!(keys.iter().all(|k| now.elements[*set].contains_key(*k)));
                }
                Act::AddElements { set, elements, .. } => {
                    assert!(now.sets.contains_key(*set));
                    let there = now.elements.get(*set);
                    assert!(!elements.iter().any(|(k, _)| there.is_some_and(|t| t.contains_key(*k))));
                    let whole = |e: &Element| match &e.data {
                        Data::Verdict(Verdict::Goto(to) | Verdict::Jump(to)) => now.chains.contains_key(to),
                        _ => true,
                    };
                    assert!(elements.iter().all(|(_, e)| whole(e)));
                }
                Act::AddRules(name, chain) => {
                    assert!(now.chains[*name].rules.is_empty());
                    assert!(names(chain).all(|n| now.sets.contains_key(n) || now.chains.contains_key(n)));
                }
                Act::FlushChain(name) => assert!(now.chains.contains_key(*name)),
                Act::AddTable => assert!(from.is_none()),
            }
            now.apply(&Acts { main: vec![change.clone()], sweep: Vec::new() });
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]
        #[test]
        fn the_changes_lead_from_any_table_to_any_other(a in any::<[u8; 40]>(), b in any::<[u8; 40]>()) {
            let (from, to) = (table(&a), table(&b));
            let changes = plan(Some(&from), &to);
            check_order(Some(&from), &changes);
            let mut became = from.clone();
            became.apply(&changes);
            prop_assert_eq!(&became, &to);
            let again = plan(Some(&became), &to);
            prop_assert!(again.main.is_empty() && again.sweep.is_empty());
            check_order(None, &plan(None, &to));

            let known = super::super::changes::between(&from, &to);
            let changes = plan_changes(&from, &to, &known);
            check_order(Some(&from), &changes);
            let mut became = from.clone();
            became.apply(&changes);
            prop_assert_eq!(&became, &to);
        }
    }

    #[test]
    fn where_only_elements_differ_only_they_change() {
        let mut to = table(&[2, 3, 1, 2, 2, 1, 1, 1, 3, 0, 1, 0, 3, 0, 0]);
        let from = to.clone();
        to.elements.entry("ports".into()).or_default().insert(Key::of(&[Value::Port(9)]), Element::verdict(Verdict::Drop));
        let changes = plan(Some(&from), &to);
        assert!(matches!(&changes.main[..], [Act::AddElements { elements, .. }] if elements.len() == 1), "{changes:?}");
        let back = plan(Some(&to), &from);
        assert!(matches!(&back.main[..], [Act::DeleteElements { keys, .. }] if keys.len() == 1), "{back:?}");
    }
}
