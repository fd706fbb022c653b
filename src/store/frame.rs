//! One record of a journal as bytes, and a reader that stops at the first bad one, or steps over
//! it where it can prove that the disk has spoilt what was durable.
//!
//! ```text
//! len u32 | crc32c u32 | seq u64 | kind u16 | version u16 | payload (len bytes)    little-endian
//! ```
//!
//! The checksum covers everything but itself. A file begins with a [`BASE`] record; each `seq`
//! is one more than the one before it, so blocks of an older life of the file do not pass. A
//! [`SETTLED`] record says that all before it was synced before it was written: a bad record before
//! one is no torn write but a bit or block that the card lost, and costs only itself.
//! CRC-32C: RFC 3720 §12.1.

use std::io;

use super::fs::Fs;

/// First record of every file, without payload.
pub const BASE: u16 = 0;
/// First record of every batch of a durable journal, and behind what a rewriting kept; without
/// payload.
pub const SETTLED: u16 = 0xffff;
pub const HEADER: usize = 20;
/// Of a spoilt journal at most this much is searched.
const REST_MAX: u64 = 16 << 20;
/// Longest payload.
pub const MAX: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub kind: u16,
    pub version: u16,
    pub payload: Vec<u8>,
}

impl Entry {
    pub fn base() -> Entry {
        Entry { kind: BASE, version: 1, payload: Vec::new() }
    }
    pub fn settled() -> Entry {
        Entry { kind: SETTLED, version: 1, payload: Vec::new() }
    }
    /// The journal's own: tells nothing of the state.
    pub fn is_mark(&self) -> bool {
        matches!(self.kind, BASE | SETTLED)
    }
    pub fn encoded_len(&self) -> u64 {
        (HEADER + self.payload.len()) as u64
    }
}

/// Appends one record. The payload is at most [`MAX`] long (the journal checks).
pub fn encode(into: &mut Vec<u8>, seq: u64, entry: &Entry) {
    let len = (entry.payload.len() as u32).to_le_bytes();
    let mut rest = Vec::with_capacity(12 + entry.payload.len());
    rest.extend_from_slice(&seq.to_le_bytes());
    rest.extend_from_slice(&entry.kind.to_le_bytes());
    rest.extend_from_slice(&entry.version.to_le_bytes());
    rest.extend_from_slice(&entry.payload);
    into.extend_from_slice(&len);
    into.extend_from_slice(&crc32c(&[&len, &rest]).to_le_bytes());
    into.extend_from_slice(&rest);
}

pub fn encode_all<'a>(into: &mut Vec<u8>, seq: &mut u64, entries: impl IntoIterator<Item = &'a Entry>) {
    for entry in entries {
        encode(into, *seq, entry);
        *seq += 1;
    }
}

pub enum Next {
    Record(Entry),
    /// Exactly at the end.
    End,
    /// What follows is no record of this file.
    Bad,
    Unreadable(io::Error),
}

/// Reads `[0, end)` of a file record by record, holding one at a time.
pub struct Scan<'a, F: Fs> {
    fs: &'a F,
    file: &'a F::File,
    end: u64,
    /// File offset behind the last good record.
    pub good: u64,
    /// The number that the next record must have; None before the first one.
    pub seq: Option<u64>,
    /// Bytes from `good` on that were read ahead.
    ahead: Vec<u8>,
}

impl<'a, F: Fs> Scan<'a, F> {
    pub fn new(fs: &'a F, file: &'a F::File, end: u64) -> Scan<'a, F> {
        Scan { fs, file, end, good: 0, seq: None, ahead: Vec::new() }
    }

    pub fn step(&mut self) -> Next {
        let left = self.end.saturating_sub(self.good);
        if left == 0 {
            return Next::End;
        }
        if left < HEADER as u64 {
            return Next::Bad;
        }
        let payload = match self.fill(HEADER) {
            Ok(true) => self.number(0, 4) as usize,
            Ok(false) => return Next::Bad,
            Err(e) => return Next::Unreadable(e),
        };
        if payload > MAX || left < (HEADER + payload) as u64 {
            return Next::Bad;
        }
        match self.fill(HEADER + payload) {
            Ok(true) => {}
            Ok(false) => return Next::Bad,
            Err(e) => return Next::Unreadable(e),
        }
        let (Some(len), Some(rest)) = (self.ahead.get(..4), self.ahead.get(8..HEADER + payload)) else {
            return Next::Bad;
        };
        if u64::from(crc32c(&[len, rest])) != self.number(4, 8) {
            return Next::Bad;
        }
        let (seq, kind, version) = (self.number(8, 16), self.number(16, 18) as u16, self.number(18, 20) as u16);
        let expected = match self.seq {
            None => kind == BASE,
            Some(expected) => seq == expected,
        };
        // No life is that long; counting on from it would overflow.
        if !expected || seq > u64::MAX / 2 {
            return Next::Bad;
        }
        let entry = Entry { kind, version, payload: self.ahead.get(HEADER..HEADER + payload).unwrap_or_default().to_vec() };
        self.ahead.drain(..HEADER + payload);
        self.good += entry.encoded_len();
        self.seq = Some(seq + 1);
        Next::Record(entry)
    }

    /// After a bad or unreadable record: goes on behind it where a later [`SETTLED`] record proves
    /// that it had been durable. Returns how many records were stepped over; None: no such proof.
    pub fn resync(&mut self) -> io::Result<Option<u64>> {
        let Some(expected) = self.seq else { return Ok(None) };
        let rest = self.rest();
        let mut first = None;
        let (mut at, mut next) = (1, expected + 1);
        while at + HEADER <= rest.len() {
            let Some((seq, kind, len)) =
                rest.get(at..).and_then(whole).filter(|(seq, ..)| *seq >= next && seq - expected <= rest.len() as u64)
            else {
                at += 1;
                continue;
            };
            let (good, skipped) = *first.get_or_insert((self.good + at as u64, seq - expected));
            if kind == SETTLED {
                (self.good, self.seq) = (good, Some(expected + skipped));
                self.ahead.clear();
                return Ok(Some(skipped));
            }
            (at, next) = (at + len, seq + 1);
        }
        Ok(None)
    }

    /// What lies from `good` on, blocks that the disk does not give back as zeroes.
    fn rest(&self) -> Vec<u8> {
        let mut rest = Vec::new();
        let end = self.end.min(self.good + REST_MAX);
        let mut chunk = [0; 4096];
        let mut at = self.good;
        while at < end {
            // To the end of its block, so that one lost block costs one block.
            let most = (4096 - at % 4096).min(end - at) as usize;
            let n = match self.fs.read_at(self.file, chunk.get_mut(..most).unwrap_or_default(), at) {
                Ok(0) => break,
                Ok(n) => n,
                Err(_) => {
                    chunk = [0; 4096];
                    most
                }
            };
            rest.extend_from_slice(chunk.get(..n).unwrap_or_default());
            at += n as u64;
        }
        rest
    }

    /// Reads on until `n` bytes from `good` are there; false where the file ends before.
    fn fill(&mut self, n: usize) -> io::Result<bool> {
        let mut chunk = [0; 4096];
        while self.ahead.len() < n {
            let read = self.fs.read_at(self.file, &mut chunk, self.good + self.ahead.len() as u64)?;
            if read == 0 {
                return Ok(false);
            }
            self.ahead.extend_from_slice(chunk.get(..read).unwrap_or_default());
        }
        Ok(true)
    }

    /// A little-endian number of what was read ahead.
    fn number(&self, from: usize, to: usize) -> u64 {
        self.ahead.get(from..to).unwrap_or_default().iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }
}

/// Sequence number, kind and length of the record that `bytes` begin with, where they do.
fn whole(bytes: &[u8]) -> Option<(u64, u16, usize)> {
    let number = |from, to| bytes.get(from..to).map(|b: &[u8]| b.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)));
    let payload = number(0, 4)? as usize;
    let (seq, kind) = (number(8, 16)?, number(16, 18)? as u16);
    // First what costs nothing: this is asked at every byte.
    if payload > MAX || bytes.len() < HEADER + payload || seq == 0 || seq > u64::MAX / 2 {
        return None;
    }
    let sum = crc32c(&[bytes.get(..4)?, bytes.get(8..HEADER + payload)?]);
    (Some(u64::from(sum)) == number(4, 8)).then_some((seq, kind, HEADER + payload))
}

/// CRC-32C (Castagnoli) of the parts one after the other.
pub fn crc32c(parts: &[&[u8]]) -> u32 {
    static TABLE: [u32; 256] = table();
    let step = |crc: u32, byte: &u8| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8);
    !parts.iter().flat_map(|p| p.iter()).fold(!0, step)
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        let mut crc = n as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[n] = crc;
        n += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::fs::Disk;

    #[test]
    fn the_checksum_is_crc32c() {
        // RFC 3720 B.4.
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 32]]), 0x62a8_ab43);
        assert_eq!(crc32c(&[b"1234", b"56789"]), 0xe306_9283);
    }

    fn read(bytes: &[u8]) -> (Vec<Entry>, u64, bool) {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, bytes).unwrap();
        let mut scan = Scan::new(&Disk, &file, bytes.len() as u64);
        let mut entries = Vec::new();
        loop {
            match scan.step() {
                Next::Record(entry) => entries.push(entry),
                Next::End => return (entries, scan.good, true),
                Next::Bad => return (entries, scan.good, false),
                Next::Unreadable(e) => panic!("{e}"),
            }
        }
    }

    #[test]
    fn whatever_one_byte_becomes_only_records_before_it_are_read() {
        let entry = |n: u8| Entry { kind: 1 + u16::from(n), version: 1, payload: vec![n; 3 * usize::from(n)] };
        let entries: Vec<_> = std::iter::once(Entry::base()).chain((0..6).map(entry)).collect();
        let mut bytes = Vec::new();
        encode_all(&mut bytes, &mut 7, &entries);
        assert_eq!(read(&bytes), (entries.clone(), bytes.len() as u64, true));
        for at in 0..bytes.len() {
            let (cut, good, clean) = read(&bytes[..at]);
            assert!(entries.starts_with(&cut) && good <= at as u64 && clean == (good == at as u64));
            for flip in [1, 0x80, 0xff] {
                let mut bad = bytes.clone();
                bad[at] ^= flip;
                let (kept, good, clean) = read(&bad);
                assert!(!clean && entries.starts_with(&kept) && good <= at as u64, "byte {at}");
            }
        }
    }

    #[test]
    fn what_the_card_lost_before_a_settled_record_costs_only_itself() {
        let entry = |n: u8| Entry { kind: 1 + u16::from(n), version: 1, payload: vec![n; 3 * usize::from(n)] };
        let mut entries = vec![Entry::base(), entry(1), entry(2), entry(3)];
        let settled = entries.iter().map(Entry::encoded_len).sum::<u64>() as usize;
        entries.extend([Entry::settled(), entry(4), entry(5)]);
        let mut bytes = Vec::new();
        encode_all(&mut bytes, &mut 7, &entries);
        for at in Entry::base().encoded_len() as usize..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &bad).unwrap();
            let mut scan = Scan::new(&Disk, &file, bad.len() as u64);
            let (mut read, mut skipped) = (Vec::new(), 0);
            loop {
                match scan.step() {
                    Next::Record(entry) => read.push(entry),
                    Next::End => break,
                    Next::Bad => match scan.resync().unwrap() {
                        Some(n) => skipped += n,
                        None => break,
                    },
                    Next::Unreadable(e) => panic!("{e}"),
                }
            }
            if at < settled {
                assert_eq!((read.len(), skipped), (entries.len() - 1, 1), "byte {at}");
                let mut rest = entries.clone();
                rest.retain(|e| read.contains(e));
                assert_eq!(read, rest);
            } else {
                // Torn or lost: nobody can tell, so nothing behind it counts.
                assert!(skipped == 0 && entries.starts_with(&read) && read.len() >= 4, "byte {at}");
            }
        }
    }

    #[test]
    fn records_of_an_older_life_of_the_file_do_not_pass() {
        let mut bytes = Vec::new();
        encode(&mut bytes, 5, &Entry::base());
        let good = bytes.len() as u64;
        encode(&mut bytes, 9, &Entry { kind: 1, version: 1, payload: b"old".to_vec() });
        assert_eq!(read(&bytes), (vec![Entry::base()], good, false));
        assert_eq!(read(&bytes[good as usize..]), (vec![], 0, false), "no base record");
        assert_eq!(read(&[0; 64]), (vec![], 0, false));
    }
}
