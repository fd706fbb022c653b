//! Flows that connection tracking remembers: they follow the endpoints.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use super::Row;
use super::world::{By, Client, LINGER, NODE, STAY, World, at, node_port, service, vip};

pub const ROWS: &[Row] = &[
    ("Conntrack should be able to preserve UDP traffic when server pod cycles for a NodePort service", cycles),
    ("Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service", cycles),
    ("Conntrack should be able to preserve UDP traffic when initial unready endpoints get ready", unready),
    ("Conntrack should be able to preserve UDP traffic when server pod cycles and client is hostNetwork", cycles),
    ("flows to a UDP Service without endpoints are no flows to who was there before (kubernetes#139628)", gone),
];

/// A client with a port that it keeps, so that its packets are one flow.
struct Talker {
    socket: UdpSocket,
    who: String,
}

impl Talker {
    fn new(from: Client, to: SocketAddr) -> Talker {
        let source = SocketAddr::new(from.addresses[usize::from(to.is_ipv6())], 0);
        let socket = from.ns.run(move || {
            let socket = UdpSocket::bind(source).unwrap();
            socket.connect(to).unwrap();
            socket
        });
        socket.set_read_timeout(Some(Duration::from_millis(40))).unwrap();
        Talker { socket, who: format!("{} to {to}", from.who) }
    }

    /// Who answers now.
    fn ask(&self) -> Option<String> {
        // Refusals come as errors of either, and a packet may be lost: it is asked again and again.
        self.socket.send(b"?").ok()?;
        let mut bytes = [0; 64];
        let n = self.socket.recv(&mut bytes).ok()?;
        String::from_utf8_lossy(&bytes[..n]).split(' ').next().map(str::to_owned)
    }

    fn meets(&self, server: &str, within: Duration) {
        let until = Instant::now() + within;
        while self.ask().as_deref() != Some(server) {
            assert!(Instant::now() < until, "{} does not meet {server}", self.who);
        }
    }
}

fn spec(n: u16, label: &str) -> String {
    format!(
        "type: NodePort, selector: {{{label}}}, ports: [{{port: 90, protocol: UDP, targetPort: 8080, nodePort: {}}}]",
        node_port(n)
    )
}

fn talkers(w: &World, n: u16) -> Vec<Talker> {
    let ways = [
        (w.pod("c").client(), vip(n, 90)),
        (w.on_node(), vip(n, 90)),
        (w.on_node(), at(NODE, node_port(n))),
        (w.outside(2), at(NODE, node_port(n))),
        (w.pod("c").client(), at(NODE, node_port(n))),
    ];
    ways.into_iter().flat_map(|(from, to)| to.map(|to| Talker::new(from, to))).collect()
}

fn cycles(w: &World) {
    let n = w.number();
    w.put("cycles", &service("cycles", n, &spec(n, "cycles: here")));
    let one = w.make("cycle1", "cycles: here", LINGER, "");
    let talkers = talkers(w, n);
    // Flows of the moment in which the first endpoint came are forgotten once.
    for _ in 0..2 {
        talkers.iter().for_each(|t| t.meets("cycle1", Duration::from_secs(3)));
        std::thread::sleep(Duration::from_millis(100));
    }
    let two = w.make("cycle2", "cycles: here", STAY, "");
    // Flows that stand stay where they are while that one is there.
    talkers.iter().for_each(|t| assert_eq!(t.ask().as_deref(), Some("cycle1"), "{}", t.who));
    w.unmake("cycle1");
    let begun = Instant::now();
    w.node.wait("the pod is ending", 5, |node| node.pod("cycle1").is_none_or(|p| !p["metadata"]["deletionTimestamp"].is_null()));
    // It still answers, but has a replacement.
    let limit = Duration::from_secs(1);
    talkers.iter().for_each(|t| t.meets("cycle2", limit));
    // All within the time that the first one had left.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    drop(one);
    w.node.wait_gone("cycle1");
    talkers.iter().for_each(|t| t.meets("cycle2", limit));
    drop(two);
    w.unmake("cycle2");
    w.take("cycles");
}

/// Begun while nobody was there: the flow leads nowhere until an endpoint comes.
fn unready(w: &World) {
    let n = w.number();
    w.put("later", &service("later", n, &spec(n, "later: here")));
    w.hears(w.pod("c").client(), By::Udp, vip(n, 90)[0], &["rejected"]);
    let talkers = talkers(w, n);
    for talker in &talkers {
        assert_eq!(talker.ask(), None, "{}", talker.who);
    }
    let asked = Instant::now();
    let pod = w.make("later1", "later: here", STAY, "");
    talkers.iter().for_each(|t| t.meets("later1", Duration::from_secs(1)));
    assert!(asked.elapsed() < Duration::from_secs(10));
    drop(pod);
    w.unmake("later1");
    w.take("later");
}

fn gone(w: &World) {
    let n = w.number();
    w.put("vanishes", &service("vanishes", n, &spec(n, "app: web")));
    let talkers = talkers(w, n);
    for talker in &talkers {
        let until = Instant::now() + Duration::from_secs(3);
        while talker.ask().is_none() {
            assert!(Instant::now() < until, "{} meets nobody", talker.who);
        }
    }
    // The pods run on, and would answer.
    w.put("vanishes", &service("vanishes", n, &spec(n, "app: nobody")));
    w.hears(w.pod("c").client(), By::Udp, vip(n, 90)[0], &["rejected"]);
    std::thread::sleep(Duration::from_millis(200));
    for talker in &talkers {
        assert_eq!(talker.ask(), None, "{}", talker.who);
    }
    w.take("vanishes");
}
