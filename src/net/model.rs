//! Plain types of the network's front door.

use std::net::IpAddr;
use std::path::PathBuf;

/// `address/prefix` of a pod range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    pub address: IpAddr,
    pub prefix: u8,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum L4 {
    Tcp,
    Udp,
    Sctp,
}

/// One mapping from the node to a pod. `host_ip` None: all local addresses of that family.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    pub protocol: L4,
    pub host_ip: Option<IpAddr>,
    pub host_port: u16,
    pub container_port: u16,
}

/// What a pod got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// IPv4 first when both are there.
    pub addresses: Vec<IpAddr>,
    pub mtu: u32,
}
