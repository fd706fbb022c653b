//! Where a connection would go from here and now: a wanted table, held against the kernel's and
//! walked with this host's addresses and routes. Changes nothing.
//!
//! Invariant: an answer about a table that the kernel does not have says so.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use super::model::L4;
use super::observe;
use super::table::ir::{Family, Name, Table};
use super::table::trace::{Flow, Nameless, Origin, Packet, Scene, Trace, TraceError, trace};
use crate::sys::netlink::{NetlinkError, Socket};
use crate::sys::{nftables, rtnl};

/// `10.96.0.10:80/tcp`, `[fd96::10]:53/udp`; without a protocol TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub at: SocketAddr,
    pub protocol: L4,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is no target: write it like 10.96.0.10:80/tcp or [fd96::10]:53/udp")]
pub struct BadTarget {
    text: String,
}

impl FromStr for Target {
    type Err = BadTarget;
    fn from_str(text: &str) -> Result<Target, BadTarget> {
        let bad = || BadTarget { text: text.chars().take(80).collect() };
        let (at, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" => L4::Tcp,
            "udp" => L4::Udp,
            "sctp" => L4::Sctp,
            _ => return Err(bad()),
        };
        Ok(Target { at: at.parse().map_err(|_| bad())?, protocol })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum WayError {
    #[error("there is no table for {0}: the node has no pod range of that family")]
    NoTable(&'static str),
    #[error("{from} cannot send to {to}: one is IPv4, the other IPv6")]
    Families { from: IpAddr, to: IpAddr },
    #[error("this node has no route to {0}, so nothing here can send to it")]
    NoRoute(IpAddr),
    #[error("look at addresses and routes")]
    Route(#[source] NetlinkError),
    #[error("look at the kernel's table")]
    Look(#[source] NetlinkError),
    #[error("walk the table")]
    Trace(#[source] TraceError),
}

/// All that may become of the first packet of a connection, each as likely.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ways {
    pub all: Vec<Trace>,
    /// Endpoints beyond those.
    pub more: u32,
    /// How the kernel's table differs from the one that was walked.
    pub differs: Option<String>,
}

/// Endpoints that are told one by one.
const MOST: u32 = 100;

/// From an address, or from this node itself.
pub fn ways(tables: &[Table], from: Option<IpAddr>, to: &Target) -> Result<Ways, WayError> {
    let (family, destination) = (if to.at.is_ipv4() { Family::Ip } else { Family::Ip6 }, to.at.ip());
    let table = tables.iter().find(|t| t.family == family).ok_or(WayError::NoTable(family.name()))?;
    let mut routes = Routes::open()?;
    let source = match from {
        Some(from) if from.is_ipv4() != to.at.is_ipv4() => return Err(WayError::Families { from, to: destination }),
        Some(from) => from,
        None => routes.to(destination)?.and_then(|r| r.source).ok_or(WayError::NoRoute(destination))?,
    };
    let back = routes.to(source)?.ok_or(WayError::NoRoute(source))?;
    let origin = if back.local { Origin::Host } else { Origin::Interface(routes.name(back.link)) };
    let packet =
        Packet { source, destination, protocol: to.protocol.number(), source_port: 40_000, destination_port: to.at.port() };
    let routes = RefCell::new(routes);
    let failure = RefCell::new(None);
    // Asked from inside of a walk, which knows no errors: kept until after it.
    let look = |ip: IpAddr| match routes.borrow_mut().to(ip) {
        Ok(route) => route,
        Err(e) => {
            failure.replace(Some(e));
            None
        }
    };
    let is_local = |ip: IpAddr| look(ip).is_some_and(|r| r.local);
    let route = |ip: IpAddr| look(ip).map_or_else(|| "no route".into(), |r| routes.borrow().name(r.link));
    // Of the first throw: among how many, and whether it was the only one.
    let (numbers, throws) = (Cell::new(1), Cell::new(0));
    let walk = |dice: u32| {
        throws.set(0);
        let random = |modulus| {
            if throws.replace(throws.get() + 1) == 0 {
                numbers.set(modulus);
            }
            dice
        };
        let scene = Scene {
            from: origin.clone(),
            flow: Flow::New,
            is_local: &is_local,
            route: &route,
            random: &random,
            remembered: &BTreeMap::new(),
            nameless: Nameless::Empty,
        };
        trace(table, &scene, packet).map_err(WayError::Trace)
    };
    let mut all: Vec<Trace> = Vec::new();
    let mut dice = 0;
    while dice < numbers.get().min(MOST) {
        let way = walk(dice)?;
        // What was thrown again ends where another number leads to.
        if throws.get() < 2 && !all.contains(&way) {
            all.push(way);
        }
        dice += 1;
    }
    // Numbers that lead to endpoints are the lowest: how many there are is found by halves.
    let mut beyond = numbers.get();
    let first = dice;
    while dice < beyond {
        let middle = dice + (beyond - dice) / 2;
        walk(middle)?;
        if throws.get() < 2 { dice = middle + 1 } else { beyond = middle }
    }
    if let Some(error) = failure.take() {
        return Err(error);
    }
    Ok(Ways { all, more: dice - first, differs: difference(table)? })
}

/// The kernel's table against the wanted one, in words.
fn difference(table: &Table) -> Result<Option<String>, WayError> {
    let look = nftables::open().and_then(|mut socket| observe::look(&mut socket, table)).map_err(WayError::Look)?;
    let elements: usize = look.wrong.values().map(|w| w.gone.len() + w.new.len()).sum();
    Ok(match look.structure {
        None => Some("the kernel has no such table now".to_owned()),
        Some(seen) if seen != table.clone_structure() => Some("the kernel's table has other chains or sets now".to_owned()),
        Some(_) if look.dormant => Some("the kernel's table is dormant now: it does nothing".to_owned()),
        Some(_) if elements > 0 => Some(format!("{elements} elements of the kernel's table are not as they should be now")),
        Some(_) => None,
    })
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(first) = self.all.first() {
            writeln!(f, "{first}")?;
            if !first.remembers.is_empty() {
                writeln!(f, "(a client that was here not long ago goes to the endpoint that it had: sessionAffinity)")?;
            }
        }
        for other in self.all.iter().skip(1) {
            writeln!(f, "or, as likely: {}", other.outcome())?;
        }
        if self.more > 0 {
            writeln!(f, "or one of {} more", self.more)?;
        }
        if let Some(differs) = &self.differs {
            writeln!(f, "this is what is wanted, but {differs}")?;
        }
        Ok(())
    }
}

struct Routes {
    socket: Socket,
    names: BTreeMap<u32, Name>,
}

impl Routes {
    fn open() -> Result<Routes, WayError> {
        let mut socket = rtnl::open().map_err(WayError::Route)?;
        let links = rtnl::links(&mut socket).map_err(WayError::Route)?;
        Ok(Routes { socket, names: links.into_iter().map(|l| (l.index, l.name.into())).collect() })
    }

    fn to(&mut self, ip: IpAddr) -> Result<Option<rtnl::Route>, WayError> {
        rtnl::route(&mut self.socket, ip).map_err(WayError::Route)
    }

    fn name(&self, link: Option<u32>) -> Name {
        link.and_then(|index| self.names.get(&index).cloned()).unwrap_or_else(|| "?".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_written_as_people_write_them() {
        let shown = |text: &str| text.parse::<Target>().map(|t| format!("{} {}", t.at, t.protocol));
        assert_eq!(shown("10.96.0.10:80").unwrap(), "10.96.0.10:80 TCP");
        assert_eq!(shown("10.96.0.10:53/UDP").unwrap(), "10.96.0.10:53 UDP");
        assert_eq!(shown("[fd96::10]:53/sctp").unwrap(), "[fd96::10]:53 SCTP");
        for bad in ["10.96.0.10", "web:80", "10.96.0.10:80/icmp", "10.96.0.10:99999", ""] {
            assert!(shown(bad).is_err(), "{bad}");
        }
    }
}
