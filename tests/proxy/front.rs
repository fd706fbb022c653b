//! The front door: Services and pods asked for, the agent gone and back, tables edited by others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::proxy::model::{Endpoint, HostPortWant, L4, NodeFacts, ServicePort, ServicePortName};
use coracle::proxy::{PodPorts, Proxy, ProxyConfig, ServiceChange};
use coracle::store::effects::Effects;
use coracle::sys::{clock, netns, nftables};

use crate::nft::{Nft, able};
use crate::print::sorted;

const TABLE: &str = "prx";

struct Room {
    dir: tempfile::TempDir,
}

impl Room {
    fn new() -> Room {
        Room { dir: tempfile::tempdir().unwrap() }
    }

    /// As an agent opens it that has just been started.
    fn proxy(&self) -> Proxy {
        let (effects, _) = Effects::open(self.dir.path(), &clock::boot_id().unwrap()).unwrap();
        let node = NodeFacts {
            addresses: vec!["192.0.2.1".parse().unwrap()],
            pod_cidrs: vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()],
            bridge: "prx0".into(),
            ..NodeFacts::default()
        };
        let service_cidrs = vec!["10.96.0.0/16".parse().unwrap()];
        Proxy::open(ProxyConfig { table: TABLE.into(), node, service_cidrs }, Arc::new(effects)).unwrap()
    }
}

fn service(n: u8, endpoints: u8) -> ServicePort {
    let end = |i| Endpoint { ip: [10, 88, n, i].into(), port: 8080, local: true };
    ServicePort {
        name: ServicePortName { namespace: "shop".into(), service: format!("web-{n}"), port: "http".into() },
        port: 80,
        cluster_ip: Some([10, 96, 0, n].into()),
        cluster: (0..endpoints).map(end).collect(),
        has_any: endpoints > 0,
        ..ServicePort::default()
    }
}

fn come(services: Vec<ServicePort>) -> ServiceChange {
    ServiceChange { gone: Vec::new(), come: services }
}

fn pod(ip: u8, host_port: u16) -> PodPorts {
    let want = HostPortWant {
        pod: format!("shop/pod-{ip}"),
        protocol: L4::Tcp,
        host_ip: None,
        host_port,
        ip: [10, 88, 0, ip].into(),
        port: 80,
    };
    PodPorts { addresses: vec![want.ip], host_ports: vec![want] }
}

fn ruleset() -> Vec<String> {
    sorted(&Nft::host().must(&["list", "ruleset"]))
}

fn has(line: &str) -> bool {
    Nft::host().must(&["list", "ruleset"]).contains(line)
}

/// Whether the Service is among those of so many endpoints.
fn has_endpoints(n: u8, endpoints: &str) -> bool {
    let text = Nft::host().must(&["list", "ruleset"]);
    let (_, set) = text.split_once(&format!("set lb-{endpoints} {{")).unwrap_or_default();
    let set = set.split("\n\t}").next().unwrap_or_default();
    set.contains(&format!("10.96.0.{n} . tcp . 80 comment \"shop/web-{n}:http\""))
}

#[test]
fn services_of_an_earlier_agent_stay_until_somebody_says_which_there_are() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        let room = Room::new();
        let first = room.proxy();
        first.change_services(come(vec![service(1, 2), service(2, 3)]), come(vec![])).unwrap();
        first.set_pod("a", pod(5, 8080)).unwrap();
        let whole = ruleset();
        assert!(has_endpoints(1, "2"), "{whole:?}");
        drop(first);
        assert_eq!(ruleset(), whole, "the table stays");
        let generation = || nftables::generation(&mut nftables::open().unwrap()).unwrap();
        let before = generation();
        let second = room.proxy();
        second.know_pods(BTreeMap::from([("a".to_owned(), pod(5, 8080))])).unwrap();
        second.ensure().unwrap();
        assert_eq!(generation(), before, "nothing differs, nothing is written");
        // A pod comes before the Services are known.
        second.set_pod("b", pod(6, 9090)).unwrap();
        assert!(has("tcp . 9090 comment \"shop/pod-6\" : 10.88.0.6 . 80"));
        assert!(has_endpoints(2, "3"));
        second.remove_pod("b").unwrap();
        assert_eq!(ruleset(), whole);
        // One of them is there no more.
        second.change_services(come(vec![service(1, 2)]), come(vec![])).unwrap();
        assert!(has_endpoints(1, "2"));
        assert!(!has("10.96.0.2 ") && !has("chain lb-3"));
        // Changes from here on are changes only.
        second.change_services(come(vec![service(1, 1), service(3, 0)]), come(vec![])).unwrap();
        assert!(has_endpoints(1, "1") && !has("chain lb-2"));
        let gone = ServiceChange { gone: vec![service(3, 0).name, service(1, 1).name], come: Vec::new() };
        second.change_services(gone, come(vec![])).unwrap();
        assert!(!has("10.96.0.3") && !has("chain lb-1") && has("tcp . 8080 comment \"shop/pod-5\""));
        let empty = ruleset();
        second.ensure().unwrap();
        assert_eq!(ruleset(), empty, "the changes led to what the whole table would be");
        second.remove_all().unwrap();
        assert_eq!(ruleset(), [""; 0]);
    })
    .unwrap();
}

/// What an earlier coracle laid out: an element of one map led each Service to its chain.
const EARLIER: &str = "table ip prx {
    map svc { type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.1 . tcp . 80 : goto lb-2, 10.96.0.2 . tcp . 80 : goto lb-3 } }
    map eps { typeof ip daddr . meta l4proto . th dport . numgen random mod 2 : ip daddr . th dport
        elements = { 10.96.0.1 . tcp . 80 . 0 : 10.88.1.0 . 8080, 10.96.0.1 . tcp . 80 . 1 : 10.88.1.1 . 8080 } }
    map nodeports { type inet_proto . inet_service : verdict
        elements = { tcp . 30001 : goto lb-2 } }
    map noep { type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.9 . tcp . 80 : goto no-endpoint } }
    chain lb-2 { dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 2 map @eps; }
    chain lb-3 { dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 3 map @eps; }
    chain no-endpoint { reject; }
    chain services {
        ip daddr . meta l4proto . th dport vmap @svc
        meta l4proto . th dport vmap @nodeports; }
    chain prerouting { type nat hook prerouting priority dstnat; jump services; }
    chain forward { type filter hook forward priority filter; ct state new ip daddr . meta l4proto . th dport vmap @noep; }
}";

#[test]
fn a_table_of_an_earlier_layout_becomes_ours() {
    if !able() {
        return;
    }
    let wanted = || come(vec![service(1, 2), service(2, 3), service(3, 0), service(4, 40)]);
    let fresh = netns::throw_away(|| {
        let room = Room::new();
        let proxy = room.proxy();
        proxy.know_pods(BTreeMap::from([("a".to_owned(), pod(5, 8080))])).unwrap();
        proxy.change_services(wanted(), come(vec![])).unwrap();
        proxy.ensure().unwrap();
        ruleset()
    })
    .unwrap();
    netns::throw_away(|| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), EARLIER).unwrap();
        Nft::host().must(&["-f", file.path().to_str().unwrap()]);
        let room = Room::new();
        let proxy = room.proxy();
        proxy.know_pods(BTreeMap::from([("a".to_owned(), pod(5, 8080))])).unwrap();
        proxy.ensure().unwrap();
        proxy.change_services(wanted(), come(vec![])).unwrap();
        assert_eq!(ruleset(), fresh, "nothing of it is left");
        assert_eq!(proxy.refused(), [""; 0]);
    })
    .unwrap();
}

#[test]
fn a_pod_that_goes_makes_no_table() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        let room = Room::new();
        let proxy = room.proxy();
        proxy.know_pods(BTreeMap::from([("a".to_owned(), pod(5, 8080))])).unwrap();
        proxy.remove_pod("a").unwrap();
        assert_eq!(ruleset(), [""; 0]);
        // Where an earlier agent left one, the pod goes out of it.
        proxy.set_pod("b", pod(6, 9090)).unwrap();
        assert!(has("9090"));
        drop(proxy);
        let next = room.proxy();
        next.know_pods(BTreeMap::from([("b".to_owned(), pod(6, 9090))])).unwrap();
        next.remove_pod("b").unwrap();
        assert!(!has("9090") && has("table ip prx"));
    })
    .unwrap();
}

#[test]
fn an_edited_table_is_whole_again_within_two_seconds_whoever_goes_on_editing() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        let room = Room::new();
        let proxy = room.proxy();
        proxy.change_services(come((1..200).map(|n| service(n, 3)).collect()), come(vec![])).unwrap();
        proxy.set_pod("a", pod(5, 8080)).unwrap();
        let whole = ruleset();
        let nft = Nft::host();
        for damage in [
            "flush ruleset",
            "delete table ip6 prx",
            "flush set ip prx lb-3",
            "flush chain ip prx to-lb",
            "delete element ip prx lb-3-eps { 10.96.0.7 . tcp . 80 . 1 }",
            "add rule ip prx services drop",
            "flush map ip prx hostports",
        ] {
            nft.must(&[damage]);
            let damaged = Instant::now();
            while ruleset() != whole {
                assert!(damaged.elapsed() < Duration::from_secs(2), "{damage}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // What others have is theirs.
        nft.must(&["add", "table", "ip", "foreign"]);
        nft.must(&["add", "chain", "ip", "foreign", "c", "{ type filter hook forward priority 0 ; policy drop ; }"]);
        nft.must(&["add", "table", "ip", "kube-proxy"]);
        nft.must(&["add", "chain", "ip", "kube-proxy", "services"]);
        proxy.ensure().unwrap();
        assert!(has("table ip foreign") && has("table ip kube-proxy"));
        assert_eq!(proxy.foreign().kube_proxy.len(), 1);
        assert_eq!(proxy.lacks().len(), 1, "a chain that drops forwarded packets");
        nft.must(&["delete", "table", "ip", "foreign"]);
        proxy.ensure().unwrap();
        assert_eq!(proxy.lacks(), []);
        assert_eq!(proxy.refused(), [""; 0]);
    })
    .unwrap();
}
