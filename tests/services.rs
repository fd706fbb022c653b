//! Services as the shipped agent serves them from manifests: packets that are really sent, from pod,
//! node, other pod and outside, of both families. One agent and a few pods serve all rows; a row is
//! a case of Kubernetes' e2e suite, by its title, or a row of kube-proxy's features.
//!
//! `CORACLE_ROW=text` runs only the rows whose title has that text.
//!
//! What one node alone cannot show, of the titles in [sig-network]:
//! - should provide secure master service; find a service from listing all namespaces; complete a
//!   service status lifecycle; delete a collection of services; test the lifecycle of an Endpoint;
//!   EndpointSlice and EndpointSliceMirroring; Proxy version v1: an API server's;
//! - Service endpoints latency should not be very high: tests/churn.rs measures it;
//! - Traffic Distribution … in the same zone, pods on multiple nodes: a node alone has no zone and no
//!   other nodes (hints that name the node are below);
//! - LoadBalancers …: what makes a balancer's address is a cloud's; what a node does with one is below;
//! - HealthCheckNodePort, KubeProxy's own ports: where the proxy's servers are tested;
//! - [Feature:KubeProxyNFAcct]: of iptables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/ns.rs"]
#[allow(dead_code)]
mod ns;
#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

#[path = "services/affinity.rs"]
mod affinity;
#[path = "services/change.rs"]
mod change;
#[path = "services/hosts.rs"]
mod hosts;
#[path = "services/reach.rs"]
mod reach;
#[path = "services/safety.rs"]
mod safety;
#[path = "services/traffic.rs"]
mod traffic;
#[path = "services/udp.rs"]
mod udp;
#[path = "services/world.rs"]
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use world::World;

/// Title and what shows it; some show several titles.
pub type Row = (&'static str, Show);
type Show = fn(&World);

#[test]
fn every_row_of_kube_proxys_features_and_of_the_e2e_suite() {
    if !support::privileged() {
        return;
    }
    let only = std::env::var("CORACLE_ROW").unwrap_or_default();
    let all = [reach::ROWS, change::ROWS, affinity::ROWS, traffic::ROWS, udp::ROWS, hosts::ROWS];
    let world = World::new();
    let (mut failed, mut shown): (Vec<&str>, Vec<(Show, bool)>) = (Vec::new(), Vec::new());
    for (title, show) in all.into_iter().flatten().filter(|(title, _)| title.contains(&only)) {
        let begun = Instant::now();
        let before = shown.iter().find(|(done, _)| std::ptr::fn_addr_eq(*done, *show)).map(|(_, well)| *well);
        let well = before.unwrap_or_else(|| {
            let well = catch_unwind(AssertUnwindSafe(|| show(&world))).is_ok();
            world.clear();
            shown.push((*show, well));
            well
        });
        println!("{} {title} ({:.1} s)", if well { "ok    " } else { "FAILED" }, begun.elapsed().as_secs_f32());
        if !well {
            failed.push(title);
        }
    }
    assert!(!shown.is_empty(), "no title has {only:?} in it");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}
