//! One pod's link: made, and taken away again.
//!
//! The peer is born in the pod's namespace (no move, which would wait for RCU twice); the host
//! knows the pod's link-layer address for good and its port takes frames of no other, so that a
//! pod can claim nobody else's address (T35) and a reused one is right at once. Invariant: a half
//! made link is never used: `attach` finds all as it should be, or deletes the pair and begins anew.

use std::io;
use std::time::Duration;

use nix::errno::Errno;

use super::apply::{journal, reached};
use super::ipam::gateway;
use super::leases::Lease;
use super::model::{Cidr, Feature, NetError};
use super::observe::{self, POD_LINK};
use super::plan::{self, Names, mac_of};
use crate::store::effects::{Effect, Effects};
use crate::sys::netlink::{NetlinkError, Socket};
use crate::sys::rtnl::{self, Change, Veth};
use crate::sys::{netns, sysctl};

/// What a pod's link is made for.
#[derive(Clone, Copy, Debug)]
pub struct PodLink<'a> {
    pub names: &'a Names,
    pub lease: &'a Lease,
    pub cidrs: &'a [Cidr],
}

impl PodLink<'_> {
    fn kernel(&self, operation: &'static str) -> impl Fn(NetlinkError) -> NetError {
        let object = format!("pod {}", self.lease.pod);
        move |source| match source.errno() {
            // What `ip link add` calls an unknown device type.
            Errno::EOPNOTSUPP if operation == MAKE => {
                let lack = super::lacks::lack(Feature::Veth, source.to_string());
                NetError::Lacking { what: "veth pairs", lack }
            }
            _ => NetError::Kernel { operation, object: object.clone(), source },
        }
    }

    /// Whether all of it is there; the MTU then.
    pub fn is_whole(&self, socket: &mut Socket) -> Result<Option<u32>, NetError> {
        let name = self.names.veth(&self.lease.uid);
        let Some(link) = rtnl::link(socket, &name).map_err(self.kernel("look at the link of"))? else { return Ok(None) };
        let Some(bridge) = rtnl::link(socket, &self.names.bridge).map_err(self.kernel("look at the bridge of"))? else {
            return Ok(None);
        };
        if !self.names.is_veth(&link) || link.master != Some(bridge.index) || !link.up {
            return Ok(None);
        }
        let mut wanted = self.lease.addresses.clone();
        wanted.sort();
        let found = observe::pod_addresses(&self.lease.netns, link.index)?;
        Ok((found == Some(wanted)).then_some(link.mtu))
    }

    /// Makes the link; returns its MTU, which is the bridge's.
    pub fn make(&self, socket: &mut Socket, effects: &Effects, bridge: &rtnl::Link) -> Result<u32, NetError> {
        let lease = self.lease;
        let name = self.names.veth(&lease.uid);
        let mac = mac_of(&lease.addresses);
        let effect = Effect::Link { name: name.clone() };
        journal(effects.intent(&effect))?;
        reached("net.attach.intent", &lease.pod)?;
        let into = |source| NetError::Io {
            operation: "enter network namespace",
            object: format!("{} of pod {}", lease.netns.display(), lease.pod),
            source,
        };
        let pod_ns = netns::open(&lease.netns).map_err(into)?;
        let ipv6 = lease.addresses.iter().any(|ip| ip.is_ipv6());
        let mut inside = netns::within(&pod_ns, || prepare_namespace(ipv6))
            .and_then(|prepared| prepared)
            .map_err(into)?
            .map_err(self.kernel("open a socket in the namespace of"))?;
        let fd = std::os::fd::AsFd::as_fd(&pod_ns);
        let veth =
            Veth { name: &name, master: bridge.index, mtu: bridge.mtu, peer_netns: fd, peer_name: POD_LINK, peer_mac: mac };
        rtnl::create_veth(socket, &veth).map_err(self.kernel(MAKE))?;
        reached("net.attach.veth", &lease.pod)?;

        let link = rtnl::link(socket, &name).map_err(self.kernel("look at the link of"))?.ok_or_else(|| NetError::Io {
            operation: "find the link just made of",
            object: format!("pod {}", lease.pod),
            source: Errno::ENODEV.into(),
        })?;
        let calls = observe::bridge_calls_iptables().map_err(|source| NetError::Io {
            operation: "read",
            object: "/proc/sys/net/bridge".into(),
            source,
        })?;
        let alias = Some(lease.uid.as_str());
        let port = Some(plan::port(calls));
        // A kernel without IPv6 refuses the word.
        let no_ipv6_address = std::path::Path::new("/proc/sys/net/ipv6").exists();
        let change = Change { alias, port, up: true, no_ipv6_address, ..Change::default() };
        rtnl::change(socket, &name, link.index, &change).map_err(self.kernel("bring up the host's link of"))?;
        reached("net.attach.port", &lease.pod)?;
        rtnl::pin_mac(socket, link.index, mac).map_err(self.kernel("pin the link-layer address of"))?;
        for ip in &lease.addresses {
            rtnl::set_neighbour(socket, bridge.index, *ip, mac).map_err(self.kernel("set the neighbour entry of"))?;
        }
        reached("net.attach.neighbour", &lease.pod)?;
        self.make_inside(&mut inside)?;
        reached("net.attach.inside", &lease.pod)?;
        self.wait_until_ready(socket, &mut inside)?;
        journal(effects.done(&effect))?;
        Ok(bridge.mtu)
    }

    /// Loopback, addresses, routes.
    fn make_inside(&self, inside: &mut Socket) -> Result<(), NetError> {
        let kernel = self.kernel("set up the interface of");
        for name in ["lo", POD_LINK] {
            let link = rtnl::link(inside, name).map_err(&kernel)?.ok_or_else(|| NetError::Io {
                operation: "find an interface of",
                object: format!("pod {}: {name}", self.lease.pod),
                source: Errno::ENODEV.into(),
            })?;
            if name == POD_LINK {
                for ip in &self.lease.addresses {
                    rtnl::add_address(inside, link.index, *ip, if ip.is_ipv4() { 32 } else { 128 }).map_err(&kernel)?;
                }
            }
            rtnl::change(inside, name, link.index, &Change { up: true, ..Change::default() }).map_err(&kernel)?;
            if name == POD_LINK {
                for cidr in self.cidrs {
                    rtnl::add_default_route(inside, link.index, gateway(*cidr)).map_err(&kernel)?;
                }
            }
        }
        Ok(())
    }

    /// Until packets pass both ways: what comes before is dropped without a word, and the first
    /// packet of a pod is a name lookup that waits 5 s for an answer.
    fn wait_until_ready(&self, host: &mut Socket, inside: &mut Socket) -> Result<(), NetError> {
        let name = self.names.veth(&self.lease.uid);
        let ready = |socket: &mut Socket, name: &str| Ok(rtnl::link(socket, name)?.is_some_and(|l| l.ready));
        self.wait("the carrier", || ready(host, &name))?;
        self.wait("the carrier", || ready(inside, POD_LINK))?;
        // The first port gives the bridge its carrier.
        self.wait("the bridge's carrier", || ready(host, &self.names.bridge))?;
        for ip in &self.lease.addresses {
            self.wait("the address", || rtnl::is_local(inside, *ip))?;
        }
        for cidr in self.cidrs {
            self.wait("the gateway's address", || rtnl::is_local(host, gateway(*cidr)))?;
        }
        Ok(())
    }

    /// Newer kernels finish what they have put off when they are asked; others take a moment.
    fn wait(&self, what: &str, mut is_there: impl FnMut() -> Result<bool, NetlinkError>) -> Result<(), NetError> {
        let (mut pause, mut waited) = (Duration::from_micros(200), Duration::ZERO);
        while !is_there().map_err(self.kernel("look at the link of"))? {
            if waited > LINK_WATCH {
                let object = format!("{what} of pod {}", self.lease.pod);
                return Err(NetError::Io { operation: "wait for", object, source: Errno::ETIMEDOUT.into() });
            }
            std::thread::sleep(pause);
            waited += pause;
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Takes link and neighbour entries away. Nothing happens where there are none.
    pub fn unmake(&self, socket: &mut Socket, effects: &Effects) -> Result<(), NetError> {
        let name = self.names.veth(&self.lease.uid);
        if let Some(link) = rtnl::link(socket, &name).map_err(self.kernel("look at the link of"))? {
            // Made by us and not named yet, or ours by alias; the name is a hash of ours.
            if link.kind != "veth" || !(link.alias.is_empty() || link.alias == self.lease.uid) {
                return Err(NetError::ForeignLink { name, what: format!("kind \"{}\", alias \"{}\"", link.kind, link.alias) });
            }
            rtnl::delete_link(socket, &name).map_err(self.kernel("delete the link of"))?;
        }
        reached("net.detach.link", &self.lease.pod)?;
        if let Some(bridge) = rtnl::link(socket, &self.names.bridge).map_err(self.kernel("look at the bridge of"))? {
            for ip in &self.lease.addresses {
                rtnl::delete_neighbour(socket, bridge.index, *ip).map_err(self.kernel("delete the neighbour entry of"))?;
            }
        }
        reached("net.detach.neighbour", &self.lease.pod)?;
        journal(effects.undone(&Effect::Link { name }))
    }
}

/// The kernel looks after carriers once a second at the latest.
const LINK_WATCH: Duration = Duration::from_secs(3);
const MAKE: &str = "make the link of";

/// Runs inside the pod's namespace: parameters, and a socket that stays there.
fn prepare_namespace(ipv6: bool) -> io::Result<Result<Socket, NetlinkError>> {
    let more = plan::POD_WITHOUT_IPV6.into_iter().filter(|_| !ipv6);
    for (name, value) in plan::POD_SYSCTLS.into_iter().chain(more) {
        match sysctl::write(name, value) {
            // This kernel has no IPv6, or not this parameter.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io::Error::new(e.kind(), format!("set {name}: {e}"))),
            Ok(()) => {}
        }
    }
    Ok(rtnl::open())
}
