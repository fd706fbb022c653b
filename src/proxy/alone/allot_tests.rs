//! Who gets which address and node port, and who keeps it.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::api::service::ServicePort;

fn service(name: &str, edit: impl FnOnce(&mut Service)) -> Arc<Service> {
    let mut s = Service::default();
    s.metadata.namespace = "ns".into();
    s.metadata.name = name.into();
    s.spec.ports = vec![ServicePort { port: 80, ..ServicePort::default() }];
    edit(&mut s);
    Arc::new(s)
}

fn with_ip(name: &str, ip: &str) -> Arc<Service> {
    service(name, |s| s.spec.cluster_ip = ip.into())
}

fn ranges(texts: &[&str]) -> Vec<Cidr> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

const BOTH: &[&str] = &["10.96.0.0/16", "fd96::/112"];

fn ips(out: &Allotted, name: &str) -> Vec<String> {
    out.services[&Name::new("ns", name)].spec.cluster_ips.clone()
}

fn said(out: &Allotted) -> Vec<String> {
    out.skipped.iter().map(ToString::to_string).collect()
}

#[test]
fn an_address_is_the_same_whatever_stands_beside_it_and_is_kept() {
    let alone = allot([service("web", |_| {})].iter(), &ranges(BOTH), &Memory::default());
    let ip = ips(&alone, "web");
    assert_eq!(ip.len(), 1);
    assert!(ip[0].starts_with("10.96."), "{ip:?}");
    // Above the part that is left to those who write their address.
    assert!(ip[0].parse::<std::net::Ipv4Addr>().unwrap() >= "10.96.1.0".parse::<std::net::Ipv4Addr>().unwrap(), "{ip:?}");
    let many: Vec<_> = ["a", "web", "z"].iter().map(|n| service(n, |_| {})).collect();
    assert_eq!(ips(&allot(many.iter(), &ranges(BOTH), &Memory::default()), "web"), ip);
    assert_eq!(ips(&allot(many.iter().rev(), &ranges(BOTH), &alone.memory), "web"), ip);
    // One that writes it comes too late, with memory or without a name before it.
    let late = allot([with_ip("aaa", &ip[0]), service("web", |_| {})].iter(), &ranges(BOTH), &alone.memory);
    assert_eq!((ips(&late, "web"), ips(&late, "aaa")), (ip.clone(), vec![]));
    assert_eq!(
        said(&late),
        [format!("Service ns/aaa, spec.clusterIP: {} belongs to Service ns/web: remove it, or write another", ip[0])]
    );
    // Without memory what is written goes first, and the other moves.
    let fresh = allot([with_ip("zzz", &ip[0]), service("web", |_| {})].iter(), &ranges(BOTH), &Memory::default());
    assert_eq!(ips(&fresh, "zzz"), ip);
    assert!(ips(&fresh, "web") != ip && fresh.skipped.is_empty());
    // Another range: another address.
    let moved = allot([service("web", |_| {})].iter(), &ranges(&["10.43.0.0/16"]), &alone.memory);
    assert!(ips(&moved, "web")[0].starts_with("10.43."));
    // Two that write the same: the one that had it, else the first by name.
    let pair = [with_ip("one", "10.96.0.9"), with_ip("two", "10.96.0.9")];
    let first = allot(pair.iter(), &ranges(BOTH), &Memory::default());
    assert_eq!((ips(&first, "one"), ips(&first, "two")), (vec!["10.96.0.9".to_owned()], vec![]));
    let two = allot(pair[1..].iter(), &ranges(BOTH), &Memory::default());
    assert_eq!(ips(&allot(pair.iter(), &ranges(BOTH), &two.memory), "two"), ["10.96.0.9"]);
    // What is gone is forgotten.
    assert_eq!(allot([].iter(), &ranges(BOTH), &alone.memory).memory, Memory::default());
}

#[test]
fn families_are_as_asked_for() {
    use IpFamily::*;
    use IpFamilyPolicy::*;
    let of = |ranges_: &[&str], families: &[IpFamily], policy: Option<IpFamilyPolicy>| {
        let s = service("web", |s| {
            s.spec.ip_families = families.to_vec();
            s.spec.ip_family_policy = policy;
        });
        let out = allot([s].iter(), &ranges(ranges_), &Memory::default());
        let v6 = |ip: &String| ip.contains(':');
        (ips(&out, "web").iter().map(v6).collect::<Vec<_>>(), said(&out).len())
    };
    assert_eq!(of(BOTH, &[], None), (vec![false], 0));
    assert_eq!(of(&["fd96::/112", "10.96.0.0/16"], &[], None), (vec![true], 0));
    assert_eq!(of(BOTH, &[IPv6], None), (vec![true], 0));
    assert_eq!(of(BOTH, &[IPv6, IPv4], None), (vec![true, false], 0));
    assert_eq!(of(BOTH, &[IPv6], Some(PreferDualStack)), (vec![true, false], 0));
    assert_eq!(of(BOTH, &[], Some(RequireDualStack)), (vec![false, true], 0));
    let v4 = &["10.96.0.0/16"];
    assert_eq!(of(v4, &[], Some(PreferDualStack)), (vec![false], 0));
    assert_eq!(of(v4, &[IPv4, IPv6], Some(PreferDualStack)), (vec![false], 0));
    assert_eq!(of(v4, &[], Some(RequireDualStack)), (vec![], 1));
    assert_eq!(of(v4, &[IPv6], Some(SingleStack)), (vec![], 1));
    assert_eq!(of(&[], &[], None), (vec![], 1));
    // Both written.
    let s = service("web", |s| s.spec.cluster_ips = vec!["10.96.0.7".into(), "fd96::7".into()]);
    assert_eq!(ips(&allot([s].iter(), &ranges(BOTH), &Memory::default()), "web"), ["10.96.0.7", "fd96::7"]);
    // One written, the other found.
    let s = service("web", |s| {
        s.spec.cluster_ip = "fd96::7".into();
        s.spec.ip_family_policy = Some(RequireDualStack);
    });
    let out = allot([s].iter(), &ranges(BOTH), &Memory::default());
    assert_eq!((ips(&out, "web").len(), ips(&out, "web")[0].as_str()), (2, "fd96::7"));
    assert_eq!(out.services[&Name::new("ns", "web")].spec.cluster_ip, "fd96::7");
    // Headless ones have families and no address; names have neither.
    let headless = |edit: fn(&mut Service)| {
        let s = service("web", |s| {
            s.spec.cluster_ip = "None".into();
            s.spec.selector.insert("a".into(), "b".into());
            edit(s);
        });
        let out = allot([s].iter(), &ranges(BOTH), &Memory::default());
        assert!(out.skipped.is_empty() && out.memory == Memory::default());
        out.services[&Name::new("ns", "web")].spec.ip_families.clone()
    };
    assert_eq!(headless(|_| {}), [IPv4]);
    assert_eq!(headless(|s| s.spec.selector.clear()), [IPv4, IPv6]);
    assert_eq!(headless(|s| s.spec.kind = ServiceType::ExternalName), []);
}

#[test]
fn what_cannot_be_had_is_named() {
    for (ip, why) in [
        ("10.97.0.1", "10.97.0.1 is in no range of this node (10.96.0.0/16, fd96::/112): remove it"),
        ("10.96.0.0", "10.96.0.0 is in no range"),
        ("10.96.255.255", "10.96.255.255 is in no range"),
    ] {
        let out = allot([with_ip("web", ip)].iter(), &ranges(BOTH), &Memory::default());
        assert!(ips(&out, "web").is_empty() && said(&out)[0].contains(why), "{:?}", said(&out));
    }
    // A range that is full: 10.96.0.0/29 has six addresses.
    let seven: Vec<_> = (0..7).map(|n| service(&format!("s{n}"), |_| {})).collect();
    let out = allot(seven.iter(), &ranges(&["10.96.0.0/29"]), &Memory::default());
    assert_eq!(
        (out.memory.cluster_ips.len(), said(&out)[0].as_str()),
        (6, "Service ns/s6, spec.clusterIP: no IPv4 address is left: give --service-cidr a wider range, or remove Services")
    );
}

#[test]
fn node_ports_are_found_shared_by_protocols_and_kept() {
    use crate::api::pod::Protocol::*;
    let port =
        |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port, target_port: None };
    let of = |out: &Allotted, name: &str| -> Vec<i32> {
        out.services[&Name::new("ns", name)].spec.ports.iter().map(|p| p.node_port).collect()
    };
    let dns = service("dns", |s| {
        s.spec.kind = ServiceType::NodePort;
        s.spec.ports = vec![port("t", TCP, 53, 0), port("u", UDP, 53, 0), port("m", TCP, 9153, 0)];
    });
    let first = allot([Arc::clone(&dns)].iter(), &ranges(BOTH), &Memory::default());
    let got = of(&first, "dns");
    assert!(got[0] == got[1] && got[0] != got[2] && got.iter().all(|p| (30_086..=32_767).contains(p)), "{got:?}");
    // Somebody writes it: too late; without memory it is the other way round.
    let thief = |protocol| {
        service("aaa", |s| {
            s.spec.kind = ServiceType::NodePort;
            s.spec.ports = vec![port("", protocol, 1, got[0])];
        })
    };
    let late = allot([thief(TCP), Arc::clone(&dns)].iter(), &ranges(BOTH), &first.memory);
    assert_eq!((of(&late, "dns"), of(&late, "aaa")), (got.clone(), vec![0]));
    assert_eq!(
        said(&late),
        [format!("Service ns/aaa, spec.ports.nodePort: {}/TCP belongs to Service ns/dns: remove it, or write another", got[0])]
    );
    let fresh = allot([thief(TCP), Arc::clone(&dns)].iter(), &ranges(BOTH), &Memory::default());
    assert!(of(&fresh, "aaa") == [got[0]] && of(&fresh, "dns")[0] != got[0] && fresh.skipped.is_empty());
    // Another protocol is another port.
    assert_eq!(of(&allot([thief(SCTP), dns].iter(), &ranges(BOTH), &first.memory), "aaa"), [got[0]]);
    // A load balancer may go without, and may need one more.
    let balanced = service("lb", |s| {
        s.spec.kind = ServiceType::LoadBalancer;
        s.spec.allocate_load_balancer_node_ports = Some(false);
        s.spec.external_traffic_policy = Some(TrafficPolicy::Local);
        s.spec.ports = vec![port("a", TCP, 1, 0), port("b", TCP, 2, 30_001)];
    });
    let out = allot([balanced].iter(), &ranges(BOTH), &Memory::default());
    assert_eq!(of(&out, "lb"), [0, 30_001]);
    assert!(out.services[&Name::new("ns", "lb")].spec.health_check_node_port >= 30_086);
    assert_eq!(of(&allot([service("plain", |_| {})].iter(), &ranges(BOTH), &Memory::default()), "plain"), [0]);
}

proptest! {
    /// Services come, go and write addresses; whoever asks for the same keeps the same.
    #[test]
    fn nothing_is_given_twice_and_nothing_moves_without_need(
        rounds in proptest::collection::vec(proptest::collection::btree_map(0..12_u8, (0..5_u8, any::<bool>()), 0..12), 1..6)
    ) {
        let mut memory = Memory::default();
        let mut before: BTreeMap<String, (Vec<String>, u8)> = BTreeMap::new();
        for round in rounds {
            let services: Vec<_> = round.iter().map(|(n, (ip, node_port))| service(&format!("s{n}"), |s| {
                if *ip > 2 {
                    s.spec.cluster_ip = format!("10.96.0.{ip}");
                }
                if *node_port {
                    s.spec.kind = ServiceType::NodePort;
                }
            })).collect();
            let out = allot(services.iter(), &ranges(&["10.96.0.0/27"]), &memory);
            prop_assert_eq!(&allot(services.iter().rev(), &ranges(&["10.96.0.0/27"]), &memory), &out);
            prop_assert_eq!(&allot(services.iter(), &ranges(&["10.96.0.0/27"]), &out.memory).services, &out.services);
            let mut seen = BTreeSet::new();
            let mut now = BTreeMap::new();
            for (name, s) in &out.services {
                for ip in &s.spec.cluster_ips {
                    prop_assert!(seen.insert(ip.clone()), "{} twice", ip);
                }
                for port in s.spec.ports.iter().filter(|p| p.node_port != 0) {
                    prop_assert!(seen.insert(port.node_port.to_string()));
                }
                let wish = round[&name.name[1..].parse().unwrap()].0.max(2);
                if let Some((had, wished)) = before.get(&name.name) && *wished == wish && !had.is_empty() {
                    prop_assert_eq!(had, &s.spec.cluster_ips, "{} lost its address", name);
                }
                now.insert(name.name.clone(), (s.spec.cluster_ips.clone(), wish));
            }
            before = now;
            memory = out.memory;
        }
    }
}
