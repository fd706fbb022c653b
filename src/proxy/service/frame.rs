//! One Service without its endpoints: what of it can be served, in few bytes.
//!
//! Invariant: ports have distinct names, distinct port/protocol pairs and distinct node ports;
//! every address is fit and of one list only, so that a packet can mean one thing at most.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::claims::{Claim, Holder};
use super::{Name, address};
use crate::api::cidr::Cidr;
use crate::api::service::{HEADLESS, IpFamily, PROXY_NAME, Service, ServiceSpec, ServiceType, SessionAffinity, TrafficPolicy};
use crate::api::time::WallTime;
use crate::proxy::model::{HealthCheck, Ignored, L4, ServicePort, ServicePortName, Skipped};

pub const FAMILIES: [IpFamily; 2] = [IpFamily::IPv4, IpFamily::IPv6];

/// The API's default for sessionAffinityConfig.clientIP.timeoutSeconds: three hours.
const AFFINITY_SECONDS: i32 = 10_800;

/// Of one object, named one by one; more are only counted.
pub const NAMED: usize = 16;

#[derive(Debug, Default)]
pub struct Frame {
    /// Seconds; the largest where nobody knows.
    created: u64,
    ports: Box<[PortFrame]>,
    /// One a family at most.
    cluster_ips: Vec<IpAddr>,
    /// Most Services have none of it.
    extras: Option<Box<Extras>>,
    pub skipped: Vec<Skipped>,
}

#[derive(Debug)]
struct PortFrame {
    name: Box<str>,
    protocol: L4,
    port: u16,
    node_port: Option<u16>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Extras {
    external_ips: Vec<IpAddr>,
    load_balancer_ips: Vec<IpAddr>,
    source_ranges: Vec<Cidr>,
    internal_local: bool,
    external_local: bool,
    affinity: Option<Duration>,
    health_check_node_port: Option<u16>,
}

impl Frame {
    /// None: a Service that no proxy serves (headless, ExternalName, without an address yet), or
    /// another proxy does.
    pub fn of(name: &Name, service: &Service, ignored: Ignored) -> Option<Frame> {
        let spec = &service.spec;
        let labels = &service.metadata.labels;
        let elsewhere = labels.contains_key(PROXY_NAME) || labels.contains_key(HEADLESS);
        if spec.kind == ServiceType::ExternalName || spec.is_headless() || elsewhere {
            return None;
        }
        let mut notes = Notes::new(format!("Service {name}"));
        let cluster_ips = cluster_ips(spec, &mut notes);
        if cluster_ips.is_empty() && notes.is_empty() {
            return None;
        }
        let created = service.metadata.creation_timestamp.as_deref().and_then(WallTime::parse);
        let extras = extras(service, &cluster_ips, ignored, &mut notes);
        let ports = ports(spec, extras.health_check_node_port, &mut notes);
        Some(Frame {
            created: created.and_then(|t| u64::try_from(t.0 / NANOS).ok()).unwrap_or(u64::MAX),
            ports,
            cluster_ips,
            extras: (extras != Extras::default()).then(|| Box::new(extras)),
            skipped: notes.done(),
        })
    }

    /// Ports without endpoints, those of IPv4 first.
    pub fn ports(&self, name: &Name) -> Vec<ServicePort> {
        let none = Extras::default();
        let extras = self.extras.as_deref().unwrap_or(&none);
        let mut all = Vec::new();
        for family in FAMILIES {
            let of_family = |ips: &[IpAddr]| ips.iter().copied().filter(|ip| address::family(*ip) == family).collect::<Vec<_>>();
            let Some(cluster_ip) = of_family(&self.cluster_ips).first().copied() else { continue };
            for port in &self.ports {
                all.push(ServicePort {
                    name: ServicePortName {
                        namespace: name.namespace.clone(),
                        service: name.name.clone(),
                        port: port.name.to_string(),
                    },
                    protocol: port.protocol,
                    port: port.port,
                    cluster_ip: Some(cluster_ip),
                    external_ips: of_family(&extras.external_ips),
                    load_balancer_ips: of_family(&extras.load_balancer_ips),
                    node_port: port.node_port,
                    internal_local: extras.internal_local,
                    external_local: extras.external_local,
                    affinity: extras.affinity,
                    source_ranges: extras
                        .source_ranges
                        .iter()
                        .copied()
                        .filter(|r| address::family(r.address) == family)
                        .collect(),
                    health_check_node_port: extras.health_check_node_port.map(|port| HealthCheck { port, ready: Vec::new() }),
                    cluster: Vec::new(),
                    local: Vec::new(),
                    has_any: false,
                });
            }
        }
        all
    }

    /// What it wants for itself alone, and how strongly.
    pub fn claims(&self, name: &Arc<Name>) -> BTreeMap<Claim, Holder> {
        let mut claims = BTreeMap::new();
        for port in self.ports(name) {
            for (claim, rank) in Claim::of(&port) {
                let holder = Holder { rank, created: self.created, service: name.clone() };
                // The strongest of its own counts (the list comes strongest first).
                claims.entry(claim).or_insert(holder);
            }
        }
        claims
    }
}

const NANOS: i64 = 1_000_000_000;

fn cluster_ips(spec: &ServiceSpec, notes: &mut Notes) -> Vec<IpAddr> {
    let single = (!spec.cluster_ip.is_empty()).then_some(&spec.cluster_ip);
    let texts: Vec<&String> =
        if spec.cluster_ips.is_empty() { single.into_iter().collect() } else { spec.cluster_ips.iter().collect() };
    let mut ips: Vec<IpAddr> = Vec::new();
    for (index, text) in texts.into_iter().enumerate() {
        let field = || format!("spec.clusterIPs[{index}]");
        match address::parse(text) {
            Ok(ip) if ips.iter().any(|other| address::family(*other) == address::family(ip)) => {
                notes.add(field(), format!("{ip}: a Service has one ClusterIP a family"));
            }
            Ok(ip) => ips.push(ip),
            Err(why) => notes.add(field(), why),
        }
    }
    ips
}

fn extras(service: &Service, cluster_ips: &[IpAddr], ignored: Ignored, notes: &mut Notes) -> Extras {
    let spec = &service.spec;
    let mut load_balancer_ips: Vec<IpAddr> = Vec::new();
    for (index, ingress) in service.status.load_balancer.ingress.iter().enumerate() {
        // Of ipMode Proxy: the balancer itself ends the connection.
        let vip = ingress.ip_mode.as_deref().is_none_or(|mode| mode == "VIP");
        if spec.kind != ServiceType::LoadBalancer || ingress.ip.is_empty() || !vip {
            continue;
        }
        let field = format!("status.loadBalancer.ingress[{index}].ip");
        if ignored.load_balancer_ips {
            notes.add(field, format!("{}: this node serves none: it runs with --ignore-load-balancer-ips", ingress.ip));
            continue;
        }
        collect(&ingress.ip, field, cluster_ips, &mut load_balancer_ips, notes);
    }
    let mut external_ips: Vec<IpAddr> = Vec::new();
    for (index, text) in spec.external_ips.iter().enumerate() {
        let field = format!("spec.externalIPs[{index}]");
        if ignored.external_ips {
            notes.add(field, format!("{text}: this node serves none: it runs with --ignore-external-ips"));
            continue;
        }
        collect(text, field, cluster_ips, &mut external_ips, notes);
    }
    // An address in both lists is the load balancer's: it may have source ranges.
    external_ips.retain(|ip| !load_balancer_ips.contains(ip));
    let mut source_ranges = Vec::new();
    let mut unread = false;
    for (index, text) in spec.load_balancer_source_ranges.iter().enumerate() {
        match text.parse::<Cidr>() {
            Ok(range) => source_ranges.push(range),
            Err(why) => {
                unread = true;
                notes.add(format!("spec.loadBalancerSourceRanges[{index}]"), why.to_string());
            }
        }
    }
    for family in FAMILIES {
        let open = !source_ranges.iter().any(|r| address::family(r.address) == family);
        let concerned = load_balancer_ips.iter().any(|ip| address::family(*ip) == family);
        if open && concerned && unread {
            // Nobody meant to open it to all.
            load_balancer_ips.retain(|ip| address::family(*ip) != family);
            notes.add(
                "spec.loadBalancerSourceRanges".to_owned(),
                format!("no {family:?} range can be read, so the {family:?} load balancer addresses are not served"),
            );
        } else if open && concerned && !source_ranges.is_empty() {
            notes.add("spec.loadBalancerSourceRanges".to_owned(), format!("no {family:?} range is named, so the {family:?} load balancer addresses are open to all, as in every cluster: add one"));
        }
    }
    source_ranges.sort();
    source_ranges.dedup();
    let external = match spec.kind {
        ServiceType::NodePort | ServiceType::LoadBalancer => true,
        ServiceType::ClusterIP | ServiceType::ExternalName => !spec.external_ips.is_empty(),
    };
    let external_local = external && spec.external_traffic_policy == Some(TrafficPolicy::Local);
    let checked = spec.kind == ServiceType::LoadBalancer && external_local;
    load_balancer_ips.sort();
    external_ips.sort();
    Extras {
        external_ips,
        load_balancer_ips,
        source_ranges,
        internal_local: spec.internal_traffic_policy == Some(TrafficPolicy::Local),
        external_local,
        affinity: affinity(spec),
        health_check_node_port: port_number(spec.health_check_node_port).filter(|_| checked),
    }
}

fn affinity(spec: &ServiceSpec) -> Option<Duration> {
    match spec.session_affinity {
        Some(SessionAffinity::ClientIP) => {
            let config = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref());
            let seconds = config.and_then(|c| c.timeout_seconds).filter(|s| *s > 0).unwrap_or(AFFINITY_SECONDS);
            Some(Duration::from_secs(u64::from(seconds.unsigned_abs())))
        }
        Some(SessionAffinity::None) | None => None,
    }
}

fn collect(text: &str, field: String, cluster_ips: &[IpAddr], ips: &mut Vec<IpAddr>, notes: &mut Notes) {
    match address::parse(text) {
        Ok(ip) if !cluster_ips.iter().any(|c| address::family(*c) == address::family(ip)) => {
            notes.add(field, format!("{ip}: the Service has no ClusterIP of its family: set ipFamilies and ipFamilyPolicy"));
        }
        Ok(ip) if ips.contains(&ip) || cluster_ips.contains(&ip) => {}
        Ok(ip) => ips.push(ip),
        Err(why) => notes.add(field, why),
    }
}

fn ports(spec: &ServiceSpec, health: Option<u16>, notes: &mut Notes) -> Box<[PortFrame]> {
    let (mut names, mut numbers, mut node_ports) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    node_ports.extend(health.map(|port| (L4::Tcp, port)));
    let mut ports = Vec::new();
    for (index, port) in spec.ports.iter().enumerate() {
        let protocol = L4::from(port.protocol);
        let Some(number) = port_number(port.port) else {
            notes.add(format!("spec.ports[{index}].port"), format!("{} is no port: 1 to 65535 are", port.port));
            continue;
        };
        if !names.insert(port.name.as_str()) || !numbers.insert((protocol, number)) {
            notes.add(
                format!("spec.ports[{index}]"),
                format!("an earlier port has its name or its number and protocol ({number}/{protocol})"),
            );
            continue;
        }
        let wanted = matches!(spec.kind, ServiceType::NodePort | ServiceType::LoadBalancer);
        let mut node_port = port_number(port.node_port).filter(|_| wanted);
        if node_port.is_some_and(|n| !node_ports.insert((protocol, n))) {
            notes.add(
                format!("spec.ports[{index}].nodePort"),
                format!("{}/{protocol} has another use in this Service", port.node_port),
            );
            node_port = None;
        }
        ports.push(PortFrame { name: port.name.as_str().into(), protocol, port: number, node_port });
    }
    ports.into()
}

/// None for 0 and what no port can be.
pub fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|n| *n != 0)
}

/// What is left out of one object; bounded, since an object may be wrong in 100,000 places.
pub struct Notes {
    object: String,
    found: Vec<Skipped>,
    more: usize,
}

impl Notes {
    pub fn new(object: String) -> Notes {
        Notes { object, found: Vec::new(), more: 0 }
    }
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }
    pub fn add(&mut self, field: String, why: String) {
        if self.found.len() < NAMED {
            self.found.push(Skipped { object: self.object.clone(), field, why });
        } else {
            self.more += 1;
        }
    }
    pub fn done(mut self) -> Vec<Skipped> {
        if self.more > 0 {
            let why = format!("{} more of its parts are left out", self.more);
            self.found.push(Skipped { object: self.object, field: String::new(), why });
        }
        self.found
    }
}
