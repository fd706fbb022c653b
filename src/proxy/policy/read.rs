//! From objects to the model: which pods a policy selects, whom its rules mean.
//!
//! Invariant: what cannot be read is named and allows nothing; a selector of the policy's own pods
//! that cannot be read selects more rather than fewer. Peers are looked up for policies that select
//! a pod of this node, no others.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::super::model::{Cidr, L4, LocalPod, NamedPort, Skipped};
use super::super::service::Name;
use super::super::table::ranges::{self, Range};
use super::model::{Direction, Peers, Policy, PolicyModel, Ports, Rule, Subject};
use super::verdict::DNS;
use super::world::{Labels, World};
use crate::api::network_policy::{IpBlock, NetworkPolicy, PolicyPeer, PolicyPort, PolicyType};
use crate::api::selector::{IntOrString, LabelSelector, Operator, Requirement};

/// In whose place the node's DNS server stands: its namespace, its label, its ports.
const DNS_NAMESPACE: &str = "kube-system";
const DNS_LABEL: (&str, &str) = ("k8s-app", "kube-dns");
const DNS_PORTS: [(&str, L4); 2] = [("dns", L4::Udp), ("dns-tcp", L4::Tcp)];

pub fn model(world: &World) -> (PolicyModel, Vec<Skipped>) {
    let known = Known::of(world);
    let mut model = PolicyModel { servers: world.servers.iter().copied().collect(), ..PolicyModel::default() };
    let mut skipped = Vec::new();
    let mut isolating: BTreeMap<&str, Isolating> = BTreeMap::new();
    for ((namespace, name), policy) in &world.policies {
        let mut reader =
            Reader { world, known: &known, object: format!("NetworkPolicy {namespace}/{name}"), skipped: &mut skipped };
        let selector = reader.subjects(&policy.spec.pod_selector);
        let housed = world.housed().filter(|pod| pod.namespace == *namespace && selector.matches(&pod.labels));
        let selected: Vec<&LocalPod> = housed.collect();
        if selected.is_empty() {
            continue;
        }
        let name = Name::new(namespace, name);
        for pod in &selected {
            let of = isolating.entry(pod.uid.as_str()).or_insert_with(|| Isolating { pod, ingress: None, egress: None });
            for (kind, names) in [(PolicyType::Ingress, &mut of.ingress), (PolicyType::Egress, &mut of.egress)] {
                if policy.spec.restricts(kind) {
                    names.get_or_insert_default().push(name.clone());
                }
            }
        }
        model.policies.insert(name, reader.policy(namespace, policy, &selected));
    }
    // Many pods have the same list: once each.
    let mut lists: BTreeMap<Vec<Name>, Arc<[Name]>> = BTreeMap::new();
    let mut shared = |names: Vec<Name>| {
        let list = || Arc::from(names.as_slice());
        Arc::clone(lists.entry(names.clone()).or_insert_with(list))
    };
    for Isolating { pod, ingress, egress } in isolating.into_values() {
        let of = Subject {
            pod: format!("{}/{}", pod.namespace, pod.name).into(),
            ingress: ingress.map(&mut shared),
            egress: egress.map(&mut shared),
        };
        model.subjects.extend(pod.addresses.iter().map(|ip| (*ip, of.clone())));
    }
    (model, skipped)
}

struct Isolating<'a> {
    pod: &'a LocalPod,
    ingress: Option<Vec<Name>>,
    egress: Option<Vec<Name>>,
}

/// A pod that rules may name.
struct Known<'a> {
    by_namespace: BTreeMap<&'a str, Vec<Pod<'a>>>,
}

struct Pod<'a> {
    labels: &'a Labels,
    addresses: &'a [IpAddr],
    ports: &'a [NamedPort],
}

impl<'a> Known<'a> {
    fn of(world: &'a World) -> Known<'a> {
        let local = world.housed().map(|p| (&p.namespace, Pod { labels: &p.labels, addresses: &p.addresses, ports: &p.ports }));
        let far = world.peers.iter();
        let far = far.map(|p| (&p.namespace, Pod { labels: &p.labels, addresses: &p.addresses, ports: &p.ports }));
        let mut by_namespace: BTreeMap<&str, Vec<Pod>> = BTreeMap::new();
        for (namespace, pod) in local.chain(far) {
            by_namespace.entry(namespace).or_default().push(pod);
        }
        Known { by_namespace }
    }

    fn all(&self) -> impl Iterator<Item = &Pod<'a>> {
        self.by_namespace.values().flatten()
    }
}

/// The policy's own selector as it can be read, and which of its requirements cannot be.
pub(super) fn subjects(selector: &LabelSelector) -> (LabelSelector, Vec<usize>) {
    let bad: Vec<usize> = faults(selector).collect();
    let mut readable = selector.clone();
    bad.iter().rev().for_each(|at| drop(readable.match_expressions.remove(*at)));
    (readable, bad)
}

/// The first port of that name counts, as in a Service.
fn number(ports: &[NamedPort], name: &str, protocol: L4) -> Option<u16> {
    ports.iter().find(|p| p.name == name && p.protocol == protocol).map(|p| p.number)
}

struct Reader<'a> {
    world: &'a World,
    known: &'a Known<'a>,
    object: String,
    skipped: &'a mut Vec<Skipped>,
}

/// What the ports of a rule say, before it is known whose they are.
struct Asked {
    every: bool,
    ranges: Vec<(L4, u16, u16)>,
    names: Vec<(String, L4)>,
}

impl Reader<'_> {
    fn skip(&mut self, field: &str, why: &str) {
        self.skipped.push(Skipped { object: self.object.clone(), field: field.to_owned(), why: why.to_owned() });
    }

    fn subjects(&mut self, selector: &LabelSelector) -> LabelSelector {
        let (selector, bad) = subjects(selector);
        for at in bad {
            let field = format!("spec.podSelector.matchExpressions[{at}]");
            self.skip(&field, &format!("{BAD_VALUES}; without it the policy isolates more pods"));
        }
        selector
    }

    fn policy(&mut self, namespace: &str, policy: &NetworkPolicy, selected: &[&LocalPod]) -> Policy {
        let mut read = Policy::default();
        if policy.spec.restricts(PolicyType::Ingress) {
            for (at, rule) in policy.spec.ingress.iter().enumerate() {
                let peers = self.peers(namespace, &format!("spec.ingress[{at}].from"), &rule.from);
                let asked = self.ports(&format!("spec.ingress[{at}].ports"), &rule.ports);
                let own = selected.iter().flat_map(|pod| pod.addresses.iter().map(|ip| (*ip, pod.ports.as_slice())));
                read.ingress.push(Rule { peers, ports: resolve(asked, own), resolves: BTreeSet::new() });
            }
        }
        if policy.spec.restricts(PolicyType::Egress) {
            for (at, rule) in policy.spec.egress.iter().enumerate() {
                let field = format!("spec.egress[{at}].to");
                let peers = self.peers(namespace, &field, &rule.to);
                let asked = self.ports(&format!("spec.egress[{at}].ports"), &rule.ports);
                let resolves = self.resolves(namespace, &rule.to, &peers, &asked);
                let all = self.known.all().flat_map(|pod| pod.addresses.iter().map(|ip| (*ip, pod.ports)));
                let named = all.filter(|(ip, _)| peers.contain(*ip));
                let ports = resolve(asked, named);
                read.egress.push(Rule { peers, ports, resolves });
            }
        }
        read
    }

    fn peers(&mut self, namespace: &str, field: &str, peers: &[PolicyPeer]) -> Peers {
        if peers.is_empty() {
            return Peers::Everybody;
        }
        let (mut selects, mut pods, mut blocks) = (false, BTreeSet::new(), Vec::new());
        for (at, peer) in peers.iter().enumerate() {
            let field = format!("{field}[{at}]");
            match (&peer.ip_block, peer.pod_selector.is_some() || peer.namespace_selector.is_some()) {
                (Some(_), true) => self.skip(&field, "an ipBlock beside a selector; make two peers of them"),
                (None, false) => self.skip(&field, "no peer; write a podSelector, a namespaceSelector or an ipBlock"),
                (Some(block), false) => blocks.extend(self.block(&format!("{field}.ipBlock"), block).unwrap_or_default()),
                (None, true) => {
                    selects = true;
                    self.select(namespace, &field, peer, &mut pods);
                }
            }
        }
        Peers::These { selects, pods, blocks: ranges::united(blocks) }
    }

    fn select(&mut self, namespace: &str, field: &str, peer: &PolicyPeer, into: &mut BTreeSet<IpAddr>) {
        for (name, selector) in [("podSelector", &peer.pod_selector), ("namespaceSelector", &peer.namespace_selector)] {
            let bad: Vec<usize> = selector.iter().flat_map(faults).collect();
            if let Some(at) = bad.first() {
                return self.skip(&format!("{field}.{name}.matchExpressions[{at}]"), BAD_VALUES);
            }
        }
        for (of, pods) in &self.known.by_namespace {
            if takes_namespace(self.world, peer, namespace, of) {
                let chosen = pods.iter().filter(|pod| takes(&peer.pod_selector, pod.labels));
                into.extend(chosen.flat_map(|pod| pod.addresses));
            }
        }
    }

    fn block(&mut self, field: &str, block: &IpBlock) -> Option<Vec<Range>> {
        let Ok(cidr) = block.cidr.parse::<Cidr>() else {
            self.skip(
                &format!("{field}.cidr"),
                &format!("{} is no range of addresses; write it like 10.0.0.0/8", shown(&block.cidr)),
            );
            return None;
        };
        let mut excepts = Vec::with_capacity(block.except.len());
        for (at, text) in block.except.iter().enumerate() {
            match text.parse::<Cidr>() {
                Ok(except) if cidr.covers(&except) => excepts.push(except),
                _ => {
                    let why = format!("{} is no range within {cidr}; the block allows nothing until it is", shown(text));
                    self.skip(&format!("{field}.except[{at}]"), &why);
                    return None;
                }
            }
        }
        Some(ranges::without(cidr, excepts))
    }

    fn ports(&mut self, field: &str, ports: &[PolicyPort]) -> Asked {
        let mut asked = Asked { every: ports.is_empty(), ranges: Vec::new(), names: Vec::new() };
        for (at, port) in ports.iter().enumerate() {
            let protocol = L4::from(port.protocol);
            let number = |n: i32| u16::try_from(n).ok().filter(|n| *n > 0);
            let field = |name: &str| format!("{field}[{at}].{name}");
            match (&port.port, port.end_port) {
                (None, None) => asked.ranges.push((protocol, 0, u16::MAX)),
                (None, Some(_)) => self.skip(&field("endPort"), "an end without a beginning; write port too"),
                (Some(IntOrString::Text(_)), Some(_)) => {
                    self.skip(&field("endPort"), "a range has no name; write port as a number")
                }
                (Some(IntOrString::Text(name)), None) => asked.names.push((name.clone(), protocol)),
                (Some(IntOrString::Int(first)), end) => match (number(*first), number(end.unwrap_or(*first))) {
                    (None, _) => self.skip(&field("port"), &format!("{first} is no port; use 1 to 65535")),
                    (Some(first), Some(last)) if first <= last => asked.ranges.push((protocol, first, last)),
                    (Some(first), _) => {
                        let why = format!("{} ends no range from {first} on; use {first} to 65535", end.unwrap_or_default());
                        self.skip(&field("endPort"), &why);
                    }
                },
            }
        }
        asked.ranges = merged(asked.ranges);
        asked
    }

    /// See the module's head.
    fn resolves(&self, namespace: &str, to: &[PolicyPeer], peers: &Peers, asked: &Asked) -> BTreeSet<L4> {
        let readable = match peers {
            Peers::Everybody => true,
            Peers::These { selects, blocks, .. } => *selects || !blocks.is_empty(),
        };
        let label = Labels::from([(DNS_LABEL.0.to_owned(), DNS_LABEL.1.to_owned())]);
        let takes_dns = |peer: &PolicyPeer| {
            peer.ip_block.is_none()
                && (peer.pod_selector.is_some() || peer.namespace_selector.is_some())
                && peer.pod_selector.iter().chain(&peer.namespace_selector).all(|s| faults(s).next().is_none())
                && takes_namespace(self.world, peer, namespace, DNS_NAMESPACE)
                && takes(&peer.pod_selector, &label)
        };
        let dns = to.iter().any(takes_dns);
        let may = |(name, protocol): (&str, L4)| {
            let named = asked.names.iter().any(|(asked, of)| asked == name && *of == protocol);
            let numbered = asked.ranges.iter().any(|(of, first, last)| *of == protocol && (*first..=*last).contains(&DNS));
            (numbered && readable) || (dns && (asked.every || named))
        };
        DNS_PORTS.into_iter().filter(|port| may(*port)).map(|(_, protocol)| protocol).collect()
    }
}

fn takes(selector: &Option<LabelSelector>, labels: &Labels) -> bool {
    selector.as_ref().is_none_or(|selector| selector.matches(labels))
}

/// Whether the peer means pods of namespace `of`; without a namespaceSelector it means the policy's own.
fn takes_namespace(world: &World, peer: &PolicyPeer, own: &str, of: &str) -> bool {
    match &peer.namespace_selector {
        None => own == of,
        Some(selector) => selector.matches(&world.labels(of)),
    }
}

const BAD_VALUES: &str = "In and NotIn need values, Exists and DoesNotExist take none";

/// Requirements that mean nothing.
fn faults(selector: &LabelSelector) -> impl Iterator<Item = usize> {
    let bad = |r: &Requirement| matches!(r.operator, Operator::In | Operator::NotIn) == r.values.is_empty();
    selector.match_expressions.iter().enumerate().filter(move |(_, r)| bad(r)).map(|(at, _)| at)
}

fn resolve<'a>(asked: Asked, pods: impl Iterator<Item = (IpAddr, &'a [NamedPort])>) -> Ports {
    if asked.every {
        return Ports::Every;
    }
    let mut named = BTreeSet::new();
    if !asked.names.is_empty() {
        for (ip, ports) in pods {
            let of_pod = asked.names.iter().filter_map(|(name, of)| Some((ip, *of, number(ports, name, *of)?)));
            named.extend(of_pod);
        }
    }
    Ports::These { ranges: asked.ranges, by_name: !asked.names.is_empty(), named }
}

fn merged(mut ranges: Vec<(L4, u16, u16)>) -> Vec<(L4, u16, u16)> {
    ranges.sort_unstable();
    let mut merged: Vec<(L4, u16, u16)> = Vec::with_capacity(ranges.len());
    for (protocol, first, last) in ranges {
        match merged.last_mut() {
            Some((of, _, end)) if *of == protocol && first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((protocol, first, last)),
        }
    }
    merged
}

fn shown(text: &str) -> String {
    format!("\"{}\"", text.chars().take(80).collect::<String>().escape_debug())
}

impl PolicyModel {
    /// Policies that isolate the pods of that address.
    pub fn isolating(&self, ip: IpAddr, direction: Direction) -> &[Name] {
        self.subjects.get(&ip).and_then(|s| s.policies(direction)).map(|names| &**names).unwrap_or_default()
    }
}
