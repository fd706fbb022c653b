//! What planning 10,000 Services of three endpoints costs: measured, not judged.
//! `cargo test --test proxy -- --ignored --nocapture planning`.

use std::net::IpAddr;
use std::time::Instant;

use coracle::proxy::layout::{Ground, Layout};
use coracle::proxy::model::{Endpoint, NodeFacts, ServicePort, ServicePortName};
use coracle::proxy::table::ir::Family;

/// Anonymous memory of this process, kB.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find_map(|l| l.strip_prefix("RssAnon:")?.split_whitespace().next()?.parse().ok()).unwrap()
}

fn service(number: u32) -> ServicePort {
    let address = |base: u32| IpAddr::from((base + number).to_be_bytes());
    let endpoint = |k: u32| Endpoint { ip: address(0x0a80_0000 + k * 0x1_0000), port: 8080, local: false };
    ServicePort {
        name: ServicePortName { namespace: "team-a".into(), service: format!("service-{number}"), port: "http".into() },
        port: 80,
        cluster_ip: Some(address(0x0a60_0000)),
        cluster: (0..3).map(endpoint).collect(),
        has_any: true,
        ..ServicePort::default()
    }
}

#[test]
#[ignore = "a measurement: alone in its process"]
fn planning_ten_thousand_services() {
    let node = NodeFacts { bridge: "b0".into(), ..NodeFacts::default() };
    let (begun, before) = (Instant::now(), memory());
    let mut layout = Layout::new(Ground::of(Family::Ip, "t", &node, &[], true));
    layout.load((0..10_000).map(service));
    let (loaded, wanted) = (begun.elapsed(), memory() - before);
    let table = layout.table();
    let (planned, all) = (begun.elapsed(), memory() - before);
    let mut changes: Vec<_> = (0..200)
        .map(|n| {
            let other = ServicePort { cluster: service(20_000 + n).cluster, ..service(n) };
            let begun = Instant::now();
            let changes = layout.change([], [other]);
            assert_eq!(changes.element_count(), 3);
            begun.elapsed()
        })
        .collect();
    changes.sort();
    assert_eq!(table.elements.values().map(|e| e.len()).sum::<usize>(), 50_000);
    println!(
        "wanted: {wanted} kB after {loaded:?}; with the whole table: {all} kB after {planned:?}; one change: {:?}",
        changes[100]
    );
}
