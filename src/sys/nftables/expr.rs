//! The expressions of nf_tables rules that we use, one function each.
//!
//! Invariant: shapes and registers are those that the nft program itself makes of the same rule
//! (`nft --debug=netlink`), so that it can always print ours. Single values go through register 1;
//! the fields of a concatenation stand side by side from register 8 on, in units of 4 bytes, and
//! register 1 is another name of 8 to 11. Source: linux/netfilter/nf_tables.h.

use super::Verdict;
use crate::sys::netlink::Attrs;

const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFT_REG_VERDICT: u32 = 0;
const NFT_REG_1: u32 = 1;
const NFT_REG_2: u32 = 2;
const NFT_REG32_00: u32 = 8;
const LOOKUP_INVERTED: u32 = 1;
/// NF_NAT_RANGE_PROTO_SPECIFIED, _PROTO_RANDOM_FULLY.
const NAT_PORT: u32 = 0x2;
const NAT_FULLY_RANDOM: u32 = 0x10;

/// One expression, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expr(pub(super) Attrs);

/// Where a field of a key stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(u32);

impl Register {
    /// The register of single values, and of the first field.
    pub const FIRST: Register = Register(NFT_REG_1);
    /// The second of single values.
    const SECOND: Register = Register(NFT_REG_2);
    /// `words` units of 4 bytes behind the first.
    pub const fn after(words: u32) -> Register {
        if words == 0 { Register::FIRST } else { Register(NFT_REG32_00 + words) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Network = 1,
    Transport = 2,
}

/// NFT_META_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meta {
    Mark = 3,
    InInterface = 6,
    OutInterface = 7,
    L4Protocol = 16,
}

/// NFT_CT_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ct {
    State = 0,
    Status = 2,
}

/// Which address of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// NFTA_FIB_F_SADDR.
    Source = 1,
    /// NFTA_FIB_F_DADDR.
    Destination = 2,
}

/// NFT_CMP_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    Equal = 0,
    NotEqual = 1,
    AtMost = 3,
    AtLeast = 5,
}

/// NFT_DYNSET_OP_*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dynset {
    Update = 1,
    Delete = 2,
}

/// How a packet is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectWith {
    TcpReset,
    /// ICMP destination unreachable or ICMPv6's, with that code.
    Icmp(u8),
}

fn expr(name: &str, data: Attrs) -> Expr {
    Expr(Attrs::new().text(NFTA_EXPR_NAME, name).nest(NFTA_EXPR_DATA, data))
}

fn value(bytes: &[u8]) -> Attrs {
    Attrs::new().bytes(NFTA_DATA_VALUE, bytes)
}

/// `payload load`: bytes of the packet.
pub fn payload(base: Base, offset: u32, length: u32, to: Register) -> Expr {
    expr("payload", Attrs::new().be32(1, to.0).be32(2, base as u32).be32(3, offset).be32(4, length))
}

/// `meta <key>`.
pub fn meta(key: Meta, to: Register) -> Expr {
    expr("meta", Attrs::new().be32(1, to.0).be32(2, key as u32))
}

/// `meta mark set` to what the first register holds.
pub fn set_mark() -> Expr {
    expr("meta", Attrs::new().be32(2, Meta::Mark as u32).be32(3, NFT_REG_1))
}

/// `ct <key>`.
pub fn ct(key: Ct, to: Register) -> Expr {
    expr("ct", Attrs::new().be32(1, to.0).be32(2, key as u32))
}

/// `ct original ip daddr`; `number` is the family's NFPROTO_*.
pub fn ct_original_destination(number: u8, to: Register) -> Expr {
    const DST_IP: u32 = 20;
    const DST_IP6: u32 = 22;
    let key = if number == 2 { DST_IP } else { DST_IP6 };
    expr("ct", Attrs::new().be32(1, to.0).be32(2, key).u8(3, 0))
}

/// `fib saddr type`, `fib daddr type`: what kind of address it is to this host.
pub fn fib_type(side: Side, to: Register) -> Expr {
    const ADDRESS_TYPE: u32 = 3;
    expr("fib", Attrs::new().be32(1, to.0).be32(2, ADDRESS_TYPE).be32(3, side as u32))
}

/// `numgen random mod <modulus> offset <offset>`.
pub fn random(modulus: u32, offset: u32, to: Register) -> Expr {
    const RANDOM: u32 = 1;
    expr("numgen", Attrs::new().be32(1, to.0).be32(2, modulus).be32(3, RANDOM).be32(4, offset))
}

pub fn compare(register: Register, how: Compare, bytes: &[u8]) -> Expr {
    expr("cmp", Attrs::new().be32(1, register.0).be32(2, how as u32).nest(3, value(bytes)))
}

/// Goes on where the value lies outside of the range.
pub fn outside(register: Register, first: &[u8], last: &[u8]) -> Expr {
    let attrs = Attrs::new().be32(1, register.0).be32(2, Compare::NotEqual as u32);
    expr("range", attrs.nest(3, value(first)).nest(4, value(last)))
}

/// A register's bits: those of `mask` are kept, then those of `flip` flipped.
pub fn bits(register: Register, mask: &[u8], flip: &[u8]) -> Expr {
    let data = Attrs::new().be32(1, register.0).be32(2, register.0).be32(3, mask.len() as u32);
    expr("bitwise", data.nest(4, value(mask)).nest(5, value(flip)))
}

/// Goes on with the rule where the key from the first register on is in the set.
pub fn in_set(set: &str, not: bool) -> Expr {
    let attrs = Attrs::new().text(1, set).be32(2, NFT_REG_1);
    expr("lookup", attrs.when(not, |a| a.be32(5, LOOKUP_INVERTED)))
}

/// Replaces the key, from the first register on, by what the map holds for it; without such an
/// element the rule ends.
pub fn map(map: &str) -> Expr {
    expr("lookup", Attrs::new().text(1, map).be32(2, NFT_REG_1).be32(3, NFT_REG_1))
}

/// The verdict that the map holds for the key.
pub fn verdict_map(map: &str) -> Expr {
    expr("lookup", Attrs::new().text(1, map).be32(2, NFT_REG_1).be32(3, NFT_REG_VERDICT))
}

/// `update @set { … }`, `delete @set { … }`: the key from the first register on.
pub fn dynset(set: &str, how: Dynset) -> Expr {
    expr("dynset", Attrs::new().text(1, set).be32(3, how as u32).be32(4, NFT_REG_1))
}

/// `dnat to` the address in the first register and the port in `port`.
pub fn dnat(nfproto: u8, port: Register) -> Expr {
    expr("nat", Attrs::new().be32(1, 1).be32(2, u32::from(nfproto)).be32(3, NFT_REG_1).be32(5, port.0))
}

/// `dnat to <address>:<port>`.
pub fn dnat_to(nfproto: u8, address: &[u8], port: u16) -> [Expr; 3] {
    let attrs = Attrs::new().be32(1, 1).be32(2, u32::from(nfproto)).be32(3, NFT_REG_1).be32(5, NFT_REG_2);
    [immediate(Register::FIRST, address), immediate(Register::SECOND, &port.to_be_bytes()), expr("nat", attrs.be32(7, NAT_PORT))]
}

pub fn masquerade(fully_random: bool) -> Expr {
    expr("masq", Attrs::new().when(fully_random, |a| a.be32(1, NAT_FULLY_RANDOM)))
}

pub fn reject(with: RejectWith) -> Expr {
    let (kind, code) = match with {
        RejectWith::Icmp(code) => (0, code),
        RejectWith::TcpReset => (1, 0),
    };
    expr("reject", Attrs::new().be32(1, kind).u8(2, code))
}

fn immediate(to: Register, bytes: &[u8]) -> Expr {
    expr("immediate", Attrs::new().be32(1, to.0).nest(2, value(bytes)))
}

pub fn verdict(verdict: &Verdict) -> Expr {
    let attrs = Attrs::new().be32(NFTA_VERDICT_CODE, verdict.code() as u32);
    let attrs = match verdict.chain() {
        Some(chain) => attrs.text(NFTA_VERDICT_CHAIN, chain),
        None => attrs,
    };
    let data = Attrs::new().be32(1, NFT_REG_VERDICT).nest(2, Attrs::new().nest(NFTA_DATA_VERDICT, attrs));
    expr("immediate", data)
}
