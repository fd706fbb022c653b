//! Questions: those that come in, and ours to upstreams.
//!
//! Invariant: what is no question for us gets nothing, or a header and no more: nobody is sent more
//! than they sent. RFC 1035 §4.1, RFC 6891 §6.1.
#![deny(clippy::disallowed_methods)]

use super::envelope::push_opt;
use super::{HEADER, Record, Section, flag, kind, name, rcode, set_u16, u16_at, u32_at};

/// A question that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query<'a> {
    pub id: u16,
    pub flags: u16,
    /// Name, type and class as they stand in the message.
    pub question: &'a [u8],
    pub kind: u16,
    pub class: u16,
    pub edns: Option<Edns>,
}

/// What an OPT record says that concerns us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edns {
    pub size: u16,
    pub dnssec_ok: bool,
}

/// What is done with bytes that are no question for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Nobody asked: an answer would be one more message that nobody asked for.
    Silent,
    /// This, and no more.
    Answer(Vec<u8>),
}

impl<'a> Query<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Query<'a>, Unfit> {
        let (Some(id), Some(flags)) = (u16_at(bytes, 0), u16_at(bytes, 2)) else { return Err(Unfit::Silent) };
        if bytes.len() < HEADER || flags & flag::REPLY != 0 {
            return Err(Unfit::Silent);
        }
        let refuse = |code| Unfit::Answer(bare(id, flags, code));
        if flags & 0x7800 != 0 {
            return Err(refuse(rcode::NOT_IMPLEMENTED));
        }
        let count = |at| u16_at(bytes, at).unwrap_or(0);
        if (count(4), count(6), count(8)) != (1, 0, 0) {
            return Err(refuse(rcode::FORMAT));
        }
        Query::read(bytes, id, flags, count(10)).ok_or_else(|| refuse(rcode::FORMAT))?.map_err(|version| {
            let mut reply = bare(id, flags, rcode::OK);
            push_opt(&mut reply, false, version);
            Unfit::Answer(reply)
        })
    }

    /// None: malformed. Err: EDNS of another version; the extended part of BADVERS.
    fn read(bytes: &'a [u8], id: u16, flags: u16, extra: u16) -> Option<Result<Query<'a>, u8>> {
        // No jump is possible in the first name of a message.
        let end = name(bytes, HEADER, |_| {})?;
        let (kind, class) = (u16_at(bytes, end)?, u16_at(bytes, end + 2)?);
        let question = bytes.get(HEADER..end + 4)?;
        let mut edns = None;
        let mut other_version = false;
        let mut at = end + 4;
        for _ in 0..extra {
            let record = Record::read(bytes, at, Section::Extra)?;
            if record.kind == kind::OPT {
                // Its owner is the root, and there is one of it.
                if edns.is_some() || bytes.get(at) != Some(&0) {
                    return None;
                }
                let settings = u32_at(bytes, record.ttl_at)?;
                other_version = (settings >> 16) & 0xFF != 0;
                edns = Some(Edns { size: record.class, dnssec_ok: settings & 0x8000 != 0 });
            }
            at = record.end();
        }
        if other_version {
            return Some(Err((rcode::BAD_VERSION >> 4) as u8));
        }
        Some(Ok(Query { id, flags, question, kind, class, edns }))
    }

    /// From the question alone, as an [`Envelope`] keeps it.
    pub fn parse_question(question: &'a [u8]) -> Option<Query<'a>> {
        let end = question.len().checked_sub(4)?;
        let (kind, class) = (u16_at(question, end)?, u16_at(question, end + 2)?);
        Some(Query { id: 0, flags: 0, question, kind, class, edns: None })
    }

    pub fn name(&self) -> &'a [u8] {
        self.question.get(..self.question.len().saturating_sub(4)).unwrap_or_default()
    }

    pub fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|e| e.dnssec_ok)
    }
}

/// A reply of a header only, for what has no question that could be told again.
fn bare(id: u16, flags: u16, code: u16) -> Vec<u8> {
    let mut reply = vec![0; HEADER];
    set_u16(&mut reply, 0, id);
    // Opcode and RD come back as they were.
    let kept = flags & (0x7800 | flag::RECURSION_DESIRED);
    set_u16(&mut reply, 2, flag::REPLY | flag::RECURSION_AVAILABLE | kept | code & 0xF);
    reply
}

/// A question to an upstream. `edns` is left out for servers that do not know it.
pub fn ask(id: u16, question: &[u8], checking_disabled: bool, edns: Option<bool>) -> Vec<u8> {
    let mut message = vec![0; HEADER];
    set_u16(&mut message, 0, id);
    let cd = if checking_disabled { flag::CHECKING_DISABLED } else { 0 };
    set_u16(&mut message, 2, flag::RECURSION_DESIRED | cd);
    set_u16(&mut message, 4, 1);
    message.extend_from_slice(question);
    if let Some(dnssec_ok) = edns {
        push_opt(&mut message, dnssec_ok, 0);
    }
    message
}
