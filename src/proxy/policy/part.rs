//! The part of a family's table that policies are: nothing at all where nobody is isolated.
//!
//! ```text
//! policy-forward  filter 1   established, related: accept      policy-input  the same for what pods
//!                            link-local: drop                                 send to this node
//!                            from a pod to itself: accept
//!                            answers without a flow: drop      policy-output answers without a flow
//!                            ip saddr vmap @policy-egress
//!                            ip daddr vmap @policy-ingress
//! policy-eg-…, policy-in-…   once for each list of policies that isolates a pod: a rule or more for
//!                            each rule of theirs, return or accept; last of all drop
//! policy-…-i0-pods, -nets, -ports, -named    whom the first ingress rule of a policy means
//! ```
//!
//! Invariants: pods that nobody isolates cost a miss in each map, pods that come and go cost
//! elements; a name is made of hashes. Behind translation (priority 1), so that a Service means its
//! endpoints, and behind the rejection of Services without any.
//!
//! *Link-local addresses* of IPv6 are nobody's that a policy could name, and every pod has one. So
//! while somebody is isolated nothing goes from one to another pod (where bridged packets come this
//! way), and while somebody's egress is, no pod begins anything with this node from one.
//!
//! *Answers without a flow.* A flow that a policy ended would begin anew, the other way round, with
//! the next packet of the pod that may not be reached: connection tracking takes any TCP packet
//! for a beginning. So what an isolated pod sends against its isolation has to open a connection.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use super::super::model::{Cidr, L4};
use super::super::service::Name as PolicyName;
use super::super::table::ir::{
    Base, Chain, ChainType, CtStates, Element, Elements, Family, Field, Hook, Key, Name, Rule, SetSpec, Step, Table, Type, Value,
    Verdict,
};
use super::model::{self, Direction, Peers, PolicyModel, Ports};
use super::verdict::DNS;

/// What all names of ours begin with, and none of others.
pub const PREFIX: &str = "policy-";
const EGRESS: &str = "policy-egress";
const INGRESS: &str = "policy-ingress";
const EGRESS_PODS: &str = "policy-egress-pods";
const INGRESS_PODS: &str = "policy-ingress-pods";
const TO_ITSELF: &str = "policy-itself";

/// Behind filter (0).
const PRIORITY: i32 = 1;
const TCP: u8 = 6;
const ICMP6: u8 = 58;
const LINK_LOCAL: Cidr = Cidr { address: IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), prefix: 10 };

/// Chains, sets and elements of policies, in a table of that name.
/// `bridge`: the pods' link.
pub fn part(model: &PolicyModel, family: Family, table: &str, bridge: &str) -> Table {
    let mut draft = Draft { model, bridge, table: Table::new(family, table) };
    let subjects: Vec<(&IpAddr, &model::Subject)> =
        model.subjects.iter().filter(|(ip, _)| ip.is_ipv4() == (family == Family::Ip)).collect();
    if subjects.is_empty() {
        return draft.table;
    }
    for direction in Direction::BOTH {
        draft.isolate(direction, &subjects);
    }
    let itself = subjects.iter().map(|(ip, _)| (Key::of(&[Value::Address(**ip), Value::Address(**ip)]), Element::bare()));
    draft.set(TO_ITSELF.into(), SetSpec::set(&[Type::Address, Type::Address]), itself.collect());
    draft.hooks();
    draft.table
}

struct Draft<'a> {
    model: &'a PolicyModel,
    bridge: &'a str,
    table: Table,
}

impl Draft<'_> {
    fn set(&mut self, name: Name, spec: SetSpec, elements: Elements) {
        self.table.sets.insert(Name::clone(&name), spec);
        if !elements.is_empty() {
            self.table.elements.insert(name, elements);
        }
    }

    fn is_ours(&self, ip: &IpAddr) -> bool {
        ip.is_ipv4() == (self.table.family == Family::Ip)
    }

    /// Isolated pods, and the chains that say what they may.
    fn isolate(&mut self, direction: Direction, subjects: &[(&IpAddr, &model::Subject)]) {
        let (map, set) = match direction {
            Direction::Ingress => (INGRESS, INGRESS_PODS),
            Direction::Egress => (EGRESS, EGRESS_PODS),
        };
        let mut chains: BTreeMap<&[PolicyName], Name> = BTreeMap::new();
        let (mut verdicts, mut pods) = (Elements::new(), Elements::new());
        for (ip, subject) in subjects {
            let Some(policies) = subject.policies(direction) else { continue };
            let chain = chains.entry(policies).or_insert_with(|| chain_name(direction, policies));
            let key = Key::of(&[Value::Address(**ip)]);
            verdicts.insert(key.clone(), Element::verdict(Verdict::Jump(Name::clone(chain))).with(&subject.pod));
            pods.insert(key, Element::bare().with(&subject.pod));
        }
        if verdicts.is_empty() {
            return;
        }
        self.set(map.into(), SetSpec::verdict_map(&[Type::Address]), verdicts);
        self.set(set.into(), SetSpec::set(&[Type::Address]), pods);
        for (policies, name) in chains {
            let rules = self.allowing(direction, policies);
            self.table.chains.insert(name, Chain { base: None, rules });
        }
    }

    fn hooks(&mut self) {
        let has = |map: &str| self.table.sets.contains_key(map);
        let (egress, ingress) = (has(EGRESS), has(INGRESS));
        let established =
            Rule::new("flows that were let through", vec![Step::CtState { states: CtStates::KNOWN, not: false }, accept()]);
        let by = |field, map: &str| Step::VerdictMap { key: vec![field], map: map.into() };
        let in_set = |key: &[Field], set: &str| Step::InSet { key: key.to_vec(), set: set.into(), not: false };
        let answer = |field, set: &str| {
            let steps =
                vec![Step::Protocol { number: TCP, not: false }, Step::TcpOpens { not: true }, in_set(&[field], set), drop()];
            Rule::new("an answer without a flow", steps)
        };
        let mut forward = vec![established.clone()];
        forward.extend(self.link_local());
        forward.push(Rule::new("a pod to itself", vec![in_set(&[Field::Source, Field::Destination], TO_ITSELF), accept()]));
        forward.extend(ingress.then(|| answer(Field::Source, INGRESS_PODS)));
        forward.extend(egress.then(|| answer(Field::Destination, EGRESS_PODS)));
        forward.extend(egress.then(|| Rule::new("pods whose egress is isolated", vec![by(Field::Source, EGRESS)])));
        forward.extend(ingress.then(|| Rule::new("pods whose ingress is isolated", vec![by(Field::Destination, INGRESS)])));
        let mut chains = vec![("policy-forward", Hook::Forward, forward)];
        if egress {
            let mut input = vec![established.clone()];
            input.extend(self.link_local());
            input.push(Rule::new("pods whose egress is isolated", vec![by(Field::Source, EGRESS)]));
            chains.push(("policy-input", Hook::Input, input));
            chains.push(("policy-output", Hook::Output, vec![established, answer(Field::Destination, EGRESS_PODS)]));
        }
        for (name, hook, rules) in chains {
            let base = Some(Base { kind: ChainType::Filter, hook, priority: PRIORITY });
            self.table.chains.insert(name.into(), Chain { base, rules });
        }
    }

    /// Neighbours are found; nothing else comes from a pod's link-local address.
    fn link_local(&self) -> Vec<Rule> {
        if self.table.family == Family::Ip {
            return Vec::new();
        }
        let found = vec![
            Step::Protocol { number: ICMP6, not: false },
            Step::CtState { states: CtStates::UNTRACKED, not: false },
            accept(),
        ];
        let nobody = vec![
            Step::InInterface { name: self.bridge.into(), not: false },
            Step::SourceIn { cidr: LINK_LOCAL, not: false },
            drop(),
        ];
        vec![Rule::new("neighbour discovery", found), Rule::new("a pod by its link-local address", nobody)]
    }

    /// All that the policies allow, then nothing.
    fn allowing(&mut self, direction: Direction, policies: &[PolicyName]) -> Vec<Rule> {
        let model = self.model;
        let mut rules = Vec::new();
        for name in policies {
            let Some(policy) = model.policies.get(name) else { continue };
            for (at, rule) in policy.rules(direction).iter().enumerate() {
                let comment = format!("{name} {}[{at}]", direction.word());
                let id = format!("{PREFIX}{}-{}{at}", id(std::slice::from_ref(name)), letter(direction));
                for steps in self.rule(direction, &id, rule) {
                    rules.push(Rule::new(&comment, steps));
                }
            }
        }
        let names: Vec<String> = policies.iter().map(ToString::to_string).collect();
        rules.push(Rule::new(&format!("not allowed by {}", names.join(", ")), vec![drop()]));
        rules
    }

    /// Any of these allows.
    fn rule(&mut self, direction: Direction, id: &str, rule: &model::Rule) -> Vec<Vec<Step>> {
        let allow = match direction {
            Direction::Ingress => accept(),
            // Ingress of the other side has its say yet.
            Direction::Egress => Step::Verdict(Verdict::Return),
        };
        let peers = self.peers(direction, id, &rule.peers);
        let ports = self.ports(id, &rule.ports);
        let mut all = Vec::new();
        for peer in &peers {
            all.extend(ports.iter().map(|port| [peer.as_slice(), port, std::slice::from_ref(&allow)].concat()));
        }
        let servers = self.model.servers.iter().filter(|ip| self.is_ours(ip));
        for (server, protocol) in servers.flat_map(|ip| rule.resolves.iter().map(move |l4| (*ip, *l4))) {
            all.push(vec![
                Step::DestinationIn { cidr: Cidr::only(server), not: false },
                Step::Protocol { number: protocol.number(), not: false },
                Step::DestinationPorts { first: DNS, last: DNS, not: false },
                allow.clone(),
            ]);
        }
        all
    }

    fn peers(&mut self, direction: Direction, id: &str, peers: &Peers) -> Vec<Vec<Step>> {
        let Peers::These { selects, pods, blocks } = peers else { return vec![Vec::new()] };
        let field = if direction == Direction::Ingress { Field::Source } else { Field::Destination };
        let within = |set: &Name| vec![Step::InSet { key: vec![field], set: Name::clone(set), not: false }];
        let mut any = Vec::new();
        if *selects {
            let name: Name = format!("{id}-pods").into();
            any.push(within(&name));
            let pods = pods.iter().filter(|ip| self.is_ours(ip)).map(|ip| (Key::of(&[Value::Address(*ip)]), Element::bare()));
            let elements = pods.collect();
            self.set(name, SetSpec::set(&[Type::Address]), elements);
        }
        let blocks = blocks.iter().filter(|(first, _)| self.is_ours(first));
        let nets: Elements = blocks
            .map(|(first, last)| (Key::range(&[Value::Address(*first)], &[Value::Address(*last)]), Element::bare()))
            .collect();
        if !nets.is_empty() {
            let name: Name = format!("{id}-nets").into();
            any.push(within(&name));
            self.set(name, SetSpec::set(&[Type::Address]).of_ranges(), nets);
        }
        any
    }

    fn ports(&mut self, id: &str, ports: &Ports) -> Vec<Vec<Step>> {
        let Ports::These { ranges, by_name, named } = ports else { return vec![Vec::new()] };
        let mut any = Vec::new();
        match ranges.as_slice() {
            [] => {}
            [one] => any.push(range(*one)),
            many => {
                let name: Name = format!("{id}-ports").into();
                let key = vec![Field::Protocol, Field::DestinationPort];
                any.push(vec![Step::InSet { key, set: Name::clone(&name), not: false }]);
                let single = many.iter().all(|(_, first, last)| first == last);
                let spec = SetSpec::set(&[Type::Protocol, Type::Port]);
                let element = |(protocol, first, last): &(L4, u16, u16)| {
                    let [start, end] = [first, last].map(|port| [Value::Protocol(protocol.number()), Value::Port(*port)]);
                    (if single { Key::of(&start) } else { Key::range(&start, &end) }, Element::bare())
                };
                self.set(name, if single { spec } else { spec.of_ranges() }, many.iter().map(element).collect());
            }
        }
        if *by_name {
            let name: Name = format!("{id}-named").into();
            let key = vec![Field::Destination, Field::Protocol, Field::DestinationPort];
            any.push(vec![Step::InSet { key, set: Name::clone(&name), not: false }]);
            let ours = named.iter().filter(|(ip, ..)| self.is_ours(ip)).map(|(ip, protocol, port)| {
                let key = [Value::Address(*ip), Value::Protocol(protocol.number()), Value::Port(*port)];
                (Key::of(&key), Element::bare())
            });
            let elements = ours.collect();
            self.set(name, SetSpec::set(&[Type::Address, Type::Protocol, Type::Port]), elements);
        }
        any
    }
}

fn range((protocol, first, last): (L4, u16, u16)) -> Vec<Step> {
    let mut steps = vec![Step::Protocol { number: protocol.number(), not: false }];
    if (first, last) != (0, u16::MAX) {
        steps.push(Step::DestinationPorts { first, last, not: false });
    }
    steps
}

fn accept() -> Step {
    Step::Verdict(Verdict::Accept)
}

fn drop() -> Step {
    Step::Verdict(Verdict::Drop)
}

fn letter(direction: Direction) -> char {
    match direction {
        Direction::Ingress => 'i',
        Direction::Egress => 'e',
    }
}

fn chain_name(direction: Direction, policies: &[PolicyName]) -> Name {
    format!("{PREFIX}{}-{}", if direction == Direction::Ingress { "in" } else { "eg" }, id(policies)).into()
}

/// Says which policies they are, in letters that every name may have. Names of objects have no
/// bytes 0, so no two lists are one text.
fn id(policies: &[PolicyName]) -> String {
    let text: Vec<String> = policies.iter().map(|name| format!("{}\0{}\0", name.namespace, name.name)).collect();
    let digest = ring::digest::digest(&ring::digest::SHA256, text.concat().as_bytes());
    digest.as_ref().iter().take(12).map(|b| format!("{b:02x}")).collect()
}
