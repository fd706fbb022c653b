//! Connection tracking: forgetting flows of an address that is given to somebody else.
//!
//! The kernel dumps only what the filter lets through (CTA_FILTER, Linux 5.8); each of those is
//! then deleted by its own tuple and id, so that nothing else can go. Sources:
//! linux/netfilter/nfnetlink_conntrack.h, net/netfilter/nf_conntrack_netlink.c.

use std::net::IpAddr;

use nix::errno::Errno;

use super::netlink::{Attrs, Message, NetlinkError, Protocol, Reply, Socket, attribute};

const SUBSYSTEM: u16 = 1;
const CT_NEW: u16 = 0;
const CT_GET: u16 = 1;
const CT_DELETE: u16 = 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
/// The bit of the source address in the filter's flags.
const FILTER_SOURCE: u32 = 1;

/// Deletes the flows in which `address` answers: those begun to it or translated to it. Returns
/// how many there were.
pub fn forget_answering(socket: &mut Socket, address: IpAddr) -> Result<usize, NetlinkError> {
    let (family, bytes, source) = match address {
        IpAddr::V4(ip) => (2u8, ip.octets().to_vec(), 1),
        IpAddr::V6(ip) => (10u8, ip.octets().to_vec(), 3),
    };
    let tuple = Attrs::new().nest(CTA_TUPLE_IP, Attrs::new().bytes(source, &bytes));
    let filter = Attrs::new().u32(CTA_FILTER_ORIG_FLAGS, 0).u32(CTA_FILTER_REPLY_FLAGS, FILTER_SOURCE);
    let ask = message(CT_GET, family, Attrs::new().nest(CTA_TUPLE_REPLY, tuple).nest(CTA_FILTER, filter));
    let what = "list flows of an address";
    let mut deleted = 0;
    for flow in socket.dump(what, &ask)?.iter().filter(|r| r.kind == SUBSYSTEM << 8 | CT_NEW) {
        // A kernel that does not know the filter would answer with everybody's flows.
        if source_of(flow, CTA_TUPLE_REPLY, source) != Some(&bytes) {
            continue;
        }
        let Some(original) = attribute(body(flow), CTA_TUPLE_ORIG) else { continue };
        let exact = Attrs::new().nest(CTA_TUPLE_ORIG, Attrs::new().raw(original));
        let exact = match attribute(body(flow), CTA_ID) {
            Some(id) => exact.bytes(CTA_ID, id),
            None => exact,
        };
        match socket.request("delete a flow", &message(CT_DELETE, family, exact)) {
            Ok(()) => deleted += 1,
            // It ended by itself.
            Err(e) if e.errno() == Errno::ENOENT => {}
            Err(e) => return Err(e),
        }
    }
    Ok(deleted)
}

pub fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Protocol::Netfilter)
}

fn source_of(flow: &Reply, tuple: u16, source: u16) -> Option<&[u8]> {
    attribute(attribute(attribute(body(flow), tuple)?, CTA_TUPLE_IP)?, source)
}

fn message(kind: u16, family: u8, attrs: Attrs) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, 0, &[family, 0, 0, 0], attrs)
}

fn body(reply: &Reply) -> &[u8] {
    reply.payload.get(4..).unwrap_or_default()
}
