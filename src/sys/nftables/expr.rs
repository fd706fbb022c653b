//! The expressions of nf_tables rules that we use, one function each.
//!
//! Invariant: shapes and registers are those that the nft program itself makes of the same rule
//! (`nft --debug=netlink`), so that it can always print ours. Single values go through register 1;
//! the fields of a concatenation stand side by side from register 8 on, in units of 4 bytes, and
//! register 1 is another name of 8 to 11. Source: linux/netfilter/nf_tables.h.

use crate::sys::netlink::Attrs;

const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFT_REG_1: u32 = 1;
const NFT_REG32_00: u32 = 8;
const NFT_JUMP: i32 = -3;
const NFT_RETURN: i32 = -5;

/// One expression, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expr(pub(super) Attrs);

/// Where a field of a key stands: `Field(0)` is the start of a concatenation, each further one
/// that many units of 4 bytes behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register(u32);

impl Register {
    /// The register of single values, and of the first field.
    pub const FIRST: Register = Register(NFT_REG_1);
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

/// `meta l4proto`.
pub fn l4_protocol(to: Register) -> Expr {
    expr("meta", Attrs::new().be32(1, to.0).be32(2, 16))
}

/// `meta oifname`.
pub fn out_interface(to: Register) -> Expr {
    expr("meta", Attrs::new().be32(1, to.0).be32(2, 7))
}

/// `ct status`.
pub fn ct_status(to: Register) -> Expr {
    expr("ct", Attrs::new().be32(1, to.0).be32(2, 2))
}

/// `fib daddr type`: what kind of address the destination is to this host.
pub fn fib_destination_type(to: Register) -> Expr {
    expr("fib", Attrs::new().be32(1, to.0).be32(2, 3).be32(3, 2))
}

pub fn equal(register: Register, bytes: &[u8]) -> Expr {
    expr("cmp", Attrs::new().be32(1, register.0).be32(2, 0).nest(3, value(bytes)))
}

pub fn not_equal(register: Register, bytes: &[u8]) -> Expr {
    expr("cmp", Attrs::new().be32(1, register.0).be32(2, 1).nest(3, value(bytes)))
}

/// Keeps the bits of `bits` in a register.
pub fn and(register: Register, bits: &[u8]) -> Expr {
    let data = Attrs::new().be32(1, register.0).be32(2, register.0).be32(3, bits.len() as u32);
    expr("bitwise", data.nest(4, value(bits)).nest(5, value(&vec![0; bits.len()])))
}

/// Goes on with the rule where the key from the first register on is in the set.
pub fn in_set(set: &str) -> Expr {
    expr("lookup", Attrs::new().text(1, set).be32(2, NFT_REG_1))
}

/// Replaces the key, from the first register on, by what the map holds for it; without such an
/// element the rule ends.
pub fn map(map: &str) -> Expr {
    expr("lookup", Attrs::new().text(1, map).be32(2, NFT_REG_1).be32(3, NFT_REG_1))
}

/// `dnat to` the address in the first register and the port in `port`.
pub fn dnat(nfproto: u8, port: Register) -> Expr {
    expr("nat", Attrs::new().be32(1, 1).be32(2, u32::from(nfproto)).be32(3, NFT_REG_1).be32(5, port.0))
}

pub fn masquerade() -> Expr {
    expr("masq", Attrs::new())
}

pub fn jump(chain: &str) -> Expr {
    verdict(Attrs::new().be32(NFTA_VERDICT_CODE, NFT_JUMP as u32).text(NFTA_VERDICT_CHAIN, chain))
}

pub fn return_() -> Expr {
    verdict(Attrs::new().be32(NFTA_VERDICT_CODE, NFT_RETURN as u32))
}

fn verdict(verdict: Attrs) -> Expr {
    expr("immediate", Attrs::new().be32(1, 0).nest(2, Attrs::new().nest(NFTA_DATA_VERDICT, verdict)))
}
