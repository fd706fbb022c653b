//! Messages against those of another library (simple-dns), and any bytes at all.
#![deny(clippy::disallowed_methods)]

use simple_dns::{CLASS, Name, Packet, QTYPE, Question, ResourceRecord, TYPE, rdata::A, rdata::RData};

use super::envelope::{cut, push_opt};
use super::*;

fn question(name: &str, kind: u16) -> Vec<u8> {
    let mut question = name_of(name).unwrap();
    question.extend_from_slice(&kind.to_be_bytes());
    question.extend_from_slice(&CLASS_IN.to_be_bytes());
    question
}

fn query(name: &str, kind: u16, edns: Option<(u16, bool)>) -> Vec<u8> {
    let mut message = ask(0x1234, &question(name, kind), false, edns.map(|(_, dnssec_ok)| dnssec_ok));
    if let Some((size, _)) = edns {
        let at = message.len() - 8;
        set_u16(&mut message, at, size);
    }
    message
}

/// A message with `n` addresses, made by somebody else's code.
fn addresses(name: &str, n: u32) -> Vec<u8> {
    let mut packet = Packet::new_reply(7);
    packet.questions.push(Question::new(Name::new(name).unwrap(), QTYPE::TYPE(TYPE::A), CLASS::IN.into(), false));
    for address in 0..n {
        packet.answers.push(ResourceRecord::new(Name::new(name).unwrap(), CLASS::IN, 60 + address, RData::A(A { address })));
    }
    packet.build_bytes_vec_compressed().unwrap()
}

fn counts(message: &[u8]) -> [u16; 4] {
    [4, 6, 8, 10].map(|at| u16_at(message, at).unwrap())
}

#[test]
fn a_question_is_read_as_another_library_reads_it() {
    for edns in [None, Some((1400, false)), Some((4096, true))] {
        let bytes = query("Web.Shop.svc.cluster.local", kind::AAAA, edns);
        let ours = Query::parse(&bytes).unwrap();
        let theirs = Packet::parse(&bytes).unwrap();
        assert_eq!((ours.id, ours.kind, ours.class), (theirs.id(), kind::AAAA, CLASS_IN));
        let labels: Vec<&[u8]> = theirs.questions[0].qname.as_bytes().collect();
        assert_eq!(super::labels(ours.name()), labels);
        assert_eq!(ours.edns.map(|e| (e.size, e.dnssec_ok)), edns);
        assert_eq!(theirs.opt().map(|o| o.udp_packet_size), edns.map(|(size, _)| size));
    }
}

#[test]
fn a_type_that_nobody_knows_is_a_question_like_any_other() {
    let bytes = query("example.org", 65280, None);
    assert_eq!(Query::parse(&bytes).unwrap().kind, 65280);
}

#[test]
fn who_does_not_ask_gets_no_answer_and_who_asks_wrongly_gets_a_header() {
    let good = query("example.org", kind::A, None);
    let unfit = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        match Query::parse(&bytes) {
            Err(Unfit::Answer(reply)) => {
                assert!(reply.len() <= bytes.len().max(HEADER + OPT), "no more comes back than came");
                Some((u16_at(&reply, 0).unwrap(), u16_at(&reply, 2).unwrap() & 0xF))
            }
            Err(Unfit::Silent) => None,
            Ok(query) => panic!("{query:?}"),
        }
    };
    assert_eq!(unfit(&|b| b.truncate(11)), None);
    assert_eq!(unfit(&|b| b[2] |= 0x80), None, "an answer is not answered");
    assert_eq!(unfit(&|b| b[2] |= 0x28), Some((0x1234, rcode::NOT_IMPLEMENTED)), "an update");
    assert_eq!(unfit(&|b| b[5] = 0), Some((0x1234, rcode::FORMAT)));
    assert_eq!(unfit(&|b| b[5] = 2), Some((0x1234, rcode::FORMAT)));
    assert_eq!(unfit(&|b| b[7] = 1), Some((0x1234, rcode::FORMAT)));
    assert_eq!(unfit(&|b| b[11] = 1), Some((0x1234, rcode::FORMAT)), "a record that is not there");
    assert_eq!(unfit(&|b| b[10] = 0xFF), Some((0x1234, rcode::FORMAT)), "65,280 records that are not there");
    assert_eq!(unfit(&|b| b.truncate(20)), Some((0x1234, rcode::FORMAT)));
    assert_eq!(unfit(&|b| b[12] = 0xC0), Some((0x1234, rcode::FORMAT)), "a jump in the first name");
    assert_eq!(unfit(&|b| b[12] = 0x40), Some((0x1234, rcode::FORMAT)), "a label of an unknown kind");
}

#[test]
fn two_opt_records_are_one_too_many_and_another_version_is_told_ours() {
    let mut two = query("example.org", kind::A, Some((512, false)));
    push_opt(&mut two, false, 0);
    assert!(matches!(Query::parse(&two), Err(Unfit::Answer(reply)) if reply[3] & 0xF == 1));
    let mut later = query("example.org", kind::A, Some((512, false)));
    let at = later.len() - 5;
    later[at] = 1;
    let Err(Unfit::Answer(reply)) = Query::parse(&later) else { panic!() };
    // RFC 6891 §6.1.3: the upper eight bits are the first byte of the TTL (simple-dns 0.13 looks
    // for them in the last one). What dig makes of it: tests/dns.rs.
    assert_eq!((reply[3] & 0xF, &reply[12..]), (0, &[0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0][..]));
}

#[test]
fn names_end_whatever_their_jumps_say() {
    let mut bytes = vec![0; HEADER];
    let at = bytes.len();
    bytes.extend_from_slice(b"\x01a\xC0\x0C");
    assert_eq!(name(&bytes, at, |_| {}), None, "onto itself");
    bytes.extend_from_slice(b"\x01b\xC0\x0E");
    assert_eq!(name(&bytes, at + 4, |_| {}), None, "onto a jump onto itself");
    let mut chain = vec![0; HEADER];
    chain.push(0);
    for target in 0..2000u16 {
        let to = if target == 0 { HEADER as u16 } else { HEADER as u16 + 1 + (target - 1) * 2 };
        chain.extend_from_slice(&(0xC000 | to).to_be_bytes());
    }
    assert_eq!(name(&chain, chain.len() - 2, |_| {}), None, "two thousand jumps");
    assert_eq!(name(&chain, HEADER + 1 + 40 * 2, |_| {}), Some(HEADER + 1 + 41 * 2));
    let mut long = vec![0; HEADER];
    for _ in 0..5 {
        long.push(63);
        long.extend_from_slice(&[b'x'; 63]);
    }
    long.push(0);
    assert_eq!(name(&long, HEADER, |_| {}), None, "320 bytes");
}

#[test]
fn text_becomes_a_name_or_nothing() {
    assert_eq!(name_of("a.bc.").unwrap(), b"\x01a\x02bc\0");
    for bad in ["", ".", "a..b", &"x".repeat(64), &"a.".repeat(128)] {
        assert_eq!(name_of(bad), None, "{bad}");
    }
    assert_eq!(labels(&name_of("a.bc").unwrap()), [b"a".as_slice(), b"bc"]);
}

#[test]
fn a_reply_must_fit_its_question_in_everything() {
    let asked = question("Host.example.org", kind::A);
    let good = addresses("host.EXAMPLE.org", 2);
    assert_eq!(reply(&good, 7, &asked).unwrap().ttl, Some(60));
    assert_eq!(reply(&good, 8, &asked), None, "another id");
    assert_eq!(reply(&good, 7, &question("host.example.com", kind::A)), None);
    assert_eq!(reply(&good, 7, &question("host.example.org", kind::AAAA)), None);
    let mut bad = good.clone();
    bad[2] &= 0x7F;
    assert_eq!(reply(&bad, 7, &asked), None, "a question");
    assert_eq!(reply(&good[..good.len() - 1], 7, &asked), None, "cut off");
    let mut forged = good.clone();
    forged[6] = 0xFF;
    assert_eq!(reply(&forged, 7, &asked), None, "more records than bytes");
}

#[test]
fn what_holds_how_long_is_read_from_the_reply() {
    let asked = question("host.example.org", kind::A);
    let soa = |ttl: u32, minimum: u32| {
        let mut record = b"\0\0\x06\0\x01".to_vec();
        record.extend_from_slice(&ttl.to_be_bytes());
        record.extend_from_slice(b"\0\x16\0\0\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04");
        record.extend_from_slice(&minimum.to_be_bytes());
        record
    };
    let message = |code: u8, authority: &[u8]| {
        let mut message = addresses("host.example.org", 0);
        message[3] = code;
        message[9] = u8::from(!authority.is_empty());
        message.extend_from_slice(authority);
        reply(&message, 7, &asked).map(|r| (r.rcode, r.ttl, r.negative)).unwrap()
    };
    assert_eq!(message(3, &soa(900, 60)), (rcode::NO_NAME, Some(60), true));
    assert_eq!(message(0, &soa(30, 60)), (rcode::OK, Some(30), true));
    assert_eq!(message(0, &soa(u32::MAX, 60)), (rcode::OK, Some(0), true), "the highest bit means none");
    assert_eq!(message(3, b""), (rcode::NO_NAME, None, true), "no SOA, no negative caching");
    assert_eq!(message(2, &soa(30, 60)), (rcode::FAILURE, None, true));
}

#[test]
fn the_upstream_s_opt_record_stays_behind() {
    let asked = question("host.example.org", kind::A);
    let plain = addresses("host.example.org", 1);
    let mut with = plain.clone();
    push_opt(&mut with, true, 0);
    with.extend_from_slice(b"garbage");
    assert_eq!(reply(&with, 7, &asked).unwrap().message, plain);
    let mut extended = plain;
    push_opt(&mut extended, false, 1);
    assert_eq!(reply(&extended, 7, &asked).unwrap().rcode, 16);
}

#[test]
fn ttls_are_set_in_every_record_and_nowhere_else() {
    let mut message = addresses("host.example.org", 3);
    set_ttls(&mut message, |ttl| ttl - 60);
    let packet = Packet::parse(&message).unwrap();
    assert_eq!(packet.answers.iter().map(|r| r.ttl).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn a_sealed_reply_fits_what_the_asker_takes_and_says_when_it_is_not_all() {
    for (edns, tcp, limit) in [
        (None, false, 512),
        (Some((100, false)), false, 512),
        (Some((900, false)), false, 900),
        (Some((4096, true)), false, UDP),
        (None, true, TCP),
    ] {
        let asked = query("HOST.example.org", kind::A, edns);
        let envelope = Envelope::of(&Query::parse(&asked).unwrap(), tcp);
        for n in [0, 1, 20, 28, 29, 30, 75, 76, 300, 5000] {
            let sealed = envelope.seal(addresses("host.example.org", n), false);
            assert!(sealed.len() <= limit, "{} bytes of {limit}", sealed.len());
            let packet = Packet::parse(&sealed).unwrap();
            assert_eq!(packet.id(), 0x1234);
            assert_eq!(packet.questions[0].qname.to_string(), "HOST.example.org", "as it was asked");
            assert_eq!(packet.opt().is_some(), edns.is_some());
            let whole = packet.answers.len() == n as usize;
            assert_eq!(packet.has_flags(simple_dns::PacketFlag::TRUNCATION), !whole, "{n} records in {limit}");
            assert!(whole || sealed.len() + 16 > limit - OPT, "as many as fit");
            assert!(packet.has_flags(simple_dns::PacketFlag::RECURSION_AVAILABLE | simple_dns::PacketFlag::RESPONSE));
        }
    }
    let counted = counts(&addresses("host.example.org", 3));
    assert_eq!(counted, [1, 3, 0, 0]);
}

mod any_bytes {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_panics_and_replies_to_garbage_are_short(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            check(&bytes);
        }

        #[test]
        fn nor_with_a_header_that_looks_right(mut bytes in proptest::collection::vec(any::<u8>(), 12..400), counts in any::<[u8; 4]>()) {
            bytes[2] &= 0x87;
            for (at, count) in [5, 7, 9, 11].into_iter().zip(counts) {
                bytes[at - 1] = 0;
                bytes[at] = count % 4;
            }
            bytes[4..6].copy_from_slice(&[0, 1]);
            check(&bytes);
        }
    }

    fn check(bytes: &[u8]) {
        match Query::parse(bytes) {
            Ok(query) => {
                let envelope = Envelope::of(&query, false);
                let sealed = envelope.seal(envelope.empty(rcode::REFUSED), true);
                assert_eq!(Query::parse(&sealed), Err(Unfit::Silent));
                assert_eq!(counts(&sealed)[..3], [1, 0, 0]);
                if let Some(reply) = reply(bytes, query.id, query.question) {
                    assert!(reply.message.len() <= bytes.len());
                }
            }
            Err(Unfit::Answer(reply)) => assert!(reply.len() <= HEADER + OPT),
            Err(Unfit::Silent) => {}
        }
        let mut copy = bytes.to_vec();
        set_ttls(&mut copy, |_| 5);
        cut(&mut copy, 100);
        assert!(copy.len() <= bytes.len());
    }
}
