//! What Services share: sets of the places that lead to as many endpoints, for each a chain that
//! chooses one by number, and the map that says which that is.
//!
//! A change of a Service's endpoints changes elements only, and 10,000 Services share a few dozen
//! chains. What it must not do is make the kernel walk all Services, as two things would:
//!
//! - An element that leads to a chain: the transaction that adds one walks every map that leads to
//!   chains. So none does, but those of sessionAffinity; rules lead from sets to chains.
//! - A new rule that looks into a map: all elements of that map are walked. So each chain has its
//!   own map, that comes and goes with it.
//!
//! Each set is one look-up for each new connection, so there are not many: one for each number of
//! endpoints up to [`EXACT`], beyond that one for each power of two. There a chain throws among as
//! many places as the power of two, more than half of which are taken, again while it hits an empty
//! one, at last among the lower half, all taken: each endpoint is as likely as the next to 0.5 %.
//!
//! Invariant: a name says all that is in a set's and a chain's rules.
#![deny(clippy::disallowed_methods)]

use super::super::table::ir::{Chain, Field, Name, Rule, SetSpec, Step, Type, Verdict};
use super::frame::{MASQUERADE_MARK, PORT, VIP};
use super::ground::Ground;

/// Endpoints of one place beyond these are left out.
pub const MOST: usize = 1 << 24;

/// Up to here a chain is for one number of endpoints.
pub const EXACT: u32 = 16;

/// Throws among all places, before the one that cannot miss. All of them miss once in 256.
const THROWS: usize = 8;

/// Where something is reached: says what keys begin with, and how traffic is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    ClusterIp,
    /// Addresses of load balancers, externalIPs.
    External,
    NodePort,
}

/// Which endpoints are chosen among. In the order in which a packet meets the sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Among {
    /// The policy's. External traffic of policy Cluster may leave this node, so it is always
    /// masqueraded.
    Any,
    /// External traffic of policy Local, sent by pods of this node or the node: those of policy
    /// Cluster, as if it had gone out to the load balancer and come in anywhere.
    Inside,
    /// … sent by others: those of this node, and it keeps its source.
    Here,
    /// Those that the Service's own chains know (sessionAffinity).
    Own,
}

/// One set, and the chain that it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub place: Place,
    pub among: Among,
    /// Endpoints, or the power of two that they are thrown among.
    pub places: u32,
}

impl Place {
    pub const ALL: [Place; 3] = [Place::ClusterIp, Place::External, Place::NodePort];

    /// How names begin.
    pub(super) fn word(self) -> &'static str {
        match self {
            Place::ClusterIp => "lb",
            Place::External => "external",
            Place::NodePort => "nodeport",
        }
    }
    pub(super) fn key(self) -> &'static [Field] {
        match self {
            Place::ClusterIp | Place::External => &VIP,
            Place::NodePort => &PORT,
        }
    }
}

impl Entry {
    pub fn of(place: Place, among: Among, endpoints: usize) -> Entry {
        let count = endpoints.min(MOST) as u32;
        Entry { place, among, places: if count <= EXACT { count } else { count.next_power_of_two() } }
    }
    /// Of Services with sessionAffinity.
    pub(super) fn own(place: Place) -> Entry {
        Entry { place, among: Among::Own, places: 0 }
    }

    /// Of the set and of the chain.
    pub fn name(self) -> Name {
        let Entry { place, among, places } = self;
        let word = place.word();
        match among {
            Among::Any => format!("{word}-{places}"),
            Among::Inside => format!("{word}-all-{places}"),
            Among::Here => format!("{word}-local-{places}"),
            Among::Own => format!("{word}-affinity"),
        }
        .into()
    }

    /// The map from places and numbers to endpoints.
    pub fn endpoints(self) -> Name {
        format!("{}-eps", self.name()).into()
    }

    pub(super) fn set(self) -> SetSpec {
        let key: Vec<Type> = self.place.key().iter().map(|field| field.kind()).collect();
        if self.among == Among::Own { SetSpec::verdict_map(&key) } else { SetSpec::set(&key) }
    }

    /// None: each Service has its own, or there is nobody.
    pub(super) fn map(self) -> Option<SetSpec> {
        let key = self.place.key().iter().map(|field| field.kind()).chain([Type::Index]);
        (self.places > 0).then(|| SetSpec::map(&key.collect::<Vec<_>>(), &[Type::Address, Type::Port]))
    }

    /// What leads from the set to the chain.
    pub(super) fn rule(self) -> Rule {
        let (key, name) = (self.place.key().to_vec(), self.name());
        let comment = match (self.among, self.places) {
            (Among::Own, _) => return Rule::new("sessionAffinity", vec![Step::VerdictMap { key, map: name }]),
            (Among::Here, 0) => "no endpoint on this node".to_owned(),
            (_, 1) => "one endpoint".to_owned(),
            (_, count) if count <= EXACT => format!("{count} endpoints"),
            (_, places) => format!("{} to {places} endpoints", places / 2 + 1),
        };
        let found = Step::InSet { key, set: Name::clone(&name), not: false };
        Rule::new(&comment, vec![found, Step::Verdict(Verdict::Goto(name))])
    }

    /// None: each Service has its own.
    pub(super) fn chain(self, ground: &Ground) -> Option<Chain> {
        let mut rules = match (self.place, self.among) {
            (_, Among::Own) => return None,
            (Place::ClusterIp, _) => from_others(ground),
            (_, Among::Any) => vec![Rule::new("external traffic", vec![Step::MarkOr { bits: MASQUERADE_MARK }])],
            (_, Among::Inside) => from_node(ground),
            (_, Among::Here) => Vec::new(),
        };
        if self.places == 0 {
            rules.push(nobody_here());
        } else {
            rules.extend(self.choose());
        }
        Some(Chain { base: None, rules })
    }

    fn choose(self) -> Vec<Rule> {
        let throw = |comment, modulus| {
            let key = self.place.key().iter().copied().chain([Field::Random { modulus, offset: 0 }]).collect();
            Rule::new(comment, vec![Step::DnatMap { key, map: self.endpoints() }])
        };
        let mut rules = vec![throw("any endpoint", self.places)];
        if self.places > EXACT {
            rules.resize(THROWS, throw("that place was empty: another", self.places));
            rules.push(throw("of those that are taken for sure", self.places / 2));
        }
        rules
    }
}

/// Marks internal traffic whose answers must come back through this node.
pub(super) fn from_others(ground: &Ground) -> Vec<Rule> {
    let marked = ground.sent_by_others().into_iter().map(|mut steps| {
        steps.push(Step::MarkOr { bits: MASQUERADE_MARK });
        Rule::new("not from a pod", steps)
    });
    marked.collect()
}

/// Marks what the node sends itself; what pods send is not.
pub(super) fn from_node(ground: &Ground) -> Vec<Rule> {
    let marked = ground.sent_by_node().map(|mut steps| {
        steps.push(Step::MarkOr { bits: MASQUERADE_MARK });
        Rule::new("from this node", steps)
    });
    marked.into_iter().collect()
}

/// The place is the Service's and nobody else's, whoever serves: a filter chain drops it.
pub(super) fn nobody_here() -> Rule {
    Rule::new("nobody here serves it", vec![Step::Verdict(Verdict::Accept)])
}
