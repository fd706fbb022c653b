//! A table with every kind of set and every step that the IR knows.

use std::net::IpAddr;
use std::time::Duration;

use coracle::proxy::table::ir::*;

pub const NAME: &str = "prx";

pub fn address(family: Family, n: u16) -> IpAddr {
    match family {
        Family::Ip => IpAddr::from([10, 1, (n >> 8) as u8, n as u8]),
        Family::Ip6 => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]),
    }
}

fn cidr(family: Family, v4: &str, v6: &str) -> Cidr {
    if family == Family::Ip { v4 } else { v6 }.parse().unwrap()
}

fn name(text: &str) -> Name {
    text.into()
}

pub fn service(family: Family, n: u16) -> Key {
    Key::of(&[Value::Address(address(family, n)), Value::Protocol(6), Value::Port(80)])
}

pub fn endpoint(family: Family, n: u16, index: u32) -> (Key, Element) {
    let key = Key::of(&[Value::Address(address(family, n)), Value::Protocol(6), Value::Port(80), Value::Index(index)]);
    (key, Element::values(&[Value::Address(address(family, 1000 + n + index as u16)), Value::Port(8080)]))
}

pub fn table(family: Family) -> Table {
    use Type::{Address, Index, Port, Protocol};
    let mut table = Table::new(family, NAME);
    let mut set = |set: &str, spec: SetSpec, elements: Vec<(Key, Element)>| {
        table.sets.insert(name(set), spec);
        if !elements.is_empty() {
            table.elements.insert(name(set), elements.into_iter().collect());
        }
    };
    let ip = |n| Value::Address(address(family, n));
    let comment: std::sync::Arc<str> = "shop/web:http".into();
    let to_lb = Element::verdict(Verdict::Goto(name("lb-2"))).with(&comment);
    set(
        "svc",
        SetSpec::verdict_map(&[Address, Protocol, Port]),
        vec![
            (service(family, 1), to_lb),
            (service(family, 2), Element::verdict(Verdict::Jump(name("lb-1")))),
            (service(family, 3), Element::verdict(Verdict::Drop)),
            (service(family, 4), Element::verdict(Verdict::Accept)),
            (service(family, 5), Element::verdict(Verdict::Return)),
        ],
    );
    let endpoints = [(1, 0), (1, 1), (2, 0), (1, 70_000)].map(|(n, index)| endpoint(family, n, index));
    set("eps", SetSpec::map(&[Address, Protocol, Port, Index], &[Address, Port]), endpoints.to_vec());
    set("hairpin", SetSpec::set(&[Address, Address]), vec![(Key::of(&[ip(7), ip(7)]), Element::bare())]);
    set("known", SetSpec::set(&[Address]), vec![(Key::of(&[ip(8)]), Element::bare().with(&comment))]);
    set("ports", SetSpec::verdict_map(&[Port]), vec![(Key::of(&[Value::Port(53)]), Element::verdict(Verdict::Accept))]);
    set("protocols", SetSpec::set(&[Protocol]), vec![(Key::of(&[Value::Protocol(132)]), Element::bare())]);
    let range = |a: u16, b: u16| (Key::range(&[ip(a)], &[ip(b)]), Element::bare());
    let (all_ones, low) = match family {
        Family::Ip => (IpAddr::from([255; 4]), IpAddr::from([255, 255, 0, 0])),
        Family::Ip6 => (IpAddr::from([0xffff; 8]), IpAddr::from([0xff00, 0, 0, 0, 0, 0, 0, 0])),
    };
    let last = Key::range(&[Value::Address(low)], &[Value::Address(all_ones)]);
    set(
        "cidrs",
        SetSpec::set(&[Address]).of_ranges(),
        vec![range(16, 31), range(32, 32), range(64, 127), (last, Element::bare())],
    );
    let ports = |a, b| (Key::range(&[Value::Port(a)], &[Value::Port(b)]), Element::verdict(Verdict::Jump(name("lb-1"))));
    set("port-ranges", SetSpec::verdict_map(&[Port]).of_ranges(), vec![ports(80, 90), ports(91, 91), ports(65_000, 65_535)]);
    let sources = |a, b, p, q| {
        let key = |address, port| vec![ip(1), Value::Protocol(6), Value::Port(port), ip(address)];
        (Key::range(&key(a, p), &key(b, q)), Element::bare().with(&comment))
    };
    set(
        "fw",
        SetSpec::set(&[Address, Protocol, Port, Address]).of_ranges(),
        vec![sources(16, 31, 80, 80), sources(64, 100, 80, 90)],
    );
    let dynamic = Dynamic { timeout: Duration::from_secs(10_800), size: 1000 };
    set("affinity", SetSpec::set(&[Address, Port]).of_rules(dynamic), vec![]);

    let destination = vec![Field::Destination, Field::Protocol, Field::DestinationPort];
    let random = |modulus, offset| {
        let mut key = destination.clone();
        key.push(Field::Random { modulus, offset });
        key
    };
    let verdict = |v| Step::Verdict(v);
    let mut chain = |chain: &str, base: Option<(ChainType, Hook, i32)>, rules: Vec<Vec<Step>>| {
        let base = base.map(|(kind, hook, priority)| Base { kind, hook, priority });
        let rules = rules.into_iter().map(|steps| Rule::new("what it is for", steps)).collect();
        table.chains.insert(name(chain), Chain { base, rules });
    };
    chain("lb-1", None, vec![vec![Step::DnatMap { key: random(1, 0), map: name("eps") }]]);
    chain(
        "lb-2",
        None,
        vec![
            vec![Step::DnatMap { key: random(2, 0), map: name("eps") }],
            vec![Step::DnatMap { key: random(3, 1 << 24), map: name("eps") }],
            vec![Step::Protocol { number: 6, not: false }, Step::Dnat { address: address(family, 9), port: 8080 }],
        ],
    );
    let affinity = || vec![Field::Source, Field::DestinationPort];
    chain(
        "services",
        None,
        vec![
            vec![Step::DestinationIn { cidr: cidr(family, "127.0.0.0/8", "::1/128"), not: false }, verdict(Verdict::Return)],
            vec![Step::VerdictMap { key: destination.clone(), map: name("svc") }],
            vec![Step::VerdictMap { key: vec![Field::SourcePort], map: name("ports") }],
            vec![Step::VerdictMap { key: vec![Field::DestinationPort], map: name("port-ranges") }],
            vec![Step::Delete { key: affinity(), set: name("affinity") }],
            vec![Step::Update { key: affinity(), set: name("affinity") }],
            vec![Step::InSet { key: affinity(), set: name("affinity"), not: false }, Step::MarkOr { bits: 0x4000 }],
        ],
    );
    use ChainType::{Filter, Nat, Route};
    use Hook::{Forward, Input, Output, Postrouting, Prerouting};
    let local = vec![Step::DestinationIsLocal { not: false }, verdict(Verdict::Jump(name("services")))];
    chain("prerouting", Some((Nat, Prerouting, -100)), vec![local.clone()]);
    chain("output", Some((Nat, Output, -100)), vec![local]);
    chain("mangle", Some((Route, Output, -150)), vec![vec![Step::MarkXor { bits: 0x4000 }]]);
    chain("raw", Some((Filter, Prerouting, -300)), vec![vec![Step::SourceIsLocal { not: true }, verdict(Verdict::Return)]]);
    chain(
        "postrouting",
        Some((Nat, Postrouting, 100)),
        vec![
            vec![
                Step::MarkHas { bits: 0x4000, not: false },
                Step::MarkXor { bits: 0x4000 },
                Step::Masquerade { fully_random: true },
            ],
            vec![
                Step::CtStatusDnat { not: false },
                Step::InSet { key: vec![Field::Source, Field::Destination], set: name("hairpin"), not: false },
                Step::Masquerade { fully_random: false },
            ],
            vec![
                Step::SourceIn { cidr: cidr(family, "10.88.0.0/23", "fd88::/63"), not: false },
                Step::DestinationIn { cidr: cidr(family, "10.88.0.0/24", "fd88::/64"), not: true },
                Step::OutInterface { name: name("coracle0"), not: true },
                Step::Masquerade { fully_random: false },
            ],
            vec![Step::CtStatusDnat { not: true }, verdict(Verdict::Accept)],
        ],
    );
    chain(
        "input",
        Some((Filter, Input, 0)),
        vec![
            vec![Step::InInterface { name: name("lo"), not: false }, verdict(Verdict::Accept)],
            vec![Step::InInterface { name: name("coracle0"), not: true }, verdict(Verdict::Return)],
        ],
    );
    let none = CtStates::default();
    chain(
        "forward",
        Some((Filter, Forward, 0)),
        vec![
            vec![Step::CtState { states: CtStates::KNOWN, not: false }, verdict(Verdict::Accept)],
            vec![Step::CtState { states: CtStates::NEW, not: true }, verdict(Verdict::Return)],
            vec![Step::CtState { states: CtStates::INVALID, not: false }, verdict(Verdict::Drop)],
            vec![Step::CtState { states: CtStates { new: true, untracked: true, ..none }, not: true }, verdict(Verdict::Drop)],
            vec![Step::InSet { key: vec![Field::Source], set: name("cidrs"), not: false }, verdict(Verdict::Accept)],
            vec![Step::InSet { key: vec![Field::Source], set: name("known"), not: true }, verdict(Verdict::Accept)],
            vec![Step::InSet { key: vec![Field::Protocol], set: name("protocols"), not: false }, verdict(Verdict::Accept)],
            vec![Step::InSet { key: vec![Field::OriginalDestination], set: name("known"), not: false }, verdict(Verdict::Accept)],
            vec![Step::SourceIn { cidr: cidr(family, "0.0.0.0/0", "::/0"), not: false }, verdict(Verdict::Accept)],
            vec![Step::DestinationIn { cidr: cidr(family, "10.1.0.0/32", "fd00::1/128"), not: true }, verdict(Verdict::Accept)],
            vec![Step::Protocol { number: 6, not: false }, Step::Reject(Reject::TcpReset)],
            vec![Step::Protocol { number: 17, not: true }, Step::Reject(Reject::PortUnreachable)],
            vec![Step::DestinationPorts { first: 80, last: 80, not: false }, Step::Reject(Reject::AdminProhibited)],
            vec![Step::DestinationPorts { first: 80, last: 90, not: false }, verdict(Verdict::Drop)],
            vec![Step::DestinationPorts { first: 80, last: 90, not: true }, verdict(Verdict::Drop)],
            vec![Step::DestinationPorts { first: 80, last: 80, not: true }, verdict(Verdict::Drop)],
            vec![Step::Protocol { number: 6, not: false }, Step::TcpOpens { not: true }, verdict(Verdict::Drop)],
            vec![
                Step::InSet {
                    key: vec![Field::Destination, Field::Protocol, Field::DestinationPort, Field::Source],
                    set: name("fw"),
                    not: true,
                },
                verdict(Verdict::Drop),
            ],
            vec![Step::MarkHas { bits: 0x4000, not: true }, verdict(Verdict::Goto(name("empty")))],
        ],
    );
    chain("empty", None, vec![]);
    table
}
