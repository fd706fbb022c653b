//! What the zone has → a reply, by the `simple-dns` crate; and aliases that lead out of the zone.
//!
//! Pure. Invariant: every question that [`wire::Query`] read gets a message whose question is the
//! one that was asked and whose counts are those of its records. RFC 1035 §4.3.1, RFC 2308 §3
//! (SOA with NXDOMAIN and NODATA), RFC 8482 (ANY is refused), RFC 6895 (classes).
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use simple_dns::rdata::{A, AAAA, CNAME, NS, PTR, RData, SOA, SRV, TXT};
use simple_dns::{CLASS, Label, Name, Packet, QCLASS, QTYPE, Question, RCODE, ResourceRecord};

use super::wire::{self, Envelope, Query, kind, rcode};
use super::zone::{Apex, Asked, Data, Lookup, Records, SCHEMA_VERSION, TTL, TTL_VERSION, Zone};

/// Aliases followed before it counts as a loop.
const ALIASES: usize = 8;

/// No record of ours weighs less: a name that jumps, type, class, TTL, length, an IPv4 address.
const RECORD: usize = 16;

/// What becomes of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A message, to be sealed; ours to answer for.
    Reply(Vec<u8>),
    /// Upstreams know. With aliases: of the last one's target.
    Forward { question: Vec<u8>, aliases: Vec<Alias> },
}

/// One step of an alias: a CNAME record of ours. Names as on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    pub owner: Vec<u8>,
    pub target: Vec<u8>,
}

/// `zone`: None while nobody has told what the cluster holds; `domain` is then all we know.
pub fn answer(zone: Option<&Zone>, domain: &str, envelope: &Envelope, query: &Query<'_>, spin: u32) -> Outcome {
    if query.class != wire::CLASS_IN || kind::QUESTIONS_ONLY.contains(&query.kind) {
        return Outcome::Reply(envelope.empty(rcode::REFUSED));
    }
    if query.kind == kind::OPT {
        return Outcome::Reply(envelope.empty(rcode::FORMAT));
    }
    let forward = |name: &[u8], aliases| {
        let rest = query.question.get(query.name().len()..).unwrap_or_default();
        Outcome::Forward { question: [name, rest].concat(), aliases }
    };
    let Some(zone) = zone else {
        // "No such name" would be kept by the asker, and may be wrong a moment later.
        return match is_below(&wire::labels(query.name()), domain) {
            true => Outcome::Reply(envelope.empty(rcode::FAILURE)),
            false => forward(query.name(), Vec::new()),
        };
    };
    let mut aliases: Vec<Alias> = Vec::new();
    let mut name = query.name().to_vec();
    // One more than there is room for: that something is missing has to show.
    let most = envelope.limit() / RECORD + 1;
    loop {
        let labels = wire::labels(&name);
        match zone.lookup(&labels, Asked { kind: query.kind, spin, most }) {
            Lookup::NotOurs => return forward(&name, aliases),
            Lookup::Alias(target) => {
                let Some(target) = wire::name_of(&target).filter(|_| aliases.len() < ALIASES) else {
                    return Outcome::Reply(envelope.empty(rcode::FAILURE));
                };
                aliases.push(Alias { owner: name, target: target.clone() });
                if query.kind == kind::CNAME {
                    return finish(query, envelope, Reply { aliases: &aliases, ..Reply::default() });
                }
                name = target;
            }
            Lookup::Records(records) => {
                let (name, aliases, records) = (&name, &aliases, Some(&records));
                return finish(query, envelope, Reply { zone: Some(zone), name, aliases, records, ..Reply::default() });
            }
            Lookup::NoData(apex) => {
                let (name, aliases, soa) = (&name, &aliases, Some(apex));
                return finish(query, envelope, Reply { zone: Some(zone), name, aliases, soa, ..Reply::default() });
            }
            Lookup::NoName(apex) => {
                let (name, aliases, soa) = (&name, &aliases, Some(apex));
                let reply = Reply { zone: Some(zone), name, aliases, soa, no_name: true, ..Reply::default() };
                return finish(query, envelope, reply);
            }
        }
    }
}

pub fn is_below(labels: &[&[u8]], domain: &str) -> bool {
    let depth = domain.split('.').count();
    labels.len() >= depth && labels.iter().rev().zip(domain.rsplit('.')).all(|(l, d)| l.eq_ignore_ascii_case(d.as_bytes()))
}

/// What a reply of ours is made of.
#[derive(Clone, Copy, Default)]
struct Reply<'a> {
    zone: Option<&'a Zone>,
    /// Whose records they are: the end of the aliases.
    name: &'a [u8],
    aliases: &'a [Alias],
    records: Option<&'a Records>,
    soa: Option<Apex>,
    no_name: bool,
}

fn finish(query: &Query<'_>, envelope: &Envelope, reply: Reply<'_>) -> Outcome {
    // A message that cannot be made is our failure, and never silence.
    Outcome::Reply(build(query, &reply).unwrap_or_else(|_| envelope.empty(rcode::FAILURE)))
}

fn build(query: &Query<'_>, reply: &Reply<'_>) -> simple_dns::Result<Vec<u8>> {
    let mut packet = Packet::new_reply(0);
    packet.questions.push(question(query));
    packet.answers.extend(reply.aliases.iter().map(alias));
    let texts = Texts::of(reply)?;
    if let (Some(zone), Some(records)) = (reply.zone, reply.records) {
        for (data, text) in records.answers.iter().zip(&texts.targets) {
            let (ttl, data) = match data {
                Data::Version => (TTL_VERSION, RData::TXT(TXT::new().with_string(SCHEMA_VERSION)?)),
                Data::Authority => (TTL, soa(zone, &texts)),
                Data::Address(ip) => (TTL, address(*ip)),
                Data::Pointer(_) => (TTL, RData::PTR(PTR(on_wire(text)))),
                Data::NameServer(_) => (TTL, RData::NS(NS(on_wire(text)))),
                Data::Service { port, weight, .. } => {
                    let target = on_wire(text);
                    (TTL, RData::SRV(SRV { priority: 0, weight: *weight, port: *port, target }))
                }
            };
            packet.answers.push(ResourceRecord::new(on_wire(reply.name), CLASS::IN, ttl, data));
        }
        let extra = records.extra.iter().zip(&texts.extra);
        let extra = extra.map(|((_, ip), owner)| ResourceRecord::new(on_wire(owner), CLASS::IN, TTL, address(*ip)));
        packet.additional_records.extend(extra);
    }
    if let (Some(zone), Some(Apex(depth))) = (reply.zone, reply.soa) {
        let labels = wire::labels(reply.name);
        let apex = labels.get(labels.len().saturating_sub(depth)..).unwrap_or_default();
        packet.name_servers.push(ResourceRecord::new(name(apex), CLASS::IN, TTL, soa(zone, &texts)));
    }
    if reply.no_name {
        *packet.rcode_mut() = RCODE::NameError;
    }
    packet.build_bytes_vec_compressed()
}

/// The reply to a question whose name is an alias of one that an upstream told about.
pub fn join(envelope: &Envelope, aliases: &[Alias], upstream: &[u8]) -> Vec<u8> {
    let joined = || {
        let query = Query::parse_question(&envelope.question)?;
        // A forged count costs no more than the records that the bytes have room for.
        wire::records(upstream)?.all(|record| record.is_some()).then_some(())?;
        let found = Packet::parse(upstream).ok()?;
        let mut packet = Packet::new_reply(0);
        packet.questions.push(question(&query));
        packet.answers.extend(aliases.iter().map(alias));
        packet.answers.extend(found.answers.iter().cloned());
        packet.name_servers.extend(found.name_servers.iter().cloned());
        *packet.rcode_mut() = found.rcode();
        packet.build_bytes_vec_compressed().ok()
    };
    let mut message = joined().unwrap_or_else(|| envelope.empty(rcode::FAILURE));
    if wire::u16_at(upstream, 2).is_some_and(|flags| flags & wire::flag::TRUNCATED != 0) {
        let flags = wire::u16_at(&message, 2).unwrap_or(0);
        wire::set_u16(&mut message, 2, flags | wire::flag::TRUNCATED);
    }
    message
}

/// Names of records as on the wire, held while the packet that borrows them is written.
struct Texts {
    targets: Vec<Vec<u8>>,
    extra: Vec<Vec<u8>>,
    server: Vec<u8>,
    mailbox: Vec<u8>,
}

impl Texts {
    fn of(reply: &Reply<'_>) -> simple_dns::Result<Texts> {
        let wire = |text: &str| wire::name_of(text).ok_or(simple_dns::SimpleDnsError::InvalidServiceName);
        let target = |data: &Data| match data {
            Data::Pointer(name) | Data::NameServer(name) | Data::Service { target: name, .. } => wire(name),
            Data::Address(_) | Data::Version | Data::Authority => Ok(Vec::new()),
        };
        let (mut targets, mut extra) = (Vec::new(), Vec::new());
        if let Some(records) = reply.records {
            targets = records.answers.iter().map(target).collect::<Result<_, _>>()?;
            extra = records.extra.iter().map(|(name, _)| wire(name)).collect::<Result<_, _>>()?;
        }
        let (server, mailbox) = match reply.zone {
            Some(zone) => (wire(&zone.server_name())?, wire(&format!("hostmaster.{}", zone.domain()))?),
            None => (Vec::new(), Vec::new()),
        };
        Ok(Texts { targets, extra, server, mailbox })
    }
}

fn question<'a>(query: &Query<'a>) -> Question<'a> {
    let kind = QTYPE::TYPE(query.kind.into());
    Question::new(on_wire(query.name()), kind, QCLASS::CLASS(CLASS::IN), false)
}

fn alias(step: &Alias) -> ResourceRecord<'_> {
    ResourceRecord::new(on_wire(&step.owner), CLASS::IN, TTL, RData::CNAME(CNAME(on_wire(&step.target))))
}

fn soa<'a>(zone: &Zone, texts: &'a Texts) -> RData<'a> {
    RData::SOA(SOA {
        mname: on_wire(&texts.server),
        rname: on_wire(&texts.mailbox),
        serial: zone.serial(),
        refresh: 7200,
        retry: 1800,
        expire: 86400,
        minimum: TTL,
    })
}

fn address(ip: IpAddr) -> RData<'static> {
    match ip {
        IpAddr::V4(ip) => RData::A(A::from(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA::from(ip)),
    }
}

fn on_wire(wire: &[u8]) -> Name<'_> {
    name(&wire::labels(wire))
}

/// Labels keep their case, byte for byte.
fn name<'a>(labels: &[&'a [u8]]) -> Name<'a> {
    let labels: Vec<Label<'a>> = labels.iter().map(|label| Label::new_unchecked(*label)).collect();
    Name::new_with_labels(&labels)
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
