//! Replies of upstreams: whether they answer what was asked, and for how long that holds.
//!
//! Invariant: nothing is taken for an answer that differs from its question in id, name, type or
//! class. RFC 5452 §9.1, RFC 2308 §5, RFC 2181 §8.
#![deny(clippy::disallowed_methods)]

use super::{HEADER, Section, flag, kind, rcode, records, set_u16, u16_at, u32_at};

/// What a reply of an upstream is, once its OPT record is taken off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub message: Vec<u8>,
    pub rcode: u16,
    pub truncated: bool,
    /// How long it holds; None: it must not be kept (RFC 2308 §5: no SOA, no negative caching).
    pub ttl: Option<u32>,
    pub negative: bool,
}

/// None: this is no answer to `question` (as [`ask`] sent it with `id`), or it is broken.
pub fn reply(bytes: &[u8], id: u16, question: &[u8]) -> Option<Reply> {
    let flags = u16_at(bytes, 2)?;
    let ours = u16_at(bytes, 0)? == id && flags & (flag::REPLY | 0x7800) == flag::REPLY;
    let told = bytes.get(HEADER..HEADER + question.len())?;
    let tail = question.len().checked_sub(4)?;
    // Names are equal in whatever case; type and class are no letters.
    if !ours || !told.eq_ignore_ascii_case(question) || told.get(tail..) != question.get(tail..) {
        return None;
    }
    let wanted = u16_at(question, tail)?;
    let mut rcode = flags & 0xF;
    let (mut end, mut extra) = (HEADER + question.len(), 0);
    let (mut positive, mut negative, mut found) = (None, None, false);
    for record in records(bytes)? {
        let record = record?;
        if record.kind == kind::OPT && record.section == Section::Extra {
            // What follows it (a signature of this hop at most) would lose its place.
            rcode |= ((u32_at(bytes, record.ttl_at)? >> 24) as u16) << 4;
            break;
        }
        let ttl = record.ttl(bytes);
        match record.section {
            Section::Answer => {
                found |= record.kind == wanted;
                positive = Some(positive.map_or(ttl, |least: u32| least.min(ttl)));
            }
            Section::Authority if record.kind == kind::SOA => {
                // MINIMUM is the last field of an SOA.
                let minimum = u32_at(bytes, record.data.end.checked_sub(4)?)?;
                negative = Some(negative.map_or(ttl.min(minimum), |least: u32| least.min(ttl.min(minimum))));
            }
            Section::Authority => {}
            Section::Extra => extra += 1,
        }
        end = record.end();
    }
    let ttl = match (rcode, found) {
        (rcode::OK, true) => positive,
        // An alias that leads nowhere holds as long as the shorter of both.
        (rcode::OK | rcode::NO_NAME, _) => negative.map(|n| positive.map_or(n, |p| p.min(n))),
        _ => None,
    };
    let mut message = bytes.get(..end)?.to_vec();
    set_u16(&mut message, 10, extra);
    Some(Reply { message, rcode, truncated: flags & flag::TRUNCATED != 0, ttl, negative: !found })
}
