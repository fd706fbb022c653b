//! Which pods stand behind a Service, and in which state.
#![deny(clippy::disallowed_methods)]

use super::*;
use crate::proxy::model::{LocalPod, NamedPort};
use crate::proxy::service::resolve;

fn pod(name: &str, number: u8) -> Pod {
    Pod {
        local: LocalPod {
            uid: format!("uid-{name}"),
            namespace: "ns".into(),
            name: name.into(),
            addresses: vec![format!("10.88.0.{number}").parse().unwrap(), format!("fd88::{number}").parse().unwrap()],
            labels: [("app".to_owned(), "web".to_owned())].into(),
            ports: vec![
                NamedPort { name: "http".into(), number: 8000 + u16::from(number % 2), protocol: L4::Tcp },
                NamedPort { name: "http".into(), number: 9999, protocol: L4::Udp },
            ],
            host_network: false,
        },
        ready: true,
        ..Pod::default()
    }
}

fn service(edit: impl FnOnce(&mut Service)) -> Service {
    let mut s = Service::default();
    s.metadata.namespace = "ns".into();
    s.metadata.name = "web".into();
    s.spec.selector = [("app".to_owned(), "web".to_owned())].into();
    s.spec.cluster_ips = vec!["10.96.0.1".into()];
    s.spec.ip_families = vec![IpFamily::IPv4];
    s.spec.ports =
        vec![ServicePort { name: "http".into(), port: 80, target_port: Some(IntOrString::Int(8080)), ..ServicePort::default() }];
    edit(&mut s);
    s
}

fn node() -> NodeFacts {
    NodeFacts { name: "here".into(), zone: Some("a".into()), ..NodeFacts::default() }
}

fn of(service: &Service, pods: &[Pod]) -> (Vec<EndpointSlice>, Vec<Skipped>) {
    of_service(&Name::new("ns", "web"), service, pods, &node())
}

/// `name v4 http:8080=10.88.0.1/rst,…` with r, s, t for the conditions that hold.
fn shown(slices: &[EndpointSlice]) -> Vec<String> {
    let one = |s: &EndpointSlice| {
        let ports: Vec<String> = s.ports.iter().map(|p| format!("{}:{}", p.name, p.port.unwrap())).collect();
        let flags = |c: &EndpointConditions| {
            [(c.ready, 'r'), (c.serving, 's'), (c.terminating, 't')]
                .iter()
                .filter(|(on, _)| *on == Some(true))
                .map(|(_, f)| *f)
                .collect::<String>()
        };
        let ends: Vec<String> = s.endpoints.iter().map(|e| format!("{}/{}", e.addresses[0], flags(&e.conditions))).collect();
        format!("{} {:?} {}={}", s.metadata.name, s.address_type, ports.join(","), ends.join(","))
    };
    slices.iter().map(one).collect()
}

#[test]
fn selected_pods_stand_in_slices_with_their_conditions() {
    let mut pods = vec![pod("a", 1), pod("b", 2), pod("c", 3), pod("d", 4), pod("other", 5), pod("away", 6)];
    pods[1].ready = false;
    pods[2].ending = true;
    pods[3] = Pod { ready: false, ending: true, ..pods[3].clone() };
    pods[4].local.labels.insert("app".into(), "db".into());
    pods[5].local.namespace = "elsewhere".into();
    let (slices, skipped) = of(&service(|_| {}), &pods);
    assert_eq!(shown(&slices), ["web@ipv4-0 IPv4 http:8080=10.88.0.1/rs,10.88.0.2/,10.88.0.3/st,10.88.0.4/t"]);
    assert!(skipped.is_empty());
    let first = &slices[0].endpoints[0];
    assert_eq!((first.node_name.as_deref(), first.zone.as_deref(), &first.hints), (Some("here"), Some("a"), &None));
    assert_eq!(first.target_ref.as_ref().unwrap().uid, "uid-a");
    assert_eq!(slices[0].service(), Some("web"));
    // Published before they are ready, and while they end.
    let (slices, _) = of(&service(|s| s.spec.publish_not_ready_addresses = true), &pods);
    assert_eq!(shown(&slices), ["web@ipv4-0 IPv4 http:8080=10.88.0.1/rs,10.88.0.2/r,10.88.0.3/rst,10.88.0.4/rt"]);
    // And the resolver that serves a cluster serves this.
    let web = service(|_| {});
    let (ports, skipped) = resolve(&node(), [&web], &of(&web, &pods).0);
    assert_eq!((ports[0].cluster.len(), ports[0].cluster[0].local, skipped.len()), (1, true, 0));
    for nobody in [service(|s| s.spec.selector.clear()), service(|s| s.spec.kind = ServiceType::ExternalName)] {
        assert_eq!(of(&nobody, &pods), (vec![], vec![]));
    }
}

#[test]
fn named_target_ports_are_each_pods_own() {
    let named = |name: &str| service(|s| s.spec.ports[0].target_port = Some(IntOrString::Text(name.into())));
    let pods = [pod("a", 1), pod("b", 2), pod("c", 3)];
    assert_eq!(
        shown(&of(&named("http"), &pods).0),
        ["web@ipv4-0 IPv4 http:8000=10.88.0.2/rs", "web@ipv4-1 IPv4 http:8001=10.88.0.1/rs,10.88.0.3/rs"]
    );
    let (slices, skipped) = of(&named("grpc"), &pods[..1]);
    assert_eq!(shown(&slices), ["web@ipv4-0 IPv4 =10.88.0.1/rs"]);
    assert_eq!(
        skipped[0].to_string(),
        "Service ns/web, spec.ports[0].targetPort: pod ns/a has no TCP port named \"grpc\", so this port does not reach it: name a container port so, or use its number"
    );
    // No target port: the Service's own number.
    assert_eq!(
        shown(&of(&service(|s| s.spec.ports[0].target_port = None), &pods[..1]).0),
        ["web@ipv4-0 IPv4 http:80=10.88.0.1/rs"]
    );
}

#[test]
fn both_families_headless_host_names_and_nearness() {
    let pods = [pod("a", 1)];
    let both = service(|s| s.spec.ip_families = vec![IpFamily::IPv6, IpFamily::IPv4]);
    assert_eq!(shown(&of(&both, &pods).0), ["web@ipv4-0 IPv4 http:8080=10.88.0.1/rs", "web@ipv6-1 IPv6 http:8080=fd88::1/rs"]);
    let mut named = pods.clone();
    named[0].hostname = Some("db-0".into());
    named[0].subdomain = Some("web".into());
    let headless = service(|s| {
        s.spec.cluster_ip = "None".into();
        s.spec.cluster_ips.clear();
        s.spec.ports.clear();
    });
    let (slices, _) = of(&headless, &named);
    assert_eq!(
        (shown(&slices), slices[0].endpoints[0].hostname.as_deref()),
        (vec!["web@ipv4-0 IPv4 =10.88.0.1/rs".to_owned()], Some("db-0"))
    );
    assert!(slices[0].metadata.labels.contains_key(HEADLESS));
    named[0].subdomain = Some("other".into());
    assert_eq!(of(&headless, &named).0[0].endpoints[0].hostname, None);
    // A pod with hostNetwork has the node's address.
    let mut host = pods.clone();
    host[0].local.addresses = vec!["192.0.2.10".parse().unwrap()];
    assert_eq!(shown(&of(&both, &host).0), ["web@ipv4-0 IPv4 http:8080=192.0.2.10/rs"]);
    let hints = |distribution: &str| {
        let near = service(|s| s.spec.traffic_distribution = Some(distribution.into()));
        let hints = of(&near, &pods).0[0].endpoints[0].hints.clone().unwrap_or_default();
        (hints.for_zones.len(), hints.for_nodes.len())
    };
    assert_eq!(
        [hints("PreferClose"), hints("PreferSameZone"), hints("PreferSameNode"), hints("Far")],
        [(1, 0), (1, 0), (1, 1), (0, 0)]
    );
}
