//! Keys and data of elements: their fields' bytes, side by side, as the kernel wants them.
//!
//! A table of 10,000 Services holds 40,000 of them, so those of IPv4 stand in the value itself
//! and take no heap. Order and equality are those of the bytes, wherever they stand.
#![deny(clippy::disallowed_methods)]

use std::cmp::Ordering;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ir::{Type, Value};
use crate::sys::nftables::Family;

/// Four fields of IPv4: the longest key that is common.
const INLINE: usize = 22;

#[derive(Clone)]
enum Repr {
    Inline(u8, [u8; INLINE]),
    Heap(Box<[u8]>),
}

/// The bytes of a key or of data.
#[derive(Clone)]
pub struct Bytes(Repr);

/// The key of an element: one value, or the first and the last of a range.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub start: Bytes,
    /// Inclusive, field by field; only in sets of ranges.
    pub end: Option<Box<Bytes>>,
}

impl Key {
    pub fn of(values: &[Value]) -> Key {
        Key { start: Bytes::of(values), end: None }
    }
    /// Of each field the values from `first`'s to `last`'s.
    pub fn range(first: &[Value], last: &[Value]) -> Key {
        Key { start: Bytes::of(first), end: Some(Box::new(Bytes::of(last))) }
    }
}

impl Bytes {
    /// Each value padded to words of 4 bytes.
    pub fn of(values: &[Value]) -> Bytes {
        let mut bytes = [0; 4 * 16];
        let mut length = 0;
        for value in values {
            let (word, octets): ([u8; 4], [u8; 16]);
            let some: &[u8] = match value {
                Value::Address(IpAddr::V4(ip)) => {
                    word = ip.octets();
                    &word
                }
                Value::Address(IpAddr::V6(ip)) => {
                    octets = ip.octets();
                    &octets
                }
                Value::Protocol(number) => {
                    word = [*number, 0, 0, 0];
                    &word
                }
                Value::Port(port) => {
                    let [high, low] = port.to_be_bytes();
                    word = [high, low, 0, 0];
                    &word
                }
                Value::Index(index) => {
                    word = index.to_ne_bytes();
                    &word
                }
            };
            // Beyond the kernel's 16 words nothing is kept: `encode` refuses such a key by its
            // set's types.
            let Some(room) = bytes.get_mut(length..length + some.len()) else { break };
            room.copy_from_slice(some);
            length += some.len();
        }
        Bytes::from(bytes.get(..length).unwrap_or_default())
    }

    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            // `length` is at most INLINE by construction.
            Repr::Inline(length, bytes) => bytes.get(..usize::from(*length)).unwrap_or_default(),
            Repr::Heap(bytes) => bytes,
        }
    }

    /// The values, if the bytes are just those of such fields.
    pub fn values(&self, types: &[Type], family: Family) -> Option<Vec<Value>> {
        let mut rest = self.as_slice();
        let mut values = Vec::with_capacity(types.len());
        for field in types {
            let (bytes, after) = rest.split_at_checked(field.words(family) * 4)?;
            rest = after;
            values.push(match (field, bytes) {
                (Type::Address, bytes) => match <[u8; 4]>::try_from(bytes) {
                    Ok(four) => Value::Address(Ipv4Addr::from(four).into()),
                    Err(_) => Value::Address(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
                },
                (Type::Protocol, [number, ..]) => Value::Protocol(*number),
                (Type::Port, [high, low, ..]) => Value::Port(u16::from_be_bytes([*high, *low])),
                (Type::Index, bytes) => Value::Index(u32::from_ne_bytes(bytes.try_into().ok()?)),
                (Type::Protocol | Type::Port, _) => return None,
            });
        }
        rest.is_empty().then_some(values)
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Bytes {
        let mut inline = [0; INLINE];
        Bytes(match inline.get_mut(..bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                // Fits: `room` is no longer than INLINE.
                Repr::Inline(bytes.len() as u8, inline)
            }
            None => Repr::Heap(bytes.into()),
        })
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        self.as_slice() == other.as_slice()
    }
}
impl Eq for Bytes {}
impl PartialOrd for Bytes {
    fn partial_cmp(&self, other: &Bytes) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Bytes {
    fn cmp(&self, other: &Bytes) -> Ordering {
        self.as_slice().cmp(other.as_slice())
    }
}
impl std::hash::Hash for Bytes {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            None => write!(f, "{:?}", self.start),
            Some(end) => write!(f, "{:?}-{end:?}", self.start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_as_they_went_in() {
        let v4 = [Value::Address([10, 0, 0, 1].into()), Value::Protocol(17), Value::Port(53), Value::Index(70_000)];
        let types = [Type::Address, Type::Protocol, Type::Port, Type::Index];
        let bytes = Bytes::of(&v4);
        assert_eq!(bytes.as_slice().len(), 16);
        assert_eq!(bytes.values(&types, Family::Ip), Some(v4.to_vec()));
        assert_eq!(bytes.values(&types[..3], Family::Ip), None);
        assert_eq!(bytes.values(&types, Family::Ip6), None);
        let v6 = [Value::Address("fd00::1".parse().unwrap()), Value::Port(80), Value::Protocol(6), Value::Index(3)];
        let types = [Type::Address, Type::Port, Type::Protocol, Type::Index];
        assert_eq!(Bytes::of(&v6).values(&types, Family::Ip6), Some(v6.to_vec()));
    }

    #[test]
    fn order_and_equality_are_those_of_the_bytes() {
        let long = Bytes::from(&[1; 30][..]);
        let short = Bytes::from(&[1; 22][..]);
        assert!(matches!((&long.0, &short.0), (Repr::Heap(_), Repr::Inline(..))));
        assert!(short < long && long < Bytes::from(&[2][..]) && Bytes::from(&[][..]) < short);
        assert_eq!(Bytes::from(&[1; 30][..]), long);
        assert_eq!(std::mem::size_of::<Key>(), 32);
    }
}
