//! ClusterIPs and node ports.
//!
//! Who has what, strongest first: what a Service had before, what one writes itself, what is
//! looked for by the hash of its name. So an address outlives restarts and the order of files,
//! mostly even the loss of [`Memory`], and nobody takes an address away by writing it.
//!
//! Invariant: no two Services get one address, or one node port of a protocol; one that cannot
//! have what it asks for is named and gets none. As in a cluster, the low part of each range is
//! left to those who write their address (KEP-3070, KEP-3668).
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::NODE_PORTS;
use crate::api::cidr::Cidr;
use crate::api::service::{IpFamily, IpFamilyPolicy, Service, ServiceType, TrafficPolicy};
use crate::proxy::model::{L4, Skipped};
use crate::proxy::service::{Name, address};

/// What was allotted, by `namespace/name` and `namespace/name:port/PROTOCOL`; for the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Memory {
    pub cluster_ips: BTreeMap<String, Vec<IpAddr>>,
    pub node_ports: BTreeMap<String, u16>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allotted {
    /// Every Service, with its addresses, families and node ports; without where there is none.
    pub services: BTreeMap<Name, Arc<Service>>,
    pub memory: Memory,
    pub skipped: Vec<Skipped>,
}

/// `ranges`: one a family at most, the first one's family is the default.
pub fn allot<'a>(services: impl Iterator<Item = &'a Arc<Service>>, ranges: &[Cidr], memory: &Memory) -> Allotted {
    let services: BTreeMap<Name, Arc<Service>> =
        services.map(|s| (Name::new(&s.metadata.namespace, &s.metadata.name), Arc::clone(s))).collect();
    let mut out = Allotted { services, ..Allotted::default() };
    cluster_ips(&mut out, ranges, memory);
    node_ports(&mut out, memory);
    out
}

fn skip(out: &mut Vec<Skipped>, name: &Name, field: &str, why: String) {
    out.push(Skipped { object: format!("Service {name}"), field: field.to_owned(), why });
}

/// One Service that is to have ClusterIPs.
struct Wish {
    name: Name,
    families: Vec<IpFamily>,
    given: Vec<IpAddr>,
    got: Vec<IpAddr>,
    refused: bool,
}

fn cluster_ips(out: &mut Allotted, ranges: &[Cidr], memory: &Memory) {
    let mut wishes = Vec::new();
    for (name, service) in &mut out.services {
        if service.spec.kind == ServiceType::ExternalName {
            continue;
        }
        let families = match families(service, ranges) {
            Ok(families) => families,
            Err((field, why)) => {
                skip(&mut out.skipped, name, field, why);
                wishes.push(Wish { name: name.clone(), families: Vec::new(), given: Vec::new(), got: Vec::new(), refused: true });
                continue;
            }
        };
        if service.spec.is_headless() {
            Arc::make_mut(service).spec.ip_families = families;
            continue;
        }
        let given = given(service);
        wishes.push(Wish { name: name.clone(), families, given, got: Vec::new(), refused: false });
    }
    let mut taken: BTreeMap<IpAddr, Name> = BTreeMap::new();
    // What they had, as far as it is still what they want.
    for wish in wishes.iter_mut().filter(|w| !w.refused) {
        let had = memory.cluster_ips.get(&wish.name.to_string()).map(Vec::as_slice).unwrap_or_default();
        for ip in had {
            let wanted = wish.families.contains(&address::family(*ip)) && !wish.has(address::family(*ip));
            let written = wish.given.iter().find(|g| address::family(**g) == address::family(*ip));
            let same = written.is_none_or(|written| written == ip);
            if wanted && same && usable(*ip, ranges) && !taken.contains_key(ip) {
                taken.insert(*ip, wish.name.clone());
                wish.got.push(*ip);
            }
        }
    }
    for wish in wishes.iter_mut().filter(|w| !w.refused) {
        for ip in wish.given.clone() {
            if wish.got.contains(&ip) {
                continue;
            }
            let shown: Vec<String> = ranges.iter().map(Cidr::to_string).collect();
            let why = if !usable(ip, ranges) {
                format!(
                    "{ip} is in no range of this node ({}): remove it, or give --service-cidr a range that has it",
                    shown.join(", ")
                )
            } else if let Some(owner) = taken.get(&ip) {
                format!("{ip} belongs to Service {owner}: remove it, or write another")
            } else {
                taken.insert(ip, wish.name.clone());
                wish.got.push(ip);
                continue;
            };
            wish.refused = true;
            skip(&mut out.skipped, &wish.name, "spec.clusterIP", why);
        }
    }
    // Nothing is given back here: who looked through all of a range has looked for everybody.
    let mut full = Vec::new();
    for wish in wishes.iter_mut().filter(|w| !w.refused) {
        for family in wish.families.clone() {
            if wish.has(family) {
                continue;
            }
            let range = ranges.iter().find(|r| address::family(r.address) == family && !full.contains(&family));
            match range.and_then(|range| look(&wish.name, range, &taken)) {
                Some(ip) => {
                    taken.insert(ip, wish.name.clone());
                    wish.got.push(ip);
                }
                None => {
                    full.extend((!full.contains(&family)).then_some(family));
                    wish.refused = true;
                    let why = format!("no {family:?} address is left: give --service-cidr a wider range, or remove Services");
                    skip(&mut out.skipped, &wish.name, "spec.clusterIP", why);
                }
            }
        }
    }
    for wish in wishes {
        let Some(service) = out.services.get_mut(&wish.name) else { continue };
        let spec = &mut Arc::make_mut(service).spec;
        let got = if wish.refused { Vec::new() } else { wish.got };
        let of = |family: &IpFamily| got.iter().find(|ip| address::family(**ip) == *family);
        spec.cluster_ips = wish.families.iter().filter_map(of).map(IpAddr::to_string).collect();
        spec.cluster_ip = spec.cluster_ips.first().cloned().unwrap_or_default();
        spec.ip_families = wish.families;
        if !got.is_empty() {
            out.memory.cluster_ips.insert(wish.name.to_string(), got);
        }
    }
}

impl Wish {
    fn has(&self, family: IpFamily) -> bool {
        self.got.iter().any(|ip| address::family(*ip) == family)
    }
}

fn given(service: &Service) -> Vec<IpAddr> {
    let spec = &service.spec;
    let texts = spec.cluster_ips.iter().chain(spec.cluster_ips.is_empty().then_some(&spec.cluster_ip));
    // Validation let only addresses through.
    texts.filter_map(|text| text.parse().ok()).collect()
}

/// Which families a Service is of, the first one its primary; Err: field and why it cannot be.
fn families(service: &Service, ranges: &[Cidr]) -> Result<Vec<IpFamily>, (&'static str, String)> {
    let spec = &service.spec;
    let headless = spec.is_headless();
    let configured: Vec<IpFamily> = ranges.iter().map(|r| address::family(r.address)).collect();
    let other = |family: IpFamily| if family == IpFamily::IPv4 { IpFamily::IPv6 } else { IpFamily::IPv4 };
    let mut named = spec.ip_families.clone();
    if named.is_empty() {
        named = given(service).into_iter().map(address::family).collect();
    }
    let policy = spec.ip_family_policy.unwrap_or(match named.len() {
        // Whoever names two wants two.
        2.. => IpFamilyPolicy::RequireDualStack,
        // Without a selector nobody knows of which family its endpoints will be.
        0 if headless && (spec.selector.is_empty() || ranges.is_empty()) => IpFamilyPolicy::RequireDualStack,
        _ => IpFamilyPolicy::SingleStack,
    });
    let Some(primary) = named.first().or(configured.first()).copied().or(headless.then_some(IpFamily::IPv4)) else {
        return Err(("spec.clusterIP", "this node gives no addresses to Services: give --service-cidr".to_owned()));
    };
    let mut families = vec![primary];
    let second = other(primary);
    let wanted = match policy {
        IpFamilyPolicy::SingleStack => false,
        IpFamilyPolicy::PreferDualStack => named.contains(&second) || configured.contains(&second),
        IpFamilyPolicy::RequireDualStack => true,
    };
    families.extend(wanted.then_some(second));
    match families.iter().find(|f| !headless && !configured.contains(f)) {
        None => Ok(families),
        // Preferring is no asking.
        Some(lack) if policy == IpFamilyPolicy::PreferDualStack && *lack == second && given(service).len() < 2 => {
            Ok(vec![primary])
        }
        Some(lack) => Err((
            "spec.ipFamilies",
            format!(
                "this node gives no {lack:?} addresses to Services: give --service-cidr such a range, or ask for the other family"
            ),
        )),
    }
}

/// In a range, and neither its first address nor (IPv4) its last one.
fn usable(ip: IpAddr, ranges: &[Cidr]) -> bool {
    ranges.iter().any(|r| r.contains(ip) && ip != r.address && !(r.is_v4() && ip == r.last()))
}

/// A free address for a name: from its hash upwards, in the upper part of the range first.
fn look(name: &Name, range: &Cidr, taken: &BTreeMap<IpAddr, Name>) -> Option<IpAddr> {
    let bits = u32::from(if range.is_v4() { 32 } else { 128 } - range.prefix);
    // Offsets 1 to `end`, exclusive; more than 2^64 addresses need not be told apart.
    let total = 1_u128.checked_shl(bits.min(64)).unwrap_or(1 << 64);
    let end = if range.is_v4() { total.saturating_sub(1) } else { total };
    let band = (total / 16).clamp(16, 256).min(end);
    let start = hash(&format!("{name} {}", if range.is_v4() { "IPv4" } else { "IPv6" }));
    for (low, high) in [(band, end), (1, band)] {
        let size = high.saturating_sub(low);
        // One more than are taken: that many tries find a free one where there is any.
        for step in 0..size.min(taken.len() as u128 + 1) {
            let ip = at(range, low + (u128::from(start) + step) % size);
            if !taken.contains_key(&ip) {
                return Some(ip);
            }
        }
    }
    None
}

fn at(range: &Cidr, offset: u128) -> IpAddr {
    match range.address {
        // The offset is below the range's size.
        IpAddr::V4(ip) => IpAddr::from(u32::from(ip).wrapping_add(offset as u32).to_be_bytes()),
        IpAddr::V6(ip) => IpAddr::from(u128::from(ip).wrapping_add(offset).to_be_bytes()),
    }
}

fn hash(text: &str) -> u64 {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

/// Where a node port belongs to.
#[derive(Clone, Copy)]
enum Slot {
    Port(usize),
    HealthCheck,
}

struct PortWish {
    name: Name,
    slot: Slot,
    protocol: L4,
    /// In [`Memory`].
    key: String,
    /// Ports of one number share it, so that TCP and UDP get the same node port where they can.
    seed: String,
    given: u16,
    got: Option<u16>,
}

fn node_ports(out: &mut Allotted, memory: &Memory) {
    let mut wishes: Vec<PortWish> = out.services.iter().flat_map(|(name, service)| port_wishes(name, service)).collect();
    let mut taken: BTreeMap<(L4, u16), Name> = BTreeMap::new();
    for wish in &mut wishes {
        let had = memory.node_ports.get(&wish.key).copied().filter(|p| NODE_PORTS.contains(p));
        if let Some(had) = had.filter(|had| [0, *had].contains(&wish.given) && !taken.contains_key(&(wish.protocol, *had))) {
            taken.insert((wish.protocol, had), wish.name.clone());
            wish.got = Some(had);
        }
    }
    for wish in wishes.iter_mut().filter(|w| w.got.is_none() && w.given != 0) {
        if let Some(owner) = taken.get(&(wish.protocol, wish.given)) {
            let why = format!("{}/{} belongs to Service {owner}: remove it, or write another", wish.given, wish.protocol);
            skip(&mut out.skipped, &wish.name, wish.slot.field(), why);
        } else {
            taken.insert((wish.protocol, wish.given), wish.name.clone());
            wish.got = Some(wish.given);
        }
    }
    let mut full = Vec::new();
    for wish in wishes.iter_mut().filter(|w| w.got.is_none() && w.given == 0) {
        let free = (!full.contains(&wish.protocol)).then(|| look_port(&wish.seed, wish.protocol, &taken));
        match free.flatten() {
            Some(port) => {
                taken.insert((wish.protocol, port), wish.name.clone());
                wish.got = Some(port);
            }
            None => {
                full.extend((!full.contains(&wish.protocol)).then_some(wish.protocol));
                let why = format!(
                    "no node port of {} is left in {} to {}: remove Services",
                    wish.protocol,
                    NODE_PORTS.start(),
                    NODE_PORTS.end()
                );
                skip(&mut out.skipped, &wish.name, wish.slot.field(), why);
            }
        }
    }
    for wish in wishes {
        let Some(service) = out.services.get_mut(&wish.name) else { continue };
        let spec = &mut Arc::make_mut(service).spec;
        let number = i32::from(wish.got.unwrap_or(0));
        match wish.slot {
            Slot::Port(index) => {
                if let Some(port) = spec.ports.get_mut(index) {
                    port.node_port = number;
                }
            }
            Slot::HealthCheck => spec.health_check_node_port = number,
        }
        if let Some(port) = wish.got {
            out.memory.node_ports.insert(wish.key, port);
        }
    }
}

impl Slot {
    fn field(self) -> &'static str {
        match self {
            Slot::Port(_) => "spec.ports.nodePort",
            Slot::HealthCheck => "spec.healthCheckNodePort",
        }
    }
}

fn port_wishes(name: &Name, service: &Service) -> Vec<PortWish> {
    let spec = &service.spec;
    let balanced = spec.kind == ServiceType::LoadBalancer;
    let every = spec.kind == ServiceType::NodePort || (balanced && spec.allocate_load_balancer_node_ports != Some(false));
    let written = |number: i32| u16::try_from(number).unwrap_or(0);
    let mut wishes = Vec::new();
    for (index, port) in spec.ports.iter().enumerate().filter(|(_, p)| every || (balanced && p.node_port != 0)) {
        let protocol = L4::from(port.protocol);
        wishes.push(PortWish {
            name: name.clone(),
            slot: Slot::Port(index),
            protocol,
            key: format!("{name}:{}/{protocol}", port.name),
            seed: format!("{name} {}", port.port),
            given: written(port.node_port),
            got: None,
        });
    }
    if balanced && spec.external_traffic_policy == Some(TrafficPolicy::Local) {
        wishes.push(PortWish {
            name: name.clone(),
            slot: Slot::HealthCheck,
            protocol: L4::Tcp,
            key: format!("{name} healthCheck"),
            seed: format!("{name} healthCheck"),
            given: written(spec.health_check_node_port),
            got: None,
        });
    }
    wishes
}

fn look_port(seed: &str, protocol: L4, taken: &BTreeMap<(L4, u16), Name>) -> Option<u16> {
    /// Left to those who write their port.
    const BAND: u16 = 86;
    let (first, last) = (*NODE_PORTS.start(), *NODE_PORTS.end());
    for (low, high) in [(first + BAND, last), (first, first + BAND - 1)] {
        let size = u64::from(high - low) + 1;
        let start = hash(seed) % size;
        // Both are below the size of the range.
        let mut ports = (0..size).map(|step| low + ((start + step) % size) as u16);
        if let Some(free) = ports.find(|port| !taken.contains_key(&(protocol, *port))) {
            return Some(free);
        }
    }
    None
}

#[cfg(test)]
#[path = "allot_tests.rs"]
mod tests;
