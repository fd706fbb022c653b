//! Nine pods on a node (namespaces x, y and z, pods a, b and c in each, as sig-network's Netpol
//! suite has them), servers in all of them, and who reaches whom: packets really sent, of both
//! families and three protocols. Servers and clients are sockets of this process, made inside of
//! the pods' network namespaces.
//!
//! SCTP needs no SCTP of the kernel: an INIT is sent by hand and seen to arrive or not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use coracle::api::l4::L4;
use coracle::sys::netns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, sockopt};
use serde_json::Value;

use crate::support::{Node, STAY};

/// How long a packet is waited for.
const LIMIT: Duration = Duration::from_millis(250);

/// `x/a`
pub type Pod = (char, char);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probe {
    pub from: Pod,
    pub to: Pod,
    pub l4: L4,
    pub port: u16,
    pub v6: bool,
}

pub const PORTS: [u16; 2] = [80, 81];

pub fn pods() -> impl Iterator<Item = Pod> {
    ['x', 'y', 'z'].into_iter().flat_map(|ns| ['a', 'b', 'c'].map(|name| (ns, name)))
}

pub struct Housed {
    pub netns: File,
    pub addresses: [IpAddr; 2],
}

pub struct Field {
    pub node: Node,
    pub pods: BTreeMap<Pod, Housed>,
    servers: BTreeMap<Pod, Server>,
    pub arrived: Arrived,
    marks: u32,
}

/// What came: SCTP packets, connections and datagrams; source and destination.
type Arrived = Arc<Mutex<BTreeSet<(SocketAddr, SocketAddr)>>>;

pub fn namespaces(labels: impl Fn(char) -> String) -> String {
    let one = |ns: char| format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: \"{ns}\", labels: {{{}}}}}\n", labels(ns));
    ['x', 'y', 'z'].map(one).join("---\n")
}

pub fn manifest((ns, name): Pod, labels: &str) -> String {
    let port =
        |port: u16, l4: &str| format!("{{name: serve-{port}-{}, containerPort: {port}, protocol: {l4}}}", l4.to_lowercase());
    let ports: Vec<String> = PORTS.iter().flat_map(|p| ["TCP", "UDP", "SCTP"].map(|l4| port(*p, l4))).collect();
    let script = serde_json::to_string(STAY).unwrap();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: \"{ns}\", labels: {{{labels}}}}}\nspec:\n  terminationGracePeriodSeconds: 2\n  containers:\n  - {{name: c, image: \"busybox:1.35\", imagePullPolicy: IfNotPresent, command: [sh, -c, {script}], ports: [{}]}}\n",
        ports.join(", ")
    )
}

impl Field {
    pub fn new() -> Field {
        let mut node = Node::new();
        node.args = vec!["--pod-cidr=fd00:231::/64".to_owned()];
        node.start();
        node.import();
        node.put("namespaces.yaml", &namespaces(|ns| format!("ns: \"{ns}\"")));
        // Shows in its policies which word the agent has heard.
        node.put("mark.yaml", &manifest(('m', 'm'), ""));
        for pod in pods() {
            node.put(&format!("{}-{}.yaml", pod.0, pod.1), &manifest(pod, &format!("pod: \"{}\"", pod.1)));
        }
        let mut field = Field { node, pods: BTreeMap::new(), servers: BTreeMap::new(), arrived: Arrived::default(), marks: 0 };
        pods().for_each(|pod| field.house(pod));
        field.housed(('m', 'm'));
        field
    }

    pub fn object(&self, pod: Pod) -> Option<Value> {
        let named = |p: &Value| p["metadata"]["namespace"] == pod.0.to_string() && p["metadata"]["name"] == pod.1.to_string();
        self.node.pods().into_iter().find(named)
    }

    /// Waits for the pod to run and gives its addresses.
    fn housed(&self, pod: Pod) -> [IpAddr; 2] {
        let mut found = None;
        self.node.wait(&format!("{pod:?} runs"), 60, |_| {
            let Some(object) = self.object(pod) else { return false };
            let status = &object["status"];
            let ready = status["conditions"]
                .as_array()
                .is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"));
            let ips: Vec<IpAddr> =
                status["podIPs"].as_array().into_iter().flatten().map(|ip| ip["ip"].as_str().unwrap().parse().unwrap()).collect();
            found = <[IpAddr; 2]>::try_from(ips).ok().filter(|_| ready && object["metadata"]["deletionTimestamp"].is_null());
            found.is_some()
        });
        found.unwrap()
    }

    /// Finds the pod's network namespace and serves in it.
    pub fn house(&mut self, pod: Pod) {
        let addresses = self.housed(pod);
        let has = |ns: &File| {
            let all = netns::within(ns, || nix::ifaddrs::getifaddrs().map(|all| all.collect::<Vec<_>>())).unwrap().unwrap();
            all.iter().any(|i| {
                i.address.as_ref().and_then(|a| a.as_sockaddr_in()).is_some_and(|a| IpAddr::from(a.ip()) == addresses[0])
            })
        };
        let spaces = self.node.shells().into_iter().filter_map(|pid| File::open(format!("/proc/{pid}/ns/net")).ok());
        let netns = spaces.into_iter().find(has).unwrap_or_else(|| panic!("no process of {pod:?}"));
        self.servers.insert(pod, Server::start(&netns, addresses, Arc::clone(&self.arrived)));
        self.pods.insert(pod, Housed { netns, addresses });
    }

    /// These are all policies now, and the agent has carried that out.
    pub fn say(&mut self, policies: &str) {
        self.marks += 1;
        let mark = format!("mark-{}", self.marks);
        let policies = self.filled(policies);
        self.node.put(
            "policies.yaml",
            &format!("{policies}\n---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {mark}, namespace: m}}\nspec: {{podSelector: {{}}}}\n"),
        );
        self.node.wait(&format!("{mark} is heard"), 20, |node| node.ok(&["policies", "m/m"]).contains(&format!("{mark}\n")));
        // Behind it in the proxy's queue.
        self.node.ok(&["proxy", "--dry-run"]);
    }

    /// `{x/a}` and `{x/a:6}` are addresses.
    pub fn filled(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (pod, housed) in &self.pods {
            text = text.replace(&format!("{{{}/{}}}", pod.0, pod.1), &housed.addresses[0].to_string());
            text = text.replace(&format!("{{{}/{}:6}}", pod.0, pod.1), &housed.addresses[1].to_string());
        }
        text
    }

    /// Every pair of different pods by everything.
    pub fn all(&self) -> Vec<Probe> {
        let mut all = Vec::new();
        for from in pods() {
            for to in pods().filter(|to| *to != from) {
                for l4 in [L4::Tcp, L4::Udp, L4::Sctp] {
                    for port in PORTS {
                        all.extend([false, true].map(|v6| Probe { from, to, l4, port, v6 }));
                    }
                }
            }
        }
        all
    }

    /// Which of them get through.
    pub fn reach(&self, probes: &[Probe]) -> BTreeMap<Probe, bool> {
        let mut by_pod: BTreeMap<Pod, Vec<Probe>> = BTreeMap::new();
        probes.iter().for_each(|probe| by_pod.entry(probe.from).or_default().push(*probe));
        std::thread::scope(|scope| {
            let threads: Vec<_> = by_pod
                .into_iter()
                .map(|(from, probes)| {
                    let targets =
                        probes.iter().map(|p| (SocketAddr::new(self.pods[&p.to].addresses[usize::from(p.v6)], p.port), p.l4));
                    let (targets, housed): (Vec<_>, _) = (targets.collect(), &self.pods[&from]);
                    scope.spawn(move || {
                        let passed = netns::within(&housed.netns, || knock(housed.addresses, &targets, &self.arrived)).unwrap();
                        probes.into_iter().zip(passed).collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        })
    }
}

static SOURCE_PORT: AtomicU16 = AtomicU16::new(10_000);

/// Whether each target is reached, from the calling thread's network namespace, all at once.
pub fn knock(own: [IpAddr; 2], targets: &[(SocketAddr, L4)], arrived: &Arrived) -> Vec<bool> {
    let mut sockets: Vec<Option<(OwnedFd, PollFlags)>> = Vec::new();
    let mut passed = vec![false; targets.len()];
    let mut inits = Vec::new();
    let raw = [raw(AddressFamily::Inet), raw(AddressFamily::Inet6)];
    for (at, (to, l4)) in targets.iter().enumerate() {
        let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        sockets.push(match l4 {
            L4::Tcp => {
                let fd = socket::socket(family, SockType::Stream, flags, None).unwrap();
                match socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(*to)) {
                    Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => Some((fd, PollFlags::POLLOUT)),
                    Err(e) => panic!("connect to {to}: {e}"),
                }
            }
            L4::Udp => {
                let fd = socket::socket(family, SockType::Datagram, flags, None).unwrap();
                socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(*to)).unwrap();
                socket::send(fd.as_raw_fd(), b"?", MsgFlags::empty()).unwrap();
                Some((fd, PollFlags::POLLIN))
            }
            L4::Sctp => {
                let from =
                    SocketAddr::new(own[usize::from(to.is_ipv6())], SOURCE_PORT.fetch_add(1, Ordering::Relaxed).max(10_000));
                let packet = packet(from, *to);
                let fd = &raw[usize::from(to.is_ipv6())];
                socket::sendto(fd.as_raw_fd(), &packet, &SockaddrStorage::from(SocketAddr::new(to.ip(), 0)), MsgFlags::empty())
                    .unwrap();
                inits.push((at, (from, *to)));
                None
            }
        });
    }
    let end = Instant::now() + LIMIT;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        {
            let arrived = arrived.lock().unwrap();
            inits.iter().for_each(|(at, way)| passed[*at] = arrived.contains(way));
        }
        let waiting: Vec<usize> = (0..sockets.len()).filter(|at| sockets[*at].is_some()).collect();
        if left.is_zero() || (waiting.is_empty() && inits.iter().all(|(at, _)| passed[*at])) {
            return passed;
        }
        let mut fds: Vec<PollFd> =
            waiting.iter().filter_map(|at| sockets[*at].as_ref()).map(|(fd, events)| PollFd::new(fd.as_fd(), *events)).collect();
        poll(&mut fds, PollTimeout::try_from(left.min(Duration::from_millis(20))).unwrap()).unwrap();
        let ready: Vec<bool> = fds.iter().map(|fd| fd.revents().is_some_and(|r| !r.is_empty())).collect();
        for (at, _) in waiting.iter().zip(ready).filter(|(_, ready)| *ready) {
            let (fd, _) = sockets[*at].take().unwrap();
            passed[*at] = match targets[*at].1 {
                L4::Tcp => socket::getsockopt(&fd, sockopt::SocketError).unwrap() == 0,
                _ => socket::recv(fd.as_raw_fd(), &mut [0; 8], MsgFlags::empty()).is_ok(),
            };
        }
    }
}

/// Sends whole packets, the IP header among them.
fn raw(family: AddressFamily) -> OwnedFd {
    socket::socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, socket::SockProtocol::Raw).unwrap()
}

/// Hears every packet, from its IP header on.
fn tap() -> OwnedFd {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(AddressFamily::Packet, SockType::Datagram, flags, socket::SockProtocol::EthAll).unwrap()
}

/// Source and destination of an SCTP packet.
fn sctp(packet: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let ip = |at: usize, length: usize| -> Option<IpAddr> {
        let bytes = packet.get(at..at + length)?;
        Some(match <[u8; 4]>::try_from(bytes) {
            Ok(four) => four.into(),
            Err(_) => <[u8; 16]>::try_from(bytes).ok()?.into(),
        })
    };
    let (protocol, source, destination, payload) = match packet.first()? >> 4 {
        4 => (packet.get(9)?, ip(12, 4)?, ip(16, 4)?, usize::from(packet[0] & 15) * 4),
        _ => (packet.get(6)?, ip(8, 16)?, ip(24, 16)?, 40),
    };
    let port = |at: usize| Some(u16::from_be_bytes([*packet.get(payload + at)?, *packet.get(payload + at + 1)?]));
    (*protocol == 132).then_some((SocketAddr::new(source, port(0)?), SocketAddr::new(destination, port(2)?)))
}

/// The kernel fills in IPv4's checksum and identification.
fn packet(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let chunk = init(from.port(), to.port());
    let mut packet = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let length = (20 + chunk.len() as u16).to_be_bytes();
            let head = [0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, 132, 0, 0];
            [&head[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let length = (chunk.len() as u16).to_be_bytes();
            let head = [0x60, 0, 0, 0, length[0], length[1], 132, 64];
            [&head[..], &from.octets(), &to.octets()].concat()
        }
        _ => panic!("{from} to {to}"),
    };
    packet.extend(chunk);
    packet
}

/// RFC 9260: the common header and an INIT chunk.
fn init(from: u16, to: u16) -> Vec<u8> {
    let mut packet = Vec::new();
    packet.extend(from.to_be_bytes());
    packet.extend(to.to_be_bytes());
    packet.extend([0; 8]); // tag 0, checksum to come
    packet.extend([1, 0, 0, 20]);
    packet.extend([0, 0, 0, 7, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
    let mut crc = !0u32;
    for byte in &packet {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    packet[8..12].copy_from_slice(&(!crc).to_le_bytes());
    packet
}

/// Accepts, echoes and notes until it is dropped.
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(ns: &File, addresses: [IpAddr; 2], arrived: Arrived) -> Server {
        let (tcp, udp, tap) = netns::within(ns, || {
            let at = |port| SocketAddr::new([0u16; 8].into(), port);
            let tcp = PORTS.map(|port| TcpListener::bind(at(port)).unwrap());
            let udp: Vec<UdpSocket> =
                PORTS.iter().flat_map(|port| addresses.map(|ip| UdpSocket::bind(SocketAddr::new(ip, *port)).unwrap())).collect();
            (tcp, udp, tap())
        })
        .unwrap();
        tcp.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        udp.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let all = tcp.iter().map(AsFd::as_fd).chain(udp.iter().map(AsFd::as_fd)).chain([tap.as_fd()]);
                let mut fds: Vec<PollFd> = all.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
                poll(&mut fds, PollTimeout::from(100u8)).unwrap();
                for listener in &tcp {
                    while let Ok((stream, peer)) = listener.accept() {
                        arrived.lock().unwrap().insert((peer, stream.local_addr().unwrap()));
                    }
                }
                let mut bytes = [0; 512];
                for socket in &udp {
                    while let Ok((_, peer)) = socket.recv_from(&mut bytes) {
                        arrived.lock().unwrap().insert((peer, socket.local_addr().unwrap()));
                        // A client that is gone needs no answer.
                        let _ = socket.send_to(b"!", peer);
                    }
                }
                while let Ok(length) = socket::recv(tap.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
                    // What the pod itself sends is heard too.
                    let came = sctp(&bytes[..length]).filter(|(_, to)| addresses.contains(&to.ip()));
                    arrived.lock().unwrap().extend(came);
                }
            }
        });
        Server { stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}
