//! One nftables table as typed data: sets, chains, rules, elements.
//!
//! The layout (services, host ports, policies) writes a [`Table`], `encode` turns it into
//! netlink messages, `diff` two of them into the messages between them, `trace` walks a packet
//! through one. Invariant: each [`Step`] has exactly one encoding, the shape that the nft program
//! makes of the same words, and exactly one meaning. The words are nft's (nft(8)).
//!
//! Names of chains and sets: nft can print those that begin with a letter and go on with
//! letters, digits, `/`, `\`, `_`, `.` and `-`; the kernel takes 255 bytes, rules' names of
//! chains 127. Nothing that comes from an object's name may be one: use a hash of it.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

pub use super::bytes::{Bytes, Key};
pub use crate::api::cidr::Cidr;
pub use crate::sys::nftables::{ChainType, Family, Hook, Verdict};

/// A name of a chain or set; shared, since thousands of elements may lead to one chain.
pub type Name = Arc<str>;

/// All that a table is to be. Two equal ones do the same to every packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub family: Family,
    pub name: Name,
    pub sets: BTreeMap<Name, SetSpec>,
    pub chains: BTreeMap<Name, Chain>,
    /// By set; a set without an entry is empty. Never of dynamic sets: their elements are made
    /// by rules and belong to the kernel.
    pub elements: BTreeMap<Name, Elements>,
}

/// The elements of one set.
pub type Elements = BTreeMap<Key, Element>;

/// A set, map or verdict map. What differs makes another set: it is made anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSpec {
    /// More than one: a concatenation. At most 16 words of 4 bytes.
    pub key: Vec<Type>,
    pub data: DataSpec,
    /// Keys are ranges ([`Key::range`]), of each field from the start's to the end's value, both
    /// inclusive. Ranges in a set must not overlap: see [`super::ranges`].
    pub interval: bool,
    /// Rules put elements in, which go after this time: sets for [`Step::Update`].
    pub dynamic: Option<Dynamic>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dynamic {
    pub timeout: std::time::Duration,
    /// No more elements than this; an update beyond it ends the rule.
    pub size: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataSpec {
    /// A set.
    None,
    /// A map; for [`Step::DnatMap`] `[Address, Port]`.
    Fields(Vec<Type>),
    /// A verdict map.
    Verdict,
}

/// Type of a field of keys and data; each takes a multiple of 4 bytes in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Type {
    /// Of the table's family: 4 or 16 bytes.
    Address,
    /// inet_proto: one byte and padding.
    Protocol,
    /// inet_service: two bytes and padding.
    Port,
    /// Of [`Field::Random`]: a number of 32 bits. nft calls it a mark.
    Index,
}

/// One value of a key or of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    Address(IpAddr),
    /// IPPROTO_*.
    Protocol(u8),
    Port(u16),
    Index(u32),
}

/// What an element holds beside its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    pub data: Data,
    /// What nft prints behind it, e.g. `shop/web:http`. Says nothing to the kernel; bytes that nft
    /// cannot print are left out, and it is cut off at 120. Two elements that differ in it only
    /// are not written anew.
    pub comment: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    None,
    /// The values side by side, as [`Bytes::of`] makes them.
    Fields(Bytes),
    Verdict(Verdict),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// None: reached by jump and goto only.
    pub base: Option<Base>,
    pub rules: Vec<Rule>,
}

/// Where the kernel enters a chain. A packet that runs off its end is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    pub kind: ChainType,
    pub hook: Hook,
    /// nft's names: raw -300, mangle -150, dstnat -100, filter 0, security 50, srcnat 100.
    pub priority: i32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// In order; a match that fails ends the rule.
    pub steps: Vec<Step>,
    /// What it is for. `encode` adds the chain's fingerprint.
    pub comment: String,
}

/// What a key is made of at a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// `ip saddr`.
    Source,
    /// `ip daddr`.
    Destination,
    /// `meta l4proto`.
    Protocol,
    /// `th sport`.
    SourcePort,
    /// `th dport`.
    DestinationPort,
    /// `ct original ip daddr`: the destination before translation.
    OriginalDestination,
    /// `numgen random mod N offset M`: one of M to M + N - 1, each as likely. Not zero. nft 1.0.6
    /// prints it in a concatenation as the last field only.
    Random { modulus: u32, offset: u32 },
}

/// One part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    // Matches: the rule goes on where they hold. `not`: where they do not.
    /// `fib daddr type local`: the destination is an address of this host.
    DestinationIsLocal { not: bool },
    /// `fib saddr type local`.
    SourceIsLocal { not: bool },
    /// `ip saddr <cidr>`.
    SourceIn { cidr: Cidr, not: bool },
    /// `ip daddr <cidr>`.
    DestinationIn { cidr: Cidr, not: bool },
    /// `iifname <name>`; never matches in output chains, where there is none.
    InInterface { name: Name, not: bool },
    /// `oifname <name>`; known from forward, output and postrouting on.
    OutInterface { name: Name, not: bool },
    /// `meta l4proto <number>`.
    Protocol { number: u8, not: bool },
    /// `th dport <first>-<last>`; of a protocol that has ports: match that first.
    DestinationPorts { first: u16, last: u16, not: bool },
    /// `tcp flags & (fin|syn|rst|ack) == syn`: the packet opens a connection; of TCP only: match that first.
    TcpOpens { not: bool },
    /// `<fields> @set`.
    InSet { key: Vec<Field>, set: Name, not: bool },
    /// `ct state <states>`: any of them.
    CtState { states: CtStates, not: bool },
    /// `ct status dnat`: the flow's destination was translated, here or elsewhere.
    CtStatusDnat { not: bool },
    /// `meta mark & <bits> == <bits>`, with `not` `!=`.
    MarkHas { bits: u32, not: bool },

    // Changes: the rule goes on.
    /// `meta mark set mark or <bits>`.
    MarkOr { bits: u32 },
    /// `meta mark set mark xor <bits>`: clears them where MarkHas held.
    MarkXor { bits: u32 },
    /// `update @set { <fields> }`: puts the key into a dynamic set, or begins its time anew.
    Update { key: Vec<Field>, set: Name },
    /// `delete @set { <fields> }`.
    Delete { key: Vec<Field>, set: Name },

    // Verdicts: where they are given, the rule's last step.
    /// accept ends this base chain only, others at the same hook still run; drop ends all.
    Verdict(Verdict),
    /// `<fields> vmap @map`: the element's verdict; without an element the next rule follows.
    VerdictMap { key: Vec<Field>, map: Name },
    /// `dnat to <address>:<port>`. In nat chains at prerouting and output.
    Dnat { address: IpAddr, port: u16 },
    /// `dnat ip to <fields> map @map`; without an element the next rule follows.
    DnatMap { key: Vec<Field>, map: Name },
    /// `masquerade [fully-random]`. In nat chains at postrouting.
    Masquerade { fully_random: bool },
    /// In filter chains at input, forward and output.
    Reject(Reject),
}

/// Of `ct state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtStates {
    pub new: bool,
    pub established: bool,
    pub related: bool,
    pub invalid: bool,
    pub untracked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reject {
    /// `reject with tcp reset`; where the packet is TCP: match that first.
    TcpReset,
    /// `reject`: ICMP or ICMPv6 port unreachable.
    PortUnreachable,
    /// `reject with icmp admin-prohibited`, as the family has it.
    AdminProhibited,
}

impl Table {
    pub fn new(family: Family, name: &str) -> Table {
        let (sets, chains, elements) = Default::default();
        Table { family, name: name.into(), sets, chains, elements }
    }
    /// Words of 4 bytes that a field of the type takes.
    pub fn words(&self, field: Type) -> usize {
        field.words(self.family)
    }
}

impl Type {
    pub fn words(self, family: Family) -> usize {
        match (self, family) {
            (Type::Address, Family::Ip6) => 4,
            (Type::Address, Family::Ip) | (Type::Protocol | Type::Port | Type::Index, _) => 1,
        }
    }
}

impl Field {
    pub fn kind(self) -> Type {
        match self {
            Field::Source | Field::Destination | Field::OriginalDestination => Type::Address,
            Field::Protocol => Type::Protocol,
            Field::SourcePort | Field::DestinationPort => Type::Port,
            Field::Random { .. } => Type::Index,
        }
    }
}

impl SetSpec {
    /// Single keys, no data.
    pub fn set(key: &[Type]) -> SetSpec {
        SetSpec { key: key.to_vec(), data: DataSpec::None, interval: false, dynamic: None }
    }
    pub fn map(key: &[Type], data: &[Type]) -> SetSpec {
        SetSpec { data: DataSpec::Fields(data.to_vec()), ..SetSpec::set(key) }
    }
    pub fn verdict_map(key: &[Type]) -> SetSpec {
        SetSpec { data: DataSpec::Verdict, ..SetSpec::set(key) }
    }
    pub fn of_ranges(self) -> SetSpec {
        SetSpec { interval: true, ..self }
    }
    pub fn of_rules(self, dynamic: Dynamic) -> SetSpec {
        SetSpec { dynamic: Some(dynamic), ..self }
    }
}

impl CtStates {
    /// `established,related`: flows that were let through when they began.
    pub const KNOWN: CtStates = CtStates { established: true, related: true, ..CtStates::NONE };
    pub const NEW: CtStates = CtStates { new: true, ..CtStates::NONE };
    /// What connection tracking does not look at: neighbour discovery among it.
    pub const UNTRACKED: CtStates = CtStates { untracked: true, ..CtStates::NONE };
    pub const INVALID: CtStates = CtStates { invalid: true, ..CtStates::NONE };
    const NONE: CtStates = CtStates { new: false, established: false, related: false, invalid: false, untracked: false };
}

impl Rule {
    pub fn new(comment: &str, steps: Vec<Step>) -> Rule {
        Rule { steps, comment: comment.to_owned() }
    }
    /// Chains that its own verdicts name, in their order; those of a map are the map's.
    pub fn leads_to(&self) -> impl Iterator<Item = &str> {
        self.steps.iter().filter_map(|step| match step {
            Step::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(&**chain),
            _ => None,
        })
    }
}

impl Element {
    /// Of a set.
    pub fn bare() -> Element {
        Element { data: Data::None, comment: None }
    }
    /// Of a map.
    pub fn values(data: &[Value]) -> Element {
        Element { data: Data::Fields(Bytes::of(data)), comment: None }
    }
    /// Of a verdict map.
    pub fn verdict(verdict: Verdict) -> Element {
        Element { data: Data::Verdict(verdict), comment: None }
    }
    pub fn with(self, comment: &Arc<str>) -> Element {
        Element { comment: Some(Arc::clone(comment)), ..self }
    }
}
