//! What the DNS server is told: a new zone whenever something that has a name changed.
//!
//! Invariant: the server never sees half of a change, and none where nothing changed. A zone costs
//! all names there are, so changes that come fast share one: making zones takes no more than a
//! hundredth of the time, and no name is older than the time for which answers may be kept anyway.

use std::net::IpAddr;
use std::sync::Arc;

use super::rooms::Rooms;
use super::services::Services;
use crate::api::endpoint_slice::EndpointSlice;
use crate::dns::Dns;
use crate::dns::zone::{Objects, TTL, Zone};
use crate::proxy::model::Cidr;
use crate::sys::clock;

/// The zone that the server has.
#[derive(Default)]
pub struct Names {
    /// Revision of the Services that it was made of.
    told: Option<u64>,
    serial: u32,
    /// Boot time in ns: before it no other one is made.
    next: i64,
}

/// Of the time that a zone took to make, until the next.
const SPARE: i64 = 100;
/// In ns: the time to live of our answers.
const LATEST: i64 = TTL as i64 * 1_000_000_000;

impl Names {
    /// Gives when to call again where that is not with the next change.
    pub fn tell(&mut self, rooms: &Rooms, dns: &Dns, services: &Services) -> Option<i64> {
        if self.told == Some(services.revision()) {
            return None;
        }
        let began = clock::boot_nanos();
        if began < self.next {
            return Some(self.next);
        }
        self.told = Some(services.revision());
        self.serial = self.serial.wrapping_add(1);
        let ranges: Vec<Cidr> = rooms.facts.pod_cidrs.iter().chain(&rooms.service_ranges).copied().collect();
        let slices: Vec<&EndpointSlice> = services.services().keys().flat_map(|name| services.slices(name)).collect();
        // Of pods on the host's network the address is not their own.
        let pods = services.local_pods().iter().map(|pod| &pod.local).filter(|pod| !pod.host_network);
        let pods: Vec<(&str, &[IpAddr])> = pods.map(|pod| (pod.namespace.as_str(), pod.addresses.as_slice())).collect();
        let zone = Zone::build(&Objects {
            domain: &rooms.config.cluster_domain,
            servers: &rooms.net.gateways(),
            ranges: &ranges,
            serial: self.serial,
            services: &services.services().values().map(|service| &**service).collect::<Vec<_>>(),
            slices: &slices,
            pods: &pods,
        });
        match zone {
            Ok(zone) => dns.set_zone(Arc::new(zone)),
            // The flag was checked; there is no other cause.
            Err(error) => tracing::error!(%error, "DNS: the cluster has no zone"),
        }
        let end = clock::boot_nanos();
        self.next = end.saturating_add((end - began).saturating_mul(SPARE).min(LATEST));
        None
    }
}
