//! Netlink messages written one behind the other into one buffer, as a transaction is sent.
//!
//! A full table is megabytes: each byte is written once, here. Invariant: what [`Wire::messages`]
//! counts is whole; a message with an attribute beyond its 16 bit length is remembered and the
//! transaction must not be sent. Source: netlink(7).

use super::netlink::{Attrs, HEADER, NLA_F_NESTED, NLM_F_REQUEST};

/// Where a nested attribute began.
#[derive(Debug)]
#[must_use = "a nest has to be closed"]
pub struct Nest(usize);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wire {
    bytes: Vec<u8>,
    /// Where each message begins.
    starts: Vec<usize>,
    /// Messages that cannot be sent.
    too_long: Vec<usize>,
}

impl Wire {
    pub fn messages(&self) -> usize {
        self.starts.len()
    }
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }
    /// The first message that must not be sent.
    pub fn too_long(&self) -> Option<usize> {
        self.too_long.first().copied()
    }

    /// Begins a message; what is written from here on is its.
    pub fn begin(&mut self, kind: u16, flags: u16, fixed: [u8; 4]) {
        self.starts.push(self.bytes.len());
        let length = (HEADER + fixed.len()) as u32;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        // Sequence and port.
        self.bytes.extend_from_slice(&[0; 8]);
        self.bytes.extend_from_slice(&fixed);
    }

    /// Ends the message: its length is known.
    pub fn end(&mut self) {
        let Some(start) = self.starts.last().copied() else { return };
        let length = (self.bytes.len() - start) as u32;
        self.put(start, &length.to_ne_bytes());
    }

    pub fn bytes(&mut self, kind: u16, value: &[u8]) {
        let start = self.open(kind);
        self.bytes.extend_from_slice(value);
        self.close_at(start);
    }
    /// In network order.
    pub fn be32(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }
    /// NUL-terminated.
    pub fn text(&mut self, kind: u16, value: &str) {
        let start = self.open(kind);
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
        self.close_at(start);
    }
    pub fn attrs(&mut self, attrs: &Attrs) {
        if attrs.is_too_long() {
            self.mark();
        }
        self.bytes.extend_from_slice(attrs.as_slice());
    }
    pub fn nest(&mut self, kind: u16) -> Nest {
        Nest(self.open(kind | NLA_F_NESTED))
    }
    pub fn close(&mut self, nest: Nest) {
        self.close_at(nest.0);
    }
    /// Bytes in a nest so far.
    pub fn room_taken(&self, nest: &Nest) -> usize {
        self.bytes.len() - nest.0
    }

    fn open(&mut self, kind: u16) -> usize {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        start
    }

    fn close_at(&mut self, start: usize) {
        match u16::try_from(self.bytes.len() - start) {
            Ok(length) => self.put(start, &length.to_ne_bytes()),
            Err(_) => self.mark(),
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn mark(&mut self) {
        self.too_long.extend(self.starts.len().checked_sub(1));
    }

    fn put(&mut self, at: usize, value: &[u8]) {
        if let Some(room) = self.bytes.get_mut(at..at + value.len()) {
            room.copy_from_slice(value);
        }
    }

    /// Takes the last message back.
    pub fn pop(&mut self) {
        if let Some(start) = self.starts.pop() {
            self.bytes.truncate(start);
        }
    }
    /// A message's bytes, header and all.
    pub fn message(&self, at: usize) -> Option<&[u8]> {
        let start = *self.starts.get(at)?;
        self.bytes.get(start..self.starts.get(at + 1).copied().unwrap_or(self.bytes.len()))
    }

    /// Numbers the messages from `sequence` on and asks for an answer to that one: the others
    /// answer by failing only.
    pub(super) fn number(&mut self, sequence: u32, acked: usize, ack: u16) {
        for at in 0..self.starts.len() {
            let Some(start) = self.starts.get(at).copied() else { return };
            self.put(start + 8, &sequence.wrapping_add(at as u32).to_ne_bytes());
            let flags = self.bytes.get(start + 6..start + 8).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
            if let (Some(flags), true) = (flags, at == acked) {
                self.put(start + 6, &(flags | ack).to_ne_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::netlink::{attribute, messages, text};
    use super::*;

    #[test]
    fn messages_come_back_as_they_were_written() {
        let mut wire = Wire::default();
        wire.begin(7, 0x400, [2, 0, 0, 0]);
        wire.text(1, "abc");
        let nest = wire.nest(3);
        wire.be32(1, 5);
        wire.close(nest);
        wire.end();
        wire.begin(8, 0, [2, 0, 0, 0]);
        wire.attrs(&Attrs::new().text(1, "x"));
        wire.end();
        wire.number(41, 1, 4);
        let read: Vec<_> = messages(wire.as_slice()).collect();
        assert_eq!((read.len(), wire.messages(), wire.too_long()), (2, 2, None));
        assert_eq!((read[0].0.kind, read[0].0.flags, read[0].0.sequence), (7, 0x401, 41));
        assert_eq!((read[1].0.kind, read[1].0.flags, read[1].0.sequence), (8, 0x5, 42));
        assert_eq!(attribute(&read[0].1[4..], 1).map(text).as_deref(), Some("abc"));
        assert_eq!(attribute(attribute(&read[0].1[4..], 3).unwrap(), 1), Some(&[0, 0, 0, 5][..]));
    }

    #[test]
    fn a_nest_beyond_64_kib_is_remembered() {
        let mut wire = Wire::default();
        wire.begin(7, 0, [0; 4]);
        wire.end();
        wire.begin(7, 0, [0; 4]);
        let nest = wire.nest(3);
        for _ in 0..5000 {
            wire.bytes(1, &[0; 16]);
        }
        wire.close(nest);
        wire.end();
        assert_eq!(wire.too_long(), Some(1));
    }
}
