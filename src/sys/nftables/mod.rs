//! nf_tables over netlink: one table's messages, transactions, and reading it back.
//!
//! Invariant: a [`Batch`] is one transaction: all of it or nothing, and the refused message is
//! named. What is encoded here, the nft program of the host can print. Sources:
//! linux/netfilter/nf_tables.h, net/netfilter/nf_tables_api.c.

pub mod expr;

use std::sync::Arc;

pub use super::netlink::BatchError;
use super::netlink::{
    Attrs, Message, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NetlinkError, Protocol, Reply, Socket, attribute, attributes,
    messages, text,
};
use expr::Expr;

const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const NEWTABLE: u16 = 0;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const GETCHAIN: u16 = 4;
const NEWRULE: u16 = 6;
const GETRULE: u16 = 7;
const NEWSET: u16 = 9;
const NEWSETELEM: u16 = 12;
const GETSETELEM: u16 = 13;
const DELSETELEM: u16 = 14;
const NEWGEN: u16 = 15;
/// NFNLGRP_NFTABLES as a bit of the bind mask.
const NOTIFY_GROUP: u32 = 1 << 6;
const LIST_ELEM: u16 = 1;
const SET_MAP: u32 = 8;
/// Elements in one message: each has fewer than 300 bytes, a nest takes 64 KiB.
const ELEMENTS_PER_MESSAGE: usize = 200;

/// An address family of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    Ip,
    Ip6,
}

impl Family {
    /// NFPROTO_*.
    pub fn number(self) -> u8 {
        match self {
            Family::Ip => 2,
            Family::Ip6 => 10,
        }
    }
    /// As nft writes it.
    pub fn name(self) -> &'static str {
        match self {
            Family::Ip => "ip",
            Family::Ip6 => "ip6",
        }
    }
}

/// Field types of keys and data: nft's ids, so that it prints values and not hex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Ipv4 = 7,
    Ipv6 = 8,
    Protocol = 12,
    Port = 13,
}

impl Field {
    /// Room in a concatenation, padded to 4 bytes.
    fn size(self) -> u32 {
        match self {
            Field::Ipv6 => 16,
            Field::Ipv4 | Field::Protocol | Field::Port => 4,
        }
    }
}

/// NF_INET_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    Prerouting = 0,
    Input = 1,
    Forward = 2,
    Output = 3,
    Postrouting = 4,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChainType {
    Filter,
    Nat,
    Route,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Accept,
    Drop,
    /// Back to the chain that jumped here; in a base chain its policy.
    Return,
    /// On return the next rule follows.
    Jump(Arc<str>),
    /// On return the chain that was jumped from last follows.
    Goto(Arc<str>),
}

/// A set, or with `data` a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    pub name: &'static str,
    pub key: Vec<Field>,
    pub data: Vec<Field>,
}

/// One element; key and data are the fields' bytes, each padded to 4.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    pub key: Vec<u8>,
    pub data: Vec<u8>,
    pub comment: String,
}

/// A rule as the kernel tells it; its expressions are the comment's business.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSeen {
    pub chain: String,
    pub comment: String,
}

/// The messages of one transaction on the table `name`.
#[derive(Clone, Debug)]
pub struct Batch {
    family: Family,
    table: String,
    messages: Vec<Message>,
}

impl Batch {
    pub fn new(family: Family, table: &str) -> Batch {
        Batch { family, table: table.to_owned(), messages: Vec::new() }
    }
    pub fn len(&self) -> usize {
        self.messages.len()
    }
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }
    /// All bytes of the messages so far, for fingerprints.
    pub fn bytes(&self) -> Vec<u8> {
        self.messages.iter().flat_map(Message::body).collect()
    }

    fn push(&mut self, kind: u16, flags: u16, attrs: Attrs) {
        self.messages.push(message(kind, flags, self.family, attrs));
    }
    fn named(&self) -> Attrs {
        Attrs::new().text(1, &self.table)
    }

    /// Makes the table; nothing happens where it is there.
    pub fn add_table(&mut self) {
        self.push(NEWTABLE, NLM_F_CREATE, self.named());
    }
    /// With all that is in it.
    pub fn delete_table(&mut self) {
        self.push(DELTABLE, 0, self.named());
    }
    pub fn add_chain(&mut self, name: &str) {
        self.push(NEWCHAIN, NLM_F_CREATE, self.named().text(3, name));
    }
    /// A nat chain at `hook`, policy accept.
    pub fn add_nat_chain(&mut self, name: &str, hook: Hook, priority: i32) {
        let place = Attrs::new().be32(1, hook as u32).be32(2, priority as u32);
        self.push(NEWCHAIN, NLM_F_CREATE, self.named().text(3, name).nest(4, place).be32(5, 1).text(7, "nat"));
    }
    pub fn add_set(&mut self, set: &Set, id: u32) {
        let kind = |fields: &[Field]| fields.iter().fold(0, |all, f| all << 6 | *f as u32);
        let size = |fields: &[Field]| fields.iter().map(|f| f.size()).sum();
        let is_map = !set.data.is_empty();
        let attrs = self.named().text(2, set.name).be32(3, if is_map { SET_MAP } else { 0 });
        let attrs = attrs.be32(4, kind(&set.key)).be32(5, size(&set.key));
        let attrs = attrs.when(is_map, |a| a.be32(6, kind(&set.data)).be32(7, size(&set.data)));
        self.push(NEWSET, NLM_F_CREATE | NLM_F_EXCL, attrs.be32(10, id));
    }
    pub fn add_rule(&mut self, chain: &str, exprs: &[Expr], comment: &str) {
        let list = exprs.iter().fold(Attrs::new(), |list, e| list.nest(LIST_ELEM, e.0.clone()));
        let attrs = self.named().text(2, chain).nest(4, list).bytes(7, &comment_udata(comment));
        self.push(NEWRULE, NLM_F_CREATE | NLM_F_APPEND, attrs);
    }
    /// An element that is there already is fine; the same key with other data is EEXIST.
    pub fn add_elements(&mut self, set: &str, elements: &[Element]) {
        for some in elements.chunks(ELEMENTS_PER_MESSAGE) {
            let list = element_list(some, true);
            self.push(NEWSETELEM, NLM_F_CREATE, self.named().text(2, set).nest(3, list));
        }
    }
    /// Each of them must be there.
    pub fn delete_elements(&mut self, set: &str, elements: &[Element]) {
        for some in elements.chunks(ELEMENTS_PER_MESSAGE) {
            let list = element_list(some, false);
            self.push(DELSETELEM, 0, self.named().text(2, set).nest(3, list));
        }
    }
}

fn element_list(elements: &[Element], whole: bool) -> Attrs {
    elements.iter().fold(Attrs::new(), |list, e| {
        let one = Attrs::new().nest(1, Attrs::new().bytes(1, &e.key));
        let one = one.when(whole && !e.data.is_empty(), |a| a.nest(2, Attrs::new().bytes(1, &e.data)));
        let one = one.when(whole && !e.comment.is_empty(), |a| a.bytes(6, &comment_udata(&e.comment)));
        list.nest(LIST_ELEM, one)
    })
}

/// What nft shows as `comment "…"`: type 0, length, text, NUL; 128 bytes at most.
fn comment_udata(comment: &str) -> Vec<u8> {
    let text: Vec<u8> = comment.bytes().filter(|b| (0x20..0x7f).contains(b) && *b != b'"').take(120).collect();
    let mut bytes = vec![0, text.len() as u8 + 1];
    bytes.extend(text);
    bytes.push(0);
    bytes
}

fn comment_of(udata: &[u8]) -> String {
    match udata {
        [0, length, rest @ ..] => text(rest.get(..usize::from(*length)).unwrap_or_default()),
        _ => String::new(),
    }
}

fn message(kind: u16, flags: u16, family: Family, attrs: Attrs) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, flags, &[family.number(), 0, 0, 0], attrs)
}

pub fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Protocol::Netfilter)
}

/// Carries out the transaction. The index in an error is that of the batch's messages.
pub fn commit(socket: &mut Socket, what: &str, batch: &Batch) -> Result<(), BatchError> {
    if batch.is_empty() {
        return Ok(());
    }
    let edge = |kind| (Message::new(kind, 0, &[0, 0, 0, SUBSYSTEM as u8], Attrs::new()), false);
    let mut parts = vec![edge(BATCH_BEGIN)];
    parts.extend(batch.messages.iter().map(|m| (m.clone(), true)));
    parts.push(edge(BATCH_END));
    socket.batch(what, &parts).map_err(|e| BatchError { message: e.message.and_then(|at| at.checked_sub(1)), error: e.error })
}

/// A base chain of anybody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainSeen {
    pub family: u8,
    pub table: String,
    pub name: String,
    /// NF_INET_*, where it is a base chain.
    pub hook: Option<u32>,
    pub drops: bool,
}

/// NF_INET_FORWARD.
pub const HOOK_FORWARD: u32 = 2;

impl ChainSeen {
    /// Families inet, ip and ip6; hooks of others have other meanings.
    pub fn sees_ip(&self) -> bool {
        matches!(self.family, 1 | 2 | 10)
    }
}

/// All chains of all tables.
pub fn chains(socket: &mut Socket) -> Result<Vec<ChainSeen>, NetlinkError> {
    let all = Message::new(SUBSYSTEM << 8 | GETCHAIN, 0, &[0; 4], Attrs::new());
    let replies = socket.dump("list nftables chains", &all)?;
    Ok(replies.iter().filter(|r| r.kind == SUBSYSTEM << 8 | NEWCHAIN).filter_map(ChainSeen::read).collect())
}

impl ChainSeen {
    /// Of an NFT_MSG_NEWCHAIN; None where it names no table or chain.
    pub fn read(reply: &Reply) -> Option<ChainSeen> {
        let b = body(reply);
        Some(ChainSeen {
            family: *reply.payload.first()?,
            table: text(attribute(b, 1)?),
            name: text(attribute(b, 3)?),
            hook: attribute(b, 4).and_then(|hook| be32(attribute(hook, 1)?)),
            drops: attribute(b, 5).and_then(be32) == Some(0),
        })
    }
}

/// The rules of a table in their order; a table that is not there has none.
pub fn rules(socket: &mut Socket, family: Family, table: &str) -> Result<Vec<RuleSeen>, NetlinkError> {
    let ask = message(GETRULE, 0, family, Attrs::new().text(1, table));
    let replies = match socket.dump("list nftables rules", &ask) {
        Err(e) if e.errno() == nix::errno::Errno::ENOENT => return Ok(Vec::new()),
        other => other?,
    };
    // Older kernels answer with the rules of every table.
    let mine = |r: &&Reply| r.kind == SUBSYSTEM << 8 | NEWRULE && attribute(body(r), 1).map(text).as_deref() == Some(table);
    Ok(replies.iter().filter(mine).filter_map(RuleSeen::read).collect())
}

impl RuleSeen {
    /// Of an NFT_MSG_NEWRULE; None where it names no chain.
    pub fn read(reply: &Reply) -> Option<RuleSeen> {
        let comment = attribute(body(reply), 7).map(comment_of).unwrap_or_default();
        Some(RuleSeen { chain: text(attribute(body(reply), 2)?), comment })
    }
}

/// The elements of a set; None where set or table is not there.
pub fn elements(socket: &mut Socket, family: Family, table: &str, set: &str) -> Result<Option<Vec<Element>>, NetlinkError> {
    let ask = message(GETSETELEM, 0, family, Attrs::new().text(1, table).text(2, set));
    let replies = match socket.dump("list nftables elements", &ask) {
        Err(e) if e.errno() == nix::errno::Errno::ENOENT => return Ok(None),
        other => other?,
    };
    Ok(Some(replies.iter().filter(|r| r.kind == SUBSYSTEM << 8 | NEWSETELEM).flat_map(Element::read).collect()))
}

impl Element {
    /// All of an NFT_MSG_NEWSETELEM.
    pub fn read(reply: &Reply) -> Vec<Element> {
        let list = attribute(body(reply), 3).unwrap_or_default();
        let one = |element: &[u8]| {
            let data = |kind| attribute(element, kind).and_then(|a| attribute(a, 1)).unwrap_or_default().to_vec();
            let comment = attribute(element, 6).map(comment_of).unwrap_or_default();
            Element { key: data(1), data: data(2), comment }
        };
        attributes(list).map(|(_, element)| one(element)).collect()
    }
}

/// A non-blocking socket that hears of every change to any table.
pub fn listen() -> Result<Socket, NetlinkError> {
    Socket::listen(Protocol::Netfilter, NOTIFY_GROUP)
}

/// Whether a datagram of [`listen`]'s socket tells of a change to the table.
pub fn concerns(datagram: &[u8], table: &str) -> bool {
    messages(datagram).any(|(header, payload)| {
        let of_a_table = header.kind >> 8 == SUBSYSTEM && header.kind & 0xff != NEWGEN;
        of_a_table && payload.get(4..).and_then(|b| attribute(b, 1)).map(text).as_deref() == Some(table)
    })
}

fn body(reply: &Reply) -> &[u8] {
    reply.payload.get(4..).unwrap_or_default()
}

fn be32(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_be_bytes)
}
