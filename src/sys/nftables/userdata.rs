//! What nft keeps with sets, rules and elements for its own eyes: comments, and the expressions
//! that name a set's types where an id does not (`typeof`).
//!
//! Bytes type, length, value, one behind the other (libnftnl's udata.h); numbers are in the
//! machine's order. The ids of expressions and headers are nft's own and stay what they are:
//! sets outlive the program that made them. Checked by printing with nft 1.0.6 and 1.1.3.

use super::{Field, Set, SetData};
use crate::sys::netlink::text;

const COMMENT: u8 = 0;
/// nft reads 128 bytes.
const COMMENT_MAX: usize = 120;

const KEY_BYTE_ORDER: u8 = 0;
const DATA_BYTE_ORDER: u8 = 1;
const KEY_TYPEOF: u8 = 3;
const DATA_TYPEOF: u8 = 4;
const ORDER_HOST: u32 = 1;
const ORDER_BIG: u32 = 2;
const EXPR_PAYLOAD: u32 = 7;
const EXPR_META: u32 = 9;
const EXPR_CONCAT: u32 = 13;
const EXPR_NUMGEN: u32 = 23;
const HEADER_TRANSPORT: u32 = 11;
const HEADER_IP: u32 = 12;
const HEADER_IP6: u32 = 13;
const IP_DESTINATION: u32 = 12;
const IP6_DESTINATION: u32 = 9;
const TRANSPORT_DESTINATION: u32 = 2;
const META_L4PROTO: u32 = 16;
const RANDOM: u32 = 1;

/// What nft shows as `comment "…"`: printable, no quote, cut off.
pub(super) fn comment(text: &str) -> Vec<u8> {
    let text = comment_text(text);
    let mut bytes = vec![COMMENT, text.len() as u8 + 1];
    bytes.extend(text.as_bytes());
    bytes.push(0);
    bytes
}

/// A comment as it will be read back.
pub fn comment_text(text: &str) -> String {
    text.chars().filter(|c| (' '..='~').contains(c) && *c != '"').take(COMMENT_MAX).collect()
}

pub(super) fn comment_of(udata: &[u8]) -> String {
    match udata {
        [COMMENT, length, rest @ ..] => text(rest.get(..usize::from(*length)).unwrap_or_default()),
        _ => String::new(),
    }
}

/// Of a set: the byte order of single fields, and `typeof` where a type has no name of its own.
pub(super) fn set_types(set: &Set) -> Vec<u8> {
    let order = |fields: &[Field]| match fields {
        [Field::Integer] => ORDER_HOST,
        [_] => ORDER_BIG,
        _ => 0,
    };
    let mut bytes = Vec::new();
    put(&mut bytes, KEY_BYTE_ORDER, &order(&set.key).to_ne_bytes());
    if let SetData::Fields(data) = &set.data {
        put(&mut bytes, DATA_BYTE_ORDER, &order(data).to_ne_bytes());
    }
    if set.key.contains(&Field::Integer) {
        put(&mut bytes, KEY_TYPEOF, &type_of(&set.key));
        if let SetData::Fields(data) = &set.data {
            put(&mut bytes, DATA_TYPEOF, &type_of(data));
        }
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, kind: u8, value: &[u8]) {
    // Keys of 16 fields at most keep every value below 256 bytes for the few fields that we name;
    // a longer one would be cut by its length byte, so it is left out and printed as hex.
    if let Ok(length) = u8::try_from(value.len()) {
        bytes.extend([kind, length]);
        bytes.extend(value);
    }
}

fn numbers(values: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, value) in values.iter().enumerate() {
        put(&mut bytes, kind as u8, &value.to_ne_bytes());
    }
    bytes
}

fn expression(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put(&mut bytes, 0, &kind.to_ne_bytes());
    put(&mut bytes, 1, data);
    bytes
}

fn type_of(fields: &[Field]) -> Vec<u8> {
    let one = |field: &Field| match field {
        Field::Ipv4 => expression(EXPR_PAYLOAD, &numbers(&[HEADER_IP, IP_DESTINATION])),
        Field::Ipv6 => expression(EXPR_PAYLOAD, &numbers(&[HEADER_IP6, IP6_DESTINATION])),
        Field::Port => expression(EXPR_PAYLOAD, &numbers(&[HEADER_TRANSPORT, TRANSPORT_DESTINATION])),
        Field::Protocol => expression(EXPR_META, &numbers(&[META_L4PROTO])),
        Field::Integer => expression(EXPR_NUMGEN, &numbers(&[RANDOM, 2, 0])),
    };
    if let [field] = fields {
        return one(field);
    }
    let mut parts = Vec::new();
    for (at, field) in fields.iter().enumerate() {
        put(&mut parts, at as u8, &one(field));
    }
    expression(EXPR_CONCAT, &parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_written_as_nft_1_0_6_writes_them() {
        let set = Set {
            name: "eps",
            key: vec![Field::Ipv4, Field::Protocol, Field::Port, Field::Integer],
            data: SetData::Fields(vec![Field::Ipv4, Field::Port]),
            interval: false,
            dynamic: None,
        };
        let hex: String = set_types(&set).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "000400000000010400000000036000040d00000001580014000407000000010c00040c00000001040c000000010e00040900000001060004100000000214000407000000010c00040b000000010402000000031a0004170000000112000401000000010402000000020400000000043400040d000000012c0014000407000000010c00040c00000001040c0000000114000407000000010c00040b000000010402000000"
        );
    }

    #[test]
    fn comments_are_cut_to_what_nft_reads() {
        assert_eq!(comment_of(&comment("shop/web \"x\"\n\u{e9}!")), "shop/web x!");
        assert_eq!(comment_of(&comment(&"x".repeat(500))).len(), 120);
        assert_eq!((comment_of(&[]), comment_of(&[0, 200, b'a'])), (String::new(), String::new()));
    }
}
