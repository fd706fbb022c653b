//! One EndpointSlice, in few bytes: the endpoints that could ever take a connection.
//!
//! Invariant: every endpoint is of the slice's family and fit; those that are neither ready nor
//! serving while they end are not kept, since no rule can choose them.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::frame::{Notes, port_number};
use super::{Name, address};
use crate::api::endpoint_slice::{AddressType, EndpointHints, EndpointSlice};
use crate::api::service::{HEADLESS, IpFamily, PROXY_NAME};
use crate::proxy::model::{L4, NodeFacts, Skipped};

/// Where this node is; zone names are kept once, as numbers.
pub struct Place {
    node: String,
    zone: Option<u32>,
    zones: BTreeMap<Box<str>, u32>,
}

impl Place {
    pub fn new(node: &NodeFacts) -> Place {
        let mut place = Place { node: node.name.clone(), zone: None, zones: BTreeMap::new() };
        place.move_to(node);
        place
    }

    /// Whether a node's zone is what topology counts with already. A node's name never changes.
    pub fn is_at(&self, node: &NodeFacts) -> bool {
        match node.zone.as_deref().filter(|z| !z.is_empty()) {
            None => self.zone.is_none(),
            Some(zone) => self.zone.is_some() && self.zone == self.zones.get(zone).copied(),
        }
    }

    pub fn move_to(&mut self, node: &NodeFacts) {
        self.zone = node.zone.as_deref().filter(|z| !z.is_empty()).map(|z| self.number(z));
    }

    pub fn is_here(&self, zones: &Zones) -> bool {
        match (self.zone, zones) {
            (Some(here), Zones::One(zone)) => *zone == here,
            (Some(here), Zones::Many(zones)) => zones.contains(&here),
            (None, _) | (_, Zones::None) => false,
        }
    }

    fn number(&mut self, zone: &str) -> u32 {
        if let Some(number) = self.zones.get(zone) {
            return *number;
        }
        // Fewer than the bytes that named them.
        let number = u32::try_from(self.zones.len()).unwrap_or(u32::MAX);
        self.zones.insert(zone.into(), number);
        number
    }

    /// None: a slice that no proxy serves (of names, or for another proxy).
    pub fn digest(&mut self, name: &Name, slice: &EndpointSlice) -> Option<Digest> {
        let labels = &slice.metadata.labels;
        if labels.contains_key(PROXY_NAME) || labels.contains_key(HEADLESS) {
            return None;
        }
        let family = match slice.address_type {
            AddressType::IPv4 => IpFamily::IPv4,
            AddressType::IPv6 => IpFamily::IPv6,
            AddressType::FQDN => return None,
        };
        let mut notes = Notes::new(format!("EndpointSlice {name}"));
        let mut ports = Vec::new();
        for (index, port) in slice.ports.iter().enumerate() {
            match port.port.map(|number| (number, port_number(number))) {
                Some((_, Some(number))) => ports.push((port.name.as_str().into(), L4::from(port.protocol), number)),
                Some((number, None)) => notes.add(format!("ports[{index}].port"), format!("{number} is no port: 1 to 65535 are")),
                None => notes.add(
                    format!("ports[{index}].port"),
                    "without a number it means all ports, which cannot be served: name one".to_owned(),
                ),
            }
        }
        let mut endpoints = Vec::new();
        for (index, endpoint) in slice.endpoints.iter().enumerate() {
            let ip = match endpoint.addresses.first().map(|text| address::parse(text)) {
                None => Err("it has no address".to_owned()),
                Some(Ok(ip)) if address::family(ip) != family => {
                    Err(format!("{ip} is not of the slice's addressType {family:?}"))
                }
                Some(read) => read,
            };
            let ip = match ip {
                Ok(ip) => ip,
                Err(why) => {
                    notes.add(format!("endpoints[{index}].addresses"), why);
                    continue;
                }
            };
            if endpoint.addresses.len() > 1 {
                notes.add(
                    format!("endpoints[{index}].addresses"),
                    "only the first address of an endpoint is served, as in every cluster".to_owned(),
                );
            }
            let conditions = &endpoint.conditions;
            let state = match (conditions.is_ready(), conditions.is_serving() && conditions.is_terminating()) {
                (true, _) => State::Ready,
                (false, true) => State::Ending,
                (false, false) => continue,
            };
            endpoints.push(self.backend(ip, state, endpoint.node_name.as_deref(), endpoint.hints.as_ref()));
        }
        Some(Digest { family, ports: ports.into(), endpoints: endpoints.into(), skipped: notes.done() })
    }

    fn backend(&mut self, ip: IpAddr, state: State, node: Option<&str>, hints: Option<&EndpointHints>) -> Backend {
        let hints_for =
            |list: fn(&EndpointHints) -> &Vec<crate::api::endpoint_slice::Hint>| hints.map(list).into_iter().flatten();
        let mut zones: Vec<u32> = hints_for(|h| &h.for_zones).map(|h| self.number(&h.name)).collect();
        zones.sort_unstable();
        zones.dedup();
        let nodes = match (hints_for(|h| &h.for_nodes).next(), hints_for(|h| &h.for_nodes).any(|h| h.name == self.node)) {
            (None, _) => Nodes::None,
            (Some(_), true) => Nodes::Here,
            (Some(_), false) => Nodes::Others,
        };
        let zones = match zones.as_slice() {
            [] => Zones::None,
            [zone] => Zones::One(*zone),
            _ => Zones::Many(zones.into()),
        };
        Backend { ip, state, local: !self.node.is_empty() && node == Some(self.node.as_str()), nodes, zones }
    }
}

#[derive(Debug)]
pub struct Digest {
    pub family: IpFamily,
    pub ports: Box<[(Box<str>, L4, u16)]>,
    pub endpoints: Box<[Backend]>,
    pub skipped: Vec<Skipped>,
}

#[derive(Clone, Debug)]
pub struct Backend {
    pub ip: IpAddr,
    pub state: State,
    pub local: bool,
    pub nodes: Nodes,
    pub zones: Zones,
}

/// Better last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Serving and terminating: used where nothing is ready (KEP-1669).
    Ending,
    Ready,
}

/// hints.forNodes, as this node sees them; they name us last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nodes {
    None,
    Others,
    Here,
}

/// hints.forZones, as numbers of [`Place`]; sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Zones {
    None,
    One(u32),
    Many(Box<[u32]>),
}

impl Zones {
    pub fn join(&self, other: &Zones) -> Zones {
        match (self, other) {
            (Zones::None, zones) | (zones, Zones::None) => zones.clone(),
            (one, two) if one == two => one.clone(),
            (one, two) => {
                let mut all: Vec<u32> = one.list().iter().chain(two.list()).copied().collect();
                all.sort_unstable();
                all.dedup();
                Zones::Many(all.into())
            }
        }
    }
    fn list(&self) -> &[u32] {
        match self {
            Zones::None => &[],
            Zones::One(zone) => std::slice::from_ref(zone),
            Zones::Many(zones) => zones,
        }
    }
}
