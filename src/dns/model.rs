//! Plain types of the DNS room: how it is set up, and what it counts.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::proxy::model::Cidr;

/// How the server is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The cluster's, in lower case and without a dot at its end.
    pub domain: String,
    /// One socket each, so that a reply leaves from the address that was asked.
    pub listen: Vec<IpAddr>,
    pub port: u16,
    /// Who may ask: the server is for pods and the node, and nobody's open resolver.
    pub allow: Vec<Cidr>,
    /// `/etc/resolv.conf`
    pub resolv_conf: PathBuf,
    /// Files that name the servers behind a stub on loopback, best first.
    pub behind_stub: Vec<PathBuf>,
    /// What the cache may weigh.
    pub cache_bytes: usize,
}

/// Size of the cache where nothing else is said.
pub const CACHE_BYTES: usize = 1 << 20;

/// What happened since the start; read by metrics.
#[derive(Debug, Default)]
pub struct Counters {
    pub udp: AtomicU64,
    pub tcp: AtomicU64,
    /// Answered from the zone.
    pub cluster: AtomicU64,
    /// Answered from the cache, still valid.
    pub hits: AtomicU64,
    /// Answered from the cache, no longer valid: the uplink is gone.
    pub stale: AtomicU64,
    /// Questions to upstreams.
    pub asked: AtomicU64,
    /// Answered SERVFAIL: no upstream did.
    pub failed: AtomicU64,
    /// Bytes that are no question.
    pub malformed: AtomicU64,
    /// From somebody who may not ask.
    pub strangers: AtomicU64,
    /// Turned away: too much in flight.
    pub overload: AtomicU64,
    /// Datagrams on the socket of a question that do not answer it.
    pub forged: AtomicU64,
}

impl Counters {
    pub fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Names as metrics have them.
    pub fn read(&self) -> [(&'static str, u64); 11] {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("coracle_dns_udp_requests_total", get(&self.udp)),
            ("coracle_dns_tcp_requests_total", get(&self.tcp)),
            ("coracle_dns_cluster_answers_total", get(&self.cluster)),
            ("coracle_dns_cache_hits_total", get(&self.hits)),
            ("coracle_dns_cache_stale_total", get(&self.stale)),
            ("coracle_dns_upstream_requests_total", get(&self.asked)),
            ("coracle_dns_failures_total", get(&self.failed)),
            ("coracle_dns_malformed_total", get(&self.malformed)),
            ("coracle_dns_strangers_total", get(&self.strangers)),
            ("coracle_dns_overload_total", get(&self.overload)),
            ("coracle_dns_forged_total", get(&self.forged)),
        ]
    }
}
