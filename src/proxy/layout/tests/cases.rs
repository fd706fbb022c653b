//! What kube-proxy does with each kind of Service, as sentences.
#![deny(clippy::disallowed_methods)]

use std::time::Duration;

use super::super::frame;
use super::world::*;
use crate::proxy::model::{Cidr, HostPortWant, L4, NodePortAddresses, ServicePort, ServicePortName};
use crate::proxy::table::ir::{DataSpec, Family, Field, Key, Name, Step, Table, Value};
use crate::proxy::table::trace::{Did, Flow, Nameless};

fn named(service: ServicePort, name: &str) -> ServicePort {
    let name = ServicePortName { service: name.into(), ..service.name };
    ServicePort { name, ..service }
}

fn only(service: ServicePort) -> World {
    world(&[service])
}

#[test]
fn a_pod_reaches_each_endpoint_of_a_cluster_ip_as_often_and_keeps_its_source() {
    let all = only(service(&[POD2, FAR, FAR2]));
    assert_eq!(all.send(POD, VIP, 80), "10.88.0.3, 10.88.1.2 masq, 10.88.1.3 masq", "what leaves for the outside is ours");
    assert_eq!(only(service(&[POD2])).send(POD, VIP, 80), "10.88.0.3");
}

#[test]
fn a_cluster_ip_asked_by_the_node_or_from_outside_answers_through_this_node() {
    for nameless in [Nameless::Fails, Nameless::Empty] {
        let world = World { nameless, ..only(service(&[POD, FAR])) };
        assert_eq!(world.send(NODE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq");
        assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq");
        assert_eq!(world.send(FAR2, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq", "a pod of another node is no pod of ours");
    }
}

#[test]
fn a_pod_that_is_its_own_endpoint_sees_the_node_as_client() {
    assert_eq!(only(service(&[POD, POD2])).send(POD, VIP, 80), "10.88.0.2 masq, 10.88.0.3");
    assert_eq!(only(sticky(service(&[POD]))).send(POD, VIP, 80), "10.88.0.2 masq");
}

#[test]
fn each_protocol_and_each_port_has_its_own_endpoints() {
    let udp = named(ServicePort { protocol: L4::Udp, ..service(&[POD]) }, "dns-udp");
    let sctp = named(ServicePort { protocol: L4::Sctp, ..service(&[POD2]) }, "sctp");
    let second = named(ServicePort { port: 81, ..service(&[FAR]) }, "second");
    let world = world(&[udp, sctp, second, service(&[POD, POD2])]);
    assert_eq!(world.send_by(OUTSIDE, VIP, L4::Udp, 80), "10.88.0.2 masq");
    assert_eq!(world.send_by(OUTSIDE, VIP, L4::Sctp, 80), "10.88.0.3 masq");
    assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.0.3 masq");
    assert_eq!(world.send(OUTSIDE, VIP, 81), "10.88.1.2 masq");
    assert_eq!(world.send_by(OUTSIDE, VIP, L4::Udp, 81), "rejected");
}

#[test]
fn ipv6_has_a_table_of_its_own() {
    let six = ServicePort { cluster_ip: Some(ip("fd96::10")), node_port: Some(30080), ..service(&["fd88::2", "2001:db8:f::1"]) };
    let world = only(six);
    assert_eq!(world.send("2001:db8:9::1", "fd96::10", 80), "fd88::2 masq, 2001:db8:f::1 masq");
    assert_eq!(world.send("fd88::2", "fd96::10", 80), "fd88::2 masq, 2001:db8:f::1 masq");
    assert_eq!(world.send("2001:db8:9::1", "2001:db8::1", 30080), "fd88::2 masq, 2001:db8:f::1 masq");
    assert_eq!(world.send("2001:db8:9::1", "fd96::10", 81), "rejected");
    assert_eq!(world.send("2001:db8:9::1", "fd96::11", 81), "dropped");
    assert_eq!(world.send("::1", "::1", 30080), "as it is");
}

#[test]
fn a_service_without_endpoints_is_refused_at_once_from_everywhere() {
    let mut world = only(exposed(&[]));
    for (to, port) in [(VIP, 80), (LB, 80), ("203.0.113.201", 80), (NODE, 30080), (NODE2, 30080)] {
        for from in [POD, FAR, NODE, OUTSIDE] {
            assert_eq!(world.send(from, to, port), "rejected", "{from} to {to}");
        }
    }
    // Policy Local does not change that nobody is there.
    let local = ServicePort { internal_local: true, external_local: true, ..exposed(&[]) };
    world.services = vec![local];
    for (to, port) in [(VIP, 80), (LB, 80), (NODE, 30080)] {
        assert_eq!(world.send(OUTSIDE, to, port), "rejected");
    }
}

#[test]
fn policy_local_without_a_local_endpoint_drops() {
    let world = only(ServicePort { internal_local: true, external_local: true, ..exposed(&[FAR]) });
    for from in [POD, NODE, OUTSIDE] {
        assert_eq!(world.send(from, VIP, 80), "dropped");
    }
    for (to, port) in [(LB, 80), ("203.0.113.201", 80), (NODE, 30080)] {
        assert_eq!(world.send(OUTSIDE, to, port), "dropped", "so that the load balancer goes elsewhere");
        assert_eq!(world.send(POD, to, port), "10.88.1.2 masq", "a pod reaches it all the same (kubernetes#131765)");
        assert_eq!(world.send(NODE, to, port), "10.88.1.2 masq", "so does the node");
    }
}

#[test]
fn internal_policy_local_takes_endpoints_of_this_node() {
    let world = only(ServicePort { internal_local: true, node_port: Some(30080), ..service(&[POD, POD2, FAR]) });
    assert_eq!(world.send(POD, VIP, 80), "10.88.0.2 masq, 10.88.0.3");
    assert_eq!(world.send(NODE, VIP, 80), "10.88.0.2 masq, 10.88.0.3 masq");
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "10.88.0.2 masq, 10.88.0.3 masq, 10.88.1.2 masq");
}

#[test]
fn external_policy_local_keeps_the_source_and_pods_see_every_endpoint() {
    let world = only(ServicePort { external_local: true, ..exposed(&[POD, POD2, FAR]) });
    for (to, port) in [(LB, 80), ("203.0.113.201", 80), (NODE, 30080), (NODE2, 30080)] {
        assert_eq!(world.send(OUTSIDE, to, port), "10.88.0.2, 10.88.0.3", "{to}");
        assert_eq!(world.send(FAR, to, port), "10.88.0.2, 10.88.0.3", "a pod of another node went out and came in");
        assert_eq!(world.send(POD, to, port), "10.88.0.2 masq, 10.88.0.3, 10.88.1.2 masq");
        assert_eq!(world.send(NODE, to, port), "10.88.0.2 masq, 10.88.0.3 masq, 10.88.1.2 masq");
    }
    assert_eq!(
        world.send(OUTSIDE, VIP, 80),
        "10.88.0.2 masq, 10.88.0.3 masq, 10.88.1.2 masq",
        "internal traffic is another policy's"
    );
}

#[test]
fn external_policy_cluster_hides_every_source() {
    let world = only(exposed(&[POD2, FAR]));
    for (to, port) in [(LB, 80), ("203.0.113.201", 80), (NODE, 30080)] {
        for from in [OUTSIDE, POD, NODE, FAR2] {
            assert_eq!(world.send(from, to, port), "10.88.0.3 masq, 10.88.1.2 masq", "{from} to {to}");
        }
    }
}

#[test]
fn node_ports_are_taken_on_the_nodes_addresses_only() {
    let mut world = only(exposed(&[POD]));
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "10.88.0.2 masq");
    assert_eq!(world.send(OUTSIDE, GATEWAY, 30080), "10.88.0.2 masq", "all of them, ours of the bridge too");
    assert_eq!(world.send(POD2, "203.0.113.77", 30080), "as it is masq", "what passes through is not ours");
    assert_eq!(world.send("127.0.0.1", "127.0.0.1", 30080), "as it is", "loopback never");
    assert_eq!(world.send_by(OUTSIDE, NODE, L4::Udp, 30080), "as it is");
    world.node.node_port_addresses = NodePortAddresses::Primary;
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "10.88.0.2 masq");
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "as it is");
    world.node.node_port_addresses = NodePortAddresses::Cidrs(vec!["198.51.100.0/24".parse().unwrap()]);
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "as it is");
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "10.88.0.2 masq");
    world.services = vec![exposed(&[])];
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "as it is", "a socket of the node's may listen there");
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "rejected");
}

#[test]
fn a_port_that_the_service_lacks_is_refused_and_an_address_that_no_service_has_is_dropped() {
    let world = only(service(&[POD]));
    for from in [POD, NODE, OUTSIDE] {
        assert_eq!(world.send(from, VIP, 81), "rejected");
        assert_eq!(world.send(from, "10.96.7.7", 80), "dropped");
    }
    assert_eq!(world.send(POD, "10.97.0.1", 80), "as it is masq", "not in a Service range");
}

#[test]
fn source_ranges_guard_the_load_balancers_addresses_alone() {
    let ranges = |all: &[&str]| all.iter().map(|c| c.parse().unwrap()).collect::<Vec<Cidr>>();
    let of = |all: &[&str]| only(ServicePort { source_ranges: ranges(all), ..exposed(&[POD]) });
    let world = of(&["203.0.113.8/31", "10.88.0.3/32", "203.0.113.0/28"]);
    assert_eq!(world.send(OUTSIDE, LB, 80), "10.88.0.2 masq");
    assert_eq!(world.send("203.0.113.16", LB, 80), "dropped");
    assert_eq!(world.send(NODE, LB, 80), "dropped");
    assert_eq!(world.send(POD2, LB, 80), "10.88.0.2 masq");
    assert_eq!(world.send(POD, LB, 80), "dropped", "pods are no exception");
    for (to, port) in [(VIP, 80), ("203.0.113.201", 80), (NODE, 30080)] {
        assert_eq!(world.send("203.0.113.16", to, port), "10.88.0.2 masq", "{to}");
    }
    assert_eq!(of(&["192.0.2.0/24"]).send(NODE, LB, 80), "10.88.0.2 masq");
    // A node that holds the address itself uses it as source.
    let allowed = of(&["192.0.2.0/24"]).table(Family::Ip);
    assert_eq!(allowed.elements[frame::SOURCES].len(), 2);
    assert_eq!(of(&["203.0.113.0/28"]).table(Family::Ip).elements[frame::SOURCES].len(), 1);
    // The ranges hold whether somebody serves or not.
    let nobody = only(ServicePort { source_ranges: ranges(&["192.0.2.0/24"]), ..exposed(&[]) });
    assert_eq!(nobody.send(OUTSIDE, LB, 80), "dropped");
    assert_eq!(nobody.send(NODE, LB, 80), "rejected");
    assert!(!only(exposed(&[POD])).table(Family::Ip).chains.contains_key("firewall-prerouting"), "no ranges, no cost");
}

#[test]
fn overlapping_source_ranges_are_one() {
    let all = ["10.0.0.0/8", "10.1.0.0/16", "0.0.0.0/0"].map(|c| c.parse().unwrap()).to_vec();
    let table = only(ServicePort { source_ranges: all, ..exposed(&[POD]) }).table(Family::Ip);
    assert_eq!(table.elements[frame::SOURCES].len(), 1);
}

#[test]
fn an_external_address_need_not_be_the_nodes() {
    let world = only(ServicePort { external_ips: vec![ip(NODE2), ip("203.0.113.201")], ..service(&[POD]) });
    assert_eq!(world.send(OUTSIDE, "203.0.113.201", 80), "10.88.0.2 masq");
    assert_eq!(world.send(OUTSIDE, NODE2, 80), "10.88.0.2 masq");
    assert_eq!(world.send(NODE, NODE2, 80), "10.88.0.2 masq");
    assert_eq!(world.send(OUTSIDE, NODE2, 22), "as it is", "the node's own services stay");
    let loopback = only(ServicePort { external_ips: vec![ip("127.0.0.1")], ..service(&[]) });
    assert_eq!(loopback.send("127.0.0.1", "127.0.0.1", 80), "as it is");
}

#[test]
fn affinity_keeps_a_client_at_its_endpoint_wherever_it_asks() {
    let mut world = only(ServicePort { external_local: true, ..sticky(exposed(&[POD, POD2, FAR])) });
    let table = world.table(Family::Ip);
    assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.0.3 masq, 10.88.1.2 masq");
    let first = world.walk(&table, world.packet(OUTSIDE, VIP, L4::Tcp, 80), 1);
    assert_eq!(first.remembers.len(), 1);
    for (set, key) in first.remembers {
        assert_eq!(table.sets[&set].dynamic.unwrap().timeout, Duration::from_secs(10_800));
        world.remembered.entry(set).or_default().insert(key);
    }
    for (to, port, told) in [(VIP, 80, "10.88.0.3 masq"), (LB, 80, "10.88.0.3"), (NODE, 30080, "10.88.0.3")] {
        assert_eq!(world.send(OUTSIDE, to, port), told, "{to}");
        let again = world.walk(&table, world.packet(OUTSIDE, to, L4::Tcp, port), 0);
        assert_eq!(again.remembers.len(), 1, "each connection begins the time anew");
    }
    assert_eq!(world.send("203.0.113.10", LB, 80), "10.88.0.2, 10.88.0.3", "another client chooses for itself");
    world.services = vec![ServicePort { external_local: true, ..sticky(exposed(&[POD, FAR])) }];
    assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq", "the endpoint went, and its clients with it");
}

#[test]
fn affinity_changes_nothing_else() {
    let cluster = only(sticky(exposed(&[POD, FAR])));
    for (to, port) in [(LB, 80), (NODE, 30080)] {
        assert_eq!(cluster.send(OUTSIDE, to, port), "10.88.0.2 masq, 10.88.1.2 masq");
    }
    let none = only(ServicePort { internal_local: true, external_local: true, ..sticky(exposed(&[FAR])) });
    assert_eq!(none.send(POD, VIP, 80), "dropped");
    assert_eq!(none.send(OUTSIDE, LB, 80), "dropped");
    assert_eq!(none.send(POD, LB, 80), "10.88.1.2 masq");
    assert_eq!(only(sticky(exposed(&[]))).send(POD, VIP, 80), "rejected");
}

fn host_port(host_ip: Option<&str>, port: u16, to: &str) -> HostPortWant {
    HostPortWant { pod: "shop/web".into(), protocol: L4::Tcp, host_ip: host_ip.map(ip), host_port: port, ip: ip(to), port: 8080 }
}

#[test]
fn host_ports_lead_to_their_pod_and_keep_the_source() {
    let mut world = world(&[]);
    world.host_ports =
        vec![host_port(None, 8000, POD), host_port(Some(NODE2), 8001, POD), host_port(Some("0.0.0.0"), 8002, POD2)];
    assert_eq!(world.send(OUTSIDE, NODE, 8000), "10.88.0.2");
    assert_eq!(world.send(OUTSIDE, GATEWAY, 8000), "10.88.0.2");
    assert_eq!(world.send(NODE, NODE, 8000), "10.88.0.2");
    assert_eq!(world.send(POD2, NODE, 8000), "10.88.0.2");
    assert_eq!(world.send(POD, NODE, 8000), "10.88.0.2 masq", "a pod by its own hostPort");
    assert_eq!(world.send(OUTSIDE, NODE2, 8001), "10.88.0.2");
    assert_eq!(world.send(OUTSIDE, NODE, 8001), "as it is");
    assert_eq!(world.send(OUTSIDE, NODE, 8002), "10.88.0.3");
    assert_eq!(world.send("127.0.0.1", "127.0.0.1", 8000), "as it is", "loopback stays on the node");
    assert_eq!(world.send(POD, OUTSIDE, 8000), "as it is masq", "only packets to this host are translated");
    assert_eq!(world.send_by(OUTSIDE, NODE, L4::Udp, 8000), "as it is");
    assert_eq!(world.send("2001:db8:9::1", "2001:db8::1", 8000), "as it is", "the pod's IPv6 has wants of its own");
}

#[test]
fn nobodys_host_port_takes_the_pods_names_from_them() {
    let mut world = world(&[]);
    world.node.resolvers = vec![ip(GATEWAY)];
    for protocol in [L4::Udp, L4::Tcp] {
        world.host_ports = vec![HostPortWant { protocol, ..host_port(None, 53, POD) }];
        assert_eq!(world.send_by(POD2, GATEWAY, protocol, 53), "as it is");
        assert_eq!(world.send_by(OUTSIDE, NODE, protocol, 53), "10.88.0.2");
    }
}

#[test]
fn the_host_ip_is_asked_first_then_host_ports_then_node_ports() {
    let mut world = only(exposed(&[FAR]));
    world.host_ports = vec![host_port(None, 30080, POD)];
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "10.88.0.2");
    world.host_ports.push(host_port(Some(NODE), 30080, POD2));
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "10.88.0.3");
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "10.88.0.2");
    // A NodePort without endpoints refuses nobody who comes for the host port.
    world.services = vec![exposed(&[])];
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "10.88.0.3");
}

#[test]
fn pods_reach_the_outside_under_the_nodes_name_and_each_other_under_their_own() {
    let world = world(&[]);
    assert_eq!(world.send(POD, OUTSIDE, 443), "as it is masq");
    assert_eq!(world.send(POD, POD2, 443), "as it is");
    assert_eq!(world.send(POD, NODE, 443), "as it is");
    assert_eq!(world.send(NODE, OUTSIDE, 443), "as it is");
    assert_eq!(world.send(OUTSIDE, POD, 443), "as it is");
}

#[test]
fn the_mark_is_gone_when_the_packet_leaves() {
    let world = only(exposed(&[POD]));
    let trace = world.walk(&world.table(Family::Ip), world.packet(OUTSIDE, LB, L4::Tcp, 80), 0);
    let last = trace.hops.last().unwrap();
    assert_eq!(last.did, Did::Masqueraded);
    let rule = &world.table(Family::Ip).chains[&last.chain].rules[last.rule];
    assert!(rule.steps.contains(&Step::MarkXor { bits: frame::MASQUERADE_MARK }));
}

#[test]
fn flows_that_began_are_left_alone() {
    let mut world = only(ServicePort { source_ranges: vec!["192.0.2.0/24".parse().unwrap()], ..exposed(&[POD]) });
    world.flow = Flow::Established { to: Some((ip(FAR), 8080)) };
    assert_eq!(world.send(OUTSIDE, LB, 80), "10.88.1.2", "an old translation, sources that were allowed once");
    world.flow = Flow::Established { to: None };
    assert_eq!(world.send(OUTSIDE, VIP, 81), "as it is");
}

#[test]
fn an_endpoint_on_the_node_itself_is_reached_there() {
    let world = only(exposed(&[NODE]));
    assert_eq!(world.send(OUTSIDE, NODE, 30080), "192.0.2.1", "it does not leave, so nothing is masqueraded");
    assert_eq!(world.send(POD, VIP, 80), "192.0.2.1");
    assert_eq!(world.send(NODE, VIP, 80), "192.0.2.1 masq");
}

#[test]
fn pods_of_a_cni_plugin_are_told_by_their_range() {
    let mut world = only(ServicePort { external_local: true, ..exposed(&[POD, FAR]) });
    world.node.bridge.clear();
    assert_eq!(world.send(POD2, VIP, 80), "10.88.0.2, 10.88.1.2", "the plugin masquerades, or does not");
    assert_eq!(world.send(NODE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq");
    assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq");
    assert_eq!(world.send(POD2, LB, 80), "10.88.0.2, 10.88.1.2");
    assert_eq!(world.send(NODE, LB, 80), "10.88.0.2 masq, 10.88.1.2 masq");
    assert_eq!(world.send(OUTSIDE, LB, 80), "10.88.0.2");
    world.node.pod_cidrs.clear();
    assert_eq!(world.send(POD2, VIP, 80), "10.88.0.2, 10.88.1.2", "nobody can be told from a pod");
    assert_eq!(world.send(POD2, LB, 80), "10.88.0.2");
}

#[test]
fn a_kernel_without_fib_serves_all_but_host_ports() {
    let mut world = only(exposed(&[POD, FAR]));
    world.fib = false;
    world.host_ports = vec![host_port(None, 8000, POD)];
    assert_eq!(world.send(POD2, VIP, 80), "10.88.0.2, 10.88.1.2 masq");
    assert_eq!(world.send(OUTSIDE, VIP, 80), "10.88.0.2 masq, 10.88.1.2 masq");
    assert_eq!(world.send(OUTSIDE, NODE2, 30080), "10.88.0.2 masq, 10.88.1.2 masq", "all addresses that we know of");
    assert_eq!(world.send(OUTSIDE, LB, 80), "10.88.0.2 masq, 10.88.1.2 masq");
    assert_eq!(world.send(OUTSIDE, NODE, 8000), "as it is");
    let words = world.table(Family::Ip).to_string();
    assert!(!words.contains("fib "), "{words}");
}

#[test]
fn another_endpoint_changes_elements_only() {
    let other = named(ServicePort { cluster_ip: Some(ip("10.96.0.9")), ..service(&[POD, POD2]) }, "b");
    let [old, new, fewer] = [&[POD, POD2, FAR][..], &[POD, POD2, FAR2], &[POD, POD2]].map(exposed);
    let mut layout = world(&[old, other]).layout(Family::Ip);
    let changes = layout.change([], [new.clone()]);
    assert!(changes.keeps_structure());
    assert_eq!(changes.element_count(), 4, "one at each place: {changes:?}");
    assert!(layout.change([], [new]).is_empty());
    // The ClusterIP's chain for two is there; those of external traffic are not.
    let changes = layout.change([], [fewer]);
    let chains: Vec<&str> = changes.chains.keys().map(|n| &**n).collect();
    let gone = ["external-2", "external-3", "lb-3", "nodeport-2", "nodeport-3", "to-external", "to-lb", "to-nodeport"];
    assert_eq!(chains, gone, "and the chains that lead to them");
    let sets: Vec<String> = gone[..5].iter().flat_map(|name| [name.to_string(), format!("{name}-eps")]).collect();
    assert_eq!(changes.sets.keys().map(|n| n.to_string()).collect::<Vec<_>>(), sets);
    assert_eq!((changes.elements["lb-2"].len(), changes.elements["lb-2-eps"].len()), (1, 2));
    assert_eq!((changes.elements["external-2"].len(), changes.elements["external-2-eps"].len()), (2, 4));
}

#[test]
fn names_are_such_that_nft_prints_them_whatever_a_service_is_called() {
    let odd = |text: &str| ServicePortName { namespace: text.into(), service: "\"};\n'".into(), port: "ÿ\0".into() };
    let name = odd(&"n".repeat(400));
    let mut services = vec![ServicePort { name, ..sticky(exposed(&[POD, FAR])) }];
    services.push(ServicePort {
        name: odd("{"),
        cluster_ip: Some(ip("fd96::1")),
        ..sticky(service(&["fd88::2", "2001:db8:f::1"]))
    });
    for family in [Family::Ip, Family::Ip6] {
        let of = |s: &&ServicePort| s.cluster_ip.unwrap().is_ipv4() == (family == Family::Ip);
        let table = world(&services.iter().filter(of).cloned().collect::<Vec<_>>()).table(family);
        for name in table.chains.keys().chain(table.sets.keys()) {
            let fine = |c: char| c.is_ascii_alphanumeric() || "/\\_.-".contains(c);
            assert!(name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(fine) && name.len() < 128, "{name}");
        }
    }
}

#[test]
fn a_hundred_thousand_endpoints_and_ten_thousand_ports_are_planned_in_one_go() {
    let address = |n: u32| std::net::IpAddr::from((0x0a58_0000 + n).to_be_bytes());
    let all: Vec<_> = (0..100_000).map(|n| crate::proxy::model::Endpoint { ip: address(n), port: 1, local: false }).collect();
    let mut services = vec![ServicePort { cluster: all, node_port: Some(30080), ..service(&[]) }];
    services.extend((1..=10_000).map(|port| named(ServicePort { port: 100 + port, ..service(&[POD]) }, &format!("p{port}"))));
    let world = world(&services);
    let mut layout = world.layout(Family::Ip);
    let table = layout.table();
    assert_eq!((table.elements["lb-131072-eps"].len(), table.elements["lb-1-eps"].len()), (100_000, 10_000));
    assert_eq!(table.elements[frame::CLUSTER_IPS].len(), 1);
    assert!(table.chains.len() < 20, "ports share chains");
    assert_eq!(layout.change([&services[7].name], []).element_count(), 2);
}

#[test]
fn a_trace_tells_rule_service_endpoint_and_end() {
    let mut world = only(ServicePort { external_local: true, ..exposed(&[POD, FAR]) });
    let table = world.table(Family::Ip);
    let packet = world.packet(NODE, LB, L4::Tcp, 80);
    let told = world.walk(&table, packet, 1).to_string();
    let lines = [
        "output output 1: Services and host ports: jump services",
        "output services 3: external addresses of Services: @external-ips jump to-external",
        "output to-external 2: this node: jump to-external-all",
        "output to-external-all 1: 2 endpoints: @external-all-2 (shop/web:http) goto external-all-2",
        "output external-all-2 1: from this node: goes on",
        "output external-all-2 2: any endpoint: @external-all-2-eps to 10.88.1.2:8080",
        "output outgoing 1: what begins and nobody serves: jump refuse",
        "postrouting postrouting 1: answers have to come back through this node: masquerade",
        "to 10.88.1.2:8080 by eth0, source masqueraded",
    ];
    assert_eq!(told.lines().collect::<Vec<_>>(), lines);
    world.services = vec![exposed(&[])];
    let told = world.walk(&world.table(Family::Ip), packet, 0).to_string();
    assert!(told.ends_with("refused: reset") && told.contains("@noep (shop/web:http) goto rejected"), "{told}");
}

#[test]
fn the_plan_is_printed_in_nfts_words() {
    let text = only(sticky(exposed(&[POD]))).table(Family::Ip).to_string();
    for words in [
        "table ip t {",
        "\tmap lb-affinity {\n\t\ttype ipv4_addr . inet_proto . inet_service : verdict\n",
        "10.96.0.10 . tcp . 80 comment \"shop/web:http\" : goto aff-",
        "type nat hook prerouting priority -100; policy accept;",
        "\t\tsize 16384\n\t\tflags dynamic,timeout\n\t\ttimeout 10800s\n",
        "meta mark & 0x00004000 == 0x00004000 meta mark set meta mark ^ 0x00004000 masquerade fully-random",
        "\t\tip daddr @cluster-ips goto rejected comment \"a port that the Service does not have\"",
    ] {
        assert!(text.contains(words), "{words}\n{text}");
    }
    let text = only(service(&[POD, FAR])).table(Family::Ip).to_string();
    assert!(text.contains("dnat ip to ip daddr . meta l4proto . th dport . numgen random mod 2 map @lb-2-eps comment"), "{text}");
    assert!(text.contains("10.96.0.10 . tcp . 80 . 0x00000001 : 10.88.1.2 . 8080"), "{text}");
    assert!(text.contains("\tset lb-2 {\n\t\ttype ipv4_addr . inet_proto . inet_service\n"), "{text}");
    assert!(text.contains("ip daddr . meta l4proto . th dport @lb-2 goto lb-2 comment \"2 endpoints\""), "{text}");
}

/// How likely each place is, by what the rules of a chain say.
fn likely(table: &Table, chain: &str, front: &[Value]) -> Vec<f64> {
    let elements = &table.elements[&*format!("{chain}-eps")];
    let taken = |n: u32| elements.contains_key(&Key::of(&[front, &[Value::Index(n)]].concat()));
    let mut left = 1.0;
    let mut all = vec![0.0; elements.len()];
    let throws = table.chains[chain].rules.iter().flat_map(|rule| &rule.steps).filter_map(|step| match step {
        Step::DnatMap { key, .. } => key.last(),
        _ => None,
    });
    for throw in throws {
        let Field::Random { modulus, offset: 0 } = throw else { panic!("{throw:?}") };
        let hits = (0..*modulus).filter(|n| taken(*n)).inspect(|n| all[*n as usize] += left / f64::from(*modulus)).count();
        left *= 1.0 - hits as f64 / f64::from(*modulus);
    }
    assert!(left < 1e-12, "{chain}: a packet may miss every throw");
    // The map has other places too.
    all.retain(|chance| *chance > 0.0);
    all
}

#[test]
fn each_of_many_endpoints_is_as_likely_as_the_next_to_one_percent() {
    let front = [Value::Address(ip(VIP)), Value::Protocol(6), Value::Port(80)];
    for count in [1_u16, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 127, 129, 1000] {
        let all = (0..count).map(|n| crate::proxy::model::Endpoint {
            ip: (0x0a80_0000 + u32::from(n)).to_be_bytes().into(),
            port: 8080,
            local: true,
        });
        let all: Vec<_> = all.collect();
        let service = ServicePort { local: all.clone(), cluster: all, has_any: true, external_local: true, ..exposed(&[]) };
        let table = only(service).table(Family::Ip);
        let places = if count <= 16 { count } else { count.next_power_of_two() };
        let lb = [Value::Address(ip(LB)), Value::Protocol(6), Value::Port(80)];
        for (chain, front) in [("lb", front), ("external-local", lb), ("external-all", lb)] {
            let chances = likely(&table, &format!("{chain}-{places}"), &front);
            assert_eq!(chances.len(), usize::from(count));
            let even = 1.0 / f64::from(count);
            assert!(chances.iter().all(|chance| (chance / even - 1.0).abs() < 0.01), "{chain} {count}: {chances:?}");
        }
    }
}

#[test]
fn what_many_services_look_up_is_bounded_whatever_numbers_of_endpoints_they_have() {
    let service = |n: u16| {
        let end = |i| crate::proxy::model::Endpoint { ip: [10, 88, 0, i].into(), port: 8080, local: i % 2 == 0 };
        let all: Vec<_> = (0..n as u8).map(end).collect();
        let local = all.iter().filter(|e| e.local).copied().collect();
        let vip = Some([10, 96, 1, n as u8].into());
        let (load_balancer_ips, node_port) = (vec![[203, 0, 113, n as u8].into()], Some(30_000 + n));
        named(
            ServicePort {
                cluster_ip: vip,
                load_balancer_ips,
                node_port,
                external_local: true,
                cluster: all,
                local,
                has_any: true,
                ..service(&[])
            },
            &format!("s{n}"),
        )
    };
    let all: Vec<_> = (1..200).map(service).collect();
    let mut layout = world(&all).layout(Family::Ip);
    let table = layout.table();
    let rules = |chain: &str| table.chains[chain].rules.len();
    assert_eq!((rules("to-lb"), rules("to-external-all"), rules("to-nodeport-all")), (20, 20, 20));
    assert_eq!((rules("to-external"), rules("to-nodeport")), (2 + 19, 2 + 19), "both lists' numbers beside each other");
    // One that becomes another of a class that others use: elements only.
    let changes = layout.change([], [ServicePort { node_port: Some(30_150), ..named(service(20), "s150") }]);
    assert!(changes.keeps_structure());
    let leads = |set: &&Name| table.sets[*set].data == DataSpec::Verdict;
    assert_eq!(table.sets.keys().filter(leads).count(), 0, "no element leads to a chain");
}
