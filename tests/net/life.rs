//! Life of the host's state: what is made, what is put back, what a crash may leave, who else is there.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

use coracle::net::model::L4::{Tcp, Udp};
use coracle::net::model::NetError;

use crate::world::*;

/// Everything of the node that we could leave something in.
pub fn picture(world: &World) -> String {
    let sysctls = [
        "net/ipv4/ip_forward",
        "net/ipv4/conf/all/send_redirects",
        "net/ipv4/conf/all/accept_redirects",
        "net/ipv6/conf/all/forwarding",
        "net/ipv6/conf/up0/accept_ra",
        "net/ipv6/conf/default/accept_ra",
    ]
    .map(|name| format!("{name}={}", world.node.sysctl(name)))
    .join("\n");
    let links = world.node.json("link show");
    let names: Vec<_> = links.as_array().unwrap().iter().map(|l| l["ifname"].to_string()).collect();
    format!("{sysctls}\n{names:?}\n{}\n{}", world.nft("list ruleset"), world.node.ip("route show").replace(" linkdown", ""))
}

#[test]
fn remove_all_leaves_the_host_as_it_was_and_others_things_alone() {
    let Some(world) = World::possible() else { return };
    // A foreign table, bridge and veth, and redirects refused before forwarding was ever on.
    world.nft("add table ip foreign");
    world.nft("add chain ip foreign c { type nat hook postrouting priority 100 ; }");
    world.node.ip("link add br-foreign type bridge");
    world.node.ip("link add veth0123456789a type veth peer name foreign1");
    world.node.set_sysctl("net/ipv4/conf/all/accept_redirects", "0");
    let before = picture(&world);
    let net = world.net();
    let pods: Vec<Ns> = ["a", "b"].map(|name| world.pod(name)).into();
    world.attach(&net, "a", &pods[0], &[port(Tcp, "", 8080, 80)]);
    world.attach(&net, "b", &pods[1], &[]);
    world.ensure(&net);
    assert_ne!(picture(&world), before);
    world.remove_all(&net);
    assert_eq!(picture(&world), before);
    assert!(!world.run_dir().join("net").exists());
    // Again: nothing to do. And from nothing: as the first time.
    world.remove_all(&net);
    assert_eq!(picture(&world), before);
    let again = world.net();
    world.attach(&again, "a", &pods[0], &[]);
    world.node.run(|| again.remove_all().unwrap());
    assert_eq!(picture(&world), before);
}

#[test]
fn two_hundred_pods_come_and_go_and_nothing_stays() {
    let Some((world, net)) = World::with_net() else { return };
    world.ensure(&net);
    let before = picture(&world);
    let pod = world.pod("a");
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut addresses = BTreeSet::new();
    let mut times = (Vec::new(), Vec::new());
    for n in 0..200 {
        let name = format!("p{n}");
        let request = request(&name, &pod.path, &[port(Tcp, "", 8080, 80), port(Udp, "", 8080, 80)]);
        let (attach, detach, attachment) = world.node.run(|| {
            let started = Instant::now();
            let attachment = net.attach(&request).unwrap();
            let attached = started.elapsed();
            let started = Instant::now();
            net.detach(&request.uid).unwrap();
            (attached, started.elapsed(), attachment)
        });
        times.0.push(attach);
        times.1.push(detach);
        addresses.insert(attachment.addresses);
    }
    for (what, mut all) in [("attach", times.0), ("detach", times.1)] {
        all.sort();
        println!("{what}: p50 {:?}, p95 {:?}, max {:?}", all[100], all[190], all[199]);
    }
    // Round the range: no address again before it must be.
    assert_eq!(addresses.len(), 200);
    assert_eq!(picture(&world), before);
    assert!(world.node.json(&format!("neigh show dev {BRIDGE} nud permanent")).as_array().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(world.run_dir().join("net")).unwrap().count(), 1, "only the allocator's memory stays");
    let count = fds();
    world.attach(&net, "last", &pod, &[]);
    world.detach(&net, "last");
    assert!(fds() <= count + 2, "descriptors leak"); // other tests run in this process
}

#[test]
fn a_full_range_says_which_and_what_to_do_and_nothing_is_lost_by_it() {
    let Some(world) = World::possible() else { return };
    let mut config = world.config();
    config.cidrs = vec!["10.77.0.0/29".parse().unwrap(), V6.parse().unwrap()];
    let net = world.net_with(config);
    let pods: Vec<Ns> = (0..6).map(|n| world.pod(&n.to_string())).collect();
    for (n, pod) in pods.iter().enumerate().take(5) {
        world.attach(&net, &n.to_string(), pod, &[]);
    }
    let full = world.try_attach(&net, "5", &pods[5], &[]).unwrap_err();
    assert_eq!(
        full.to_string(),
        "pod range 10.77.0.0/29 has no free address left (5 pods hold one): use a wider --pod-cidr, or remove pods"
    );
    assert_eq!(world.veths().len(), 5);
    world.detach(&net, "2");
    let got = world.attach(&net, "5", &pods[5], &[]);
    assert_eq!(got.addresses[0].to_string(), "10.77.0.4");
}

#[test]
fn host_ports_of_two_pods_conflict_by_name() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.attach(&net, "a", &a, &[port(Tcp, "", 80, 80)]);
    let taken = world.try_attach(&net, "b", &b, &[port(Udp, "", 80, 80), port(Tcp, "192.0.2.1", 80, 80)]).unwrap_err();
    assert_eq!(
        taken.to_string(),
        "hostPort 192.0.2.1:80/TCP of pod test/b belongs to pod test/a already: use another port, or another hostIP"
    );
    assert_eq!(world.veths().len(), 1);
    world.attach(&net, "b", &b, &[port(Udp, "", 80, 80)]);
    world.detach(&net, "a");
    world.attach(&net, "b", &b, &[port(Udp, "", 80, 80), port(Tcp, "192.0.2.1", 80, 80)]);
}

#[test]
fn attach_is_idempotent_and_mends_what_was_broken() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    let ports = [port(Tcp, "", 8080, 80)];
    let first = world.attach(&net, "a", &a, &ports);
    let index = |w: &World| w.node.json(&format!("link show dev {}", w.veths()[0]))[0]["ifindex"].clone();
    let before = index(&world);
    assert_eq!(world.attach(&net, "a", &a, &ports), first);
    assert_eq!(index(&world), before, "a whole link is left alone");
    for damage in ["addr flush dev eth0 scope global", "link set eth0 down"] {
        a.ip(damage);
        assert_eq!(world.attach(&net, "a", &a, &ports), first, "{damage}");
    }
    world.node.ip(&format!("link del {}", world.veths()[0]));
    assert_eq!(world.attach(&net, "a", &a, &ports), first);
    // Another sandbox for the same pod: the old one's link goes.
    let second = world.pod("second");
    let request = request("a", &second.path, &ports);
    world.node.run(|| net.attach(&request).unwrap());
    assert_eq!(world.veths().len(), 1);
    assert_eq!(second.json("-4 addr show dev eth0")[0]["addr_info"][0]["local"], "10.88.0.2");
    // Detach, and again, and of one that never was; also after the namespace is gone.
    drop(second);
    for uid in ["uid-a", "uid-a", "uid-never"] {
        world.node.run(|| net.detach(uid).unwrap());
    }
    assert!(world.veths().is_empty());
}

#[test]
fn a_new_agent_adopts_what_lives_and_frees_the_rest() {
    let Some(world) = World::possible() else { return };
    let (a, b, c) = (world.pod("a"), world.pod("b"), world.pod("c"));
    let old = world.net();
    let at_a = world.attach(&old, "a", &a, &[port(Tcp, "", 8080, 80)]);
    world.attach(&old, "b", &b, &[port(Tcp, "", 8081, 80)]);
    world.attach(&old, "c", &c, &[]);
    drop(old);
    // c's lease is lost: the kernel still knows it.
    std::fs::remove_file(world.run_dir().join("net/uid-c.json")).unwrap();
    let _server = a.tcp("a", "0.0.0.0:80");
    let living: Vec<(String, PathBuf)> = [("uid-a", &a), ("uid-c", &c)].map(|(uid, ns)| (uid.to_owned(), ns.path.clone())).into();
    let new = world.net();
    let adopted = world.node.run(|| new.recover(&living).unwrap());
    assert_eq!(adopted, [("uid-a".to_owned(), at_a)]);
    assert_eq!(world.veths().len(), 2, "b is gone");
    assert_eq!(world.outside.ask("192.0.2.1:8080"), "a 192.0.2.2");
    assert_eq!(world.outside.ask("192.0.2.1:8081"), "ConnectionRefused");
    assert!(!world.run_dir().join("net/uid-b.json").exists());
    // c keeps its address and gets its lease again.
    let at_c = world.attach(&new, "c", &c, &[port(Tcp, "", 8082, 80)]);
    assert_eq!(at_c.addresses[0].to_string(), "10.88.0.4");
    // b's address rests, the next one is new.
    let d = world.pod("d");
    assert_eq!(world.attach(&new, "d", &d, &[]).addresses[0].to_string(), "10.88.0.5");
}

#[test]
fn after_a_reboot_all_is_made_anew() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    world.attach(&net, "a", &a, &[port(Tcp, "", 8080, 80)]);
    drop((net, a));
    // The same directory, another kernel: nothing of the old one is there.
    let (node, outside) = (Ns::new(world.dir.path().join("node2")), Ns::new(world.dir.path().join("out2")));
    let rebooted = World { node, outside, run: world.run, dir: world.dir };
    let new = rebooted.net();
    assert_eq!(rebooted.node.run(|| new.recover(&[]).unwrap()), []);
    assert!(!rebooted.run_dir().join("net/uid-a.json").exists());
    let a = Ns::new(rebooted.dir.path().join("a2"));
    rebooted.attach(&new, "a", &a, &[port(Tcp, "", 8080, 80)]);
    drop(world.node);
}

#[test]
fn the_hosts_nft_prints_what_leads_to_and_from_pods() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    world.attach(&net, "a", &a, &[port(Tcp, "", 8080, 80), port(Udp, "192.0.2.1", 53, 53), port(Tcp, "2001:db8::1", 81, 80)]);
    let text = world.nft("list ruleset");
    for line in [
        "type inet_proto . inet_service : ipv4_addr . inet_service",
        "tcp . 8080 comment \"test/a\" : 10.88.0.2 . 80",
        "udp . 192.0.2.1 . 53 comment \"test/a\" : 10.88.0.2 . 53",
        "tcp . 2001:db8::1 . 81 comment \"test/a\" : fd88::2 . 80",
        "elements = { 10.88.0.2 . 10.88.0.2 }",
        "type nat hook prerouting priority dstnat; policy accept;",
        "type nat hook postrouting priority srcnat; policy accept;",
        "fib daddr type != local return",
        "ip daddr 127.0.0.0/8 return",
        "ip6 daddr ::1 return",
        "dnat ip to meta l4proto . ip daddr . th dport map @hostip-hostports",
        "dnat ip6 to meta l4proto . th dport map @hostports",
        "ct status dnat ip saddr . ip daddr @hairpin masquerade",
        "ip saddr 10.88.0.0/24 ip daddr != 10.88.0.0/24 oifname != \"tnet0\" masquerade",
        "ip6 saddr fd88::/64 ip6 daddr != fd88::/64 oifname != \"tnet0\" masquerade",
    ] {
        assert!(text.contains(line), "no line {line:?} in\n{text}");
    }
    // What it prints it also reads: nothing of ours is beyond its language.
    std::fs::write(world.dir.path().join("dump.nft"), &text).unwrap();
    world.nft("flush ruleset");
    world.nft(&format!("-f {}", world.dir.path().join("dump.nft").display()));
}

#[test]
fn a_flushed_or_changed_table_is_noticed_and_restored_and_foreign_ones_stay() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    world.attach(&net, "a", &a, &[port(Tcp, "", 8080, 80)]);
    world.ensure(&net);
    let whole = world.nft("list ruleset");
    let watch = world.node.run(|| net.watch().unwrap());
    for damage in [
        "flush ruleset",
        "delete table ip tnet",
        "flush chain ip tnet postrouting",
        "flush map ip tnet hostports",
        "add rule ip tnet prerouting drop",
        "add element ip6 tnet hostports { tcp . 99 : fd88::9 . 99 }",
    ] {
        world.nft(damage);
        eventually(damage, || world.nft("list ruleset") == whole || sorted(&world.nft("list ruleset")) == sorted(&whole));
    }
    world.nft("add table ip foreign");
    drop(watch);
    assert!(world.nft("list tables").contains("table ip foreign"));
    // Without the watch nobody looks; the next pass does.
    world.nft("delete table ip6 tnet");
    world.ensure(&net);
    assert!(world.nft("list tables").contains("table ip6 tnet"));
    // And every second pass finds nothing to do.
    let generation = || world.node.must("nft", &["-a", "list", "ruleset"]);
    let before = generation();
    world.ensure(&net);
    assert_eq!(generation(), before);
}

fn sorted(text: &str) -> Vec<String> {
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn the_host_is_kept_as_it_should_be() {
    let Some((world, net)) = World::with_net() else { return };
    let a = world.pod("a");
    world.attach(&net, "a", &a, &[]);
    let _server = a.tcp("a", "[::]:80");
    for damage in [
        format!("link set {BRIDGE} down"),
        format!("addr flush dev {BRIDGE}"),
        format!("addr add 10.99.0.1/16 dev {BRIDGE}"),
        format!("neigh flush dev {BRIDGE} nud permanent"),
        format!("link set {} nomaster", world.veths()[0]),
        format!("link del {BRIDGE}"),
        format!("link set {BRIDGE} mtu 1300"),
    ] {
        world.node.ip(&damage);
        world.ensure(&net);
        assert_eq!(world.node.ask("10.88.0.2:80"), "a 10.88.0.1", "{damage}");
        assert_eq!(world.node.ask("[fd88::2]:80"), "a fd88::1", "{damage}");
        assert!(!world.node.ip(&format!("addr show dev {BRIDGE}")).contains("10.99.0.1"));
    }
    world.node.set_sysctl("net/ipv4/ip_forward", "0");
    world.node.set_sysctl("net/ipv6/conf/all/forwarding", "0");
    world.ensure(&net);
    let _out = world.outside.tcp("out", "[::]:80");
    assert_eq!(a.ask("[2001:db8::2]:80"), "out 2001:db8::1");
    // The uplink's MTU changes: bridge and pods follow.
    world.node.ip("link set up0 mtu 1400");
    world.ensure(&net);
    for (ns, link) in [(&world.node, BRIDGE), (&world.node, world.veths()[0].as_str()), (&a, "eth0")] {
        assert_eq!(ns.json(&format!("link show dev {link}"))[0]["mtu"], 1400, "{link}");
    }
}

#[test]
fn what_is_not_ours_is_refused_not_taken() {
    let Some(world) = World::possible() else { return };
    world.node.ip(&format!("link add {BRIDGE} type bridge"));
    let net = world.net();
    let refused = world.node.run(|| net.ensure().unwrap_err());
    assert!(matches!(&refused, NetError::ForeignLink { name, .. } if name == BRIDGE), "{refused}");
    world.remove_all(&net);
    assert!(world.node.ip("link show").contains(BRIDGE), "not ours, not removed");
}

#[test]
fn a_kernel_without_ipv6_gives_ipv4_and_says_what_lacks() {
    let Some(world) = World::possible() else { return };
    world.node.set_sysctl("net/ipv6/conf/all/disable_ipv6", "1");
    let net = world.net();
    let a = world.pod("a");
    let got = world.attach(&net, "a", &a, &[]);
    assert_eq!(got.addresses.len(), 1);
    let lacks = net.lacks();
    assert_eq!(lacks.len(), 1);
    assert_eq!(lacks[0].feature, coracle::net::model::Feature::Ipv6);
    assert!(lacks[0].cure.contains("disable_ipv6=0"));
    // This kernel has all the rest; the probe leaves nothing behind.
    let before = picture(&world);
    let probed = world.node.run(|| coracle::net::lacks::probe().unwrap());
    assert_eq!(probed.iter().map(|l| l.feature).collect::<Vec<_>>(), [coracle::net::model::Feature::Ipv6]);
    assert_eq!(world.node.run(|| coracle::proxy::lacks::probe().unwrap()), []);
    assert_eq!(picture(&world), before);
}

#[test]
fn a_foreign_firewall_that_drops_forwarded_packets_is_named() {
    let Some(world) = World::possible() else { return };
    world.nft("add table ip filter");
    world.nft("add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }");
    let net = world.net();
    world.ensure(&net);
    let lacks = net.proxy.lacks();
    assert_eq!(lacks.len(), 1);
    assert_eq!(lacks[0].said, "chain FORWARD of nftables table filter drops what it does not accept");
    // What it says to do helps.
    let a = world.pod("a");
    world.attach(&net, "a", &a, &[]);
    let _out = world.outside.tcp("out", "0.0.0.0:80");
    assert_eq!(a.ask("192.0.2.2:80"), "TimedOut");
    for way in ["iifname", "oifname"] {
        world.nft(&format!("insert rule ip filter FORWARD {way} {BRIDGE} accept"));
    }
    assert_eq!(a.ask("192.0.2.2:80"), "out 192.0.2.1");
    world.nft("delete table ip filter");
    world.ensure(&net);
    assert_eq!(net.proxy.lacks(), []);
}

#[test]
fn with_ipv4_only_pods_the_hosts_ipv6_stays_what_it_was_and_hears_no_pod() {
    let Some(world) = World::possible() else { return };
    let mut config = world.config();
    config.cidrs.truncate(1);
    let net = world.net_with(config);
    let a = world.pod("a");
    let got = world.attach(&net, "a", &a, &[]);
    assert_eq!(got.addresses.len(), 1);
    for (name, value) in [
        ("all/forwarding", "0"),
        ("up0/accept_ra", "1"),
        (&format!("{BRIDGE}/accept_ra"), "0"),
        (&format!("{BRIDGE}/accept_redirects"), "0"),
        (&format!("{BRIDGE}/disable_ipv6"), "1"),
    ] {
        assert_eq!(world.node.sysctl(&format!("net/ipv6/conf/{name}")), value, "{name}");
    }
    assert!(!world.nft("list tables").contains("ip6"));
}
