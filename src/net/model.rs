//! Plain types of the network's front door.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::api::cidr::Cidr;
pub use crate::api::l4::L4;
use crate::store::error::StoreError;
use crate::sys::netlink::NetlinkError;

/// What the network of one agent is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// Names everything on the host: bridge `<instance>0`.
    pub instance: String,
    /// Pod ranges, one a family at most. None at all: pods with a network of their own are refused.
    pub cidrs: Vec<Cidr>,
    /// Our run directory: `<run>/net` holds one lease a pod.
    pub run: PathBuf,
    /// None: the smallest MTU among the links that default routes use.
    pub mtu: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is no pod range: write it like 10.88.0.0/24 or fd88::/64, with room for a gateway and a pod")]
pub struct BadRange {
    pub text: String,
}

/// A range that pods can have addresses of.
pub fn pod_range(text: &str) -> Result<Cidr, BadRange> {
    let bad = || BadRange { text: text.chars().take(80).collect() };
    let cidr: Cidr = text.parse().map_err(|_| bad())?;
    // Two bits at least: network, gateway, one pod, broadcast.
    let longest = if cidr.is_v4() { 30 } else { 126 };
    if cidr.prefix == 0 || cidr.prefix > longest || cidr.address.is_loopback() || cidr.address.is_multicast() {
        return Err(bad());
    }
    Ok(cidr)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachRequest {
    /// The pod's uid: key of the allocation, and IFLA_IFALIAS of the host's veth end.
    pub uid: String,
    /// `namespace/name`, for messages.
    pub pod: String,
    /// Pinned network namespace.
    pub netns: PathBuf,
    pub host_ports: Vec<HostPort>,
}

/// One mapping from the node to a pod. `host_ip` None (or 0.0.0.0, ::): all local addresses of
/// that family, or of both.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostPort {
    pub protocol: L4,
    pub host_ip: Option<IpAddr>,
    pub host_port: u16,
    pub container_port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host_ip {
            Some(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}/{}", self.host_port, self.protocol),
            Some(ip) => write!(f, "{ip}:{}/{}", self.host_port, self.protocol),
            None => write!(f, "{}/{}", self.host_port, self.protocol),
        }
    }
}

/// What a pod got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// IPv4 first when both are there.
    pub addresses: Vec<IpAddr>,
    pub mtu: u32,
}

/// Something that this kernel or host withholds, what follows from it, and the line that mends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    pub feature: Feature,
    pub consequence: &'static str,
    pub cure: &'static str,
    /// What the kernel said.
    pub said: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    Bridge,
    Veth,
    Ipv6,
    Conntrack,
}

/// What a pod holds on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPorts {
    pub uid: String,
    /// `namespace/name`.
    pub pod: String,
    pub addresses: Vec<IpAddr>,
    pub host_ports: Vec<HostPort>,
}

/// Why ports cannot be led to pods.
pub type PortsError = Box<dyn std::error::Error + Send + Sync>;

/// Whoever writes packet filter tables: leads host ports to pods, and pods to the outside.
pub trait Ports: fmt::Debug + Send + Sync {
    /// Every pod that may hold anything, before all other calls. Nothing is written.
    fn know(&self, pods: Vec<PodPorts>) -> Result<(), PortsError>;
    /// The pod's ports lead to it when this returns, and no others.
    fn open(&self, pod: &PodPorts) -> Result<(), PortsError>;
    /// Nothing leads to it any more.
    fn close(&self, uid: &str) -> Result<(), PortsError>;
    /// Compares with the kernel and mends.
    fn ensure(&self) -> Result<(), PortsError>;
    /// Removes all that it made in the kernel.
    fn remove_all(&self) -> Result<(), PortsError>;
}

#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("instance name \"{0}\" cannot name a bridge and a table: use 1 to 13 of a-z, 0-9, - and _, a letter first")]
    BadInstance(String),
    #[error("two pod ranges of one family, {0} and {1}: give one of IPv4 and one of IPv6")]
    TwoOfAFamily(Cidr, Cidr),
    #[error("pod {pod} needs an address, and this node has no pod range: give --pod-cidr")]
    NoRange { pod: String },
    #[error("pod range {cidr} has no free address left ({held} pods hold one): use a wider --pod-cidr, or remove pods")]
    Exhausted { cidr: Cidr, held: usize },
    #[error("hostPort {port} of pod {pod} belongs to pod {holder} already: use another port, or another hostIP")]
    HostPortTaken { pod: String, port: HostPort, holder: String },
    #[error(
        "hostPort {port} of pod {pod}: its hostIP is of a family in which pods have no address: use an address of the other family, or give --pod-cidr for both"
    )]
    HostPortFamily { pod: String, port: HostPort },
    #[error(
        "hostPort {port} of pod {pod}: a pod cannot be reached by the node's loopback address (that takes route_localnet, CVE-2020-8558): use an address of the node, or hostNetwork"
    )]
    HostPortLoopback { pod: String, port: HostPort },
    #[error("hostPort {port} of pod {pod}: port 0 is none: use 1 to 65535 for hostPort and containerPort")]
    HostPortZero { pod: String, port: HostPort },
    #[error("this kernel has no {what}: {}", .lack.cure)]
    Lacking { what: &'static str, lack: Lack },
    #[error("interface {name} is there and is not ours ({what}): remove it, or use another --instance")]
    ForeignLink { name: String, what: String },
    #[error("{operation} {object}")]
    Kernel { operation: &'static str, object: String, source: NetlinkError },
    #[error("{operation} {object}")]
    Io { operation: &'static str, object: String, source: std::io::Error },
    #[error("{operation}")]
    Store { operation: &'static str, source: StoreError },
    #[error("{operation} {object}")]
    Ports { operation: &'static str, object: String, source: PortsError },
}

impl NetError {
    pub(super) fn ports(operation: &'static str, object: &str) -> impl FnOnce(PortsError) -> NetError {
        let object = object.to_owned();
        move |source| NetError::Ports { operation, object, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_ranges_need_room_and_ordinary_addresses() {
        let range = |text: &str| pod_range(text).map(|c| c.to_string());
        assert_eq!(range("10.88.3.7/16").unwrap(), "10.88.0.0/16");
        assert_eq!(range("fd88::5/64").unwrap(), "fd88::/64");
        for bad in ["10.88.0.0", "10.88.0.0/31", "fd88::/127", "10.0.0.0/0", "127.0.0.0/8", "x/8", "224.0.0.0/8"] {
            assert!(range(bad).is_err(), "{bad}");
        }
    }
}
