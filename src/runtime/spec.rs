//! One container's OCI runtime spec: what containerd's CRI plug-in and runc would make of it. Pure.
use std::path::PathBuf;

use oci_spec::runtime::{LinuxSeccomp, Process, Spec};

use super::model::{Pins, ResolvedUser};

#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("{field} \"{value}\": {cure}")]
    Bad { field: &'static str, value: String, cure: String },
}

/// Everything that decides a container's spec, resolved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecInput {
    pub args: Vec<String>,
    /// The image's `KEY=value` list.
    pub image_env: Vec<String>,
    /// The pod's environment, resolved, in order; later wins over earlier and over the image's.
    pub env: Vec<(String, String)>,
    pub cwd: String,
    pub hostname: String,
    pub user: ResolvedUser,
    pub tty: bool,
    /// Capability names with or without `CAP_`, `ALL` too.
    pub add_capabilities: Vec<String>,
    pub drop_capabilities: Vec<String>,
    pub privileged: bool,
    /// securityContext.allowPrivilegeEscalation is false.
    pub no_new_privileges: bool,
    pub read_only_root: bool,
    pub seccomp: Option<LinuxSeccomp>,
    pub oom_score_adj: i32,
    pub host_pid: bool,
    pub pins: Pins,
    /// Leaf cgroup, from the hierarchy's root.
    pub cgroup: String,
    pub mounts: Vec<SpecMount>,
    pub host: HostFacts,
}

/// A bind mount of a volume or of one of the kubelet's own files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecMount {
    pub source: PathBuf,
    pub destination: PathBuf,
    pub read_only: bool,
    pub propagation: SpecPropagation,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecPropagation {
    #[default]
    Private,
    Slave,
    Shared,
}

/// What this host lets us hand on; read once at start by [`HostFacts::observe`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Names of the capabilities in our own bounding set.
    pub capabilities: Vec<String>,
    /// Lowest oom_score_adj that we may set; stricter values are clamped to it.
    pub oom_floor: i32,
    /// Device nodes below /dev, for privileged containers.
    pub devices: Vec<HostDevice>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    pub path: PathBuf,
    pub block: bool,
    pub major: u32,
    pub minor: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

pub fn container_spec(_input: &SpecInput) -> Result<Spec, SpecError> {
    todo!()
}

/// A process beside a container's first one: its own argv and terminal, all else as the container's.
pub fn exec_process(_container: &Spec, _argv: &[String], _tty: bool) -> Result<Process, SpecError> {
    todo!()
}
