//! For random histories of objects: what the cache told adds up to what a new one tells at once,
//! and both are what a plain reading of the rules gives.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::tests::node;
use super::*;
use crate::api::endpoint_slice::*;
use crate::api::pod::Protocol;
use crate::api::service::{self as api, LoadBalancerIngress, SessionAffinity, TrafficPolicy};
use crate::proxy::model::{Endpoint, L4};

#[derive(Clone, Debug)]
enum Step {
    Service(u8, Option<Box<Service>>),
    Slice(u8, Option<Box<EndpointSlice>>),
    Zone(u8),
    Tell,
}

fn name(kind: &str, number: u8) -> Name {
    Name::new("ns", &format!("{kind}{number}"))
}

fn zone(number: u8) -> String {
    ["", "a", "b"][usize::from(number % 3)].to_owned()
}

/// Few addresses and ports, so that Services meet.
fn a_service(number: u8) -> impl Strategy<Value = Service> {
    let bits = any::<u32>();
    let ports = proptest::collection::vec((0..3_u8, 80..83_i32, any::<bool>(), 30_000..30_003_i32), 0..3);
    (bits, ports).prop_map(move |(bits, ports)| {
        let on = |bit: u32| bits >> bit & 1 == 1;
        let mut s = Service::default();
        s.metadata.namespace = "ns".into();
        s.metadata.name = format!("svc{number}");
        s.metadata.creation_timestamp = on(0).then(|| format!("2026-01-0{}T00:00:00Z", 1 + (bits >> 1 & 3)));
        s.spec.kind = [
            api::ServiceType::ClusterIP,
            api::ServiceType::NodePort,
            api::ServiceType::LoadBalancer,
            api::ServiceType::ExternalName,
        ][(bits >> 3 & 3) as usize];
        let ip = bits >> 5 & 7;
        s.spec.cluster_ips = match bits >> 8 & 7 {
            0 => vec!["None".into()],
            1 => vec![],
            2 => vec![format!("fd96::{ip}")],
            3 => vec!["127.0.0.1".into()],
            4 => vec![format!("fd96::{ip}"), format!("10.96.0.{ip}")],
            _ => vec![format!("10.96.0.{ip}")],
        };
        s.spec.external_ips = (0..bits >> 11 & 3).map(|n| format!("10.96.0.{}", n + (bits >> 13 & 3))).collect();
        s.spec.internal_traffic_policy = on(15).then_some(TrafficPolicy::Local);
        s.spec.external_traffic_policy = on(16).then_some(TrafficPolicy::Local);
        s.spec.session_affinity = on(17).then_some(SessionAffinity::ClientIP);
        s.spec.health_check_node_port = if on(18) { 30_001 } else { 0 };
        if on(19) {
            s.metadata.labels.insert(api::HEADLESS.into(), String::new());
        }
        if on(20) {
            let ingress = |ip: String, mode: Option<&str>| LoadBalancerIngress {
                ip,
                ip_mode: mode.map(str::to_owned),
                ..Default::default()
            };
            s.status.load_balancer.ingress =
                vec![ingress(format!("10.96.0.{}", bits >> 21 & 3), None), ingress("203.0.113.9".into(), Some("Proxy"))];
        }
        s.spec.ports = ports
            .into_iter()
            .map(|(name, port, udp, node_port)| api::ServicePort {
                name: format!("p{name}"),
                port,
                protocol: if udp { Protocol::UDP } else { Protocol::TCP },
                node_port,
                target_port: None,
            })
            .collect();
        s
    })
}

fn a_slice(number: u8) -> impl Strategy<Value = EndpointSlice> {
    let endpoint = (1..6_u8, any::<u16>());
    let ports = proptest::collection::vec((0..3_u8, any::<bool>(), 8080..8082_i32), 0..3);
    (0..5_u8, any::<u8>(), proptest::collection::vec(endpoint, 0..5), ports).prop_map(move |(home, kind, endpoints, ports)| {
        let mut s = EndpointSlice::default();
        s.metadata.namespace = "ns".into();
        s.metadata.name = format!("slice{number}");
        if home < 4 {
            s.metadata.labels.insert(SERVICE_NAME.into(), format!("svc{home}"));
        }
        let v6 = kind & 3 == 0;
        s.address_type = if v6 { AddressType::IPv6 } else { AddressType::IPv4 };
        if kind >> 2 & 7 == 0 {
            s.address_type = AddressType::FQDN;
        }
        s.endpoints = endpoints
            .into_iter()
            .map(|(ip, bits)| {
                let on = |bit: u16| bits >> bit & 1 == 1;
                let names = |list: u16| {
                    ["a", "b"]
                        .iter()
                        .enumerate()
                        .filter(|(n, _)| list >> n & 1 == 1)
                        .map(|(_, z)| Hint { name: (*z).to_owned() })
                        .collect()
                };
                let nodes: Vec<Hint> = ["here", "there"]
                    .iter()
                    .enumerate()
                    .filter(|(n, _)| bits >> 8 >> n & 1 == 1)
                    .map(|(_, n)| Hint { name: (*n).to_owned() })
                    .collect();
                SliceEndpoint {
                    addresses: match bits >> 12 {
                        0 => vec!["127.0.0.1".into()],
                        1 => vec![],
                        2 => vec![format!("10.0.0.{ip}")],
                        _ if v6 => vec![format!("fd00::{ip}")],
                        _ => vec![format!("10.0.0.{ip}")],
                    },
                    conditions: EndpointConditions {
                        ready: [None, Some(true), Some(true), Some(false)][usize::from(bits & 3)],
                        serving: [None, Some(true), Some(true), Some(false)][usize::from(bits >> 2 & 3)],
                        terminating: Some(on(4)),
                    },
                    node_name: on(5).then(|| "here".to_owned()),
                    hints: Some(EndpointHints { for_zones: names(bits >> 6), for_nodes: nodes }),
                    ..Default::default()
                }
            })
            .collect();
        s.ports = ports
            .into_iter()
            .map(|(name, udp, port)| EndpointPort {
                name: format!("p{name}"),
                protocol: if udp { Protocol::UDP } else { Protocol::TCP },
                port: Some(port),
            })
            .collect();
        s
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_u8).prop_flat_map(|n| proptest::option::weighted(0.8, a_service(n).prop_map(Box::new)).prop_map(move |s| Step::Service(n, s))),
        4 => (0..5_u8).prop_flat_map(|n| proptest::option::weighted(0.8, a_slice(n).prop_map(Box::new)).prop_map(move |s| Step::Slice(n, s))),
        1 => any::<u8>().prop_map(Step::Zone),
        2 => Just(Step::Tell),
    ]
}

/// The rules, read plainly: every endpoint of every slice for every port, without any index.
fn plainly(port: &ServicePort, slices: &BTreeMap<u8, EndpointSlice>, here: &str) -> (Vec<Endpoint>, Vec<Endpoint>, bool) {
    let wanted = if port.cluster_ip.unwrap().is_ipv4() { AddressType::IPv4 } else { AddressType::IPv6 };
    let mut found: BTreeMap<(std::net::IpAddr, u16), Vec<&SliceEndpoint>> = BTreeMap::new();
    for slice in slices.values().filter(|s| s.service() == Some(&port.name.service) && s.address_type == wanted) {
        for p in slice.ports.iter().filter(|p| p.name == port.name.port && L4::from(p.protocol) == port.protocol) {
            for e in &slice.endpoints {
                if let Some(ip) = e.addresses.first().and_then(|a| a.parse::<std::net::IpAddr>().ok()) {
                    let usable = e.conditions.is_ready() || (e.conditions.is_serving() && e.conditions.is_terminating());
                    if ip.is_ipv4() == (wanted == AddressType::IPv4) && !ip.is_loopback() && usable {
                        found.entry((ip, p.port.unwrap() as u16)).or_default().push(e);
                    }
                }
            }
        }
    }
    let ready = |all: &[&SliceEndpoint]| all.iter().any(|e| e.conditions.is_ready());
    let local = |all: &[&SliceEndpoint]| all.iter().any(|e| e.node_name.as_deref() == Some("here"));
    let hints = |all: &[&SliceEndpoint], nodes: bool| -> Vec<String> {
        let list = |h: &EndpointHints| if nodes { h.for_nodes.clone() } else { h.for_zones.clone() };
        all.iter().filter_map(|e| e.hints.as_ref()).flat_map(list).map(|h| h.name).collect()
    };
    let end = |all: &[&SliceEndpoint], (ip, port): (std::net::IpAddr, u16)| Endpoint { ip, port, local: local(all) };
    let is_ready: Vec<_> = found.iter().filter(|(_, all)| ready(all)).collect();
    let choose = |nodes: bool, name: &str| {
        let all_hinted = is_ready.iter().all(|(_, all)| !hints(all, nodes).is_empty());
        let named: Vec<_> = is_ready
            .iter()
            .filter(|(_, all)| hints(all, nodes).iter().any(|h| h == name))
            .map(|(k, all)| end(all, **k))
            .collect();
        (all_hinted && !named.is_empty() && !name.is_empty()).then_some(named)
    };
    let mut cluster = choose(true, "here")
        .or_else(|| choose(false, here))
        .unwrap_or_else(|| is_ready.iter().map(|(k, all)| end(all, **k)).collect());
    if cluster.is_empty() {
        cluster = found.iter().map(|(k, all)| end(all, *k)).collect();
    }
    let mine: Vec<_> = found.iter().filter(|(_, all)| local(all)).collect();
    let mut on_node: Vec<_> = mine.iter().filter(|(_, all)| ready(all)).map(|(k, all)| end(all, **k)).collect();
    if on_node.is_empty() {
        on_node = mine.iter().map(|(k, all)| end(all, **k)).collect();
    }
    (
        if port.uses_cluster() { cluster } else { Vec::new() },
        if port.uses_local() { on_node } else { Vec::new() },
        !found.is_empty(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_history_ends_where_a_fresh_start_does(steps in proptest::collection::vec(step(), 1..40)) {
        let (mut services, mut slices, mut here) = (BTreeMap::new(), BTreeMap::new(), String::new());
        let mut cache = Cache::new(&node(&here));
        let mut told: BTreeMap<Arc<Name>, Vec<ServicePort>> = BTreeMap::new();
        for step in steps.into_iter().chain([Step::Tell]) {
            match step {
                Step::Service(n, service) => {
                    cache.put_service(&name("svc", n), service.as_deref());
                    match service {
                        Some(s) => drop(services.insert(n, *s)),
                        None => drop(services.remove(&n)),
                    }
                }
                Step::Slice(n, slice) => {
                    cache.put_slice(&name("slice", n), slice.as_deref());
                    match slice {
                        Some(s) => drop(slices.insert(n, *s)),
                        None => drop(slices.remove(&n)),
                    }
                }
                Step::Zone(n) => {
                    here = zone(n);
                    cache.move_to(&node(&here));
                }
                Step::Tell => {
                    for change in cache.changes() {
                        prop_assert_ne!(&change.before, &change.after);
                        let known = told.get(&change.service).cloned().unwrap_or_default();
                        prop_assert_eq!(&change.before, &known, "before, of {}", change.service);
                        told.insert(change.service, change.after);
                    }
                    let sum: Vec<ServicePort> = told.values().flatten().cloned().collect();
                    // Another order of arrival, no history.
                    let (fresh, skipped) = resolve(&node(&here), services.values().rev(), slices.values().rev());
                    prop_assert_eq!(&sum, &fresh);
                    prop_assert_eq!(cache.all_skipped().collect::<Vec<_>>(), skipped);
                    prop_assert_eq!(cache.all().collect::<Vec<_>>(), fresh);
                    let mut owners = BTreeMap::new();
                    for port in &sum {
                        let (cluster, local, any) = plainly(port, &slices, &here);
                        prop_assert_eq!((&port.cluster, &port.local, port.has_any), (&cluster, &local, any), "{}", port.name);
                        for (claim, _) in claims::Claim::of(port) {
                            let owner = owners.entry(claim).or_insert_with(|| port.name.service.clone());
                            prop_assert_eq!(&*owner, &port.name.service, "{} has two owners", claim);
                        }
                    }
                    prop_assert!(cache.changes().is_empty(), "a second pass over an unchanged world plans nothing");
                }
            }
        }
    }
}
