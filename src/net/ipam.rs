//! Which pod has which address.
//!
//! Pure: time is an argument. Invariant: an address is held by one pod at most, and network,
//! gateway (the first address) and last address of a range by none. Addresses go round the range,
//! so that one just freed comes last; for [`QUARANTINE`] it is given only where nothing else is
//! left (an old peer's packets, cached names and connection tracking may still mean the old pod).
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::model::Cidr;

/// Nanoseconds; longer than the kernel remembers a UDP stream (120 s).
pub const QUARANTINE: i64 = 150 * 1_000_000_000;

/// No address is left in this range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    pub cidr: Cidr,
    pub held: usize,
}

/// The addresses of one agent's pods, over all its ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipam {
    ranges: Vec<Range>,
}

/// Addresses are counted from the range's first one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    cidr: Cidr,
    cursor: u128,
    held: BTreeMap<u128, String>,
    freed: BTreeMap<u128, i64>,
}

/// What outlives the agent besides the leases: where to go on, and what rests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub cursors: Vec<IpAddr>,
    /// With the time it was freed at.
    pub freed: Vec<(IpAddr, i64)>,
}

impl Ipam {
    pub fn new(cidrs: &[Cidr]) -> Ipam {
        let mut cidrs = cidrs.to_vec();
        // IPv4 first, in whatever order they were given: addresses are listed so.
        cidrs.sort();
        let range = |cidr| Range { cidr, cursor: 1, held: BTreeMap::new(), freed: BTreeMap::new() };
        Ipam { ranges: cidrs.into_iter().map(range).collect() }
    }

    /// One address of each range. Those that the pod holds already stay; `wanted` are taken where
    /// they are free. All of them or none.
    pub fn allocate(&mut self, uid: &str, wanted: &[IpAddr], now: i64) -> Result<Vec<IpAddr>, Exhausted> {
        let picked = self.ranges.iter().map(|r| r.pick(uid, wanted, now)).collect::<Result<Vec<_>, _>>()?;
        for (range, (offset, fresh)) in self.ranges.iter_mut().zip(&picked) {
            range.freed.retain(|o, at| o != offset && now.saturating_sub(*at) < QUARANTINE);
            range.held.insert(*offset, uid.to_owned());
            if *fresh {
                range.cursor = *offset;
            }
        }
        Ok(self.ranges.iter().zip(picked).map(|(range, (offset, _))| range.address(offset)).collect())
    }

    /// Notes what a living pod has. False: the address is outside of all ranges, or another pod's.
    pub fn adopt(&mut self, uid: &str, addresses: &[IpAddr]) -> bool {
        let places: Option<Vec<(usize, u128)>> = addresses.iter().map(|ip| self.place(*ip)).collect();
        let Some(places) = places else { return false };
        let free = |(at, offset): &(usize, u128)| {
            self.ranges.get(*at).is_some_and(|r| r.usable(*offset) && r.held.get(offset).is_none_or(|holder| holder == uid))
        };
        if places.len() != self.ranges.len() || !places.iter().all(free) {
            return false;
        }
        for (at, offset) in places {
            if let Some(range) = self.ranges.get_mut(at) {
                range.held.insert(offset, uid.to_owned());
                range.freed.remove(&offset);
            }
        }
        true
    }

    /// Frees all that the pod holds.
    pub fn release(&mut self, uid: &str, now: i64) {
        for range in &mut self.ranges {
            let mine: Vec<u128> = range.held.iter().filter(|(_, holder)| *holder == uid).map(|(offset, _)| *offset).collect();
            for offset in mine {
                range.held.remove(&offset);
                range.freed.insert(offset, now);
            }
        }
    }

    pub fn memory(&self) -> Memory {
        Memory {
            cursors: self.ranges.iter().map(|r| r.address(r.cursor)).collect(),
            freed: self.ranges.iter().flat_map(|r| r.freed.iter().map(|(offset, at)| (r.address(*offset), *at))).collect(),
        }
    }

    /// Goes on where another agent of this boot left off. What fits no range is left out.
    pub fn recall(&mut self, memory: &Memory) {
        for cursor in &memory.cursors {
            if let Some((at, offset)) = self.place(*cursor) {
                self.ranges.get_mut(at).into_iter().for_each(|r| r.cursor = offset);
            }
        }
        for (ip, since) in &memory.freed {
            if let Some((at, offset)) = self.place(*ip) {
                self.ranges.get_mut(at).into_iter().for_each(|r| {
                    if r.usable(offset) && !r.held.contains_key(&offset) {
                        r.freed.insert(offset, *since);
                    }
                });
            }
        }
    }

    fn place(&self, ip: IpAddr) -> Option<(usize, u128)> {
        let at = self.ranges.iter().position(|r| r.cidr.contains(ip))?;
        Some((at, number(ip) - number(self.ranges.get(at)?.cidr.address)))
    }
}

impl Range {
    /// Offset, and whether it is a new one.
    fn pick(&self, uid: &str, wanted: &[IpAddr], now: i64) -> Result<(u128, bool), Exhausted> {
        if let Some((offset, _)) = self.held.iter().find(|(_, holder)| *holder == uid) {
            return Ok((*offset, false));
        }
        let free = |offset: u128| self.usable(offset) && !self.held.contains_key(&offset);
        let wanted = wanted.iter().filter(|ip| self.cidr.contains(**ip)).map(|ip| number(*ip) - number(self.cidr.address));
        if let Some(offset) = wanted.filter(|o| free(*o)).take(1).next() {
            return Ok((offset, false));
        }
        let resting = |offset: u128| self.freed.get(&offset).is_some_and(|at| now.saturating_sub(*at) < QUARANTINE);
        // Among that many neighbouring addresses one is neither held nor resting, if any is.
        let tries = self.count().min(self.held.len() as u128 + self.freed.len() as u128 + 1);
        let first = if self.usable(self.cursor) { self.cursor } else { self.last() };
        let mut at = first;
        for _ in 0..tries {
            at = if at >= self.last() { 2 } else { at + 1 };
            if free(at) && !resting(at) {
                return Ok((at, true));
            }
        }
        let oldest = self.freed.iter().filter(|(offset, _)| free(**offset)).min_by_key(|(_, at)| **at);
        oldest.map(|(offset, _)| (*offset, true)).ok_or(Exhausted { cidr: self.cidr, held: self.held.len() })
    }

    /// The one before the last: the last is IPv4's broadcast address and of IPv6's anycast ones.
    fn last(&self) -> u128 {
        let bits = if self.cidr.is_v4() { 32 } else { 128 } - u32::from(self.cidr.prefix);
        // Cidr has 2 to 127 bits.
        (1u128 << bits.min(127)) - 2
    }
    fn count(&self) -> u128 {
        self.last() - 1
    }
    fn usable(&self, offset: u128) -> bool {
        (2..=self.last()).contains(&offset)
    }
    fn address(&self, offset: u128) -> IpAddr {
        address_at(self.cidr, offset)
    }
}

/// The bridge's own address in the range: the first one.
pub fn gateway(cidr: Cidr) -> IpAddr {
    address_at(cidr, 1)
}

fn address_at(cidr: Cidr, offset: u128) -> IpAddr {
    let number = number(cidr.address) + offset;
    if cidr.is_v4() { IpAddr::from((number as u32).to_be_bytes()) } else { IpAddr::from(number.to_be_bytes()) }
}

fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(u32::from(ip)),
        IpAddr::V6(ip) => u128::from(ip),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ipam(cidrs: &[&str]) -> Ipam {
        Ipam::new(&cidrs.iter().map(|c| c.parse().unwrap()).collect::<Vec<_>>())
    }
    fn texts(addresses: &[IpAddr]) -> Vec<String> {
        addresses.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn a_pod_gets_one_address_of_each_family_ipv4_first_and_always_the_same() {
        let mut ipam = ipam(&["fd88::/64", "10.88.0.0/24"]);
        assert_eq!(texts(&ipam.allocate("a", &[], 0).unwrap()), ["10.88.0.2", "fd88::2"]);
        assert_eq!(texts(&ipam.allocate("b", &[], 0).unwrap()), ["10.88.0.3", "fd88::3"]);
        assert_eq!(texts(&ipam.allocate("a", &[], 9).unwrap()), ["10.88.0.2", "fd88::2"]);
    }

    #[test]
    fn a_freed_address_comes_last_and_only_in_need_before_its_rest_is_over() {
        // Usable: .2 to .6
        let mut ipam = ipam(&["10.0.0.0/29"]);
        for uid in ["a", "b"] {
            ipam.allocate(uid, &[], 0).unwrap();
        }
        ipam.release("a", 10);
        for (uid, expected) in [("c", "10.0.0.4"), ("d", "10.0.0.5"), ("e", "10.0.0.6"), ("f", "10.0.0.2")] {
            assert_eq!(texts(&ipam.allocate(uid, &[], 20).unwrap()), [expected], "{uid}");
        }
        let full = ipam.allocate("g", &[], 20).unwrap_err();
        assert_eq!((full.cidr.to_string().as_str(), full.held), ("10.0.0.0/29", 5));
        ipam.release("b", 30);
        ipam.release("d", 40);
        assert_eq!(texts(&ipam.allocate("g", &[], 50).unwrap()), ["10.0.0.3"]);
        ipam.release("e", 60);
        // .5 has rested, .6 has not.
        assert_eq!(texts(&ipam.allocate("h", &[], 41 + QUARANTINE).unwrap()), ["10.0.0.5"]);
    }

    #[test]
    fn nothing_is_taken_where_one_family_is_full() {
        let mut ipam = ipam(&["10.0.0.0/30", "fd88::/64"]);
        ipam.allocate("a", &[], 0).unwrap();
        let before = ipam.clone();
        assert!(ipam.allocate("b", &[], 0).is_err());
        assert_eq!(ipam, before);
    }

    #[test]
    fn what_lives_is_adopted_unless_it_cannot_be() {
        let mut ipam = ipam(&["10.88.0.0/24"]);
        assert!(ipam.adopt("a", &["10.88.0.9".parse().unwrap()]));
        assert!(ipam.adopt("a", &["10.88.0.9".parse().unwrap()]));
        for not in ["10.88.0.9", "10.88.0.0", "10.88.0.1", "10.88.0.255", "10.99.0.5", "fd88::5"] {
            assert!(!ipam.adopt("b", &[not.parse().unwrap()]), "{not}");
        }
        assert!(!ipam.adopt("b", &[]));
        assert_eq!(texts(&ipam.allocate("c", &["10.88.0.9".parse().unwrap()], 0).unwrap()), ["10.88.0.2"]);
        assert_eq!(texts(&ipam.allocate("d", &["10.88.0.44".parse().unwrap()], 0).unwrap()), ["10.88.0.44"]);
    }

    #[test]
    fn the_next_agent_goes_on_where_the_last_one_stopped() {
        let mut old = ipam(&["10.88.0.0/24", "fd88::/64"]);
        for uid in ["a", "b", "c"] {
            old.allocate(uid, &[], 0).unwrap();
        }
        old.release("a", 5);
        let mut new = ipam(&["10.88.0.0/24", "fd88::/64"]);
        new.adopt("b", &["10.88.0.3".parse().unwrap(), "fd88::3".parse().unwrap()]);
        new.adopt("c", &["10.88.0.4".parse().unwrap(), "fd88::4".parse().unwrap()]);
        new.recall(&old.memory());
        assert_eq!(new, old);
        // Another range: nothing of the memory fits.
        let mut other = ipam(&["10.77.0.0/24"]);
        other.recall(&old.memory());
        assert_eq!(other, ipam(&["10.77.0.0/24"]));
    }

    proptest! {
        /// Whatever comes and goes: no address twice, none outside, exhausted only when full.
        #[test]
        fn no_address_is_given_twice(steps in proptest::collection::vec((0u8..24, any::<bool>(), 0i64..QUARANTINE), 1..200)) {
            let mut ipam = ipam(&["10.0.0.0/28", "fd88::/124"]);
            let mut holds: BTreeMap<u8, Vec<IpAddr>> = BTreeMap::new();
            let mut now = 0;
            for (pod, add, passes) in steps {
                now += passes;
                if add {
                    match ipam.allocate(&pod.to_string(), &[], now) {
                        Ok(addresses) => { holds.insert(pod, addresses); }
                        Err(full) => prop_assert_eq!((full.held, holds.len(), holds.contains_key(&pod)), (13, 13, false)),
                    }
                } else {
                    ipam.release(&pod.to_string(), now);
                    holds.remove(&pod);
                }
                let mut all: Vec<_> = holds.values().flatten().collect();
                let count = all.len();
                all.sort();
                all.dedup();
                prop_assert_eq!((all.len(), count), (holds.len() * 2, holds.len() * 2));
                for taken in all {
                    let last = match taken { IpAddr::V4(ip) => ip.octets()[3], IpAddr::V6(ip) => ip.octets()[15] };
                    prop_assert!((2..=14).contains(&last));
                }
            }
        }
    }
}
