//! The life of questions: time, servers and replies are the test's.

use std::collections::BTreeMap;

use proptest::prelude::*;
use simple_dns::{
    CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, ResourceRecord, TYPE, rdata::A, rdata::RData, rdata::SOA,
};

use super::*;

const SECOND: i64 = 1_000_000_000;

fn server(n: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, n], 53))
}

/// The forwarder with its surroundings: time, ids, and what is open on the wire.
struct World {
    forwarder: Forwarder,
    counters: Arc<Counters>,
    now: i64,
    ids: u16,
    open: BTreeMap<u32, (SocketAddr, bool, Vec<u8>)>,
    replies: Vec<(To, Vec<u8>)>,
    clients: u16,
}

impl World {
    fn new(servers: &[u8]) -> World {
        let counters = Arc::new(Counters::default());
        let mut forwarder = Forwarder::new(1 << 20, Arc::clone(&counters));
        forwarder.set_servers(&servers.iter().map(|n| server(*n)).collect::<Vec<_>>());
        World { forwarder, counters, now: 0, ids: 0, open: BTreeMap::new(), replies: Vec::new(), clients: 0 }
    }

    fn step(&mut self, step: impl FnOnce(&mut Forwarder, i64, Ids<'_>, &mut Vec<Effect>)) {
        let mut out = Vec::new();
        let ids = &mut self.ids;
        step(
            &mut self.forwarder,
            self.now,
            &mut || {
                *ids += 1;
                Some(*ids)
            },
            &mut out,
        );
        for effect in out {
            match effect {
                Effect::Reply { to, message } => self.replies.push((to, message)),
                Effect::Ask { attempt, server, tcp, message } => {
                    assert!(self.open.insert(attempt, (server, tcp, message)).is_none());
                }
                Effect::Forget { attempt } => assert!(self.open.remove(&attempt).is_some(), "only what is open is closed"),
            }
        }
    }

    /// A new asker of its own port.
    fn ask(&mut self, name: &str) -> To {
        self.clients += 1;
        let to = To::Udp(0, SocketAddr::from(([10, 88, 0, 7], 1000 + self.clients)));
        self.ask_as(to, name, 77);
        to
    }

    fn ask_as(&mut self, to: To, name: &str, id: u16) {
        let mut question = wire::name_of(name).unwrap();
        question.extend_from_slice(&[0, 1, 0, 1]);
        let bytes = wire::ask(id, &question, false, None);
        let envelope = Envelope::of(&wire::Query::parse(&bytes).unwrap(), false);
        let client = Client { to, ip: [10, 88, 0, 7].into(), envelope, aliases: Vec::new() };
        self.step(|forwarder, now, ids, out| forwarder.ask(question, client, now, ids, out));
    }

    fn wait(&mut self, until: i64) {
        while let Some(due) = self.forwarder.due().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.step(|forwarder, now, ids, out| forwarder.pass(now, ids, out));
        }
        self.now = until;
        self.step(|forwarder, now, ids, out| forwarder.pass(now, ids, out));
    }

    /// Attempts that are open: their servers, `t` for TCP.
    fn asked(&self) -> Vec<String> {
        self.open.values().map(|(server, tcp, _)| format!("{}{}", server.ip(), if *tcp { "t" } else { "" })).collect()
    }

    fn last(&self) -> u32 {
        *self.open.keys().last().expect("somebody is asked")
    }

    fn tell(&mut self, attempt: u32, change: impl FnOnce(&mut Packet<'_>)) {
        let asked = self.open.get(&attempt).expect("it is open").2.clone();
        let bytes = reply_to(&asked, change);
        self.step(|forwarder, now, ids, out| forwarder.told(attempt, &bytes, now, ids, out));
    }

    /// What `to` got: the code, or the addresses with their TTL.
    fn got(&mut self, to: To) -> String {
        let at = self.replies.iter().position(|(who, _)| *who == to);
        let Some(at) = at else { return "nothing".to_owned() };
        let (_, message) = self.replies.remove(at);
        assert!(self.replies.iter().all(|(who, _)| *who != to), "one reply each");
        let packet = Packet::parse(&message).unwrap();
        assert_eq!(packet.id(), 77);
        let address = |record: &ResourceRecord<'_>| match &record.rdata {
            RData::A(a) => format!("{} for {} s", std::net::Ipv4Addr::from(a.address), record.ttl),
            other => format!("{other:?}"),
        };
        match packet.answers.first() {
            Some(record) => address(record),
            None => format!("{:?}", packet.rcode()),
        }
    }

    fn count(&self, name: &str) -> u64 {
        self.counters.read().iter().find(|(known, _)| known.contains(name)).unwrap().1
    }
}

fn reply_to(asked: &[u8], change: impl FnOnce(&mut Packet<'_>)) -> Vec<u8> {
    let query = Packet::parse(asked).unwrap();
    let mut reply = Packet::new_reply(query.id());
    reply.questions = query.questions;
    change(&mut reply);
    reply.build_bytes_vec_compressed().unwrap()
}

fn address(last: u8, ttl: u32) -> impl FnOnce(&mut Packet<'_>) {
    move |packet| {
        let name = packet.questions[0].qname.clone();
        let a = RData::A(A::from(std::net::Ipv4Addr::new(203, 0, 113, last)));
        packet.answers.push(ResourceRecord::new(name, CLASS::IN, ttl, a));
    }
}

fn code(code: RCODE) -> impl FnOnce(&mut Packet<'_>) {
    move |packet| *packet.rcode_mut() = code
}

fn no_name(packet: &mut Packet<'_>) {
    *packet.rcode_mut() = RCODE::NameError;
    let root = Name::new(".").unwrap();
    let soa = SOA { mname: root.clone(), rname: root.clone(), serial: 1, refresh: 1, retry: 1, expire: 1, minimum: 60 };
    packet.name_servers.push(ResourceRecord::new(root, CLASS::IN, 60, RData::SOA(soa)));
}

#[test]
fn an_answer_goes_to_who_asked_and_stays_for_the_next() {
    let mut world = World::new(&[1, 2]);
    let a = world.ask("example.org");
    assert_eq!((world.asked(), world.got(a)), (vec!["192.0.2.1".to_owned()], "nothing".to_owned()));
    world.tell(world.last(), address(9, 60));
    assert_eq!(world.got(a), "203.0.113.9 for 60 s");
    world.now = 20 * SECOND;
    let b = world.ask("EXAMPLE.org");
    assert_eq!(world.got(b), "203.0.113.9 for 40 s");
    assert!(world.open.is_empty());
    world.now = 61 * SECOND;
    let c = world.ask("example.org");
    assert_eq!((world.got(c).as_str(), world.open.len()), ("nothing", 1), "it holds no longer");
}

#[test]
fn nothing_is_promised_for_longer_than_it_is_kept() {
    let mut world = World::new(&[1]);
    let a = world.ask("example.org");
    world.tell(world.last(), address(9, 86400));
    assert_eq!(world.got(a), "203.0.113.9 for 3600 s");
    world.now = 3599 * SECOND;
    let b = world.ask("example.org");
    assert_eq!(world.got(b), "203.0.113.9 for 1 s");
}

#[test]
fn who_asks_the_same_waits_for_the_same_flight_and_each_once() {
    let mut world = World::new(&[1]);
    let all: Vec<To> = (0..20).map(|_| world.ask("example.org")).collect();
    world.ask_as(all[3], "example.org", 77);
    assert_eq!(world.open.len(), 1);
    world.tell(world.last(), address(9, 60));
    for to in all {
        assert_eq!(world.got(to), "203.0.113.9 for 60 s");
    }
    assert!(world.replies.is_empty());
}

#[test]
fn a_silent_server_is_followed_by_the_next_and_may_still_be_the_one_that_answers() {
    let mut world = World::new(&[1, 2]);
    let a = world.ask("example.org");
    let first = world.last();
    world.wait(TRY);
    assert_eq!(world.asked(), ["192.0.2.1", "192.0.2.2"]);
    world.tell(first, address(9, 60));
    assert_eq!(world.got(a), "203.0.113.9 for 60 s");
    assert!(world.open.is_empty(), "the other is forgotten");
}

#[test]
fn errors_and_failures_lead_to_the_next_server_at_once() {
    let mut world = World::new(&[1, 2, 3]);
    let a = world.ask("example.org");
    world.step(|f, now, ids, out| f.failed(1 + 1, now, ids, out));
    assert_eq!(world.asked(), ["192.0.2.2"]);
    world.tell(world.last(), code(RCODE::ServerFailure));
    assert_eq!(world.asked(), ["192.0.2.3"]);
    world.tell(world.last(), code(RCODE::Refused));
    for _ in 0..3 {
        world.tell(world.last(), code(RCODE::ServerFailure));
    }
    assert_eq!((world.got(a).as_str(), world.now), ("ServerFailure", 0), "after two rounds");
    assert!(world.open.is_empty());
}

#[test]
fn nobody_answers_and_whoever_waits_is_told_before_they_lose_patience() {
    let mut world = World::new(&[1]);
    let a = world.ask("example.org");
    world.wait(GIVE_UP - 1);
    assert_eq!((world.got(a).as_str(), world.open.len()), ("nothing", 3));
    world.wait(GIVE_UP);
    assert_eq!((world.got(a).as_str(), world.open.len()), ("ServerFailure", 0));
    let b = world.ask("example.org");
    assert_eq!((world.got(b).as_str(), world.open.len()), ("ServerFailure", 0), "for a second nobody is asked again");
    world.wait(world.now + SECOND);
    world.ask("example.org");
    assert_eq!(world.open.len(), 1);
    let mut none = World::new(&[]);
    let c = none.ask("example.org");
    assert_eq!(none.got(c), "ServerFailure");
}

#[test]
fn with_the_uplink_gone_old_answers_come_after_a_second_and_then_at_once() {
    let mut world = World::new(&[1]);
    for name in ["a.example.org", "b.example.org"] {
        world.ask(name);
        world.tell(world.last(), address(9, 60));
    }
    world.ask("no.example.org");
    world.tell(world.last(), no_name);
    world.replies.clear();
    world.now = 3600 * SECOND;
    let a = world.ask("a.example.org");
    world.wait(world.now + STALE_AFTER - 1);
    assert_eq!(world.got(a), "nothing");
    world.wait(world.now + 1);
    assert_eq!(world.got(a), "203.0.113.9 for 30 s");
    world.wait(world.now + GIVE_UP);
    let b = world.ask("b.example.org");
    assert_eq!(world.got(b), "203.0.113.9 for 30 s", "the uplink is known to be gone");
    let no = world.ask("no.example.org");
    assert_eq!(world.got(no), "NameError", "also what is not there");
    assert_eq!(world.open.len(), 2, "somebody keeps asking");
    world.tell(world.last(), no_name);
    let b = world.ask("b.example.org");
    assert_eq!(world.got(b), "nothing", "it is back: an old answer is the last resort again");
    let first = *world.open.keys().next().unwrap();
    world.tell(first, address(10, 60));
    assert_eq!(world.got(b), "203.0.113.10 for 60 s");
    assert_eq!(world.count("stale"), 3);
}

#[test]
fn an_old_answer_does_not_hide_a_new_one_that_comes_in_time() {
    let mut world = World::new(&[1]);
    world.ask("example.org");
    world.tell(world.last(), address(9, 60));
    world.replies.clear();
    world.now = 3600 * SECOND;
    let a = world.ask("example.org");
    world.wait(world.now + STALE_AFTER / 2);
    world.tell(world.last(), no_name);
    assert_eq!(world.got(a), "NameError");
}

#[test]
fn a_truncated_answer_is_fetched_by_tcp_and_where_that_fails_a_part_is_passed_on() {
    let truncated = |packet: &mut Packet<'_>| {
        address(9, 60)(packet);
        packet.set_flags(PacketFlag::TRUNCATION);
    };
    let mut world = World::new(&[1]);
    let a = world.ask("example.org");
    world.tell(world.last(), truncated);
    assert_eq!(world.asked(), ["192.0.2.1t"]);
    world.tell(world.last(), address(10, 60));
    assert_eq!(world.got(a), "203.0.113.10 for 60 s");

    let b = world.ask("example.com");
    world.tell(world.last(), truncated);
    let tcp = world.last();
    world.step(|f, now, ids, out| f.failed(tcp, now, ids, out));
    let (_, message) = world.replies.last().unwrap();
    assert!(Packet::parse(message).unwrap().has_flags(PacketFlag::TRUNCATION));
    assert_eq!(world.got(b), "203.0.113.9 for 60 s");
    world.ask("example.com");
    assert_eq!(world.open.len(), 1, "a part is not kept");
}

#[test]
fn a_server_that_does_not_know_edns_is_asked_without() {
    let mut world = World::new(&[1]);
    let has_opt = |world: &World| Packet::parse(&world.open[&world.last()].2).unwrap().opt().is_some();
    let a = world.ask("example.org");
    assert!(has_opt(&world));
    world.tell(world.last(), code(RCODE::FormatError));
    assert!(!has_opt(&world));
    world.tell(world.last(), address(9, 60));
    assert_eq!(world.got(a), "203.0.113.9 for 60 s");
    world.ask("example.com");
    assert!(!has_opt(&world), "and remembered");
}

#[test]
fn forged_replies_are_counted_and_the_right_one_still_counts() {
    let mut world = World::new(&[1]);
    let a = world.ask("example.org");
    let attempt = world.last();
    let good = reply_to(&world.open[&attempt].2.clone(), address(9, 60));
    let mut guess = good.clone();
    guess[1] ^= 1;
    let other = {
        let mut packet = Packet::new_reply(Packet::parse(&good).unwrap().id());
        packet.questions.push(Question::new(Name::new("evil.org").unwrap(), QTYPE::TYPE(TYPE::A), CLASS::IN.into(), false));
        packet.build_bytes_vec().unwrap()
    };
    for bytes in [&guess, &other, &good[..30].to_vec(), &Vec::new()] {
        world.step(|f, now, ids, out| f.told(attempt, bytes, now, ids, out));
    }
    assert_eq!((world.got(a).as_str(), world.count("forged")), ("nothing", 4));
    world.step(|f, now, ids, out| f.told(attempt, &good, now, ids, out));
    assert_eq!(world.got(a), "203.0.113.9 for 60 s");
}

#[test]
fn one_pod_cannot_take_all_places_and_a_flood_is_turned_away_at_once() {
    let mut world = World::new(&[1]);
    for n in 0..500 {
        world.ask(&format!("host{n}.example.org"));
    }
    assert_eq!((world.open.len(), world.count("overload")), (WAITING_EACH, 500 - WAITING_EACH as u64));
    assert_eq!(world.replies.len(), 500 - WAITING_EACH);
    for pod in 0..20u8 {
        for n in 0..100u16 {
            let to = To::Udp(0, SocketAddr::from(([10, 88, 1, pod], n)));
            let mut question = wire::name_of(&format!("h{n}.p{pod}.example.org")).unwrap();
            question.extend_from_slice(&[0, 1, 0, 1]);
            let bytes = wire::ask(77, &question, false, None);
            let envelope = Envelope::of(&wire::Query::parse(&bytes).unwrap(), false);
            let client = Client { to, ip: [10, 88, 1, pod].into(), envelope, aliases: Vec::new() };
            world.step(|f, now, ids, out| f.ask(question, client, now, ids, out));
        }
    }
    assert_eq!(world.forwarder.flights.len(), FLIGHTS);
    world.wait(world.now + GIVE_UP);
    assert_eq!((world.replies.len(), world.open.len()), (2500, 0), "each got one reply");
    let f = &world.forwarder;
    assert!(f.waiting.is_empty() && f.by_key.is_empty() && f.attempts.is_empty() && f.failures.len() <= FAILURES);
}

#[test]
fn a_name_of_no_time_is_not_kept_and_no_random_id_means_no_question() {
    let mut world = World::new(&[1]);
    world.ask("example.org");
    world.tell(world.last(), address(9, 0));
    world.ask("example.org");
    assert_eq!(world.open.len(), 1);
    let mut out = Vec::new();
    let bytes = wire::ask(77, b"\x01x\0\0\x01\0\x01", false, None);
    let envelope = Envelope::of(&wire::Query::parse(&bytes).unwrap(), false);
    let client = Client { to: To::Tcp(1), ip: [10, 88, 0, 7].into(), envelope, aliases: Vec::new() };
    world.forwarder.ask(b"\x01x\0\0\x01\0\x01".to_vec(), client, 0, &mut || None, &mut out);
    assert!(matches!(out.as_slice(), [Effect::Reply { message, .. }] if message[3] & 0xF == 2));
}

proptest! {
    /// Whatever happens in whatever order, each asker gets one reply and nothing stays behind.
    #[test]
    fn everybody_gets_exactly_one_reply(events in proptest::collection::vec((0u8..8, any::<u8>()), 1..120)) {
        let mut world = World::new(&[1, 2]);
        let mut askers = Vec::new();
        for (event, n) in events {
            let some = world.open.keys().nth(usize::from(n) % world.open.len().max(1)).copied();
            match (event, some) {
                (0 | 1, _) => askers.push(world.ask(&format!("h{}.org", n % 5))),
                (2, Some(attempt)) => world.tell(attempt, address(n, u32::from(n % 3) * 2)),
                (3, Some(attempt)) => world.tell(attempt, code(RCODE::ServerFailure)),
                (4, Some(attempt)) => world.step(|f, now, ids, out| f.failed(attempt, now, ids, out)),
                (5, Some(attempt)) => world.tell(attempt, |packet| packet.set_flags(PacketFlag::TRUNCATION)),
                (6, Some(attempt)) => world.tell(attempt, no_name),
                _ => world.wait(world.now + i64::from(n) * 10 * MILLI),
            }
        }
        world.wait(world.now + 2 * GIVE_UP);
        prop_assert!(world.open.is_empty() && world.forwarder.flights.is_empty());
        prop_assert!(world.forwarder.waiting.is_empty() && world.forwarder.attempts.is_empty() && world.forwarder.by_key.is_empty());
        for to in askers {
            prop_assert_eq!(world.replies.iter().filter(|(who, _)| *who == to).count(), 1);
        }
    }
}
