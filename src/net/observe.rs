//! Reads what the host's network looks like. Changes nothing.
//!
//! Sources: rtnetlink(7), ip-sysctl.rst; bridge-nf-call-* is in net/bridge/br_netfilter_hooks.c.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use super::model::NetError;
use super::plan::{self, Names, Seen, Want};
use crate::sys::netlink::Socket;
use crate::sys::{netns, rtnl, sysctl};

/// A pod's interface, in its own namespace.
pub const POD_LINK: &str = "eth0";

pub fn seen(socket: &mut Socket, want: &Want) -> Result<Seen, NetError> {
    let kernel = |operation| move |source| NetError::Kernel { operation, object: String::new(), source };
    let names = &want.names;
    let links = rtnl::links(socket).map_err(kernel("look at links"))?;
    let (mut addresses, mut neighbours) = (Vec::new(), Vec::new());
    if let Some(bridge) = links.iter().find(|l| l.name == names.bridge) {
        addresses = rtnl::addresses(socket, bridge.index).map_err(kernel("look at the bridge's addresses"))?;
        neighbours = rtnl::neighbours(socket, bridge.index).map_err(kernel("look at the bridge's neighbours"))?;
    }
    let mut uplinks = Vec::new();
    for family in [rtnl::AF_INET, rtnl::AF_INET6] {
        uplinks.extend(rtnl::default_route_links(socket, family).map_err(kernel("look at routes"))?);
    }
    // A default route by our own bridge is somebody's mistake and no uplink.
    let uplink_mtu =
        links.iter().filter(|l| uplinks.contains(&l.index) && l.name != names.bridge).map(|l| l.mtu).filter(|m| *m > 0).min();
    let sysctls = sysctls(names, want).map_err(|source| NetError::Io {
        operation: "read kernel parameters",
        object: "/proc/sys/net".into(),
        source,
    })?;
    let bridge_calls_iptables = bridge_calls_iptables().map_err(|source| NetError::Io {
        operation: "read",
        object: "/proc/sys/net/bridge".into(),
        source,
    })?;
    Ok(Seen { links, addresses, neighbours, sysctls, bridge_calls_iptables, uplink_mtu })
}

fn sysctls(names: &Names, want: &Want) -> io::Result<BTreeMap<String, String>> {
    let ipv6 = want.cidrs.iter().any(|c| !c.is_v4());
    let mut interfaces = Vec::new();
    if ipv6 {
        for entry in fs::read_dir("/proc/sys/net/ipv6/conf")? {
            interfaces.extend(entry?.file_name().into_string().ok());
        }
    }
    let mut values = BTreeMap::new();
    for name in plan::sysctl_names(names, ipv6, &interfaces) {
        if let Some(value) = sysctl::read(&name)? {
            values.insert(name, value);
        }
    }
    Ok(values)
}

/// Whether frames between two ports pass iptables or ip6tables. One flag of a port stands for
/// both families, so one of them is enough.
pub fn bridge_calls_iptables() -> io::Result<bool> {
    for name in ["net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"] {
        if sysctl::read(name)?.is_some_and(|v| v != "0") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Why this kernel has no IPv6 for us; None: it has.
pub fn no_ipv6() -> io::Result<Option<String>> {
    Ok(match sysctl::read("net/ipv6/conf/all/disable_ipv6")?.as_deref() {
        None => Some("there is no /proc/sys/net/ipv6".to_owned()),
        Some("0") => None,
        Some(value) => Some(format!("net.ipv6.conf.all.disable_ipv6 is {value}")),
    })
}

/// The addresses of a pod's interface, if it is the other end of `host_link`. None: it is not
/// there, is down, or belongs to another link.
pub fn pod_addresses(netns_path: &Path, host_link: u32) -> Result<Option<Vec<IpAddr>>, NetError> {
    let io = |source| NetError::Io { operation: "look into network namespace", object: netns_path.display().to_string(), source };
    let kernel =
        |source| NetError::Kernel { operation: "look at a pod's interface in", object: netns_path.display().to_string(), source };
    let netns = match netns::open(netns_path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(io)?,
    };
    let mut socket = netns::within(&netns, rtnl::open).map_err(io)?.map_err(kernel)?;
    let Some(link) = rtnl::link(&mut socket, POD_LINK).map_err(kernel)? else { return Ok(None) };
    if link.peer != Some(host_link) || !link.up {
        return Ok(None);
    }
    let mut addresses: Vec<IpAddr> =
        rtnl::addresses(&mut socket, link.index).map_err(kernel)?.into_iter().map(|(ip, _)| ip).collect();
    addresses.sort();
    Ok(Some(addresses))
}
