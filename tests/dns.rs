//! The DNS server as the shipped binary, in a network namespace of its own, asked by `dig` and by
//! hand. Upstreams are a scripted server (tests/dns/upstream.py) on another address of it.

#[path = "dns/node.rs"]
mod node;
#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const US: &str = "10.88.0.1";
const US6: &str = "fd88::1";
const UPSTREAM: &str = "192.0.2.53";

fn able() -> bool {
    let root = nix::unistd::geteuid().is_root();
    let dig = Command::new("dig").arg("-v").output().is_ok();
    if !(root && dig) {
        assert!(std::env::var_os("CI").is_none(), "CI needs root and dig (bind9-dnsutils)");
        eprintln!("SKIP: no root, or no dig");
    }
    root && dig
}

/// A namespace with the addresses of node, pods, upstream and a stranger; all of it is gone when
/// the value is.
struct World {
    holder: Child,
    dir: tempfile::TempDir,
    upstream: Option<Child>,
    server: Option<Child>,
}

impl World {
    fn new() -> World {
        let links =
            [US, "10.88.0.7", UPSTREAM, "192.0.2.54", "192.0.2.99"].map(|a| format!("ip addr add {a}/32 dev lo")).join(" && ");
        let script =
            format!("ip link set lo up && {links} && ip addr add {US6}/128 dev lo nodad && echo up && exec sleep 100000");
        let mut holder = Command::new("unshare").args(["--net", "sh", "-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("resolv.conf"), format!("nameserver {UPSTREAM}\n")).unwrap();
        fs::write(dir.path().join("objects.yaml"), OBJECTS).unwrap();
        World { holder, dir, upstream: None, server: None }
    }

    fn whole() -> World {
        let mut world = World::new();
        world.start_upstream();
        world.start(&[]);
        world
    }

    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.holder.id())).arg("--").arg(program).stdin(Stdio::null());
        command
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn start_upstream(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dns/upstream.py");
        let mut command = self.inside("python3");
        let mut child = command.arg(script).args([UPSTREAM, &self.path("asked")]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        self.upstream = Some(child);
    }

    fn end_upstream(&mut self) {
        let mut child = self.upstream.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn start(&mut self, more: &[&str]) {
        let mut command = self.inside(env!("CARGO_BIN_EXE_coracle"));
        command.args(["dns", "serve", "--listen", US, "--listen", US6, "--allow", "10.88.0.0/16", "--allow", "fd88::/64"]);
        command.args([
            "--objects",
            &self.path("objects.yaml"),
            "--resolv-conf",
            &self.path("resolv.conf"),
            "--log-level",
            "debug",
        ]);
        let log = File::create(self.path("log")).unwrap();
        let out = File::create(self.path("counted")).unwrap();
        self.server = Some(command.args(more).stdout(out).stderr(log).spawn().unwrap());
        self.until("it answers", || self.log().contains("DNS: answers"));
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(15);
        while !done() {
            assert!(Instant::now() < end, "not within 15 s: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// dig's answer, from a pod's address.
    fn dig(&self, words: &str) -> String {
        let output = self
            .inside("dig")
            .args(["-b", "10.88.0.7", &format!("@{US}"), "+tries=1", "+timeout=8"])
            .args(words.split(' '))
            .output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }

    fn short(&self, words: &str) -> String {
        self.dig(&format!("{words} +short")).lines().collect::<Vec<_>>().join(" ")
    }

    fn status(&self, words: &str) -> String {
        let text = self.dig(words);
        text.split("status: ").nth(1).map_or(text.clone(), |rest| rest.split(',').next().unwrap().to_owned())
    }

    /// How often the upstream was asked for a name.
    fn asked(&self, name: &str) -> usize {
        fs::read_to_string(self.path("asked")).unwrap().lines().filter(|l| l.split(' ').nth(1) == Some(name)).count()
    }

    /// Ends the server as its user would; what it counted.
    fn stop(&mut self) -> String {
        let mut server = self.server.take().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(server.id() as i32), nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(server.wait().unwrap().success());
        fs::read_to_string(self.path("counted")).unwrap()
    }

    /// A Python program in the namespace; its output.
    fn python(&self, program: &str) -> String {
        let output = self.inside("python3").args(["-c", program]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn resident_kib(&self) -> u64 {
        let pid = self.server.as_ref().unwrap().id();
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = text.lines().find(|l| l.starts_with("RssAnon")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in [self.server.as_mut(), self.upstream.as_mut(), Some(&mut self.holder)].into_iter().flatten() {
            // One that has ended already is as good.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const OBJECTS: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10, "fd96::10"], ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{name: pg, port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: pg, port: 5432}]
endpoints: [{addresses: [10.88.0.5], hostname: db-0}, {addresses: [10.88.0.6]}, {addresses: [10.88.0.9], conditions: {ready: false}}]
---
apiVersion: v1
kind: Service
metadata: {name: out, namespace: shop}
spec: {type: ExternalName, externalName: host.example.test}
"#;

#[test]
fn names_of_the_cluster_by_udp_and_tcp_and_both_families() {
    if !able() {
        return;
    }
    let world = World::whole();
    for way in ["", " +tcp", " +noedns", " +bufsize=4096"] {
        assert_eq!(world.short(&format!("web.shop.svc.cluster.local A{way}")), "10.96.0.10");
        assert_eq!(world.short(&format!("web.shop.svc.cluster.local AAAA{way}")), "fd96::10");
        assert_eq!(world.short(&format!("_pg._tcp.db.shop.svc.cluster.local SRV{way}")).matches("5432").count(), 2);
        assert_eq!(world.status(&format!("nosuch.shop.svc.cluster.local A{way}")), "NXDOMAIN");
    }
    let mut addresses: Vec<String> = world.short("db.shop.svc.cluster.local").split(' ').map(str::to_owned).collect();
    addresses.sort();
    assert_eq!(addresses, ["10.88.0.5", "10.88.0.6"]);
    assert_eq!(world.short("-x 10.96.0.10"), "web.shop.svc.cluster.local.");
    assert_eq!(world.short("-x 10.88.0.5"), "db-0.db.shop.svc.cluster.local.");
    let six = world
        .inside("dig")
        .args(["-b", US6, &format!("@{US6}"), "+short", "+tries=1", "web.shop.svc.cluster.local"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(six.stdout).unwrap(), "10.96.0.10\n");
    let full = world.dig("wEb.sHop.svc.cluster.local A +nocookie");
    assert!(full.contains("wEb.sHop.svc.cluster.local. 5\tIN\tA\t10.96.0.10"), "0x20 and TTL: {full}");
    assert!(full.contains("flags: qr aa rd ra;") && !full.contains("unexpected source"), "{full}");
    let none = world.dig("web.shop.svc.cluster.local MX");
    assert!(none.contains("NOERROR") && none.contains("SOA\tns.dns.cluster.local. hostmaster.cluster.local."), "{none}");
    assert_eq!(world.status("web.shop.svc.cluster.local ANY +notcp"), "REFUSED");
    assert!(world.dig("cluster.local AXFR +tcp").contains("Transfer failed"));
    assert_eq!(world.status("version.bind CH TXT"), "REFUSED");
    assert_eq!(world.status("web.shop.svc.cluster.local A +opcode=2 +noedns"), "NOTIMP");
    assert_eq!(world.status("web.shop.svc.cluster.local A +edns=1 +noednsneg"), "BADVERS");
    assert_eq!(fs::read_to_string(world.path("asked")).unwrap(), "", "nothing of this was asked elsewhere");
}

#[test]
fn the_rest_is_asked_once_and_kept() {
    if !able() {
        return;
    }
    let mut world = World::whole();
    let first = world.short("host.example.test");
    assert!(first.starts_with("203.0."), "{first}");
    for _ in 0..5 {
        assert_eq!(world.short("HOST.example.TEST"), first);
    }
    assert_eq!(world.asked("host.example.test"), 1);
    assert_eq!(world.status("nx.example.test"), "NXDOMAIN");
    assert_eq!(world.status("nx.example.test"), "NXDOMAIN");
    assert_eq!(world.asked("nx.example.test"), 1, "what is not there is kept too");
    assert_eq!(world.short("out.shop.svc.cluster.local"), format!("host.example.test. {first}"), "ExternalName, chain and all");
    assert_eq!(world.short("plain.example.test").split('.').next(), Some("203"), "a server without EDNS");
    assert_eq!(world.asked("plain.example.test"), 2);
    assert_eq!(world.short("forged.example.test"), "203.0.0.1");
    assert_eq!(world.status("fail.example.test"), "SERVFAIL");
    assert_eq!(world.short("type.example.test TYPE65280"), world.short("type.example.test TYPE65280"));
    // The same name from many at once is one question.
    world.python(
        "import socket\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.88.0.7', 0)); s.settimeout(5)\n\
         for i in range(50): s.sendto(bytes([1, i, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + b'\\x04many\\x04test\\0\\0\\1\\0\\1', ('10.88.0.1', 53))\n\
         got = {s.recv(512)[1] for _ in range(50)}\n\
         assert got == set(range(50)), got",
    );
    assert_eq!(world.asked("many.test"), 1);
    let counted = world.stop();
    assert!(counted.contains("coracle_dns_forged_total 3"), "{counted}");
}

#[test]
fn what_does_not_fit_is_truncated_and_comes_whole_by_tcp() {
    if !able() {
        return;
    }
    let world = World::whole();
    let udp = world.dig("big.example.test +ignore +noedns");
    let size = |text: &str| text.split("rcvd: ").nth(1).unwrap().split_whitespace().next().unwrap().parse::<usize>().unwrap();
    assert!(udp.contains("flags: qr tc rd ra") && (480..=512).contains(&size(&udp)), "{udp}");
    let wide = world.dig("big.example.test +ignore +bufsize=4096");
    assert!((1200..=1232).contains(&size(&wide)), "{wide}");
    assert_eq!(world.short("big.example.test").split(' ').count(), 300, "dig goes to TCP");
    assert_eq!(world.asked("big.example.test"), 2, "and so did we, once");
}

#[test]
fn who_asks_without_end_on_one_connection_keeps_nobody_else_waiting() {
    if !able() {
        return;
    }
    let world = World::whole();
    let script = format!(
        r#"
import socket, struct, threading, time
name = b"".join(bytes([len(l)]) + l for l in b"web.shop.svc.cluster.local".split(b".")) + b"\0"
question = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + name + struct.pack("!2H", 1, 1)
many = (struct.pack("!H", len(question)) + question) * 1000
s = socket.socket()
s.bind(("10.88.0.7", 0))
s.connect(("{US}", 53))
def send():
    while True:
        s.sendall(many)
threading.Thread(target=send, daemon=True).start()
end, got = time.time() + 4, 0
while time.time() < end:
    got += len(s.recv(1 << 20))
    if got > 100000:
        print("asking", flush=True)
        got = -1 << 60
"#
    );
    let mut greedy = world.inside("python3").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(greedy.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "asking\n");
    for n in 0..10 {
        let begun = Instant::now();
        assert_eq!(world.short("web.shop.svc.cluster.local +tries=1 +timeout=1"), "10.96.0.10", "{n}");
        assert!(begun.elapsed() < Duration::from_millis(900), "{n}: {:?}", begun.elapsed());
    }
    assert!(greedy.try_wait().unwrap().is_none(), "it asks still");
    greedy.kill().unwrap();
    greedy.wait().unwrap();
}

#[test]
fn with_the_uplink_gone_old_answers_are_given() {
    if !able() {
        return;
    }
    let mut world = World::whole();
    let first = world.short("ttl1.example.test");
    assert_eq!(world.status("nx.ttl.test"), "NXDOMAIN");
    world.end_upstream();
    std::thread::sleep(Duration::from_millis(1100));
    let begun = Instant::now();
    let stale = world.dig("ttl1.example.test");
    assert!(stale.contains(&format!("30\tIN\tA\t{first}")), "{stale}");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(world.status("other.example.test"), "SERVFAIL");
    assert_eq!(world.short("web.shop.svc.cluster.local"), "10.96.0.10", "the cluster's names need no uplink");
    // An uplink that swallows packets, and not one that refuses them.
    world.python(
        "import subprocess; subprocess.run(['ip', 'addr', 'del', '192.0.2.53/32', 'dev', 'lo'], check=True); \
                  subprocess.run(['ip', 'link', 'add', 'up0', 'type', 'veth', 'peer', 'name', 'up1'], check=True); \
                  subprocess.run(['ip', 'link', 'set', 'up0', 'up'], check=True); \
                  subprocess.run(['ip', 'link', 'set', 'up1', 'up'], check=True); \
                  subprocess.run(['ip', 'route', 'add', '192.0.2.53/32', 'dev', 'up0'], check=True); \
                  subprocess.run(['ip', 'neigh', 'add', '192.0.2.53', 'lladdr', '02:00:00:00:00:01', 'dev', 'up0', 'nud', 'permanent'], check=True)",
    );
    std::thread::sleep(Duration::from_secs(6));
    for limit in [1500, 500] {
        let begun = Instant::now();
        assert_eq!(world.short("ttl1.example.test"), first);
        assert!(begun.elapsed() < Duration::from_millis(limit), "{:?}", begun.elapsed());
        std::thread::sleep(Duration::from_secs(5));
    }
    world.python(
        "import subprocess; subprocess.run(['ip', 'link', 'del', 'up0'], check=True); \
                  subprocess.run(['ip', 'addr', 'add', '192.0.2.53/32', 'dev', 'lo'], check=True)",
    );
    world.start_upstream();
    world.until("new answers", || world.short("ttl1.example.test") != first);
    assert!(world.stop().contains("coracle_dns_cache_stale_total"));
}

#[test]
fn strangers_hear_nothing_and_hostile_bytes_do_no_harm() {
    if !able() {
        return;
    }
    let mut world = World::whole();
    let stranger = world
        .inside("dig")
        .args(["-b", "192.0.2.99", &format!("@{US}"), "+tries=1", "+timeout=1", "web.shop.svc.cluster.local"])
        .output();
    assert!(String::from_utf8(stranger.unwrap().stdout).unwrap().contains("no servers could be reached"));
    world.python(
        "import random, socket, struct, time\n\
         random.seed(7)\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.88.0.7', 0))\n\
         query = bytes([1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + b'\\x03web\\x04shop\\x03svc\\x07cluster\\x05local\\0\\0\\1\\0\\1'\n\
         for i in range(20000):\n\
         \x20   b = bytearray(query)\n\
         \x20   for _ in range(random.randrange(1, 6)): b[random.randrange(len(b))] = random.randrange(256)\n\
         \x20   s.sendto(bytes(b[:random.randrange(len(b) + 1)]) if i % 2 else random.randbytes(random.randrange(1500)), ('10.88.0.1', 53))\n\
         \x20   if i % 100 == 0: time.sleep(0.005)\n\
         slow = []\n\
         for i in range(60):\n\
         \x20   t = socket.socket(); t.bind(('10.88.0.7', 0)); t.settimeout(3)\n\
         \x20   t.connect(('10.88.0.1', 53)); t.send(b'\\0'); slow.append(t)\n\
         t = socket.socket(); t.bind(('10.88.0.1', 0)); t.settimeout(3); t.connect(('10.88.0.1', 53))\n\
         t.sendall(struct.pack('!H', len(query)) + query + struct.pack('!H', len(query)) + query)\n\
         for _ in range(2):\n\
         \x20   n, = struct.unpack('!H', t.recv(2, socket.MSG_WAITALL)); assert t.recv(n, socket.MSG_WAITALL)[3] & 15 == 0\n\
         open_ones = 0\n\
         time.sleep(11)\n\
         for t in slow:\n\
         \x20   try: assert t.recv(1) == b''\n\
         \x20   except ConnectionResetError: pass\n\
         for junk in (b'\\0\\0', b'\\0\\x05hello', b'\\xff\\xff' + b'x' * 2000):\n\
         \x20   t = socket.socket(); t.bind(('10.88.0.7', 0)); t.settimeout(5); t.connect(('10.88.0.1', 53)); t.sendall(junk)\n\
         \x20   try: assert t.recv(1) == b''\n\
         \x20   except ConnectionResetError: pass",
    );
    assert_eq!(world.short("web.shop.svc.cluster.local +tcp"), "10.96.0.10");
    let counted = world.stop();
    assert!(counted.contains("coracle_dns_strangers_total 1\n"), "{counted}");
}

#[test]
fn a_flood_of_names_stays_within_bounds() {
    if !able() {
        return;
    }
    let mut world = World::whole();
    world.short("host.example.test");
    let before = world.resident_kib();
    let flood = |count: u32, name: &str| {
        world.python(&format!(
            "import socket, struct, time\n\
             s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.88.0.7', 0)); s.settimeout(5)\n\
             head = bytes([1, 0, 0, 1, 0, 0, 0, 0, 0, 0])\n\
             begun = time.time(); sent = got = 0\n\
             while got < {count}:\n\
             \x20   while sent < {count} and sent - got < 32:\n\
             \x20       name = {name}\n\
             \x20       s.sendto(struct.pack('!H', sent & 0xffff) + head + name + b'\\0\\0\\1\\0\\1', ('10.88.0.1', 53)); sent += 1\n\
             \x20   s.recv(2048); got += 1\n\
             print(int(got / (time.time() - begun)))"
        ))
    };
    let outside = flood(20_000, "b'\\x09n%08d\\x04test' % sent");
    let cluster = flood(50_000, "b'\\x03web\\x04shop\\x03svc\\x07cluster\\x05local'");
    let after = world.resident_kib();
    eprintln!(
        "one Python client, 32 in flight: {} names/s from upstream, {} names/s of the cluster, {before} -> {after} KiB",
        outside.trim(),
        cluster.trim()
    );
    assert!(after < before + 4096, "{before} -> {after} KiB");
    world.stop();
}

#[test]
fn a_port_that_is_taken_is_told_with_its_holder_and_taken_over_once_free() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.start_upstream();
    let mut command = world.inside("python3");
    let program = format!(
        "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('{US}', 53)); print('up', flush=True); time.sleep(1000)"
    );
    let mut other = command.args(["-c", &program]).stdout(Stdio::piped()).spawn().unwrap();
    let mut two = [0; 2];
    other.stdout.as_mut().unwrap().read_exact(&mut two).unwrap();
    world.start(&[]);
    let log = world.log();
    assert!(log.contains("cannot listen") && log.contains(&format!("(pid {})", other.id())), "{log}");
    assert!(log.contains("servers=[fd88::1]") || log.contains("fd88::1"), "the other address is served: {log}");
    other.kill().unwrap();
    other.wait().unwrap();
    world.until("the port is taken over", || world.log().contains("the port is free now"));
    assert_eq!(world.short("web.shop.svc.cluster.local"), "10.96.0.10");
    assert_eq!(world.log().matches("cannot listen").count(), 1, "told once");
}

#[test]
fn changed_resolver_files_are_noticed_and_we_never_ask_ourselves() {
    if !able() {
        return;
    }
    let mut world = World::whole();
    assert!(world.short("a.example.test").starts_with("203."));
    File::create(world.path("resolv.conf"))
        .unwrap()
        .write_all(format!("nameserver {US}\nnameserver {US6}\n").as_bytes())
        .unwrap();
    std::thread::sleep(Duration::from_millis(2100));
    let begun = Instant::now();
    assert_eq!(world.status("b.example.test"), "SERVFAIL");
    assert!(begun.elapsed() < Duration::from_secs(1), "nobody is left to ask");
    fs::write(world.path("resolv.conf"), format!("nameserver 192.0.2.54\nnameserver {UPSTREAM}\n")).unwrap();
    std::thread::sleep(Duration::from_millis(2100));
    assert!(world.short("c.example.test").starts_with("203."), "the first of two does not answer");
    // A loop over a forwarder of somebody else's that asks us again.
    let program = format!(
        "import socket, threading\n\
         s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('192.0.2.54', 53)); print('up', flush=True)\n\
         back = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); back.bind(('10.88.0.7', 0))\n\
         n = 0\n\
         while True:\n\
         \x20   m, _ = s.recvfrom(4096); back.sendto(m, ('{US}', 53)); n += 1; print(n, flush=True)"
    );
    let out = File::create(world.path("looped")).unwrap();
    let mut looper = world.inside("python3").args(["-c", &program]).stdout(out).spawn().unwrap();
    world.until("the looper is up", || fs::read_to_string(world.path("looped")).unwrap().contains("up"));
    fs::write(world.path("resolv.conf"), "nameserver 192.0.2.54\n# and no other\n").unwrap();
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(world.status("d.example.test"), "SERVFAIL");
    let rounds: u32 = fs::read_to_string(world.path("looped")).unwrap().lines().last().unwrap().parse().unwrap();
    looper.kill().unwrap();
    looper.wait().unwrap();
    assert!(rounds <= 3, "a loop ends in its first flight: {rounds} questions");
    world.stop();
}
