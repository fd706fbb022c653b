//! 10,000 random worlds: each packet goes where the plain model says, and whatever the order in
//! which Services come and go, the changes make of one table the other.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use proptest::prelude::*;

use super::plain::{Expected, Sent, expected};
use super::world::*;
use crate::proxy::model::{Cidr, Endpoint, HostPortWant, L4, NodePortAddresses, ServicePort, ServicePortName};
use crate::proxy::table::changes::{Changes, between};
use crate::proxy::table::ir::{Family, Key, Name, Table};
use crate::proxy::table::trace::{End, Nameless};

/// The same world in both families.
struct Places {
    pods: [&'static str; 2],
    far: [&'static str; 2],
    nodes: [&'static str; 2],
    outside: [&'static str; 2],
    vips: [&'static str; 3],
    lbs: [&'static str; 2],
    /// Of no Service; the second in a Service range.
    others: [&'static str; 2],
    loopback: &'static str,
    ranges: [&'static str; 4],
}

const V4: Places = Places {
    pods: [POD, POD2],
    far: [FAR, FAR2],
    nodes: [NODE, NODE2],
    outside: [OUTSIDE, "203.0.113.10"],
    vips: [VIP, "10.96.0.11", "10.99.0.1"],
    lbs: [LB, NODE2],
    others: ["203.0.113.99", "10.96.9.9"],
    loopback: "127.0.0.1",
    ranges: ["203.0.113.8/31", "203.0.113.9/32", "192.0.2.0/24", "10.88.0.0/16"],
};

const V6: Places = Places {
    pods: ["fd88::2", "fd88::3"],
    far: ["fd88:0:0:1::2", "fd88:0:0:1::3"],
    nodes: ["2001:db8::1", "fd88::1"],
    outside: ["2001:db8:9::9", "2001:db8:9::a"],
    vips: ["fd96::10", "fd96::11", "fd99::1"],
    lbs: ["2001:db8:9::200", "2001:db8::1"],
    others: ["2001:db8:9::99", "fd96::999"],
    loopback: "::1",
    ranges: ["2001:db8:9::8/127", "2001:db8:9::9/128", "2001:db8::/64", "fd88::/48"],
};

/// Another pod of another node.
fn crowd(v4: bool, n: u16) -> IpAddr {
    if v4 { IpAddr::from([10, 88, 2, n as u8]) } else { IpAddr::from([0xfd88, 0, 0, 2, 0, 0, 0, n]) }
}

fn places(v4: bool) -> &'static Places {
    if v4 { &V4 } else { &V6 }
}

fn protocol() -> impl Strategy<Value = L4> {
    prop_oneof![4 => Just(L4::Tcp), 2 => Just(L4::Udp), 1 => Just(L4::Sctp)]
}

/// With probability of about one in `n`.
fn seldom(n: u32) -> impl Strategy<Value = bool> {
    (0..n).prop_map(|x| x == 0)
}

fn subset(of: Vec<IpAddr>) -> impl Strategy<Value = Vec<IpAddr>> {
    proptest::sample::subsequence(of.clone(), 0..=of.len())
}

fn service(v4: bool, number: usize) -> impl Strategy<Value = ServicePort> {
    let p = places(v4);
    let ips = |texts: &[&str]| texts.iter().map(|t| ip(t)).collect::<Vec<_>>();
    let few = subset(ips(&[&p.pods[..], &p.far, &p.nodes[..1]].concat()));
    let endpoints = (few, prop_oneof![15 => Just(0), 1 => 0..66_u16]).prop_map(move |(few, more)| {
        let mut all = few;
        all.extend((0..more).map(|n| crowd(v4, n)));
        all.sort();
        all
    });
    let external = ips(&[p.lbs[0], p.lbs[1], p.vips[0], p.loopback]);
    let reached = (
        0..p.vips.len(),
        prop_oneof![2 => Just(Vec::new()), 1 => subset(external)],
        prop_oneof![1 => Just(Vec::new()), 1 => subset(ips(&p.lbs))],
        proptest::option::weighted(0.6, 30_000_u16..30_002),
    );
    let policy = (
        seldom(4),
        any::<bool>(),
        seldom(3),
        prop_oneof![1 => Just(vec![]), 1 => proptest::sample::subsequence(p.ranges.to_vec(), 1..3)],
    );
    (protocol(), 80_u16..82, endpoints, any::<proptest::sample::Index>(), seldom(4), reached, policy).prop_map(
        move |(protocol, port, all, at, zones, (vip, external_ips, load_balancer_ips, node_port), policy)| {
            let (internal_local, external_local, sticky, ranges) = policy;
            let all: Vec<Endpoint> =
                all.into_iter().map(|ip| Endpoint { ip, port: 8080, local: is_here(ip) || is_node(ip) }).collect();
            // Topology may leave some out, never all.
            let near = if all.is_empty() { Vec::new() } else { vec![all[at.index(all.len())]] };
            let mut service = ServicePort {
                name: ServicePortName { namespace: "n".into(), service: format!("s{number}"), port: String::new() },
                protocol,
                port,
                cluster_ip: Some(ip(p.vips[vip])),
                external_ips,
                load_balancer_ips,
                node_port,
                internal_local,
                external_local,
                affinity: sticky.then_some(Duration::from_secs(60)),
                source_ranges: ranges.iter().map(|c| c.parse::<Cidr>().unwrap()).collect(),
                health_check_node_port: None,
                has_any: !all.is_empty(),
                local: all.iter().filter(|e| e.local).copied().collect(),
                cluster: if zones { near } else { all },
            };
            // As the model gives them.
            if !service.uses_cluster() {
                service.cluster.clear();
            }
            if !service.uses_local() {
                service.local.clear();
            }
            service
        },
    )
}

/// Services by number, some missing, so that two of these have some in common.
fn services(v4: bool) -> impl Strategy<Value = Vec<ServicePort>> {
    let some = |number| proptest::option::weighted(0.6, service(v4, number));
    (some(0), some(1), some(2), some(3)).prop_map(|(a, b, c, d)| {
        let mut taken = BTreeSet::new();
        [a, b, c, d].into_iter().flatten().filter_map(|s| settled(s, &mut taken)).collect()
    })
}

/// What earlier Services left of it.
fn settled(mut service: ServicePort, taken: &mut BTreeSet<(Option<IpAddr>, L4, u16)>) -> Option<ServicePort> {
    let (protocol, port) = (service.protocol, service.port);
    let mut free = |ip: Option<IpAddr>, port| taken.insert((ip, protocol, port));
    if !free(service.cluster_ip, port) {
        return None;
    }
    // Where it is both of one Service, it is the load balancer's.
    let both = service.load_balancer_ips.clone();
    service.load_balancer_ips.retain(|ip| free(Some(*ip), port));
    let own = [service.load_balancer_ips.clone(), service.cluster_ip.into_iter().collect()].concat();
    service.external_ips.retain(|ip| own.contains(ip) || (!both.contains(ip) && free(Some(*ip), port)));
    service.node_port = service.node_port.filter(|port| free(None, *port));
    Some(service)
}

fn host_ports(v4: bool) -> impl Strategy<Value = Vec<HostPortWant>> {
    let p = places(v4);
    let wild = if v4 { "0.0.0.0" } else { "::" };
    let host_ip = proptest::sample::select(vec![None, None, Some(wild), Some(p.nodes[0]), Some(p.nodes[1])]);
    let port = proptest::sample::select(vec![80_u16, 30_000, 8000]);
    let one = (protocol(), host_ip, port, 0..2_usize, 0..2_u16).prop_map(move |(protocol, host_ip, host_port, at, more)| {
        HostPortWant {
            pod: format!("n/p{at}"),
            protocol,
            host_ip: host_ip.map(ip),
            host_port,
            ip: ip(p.pods[at]),
            port: 8080 + more,
        }
    });
    proptest::collection::vec(one, 0..3)
}

fn any_world(v4: bool) -> impl Strategy<Value = World> {
    let p = places(v4);
    let where_ = prop_oneof![
        2 => Just(NodePortAddresses::All),
        1 => Just(NodePortAddresses::Primary),
        1 => proptest::sample::subsequence(p.nodes.to_vec(), 0..=2)
            .prop_map(|some| NodePortAddresses::Cidrs(some.iter().map(|t| Cidr::only(ip(t))).collect())),
    ];
    (services(v4), host_ports(v4), where_, seldom(5), any::<bool>()).prop_map(|(services, host_ports, where_, plugin, empty)| {
        let mut world = world(&services);
        world.node.addresses.insert(1, ip("fd88::1"));
        world.host_ports = host_ports;
        world.node.node_port_addresses = where_;
        if plugin {
            world.node.bridge.clear();
        }
        world.nameless = if empty { Nameless::Empty } else { Nameless::Fails };
        world
    })
}

fn sent(v4: bool) -> impl Strategy<Value = Sent> {
    let p = places(v4);
    let from = [&p.pods[..], &p.far, &p.nodes[..1], &p.outside].concat();
    let to = [&p.vips[..], &p.lbs, &p.nodes, &p.nodes, &p.others, &[p.loopback], &p.pods].concat();
    let port = prop_oneof![4 => 80_u16..82, 3 => 30_000_u16..30_002, 1 => Just(8000_u16)];
    (proptest::sample::select(from), proptest::sample::select(to), protocol(), port).prop_map(|(from, to, protocol, port)| {
        let (from, to) = (ip(from), ip(to));
        // Nobody else can send to loopback.
        let from = if to.is_loopback() { to } else { from };
        Sent { from, to, protocol, port }
    })
}

fn both<T: std::fmt::Debug, S: Strategy<Value = T> + 'static>(of: fn(bool) -> S) -> impl Strategy<Value = T> {
    any::<bool>().prop_flat_map(of)
}

/// Everything that can become of the packet, by throwing every number. Where a number is thrown
/// again, it leads where another one does.
fn outcome(world: &World, table: &Table, sent: &Sent) -> Expected {
    let packet = world.packet(&sent.from.to_string(), &sent.to.to_string(), sent.protocol, sent.port);
    let (mut seen, mut again) = (Vec::new(), Vec::new());
    let (mut numbers, mut dice) = (1, 0);
    while dice < numbers {
        let (trace, asked) = world.walk_counted(table, packet, dice);
        numbers = asked.first().copied().unwrap_or(1);
        match trace.end {
            End::Dropped => return Expected::Dropped,
            End::Rejected(_) => return Expected::Rejected,
            End::Delivered | End::Sent(_) => {
                let to = (trace.packet.destination, trace.packet.destination_port, trace.masqueraded);
                if asked.len() < 2 { seen.push(to) } else { again.push(to) }
            }
        }
        dice += 1;
    }
    seen.sort();
    assert!(again.iter().all(|to| seen.binary_search(to).is_ok()), "{again:?}");
    assert!(again.len() < seen.len(), "more than half of the numbers are somebody's");
    Expected::To(seen)
}

fn bare(mut table: Table) -> Table {
    table.elements.values_mut().flat_map(|e| e.values_mut()).for_each(|e| e.comment = None);
    table
}

fn keys(changes: &Changes) -> Vec<(&Name, &Key)> {
    changes.elements.iter().flat_map(|(set, all)| all.keys().map(move |key| (set, key))).collect()
}

fn config(cases: u32) -> ProptestConfig {
    let cases = crate::proxy::worlds(cases);
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 2_000, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(10_000))]

    #[test]
    fn every_packet_goes_where_the_plain_model_says(
        (mut world, packets) in both(|v4| (any_world(v4), proptest::collection::vec(sent(v4), 1..4)).boxed())
    ) {
        let family = if packets[0].to.is_ipv4() { Family::Ip } else { Family::Ip6 };
        let table = world.table(family);
        for sent in &packets {
            let mut plain = expected(&world, sent);
            if let Expected::To(all) = &mut plain {
                all.sort();
            }
            prop_assert_eq!(outcome(&world, &table, sent), plain, "{} to {} {}", sent.from, sent.to, sent.port);
            // A client that is remembered comes back to the same endpoint.
            let packet = world.packet(&sent.from.to_string(), &sent.to.to_string(), sent.protocol, sent.port);
            let first = world.walk(&table, packet, 1);
            if !first.remembers.is_empty() {
                for (set, key) in first.remembers {
                    world.remembered.entry(set).or_default().insert(key);
                }
                for dice in 0..6 {
                    prop_assert_eq!(world.walk(&table, packet, dice).packet, first.packet);
                }
                world.remembered.clear();
            }
        }
    }

    #[test]
    fn changes_make_of_one_table_the_other_and_are_no_more_than_the_difference(
        (v4, world, next, ports) in both(|v4| {
            (Just(v4), any_world(v4), proptest::collection::vec(services(v4), 1..3), host_ports(v4)).boxed()
        })
    ) {
        let family = if v4 { Family::Ip } else { Family::Ip6 };
        let mut layout = world.layout(family);
        let mut before = bare(layout.table());
        for services in next {
            let here = |name: &ServicePortName| services.iter().any(|s| s.name == *name);
            let gone: Vec<ServicePortName> = layout.services().map(|s| s.name.clone()).filter(|n| !here(n)).collect();
            let changes = layout.change(&gone, services.iter().cloned());
            let after = bare(layout.table());
            prop_assert!(layout.change([], services.iter().cloned()).is_empty());
            let scratch = World { services, ..world.clone() };
            prop_assert_eq!(&after, &bare(scratch.table(family)), "as from scratch");
            let difference = between(&before, &after);
            prop_assert_eq!(&changes.sets, &difference.sets);
            prop_assert_eq!(&changes.chains, &difference.chains);
            prop_assert_eq!(keys(&changes), keys(&difference));
            let mut made = before.clone();
            difference.apply_to(&mut made);
            prop_assert_eq!(&made, &after);
            changes.apply_to(&mut before);
            before = bare(before);
            prop_assert_eq!(&before, &after);
        }
        layout.open(ports).apply_to(&mut before);
        layout.house(vec![ip(POD), ip("fd88::3")]).apply_to(&mut before);
        prop_assert_eq!(bare(before), bare(layout.table()));
    }
}
