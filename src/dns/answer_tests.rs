//! Every kind of record as a sentence, and any question over any zone.

use std::collections::BTreeSet;

use proptest::prelude::*;
use simple_dns::PacketFlag;

use super::*;
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::service::Service;
use crate::dns::zone::Objects;
use crate::proxy::model::Cidr;

/// A cluster in a few lines of YAML's little brother.
struct Cluster {
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
    pods: Vec<(String, Vec<IpAddr>)>,
}

impl Cluster {
    fn example() -> Cluster {
        let service = |json: serde_json::Value| serde_json::from_value(json).unwrap();
        let slice = |namespace: &str, service: &str, family: &str, ports: serde_json::Value, endpoints: serde_json::Value| {
            serde_json::from_value(serde_json::json!({
                "metadata": {"namespace": namespace, "name": service, "labels": {"kubernetes.io/service-name": service}},
                "addressType": family, "ports": ports, "endpoints": endpoints,
            }))
            .unwrap()
        };
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let http = || json(r#"[{"name": "http", "port": 8080, "protocol": "TCP"}]"#);
        Cluster {
            services: vec![
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "web"}, "spec": {"clusterIP": "10.96.0.10",
                        "clusterIPs": ["10.96.0.10", "fd96::10"], "ports": [{"name": "http", "port": 80, "protocol": "TCP"},
                        {"name": "dns", "port": 53, "protocol": "UDP"}, {"port": 99, "protocol": "TCP"}]}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "db"}, "spec": {"clusterIP": "None",
                        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "early"}, "spec": {"clusterIP": "None",
                        "publishNotReadyAddresses": true}}"#,
                )),
                service(json(r#"{"metadata": {"namespace": "shop", "name": "none"}, "spec": {"clusterIP": "None"}}"#)),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "out"},
                        "spec": {"type": "ExternalName", "externalName": "Www.Example.com."}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "in"},
                        "spec": {"type": "ExternalName", "externalName": "web.shop.svc.cluster.local"}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "round"},
                        "spec": {"type": "ExternalName", "externalName": "round.shop.svc.cluster.local"}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "shop", "name": "number"},
                        "spec": {"type": "ExternalName", "externalName": "192.0.2.1"}}"#,
                )),
                service(json(
                    r#"{"metadata": {"namespace": "bank", "name": "web"}, "spec": {"clusterIP": "10.96.0.20",
                        "ports": [{"name": "http", "port": 443, "protocol": "TCP"}]}}"#,
                )),
            ],
            slices: vec![
                slice("shop", "web", "IPv4", http(), json(r#"[{"addresses": ["10.88.0.9"]}]"#)),
                slice(
                    "shop",
                    "db",
                    "IPv4",
                    http(),
                    json(
                        r#"[{"addresses": ["10.88.0.5"], "hostname": "db-0"}, {"addresses": ["10.88.0.6"]},
                            {"addresses": ["10.88.0.7"], "conditions": {"ready": false}}]"#,
                    ),
                ),
                slice("shop", "db", "IPv6", http(), json(r#"[{"addresses": ["fd88::5"], "hostname": "db-0"}]"#)),
                slice(
                    "shop",
                    "early",
                    "IPv4",
                    json("[]"),
                    json(r#"[{"addresses": ["10.88.0.8"], "conditions": {"ready": false}}]"#),
                ),
                slice("shop", "none", "IPv4", http(), json(r#"[{"addresses": ["10.88.0.7"], "conditions": {"ready": false}}]"#)),
            ],
            pods: vec![
                ("shop".to_owned(), vec!["10.88.0.5".parse().unwrap(), "fd88::5".parse().unwrap()]),
                ("empty".to_owned(), vec!["10.88.0.77".parse().unwrap()]),
            ],
        }
    }

    fn zone(&self) -> Zone {
        let ranges: Vec<Cidr> = ["10.88.0.0/16", "fd88::/64", "10.96.0.0/12"].iter().map(|text| text.parse().unwrap()).collect();
        let pods: Vec<(&str, &[IpAddr])> = self.pods.iter().map(|(ns, ips)| (ns.as_str(), ips.as_slice())).collect();
        Zone::build(&Objects {
            domain: "Cluster.Local.",
            servers: &["10.88.0.1".parse().unwrap()],
            ranges: &ranges,
            serial: 7,
            services: &self.services.iter().collect::<Vec<_>>(),
            slices: &self.slices.iter().collect::<Vec<_>>(),
            pods: &pods,
        })
        .unwrap()
    }
}

fn question_of(name: &str, kind: u16, class: u16) -> Vec<u8> {
    let mut question = wire::name_of(name).unwrap();
    question.extend_from_slice(&kind.to_be_bytes());
    question.extend_from_slice(&class.to_be_bytes());
    wire::ask(1, &question, false, None)
}

fn outcome(zone: Option<&Zone>, name: &str, kind: u16, class: u16, spin: u32) -> Outcome {
    let bytes = question_of(name, kind, class);
    let query = Query::parse(&bytes).unwrap();
    answer(zone, "cluster.local", &Envelope::of(&query, true), &query, spin)
}

/// A reply as text: its code, answers, `|` and the rest. Read by simple-dns from the wire.
fn ask(zone: &Zone, name: &str, kind: u16) -> String {
    ask_turned(zone, name, kind, 0)
}

fn ask_turned(zone: &Zone, name: &str, kind: u16, spin: u32) -> String {
    let bytes = question_of(name, kind, 1);
    let query = Query::parse(&bytes).unwrap();
    let envelope = Envelope::of(&query, true);
    match answer(Some(zone), "cluster.local", &envelope, &query, spin) {
        Outcome::Reply(message) => text(&envelope.seal(message, true)),
        Outcome::Forward { question, aliases } => {
            let name =
                wire::labels(&question[..question.len() - 4]).iter().map(|l| String::from_utf8_lossy(l)).collect::<Vec<_>>();
            format!("forward {} after {} aliases", name.join("."), aliases.len())
        }
    }
}

fn text(message: &[u8]) -> String {
    let packet = Packet::parse(message).unwrap();
    assert!(packet.has_flags(PacketFlag::AUTHORITATIVE_ANSWER));
    let section = |records: &[ResourceRecord<'_>]| records.iter().map(record).collect::<Vec<_>>().join(", ");
    let mut text = format!("{:?}", packet.rcode());
    for (mark, records) in [(' ', &packet.answers), ('|', &packet.name_servers), ('+', &packet.additional_records)] {
        if !records.is_empty() {
            text += &format!("{}{mark} {}", if mark == ' ' { "" } else { " " }, section(records)).replace("  ", " ");
        }
    }
    text
}

fn record(record: &ResourceRecord<'_>) -> String {
    let data = match &record.rdata {
        RData::A(a) => format!("A {}", std::net::Ipv4Addr::from(a.address)),
        RData::AAAA(a) => format!("AAAA {}", std::net::Ipv6Addr::from(a.address)),
        RData::CNAME(name) => format!("CNAME {}", name.0),
        RData::PTR(name) => format!("PTR {}", name.0),
        RData::NS(name) => format!("NS {}", name.0),
        RData::SRV(s) => format!("SRV {} {} {} {}", s.priority, s.weight, s.port, s.target),
        RData::SOA(s) => {
            assert_eq!((s.serial, s.minimum), (7, TTL));
            return format!("SOA {}", record.name);
        }
        RData::TXT(t) => format!("TXT {}", String::try_from(t.clone()).unwrap()),
        other => format!("{other:?}"),
    };
    if !matches!(record.rdata, RData::TXT(_)) {
        assert_eq!(record.ttl, TTL);
    }
    format!("{} {data}", record.name)
}

const WEB: &str = "web.shop.svc.cluster.local";
const DB: &str = "db.shop.svc.cluster.local";
const SOA_OF: &str = "| SOA cluster.local";

#[test]
fn a_service_with_addresses_has_one_record_a_family() {
    let zone = Cluster::example().zone();
    assert_eq!(ask(&zone, WEB, kind::A), format!("NoError {WEB} A 10.96.0.10"));
    assert_eq!(ask(&zone, WEB, kind::AAAA), format!("NoError {WEB} AAAA fd96::10"));
    assert_eq!(
        ask(&zone, "web.bank.svc.cluster.local", kind::AAAA),
        format!("NoError {SOA_OF}"),
        "no IPv6: NODATA, not NXDOMAIN"
    );
    assert_eq!(ask(&zone, WEB, kind::TXT), format!("NoError {SOA_OF}"));
}

#[test]
fn a_headless_service_has_the_addresses_of_all_its_ready_endpoints() {
    let zone = Cluster::example().zone();
    assert_eq!(ask(&zone, DB, kind::A), format!("NoError {DB} A 10.88.0.5, {DB} A 10.88.0.6"));
    assert_eq!(ask(&zone, DB, kind::AAAA), format!("NoError {DB} AAAA fd88::5"));
    assert_eq!(ask(&zone, "none.shop.svc.cluster.local", kind::A), format!("NameError {SOA_OF}"), "none is ready");
    let early = "early.shop.svc.cluster.local";
    assert_eq!(ask(&zone, early, kind::A), format!("NoError {early} A 10.88.0.8"), "publishNotReadyAddresses");
}

#[test]
fn of_many_endpoints_no_more_are_looked_up_than_a_reply_holds() {
    let mut cluster = Cluster::example();
    cluster.slices = (0..100)
        .map(|n| {
            let endpoints: Vec<_> = (0..100).map(|i| serde_json::json!({"addresses": [format!("10.89.{n}.{i}")]})).collect();
            serde_json::from_value(serde_json::json!({
                "metadata": {"namespace": "shop", "name": format!("db-{n}"), "labels": {"kubernetes.io/service-name": "db"}},
                "addressType": "IPv4", "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints,
            }))
            .unwrap()
        })
        .collect();
    let zone = cluster.zone();
    let of = |name: &str, kind, spin| {
        let wire = wire::name_of(name).unwrap();
        match zone.lookup(&wire::labels(&wire), Asked { kind, spin, most: 10 }) {
            Lookup::Records(records) => records,
            other => panic!("{other:?}"),
        }
    };
    let http = format!("_http._tcp.{DB}");
    for spin in [0, 9_995, 12_345] {
        let first = Data::Address([10, 89, (spin % 10_000 / 100) as u8, (spin % 100) as u8].into());
        let found = of(DB, kind::A, spin);
        assert_eq!((found.answers.len(), &found.answers[0]), (10, &first), "{spin}");
        let found = of(&http, kind::SRV, spin);
        assert_eq!((found.answers.len(), found.extra.len()), (10, 10), "{spin}");
    }
    // What is left off shows, and a large message is full.
    let reply = |tcp| {
        let bytes = question_of(DB, kind::A, 1);
        let query = Query::parse(&bytes).unwrap();
        let envelope = Envelope::of(&query, tcp);
        let Outcome::Reply(message) = answer(Some(&zone), "cluster.local", &envelope, &query, 0) else { panic!() };
        let message = envelope.seal(message, true);
        let truncated = wire::u16_at(&message, 2).unwrap() & wire::flag::TRUNCATED != 0;
        (truncated, envelope.limit() - message.len() < RECORD)
    };
    assert_eq!([reply(false), reply(true)], [(true, true); 2]);
}

#[test]
fn an_endpoint_is_called_by_its_hostname_and_without_one_by_its_address() {
    let zone = Cluster::example().zone();
    let db0 = format!("db-0.{DB}");
    assert_eq!(ask(&zone, &db0, kind::A), format!("NoError {db0} A 10.88.0.5"));
    assert_eq!(ask(&zone, &db0, kind::AAAA), format!("NoError {db0} AAAA fd88::5"));
    let dashed = format!("10-88-0-6.{DB}");
    assert_eq!(ask(&zone, &dashed, kind::A), format!("NoError {dashed} A 10.88.0.6"));
    for gone in ["10-88-0-5", "10-88-0-7", "db-1", "x.db-0"] {
        assert_eq!(ask(&zone, &format!("{gone}.{DB}"), kind::A), format!("NameError {SOA_OF}"), "{gone}");
    }
}

#[test]
fn named_ports_have_srv_records_and_one_an_endpoint_where_it_is_headless() {
    let zone = Cluster::example().zone();
    let http = format!("_http._tcp.{WEB}");
    assert_eq!(
        ask(&zone, &http, kind::SRV),
        format!("NoError {http} SRV 0 100 80 {WEB} + {WEB} A 10.96.0.10, {WEB} AAAA fd96::10")
    );
    let http = format!("_http._tcp.{DB}");
    assert_eq!(
        ask(&zone, &http, kind::SRV),
        format!(
            "NoError {http} SRV 0 50 8080 db-0.{DB}, {http} SRV 0 50 8080 10-88-0-6.{DB} + \
             10-88-0-6.{DB} A 10.88.0.6, db-0.{DB} A 10.88.0.5, db-0.{DB} AAAA fd88::5"
        )
    );
    assert!(ask(&zone, WEB, kind::SRV).starts_with("NoError web.shop.svc.cluster.local SRV 0 33 80"), "as CoreDNS: all ports");
    assert!(ask(&zone, &format!("db-0.{DB}"), kind::SRV).contains("SRV 0 100 8080 db-0."));
    for no_name in ["_http._udp", "_dns._tcp", "_x._tcp", "__tcp._tcp", "http._tcp", "_http.tcp", "_._tcp"] {
        assert_eq!(ask(&zone, &format!("{no_name}.{WEB}"), kind::SRV), format!("NameError {SOA_OF}"), "{no_name}");
    }
}

#[test]
fn what_has_names_below_it_is_there_itself() {
    let zone = Cluster::example().zone();
    for there in [
        "cluster.local",
        "svc.cluster.local",
        "pod.cluster.local",
        "dns.cluster.local",
        "shop.svc.cluster.local",
        "empty.svc.cluster.local",
        "shop.pod.cluster.local",
        "_tcp.web.shop.svc.cluster.local",
        "_udp.web.shop.svc.cluster.local",
        "_http._tcp.web.shop.svc.cluster.local",
        "_tcp.db.shop.svc.cluster.local",
        "dns-version.cluster.local",
    ] {
        assert_eq!(ask(&zone, there, kind::A), format!("NoError {SOA_OF}"), "{there}");
    }
    for gone in [
        "nosuch.svc.cluster.local",
        "nosuch.pod.cluster.local",
        "x.cluster.local",
        "web.svc.cluster.local",
        "_sctp.web.shop.svc.cluster.local",
        "a.b.c.web.shop.svc.cluster.local",
        "a.b.shop.pod.cluster.local",
        "we b.shop.svc.cluster.local",
        "number.shop.svc.cluster.local",
    ] {
        assert_eq!(ask(&zone, gone, kind::A), format!("NameError {SOA_OF}"), "{gone}");
    }
}

#[test]
fn the_zone_says_who_it_is() {
    let zone = Cluster::example().zone();
    assert_eq!(ask(&zone, "cluster.local", kind::SOA), "NoError SOA cluster.local");
    assert_eq!(
        ask(&zone, "cluster.local", kind::NS),
        "NoError cluster.local NS ns.dns.cluster.local + ns.dns.cluster.local A 10.88.0.1"
    );
    assert_eq!(ask(&zone, "ns.dns.cluster.local", kind::A), "NoError ns.dns.cluster.local A 10.88.0.1");
    assert_eq!(ask(&zone, "dns-version.cluster.local", kind::TXT), "NoError dns-version.cluster.local TXT 1.1.0");
}

#[test]
fn a_pod_has_a_name_of_its_address_in_its_namespace_only() {
    let zone = Cluster::example().zone();
    let pod = "10-88-0-5.shop.pod.cluster.local";
    assert_eq!(ask(&zone, pod, kind::A), format!("NoError {pod} A 10.88.0.5"));
    assert_eq!(ask(&zone, pod, kind::AAAA), format!("NoError {SOA_OF}"));
    let six = "fd88--5.shop.pod.cluster.local";
    assert_eq!(ask(&zone, six, kind::AAAA), format!("NoError {six} AAAA fd88::5"));
    for gone in ["10-88-0-5.empty", "10-88-0-5.bank", "10-88-0-99.shop", "1-2-3.shop", "web.shop"] {
        assert_eq!(ask(&zone, &format!("{gone}.pod.cluster.local"), kind::A), format!("NameError {SOA_OF}"), "{gone}");
    }
}

#[test]
fn addresses_lead_back_to_names() {
    let zone = Cluster::example().zone();
    let back = |name: &str| ask(&zone, name, kind::PTR);
    assert_eq!(back("10.0.96.10.in-addr.arpa"), format!("NoError 10.0.96.10.in-addr.arpa PTR {WEB}"));
    assert_eq!(back("5.0.88.10.in-addr.arpa"), format!("NoError 5.0.88.10.in-addr.arpa PTR db-0.{DB}"));
    assert_eq!(back("9.0.88.10.in-addr.arpa"), format!("NoError 9.0.88.10.in-addr.arpa PTR 10-88-0-9.{WEB}"));
    let six: String = "5.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.8.d.f.ip6.arpa".into();
    assert_eq!(back(&six), format!("NoError {six} PTR db-0.{DB}"));
    assert_eq!(back("7.0.88.10.in-addr.arpa"), "NameError | SOA 88.10.in-addr.arpa", "not ready, and nobody else's");
    assert_eq!(back("1.2.97.10.in-addr.arpa"), "NameError | SOA 97.10.in-addr.arpa", "a border of labels inside 10.96.0.0/12");
    assert_eq!(ask(&zone, "10.0.96.10.in-addr.arpa", kind::A), "NoError | SOA 96.10.in-addr.arpa");
    for others in
        ["1.2.0.192.in-addr.arpa", "0.88.10.in-addr.arpa", "05.0.88.10.in-addr.arpa", "x.0.88.10.in-addr.arpa", "8.8.ip6.arpa"]
    {
        assert!(back(others).starts_with("forward"), "{others}");
    }
}

#[test]
fn an_alias_is_followed_inside_the_zone_and_handed_on_outside() {
    let zone = Cluster::example().zone();
    let out = "out.shop.svc.cluster.local";
    assert_eq!(ask(&zone, out, kind::A), "forward www.example.com after 1 aliases");
    assert_eq!(ask(&zone, out, kind::CNAME), format!("NoError {out} CNAME www.example.com"));
    assert_eq!(ask(&zone, &format!("x.{out}"), kind::A), format!("NameError {SOA_OF}"));
    let inside = "in.shop.svc.cluster.local";
    assert_eq!(ask(&zone, inside, kind::A), format!("NoError {inside} CNAME {WEB}, {WEB} A 10.96.0.10"));
    assert_eq!(ask(&zone, inside, kind::TXT), format!("NoError {inside} CNAME {WEB} {SOA_OF}"));
    assert_eq!(ask(&zone, "round.shop.svc.cluster.local", kind::A), "ServerFailure", "a loop ends");
}

#[test]
fn an_upstream_s_answer_is_joined_to_the_alias_that_led_there() {
    let zone = Cluster::example().zone();
    let bytes = question_of("OUT.shop.svc.cluster.local", kind::A, 1);
    let query = Query::parse(&bytes).unwrap();
    let envelope = Envelope::of(&query, true);
    let Outcome::Forward { question, aliases } = answer(Some(&zone), "cluster.local", &envelope, &query, 0) else { panic!() };
    let mut upstream = Packet::new_reply(9);
    upstream.questions.push(super::question(&Query::parse_question(&question).unwrap()));
    let a = RData::A(A::from(std::net::Ipv4Addr::new(192, 0, 2, 1)));
    upstream.answers.push(ResourceRecord::new(Name::new("www.example.com").unwrap(), CLASS::IN, TTL, a));
    let upstream = upstream.build_bytes_vec_compressed().unwrap();
    assert_eq!(
        text(&envelope.seal(join(&envelope, &aliases, &upstream), true)),
        "NoError OUT.shop.svc.cluster.local CNAME www.example.com, www.example.com A 192.0.2.1"
    );
    for broken in [&upstream[..20], b"", &[0xFF; 40]] {
        assert_eq!(text(&envelope.seal(join(&envelope, &aliases, broken), true)), "ServerFailure");
    }
}

#[test]
fn upper_and_lower_case_come_back_as_they_were_asked() {
    let zone = Cluster::example().zone();
    let mixed = "wEb.SHOP.svc.CLUSTER.local";
    assert_eq!(ask(&zone, mixed, kind::A), format!("NoError {mixed} A 10.96.0.10"));
    assert_eq!(ask(&zone, "x.sVc.cLuster.LOCAL", kind::A), "NameError | SOA cLuster.LOCAL");
}

#[test]
fn the_order_of_equal_answers_turns() {
    let zone = Cluster::example().zone();
    let all: BTreeSet<String> = (0..4).map(|spin| ask_turned(&zone, DB, kind::A, spin)).collect();
    assert_eq!(all.len(), 2);
    assert!(all.contains(&format!("NoError {DB} A 10.88.0.6, {DB} A 10.88.0.5")));
}

#[test]
fn other_classes_transfers_and_any_are_refused() {
    let zone = Cluster::example().zone();
    let code = |name: &str, kind: u16, class: u16| match outcome(Some(&zone), name, kind, class, 0) {
        Outcome::Reply(message) => wire::u16_at(&message, 2).unwrap() & 0xF,
        Outcome::Forward { .. } => panic!("forwarded"),
    };
    for name in [WEB, "example.org"] {
        assert_eq!(code(name, 255, 1), rcode::REFUSED);
        assert_eq!(code(name, 252, 1), rcode::REFUSED);
        assert_eq!(code(name, kind::TXT, 3), rcode::REFUSED);
        assert_eq!(code(name, kind::A, 255), rcode::REFUSED);
        assert_eq!(code(name, kind::OPT, 1), rcode::FORMAT);
    }
}

#[test]
fn before_the_first_zone_nothing_of_the_cluster_is_denied() {
    match outcome(None, WEB, kind::A, 1, 0) {
        Outcome::Reply(message) => assert_eq!(wire::u16_at(&message, 2).unwrap() & 0xF, rcode::FAILURE),
        Outcome::Forward { .. } => panic!("the cluster's names stay here"),
    }
    assert!(matches!(outcome(None, "example.org", kind::A, 1, 0), Outcome::Forward { .. }));
}

#[test]
fn bad_domains_are_told_and_bad_objects_left_out() {
    let objects =
        |domain: &'static str| Objects { domain, servers: &[], ranges: &[], serial: 0, services: &[], slices: &[], pods: &[] };
    for bad in ["", ".", "a..b", "a b", "ü.local", &"x.".repeat(70)] {
        assert!(Zone::build(&Objects { domain: bad, ..objects("") }).is_err(), "{bad}");
    }
    let mut cluster = Cluster::example();
    cluster.services[0].metadata.name = "we.b".into();
    cluster.services[1].spec.cluster_ip = "what".into();
    cluster.slices[1].endpoints[0].addresses = vec!["10.88.0.5/32".into(), String::new()];
    let zone = cluster.zone();
    assert!(ask(&zone, WEB, kind::A).starts_with("NameError"));
    assert!(ask(&zone, DB, kind::A).starts_with("NoError |"), "an address that is none");
}

#[test]
fn a_service_of_many_endpoints_is_answered_with_what_fits() {
    let mut cluster = Cluster::example();
    let template = cluster.slices[1].endpoints[1].clone();
    cluster.slices[1].endpoints = (0..20_000u32)
        .map(|n| {
            let mut endpoint = template.clone();
            endpoint.addresses = vec![std::net::Ipv4Addr::from(0x0A58_0000 + n).to_string()];
            endpoint
        })
        .collect();
    let zone = cluster.zone();
    for kind in [kind::A, kind::SRV] {
        let name = if kind == kind::A { DB.to_owned() } else { format!("_http._tcp.{DB}") };
        let bytes = question_of(&name, kind, 1);
        let query = Query::parse(&bytes).unwrap();
        for (tcp, limit) in [(false, 512), (true, 65535)] {
            let envelope = Envelope::of(&query, tcp);
            let Outcome::Reply(message) = answer(Some(&zone), "cluster.local", &envelope, &query, 3) else { panic!() };
            let sealed = envelope.seal(message, true);
            assert!(sealed.len() <= limit);
            let packet = Packet::parse(&sealed).unwrap();
            assert!(packet.answers.len() > 3, "{}", packet.answers.len());
        }
    }
}

// ---- any question over any zone ----------------------------------------------------------------

prop_compose! {
    fn label()(text in "[a-c]{1}|db-0|_http|_tcp|svc|pod|shop|bank|web|db|10-88-0-5|fd88--5|cluster|local|[ -~]{1,9}") -> String { text }
}

fn any_name() -> impl Strategy<Value = String> {
    let labels = proptest::collection::vec(label(), 0..6);
    let tail = prop_oneof![
        Just(".svc.cluster.local"),
        Just(".shop.svc.cluster.local"),
        Just(".CLUSTER.local"),
        Just(".0.88.10.in-addr.arpa"),
        Just(".example.org"),
    ];
    (labels, tail).prop_map(|(labels, tail)| {
        let head: Vec<String> = labels.iter().map(|l| l.replace('.', "-")).filter(|l| !l.is_empty()).collect();
        format!("{}{tail}", head.join(".")).trim_start_matches('.').to_owned()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_question_gets_a_message_that_can_be_read(
        name in any_name(), kind in prop_oneof![Just(1u16), Just(28), Just(33), Just(12), Just(6), Just(5), any::<u16>()],
        class in prop_oneof![9 => Just(1u16), 1 => any::<u16>()], tcp: bool, edns in proptest::option::of(any::<u16>()), spin: u32,
        keep in any::<u16>(),
    ) {
        let mut cluster = Cluster::example();
        let mut bit = 0;
        cluster.services.retain(|_| { bit += 1; keep & (1 << bit) == 0 });
        cluster.slices.retain(|_| { bit += 1; keep & (1 << bit) == 0 });
        let zone = cluster.zone();
        let mut bytes = question_of(&name, kind, class);
        if let Some(size) = edns {
            bytes = wire::ask(1, &bytes[12..], true, Some(true));
            let at = bytes.len() - 8;
            wire::set_u16(&mut bytes, at, size);
        }
        let query = Query::parse(&bytes).unwrap();
        let envelope = Envelope::of(&query, tcp);
        let Outcome::Reply(message) = answer(Some(&zone), "cluster.local", &envelope, &query, spin) else {
            prop_assert!(!name.to_lowercase().ends_with("cluster.local") || name.starts_with("out.shop"), "{name} left the zone");
            return Ok(());
        };
        let sealed = envelope.seal(message, true);
        prop_assert!(sealed.len() <= envelope.limit());
        prop_assert_eq!(&sealed[12..12 + query.question.len()], query.question);
        // simple-dns knows not every type and class of a question.
        if let Ok(packet) = Packet::parse(&sealed) {
            prop_assert!(wire::records(&sealed).unwrap().all(|r| r.is_some()));
            let refused = matches!(packet.rcode(), RCODE::Refused | RCODE::ServerFailure | RCODE::FormatError);
            let denies = packet.answers.iter().all(|r| kind != 5 && matches!(r.rdata, RData::CNAME(_)));
            prop_assert_eq!(packet.name_servers.len(), usize::from(denies && !refused), "an SOA where nothing is found: {}", text(&sealed));
            prop_assert!(packet.rcode() != RCODE::NameError || denies);
            // Whoever asks in one namespace is told nothing of another.
            let asked = name.to_lowercase();
            for found in packet.answers.iter().chain(&packet.additional_records) {
                let told = record(found).to_lowercase();
                prop_assert!(!told.contains(".bank.") || asked.contains("bank"), "{asked}: {told}");
            }
        }
    }
}
