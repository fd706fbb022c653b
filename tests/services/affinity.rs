//! sessionAffinity: ClientIP.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use super::Row;
use super::world::{By, Client, NODE, World, at, ip, node_port, service, slices, vip};

pub const ROWS: &[Row] = &[
    ("Services should have session affinity work for service with type clusterIP [LinuxOnly]", works),
    ("Services should have session affinity work for NodePort service [LinuxOnly]", works),
    (
        "Services should be able to switch session affinity for service with type clusterIP, NodePort service [LinuxOnly]",
        switches,
    ),
    (
        "Services should have session affinity timeout work for service with type clusterIP, NodePort service [LinuxOnly]",
        times_out,
    ),
    ("Networking Granular Checks: Services should function for client IP based session affinity: http, udp", works),
];

/// Ten places of the LAN, all of the one server that answers with the address that was asked.
const PLACES: u8 = 10;

fn spec(n: u16, affinity: &str) -> String {
    format!("type: NodePort, {affinity}ports: [{{port: 80, targetPort: 8080, nodePort: {}}}]", node_port(n))
}

const STICKY: &str = "sessionAffinity: ClientIP, ";

/// A Service of ten endpoints that answer with their own addresses.
fn of_many(w: &World, name: &str) -> String {
    w.many();
    let places: Vec<_> = (0..PLACES)
        .map(|i| ([ip(&format!("198.18.0.{}", i + 1)), ip(&format!("2001:db8:18::{:x}", i + 1))], "elsewhere"))
        .collect();
    slices(name, &places).replace("port: 8080", "port: 8082")
}

fn servers(w: &World, from: Client, to: SocketAddr, times: u32) -> BTreeSet<String> {
    let server = |answer: String| answer.split(' ').next().unwrap().to_owned();
    (0..times).map(|_| server(w.ask(from, By::Tcp, to))).collect()
}

/// Once the Service is there.
fn wait(w: &World, to: [SocketAddr; 2]) {
    for to in to {
        w.node.wait("the Service is served", 5, |_| {
            servers(w, w.on_node(), to, 1).first().is_some_and(|s| s.contains('.') || s.contains(':'))
        });
    }
}

fn works(w: &World) {
    let n = w.number();
    w.put("sticky", &(service("sticky", n, &spec(n, STICKY)) + &of_many(w, "sticky")));
    wait(w, vip(n, 80));
    for way in [vip(n, 80), at(NODE, node_port(n))] {
        for to in way {
            let mut seen = BTreeSet::new();
            for from in [w.pod("a").client(), w.pod("b").client(), w.pod("c").client(), w.outside(2), w.outside(3)] {
                let answered = servers(w, from, to, 15);
                assert_eq!(answered.len(), 1, "{} to {to}: {answered:?}", from.who);
                seen.extend(answered);
            }
            // Not all clients met the same one, but for once in 10,000 times.
            assert!(seen.len() > 1, "{to}: {seen:?}");
        }
    }
    w.take("sticky");
}

fn switches(w: &World) {
    let n = w.number();
    let slices = of_many(w, "switch");
    for _ in 0..2 {
        for (affinity, sticky) in [("", false), (STICKY, true)] {
            w.put("switch", &(service("switch", n, &spec(n, affinity)) + &slices));
            wait(w, vip(n, 80));
            for from in [w.pod("c").client(), w.outside(2)] {
                for to in [vip(n, 80)[0], vip(n, 80)[1], at(NODE, node_port(n))[0], at(NODE, node_port(n))[1]] {
                    w.node.wait("affinity is as it is asked for", 5, |_| (servers(w, from, to, 12).len() == 1) == sticky);
                }
            }
        }
    }
    w.take("switch");
}

/// One second without a connection, and a client may meet another; with connections it stays.
fn times_out(w: &World) {
    let n = w.number();
    let short = "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}}, ";
    w.put("forgets", &(service("forgets", n, &spec(n, short)) + &of_many(w, "forgets")));
    wait(w, vip(n, 80));
    let ways = [(w.pod("c").client(), vip(n, 80)), (w.outside(2), at(NODE, node_port(n)))];
    for (from, [v4, v6]) in ways {
        let kept = servers(w, from, v4, 1);
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(servers(w, from, v4, 1), kept);
        }
        let mut seen = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..12 {
            if seen.iter().all(|s| s.len() > 1) {
                break;
            }
            for (seen, to) in seen.iter_mut().zip([v4, v6]) {
                seen.extend(servers(w, from, to, 1));
            }
            std::thread::sleep(Duration::from_millis(1300));
        }
        assert!(seen.iter().all(|s| s.len() > 1), "{}: {seen:?}", from.who);
    }
    w.take("forgets");
}
