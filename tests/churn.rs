//! Churn: 1,000 Services of 10 endpoints, 20 of them changed every second, while clients connect and
//! the agent is killed again and again. No connection is refused, none reaches an endpoint a second
//! after its removal was programmed, and what did not change is in the kernel untouched.
//!
//! What was programmed when is known by canaries: a Service that is changed after all else; once
//! its new endpoint answers, all that was changed before it is in the kernel. Before the kills: what
//! one change costs the agent and how soon it is seen. 10 kills in a minute;
//! `CORACLE_CHURN_SECONDS=300 CORACLE_CHURN_KILLS=50` in `make soak`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/ns.rs"]
#[allow(dead_code)]
mod ns;
#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;
#[path = "services/world.rs"]
#[allow(dead_code)]
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use support::Node;
use world::ip;

const SERVICES: u32 = 1_000;
const ENDPOINTS: usize = 10;
/// Of each Service: those that serve it now are some of these.
const PLACES: u32 = 14;
const A_SECOND: u32 = 20;
/// How long after a removal was programmed a connection may still meet the endpoint.
const GRACE: Duration = Duration::from_secs(1);
/// The last Service; nobody churns it.
const CANARY: u32 = SERVICES;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().unwrap())
}

fn vip(service: u32) -> SocketAddr {
    (Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 96, 16, 0)) + service), 80).into()
}

fn place(service: u32, place: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)) + service * 16 + place + 1)
}

struct Random(u64);
impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }
}

fn manifest(service: u32, places: &BTreeSet<u32>) -> String {
    let mut yaml = format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: s{service}}}\nspec: {{clusterIP: {}, ports: [{{port: 80}}]}}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: s{service}-1, labels: {{kubernetes.io/service-name: s{service}}}}}\n\
         addressType: IPv4\nports: [{{port: 8080}}]\nendpoints:\n",
        vip(service).ip()
    );
    for at in places {
        writeln!(yaml, "- addresses: [{}]", place(service, *at)).unwrap();
    }
    yaml
}

/// One endpoint of a Service: when it was asked for, and when it was taken away.
struct Stay {
    from: Instant,
    until: Option<Instant>,
}

/// What the manifests have said so far.
struct Wanted {
    now: Vec<BTreeSet<u32>>,
    stays: BTreeMap<Ipv4Addr, Vec<Stay>>,
    /// Of canaries: when they were written and when they were seen.
    seen: Vec<(Instant, Instant)>,
    lately: Vec<u32>,
    changes: u32,
}

impl Wanted {
    fn new() -> Wanted {
        let now: Vec<BTreeSet<u32>> =
            (0..=SERVICES).map(|s| if s == CANARY { [0].into() } else { (0..ENDPOINTS as u32).collect() }).collect();
        let at = Instant::now();
        let all = now.iter().zip(0..).flat_map(|(places, s)| places.iter().map(move |p| place(s, *p)));
        let stays = all.map(|ip| (ip, vec![Stay { from: at, until: None }])).collect();
        Wanted { now, stays, seen: Vec::new(), lately: vec![0], changes: 0 }
    }

    /// Other endpoints of a Service; what stays is kept. To be written right after.
    fn change(&mut self, service: u32, places: BTreeSet<u32>) -> String {
        let at = Instant::now();
        let before = std::mem::replace(&mut self.now[service as usize], places);
        let after = &self.now[service as usize];
        for gone in before.difference(after) {
            self.stays.get_mut(&place(service, *gone)).unwrap().last_mut().unwrap().until = Some(at);
        }
        for come in after.difference(&before) {
            self.stays.entry(place(service, *come)).or_default().push(Stay { from: at, until: None });
        }
        self.changes += 1;
        self.lately.push(service);
        manifest(service, after)
    }

    /// When everything written before was in the kernel for sure; None: not yet.
    fn programmed(&self, written: Instant) -> Option<Instant> {
        self.seen.iter().find(|(canary, _)| *canary >= written).map(|(_, seen)| *seen)
    }
}

struct Met {
    service: u32,
    began: Instant,
    answer: String,
}

/// Connects to Services, mostly to those that were changed lately.
fn clients(wanted: &Mutex<Wanted>, from: IpAddr, seed: u64, stop: &AtomicBool) -> Vec<Met> {
    let mut random = Random(seed);
    let mut met = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let service = match random.below(4) {
            0 => random.below(SERVICES),
            _ => {
                let wanted = wanted.lock().unwrap();
                let last = wanted.lately.len().min(60);
                wanted.lately[wanted.lately.len() - 1 - random.below(last as u32) as usize]
            }
        };
        let began = Instant::now();
        let answer = ns::ask(from, vip(service));
        met.push(Met { service, began, answer: answer.split(' ').next().unwrap_or_default().to_owned() });
        std::thread::sleep(Duration::from_millis(8));
    }
    met
}

fn judge(wanted: &Wanted, met: &[Met]) -> Vec<String> {
    let mut wrong = Vec::new();
    for Met { service, began, answer } in met {
        let Ok(server) = answer.parse::<Ipv4Addr>() else {
            wrong.push(format!("s{service}: {answer}"));
            continue;
        };
        let stays = wanted.stays.get(&server).map(Vec::as_slice).unwrap_or_default();
        let may = stays.iter().any(|stay| {
            let over = stay.until.and_then(|until| wanted.programmed(until));
            // The connection may have begun a little before we noted what we were about to write.
            stay.from <= *began + GRACE && over.is_none_or(|over| *began <= over + GRACE)
        });
        if !may {
            wrong.push(format!("s{service} led to {server}, which is long gone"));
        }
    }
    wrong
}

/// One change every 50 ms.
fn churn(node: &Node, wanted: &Mutex<Wanted>, random: &mut Random) {
    let service = random.below(SERVICES);
    let mut wanted = wanted.lock().unwrap();
    let mut places = wanted.now[service as usize].clone();
    // Some endpoints give way to others; sometimes there are fewer, but never none.
    for _ in 0..=random.below(3) {
        let gone = *places.iter().nth(random.below(places.len() as u32) as usize).unwrap();
        if places.len() > 5 {
            places.remove(&gone);
        }
        places.insert(random.below(PLACES));
    }
    let yaml = wanted.change(service, places);
    node.put(&format!("s{service}.yaml"), &yaml);
}

/// Changes the canary and waits until that is seen; gives how long it took.
fn canary(node: &Node, wanted: &Mutex<Wanted>, ask: impl Fn() -> String) -> Duration {
    let (written, next) = {
        let mut wanted = wanted.lock().unwrap();
        let next = (wanted.now[CANARY as usize].first().unwrap() + 1) % PLACES;
        let yaml = wanted.change(CANARY, [next].into());
        let written = Instant::now();
        node.put("canary.yaml", &yaml);
        (written, place(CANARY, next).to_string())
    };
    loop {
        if ask().starts_with(&format!("{next} ")) {
            let seen = Instant::now();
            wanted.lock().unwrap().seen.push((written, seen));
            return seen - written;
        }
        assert!(written.elapsed() < Duration::from_secs(20), "a change is not seen\n{}", node.log_tail());
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// CPU that the agent has used so far.
fn cpu(node: &Node) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{}/stat", node.agent_pid())).unwrap();
    let rest = text.rsplit_once(") ").unwrap().1;
    let ticks: u64 = rest.split(' ').skip(11).take(2).map(|t| t.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn resident(node: &Node) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", node.agent_pid())).unwrap();
    text.lines().filter(|l| l.starts_with("VmRSS") || l.starts_with("VmHWM")).collect::<Vec<_>>().join(" ")
}

/// Chains, rules and sets with their handles, and the elements of Services that are not `touched`.
fn rules(node: &Node, touched: &BTreeSet<u32>) -> BTreeSet<String> {
    let out = node.command("nft").args(["-a", "-s", "list", "ruleset"]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let touched: BTreeSet<String> = touched.iter().map(|s| vip(*s).ip().to_string()).collect();
    let mut all = BTreeSet::new();
    let mut chain = String::new();
    for line in String::from_utf8(out.stdout).unwrap().lines() {
        if line.contains('{') && line.contains("# handle") {
            line.trim().clone_into(&mut chain);
        }
        // Several elements stand on one line.
        for word in line.trim().trim_start_matches("elements = { ").trim_end_matches(" }").split(", ") {
            let first = word.split(' ').next().unwrap_or_default();
            if !touched.contains(first) {
                all.insert(format!("{chain} | {}", word.trim_end_matches(',')));
            }
        }
    }
    all
}

fn percentile(of: &mut [Duration], part: f64) -> Duration {
    of.sort();
    of[((of.len() - 1) as f64 * part) as usize]
}

#[test]
fn a_thousand_services_churn_while_the_agent_is_killed() {
    if !support::privileged() {
        return;
    }
    let (seconds, kills) = (number("CORACLE_CHURN_SECONDS", 60), number("CORACLE_CHURN_KILLS", 10));
    let seed = number("CORACLE_SEED", u64::from(std::process::id()));
    println!("seed {seed}, {seconds} s, {kills} kills");
    let (mut node, host, lan) = world::ground();
    node.args.push("--dns=auto".to_owned());
    lan.ip("route add local 198.18.0.0/15 dev lo");
    let server = lan.serve_all(8080);
    let wanted = Mutex::new(Wanted::new());
    for service in 0..=SERVICES {
        let file = if service == CANARY { "canary.yaml".to_owned() } else { format!("s{service}.yaml") };
        std::fs::write(node.path("manifests").join(file), manifest(service, &wanted.lock().unwrap().now[service as usize]))
            .unwrap();
    }
    let begun = Instant::now();
    node.start();
    let from = ip(world::FAR[0]);
    let ask = || lan.ask(from, vip(CANARY));
    canary(&node, &wanted, ask);
    println!(
        "started with {SERVICES} Services: all served after {:?}, {:?} of CPU, {}",
        begun.elapsed(),
        cpu(&node),
        resident(&node)
    );

    let mut random = Random(seed);
    what_one_change_costs(&node, &wanted, &mut random, ask);

    let stop = AtomicBool::new(false);
    let met = std::thread::scope(|scope| {
        let places = [(&lan, ip("192.0.2.2")), (&lan, ip("192.0.2.3")), (&host, ip(world::NODE[0]))];
        let threads: Vec<_> = places
            .into_iter()
            .zip(1..)
            .map(|((place, from), n)| {
                scope.spawn({
                    let (wanted, stop) = (&wanted, &stop);
                    move || place.run(|| clients(wanted, from, seed + n, stop))
                })
            })
            .collect();
        // Whatever fails here: the threads have to end.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let period = Duration::from_secs(seconds) / kills.max(1) as u32;
            for kill in 0..kills {
                // At any point of a change, so at any time.
                let life = period.mul_f64(0.5) + Duration::from_millis(u64::from(random.below(400)));
                let latencies = churning(&node, &wanted, &mut random, life, ask);
                // The last of them may not be in the kernel yet.
                let before_changes = wanted.lock().unwrap().lately.len().saturating_sub(30);
                let before = rules(&node, &BTreeSet::new());
                node.kill_agent();
                // Nobody is there: what is changed now is done when somebody is.
                for _ in 0..random.below(5) {
                    churn(&node, &wanted, &mut random);
                }
                let begun = Instant::now();
                node.start();
                let up = begun.elapsed();
                let seen = canary(&node, &wanted, ask);
                let touched: BTreeSet<u32> = wanted.lock().unwrap().lately[before_changes..].iter().copied().collect();
                let after = rules(&node, &touched);
                let lost: Vec<&String> = after.symmetric_difference(&before).filter(|l| !is_of(l, &touched)).take(20).collect();
                assert!(lost.is_empty(), "the agent has changed what did not: {lost:#?}");
                println!("kill {}: up after {up:?}, all served {seen:?} later; {latencies}", kill + 1);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        let met: Vec<Met> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        if let Err(panic) = result {
            println!("{}", judge(&wanted.lock().unwrap(), &met).join("\n"));
            std::panic::resume_unwind(panic);
        }
        met
    });
    let wanted = wanted.into_inner().unwrap();
    let wrong = judge(&wanted, &met);
    println!("{} connections, {} changes, {} served", met.len(), wanted.changes, server.served.load(Ordering::Relaxed));
    assert!(
        met.len() as u64 > 20 * seconds && u64::from(wanted.changes) > seconds * u64::from(A_SECOND) / 4,
        "too little happened"
    );
    assert!(
        wrong.is_empty(),
        "{} of {} connections went wrong:\n{}",
        wrong.len(),
        met.len(),
        wrong.iter().take(30).cloned().collect::<Vec<_>>().join("\n")
    );
}

fn is_of(line: &str, touched: &BTreeSet<u32>) -> bool {
    let element = line.split(" | ").nth(1).unwrap_or_default();
    let first = element.split(' ').next().unwrap_or_default();
    // Chains are shared: they come with the first Service that needs them and go with the last.
    let shared = line.contains("chain lb-") || element.starts_with("chain lb-");
    shared || touched.iter().any(|s| vip(*s).ip().to_string() == first)
}

/// 20 changes a second and four canaries, for a while.
fn churning(node: &Node, wanted: &Mutex<Wanted>, random: &mut Random, life: Duration, ask: impl Fn() -> String) -> String {
    let (begun, spent) = (Instant::now(), cpu(node));
    let (mut changes, mut seen) = (0, Vec::new());
    while begun.elapsed() < life {
        let due = begun + Duration::from_secs(1) / A_SECOND * changes;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if changes % 6 == 5 {
            seen.push(canary(node, wanted, &ask));
        } else {
            churn(node, wanted, random);
        }
        changes += 1;
    }
    let cost = (cpu(node) - spent) / changes.max(1);
    let most = seen.iter().max().copied().unwrap_or_default();
    format!("{changes} changes, {cost:?} of CPU each, seen after {:?}, at most {most:?}", percentile(&mut seen, 0.5))
}

fn what_one_change_costs(node: &Node, wanted: &Mutex<Wanted>, random: &mut Random, ask: impl Fn() -> String) {
    // What was written lately is read again for a while.
    std::thread::sleep(Duration::from_secs(4));
    canary(node, wanted, &ask);
    std::thread::sleep(Duration::from_millis(500));
    let spent = cpu(node);
    let mut alone: Vec<Duration> = (0..40)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            canary(node, wanted, &ask)
        })
        .collect();
    let each = (cpu(node) - spent) / 40;
    let (half, most) = (percentile(&mut alone, 0.5), percentile(&mut alone, 1.0));
    println!("one change at a time: {each:?} of CPU each; seen after {half:?} (median), {most:?} (most); {}", resident(node));
    println!("without kills: {}", churning(node, wanted, random, Duration::from_secs(5), &ask));
}
