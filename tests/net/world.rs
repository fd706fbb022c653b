//! A world of network namespaces: the node, the outside behind its uplink, pods. Everything is
//! gone when the value is dropped, also after a panic.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::kubelet::host_ports::HostPorts;
use coracle::net::model::{AttachRequest, Attachment, HostPort, L4, NetConfig};
use coracle::proxy::model::NodeFacts;
use coracle::proxy::{Proxy, ProxyConfig};
use coracle::store::effects::Effects;
use coracle::sys::{clock, netns};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Root with network namespaces, or a loud word; in CI it must be there.
pub fn able() -> bool {
    let able = nix::unistd::geteuid().is_root() && netns::throw_away(|| ()).is_ok();
    if !able {
        assert!(std::env::var_os("CI").is_none(), "CI needs root and network namespaces");
        eprintln!("SKIP: no root, or no network namespaces");
    }
    able
}

/// A pinned network namespace.
pub struct Ns {
    pub path: PathBuf,
    file: File,
}

impl Ns {
    pub fn new(path: PathBuf) -> Ns {
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

    pub fn command(&self, program: &str, args: &[&str]) -> Output {
        self.run(|| Command::new(program).args(args).output().unwrap())
    }

    /// A program that must succeed; its output.
    pub fn must(&self, program: &str, args: &[&str]) -> String {
        let out = self.command(program, args);
        assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    pub fn ip(&self, args: &str) -> String {
        self.must("ip", &args.split(' ').collect::<Vec<_>>())
    }

    pub fn json(&self, args: &str) -> serde_json::Value {
        serde_json::from_str(&self.ip(&format!("-j {args}"))).unwrap()
    }

    pub fn sysctl(&self, name: &str) -> String {
        let name = name.to_owned();
        self.run(move || std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap().trim().to_owned())
    }

    pub fn set_sysctl(&self, name: &str, value: &str) {
        let (name, value) = (name.to_owned(), value.to_owned());
        self.run(move || std::fs::write(format!("/proc/sys/{name}"), value).unwrap());
    }

    /// Answers every TCP connection with `name peer-address` until dropped.
    pub fn tcp(&self, name: &str, at: &str) -> Server {
        let at: SocketAddr = at.parse().unwrap();
        let listener = self.run(move || TcpListener::bind(at).unwrap());
        listener.set_nonblocking(true).unwrap();
        let name = name.to_owned();
        Server::start(move || {
            if let Ok((mut stream, peer)) = listener.accept() {
                // The client may be gone already.
                let _ = stream.write_all(format!("{name} {}", peer.ip().to_canonical()).as_bytes());
            }
        })
    }

    /// Answers every datagram likewise.
    pub fn udp(&self, name: &str, at: &str) -> Server {
        let at: SocketAddr = at.parse().unwrap();
        let socket = self.run(move || UdpSocket::bind(at).unwrap());
        socket.set_nonblocking(true).unwrap();
        let name = name.to_owned();
        Server::start(move || {
            let mut buffer = [0; 64];
            if let Ok((_, peer)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(format!("{name} {}", peer.ip().to_canonical()).as_bytes(), peer);
            }
        })
    }

    /// What a TCP server at `to` answers; the error's text where there is none.
    pub fn ask(&self, to: &str) -> String {
        let to: SocketAddr = to.parse().unwrap();
        self.run(move || {
            let mut stream = match TcpStream::connect_timeout(&to, Duration::from_millis(1500)) {
                Ok(stream) => stream,
                Err(e) => return format!("{:?}", e.kind()),
            };
            stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
            let mut text = String::new();
            match stream.read_to_string(&mut text) {
                Ok(_) => text,
                Err(e) => format!("{:?}", e.kind()),
            }
        })
    }

    pub fn ask_udp(&self, to: &str) -> String {
        let to: SocketAddr = to.parse().unwrap();
        let socket = self.run(move || UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap());
        ask_with(&socket, to)
    }

    pub fn udp_socket(&self, at: &str) -> UdpSocket {
        let at: SocketAddr = at.parse().unwrap();
        self.run(move || UdpSocket::bind(at).unwrap())
    }
}

/// One question with an open socket, so that the flow stays the same.
pub fn ask_with(socket: &UdpSocket, to: SocketAddr) -> String {
    socket.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    if let Err(e) = socket.send_to(b"?", to) {
        return format!("{:?}", e.kind());
    }
    let mut buffer = [0; 64];
    match socket.recv(&mut buffer) {
        Ok(n) => String::from_utf8_lossy(&buffer[..n]).into_owned(),
        Err(e) => format!("{:?}", e.kind()),
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
    stop: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(mut once: impl FnMut() + Send + 'static) -> Server {
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                once();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Server { stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A node with an uplink to the outside: 192.0.2.1 and 2001:db8::1, the outside has .2. The
/// outside knows no way to pods.
pub struct World {
    pub node: Ns,
    pub outside: Ns,
    pub run: RunMount,
    pub dir: tempfile::TempDir,
}

/// The room, and whoever leads host ports to its pods.
pub struct Net {
    net: coracle::net::Net,
    pub proxy: Proxy,
}

impl std::ops::Deref for Net {
    type Target = coracle::net::Net;
    fn deref(&self) -> &coracle::net::Net {
        &self.net
    }
}

/// The program mounts a file system of its own on its run directory.
pub struct RunMount(PathBuf);

impl Drop for RunMount {
    fn drop(&mut self) {
        // Not every test runs the program.
        while umount2(&self.0, MntFlags::MNT_DETACH).is_ok() {}
    }
}

pub const V4: &str = "10.88.0.0/24";
pub const V6: &str = "fd88::/64";
pub const INSTANCE: &str = "tnet";
pub const BRIDGE: &str = "tnet0";
pub const CALL_IPTABLES: &str = "net/bridge/bridge-nf-call-iptables";
pub const CALL_IP6TABLES: &str = "net/bridge/bridge-nf-call-ip6tables";

impl World {
    /// A world and the room in it, as an agent opens it that has just been started. None: this
    /// machine cannot have one.
    pub fn with_net() -> Option<(World, Net)> {
        let world = World::possible()?;
        let net = world.net();
        Some((world, net))
    }

    pub fn possible() -> Option<World> {
        able().then(World::new)
    }

    pub fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let node = Ns::new(dir.path().join("node"));
        let outside = Ns::new(dir.path().join("outside"));
        node.ip("link add up0 mtu 1460 type veth peer name eth0 netns /proc/self/fd/0"
            .replace("/proc/self/fd/0", outside.path.to_str().unwrap())
            .as_str());
        outside.ip("link set eth0 mtu 1460");
        for (ns, link, last) in [(&node, "up0", 1), (&outside, "eth0", 2)] {
            ns.ip(&format!("addr add 192.0.2.{last}/24 dev {link}"));
            ns.ip(&format!("addr add 2001:db8::{last}/64 dev {link} nodad"));
            ns.ip(&format!("link set {link} up"));
        }
        node.ip("addr add 192.0.2.11/24 dev up0");
        node.ip("route add default via 192.0.2.2");
        node.ip("-6 route add default via 2001:db8::2");
        // Carrier and neighbours of the uplink are not our matter.
        let there = outside.udp("there", "[::]:9");
        for to in ["192.0.2.2:9", "[2001:db8::2]:9"] {
            eventually(to, || node.ask_udp(to).contains(' '));
        }
        drop(there);
        let run = RunMount(dir.path().join("run"));
        World { node, outside, run, dir }
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn config(&self) -> NetConfig {
        NetConfig {
            instance: INSTANCE.into(),
            cidrs: vec![V4.parse().unwrap(), V6.parse().unwrap()],
            run: self.run_dir(),
            mtu: None,
        }
    }

    /// As an agent opens it that has just been started.
    pub fn net(&self) -> Net {
        self.net_with(self.config())
    }

    pub fn net_with(&self, config: NetConfig) -> Net {
        std::fs::create_dir_all(&config.run).unwrap();
        let (effects, _) = Effects::open(&config.run, &clock::boot_id().unwrap()).unwrap();
        let effects = Arc::new(effects);
        let node = NodeFacts { pod_cidrs: config.cidrs.clone(), bridge: BRIDGE.into(), ..NodeFacts::default() };
        let proxy = ProxyConfig { table: INSTANCE.into(), node, service_cidrs: Vec::new() };
        self.node.run(|| {
            let proxy = Proxy::open(proxy, Arc::clone(&effects)).unwrap();
            let net = coracle::net::Net::open(config, effects, Arc::new(HostPorts(proxy.clone()))).unwrap();
            Net { net, proxy }
        })
    }

    pub fn pod(&self, name: &str) -> Ns {
        Ns::new(self.dir.path().join(format!("pod-{name}")))
    }

    pub fn attach(&self, net: &Net, name: &str, ns: &Ns, ports: &[HostPort]) -> Attachment {
        self.try_attach(net, name, ns, ports).unwrap()
    }

    pub fn try_attach(
        &self,
        net: &Net,
        name: &str,
        ns: &Ns,
        ports: &[HostPort],
    ) -> Result<Attachment, coracle::net::model::NetError> {
        let request = request(name, &ns.path, ports);
        self.node.run(|| net.attach(&request))
    }

    pub fn detach(&self, net: &Net, name: &str) {
        self.node.run(|| net.detach(&format!("uid-{name}")).unwrap());
    }

    pub fn ensure(&self, net: &Net) {
        self.node.run(|| net.ensure().unwrap());
    }

    pub fn remove_all(&self, net: &Net) {
        self.node.run(|| net.remove_all().unwrap());
    }

    /// Whether the kernel has br_netfilter, here loaded or built in; in CI it must.
    pub fn has_br_netfilter(&self) -> bool {
        let has = self.node.run(|| Path::new("/proc/sys").join(CALL_IPTABLES).exists());
        if !has {
            assert!(std::env::var_os("CI").is_none(), "CI needs br_netfilter");
            eprintln!("SKIP: no br_netfilter in this kernel");
        }
        has
    }

    /// Of each pod's port, by the links' names: whether it is isolated from the others.
    pub fn isolated(&self) -> Vec<bool> {
        let links = self.node.json("-d link show type veth");
        let mut ports: Vec<_> = links.as_array().unwrap().iter().filter(|l| l["ifname"] != "up0").collect();
        ports.sort_by_key(|l| l["ifname"].to_string());
        ports.iter().map(|l| l["linkinfo"]["info_slave_data"]["isolated"].as_bool().unwrap()).collect()
    }

    /// Host ends of pods' links.
    pub fn veths(&self) -> Vec<String> {
        let links = self.node.json("link show type veth");
        let mut names: Vec<String> = links
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|l| l["ifname"].as_str())
            .filter(|n| *n != "up0")
            .map(str::to_owned)
            .collect();
        names.sort();
        names
    }

    pub fn nft(&self, args: &str) -> String {
        self.node.must("nft", &args.split(' ').collect::<Vec<_>>())
    }
}

pub fn request(name: &str, netns: &Path, ports: &[HostPort]) -> AttachRequest {
    AttachRequest { uid: format!("uid-{name}"), pod: format!("test/{name}"), netns: netns.to_owned(), host_ports: ports.to_vec() }
}

pub fn port(protocol: L4, host_ip: &str, host_port: u16, container_port: u16) -> HostPort {
    HostPort { protocol, host_ip: host_ip.parse::<IpAddr>().ok(), host_port, container_port }
}

/// Waits for something that comes by itself.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
