//! Connection tracking: flows listed, and forgotten where what they lead to is gone.
//!
//! For IPv4 a filter in one message deletes in the kernel (CTA_FILTER of a delete, Linux 6.10);
//! older ones refuse it. Then, and for IPv6, whose comparison in the kernel (6.18 too) is the wrong
//! way round and would delete everybody else's, the flows are listed, matched here, and deleted each
//! by its own tuple and id, so that nothing else can go. Either walks the kernel's whole table
//! (11 ms at 262,144 buckets), so many filters are one list. A delete without any tuple would empty
//! the table: none is ever sent.
//! Sources: linux/netfilter/nfnetlink_conntrack.h, net/netfilter/nf_conntrack_netlink.c.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::errno::Errno;

use super::netlink::{Attrs, Message, NetlinkError, Protocol, Socket, attribute};

const SUBSYSTEM: u16 = 1;
const CT_NEW: u16 = 0;
const CT_GET: u16 = 1;
const CT_DELETE: u16 = 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
/// CTA_FILTER_FLAG_*.
const HAS_SOURCE: u32 = 1 << 0;
const HAS_DESTINATION: u32 = 1 << 1;
const HAS_PROTOCOL: u32 = 1 << 3;
const HAS_SOURCE_PORT: u32 = 1 << 4;
const HAS_DESTINATION_PORT: u32 = 1 << 5;
/// More filters than this are matched on one list.
const ONE_BY_ONE: usize = 4;

/// One direction of a flow. Ports are 0 where the protocol has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    pub source_port: u16,
    pub destination_port: u16,
}

/// As whoever began it sent, and as it is answered: from where a translation leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub original: Tuple,
    pub reply: Tuple,
}

/// Flows in which all of this holds; None means any. One address at least is needed, of the family
/// of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Filter {
    pub protocol: Option<u8>,
    /// Before translation.
    pub destination: Option<IpAddr>,
    pub destination_port: Option<u16>,
    /// Who answers: after translation.
    pub answering: Option<IpAddr>,
    pub answering_port: Option<u16>,
}

impl Filter {
    pub fn matches(&self, flow: &Flow) -> bool {
        let is = |wanted: Option<u16>, port| wanted.is_none_or(|w| w == port);
        self.protocol.is_none_or(|p| p == flow.original.protocol)
            && self.destination.is_none_or(|ip| ip == flow.original.destination)
            && is(self.destination_port, flow.original.destination_port)
            && self.answering.is_none_or(|ip| ip == flow.reply.source)
            && is(self.answering_port, flow.reply.source_port)
    }

    fn family(&self) -> Option<u8> {
        let address = self.destination.or(self.answering)?;
        let same = |ip: Option<IpAddr>| ip.is_none_or(|ip| ip.is_ipv4() == address.is_ipv4());
        (same(self.destination) && same(self.answering)).then(|| family_of(address))
    }

    /// Tuples and the flags that say what of them counts.
    fn attrs(&self) -> Attrs {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let (protocol, has_protocol) = (self.protocol, flag(self.protocol.is_some(), HAS_PROTOCOL));
        let original = flag(self.destination.is_some(), HAS_DESTINATION)
            | flag(self.destination_port.is_some(), HAS_DESTINATION_PORT)
            | flag(self.destination.is_some() || self.destination_port.is_some(), has_protocol);
        let reply = flag(self.answering.is_some(), HAS_SOURCE)
            | flag(self.answering_port.is_some(), HAS_SOURCE_PORT)
            | flag(original == 0 || self.answering_port.is_some(), has_protocol);
        let tuple = |address: Option<(IpAddr, bool)>, port: Option<(u16, u16)>| {
            let ip = address.map_or(Attrs::new(), |(ip, source)| address_attr(ip, source));
            let proto = protocol.map_or(Attrs::new(), |number| Attrs::new().u8(CTA_PROTO_NUM, number));
            let proto = port.map_or(proto.clone(), |(kind, port)| proto.be16(kind, port));
            let attrs = Attrs::new().when(address.is_some(), |a| a.nest(CTA_TUPLE_IP, ip));
            attrs.when(protocol.is_some(), |a| a.nest(CTA_TUPLE_PROTO, proto))
        };
        let begun = tuple(self.destination.map(|ip| (ip, false)), self.destination_port.map(|p| (CTA_PROTO_DST_PORT, p)));
        let answered = tuple(self.answering.map(|ip| (ip, true)), self.answering_port.map(|p| (CTA_PROTO_SRC_PORT, p)));
        let filter = Attrs::new().u32(CTA_FILTER_ORIG_FLAGS, original).u32(CTA_FILTER_REPLY_FLAGS, reply);
        Attrs::new()
            .when(original != 0, |a| a.nest(CTA_TUPLE_ORIG, begun))
            .when(reply != 0, |a| a.nest(CTA_TUPLE_REPLY, answered))
            .nest(CTA_FILTER, filter)
    }
}

pub fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Protocol::Netfilter)
}

/// Forgets the flows that any of the filters names. Filters without an address name none. How many
/// there were: a filter that the kernel carries out by itself counts as one where any flow fits.
pub fn forget(socket: &mut Socket, filters: &[Filter]) -> Result<usize, NetlinkError> {
    let mut count = 0;
    let filters: Vec<&Filter> = filters.iter().filter(|f| f.family().is_some()).collect();
    let mut left = filters.as_slice();
    if filters.len() <= ONE_BY_ONE && filters.iter().all(|f| f.family() == Some(2)) {
        while let [filter, rest @ ..] = left {
            match forget_in_kernel(socket, filter) {
                Ok(any) => {
                    count += usize::from(any);
                    left = rest;
                }
                // Before 6.10 a delete takes whole tuples only.
                Err(e) if matches!(e.errno(), Errno::EINVAL | Errno::EOPNOTSUPP) => break,
                Err(e) => return Err(e),
            }
        }
    }
    for family in [2, 10] {
        let of_family: Vec<&Filter> = left.iter().filter(|f| f.family() == Some(family)).copied().collect();
        if !of_family.is_empty() {
            count += forget_where(socket, family, |flow| of_family.iter().any(|f| f.matches(flow)))?;
        }
    }
    Ok(count)
}

/// False: no flow fits.
fn forget_in_kernel(socket: &mut Socket, filter: &Filter) -> Result<bool, NetlinkError> {
    let Some(family) = filter.family() else { return Ok(false) };
    let result = socket.request("forget flows", &message(CT_DELETE, family, filter.attrs()));
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.errno() == Errno::ENOENT => Ok(false),
        Err(e) => Err(e),
    }
}

/// Forgets the flows of a family (NFPROTO_*) that `gone` names; how many there were.
pub fn forget_where(socket: &mut Socket, family: u8, gone: impl Fn(&Flow) -> bool) -> Result<usize, NetlinkError> {
    let what = "list flows";
    let take = |exact: &mut Vec<Attrs>, kind, payload: &[u8]| {
        if kind == SUBSYSTEM << 8 | CT_NEW
            && let Some(flow) = Flow::read(payload)
            && gone(&flow)
        {
            exact.extend(exactly(payload));
        }
    };
    let exact = socket.dump_each(what, &message(CT_GET, family, Attrs::new()), Vec::new, take)?;
    let mut count = 0;
    for one in exact {
        match socket.request("forget a flow", &message(CT_DELETE, family, one)) {
            Ok(()) => count += 1,
            // It ended by itself.
            Err(e) if e.errno() == Errno::ENOENT => {}
            Err(e) => return Err(e),
        }
    }
    Ok(count)
}

/// What names one flow and no other.
fn exactly(payload: &[u8]) -> Option<Attrs> {
    let body = payload.get(4..)?;
    let exact = Attrs::new().nest(CTA_TUPLE_ORIG, Attrs::new().raw(attribute(body, CTA_TUPLE_ORIG)?));
    let more = [CTA_ID, CTA_ZONE].into_iter().filter_map(|kind| Some((kind, attribute(body, kind)?)));
    Some(more.fold(exact, |attrs, (kind, value)| attrs.bytes(kind, value)))
}

impl Flow {
    pub fn read(payload: &[u8]) -> Option<Flow> {
        let body = payload.get(4..)?;
        Some(Flow { original: tuple(attribute(body, CTA_TUPLE_ORIG)?)?, reply: tuple(attribute(body, CTA_TUPLE_REPLY)?)? })
    }
}

fn tuple(bytes: &[u8]) -> Option<Tuple> {
    let (ip, proto) = (attribute(bytes, CTA_TUPLE_IP)?, attribute(bytes, CTA_TUPLE_PROTO)?);
    let address = |v4, v6| -> Option<IpAddr> {
        match attribute(ip, v4) {
            Some(four) => Some(Ipv4Addr::from(<[u8; 4]>::try_from(four).ok()?).into()),
            None => Some(Ipv6Addr::from(<[u8; 16]>::try_from(attribute(ip, v6)?).ok()?).into()),
        }
    };
    let port = |kind| attribute(proto, kind).and_then(|b| b.try_into().ok()).map_or(0, u16::from_be_bytes);
    Some(Tuple {
        source: address(1, 3)?,
        destination: address(2, 4)?,
        protocol: *attribute(proto, CTA_PROTO_NUM)?.first()?,
        source_port: port(CTA_PROTO_SRC_PORT),
        destination_port: port(CTA_PROTO_DST_PORT),
    })
}

fn address_attr(ip: IpAddr, source: bool) -> Attrs {
    match ip {
        IpAddr::V4(ip) => Attrs::new().bytes(if source { 1 } else { 2 }, &ip.octets()),
        IpAddr::V6(ip) => Attrs::new().bytes(if source { 3 } else { 4 }, &ip.octets()),
    }
}

fn family_of(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 2 } else { 10 }
}

fn message(kind: u16, family: u8, attrs: Attrs) -> Message {
    // A version beyond 0 makes the kernel mind the family of a delete (Linux 5.2).
    Message::new(SUBSYSTEM << 8 | kind, 0, &[family, u8::from(kind == CT_DELETE), 0, 0], attrs)
}
