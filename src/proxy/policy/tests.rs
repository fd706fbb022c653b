//! What policies mean where the truth tables of tests/policy do not look: objects that cannot be
//! read, the node and its DNS server, what a change may end, names.
#![deny(clippy::disallowed_methods)]

use super::super::model::{LocalPod, NamedPort, Peer};
use super::super::table::changes::between;
use super::super::table::ir::Family;
use super::*;
use crate::api::network_policy::NetworkPolicy;
use crate::api::yaml;
use crate::proxy::model::L4;

pub(super) fn policy(namespace: &str, name: &str, spec: &str) -> ((String, String), std::sync::Arc<NetworkPolicy>) {
    let text = format!("metadata: {{name: {name}, namespace: \"{namespace}\"}}\nspec: {spec}\n");
    let document = yaml::documents(text.as_bytes(), yaml::Limits::default()).next().unwrap().unwrap();
    let (policy, unknown) = document.read::<NetworkPolicy>().unwrap();
    assert!(unknown.is_empty(), "{spec}");
    ((namespace.to_owned(), name.to_owned()), std::sync::Arc::new(policy))
}

/// `x/a` at 10.0.0.1 and fd00::1 with label pod=a, and so on; x/h has hostNetwork.
fn world(policies: &[(&str, &str, &str)]) -> World {
    let pod = |namespace: &str, name: &str, last: u8| LocalPod {
        uid: format!("{namespace}-{name}"),
        namespace: namespace.into(),
        name: name.into(),
        addresses: vec![[10, 0, 0, last].into(), [0xfd00, 0, 0, 0, 0, 0, 0, last.into()].into()],
        labels: [("pod".to_owned(), name.to_owned())].into(),
        ports: vec![NamedPort { name: "web".into(), number: 8000 + u16::from(last), protocol: L4::Tcp }],
        host_network: false,
    };
    let host = LocalPod { host_network: true, addresses: vec![NODE.parse().unwrap()], ..pod("x", "h", 0) };
    World {
        policies: policies.iter().map(|(namespace, name, spec)| policy(namespace, name, spec)).collect(),
        pods: vec![pod("x", "a", 1), pod("x", "b", 2), pod("y", "a", 3), host],
        peers: vec![Peer {
            namespace: "y".into(),
            name: "far".into(),
            addresses: vec![[10, 1, 0, 1].into()],
            labels: [("pod".to_owned(), "far".to_owned())].into(),
            ports: vec![NamedPort { name: "web".into(), number: 8100, protocol: L4::Tcp }],
        }]
        .into(),
        servers: vec![[10, 0, 0, 254].into()],
        ..World::default()
    }
}

const NODE: &str = "192.0.2.1";
const OUT: &str = "203.0.113.9";
const XA: &str = "10.0.0.1";
const XB: &str = "10.0.0.2";
const YA: &str = "10.0.0.3";
const FAR: &str = "10.1.0.1";
const DNS_SERVER: &str = "10.0.0.254";

/// `10.0.0.1>10.0.0.2:80`, with `/udp` and so on.
fn passes(model: &PolicyModel, text: &str) -> bool {
    let (text, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let (source, rest) = text.split_once('>').unwrap();
    let (destination, port) = rest.rsplit_once(':').unwrap();
    let protocol = match protocol {
        "tcp" => 6,
        "udp" => 17,
        "sctp" => 132,
        _ => 1,
    };
    let (source, destination) = (source.parse().unwrap(), destination.parse().unwrap());
    let flow = Flow { source, destination, protocol, port: port.parse().unwrap() };
    model.verdict(&flow, source == NODE.parse::<std::net::IpAddr>().unwrap()) == Verdict::Allowed
}

fn check(world: &World, allowed: &[String], denied: &[String]) {
    let model = model(world).0;
    allowed.iter().for_each(|flow| assert!(passes(&model, flow), "{flow} is to pass"));
    denied.iter().for_each(|flow| assert!(!passes(&model, flow), "{flow} is not to pass"));
}

fn told(world: &World) -> Vec<String> {
    model(world).1.iter().map(ToString::to_string).collect()
}

#[test]
fn without_a_policy_there_are_no_chains_sets_or_elements() {
    let nobody = [("z", "all", "{podSelector: {}}"), ("x", "other", "{podSelector: {matchLabels: {pod: none}}}")];
    for policies in [&[][..], &nobody] {
        let (model, skipped) = model(&world(policies));
        assert!(skipped.is_empty() && model.subjects.is_empty() && model.policies.is_empty());
        for family in [Family::Ip, Family::Ip6] {
            let part = part::part(&model, family, "t", "b0");
            assert!(part.chains.is_empty() && part.sets.is_empty() && part.elements.is_empty());
        }
    }
}

#[test]
fn the_node_passes_a_pod_reaches_itself_and_host_network_is_the_node() {
    let deny = "{podSelector: {}, policyTypes: [Ingress, Egress]}";
    let world = world(&[("x", "deny", deny), ("y", "from-x", "{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}")]);
    check(
        &world,
        &[format!("{NODE}>{XA}:80"), format!("{XA}>{XA}:80"), format!("{FAR}>{YA}:80"), format!("{NODE}>{YA}:1/icmp")],
        &[format!("{XB}>{XA}:80"), format!("{XA}>{NODE}:80"), format!("{XA}>{OUT}:80/udp"), format!("{OUT}>{YA}:80")],
    );
    // Not a subject, whatever selects it; no peer of a selector.
    let model = model(&world).0;
    assert!(!model.subjects.contains_key(&NODE.parse().unwrap()));
    assert!(!model.policies.values().any(|p| p.ingress.iter().any(|r| r.peers.contain(NODE.parse().unwrap()))));
}

#[test]
fn what_cannot_be_read_allows_nothing_and_the_policy_isolates_all_the_same() {
    for (rule, field, cure) in [
        ("from: [{ipBlock: {cidr: 10.0.0.0/33}}]", "from[0].ipBlock.cidr", "write it like"),
        ("from: [{ipBlock: {cidr: nonsense}}]", "from[0].ipBlock.cidr", "write it like"),
        ("from: [{ipBlock: {cidr: 10.0.0.0/24, except: [10.0.1.0/24]}}]", "from[0].ipBlock.except[0]", "within 10.0.0.0/24"),
        ("from: [{ipBlock: {cidr: 10.0.0.0/24, except: [x]}}]", "from[0].ipBlock.except[0]", "within 10.0.0.0/24"),
        ("from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]", "from[0]", "two peers"),
        ("from: [{}]", "from[0]", "write a podSelector"),
        (
            "from: [{podSelector: {matchExpressions: [{key: pod, operator: In}]}}]",
            "from[0].podSelector.matchExpressions[0]",
            "In and NotIn need values",
        ),
        ("ports: [{port: 80, endPort: 79}]", "ports[0].endPort", "use 80 to 65535"),
        ("ports: [{port: 0}]", "ports[0].port", "use 1 to 65535"),
        ("ports: [{port: 70000}]", "ports[0].port", "use 1 to 65535"),
        ("ports: [{port: web, endPort: 90}]", "ports[0].endPort", "write port as a number"),
        ("ports: [{endPort: 90}]", "ports[0].endPort", "write port too"),
    ] {
        let world = world(&[("x", "bad", &format!("{{podSelector: {{}}, ingress: [{{{rule}}}]}}"))]);
        let told = told(&world);
        assert_eq!(told.len(), 1, "{rule}: {told:?}");
        assert!(
            told[0].starts_with(&format!("NetworkPolicy x/bad, spec.ingress[0].{field}: ")) && told[0].contains(cure),
            "{told:?}"
        );
        check(&world, &[format!("{NODE}>{XA}:80")], &[format!("{XB}>{XA}:80"), format!("{OUT}>{XA}:80/udp")]);
    }
    // What else the rule says holds.
    let both = "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: x}}, {podSelector: {matchLabels: {pod: b}}}], ports: [{port: 0}, {port: 80}]}]}";
    check(&world(&[("x", "half", both)]), &[format!("{XB}>{XA}:80")], &[format!("{XB}>{XA}:81"), format!("{YA}>{XA}:80")]);
    // A selector of its own pods that cannot be read selects more.
    let own = "{podSelector: {matchExpressions: [{key: none, operator: Exists, values: [a]}]}}";
    let world = world(&[("x", "own", own)]);
    assert!(told(&world)[0].contains("isolates more pods"), "{:?}", told(&world));
    check(&world, &[], &[format!("{XB}>{XA}:80")]);
}

#[test]
fn names_of_ports_are_those_of_the_pod_that_is_reached() {
    let ingress = ("x", "in", "{podSelector: {}, ingress: [{ports: [{port: web}]}]}");
    check(
        &world(&[ingress]),
        &[format!("{YA}>{XA}:8001"), format!("{YA}>{XB}:8002"), "fd00::3>fd00::1:8001".into()],
        &[format!("{YA}>{XA}:8002"), format!("{YA}>{XA}:8001/udp")],
    );
    let egress = ("x", "eg", "{podSelector: {}, egress: [{to: [{namespaceSelector: {}}], ports: [{port: web}]}]}");
    check(
        &world(&[egress]),
        &[format!("{XA}>{YA}:8003"), format!("{XA}>{FAR}:8100")],
        &[format!("{XA}>{YA}:8001"), format!("{XA}>{OUT}:8003"), format!("{XA}>{NODE}:8000")],
    );
}

#[test]
fn the_dns_server_is_asked_where_port_53_is_named_or_kube_dns_is_meant() {
    let asks = |egress: &str| {
        let world = world(&[("x", "eg", &format!("{{podSelector: {{}}, policyTypes: [Egress], egress: [{egress}]}}"))]);
        let model = model(&world).0;
        ["udp", "tcp"].map(|l4| passes(&model, &format!("{XA}>{DNS_SERVER}:53/{l4}")))
    };
    let kube_dns = "namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}, podSelector: {matchLabels: {k8s-app: kube-dns}}";
    assert_eq!(asks(""), [false, false]);
    assert_eq!(asks("{}"), [true, true]);
    assert_eq!(asks("{to: [{podSelector: {}}]}"), [false, false], "not a way out of the namespace");
    assert_eq!(asks("{ports: [{port: 53, protocol: UDP}]}"), [true, false]);
    assert_eq!(asks("{to: [{ipBlock: {cidr: 10.96.0.10/32}}], ports: [{port: 53, protocol: UDP}, {port: 53}]}"), [true, true]);
    assert_eq!(asks("{to: [{ipBlock: {cidr: bad}}], ports: [{port: 53, protocol: UDP}]}"), [false, false]);
    assert_eq!(asks(&format!("{{to: [{{{kube_dns}}}]}}")), [true, true]);
    assert_eq!(asks(&format!("{{to: [{{{kube_dns}}}], ports: [{{port: dns, protocol: UDP}}]}}")), [true, false]);
    assert_eq!(asks(&format!("{{to: [{{{kube_dns}}}], ports: [{{port: 443}}]}}")), [false, false]);
    // The server's address opens nothing else of the node.
    let rule = format!("{{podSelector: {{}}, policyTypes: [Egress], egress: [{{to: [{{{kube_dns}}}]}}]}}");
    check(&world(&[("x", "eg", &rule)]), &[], &[format!("{XA}>{DNS_SERVER}:54"), format!("{XA}>{DNS_SERVER}:53/sctp")]);
}

#[test]
fn pods_that_come_and_go_are_elements_and_equal_lists_share_a_chain() {
    let two = [
        ("x", "deny", "{podSelector: {}}"),
        ("x", "some", "{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}], ports: [{port: 80}]}]}"),
    ];
    let all = world(&two);
    let fewer = World { pods: all.pods[1..].to_vec(), ..all.clone() };
    let of = |world: &World| part::part(&model(world).0, Family::Ip, "t", "b0");
    assert_eq!(of(&all).chains.len(), 2, "forward, and one for both pods");
    let changes = between(&of(&fewer), &of(&all));
    assert!(changes.keeps_structure() && !changes.is_empty());
    assert!(between(&of(&all), &of(&all.clone())).is_empty());
    // Names that no chain may have.
    let odd = World { policies: [policy("x", "\"a b\\n;{}\"", "{podSelector: {}}")].into(), ..all };
    let part = of(&odd);
    let plain = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    assert!(part.chains.keys().chain(part.sets.keys()).all(|name| plain(name) && name.starts_with(part::PREFIX)));
}

#[test]
fn only_what_may_end_a_flow_counts_as_tighter() {
    let spec = |rule: &str| format!("{{podSelector: {{}}, ingress: [{rule}]}}");
    let of = |spec: &str| world(&[("x", "p", spec)]);
    let tighter = |a: &World, b: &World| may_tighten(&model(a).0, &model(b).0);
    let (none, all) = (world(&[]), of(&spec("{}")));
    let some = of(&spec("{from: [{namespaceSelector: {}}]}"));
    assert!(tighter(&none, &all), "connections of another policy's time are looked at");
    assert!(!tighter(&all, &none) && !tighter(&some, &some.clone()));
    assert!(tighter(&all, &some) && !tighter(&some, &all));
    let fewer = World { pods: some.pods[..2].to_vec(), ..some.clone() };
    assert!(tighter(&some, &fewer) && !tighter(&fewer, &some), "a peer went, a peer came");
}

#[test]
fn policies_are_told_in_words() {
    let world = world(&[(
        "x",
        "p",
        "{podSelector: {}, policyTypes: [Ingress, Egress], ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}, {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}], ports: [{port: 80, endPort: 90}, {protocol: UDP}]}, {from: [{namespaceSelector: {matchExpressions: [{key: a, operator: NotIn, values: [b, c]}]}}]}]}",
    )]);
    let [ingress, egress] = words::isolation(&world, &world.pods[0]);
    let told: Vec<&str> = ingress.allows.iter().map(|a| a.words.as_str()).collect();
    assert_eq!(
        told,
        [
            "from pods pod=b of its namespace, or 10.0.0.0/8 except 10.1.0.0/16: TCP 80-90, every UDP port",
            "from pods of namespaces a not in (b,c): every port"
        ]
    );
    assert_eq!((egress.policies, egress.allows), (vec!["x/p".to_owned()], vec![]));
    assert!(words::isolation(&world, &world.pods[3]).iter().all(|i| i.policies.is_empty()), "hostNetwork");
}

#[test]
fn ten_thousand_blocks_ports_and_peers_are_read_in_a_moment() {
    let blocks: Vec<String> =
        (0..10_000u32).map(|n| format!("{{ipBlock: {{cidr: 10.{}.{}.0/23}}}}", n / 250 % 250, n % 250)).collect();
    let ports: Vec<String> = (0..10_000u32).map(|n| format!("{{port: {}, endPort: {}}}", 1 + n * 6, 4 + n * 6)).collect();
    let spec = format!(
        "{{podSelector: {{}}, egress: [{{to: [{}, {{namespaceSelector: {{}}}}], ports: [{{port: web}}, {}]}}]}}",
        blocks.join(", "),
        ports.join(", ")
    );
    let mut world = world(&[("x", "large", &spec)]);
    let peer = |n: u32| Peer { addresses: vec![[11, (n >> 16) as u8, (n >> 8) as u8, n as u8].into()], ..world.peers[0].clone() };
    world.peers = (0..10_000).map(peer).collect::<Vec<_>>().into();
    // A square of 10,000 would take minutes: the run of the tests would show it.
    let (model, skipped) = model(&world);
    let part = part::part(&model, Family::Ip, "t", "b0");
    assert!(skipped.is_empty() && part.elements.values().map(|e| e.len()).sum::<usize>() > 20_000);
    assert!(passes(&model, &format!("{XA}>11.0.39.15:8100")) && passes(&model, &format!("{XA}>10.3.7.9:1")));
    assert!(!passes(&model, &format!("{XA}>12.0.0.1:1")) && !passes(&model, &format!("{XA}>10.3.7.9:6")));
}
