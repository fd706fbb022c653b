//! Where things of a pod lie below `<run>/pods/<uid>`; known to agent and monitor alike.
//!
//! ```text
//! sandbox.json      what the sandbox was asked to be; written first
//! ready             the sandbox is whole; written last
//! mon.sock          the monitor's socket, 0600
//! monitor.err       what the monitor said on its stderr (a panic)
//! ns/{net,ipc,uts}  pinned namespaces
//! shm               the pod's /dev/shm, a tmpfs
//! exit/<id>         exits that nobody acknowledged yet
//! c/<id>/           bundle: config.json, rootfs (the overlay), meta.json, started, exec-*.json
//! lc/<id>/          libcontainer's scratch, never truth
//!
//! ../../seccomp/    compiled filters, all pods'; a cache
//! ```
//!
//! Invariant: `<run>` is unbindable, so that pods with a bind of `/` do not pin what is below it:
//! nothing here but mounts of their own (`shm`, `rootfs`) can be bound into a container.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::store::ids::{ContainerId, PodUid};

pub const SOCKET: &str = "mon.sock";
pub const SANDBOX: &str = "sandbox.json";
pub const STARTED: &str = "started";

/// A pod's run directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRun(PathBuf);

impl PodRun {
    pub fn at(path: PathBuf) -> PodRun {
        PodRun(path)
    }
    pub fn of(run: &Path, uid: &PodUid) -> PodRun {
        PodRun(run.join("pods").join(uid.as_str()))
    }
    pub fn path(&self) -> &Path {
        &self.0
    }
    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
    pub fn ready(&self) -> PathBuf {
        self.0.join("ready")
    }
    pub fn namespace(&self, kind: &str) -> PathBuf {
        self.0.join("ns").join(kind)
    }
    pub fn shm(&self) -> PathBuf {
        self.0.join("shm")
    }
    pub fn exits(&self) -> PathBuf {
        self.0.join("exit")
    }
    pub fn exit(&self, id: &ContainerId) -> PathBuf {
        self.exits().join(id.as_str())
    }
    pub fn containers(&self) -> PathBuf {
        self.0.join("c")
    }
    pub fn container(&self, id: &ContainerId) -> PathBuf {
        self.containers().join(id.as_str())
    }
    pub fn rootfs(&self, id: &ContainerId) -> PathBuf {
        self.container(id).join("rootfs")
    }
    /// All pods': `<run>/seccomp`.
    pub fn filters(&self) -> PathBuf {
        self.0.ancestors().nth(2).unwrap_or(&self.0).join("seccomp")
    }
    pub fn scratch(&self) -> PathBuf {
        self.0.join("lc")
    }
}

/// `sandbox.json`: what the monitor needs to know, and what recovery needs to undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    pub hostname: String,
    #[serde(default)]
    pub host_network: bool,
    #[serde(default)]
    pub host_ipc: bool,
    #[serde(default)]
    pub sysctls: Vec<(String, String)>,
    /// Absolute path of this run directory.
    pub dir: PathBuf,
    pub cgroup_parent: String,
    pub cgroup: String,
    pub monitor_cgroup: String,
    /// Wall-clock nanoseconds.
    #[serde(default)]
    pub created_at: i64,
}

/// `c/<id>/meta.json`: what recovery knows of a container whose monitor is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    pub name: String,
    pub attempt: u32,
    pub cgroup: String,
}

/// `c/<id>/started`: written by the monitor once the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    pub pid: i32,
    pub at: i64,
}
