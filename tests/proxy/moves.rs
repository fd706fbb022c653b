//! The node's addresses change under the proxy: a lease that is renewed with another address.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::proxy::mode::Mode;
use coracle::proxy::model::NodeFacts;
use coracle::proxy::{Options, Proxy, ProxyConfig};
use coracle::store::effects::Effects;
use coracle::sys::{clock, netns};

use crate::nft::{Nft, able};

fn ip(line: &str) {
    let out = Command::new("ip").args(line.split(' ')).output().unwrap();
    assert!(out.status.success(), "ip {line}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Waits until the set of addresses that take NodePorts holds one of these, and no other.
fn wait_for(address: Option<&str>) {
    let limit = Instant::now() + Duration::from_secs(5);
    loop {
        let set = Nft::host().must(&["list", "set", "ip", "prx", "nodeport-ips"]);
        let holds = |ip: &str| set.contains(ip);
        let all = ["203.0.113.9", "198.51.100.3"];
        if all.iter().all(|ip| holds(ip) == (Some(*ip) == address)) {
            return;
        }
        assert!(Instant::now() < limit, "not {address:?}: {set}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn node_ports_follow_the_address_of_the_default_route() {
    if !able() {
        return;
    }
    netns::throw_away(|| {
        let dir = tempfile::tempdir().unwrap();
        let (effects, _) = Effects::open(dir.path(), &clock::boot_id().unwrap()).unwrap();
        let node = NodeFacts { pod_cidrs: vec!["10.88.0.0/24".parse().unwrap()], bridge: "prx0".into(), ..NodeFacts::default() };
        let config = ProxyConfig { table: "prx".into(), node, service_cidrs: Vec::new() };
        let options = Options { mode: Mode::On, follow: Some(Vec::new()), conntrack: None };
        let proxy = Proxy::open_with(config, options, Arc::new(effects)).unwrap();
        // Started before there is any network.
        proxy.ensure().unwrap();
        wait_for(None);
        for line in ["link add up0 type bridge", "link set up0 up", "addr add 203.0.113.9/24 dev up0"] {
            ip(line);
        }
        ip("route add default via 203.0.113.1");
        wait_for(Some("203.0.113.9"));
        // Another lease, of another network.
        ip("addr del 203.0.113.9/24 dev up0");
        wait_for(None);
        ip("addr add 198.51.100.3/24 dev up0");
        ip("route add default via 198.51.100.1");
        wait_for(Some("198.51.100.3"));
        // An address beside it changes nothing.
        let generation = || coracle::sys::nftables::generation(&mut coracle::sys::nftables::open().unwrap()).unwrap();
        let before = generation();
        ip("addr add 203.0.113.9/24 dev up0");
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(generation(), before);
        proxy.remove_all().unwrap();
    })
    .unwrap();
}
