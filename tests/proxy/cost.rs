//! What it costs to write tables: measured, not judged. `make bench` runs it:
//! `cargo test --test proxy -- --ignored --nocapture cost`.

use std::time::{Duration, Instant};

use coracle::proxy::apply::{Keeper, Reach};
use coracle::proxy::table::changes::{Change, Changes};
use coracle::proxy::table::ir::*;
use coracle::sys::netns;
use nix::time::{ClockId, clock_gettime};

use crate::nft::able;

const FAMILY: Family = Family::Ip;
const ENDPOINTS: u32 = 3;

fn vip(n: u32) -> Value {
    Value::Address(std::net::Ipv4Addr::from(0x0a60_0000 + n).into())
}

fn endpoint(n: u32, index: u32, version: u8) -> (Key, Element) {
    let key = Key::of(&[vip(n), Value::Protocol(6), Value::Port(80), Value::Index(index)]);
    let to = std::net::Ipv4Addr::from(0x0a00_0000 + n * 4 + index + (u32::from(version) << 22));
    (key, Element::values(&[Value::Address(to.into()), Value::Port(8080)]))
}

/// As the layout has it: addresses to shared chains, addresses and index to endpoints.
fn table(services: u32) -> Table {
    use Type::{Address, Index, Port, Protocol};
    let mut table = Table::new(FAMILY, "cost");
    table.sets.insert("svc".into(), SetSpec::verdict_map(&[Address, Protocol, Port]));
    table.sets.insert("eps".into(), SetSpec::map(&[Address, Protocol, Port, Index], &[Address, Port]));
    let key = vec![Field::Destination, Field::Protocol, Field::DestinationPort];
    for count in [2, ENDPOINTS] {
        let mut by_index = key.clone();
        by_index.push(Field::Random { modulus: count, offset: 0 });
        let rules = vec![Rule::new("any endpoint", vec![Step::DnatMap { key: by_index, map: "eps".into() }])];
        table.chains.insert(format!("lb-{count}").into(), Chain { base: None, rules });
    }
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        let rules = vec![Rule::new("services", vec![Step::VerdictMap { key: key.clone(), map: "svc".into() }])];
        table.chains.insert(name.into(), Chain { base: Some(Base { kind: ChainType::Nat, hook, priority: -100 }), rules });
    }
    let to: Name = format!("lb-{ENDPOINTS}").into();
    let service = |n: u32| {
        let comment: std::sync::Arc<str> = format!("bench/service-{n}:http").into();
        (
            Key::of(&[vip(n), Value::Protocol(6), Value::Port(80)]),
            Element::verdict(Verdict::Goto(Name::clone(&to))).with(&comment),
        )
    };
    table.elements.insert("svc".into(), (0..services).map(service).collect());
    table.elements.insert("eps".into(), (0..services).flat_map(|n| (0..ENDPOINTS).map(move |i| endpoint(n, i, 0))).collect());
    table.elements.retain(|_, e| !e.is_empty());
    table
}

fn cpu() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    Duration::new(time.tv_sec() as u64, time.tv_nsec() as u32)
}

/// Anonymous memory of this process, kB: now, and the most that it ever was.
fn memory() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    (of("RssAnon:"), of("VmHWM:"))
}

fn measured(name: &str, services: u32, mut once: impl FnMut(u32)) {
    let mut times: Vec<(Duration, Duration)> = (0..200)
        .map(|n| {
            let (began, spent) = (Instant::now(), cpu());
            once(n);
            (cpu() - spent, began.elapsed())
        })
        .collect();
    times.sort();
    let micros = |d: Duration| d.as_secs_f64() * 1e6;
    let (p50, p99) = (times[100], times[198]);
    println!(
        "{name}, {services} Services: cpu p50 {:.1} p99 {:.1} µs, wall p50 {:.1} µs",
        micros(p50.0),
        micros(p99.0),
        micros(p50.1)
    );
}

#[test]
#[ignore = "a measurement"]
fn cost_of_changes_loads_and_looks() {
    if !able() {
        return;
    }
    for services in [10, 1_000, 10_000] {
        netns::throw_away(|| {
            let before = memory();
            let began = Instant::now();
            let whole = table(services);
            let made = began.elapsed();
            let held = memory();
            let mut keeper = Keeper::new().unwrap();
            let (began, spent) = (Instant::now(), cpu());
            keeper.bring(whole, Reach::All, Instant::now()).unwrap();
            let (loaded, load_cpu) = (began.elapsed(), cpu() - spent);
            let after = memory();
            println!(
                "load {services} x {ENDPOINTS}: table made in {made:?} ({} kB), written in {loaded:?} (cpu {load_cpu:?}); {} kB at rest, {} kB at most",
                held.0 - before.0,
                after.0.saturating_sub(before.0),
                after.1
            );
            let began = Instant::now();
            assert_eq!(keeper.bring(table(services), Reach::All, Instant::now()).unwrap().acts, 0);
            println!("look at {services} x {ENDPOINTS}, nothing differs: {:?}", began.elapsed());

            let n = services / 2;
            measured("one endpoint for another", services, |turn| {
                let version = |t: u32| (t % 2) as u8;
                let ((key, old), (_, new)) = (endpoint(n, 1, version(turn)), endpoint(n, 1, version(turn + 1)));
                let change = Change { before: Some(old), after: Some(new) };
                let changes = Changes { elements: [("eps".into(), [(key, change)].into())].into(), ..Changes::default() };
                assert!(keeper.change(&changes).is_some());
            });
            let lead = |count: u32| Element::verdict(Verdict::Goto(format!("lb-{count}").into()));
            measured("one endpoint less or more", services, |turn| {
                let service = Key::of(&[vip(n), Value::Protocol(6), Value::Port(80)]);
                let (key, element) = endpoint(n, 2, 0);
                let (from, to) = if turn % 2 == 0 { (3, 2) } else { (2, 3) };
                let (before, after) = if to == 2 { (Some(element), None) } else { (None, Some(element)) };
                let elements = [
                    ("eps".into(), [(key, Change { before, after })].into()),
                    ("svc".into(), [(service, Change { before: Some(lead(from)), after: Some(lead(to)) })].into()),
                ];
                assert!(keeper.change(&Changes { elements: elements.into(), ..Changes::default() }).is_some());
            });
        })
        .unwrap();
    }
}
