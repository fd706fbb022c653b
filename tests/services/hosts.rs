//! Host ports, SCTP, and names and variables by which pods find Services.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use super::Row;
use super::world::{By, Client, NODE, STAY, World, at, manifest, node_port, service, vip};
use crate::ns::Ns;

pub const ROWS: &[Row] = &[
    (
        "HostPort validates that there is no conflict between pods with same hostPort but different hostIP and protocol [LinuxOnly]",
        host_ports,
    ),
    (
        "SchedulerPredicates validates that there exists conflict between pods with same hostPort and protocol but one using 0.0.0.0 hostIP",
        conflict,
    ),
    ("SCTP should create a ClusterIP Service with SCTP ports, a NodePort too", sctp),
    ("DNS should provide DNS for services: a pod reaches a Service by its name", names),
    ("Pods should contain environment variables for services", variables),
    ("Networking Granular Checks: Pods should function for intra-pod and node-pod communication: http, udp", pods),
];

fn with_host_port(name: &str, ports: &str) -> String {
    manifest(name, "job: hostport", STAY, "").replace("command: [sh", &format!("ports: [{ports}], command: [sh"))
}

fn host_ports(w: &World) {
    w.host.ip("addr add 192.0.2.70/24 dev up0");
    let ports = [
        ("hp1", "{containerPort: 8080, hostPort: 8900, hostIP: 192.0.2.70}"),
        ("hp2", "{containerPort: 8080, hostPort: 8900, hostIP: 192.0.2.7}"),
        ("hp3", "{containerPort: 8080, hostPort: 8900, hostIP: 192.0.2.7, protocol: UDP}"),
        ("hp4", "{containerPort: 8080, hostPort: 8900, hostIP: '2001:db8::7'}"),
    ];
    for (name, port) in ports {
        w.put(&format!("pod-{name}"), &with_host_port(name, port));
    }
    let pods: Vec<_> = ports.iter().map(|(name, _)| w.enter(name)).collect();
    let [v4, v6] = at(NODE, 8900);
    for from in [w.outside(2), w.pod("c").client(), w.on_node()] {
        let hears = |by, to: SocketAddr, server: &str| w.hears(from, by, to, &[&format!("{server} kept")]);
        hears(By::Tcp, "192.0.2.70:8900".parse().unwrap(), "hp1");
        hears(By::Tcp, v4, "hp2");
        hears(By::Udp, v4, "hp3");
        hears(By::Tcp, v6, "hp4");
    }
    for (name, _) in ports {
        w.unmake(name);
    }
    drop(pods);
    for (name, _) in ports {
        w.node.wait_gone(name);
    }
    w.hears(w.outside(2), By::Tcp, v4, &["rejected"]);
    w.host.ip("addr del 192.0.2.70/24 dev up0");
}

fn conflict(w: &World) {
    w.put("pod-first", &with_host_port("first", "{containerPort: 8080, hostPort: 8901}"));
    let first = w.enter("first");
    w.put("pod-second", &with_host_port("second", "{containerPort: 8080, hostPort: 8901, hostIP: 192.0.2.7}"));
    let told = |node: &crate::support::Node| {
        let out = node.cli(&["pods", "-o", "json"]);
        let status = node.status("second");
        (
            status["phase"] == "Failed" || status["reason"] != serde_json::Value::Null,
            String::from_utf8_lossy(&out.stdout).into_owned(),
        )
    };
    w.node.wait("the second one is refused", 10, |node| told(node).0);
    w.hears(w.outside(2), By::Tcp, at(NODE, 8901)[0], &["first kept"]);
    drop(first);
    w.unmake("second");
    w.unmake("first");
}

const SCTP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/net/sctp.py");

/// Ends when its standard input does.
struct Sctp(Child);

impl Sctp {
    fn start(ns: &Ns, name: &str, address: &str) -> Sctp {
        let mut child = ns.run(|| {
            let mut command = Command::new("python3");
            command.args([SCTP, "serve", name, address, "3868"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        Sctp(child)
    }
}

impl Drop for Sctp {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

fn ask_sctp(from: Client, to: SocketAddr) -> String {
    let (address, port) = (to.ip().to_string(), to.port().to_string());
    let out = from.ns.run(|| Command::new("python3").args([SCTP, "ask", &address, &port]).output().unwrap());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

fn sctp(w: &World) {
    if !w.host.run(|| std::path::Path::new("/proc/sys/net/netfilter/nf_conntrack_sctp_timeout_established").exists()) {
        assert!(std::env::var_os("CI").is_none(), "this kernel tracks no SCTP");
        eprintln!("SKIP: this kernel tracks no SCTP");
        return;
    }
    let n = w.number();
    let ports = format!("{{port: 80, protocol: SCTP, targetPort: 3868, nodePort: {}}}", node_port(n));
    w.put("sctp", &service("sctp", n, &format!("type: NodePort, selector: {{pod: sctp}}, ports: [{ports}]")));
    let pod = w.make("sctp", "pod: sctp", STAY, "");
    let (v4, v6) = (pod.addresses[0].to_string(), pod.addresses[1].to_string());
    let _servers = (Sctp::start(&pod.ns, "sctp", &v4), Sctp::start(&pod.ns, "sctp", &v6));
    for to in vip(n, 80) {
        let c = w.pod("c").client();
        assert_eq!(ask_sctp(c, to), format!("sctp {}", c.addresses[usize::from(to.is_ipv6())]));
    }
    for to in at(NODE, node_port(n)) {
        let gateway = if to.is_ipv4() { "10.231.0.1" } else { "fd31::1" };
        assert_eq!(ask_sctp(w.outside(2), to), format!("sctp {gateway}"));
    }
    drop(pod);
    w.unmake("sctp");
    w.take("sctp");
}

fn names(w: &World) {
    let n = w.number();
    let yaml = service("named", n, "selector: {app: web}, ports: [{name: web, port: 80, targetPort: 8080}]");
    let headless = "apiVersion: v1\nkind: Service\nmetadata: {name: peers}\nspec: {clusterIP: None, selector: {pod: none, app: web}, ports: [{port: 80}]}\n---\n";
    let alias = "apiVersion: v1\nkind: Service\nmetadata: {name: alias}\nspec: {type: ExternalName, externalName: named.default.svc.cluster.local}\n";
    w.put("named", &(yaml + headless + alias));
    for name in ["named", "named.default", "named.default.svc.cluster.local", "alias"] {
        w.node.wait("the Service is reached by its name", 10, |node| {
            let out = node.cli(&["exec", "c", "--", "nc", "-w", "2", name, "80"]);
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.starts_with("a ") || text.starts_with("b ")
        });
    }
    w.take("named");
}

fn variables(w: &World) {
    let n = w.number();
    w.put("env-svc", &service("env-svc", n, "selector: {app: web}, ports: [{name: web, port: 80, targetPort: 8080}]"));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    let pod = w.make("env", "job: env", STAY, "");
    let env = w.node.ok(&["exec", "env", "--", "env"]);
    let [v4, _] = vip(n, 80);
    for line in
        [format!("ENV_SVC_SERVICE_HOST={}", v4.ip()), "ENV_SVC_SERVICE_PORT=80".into(), format!("ENV_SVC_PORT=tcp://{v4}")]
    {
        assert!(env.lines().any(|l| l == line), "{line}: {env}");
    }
    let asked = w.node.ok(&["exec", "env", "--", "sh", "-c", "nc -w 2 $ENV_SVC_SERVICE_HOST $ENV_SVC_SERVICE_PORT"]);
    assert!(asked.starts_with("a ") || asked.starts_with("b "), "{asked}");
    drop(pod);
    w.unmake("env");
    w.take("env-svc");
}

fn pods(w: &World) {
    let to = w.pod("a").addresses.map(|ip| SocketAddr::new(ip, 8080));
    for by in [By::Tcp, By::Udp] {
        w.all_hear(w.pod("c").client(), by, to, &["a kept"]);
        w.all_hear(w.pod("a").client(), by, to, &["a kept"]);
        w.all_hear(w.on_node(), by, to, &["a kept"]);
    }
}
