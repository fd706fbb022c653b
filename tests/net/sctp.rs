//! SCTP host ports, with packets: `sctp.py` is at both ends (its header tells how).

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use coracle::net::model::L4::{Sctp, Tcp, Udp};

use crate::world::*;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/net/sctp.py");

/// Ends when its standard input does.
struct Server(Child);

impl Server {
    fn start(ns: &Ns, name: &str, at: &str) -> Server {
        let at: SocketAddr = at.parse().unwrap();
        let (ip, port) = (at.ip().to_string(), at.port().to_string());
        let mut child = ns.run(|| {
            let mut command = Command::new("python3");
            command.args([SCRIPT, "serve", name, &ip, &port]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

fn ask(ns: &Ns, to: &str) -> String {
    let to: SocketAddr = to.parse().unwrap();
    ns.must("python3", &[SCRIPT, "ask", &to.ip().to_string(), &to.port().to_string()]).trim().to_owned()
}

#[test]
fn one_port_number_of_three_protocols_leads_to_three_pods() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b, c, d) = (world.pod("a"), world.pod("b"), world.pod("c"), world.pod("d"));
    world.attach(&net, "a", &a, &[port(Tcp, "", 9000, 80)]);
    world.attach(&net, "b", &b, &[port(Udp, "", 9000, 53)]);
    world.attach(&net, "c", &c, &[port(Sctp, "", 9000, 3868), port(Sctp, "192.0.2.11", 9001, 3868)]);
    world.attach(&net, "d", &d, &[]);
    let _servers = (a.tcp("a", "[::]:80"), b.udp("b", "0.0.0.0:53"), b.udp("b", "[fd88::3]:53"));
    let (v4, v6) = (Server::start(&c, "c", "0.0.0.0:3868"), Server::start(&c, "c", "[fd88::4]:3868"));
    // From outside, by both families.
    assert_eq!(world.outside.ask("192.0.2.1:9000"), "a 192.0.2.2");
    assert_eq!(world.outside.ask_udp("192.0.2.1:9000"), "b 192.0.2.2");
    assert_eq!(ask(&world.outside, "192.0.2.1:9000"), "c 192.0.2.2");
    assert_eq!(world.outside.ask("[2001:db8::1]:9000"), "a 2001:db8::2");
    assert_eq!(world.outside.ask_udp("[2001:db8::1]:9000"), "b 2001:db8::2");
    assert_eq!(ask(&world.outside, "[2001:db8::1]:9000"), "c 2001:db8::2");
    // By hostIP; from the node, from another pod, and from the pod itself.
    assert_eq!(ask(&world.outside, "192.0.2.11:9001"), "c 192.0.2.2");
    assert_eq!(ask(&world.outside, "192.0.2.1:9001"), "TimedOut");
    assert_eq!(ask(&world.node, "192.0.2.1:9000"), "c 192.0.2.1");
    assert_eq!(ask(&d, "192.0.2.1:9000"), "c 10.88.0.5");
    assert_eq!(ask(&c, "192.0.2.1:9000"), "c 10.88.0.1");
    // And without a translation.
    assert_eq!(ask(&d, "10.88.0.4:3868"), "c 10.88.0.5");

    // One goes: its association is forgotten, the others stay.
    let flows = || world.node.must("conntrack", &["-L", "-p", "sctp"]);
    assert!(flows().contains("10.88.0.4"), "{}", flows());
    world.detach(&net, "c");
    drop((v4, v6));
    assert!(!flows().contains("10.88.0.4"), "{}", flows());
    assert_eq!(ask(&world.outside, "192.0.2.1:9000"), "TimedOut");
    assert_eq!(world.outside.ask("192.0.2.1:9000"), "a 192.0.2.2");
    assert_eq!(world.outside.ask_udp("192.0.2.1:9000"), "b 192.0.2.2");
    // Another pod may have it then.
    world.attach(&net, "d", &d, &[port(Sctp, "", 9000, 3868)]);
    let _server = Server::start(&d, "d", "0.0.0.0:3868");
    assert_eq!(ask(&world.outside, "192.0.2.1:9000"), "d 192.0.2.2");
}
