//! Netlink attributes and messages in the making: one encoder for route, nf_tables and conntrack.
//!
//! Invariant: what does not fit into an attribute's 16 bit length is remembered, and the message is
//! never sent. Source: netlink(7).

use super::netlink::{HEADER, NLA_F_NESTED, NLM_F_REQUEST};

/// Attributes in the making.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attrs {
    bytes: Vec<u8>,
    /// One of them did not fit into its 16 bit length: the message must not be sent.
    pub(super) too_long: bool,
}

impl Attrs {
    pub fn new() -> Attrs {
        Attrs::default()
    }
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Attrs {
        self.push(kind, value);
        self
    }
    pub fn u8(self, kind: u16, value: u8) -> Attrs {
        self.bytes(kind, &[value])
    }
    /// In the machine's order, as rtnetlink wants it.
    pub fn u32(self, kind: u16, value: u32) -> Attrs {
        self.bytes(kind, &value.to_ne_bytes())
    }
    /// In network order, as nfnetlink wants it.
    pub fn be32(self, kind: u16, value: u32) -> Attrs {
        self.bytes(kind, &value.to_be_bytes())
    }
    pub fn be16(self, kind: u16, value: u16) -> Attrs {
        self.bytes(kind, &value.to_be_bytes())
    }
    /// NUL-terminated.
    pub fn text(self, kind: u16, value: &str) -> Attrs {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }
    pub fn nest(mut self, kind: u16, inner: Attrs) -> Attrs {
        self.too_long |= inner.too_long;
        self.push(kind | NLA_F_NESTED, &inner.bytes);
        self
    }
    /// Bytes with a length already known to be right, e.g. a nested message.
    pub fn raw(mut self, value: &[u8]) -> Attrs {
        self.bytes.extend_from_slice(value);
        self
    }
    pub fn when(self, condition: bool, then: impl FnOnce(Attrs) -> Attrs) -> Attrs {
        if condition { then(self) } else { self }
    }
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }
    pub fn is_too_long(&self) -> bool {
        self.too_long
    }

    fn push(&mut self, kind: u16, value: &[u8]) {
        let Ok(length) = u16::try_from(value.len() + 4) else {
            self.too_long = true;
            return;
        };
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// One message: type, flags, the family's fixed header, attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    kind: u16,
    flags: u16,
    fixed: Vec<u8>,
    pub(super) attrs: Attrs,
}

impl Message {
    /// `fixed` has a multiple of 4 bytes, as all such headers do.
    pub fn new(kind: u16, flags: u16, fixed: &[u8], attrs: Attrs) -> Message {
        Message { kind, flags, fixed: fixed.to_vec(), attrs }
    }

    pub(super) fn encode(&self, more_flags: u16, sequence: u32, into: &mut Vec<u8>) {
        let length = (HEADER + self.fixed.len() + self.attrs.bytes.len()) as u32;
        into.extend_from_slice(&length.to_ne_bytes());
        into.extend_from_slice(&self.kind.to_ne_bytes());
        into.extend_from_slice(&(self.flags | NLM_F_REQUEST | more_flags).to_ne_bytes());
        into.extend_from_slice(&sequence.to_ne_bytes());
        into.extend_from_slice(&0u32.to_ne_bytes());
        into.extend_from_slice(&self.fixed);
        into.extend_from_slice(&self.attrs.bytes);
    }
}
