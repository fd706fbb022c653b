//! The chains that look for a packet's destination in one set of places after the other.
//!
//! ```text
//! to-lb                 ip daddr . meta l4proto . th dport @lb-1 goto lb-1, … @lb-2 goto lb-2, …
//! to-external           … @external-2 goto external-2, …             policy Cluster
//!                       from a pod or this node: jump to-external-all
//!                       … @external-local-1 goto external-local-1, …  policy Local
//!                       … vmap @external-affinity
//! to-external-all       … @external-all-3 goto external-all-3, …      policy Local, inside
//! to-nodeport, to-nodeport-all                                         as external, by port alone
//! ```
//!
//! Invariant: there is a rule for each set that is not empty, and none else; so a chain changes
//! with the first and the last place of an entry only.
#![deny(clippy::disallowed_methods)]

use super::super::table::ir::{Chain, Name, Rule, Step, Verdict};
use super::entries::{Among, Entry, Place};
use super::ground::Ground;

/// The chain that packets to such a place are led to.
pub(super) fn name(place: Place) -> Name {
    format!("to-{}", place.word()).into()
}

/// `entries` in order.
pub(super) fn chains(ground: &Ground, place: Place, entries: impl IntoIterator<Item = Entry>) -> Vec<(Name, Chain)> {
    let (inside, rest): (Vec<Entry>, Vec<Entry>) =
        entries.into_iter().filter(|entry| entry.place == place).partition(|entry| entry.among == Among::Inside);
    let rules = |entries: &[Entry]| entries.iter().map(|entry| entry.rule()).collect::<Vec<Rule>>();
    let to_all: Name = format!("to-{}-all", place.word()).into();
    let at = rest.partition_point(|entry| entry.among == Among::Any);
    let mut all = rules(&rest);
    if !inside.is_empty() {
        let jump = |comment, mut steps: Vec<Step>| {
            steps.push(Step::Verdict(Verdict::Jump(Name::clone(&to_all))));
            Rule::new(comment, steps)
        };
        let pods = ground.sent_by_pods().into_iter().map(|pod| jump("pods of this node", vec![pod]));
        let node = ground.sent_by_node().map(|steps| jump("this node", steps));
        all.splice(at..at, pods.chain(node).collect::<Vec<_>>());
    }
    let mut chains = vec![(name(place), Chain { base: None, rules: all })];
    if !inside.is_empty() {
        chains.push((to_all, Chain { base: None, rules: rules(&inside) }));
    }
    chains
}
