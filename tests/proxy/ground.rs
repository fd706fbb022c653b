//! A node with a bridge and two pods, and the outside behind its uplink, which has a client with
//! two addresses and an endpoint. Gone when the value is dropped, also after a panic.
//!
//! ```text
//! pod a 10.88.0.2, fd88::2 ─┐
//! pod b 10.88.0.3, fd88::3 ─┴ tp0 10.88.0.1 [node] up0 192.0.2.1 ── outside 192.0.2.2, .3, .9
//! ```

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coracle::sys::netns;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub const BRIDGE: &str = "tp0";

/// A pinned network namespace.
pub struct Ns {
    path: PathBuf,
    file: File,
}

impl Ns {
    fn new(path: PathBuf) -> Ns {
        File::create(&path).unwrap();
        let pin = path.clone();
        netns::throw_away(move || {
            mount(Some("/proc/thread-self/ns/net"), &pin, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        })
        .unwrap();
        let file = File::open(&path).unwrap();
        let ns = Ns { path, file };
        ns.ip("link set lo up");
        ns
    }

    /// Runs in the namespace; threads and processes begun there stay in it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        netns::within(&self.file, work).unwrap()
    }

    fn ip(&self, args: &str) {
        let args: Vec<&str> = args.split(' ').collect();
        let out = self.run(|| Command::new("ip").args(&args).output().unwrap());
        assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn set(&self, sysctl: &str, value: &str) {
        let file = format!("/proc/sys/net/{sysctl}");
        self.run(|| std::fs::write(&file, value)).unwrap_or_else(|e| panic!("{file}: {e}"));
    }

    /// Answers with its own address and whom it sees, by TCP and UDP.
    pub fn serve(&self, name: &str, port: u16) -> [Server; 2] {
        let at = SocketAddr::new(name.parse().unwrap(), port);
        let (listener, socket) = self.run(move || (TcpListener::bind(at).unwrap(), UdpSocket::bind(at).unwrap()));
        listener.set_nonblocking(true).unwrap();
        socket.set_nonblocking(true).unwrap();
        let answer = {
            let name = name.to_owned();
            move |peer: SocketAddr| format!("{name} {}", peer.ip().to_canonical())
        };
        let other = answer.clone();
        let tcp = Server::start(move || {
            if let Ok((mut stream, peer)) = listener.accept() {
                // The client may be gone already.
                let _ = stream.write_all(answer(peer).as_bytes());
            }
        });
        let udp = Server::start(move || {
            if let Ok((_, peer)) = socket.recv_from(&mut [0; 64]) {
                // Likewise.
                let _ = socket.send_to(other(peer).as_bytes(), peer);
            }
        });
        [tcp, udp]
    }

    /// What a server answers to `from`, or how the connection failed.
    pub fn ask(&self, from: IpAddr, to: SocketAddr) -> String {
        self.run(move || {
            let failed = |e: std::io::Error| told(&e);
            let socket = match connect(from, to) {
                Ok(socket) => socket,
                Err(e) => return failed(e),
            };
            let mut stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text).unwrap_or_else(failed)
        })
    }

    pub fn ask_udp(&self, from: IpAddr, to: SocketAddr) -> String {
        self.run(move || {
            let socket = UdpSocket::bind(SocketAddr::new(from, 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(1000))).unwrap();
            let mut bytes = [0; 64];
            // Connected, so that a refusal is heard of; one of our own output comes twice: as the
            // answer to sending, as is a drop's, and then as the refusal.
            let sent = socket.connect(to).and_then(|()| socket.send(b"?"));
            let denied = sent.as_ref().is_err_and(|e| e.kind() == ErrorKind::PermissionDenied);
            let answer = if denied { socket.recv(&mut bytes) } else { sent.and_then(|_| socket.recv(&mut bytes)) };
            answer.map(|n| String::from_utf8_lossy(&bytes[..n]).into_owned()).unwrap_or_else(|e| told(&e))
        })
    }
}

/// A TCP socket bound to `from`, connected within 1.5 s.
fn connect(from: IpAddr, to: SocketAddr) -> std::io::Result<std::os::fd::OwnedFd> {
    use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
    use std::os::fd::AsRawFd;
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let limit = nix::sys::time::TimeVal::new(1, 500_000);
    socket::setsockopt(&fd, socket::sockopt::SendTimeout, &limit)?;
    socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(to))?;
    Ok(fd)
}

fn told(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "rejected".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "dropped".to_owned(),
        // What a connect with a time limit ends with.
        _ if error.raw_os_error() == Some(nix::libc::EINPROGRESS) => "dropped".to_owned(),
        other => format!("{other:?}"),
    }
}

impl Drop for Ns {
    fn drop(&mut self) {
        if let Err(e) = umount2(&self.path, MntFlags::MNT_DETACH) {
            eprintln!("{}: {e}", self.path.display());
        }
    }
}

pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(mut once: impl FnMut() + Send + 'static) -> Server {
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                once();
                std::thread::sleep(Duration::from_millis(1));
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

pub struct Ground {
    pub node: Ns,
    pub a: Ns,
    pub b: Ns,
    pub outside: Ns,
    _dir: tempfile::TempDir,
}

impl Ground {
    pub fn new() -> Ground {
        let dir = tempfile::tempdir().unwrap();
        let [node, a, b, outside] = ["node", "a", "b", "outside"].map(|name| Ns::new(dir.path().join(name)));
        let ground = Ground { node, a, b, outside, _dir: dir };
        ground.build();
        ground
    }

    fn build(&self) {
        let node = &self.node;
        let host = [
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
            // We ask for more refusals than the kernel would send to one host.
            ("ipv4/icmp_ratelimit", "0"),
            ("ipv6/icmp/ratelimit", "0"),
        ];
        for (file, value) in host {
            node.set(file, value);
        }
        for ns in [node, &self.a, &self.b, &self.outside] {
            ns.set("ipv6/conf/default/accept_dad", "0");
            // Pods do not reach each other but through the node, as in the network room.
            ns.set("ipv6/conf/default/accept_redirects", "0");
        }
        node.ip("link add tp0 type bridge");
        for family in ["iptables", "ip6tables"] {
            let file = format!("/proc/sys/net/bridge/bridge-nf-call-{family}");
            // Not there without br_netfilter, which is the same as 0.
            node.run(|| std::path::Path::new(&file).exists().then(|| std::fs::write(&file, "0").unwrap()));
        }
        node.ip("link set tp0 up");
        node.set("ipv4/conf/tp0/send_redirects", "0");
        node.ip("addr add 10.88.0.1/24 dev tp0");
        node.ip("addr add fd88::1/64 dev tp0 nodad");
        for (pod, port, last) in [(&self.a, "porta", 2), (&self.b, "portb", 3)] {
            node.ip(&format!("link add {port} type veth peer name eth0 netns {}", pod.path.display()));
            node.ip(&format!("link set {port} master tp0 up"));
            node.ip(&format!("link set {port} type bridge_slave isolated on hairpin on"));
            pod.ip("link set eth0 up");
            pod.ip(&format!("addr add 10.88.0.{last}/32 dev eth0"));
            pod.ip("route add 10.88.0.1 dev eth0");
            pod.ip("route add default via 10.88.0.1");
            pod.ip(&format!("addr add fd88::{last}/128 dev eth0 nodad"));
            pod.ip("route add fd88::1 dev eth0");
            pod.ip("-6 route add default via fd88::1");
        }
        let outside = &self.outside;
        node.ip(&format!("link add up0 type veth peer name eth0 netns {}", outside.path.display()));
        for (ns, link, lasts) in [(node, "up0", &[1][..]), (outside, "eth0", &[2, 3, 9])] {
            ns.ip(&format!("link set {link} up"));
            for last in lasts {
                ns.ip(&format!("addr add 192.0.2.{last}/24 dev {link}"));
                ns.ip(&format!("addr add 2001:db8::{last}/64 dev {link} nodad"));
            }
        }
        outside.ip("route add default via 192.0.2.1");
        outside.ip("-6 route add default via 2001:db8::1");
        node.ip("route add default via 192.0.2.2");
        node.ip("-6 route add default via 2001:db8::2");
    }
}
