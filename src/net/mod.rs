//! ROOM 3: the bridge network of pods.
//!
//! ```text
//!  outside ── uplink ── routing ── <instance>0 (gateway addresses) ── veth… ── eth0 of a pod (/32, /128)
//! ```
//!
//! All traffic of a pod is routed by the host (its default route leads through the bridge's
//! address), so that address translation sees both directions without br_netfilter. Translation
//! itself (masquerade, host ports) is the proxy's: [`model::Ports`] is what we ask of it.
//!
//! Invariant: an address is given to one pod at a time, whatever was killed when; what lives in
//! the kernel decides, leases in `<run>/net` come second, memory never.
//!
//! A lease is written before anything is made for a pod and goes after all of it is gone. Locks:
//! `pass` orders passes over the host, `memory` the allocator's file; `state` is held for moments,
//! never over a call to the kernel, and is the only one taken while another is held.

mod apply;
mod flows;
mod host;
pub mod host_ports;
pub mod ipam;
pub mod lacks;
mod leases;
pub mod model;
pub mod observe;
pub mod plan;
mod pod;
mod recover;
pub mod texts;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::store::effects::Effects;
use crate::sys::chain::chain;
use crate::sys::{clock, rtnl};
use apply::reached;
use host_ports::Holding;
use ipam::Ipam;
pub use lacks::probe;
use leases::{Lease, Leases};
use model::{AttachRequest, Attachment, Cidr, Feature, Lack, NetConfig, NetError, Ports};
use plan::Names;
use pod::PodLink;
pub use watch::Watch;

/// The front door; cheap to clone, every call may come from any thread.
#[derive(Clone, Debug)]
pub struct Net {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    names: Names,
    /// Those that this kernel can serve, IPv4 first.
    cidrs: Vec<Cidr>,
    mtu: Option<u32>,
    leases: Leases,
    boot_id: String,
    effects: Arc<Effects>,
    ports: Arc<dyn Ports>,
    pass: Mutex<()>,
    memory: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ipam: Ipam,
    /// By uid.
    pods: BTreeMap<String, Pod>,
    lacks: BTreeMap<Feature, Lack>,
    /// The host was seen as it should be, bridge and all.
    ensured: bool,
}

#[derive(Clone, Debug)]
struct Pod {
    lease: Lease,
    /// True from the moment at which its host ports are to go.
    leaving: bool,
}

impl Net {
    /// Checks the configuration and reads the leases, of which `ports` is told; changes nothing.
    pub fn open(config: NetConfig, effects: Arc<Effects>, ports: Arc<dyn Ports>) -> Result<Net, NetError> {
        let names = Names::new(&config.instance)?;
        let mut cidrs = config.cidrs.clone();
        cidrs.sort();
        for pair in cidrs.windows(2) {
            if let [a, b] = pair
                && a.is_v4() == b.is_v4()
            {
                return Err(NetError::TwoOfAFamily(*a, *b));
            }
        }
        let mut lacks = BTreeMap::new();
        let look = |source| NetError::Io { operation: "look for", object: "IPv6".into(), source };
        if cidrs.iter().any(|c| !c.is_v4())
            && let Some(said) = observe::no_ipv6().map_err(look)?
        {
            cidrs.retain(Cidr::is_v4);
            note_lack(&mut lacks, lacks::lack(Feature::Ipv6, said));
        }
        let leases = Leases::at(&config.run);
        let read = |source| NetError::Io { operation: "read leases in", object: leases.dir().display().to_string(), source };
        let boot_id = clock::boot_id().map_err(read)?;
        let mut ipam = Ipam::new(&cidrs);
        let mut pods = BTreeMap::new();
        for lease in leases.all().map_err(read)? {
            // One that fits no range any more still names what has to be removed.
            if !ipam.adopt(&lease.uid, &lease.addresses) {
                tracing::warn!(pod = lease.pod, addresses = ?lease.addresses, "a lease is outside of the pod ranges");
            }
            pods.insert(lease.uid.clone(), Pod { lease, leaving: false });
        }
        if let Some(memory) = leases.memory(&boot_id).map_err(read)? {
            ipam.recall(&memory);
        }
        ports
            .know(pods.values().map(|pod: &Pod| pod.lease.ports()).collect())
            .map_err(NetError::ports("tell of the leases", ""))?;
        let state = State { ipam, pods, lacks, ensured: false };
        let (pass, memory, state) = (Mutex::new(()), Mutex::new(()), Mutex::new(state));
        Ok(Net { inner: Arc::new(Inner { names, cidrs, mtu: config.mtu, leases, boot_id, effects, ports, pass, memory, state }) })
    }

    /// Makes bridge and sysctls what they have to be, and has the ports looked at. Idempotent.
    pub fn ensure(&self) -> Result<(), NetError> {
        self.inner.ensure_host()?;
        self.inner.ensure_ports()
    }

    /// Starts the thread that re-checks every 20 s and when br_netfilter is loaded. It ends when the
    /// value is dropped.
    pub fn watch(&self) -> Result<Watch, NetError> {
        Watch::start(self.clone())
    }

    /// Gives the pod's namespace its eth0, addresses, routes and host ports. Again for the same
    /// uid: the same answer.
    pub fn attach(&self, request: &AttachRequest) -> Result<Attachment, NetError> {
        let lease = self.inner.reserve(request)?;
        match self.inner.attach(&lease) {
            Ok(mtu) => Ok(Attachment { addresses: lease.addresses, mtu }),
            Err(error) => {
                // What cannot be taken back now stays reserved: detach or the next start does it.
                if let Err(undo) = self.detach(&request.uid) {
                    tracing::warn!(pod = request.pod, uid = request.uid, error = %chain(&undo), "a failed attach was not undone");
                }
                Err(error)
            }
        }
    }

    /// What a pod has, where its network is whole.
    pub fn attachment(&self, uid: &str, netns: &std::path::Path) -> Result<Option<Attachment>, NetError> {
        let Some(lease) = self.inner.state().pods.get(uid).map(|p| p.lease.clone()) else { return Ok(None) };
        let lease = Lease { netns: netns.to_owned(), ..lease };
        let link = PodLink { names: &self.inner.names, lease: &lease, cidrs: &self.inner.cidrs };
        let mtu = link.is_whole(&mut self.inner.route_socket()?)?;
        Ok(mtu.map(|mtu| Attachment { addresses: lease.addresses.clone(), mtu }))
    }

    /// Takes all of it away. Again, or for a pod that never had any: nothing happens.
    pub fn detach(&self, uid: &str) -> Result<(), NetError> {
        self.inner.detach(uid)
    }

    /// Once at start, before any attach: adopts what lives (uid and pinned netns), frees the rest
    /// and makes nothing. Living pods that are not in the answer lost their link or never had it
    /// whole: attach them.
    pub fn recover(&self, living: &[(String, PathBuf)]) -> Result<Vec<(String, Attachment)>, NetError> {
        self.inner.recover(living)
    }

    /// Removes what we made on the host and nothing else.
    pub fn remove_all(&self) -> Result<(), NetError> {
        self.inner.remove_all()
    }

    /// Pods that have an address and no link on this host any more: attach them again.
    pub fn severed(&self) -> Result<Vec<String>, NetError> {
        let links = self.inner.want()?.pods;
        if links.is_empty() {
            return Ok(Vec::new());
        }
        let look = |source| NetError::Kernel { operation: "look at", object: "links".into(), source };
        let seen = rtnl::links(&mut self.inner.route_socket()?).map_err(look)?;
        Ok(links.into_iter().filter(|(_, pod)| !seen.iter().any(|l| l.name == pod.link)).map(|(uid, _)| uid).collect())
    }

    /// The node's addresses on the bridge, IPv4 first: the pods' routers.
    pub fn gateways(&self) -> Vec<std::net::IpAddr> {
        self.inner.cidrs.iter().map(|cidr| ipam::gateway(*cidr)).collect()
    }

    /// What this kernel withholds from us, as far as we met it; [`lacks::probe`] tries everything.
    pub fn lacks(&self) -> Vec<Lack> {
        self.inner.state().lacks.values().cloned().collect()
    }
}

/// Keeps it, and says it once.
fn note_lack(lacks: &mut BTreeMap<Feature, Lack>, lack: Lack) {
    lacks.entry(lack.feature).or_insert_with(|| {
        tracing::warn!(feature = ?lack.feature, said = lack.said, cure = lack.cure, "{}", lack.consequence);
        lack
    });
}

impl Inner {
    /// A panic elsewhere leaves the state usable: each change of it is one whole step.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease_io(&self, operation: &'static str, uid: &str) -> impl Fn(std::io::Error) -> NetError {
        let object = format!("{uid} in {}", self.leases.dir().display());
        move |source| NetError::Io { operation, object: object.clone(), source }
    }

    /// Addresses and host ports for a pod, or why there are none.
    fn reserve(&self, request: &AttachRequest) -> Result<Lease, NetError> {
        if self.cidrs.is_empty() {
            return Err(NetError::NoRange { pod: request.pod.clone() });
        }
        let mut state = self.state();
        let held = state.pods.values().flat_map(|p| {
            let (uid, pod) = (p.lease.uid.as_str(), p.lease.pod.as_str());
            p.lease.host_ports.iter().map(move |port| Holding { uid, pod, port })
        });
        host_ports::check(&request.uid, &request.pod, &request.host_ports, held, &self.cidrs)?;
        let wanted = state.pods.get(&request.uid).map(|p| p.lease.addresses.clone()).unwrap_or_default();
        let now = clock::boot_nanos();
        let addresses = state
            .ipam
            .allocate(&request.uid, &wanted, now)
            .map_err(|full| NetError::Exhausted { cidr: full.cidr, held: full.held })?;
        let lease = Lease {
            uid: request.uid.clone(),
            pod: request.pod.clone(),
            netns: request.netns.clone(),
            addresses,
            host_ports: request.host_ports.clone(),
        };
        state.pods.insert(request.uid.clone(), Pod { lease: lease.clone(), leaving: false });
        Ok(lease)
    }

    fn attach(&self, lease: &Lease) -> Result<u32, NetError> {
        let started = std::time::Instant::now();
        self.leases.save(lease).map_err(self.lease_io("write the lease of", &lease.uid))?;
        self.save_memory()?;
        reached("net.attach.lease", &lease.pod)?;
        let link = PodLink { names: &self.names, lease, cidrs: &self.cidrs };
        let mut socket = self.route_socket()?;
        let mtu = match link.is_whole(&mut socket)? {
            Some(mtu) => mtu,
            None => {
                link.unmake(&mut socket, &self.effects)?;
                let bridge = self.bridge(&mut socket)?;
                link.make(&mut socket, &self.effects, &bridge)?
            }
        };
        // Whatever it had and has no more goes.
        self.ports.open(&lease.ports()).map_err(NetError::ports("open the host ports of", &lease.pod))?;
        reached("net.attach.hostports", &lease.pod)?;
        tracing::debug!(pod = lease.pod, addresses = ?lease.addresses, took = ?started.elapsed(), "attached to the network");
        Ok(mtu)
    }

    /// The bridge, made where it is missing.
    fn bridge(&self, socket: &mut crate::sys::netlink::Socket) -> Result<rtnl::Link, NetError> {
        let look = |source| NetError::Kernel { operation: "look at the bridge", object: self.names.bridge.clone(), source };
        // There is more to a bridge than being there; once we have seen it all, this is enough.
        if self.state().ensured
            && let Some(bridge) = rtnl::link(socket, &self.names.bridge).map_err(look)?
            && bridge.up
            && bridge.alias == self.names.bridge_alias
        {
            return Ok(bridge);
        }
        self.ensure_host()?;
        self.ensure_ports()?;
        rtnl::link(socket, &self.names.bridge).map_err(look)?.ok_or_else(|| NetError::Io {
            operation: "find the bridge",
            object: self.names.bridge.clone(),
            source: nix::errno::Errno::ENODEV.into(),
        })
    }

    fn detach(&self, uid: &str) -> Result<(), NetError> {
        let known = {
            let mut state = self.state();
            state.pods.get_mut(uid).map(|pod| {
                pod.leaving = true;
                pod.lease.clone()
            })
        };
        let lease = match known {
            Some(lease) => lease,
            // Not ours as far as we remember; its link may be there all the same.
            None => self.leases.load(uid).map_err(self.lease_io("read the lease of", uid))?.unwrap_or_else(|| Lease {
                uid: uid.to_owned(),
                pod: uid.to_owned(),
                netns: PathBuf::new(),
                addresses: Vec::new(),
                host_ports: Vec::new(),
            }),
        };
        self.ports.close(&lease.uid).map_err(NetError::ports("close the host ports of", &lease.pod))?;
        reached("net.detach.hostports", &lease.pod)?;
        let link = PodLink { names: &self.names, lease: &lease, cidrs: &self.cidrs };
        link.unmake(&mut self.route_socket()?, &self.effects)?;
        self.forget_flows(&lease)?;
        reached("net.detach.flows", &lease.pod)?;
        self.forget(uid)
    }

    /// Frees what the pod held, last of all.
    fn forget(&self, uid: &str) -> Result<(), NetError> {
        {
            let mut state = self.state();
            state.ipam.release(uid, clock::boot_nanos());
            state.pods.remove(uid);
        }
        if self.leases.remove(uid).map_err(self.lease_io("remove the lease of", uid))? {
            self.save_memory()?;
        }
        Ok(())
    }

    /// Where no pod gets an address there is nothing to lead to.
    fn ensure_ports(&self) -> Result<(), NetError> {
        match self.cidrs.is_empty() {
            true => Ok(()),
            false => self.ports.ensure().map_err(NetError::ports("look after host ports", "")),
        }
    }

    /// In one order, so that what is written last is what was true last.
    fn save_memory(&self) -> Result<(), NetError> {
        let _order = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = self.state().ipam.memory();
        self.leases.save_memory(&self.boot_id, memory).map_err(self.lease_io("write", "the allocator's memory"))
    }

    fn route_socket(&self) -> Result<crate::sys::netlink::Socket, NetError> {
        rtnl::open().map_err(|source| NetError::Kernel { operation: "open", object: "a route socket".into(), source })
    }
}
