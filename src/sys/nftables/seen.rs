//! Tables read back: chains, rules' comments, sets, elements.
//!
//! Invariant: elements are handed out one by one from the datagram they came in; nothing is kept.

use nix::errno::Errno;

use super::userdata::comment_of;
use super::{
    Family, GETCHAIN, GETGEN, GETRULE, GETSET, GETSETELEM, GETTABLE, NEWCHAIN, NEWGEN, NEWRULE, NEWSET, NEWSETELEM, NEWTABLE,
    SUBSYSTEM, VERDICT_ACCEPT, VERDICT_DROP, VERDICT_GOTO, VERDICT_JUMP, VERDICT_RETURN, Verdict,
};
use crate::sys::netlink::{Attrs, Message, NetlinkError, Socket, attribute, attributes, text};

/// NF_INET_FORWARD.
pub(super) const FORWARD: u32 = 2;
const ELEM_INTERVAL_END: u32 = 1;

/// A base chain of anybody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainSeen {
    /// NFPROTO_*.
    pub family: u8,
    pub table: String,
    pub name: String,
    /// Where it is a base chain.
    pub base: Option<BaseSeen>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseSeen {
    /// NF_INET_* in the families ip, ip6 and inet.
    pub hook: u32,
    pub priority: i32,
    /// `filter`, `nat`, `route`.
    pub kind: String,
    /// Its policy.
    pub drops: bool,
}

impl ChainSeen {
    /// Whether forwarded packets of IPv4 or IPv6 run through it and end there unless accepted.
    pub fn drops_forwarded(&self) -> bool {
        // NFPROTO_INET, _IPV4, _IPV6: hooks of others have other meanings.
        matches!(self.family, 1 | 2 | 10) && self.base.as_ref().is_some_and(|b| b.hook == FORWARD && b.drops)
    }

    pub fn read(payload: &[u8]) -> Option<ChainSeen> {
        let b = body(payload);
        let base = |hook: &[u8]| {
            Some(BaseSeen {
                hook: be32(attribute(hook, 1)?)?,
                priority: be32(attribute(hook, 2)?)? as i32,
                kind: attribute(b, 7).map(text).unwrap_or_default(),
                drops: attribute(b, 5).and_then(be32) == Some(0),
            })
        };
        Some(ChainSeen {
            family: *payload.first()?,
            table: text(attribute(b, 1)?),
            name: text(attribute(b, 3)?),
            base: attribute(b, 4).and_then(base),
        })
    }
}

/// A rule as the kernel tells it; its expressions are the comment's business, but for where it
/// leads: a chain that somebody renames takes the rules along that lead to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSeen {
    pub chain: String,
    pub comment: String,
    /// Chains that it jumps or goes to, as they are called now.
    pub leads_to: Vec<String>,
}

impl RuleSeen {
    pub fn read(payload: &[u8]) -> Option<RuleSeen> {
        let b = body(payload);
        let chain = text(attribute(b, 2)?);
        let comment = attribute(b, 7).map(comment_of).unwrap_or_default();
        let leads_to = attributes(attribute(b, 4).unwrap_or_default()).filter_map(|(_, expr)| chain_of(expr)).collect();
        Some(RuleSeen { chain, comment, leads_to })
    }
}

/// A set as the kernel tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSeen {
    pub name: String,
    pub flags: u32,
    pub key_type: u32,
    pub key_length: u32,
    pub data_type: u32,
    pub data_length: u32,
    /// Milliseconds.
    pub timeout: u64,
    pub size: u32,
}

/// One element in the datagram that it came in.
#[derive(Clone, Copy, Debug)]
pub struct ElementSeen<'a> {
    pub key: &'a [u8],
    pub key_end: Option<&'a [u8]>,
    pub is_end: bool,
    pub content: ContentSeen<'a>,
    pub userdata: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentSeen<'a> {
    None,
    Data(&'a [u8]),
    /// Code, and the chain's name with its NUL where the verdict has one.
    Verdict(i32, &'a [u8]),
}

impl<'a> ElementSeen<'a> {
    /// All that a message holds.
    pub fn each(payload: &'a [u8]) -> impl Iterator<Item = ElementSeen<'a>> {
        attributes(attribute(body(payload), 3).unwrap_or_default()).map(|(_, element)| ElementSeen::read(element))
    }

    fn read(element: &'a [u8]) -> ElementSeen<'a> {
        let value = |kind| attribute(element, kind).and_then(|a| attribute(a, 1));
        let verdict = || {
            let verdict = attribute(attribute(element, 2)?, 2)?;
            let code = be32(attribute(verdict, 1)?)? as i32;
            Some(ContentSeen::Verdict(code, attribute(verdict, 2).unwrap_or_default()))
        };
        ElementSeen {
            key: value(1).unwrap_or_default(),
            key_end: value(10),
            is_end: attribute(element, 3).and_then(be32).unwrap_or(0) & ELEM_INTERVAL_END != 0,
            content: value(2).map(ContentSeen::Data).or_else(verdict).unwrap_or(ContentSeen::None),
            userdata: attribute(element, 6).unwrap_or_default(),
        }
    }

    pub fn comment(&self) -> String {
        comment_of(self.userdata)
    }
}

impl ContentSeen<'_> {
    /// None: of no kind that we know, or data.
    pub fn verdict(&self) -> Option<Verdict> {
        match *self {
            ContentSeen::Verdict(VERDICT_ACCEPT, _) => Some(Verdict::Accept),
            ContentSeen::Verdict(VERDICT_DROP, _) => Some(Verdict::Drop),
            ContentSeen::Verdict(VERDICT_RETURN, _) => Some(Verdict::Return),
            ContentSeen::Verdict(VERDICT_JUMP, chain) => Some(Verdict::Jump(text(chain).into())),
            ContentSeen::Verdict(VERDICT_GOTO, chain) => Some(Verdict::Goto(text(chain).into())),
            ContentSeen::Verdict(..) | ContentSeen::None | ContentSeen::Data(_) => None,
        }
    }
}

/// The generation of all tables of this network namespace: every transaction of anybody's makes
/// it one more.
pub fn generation(socket: &mut Socket) -> Result<u32, NetlinkError> {
    let what = "read the generation of nftables";
    let replies = socket.query(what, &message(GETGEN, 0, Attrs::new()))?;
    let of = |kind, payload: &[u8]| (kind == SUBSYSTEM << 8 | NEWGEN).then(|| be32(attribute(body(payload), 1)?)).flatten();
    let id = replies.iter().find_map(|r| of(r.kind, &r.payload));
    id.ok_or_else(|| NetlinkError { what: what.to_owned(), offset: None, source: Errno::EBADMSG.into() })
}

/// Family and name of all tables.
pub fn tables(socket: &mut Socket) -> Result<Vec<(u8, String)>, NetlinkError> {
    let take = |all: &mut Vec<(u8, String)>, kind, payload: &[u8]| {
        if kind == SUBSYSTEM << 8 | NEWTABLE
            && let (Some(family), Some(name)) = (payload.first(), attribute(body(payload), 1))
        {
            all.push((*family, text(name)));
        }
    };
    socket.dump_each("list nftables tables", &message(GETTABLE, 0, Attrs::new()), Vec::new, take)
}

/// Whether somebody has put a table to sleep (`flags dormant`): it is there whole and does nothing.
pub fn is_dormant(socket: &mut Socket, family: Family, table: &str) -> Result<bool, NetlinkError> {
    const DORMANT: u32 = 1;
    let take = |found: &mut bool, kind, payload: &[u8]| {
        let b = body(payload);
        let ours = payload.first() == Some(&family.number()) && attribute(b, 1).map(text).as_deref() == Some(table);
        *found |= kind == SUBSYSTEM << 8 | NEWTABLE && ours && attribute(b, 2).and_then(be32).unwrap_or(0) & DORMANT != 0;
    };
    socket.dump_each("list nftables tables", &message(GETTABLE, family.number(), Attrs::new()), || false, take)
}

/// All chains of all tables, one by one.
pub fn for_each_chain<T>(
    socket: &mut Socket,
    begin: impl Fn() -> T,
    mut take: impl FnMut(&mut T, ChainSeen),
) -> Result<T, NetlinkError> {
    let all = message(GETCHAIN, 0, Attrs::new());
    socket.dump_each("list nftables chains", &all, begin, |gathered, kind, payload| {
        if kind == SUBSYSTEM << 8 | NEWCHAIN
            && let Some(chain) = ChainSeen::read(payload)
        {
            take(gathered, chain);
        }
    })
}

/// The chains of a table; a table that is not there has none.
pub fn chains(socket: &mut Socket, family: Family, table: &str) -> Result<Vec<ChainSeen>, NetlinkError> {
    let ask = message(GETCHAIN, family.number(), Attrs::new().text(1, table));
    let take = |all: &mut Vec<ChainSeen>, kind, payload: &[u8]| {
        if kind == SUBSYSTEM << 8 | NEWCHAIN {
            all.extend(ChainSeen::read(payload).filter(|c| c.table == table));
        }
    };
    none_without_table(socket.dump_each("list nftables chains", &ask, Vec::new, take))
}

/// The rules of a table in their order; a table that is not there has none.
pub fn rules(socket: &mut Socket, family: Family, table: &str) -> Result<Vec<RuleSeen>, NetlinkError> {
    let ask = message(GETRULE, family.number(), Attrs::new().text(1, table));
    // Older kernels answer with the rules of every table.
    let take = |all: &mut Vec<RuleSeen>, kind, payload: &[u8]| {
        if kind == SUBSYSTEM << 8 | NEWRULE && attribute(body(payload), 1).map(text).as_deref() == Some(table) {
            all.extend(RuleSeen::read(payload));
        }
    };
    none_without_table(socket.dump_each("list nftables rules", &ask, Vec::new, take))
}

/// The chain of an expression that is a verdict.
fn chain_of(expr: &[u8]) -> Option<String> {
    let is_verdict = attribute(expr, 1).map(text).as_deref() == Some("immediate");
    let verdict = attribute(attribute(attribute(expr, 2).filter(|_| is_verdict)?, 2)?, 2)?;
    attribute(verdict, 2).map(text)
}

/// The sets of a table, those that rules keep for themselves left out.
pub fn sets(socket: &mut Socket, family: Family, table: &str) -> Result<Vec<SetSeen>, NetlinkError> {
    const ANONYMOUS: u32 = 1;
    let ask = message(GETSET, family.number(), Attrs::new().text(1, table));
    let take = |all: &mut Vec<SetSeen>, kind, payload: &[u8]| {
        let b = body(payload);
        let number = |kind| attribute(b, kind).and_then(be32).unwrap_or(0);
        if kind == SUBSYSTEM << 8 | NEWSET
            && attribute(b, 1).map(text).as_deref() == Some(table)
            && let Some(name) = attribute(b, 2)
            && number(3) & ANONYMOUS == 0
        {
            all.push(SetSeen {
                name: text(name),
                flags: number(3),
                key_type: number(4),
                key_length: number(5),
                data_type: number(6),
                data_length: number(7),
                timeout: attribute(b, 11).and_then(|t| t.try_into().ok()).map_or(0, u64::from_be_bytes),
                size: attribute(b, 9).and_then(|d| be32(attribute(d, 1)?)).unwrap_or(0),
            });
        }
    };
    none_without_table(socket.dump_each("list nftables sets", &ask, Vec::new, take))
}

/// The elements of a set, one by one; None where set or table is not there.
pub fn elements<T>(
    socket: &mut Socket,
    family: Family,
    table: &str,
    set: &str,
    begin: impl Fn() -> T,
    mut take: impl FnMut(&mut T, ElementSeen),
) -> Result<Option<T>, NetlinkError> {
    let ask = message(GETSETELEM, family.number(), Attrs::new().text(1, table).text(2, set));
    let result = socket.dump_each("list nftables elements", &ask, begin, |gathered, kind, payload| {
        if kind == SUBSYSTEM << 8 | NEWSETELEM {
            ElementSeen::each(payload).for_each(|element| take(gathered, element));
        }
    });
    match result {
        Err(e) if e.errno() == Errno::ENOENT => Ok(None),
        other => other.map(Some),
    }
}

fn none_without_table<T>(result: Result<Vec<T>, NetlinkError>) -> Result<Vec<T>, NetlinkError> {
    match result {
        Err(e) if e.errno() == Errno::ENOENT => Ok(Vec::new()),
        other => other,
    }
}

fn message(kind: u16, family: u8, attrs: Attrs) -> Message {
    Message::new(SUBSYSTEM << 8 | kind, 0, &[family, 0, 0, 0], attrs)
}

/// Behind nfgenmsg.
fn body(payload: &[u8]) -> &[u8] {
    payload.get(4..).unwrap_or_default()
}

fn be32(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_be_bytes)
}
