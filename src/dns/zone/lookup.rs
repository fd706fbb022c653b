//! A name's labels and a type → what the zone has of it.
//!
//! Invariant: it gives no more records than were asked for and makes nothing of the others, so that
//! a question costs what its reply weighs; of a Service's endpoints it only walks past those.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::build::is_label;
use super::{Apex, Data, Endpoint, Kind, Lookup, Port, Records, Service, Zone};
use crate::dns::wire::kind;
use crate::proxy::model::{Cidr, L4};

/// What is asked of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub kind: u16,
    /// Turns the order of equal answers, so that clients which take the first one spread.
    pub spin: u32,
    /// More records are not wanted.
    pub most: usize,
}

impl Asked {
    /// Where an order of so many begins.
    fn turn(&self, count: usize) -> usize {
        (self.spin as usize).checked_rem(count).unwrap_or(0)
    }
}

impl Zone {
    /// `labels` as asked.
    pub fn lookup(&self, labels: &[&[u8]], asked: Asked) -> Lookup {
        let depth = self.domain.split('.').count();
        let inside = labels.len() >= depth
            && labels.iter().rev().zip(self.domain.split('.').rev()).all(|(l, d)| l.eq_ignore_ascii_case(d.as_bytes()));
        if !inside {
            return self.backwards(labels, asked);
        }
        let apex = Apex(depth);
        // What can be no label of ours has no name here.
        let lower: Option<Vec<String>> = labels[..labels.len() - depth].iter().map(|label| lower(label)).collect();
        let Some(lower) = lower else { return Lookup::NoName(apex) };
        let head: Vec<&str> = lower.iter().map(String::as_str).collect();
        match self.cluster(&head, asked) {
            Found::No => Lookup::NoName(apex),
            Found::Alias(target) => Lookup::Alias(target),
            Found::Name(records) if records.answers.is_empty() => Lookup::NoData(apex),
            Found::Name(records) => Lookup::Records(records),
        }
    }

    /// `head`: the labels left of the domain.
    fn cluster(&self, head: &[&str], asked: Asked) -> Found {
        let kind = asked.kind;
        match *head {
            [] if kind == kind::SOA => answers(vec![Data::Authority]),
            [] if kind == kind::NS => {
                let name = self.server_name();
                let extra = self.servers.iter().map(|ip| (name.clone(), *ip)).collect();
                Found::Name(Records { answers: vec![Data::NameServer(name)], extra })
            }
            [] | ["svc" | "pod" | "dns"] => nothing(),
            ["ns", "dns"] => addresses(self.servers.iter().copied(), asked),
            ["dns-version"] if kind == kind::TXT => answers(vec![Data::Version]),
            ["dns-version"] => nothing(),
            [namespace, "svc" | "pod"] => match self.namespaces.binary_search_by(|n| (**n).cmp(namespace)) {
                Ok(_) => nothing(),
                Err(_) => Found::No,
            },
            [name, namespace, "pod"] => self.pod(name, namespace, asked),
            [ref below @ .., name, namespace, "svc"] => match self.service(namespace, name) {
                Some(service) => self.below(service, below, asked),
                None => Found::No,
            },
            _ => Found::No,
        }
    }

    fn service(&self, namespace: &str, name: &str) -> Option<&Service> {
        let at = self.services.binary_search_by(|s| (&*s.namespace, &*s.name).cmp(&(namespace, name))).ok()?;
        self.services.get(at)
    }

    /// `below`: the labels left of the Service's name.
    fn below(&self, service: &Service, below: &[&str], asked: Asked) -> Found {
        let kind = asked.kind;
        match (below, &service.kind) {
            ([], Kind::ExternalName(target)) => Found::Alias(target.to_string()),
            (_, Kind::ExternalName(_)) => Found::No,
            ([], Kind::ClusterIp(ips)) if kind == kind::SRV => self.ports(service, ips, asked, |_| true),
            ([], Kind::ClusterIp(ips)) => addresses(ips.iter().copied(), asked),
            ([], Kind::Headless) => self.endpoints(service, asked, |_| true, |_| true),
            ([protocol], _) if protocol.starts_with('_') => {
                let has = |port: &Port| !port.name.is_empty() && is_protocol(port.protocol, protocol);
                if service.named_ports().any(has) { nothing() } else { Found::No }
            }
            ([name], _) => {
                let ip = dashed(name);
                self.endpoints(service, asked, |e| e.is_called(name, ip), |_| true)
            }
            ([port, protocol], kind_of) => {
                let Some(port) = port.strip_prefix('_').filter(|name| !name.is_empty()) else { return Found::No };
                let wanted = |p: &Port| *p.name == *port && is_protocol(p.protocol, protocol);
                match kind_of {
                    _ if !service.named_ports().any(wanted) => Found::No,
                    _ if kind != kind::SRV => nothing(),
                    Kind::ClusterIp(ips) => self.ports(service, ips, asked, wanted),
                    _ => self.endpoints(service, asked, |_| true, wanted),
                }
            }
            _ => Found::No,
        }
    }

    /// SRV records of a Service with an address of its own.
    fn ports(&self, service: &Service, ips: &[IpAddr], asked: Asked, wanted: impl Fn(&Port) -> bool) -> Found {
        let target = self.name_of(service);
        let ports: Vec<&Port> = service.ports.iter().filter(|p| wanted(p)).take(asked.most).collect();
        let weight = weight(ports.len());
        let answers = ports.iter().map(|p| Data::Service { port: p.number, weight, target: target.clone() }).collect();
        Found::Name(Records { answers, extra: ips.iter().map(|ip| (target.clone(), *ip)).collect() })
    }

    /// Records of endpoints: their addresses, or their ports.
    fn endpoints(
        &self,
        service: &Service,
        asked: Asked,
        called: impl Fn(&Endpoint) -> bool,
        port: impl Fn(&Port) -> bool,
    ) -> Found {
        let all = || service.endpoints().filter(|(_, e)| called(e));
        let count = all().count();
        if count == 0 {
            return Found::No;
        }
        let turn = asked.turn(count);
        let all = all().skip(turn).chain(all().take(turn));
        if asked.kind != kind::SRV {
            let mut seen = BTreeSet::new();
            let ips = all.map(|(_, e)| e.ip).filter(|ip| is_kind(*ip, asked.kind) && seen.insert(*ip));
            return answers(ips.take(asked.most).map(Data::Address).collect());
        }
        let parent = self.name_of(service);
        let (mut services, mut extra) = (BTreeSet::new(), BTreeSet::new());
        let mut found = Vec::new();
        for (group, endpoint) in all {
            if found.len() >= asked.most {
                break;
            }
            let target = format!("{}.{parent}", endpoint.label());
            for port in group.ports.iter().filter(|p| port(p)).take(asked.most) {
                if services.insert((target.clone(), port.number)) {
                    found.push((target.clone(), port.number));
                }
            }
            extra.insert((target, endpoint.ip));
        }
        found.truncate(asked.most);
        let weight = weight(found.len());
        let answers = found.into_iter().map(|(target, port)| Data::Service { port, weight, target }).collect();
        Found::Name(Records { answers, extra: extra.into_iter().collect() })
    }

    /// `10-88-0-7.shop.pod`: there while such a pod is.
    fn pod(&self, name: &str, namespace: &str, asked: Asked) -> Found {
        let Some(ip) = dashed(name) else { return Found::No };
        match self.pods.binary_search_by(|(n, i)| (&**n, *i).cmp(&(namespace, ip))) {
            Ok(_) => addresses([ip].into_iter(), asked),
            Err(_) => Found::No,
        }
    }

    fn name_of(&self, service: &Service) -> String {
        format!("{}.{}.svc.{}", service.name, service.namespace, self.domain)
    }

    // ---- addresses to names ----------------------------------------------------------------

    fn backwards(&self, labels: &[&[u8]], asked: Asked) -> Lookup {
        let Some(ip) = backward_address(labels) else { return Lookup::NotOurs };
        let mut names: Vec<String> = self.names(ip).collect();
        let range = self.ranges.iter().find(|range| range.contains(ip));
        let apex = Apex(range.map_or(labels.len(), |range| backward_depth(range, ip)));
        if names.is_empty() {
            return if range.is_some() { Lookup::NoName(apex) } else { Lookup::NotOurs };
        }
        if asked.kind != kind::PTR {
            return Lookup::NoData(apex);
        }
        let turn = asked.turn(names.len());
        names.rotate_left(turn);
        Lookup::Records(Records { answers: names.into_iter().take(asked.most).map(Data::Pointer).collect(), extra: Vec::new() })
    }

    /// A Service's own address has its name only; an endpoint's, that in each of its Services.
    fn names(&self, ip: IpAddr) -> impl Iterator<Item = String> {
        let start = self.reverse.partition_point(|(known, _)| *known < ip);
        let owners = self.reverse[start..].iter().take_while(move |(known, _)| *known == ip).map(|(_, owner)| owner);
        let own = owners.clone().any(|owner| owner.endpoint.is_none());
        let names: BTreeSet<String> = owners
            .filter(|owner| owner.endpoint.is_none() == own)
            .filter_map(|owner| {
                let service = self.services.get(owner.service as usize)?;
                let parent = self.name_of(service);
                let Some((group, at)) = owner.endpoint else { return Some(parent) };
                let endpoint = service.groups.get(group as usize)?.endpoints.get(at as usize)?;
                Some(format!("{}.{parent}", endpoint.label()))
            })
            .collect();
        names.into_iter()
    }
}

enum Found {
    No,
    Name(Records),
    Alias(String),
}

/// The name is there; of this type it has nothing.
fn nothing() -> Found {
    Found::Name(Records::default())
}

fn answers(answers: Vec<Data>) -> Found {
    Found::Name(Records { answers, extra: Vec::new() })
}

/// Of a few: a Service's own, the servers'.
fn addresses(ips: impl Iterator<Item = IpAddr>, asked: Asked) -> Found {
    let mut ips: Vec<IpAddr> = ips.filter(|ip| is_kind(*ip, asked.kind)).collect();
    let turn = asked.turn(ips.len());
    ips.rotate_left(turn);
    ips.truncate(asked.most);
    answers(ips.into_iter().map(Data::Address).collect())
}

fn is_kind(ip: IpAddr, kind: u16) -> bool {
    match ip {
        IpAddr::V4(_) => kind == kind::A,
        IpAddr::V6(_) => kind == kind::AAAA,
    }
}

/// `_tcp`
fn is_protocol(protocol: L4, label: &str) -> bool {
    let name = match protocol {
        L4::Tcp => "_tcp",
        L4::Udp => "_udp",
        L4::Sctp => "_sctp",
    };
    label == name
}

/// Equal weights that add up to a hundred where they can.
fn weight(records: usize) -> u16 {
    u16::try_from(100 / records.max(1)).unwrap_or(1).max(1)
}

fn lower(label: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(label).ok().filter(|text| is_label(text))?;
    Some(text.to_ascii_lowercase())
}

impl Service {
    /// Ports that SRV names can name.
    fn named_ports(&self) -> impl Iterator<Item = &Port> {
        let headless = matches!(self.kind, Kind::Headless);
        let own = self.ports.iter().filter(move |_| !headless);
        let of_endpoints = self.groups.iter().filter(move |_| headless).flat_map(|group| &group.ports);
        own.chain(of_endpoints).filter(|port| !port.name.is_empty())
    }
}

impl Endpoint {
    /// `ip`: the label, read as an address.
    fn is_called(&self, label: &str, ip: Option<IpAddr>) -> bool {
        match &self.hostname {
            Some(name) => **name == *label,
            None => ip == Some(self.ip),
        }
    }
}

/// `10-88-0-7`, `fd88--7`: an address whose dots or colons are dashes.
fn dashed(label: &str) -> Option<IpAddr> {
    if !label.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
        return None;
    }
    let four = label.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    four.or_else(|_| label.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6)).ok()
}

/// The whole address of `4.3.2.1.in-addr.arpa` or of 32 digits under `ip6.arpa`.
fn backward_address(labels: &[&[u8]]) -> Option<IpAddr> {
    let (tree, digits) = match labels {
        [digits @ .., tree, arpa] if arpa.eq_ignore_ascii_case(b"arpa") => (*tree, digits),
        _ => return None,
    };
    let texts = digits.iter().rev().map(|d| std::str::from_utf8(d).ok());
    if tree.eq_ignore_ascii_case(b"in-addr") && digits.len() == 4 {
        // Ipv4Addr's parser refuses leading zeros and signs.
        return texts.collect::<Option<Vec<_>>>()?.join(".").parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    }
    if tree.eq_ignore_ascii_case(b"ip6") && digits.len() == 32 {
        let mut bits = 0u128;
        for text in texts {
            let digit = text.filter(|t| t.len() == 1).and_then(|t| t.chars().next()).and_then(|c| c.to_digit(16))?;
            bits = bits << 4 | u128::from(digit);
        }
        return Some(IpAddr::V6(bits.into()));
    }
    None
}

/// Labels of the zone around `ip` that begins at a label's border inside the range.
fn backward_depth(range: &Cidr, ip: IpAddr) -> usize {
    let (bits, most) = if ip.is_ipv4() { (8, 4) } else { (4, 32) };
    2 + usize::from(range.prefix.div_ceil(bits)).clamp(1, most)
}
