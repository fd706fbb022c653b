//! The chains that choose an endpoint by number, shared by all Services that have as many.
//!
//! A chain says how many endpoints there are and by which policy, the maps say which: so a change
//! of a Service's endpoints changes elements only, and 10,000 Services share a dozen chains.
//! Endpoints stand in the maps from index 0 on; those that external traffic of policy Local uses
//! for pods and the node itself (policy Cluster's) from [`CLUSTER_AT`] on.
//!
//! Invariant: a chain's name says all that is in it.
#![deny(clippy::disallowed_methods)]

use super::super::table::ir::{Chain, Field, Name, Rule, Step};
use super::frame::{ENDPOINTS, MASQUERADE_MARK, NODE_PORT_ENDPOINTS};
use super::ground::Ground;

/// Index of the first endpoint of policy Cluster beside those of policy Local.
pub const CLUSTER_AT: u32 = 1 << 24;

/// What leads to endpoints by numbers, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Entry {
    ClusterIp {
        count: u32,
    },
    /// External traffic of policy Cluster: may leave this node, so always masqueraded.
    External {
        count: u32,
        by: By,
    },
    /// External traffic of policy Local: keeps its source.
    ExternalLocal {
        cluster: u32,
        local: u32,
        by: By,
    },
}

/// What the maps' keys begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    Address,
    NodePort,
}

impl Entry {
    pub fn name(self) -> Name {
        let by = |by| match by {
            By::Address => "external",
            By::NodePort => "nodeport",
        };
        match self {
            Entry::ClusterIp { count } => format!("lb-{count}"),
            Entry::External { count, by: key } => format!("{}-{count}", by(key)),
            Entry::ExternalLocal { cluster, local, by: key } => format!("{}-local-{cluster}-{local}", by(key)),
        }
        .into()
    }

    pub(super) fn chain(self, ground: &Ground) -> Chain {
        let rules = match self {
            Entry::ClusterIp { count } => cluster_ip(ground, vec![choose(By::Address, count, 0)]),
            Entry::External { count, by } => {
                vec![Rule::new("any endpoint", vec![Step::MarkOr { bits: MASQUERADE_MARK }, choose(by, count, 0)])]
            }
            Entry::ExternalLocal { cluster, local, by } => {
                let to = |count, first| (count > 0).then(|| choose(by, count, first));
                external_local(ground, to(cluster, CLUSTER_AT), to(local, 0))
            }
        };
        Chain { base: None, rules }
    }
}

/// Internal traffic, that ends in `last`.
pub(super) fn cluster_ip(ground: &Ground, last: Vec<Step>) -> Vec<Rule> {
    let mut rules: Vec<Rule> = ground
        .sent_by_others()
        .into_iter()
        .map(|mut steps| {
            steps.push(Step::MarkOr { bits: MASQUERADE_MARK });
            Rule::new("not from a pod", steps)
        })
        .collect();
    rules.push(Rule::new("an endpoint", last));
    rules
}

/// Pods reach an address of the Service as if their packets had gone out to the load balancer and
/// come in anywhere; so does the node, whose source is no pod's and is masqueraded.
pub(super) fn external_local(ground: &Ground, cluster: Option<Step>, local: Option<Step>) -> Vec<Rule> {
    let mut rules = Vec::new();
    if let Some(cluster) = cluster {
        rules.extend(ground.sent_by_pods().into_iter().map(|pod| Rule::new("pods: any endpoint", vec![pod, cluster.clone()])));
        if ground.fib {
            let own = vec![Step::SourceIsLocal { not: false }, Step::MarkOr { bits: MASQUERADE_MARK }, cluster];
            rules.push(Rule::new("this node: any endpoint", own));
        }
    }
    rules.extend(local.map(|local| Rule::new("others: an endpoint of this node", vec![local])));
    rules
}

fn choose(by: By, count: u32, first: u32) -> Step {
    let random = Field::Random { modulus: count, offset: first };
    let (key, map) = match by {
        By::Address => (vec![Field::Destination, Field::Protocol, Field::DestinationPort, random], ENDPOINTS),
        By::NodePort => (vec![Field::Protocol, Field::DestinationPort, random], NODE_PORT_ENDPOINTS),
    };
    Step::DnatMap { key, map: map.into() }
}
