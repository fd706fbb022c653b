//! Cgroups of pods, containers and monitors, on v1, hybrid and v2.
use std::path::PathBuf;
use std::sync::Arc;

use super::model::CgroupResources;

/// How this host mounts its cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    V1,
    Hybrid,
    V2,
}

/// Something that this host withholds; the rest works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    pub what: &'static str,
    pub effect: &'static str,
    pub cure: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("cgroup {operation} {path}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cgroup path \"{path}\" is refused: {cure}")]
    BadPath { path: String, cure: &'static str },
    #[error("cgroup {path} still holds {pids} processes")]
    Busy { path: String, pids: usize },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub memory: Option<u64>,
    pub cpu_nanos: Option<u64>,
    pub pids: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct Cgroups {
    _inner: Arc<()>,
}

impl Cgroups {
    /// `parent`: the delegated cgroup below which all of ours lie, `/` without systemd. Controllers
    /// are switched on from there down. Paths given to the other verbs are from the hierarchy's
    /// root and must lie below `parent`.
    pub fn detect(parent: &str) -> Result<Cgroups, CgroupError> {
        let _ = parent;
        todo!()
    }
    pub fn layout(&self) -> Layout {
        todo!()
    }
    pub fn lacks(&self) -> &[Lack] {
        todo!()
    }
    /// Makes the cgroup and every missing parent, and writes its limits. Idempotent.
    pub fn create(&self, _path: &str, _limits: &CgroupResources) -> Result<(), CgroupError> {
        todo!()
    }
    /// Writes limits of an existing cgroup. None fields go back to "no limit".
    pub fn update(&self, _path: &str, _limits: &CgroupResources) -> Result<(), CgroupError> {
        todo!()
    }
    /// Removes it with all below, children first; absent is fine. Waits a bounded time for the
    /// last processes to go.
    pub fn remove(&self, _path: &str) -> Result<(), CgroupError> {
        todo!()
    }
    /// SIGKILL to everything in it and below. Does not wait.
    pub fn kill(&self, _path: &str) -> Result<(), CgroupError> {
        todo!()
    }
    pub fn add_pid(&self, _path: &str, _pid: i32) -> Result<(), CgroupError> {
        todo!()
    }
    /// Pids in it and below.
    pub fn pids(&self, _path: &str) -> Result<Vec<i32>, CgroupError> {
        todo!()
    }
    /// How many times the kernel's OOM killer struck inside; 0 without a memory controller.
    pub fn oom_kills(&self, _path: &str) -> Result<u64, CgroupError> {
        todo!()
    }
    pub fn usage(&self, _path: &str) -> Result<Usage, CgroupError> {
        todo!()
    }
}
