//! Policies resolved: whom each rule means, as addresses and ports of both families.
//!
//! Invariant: lists are sorted, ranges neither overlap nor touch, so that equal meanings are equal
//! values. Only policies that select a pod of this node are in it.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::super::model::L4;
use super::super::service::Name;
use super::super::table::ranges::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    pub const BOTH: [Direction; 2] = [Direction::Ingress, Direction::Egress];

    pub fn word(self) -> &'static str {
        match self {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyModel {
    /// Pods of this node that are isolated, by address.
    pub subjects: BTreeMap<IpAddr, Subject>,
    pub policies: BTreeMap<Name, Policy>,
    /// The node's DNS server.
    pub servers: BTreeSet<IpAddr>,
}

/// An isolated pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// `namespace/name`
    pub pod: Arc<str>,
    /// The policies that isolate it; None: it is not isolated.
    pub ingress: Option<Arc<[Name]>>,
    pub egress: Option<Arc<[Name]>>,
}

impl Subject {
    pub fn policies(&self, direction: Direction) -> Option<&Arc<[Name]>> {
        match direction {
            Direction::Ingress => self.ingress.as_ref(),
            Direction::Egress => self.egress.as_ref(),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    pub ingress: Vec<Rule>,
    pub egress: Vec<Rule>,
}

impl Policy {
    pub fn rules(&self, direction: Direction) -> &[Rule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }
}

/// Allows what is of one of the peers and of one of the ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub peers: Peers,
    pub ports: Ports,
    /// Of egress: protocols by which the node's DNS server may be asked.
    pub resolves: BTreeSet<L4>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peers {
    Everybody,
    These {
        /// A selector is among them, so that `pods` may come to hold more.
        selects: bool,
        pods: BTreeSet<IpAddr>,
        blocks: Vec<Range>,
    },
}

impl Peers {
    pub fn contain(&self, ip: IpAddr) -> bool {
        match self {
            Peers::Everybody => true,
            Peers::These { pods, blocks, .. } => {
                let before = blocks.partition_point(|(first, _)| *first <= ip);
                let last = before.checked_sub(1).and_then(|at| blocks.get(at)).map(|(_, last)| *last);
                pods.contains(&ip) || last.is_some_and(|last| ip <= last)
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// Of every protocol.
    Every,
    These {
        /// By protocol, first and last port; from 0 on: the whole protocol.
        ranges: Vec<(L4, u16, u16)>,
        /// A name is among them, so that `named` may come to hold more.
        by_name: bool,
        /// What the names mean, for each pod that has them.
        named: BTreeSet<(IpAddr, L4, u16)>,
    },
}

impl Ports {
    pub fn contain(&self, ip: IpAddr, protocol: u8, port: u16) -> bool {
        match self {
            Ports::Every => true,
            Ports::These { ranges, named, .. } => {
                let in_range = |(of, first, last): &(L4, u16, u16)| of.number() == protocol && (*first..=*last).contains(&port);
                ranges.iter().any(in_range)
                    || named.iter().any(|(at, of, number)| *at == ip && of.number() == protocol && *number == port)
            }
        }
    }
}
