//! The parts of a table that no Service changes: its sets, and its chains at hooks.
//!
//! ```text
//! prerouting, output       nat dstnat     jump services
//! services                 to loopback: return
//!                          ip daddr @cluster-ips: jump to-lb (these chains: dispatch.rs)
//!                          ip daddr @external-ips: jump to-external
//!                          not to this node: return
//!                          dnat to … map @hostip-hostports, @hostports
//!                          [ip daddr @nodeport-ips] meta l4proto . th dport @nodeports: goto to-nodeport
//! forward                  filter         from a pod, of no connection: drop; new: jump refuse
//! outgoing                 filter         new: jump refuse
//! input                    filter         new: jump refuse-input
//! refuse                   … @noep goto rejected, … @noep-drop drop
//!                          ip daddr @cluster-ips: goto rejected; to a Service range: drop
//! refuse-input             … @noep goto rejected, … @noep-drop drop
//!                          to a port of this node: @noep-nodeports goto rejected, @noep-nodeports-drop drop
//! rejected                 TCP: reject with tcp reset; reject
//! postrouting              nat srcnat     marked: masquerade
//!                                         translated, a pod to itself: masquerade
//!                                         pods to the outside: masquerade
//! firewall-prerouting, firewall-output    filter dstnat-10, only while a Service has source ranges
//! ```
//!
//! Invariants: only packets to an address of this host are translated for a port of the host
//! (CVE-2025-67499), never those to loopback (no route_localnet, CVE-2020-8558). A Service's
//! address wins over a host port, a host port over a NodePort.
#![deny(clippy::disallowed_methods)]

use super::super::model::{Cidr, L4};
use super::super::table::ir::{
    Base, Chain, ChainType, CtStates, Element, Field, Hook, Key, Name, Reject, Rule, SetSpec, Step, Table, Type, Value, Verdict,
};
use super::dispatch;
use super::entries::Place;
use super::ground::{Ground, NodePorts};

/// Protocol and port of NodePorts that lead somewhere.
pub const NODE_PORTS: &str = "nodeports";
/// The node's addresses that take NodePorts, where not all do.
pub const NODE_PORT_IPS: &str = "nodeport-ips";
/// What has no endpoint.
pub const WITHOUT: &str = "noep";
pub const NODE_PORTS_WITHOUT: &str = "noep-nodeports";
/// What has endpoints, but policy Local forbids them.
pub const DROPPED: &str = "noep-drop";
pub const NODE_PORTS_DROPPED: &str = "noep-nodeports-drop";
pub const CLUSTER_IPS: &str = "cluster-ips";
/// Load balancers' addresses and externalIPs.
pub const EXTERNAL_IPS: &str = "external-ips";
/// What only some sources may use.
pub const RESTRICTED: &str = "fw-vips";
/// … and those sources.
pub const SOURCES: &str = "fw-sources";
pub const HOST_PORTS: &str = "hostports";
pub const HOST_IP_PORTS: &str = "hostip-hostports";
/// Pods' addresses, each twice.
pub const HAIRPIN: &str = "hairpin";

/// Of packets that are to be masqueraded: kube-proxy's bit, which other programs know to leave
/// alone. It is gone when the packet leaves.
pub const MASQUERADE_MARK: u32 = 0x4000;

/// No word of nft's: it could print a chain `reject`, and not read it.
const REJECTED: &str = "rejected";
const TCP: u8 = 6;

const DSTNAT: i32 = -100;
const FILTER: i32 = 0;
const SRCNAT: i32 = 100;

pub(super) fn verdict(map: &str, key: &[Field]) -> Step {
    Step::VerdictMap { key: key.to_vec(), map: map.into() }
}

fn in_set(set: &str, key: &[Field], not: bool) -> Step {
    Step::InSet { key: key.to_vec(), set: set.into(), not }
}

fn new() -> Step {
    Step::CtState { states: CtStates::NEW, not: false }
}

pub(super) const VIP: [Field; 3] = [Field::Destination, Field::Protocol, Field::DestinationPort];
pub(super) const PORT: [Field; 2] = [Field::Protocol, Field::DestinationPort];

fn at(kind: ChainType, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
    Chain { base: Some(Base { kind, hook, priority }), rules }
}

/// A table without any Service, host port or pod.
pub(super) fn frame(ground: &Ground) -> Table {
    let mut table = Table::new(ground.family, &ground.table);
    for (name, spec) in sets(ground) {
        table.sets.insert(name.into(), spec);
    }
    if let NodePorts::On(addresses) = &ground.node_ports {
        let elements = addresses.iter().map(|ip| (Key::of(&[Value::Address(*ip)]), Element::bare()));
        table.elements.insert(NODE_PORT_IPS.into(), elements.collect());
        table.elements.retain(|_, elements| !elements.is_empty());
    }
    let mut chain = |name: &str, chain| table.chains.insert(name.into(), chain);
    let to_services = || vec![Rule::new("Services and host ports", vec![Step::Verdict(Verdict::Jump("services".into()))])];
    chain("prerouting", at(ChainType::Nat, Hook::Prerouting, DSTNAT, to_services()));
    chain("output", at(ChainType::Nat, Hook::Output, DSTNAT, to_services()));
    chain("postrouting", at(ChainType::Nat, Hook::Postrouting, SRCNAT, masquerading(ground)));
    chain("services", Chain { base: None, rules: services(ground) });
    for place in Place::ALL {
        chain(&dispatch::name(place), Chain::default());
    }
    let new_ones = |to: &str| {
        let jump = Step::Verdict(Verdict::Jump(to.into()));
        vec![Rule::new("what begins and nobody serves", vec![Step::CtState { states: CtStates::NEW, not: false }, jump])]
    };
    chain("input", at(ChainType::Filter, Hook::Input, FILTER, new_ones("refuse-input")));
    let mut forwarded = stray(ground);
    forwarded.extend(new_ones("refuse"));
    chain("forward", at(ChainType::Filter, Hook::Forward, FILTER, forwarded));
    chain("outgoing", at(ChainType::Filter, Hook::Output, FILTER, new_ones("refuse")));
    let mut refused = unserved((WITHOUT, DROPPED), &VIP, &[]);
    refused.extend(no_such_service(ground));
    chain("refuse", Chain { base: None, rules: refused });
    let mut refused = unserved((WITHOUT, DROPPED), &VIP, &[]);
    let here = [
        Step::DestinationIn { cidr: ground.loopback(), not: true },
        match &ground.node_ports {
            NodePorts::EveryLocal => Step::DestinationIsLocal { not: false },
            NodePorts::On(_) => in_set(NODE_PORT_IPS, &[Field::Destination], false),
        },
    ];
    refused.extend(unserved((NODE_PORTS_WITHOUT, NODE_PORTS_DROPPED), &PORT, &here));
    chain("refuse-input", Chain { base: None, rules: refused });
    chain(REJECTED, Chain { base: None, rules: rejected() });
    table
}

/// A late packet of a pod that belongs to no connection is not translated back: its receiver would
/// answer it with a reset, and so end the connection that it was of (kubernetes#74839).
fn stray(ground: &Ground) -> Vec<Rule> {
    let of = |pod| vec![pod, Step::CtState { states: CtStates::INVALID, not: false }, Step::Verdict(Verdict::Drop)];
    ground.sent_by_pods().into_iter().map(|pod| Rule::new("a pod's, of no connection", of(pod))).collect()
}

/// A connect that is refused by ICMP while its SYN is still being sent, as on this host it may be,
/// takes no notice and waits for a second; of a reset it hears at once.
fn rejected() -> Vec<Rule> {
    let tcp = Step::Protocol { number: TCP, not: false };
    vec![
        Rule::new("TCP", vec![tcp, Step::Reject(Reject::TcpReset)]),
        Rule::new("others", vec![Step::Reject(Reject::PortUnreachable)]),
    ]
}

fn reject() -> Step {
    Step::Verdict(Verdict::Goto(REJECTED.into()))
}

/// What has no endpoint, by the sets to refuse and to drop.
fn unserved((without, dropped): (&str, &str), key: &[Field], where_: &[Step]) -> Vec<Rule> {
    let rule = |comment, set, last| Rule::new(comment, [where_, &[in_set(set, key, false), last]].concat());
    vec![rule("no endpoint", without, reject()), rule("no endpoint of this node", dropped, Step::Verdict(Verdict::Drop))]
}

fn sets(ground: &Ground) -> Vec<(&'static str, SetSpec)> {
    use Type::{Address, Port, Protocol};
    let mut sets = vec![
        (NODE_PORTS, SetSpec::set(&[Protocol, Port])),
        (WITHOUT, SetSpec::set(&[Address, Protocol, Port])),
        (DROPPED, SetSpec::set(&[Address, Protocol, Port])),
        (NODE_PORTS_WITHOUT, SetSpec::set(&[Protocol, Port])),
        (NODE_PORTS_DROPPED, SetSpec::set(&[Protocol, Port])),
        (CLUSTER_IPS, SetSpec::set(&[Address])),
        (EXTERNAL_IPS, SetSpec::set(&[Address])),
        (HAIRPIN, SetSpec::set(&[Address, Address])),
    ];
    if let NodePorts::On(_) = ground.node_ports {
        sets.push((NODE_PORT_IPS, SetSpec::set(&[Address])));
    }
    if ground.fib {
        sets.push((HOST_PORTS, SetSpec::map(&[Protocol, Port], &[Address, Port])));
        sets.push((HOST_IP_PORTS, SetSpec::map(&[Protocol, Address, Port], &[Address, Port])));
    }
    sets
}

fn services(ground: &Ground) -> Vec<Rule> {
    let back = || Step::Verdict(Verdict::Return);
    let to = |place| dispatch::name(place);
    let by_address = |comment, set, place| {
        Rule::new(comment, vec![in_set(set, &[Field::Destination], false), Step::Verdict(Verdict::Jump(to(place)))])
    };
    let mut rules = vec![
        Rule::new("loopback stays on the node", vec![Step::DestinationIn { cidr: ground.loopback(), not: false }, back()]),
        by_address("ClusterIPs", CLUSTER_IPS, Place::ClusterIp),
        by_address("external addresses of Services", EXTERNAL_IPS, Place::External),
    ];
    if ground.fib {
        let host =
            |comment, key: &[Field], map: &str| Rule::new(comment, vec![Step::DnatMap { key: key.to_vec(), map: map.into() }]);
        let by_address = [Field::Protocol, Field::Destination, Field::DestinationPort];
        rules.push(Rule::new("not to this node", vec![Step::DestinationIsLocal { not: true }, back()]));
        // A pod that takes port 53 of every address would take the pods' names from them.
        rules.extend(ground.resolvers.iter().flat_map(|ip| {
            [L4::Udp, L4::Tcp].map(|protocol| {
                let asked = vec![
                    Step::DestinationIn { cidr: Cidr::only(*ip), not: false },
                    Step::Protocol { number: protocol.number(), not: false },
                    Step::DestinationPorts { first: 53, last: 53, not: false },
                    back(),
                ];
                Rule::new("the node's DNS server", asked)
            })
        }));
        rules.push(host("hostPort with hostIP", &by_address, HOST_IP_PORTS));
        rules.push(host("hostPort", &PORT, HOST_PORTS));
    }
    let mut node_ports = vec![in_set(NODE_PORTS, &PORT, false), Step::Verdict(Verdict::Goto(to(Place::NodePort)))];
    if let NodePorts::On(_) = ground.node_ports {
        node_ports.insert(0, in_set(NODE_PORT_IPS, &[Field::Destination], false));
    }
    rules.push(Rule::new("NodePorts", node_ports));
    rules
}

fn masquerading(ground: &Ground) -> Vec<Rule> {
    let bits = MASQUERADE_MARK;
    let marked = vec![Step::MarkHas { bits, not: false }, Step::MarkXor { bits }, Step::Masquerade { fully_random: true }];
    let to_itself = vec![
        Step::CtStatusDnat { not: false },
        in_set(HAIRPIN, &[Field::Source, Field::Destination], false),
        Step::Masquerade { fully_random: false },
    ];
    let mut rules = vec![
        Rule::new("answers have to come back through this node", marked),
        Rule::new("a pod that is its own endpoint", to_itself),
    ];
    if let Some(bridge) = &ground.bridge {
        rules.extend(ground.pod_cidrs.iter().map(|cidr| {
            let outside = vec![
                Step::SourceIn { cidr: *cidr, not: false },
                Step::DestinationIn { cidr: *cidr, not: true },
                Step::OutInterface { name: Name::clone(bridge), not: true },
                Step::Masquerade { fully_random: false },
            ];
            Rule::new("pods to the outside", outside)
        }));
    }
    rules
}

fn no_such_service(ground: &Ground) -> Vec<Rule> {
    let unknown = vec![in_set(CLUSTER_IPS, &[Field::Destination], false), reject()];
    let mut rules = vec![Rule::new("a port that the Service does not have", unknown)];
    rules.extend(ground.service_cidrs.iter().map(|cidr| {
        let unallocated = vec![Step::DestinationIn { cidr: *cidr, not: false }, Step::Verdict(Verdict::Drop)];
        Rule::new("no Service has this address", unallocated)
    }));
    rules
}

#[derive(Debug)]
pub(super) struct Firewall {
    pub sets: [(Name, SetSpec); 2],
    pub chains: [(Name, Chain); 2],
}

/// Sets and chains that are there while a Service has loadBalancerSourceRanges. Ahead of
/// translation, where the Service's address is still to be seen.
pub(super) fn firewall() -> Firewall {
    use Type::{Address, Port, Protocol};
    let sets = [
        (RESTRICTED.into(), SetSpec::set(&[Address, Protocol, Port])),
        (SOURCES.into(), SetSpec::set(&[Address, Protocol, Port, Address]).of_ranges()),
    ];
    let [destination, protocol, port] = VIP;
    let outside = vec![
        new(),
        in_set(RESTRICTED, &VIP, false),
        in_set(SOURCES, &[destination, protocol, port, Field::Source], true),
        Step::Verdict(Verdict::Drop),
    ];
    let chain = |hook| {
        let rules = vec![Rule::new("not in loadBalancerSourceRanges", outside.clone())];
        at(ChainType::Filter, hook, DSTNAT - 10, rules)
    };
    let chains = [("firewall-prerouting".into(), chain(Hook::Prerouting)), ("firewall-output".into(), chain(Hook::Output))];
    Firewall { sets, chains }
}
