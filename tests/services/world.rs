//! A node with three pods, and a LAN behind its uplink with clients and an endpoint of its own.
//!
//! ```text
//! pods a, b (labels app=web, pod=…), c ─┐
//!                              <bridge> [node] up0 192.0.2.7 ── LAN 192.0.2.2, .3 (clients), .9
//!                                            2001:db8::7          2001:db8::2 …
//! ```
//!
//! Servers are threads in the pods' namespaces: at 8080 they answer with the pod's name, at 8081
//! with the name and a 2, by TCP and UDP and both families.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::ns::{Ns, Server};
use crate::support::{Node, pod};

pub const NODE: [&str; 2] = ["192.0.2.7", "2001:db8::7"];
pub const FAR: [&str; 2] = ["192.0.2.9", "2001:db8::9"];
const GATEWAYS: [&str; 2] = ["10.231.0.1", "fd31::1"];
/// How long a change may take until packets follow.
const SOON: Duration = Duration::from_secs(5);

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Somebody who asks: a place with an address of each family.
#[derive(Clone, Copy)]
pub struct Client<'a> {
    pub who: &'a str,
    pub ns: &'a Ns,
    pub addresses: [IpAddr; 2],
}

pub struct Pod {
    pub name: String,
    pub ns: Ns,
    pub addresses: [IpAddr; 2],
    _servers: Vec<Server>,
}

impl Pod {
    pub fn client(&self) -> Client<'_> {
        Client { who: &self.name, ns: &self.ns, addresses: self.addresses }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum By {
    Tcp,
    Udp,
}

pub struct World {
    // Before the node: servers end, and nothing holds its namespaces.
    pods: BTreeMap<&'static str, Pod>,
    _far: Vec<Server>,
    many: std::cell::OnceCell<Server>,
    pub host: Ns,
    pub lan: Ns,
    pub node: Node,
    next: Cell<u16>,
}

impl World {
    pub fn new() -> World {
        let (node, host, lan) = ground();
        let mut world =
            World { pods: BTreeMap::new(), _far: Vec::new(), many: Default::default(), host, lan, node, next: Cell::new(10) };
        world.node.start();
        world.node.import();
        for name in ["a", "b", "c"] {
            let labels = if name == "c" { "app: client" } else { "app: web" };
            world.node.put(&format!("pod-{name}.yaml"), &manifest(name, labels, STAY, ""));
        }
        for name in ["a", "b", "c"] {
            let pod = world.enter(name);
            world.pods.insert(name, pod);
        }
        let far = FAR.map(ip);
        world._far = vec![world.lan.serve("far", 8080, &far), world.lan.serve("far2", 8081, &far)];
        world
    }

    /// One of the pods that stand all the time.
    pub fn pod(&self, name: &str) -> &Pod {
        &self.pods[name]
    }

    /// A pod once it is ready, with servers in it.
    pub fn enter(&self, name: &str) -> Pod {
        self.node.wait_ready(name);
        self.enter_early(name)
    }

    /// As soon as it has a process and addresses.
    pub fn enter_early(&self, name: &str) -> Pod {
        let of = |status: &serde_json::Value| -> Vec<IpAddr> {
            let all = status["podIPs"].as_array().cloned().unwrap_or_default();
            all.iter().map(|a| ip(a["ip"].as_str().unwrap())).collect()
        };
        let addresses = of(&self.node.wait_pod(name, "has its addresses", |status| of(status).len() == 2));
        let marker = format!(": pod-{name};");
        let mut pid = None;
        self.node.wait("the pod has a process", 10, |node| {
            let is_it = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|l| l.contains(&marker));
            pid = node.pids().into_iter().find(is_it);
            pid.is_some()
        });
        let ns = Ns::of_process(pid.unwrap() as u32);
        let servers = vec![ns.serve(name, 8080, &addresses), ns.serve(&format!("{name}2"), 8081, &addresses)];
        Pod { name: name.to_owned(), ns, addresses: [addresses[0], addresses[1]], _servers: servers }
    }

    /// A pod of a row: made now, ready and serving.
    pub fn make(&self, name: &str, labels: &str, script: &str, more: &str) -> Pod {
        self.node.put(&format!("pod-{name}.yaml"), &manifest(name, labels, script, more));
        self.enter(name)
    }

    pub fn unmake(&self, name: &str) {
        self.node.take_away(&format!("pod-{name}.yaml"));
    }

    pub fn on_node(&self) -> Client<'_> {
        Client { who: "node", ns: &self.host, addresses: NODE.map(ip) }
    }

    /// A client of the LAN: 2 or 3.
    pub fn outside(&self, last: u8) -> Client<'_> {
        let addresses = [IpAddr::from([192, 0, 2, last]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(last)])];
        Client { who: if last == 2 { "outside" } else { "another outside" }, ns: &self.lan, addresses }
    }

    /// 198.18.0.0/24 and 2001:db8:18::/64 are places of the LAN; at 8082 each answers with its own
    /// address.
    pub fn many(&self) {
        self.many.get_or_init(|| {
            self.lan.ip("route add local 198.18.0.0/24 dev lo");
            self.lan.ip("-6 route add local 2001:db8:18::/64 dev lo");
            self.lan.serve_all(8082)
        });
    }

    /// A number for the addresses and node port of a Service that nobody else has.
    pub fn number(&self) -> u16 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    pub fn put(&self, file: &str, yaml: &str) {
        self.node.put(&format!("{file}.yaml"), yaml);
    }

    pub fn take(&self, file: &str) {
        self.node.take_away(&format!("{file}.yaml"));
    }

    /// Takes away what a row that failed has left.
    pub fn clear(&self) {
        for entry in std::fs::read_dir(self.node.path("manifests")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if !["pod-a.yaml", "pod-b.yaml", "pod-c.yaml"].contains(&&*name) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
    }

    /// What `from` hears: server and whether it sees the client (`kept`), the node, or somebody.
    pub fn ask(&self, from: Client, by: By, to: SocketAddr) -> String {
        let source = from.addresses[usize::from(to.is_ipv6())];
        let answer = match by {
            By::Tcp => from.ns.ask(source, to),
            By::Udp => from.ns.ask_udp(SocketAddr::new(source, 0), to),
        };
        let Some((server, peer)) = answer.split_once(' ') else { return answer };
        let peer = ip(peer);
        let who = match peer {
            _ if peer == source => "kept".to_owned(),
            _ if NODE.iter().chain(&GATEWAYS).any(|own| ip(own) == peer) => "node".to_owned(),
            other => other.to_string(),
        };
        format!("{server} {who}")
    }

    /// Within [`SOON`] it is just these answers that come, each of them.
    pub fn hears(&self, from: Client, by: By, to: SocketAddr, answers: &[&str]) {
        let expected: BTreeSet<String> = answers.iter().map(|a| (*a).to_owned()).collect();
        // All show, but for once in 10,000,000 times.
        let most = 1 + 30 * (expected.len() - 1);
        // What was before may give one of them too.
        let least = if expected.iter().all(|e| e.contains(' ')) { 10 } else { 1 };
        let until = Instant::now() + SOON;
        loop {
            let mut got = BTreeSet::new();
            for n in 0..most.max(least) {
                let answer = self.ask(from, by, to);
                let fits = expected.contains(&answer);
                got.insert(answer);
                if !fits || (got == expected && n + 1 >= least) {
                    break;
                }
            }
            if got == expected {
                return;
            }
            let who = from.who;
            assert!(Instant::now() < until, "{who} to {to} by {by:?}: {got:?}, expected {expected:?}\n{}", self.why());
        }
    }

    /// The same by both families; `to` of a Service with the numbers of [`World::number`].
    pub fn all_hear(&self, from: Client, by: By, to: [SocketAddr; 2], answers: &[&str]) {
        for to in to {
            self.hears(from, by, to, answers);
        }
    }

    /// For a message: the table, and what is said to be served.
    pub fn why(&self) -> String {
        let services = self.node.cli(&["services", "-o", "wide"]);
        let log = self.node.log_tail();
        let log: Vec<&str> = log.lines().filter(|l| !l.contains("DEBUG")).collect();
        format!("{}{}", String::from_utf8_lossy(&services.stdout), log.join("\n"))
    }

    pub fn services(&self) -> String {
        self.node.ok(&["services"])
    }
}

/// The node's namespaces with an uplink to a LAN, before an agent.
pub fn ground() -> (Node, Ns, Ns) {
    let mut node = Node::new();
    let more = ["--node-ip", NODE[1], "--pod-cidr", "fd31::/64"];
    node.args = more.map(str::to_owned).to_vec();
    let host = Ns::of_process(node.holder());
    let lan = Ns::pinned(node.path("lan"));
    lan.set("ipv6/conf/default/accept_dad", "0");
    // We ask for more refusals than the kernel would send to one host.
    host.set("ipv4/icmp_ratelimit", "0");
    host.set("ipv6/icmp/ratelimit", "0");
    host.ip(&format!("link add up0 type veth peer name eth0 netns {}", lan.pin().display()));
    for (ns, link, lasts) in [(&host, "up0", &[7][..]), (&lan, "eth0", &[2, 3, 9])] {
        ns.ip(&format!("link set {link} up"));
        for last in lasts {
            ns.ip(&format!("addr add 192.0.2.{last}/24 dev {link}"));
            ns.ip(&format!("addr add 2001:db8::{last}/64 dev {link} nodad"));
        }
    }
    lan.ip("route add default via 192.0.2.7");
    lan.ip("-6 route add default via 2001:db8::7");
    host.ip("route add default via 192.0.2.2");
    host.ip("-6 route add default via 2001:db8::2");
    (node, host, lan)
}

/// Ends at once when it is told to.
pub const STAY: &str = "trap 'exit 0' TERM; while :; do sleep 0.1; done";
/// Ends only when its time is over.
pub const LINGER: &str = "trap '' TERM; while :; do sleep 0.1; done";

pub fn manifest(name: &str, labels: &str, script: &str, more: &str) -> String {
    let script = format!(": pod-{name}; {script}");
    pod(name, "Always", &[], &[("c", &script)], more).replacen(
        &format!("metadata: {{name: {name}}}"),
        &format!("metadata: {{name: {name}, labels: {{{labels}}}}}"),
        1,
    )
}

/// ClusterIPs of a Service of that number, with a port.
pub fn vip(number: u16, port: u16) -> [SocketAddr; 2] {
    let [high, low] = number.to_be_bytes();
    [([10, 96, high, low], port).into(), ([0xfd88, 0x96, 0, 0, 0, 0, 0, number], port).into()]
}

pub fn at(addresses: [&str; 2], port: u16) -> [SocketAddr; 2] {
    addresses.map(|a| SocketAddr::new(ip(a), port))
}

/// Its node port.
pub fn node_port(number: u16) -> u16 {
    30_000 + number
}

/// A dual-stack Service at the addresses of its number; `spec` is the rest.
pub fn service(name: &str, number: u16, spec: &str) -> String {
    let [v4, v6] = vip(number, 0).map(|at| at.ip());
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {v4}, clusterIPs: [{v4}, '{v6}'], \
         ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack, {spec}}}\n---\n"
    )
}

/// A slice of one family; `endpoints` as they stand in the object.
pub fn slice(name: &str, of: &str, kind: &str, endpoints: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}, labels: {{kubernetes.io/service-name: {of}}}}}\n\
         addressType: {kind}\nendpoints: [{endpoints}]\nports: [{{port: 8080}}]\n---\n"
    )
}

/// Slices of both families with these places: addresses and the node that they are on.
pub fn slices(of: &str, places: &[([IpAddr; 2], &str)]) -> String {
    let endpoints = |family: usize| {
        let one = |(addresses, node): &([IpAddr; 2], &str)| format!("{{addresses: ['{}'], nodeName: {node}}}", addresses[family]);
        places.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    slice(&format!("{of}-4"), of, "IPv4", &endpoints(0)) + &slice(&format!("{of}-6"), of, "IPv6", &endpoints(1))
}
