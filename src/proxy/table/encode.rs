//! The table as messages: one encoding a step, and what is written with each rule to know it again.
//!
//! Pure. Invariant: what is written is what nft itself would write, so that it prints it; each
//! rule's comment ends with a fingerprint of its whole chain, so that a chain which is not ours in
//! every byte is seen by its comments alone.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use super::acts::Act;
use super::ir::{Base, Chain, CtStates, DataSpec, Element, Family, Field, Key, Reject, Rule, SetSpec, Step, Type};
use super::ir::{Cidr, Data};
use crate::sys::nftables::expr::{self, Compare, Ct, Dynset, Expr, Meta, Register, RejectWith, Side};
use crate::sys::nftables::{self, Batch, Content, Set, SetData, comment_text};

/// RTN_LOCAL.
const LOCAL: u32 = 2;
/// IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const CT_DST_NAT: u32 = 1 << 5;
/// TCP's flags fin, syn, rst and ack (RFC 9293); a connection begins with syn alone.
const TCP_STATE: u8 = 0x17;
const TCP_SYN: u8 = 0x02;
/// A rule's words without their fingerprint.
const COMMENT_MAX: usize = 100;

/// A transaction, and for each of its messages what it does.
#[derive(Clone, Debug)]
pub struct Encoded {
    pub batch: Batch,
    pub origins: Vec<Origin>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Index into the changes.
    pub change: usize,
    /// The first element or rule in the message, and how many of them.
    pub from: usize,
    pub count: usize,
}

/// All changes as one transaction.
pub fn encode(family: Family, table: &str, changes: &[Act]) -> Encoded {
    let mut into = Encoded { batch: Batch::new(family, table), origins: Vec::new() };
    for (at, change) in changes.iter().enumerate() {
        into.change(family, at, change);
        into.origins.resize(into.batch.len(), Origin { change: at, from: 0, count: 0 });
    }
    into
}

impl Encoded {
    fn change(&mut self, family: Family, at: usize, change: &Act) {
        let batch = &mut self.batch;
        match change {
            Act::AddTable => batch.add_table(),
            Act::FlushChain(name) => batch.flush_chain(name),
            Act::DeleteChain(name) => batch.delete_chain(name),
            Act::AddChain(name, base) => add_chain(batch, name, *base),
            Act::DeleteSet(name) => batch.delete_set(name),
            Act::AddSet(name, spec) => batch.add_set(&set(family, name, spec)),
            Act::AddRules(name, chain) => {
                let print = fingerprint(family, chain);
                for (from, rule) in chain.rules.iter().enumerate() {
                    batch.add_rule(name, &rule_exprs(family, rule), &comment(rule, &print));
                    self.origins.push(Origin { change: at, from, count: 1 });
                }
            }
            Act::DeleteElements { set, spec, keys } => {
                let list: Vec<_> = keys.iter().map(|key| (*key, None)).collect();
                self.elements(at, false, set, spec, family, &list);
            }
            Act::AddElements { set, spec, elements } => {
                let list: Vec<_> = elements.iter().map(|(key, element)| (*key, Some(*element))).collect();
                self.elements(at, true, set, spec, family, &list);
            }
        }
    }

    fn elements(
        &mut self,
        change: usize,
        add: bool,
        set: &str,
        spec: &SetSpec,
        family: Family,
        list: &[(&Key, Option<&Element>)],
    ) {
        let single = single_range(spec);
        let ends = if single { range_ends(spec, family, list) } else { Vec::new() };
        let mut written = list.iter().enumerate().flat_map(|(at, (key, element))| {
            let start = one(spec, family, key, *element);
            let end = ends.get(at).and_then(Option::as_deref).map(|key| nftables::Element {
                key,
                key_end: None,
                is_end: true,
                content: Content::None,
                comment: "",
            });
            std::iter::once((at, start)).chain(end.map(|end| (at, end)))
        });
        let mut rest = written.by_ref().peekable();
        while let Some((from, _)) = rest.peek().map(|(at, _)| (*at, ())) {
            let mut last = from;
            let mut some = rest.by_ref().map(|(at, element)| {
                last = at;
                element
            });
            match add {
                true => self.batch.add_elements(set, &mut some, usize::MAX),
                false => self.batch.delete_elements(set, &mut some, usize::MAX),
            };
            self.origins.push(Origin { change, from, count: last - from + 1 });
        }
    }
}

fn add_chain(batch: &mut Batch, name: &str, base: Option<Base>) {
    match base {
        Some(base) => batch.add_base_chain(name, base.kind, base.hook, base.priority),
        None => batch.add_chain(name),
    }
}

/// A rule's comment as it is in the kernel.
pub fn comment(rule: &Rule, fingerprint: &str) -> String {
    let words: String = comment_text(&rule.comment).chars().take(COMMENT_MAX).collect();
    format!("{words} [{fingerprint}]")
}

/// Of all that a chain is.
pub fn fingerprint(family: Family, chain: &Chain) -> String {
    let mut batch = Batch::new(family, "");
    add_chain(&mut batch, "", chain.base);
    for rule in &chain.rules {
        batch.add_rule("", &rule_exprs(family, rule), &rule.comment);
    }
    let digest = ring::digest::digest(&ring::digest::SHA256, batch.bytes());
    digest.as_ref().iter().take(4).map(|b| format!("{b:02x}")).collect()
}

// ---- sets and elements ---------------------------------------------------------------------

fn field(family: Family, field: Type) -> nftables::Field {
    match (field, family) {
        (Type::Address, Family::Ip) => nftables::Field::Ipv4,
        (Type::Address, Family::Ip6) => nftables::Field::Ipv6,
        (Type::Protocol, _) => nftables::Field::Protocol,
        (Type::Port, _) => nftables::Field::Port,
        (Type::Index, _) => nftables::Field::Integer,
    }
}

/// A set as the kernel is asked for it.
pub fn set<'a>(family: Family, name: &'a str, spec: &SetSpec) -> Set<'a> {
    let fields = |types: &[Type]| types.iter().map(|t| field(family, *t)).collect();
    let data = match &spec.data {
        DataSpec::None => SetData::None,
        DataSpec::Fields(types) => SetData::Fields(fields(types)),
        DataSpec::Verdict => SetData::Verdict,
    };
    let dynamic = spec.dynamic.map(|d| (d.timeout, d.size));
    Set { name, key: fields(&spec.key), data, interval: spec.interval, dynamic }
}

/// The kernel takes ranges of a single field as a first value and the first beyond it.
pub fn single_range(spec: &SetSpec) -> bool {
    spec.interval && spec.key.len() == 1
}

/// Single values are as long as they are, not padded.
pub fn length(types: &[Type], family: Family) -> Option<usize> {
    match types {
        [one] => Some(field(family, *one).length() as usize),
        _ => None,
    }
}

fn cut<'a>(bytes: &'a [u8], types: &[Type], family: Family) -> &'a [u8] {
    length(types, family).and_then(|length| bytes.get(..length)).unwrap_or(bytes)
}

fn one<'a>(spec: &SetSpec, family: Family, key: &'a Key, element: Option<&'a Element>) -> nftables::Element<'a> {
    let content = match (element.map(|e| &e.data), &spec.data) {
        (Some(Data::Fields(bytes)), DataSpec::Fields(types)) => Content::Data(cut(bytes.as_slice(), types, family)),
        (Some(Data::Fields(bytes)), DataSpec::None | DataSpec::Verdict) => Content::Data(bytes.as_slice()),
        (Some(Data::Verdict(verdict)), _) => Content::Verdict(verdict),
        (Some(Data::None) | None, _) => Content::None,
    };
    let end = key.end.as_deref().filter(|_| !single_range(spec));
    nftables::Element {
        key: cut(key.start.as_slice(), &spec.key, family),
        key_end: end.map(|end| end.as_slice()),
        is_end: false,
        content,
        comment: element.and_then(|e| e.comment.as_deref()).unwrap_or(""),
    }
}

/// For each range the first key beyond it; None where it ends with the last key of all.
fn range_ends(spec: &SetSpec, family: Family, list: &[(&Key, Option<&Element>)]) -> Vec<Option<Vec<u8>>> {
    let beyond = |key: &Key| {
        let last = key.end.as_deref().unwrap_or(&key.start);
        let mut bytes = cut(last.as_slice(), &spec.key, family).to_vec();
        for byte in bytes.iter_mut().rev() {
            let (more, carry) = byte.overflowing_add(1);
            *byte = more;
            if !carry {
                return Some(bytes);
            }
        }
        None
    };
    list.iter().map(|(key, _)| beyond(key)).collect()
}

// ---- rules ---------------------------------------------------------------------------------

fn rule_exprs(family: Family, rule: &Rule) -> Vec<Expr> {
    let mut exprs = Vec::new();
    for step in &rule.steps {
        step_exprs(family, step, &mut exprs);
    }
    exprs
}

/// Where the addresses are in the packet.
fn address_offset(family: Family, side: Side) -> u32 {
    match (family, side) {
        (Family::Ip, Side::Source) => 12,
        (Family::Ip, Side::Destination) => 16,
        (Family::Ip6, Side::Source) => 8,
        (Family::Ip6, Side::Destination) => 24,
    }
}

fn address_length(family: Family) -> u32 {
    match family {
        Family::Ip => 4,
        Family::Ip6 => 16,
    }
}

fn equality(not: bool) -> Compare {
    if not { Compare::NotEqual } else { Compare::Equal }
}

fn load(family: Family, key: &[Field], into: &mut Vec<Expr>) {
    let mut words = 0;
    for field in key {
        let to = Register::after(words);
        let address = |side| expr::payload(expr::Base::Network, address_offset(family, side), address_length(family), to);
        into.push(match field {
            Field::Source => address(Side::Source),
            Field::Destination => address(Side::Destination),
            Field::Protocol => expr::meta(Meta::L4Protocol, to),
            Field::SourcePort => expr::payload(expr::Base::Transport, 0, 2, to),
            Field::DestinationPort => expr::payload(expr::Base::Transport, 2, 2, to),
            Field::OriginalDestination => expr::ct_original_destination(family.number(), to),
            Field::Random { modulus, offset } => expr::random(*modulus, *offset, to),
        });
        words += field.kind().words(family) as u32;
    }
}

fn step_exprs(family: Family, step: &Step, into: &mut Vec<Expr>) {
    let first = Register::FIRST;
    match step {
        Step::DestinationIsLocal { not } => local(Side::Destination, *not, into),
        Step::SourceIsLocal { not } => local(Side::Source, *not, into),
        Step::SourceIn { cidr, not } => in_range(family, Side::Source, cidr, *not, into),
        Step::DestinationIn { cidr, not } => in_range(family, Side::Destination, cidr, *not, into),
        Step::InInterface { name, not } => interface(Meta::InInterface, name, *not, into),
        Step::OutInterface { name, not } => interface(Meta::OutInterface, name, *not, into),
        Step::Protocol { number, not } => {
            into.extend([expr::meta(Meta::L4Protocol, first), expr::compare(first, equality(*not), &[*number])]);
        }
        Step::DestinationPorts { first: low, last: high, not } => {
            into.push(expr::payload(expr::Base::Transport, 2, 2, first));
            let (low, high) = (low.to_be_bytes(), high.to_be_bytes());
            match (low == high, not) {
                (true, _) => into.push(expr::compare(first, equality(*not), &low)),
                (false, true) => into.push(expr::outside(first, &low, &high)),
                (false, false) => {
                    into.extend([expr::compare(first, Compare::AtLeast, &low), expr::compare(first, Compare::AtMost, &high)])
                }
            }
        }
        Step::TcpOpens { not } => {
            into.extend([expr::payload(expr::Base::Transport, 13, 1, first), expr::bits(first, &[TCP_STATE], &[0])]);
            into.push(expr::compare(first, equality(*not), &[TCP_SYN]));
        }
        Step::InSet { key, set, not } => {
            load(family, key, into);
            into.push(expr::in_set(set, *not));
        }
        Step::CtState { states, not } => any_bit(Ct::State, state_bits(*states), *not, into),
        Step::CtStatusDnat { not } => any_bit(Ct::Status, CT_DST_NAT, *not, into),
        Step::MarkHas { bits, not } => {
            let bytes = bits.to_ne_bytes();
            into.extend([expr::meta(Meta::Mark, first), expr::bits(first, &bytes, &[0; 4])]);
            into.push(expr::compare(first, equality(*not), &bytes));
        }
        Step::MarkOr { bits } => mark(!bits, *bits, into),
        Step::MarkXor { bits } => mark(u32::MAX, *bits, into),
        Step::Update { key, set } => {
            load(family, key, into);
            into.push(expr::dynset(set, Dynset::Update));
        }
        Step::Delete { key, set } => {
            load(family, key, into);
            into.push(expr::dynset(set, Dynset::Delete));
        }
        Step::Verdict(verdict) => into.push(expr::verdict(verdict)),
        Step::VerdictMap { key, map } => {
            load(family, key, into);
            into.push(expr::verdict_map(map));
        }
        Step::Dnat { address, port } => {
            let bytes = match address {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            into.extend(expr::dnat_to(family.number(), &bytes, *port));
        }
        Step::DnatMap { key, map } => {
            load(family, key, into);
            into.push(expr::map(map));
            into.push(expr::dnat(family.number(), Register::after(Type::Address.words(family) as u32)));
        }
        Step::Masquerade { fully_random } => into.push(expr::masquerade(*fully_random)),
        Step::Reject(with) => into.push(expr::reject(reject_with(family, *with))),
    }
}

fn reject_with(family: Family, with: Reject) -> RejectWith {
    // ICMP_PORT_UNREACH, ICMP_PKT_FILTERED; ICMPV6_PORT_UNREACH, ICMPV6_ADM_PROHIBITED.
    match (with, family) {
        (Reject::TcpReset, _) => RejectWith::TcpReset,
        (Reject::PortUnreachable, Family::Ip) => RejectWith::Icmp(3),
        (Reject::PortUnreachable, Family::Ip6) => RejectWith::Icmp(4),
        (Reject::AdminProhibited, Family::Ip) => RejectWith::Icmp(13),
        (Reject::AdminProhibited, Family::Ip6) => RejectWith::Icmp(1),
    }
}

/// NF_CT_STATE_BIT.
fn state_bits(states: CtStates) -> u32 {
    let bit = |on: bool, bit: u32| if on { bit } else { 0 };
    bit(states.invalid, 1) | bit(states.established, 2) | bit(states.related, 4) | bit(states.new, 8) | bit(states.untracked, 64)
}

fn any_bit(key: Ct, bits: u32, not: bool, into: &mut Vec<Expr>) {
    let first = Register::FIRST;
    into.extend([expr::ct(key, first), expr::bits(first, &bits.to_ne_bytes(), &[0; 4])]);
    into.push(expr::compare(first, equality(!not), &[0; 4]));
}

fn mark(keep: u32, flip: u32, into: &mut Vec<Expr>) {
    let first = Register::FIRST;
    into.push(expr::meta(Meta::Mark, first));
    into.push(expr::bits(first, &keep.to_ne_bytes(), &flip.to_ne_bytes()));
    into.push(expr::set_mark());
}

fn local(side: Side, not: bool, into: &mut Vec<Expr>) {
    let first = Register::FIRST;
    into.extend([expr::fib_type(side, first), expr::compare(first, equality(not), &LOCAL.to_ne_bytes())]);
}

fn interface(key: Meta, name: &str, not: bool, into: &mut Vec<Expr>) {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(16, 0);
    into.extend([expr::meta(key, Register::FIRST), expr::compare(Register::FIRST, equality(not), &bytes)]);
}

/// Compares an address of the packet with the range; loads no more than the prefix's bytes where
/// it ends at one, as nft does.
fn in_range(family: Family, side: Side, cidr: &Cidr, not: bool, into: &mut Vec<Expr>) {
    let first = Register::FIRST;
    let bytes = match cidr.address {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let whole = usize::from(cidr.prefix / 8);
    let load = |length: usize| expr::payload(expr::Base::Network, address_offset(family, side), length as u32, first);
    if cidr.prefix.is_multiple_of(8) && cidr.prefix > 0 {
        into.extend([load(whole), expr::compare(first, equality(not), bytes.get(..whole).unwrap_or(&bytes))]);
        return;
    }
    let mut mask = vec![0xff; whole];
    mask.push(0xffu8.checked_shl(8 - u32::from(cidr.prefix % 8)).unwrap_or(0));
    mask.resize(bytes.len(), 0);
    into.extend([
        load(bytes.len()),
        expr::bits(first, &mask, &vec![0; bytes.len()]),
        expr::compare(first, equality(not), &bytes),
    ]);
}
