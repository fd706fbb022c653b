//! Packets: who reaches whom, and with which address.

use coracle::net::model::L4::{Tcp, Udp};

use crate::world::*;

#[test]
fn pods_reach_each_other_the_node_and_the_outside_by_both_families() {
    let Some((world, net)) = World::with_net() else { return };
    world.ensure(&net);
    let (a, b) = (world.pod("a"), world.pod("b"));
    let at_a = world.attach(&net, "a", &a, &[]);
    let at_b = world.attach(&net, "b", &b, &[]);
    assert_eq!(at_a.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.88.0.2", "fd88::2"]);
    assert_eq!(at_b.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.88.0.3", "fd88::3"]);
    // The uplink's MTU.
    assert_eq!(at_a.mtu, 1460);

    let _servers = [
        a.tcp("a", "[::]:80"),
        b.tcp("b", "[::]:80"),
        world.node.tcp("node", "[::]:8000"),
        world.outside.tcp("out", "[::]:80"),
        world.outside.udp("out", "[::]:53"),
    ];
    // Pod to pod: nobody's address is changed.
    assert_eq!(a.ask("10.88.0.3:80"), "b 10.88.0.2");
    assert_eq!(b.ask("[fd88::2]:80"), "a fd88::3");
    // Node to pod, pod to node: by the gateway's and by the uplink's address.
    assert_eq!(world.node.ask("10.88.0.2:80"), "a 10.88.0.1");
    assert_eq!(world.node.ask("[fd88::2]:80"), "a fd88::1");
    assert_eq!(a.ask("10.88.0.1:8000"), "node 10.88.0.2");
    assert_eq!(a.ask("192.0.2.1:8000"), "node 10.88.0.2");
    assert_eq!(a.ask("[fd88::1]:8000"), "node fd88::2");
    // To the outside: with the node's address, since nobody there knows pods.
    assert_eq!(a.ask("192.0.2.2:80"), "out 192.0.2.1");
    assert_eq!(a.ask("[2001:db8::2]:80"), "out 2001:db8::1");
    assert_eq!(a.ask_udp("192.0.2.2:53"), "out 192.0.2.1");
    assert_eq!(a.ask_udp("[2001:db8::2]:53"), "out 2001:db8::1");
    // To itself.
    assert_eq!(a.ask("10.88.0.2:80"), "a 10.88.0.2");
    assert_eq!(a.ask("127.0.0.1:80"), "a 127.0.0.1");
}

#[test]
fn a_pods_interface_is_as_the_design_says() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    // Without ensure: attach makes what is missing.
    world.attach(&net, "a", &a, &[]);
    let addresses = a.json("addr show dev eth0");
    let own: Vec<String> = addresses[0]["addr_info"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|i| i["scope"] == "global")
        .map(|i| format!("{}/{}", i["local"].as_str().unwrap(), i["prefixlen"]))
        .collect();
    assert_eq!(own, ["10.88.0.2/32", "fd88::2/128"]);
    assert_eq!(addresses[0]["address"], "0a:58:0a:58:00:02");
    assert_eq!(addresses[0]["mtu"], 1460);
    assert!(!addresses.to_string().contains("tentative"), "{addresses}");
    for (family, gateway) in [("-4", "10.88.0.1"), ("-6", "fd88::1")] {
        let routes = a.json(&format!("{family} route show default"));
        assert_eq!((&routes[0]["gateway"], &routes[0]["dev"]), (&gateway.into(), &"eth0".into()));
        assert!(routes[0]["flags"].to_string().contains("onlink"), "{routes}");
    }
    for off in ["accept_ra", "accept_redirects", "accept_dad", "autoconf"] {
        assert_eq!(a.sysctl(&format!("net/ipv6/conf/eth0/{off}")), "0", "{off}");
    }
    assert_eq!(a.sysctl("net/ipv4/conf/eth0/accept_redirects"), "0");
    assert!(a.json("link show lo")[0]["flags"].to_string().contains("UP"));

    // The host's end: hairpin, isolated as bridge-nf-call says, no learning, named by the pod's uid.
    let link =
        &world.node.json("-d link show type veth").as_array().unwrap().iter().find(|l| l["ifname"] != "up0").unwrap().clone();
    let port = &link["linkinfo"]["info_slave_data"];
    let calls = world.node.run(|| coracle::net::observe::bridge_calls_iptables().unwrap());
    assert_eq!(
        (&port["hairpin"], &port["isolated"], &port["learning"]),
        (&true.into(), &(!calls).into(), &false.into()),
        "{port}"
    );
    assert_eq!((&link["ifalias"], &link["master"]), (&"uid-a".into(), &BRIDGE.into()));
    assert!(link["ifname"].as_str().unwrap().len() <= 15);
    // The host asks nobody for the pod's link-layer address.
    for neighbour in world.node.json(&format!("neigh show dev {BRIDGE} nud permanent")).as_array().unwrap() {
        assert_eq!(neighbour["lladdr"], "0a:58:0a:58:00:02");
    }
    assert_eq!(world.node.json(&format!("neigh show dev {BRIDGE} nud permanent")).as_array().unwrap().len(), 2);
    // The bridge.
    let bridge = world.node.json(&format!("addr show dev {BRIDGE}"));
    let text = bridge.to_string();
    assert!(text.contains("10.88.0.1") && text.contains("fd88::1") && !text.contains("tentative"), "{text}");
    assert_eq!(bridge[0]["mtu"], 1460);
    assert_eq!(world.node.sysctl(&format!("net/ipv4/conf/{BRIDGE}/send_redirects")), "0");
    assert_eq!(world.node.sysctl("net/ipv4/conf/all/send_redirects"), "0");
    assert_eq!(world.node.sysctl(&format!("net/ipv6/conf/{BRIDGE}/accept_ra")), "0");
    assert_eq!(
        (world.node.sysctl("net/ipv4/ip_forward"), world.node.sysctl("net/ipv6/conf/all/forwarding")),
        ("1".into(), "1".into())
    );
    // It heard router advertisements on its uplink before, and does so now.
    assert_eq!(world.node.sysctl("net/ipv6/conf/up0/accept_ra"), "2");
}

#[test]
fn host_ports_lead_from_outside_node_and_pods_to_the_pod() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b, c) = (world.pod("a"), world.pod("b"), world.pod("c"));
    let ports =
        [port(Tcp, "", 8080, 80), port(Udp, "", 8080, 53), port(Tcp, "192.0.2.11", 9090, 80), port(Tcp, "2001:db8::1", 9091, 80)];
    world.attach(&net, "a", &a, &ports);
    world.attach(&net, "b", &b, &[port(Tcp, "192.0.2.1", 9090, 80), port(Tcp, "0.0.0.0", 7000, 80), port(Tcp, "::", 7001, 80)]);
    world.attach(&net, "c", &c, &[]);
    let _servers = [
        a.tcp("a", "[::]:80"),
        a.udp("a", "0.0.0.0:53"),
        a.udp("a", "[fd88::2]:53"),
        b.tcp("b", "[::]:80"),
        world.outside.tcp("out", "[::]:8080"),
    ];
    // From outside: the client's address arrives.
    assert_eq!(world.outside.ask("192.0.2.1:8080"), "a 192.0.2.2");
    assert_eq!(world.outside.ask("192.0.2.11:8080"), "a 192.0.2.2");
    assert_eq!(world.outside.ask("[2001:db8::1]:8080"), "a 2001:db8::2");
    assert_eq!(world.outside.ask_udp("192.0.2.1:8080"), "a 192.0.2.2");
    assert_eq!(world.outside.ask_udp("[2001:db8::1]:8080"), "a 2001:db8::2");
    // hostIP decides between two pods with one port.
    assert_eq!(world.outside.ask("192.0.2.1:9090"), "b 192.0.2.2");
    assert_eq!(world.outside.ask("192.0.2.11:9090"), "a 192.0.2.2");
    assert_eq!(world.outside.ask("[2001:db8::1]:9091"), "a 2001:db8::2");
    assert_eq!(world.outside.ask("192.0.2.1:9091"), "ConnectionRefused");
    // 0.0.0.0 and :: mean their own family.
    assert_eq!(world.outside.ask("192.0.2.1:7000"), "b 192.0.2.2");
    assert_eq!(world.outside.ask("[2001:db8::1]:7000"), "ConnectionRefused");
    assert_eq!(world.outside.ask("[2001:db8::1]:7001"), "b 2001:db8::2");
    // From the node itself.
    assert_eq!(world.node.ask("192.0.2.1:8080"), "a 192.0.2.1");
    assert_eq!(world.node.ask("[2001:db8::1]:8080"), "a 2001:db8::1");
    assert_eq!(world.node.ask_udp("192.0.2.1:8080"), "a 192.0.2.1");
    // From another pod, by the node's address and the gateway's.
    assert_eq!(c.ask("192.0.2.1:8080"), "a 10.88.0.4");
    assert_eq!(c.ask("10.88.0.1:8080"), "a 10.88.0.4");
    assert_eq!(c.ask("[2001:db8::1]:8080"), "a fd88::4");
    // Hairpin: a pod by its own hostPort sees the gateway come.
    assert_eq!(a.ask("192.0.2.1:8080"), "a 10.88.0.1");
    assert_eq!(a.ask("[2001:db8::1]:8080"), "a fd88::1");
    assert_eq!(a.ask_udp("192.0.2.1:8080"), "a 10.88.0.1");
    // Only what is meant for this node is translated (CVE-2025-67499).
    assert_eq!(c.ask("192.0.2.2:8080"), "out 192.0.2.1");
    assert_eq!(world.node.ask("192.0.2.2:8080"), "out 192.0.2.1");
    // Loopback stays the node's own.
    assert_eq!(world.node.ask("127.0.0.1:8080"), "ConnectionRefused");
    let _own = world.node.tcp("node", "127.0.0.1:8080");
    assert_eq!(world.node.ask("127.0.0.1:8080"), "node 127.0.0.1");
    for route_localnet in ["all", BRIDGE, "up0"] {
        assert_eq!(world.node.sysctl(&format!("net/ipv4/conf/{route_localnet}/route_localnet")), "0");
    }
    // From the LAN to the node's loopback services: dropped (T33).
    world.outside.ip("route add 127.9.9.9 via 192.0.2.1 dev eth0");
    let _loopback = world.node.tcp("node", "127.9.9.9:6000");
    assert_ne!(world.outside.ask("127.9.9.9:6000"), "node 192.0.2.2");

    world.detach(&net, "a");
    assert_eq!(world.outside.ask("192.0.2.1:8080"), "ConnectionRefused");
    assert_eq!(world.outside.ask("192.0.2.1:9090"), "b 192.0.2.2");
}

#[test]
fn a_udp_flow_does_not_outlive_its_host_port() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.attach(&net, "a", &a, &[port(Udp, "", 5353, 53)]);
    let first = a.udp("a", "0.0.0.0:53");
    // One socket, so one flow for conntrack, whatever is behind it.
    let client = world.outside.udp_socket("0.0.0.0:0");
    let to = "192.0.2.1:5353".parse().unwrap();
    assert_eq!(ask_with(&client, to), "a 192.0.2.2");
    world.detach(&net, "a");
    drop(first);
    assert_eq!((net.lacks(), net.proxy.lacks()), (vec![], vec![]));
    let flows = world.node.must("conntrack", &["-L"]);
    assert!(!flows.contains("10.88.0.2"), "{flows}");
    world.attach(&net, "b", &b, &[port(Udp, "", 5353, 53)]);
    let _second = b.udp("b", "0.0.0.0:53");
    assert_eq!(ask_with(&client, to), "b 192.0.2.2");
}

#[test]
fn isolation_follows_bridge_nf_call_and_traffic_passes_either_way() {
    let Some((world, net)) = World::with_net() else { return };
    let call = CALL_IPTABLES;
    if !world.has_br_netfilter() {
        return;
    }
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.node.set_sysctl(call, "0");
    world.node.set_sysctl(CALL_IP6TABLES, "0");
    world.attach(&net, "a", &a, &[port(Tcp, "", 8080, 80)]);
    assert_eq!(world.isolated(), [true]);
    for (value, wanted) in [("1", false), ("0", true), ("1", false)] {
        world.node.set_sysctl(call, value);
        world.ensure(&net);
        assert_eq!(world.isolated(), [wanted]);
        world.attach(&net, "b", &b, &[]);
        assert_eq!(world.isolated(), [wanted, wanted]);
        let _servers = [a.tcp("a", "0.0.0.0:80"), b.tcp("b", "0.0.0.0:80")];
        for _ in 0..3 {
            assert_eq!(b.ask("10.88.0.2:80"), format!("a {}", address_of(&b)));
            // Translated between two pods of one bridge: what isolation and br_netfilter break together.
            assert_eq!(b.ask("192.0.2.1:8080"), format!("a {}", address_of(&b)));
            assert_eq!(a.ask("192.0.2.1:8080"), "a 10.88.0.1");
        }
        world.detach(&net, "b");
    }
}

fn address_of(pod: &Ns) -> String {
    pod.json("-4 addr show dev eth0")[0]["addr_info"][0]["local"].as_str().unwrap().to_owned()
}

#[test]
fn a_pod_cannot_take_anothers_address_on_the_link() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.attach(&net, "a", &a, &[]);
    world.attach(&net, "b", &b, &[]);
    let _a = a.tcp("a", "0.0.0.0:80");
    let _b = b.tcp("b", "0.0.0.0:80");
    assert_eq!(world.node.ask("10.88.0.2:80"), "a 10.88.0.1");
    // b claims a's network and link-layer address and tells the link so.
    b.ip("link set eth0 down");
    b.ip("link set eth0 address 0a:58:0a:58:00:02");
    b.ip("addr add 10.88.0.2/32 dev eth0");
    b.ip("link set eth0 up");
    b.ip("route replace default via 10.88.0.1 dev eth0 onlink");
    // Its link came up with a gratuitous ARP; a datagram with a's address follows.
    b.udp_socket("10.88.0.2:0").send_to(b"it is me", "10.88.0.1:9").unwrap();
    for _ in 0..3 {
        assert_eq!(world.node.ask("10.88.0.2:80"), "a 10.88.0.1");
    }
}

#[test]
fn the_first_packet_after_attach_arrives() {
    let Some((world, net)) = World::with_net() else { return };
    let _out = world.outside.udp("out", "[::]:53");
    let _node = world.node.udp("node", "[::]:54");
    for n in 0..40 {
        // A bridge without ports has no carrier: the first pod brings it.
        let pod = world.pod(&n.to_string());
        world.attach(&net, &n.to_string(), &pod, &[port(Udp, "", 5353, 53)]);
        let server = pod.udp("pod", "[::]:53");
        let (v4, v6) = if n % 2 == 0 { ("192.0.2.2:53", "[fd88::1]:54") } else { ("10.88.0.1:54", "[2001:db8::2]:53") };
        assert!(pod.ask_udp(v4).contains(" "), "{n}: {v4}");
        assert!(pod.ask_udp(v6).contains(' '), "{n}: {v6}");
        assert!(world.outside.ask_udp("192.0.2.1:5353").starts_with("pod "), "{n}");
        world.node.run(|| net.detach(&format!("uid-{n}")).unwrap());
        drop(server);
    }
}
