//! Plain types of the runtime's front door. Paths are absolute host paths; cgroup paths are
//! relative to the hierarchy's root and begin with `/`.

use std::path::PathBuf;

use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::ExitRecord;

/// What a sandbox is made from: one monitor process and the pod's namespaces.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxSpec {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    pub hostname: String,
    pub host_network: bool,
    pub host_ipc: bool,
    /// Set once in the pod's namespaces, never in container specs.
    pub sysctls: Vec<(String, String)>,
    /// The pod's cgroup, e.g. `/kubepods/burstable/pod<uid>`; made with these limits.
    pub cgroup: String,
    pub resources: CgroupResources,
    /// Leaf of the monitor, outside the pod's limits, e.g. `/coracle/<uid>`.
    pub monitor_cgroup: String,
    /// `/dev/shm` of the pod: a tmpfs shared by all its containers.
    pub shm_size: u64,
}

/// Limits of one cgroup in hierarchy-neutral units; None is "no limit of our own".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupResources {
    /// cgroup v1 cpu.shares (2 to 262144); v2 weight is 1 + (shares-2)*9999/262142.
    pub cpu_shares: Option<u64>,
    /// Microseconds of CPU per `cpu_period`; None: unlimited.
    pub cpu_quota: Option<i64>,
    /// Microseconds, 100000 when quota is set.
    pub cpu_period: Option<u64>,
    /// Bytes.
    pub memory_limit: Option<i64>,
    /// Kill the whole cgroup on OOM (v2 memory.oom.group).
    pub oom_group: bool,
    /// No swap at all: v2 memory.swap.max 0, v1 memsw limit = memory limit (kubelet's NoSwap).
    pub no_swap: bool,
    pub pids_limit: Option<i64>,
    /// Device allow list over default-deny; None: not filtered at this level.
    pub devices: Option<Vec<DeviceRule>>,
}

/// One allowed class of device nodes; `None` numbers match all. An empty list denies everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRule {
    pub kind: DeviceKind,
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub read: bool,
    pub write: bool,
    pub mknod: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Character and block devices.
    All,
    Char,
    Block,
}

/// The pod's namespaces and shared memory as a container's spec names them; None: the host's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    pub net: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    /// Bound to /dev/shm.
    pub shm: Option<PathBuf>,
}

/// Whom a container's process runs as, after the image's passwd and group were asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedUser {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, sorted, without duplicates; the primary one is among them.
    pub groups: Vec<u32>,
    /// Home directory of that uid in the image's passwd; `/` where it has none.
    pub home: String,
}

/// An overlay root file system that the runtime mounts for a container; with an empty `upper` the
/// first layer itself, written to directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rootfs {
    /// Layer directories, topmost first (as overlay's lowerdir wants them).
    pub lower: Vec<PathBuf>,
    /// `<state>/containers/<id>/{upper,work}`.
    pub upper: PathBuf,
    pub work: PathBuf,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ContainerSpec {
    pub uid: PodUid,
    pub id: ContainerId,
    pub name: String,
    pub attempt: u32,
    /// Written as the bundle's config.json; root.path is filled in by the runtime.
    pub oci: oci_spec::runtime::Spec,
    pub rootfs: Rootfs,
    /// Leaf cgroup, one a container: `<pod cgroup>/<id>`.
    pub cgroup: String,
    pub resources: CgroupResources,
    /// `/var/log/pods/<ns>_<pod>_<uid>/<container>/<attempt>.log`; None: output is dropped.
    pub log: Option<LogSpec>,
    pub stdin: bool,
    pub stdin_once: bool,
    pub tty: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSpec {
    pub path: PathBuf,
    /// Bytes after which the monitor rotates; kubelet's default is 10 MiB.
    pub max_size: u64,
    /// Files kept, the live one included; kubelet's default is 5.
    pub max_files: u32,
}

/// What a monitor says about its pod.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxState {
    pub uid: PodUid,
    /// Pid of the monitor.
    pub monitor: i32,
    /// When the sandbox was made, wall-clock nanoseconds: tells it from an earlier one of the pod.
    pub created_at: i64,
    /// Pinned namespaces and /dev/shm; `net` is None with hostNetwork.
    pub pins: Pins,
    pub containers: Vec<ContainerState>,
    /// False once the monitor has died: everything in the pod has been ended and is to be made anew.
    pub alive: bool,
    /// False while a living monitor does not answer (a slow disk may block it): `containers` then
    /// says what it last wrote down. Ask again; never end a pod for it.
    pub answers: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ContainerState {
    pub id: ContainerId,
    pub name: String,
    pub attempt: u32,
    pub phase: ContainerPhase,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ContainerPhase {
    /// Its init waits for start.
    Created {
        pid: i32,
    },
    /// `started_at`: wall-clock nanoseconds.
    Running {
        pid: i32,
        started_at: i64,
    },
    Exited(ExitRecord),
}

/// Something that a monitor tells without being asked.
#[derive(Clone, Debug, PartialEq)]
pub enum RuntimeEvent {
    /// The exit is already in `<run>/pods/<uid>/exit/<id>`.
    Exited { uid: PodUid, id: ContainerId, exit: ExitRecord },
    /// The monitor itself is gone (its pidfd says so).
    MonitorDied { uid: PodUid },
}

/// A process to run inside a running container.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecSpec {
    pub uid: PodUid,
    pub id: ContainerId,
    pub argv: Vec<String>,
    pub tty: bool,
    pub stdin: bool,
}
