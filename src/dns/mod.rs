//! The node's DNS server: names of Services and pods, and a cache for the rest.
//!
//! ```text
//!  pod ── UDP, TCP ──> gateway address:53 ─ answer ─ zone (cluster.local, in-addr.arpa, ip6.arpa)
//!                                             └ forward ─ cache ─ upstreams of /etc/resolv.conf
//! ```
//!
//! One thread serves all of it ([`serve`]); decisions are pure: [`answer`], [`forward`], [`zone`],
//! [`wire`]. The zone comes from whoever knows the objects, whole, and is swapped.
//!
//! Invariant: what the cluster's names are is answered here and never asked elsewhere; whoever
//! may not ask gets nothing; memory is bounded whatever is asked. Sources: RFC 1034, 1035, 2308,
//! 6891, 7766, 8767; Kubernetes DNS-Based Service Discovery 1.1.0.

pub mod answer;
pub mod cache;
mod clients;
mod files;
pub mod forward;
mod holder;
mod links;
pub mod model;
mod serve;
pub mod upstreams;
pub mod wire;
pub mod zone;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use model::{Config, Counters};
use serve::Server;
use zone::Zone;

/// A datagram's buffer and small change.
const STACK: usize = 128 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    #[error("start the DNS server: {operation}")]
    Start { operation: &'static str, source: io::Error },
}

/// The running server; it ends when the value is dropped.
pub struct Dns {
    shared: Arc<Shared>,
    /// The thread ends when this end closes.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and its owner both see. Each lock is held for the time of a copy.
#[derive(Default)]
struct Shared {
    zone: Mutex<Option<Arc<Zone>>>,
    bound: Mutex<Vec<IpAddr>>,
    counters: Arc<Counters>,
}

impl Dns {
    /// Listens where it can; where it cannot, it says so and tries again. Until the first
    /// [`Dns::set_zone`] names of the cluster are "server failure" and not "no such name".
    pub fn start(config: Config) -> Result<Dns, DnsError> {
        let failed = |operation| move |source| DnsError::Start { operation, source };
        let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        let shared = Arc::new(Shared::default());
        let server = Server::new(config, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("dns".to_owned()).stack_size(STACK);
        let thread = thread.spawn(move || server.run(&theirs)).map_err(failed("start its thread"))?;
        Ok(Dns { shared, stop: Some(ours), thread: Some(thread) })
    }

    /// What holds from the next question on.
    pub fn set_zone(&self, zone: Arc<Zone>) {
        *lock(&self.shared.zone) = Some(zone);
    }

    /// Addresses at which it can be asked now, in the order of the configuration.
    pub fn servers(&self) -> Vec<IpAddr> {
        lock(&self.shared.bound).clone()
    }

    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

impl Drop for Dns {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It ended by a panic, which was told already, or as it should.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn zone(&self) -> Option<Arc<Zone>> {
        lock(&self.zone).clone()
    }
    fn set_bound(&self, bound: Vec<IpAddr>) {
        *lock(&self.bound) = bound;
    }
}

/// A panic elsewhere leaves these whole: each change is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
