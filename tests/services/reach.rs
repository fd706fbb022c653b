//! Who reaches what: ClusterIPs, NodePorts, external addresses, from pod, node and outside.

use std::time::Instant;

use super::Row;
use super::world::{By, NODE, STAY, World, at, node_port, service, vip};

pub const ROWS: &[Row] = &[
    ("Services should serve a basic endpoint from pods", basic),
    ("Services should preserve source pod IP for traffic thru service cluster IP [LinuxOnly]", basic),
    ("Networking Granular Checks: Services should function for pod-Service, node-Service, endpoint-Service: http, udp", granular),
    ("Services should serve multiport endpoints from pods", multiport),
    ("Services should serve endpoints on same port and different protocols", protocols),
    ("Services should be able to create a functioning NodePort service", node_ports),
    ("Services should allow pods to hairpin back to themselves through services", hairpin),
    ("Services should be rejected when no endpoints exist", rejected),
    ("Services should be rejected for evicted pods (no endpoints exist)", rejected_after),
    (
        "Services should be possible to connect to a service via ExternalIP when the external IP is not assigned to a node",
        external,
    ),
    ("[Feature:IPv6DualStack] should create service with ipv4 cluster ip, with ipv6 cluster ip, with both", stacks),
    ("a port that the Service lacks is refused, an address without a Service is no trap", nobody),
];

const WEB: &str = "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]";

fn basic(w: &World) {
    let n = w.number();
    w.put("basic", &service("basic", n, WEB));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.all_hear(w.on_node(), By::Tcp, vip(n, 80), &["a node", "b node"]);
    w.all_hear(w.outside(2), By::Tcp, vip(n, 80), &["a node", "b node"]);
    w.take("basic");
}

fn granular(w: &World) {
    let n = w.number();
    let ports = "{name: http, port: 80, targetPort: 8080}, {name: udp, port: 90, protocol: UDP, targetPort: 8080}";
    w.put("granular", &service("granular", n, &format!("selector: {{app: web}}, ports: [{ports}]")));
    for (by, port) in [(By::Tcp, 80), (By::Udp, 90)] {
        let to = vip(n, port);
        w.all_hear(w.pod("c").client(), by, to, &["a kept", "b kept"]);
        w.all_hear(w.on_node(), by, to, &["a node", "b node"]);
        // An endpoint that meets itself sees the node.
        w.all_hear(w.pod("a").client(), by, to, &["a node", "b kept"]);
        w.all_hear(w.outside(2), by, to, &["a node", "b node"]);
    }
    w.take("granular");
}

fn multiport(w: &World) {
    let n = w.number();
    let ports = "{name: one, port: 80, targetPort: 8080}, {name: two, port: 81, targetPort: 8081}";
    w.put("multi", &service("multi", n, &format!("selector: {{pod: a}}, ports: [{ports}]")));
    let a = w.make("multi", "pod: a", STAY, "");
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["multi kept"]);
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 81), &["multi2 kept"]);
    w.unmake("multi");
    w.node.wait_gone("multi");
    drop(a);
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 81), &["rejected"]);
    w.take("multi");
}

fn protocols(w: &World) {
    let n = w.number();
    let ports = "{name: t, port: 80, targetPort: 8080}, {name: u, port: 80, protocol: UDP, targetPort: 8081}";
    w.put("protocols", &service("protocols", n, &format!("selector: {{app: web}}, ports: [{ports}]")));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.all_hear(w.pod("c").client(), By::Udp, vip(n, 80), &["a2 kept", "b2 kept"]);
    w.take("protocols");
}

fn node_ports(w: &World) {
    let n = w.number();
    let nodes = at(NODE, node_port(n));
    let ports = format!(
        "{{name: t, port: 80, targetPort: 8080, nodePort: {0}}}, {{name: u, port: 80, protocol: UDP, targetPort: 8081, nodePort: {0}}}",
        node_port(n)
    );
    w.put("np", &service("np", n, &format!("type: NodePort, selector: {{app: web}}, ports: [{ports}]")));
    for from in [w.outside(2), w.on_node(), w.pod("c").client()] {
        w.all_hear(from, By::Tcp, nodes, &["a node", "b node"]);
        w.all_hear(from, By::Udp, nodes, &["a2 node", "b2 node"]);
        w.all_hear(from, By::Tcp, vip(n, 80), if from.who == "c" { &["a kept", "b kept"] } else { &["a node", "b node"] });
    }
    // Of the node's addresses only the primary one takes NodePorts, and loopback never.
    w.hears(w.pod("c").client(), By::Tcp, format!("10.231.0.1:{}", node_port(n)).parse().unwrap(), &["rejected"]);
    for (own, loopback) in [("127.0.0.1", "127.0.0.1"), ("::1", "::1")] {
        let to = std::net::SocketAddr::new(loopback.parse().unwrap(), node_port(n));
        assert_eq!(w.host.ask(own.parse().unwrap(), to), "rejected");
    }
    // One that is no longer written stays as it was.
    w.put("np", &service("np", n, "type: NodePort, selector: {app: web}, ports: [{name: t, port: 80, targetPort: 8080}]"));
    w.all_hear(w.outside(2), By::Tcp, nodes, &["a node", "b node"]);
    w.take("np");
    w.hears(w.outside(2), By::Tcp, nodes[0], &["rejected"]);
}

fn hairpin(w: &World) {
    let n = w.number();
    let ports = format!(
        "{{name: t, port: 80, targetPort: 8080, nodePort: {}}}, {{name: u, port: 80, protocol: UDP, targetPort: 8080}}",
        node_port(n)
    );
    let spec =
        format!("type: NodePort, externalIPs: [203.0.113.77, '2001:db8:77::1'], selector: {{only: one}}, ports: [{ports}]");
    w.put("hairpin", &service("hairpin", n, &spec));
    let one = w.make("hairpin", "only: one", STAY, "");
    w.all_hear(one.client(), By::Tcp, vip(n, 80), &["hairpin node"]);
    w.all_hear(one.client(), By::Udp, vip(n, 80), &["hairpin node"]);
    w.all_hear(one.client(), By::Tcp, at(NODE, node_port(n)), &["hairpin node"]);
    w.all_hear(one.client(), By::Tcp, at(["203.0.113.77", "2001:db8:77::1"], 80), &["hairpin node"]);
    w.unmake("hairpin");
    w.take("hairpin");
}

/// At once, not when the client has lost its patience.
fn rejected(w: &World) {
    let n = w.number();
    let ports =
        format!("{{name: t, port: 80, nodePort: {0}}}, {{name: u, port: 80, protocol: UDP, nodePort: {0}}}", node_port(n));
    let status = "\nstatus: {loadBalancer: {ingress: [{ip: 203.0.113.78}, {ip: '2001:db8:78::1'}]}}\n---\n";
    let spec = format!(
        "type: LoadBalancer, externalIPs: [203.0.113.79, '2001:db8:79::1'], selector: {{nobody: here}}, ports: [{ports}]"
    );
    w.put("rejected", &service("rejected", n, &spec).replace("\n---\n", status));
    let targets = [
        vip(n, 80),
        at(NODE, node_port(n)),
        at(["203.0.113.78", "2001:db8:78::1"], 80),
        at(["203.0.113.79", "2001:db8:79::1"], 80),
    ];
    for from in [w.pod("c").client(), w.on_node(), w.outside(2)] {
        for to in targets {
            w.all_hear(from, By::Tcp, to, &["rejected"]);
            w.all_hear(from, By::Udp, to, &["rejected"]);
            let took = (0..3).map(|_| {
                let begun = Instant::now();
                w.ask(from, By::Tcp, to[0]);
                begun.elapsed().as_millis()
            });
            assert!(took.min().unwrap() < 100, "{} waited for {}", from.who, to[0]);
        }
    }
    w.take("rejected");
}

/// A pod that has failed takes no connections any more, though its manifest still stands.
fn rejected_after(w: &World) {
    let n = w.number();
    w.put("evicted", &service("evicted", n, "selector: {job: evicted}, ports: [{port: 80, targetPort: 8080}]"));
    let yaml = super::world::manifest("evicted", "job: evicted", "while [ ! -e /tmp/end ]; do sleep 0.05; done; exit 3", "");
    w.put("pod-evicted", &yaml.replace("restartPolicy: Always", "restartPolicy: Never"));
    let pod = w.enter("evicted");
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["evicted kept"]);
    w.node.ok(&["exec", "evicted", "--", "touch", "/tmp/end"]);
    w.node.wait_phase("evicted", "Failed");
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["rejected"]);
    drop(pod);
    w.unmake("evicted");
    w.take("evicted");
}

fn external(w: &World) {
    let n = w.number();
    let spec = format!("externalIPs: [203.0.113.81, '2001:db8:81::1'], {WEB}");
    w.put("external", &service("external", n, &spec));
    for from in [w.pod("c").client(), w.on_node(), w.outside(2)] {
        w.all_hear(from, By::Tcp, at(["203.0.113.81", "2001:db8:81::1"], 80), &["a node", "b node"]);
    }
    w.take("external");
}

fn stacks(w: &World) {
    let [four, six, both] = [w.number(), w.number(), w.number()];
    let single = |name: &str, n: u16, family: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: '{}', ipFamilies: [{family}], \
             ipFamilyPolicy: SingleStack, {WEB}}}\n---\n",
            vip(n, 80)[usize::from(family == "IPv6")].ip()
        )
    };
    w.put("stacks", &(single("four", four, "IPv4") + &single("six", six, "IPv6") + &service("both", both, WEB)));
    let c = w.pod("c").client();
    w.hears(c, By::Tcp, vip(four, 80)[0], &["a kept", "b kept"]);
    w.hears(c, By::Tcp, vip(six, 80)[1], &["a kept", "b kept"]);
    w.all_hear(c, By::Tcp, vip(both, 80), &["a kept", "b kept"]);
    w.hears(c, By::Tcp, vip(four, 80)[1], &["dropped"]);
    w.hears(c, By::Tcp, vip(six, 80)[0], &["dropped"]);
    w.take("stacks");
}

fn nobody(w: &World) {
    let [n, unused] = [w.number(), w.number()];
    w.put("nobody", &service("nobody", n, WEB));
    let c = w.pod("c").client();
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.all_hear(c, By::Tcp, vip(n, 81), &["rejected"]);
    w.all_hear(c, By::Tcp, vip(unused, 80), &["dropped"]);
    w.take("nobody");
}
