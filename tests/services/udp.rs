//! Flows that connection tracking remembers: they follow the endpoints.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::Row;
use super::world::{By, Client, LINGER, NODE, STAY, World, at, node_port, service, slices, vip};
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sockopt};

pub const ROWS: &[Row] = &[
    ("Conntrack should be able to preserve UDP traffic when server pod cycles for a NodePort service", cycles),
    ("Conntrack should be able to preserve UDP traffic when server pod cycles for a ClusterIP service", cycles),
    ("Conntrack should be able to preserve UDP traffic when initial unready endpoints get ready", unready),
    ("Conntrack should be able to preserve UDP traffic when server pod cycles and client is hostNetwork", cycles),
    ("Conntrack should drop INVALID conntrack entries", invalid),
    ("KubeProxy should set TCP CLOSE_WAIT timeout [Privileged]", close_wait),
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

/// TCP packets by hand, from and to a pod.
struct Raw(OwnedFd);

impl Raw {
    fn new(from: Client) -> Raw {
        Raw(from.ns.run(|| {
            let fd = socket::socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp).unwrap();
            socket::setsockopt(&fd, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(0, 300_000)).unwrap();
            fd
        }))
    }

    /// An acknowledgement that belongs into no window.
    fn send(&self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) {
        let mut packet = Vec::new();
        packet.extend(from.1.to_be_bytes());
        packet.extend(to.1.to_be_bytes());
        packet.extend([0x7f, 0, 0, 1, 0x3f, 0, 0, 1, 5 << 4, 0x10, 0x10, 0, 0, 0, 0, 0]);
        let pseudo = [&from.0.octets()[..], &to.0.octets(), &[0, 6, 0, 20], &packet].concat();
        let mut sum: u32 = pseudo.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        sum = (sum >> 16) + (sum & 0xffff);
        sum += sum >> 16;
        packet[16..18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        let [a, b, c, d] = to.0.octets();
        socket::sendto(self.0.as_raw_fd(), &packet, &SockaddrIn::new(a, b, c, d, 0), MsgFlags::empty()).unwrap();
    }

    /// Whether a reset comes from there within 0.3 s.
    fn hears_reset(&self, by: (Ipv4Addr, u16)) -> bool {
        let mut bytes = [0; 256];
        while let Ok(n) = socket::recv(self.0.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            let packet = &bytes[..n];
            let header = usize::from(packet[0] & 15) * 4;
            let port = u16::from_be_bytes([packet[header], packet[header + 1]]);
            if packet[12..16] == by.0.octets() && port == by.1 && packet[header + 13] & 4 != 0 {
                return true;
            }
        }
        false
    }
}

fn v4(ip: IpAddr) -> Ipv4Addr {
    match ip {
        IpAddr::V4(ip) => ip,
        IpAddr::V6(ip) => panic!("{ip}"),
    }
}

/// kubernetes#74839: what is late is not translated back, and the client would reset it.
fn invalid(w: &World) {
    let n = w.number();
    let (a, c) = (w.pod("a").client(), w.pod("c").client());
    let (server, client) = (v4(a.addresses[0]), v4(c.addresses[0]));
    let port = |yaml: String| yaml.replace("port: 8080", "port: 9999");
    w.put("invalid", &port(service("invalid", n, "ports: [{port: 80}]") + &slices("invalid", &[(a.addresses, "testnode")])));
    let listener = a.ns.run(|| TcpListener::bind((server, 9999)).unwrap());
    let mut connected = None;
    w.node.wait("the Service is served", 5, |_| {
        connected = c.ns.run(|| TcpStream::connect_timeout(&vip(n, 80)[0], Duration::from_millis(400)).ok());
        connected.is_some()
    });
    let mut connected = connected.unwrap();
    let (mut accepted, peer) = listener.accept().unwrap();
    let raw = Raw::new(a);
    // To nobody: the client's kernel says so.
    raw.send((server, 9998), (client, 9998));
    assert!(raw.hears_reset((client, 9998)), "packets made by hand do not arrive");
    raw.send((server, 9999), (client, peer.port()));
    assert!(!raw.hears_reset((client, peer.port())), "the client has seen a packet of no connection");
    // And the connection lives.
    use std::io::Write;
    accepted.write_all(b"alive").unwrap();
    let mut word = [0; 5];
    connected.read_exact(&mut word).unwrap();
    w.take("invalid");
}

/// A client that still reads what a server has sent that is gone has an hour for it.
fn close_wait(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    w.put("half", &service("half", n, "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]"));
    w.hears(c, By::Tcp, vip(n, 80)[0], &["a kept", "b kept"]);
    for (name, value) in [("established", "86400"), ("close_wait", "3600")] {
        let file = format!("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{name}");
        assert_eq!(w.host.run(|| std::fs::read_to_string(&file)).unwrap().trim(), value, "{name}");
    }
    // The server says all it has to say and closes; the client does not.
    let mut stream = c.ns.run(|| TcpStream::connect(vip(n, 80)[0]).unwrap());
    stream.read_to_string(&mut String::new()).unwrap();
    let list = || w.node.command("conntrack").args(["-L", "-p", "tcp", "-d", &vip(n, 80)[0].ip().to_string()]).output();
    if list().is_err() {
        assert!(std::env::var_os("CI").is_none(), "CI needs conntrack");
        eprintln!("SKIP: no conntrack program: only the limits were looked at");
    } else {
        // The client's kernel takes a moment to acknowledge the end.
        w.node.wait("the connection is half closed, and for an hour", 5, |_| {
            let text = String::from_utf8_lossy(&list().unwrap().stdout).into_owned();
            let half = text.lines().find(|l| l.contains("CLOSE_WAIT"));
            let left: Option<u32> = half.map(|l| l.split_whitespace().nth(2).unwrap().parse().unwrap());
            left.is_some_and(|left| (3540..=3600).contains(&left))
        });
    }
    w.take("half");
}
