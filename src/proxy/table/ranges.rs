//! Networks as ranges that do not overlap, as sets of ranges need them.
//!
//! The kernel refuses an element that overlaps another one, and policies may name networks that
//! do; a set means the same with them merged. Never quadratic: one sort, one pass.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use crate::api::cidr::Cidr;

/// First and last address, both inclusive.
pub type Range = (IpAddr, IpAddr);

/// All addresses of the networks, in as few ranges as possible, in order. IPv4 and IPv6 do not mix.
pub fn merged(networks: impl IntoIterator<Item = Cidr>) -> Vec<Range> {
    united(networks.into_iter().map(|c| (c.address, c.last())).collect())
}

/// The same of ranges that may overlap.
pub fn united(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort();
    let mut merged: Vec<Range> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(before) if touches(before.1, first) => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// The addresses of a network that are in none of the others, in order.
pub fn without(network: Cidr, others: impl IntoIterator<Item = Cidr>) -> Vec<Range> {
    let (mut first, last) = (Some(network.address), network.last());
    let mut left = Vec::new();
    for (from, to) in merged(others.into_iter().filter(|c| network.covers(c))) {
        if let (Some(first), Some(before)) = (first, step(from, false))
            && first <= before
        {
            left.push((first, before));
        }
        first = step(to, true);
    }
    left.extend(first.filter(|first| *first <= last && first.is_ipv4() == last.is_ipv4()).map(|first| (first, last)));
    left
}

/// The address behind it, or ahead of it; None beyond the last one and the first.
fn step(ip: IpAddr, up: bool) -> Option<IpAddr> {
    match (ip, up) {
        (IpAddr::V4(ip), true) => u32::from(ip).checked_add(1).map(|n| IpAddr::from(n.to_be_bytes())),
        (IpAddr::V4(ip), false) => u32::from(ip).checked_sub(1).map(|n| IpAddr::from(n.to_be_bytes())),
        (IpAddr::V6(ip), true) => u128::from(ip).checked_add(1).map(|n| IpAddr::from(n.to_be_bytes())),
        (IpAddr::V6(ip), false) => u128::from(ip).checked_sub(1).map(|n| IpAddr::from(n.to_be_bytes())),
    }
}

/// Whether a range that begins at `first` goes on where one up to `last` ends.
fn touches(last: IpAddr, first: IpAddr) -> bool {
    match (last, first) {
        (IpAddr::V4(last), IpAddr::V4(first)) => u32::from(first) <= u32::from(last).saturating_add(1),
        (IpAddr::V6(last), IpAddr::V6(first)) => u128::from(first) <= u128::from(last).saturating_add(1),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(texts: &[&str]) -> Vec<String> {
        merged(texts.iter().map(|t| t.parse().unwrap())).iter().map(|(a, b)| format!("{a}-{b}")).collect()
    }

    #[test]
    fn what_is_excepted_is_cut_out_at_both_ends_and_in_the_middle() {
        let left = |network: &str, others: &[&str]| {
            let ranges = without(network.parse().unwrap(), others.iter().map(|t| t.parse().unwrap()));
            ranges.iter().map(|(a, b)| format!("{a}-{b}")).collect::<Vec<_>>()
        };
        assert_eq!(left("10.0.0.0/30", &[]), ["10.0.0.0-10.0.0.3"]);
        assert_eq!(left("10.0.0.0/30", &["10.0.0.1/32"]), ["10.0.0.0-10.0.0.0", "10.0.0.2-10.0.0.3"]);
        assert_eq!(left("10.0.0.0/30", &["10.0.0.0/31", "10.0.0.3/32"]), ["10.0.0.2-10.0.0.2"]);
        assert_eq!(left("10.0.0.0/30", &["10.0.0.0/30", "10.0.0.0/31"]), [""; 0]);
        assert_eq!(left("0.0.0.0/0", &["0.0.0.0/1", "255.255.255.255/32"]), ["128.0.0.0-255.255.255.254"]);
        assert_eq!(left("::/0", &["8000::/1"]), ["::-7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]);
    }

    #[test]
    fn overlapping_and_touching_networks_become_one_range() {
        assert_eq!(of(&["10.0.1.0/24", "10.0.0.0/24", "10.0.0.7/32"]), ["10.0.0.0-10.0.1.255"]);
        assert_eq!(of(&["10.0.0.0/25", "10.0.1.0/24"]), ["10.0.0.0-10.0.0.127", "10.0.1.0-10.0.1.255"]);
        assert_eq!(of(&["0.0.0.0/0", "255.255.255.255/32"]), ["0.0.0.0-255.255.255.255"]);
        assert_eq!(of(&["::/0", "0.0.0.0/0"]), ["0.0.0.0-255.255.255.255", "::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]);
        assert_eq!(of(&["fd00::/128", "fd00::1/128"]), ["fd00::-fd00::1"]);
        assert_eq!(of(&[]), [""; 0]);
    }
}
