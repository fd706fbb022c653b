//! A packet's way through one table, as the kernel would take it.
//!
//! ```text
//! from an interface:  prerouting ── to this host ── input
//!                          └────── else ────────── forward ── postrouting
//! from this host:     output ────── else ────────── postrouting
//!                          └────── to this host ── postrouting ── prerouting ── input
//! ```
//!
//! At each hook the base chains run by priority; those of type nat see a flow's first packet only
//! and of a packet that comes round by loopback only once. Invariant: each step means here what
//! nft(8) says, and nothing is known here of what the table is for. Routes, addresses and chance
//! are the [`Scene`]'s. Other tables are not looked at: their drops end a packet that this one
//! lets pass. Source: net/netfilter/nf_tables_core.c, nf_nat_core.c.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::ir::{
    Chain, ChainType, CtStates, Data, Element, Field, Hook, Key, Name, Reject, Rule, Step, Table, Type, Value, Verdict,
};

/// Of the addresses and ports as they are on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// IPPROTO_*.
    pub protocol: u8,
    pub source_port: u16,
    pub destination_port: u16,
}

/// What the kernel knows of the packet and the host.
pub struct Scene<'a> {
    pub from: Origin,
    pub flow: Flow,
    pub is_local: &'a dyn Fn(IpAddr) -> bool,
    /// The interface by which packets to an address that is not this host's leave.
    pub route: &'a dyn Fn(IpAddr) -> Name,
    /// Of a modulus a number below it.
    pub random: &'a dyn Fn(u32) -> u32,
    /// Elements that rules have put into dynamic sets.
    pub remembered: &'a BTreeMap<Name, BTreeSet<Key>>,
    /// What `iifname` of a packet from this host is: kernels differ.
    pub nameless: Nameless,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Host,
    Interface(Name),
}

/// What connection tracking knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    New,
    /// With the destination that its first packet's was translated to.
    Established {
        to: Option<(IpAddr, u16)>,
    },
    Related,
    Invalid,
    Untracked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nameless {
    /// No match, nor a negated one.
    Fails,
    /// The empty name.
    Empty,
}

/// Where a packet went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The rules that did something, in order.
    pub hops: Vec<Hop>,
    /// As it came to its end, but for the source that masquerading gives it.
    pub packet: Packet,
    pub masqueraded: bool,
    pub end: End,
    /// What rules put into dynamic sets, and took out.
    pub remembers: Vec<(Name, Key)>,
    pub forgets: Vec<(Name, Key)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// To a socket of this host.
    Delivered,
    /// Out by this interface.
    Sent(Name),
    Dropped,
    Rejected(Reject),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    pub hook: Hook,
    pub chain: Name,
    /// Its place in the chain, from 0 on.
    pub rule: usize,
    pub comment: String,
    /// The set or map whose element decided, and that element's comment.
    pub element: Decided,
    pub did: Did,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Did {
    /// Marked, remembered.
    Went,
    Verdict(Verdict),
    Translated(IpAddr, u16),
    Masqueraded,
    Rejected(Reject),
}

/// A table that the kernel would not have taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    #[error("chain {chain} leads to chain {missing}, which is not there")]
    NoChain { chain: Name, missing: Name },
    #[error("chain {chain} looks into set {missing}, which is not there")]
    NoSet { chain: Name, missing: Name },
    #[error("chains lead in a circle by way of {chain}")]
    Circle { chain: Name },
    #[error("set {set} holds data that its rule in chain {chain} cannot use")]
    Data { chain: Name, set: Name },
}

/// More than any chain of ours is deep; the kernel takes 16 jumps.
const DEPTH: usize = 32;

pub fn trace(table: &Table, scene: &Scene, packet: Packet) -> Result<Trace, TraceError> {
    let mut walk = Walk {
        table,
        scene,
        original: packet,
        packet,
        mark: 0,
        comes_by: match &scene.from {
            Origin::Host => None,
            Origin::Interface(name) => Some(Name::clone(name)),
        },
        leaves_by: None,
        translated: false,
        destination_decided: scene.flow != Flow::New,
        source_decided: scene.flow != Flow::New,
        masqueraded: false,
        hops: Vec::new(),
        remembers: Vec::new(),
        forgets: Vec::new(),
    };
    let end = walk.route()?;
    let Walk { packet, masqueraded, hops, remembers, forgets, .. } = walk;
    Ok(Trace { hops, packet, masqueraded, end, remembers, forgets })
}

struct Walk<'a> {
    table: &'a Table,
    scene: &'a Scene<'a>,
    original: Packet,
    packet: Packet,
    mark: u32,
    comes_by: Option<Name>,
    leaves_by: Option<Name>,
    translated: bool,
    /// Connection tracking has its translation, or none: nat chains are not asked again.
    destination_decided: bool,
    source_decided: bool,
    masqueraded: bool,
    hops: Vec<Hop>,
    remembers: Vec<(Name, Key)>,
    forgets: Vec<(Name, Key)>,
}

/// The set and the comment of its element that decided.
pub type Decided = Option<(Name, Option<Arc<str>>)>;

/// How a chain ended.
enum Outcome {
    /// At its end, or by return.
    Ran,
    Accept,
    Ended(End),
}

impl<'a> Walk<'a> {
    fn route(&mut self) -> Result<End, TraceError> {
        let first = if self.comes_by.is_some() { Hook::Prerouting } else { Hook::Output };
        if first == Hook::Output {
            self.leaves_by = Some((self.scene.route)(self.packet.destination));
        }
        if let Some(end) = self.hook(first)? {
            return Ok(end);
        }
        let here = self.packet.destination.is_loopback() || (self.scene.is_local)(self.packet.destination);
        let by = if here { "lo".into() } else { (self.scene.route)(self.packet.destination) };
        let hooks: &[Hook] = match (first, here) {
            (Hook::Prerouting, true) => &[Hook::Input],
            (Hook::Prerouting, false) => &[Hook::Forward, Hook::Postrouting],
            (_, false) => &[Hook::Postrouting],
            (_, true) => &[Hook::Postrouting, Hook::Prerouting, Hook::Input],
        };
        for hook in hooks {
            self.leaves_by = matches!(hook, Hook::Forward | Hook::Postrouting).then(|| Name::clone(&by));
            if matches!(hook, Hook::Prerouting) {
                self.comes_by = Some(Name::clone(&by));
            }
            if let Some(end) = self.hook(*hook)? {
                return Ok(end);
            }
        }
        Ok(if here { End::Delivered } else { End::Sent(by) })
    }

    /// All base chains of a hook; what ends the packet there.
    fn hook(&mut self, hook: Hook) -> Result<Option<End>, TraceError> {
        const NAT: i32 = -100;
        let table = self.table;
        let mut chains: Vec<(i32, &Name, &Chain, ChainType)> = table
            .chains
            .iter()
            .filter_map(|(name, chain)| {
                let base = chain.base.filter(|base| base.hook == hook)?;
                Some((base.priority, name, chain, base.kind))
            })
            .collect();
        chains.sort_by_key(|(priority, name, ..)| (*priority, Name::clone(name)));
        let translating = matches!(hook, Hook::Prerouting | Hook::Output);
        let (early, late): (Vec<_>, Vec<_>) = chains.into_iter().partition(|(priority, ..)| *priority < NAT);
        for (chains, then_translate) in [(early, translating), (late, false)] {
            for (_, name, chain, kind) in chains {
                let decided = if translating { self.destination_decided } else { self.source_decided };
                if kind == ChainType::Nat && decided {
                    continue;
                }
                if let Outcome::Ended(end) = self.chain(hook, name, chain, 0)? {
                    return Ok(Some(end));
                }
            }
            if let (true, Flow::Established { to: Some((ip, port)) }) = (then_translate, self.scene.flow) {
                self.translate(ip, port);
            }
        }
        match translating {
            true => self.destination_decided = true,
            false if hook == Hook::Postrouting => self.source_decided = true,
            false => {}
        }
        Ok(None)
    }

    fn translate(&mut self, ip: IpAddr, port: u16) {
        self.packet.destination = ip;
        self.packet.destination_port = port;
        self.translated = true;
        self.destination_decided = true;
    }

    fn chain(&mut self, hook: Hook, name: &Name, chain: &Chain, depth: usize) -> Result<Outcome, TraceError> {
        if depth > DEPTH {
            return Err(TraceError::Circle { chain: Name::clone(name) });
        }
        for (at, rule) in chain.rules.iter().enumerate() {
            let Some((did, element)) = self.rule(name, rule)? else { continue };
            let comment = rule.comment.clone();
            self.hops.push(Hop { hook, chain: Name::clone(name), rule: at, comment, element, did: did.clone() });
            match did {
                Did::Went => {}
                Did::Verdict(Verdict::Accept) | Did::Translated(..) | Did::Masqueraded => return Ok(Outcome::Accept),
                Did::Verdict(Verdict::Drop) => return Ok(Outcome::Ended(End::Dropped)),
                Did::Verdict(Verdict::Return) => return Ok(Outcome::Ran),
                Did::Rejected(how) => return Ok(Outcome::Ended(End::Rejected(how))),
                Did::Verdict(Verdict::Jump(to)) => match self.chain(hook, &to, self.named(name, &to)?, depth + 1)? {
                    Outcome::Ran => {}
                    other => return Ok(other),
                },
                Did::Verdict(Verdict::Goto(to)) => return self.chain(hook, &to, self.named(name, &to)?, depth + 1),
            }
        }
        Ok(Outcome::Ran)
    }

    fn named(&self, from: &Name, to: &Name) -> Result<&'a Chain, TraceError> {
        let missing = || TraceError::NoChain { chain: Name::clone(from), missing: Name::clone(to) };
        self.table.chains.get(to).ok_or_else(missing)
    }

    /// What the rule does, and the element that says so; None where it does nothing.
    fn rule(&mut self, chain: &Name, rule: &Rule) -> Result<Option<(Did, Decided)>, TraceError> {
        let mut element: Decided = None;
        let mut went = false;
        for step in &rule.steps {
            let holds = match step {
                Step::DestinationIsLocal { not } => self.local(self.packet.destination) != *not,
                Step::SourceIsLocal { not } => self.local(self.packet.source) != *not,
                Step::SourceIn { cidr, not } => cidr.contains(self.packet.source) != *not,
                Step::DestinationIn { cidr, not } => cidr.contains(self.packet.destination) != *not,
                Step::InInterface { name, not } => self.named_so(&self.comes_by, name, *not),
                Step::OutInterface { name, not } => self.named_so(&self.leaves_by, name, *not),
                Step::Protocol { number, not } => (self.packet.protocol == *number) != *not,
                Step::DestinationPorts { first, last, not } => (*first..=*last).contains(&self.packet.destination_port) != *not,
                // A flow that is new begins as flows begin.
                Step::TcpOpens { not } => (self.scene.flow == Flow::New) != *not,
                Step::InSet { key, set, not } => {
                    let found = self.look_up(chain, set, &self.key(key))?;
                    let holds = found.is_some() != *not;
                    if let (true, Some(found)) = (holds, found) {
                        element = Some((Name::clone(set), found.comment.clone()));
                    }
                    holds
                }
                Step::CtState { states, not } => self.state_in(*states) != *not,
                Step::CtStatusDnat { not } => self.translated != *not,
                Step::MarkHas { bits, not } => (self.mark & bits == *bits) != *not,
                Step::MarkOr { bits } => {
                    self.mark |= bits;
                    went = true;
                    true
                }
                Step::MarkXor { bits } => {
                    self.mark ^= bits;
                    went = true;
                    true
                }
                Step::Update { key, set } => {
                    self.remembers.push((Name::clone(set), Key::of(&self.key(key))));
                    went = true;
                    true
                }
                Step::Delete { key, set } => {
                    self.forgets.push((Name::clone(set), Key::of(&self.key(key))));
                    went = true;
                    true
                }
                Step::Verdict(verdict) => return Ok(Some((Did::Verdict(verdict.clone()), element))),
                Step::VerdictMap { key, map } => match self.look_up(chain, map, &self.key(key))? {
                    None => false,
                    Some(found) => {
                        let Data::Verdict(verdict) = &found.data else {
                            return Err(TraceError::Data { chain: Name::clone(chain), set: Name::clone(map) });
                        };
                        let decided = Some((Name::clone(map), found.comment.clone()));
                        return Ok(Some((Did::Verdict(verdict.clone()), decided)));
                    }
                },
                Step::Dnat { address, port } => {
                    self.translate(*address, *port);
                    return Ok(Some((Did::Translated(*address, *port), element)));
                }
                Step::DnatMap { key, map } => match self.look_up(chain, map, &self.key(key))? {
                    None => false,
                    Some(found) => {
                        let (ip, port) = self
                            .endpoint(&found)
                            .ok_or_else(|| TraceError::Data { chain: Name::clone(chain), set: Name::clone(map) })?;
                        self.translate(ip, port);
                        let decided = Some((Name::clone(map), found.comment.clone()));
                        return Ok(Some((Did::Translated(ip, port), decided)));
                    }
                },
                Step::Masquerade { .. } => {
                    self.masqueraded = true;
                    self.source_decided = true;
                    return Ok(Some((Did::Masqueraded, element)));
                }
                Step::Reject(how) => return Ok(Some((Did::Rejected(*how), element))),
            };
            if !holds {
                // What came before the failing match has been done all the same.
                return Ok(went.then_some((Did::Went, element)));
            }
        }
        Ok(went.then_some((Did::Went, element)))
    }

    fn local(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || (self.scene.is_local)(ip)
    }

    fn named_so(&self, interface: &Option<Name>, name: &Name, not: bool) -> bool {
        match (interface, self.scene.nameless) {
            (Some(interface), _) => (interface == name) != not,
            (None, Nameless::Fails) => false,
            (None, Nameless::Empty) => not,
        }
    }

    fn state_in(&self, states: CtStates) -> bool {
        match self.scene.flow {
            Flow::New => states.new,
            Flow::Established { .. } => states.established,
            Flow::Related => states.related,
            Flow::Invalid => states.invalid,
            Flow::Untracked => states.untracked,
        }
    }

    fn key(&self, fields: &[Field]) -> Vec<Value> {
        let value = |field: &Field| match field {
            Field::Source => Value::Address(self.packet.source),
            Field::Destination => Value::Address(self.packet.destination),
            Field::Protocol => Value::Protocol(self.packet.protocol),
            Field::SourcePort => Value::Port(self.packet.source_port),
            Field::DestinationPort => Value::Port(self.packet.destination_port),
            Field::OriginalDestination => Value::Address(self.original.destination),
            Field::Random { modulus, offset } => {
                Value::Index((self.scene.random)(*modulus).checked_rem(*modulus).unwrap_or(0).saturating_add(*offset))
            }
        };
        fields.iter().map(value).collect()
    }

    fn look_up(&self, chain: &Name, set: &Name, values: &[Value]) -> Result<Option<Element>, TraceError> {
        let missing = || TraceError::NoSet { chain: Name::clone(chain), missing: Name::clone(set) };
        let spec = self.table.sets.get(set).ok_or_else(missing)?;
        let key = Key::of(values);
        if spec.dynamic.is_some() {
            let known = self.scene.remembered.get(set).is_some_and(|keys| keys.contains(&key));
            return Ok(known.then(Element::bare));
        }
        let Some(elements) = self.table.elements.get(set) else { return Ok(None) };
        if !spec.interval {
            return Ok(elements.get(&key).cloned());
        }
        let within = |range: &&Key| {
            let end = range.end.as_deref().unwrap_or(&range.start);
            let mut at = 0;
            spec.key.iter().all(|field| {
                let part =
                    |bytes: &super::ir::Bytes| bytes.as_slice().get(at..at + 4 * self.table.words(*field)).map(<[u8]>::to_vec);
                let (low, this, high) = (part(&range.start), part(&key.start), part(end));
                at += 4 * self.table.words(*field);
                low <= this && this <= high
            })
        };
        // Found by looking at each: a trace is one packet's, and ranges may lie anyhow.
        Ok(elements.iter().find(|(range, _)| within(range)).map(|(_, element)| element.clone()))
    }

    fn endpoint(&self, element: &Element) -> Option<(IpAddr, u16)> {
        let Data::Fields(bytes) = &element.data else { return None };
        match bytes.values(&[Type::Address, Type::Port], self.table.family)?.as_slice() {
            [Value::Address(ip), Value::Port(port)] => Some((*ip, *port)),
            _ => None,
        }
    }
}
