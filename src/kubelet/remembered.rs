//! What one that ends the pods must know of the agent that made them: `coracle stop-all` and
//! `coracle uninstall` are not given its flags.
//!
//! Invariant: it is in the run directory before anything that bears one of these names is made,
//! and goes with it: after a reboot nothing of that name is there any more.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::store::StoreError;
use crate::store::atomic;

/// More than any of it can be.
const MAX: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum RememberError {
    #[error("write the agent's flags")]
    Write(#[source] StoreError),
    #[error("read the last agent's flags")]
    Read(#[source] StoreError),
    #[error("the agent's flags as JSON in {}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    instance: String,
    cgroup_parent: String,
    pod_cidrs: Vec<String>,
    mtu: Option<u32>,
}

fn place(config: &Config) -> PathBuf {
    config.roots.run.join("agent.json")
}

pub fn remember(config: &Config) -> Result<(), RememberError> {
    let path = place(config);
    let remembered = Remembered {
        instance: config.instance.clone(),
        cgroup_parent: config.cgroup_parent.clone(),
        pod_cidrs: config.pod_cidrs.clone(),
        mtu: config.mtu,
    };
    let bytes = serde_json::to_vec(&remembered).map_err(|source| RememberError::Json { path: path.clone(), source })?;
    atomic::write(&path, &bytes, 0o600).map_err(RememberError::Write)
}

/// The flags of the last agent of this root and boot; those given where none has run.
pub fn recall(mut config: Config) -> Result<Config, RememberError> {
    let path = place(&config);
    if let Some(bytes) = atomic::read_bounded(&path, MAX).map_err(RememberError::Read)? {
        let last: Remembered = serde_json::from_slice(&bytes).map_err(|source| RememberError::Json { path, source })?;
        config.instance = last.instance;
        config.cgroup_parent = last.cgroup_parent;
        config.pod_cidrs = last.pod_cidrs;
        config.mtu = last.mtu;
    }
    Ok(config)
}
