//! Rows of research's feature table, one at a time: given these objects, these endpoints.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;
use std::time::Duration;

use super::*;
use crate::api::yaml::{Limits, documents};
use crate::proxy::model::Endpoint;

pub fn node(zone: &str) -> NodeFacts {
    NodeFacts {
        name: "here".into(),
        zone: (!zone.is_empty()).then(|| zone.into()),
        addresses: vec!["192.0.2.10".parse().unwrap()],
        ..NodeFacts::default()
    }
}

fn service(spec: &str) -> Service {
    service_named("web", spec)
}

fn service_named(name: &str, spec: &str) -> Service {
    read(&format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: ns}}\nspec: {{{spec}}}\n"))
}

fn slice(name: &str, text: &str) -> EndpointSlice {
    read(&format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}, namespace: ns, labels: {{kubernetes.io/service-name: web}}}}\n{text}\n"
    ))
}

fn read<T: serde::de::DeserializeOwned>(text: &str) -> T {
    let (object, unknown) = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap().read::<T>().unwrap();
    assert!(unknown.is_empty(), "{unknown:?}");
    object
}

const PORTS: &str = "ports: [{name: http, protocol: TCP, port: 8080}]";
const WEB: &str = "clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]";

fn resolved(zone: &str, spec: &str, slices: &[&str]) -> Vec<ServicePort> {
    let slices: Vec<_> = slices.iter().enumerate().map(|(n, text)| slice(&format!("s{n}"), text)).collect();
    resolve(&node(zone), [&service(spec)], &slices).0
}

/// `10.0.0.1:80` on another node, `10.0.0.1:80!` on this one.
fn shown(endpoints: &[Endpoint]) -> String {
    let one = |e: &Endpoint| format!("{}{}", std::net::SocketAddr::new(e.ip, e.port), if e.local { "!" } else { "" });
    endpoints.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Cluster list, local list, whether anything is anywhere; of one port of one family.
fn chosen(zone: &str, spec: &str, endpoints: &[&str]) -> (String, String, bool) {
    let text = format!("addressType: IPv4\n{PORTS}\nendpoints: [{}]", endpoints.join(", "));
    let ports = resolved(zone, spec, &[&text]);
    assert_eq!(ports.len(), 1);
    (shown(&ports[0].cluster), shown(&ports[0].local), ports[0].has_any)
}

fn all(cluster: &str, local: &str, any: bool) -> (String, String, bool) {
    (cluster.to_owned(), local.to_owned(), any)
}

/// An endpoint: last number of its address; flags: h here, n not ready, t terminating, s (not
/// ready but) serving; zones and nodes of its hints.
fn ep(number: u8, flags: &str, zones: &str, nodes: &str) -> String {
    let has = |flag| flags.contains(flag);
    let ready = !has('n') && !has('t');
    let list = |names: &str| names.split_whitespace().map(|n| format!("{{name: {n}}}")).collect::<Vec<_>>().join(", ");
    format!(
        "{{addresses: [10.0.0.{number}], nodeName: {}, conditions: {{ready: {ready}, serving: {}, terminating: {}}}, hints: {{forZones: [{}], forNodes: [{}]}}}}",
        if has('h') { "here" } else { "there" },
        ready || has('s'),
        has('t'),
        list(zones),
        list(nodes)
    )
}

fn pick(zone: &str, spec: &str, endpoints: &[String]) -> (String, String, bool) {
    chosen(zone, spec, &endpoints.iter().map(String::as_str).collect::<Vec<_>>())
}

const INTERNAL: &str = "internalTrafficPolicy: Local";
const EXTERNAL: &str = "type: NodePort, externalTrafficPolicy: Local";

fn web(more: &str, node_port: bool) -> String {
    let port = if node_port { ", nodePort: 30080" } else { "" };
    format!("clusterIP: 10.96.0.1, ports: [{{name: http, port: 80{port}}}]{}{more}", if more.is_empty() { "" } else { ", " })
}

#[test]
fn ready_endpoints_are_chosen_and_terminating_ones_where_none_is() {
    let spec = web("", false);
    assert_eq!(pick("", &spec, &[]), all("", "", false));
    assert_eq!(pick("", &spec, &[ep(1, "n", "", ""), ep(2, "", "", "")]), all("10.0.0.2:8080", "", true));
    assert_eq!(pick("", &spec, &[ep(1, "n", "", "")]), all("", "", false));
    assert_eq!(pick("", &spec, &[ep(1, "ts", "", ""), ep(2, "t", "", "")]), all("10.0.0.1:8080", "", true));
    assert_eq!(pick("", &spec, &[ep(1, "ts", "", ""), ep(2, "", "", "")]), all("10.0.0.2:8080", "", true));
    // Serving without terminating and without being ready is nothing.
    assert_eq!(pick("", &spec, &[ep(1, "ns", "", "")]), all("", "", false));
    // Absent conditions count as ready.
    assert_eq!(chosen("", &spec, &["{addresses: [10.0.0.9]}"]), all("10.0.0.9:8080", "", true));
    assert_eq!(
        chosen("", &spec, &["{addresses: [10.0.0.9], conditions: {ready: false, terminating: true}}"]),
        all("10.0.0.9:8080", "", true)
    );
}

#[test]
fn local_policy_takes_endpoints_of_this_node_only() {
    let (here, there) = (ep(1, "h", "", ""), ep(2, "", "", ""));
    let both = [here.clone(), there.clone()];
    // Internal only: nothing of policy Cluster is needed.
    assert_eq!(pick("", &web(INTERNAL, false), &both), all("", "10.0.0.1:8080!", true));
    assert_eq!(pick("", &web(INTERNAL, false), std::slice::from_ref(&there)), all("", "", true));
    assert_eq!(pick("", &web(INTERNAL, false), &[]), all("", "", false));
    // Internal Local, external Cluster: both.
    let spec = web(&format!("type: NodePort, {INTERNAL}"), true);
    assert_eq!(pick("", &spec, &both), all("10.0.0.1:8080! 10.0.0.2:8080", "10.0.0.1:8080!", true));
    // External Local needs the cluster list too: pods here use it.
    assert_eq!(pick("", &web(EXTERNAL, true), &both), all("10.0.0.1:8080! 10.0.0.2:8080", "10.0.0.1:8080!", true));
    // Not reachable from outside: externalTrafficPolicy means nothing.
    assert_eq!(pick("", &web("externalTrafficPolicy: Local", false), &both), all("10.0.0.1:8080! 10.0.0.2:8080", "", true));
    // Each list falls back for itself.
    let mixed = [ep(1, "hts", "", ""), there, ep(3, "ts", "", ""), ep(4, "hn", "", "")];
    assert_eq!(pick("", &web(EXTERNAL, true), &mixed), all("10.0.0.2:8080", "10.0.0.1:8080!", true));
    let ending = [ep(2, "ts", "", ""), ep(3, "ts", "", "")];
    assert_eq!(pick("", &web(EXTERNAL, true), &ending), all("10.0.0.2:8080 10.0.0.3:8080", "", true));
    // Where the node has no name nothing is local.
    let nameless = resolve(
        &NodeFacts::default(),
        [&service(&web(INTERNAL, false))],
        [&slice("s", &format!("{PORTS}\nendpoints: [{here}]"))],
    )
    .0;
    assert!(nameless[0].local.is_empty() && nameless[0].has_any);
}

#[test]
fn hints_count_when_every_ready_endpoint_has_one_and_one_names_us() {
    let spec = web("", false);
    let zoned = [ep(1, "", "a", ""), ep(2, "", "b", ""), ep(3, "", "b c", "")];
    assert_eq!(pick("a", &spec, &zoned).0, "10.0.0.1:8080");
    assert_eq!(pick("b", &spec, &zoned).0, "10.0.0.2:8080 10.0.0.3:8080");
    let everyone = "10.0.0.1:8080 10.0.0.2:8080 10.0.0.3:8080";
    assert_eq!(pick("d", &spec, &zoned).0, everyone);
    assert_eq!(pick("", &spec, &zoned).0, everyone);
    // One ready endpoint without a hint, and none counts; one that is not ready does not matter.
    assert_eq!(pick("a", &spec, &[ep(1, "", "a", ""), ep(2, "", "b", ""), ep(3, "", "", "")]).0, everyone);
    assert_eq!(pick("a", &spec, &[ep(1, "", "a", ""), ep(2, "", "b", ""), ep(3, "n", "", "")]).0, "10.0.0.1:8080");
    // The zone's only endpoint is not ready.
    assert_eq!(pick("a", &spec, &[ep(1, "n", "a", ""), ep(2, "", "b", ""), ep(3, "", "c", "")]).0, "10.0.0.2:8080 10.0.0.3:8080");
    // Nodes go before zones, where every ready endpoint names some.
    let noded = [ep(1, "", "a", "there"), ep(2, "", "b", "here"), ep(3, "", "a", "here there")];
    assert_eq!(pick("a", &spec, &noded).0, "10.0.0.2:8080 10.0.0.3:8080");
    assert_eq!(pick("a", &spec, &[ep(1, "", "a", "there"), ep(2, "", "b", "there"), ep(3, "", "c", "other")]).0, "10.0.0.1:8080");
    assert_eq!(
        pick("a", &spec, &[ep(1, "", "a", "here"), ep(2, "", "b", "there"), ep(3, "", "a", "")]).0,
        "10.0.0.1:8080 10.0.0.3:8080"
    );
    // Local lists know no topology.
    let local = [ep(1, "h", "a", ""), ep(2, "h", "b", ""), ep(3, "", "a", "")];
    assert_eq!(
        pick("a", &web(EXTERNAL, true), &local),
        all("10.0.0.1:8080! 10.0.0.3:8080", "10.0.0.1:8080! 10.0.0.2:8080!", true)
    );
}

#[test]
fn slices_are_merged_by_address_port_name_and_protocol() {
    let two = [
        format!("addressType: IPv4\n{PORTS}\nendpoints: [{}, {}]", ep(1, "n", "", ""), ep(2, "", "", "")),
        format!("addressType: IPv4\n{PORTS}\nendpoints: [{}, {}]", ep(2, "h", "", ""), ep(1, "", "", "")),
        // Same address, another port: another endpoint.
        format!("addressType: IPv4\nports: [{{name: http, port: 9090}}]\nendpoints: [{}]", ep(1, "", "", "")),
        // Another protocol, another name, names instead of addresses.
        format!(
            "addressType: IPv4\nports: [{{name: http, port: 1, protocol: UDP}}, {{name: other, port: 2}}]\nendpoints: [{}]",
            ep(7, "", "", "")
        ),
        format!("addressType: FQDN\n{PORTS}\nendpoints: [{{addresses: [example.com]}}]"),
    ];
    let texts: Vec<&str> = two.iter().map(String::as_str).collect();
    let ports = resolved("", &web("", false), &texts);
    assert_eq!(shown(&ports[0].cluster), "10.0.0.1:8080 10.0.0.1:9090 10.0.0.2:8080!");
    let ports = resolved(
        "",
        "clusterIP: 10.96.0.1, ports: [{port: 53, protocol: UDP}, {name: s, port: 53, protocol: SCTP}]",
        &[
            "addressType: IPv4\nports: [{port: 5353, protocol: UDP}, {name: s, port: 5354, protocol: SCTP}, {name: s, port: 5355}]\nendpoints: [{addresses: [10.0.0.1]}]",
        ],
    );
    assert_eq!(
        ports.iter().map(|p| format!("{} {}", p.protocol, shown(&p.cluster))).collect::<Vec<_>>(),
        ["UDP 10.0.0.1:5353", "SCTP 10.0.0.1:5354"]
    );
}

#[test]
fn each_family_has_its_own_address_and_endpoints() {
    let spec = "clusterIP: fd96::1, clusterIPs: ['fd96::1', 10.96.0.1], ipFamilies: [IPv6, IPv4], type: LoadBalancer, ports: [{name: http, port: 80, nodePort: 30080}], externalIPs: [198.51.100.7, '2001:db8::7']";
    let v6 = format!("addressType: IPv6\n{PORTS}\nendpoints: [{{addresses: ['fd00::1']}}, {{addresses: [10.0.0.9]}}]");
    let v4 = format!("addressType: IPv4\n{PORTS}\nendpoints: [{}]", ep(1, "", "", ""));
    let mut web = service(spec);
    web.status = read(
        "loadBalancer: {ingress: [{ip: 203.0.113.1}, {ip: '2001:db8::1', ipMode: VIP}, {ip: 203.0.113.2, ipMode: Proxy}, {hostname: lb.example}]}",
    );
    let (ports, skipped) = resolve(&node(""), [&web], [&slice("v6", &v6), &slice("v4", &v4)]);
    let row = |p: &ServicePort| {
        (p.cluster_ip.unwrap().to_string(), texts(&p.external_ips), texts(&p.load_balancer_ips), p.node_port, shown(&p.cluster))
    };
    assert_eq!(
        ports.iter().map(row).collect::<Vec<_>>(),
        [
            ("10.96.0.1".into(), "198.51.100.7".into(), "203.0.113.1".into(), Some(30080), "10.0.0.1:8080".into()),
            ("fd96::1".into(), "2001:db8::7".into(), "2001:db8::1".into(), Some(30080), "[fd00::1]:8080".into()),
        ]
    );
    assert_eq!(
        skipped.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["EndpointSlice ns/v6, endpoints[1].addresses: 10.0.0.9 is not of the slice's addressType IPv6"]
    );
    // A family without a ClusterIP is not served, nor are addresses of it.
    let (ports, skipped) = resolve(&node(""), [&service(&format!("{WEB}, externalIPs: ['2001:db8::7']"))], [&slice("v6", &v6)]);
    assert_eq!((ports.len(), ports[0].is_external(), ports[0].has_any), (1, false, false));
    assert!(
        skipped[0].to_string().contains("spec.externalIPs[0]: 2001:db8::7: the Service has no ClusterIP of its family"),
        "{skipped:?}"
    );
}

fn texts(ips: &[IpAddr]) -> String {
    ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn services_that_no_proxy_serves_have_no_ports() {
    let slices = [format!("addressType: IPv4\n{PORTS}\nendpoints: [{}]", ep(1, "", "", ""))];
    for spec in [
        "clusterIP: None, ports: [{name: http, port: 80}]",
        "clusterIPs: [None], ports: [{name: http, port: 80}]",
        "ports: [{name: http, port: 80}]",
        "type: ExternalName, externalName: example.com",
        "type: ExternalName, externalName: example.com, clusterIP: 10.96.0.1, ports: [{name: http, port: 80}]",
    ] {
        assert_eq!(resolved("", spec, &[&slices[0]]), [], "{spec}");
    }
    for label in [crate::api::service::HEADLESS, crate::api::service::PROXY_NAME] {
        let mut labelled = service(WEB);
        labelled.metadata.labels.insert(label.to_owned(), String::new());
        assert_eq!(resolve(&node(""), [&labelled], []), (vec![], vec![]));
        let mut other = slice("s", &slices[0]);
        other.metadata.labels.insert(label.to_owned(), "x".to_owned());
        assert!(!resolve(&node(""), [&service(WEB)], [&other]).0[0].has_any);
    }
}

#[test]
fn the_rest_of_a_service_is_taken_over() {
    let port = |spec: &str| resolved("", spec, &[]).remove(0);
    let plain = port(WEB);
    assert_eq!(plain.name.to_string(), "ns/web:http");
    assert_eq!((plain.protocol, plain.port, plain.node_port, plain.affinity), (crate::proxy::model::L4::Tcp, 80, None, None));
    let sticky = |more: &str| port(&format!("{WEB}, sessionAffinity: ClientIP{more}")).affinity;
    assert_eq!(sticky(""), Some(Duration::from_secs(10800)));
    assert_eq!(sticky(", sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}"), Some(Duration::from_secs(60)));
    // A node port of a type that has none, and a health check that nobody asks for.
    let odd = port("clusterIP: 10.96.0.1, healthCheckNodePort: 31000, ports: [{port: 80, nodePort: 30080}]");
    assert_eq!((odd.node_port, odd.health_check_node_port), (None, None));
    let checked = "clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 31000, ports: [{port: 80, nodePort: 30080}]";
    let checked = port(checked);
    assert_eq!((checked.node_port, checked.external_local), (Some(30080), true));
    assert_eq!(checked.health_check_node_port, Some(crate::proxy::model::HealthCheck { port: 31000, ready: vec![] }));
}

#[test]
fn source_ranges_never_open_what_they_meant_to_close() {
    let with = |ranges: &str| {
        let mut web = service(&format!(
            "clusterIPs: [10.96.0.1, 'fd96::1'], type: LoadBalancer, ports: [{{port: 80}}], loadBalancerSourceRanges: [{ranges}]"
        ));
        web.status = read("loadBalancer: {ingress: [{ip: 203.0.113.1}, {ip: '2001:db8::1'}]}");
        let (ports, skipped) = resolve(&node(""), [&web], []);
        let row = |p: &ServicePort| {
            format!(
                "{} {}",
                texts(&p.load_balancer_ips),
                p.source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
            )
        };
        (ports.iter().map(row).collect::<Vec<_>>().join(" | "), skipped.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    assert_eq!(with(""), ("203.0.113.1  | 2001:db8::1 ".to_owned(), vec![]));
    assert_eq!(with("' 10.0.0.0/8 ', 'fd00::/8', 10.0.0.0/8").0, "203.0.113.1 10.0.0.0/8 | 2001:db8::1 fd00::/8");
    // As in every cluster, but it is said.
    let (ports, said) = with("10.0.0.0/8");
    assert_eq!(ports, "203.0.113.1 10.0.0.0/8 | 2001:db8::1 ");
    assert!(said[0].contains("no IPv6 range is named, so the IPv6 load balancer addresses are open to all"), "{said:?}");
    let (ports, said) = with("10.0.0.0/8, 'fd00::/200'");
    assert_eq!(ports, "203.0.113.1 10.0.0.0/8 |  ");
    assert_eq!(said.len(), 2, "{said:?}");
}

#[test]
fn endpoints_that_must_not_be_reached_are_skipped_and_named() {
    let text = format!(
        "addressType: IPv4\n{PORTS}\nendpoints: [{}]",
        ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "255.255.255.255", "192.0.2.10", "10.0.0.1", "no-address"]
            .map(|ip| format!("{{addresses: [{ip}]}}"))
            .join(", ")
    );
    let (ports, skipped) = resolve(&node(""), [&service(WEB)], [&slice("s", &text)]);
    // The node's own address stays: pods with hostNetwork have it.
    assert_eq!(shown(&ports[0].cluster), "10.0.0.1:8080 192.0.2.10:8080");
    assert_eq!(skipped.len(), 6, "{skipped:?}");
    assert_eq!(
        skipped[0].to_string(),
        "EndpointSlice ns/s, endpoints[0].addresses: 127.0.0.1: a loopback address is each node's own"
    );
    let (_, skipped) = resolve(
        &node(""),
        [&service(WEB)],
        [&slice(
            "s",
            "ports: [{name: http}, {name: a, port: 0}, {name: b, port: 70000}]\nendpoints: [{addresses: []}, {addresses: [10.0.0.1, 10.0.0.2]}]",
        )],
    );
    assert_eq!(
        skipped.iter().map(|s| s.field.as_str()).collect::<Vec<_>>(),
        ["ports[0].port", "ports[1].port", "ports[2].port", "endpoints[0].addresses", "endpoints[1].addresses"]
    );
    // Thousands of bad ones are counted, not listed.
    let many = (0..5_000).map(|_| "{addresses: [127.0.0.1]}").collect::<Vec<_>>().join(", ");
    let (_, skipped) = resolve(&node(""), [&service(WEB)], [&slice("s", &format!("{PORTS}\nendpoints: [{many}]"))]);
    assert_eq!((skipped.len(), skipped[16].why.as_str()), (17, "4984 more of its parts are left out"));
    for ip in ["127.0.0.1", "169.254.0.1", "::1", "0.0.0.0"] {
        let (ports, skipped) = resolve(&node(""), [&service(&format!("{WEB}, externalIPs: ['{ip}']"))], []);
        assert!(!ports[0].is_external() && skipped.len() == 1, "{ip} {skipped:?}");
    }
}

#[test]
fn what_two_services_want_one_has() {
    let dns = service_named("dns", "clusterIP: 10.96.0.10, ports: [{port: 53, protocol: UDP}]");
    let thief = service_named("aaa", "clusterIP: 10.96.0.11, externalIPs: [10.96.0.10], ports: [{port: 53, protocol: UDP}]");
    let (ports, skipped) = resolve(&node(""), [&thief, &dns], []);
    assert_eq!(
        ports.iter().map(|p| (texts(&p.external_ips), texts(&p.cluster_ip.into_iter().collect::<Vec<_>>()))).collect::<Vec<_>>(),
        [(String::new(), "10.96.0.11".to_owned()), (String::new(), "10.96.0.10".to_owned())]
    );
    assert_eq!(
        skipped.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["Service ns/aaa, spec.externalIPs: 10.96.0.10:53/UDP belongs to Service ns/dns: use another"]
    );
    // Of equals the older has it, then the first by name.
    let node_port = |name: &str, created: Option<&str>, ip: &str| {
        let mut s = service_named(name, &format!("type: NodePort, clusterIP: {ip}, ports: [{{port: 80, nodePort: 30080}}]"));
        s.metadata.creation_timestamp = created.map(str::to_owned);
        s
    };
    let owner = |services: &[Service]| {
        let (ports, _) = resolve(&node(""), services, []);
        ports.iter().filter(|p| p.node_port.is_some()).map(|p| p.name.service.clone()).collect::<Vec<_>>()
    };
    assert_eq!(owner(&[node_port("b", None, "10.96.0.1"), node_port("a", None, "10.96.0.2")]), ["a"]);
    assert_eq!(owner(&[node_port("b", Some("2026-01-01T00:00:00Z"), "10.96.0.1"), node_port("a", None, "10.96.0.2")]), ["b"]);
    assert_eq!(
        owner(&[
            node_port("a", Some("2026-01-02T00:00:00Z"), "10.96.0.1"),
            node_port("b", Some("2026-01-01T00:00:00Z"), "10.96.0.2")
        ]),
        ["b"]
    );
    // Two of one ClusterIP: the second is not served.
    let (ports, skipped) = resolve(&node(""), [&service_named("one", WEB), &service_named("two", WEB)], []);
    assert_eq!((ports.len(), ports[0].name.service.as_str()), (1, "one"));
    assert!(skipped[0].why.contains("belongs to Service ns/one, so this port is not served at all"), "{skipped:?}");
    // Inside one Service.
    let (ports, skipped) = resolve(
        &node(""),
        [&service(
            "clusterIP: 10.96.0.1, ports: [{name: a, port: 80}, {name: a, port: 81}, {name: b, port: 80}, {name: c, port: 0}]",
        )],
        [],
    );
    assert_eq!((ports.len(), skipped.len()), (1, 3));
}

#[test]
fn changes_are_told_once_and_name_before_and_after() {
    let mut cache = Cache::new(&node("a"));
    let name = Name::new("ns", "web");
    let s0 = Name::new("ns", "s0");
    let text = |number| format!("addressType: IPv4\n{PORTS}\nendpoints: [{}]", ep(number, "", "a", ""));
    // A slice before its Service is nothing yet.
    cache.put_slice(&s0, Some(&slice("s0", &text(1))));
    assert_eq!(cache.changes(), []);
    cache.put_service(&name, Some(&service(WEB)));
    let first = cache.changes();
    assert_eq!((first.len(), first[0].before.len(), shown(&first[0].after[0].cluster)), (1, 0, "10.0.0.1:8080".to_owned()));
    assert_eq!(cache.changes(), []);
    // The same again, or there and back, is no change.
    cache.put_slice(&s0, Some(&slice("s0", &text(1))));
    cache.put_service(&name, Some(&service(WEB)));
    cache.put_slice(&s0, Some(&slice("s0", &text(2))));
    cache.put_slice(&s0, Some(&slice("s0", &text(1))));
    assert_eq!(cache.changes(), []);
    cache.put_slice(&s0, Some(&slice("s0", &text(2))));
    let second = cache.changes();
    assert_eq!(
        (shown(&second[0].before[0].cluster), shown(&second[0].after[0].cluster)),
        ("10.0.0.1:8080".to_owned(), "10.0.0.2:8080".to_owned())
    );
    // The slice moves to another Service, and the node to another zone.
    let mut moved = slice("s0", &text(2));
    moved.metadata.labels.insert(crate::api::endpoint_slice::SERVICE_NAME.to_owned(), "other".to_owned());
    cache.put_slice(&s0, Some(&moved));
    assert!(cache.changes()[0].after[0].cluster.is_empty());
    cache.put_slice(
        &s0,
        Some(&slice("s0", &format!("addressType: IPv4\n{PORTS}\nendpoints: [{}, {}]", ep(1, "", "a", ""), ep(2, "", "b", "")))),
    );
    assert_eq!(shown(&cache.changes()[0].after[0].cluster), "10.0.0.1:8080");
    cache.move_to(&node("b"));
    assert_eq!(shown(&cache.changes()[0].after[0].cluster), "10.0.0.2:8080");
    cache.move_to(&node("b"));
    assert_eq!(cache.changes(), []);
    cache.put_service(&name, None);
    let gone = cache.changes();
    assert_eq!((gone[0].before.len(), gone[0].after.len()), (1, 0));
    cache.put_slice(&s0, None);
    assert_eq!((cache.changes(), cache.all().count()), (vec![], 0));
    assert!(cache.services.is_empty() && cache.homes.is_empty());
}

/// The numbers that issue 4 names; a quadratic step would take minutes here.
#[test]
fn many_ports_and_endpoints_are_no_trouble() {
    let mut web = service(WEB);
    web.spec.ports =
        (1..=10_000).map(|n| crate::api::service::ServicePort { name: format!("p{n}"), port: n, ..Default::default() }).collect();
    let mut wide = slice("s", "addressType: IPv4\nendpoints: [{addresses: [10.0.0.1]}, {addresses: [10.0.0.2]}]");
    wide.ports = web
        .spec
        .ports
        .iter()
        .map(|p| crate::api::endpoint_slice::EndpointPort { name: p.name.clone(), port: Some(p.port), ..Default::default() })
        .collect();
    let (ports, skipped) = resolve(&node(""), [&web], [&wide]);
    assert_eq!((ports.len(), ports.iter().map(|p| p.cluster.len()).sum::<usize>(), skipped.len()), (10_000, 20_000, 0));
    let deep: Vec<_> = (0..100_u8)
        .map(|n| {
            let mut s = slice(&format!("s{n}"), &format!("addressType: IPv4\n{PORTS}\nendpoints: []"));
            s.endpoints = (0..1_000_u32)
                .map(|m| crate::api::endpoint_slice::SliceEndpoint {
                    addresses: vec![format!("10.{n}.{}.{}", m / 250, 1 + m % 250)],
                    ..Default::default()
                })
                .collect();
            s
        })
        .collect();
    let (ports, _) = resolve(&node(""), [&service(WEB)], &deep);
    assert_eq!(ports[0].cluster.len(), 100_000);
    // And what would be too many pairs of both is refused by name, not by the memory.
    wide.endpoints = deep[0].endpoints.clone();
    let (ports, skipped) = resolve(&node(""), [&web], [&wide]);
    assert!(
        ports.iter().all(|p| p.cluster.is_empty() && !p.has_any) && skipped[0].why.contains("split it into several Services"),
        "{skipped:?}"
    );
    assert!(std::mem::size_of::<slice::Backend>() <= 48);
}

#[test]
fn a_health_check_counts_ready_endpoints_of_this_node_once() {
    let spec = "clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 31000, ports: [{name: http, port: 80, nodePort: 30080}]";
    let text = format!(
        "addressType: IPv4\n{PORTS}\nendpoints: [{}, {}, {}, {}]",
        ep(1, "h", "", ""),
        ep(2, "", "", ""),
        ep(3, "hts", "", ""),
        ep(4, "hn", "", "")
    );
    let port = resolved("", spec, &[&text, &text]).remove(0);
    let ready = vec!["10.0.0.1".parse().unwrap()];
    assert_eq!(port.health_check_node_port, Some(crate::proxy::model::HealthCheck { port: 31000, ready }));
    // Traffic goes on to those that end; no load balancer is to send more.
    let text = format!("addressType: IPv4\n{PORTS}\nendpoints: [{}]", ep(3, "hts", "", ""));
    let port = resolved("", spec, &[&text]).remove(0);
    assert_eq!(shown(&port.local), "10.0.0.3:8080!");
    assert_eq!(port.health_check_node_port.unwrap().ready, [] as [IpAddr; 0]);
}

#[test]
fn addresses_that_anybody_could_have_written_are_ignored_where_that_is_asked_for() {
    let mut web = service("clusterIP: 10.96.0.1, type: LoadBalancer, externalIPs: [203.0.113.9], ports: [{port: 80}]");
    web.status = read("loadBalancer: {ingress: [{ip: 203.0.113.1}]}");
    let with = |external_ips, load_balancer_ips| {
        let node = NodeFacts { ignored: Ignored { external_ips, load_balancer_ips }, ..node("") };
        let (ports, skipped) = resolve(&node, [&web], []);
        (texts(&ports[0].external_ips), texts(&ports[0].load_balancer_ips), skipped)
    };
    assert_eq!(with(false, false), ("203.0.113.9".into(), "203.0.113.1".into(), vec![]));
    let (external, balancer, said) = with(true, false);
    assert_eq!((external.as_str(), balancer.as_str(), said.len()), ("", "203.0.113.1", 1));
    assert_eq!((said[0].field.as_str(), said[0].why.contains("--ignore-external-ips")), ("spec.externalIPs[0]", true));
    let (external, balancer, said) = with(true, true);
    assert_eq!((external.as_str(), balancer.as_str(), said.len()), ("", "", 2));
}
