//! What Services cost the kernel: to load them, to change one, to go through one. Measured, not
//! judged. `make bench` runs it: `cargo test --test proxy -- --ignored --nocapture cost`.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use coracle::proxy::apply::{Keeper, Reach};
use coracle::proxy::layout::{Ground, Layout};
use coracle::proxy::model::{Endpoint, NodeFacts, NodePortAddresses, ServicePort, ServicePortName};
use coracle::proxy::table::acts::plan_changes;
use coracle::proxy::table::changes::Changes;
use coracle::proxy::table::encode::encode;
use coracle::proxy::table::ir::Family;
use coracle::sys::netns;
use nix::time::{ClockId, clock_gettime};

use crate::ground::BRIDGE;
use crate::nft::able;

const ENDPOINTS: u32 = 3;

fn address(base: u32, n: u32) -> IpAddr {
    IpAddr::from((base + n).to_be_bytes())
}

fn service(n: u32, endpoints: u32) -> ServicePort {
    let endpoint = |k: u32| Endpoint { ip: address(0x0a80_0000 + k * 0x1_0000, n), port: 8080, local: false };
    let cluster: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
    ServicePort {
        name: ServicePortName { namespace: "bench".into(), service: format!("service-{n}"), port: "http".into() },
        port: 80,
        cluster_ip: Some(address(0x0a60_0000, n)),
        has_any: !cluster.is_empty(),
        cluster,
        ..ServicePort::default()
    }
}

fn layout(services: impl IntoIterator<Item = ServicePort>) -> Layout {
    let node = NodeFacts {
        addresses: vec!["192.0.2.1".parse().unwrap()],
        pod_cidrs: vec!["10.88.0.0/24".parse().unwrap()],
        node_port_addresses: NodePortAddresses::All,
        bridge: BRIDGE.into(),
        ..NodeFacts::default()
    };
    let mut layout = Layout::new(Ground::of(Family::Ip, "cost", &node, &["10.96.0.0/16".parse().unwrap()], true));
    layout.load(services);
    layout
}

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    Duration::new(time.tv_sec() as u64, time.tv_nsec() as u32)
}

fn kilobytes(file: &str, name: &str) -> i64 {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Of this process: now, and the most that it ever was.
fn memory() -> (i64, i64) {
    (kilobytes("/proc/self/status", "RssAnon:"), kilobytes("/proc/self/status", "VmHWM:"))
}

fn micros(d: Duration) -> f64 {
    d.as_secs_f64() * 1e6
}

fn middle(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// What of a change is our own work: acts and messages.
fn encoded(keeper: &Keeper, changes: &Changes) -> Duration {
    let held = keeper.held().unwrap().clone();
    let began = cpu();
    let mut after = None;
    if !changes.keeps_structure() {
        let (sets, chains) = (changes.sets.clone(), changes.chains.clone());
        let next = after.insert(held.clone());
        Changes { sets, chains, ..Changes::default() }.apply_to(next);
    }
    let acts = plan_changes(&held, after.as_ref().unwrap_or(&held), changes);
    std::hint::black_box(encode(held.family, &held.name, &acts.main).batch.len());
    cpu() - began
}

/// One Service now like this, now like that: what each way costs.
fn measured(names: [&str; 2], services: u32, layout: &mut Layout, keeper: &mut Keeper, states: [Option<ServicePort>; 2]) {
    let name = states.iter().flatten().next().unwrap().name.clone();
    let mut times = [(); 2].map(|()| [(); 3].map(|()| Vec::new()));
    for turn in 0..400 {
        let began = cpu();
        let gone = if states[turn % 2].is_none() { Some(&name) } else { None };
        let changes = layout.change(gone, states[turn % 2].clone());
        let planned = cpu();
        let ours = encoded(keeper, &changes);
        let (wall, spent) = (Instant::now(), cpu());
        assert!(!changes.is_empty() && keeper.change(&changes).is_some(), "{name}");
        let [plan, kernel, seen] = &mut times[turn % 2];
        plan.push(planned - began);
        kernel.push((cpu() - spent).saturating_sub(ours));
        seen.push(wall.elapsed());
    }
    for (what, [mut plan, mut kernel, mut seen]) in names.into_iter().zip(times) {
        let (p50, seen) = (middle(&mut kernel), middle(&mut seen));
        let p99 = kernel[kernel.len() * 99 / 100];
        let [p50, p99, seen, plan] = [p50, p99, seen, middle(&mut plan)].map(micros);
        println!(
            "{what}, {services} Services: kernel cpu p50 {p50:.1} p99 {p99:.1} µs, wall {seen:.1} µs; planned in {plan:.1} µs"
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn cost_of_changes_loads_and_looks() {
    if !able() {
        return;
    }
    for services in [10, 1_000, 10_000] {
        netns::throw_away(|| {
            let (before, slab) = (memory(), kilobytes("/proc/meminfo", "SUnreclaim:"));
            let (began, spent) = (Instant::now(), cpu());
            // Beside them one of each smaller number, so that these are in use.
            let few = (0..ENDPOINTS).map(|n| service(60_000 + n, n));
            let mut layout = layout((0..services).map(|n| service(n, ENDPOINTS)).chain(few));
            let wanted = memory();
            let whole = layout.table();
            let (planned, held) = (began.elapsed(), memory());
            let mut keeper = Keeper::new().unwrap();
            keeper.bring(whole, Reach::All, Instant::now()).unwrap();
            let (loaded, load_cpu) = (began.elapsed(), cpu() - spent);
            coracle::sys::process::trim_heap();
            let after = memory();
            println!(
                "load {services} x {ENDPOINTS}: planned in {planned:?}, in the kernel after {loaded:?} (cpu {load_cpu:?}); \
                 wanted {} kB, with the table {} kB, at rest {} kB, process at most {} kB, kernel's slabs {} kB more",
                wanted.0 - before.0,
                held.0 - before.0,
                after.0 - before.0,
                after.1,
                kilobytes("/proc/meminfo", "SUnreclaim:") - slab,
            );
            let began = Instant::now();
            assert_eq!(keeper.bring(layout.table(), Reach::All, Instant::now()).unwrap().acts, 0);
            println!("look at {services} x {ENDPOINTS}, nothing differs: {:?}", began.elapsed());

            let n = services / 2;
            let mut other = service(n, ENDPOINTS);
            other.cluster[1].ip = address(0x0a00_0000, n);
            let mut both = |names, states| measured(names, services, &mut layout, &mut keeper, states);
            let like = |count| Some(service(n, count));
            both(["one endpoint for another", "… and back"], [Some(other), like(3)]);
            both(["3 endpoints to 2", "2 endpoints to 3"], [like(2), like(3)]);
            both(["3 endpoints to 1", "1 endpoint to 3"], [like(1), like(3)]);
            both(["3 endpoints to 0", "0 endpoints to 3"], [like(0), like(3)]);
            both(["a Service removed", "a Service added"], [None, like(3)]);
            both(["to 5 endpoints, the first with 5", "to 3, the last with 5"], [like(5), like(3)]);
            let alone = 60_001;
            both(
                ["1 endpoint to 0, the last with 1", "0 endpoints to 1, the first with 1"],
                [0, 1].map(|k| Some(service(alone, k))),
            );
            // With many numbers of endpoints in use the chains that tell them are long.
            let many: Vec<ServicePort> = (4..20).chain([40, 70]).map(|k| service(61_000 + k, k)).collect();
            assert!(keeper.change(&layout.change([], many)).is_some());
            let mut both = |names, states| measured(names, services, &mut layout, &mut keeper, states);
            both(["20 numbers in use: 3 endpoints to 2", "… 2 to 3"], [like(2), like(3)]);
            both(["20 numbers in use: to 140, the first", "… to 3, the last with 140"], [like(140), like(3)]);
            // These have chains of their own, that elements lead to.
            let sticky = |n| ServicePort { affinity: Some(Duration::from_secs(10_800)), ..service(50_000 + n, 3) };
            assert!(keeper.change(&layout.change([], (0..services / 10).map(sticky))).is_some());
            let mut both = |names, states| measured(names, services, &mut layout, &mut keeper, states);
            both(["a tenth more with sessionAffinity: 3 endpoints to 2", "… 2 to 3"], [like(2), like(3)]);
            both(["… to 21, the first", "… to 3, the last with 21"], [like(21), like(3)]);
            both(["… one with sessionAffinity removed", "… added"], [None, Some(sticky(0))]);
        })
        .unwrap();
    }
}

/// How long a connection takes; it is reset at once.
fn connect(to: SocketAddr) -> Duration {
    let began = Instant::now();
    let stream = TcpStream::connect(to).unwrap();
    let took = began.elapsed();
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
    took
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_hop() {
    if !able() {
        return;
    }
    let ground = crate::ground::Ground::new();
    let direct: SocketAddr = "10.88.0.3:8080".parse().unwrap();
    let listener = ground.b.run(move || TcpListener::bind(direct).unwrap());
    let server = std::thread::spawn(move || while listener.accept().is_ok_and(|(_, from)| from.port() != 999) {});
    let numbers: Vec<u32> = (1..=16).chain([32, 64, 128, 256]).collect();
    for used in [1, 5, 20] {
        // All of an endpoint's numbers lead to the one server.
        let end = Endpoint { ip: direct.ip(), port: direct.port(), local: true };
        let with = |n: &u32| ServicePort { cluster: vec![end; *n as usize], ..service(*n, 1) };
        let table = layout(numbers[..used].iter().map(with)).table();
        ground.node.run(|| Keeper::new().unwrap().bring(table, Reach::All, Instant::now())).unwrap();
        for at in [numbers[0], numbers[used - 1]] {
            let vip = SocketAddr::new(address(0x0a60_0000, at), 80);
            let (mut straight, mut through): (Vec<_>, Vec<_>) =
                ground.a.run(|| (0..3000).map(|_| (connect(direct), connect(vip))).unzip());
            let [straight, through] = [&mut straight, &mut through].map(|times| micros(middle(times)));
            let more = through - straight;
            println!(
                "{used} numbers of endpoints in use, to a Service of {at}: direct {straight:.1} µs, through it {more:+.1} µs"
            );
        }
    }
    ground.b.run(move || {
        use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage};
        use std::os::fd::AsRawFd;
        let fd = socket::socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(direct.ip(), 999))).unwrap();
        socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(direct)).unwrap();
    });
    server.join().unwrap();
}
