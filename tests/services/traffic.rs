//! Traffic policies, load balancers' addresses, and slices that are written by hand.

use super::Row;
use super::world::{By, FAR, NODE, World, at, ip, node_port, service, slice, slices, vip};

pub const ROWS: &[Row] = &[
    ("Services should respect internalTrafficPolicy=Local Pod to Pod", internal_local),
    ("Services should respect internalTrafficPolicy=Local Pod (hostNetwork: true) to Pod", internal_local),
    ("LoadBalancers ExternalTrafficPolicy: Local should work for type=NodePort", external_local),
    ("LoadBalancers ExternalTrafficPolicy: Local should work for type=LoadBalancer", external_local),
    ("LoadBalancers ExternalTrafficPolicy: Local should only target nodes with endpoints", external_local),
    ("LoadBalancers ExternalTrafficPolicy: Local should work from pods", external_local),
    ("LoadBalancers should only allow access from service loadbalancer source ranges", source_ranges),
    ("a load balancer's address of ipMode Proxy is not served", ip_mode),
    ("EndpointSlice should support a Service with multiple endpoint IPs and ports specified in multiple EndpointSlices", several),
    (
        "slices of names are left out, slices with addresses that nobody may be led to are refused and named (CVE-2021-25737)",
        left_out,
    ),
    ("Traffic Distribution: hints that name this node", hints),
    ("endpoints on the node's own network", host_network),
];

const TO_WEB: &str = "ports: [{port: 80, targetPort: 8080}]";

fn places(w: &World, local: &[&str]) -> Vec<([std::net::IpAddr; 2], &'static str)> {
    let far = [(FAR.map(ip), "elsewhere")];
    local.iter().map(|pod| (w.pod(pod).addresses, "testnode")).chain(far).collect()
}

fn internal_local(w: &World) {
    let [here, there] = [w.number(), w.number()];
    let spec = format!("internalTrafficPolicy: Local, {TO_WEB}");
    let yaml = service("here", here, &spec) + &slices("here", &places(w, &["a"])) + &service("there", there, &spec);
    w.put("internal", &(yaml + &slices("there", &places(w, &[]))));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(here, 80), &["a kept"]);
    w.all_hear(w.on_node(), By::Tcp, vip(here, 80), &["a node"]);
    // There is an endpoint, but none that may be used: the client waits for it to come back.
    w.all_hear(w.pod("c").client(), By::Tcp, vip(there, 80), &["dropped"]);
    w.all_hear(w.on_node(), By::Tcp, vip(there, 80), &["dropped"]);
    w.take("internal");
}

const BALANCERS: [&str; 2] = ["203.0.113.90", "2001:db8:90::1"];

fn balanced(yaml: &str, ingress: &[&str], more: &str) -> String {
    let all: Vec<String> = ingress.iter().map(|ip| format!("{{ip: '{ip}'{more}}}")).collect();
    let status = format!("\nstatus: {{loadBalancer: {{ingress: [{}]}}}}\n---\n", all.join(", "));
    yaml.replacen("\n---\n", &status, 1)
}

fn external_local(w: &World) {
    let [here, there] = [w.number(), w.number()];
    let spec = |n: u16| {
        format!(
            "type: LoadBalancer, externalTrafficPolicy: Local, ports: [{{port: 80, targetPort: 8080, nodePort: {}}}]",
            node_port(n)
        )
    };
    let others = ["203.0.113.91", "2001:db8:91::1"];
    let yaml = balanced(&service("elh", here, &spec(here)), &BALANCERS, "") + &slices("elh", &places(w, &["a"]));
    let yaml = yaml + &balanced(&service("elt", there, &spec(there)), &others, "") + &slices("elt", &places(w, &[]));
    w.put("external-local", &yaml);
    // From outside: only this node's endpoint, and it sees the client.
    for to in [at(NODE, node_port(here)), at(BALANCERS, 80)] {
        w.all_hear(w.outside(2), By::Tcp, to, &["a kept"]);
        w.all_hear(w.outside(3), By::Tcp, to, &["a kept"]);
        // From pods and the node: as if they had come in anywhere.
        w.all_hear(w.pod("c").client(), By::Tcp, to, &["a kept", "far node"]);
        w.all_hear(w.on_node(), By::Tcp, to, &["a node", "far kept"]);
    }
    // A node without endpoints: not from outside, but pods reach them (kubernetes#131765).
    for to in [at(NODE, node_port(there)), at(others, 80)] {
        w.all_hear(w.outside(2), By::Tcp, to, &["dropped"]);
        w.all_hear(w.pod("c").client(), By::Tcp, to, &["far node"]);
        w.all_hear(w.on_node(), By::Tcp, to, &["far kept"]);
    }
    w.all_hear(w.pod("c").client(), By::Tcp, vip(here, 80), &["a kept", "far node"]);
    w.take("external-local");
}

fn source_ranges(w: &World) {
    let n = w.number();
    let spec =
        |ranges: &str| format!("type: LoadBalancer, {ranges}ports: [{{port: 80, targetPort: 8080, nodePort: {}}}]", node_port(n));
    let yaml = |ranges: &str| {
        balanced(&service("ranges", n, &spec(ranges)), &BALANCERS, "") + &slices("ranges", &places(w, &["a"])[..1])
    };
    let lb = at(BALANCERS, 80);
    w.put("ranges", &yaml("loadBalancerSourceRanges: [192.0.2.2/32, '2001:db8::2/128'], "));
    w.all_hear(w.outside(2), By::Tcp, lb, &["a node"]);
    w.all_hear(w.outside(3), By::Tcp, lb, &["dropped"]);
    w.all_hear(w.pod("c").client(), By::Tcp, lb, &["dropped"]);
    // Only the load balancer's addresses are guarded.
    w.all_hear(w.outside(3), By::Tcp, at(NODE, node_port(n)), &["a node"]);
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept"]);
    w.put("ranges", &yaml("loadBalancerSourceRanges: [192.0.2.3/32, '2001:db8::3/128'], "));
    w.all_hear(w.outside(3), By::Tcp, lb, &["a node"]);
    w.all_hear(w.outside(2), By::Tcp, lb, &["dropped"]);
    w.put("ranges", &yaml(""));
    w.all_hear(w.outside(2), By::Tcp, lb, &["a node"]);
    w.all_hear(w.outside(3), By::Tcp, lb, &["a node"]);
    w.take("ranges");
}

fn ip_mode(w: &World) {
    let [proxy, vip_mode] = [w.number(), w.number()];
    let spec = format!("type: LoadBalancer, {TO_WEB}");
    let one = |name: &str, n: u16, ips: [&str; 2], mode: &str| {
        balanced(&service(name, n, &spec), &ips, &format!(", ipMode: {mode}")) + &slices(name, &places(w, &["a"])[..1])
    };
    let theirs = ["203.0.113.93", "2001:db8:93::1"];
    w.put("modes", &(one("mproxy", proxy, theirs, "Proxy") + &one("mvip", vip_mode, BALANCERS, "VIP")));
    w.all_hear(w.pod("c").client(), By::Tcp, at(BALANCERS, 80), &["a node"]);
    w.all_hear(w.pod("c").client(), By::Tcp, vip(proxy, 80), &["a kept"]);
    // It goes out to the balancer, which here is the LAN's router, that knows nobody of that name.
    w.lan.ip("route add blackhole 203.0.113.93");
    w.lan.ip("-6 route add blackhole 2001:db8:93::1");
    for to in at(theirs, 80) {
        let answer = w.ask(w.pod("c").client(), By::Tcp, to);
        assert!(!answer.starts_with("a "), "{answer}");
    }
    w.lan.ip("route del blackhole 203.0.113.93");
    w.lan.ip("-6 route del blackhole 2001:db8:93::1");
    w.take("modes");
}

fn several(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    let [a, b] = ["a", "b"].map(|pod| w.pod(pod).addresses[0]);
    let one = |ip: std::net::IpAddr| format!("{{addresses: [{ip}], nodeName: testnode}}");
    let not = |ip: std::net::IpAddr| format!("{{addresses: [{ip}], nodeName: testnode, conditions: {{ready: false}}}}");
    let put = |first: &str, second: &str| {
        let slices = slice("several-1", "several", "IPv4", first) + &slice("several-2", "several", "IPv4", second);
        w.put("several", &(service("several", n, TO_WEB) + &slices));
    };
    let to = vip(n, 80)[0];
    put(&one(a), &one(b));
    w.hears(c, By::Tcp, to, &["a kept", "b kept"]);
    // One address in both slices is one endpoint.
    put(&one(a), &(one(a) + ", " + &one(b)));
    w.hears(c, By::Tcp, to, &["a kept", "b kept"]);
    // Ready in one of them is ready.
    put(&not(a), &one(a));
    w.hears(c, By::Tcp, to, &["a kept"]);
    put(&not(a), &one(b));
    w.hears(c, By::Tcp, to, &["b kept"]);
    let shown: serde_json::Value = serde_json::from_str(&w.node.ok(&["services", "-o", "json"])).unwrap();
    let shown = shown.as_array().unwrap().iter().find(|s| s["name"] == "several").unwrap();
    assert_eq!(shown["ports"][0]["endpoints"], serde_json::json!([format!("{b}:8080")]));
    w.take("several");
}

fn left_out(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    let a = w.pod("a").addresses;
    let bad = ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0"].map(|ip| format!("{{addresses: [{ip}]}}")).join(", ");
    let bad6 = ["::1", "fe80::1", "ff02::1", "'::ffff:10.0.0.1'"]
        .map(|ip| format!("{{addresses: ['{}']}}", ip.trim_matches('\'')))
        .join(", ");
    // As an API server would, a slice is refused whole; the others are served.
    let yaml = service("leftout", n, TO_WEB)
        + &slice("l-names", "leftout", "FQDN", "{addresses: [example.com]}")
        + &slice("l-four", "leftout", "IPv4", &bad)
        + &slice("l-six", "leftout", "IPv6", &bad6)
        + &slices("leftout", &[(a, "testnode")]);
    w.put("leftout", &yaml);
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept"]);
    let log = std::fs::read_to_string(w.node.path("agent.log")).unwrap();
    for address in ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::1", "fe80::1", "ff02::1", "::ffff:10.0.0.1"] {
        let named = |l: &str| l.contains("EndpointSlice default/l-") && l.contains(&format!("\"{address}\""));
        assert!(log.lines().any(named), "{address}: {log}");
    }
    w.take("leftout");
}

fn hints(w: &World) {
    let n = w.number();
    let [a, b] = ["a", "b"].map(|pod| w.pod(pod).addresses[0]);
    let hint = |ip: std::net::IpAddr, node: &str| {
        format!("{{addresses: [{ip}], nodeName: {node}, hints: {{forNodes: [{{name: {node}}}]}}}}")
    };
    let yaml = service("hints", n, &format!("trafficDistribution: PreferSameNode, {TO_WEB}"));
    let put = |slices: &str| w.put("hints", &(yaml.clone() + &slice("hints-1", "hints", "IPv4", slices)));
    let to = vip(n, 80)[0];
    put(&format!("{}, {}", hint(a, "testnode"), hint(b, "elsewhere")));
    w.hears(w.pod("c").client(), By::Tcp, to, &["a kept"]);
    // One without a hint, or nobody for us: all of them.
    put(&format!("{}, {{addresses: [{b}]}}", hint(a, "testnode")));
    w.hears(w.pod("c").client(), By::Tcp, to, &["a kept", "b kept"]);
    put(&format!("{}, {}", hint(a, "another"), hint(b, "elsewhere")));
    w.hears(w.pod("c").client(), By::Tcp, to, &["a kept", "b kept"]);
    w.take("hints");
}

/// As `default/kubernetes` on a control plane's node: the node's own address is the endpoint.
fn host_network(w: &World) {
    let n = w.number();
    let own = w.host.serve("host", 8080, &NODE.map(ip));
    w.put("own", &(service("own", n, TO_WEB) + &slices("own", &[(NODE.map(ip), "testnode")])));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["host kept"]);
    w.all_hear(w.on_node(), By::Tcp, vip(n, 80), &["host kept"]);
    w.all_hear(w.outside(2), By::Tcp, vip(n, 80), &["host kept"]);
    drop(own);
    w.take("own");
}
