//! Policies in words, for `coracle policies`.
#![deny(clippy::disallowed_methods)]

use super::super::model::{L4, LocalPod};
use super::model::Direction;
use super::read::subjects;
use super::world::World;
use crate::api::network_policy::{NetworkPolicy, PolicyPeer, PolicyPort, PolicyType};
use crate::api::selector::{IntOrString, LabelSelector, Operator};

/// One direction of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isolation {
    pub direction: Direction,
    /// `namespace/name`; none: everything is allowed.
    pub policies: Vec<String>,
    /// What these allow together; none: nothing.
    pub allows: Vec<Allow>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allow {
    pub policy: String,
    /// `from pods app=web to TCP 80`
    pub words: String,
}

/// Ingress, then egress.
pub fn isolation(world: &World, pod: &LocalPod) -> [Isolation; 2] {
    Direction::BOTH.map(|direction| {
        let kind = match direction {
            Direction::Ingress => PolicyType::Ingress,
            Direction::Egress => PolicyType::Egress,
        };
        let isolates = |((namespace, _), policy): &(&(String, String), &std::sync::Arc<NetworkPolicy>)| {
            !pod.host_network
                && *namespace == pod.namespace
                && policy.spec.restricts(kind)
                && subjects(&policy.spec.pod_selector).0.matches(&pod.labels)
        };
        let (mut policies, mut allows) = (Vec::new(), Vec::new());
        for ((namespace, name), policy) in world.policies.iter().filter(isolates) {
            let name = format!("{namespace}/{name}");
            let rules: Vec<String> = match direction {
                Direction::Ingress => policy.spec.ingress.iter().map(|r| rule("from", &r.from, &r.ports)).collect(),
                Direction::Egress => policy.spec.egress.iter().map(|r| rule("to", &r.to, &r.ports)).collect(),
            };
            allows.extend(rules.into_iter().map(|words| Allow { policy: name.clone(), words }));
            policies.push(name);
        }
        Isolation { direction, policies, allows }
    })
}

fn rule(preposition: &str, peers: &[PolicyPeer], ports: &[PolicyPort]) -> String {
    let whom: Vec<String> = peers.iter().map(peer).collect();
    let whom = if whom.is_empty() { "everybody".to_owned() } else { whom.join(", or ") };
    let which: Vec<String> = ports.iter().map(port).collect();
    let which = if which.is_empty() { "every port".to_owned() } else { which.join(", ") };
    format!("{preposition} {whom}: {which}")
}

fn peer(peer: &PolicyPeer) -> String {
    if let Some(block) = &peer.ip_block {
        let except = if block.except.is_empty() { String::new() } else { format!(" except {}", block.except.join(", ")) };
        return format!("{}{except}", block.cidr);
    }
    let pods = peer.pod_selector.as_ref().map_or("pods".to_owned(), |s| format!("pods{}", selector(s)));
    let of = match &peer.namespace_selector {
        None => " of its namespace".to_owned(),
        Some(s) if *s == LabelSelector::default() => " of every namespace".to_owned(),
        Some(s) => format!(" of namespaces{}", selector(s)),
    };
    pods + &of
}

/// ` app=web,tier in (a,b)`; nothing for everything.
fn selector(selector: &LabelSelector) -> String {
    let labels = selector.match_labels.iter().map(|(key, value)| format!("{key}={value}"));
    let expressions = selector.match_expressions.iter().map(|r| match r.operator {
        Operator::In => format!("{} in ({})", r.key, r.values.join(",")),
        Operator::NotIn => format!("{} not in ({})", r.key, r.values.join(",")),
        Operator::Exists => r.key.clone(),
        Operator::DoesNotExist => format!("!{}", r.key),
    });
    let parts: Vec<String> = labels.chain(expressions).collect();
    if parts.is_empty() { String::new() } else { format!(" {}", parts.join(",")) }
}

fn port(port: &PolicyPort) -> String {
    let protocol = L4::from(port.protocol);
    match (&port.port, port.end_port) {
        (None, _) => format!("every {protocol} port"),
        (Some(IntOrString::Int(first)), Some(last)) => format!("{protocol} {first}-{last}"),
        (Some(number), _) => format!("{protocol} {number}"),
    }
}
