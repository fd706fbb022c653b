//! Plain types of the proxy: what the node is, what is to be served, by whom.
//!
//! Invariant: everything here is checked; lists are sorted and hold nothing twice, so that equal
//! wishes are equal values and a difference of two wishes is a difference of what the kernel has.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

pub use crate::api::cidr::Cidr;
pub use crate::api::l4::L4;

/// The node, as far as it decides where packets go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: String,
    /// Label topology.kubernetes.io/zone.
    pub zone: Option<String>,
    /// The node's own addresses, its InternalIPs first.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<Cidr>,
    pub node_port_addresses: NodePortAddresses,
    pub ignored: Ignored,
    /// The interface behind which our pods are.
    pub bridge: String,
    /// Where the node's own DNS server answers: port 53 there is nobody's host port.
    pub resolvers: Vec<IpAddr>,
}

/// Which of the node's addresses take NodePort connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Every local one but loopback.
    All,
    /// The node's first address of each family.
    #[default]
    Primary,
    Cidrs(Vec<Cidr>),
}

/// Addresses of Services that are not served: whoever may write a Service could take another's
/// traffic with them (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// spec.externalIPs
    pub external_ips: bool,
    /// status.loadBalancer.ingress
    pub load_balancer_ips: bool,
}

/// `namespace/service:port`
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortName {
    pub namespace: String,
    pub service: String,
    /// Empty for a Service of one nameless port.
    pub port: String,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.service)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        Ok(())
    }
}

/// One port of a Service in ONE address family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePort {
    pub name: ServicePortName,
    pub protocol: L4,
    pub port: u16,
    /// None where the Service has no ClusterIP of this family; such a port is not made at all
    /// unless something else (external address, NodePort) reaches it.
    pub cluster_ip: Option<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// Those of ipMode VIP only.
    pub load_balancer_ips: Vec<IpAddr>,
    pub node_port: Option<u16>,
    /// internalTrafficPolicy: Local.
    pub internal_local: bool,
    /// externalTrafficPolicy: Local.
    pub external_local: bool,
    /// sessionAffinity: ClientIP, and for how long.
    pub affinity: Option<Duration>,
    /// Who may use the load balancer's addresses; empty: all.
    pub source_ranges: Vec<Cidr>,
    /// healthCheckNodePort, with who is counted there.
    pub health_check_node_port: Option<HealthCheck>,
    /// For traffic policy Cluster, after topology; terminating ones only where no other is.
    /// Empty also where no traffic of this port is of that policy.
    pub cluster: Vec<Endpoint>,
    /// For traffic policy Local: on this node.
    pub local: Vec<Endpoint>,
    /// Somewhere in the cluster is a usable endpoint: Local without local drops, else rejects.
    pub has_any: bool,
}

impl ServicePort {
    /// The port is of IPv4. Each is of one family; None: nothing of it says which, so that nobody
    /// can ask for it.
    pub fn is_v4(&self) -> Option<bool> {
        let addresses = self.cluster_ip.iter().chain(&self.load_balancer_ips).chain(&self.external_ips);
        let endpoints = self.cluster.iter().chain(&self.local).map(|e| &e.ip);
        addresses.chain(endpoints).next().map(IpAddr::is_ipv4)
    }
    /// Reachable by something else than its ClusterIP.
    pub fn is_external(&self) -> bool {
        self.node_port.is_some() || !self.external_ips.is_empty() || !self.load_balancer_ips.is_empty()
    }
    /// External traffic of policy Local still needs these: pods and the node itself use them.
    pub fn uses_cluster(&self) -> bool {
        !self.internal_local || self.is_external()
    }
    pub fn uses_local(&self) -> bool {
        self.internal_local || (self.external_local && self.is_external())
    }
}

/// Where load balancers ask whether this node has endpoints of a Service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HealthCheck {
    pub port: u16,
    /// Ready, on this node; those that end are served and not counted. Sorted and unique.
    pub ready: Vec<IpAddr>,
}

/// Where connections of a port end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    pub ip: IpAddr,
    pub port: u16,
    /// On this node.
    pub local: bool,
}

/// A hostPort of a local pod, in one family.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPortWant {
    /// `namespace/name`
    pub pod: String,
    pub protocol: L4,
    /// None: all of the node's addresses.
    pub host_ip: Option<IpAddr>,
    pub host_port: u16,
    pub ip: IpAddr,
    pub port: u16,
}

/// Something of an object that cannot be served, named; the rest of the object is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Skipped {
    /// `EndpointSlice default/web-x1`
    pub object: String,
    /// `endpoints[3].addresses[0]`
    pub field: String,
    /// What is wrong and what mends it.
    pub why: String,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.object)?;
        if !self.field.is_empty() {
            write!(f, ", {}", self.field)?;
        }
        write!(f, ": {}", self.why)
    }
}

/// A container's port that has a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedPort {
    pub name: String,
    pub number: u16,
    pub protocol: L4,
}

/// A pod of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalPod {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// At most one a family, IPv4 first; the node's own with `host_network`.
    pub addresses: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    /// In the order of the manifest: of several with one name the first counts.
    pub ports: Vec<NamedPort>,
    pub host_network: bool,
}

/// A pod of another node, which policies may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    pub namespace: String,
    pub name: String,
    pub addresses: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    pub ports: Vec<NamedPort>,
}
