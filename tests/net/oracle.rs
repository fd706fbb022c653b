//! What a namespace looks like to the `rtnetlink` crate: another encoder and another parser of
//! the same kernel interface, with which our own is compared.

use std::net::IpAddr;

use coracle::sys::rtnl;
use futures_util::TryStreamExt;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoBridge, InfoBridgePort, InfoData, InfoKind, InfoPortData, LinkAttribute,
    LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType,
};

use crate::world::*;

/// All that one namespace holds.
struct Oracle {
    links: Vec<LinkMessage>,
    addresses: Vec<AddressMessage>,
    routes: Vec<RouteMessage>,
    neighbours: Vec<NeighbourMessage>,
    /// Forwarding entries of bridges.
    forwarding: Vec<NeighbourMessage>,
}

impl Oracle {
    fn of(ns: &Ns) -> Oracle {
        ns.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
            runtime.block_on(async {
                let (connection, handle, _) = rtnetlink::new_connection().unwrap();
                tokio::spawn(connection);
                let mut routes: Vec<RouteMessage> = Vec::new();
                let v4 = RouteMessageBuilder::<std::net::Ipv4Addr>::new().build();
                let v6 = RouteMessageBuilder::<std::net::Ipv6Addr>::new().build();
                for family in [v4, v6] {
                    routes.extend(handle.route().get(family).execute().try_collect::<Vec<_>>().await.unwrap());
                }
                let bridge = handle.neighbours().get().set_address_family(AddressFamily::Bridge);
                Oracle {
                    links: handle.link().get().execute().try_collect().await.unwrap(),
                    addresses: handle.address().get().execute().try_collect().await.unwrap(),
                    routes,
                    neighbours: handle.neighbours().get().execute().try_collect().await.unwrap(),
                    forwarding: bridge.execute().try_collect().await.unwrap(),
                }
            })
        })
    }

    /// In our own reader's words.
    fn links(&self) -> Vec<rtnl::Link> {
        let mut links: Vec<_> = self.links.iter().map(as_ours).collect();
        links.sort_by_key(|l| l.index);
        links
    }

    fn named(&self, name: &str) -> &LinkMessage {
        let is = |l: &&LinkMessage| l.attributes.contains(&LinkAttribute::IfName(name.to_owned()));
        self.links.iter().find(is).unwrap_or_else(|| panic!("rtnetlink sees no link {name}"))
    }

    /// Addresses of a link with global scope.
    fn addresses(&self, index: u32) -> Vec<(IpAddr, u8)> {
        let of_link = self.addresses.iter().filter(|a| a.header.index == index && a.header.scope == AddressScope::Universe);
        let mut found: Vec<_> = of_link.map(|a| (local(a), a.header.prefix_len)).collect();
        found.sort();
        found
    }

    /// Permanent neighbours of a link.
    fn neighbours(&self, index: u32) -> Vec<(IpAddr, Vec<u8>)> {
        let permanent = |n: &&NeighbourMessage| n.header.ifindex == index && n.header.state == NeighbourState::Permanent;
        let mut found: Vec<_> = self.neighbours.iter().filter(permanent).map(neighbour).collect();
        found.sort();
        found
    }
}

fn local(address: &AddressMessage) -> IpAddr {
    let ip = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| address.attributes.iter().find_map(wanted);
    let local = |a: &AddressAttribute| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None };
    let plain = |a: &AddressAttribute| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None };
    ip(local).or_else(|| ip(plain)).expect("an address has an address")
}

fn neighbour(message: &NeighbourMessage) -> (IpAddr, Vec<u8>) {
    let (mut ip, mut mac) = (None, Vec::new());
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::from(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::from(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac.clone_from(bytes),
            _ => {}
        }
    }
    (ip.expect("a neighbour has an address"), mac)
}

fn as_ours(message: &LinkMessage) -> rtnl::Link {
    let mut link =
        rtnl::Link { index: message.header.index, up: message.header.flags.contains(LinkFlags::Up), ..rtnl::Link::default() };
    let (mut operating, mut forwards) = (false, true);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::IfAlias(alias) => link.alias.clone_from(alias),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(mac) => link.mac = mac.as_slice().try_into().ok(),
            LinkAttribute::Controller(index) => link.master = Some(*index),
            LinkAttribute::Link(index) => link.peer = Some(*index),
            LinkAttribute::OperState(state) => operating = *state == rtnetlink::packet_route::link::State::Up,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(InfoKind::Bridge) => link.kind = "bridge".into(),
                        LinkInfo::Kind(InfoKind::Veth) => link.kind = "veth".into(),
                        LinkInfo::PortData(InfoPortData::BridgePort(settings)) => {
                            let mut port = rtnl::Port::default();
                            for setting in settings {
                                match setting {
                                    InfoBridgePort::HairpinMode(on) => port.hairpin = *on,
                                    InfoBridgePort::Isolated(on) => port.isolated = *on,
                                    InfoBridgePort::Learning(on) => port.learning = *on,
                                    InfoBridgePort::State(state) => {
                                        forwards = *state == rtnetlink::packet_route::link::BridgePortState::Forwarding;
                                    }
                                    _ => {}
                                }
                            }
                            link.port = Some(port);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    link.ready = operating && forwards;
    link
}

/// What our own reader says of the same namespace.
fn ours(ns: &Ns) -> (Vec<rtnl::Link>, rtnl_socket::Read) {
    ns.run(|| {
        let mut socket = rtnl::open().unwrap();
        let mut links = rtnl::links(&mut socket).unwrap();
        links.sort_by_key(|l| l.index);
        let read = rtnl_socket::read(&mut socket, &links);
        (links, read)
    })
}

mod rtnl_socket {
    use super::*;

    /// By link index: addresses and permanent neighbours.
    pub type Read = Vec<(u32, Vec<(IpAddr, u8)>, Vec<(IpAddr, Vec<u8>)>)>;

    pub fn read(socket: &mut coracle::sys::netlink::Socket, links: &[rtnl::Link]) -> Read {
        let of = |index: u32, socket: &mut coracle::sys::netlink::Socket| {
            let mut addresses = rtnl::addresses(socket, index).unwrap();
            addresses.sort();
            let mut neighbours: Vec<_> =
                rtnl::neighbours(socket, index).unwrap().into_iter().map(|(ip, mac)| (ip, mac.to_vec())).collect();
            neighbours.sort();
            (index, addresses, neighbours)
        };
        links.iter().map(|l| of(l.index, socket)).collect()
    }
}

/// The default routes of a pod, as the design has them.
fn assert_default_routes(pod: &Oracle, eth0: u32) {
    let mut gateways: Vec<IpAddr> = Vec::new();
    for route in pod.routes.iter().filter(|r| r.header.destination_prefix_length == 0 && r.header.table == 254) {
        assert_eq!((route.header.kind, route.header.protocol), (RouteType::Unicast, RouteProtocol::Static), "{route:?}");
        assert_eq!(route.header.scope, RouteScope::Universe);
        assert!(route.header.flags.contains(RouteFlags::Onlink), "{route:?}");
        assert!(route.attributes.contains(&RouteAttribute::Oif(eth0)), "{route:?}");
        gateways.extend(route.attributes.iter().find_map(|a| match a {
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => Some(IpAddr::from(*ip)),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) => Some(IpAddr::from(*ip)),
            _ => None,
        }));
    }
    gateways.sort();
    assert_eq!(gateways, ["10.88.0.1", "fd88::1"].map(|t| t.parse::<IpAddr>().unwrap()));
}

#[test]
fn the_rtnetlink_crate_reads_what_our_encoder_wrote() {
    let Some((world, net)) = World::with_net() else { return };
    let (a, b) = (world.pod("a"), world.pod("b"));
    world.attach(&net, "a", &a, &[]);
    world.attach(&net, "b", &b, &[]);
    let (node, pod) = (Oracle::of(&world.node), Oracle::of(&a));
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();

    // The bridge: what CreateBridge, SetBridge and AddAddress wrote.
    let bridge = as_ours(node.named(BRIDGE));
    assert_eq!((bridge.kind.as_str(), bridge.alias.as_str(), bridge.mtu, bridge.up), ("bridge", "coracle tnet", 1460, true));
    assert_eq!(bridge.mac, Some([0x0a, 0x58, 10, 88, 0, 1]));
    let infos = node.named(BRIDGE).attributes.iter().find_map(|a| match a {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let data = infos.unwrap().iter().find_map(|i| match i {
        LinkInfo::Data(InfoData::Bridge(data)) => Some(data),
        _ => None,
    });
    assert!(data.unwrap().contains(&InfoBridge::MulticastSnooping(false)), "{data:?}");
    assert_eq!(node.addresses(bridge.index), [(ip("10.88.0.1"), 24), (ip("fd88::1"), 64)]);
    let mac = |last: u8| vec![0x0a, 0x58, 10, 88, 0, last];
    assert_eq!(
        node.neighbours(bridge.index),
        [(ip("10.88.0.2"), mac(2)), (ip("10.88.0.3"), mac(3)), (ip("fd88::2"), mac(2)), (ip("fd88::3"), mac(3))]
    );

    // The host's ends: what create_veth, change and pin_mac wrote.
    let ports: Vec<_> = node.links().into_iter().filter(|l| l.master == Some(bridge.index)).collect();
    assert_eq!(ports.iter().map(|l| l.alias.as_str()).collect::<Vec<_>>(), ["uid-a", "uid-b"]);
    let calls = world.node.run(|| coracle::net::observe::bridge_calls_iptables().unwrap());
    for (port, last) in ports.iter().zip([2, 3]) {
        assert_eq!((port.kind.as_str(), port.mtu, port.up, port.ready), ("veth", 1460, true, true));
        assert_eq!(port.port, Some(rtnl::Port { hairpin: true, isolated: !calls, learning: false }));
        let message = node.named(&port.name);
        let inet6 = message.attributes.iter().find_map(|a| match a {
            LinkAttribute::AfSpecUnspec(specs) => specs.iter().find_map(|s| match s {
                AfSpecUnspec::Inet6(specs) => Some(specs),
                _ => None,
            }),
            _ => None,
        });
        assert!(inet6.unwrap().contains(&AfSpecInet6::AddrGenMode(In6AddrGenMode::None)), "{inet6:?}");
        assert!(node.addresses.iter().all(|a| a.header.index != port.index), "the host's end needs no address");
        let pinned = node.forwarding.iter().any(|entry| {
            entry.header.ifindex == port.index
                && entry.header.state == NeighbourState::Noarp
                && entry.attributes.contains(&NeighbourAttribute::LinkLayerAddress(mac(last)))
        });
        assert!(pinned, "{:?}", node.forwarding);
    }

    // The pod's end: what make_inside wrote.
    let eth0 = as_ours(pod.named("eth0"));
    assert_eq!((eth0.kind.as_str(), eth0.mtu, eth0.up, eth0.peer), ("veth", 1460, true, Some(ports[0].index)));
    assert_eq!(eth0.mac, Some([0x0a, 0x58, 10, 88, 0, 2]));
    assert_eq!(pod.addresses(eth0.index), [(ip("10.88.0.2"), 32), (ip("fd88::2"), 128)]);
    let global = pod.addresses.iter().filter(|m| m.header.index == eth0.index && local(m).is_ipv6());
    for address in global.filter(|m| m.header.scope == AddressScope::Universe) {
        let flags = address.attributes.iter().find_map(|a| match a {
            AddressAttribute::Flags(flags) => Some(*flags),
            _ => None,
        });
        assert!(flags.unwrap().contains(AddressFlags::Nodad), "{address:?}");
    }
    assert!(as_ours(pod.named("lo")).up);
    assert_default_routes(&pod, eth0.index);

    // And our reader sees in every namespace exactly what that crate sees.
    for (name, ns) in [("node", &world.node), ("outside", &world.outside), ("a", &a), ("b", &b)] {
        let (links, read) = ours(ns);
        let theirs = Oracle::of(ns);
        assert_eq!(links, theirs.links(), "{name}");
        for (index, addresses, neighbours) in read {
            assert_eq!(addresses, theirs.addresses(index), "{name}: {index}");
            assert_eq!(neighbours, theirs.neighbours(index), "{name}: {index}");
        }
        let uplinks = ns.run(|| {
            let mut socket = rtnl::open().unwrap();
            [rtnl::AF_INET, rtnl::AF_INET6].map(|family| rtnl::default_route_links(&mut socket, family).unwrap())
        });
        let default = |r: &&RouteMessage| r.header.destination_prefix_length == 0 && r.header.table == 254;
        for (family, seen) in [AddressFamily::Inet, AddressFamily::Inet6].into_iter().zip(uplinks) {
            let of_family = theirs.routes.iter().filter(default).filter(|r| r.header.address_family == family);
            let mut through: Vec<u32> = of_family
                .flat_map(|r| &r.attributes)
                .filter_map(|a| if let RouteAttribute::Oif(index) = a { Some(*index) } else { None })
                .collect();
            through.sort_unstable();
            through.dedup();
            assert_eq!(seen, through, "{name}");
        }
    }
    // A pod that is gone is gone for both.
    world.detach(&net, "b");
    let node = Oracle::of(&world.node);
    assert_eq!(node.links().iter().filter(|l| l.master == Some(bridge.index)).count(), 1);
    assert_eq!(node.neighbours(bridge.index).len(), 2);
    assert_eq!(node.links(), ours(&world.node).0);
}
