//! DNS messages as bytes: what has to be known of one without taking it apart.
//!
//! Messages that pass through (questions of pods, replies of upstreams) stay the bytes that they
//! are, so that types which nobody here knows pass too (RFC 3597) and the cache holds nothing but
//! bytes. Messages of our own are made by the `simple-dns` crate: `answer.rs`.
//!
//! Pure. Invariant: whatever the bytes are, each function ends, stays inside them and allocates
//! at most what they weigh; a count is believed only as far as there are bytes for it.
//! RFC 1035 §4, RFC 6891 (EDNS), RFC 2181 §8 and §9 (TTL, truncation).
#![deny(clippy::disallowed_methods)]

mod envelope;
mod query;
mod reply;

use std::ops::Range;

pub use envelope::Envelope;
pub use query::{Edns, Query, Unfit, ask};
pub use reply::{Reply, reply};

pub const HEADER: usize = 12;
/// What a UDP message may weigh without EDNS.
pub const PLAIN: usize = 512;
/// What we send and take over UDP at most: passes every link unfragmented (flag day 2020).
pub const UDP: usize = 1232;
pub const TCP: usize = 65535;
/// The weight of our OPT record.
pub const OPT: usize = 11;
/// The longest name, as bytes of the wire.
const NAME: usize = 255;
/// A name jumps backwards; more often than it can have labels is malice.
const JUMPS: usize = 128;

pub mod flag {
    pub const REPLY: u16 = 0x8000;
    pub const AUTHORITATIVE: u16 = 0x0400;
    pub const TRUNCATED: u16 = 0x0200;
    pub const RECURSION_DESIRED: u16 = 0x0100;
    pub const RECURSION_AVAILABLE: u16 = 0x0080;
    pub const CHECKING_DISABLED: u16 = 0x0010;
}

pub mod rcode {
    pub const OK: u16 = 0;
    pub const FORMAT: u16 = 1;
    pub const FAILURE: u16 = 2;
    pub const NO_NAME: u16 = 3;
    pub const NOT_IMPLEMENTED: u16 = 4;
    pub const REFUSED: u16 = 5;
    /// Needs an OPT record: it has more than four bits.
    pub const BAD_VERSION: u16 = 16;
}

pub mod kind {
    pub const A: u16 = 1;
    pub const NS: u16 = 2;
    pub const CNAME: u16 = 5;
    pub const SOA: u16 = 6;
    pub const PTR: u16 = 12;
    pub const TXT: u16 = 16;
    pub const AAAA: u16 = 28;
    pub const SRV: u16 = 33;
    pub const OPT: u16 = 41;
    /// IXFR, AXFR, MAILB, MAILA, ANY.
    pub const QUESTIONS_ONLY: std::ops::RangeInclusive<u16> = 251..=255;
}

pub const CLASS_IN: u16 = 1;

pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes)
}

/// Beyond the end: nothing happens.
pub fn set_u16(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

/// Reads a name at `at`, giving each label; returns where the bytes after it start. A jump must
/// lead before everything read so far, so that a name ends.
pub fn name<'a>(bytes: &'a [u8], at: usize, mut label: impl FnMut(&'a [u8])) -> Option<usize> {
    let (mut at, mut floor, mut end, mut length) = (at, at, None, 1);
    for _ in 0..=JUMPS {
        loop {
            let first = usize::from(*bytes.get(at)?);
            match first {
                0 => return Some(end.unwrap_or(at + 1)),
                1..=63 => {
                    length += 1 + first;
                    if length > NAME {
                        return None;
                    }
                    label(bytes.get(at + 1..at + 1 + first)?);
                    at += 1 + first;
                }
                0xC0..=0xFF => break,
                _ => return None,
            }
        }
        let target = usize::from(u16_at(bytes, at)? & 0x3FFF);
        if target >= floor || target < HEADER {
            return None;
        }
        end.get_or_insert(at + 2);
        (at, floor) = (target, target);
    }
    None
}

/// A name as text to the wire; None: it is no name. One dot may stand at its end.
pub fn name_of(text: &str) -> Option<Vec<u8>> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let mut wire = Vec::with_capacity(text.len() + 2);
    for label in text.split('.') {
        let length = u8::try_from(label.len()).ok().filter(|n| (1..=63).contains(n))?;
        wire.push(length);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    (wire.len() <= NAME).then_some(wire)
}

/// Labels of a name without jumps.
pub fn labels(name: &[u8]) -> Vec<&[u8]> {
    let mut labels = Vec::with_capacity(8);
    let (mut rest, mut left) = (name, JUMPS);
    while let Some((&length, tail)) = rest.split_first()
        && (1..=63).contains(&length)
        && let Some((label, tail)) = tail.split_at_checked(usize::from(length))
        && left > 0
    {
        labels.push(label);
        (rest, left) = (tail, left - 1);
    }
    labels
}

// ---- records -------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    Answer,
    Authority,
    Extra,
}

/// Where a record lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub start: usize,
    pub kind: u16,
    pub class: u16,
    pub ttl_at: usize,
    pub data: Range<usize>,
    pub section: Section,
}

impl Record {
    fn read(bytes: &[u8], start: usize, section: Section) -> Option<Record> {
        let at = name(bytes, start, |_| {})?;
        let length = usize::from(u16_at(bytes, at + 8)?);
        let data = at + 10..at + 10 + length;
        bytes.get(data.clone())?;
        Some(Record { start, kind: u16_at(bytes, at)?, class: u16_at(bytes, at + 2)?, ttl_at: at + 4, data, section })
    }
    pub fn end(&self) -> usize {
        self.data.end
    }
    /// RFC 2181 §8: with the highest bit set it counts as 0.
    fn ttl(&self, bytes: &[u8]) -> u32 {
        u32_at(bytes, self.ttl_at).filter(|ttl| *ttl <= i32::MAX as u32).unwrap_or(0)
    }
}

/// All records behind the one question, in order; an item of None: malformed, and the end.
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    left: [u16; 3],
}

/// None: there is not exactly one question.
pub fn records(bytes: &[u8]) -> Option<Records<'_>> {
    if u16_at(bytes, 4)? != 1 {
        return None;
    }
    let at = name(bytes, HEADER, |_| {})? + 4;
    (at <= bytes.len()).then_some(())?;
    Some(Records { bytes, at, left: [u16_at(bytes, 6)?, u16_at(bytes, 8)?, u16_at(bytes, 10)?] })
}

impl Iterator for Records<'_> {
    type Item = Option<Record>;

    fn next(&mut self) -> Option<Option<Record>> {
        let sections = [Section::Answer, Section::Authority, Section::Extra];
        let (left, section) = self.left.iter_mut().zip(sections).find(|(left, _)| **left > 0)?;
        *left -= 1;
        let record = Record::read(self.bytes, self.at, section);
        match &record {
            Some(record) => self.at = record.end(),
            None => self.left = [0; 3],
        }
        Some(record)
    }
}

/// Gives every record a new TTL.
pub fn set_ttls(message: &mut [u8], new: impl Fn(u32) -> u32) {
    let Some(records) = records(message) else { return };
    let places: Vec<(usize, u32)> = records.flatten().map(|r| (r.ttl_at, r.ttl(message))).collect();
    for (at, ttl) in places {
        if let Some(place) = message.get_mut(at..at + 4) {
            place.copy_from_slice(&new(ttl).to_be_bytes());
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
