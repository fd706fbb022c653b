//! What the agent is told of its proxy: `--proxy`, and the flags that are called as kube-proxy's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::api::cidr::Cidr;

/// `--proxy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProxyMode {
    On,
    Off,
    /// On while no other kube-proxy is there.
    #[default]
    Auto,
}

/// `--nodeport-addresses`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodePorts {
    All,
    #[default]
    Primary,
    Cidrs(Vec<Cidr>),
}

/// `--conntrack-*`; None: the default, which is told by `proxy::tuning`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conntrack {
    pub max_per_core: Option<u64>,
    pub min: Option<u64>,
    /// Seconds.
    pub established: Option<u64>,
    pub close_wait: Option<u64>,
    pub liberal: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Proxying {
    pub mode: ProxyMode,
    /// None: not served.
    pub metrics: Option<SocketAddr>,
    pub healthz: Option<SocketAddr>,
    pub node_ports: NodePorts,
    pub ignore_external_ips: bool,
    pub ignore_load_balancer_ips: bool,
    pub conntrack: Conntrack,
}

/// kube-proxy's.
pub const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10249);
pub const HEALTHZ: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 10256);

impl Default for Proxying {
    fn default() -> Proxying {
        Proxying {
            mode: ProxyMode::Auto,
            metrics: Some(METRICS),
            healthz: Some(HEALTHZ),
            node_ports: NodePorts::Primary,
            ignore_external_ips: false,
            ignore_load_balancer_ips: false,
            conntrack: Conntrack::default(),
        }
    }
}
