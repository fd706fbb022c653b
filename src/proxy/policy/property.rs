//! For any world and any packet: what the chains do, what [`PolicyModel::verdict`] says and what a
//! reader of the objects says are the same, in both families.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::model::{Cidr, LocalPod, NamedPort, Peer};
use super::super::table::ir::Family;
use super::super::table::trace::{End, Flow as State, Nameless, Origin, Packet, Scene, trace};
use super::tests::policy;
use super::world::Labels;
use super::*;
use crate::api::network_policy::{NetworkPolicy, PolicyPeer, PolicyPort, PolicyType};
use crate::api::selector::IntOrString;
use crate::proxy::model::L4;

struct Choices<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Choices<'_> {
    fn next(&mut self, of: u8) -> u8 {
        self.at += 1;
        // Other numbers each time round.
        let round = (self.at / self.bytes.len()) as u8;
        (self.bytes[self.at % self.bytes.len()].wrapping_mul(31).wrapping_add(round)) % of
    }
    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.next(of.len() as u8))]
    }
    fn some(&mut self, most: u8, separator: &str, mut item: impl FnMut(&mut Self) -> String) -> String {
        let count = self.next(most + 1);
        (0..count).map(|_| item(self)).collect::<Vec<_>>().join(separator)
    }
}

fn labels(choices: &mut Choices) -> Labels {
    let mut labels = Labels::new();
    for key in ["app", "tier"] {
        if let value @ ("a" | "b") = choices.one(&["a", "b", ""]) {
            labels.insert(key.to_owned(), value.to_owned());
        }
    }
    labels
}

fn address(family: Family, net: u8, last: u8) -> IpAddr {
    match family {
        Family::Ip => [10, 0, net, last].into(),
        Family::Ip6 => [0xfd00, 0, 0, 0, 0, 0, net.into(), last.into()].into(),
    }
}

fn selector(choices: &mut Choices) -> String {
    let expression = |c: &mut Choices| {
        let key = c.one(&["app", "tier", "kubernetes.io/metadata.name"]);
        match c.next(5) {
            0 => format!("{{key: {key}, operator: Exists}}"),
            1 => format!("{{key: {key}, operator: DoesNotExist}}"),
            2 => format!("{{key: {key}, operator: In, values: [a, x]}}"),
            3 => format!("{{key: {key}, operator: NotIn, values: [b, \"y\"]}}"),
            _ => format!("{{key: {key}, operator: In}}"),
        }
    };
    match choices.next(4) {
        0 => "{}".to_owned(),
        1 => format!("{{matchLabels: {{app: {}}}}}", choices.one(&["a", "b"])),
        2 => format!("{{matchLabels: {{tier: a}}, matchExpressions: [{}]}}", choices.some(1, ", ", expression)),
        _ => format!("{{matchExpressions: [{}]}}", choices.some(2, ", ", expression)),
    }
}

fn peer(choices: &mut Choices) -> String {
    let block = |c: &mut Choices| {
        let v6 = c.next(2) == 1;
        let cidr = match v6 {
            false => c.one(&["10.0.0.0/16", "10.0.1.0/24", "10.0.1.0/30", "0.0.0.0/0", "10.0.2.1/32", "nonsense"]),
            true => c.one(&["fd00::/64", "fd00::1:0/112", "::/0", "fd00::2:1/128"]),
        };
        let excepts = c.some(2, ", ", |c| {
            match v6 {
                false => c.one(&["10.0.1.0/25", "10.0.1.2/32", "10.0.2.0/24", "10.0.1.1/32"]),
                true => c.one(&["fd00::1:0/113", "fd00::1:2/128", "fd00::2:0/112"]),
            }
            .to_owned()
        });
        format!("{{ipBlock: {{cidr: {cidr}, except: [{excepts}]}}}}")
    };
    match choices.next(6) {
        0 | 1 => format!("{{podSelector: {}}}", selector(choices)),
        2 => format!("{{namespaceSelector: {}}}", selector(choices)),
        3 => format!("{{podSelector: {}, namespaceSelector: {}}}", selector(choices), selector(choices)),
        4 => block(choices),
        _ => choices.one(&["{}", "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}}"]).to_owned(),
    }
}

fn port(choices: &mut Choices) -> String {
    let protocol = choices.one(&["TCP", "UDP", "SCTP"]);
    let what = match choices.next(7) {
        0 => "port: 80".to_owned(),
        1 => "port: 80, endPort: 82".to_owned(),
        2 => "port: 81".to_owned(),
        3 => "port: web".to_owned(),
        4 => "port: 53".to_owned(),
        5 => "port: 82, endPort: 80".to_owned(),
        _ => return format!("{{protocol: {protocol}}}"),
    };
    format!("{{protocol: {protocol}, {what}}}")
}

fn spec(choices: &mut Choices) -> String {
    let types = choices.one(&["", "policyTypes: [Ingress], ", "policyTypes: [Egress], ", "policyTypes: [Ingress, Egress], "]);
    let rule = |word: &'static str| {
        move |c: &mut Choices| format!("{{{word}: [{}], ports: [{}]}}", c.some(2, ", ", peer), c.some(2, ", ", port))
    };
    let own = selector(choices);
    let (ingress, egress) = (choices.some(2, ", ", rule("from")), choices.some(2, ", ", rule("to")));
    format!("{{{types}podSelector: {own}, ingress: [{ingress}], egress: [{egress}]}}")
}

fn world(choices: &mut Choices) -> World {
    let mut pods = Vec::new();
    let mut peers = Vec::new();
    for n in 0..5 {
        let namespace = choices.one(&["x", "y", "kube-system"]).to_owned();
        let addresses: Vec<IpAddr> =
            [Family::Ip, Family::Ip6].into_iter().filter(|_| choices.next(8) > 0).map(|f| address(f, 1, n)).collect();
        let port = |c: &mut Choices| NamedPort {
            name: "web".into(),
            number: 80 + u16::from(c.next(2)),
            protocol: c.one(&[L4::Tcp, L4::Udp]),
        };
        let ports = (0..choices.next(3)).map(|_| port(choices)).collect();
        let (labels, name) = (labels(choices), format!("p{n}"));
        match choices.next(3) {
            0 => peers.push(Peer { namespace, name, addresses, labels, ports }),
            _ => pods.push(LocalPod {
                uid: name.clone(),
                namespace,
                name,
                addresses,
                labels,
                ports,
                host_network: choices.next(12) == 0,
            }),
        }
    }
    let count = choices.next(5);
    let policies = (0..count).map(|n| policy(choices.one(&["x", "y"]), &format!("p{n}"), &spec(choices))).collect();
    let mut namespaces = BTreeMap::new();
    if choices.next(2) == 0 {
        let mut x = crate::api::namespace::Namespace::default();
        x.metadata.labels = labels(choices);
        namespaces.insert("x".to_owned(), Arc::new(x));
    }
    World {
        policies,
        namespaces,
        pods,
        peers: peers.into(),
        servers: vec![address(Family::Ip, 0, 1), address(Family::Ip6, 0, 1)],
    }
}

/// As somebody reads the objects who knows nothing of models.
fn naive(world: &World, flow: &Flow, from_node: bool) -> Verdict {
    let holds = |pod: &&LocalPod, ip: IpAddr| !pod.host_network && pod.addresses.contains(&ip);
    let local = |ip| world.pods.iter().find(|p| holds(p, ip));
    let known = |ip: IpAddr| -> Option<(&String, &Labels, &Vec<NamedPort>)> {
        let far = || world.peers.iter().find(|p| p.addresses.contains(&ip)).map(|p| (&p.namespace, &p.labels, &p.ports));
        local(ip).map(|p| (&p.namespace, &p.labels, &p.ports)).or_else(far)
    };
    if from_node || flow.source == flow.destination {
        return Verdict::Allowed;
    }
    for (direction, own, other) in
        [(Direction::Egress, flow.source, flow.destination), (Direction::Ingress, flow.destination, flow.source)]
    {
        let Some(pod) = local(own) else { continue };
        let kind = if direction == Direction::Ingress { PolicyType::Ingress } else { PolicyType::Egress };
        let means = |requirement: &crate::api::selector::Requirement| {
            use crate::api::selector::Operator::{In, NotIn};
            matches!(requirement.operator, In | NotIn) != requirement.values.is_empty()
        };
        let readable = |s: &Option<crate::api::selector::LabelSelector>| s.iter().flat_map(|s| &s.match_expressions).all(means);
        let isolates = |policy: &&Arc<NetworkPolicy>| {
            let mut own = policy.spec.pod_selector.clone();
            own.match_expressions.retain(means);
            policy.metadata.namespace == pod.namespace && policy.spec.restricts(kind) && own.matches(&pod.labels)
        };
        let peer_takes = |namespace: &str, peer: &PolicyPeer, of: &str, labels: &Labels| {
            readable(&peer.pod_selector)
                && readable(&peer.namespace_selector)
                && peer.pod_selector.as_ref().is_none_or(|s| s.matches(labels))
                && match &peer.namespace_selector {
                    None => namespace == of,
                    Some(s) => s.matches(&world.labels(of)),
                }
        };
        let peer_allows =
            |namespace: &str, peer: &PolicyPeer| match (&peer.ip_block, &peer.pod_selector, &peer.namespace_selector) {
                (Some(block), None, None) => block.cidr.parse::<Cidr>().is_ok_and(|cidr| {
                    let excepts: Vec<Cidr> = block.except.iter().map(|t| t.parse().unwrap()).collect();
                    excepts.iter().all(|e| cidr.covers(e)) && cidr.contains(other) && !excepts.iter().any(|e| e.contains(other))
                }),
                (None, None, None) | (Some(_), ..) => false,
                _ => known(other).is_some_and(|(of, labels, _)| peer_takes(namespace, peer, of, labels)),
            };
        let port_allows = |port: &PolicyPort| {
            let l4 = L4::from(port.protocol);
            l4.number() == flow.protocol
                && match (&port.port, port.end_port) {
                    (None, None) => true,
                    (Some(IntOrString::Int(first)), end) => (*first..=end.unwrap_or(*first)).contains(&i32::from(flow.port)),
                    (Some(IntOrString::Text(name)), None) => known(flow.destination)
                        .and_then(|(_, _, ports)| ports.iter().find(|p| p.name == *name && p.protocol == l4))
                        .is_some_and(|p| p.number == flow.port),
                    _ => false,
                }
        };
        let asks_names = world.servers.contains(&flow.destination) && flow.port == 53 && [6, 17].contains(&flow.protocol);
        let dns_labels = Labels::from([("k8s-app".to_owned(), "kube-dns".to_owned())]);
        let peer_is_dns = |namespace: &str, peer: &PolicyPeer| {
            peer.ip_block.is_none()
                && (peer.pod_selector.is_some() || peer.namespace_selector.is_some())
                && peer_takes(namespace, peer, "kube-system", &dns_labels)
        };
        let peer_reads = |peer: &PolicyPeer| match &peer.ip_block {
            None => peer.pod_selector.is_some() || peer.namespace_selector.is_some(),
            Some(block) => block.cidr.parse::<Cidr>().is_ok_and(|cidr| {
                let excepts: Vec<Cidr> = block.except.iter().map(|t| t.parse().unwrap()).collect();
                excepts.iter().all(|e| cidr.covers(e)) && !excepts.contains(&cidr)
            }),
        };
        let mut isolating = world.policies.values().filter(isolates).peekable();
        if isolating.peek().is_none() {
            continue;
        }
        let allows = |policy: &Arc<NetworkPolicy>| {
            let namespace = &policy.metadata.namespace;
            let rule = |peers: &[PolicyPeer], ports: &[PolicyPort], egress: bool| {
                let of_peer = peers.is_empty() || peers.iter().any(|p| peer_allows(namespace, p));
                let of_port = ports.is_empty() || ports.iter().any(port_allows);
                let names = egress
                    && asks_names
                    && ((ports.iter().any(port_allows) && (peers.is_empty() || peers.iter().any(peer_reads)))
                        || (ports.is_empty() && peers.iter().any(|p| peer_is_dns(namespace, p))));
                (of_peer && of_port) || names
            };
            match direction {
                Direction::Ingress => policy.spec.ingress.iter().any(|r| rule(&r.from, &r.ports, false)),
                Direction::Egress => policy.spec.egress.iter().any(|r| rule(&r.to, &r.ports, true)),
            }
        };
        if !isolating.any(allows) {
            return Verdict::Denied(direction);
        }
    }
    Verdict::Allowed
}

fn walk(table: &super::super::table::ir::Table, world: &World, flow: &Flow, from_node: bool, state: State) -> bool {
    let node = |ip: IpAddr| ip == address(table.family, 0, 1);
    let pod = |ip: IpAddr| world.housed().any(|p| p.addresses.contains(&ip));
    let by = |ip| if pod(ip) { "br0" } else { "up0" };
    let scene = Scene {
        from: if from_node { Origin::Host } else { Origin::Interface(by(flow.source).into()) },
        flow: state,
        is_local: &node,
        route: &|ip| by(ip).into(),
        random: &|_| 0,
        remembered: &BTreeMap::new(),
        nameless: Nameless::Empty,
    };
    let packet = Packet {
        source: flow.source,
        destination: flow.destination,
        protocol: flow.protocol,
        source_port: 40_000,
        destination_port: flow.port,
    };
    trace(table, &scene, packet).unwrap().end != End::Dropped
}

proptest! {
    #![proptest_config(ProptestConfig { cases: crate::proxy::worlds(2_000), ..ProptestConfig::default() })]

    #[test]
    fn chains_model_and_objects_say_the_same(bytes in proptest::collection::vec(any::<u8>(), 64..400)) {
        let mut choices = Choices { bytes: &bytes, at: 0 };
        let world = world(&mut choices);
        let model = model(&world).0;
        for family in [Family::Ip, Family::Ip6] {
            let table = part::part(&model, family, "t", "b0");
            // Pods, the node, two strangers.
            let mut ends: Vec<IpAddr> = (0..5).map(|n| address(family, 1, n)).collect();
            ends.extend([address(family, 0, 1), address(family, 1, 200), address(family, 2, 1)]);
            for source in &ends {
                for destination in &ends {
                    for (protocol, port) in [(6, 80), (6, 81), (17, 80), (132, 82), (17, 53), (6, 53), (1, 0)] {
                        let flow = Flow { source: *source, destination: *destination, protocol, port };
                        let from_node = *source == address(family, 0, 1);
                        let said = model.verdict(&flow, from_node);
                        prop_assert_eq!(said, naive(&world, &flow, from_node), "{:?}\n{:#?}", flow, world);
                        let passes = walk(&table, &world, &flow, from_node, State::New);
                        prop_assert_eq!(passes, said == Verdict::Allowed, "{:?}\n{}\n{:#?}", flow, table, world);
                        let goes_on = walk(&table, &world, &flow, from_node, State::Established { to: None });
                        prop_assert!(goes_on, "{:?}", flow);
                    }
                }
            }
        }
    }
}
