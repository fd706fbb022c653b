//! What a kernel withholds from us: consequence and cure, and the probe for `coracle check`.
//!
//! Invariant: the probe leaves nothing behind: it tries everything for real, in a namespace that
//! is gone when it ends.

use std::io;

use super::model::{Feature, Lack, NetError};
use super::observe;
use crate::sys::netlink::NetlinkError;
use crate::sys::{conntrack, netns, rtnl};

/// The words for a feature that is not there.
pub fn lack(feature: Feature, said: String) -> Lack {
    let (consequence, cure) = match feature {
        Feature::Bridge => ("only pods with hostNetwork can run", "modprobe bridge, or build the kernel with CONFIG_BRIDGE"),
        Feature::Veth => ("only pods with hostNetwork can run", "modprobe veth, or build the kernel with CONFIG_VETH"),
        Feature::Ipv6 => (
            "pods get no IPv6 address",
            "sysctl -w net.ipv6.conf.all.disable_ipv6=0, or boot without ipv6.disable=1, or build the kernel with CONFIG_IPV6",
        ),
        Feature::Conntrack => (
            "clients of a removed UDP hostPort reach nobody until their flow times out",
            "modprobe nf_conntrack_netlink, or build the kernel with CONFIG_NF_CT_NETLINK",
        ),
    };
    Lack { feature, consequence, cure, said }
}

/// Tries everything that we need; for `coracle check` on a node that may not even run us.
pub fn probe() -> Result<Vec<Lack>, NetError> {
    let io = |source| NetError::Io { operation: "probe the kernel", object: "in a network namespace of its own".into(), source };
    let mut lacks = Vec::new();
    if let Some(said) = observe::no_ipv6().map_err(io)? {
        lacks.push(lack(Feature::Ipv6, said));
    }
    lacks.extend(netns::throw_away(probe_inside).map_err(io)?.map_err(io)?);
    lacks.sort_by_key(|l| l.feature);
    Ok(lacks)
}

fn probe_inside() -> io::Result<Vec<Lack>> {
    let mut lacks = Vec::new();
    let mut route = rtnl::open().map_err(|e| e.source)?;
    if let Err(e) = rtnl::create_bridge(&mut route, "probe0", [0x0a, 0x58, 0, 0, 0, 1]) {
        lacks.push(lack(Feature::Bridge, words(&e)));
    }
    let own = std::fs::File::open("/proc/thread-self/ns/net")?;
    let fd = std::os::fd::AsFd::as_fd(&own);
    let pair = rtnl::Veth {
        name: "probe1",
        master: 0,
        mtu: 1500,
        peer_netns: fd,
        peer_name: "probe2",
        peer_mac: [0x0a, 0x58, 0, 0, 0, 2],
    };
    if let Err(e) = rtnl::create_veth(&mut route, &pair) {
        lacks.push(lack(Feature::Veth, words(&e)));
    }
    let filter = conntrack::Filter { answering: Some([192, 0, 2, 1].into()), ..conntrack::Filter::default() };
    let flows = conntrack::open().and_then(|mut s| conntrack::forget(&mut s, &[filter]));
    if let Err(e) = flows {
        lacks.push(lack(Feature::Conntrack, words(&e)));
    }
    Ok(lacks)
}

fn words(error: &NetlinkError) -> String {
    format!("{error}: {}", error.source)
}
