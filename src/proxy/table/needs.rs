//! What of the kernel a table needs beside nf_tables itself, and the table without it.
//!
//! Pure. Invariant: nothing that is left in a table names what was taken out of it.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeSet;

use super::ir::{ChainType, Field, Name, Step, Table};

/// A part of nf_tables that a kernel may be built without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// nat chains, dnat, masquerade.
    Nat,
    /// `fib … type`.
    Fib,
    /// `numgen`.
    Random,
    /// `ct …`.
    Conntrack,
    Reject,
    /// `update @set`, `delete @set`.
    Update,
    /// Sets of ranges of several fields.
    Ranges,
}

impl Need {
    pub const ALL: [Need; 7] = [Need::Nat, Need::Fib, Need::Random, Need::Conntrack, Need::Reject, Need::Update, Need::Ranges];
}

/// What a step needs.
pub fn needs(step: &Step) -> Vec<Need> {
    let of_key = |key: &[Field]| {
        let need = |field: &Field| match field {
            Field::Random { .. } => Some(Need::Random),
            Field::OriginalDestination => Some(Need::Conntrack),
            Field::Source | Field::Destination | Field::Protocol | Field::SourcePort | Field::DestinationPort => None,
        };
        key.iter().filter_map(need).collect::<Vec<_>>()
    };
    match step {
        Step::DestinationIsLocal { .. } | Step::SourceIsLocal { .. } => vec![Need::Fib],
        Step::CtState { .. } | Step::CtStatusDnat { .. } => vec![Need::Conntrack],
        Step::Reject(_) => vec![Need::Reject],
        Step::Dnat { .. } | Step::Masquerade { .. } => vec![Need::Nat],
        Step::DnatMap { key, .. } => [vec![Need::Nat], of_key(key)].concat(),
        Step::Update { key, .. } | Step::Delete { key, .. } => [vec![Need::Update], of_key(key)].concat(),
        Step::InSet { key, .. } | Step::VerdictMap { key, .. } => of_key(key),
        Step::SourceIn { .. }
        | Step::DestinationIn { .. }
        | Step::InInterface { .. }
        | Step::OutInterface { .. }
        | Step::Protocol { .. }
        | Step::DestinationPorts { .. }
        | Step::TcpOpens { .. }
        | Step::MarkHas { .. }
        | Step::MarkOr { .. }
        | Step::MarkXor { .. }
        | Step::Verdict(_) => Vec::new(),
    }
}

impl Table {
    /// All that works on a kernel that lacks these: rules that need them are left out, and sets and
    /// chains that cannot be.
    pub fn without(mut self, lacks: &BTreeSet<Need>) -> Table {
        if lacks.is_empty() {
            return self;
        }
        let impossible =
            |ranges: bool, dynamic: bool| (ranges && lacks.contains(&Need::Ranges)) || (dynamic && lacks.contains(&Need::Update));
        let gone: BTreeSet<Name> = self
            .sets
            .iter()
            .filter(|(_, spec)| impossible(spec.interval && spec.key.len() > 1, spec.dynamic.is_some()))
            .map(|(name, _)| Name::clone(name))
            .collect();
        self.sets.retain(|name, _| !gone.contains(name));
        self.elements.retain(|name, _| !gone.contains(name));
        self.chains
            .retain(|_, chain| !(lacks.contains(&Need::Nat) && chain.base.is_some_and(|base| base.kind == ChainType::Nat)));
        let names_gone = |step: &Step| match step {
            Step::InSet { set, .. } | Step::Update { set, .. } | Step::Delete { set, .. } => gone.contains(set),
            Step::VerdictMap { map, .. } | Step::DnatMap { map, .. } => gone.contains(map),
            _ => false,
        };
        for chain in self.chains.values_mut() {
            chain.rules.retain(|rule| {
                rule.steps.iter().all(|step| !names_gone(step) && needs(step).iter().all(|need| !lacks.contains(need)))
            });
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::ir::{Base, Chain, Family, Hook, Rule, SetSpec, Type, Verdict};
    use super::*;

    #[test]
    fn rules_that_need_what_is_missing_are_left_out_and_the_rest_stays() {
        let mut table = Table::new(Family::Ip, "t");
        let accept = || Step::Verdict(Verdict::Accept);
        let rules = vec![
            Rule::new("fib", vec![Step::DestinationIsLocal { not: false }, accept()]),
            Rule::new("plain", vec![Step::Protocol { number: 6, not: false }, accept()]),
            Rule::new("ranges", vec![Step::InSet { key: vec![Field::Source], set: "r".into(), not: false }]),
        ];
        let base = |kind| Some(Base { kind, hook: Hook::Prerouting, priority: 0 });
        table.chains.insert("a".into(), Chain { base: base(ChainType::Filter), rules });
        table.chains.insert("n".into(), Chain { base: base(ChainType::Nat), rules: Vec::new() });
        table.sets.insert("r".into(), SetSpec::set(&[Type::Address, Type::Port]).of_ranges());
        let left = |lacks: &[Need]| {
            let table = table.clone().without(&lacks.iter().copied().collect());
            let rules: Vec<String> = table.chains["a"].rules.iter().map(|r| r.comment.clone()).collect();
            (rules.join(" "), table.chains.len(), table.sets.len())
        };
        assert_eq!(left(&[]), ("fib plain ranges".into(), 2, 1));
        assert_eq!(left(&[Need::Fib]), ("plain ranges".into(), 2, 1));
        assert_eq!(left(&[Need::Nat, Need::Ranges]), ("fib plain".into(), 1, 0));
    }
}
