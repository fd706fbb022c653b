//! Connection tracking: the flows that a filter names go, by one message and by the list that
//! older kernels need, and no other does.

use std::collections::BTreeSet;
use std::net::{IpAddr, UdpSocket};

use std::sync::Arc;

use coracle::proxy::conntrack::{Stale, To, forget};
use coracle::proxy::model::{Endpoint, L4, NodeFacts, ServicePort, ServicePortName};
use coracle::proxy::{Proxy, ProxyConfig, ServiceChange};
use coracle::store::effects::Effects;
use coracle::sys::conntrack::{self, Filter};
use coracle::sys::{clock, netns};

use crate::nft::{Nft, able};

/// UDP flows to this host's own addresses, some of them translated.
const RULES: &str = "table ip n { chain o { type nat hook output priority -100 ; \
    ip daddr 10.96.0.10 udp dport 53 dnat to 127.0.0.1:5301 ; \
    ip daddr 10.96.0.11 udp dport 53 dnat to 127.0.0.2:5301 ; } ; }
table ip6 n { chain o { type nat hook output priority -100 ; ip6 daddr fd96::a udp dport 53 dnat to [::1]:5301 ; } ; }";

fn send(to: &[&str]) -> Vec<UdpSocket> {
    to.iter()
        .map(|to| {
            let socket = UdpSocket::bind(if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" }).unwrap();
            socket.send_to(b"?", to).unwrap();
            socket
        })
        .collect()
}

/// Where flows lead: original destination and who answers.
fn flows() -> BTreeSet<String> {
    let all = std::cell::RefCell::new(BTreeSet::new());
    for family in [2, 10] {
        let note = |flow: &conntrack::Flow| {
            let (to, from) = (flow.original, flow.reply);
            all.borrow_mut().insert(format!("{}:{} {}", to.destination, to.destination_port, from.source));
            false
        };
        assert_eq!(conntrack::forget_where(&mut conntrack::open().unwrap(), family, note).unwrap(), 0);
    }
    all.into_inner()
}

fn in_a_world<T: Send>(check: impl FnOnce() -> T + Send) -> T {
    netns::throw_away(|| {
        let ip = |args: &str| {
            let out = std::process::Command::new("ip").args(args.split(' ')).output().unwrap();
            assert!(out.status.success(), "ip {args}: {out:?}");
        };
        ip("link set lo up");
        ip("addr add 192.0.2.1/32 dev lo");
        ip("addr add 192.0.2.2/32 dev lo");
        ip("route add 10.96.0.0/24 dev lo");
        ip("addr add fd96::b/128 dev lo nodad");
        ip("-6 route add fd96::/64 dev lo");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), RULES).unwrap();
        Nft::host().must(&["-f", file.path().to_str().unwrap()]);
        check()
    })
    .unwrap()
}

const ALL: [&str; 7] =
    ["10.96.0.10:53", "10.96.0.11:53", "192.0.2.1:30053", "192.0.2.2:30053", "192.0.2.1:53", "[fd96::a]:53", "[fd96::b]:53"];

/// A new IPv6 address may need a moment.
fn send_all() -> Vec<UdpSocket> {
    let mut sockets = send(&ALL);
    for _ in 0..100 {
        let flows = flows();
        if flows.len() == ALL.len() {
            return sockets;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        sockets.extend(send(&ALL));
    }
    panic!("never all flows: {:?}", flows())
}

fn gone(stale: &[Stale]) -> Vec<String> {
    in_a_world(|| {
        let _sockets = send_all();
        let before = flows();
        let own: Vec<IpAddr> = vec!["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()];
        forget(&stale.iter().copied().collect(), &own).unwrap();
        before.difference(&flows()).cloned().collect()
    })
}

#[test]
fn flows_of_an_endpoint_that_is_gone_are_forgotten_and_no_others() {
    if !able() {
        return;
    }
    let to = |to: &str, port, answering: Option<(&str, u16)>| Stale {
        to: To::Address(to.parse().unwrap()),
        protocol: L4::Udp,
        port,
        answering: answering.map(|(ip, port)| (ip.parse().unwrap(), port)),
    };
    assert_eq!(gone(&[to("10.96.0.10", 53, Some(("127.0.0.1", 5301)))]), ["10.96.0.10:53 127.0.0.1"]);
    assert_eq!(gone(&[to("10.96.0.10", 53, Some(("127.0.0.9", 5301)))]), [""; 0]);
    assert_eq!(gone(&[to("10.96.0.10", 53, Some(("127.0.0.1", 5302)))]), [""; 0]);
    assert_eq!(gone(&[to("10.96.0.11", 53, None)]), ["10.96.0.11:53 127.0.0.2"]);
    assert_eq!(gone(&[to("fd96::a", 53, None)]), ["fd96::a:53 ::1"]);
    // A port of the node is that of each of its addresses.
    let node = Stale { to: To::Node { v4: true }, protocol: L4::Udp, port: 30053, answering: None };
    assert_eq!(gone(&[node]), ["192.0.2.1:30053 192.0.2.1", "192.0.2.2:30053 192.0.2.2"]);
    // So many that they are matched on one list.
    let many: Vec<Stale> = (0..20).map(|n| to("10.96.0.10", 100 + n, None)).chain([to("10.96.0.10", 53, None)]).collect();
    assert_eq!(gone(&many), ["10.96.0.10:53 127.0.0.1"]);
}

#[test]
fn the_kernels_filter_and_our_list_forget_the_same_flows() {
    if !able() {
        return;
    }
    let ip = |text: &str| Some(text.parse::<IpAddr>().unwrap());
    let none = Filter::default();
    for filter in [
        Filter { answering: ip("127.0.0.1"), ..none },
        Filter { answering: ip("127.0.0.2"), protocol: Some(17), answering_port: Some(5301), ..none },
        Filter { destination: ip("192.0.2.1"), ..none },
        Filter { destination: ip("192.0.2.1"), protocol: Some(17), destination_port: Some(53), ..none },
        Filter { destination: ip("192.0.2.1"), protocol: Some(6), ..none },
        Filter { answering: ip("::1"), ..none },
    ] {
        let left = |forget: &(dyn Fn(&mut coracle::sys::netlink::Socket) + Sync)| {
            in_a_world(|| {
                let _sockets = send_all();
                forget(&mut conntrack::open().unwrap());
                flows()
            })
        };
        let by_filter = left(&|socket| {
            conntrack::forget(socket, &[filter]).unwrap();
        });
        let by_list = left(&|socket| {
            for family in [2, 10] {
                conntrack::forget_where(socket, family, |flow| filter.matches(flow)).unwrap();
            }
        });
        assert_eq!(by_filter, by_list, "{filter:?}");
    }
    // Without an address a filter names nothing: above all not everything.
    in_a_world(|| {
        let _sockets = send_all();
        conntrack::forget(&mut conntrack::open().unwrap(), &[none, Filter { protocol: Some(17), ..none }]).unwrap();
        assert_eq!(flows().len(), ALL.len());
        let pod = Filter { answering: ip("127.0.0.1"), ..none };
        conntrack::forget(&mut conntrack::open().unwrap(), &[pod]).unwrap();
        assert_eq!(flows().len(), ALL.len() - 1);
    });
}

fn served_by(end: &str) -> ServiceChange {
    let come = ServicePort {
        name: ServicePortName { namespace: "shop".into(), service: "names".into(), port: "dns".into() },
        protocol: L4::Udp,
        port: 53,
        cluster_ip: Some("10.96.0.12".parse().unwrap()),
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        node_port: None,
        internal_local: false,
        external_local: false,
        affinity: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        cluster: vec![Endpoint { ip: end.parse().unwrap(), port: 5301, local: false }],
        local: Vec::new(),
        has_any: true,
    };
    ServiceChange { gone: Vec::new(), come: vec![come] }
}

#[test]
fn what_changed_while_no_agent_ran_is_forgotten_at_the_next_ones_first_word() {
    if !able() {
        return;
    }
    in_a_world(|| {
        let others = send_all();
        let dir = tempfile::tempdir().unwrap();
        // Killed: nothing is taken back.
        let agent = |end: &str| {
            let (effects, _) = Effects::open(dir.path(), &clock::boot_id().unwrap()).unwrap();
            let pod_cidrs = vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()];
            let node = NodeFacts { pod_cidrs, bridge: "prx0".into(), ..NodeFacts::default() };
            let config = ProxyConfig { table: "prx".into(), node, service_cidrs: Vec::new() };
            let proxy = Proxy::open(config, Arc::new(effects)).unwrap();
            proxy.change_services(served_by(end), ServiceChange::default()).unwrap();
        };
        let led = || {
            let all = flows();
            assert_eq!(all.iter().filter(|f| !f.starts_with("10.96.0.12")).count(), ALL.len(), "others' stay: {all:?}");
            all.into_iter().filter(|f| f.starts_with("10.96.0.12")).collect::<Vec<_>>()
        };
        agent("127.0.0.1");
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        let send = || assert_eq!(socket.send_to(b"?", "10.96.0.12:53").unwrap(), 1);
        send();
        assert_eq!(led(), ["10.96.0.12:53 127.0.0.1"]);
        agent("127.0.0.1");
        assert_eq!(led(), ["10.96.0.12:53 127.0.0.1"], "nothing has changed");
        agent("127.0.0.2");
        assert_eq!(led(), [""; 0]);
        send();
        assert_eq!(led(), ["10.96.0.12:53 127.0.0.2"]);
        // Begun while the table was not there.
        Nft::host().must(&["delete", "table", "ip", "prx"]);
        let early = UdpSocket::bind("0.0.0.0:0").unwrap();
        early.send_to(b"?", "10.96.0.12:53").unwrap();
        assert_eq!(led(), ["10.96.0.12:53 10.96.0.12", "10.96.0.12:53 127.0.0.2"]);
        agent("127.0.0.2");
        assert_eq!(led(), ["10.96.0.12:53 127.0.0.2"]);
        drop(others);
    });
}
