//! How a reply of ours leaves: identity, flags, size, OPT.
//!
//! Invariant: it weighs no more than the asker takes, holds whole records only, and says TC where
//! an answer had to be left off. RFC 2181 §9, RFC 6891 §6.2.5.
#![deny(clippy::disallowed_methods)]

use super::query::{Edns, Query};
use super::{HEADER, OPT, PLAIN, Section, TCP, UDP, flag, kind, name, rcode, records, set_u16, u16_at};

/// How a reply leaves, whoever made its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    pub id: u16,
    /// Of the question.
    pub flags: u16,
    /// As it was asked, upper and lower case included (0x20).
    pub question: Vec<u8>,
    pub edns: Option<Edns>,
    pub tcp: bool,
}

impl Envelope {
    pub fn of(query: &Query<'_>, tcp: bool) -> Envelope {
        Envelope { id: query.id, flags: query.flags, question: query.question.to_vec(), edns: query.edns, tcp }
    }

    /// The most that the asker takes.
    pub fn limit(&self) -> usize {
        match (self.tcp, self.edns) {
            (true, _) => TCP,
            (false, Some(edns)) => usize::from(edns.size).clamp(PLAIN, UDP),
            (false, None) => PLAIN,
        }
    }

    /// A message with no records.
    pub fn empty(&self, code: u16) -> Vec<u8> {
        let mut message = vec![0; HEADER];
        set_u16(&mut message, 2, code & 0xF);
        set_u16(&mut message, 4, 1);
        message.extend_from_slice(&self.question);
        message
    }

    /// Makes `message`, whose question is ours in whatever case, the reply to our question:
    /// identity, flags, size, OPT.
    pub fn seal(&self, mut message: Vec<u8>, authoritative: bool) -> Vec<u8> {
        set_u16(&mut message, 0, self.id);
        let rcode = u16_at(&message, 2).unwrap_or(rcode::FAILURE) & (0xF | flag::TRUNCATED);
        let asked = self.flags & (flag::RECURSION_DESIRED | flag::CHECKING_DISABLED);
        let aa = if authoritative { flag::AUTHORITATIVE } else { 0 };
        set_u16(&mut message, 2, flag::REPLY | flag::RECURSION_AVAILABLE | asked | aa | rcode);
        if let Some(place) = message.get_mut(HEADER..HEADER + self.question.len()) {
            place.copy_from_slice(&self.question);
        }
        let room = if self.edns.is_some() { OPT } else { 0 };
        cut(&mut message, self.limit() - room);
        if let Some(edns) = self.edns {
            push_opt(&mut message, edns.dnssec_ok, 0);
        }
        message
    }
}

/// Leaves off whole records from the end until it fits; TC where an answer had to go.
pub(super) fn cut(message: &mut Vec<u8>, limit: usize) {
    if message.len() <= limit {
        return;
    }
    let mut end = name(message, HEADER, |_| {}).map_or(HEADER, |end| end + 4).min(message.len());
    let mut kept = [0u16; 3];
    for record in records(message).into_iter().flatten() {
        let Some(record) = record.filter(|r| r.end() <= limit) else { break };
        let [answers, authority, extra] = &mut kept;
        *match record.section {
            Section::Answer => answers,
            Section::Authority => authority,
            Section::Extra => extra,
        } += 1;
        end = record.end();
    }
    if Some(kept[0]) != u16_at(message, 6) {
        let flags = u16_at(message, 2).unwrap_or(0);
        set_u16(message, 2, flags | flag::TRUNCATED);
    }
    for (count, at) in kept.into_iter().zip([6, 8, 10]) {
        set_u16(message, at, count);
    }
    message.truncate(end);
}

pub(super) fn push_opt(message: &mut Vec<u8>, dnssec_ok: bool, extended_rcode: u8) {
    let [high, low] = (UDP as u16).to_be_bytes();
    let settings = if dnssec_ok { 0x80 } else { 0 };
    message.extend_from_slice(&[0, 0, kind::OPT as u8, high, low, extended_rcode, 0, settings, 0, 0, 0]);
    let extra = u16_at(message, 10).unwrap_or(0);
    set_u16(message, 10, extra.saturating_add(1));
}
