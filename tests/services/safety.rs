//! The agent may die and people may tamper: connections go on.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::ns::{self, Ns};
use super::support::{Node, privileged};
use super::world::{By, NODE, World, at, node_port, service, vip};

/// Clients that connect again and again, each from its place by its way; ends with what they heard.
struct Stream {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<BTreeMap<String, u64>>>,
}

impl Stream {
    fn start(ways: Vec<(Ns, IpAddr, SocketAddr)>) -> Stream {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |(place, from, to): (Ns, IpAddr, SocketAddr)| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                place.run(|| {
                    let mut heard = BTreeMap::new();
                    while !stop.load(Ordering::Relaxed) {
                        let answer = ns::ask(from, to);
                        *heard.entry(answer.split(' ').next().unwrap_or_default().to_owned()).or_default() += 1;
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    heard
                })
            })
        };
        let threads = ways.into_iter().map(start).collect();
        Stream { stop, threads }
    }

    fn end(self) -> BTreeMap<String, u64> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = BTreeMap::new();
        for heard in self.threads.into_iter().map(|t| t.join().unwrap()) {
            heard.into_iter().for_each(|(answer, times)| *all.entry(answer).or_default() += times);
        }
        all
    }
}

/// All tables with all handles: what was made anew shows. Without counters and times.
pub fn rules(node: &Node) -> String {
    let out = node.command("nft").args(["-a", "-s", "list", "ruleset"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn served(w: &World) -> u16 {
    let n = w.number();
    let ports = format!("{{port: 80, targetPort: 8080, nodePort: {}}}", node_port(n));
    w.put("safe", &service("safe", n, &format!("type: NodePort, selector: {{app: web}}, ports: [{ports}]")));
    w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.all_hear(w.outside(2), By::Tcp, at(NODE, node_port(n)), &["a node", "b node"]);
    n
}

fn ways(w: &World, n: u16) -> Vec<(Ns, IpAddr, SocketAddr)> {
    let [c, outside] = [w.pod("c").client(), w.outside(2)];
    let ways = [(c, vip(n, 80)), (outside, at(NODE, node_port(n)))];
    ways.into_iter().flat_map(|(from, to)| [0, 1].map(|i| (from.ns.again(), from.addresses[i], to[i]))).collect()
}

#[test]
fn nobody_is_refused_while_the_agent_dies_and_comes_back_and_no_rule_is_made_anew() {
    if !privileged() {
        return;
    }
    let mut w = World::new();
    let n = served(&w);
    let before = rules(&w.node);
    assert!(before.contains("default/safe") && before.contains("ip6"), "{before}");
    let stream = Stream::start(ways(&w, n));
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(300));
        w.node.kill_agent();
        std::thread::sleep(Duration::from_millis(300));
        w.node.start();
        // The planner has spoken to the proxy when it lists Services.
        w.node.wait("Services are known again", 10, |node| node.ok(&["services"]).contains("safe"));
        std::thread::sleep(Duration::from_millis(300));
        let after = rules(&w.node);
        assert!(before == after, "{}", difference(&before, &after));
    }
    let heard = stream.end();
    assert!(heard.keys().all(|answer| answer == "a" || answer == "b"), "{heard:?}");
    assert!(heard.values().sum::<u64>() > 1000, "{heard:?}");
    println!("{heard:?} over 4 kills");
    // What happens to the Service while nobody is there is done when somebody is.
    w.node.kill_agent();
    w.node.take_away("safe.yaml");
    w.node.start();
    w.hears(w.pod("c").client(), By::Tcp, vip(n, 80)[0], &["dropped"]);
}

pub fn difference(before: &str, after: &str) -> String {
    let only = |a: &str, b: &str, sign: char| {
        let there: std::collections::BTreeSet<&str> = b.lines().collect();
        a.lines().filter(|l| !there.contains(l)).map(|l| format!("{sign} {l}\n")).collect::<String>()
    };
    only(before, after, '-') + &only(after, before, '+')
}

#[test]
fn what_somebody_does_to_our_table_is_undone_within_two_seconds_and_said_once() {
    if !privileged() {
        return;
    }
    let w = World::new();
    let n = served(&w);
    let plain = || {
        let out = w.node.command("nft").args(["-s", "list", "ruleset"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        // Elements of a hash come in any order.
        let mut words: Vec<String> =
            text.lines().map(|l| l.trim().trim_end_matches(',').trim_end_matches(" }").to_owned()).collect();
        let elements = |line: &String| line.strip_prefix("elements = { ").map(str::to_owned);
        words.iter_mut().for_each(|line| *line = elements(line).unwrap_or(std::mem::take(line)));
        words.sort();
        words
    };
    let said = || {
        let log = std::fs::read_to_string(w.node.path("agent.log")).unwrap();
        log.lines().filter(|l| l.contains("WARN") && l.contains("somebody changed our nftables table")).count()
    };
    let whole = plain();
    let ours = &w.node.instance;
    for (by, deed) in [
        vec!["flush", "ruleset"],
        vec!["delete", "table", "ip", ours],
        vec!["flush", "chain", "ip6", ours, "services"],
        vec!["delete", "table", "ip6", ours],
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(said(), usize::from(by > 0));
        assert!(w.node.command("nft").args(&deed).status().unwrap().success());
        let begun = Instant::now();
        while plain() != whole {
            assert!(begun.elapsed() < Duration::from_secs(2), "{deed:?} is not undone:\n{}", plain().join("\n"));
            std::thread::sleep(Duration::from_millis(10));
        }
        println!("nft {}: whole again after {:?}", deed.join(" "), begun.elapsed());
        w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["a kept", "b kept"]);
        w.all_hear(w.outside(2), By::Tcp, at(NODE, node_port(n)), &["a node", "b node"]);
    }
    assert_eq!(said(), 1);
    // What is others' stays as it is, whatever becomes of ours.
    let foreign = "add table inet other; add chain inet other c { type filter hook forward priority 5; }; add rule inet other c counter accept";
    assert!(w.node.command("nft").arg(foreign).status().unwrap().success());
    let list = || w.node.command("nft").args(["-a", "-s", "list", "table", "inet", "other"]).output().unwrap().stdout;
    let theirs = list();
    assert!(w.node.command("nft").args(["delete", "table", "ip", ours]).status().unwrap().success());
    w.node.wait("ours is back", 2, |node| {
        node.command("nft").args(["list", "table", "ip", ours]).output().unwrap().status.success()
    });
    w.put("safe", &service("safe", n, "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]"));
    w.hears(w.outside(2), By::Tcp, at(NODE, node_port(n))[0], &["rejected"]);
    assert_eq!(list(), theirs);
}
