//! What a kernel withholds from us: consequence and cure, and the probe for `coracle check`.
//!
//! Invariant: the probe leaves nothing behind: it tries everything for real, in a namespace that
//! is gone when it ends.

use std::io;

use nix::errno::Errno;

use super::model::{Cidr, Feature, Lack, NetError};
use super::observe;
use super::tables::{Elements, Layout};
use crate::sys::netlink::NetlinkError;
use crate::sys::{conntrack, netns, nftables, rtnl};

/// The words for a feature that is not there.
pub fn lack(feature: Feature, said: String) -> Lack {
    let (consequence, cure) = match feature {
        Feature::Bridge => ("only pods with hostNetwork can run", "modprobe bridge, or build the kernel with CONFIG_BRIDGE"),
        Feature::Veth => ("only pods with hostNetwork can run", "modprobe veth, or build the kernel with CONFIG_VETH"),
        Feature::Ipv6 => (
            "pods get no IPv6 address",
            "sysctl -w net.ipv6.conf.all.disable_ipv6=0, or boot without ipv6.disable=1, or build the kernel with CONFIG_IPV6",
        ),
        Feature::NfTables => (
            "pods reach the node and each other, not the outside; no hostPort",
            "modprobe nf_tables, or build the kernel with CONFIG_NF_TABLES and CONFIG_NETFILTER_NETLINK",
        ),
        Feature::NatIpv4 => (
            "pods reach the outside by IPv4 only where it routes back to them; no hostPort by IPv4",
            "modprobe -a nft_chain_nat nft_masq nft_nat nft_ct, or build the kernel with CONFIG_NF_TABLES_IPV4, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT",
        ),
        Feature::NatIpv6 => (
            "pods reach the outside by IPv6 only where it routes back to them; no hostPort by IPv6",
            "modprobe -a nft_chain_nat nft_masq nft_nat nft_ct, or build the kernel with CONFIG_NF_TABLES_IPV6, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT",
        ),
        Feature::FibIpv4 => ("no hostPort by IPv4", "modprobe nft_fib_ipv4, or build the kernel with CONFIG_NFT_FIB_IPV4"),
        Feature::FibIpv6 => ("no hostPort by IPv6", "modprobe nft_fib_ipv6, or build the kernel with CONFIG_NFT_FIB_IPV6"),
        Feature::Conntrack => (
            "clients of a removed UDP hostPort reach nobody until their flow times out",
            "modprobe nf_conntrack_netlink, or build the kernel with CONFIG_NF_CT_NETLINK",
        ),
        Feature::Forwarding => (
            "another firewall may drop what pods send and get",
            "accept the pods' bridge there: nft insert rule ip filter FORWARD iifname coracle0 accept, and the same with oifname; with ufw: ufw route allow in on coracle0, and out on it; with firewalld: firewall-cmd --permanent --zone=trusted --add-interface=coracle0",
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
    let ipv6 = lacks.is_empty();
    lacks.extend(netns::throw_away(|| probe_inside(ipv6)).map_err(io)?.map_err(io)?);
    lacks.sort_by_key(|l| l.feature);
    Ok(lacks)
}

fn probe_inside(ipv6: bool) -> io::Result<Vec<Lack>> {
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
    let cidrs = ["10.0.0.0/24", "fd00::/64"].iter().filter_map(|c| c.parse::<Cidr>().ok());
    for cidr in cidrs.filter(|c| c.is_v4() || ipv6) {
        let mut layout = Layout { table: "probe".into(), bridge: "probe0".into(), cidr, host_ports: true };
        // Without fib the rest may still be there.
        while let Err(refusal) = install(&layout, &Elements::new()) {
            let lacking = match refusal {
                Refusal::Lack(lacking) => lacking,
                Refusal::Failure(error) => lack(Feature::NfTables, words(&error)),
            };
            let fib = matches!(lacking.feature, Feature::FibIpv4 | Feature::FibIpv6);
            if !lacks.iter().any(|l| l.feature == lacking.feature) {
                lacks.push(lacking);
            }
            if !(fib && layout.host_ports) {
                break;
            }
            layout.host_ports = false;
        }
    }
    let filter = conntrack::Filter { answering: Some([192, 0, 2, 1].into()), ..conntrack::Filter::default() };
    let flows = conntrack::open().and_then(|mut s| conntrack::forget(&mut s, &[filter]));
    if let Err(e) = flows {
        lacks.push(lack(Feature::Conntrack, words(&e)));
    }
    Ok(lacks)
}

/// Why a table could not be installed.
#[derive(Debug)]
pub enum Refusal {
    /// The refused message needs what this kernel does not have.
    Lack(Lack),
    Failure(NetlinkError),
}

/// Installs a table, with all of its elements, in one transaction.
pub fn install(layout: &Layout, elements: &Elements) -> Result<(), Refusal> {
    let mut install = layout.install(elements);
    let refusal = |feature, error: NetlinkError| match error.errno() {
        Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
            Refusal::Lack(lack(feature, words(&error)))
        }
        _ => Refusal::Failure(error),
    };
    let mut socket = nftables::open().map_err(|e| refusal(Feature::NfTables, e))?;
    nftables::commit(&mut socket, "install our nftables table", &mut install.batch).map_err(|refused| {
        let feature = refused.message.and_then(|at| install.needs.get(at)).copied().unwrap_or(Feature::NfTables);
        refusal(feature, refused.error)
    })
}

fn words(error: &NetlinkError) -> String {
    format!("{error}: {}", error.source)
}
