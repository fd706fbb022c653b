//! ROOM 4: Services, host ports and network policies in one nftables table a family.
//!
//! ```text
//! Services, slices ─> service/, alone/ ─> ServicePorts ┐
//! pods' host ports ────────────────────────────────────┼─> layout/ ─> table/ ─> owner ─> apply ─> kernel
//! NetworkPolicies, pods ─> policy/ ────────────────────┘               └─ observe <── notifications
//! ```
//!
//! [`Proxy`] is the front door; behind it one thread, `owner`, owns the tables. Invariant: what is
//! pure decides (service, layout, policy, table), what touches the kernel decides nothing but what
//! to do when it refuses.

pub mod alone;
pub mod apply;
pub mod conntrack;
pub mod lacks;
pub mod layout;
pub mod mode;
pub mod model;
pub mod observe;
mod owner;
pub mod policy;
pub mod serve;
pub mod service;
pub mod table;
pub mod tuning;
pub mod way;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::store::StoreError;
use crate::store::effects::Effects;
use apply::ApplyError;
use lacks::Lack;
use mode::{Mode, Role};
use model::{Cidr, NodeFacts};
use observe::Foreign;
use owner::{Order, Owner, Shared, Wish};
pub use owner::{PodPorts, ServiceChange};
use policy::World;
use serve::{ServeConfig, Servers};
use table::ir::Table;
use tuning::Limits;

const STACK: usize = 256 * 1024;

/// What the proxy of one agent is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Names our table in each family.
    pub table: String,
    /// Families without a pod range get no table.
    pub node: NodeFacts,
    pub service_cidrs: Vec<Cidr>,
}

/// What it does beside that.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub mode: Mode,
    /// The node's addresses are this host's, also when those change; those named here come first.
    pub follow: Option<Vec<IpAddr>>,
    /// None: connection tracking is left as it is.
    pub conntrack: Option<Limits>,
}

#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("start the proxy's thread")]
    Start(#[source] std::io::Error),
    #[error("the proxy has ended")]
    Ended,
    #[error("write our nftables table")]
    Apply(#[source] ApplyError),
    #[error("journal our nftables table")]
    Store(#[source] StoreError),
    #[error("{operation} {object}")]
    Io { operation: &'static str, object: String, source: std::io::Error },
    #[error("{why}")]
    Refused { why: String },
    #[error("this kernel cannot do that ({}): {}", .lack.said, .lack.cure)]
    Lack { lack: Lack },
}

/// The front door; cheap to clone, every call may come from any thread and returns when the kernel
/// has acknowledged what it asked for. The thread behind it ends with the last clone.
#[derive(Clone, Debug)]
pub struct Proxy {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// None: the end has begun.
    orders: Option<Sender<Order>>,
    wake: Arc<EventFd>,
    /// Wakes the servers.
    told: Arc<EventFd>,
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// One that serves whatever it is told, and leaves the host as it is otherwise.
    pub fn open(config: ProxyConfig, effects: Arc<Effects>) -> Result<Proxy, ProxyError> {
        Proxy::open_with(config, Options { mode: Mode::On, ..Options::default() }, effects)
    }

    /// In the network namespace of the calling thread. Changes nothing until it is asked to.
    pub fn open_with(config: ProxyConfig, options: Options, effects: Arc<Effects>) -> Result<Proxy, ProxyError> {
        let start = |e: std::io::Error| ProxyError::Start(e);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_flags(flags).map_err(|e| start(e.into()))?);
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (orders, received): (Sender<Order>, Receiver<Order>) = channel();
        let told = Arc::new(EventFd::from_flags(flags).map_err(|e| start(e.into()))?);
        let owner = Owner::new(config, options, effects, Arc::clone(&shared), Arc::clone(&told));
        let woken = Arc::clone(&wake);
        let thread = std::thread::Builder::new().name("proxy".into()).stack_size(STACK);
        let thread = thread.spawn(move || owner.run(&received, &woken)).map_err(start)?;
        Ok(Proxy { inner: Arc::new(Inner { orders: Some(orders), wake, told, shared, thread: Some(thread) }) })
    }

    /// All pods of this node that hold addresses or host ports, by uid, as far as is known at the
    /// start. Nothing is written.
    pub fn know_pods(&self, pods: BTreeMap<String, PodPorts>) -> Result<(), ProxyError> {
        self.order(Wish::Pods(pods))
    }

    /// The pod's host ports lead to it when this returns, and no others; policies isolate it.
    pub fn set_pod(&self, uid: &str, pod: PodPorts) -> Result<(), ProxyError> {
        self.order(Wish::Pod(uid.to_owned(), Some(pod)))
    }

    /// Nothing leads to the pod any more.
    pub fn remove_pod(&self, uid: &str) -> Result<(), ProxyError> {
        self.order(Wish::Pod(uid.to_owned(), None))
    }

    /// Services by family. The first call has to name all there are: until then those of an earlier
    /// agent stay, after it all others go.
    pub fn change_services(&self, v4: ServiceChange, v6: ServiceChange) -> Result<(), ProxyError> {
        self.order(Wish::Services { v4, v6 })
    }

    /// As [`Proxy::change_services`], for who cannot wait: what fails is said, kept and tried again.
    pub fn tell_services(&self, v4: ServiceChange, v6: ServiceChange) -> Result<(), ProxyError> {
        self.send(Wish::Services { v4, v6 }).map(drop)
    }

    /// NetworkPolicies and all that they speak of; in the place of all that was told before. Until
    /// the first word the chains of an earlier agent stay. Of this node's pods those are isolated
    /// that hold addresses: whose names and labels came before [`Proxy::set_pod`] has its verdicts
    /// when that returns.
    pub fn set_policies(&self, world: World) -> Result<(), ProxyError> {
        self.order(Wish::Policies(world))
    }

    /// As [`Proxy::set_policies`], for who cannot wait: what fails is said, kept and tried again.
    pub fn tell_policies(&self, world: World) -> Result<(), ProxyError> {
        self.send(Wish::Policies(world)).map(drop)
    }

    /// The node is another than it was.
    pub fn set_node(&self, node: NodeFacts, service_cidrs: Vec<Cidr>) -> Result<(), ProxyError> {
        self.order(Wish::Node { node, service_cidrs })
    }

    /// Compares our tables with the kernel's and mends what differs.
    pub fn ensure(&self) -> Result<(), ProxyError> {
        self.order(Wish::Ensure)
    }

    /// As [`Proxy::ensure`], for who asks again and again: nothing is compared while notifications
    /// would have told of any change, but every ten minutes.
    pub fn tend(&self) -> Result<(), ProxyError> {
        self.order(Wish::Tend)
    }

    /// Removes our tables.
    pub fn remove_all(&self) -> Result<(), ProxyError> {
        self.order(Wish::Remove)
    }

    /// What is wanted of the kernel now, a table a family.
    pub fn tables(&self) -> Result<Vec<Table>, ProxyError> {
        let (give, tables) = channel();
        self.order(Wish::Tables(give))?;
        tables.recv().map_err(|_| ProxyError::Ended)
    }

    /// What this kernel or host withholds, as far as we met it; [`lacks::probe`] tries everything.
    pub fn lacks(&self) -> Vec<Lack> {
        self.shared(|shared| shared.lacks.values().cloned().collect())
    }

    /// Others' tables that matter to us, as they were at the last look.
    pub fn foreign(&self) -> Foreign {
        self.shared(|shared| shared.foreign.clone())
    }

    /// Elements that the kernel refuses, for people.
    pub fn refused(&self) -> Vec<String> {
        self.shared(|shared| shared.refused.clone())
    }

    /// Whether it serves Services, and why not.
    pub fn role(&self) -> Role {
        self.shared(|shared| shared.role.clone())
    }

    /// The HTTP servers of this proxy, in the network namespace of the calling thread.
    pub fn serve(&self, config: ServeConfig) -> Result<Servers, ProxyError> {
        Servers::start(config, Arc::clone(&self.inner.shared), Arc::clone(&self.inner.told))
    }

    fn shared<T>(&self, read: impl FnOnce(&Shared) -> T) -> T {
        read(&self.inner.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn order(&self, wish: Wish) -> Result<(), ProxyError> {
        self.send(wish)?.recv().map_err(|_| ProxyError::Ended)?
    }

    /// Gives where the answer comes.
    fn send(&self, wish: Wish) -> Result<Receiver<Result<(), ProxyError>>, ProxyError> {
        let (answer, answered) = channel();
        let orders = self.inner.orders.as_ref().ok_or(ProxyError::Ended)?;
        orders.send(Order { wish, since: Instant::now(), answer }).map_err(|_| ProxyError::Ended)?;
        self.inner.wake.write(1).map_err(|e| ProxyError::Start(e.into()))?;
        Ok(answered)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.orders = None;
        if let Err(e) = self.wake.write(1) {
            tracing::warn!(error = %e, "cannot end the proxy");
            return;
        }
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::warn!("the proxy had panicked");
        }
    }
}

/// How many random worlds a test walks through: all in `make test`, a tenth in `make check`, which
/// is to answer within a minute.
#[cfg(test)]
fn worlds(all: u32) -> u32 {
    if std::env::var_os("CORACLE_ALL_WORLDS").is_some() { all } else { all / 10 }
}
