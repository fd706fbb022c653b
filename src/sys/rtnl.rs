//! Links, bridge ports, addresses, routes and neighbours over rtnetlink.
//!
//! One function a request, on a socket that belongs to the namespace it was opened in. Sources:
//! rtnetlink(7), linux/if_link.h, linux/if_addr.h, linux/rtnetlink.h, linux/neighbour.h.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

use super::netlink::{
    Attrs, Message, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NetlinkError, Protocol, Socket, attribute, text, word,
};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;
const VETH_INFO_PEER: u16 = 1;
const IFLA_BR_MCAST_SNOOPING: u16 = 23;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_BRPORT_MODE: u16 = 4;
const IFLA_BRPORT_LEARNING: u16 = 8;
const IFLA_BRPORT_ISOLATED: u16 = 33;
const BR_STATE_FORWARDING: u8 = 3;
const IF_OPER_UP: u8 = 6;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_MULTIPATH: u16 = 9;
const RTA_PREFSRC: u16 = 7;
const RTA_TABLE: u16 = 15;
const RTNH_F_ONLINK: u32 = 4;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const RTN_LOCAL: u8 = 2;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
const NTF_MASTER: u8 = 4;
pub const AF_INET: u8 = 2;
pub const AF_INET6: u8 = 10;
const AF_BRIDGE: u8 = 7;

pub type Mac = [u8; 6];

/// An interface, the parts that we decide from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// `bridge`, `veth`…; empty for hardware.
    pub kind: String,
    pub alias: String,
    pub mtu: u32,
    pub up: bool,
    /// Packets pass: the kernel's link watch has seen the carrier, and a port forwards. It runs a
    /// moment after a link is brought up; what is sent before is dropped without a word.
    pub ready: bool,
    pub mac: Option<Mac>,
    /// Index of the bridge that it is a port of.
    pub master: Option<u32>,
    /// Index of a veth's other end, in that end's namespace.
    pub peer: Option<u32>,
    /// Of a bridge's port.
    pub port: Option<Port>,
}

/// Settings of a bridge's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Port {
    pub hairpin: bool,
    pub isolated: bool,
    pub learning: bool,
}

pub fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Protocol::Route)
}

/// RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE.
const ADDRESS_GROUPS: u32 = 0x10 | 0x40 | 0x100 | 0x400;

/// A non-blocking socket that hears of every address and route that comes or goes.
pub fn listen_to_addresses() -> Result<Socket, NetlinkError> {
    Socket::listen(Protocol::Route, ADDRESS_GROUPS)
}

fn family(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { AF_INET } else { AF_INET6 }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

// ---- links ---------------------------------------------------------------------------------

/// struct ifinfomsg; `change` is what of `flags` is meant.
fn ifinfo(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut fixed = [0; 16];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[8..12].copy_from_slice(&flags.to_ne_bytes());
    fixed[12..16].copy_from_slice(&change.to_ne_bytes());
    fixed
}

/// All links of the namespace.
pub fn links(socket: &mut Socket) -> Result<Vec<Link>, NetlinkError> {
    let replies = socket.dump("list links", &Message::new(RTM_GETLINK, 0, &ifinfo(0, 0, 0), Attrs::new()))?;
    Ok(replies.iter().filter(|r| r.kind == RTM_NEWLINK).filter_map(|r| parse_link(&r.payload)).collect())
}

/// None where there is none of that name.
pub fn link(socket: &mut Socket, name: &str) -> Result<Option<Link>, NetlinkError> {
    let ask = Message::new(RTM_GETLINK, 0, &ifinfo(0, 0, 0), Attrs::new().text(IFLA_IFNAME, name));
    match socket.query(&format!("look up link {name}"), &ask) {
        Err(e) if e.errno() == Errno::ENODEV => Ok(None),
        other => Ok(other?.iter().find(|r| r.kind == RTM_NEWLINK).and_then(|r| parse_link(&r.payload))),
    }
}

/// A link as RTM_NEWLINK tells it; None where the message is too short.
pub fn parse_link(payload: &[u8]) -> Option<Link> {
    let mut link = Link { index: word(payload, 4)?, up: word(payload, 8)? & IFF_UP != 0, ..Link::default() };
    let mut forwards = true;
    for (kind, value) in super::netlink::attributes(payload.get(16..)?) {
        match kind {
            IFLA_OPERSTATE => link.ready = value.first() == Some(&IF_OPER_UP),
            IFLA_ADDRESS => link.mac = value.try_into().ok(),
            IFLA_IFNAME => link.name = text(value),
            IFLA_MTU => link.mtu = word(value, 0)?,
            IFLA_LINK => link.peer = word(value, 0),
            IFLA_MASTER => link.master = word(value, 0),
            IFLA_IFALIAS => link.alias = text(value),
            IFLA_LINKINFO => {
                link.kind = attribute(value, IFLA_INFO_KIND).map(text).unwrap_or_default();
                if attribute(value, IFLA_INFO_SLAVE_KIND).map(text).as_deref() == Some("bridge") {
                    let data = attribute(value, IFLA_INFO_SLAVE_DATA).unwrap_or_default();
                    forwards = attribute(data, IFLA_BRPORT_STATE).and_then(|v| v.first()) == Some(&BR_STATE_FORWARDING);
                    let on = |kind| attribute(data, kind).and_then(|v| v.first()).is_some_and(|v| *v != 0);
                    link.port = Some(Port {
                        hairpin: on(IFLA_BRPORT_MODE),
                        isolated: on(IFLA_BRPORT_ISOLATED),
                        learning: on(IFLA_BRPORT_LEARNING),
                    });
                }
            }
            _ => {}
        }
    }
    link.ready &= forwards;
    Some(link)
}

/// A bridge, still down. Its address is set, so that it does not follow its ports'; so must its
/// MTU be, by a change after the making: one given here would follow the ports' all the same.
pub fn create_bridge(socket: &mut Socket, name: &str, mac: Mac) -> Result<(), NetlinkError> {
    let data = Attrs::new().u8(IFLA_BR_MCAST_SNOOPING, 0);
    let info = Attrs::new().text(IFLA_INFO_KIND, "bridge").nest(IFLA_INFO_DATA, data);
    let attrs = Attrs::new().text(IFLA_IFNAME, name).bytes(IFLA_ADDRESS, &mac).nest(IFLA_LINKINFO, info);
    let message = Message::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &ifinfo(0, 0, 0), attrs);
    socket.request(&format!("create bridge {name}"), &message)
}

/// What a veth pair is made from.
#[derive(Clone, Copy, Debug)]
pub struct Veth<'a> {
    pub name: &'a str,
    pub master: u32,
    pub mtu: u32,
    /// Where the other end is born: no move afterwards, which would wait for RCU twice.
    pub peer_netns: BorrowedFd<'a>,
    pub peer_name: &'a str,
    pub peer_mac: Mac,
}

/// A veth pair, both ends still down, the host's end a port of `master`.
pub fn create_veth(socket: &mut Socket, veth: &Veth<'_>) -> Result<(), NetlinkError> {
    let peer = Attrs::new()
        .raw(&ifinfo(0, 0, 0))
        .text(IFLA_IFNAME, veth.peer_name)
        .bytes(IFLA_ADDRESS, &veth.peer_mac)
        .u32(IFLA_MTU, veth.mtu)
        .u32(IFLA_NET_NS_FD, veth.peer_netns.as_raw_fd() as u32);
    let data = Attrs::new().nest(VETH_INFO_PEER, peer);
    let info = Attrs::new().text(IFLA_INFO_KIND, "veth").nest(IFLA_INFO_DATA, data);
    let attrs =
        Attrs::new().text(IFLA_IFNAME, veth.name).u32(IFLA_MTU, veth.mtu).u32(IFLA_MASTER, veth.master).nest(IFLA_LINKINFO, info);
    let message = Message::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &ifinfo(0, 0, 0), attrs);
    socket.request(&format!("create veth {}", veth.name), &message)
}

/// What to change of a link; None leaves it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change<'a> {
    pub alias: Option<&'a str>,
    pub up: bool,
    pub mtu: Option<u32>,
    pub mac: Option<Mac>,
    pub master: Option<u32>,
    pub port: Option<Port>,
    /// No IPv6 address by itself: the end of a pair that is a bridge's port needs none.
    pub no_ipv6_address: bool,
}

pub fn change(socket: &mut Socket, link: &str, index: u32, change: &Change<'_>) -> Result<(), NetlinkError> {
    let flags = if change.up { IFF_UP } else { 0 };
    let mut attrs = Attrs::new();
    if let Some(alias) = change.alias {
        attrs = attrs.bytes(IFLA_IFALIAS, alias.as_bytes());
    }
    if let Some(mtu) = change.mtu {
        attrs = attrs.u32(IFLA_MTU, mtu);
    }
    if let Some(mac) = change.mac {
        attrs = attrs.bytes(IFLA_ADDRESS, &mac);
    }
    if let Some(master) = change.master {
        attrs = attrs.u32(IFLA_MASTER, master);
    }
    if let Some(port) = change.port {
        let data = Attrs::new()
            .u8(IFLA_BRPORT_MODE, port.hairpin.into())
            .u8(IFLA_BRPORT_LEARNING, port.learning.into())
            .u8(IFLA_BRPORT_ISOLATED, port.isolated.into());
        attrs = attrs.nest(IFLA_LINKINFO, Attrs::new().text(IFLA_INFO_SLAVE_KIND, "bridge").nest(IFLA_INFO_SLAVE_DATA, data));
    }
    if change.no_ipv6_address {
        let inet6 = Attrs::new().u8(IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_NONE);
        attrs = attrs.nest(IFLA_AF_SPEC, Attrs::new().nest(u16::from(AF_INET6), inet6));
    }
    let message = Message::new(RTM_NEWLINK, 0, &ifinfo(index, flags, flags), attrs);
    socket.request(&format!("change link {link}"), &message)
}

/// False where it was gone already. A veth takes its other end with it.
pub fn delete_link(socket: &mut Socket, name: &str) -> Result<bool, NetlinkError> {
    let message = Message::new(RTM_DELLINK, 0, &ifinfo(0, 0, 0), Attrs::new().text(IFLA_IFNAME, name));
    match socket.request(&format!("delete link {name}"), &message) {
        Ok(()) => Ok(true),
        Err(e) if e.errno() == Errno::ENODEV => Ok(false),
        Err(e) => Err(e),
    }
}

// ---- addresses -----------------------------------------------------------------------------

/// struct ifaddrmsg.
fn ifaddr(ip_family: u8, prefix: u8, index: u32) -> [u8; 8] {
    let i = index.to_ne_bytes();
    [ip_family, prefix, 0, 0, i[0], i[1], i[2], i[3]]
}

/// IPv6 without duplicate address detection: nobody else has addresses of our range.
pub fn add_address(socket: &mut Socket, index: u32, ip: IpAddr, prefix: u8) -> Result<(), NetlinkError> {
    let bytes = octets(ip);
    let attrs = Attrs::new().bytes(IFA_LOCAL, &bytes).bytes(IFA_ADDRESS, &bytes);
    let attrs = attrs.when(ip.is_ipv6(), |a| a.u32(IFA_FLAGS, IFA_F_NODAD));
    let message = Message::new(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &ifaddr(family(ip), prefix, index), attrs);
    socket.request(&format!("add address {ip}/{prefix}"), &message)
}

pub fn delete_address(socket: &mut Socket, index: u32, ip: IpAddr, prefix: u8) -> Result<(), NetlinkError> {
    let bytes = octets(ip);
    let attrs = Attrs::new().bytes(IFA_LOCAL, &bytes).bytes(IFA_ADDRESS, &bytes);
    let message = Message::new(RTM_DELADDR, 0, &ifaddr(family(ip), prefix, index), attrs);
    socket.request(&format!("delete address {ip}/{prefix}"), &message)
}

/// Global addresses of a link, with their prefix lengths.
pub fn addresses(socket: &mut Socket, index: u32) -> Result<Vec<(IpAddr, u8)>, NetlinkError> {
    let replies = socket.dump("list addresses", &Message::new(RTM_GETADDR, 0, &ifaddr(0, 0, index), Attrs::new()))?;
    let parse = |payload: &[u8]| {
        let (prefix, scope) = (*payload.get(1)?, *payload.get(3)?);
        let attrs = payload.get(8..)?;
        let ip = attribute(attrs, IFA_LOCAL).or_else(|| attribute(attrs, IFA_ADDRESS))?;
        (word(payload, 4)? == index && scope == 0).then_some((address_of(ip)?, prefix))
    };
    Ok(replies.iter().filter(|r| r.kind == RTM_NEWADDR).filter_map(|r| parse(&r.payload)).collect())
}

// ---- routes --------------------------------------------------------------------------------

/// struct rtmsg; flags in the last word.
fn rtmsg(ip_family: u8, protocol: u8, kind: u8, flags: u32) -> [u8; 12] {
    let f = flags.to_ne_bytes();
    [ip_family, 0, 0, 0, RT_TABLE_MAIN, protocol, 0, kind, f[0], f[1], f[2], f[3]]
}

/// The default route of the gateway's family, although no route leads to the gateway.
pub fn add_default_route(socket: &mut Socket, index: u32, gateway: IpAddr) -> Result<(), NetlinkError> {
    let fixed = rtmsg(family(gateway), RTPROT_STATIC, RTN_UNICAST, RTNH_F_ONLINK);
    let attrs = Attrs::new().bytes(RTA_GATEWAY, &octets(gateway)).u32(RTA_OIF, index);
    let message = Message::new(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &fixed, attrs);
    socket.request(&format!("add default route by {gateway}"), &message)
}

/// The links that default routes of the main table use.
pub fn default_route_links(socket: &mut Socket, ip_family: u8) -> Result<Vec<u32>, NetlinkError> {
    let fixed = rtmsg(ip_family, 0, RTN_UNICAST, 0);
    let ask = Message::new(RTM_GETROUTE, 0, &fixed, Attrs::new().u32(RTA_TABLE, u32::from(RT_TABLE_MAIN)));
    let replies = match socket.dump("list routes", &ask) {
        // No such family in this kernel: no such routes.
        Err(e) if matches!(e.errno(), Errno::EOPNOTSUPP | Errno::ENOENT | Errno::EAFNOSUPPORT) => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for reply in replies.iter().filter(|r| r.kind == RTM_NEWROUTE) {
        let (Some([_, 0, ..]), Some(attrs)) = (reply.payload.get(..12), reply.payload.get(12..)) else { continue };
        found.extend(attribute(attrs, RTA_OIF).and_then(|v| word(v, 0)));
        // Next hops: length (2), flags, hops, interface (4), attributes.
        let mut hops = attribute(attrs, RTA_MULTIPATH).unwrap_or_default();
        while let (Some(length), Some(index)) = (hops.get(..2), word(hops, 4)) {
            found.push(index);
            let length = usize::from(u16::from_ne_bytes([length[0], length[1]])).max(8);
            hops = hops.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Where packets to an address go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// To this host.
    pub local: bool,
    /// The link that they leave by.
    pub link: Option<u32>,
    /// The source that this host's own would have.
    pub source: Option<IpAddr>,
}

/// Whether the namespace takes packets to `ip` for its own. IPv6 addresses are put into the
/// routing table by a worker, a moment after they are added or their link comes up.
pub fn is_local(socket: &mut Socket, ip: IpAddr) -> Result<bool, NetlinkError> {
    Ok(route(socket, ip)?.is_some_and(|route| route.local))
}

/// None: nowhere.
pub fn route(socket: &mut Socket, ip: IpAddr) -> Result<Option<Route>, NetlinkError> {
    let mut fixed = rtmsg(family(ip), 0, 0, 0);
    let bytes = octets(ip);
    // The whole address is meant; a lookup is in whatever table the rules say.
    (fixed[1], fixed[4]) = (bytes.len() as u8 * 8, 0);
    let ask = Message::new(RTM_GETROUTE, 0, &fixed, Attrs::new().bytes(RTA_DST, &bytes));
    match socket.query(&format!("look up the route to {ip}"), &ask) {
        Err(e) if matches!(e.errno(), Errno::ENETUNREACH | Errno::EHOSTUNREACH) => Ok(None),
        other => Ok(other?.iter().find(|r| r.kind == RTM_NEWROUTE).map(|reply| {
            let attrs = reply.payload.get(12..).unwrap_or_default();
            Route {
                local: reply.payload.get(7) == Some(&RTN_LOCAL),
                link: attribute(attrs, RTA_OIF).and_then(|v| word(v, 0)),
                source: attribute(attrs, RTA_PREFSRC).and_then(address_of),
            }
        })),
    }
}

// ---- neighbours ----------------------------------------------------------------------------

/// struct ndmsg.
fn ndmsg(nd_family: u8, index: u32, state: u16, flags: u8) -> [u8; 12] {
    let (i, s) = (index.to_ne_bytes(), state.to_ne_bytes());
    [nd_family, 0, 0, 0, i[0], i[1], i[2], i[3], s[0], s[1], flags, 0]
}

/// The link-layer address of `ip`, for good: nobody on the link can claim it.
pub fn set_neighbour(socket: &mut Socket, index: u32, ip: IpAddr, mac: Mac) -> Result<(), NetlinkError> {
    let attrs = Attrs::new().bytes(NDA_DST, &octets(ip)).bytes(NDA_LLADDR, &mac);
    let message = Message::new(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &ndmsg(family(ip), index, NUD_PERMANENT, 0), attrs);
    socket.request(&format!("set neighbour {ip}"), &message)
}

pub fn delete_neighbour(socket: &mut Socket, index: u32, ip: IpAddr) -> Result<(), NetlinkError> {
    let message = Message::new(RTM_DELNEIGH, 0, &ndmsg(family(ip), index, 0, 0), Attrs::new().bytes(NDA_DST, &octets(ip)));
    match socket.request(&format!("delete neighbour {ip}"), &message) {
        Err(e) if matches!(e.errno(), Errno::ENOENT | Errno::ENODEV | Errno::ENXIO) => Ok(()),
        other => other,
    }
}

/// The permanent neighbours of a link.
pub fn neighbours(socket: &mut Socket, index: u32) -> Result<Vec<(IpAddr, Mac)>, NetlinkError> {
    let ask = Message::new(RTM_GETNEIGH, 0, &ndmsg(0, 0, 0, 0), Attrs::new().u32(8, index));
    let replies = socket.dump("list neighbours", &ask)?;
    let parse = |payload: &[u8]| {
        let state = word(payload, 8)? as u16;
        let attrs = payload.get(12..)?;
        let ours = word(payload, 4)? == index && state & NUD_PERMANENT != 0;
        let mac = attribute(attrs, NDA_LLADDR)?.try_into().ok()?;
        ours.then_some((address_of(attribute(attrs, NDA_DST)?)?, mac))
    };
    Ok(replies.iter().filter(|r| r.kind == RTM_NEWNEIGH).filter_map(|r| parse(&r.payload)).collect())
}

/// Binds a link-layer address to one port of a bridge, so that no other port can claim it.
pub fn pin_mac(socket: &mut Socket, port: u32, mac: Mac) -> Result<(), NetlinkError> {
    let message = Message::new(
        RTM_NEWNEIGH,
        NLM_F_CREATE | NLM_F_REPLACE,
        &ndmsg(AF_BRIDGE, port, NUD_NOARP, NTF_MASTER),
        Attrs::new().bytes(NDA_LLADDR, &mac),
    );
    socket.request("pin a link-layer address to a port", &message)
}
