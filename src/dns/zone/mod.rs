//! The cluster's names: what is there under `cluster.local` and, backwards, in the ranges of pods
//! and Services.
//!
//! ```text
//! <service>.<ns>.svc.<domain>                   A AAAA SRV, or CNAME (ExternalName)
//! <hostname>.<service>.<ns>.svc.<domain>        A AAAA SRV   of one endpoint
//! _<port>._<protocol>.<service>.<ns>.svc.<domain>   SRV
//! <address-with-dashes>.<ns>.pod.<domain>       A AAAA       of a pod that is there
//! dns-version.<domain>                          TXT
//! <address>.in-addr.arpa, ….ip6.arpa            PTR
//! ```
//!
//! Pure: built from objects ([`Zone::build`], build.rs), looked up by labels ([`Zone::lookup`],
//! lookup.rs). Invariant: a name that has a record, or a name below it that has one, is never
//! "no such name" (RFC 8020); names are compared without case. Source: Kubernetes DNS-Based
//! Service Discovery 1.1.0 (kubernetes/dns, docs/specification.md); where it leaves things open,
//! what CoreDNS does (dashed names for endpoints without hostname, SRV at a Service's own name).
#![deny(clippy::disallowed_methods)]

mod build;
mod lookup;

use std::net::IpAddr;

pub use build::{BadDomain, Objects};
pub use lookup::Asked;

use crate::proxy::model::{Cidr, L4};

/// Seconds that a record of the zone may be kept elsewhere; CoreDNS's default.
pub const TTL: u32 = 5;
/// That of the record which never changes.
pub const TTL_VERSION: u32 = 28800;
pub const SCHEMA_VERSION: &str = "1.1.0";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zone {
    /// In lower case, without a dot at its end.
    domain: String,
    /// Addresses of this server: what its NS record leads to.
    servers: Vec<IpAddr>,
    /// Ranges whose every address is a pod's or a Service's: nobody else knows their names.
    ranges: Vec<Cidr>,
    serial: u32,
    /// Sorted by namespace and name.
    services: Vec<Service>,
    /// Sorted. Also those that only have pods.
    namespaces: Vec<Box<str>>,
    /// Sorted by namespace and address.
    pods: Vec<(Box<str>, IpAddr)>,
    /// Sorted by address.
    reverse: Vec<(IpAddr, Owner)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Service {
    namespace: Box<str>,
    name: Box<str>,
    kind: Kind,
    /// Of a ClusterIP Service; those of a headless one are its endpoints'.
    ports: Box<[Port]>,
    /// One an EndpointSlice, ready endpoints only.
    groups: Box<[Group]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    ClusterIp(Box<[IpAddr]>),
    Headless,
    ExternalName(Box<str>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    ports: Box<[Port]>,
    endpoints: Box<[Endpoint]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Port {
    /// Empty for the nameless one.
    name: Box<str>,
    protocol: L4,
    number: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    ip: IpAddr,
    /// None: it is called by its address.
    hostname: Option<Box<str>>,
}

/// Whose address it is: a Service's own, or an endpoint's (group, place in it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Owner {
    service: u32,
    endpoint: Option<(u32, u32)>,
}

/// What a name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Somebody else knows.
    NotOurs,
    /// NXDOMAIN.
    NoName(Apex),
    /// The name is there, records of this type are not.
    NoData(Apex),
    Records(Records),
    /// The name is an alias of this one.
    Alias(String),
}

/// Where the zone of a name begins: so many labels from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apex(pub usize);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// All of them are the name's own.
    pub answers: Vec<Data>,
    /// Addresses of the names that the answers lead to.
    pub extra: Vec<(String, IpAddr)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    Address(IpAddr),
    Service { port: u16, weight: u16, target: String },
    Pointer(String),
    Version,
    NameServer(String),
    Authority,
}

impl Zone {
    pub fn domain(&self) -> &str {
        &self.domain
    }
    pub fn serial(&self) -> u32 {
        self.serial
    }
    /// What its SOA and NS records name.
    pub fn server_name(&self) -> String {
        format!("ns.dns.{}", self.domain)
    }
}

impl Service {
    fn endpoints(&self) -> impl Iterator<Item = (&Group, &Endpoint)> {
        self.groups.iter().flat_map(|group| group.endpoints.iter().map(move |endpoint| (group, endpoint)))
    }
}

impl Endpoint {
    /// Its label: the hostname, or the address with dashes. A label ends in no dash.
    fn label(&self) -> String {
        match (&self.hostname, self.ip) {
            (Some(name), _) => name.to_string(),
            (None, IpAddr::V4(ip)) => ip.to_string().replace('.', "-"),
            (None, IpAddr::V6(ip)) => {
                let text = ip.to_string().replace([':', '.'], "-");
                if text.ends_with('-') { text + "0" } else { text }
            }
        }
    }
}
