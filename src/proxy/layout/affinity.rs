//! sessionAffinity ClientIP: which endpoint a client had, for as long as the Service says.
//!
//! Of these Services only: per endpoint a set of clients, which rules fill, and a chain that puts
//! the client in and translates; per list of endpoints a chain that looks for the client in their
//! sets and else takes any. The lists of both policies and all of the Service's addresses share the
//! endpoints' sets, so a client has one endpoint of the port wherever it asks. An endpoint that
//! goes takes its set along, and its clients choose anew.
//!
//! Each chain costs every transaction about half a microsecond, since the kernel walks a table's
//! chains at each commit, and the elements that lead to chains are walked with each that comes:
//! a thousand such Services are felt by all others' changes (`tests/proxy/cost.rs`).
//!
//! A flat map from clients to endpoints would be leaner, but no nft can print a rule that updates
//! a map from a register that another map filled: `nft list ruleset` aborts (1.0.6 and 1.1.3).
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::model::{Endpoint, ServicePort};
use super::super::table::ir::{Chain, Dynamic, Element, Elements, Field, Key, Name, Rule, SetSpec, Step, Type, Value, Verdict};
use super::entries::{from_node, from_others, nobody_here};
use super::frame::{MASQUERADE_MARK, verdict};
use super::ground::Ground;

/// Clients that one endpoint is remembered for: kernel memory that strangers can fill. Those
/// beyond are served and not remembered.
const CLIENTS: u32 = 16_384;

/// Sets, chains and elements that are one Service's own.
#[derive(Debug, Default)]
pub(super) struct Own {
    pub sets: BTreeMap<Name, SetSpec>,
    pub chains: BTreeMap<Name, Chain>,
    pub elements: BTreeMap<Name, Elements>,
}

/// The chain that the Service's places lead to.
pub(super) fn entry_name(service: &ServicePort, internal: bool) -> Name {
    format!("aff-{}-{}", id(service), if internal { "clusterip" } else { "external" }).into()
}

/// Says which Service's port it is, in letters that every name may have; two of them have one id
/// once in 2^48.
fn id(service: &ServicePort) -> String {
    let text = format!("{}/{}", service.name, service.protocol);
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().take(12).map(|b| format!("{b:02x}")).collect()
}

pub(super) fn own(ground: &Ground, service: &ServicePort) -> Own {
    let mut own = Own::default();
    let Some(timeout) = service.affinity else { return own };
    let id = id(service);
    let what = service.name.to_string();
    let internal = service.cluster_ip.is_some();
    let external = service.is_external();
    let uses_cluster = (internal && !service.internal_local) || external;
    let uses_local = (internal && service.internal_local) || (external && service.external_local);
    let mut list = |name: &str, endpoints: &[Endpoint], used: bool| -> Option<Name> {
        let name: Name = format!("aff-{id}-{name}").into();
        (used && !endpoints.is_empty()).then(|| own.list(&id, name, &what, endpoints, timeout))
    };
    let cluster = list("all", &service.cluster, uses_cluster);
    let local = list("local", &service.local, uses_local);
    let to = |comment: &str, list: &Name| Rule::new(comment, vec![Step::Verdict(Verdict::Goto(Name::clone(list)))]);
    if let Some(list) = (if service.internal_local { &local } else { &cluster }).as_ref().filter(|_| internal) {
        let mut rules = from_others(ground);
        rules.push(to("an endpoint", list));
        own.chains.insert(entry_name(service, true), Chain { base: None, rules });
    }
    if external {
        let rules = match (service.external_local, &cluster, &local) {
            (true, None, None) | (false, None, _) => Vec::new(),
            (true, cluster, local) => {
                let mut rules = Vec::new();
                if let Some(cluster) = cluster {
                    rules.extend(inside(ground, cluster));
                }
                rules.push(local.as_ref().map_or_else(nobody_here, |local| to("others: an endpoint of this node", local)));
                rules
            }
            (false, Some(cluster), _) => {
                vec![Rule::new("external traffic", vec![Step::MarkOr { bits: MASQUERADE_MARK }]), to("any endpoint", cluster)]
            }
        };
        if !rules.is_empty() {
            own.chains.insert(entry_name(service, false), Chain { base: None, rules });
        }
    }
    own
}

/// Pods and the node reach every endpoint, whatever the policy for others.
fn inside(ground: &Ground, cluster: &Name) -> Vec<Rule> {
    let to = || Step::Verdict(Verdict::Goto(Name::clone(cluster)));
    let pods = ground.sent_by_pods().into_iter().map(|pod| Rule::new("pods: any endpoint", vec![pod, to()]));
    let node = from_node(ground).into_iter().map(|mut rule| {
        rule.steps.push(to());
        rule
    });
    pods.chain(node).collect()
}

impl Own {
    /// The chain of one list of endpoints, with what it needs of each.
    fn list(&mut self, id: &str, name: Name, what: &str, endpoints: &[Endpoint], timeout: Duration) -> Name {
        let client = || vec![Field::Source];
        let mut rules = Vec::with_capacity(endpoints.len() + 1);
        let mut all = Elements::new();
        for (endpoint, index) in endpoints.iter().zip(0..) {
            // Colons are no part of names.
            let own = format!("aff-{id}-{}-{}", endpoint.ip.to_string().replace(':', "_"), endpoint.port);
            let own: Name = own.into();
            let clients = SetSpec::set(&[Type::Address]).of_rules(Dynamic { timeout, size: CLIENTS });
            self.sets.insert(Name::clone(&own), clients);
            let remember = vec![Step::Update { key: client(), set: Name::clone(&own) }];
            let translate = vec![Step::Dnat { address: endpoint.ip, port: endpoint.port }];
            let serving = vec![Rule::new(&format!("{what}: remember the client"), remember), Rule::new(what, translate)];
            self.chains.insert(Name::clone(&own), Chain { base: None, rules: serving });
            let known = Step::InSet { key: client(), set: Name::clone(&own), not: false };
            rules.push(Rule::new("had this endpoint", vec![known, Step::Verdict(Verdict::Goto(Name::clone(&own)))]));
            all.insert(Key::of(&[Value::Index(index)]), Element::verdict(Verdict::Goto(own)));
        }
        let modulus = u32::try_from(endpoints.len()).unwrap_or(u32::MAX);
        rules.push(Rule::new("any endpoint", vec![verdict(&name, &[Field::Random { modulus, offset: 0 }])]));
        self.sets.insert(Name::clone(&name), SetSpec::verdict_map(&[Type::Index]));
        self.elements.insert(Name::clone(&name), all);
        self.chains.insert(Name::clone(&name), Chain { base: None, rules });
        name
    }
}
