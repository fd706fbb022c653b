//! Which servers know the rest of the world, and which of them answer.
//!
//! Pure; who reads the files is serve.rs. Invariant: never ourselves. Sources: resolv.conf(5);
//! kubelet's rule for a stub on loopback (systemd-resolved): the servers behind it.
#![deny(clippy::disallowed_methods)]

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

pub const PORT: u16 = 53;
/// More are not tried within the patience of those who ask.
const MOST: usize = 6;
const SECOND: i64 = 1_000_000_000;
/// A server that failed is asked first again after this.
const AGAIN: i64 = 10 * SECOND;
/// One that does not know EDNS may have learnt it.
const PLAIN_FOR: i64 = 3600 * SECOND;
/// Failures in a row that make it one of the last.
const FAILURES: u32 = 2;

/// Servers that the files name, in their order. `node`: the text of /etc/resolv.conf;
/// `behind_stub`: texts of files that may name those behind a stub; `ours`: where we listen;
/// `scope`: number of an interface.
pub fn servers(node: &str, behind_stub: &[String], ours: &[SocketAddr], scope: &dyn Fn(&str) -> Option<u32>) -> Vec<SocketAddr> {
    let read = |text: &str| -> Vec<SocketAddr> { nameservers(text, scope).collect() };
    let mut servers = read(node);
    if servers.iter().any(|s| is_loopback(s.ip())) {
        let behind = behind_stub.iter().map(|text| {
            let mut servers = read(text);
            servers.retain(|s| !is_loopback(s.ip()));
            servers
        });
        // Unlike a pod, we reach a stub that no file sees behind.
        if let Some(behind) = behind.into_iter().find(|servers| !servers.is_empty()) {
            servers = behind;
        }
    }
    let mut known: Vec<SocketAddr> = Vec::new();
    for server in servers {
        if !known.contains(&server) && !ours.contains(&server) && known.len() < MOST {
            known.push(server);
        }
    }
    known
}

fn nameservers<'a>(text: &'a str, scope: &'a dyn Fn(&str) -> Option<u32>) -> impl Iterator<Item = SocketAddr> + 'a {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let word = words.next().filter(|word| *word == "nameserver").and_then(|_| words.next())?;
        match word.split_once('%') {
            None => Some(SocketAddr::new(word.parse().ok()?, PORT)),
            Some((ip, interface)) => {
                let ip: Ipv6Addr = ip.parse().ok()?;
                let number = interface.parse().ok().or_else(|| scope(interface))?;
                Some(SocketAddr::V6(SocketAddrV6::new(ip, PORT, 0, number)))
            }
        }
    })
}

fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// The servers and what was seen of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Upstreams {
    all: Vec<Upstream>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Upstream {
    address: SocketAddr,
    /// In a row.
    failures: u32,
    failed_at: i64,
    plain_until: i64,
}

impl Upstreams {
    /// Takes over a new list; what was seen of servers that stay is kept.
    pub fn set(&mut self, servers: &[SocketAddr]) {
        let fresh = |address: &SocketAddr| Upstream { address: *address, failures: 0, failed_at: 0, plain_until: i64::MIN };
        let known = |address: &SocketAddr| self.all.iter().find(|u| u.address == *address).cloned();
        self.all = servers.iter().map(|address| known(address).unwrap_or_else(|| fresh(address))).collect();
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Those that answer first; among equals the order of the file.
    pub fn order(&self, now: i64) -> Vec<SocketAddr> {
        let failing = |u: &&Upstream| u.failures >= FAILURES && now.saturating_sub(u.failed_at) < AGAIN;
        let (bad, good): (Vec<&Upstream>, Vec<&Upstream>) = self.all.iter().partition(failing);
        good.into_iter().chain(bad).map(|u| u.address).collect()
    }

    pub fn answered(&mut self, address: SocketAddr) {
        if let Some(upstream) = self.find(address) {
            upstream.failures = 0;
        }
    }

    pub fn failed(&mut self, address: SocketAddr, now: i64) {
        if let Some(upstream) = self.find(address) {
            upstream.failures = upstream.failures.saturating_add(1);
            upstream.failed_at = now;
        }
    }

    /// It did not understand a question with EDNS. False: it was known, and asked without.
    pub fn is_plain(&mut self, address: SocketAddr, now: i64) -> bool {
        match self.find(address) {
            Some(upstream) if now >= upstream.plain_until => {
                upstream.plain_until = now + PLAIN_FOR;
                true
            }
            _ => false,
        }
    }

    pub fn knows_edns(&self, address: SocketAddr, now: i64) -> bool {
        self.all.iter().find(|u| u.address == address).is_none_or(|u| now >= u.plain_until)
    }

    fn find(&mut self, address: SocketAddr) -> Option<&mut Upstream> {
        self.all.iter_mut().find(|u| u.address == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(node: &str, behind: &[&str], ours: &[&str]) -> Vec<String> {
        let behind: Vec<String> = behind.iter().map(|text| (*text).to_owned()).collect();
        let ours: Vec<SocketAddr> = ours.iter().map(|text| text.parse().unwrap()).collect();
        let scope = |name: &str| (name == "eth0").then_some(7);
        servers(node, &behind, &ours, &scope).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_file_s_order_is_kept_and_what_is_no_address_is_left_out() {
        let node = "# x\nnameserver 192.0.2.1\nnameserver\nnameserver x\n nameserver fe80::1%eth0 more\nnameserver fe80::1%nosuch\nnameserver 192.0.2.1\noptions rotate\n";
        assert_eq!(of(node, &[], &[]), ["192.0.2.1:53", "[fe80::1%7]:53"]);
    }

    #[test]
    fn behind_a_stub_on_loopback_are_the_real_servers_and_without_a_file_it_is_the_stub() {
        let stub = "nameserver 127.0.0.53\n";
        assert_eq!(of(stub, &["", "nameserver 127.0.0.1", "nameserver 192.0.2.9"], &[]), ["192.0.2.9:53"]);
        assert_eq!(of(stub, &[], &[]), ["127.0.0.53:53"]);
    }

    #[test]
    fn we_never_ask_ourselves() {
        assert_eq!(of("nameserver 10.88.0.1\nnameserver 192.0.2.1", &[], &["10.88.0.1:53"]), ["192.0.2.1:53"]);
        assert!(of("nameserver 10.88.0.1", &[], &["10.88.0.1:53"]).is_empty());
    }

    #[test]
    fn a_server_that_fails_comes_last_for_a_while() {
        let (a, b): (SocketAddr, SocketAddr) = ("192.0.2.1:53".parse().unwrap(), "192.0.2.2:53".parse().unwrap());
        let mut upstreams = Upstreams::default();
        upstreams.set(&[a, b]);
        upstreams.failed(a, 0);
        assert_eq!(upstreams.order(1), [a, b], "once is chance");
        upstreams.failed(a, 0);
        assert_eq!(upstreams.order(1), [b, a]);
        assert_eq!(upstreams.order(AGAIN), [a, b], "it is tried again");
        upstreams.failed(a, AGAIN);
        assert_eq!(upstreams.order(AGAIN + 1), [b, a]);
        upstreams.set(&[a]);
        upstreams.answered(a);
        upstreams.set(&[b, a]);
        assert_eq!(upstreams.order(AGAIN + 1), [b, a]);
        assert_eq!(upstreams.count(), 2);
    }

    #[test]
    fn one_that_does_not_know_edns_is_asked_without_for_an_hour() {
        let a: SocketAddr = "192.0.2.1:53".parse().unwrap();
        let mut upstreams = Upstreams::default();
        upstreams.set(&[a]);
        assert!(upstreams.knows_edns(a, 0));
        assert!(upstreams.is_plain(a, 0) && !upstreams.is_plain(a, 1));
        assert!(!upstreams.knows_edns(a, PLAIN_FOR - 1) && upstreams.knows_edns(a, PLAIN_FOR));
    }
}
