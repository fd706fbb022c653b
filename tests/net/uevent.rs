//! br_netfilter comes and goes: the kernel tells it by uevent, and ports follow at once, not only
//! at the look every 20 s. The kernel hands a uevent that root sends into its own network
//! namespace to all who listen there (uevent_net_rcv of lib/kobject_uevent.c), so that what a
//! loaded module announces can be said here without a module; `tests/vm` loads the real one.

use std::time::{Duration, Instant};

use coracle::sys::netlink::{Attrs, Message, Protocol, Socket};

use crate::world::*;

/// Any type above the netlink protocol's own; the kernel looks at nothing else of the header.
const ANY: u16 = 0x10;

fn announce(world: &World, action: &str, path: &str) {
    let (_, module) = path.rsplit_once('/').unwrap();
    let text = format!("{action}@{path}\0ACTION={action}\0DEVPATH={path}\0SUBSYSTEM=module\0MODULE={module}\0");
    world.node.run(|| {
        let mut socket = Socket::open(Protocol::KobjectUevent).unwrap();
        socket.request("announce a module", &Message::new(ANY, 0, text.as_bytes(), Attrs::new())).unwrap();
    });
}

#[test]
fn ports_follow_br_netfilter_when_the_kernel_tells_of_it() {
    let Some((world, net)) = World::with_net() else { return };
    if !world.has_br_netfilter() {
        return;
    }
    let call = |value| [CALL_IPTABLES, CALL_IP6TABLES].map(|name| world.node.set_sysctl(name, value));
    call("0");
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.attach(&net, "a", &a, &[port(coracle::net::model::L4::Tcp, "", 8080, 80)]);
    world.attach(&net, "b", &b, &[]);
    world.ensure(&net);
    let begun = Instant::now();
    let watch = world.node.run(|| net.watch().unwrap());
    let _server = a.tcp("a", "0.0.0.0:80");
    // What loading it does: both parameters are 1 from then on.
    call("1");
    // Another module's coming, and what is none of ours, move nothing.
    announce(&world, "add", "/module/nf_conntrack_sip");
    announce(&world, "change", "/module/br_netfilter");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(world.isolated(), [true, true]);
    announce(&world, "add", "/module/br_netfilter");
    eventually("ports are not isolated", || world.isolated() == [false, false]);
    assert_eq!(b.ask("192.0.2.1:8080"), "a 10.88.0.3");
    // One family is enough.
    world.node.set_sysctl(CALL_IPTABLES, "0");
    announce(&world, "add", "/module/br_netfilter");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(world.isolated(), [false, false]);
    // And gone again.
    call("0");
    announce(&world, "remove", "/module/br_netfilter");
    eventually("ports are isolated", || world.isolated() == [true, true]);
    assert_eq!(b.ask("192.0.2.1:8080"), "a 10.88.0.3");
    assert!(begun.elapsed() < Duration::from_secs(18), "the look every 20 s may have done it: this proves nothing");
    drop(watch);
    // Nobody listens: only the next pass sees it.
    call("1");
    announce(&world, "add", "/module/br_netfilter");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(world.isolated(), [true, true]);
    world.ensure(&net);
    assert_eq!(world.isolated(), [false, false]);
}
