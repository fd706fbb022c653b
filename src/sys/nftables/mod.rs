//! nf_tables over netlink: one table's messages, transactions, and reading tables back.
//!
//! Invariant: a [`Batch`] is one transaction: all of it or nothing, and the refused messages are
//! named. What is encoded here, the nft program of the host can print. Sources:
//! linux/netfilter/nf_tables.h, net/netfilter/nf_tables_api.c.

mod batch;
mod event;
pub mod expr;
mod seen;
mod userdata;

use std::sync::Arc;
use std::time::Duration;

pub use super::netlink::BatchError;
use super::netlink::{NetlinkError, Protocol, Socket};
pub use batch::{Batch, Content, Element, commit};
pub use event::{Event, events, listen};
pub use seen::{
    BaseSeen, ChainSeen, ContentSeen, ElementSeen, RuleSeen, SetSeen, chains, elements, for_each_chain, generation, is_dormant,
    rules, sets, tables,
};
pub use userdata::comment_text;

const SUBSYSTEM: u16 = 10;
const NEWTABLE: u16 = 0;
const GETTABLE: u16 = 1;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const GETCHAIN: u16 = 4;
const DELCHAIN: u16 = 5;
const NEWRULE: u16 = 6;
const GETRULE: u16 = 7;
const DELRULE: u16 = 8;
const NEWSET: u16 = 9;
const GETSET: u16 = 10;
const DELSET: u16 = 11;
const NEWSETELEM: u16 = 12;
const GETSETELEM: u16 = 13;
const DELSETELEM: u16 = 14;
const NEWGEN: u16 = 15;
const GETGEN: u16 = 16;
const LIST_ELEM: u16 = 1;
const VERDICT_DROP: i32 = 0;
const VERDICT_ACCEPT: i32 = 1;
const VERDICT_JUMP: i32 = -3;
const VERDICT_GOTO: i32 = -4;
const VERDICT_RETURN: i32 = -5;

/// Of sets.
pub const INTERVAL: u32 = 0x4;
pub const MAP: u32 = 0x8;
pub const TIMEOUT: u32 = 0x10;
pub const DYNAMIC: u32 = 0x20;
pub const CONCAT: u32 = 0x80;
/// The data type of verdict maps.
pub const TYPE_VERDICT: u32 = 0xffff_ff00;

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
    /// A number of 32 bits in the machine's order; nft can only name it by an expression that
    /// makes such a number, see [`userdata`].
    Integer = 4,
    Ipv4 = 7,
    Ipv6 = 8,
    Protocol = 12,
    Port = 13,
}

impl Field {
    /// Bytes of the value.
    pub fn length(self) -> u32 {
        match self {
            Field::Protocol => 1,
            Field::Port => 2,
            Field::Integer | Field::Ipv4 => 4,
            Field::Ipv6 => 16,
        }
    }
    /// Room in a concatenation, padded to 4 bytes.
    pub fn size(self) -> u32 {
        self.length().next_multiple_of(4)
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

impl ChainType {
    pub fn name(self) -> &'static str {
        match self {
            ChainType::Filter => "filter",
            ChainType::Nat => "nat",
            ChainType::Route => "route",
        }
    }
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

impl Verdict {
    fn code(&self) -> i32 {
        match self {
            Verdict::Drop => VERDICT_DROP,
            Verdict::Accept => VERDICT_ACCEPT,
            Verdict::Jump(_) => VERDICT_JUMP,
            Verdict::Goto(_) => VERDICT_GOTO,
            Verdict::Return => VERDICT_RETURN,
        }
    }
    fn chain(&self) -> Option<&str> {
        match self {
            Verdict::Jump(chain) | Verdict::Goto(chain) => Some(chain),
            Verdict::Drop | Verdict::Accept | Verdict::Return => None,
        }
    }
}

/// A set or map to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set<'a> {
    pub name: &'a str,
    pub key: Vec<Field>,
    pub data: SetData,
    pub interval: bool,
    /// Elements are made by rules, go after the time, and are that many at most.
    pub dynamic: Option<(Duration, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetData {
    None,
    Fields(Vec<Field>),
    Verdict,
}

impl Set<'_> {
    /// What the kernel will say of the set.
    pub fn expected(&self) -> SetSeen {
        let (data_type, data_length) = match &self.data {
            SetData::None => (0, 0),
            SetData::Fields(fields) => (type_of(fields), size_of(fields)),
            SetData::Verdict => (TYPE_VERDICT, 16),
        };
        let flag = |on: bool, flag| if on { flag } else { 0 };
        SetSeen {
            name: self.name.to_owned(),
            flags: flag(self.interval, INTERVAL)
                | flag(self.interval && self.key.len() > 1, CONCAT)
                | flag(self.data != SetData::None, MAP)
                | flag(self.dynamic.is_some(), TIMEOUT | DYNAMIC),
            key_type: type_of(&self.key),
            key_length: size_of(&self.key),
            data_type,
            data_length,
            timeout: self.dynamic.map_or(0, |(timeout, _)| timeout.as_millis() as u64),
            size: self.dynamic.map_or(0, |(_, size)| size),
        }
    }
}

/// 6 bits a field, the first in the highest.
fn type_of(fields: &[Field]) -> u32 {
    fields.iter().fold(0, |all, f| all << 6 | *f as u32)
}

/// A single field is as long as it is; those of a concatenation are padded.
fn size_of(fields: &[Field]) -> u32 {
    match fields {
        [field] => field.length(),
        fields => fields.iter().map(|f| f.size()).sum(),
    }
}

pub fn open() -> Result<Socket, NetlinkError> {
    Socket::open(Protocol::Netfilter)
}
