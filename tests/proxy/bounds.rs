//! Objects as large and as odd as somebody may write them: 100,000 endpoints, 10,000 ports, ranges
//! that overlap, addresses that all want, names of any bytes. Four times as much takes four times
//! the work, not sixteen; what is left out is named, in few words.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle::api::endpoint_slice::{AddressType, EndpointPort, EndpointSlice, SERVICE_NAME, SliceEndpoint};
use coracle::api::service::{Service, ServicePort as ApiPort, ServiceType};
use coracle::proxy::alone::{self, Memory};
use coracle::proxy::apply::{Keeper, Reach};
use coracle::proxy::layout::{Ground, Layout};
use coracle::proxy::model::{Cidr, Endpoint, NodeFacts, ServicePort, ServicePortName};
use coracle::proxy::service::{Name, resolve};
use coracle::proxy::table::ir::Family;
use coracle::sys::netns;
use nix::time::{ClockId, clock_gettime};

use crate::nft::{Nft, able};

/// CPU of this thread: what others do on the machine does not count.
fn spent() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

/// The work for `n` and for 4 `n`: linear would be 4 times as much, n log n a little more.
fn no_worse_than_its_size(what: &str, n: u32, work: impl Fn(u32)) {
    let cost = |n| {
        let before = spent();
        work(n);
        spent() - before
    };
    let best = |n| (0..3).map(|_| cost(n)).min().unwrap();
    let (small, large) = (best(n), best(4 * n));
    println!("{what}: {n} in {small:?}, {} in {large:?}", 4 * n);
    assert!(large < small * 8 + Duration::from_millis(5), "{what}: {n} in {small:?}, but {} in {large:?}", 4 * n);
}

fn node() -> NodeFacts {
    NodeFacts { name: "here".into(), addresses: vec![[192, 0, 2, 7].into()], bridge: "b0".into(), ..NodeFacts::default() }
}

fn address(base: [u8; 4], n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::from(base)) + n)
}

fn service(name: &str, cluster_ip: Ipv4Addr, ports: u32) -> Service {
    let mut service = Service::default();
    service.metadata.name = name.to_owned();
    service.metadata.namespace = "default".to_owned();
    service.spec.cluster_ip = cluster_ip.to_string();
    service.spec.cluster_ips = vec![cluster_ip.to_string()];
    let port = |n: u32| ApiPort { name: format!("p{n}"), port: n as i32 + 1, ..ApiPort::default() };
    service.spec.ports = (0..ports).map(port).collect();
    service
}

fn slice(of: &Service, number: u32, endpoints: impl Iterator<Item = String>) -> EndpointSlice {
    let mut slice = EndpointSlice { address_type: AddressType::IPv4, ..EndpointSlice::default() };
    slice.metadata.name = format!("{}-{number}", of.metadata.name);
    slice.metadata.namespace = of.metadata.namespace.clone();
    slice.metadata.labels.insert(SERVICE_NAME.to_owned(), of.metadata.name.clone());
    slice.endpoints = endpoints.map(|ip| SliceEndpoint { addresses: vec![ip], ..SliceEndpoint::default() }).collect();
    let port = |p: &ApiPort| EndpointPort { name: p.name.clone(), port: Some(p.port), ..EndpointPort::default() };
    slice.ports = of.spec.ports.iter().map(port).collect();
    slice
}

fn ground() -> Ground {
    Ground::of(Family::Ip, "bounds", &node(), &[], true)
}

/// To the table that the kernel would get.
fn planned(services: &[Service], slices: &[EndpointSlice]) -> usize {
    let (ports, _) = resolve(&node(), services, slices);
    let mut layout = Layout::new(ground());
    layout.load(ports);
    layout.table().elements.values().map(|elements| elements.len()).sum()
}

#[test]
fn endpoints_of_one_service() {
    no_worse_than_its_size("endpoints", 25_000, |n| {
        let web = service("web", [10, 96, 0, 1].into(), 1);
        let of = |s: u32| slice(&web, s, (0..1000).map(move |i| address([10, 0, 0, 1], s * 1000 + i).to_string()));
        let slices: Vec<_> = (0..n / 1000).map(of).collect();
        assert!(planned(&[web], &slices) > n as usize);
    });
    // All of them unfit: named, but not 100,000 times.
    let web = service("web", [10, 96, 0, 1].into(), 1);
    let bad = slice(&web, 0, (0..100_000).map(|i| address([127, 0, 0, 0], i).to_string()));
    let (ports, skipped) = resolve(&node(), [&web], [&bad]);
    assert!(!ports[0].has_any && skipped.len() < 100, "{}", skipped.len());
    let told: Vec<String> = skipped.iter().map(ToString::to_string).collect();
    assert!(told[0].starts_with("EndpointSlice default/web-0, endpoints[0].addresses: 127.0.0.0: a loopback"), "{told:?}");
    assert!(told.iter().any(|t| t.contains("99984 more")), "{told:?}");
}

#[test]
fn ports_of_one_service() {
    no_worse_than_its_size("ports", 2_500, |n| {
        let web = service("web", [10, 96, 0, 1].into(), n);
        let slices = [slice(&web, 0, (1..=3).map(|i| address([10, 0, 0, 0], i).to_string()))];
        assert!(planned(&[web], &slices) > 3 * n as usize);
    });
}

#[test]
fn services_that_all_want_the_same() {
    no_worse_than_its_size("rivals", 1_000, |n| {
        let services: Vec<Service> = (0..n)
            .map(|i| {
                let mut service = service(&format!("s{i}"), address([10, 96, 0, 1], i), 1);
                service.spec.kind = ServiceType::NodePort;
                service.spec.external_ips = vec!["203.0.113.1".to_owned()];
                service.spec.ports[0].node_port = 30_000;
                service
            })
            .collect();
        let (ports, skipped) = resolve(&node(), &services, []);
        let owners = ports.iter().filter(|p| !p.external_ips.is_empty() && p.node_port.is_some());
        assert_eq!(owners.map(|p| &*p.name.service).collect::<Vec<_>>(), ["s0"]);
        assert!(skipped.len() >= 2 * (n as usize - 1) && skipped[0].to_string().contains("belongs to Service default/s0"));
    });
}

#[test]
fn services_that_no_address_is_left_for() {
    let range: Cidr = "10.96.0.0/22".parse().unwrap();
    no_worse_than_its_size("allotment", 2_000, |n| {
        let services: Vec<Arc<Service>> = (0..n)
            .map(|i| {
                let mut service = service(&format!("s{i}"), [0, 0, 0, 0].into(), 1);
                (service.spec.cluster_ip, service.spec.cluster_ips) = (String::new(), Vec::new());
                Arc::new(service)
            })
            .collect();
        let allotted = alone::allot(services.iter(), &[range], &Memory::default());
        assert_eq!((allotted.memory.cluster_ips.len(), allotted.skipped.len()), (1022, n as usize - 1022));
        assert!(allotted.skipped[0].why.contains("no IPv4 address is left"), "{}", allotted.skipped[0]);
    });
    no_worse_than_its_size("node ports", 4_000, |n| {
        let mut many = service("many", [10, 96, 0, 1].into(), n);
        many.spec.kind = ServiceType::NodePort;
        let allotted = alone::allot([Arc::new(many)].iter(), &[range], &Memory::default());
        assert_eq!((allotted.memory.node_ports.len(), allotted.skipped.len()), (2768, n as usize - 2768));
        assert!(allotted.skipped[0].why.contains("no node port of TCP is left"), "{}", allotted.skipped[0]);
    });
}

/// A ServicePort of the layout, with a name as it comes.
fn port(name: &str, number: u32, endpoints: u32) -> ServicePort {
    let end = |i: u32| Endpoint { ip: address([10, 0, 0, 1], i).into(), port: 8080, local: false };
    ServicePort {
        name: ServicePortName { namespace: "default".into(), service: name.into(), port: "p".into() },
        port: 80,
        cluster_ip: Some(address([10, 96, 0, 1], number).into()),
        cluster: (0..endpoints).map(end).collect(),
        has_any: endpoints > 0,
        ..ServicePort::default()
    }
}

/// Each in the next one's, and beside it.
fn overlapping(n: u32) -> Vec<Cidr> {
    (0..n).map(|i| Cidr::around(IpAddr::from(address([10, 0, 0, 0], (i / 8) << 9)), 32 - (i % 8) as u8).unwrap()).collect()
}

#[test]
fn source_ranges_that_overlap() {
    let of = |n: u32| {
        let lb: Vec<IpAddr> = vec![[203, 0, 113, 1].into()];
        let mut layout = Layout::new(ground());
        layout.load([ServicePort { load_balancer_ips: lb, source_ranges: overlapping(n), ..port("lb", 0, 3) }]);
        layout
    };
    no_worse_than_its_size("source ranges", 5_000, |n| {
        assert!(of(n).table().elements["fw-sources"].len() <= n as usize / 8 + 1);
    });
    if able() {
        // The kernel refuses ranges that overlap: it takes these.
        netns::throw_away(|| Keeper::new().unwrap().bring(of(1_000).table(), Reach::All, Instant::now()).unwrap()).unwrap();
    }
}

#[test]
fn names_of_any_bytes_reach_no_parser() {
    let long = "n".repeat(10_000);
    let names = [
        "\"; flush ruleset; #",
        "new\nline",
        "nul\0byte",
        "}; add table ip evil {",
        "ünï©ode 🦀",
        "'quotes\"\\",
        "-rf /",
        "$(reboot)",
        "",
        &long,
    ];
    let mut layout = Layout::new(ground());
    layout.load(
        names
            .iter()
            .zip(0..)
            .map(|(name, n)| ServicePort { affinity: (n % 2 == 0).then_some(Duration::from_secs(10)), ..port(name, n, n % 4) }),
    );
    let table = layout.table();
    let kinds: BTreeMap<Name, ()> = names.iter().map(|n| (Name::new("default", n), ())).collect();
    assert_eq!(kinds.len(), names.len());
    if !able() {
        return;
    }
    // Before there is no network: one may have to be fetched.
    let programs = Nft::all();
    netns::throw_away(|| {
        let done = Keeper::new().unwrap().bring(table.clone(), Reach::All, Instant::now()).unwrap();
        assert!(done.acts > 0);
        // Another agent finds all as it should be.
        let again = Keeper::new().unwrap().bring(table.clone(), Reach::All, Instant::now()).unwrap();
        assert_eq!((again.acts, again.was_there), (0, true));
        for nft in &programs {
            nft.must(&["list", "ruleset"]);
            assert_eq!(nft.must(&["list", "tables"]).trim(), "table ip bounds");
            nft.must(&["-j", "list", "ruleset"]);
        }
    })
    .unwrap();
}
