//! Policies in the kernel: packets of two pods and the outside, in both families, as objects and
//! addresses come and go behind the front door; flows that end; agents that come after others.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::api::network_policy::NetworkPolicy;
use coracle::api::yaml;
use coracle::proxy::model::{LocalPod, NamedPort, NodeFacts, Peer};
use coracle::proxy::policy::World;
use coracle::proxy::{PodPorts, Proxy, ProxyConfig};
use coracle::store::effects::Effects;
use coracle::sys::clock;

use crate::ground::{BRIDGE, Ground};
use crate::nft::{Nft, able};

const A: [&str; 2] = ["10.88.0.2", "fd88::2"];
const B: [&str; 2] = ["10.88.0.3", "fd88::3"];
const NODE: [&str; 2] = ["10.88.0.1", "fd88::1"];
const OUT: [&str; 2] = ["192.0.2.2", "2001:db8::2"];

struct Land {
    ground: Ground,
    dir: tempfile::TempDir,
}

impl Land {
    fn new() -> Land {
        Land { ground: Ground::new(), dir: tempfile::tempdir().unwrap() }
    }

    /// As an agent opens it that has just been started: the pods' addresses are known.
    fn proxy(&self) -> Proxy {
        let (effects, _) = Effects::open(self.dir.path(), &clock::boot_id().unwrap()).unwrap();
        let node = NodeFacts {
            addresses: vec!["192.0.2.1".parse().unwrap()],
            pod_cidrs: vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()],
            bridge: BRIDGE.into(),
            ..NodeFacts::default()
        };
        let config = ProxyConfig { table: "prx".into(), node, service_cidrs: Vec::new() };
        self.ground.node.run(|| {
            let proxy = Proxy::open(config, Arc::new(effects)).unwrap();
            proxy.know_pods([("a".to_owned(), held(&A)), ("b".to_owned(), held(&B))].into()).unwrap();
            proxy
        })
    }

    fn text(&self) -> String {
        self.ground.node.run(|| Nft::host().must(&["list", "ruleset"]))
    }

    fn has_chains(&self) -> bool {
        self.text().contains("policy-")
    }

    /// What a client of `from` hears of a server of `to`, both families and TCP and UDP at once.
    fn goes(&self, from: &str, to: &str, port: u16) -> bool {
        let place = |name: &str| match name {
            "a" => (&self.ground.a, A),
            "b" => (&self.ground.b, B),
            "node" => (&self.ground.node, NODE),
            _ => (&self.ground.outside, OUT),
        };
        let ((ns, from), (_, to)) = (place(from), place(to));
        let all: Vec<String> = std::thread::scope(|scope| {
            let ways = from.iter().zip(to).map(|(from, to)| (from.parse().unwrap(), SocketAddr::new(to.parse().unwrap(), port)));
            let asking = ways.flat_map(|(from, to): (IpAddr, _)| {
                [scope.spawn(move || ns.ask_udp(from, to)), scope.spawn(move || ns.ask(from, to))]
            });
            asking.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let passed: Vec<bool> = all.iter().map(|answer| answer.starts_with(to[0]) || answer.starts_with(to[1])).collect();
        assert!(passed.iter().all(|p| *p == passed[0]), "families or protocols differ: {all:?}\n{}", self.text());
        passed[0]
    }
}

fn held(addresses: &[&str; 2]) -> PodPorts {
    PodPorts { addresses: addresses.iter().map(|ip| ip.parse().unwrap()).collect(), host_ports: Vec::new() }
}

fn policy(name: &str, spec: &str) -> ((String, String), Arc<NetworkPolicy>) {
    let text = format!("metadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n");
    let document = yaml::documents(text.as_bytes(), yaml::Limits::default()).next().unwrap().unwrap();
    (("shop".to_owned(), name.to_owned()), Arc::new(document.read::<NetworkPolicy>().unwrap().0))
}

/// Pods a and b of namespace shop, labelled by their names; the outside is a pod of another node.
fn world(policies: &[(&str, &str)]) -> World {
    let pod = |name: &str| LocalPod {
        uid: name.into(),
        namespace: "shop".into(),
        name: name.into(),
        labels: [("pod".to_owned(), name.to_owned())].into(),
        ports: vec![NamedPort { name: "web".into(), number: 80, protocol: coracle::proxy::model::L4::Tcp }],
        ..LocalPod::default()
    };
    let far = Peer {
        namespace: "far".into(),
        name: "out".into(),
        addresses: OUT.iter().map(|ip| ip.parse().unwrap()).collect(),
        labels: BTreeMap::new(),
        ports: Vec::new(),
    };
    World {
        policies: policies.iter().map(|(name, spec)| policy(name, spec)).collect(),
        pods: vec![pod("a"), pod("b")],
        peers: vec![far].into(),
        ..World::default()
    }
}

const DENY: (&str, &str) = ("deny", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress]}");

#[test]
fn packets_go_as_policies_say_and_a_word_takes_effect_when_it_is_answered() {
    if !able() {
        return;
    }
    let land = Land::new();
    let proxy = land.proxy();
    let servers: Vec<_> = [(&land.ground.a, &A), (&land.ground.b, &B), (&land.ground.node, &NODE), (&land.ground.outside, &OUT)]
        .into_iter()
        .flat_map(|(ns, names)| names.iter().flat_map(|name| [80, 81].map(|port| ns.serve(name, port))).collect::<Vec<_>>())
        .collect();
    proxy.set_policies(world(&[])).unwrap();
    assert_eq!(land.text(), "", "no policy costs nothing, not even a table");
    proxy.ensure().unwrap();
    assert!(!land.has_chains() && land.goes("b", "a", 80) && land.goes("a", "out", 80));
    // Closed both ways; the node passes, also back.
    proxy.set_policies(world(&[DENY])).unwrap();
    for (from, to, goes) in [
        ("b", "a", false),
        ("a", "b", false),
        ("out", "a", false),
        ("a", "out", false),
        ("a", "node", false),
        ("node", "a", true),
        ("b", "node", true),
        ("b", "out", true),
        ("out", "b", true),
    ] {
        assert_eq!(land.goes(from, to, 80), goes, "{from} to {to}\n{}", land.text());
    }
    // The gateway is still found: neighbour discovery of an isolated pod passes.
    land.ground.a.run(|| std::process::Command::new("ip").args(["neigh", "flush", "all"]).status().unwrap());
    assert!(land.goes("node", "a", 80));
    // By pod, by block, by port.
    let some = "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}], ports: [{port: 80}, {port: 80, protocol: UDP}]}], egress: [{to: [{ipBlock: {cidr: 192.0.2.0/24, except: [192.0.2.3/32]}}, {ipBlock: {cidr: \"2001:db8::/64\"}}]}]}";
    proxy.set_policies(world(&[DENY, ("some", some)])).unwrap();
    assert!(land.goes("b", "a", 80) && !land.goes("b", "a", 81) && !land.goes("out", "a", 80));
    assert!(land.goes("a", "out", 81) && !land.goes("a", "b", 80));
    // Pods of other nodes.
    let far = "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: far}}}]}]}";
    proxy.set_policies(world(&[("far", far)])).unwrap();
    assert!(land.goes("out", "a", 80) && !land.goes("b", "a", 80));
    // A pod that is detached is nobody: who comes after it with its address is nobody's peer.
    proxy.set_policies(world(&[DENY, ("some", some)])).unwrap();
    land.ground.node.run(|| proxy.remove_pod("b")).unwrap();
    assert!(!land.goes("b", "a", 80));
    proxy.set_pod("b", held(&B)).unwrap();
    assert!(land.goes("b", "a", 80));
    proxy.set_policies(world(&[])).unwrap();
    assert!(!land.has_chains() && land.goes("b", "a", 81));
    drop(servers);
}

#[test]
fn a_pod_s_verdicts_are_there_when_its_addresses_are() {
    if !able() {
        return;
    }
    let land = Land::new();
    let proxy = land.proxy();
    proxy.remove_pod("a").unwrap();
    proxy.set_policies(world(&[DENY])).unwrap();
    assert!(!land.has_chains(), "nobody holds an address that is isolated");
    proxy.set_pod("a", held(&A)).unwrap();
    let text = land.text();
    assert!(text.contains("10.88.0.2 comment \"shop/a\" : jump policy-in-") && text.contains("fd88::2 comment"), "{text}");
    proxy.remove_pod("a").unwrap();
    assert!(!land.has_chains());
}

/// Says what it hears until it hears nothing for a second; how often.
fn talk(mut say: impl FnMut() -> bool) -> usize {
    let (mut heard, mut last) = (0, Instant::now());
    while last.elapsed() < Duration::from_secs(1) && heard < 20 {
        if say() {
            heard += 1;
            last = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    heard
}

#[test]
fn a_tighter_policy_ends_what_it_denies_and_nothing_else() {
    if !able() {
        return;
    }
    for (at, from) in B.into_iter().enumerate() {
        let land = Land::new();
        let proxy = land.proxy();
        proxy.set_policies(world(&[])).unwrap();
        proxy.ensure().unwrap();
        let (a, b) = (&land.ground.a, &land.ground.b);
        let address = |port| SocketAddr::new(A[at].parse().unwrap(), port);
        let from: IpAddr = from.parse().unwrap();
        let connect = |port: u16| {
            let listener = a.run(|| TcpListener::bind(address(port)).unwrap());
            let client = b.run(|| TcpStream::connect(address(port)).unwrap());
            let server = listener.accept().unwrap().0;
            for stream in [&client, &server] {
                stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
                stream.set_nodelay(true).unwrap();
            }
            (client, server)
        };
        let udp = |port: u16| {
            let server = a.run(|| UdpSocket::bind(address(port)).unwrap());
            let client = b.run(|| UdpSocket::bind(SocketAddr::new(from, 0)).unwrap());
            client.connect(address(port)).unwrap();
            server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            (client, server)
        };
        let send = |(client, server): &(UdpSocket, UdpSocket)| {
            client.send(b"?").unwrap();
            let mut bytes = [0; 8];
            let Ok((_, peer)) = server.recv_from(&mut bytes) else { return false };
            server.send_to(b"!", peer).unwrap();
            client.recv(&mut bytes).is_ok()
        };
        let pass = |from: &mut TcpStream, to: &mut TcpStream| {
            // A full buffer is silence, too.
            let _ = from.write(b"x");
            to.read(&mut [0; 64]).is_ok_and(|n| n > 0)
        };
        let (mut denied, mut pushing, mut allowed) = (connect(81), connect(82), connect(80));
        let (udp_denied, udp_allowed) = (udp(81), udp(80));
        assert!(
            pass(&mut denied.0, &mut denied.1) && pass(&mut pushing.1, &mut pushing.0) && pass(&mut allowed.0, &mut allowed.1)
        );
        assert!(send(&udp_denied) && send(&udp_allowed));
        let spec = "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 80}, {port: 80, protocol: UDP}]}]}";
        proxy.set_policies(world(&[("p", spec)])).unwrap();
        assert_eq!(talk(|| pass(&mut denied.0, &mut denied.1)), 0, "the client speaks\n{}", land.text());
        // The other way round it would be a new flow that nobody denies.
        assert_eq!(talk(|| pass(&mut pushing.1, &mut pushing.0)), 0, "the server speaks\n{}", land.text());
        assert_eq!(talk(|| send(&udp_denied)), 0);
        assert_eq!(talk(|| pass(&mut allowed.0, &mut allowed.1)), 20);
        assert_eq!(talk(|| send(&udp_allowed)), 20);
        // Looser again: what was open goes on.
        proxy.set_policies(world(&[])).unwrap();
        assert!(talk(|| pass(&mut pushing.0, &mut pushing.1)) > 0);
    }
}

#[test]
fn chains_of_an_earlier_agent_stay_until_somebody_says_what_is_wanted() {
    if !able() {
        return;
    }
    let land = Land::new();
    let proxy = land.proxy();
    proxy.set_policies(world(&[DENY])).unwrap();
    let before = land.text();
    let handles = || land.ground.node.run(|| Nft::host().must(&["-a", "list", "ruleset"]));
    let with_handles = handles();
    drop(proxy);
    // Killed, started: looked at again and again, Services said, a pod come.
    let next = land.proxy();
    next.ensure().unwrap();
    next.change_services(Default::default(), Default::default()).unwrap();
    next.set_pod("b", held(&B)).unwrap();
    assert!(before.contains("policy-in-") && land.text().contains("policy-in-"));
    next.set_policies(world(&[DENY])).unwrap();
    let policy_lines = |text: &str| {
        let chains = text.split("\n\t}").filter(|part| part.contains("policy-")).map(str::to_owned);
        chains.collect::<Vec<_>>()
    };
    assert_eq!(policy_lines(&handles()), policy_lines(&with_handles), "nothing was made anew");
    drop(next);
    // One that knows of no policies any more.
    let last = land.proxy();
    last.ensure().unwrap();
    assert!(land.has_chains());
    last.set_policies(world(&[])).unwrap();
    assert!(!land.has_chains());
}

#[test]
#[ignore = "a measurement"]
fn cost_of_many_policies_and_of_a_new_flow() {
    if !able() {
        return;
    }
    let land = Land::new();
    let proxy = land.proxy();
    let servers = land.ground.a.serve(A[0], 80);
    let peer = |n: u16| Peer {
        namespace: "far".into(),
        name: format!("p{n}"),
        addresses: vec![[10, 99, (n >> 8) as u8, n as u8].into()],
        labels: [("num".to_owned(), (n % 100).to_string())].into(),
        ports: Vec::new(),
    };
    let flows = |what: &str| {
        let to = SocketAddr::new(A[0].parse().unwrap(), 80);
        let mut took: Vec<Duration> = land.ground.b.run(|| {
            let connect = |_| {
                let begun = Instant::now();
                drop(TcpStream::connect(to).unwrap());
                begun.elapsed()
            };
            (0..3000).map(connect).collect()
        });
        took.sort();
        println!("connect, {what}: p50 {:?}, p90 {:?}", took[took.len() / 2], took[took.len() * 9 / 10]);
    };
    proxy.set_policies(world(&[])).unwrap();
    flows("no table");
    proxy.ensure().unwrap();
    flows("no policy");
    // Pod a is selected by ten policies of 200, of which the last lets pod b in; 100 pods more by two each.
    let mut world = world(&[]);
    world.peers = (0..500).map(peer).collect::<Vec<_>>().into();
    let rule = "ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: num, operator: Exists}]}}], ports: [{port: 80}, {port: 443, endPort: 500}]}]";
    for n in 0..200 {
        let own = if n < 9 { "pod: a".to_owned() } else { format!("num: \"{}\"", n % 100) };
        world.policies.extend([policy(&format!("p{n:03}"), &format!("{{podSelector: {{matchLabels: {{{own}}}}}, {rule}}}"))]);
    }
    world.policies.extend([policy(
        "pz",
        "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}",
    )]);
    for n in 0..100u8 {
        let labels = [("num".to_owned(), n.to_string())].into();
        world.pods.push(LocalPod {
            uid: format!("n{n}"),
            namespace: "shop".into(),
            name: format!("n{n}"),
            labels,
            ..LocalPod::default()
        });
        let pod = PodPorts { addresses: vec![[10, 88, 0, 100 + n].into()], host_ports: Vec::new() };
        proxy.set_pod(&format!("n{n}"), pod).unwrap();
    }
    let begun = Instant::now();
    proxy.set_policies(world.clone()).unwrap();
    println!("200 policies of 500 peers: {:?}", begun.elapsed());
    flows("ten policies of 200");
    let mut fewer = world.clone();
    fewer.peers = fewer.peers[1..].to_vec().into();
    for (what, world) in [("one peer less", &fewer), ("one peer more", &world), ("nothing new", &world)] {
        let begun = Instant::now();
        proxy.set_policies(world.clone()).unwrap();
        println!("{what}: {:?}", begun.elapsed());
    }
    let begun = Instant::now();
    land.ground.node.run(|| proxy.remove_pod("n5")).unwrap();
    println!("one pod less: {:?}", begun.elapsed());
    let begun = Instant::now();
    proxy.set_pod("n5", PodPorts { addresses: vec![[10, 88, 0, 105].into()], host_ports: Vec::new() }).unwrap();
    println!("one pod more: {:?}", begun.elapsed());
    drop(servers);
}
