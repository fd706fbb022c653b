//! Messages of the DNS server: what pods ask, what upstreams answer.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use coracle::dns::answer::{Outcome, answer, join};
use coracle::dns::forward::{Client, Effect, Forwarder, To};
use coracle::dns::model::Counters;
use coracle::dns::wire::{self, Envelope, Query, Unfit};
use coracle::dns::zone::{Objects, Zone};

fn zone() -> &'static Zone {
    static ZONE: OnceLock<Zone> = OnceLock::new();
    ZONE.get_or_init(|| {
        let service = |json: &str| serde_json::from_str(json).expect("our own Service");
        let services = [
            service(r#"{"metadata": {"namespace": "shop", "name": "web"}, "spec": {"clusterIP": "10.96.0.10", "ports": [{"name": "http", "port": 80}]}}"#),
            service(r#"{"metadata": {"namespace": "shop", "name": "db"}, "spec": {"clusterIP": "None"}}"#),
            service(r#"{"metadata": {"namespace": "shop", "name": "out"}, "spec": {"type": "ExternalName", "externalName": "www.example.com"}}"#),
        ];
        let slice = serde_json::from_str(
            r#"{"metadata": {"namespace": "shop", "name": "db", "labels": {"kubernetes.io/service-name": "db"}}, "addressType": "IPv4",
                "ports": [{"name": "pg", "port": 5432}], "endpoints": [{"addresses": ["10.88.0.5"], "hostname": "db-0"}, {"addresses": ["10.88.0.6"]}]}"#,
        )
        .expect("our own EndpointSlice");
        let address: IpAddr = [10, 88, 0, 5].into();
        Zone::build(&Objects {
            domain: "cluster.local",
            servers: &[[10, 88, 0, 1].into()],
            ranges: &["10.88.0.0/16".parse().expect("a range")],
            serial: 1,
            services: &services.iter().collect::<Vec<_>>(),
            slices: &[&slice],
            pods: &[("shop", &[address])],
        })
        .expect("our own zone")
    })
}

/// Any bytes as a question: a reply that fits and can be read, a short refusal, or silence.
pub fn question(data: &[u8]) {
    let Some((first, bytes)) = data.split_first() else { return };
    let query = match Query::parse(bytes) {
        Ok(query) => query,
        Err(Unfit::Silent) => return,
        Err(Unfit::Answer(reply)) => return assert!(reply.len() <= wire::HEADER + wire::OPT),
    };
    let envelope = Envelope::of(&query, first & 1 == 1);
    let message = match answer(Some(zone()), "cluster.local", &envelope, &query, u32::from(*first)) {
        Outcome::Reply(message) => message,
        Outcome::Forward { question, aliases } => {
            assert!(question.len() > 4);
            join(&envelope, &aliases, bytes)
        }
    };
    let sealed = envelope.seal(message, true);
    assert!(sealed.len() <= envelope.limit());
    assert_eq!(&sealed[wire::HEADER..wire::HEADER + query.question.len()], query.question);
    assert!(wire::records(&sealed).expect("one question").all(|record| record.is_some()));
    assert_eq!(Query::parse(&sealed), Err(Unfit::Silent), "a reply is not answered");
}

/// Any bytes as an upstream's reply: whoever asked gets one message that fits and can be read.
pub fn reply(data: &[u8]) {
    let Some((first, bytes)) = data.split_first() else { return };
    // The question that the bytes seem to answer, so that some of them do.
    let id = wire::u16_at(bytes, 0).unwrap_or(0);
    let question = wire::records(bytes)
        .and_then(|_| wire::name(bytes, wire::HEADER, |_| {}))
        .and_then(|end| bytes.get(wire::HEADER..end + 4))
        .filter(|question| Query::parse(&wire::ask(1, question, false, None)).is_ok())
        .unwrap_or(b"\x01a\0\0\x01\0\x01");
    let asked = wire::ask(7, question, first & 2 != 0, (first & 4 != 0).then_some(first & 8 != 0));
    let envelope = Envelope::of(&Query::parse(&asked).expect("our own question"), first & 1 == 1);
    let mut forwarder = Forwarder::new(64 << 10, Arc::new(Counters::default()));
    forwarder.set_servers(&[([192, 0, 2, 1], 53).into()]);
    let mut ids = || Some(id);
    let mut replies = 0;
    for round in 0..2 {
        let mut out = Vec::new();
        let client = Client { to: To::Tcp(round), ip: [10, 88, 0, 7].into(), envelope: envelope.clone(), aliases: Vec::new() };
        forwarder.ask(question.to_vec(), client, 0, &mut ids, &mut out);
        for _ in 0..8 {
            let mut more = Vec::new();
            for effect in out.drain(..) {
                match effect {
                    Effect::Ask { attempt, .. } => forwarder.told(attempt, bytes, 0, &mut ids, &mut more),
                    Effect::Reply { message, .. } => {
                        replies += 1;
                        assert!(message.len() <= envelope.limit());
                        assert!(wire::records(&message).expect("one question").all(|record| record.is_some()));
                    }
                    Effect::Forget { .. } => {}
                }
            }
            out = more;
        }
        forwarder.pass(10_000_000_000, &mut ids, &mut out);
        replies += out.iter().filter(|effect| matches!(effect, Effect::Reply { .. })).count();
    }
    assert_eq!(replies, 2);
}
