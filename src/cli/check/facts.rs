//! What was seen of a host, before anything is made of it: plain data from one look by `probe`.

use crate::runtime::cgroup::{self, Layout};
use crate::{net, proxy};

/// Worked, or what the kernel said.
pub type Tried = Result<(), String>;

pub struct Facts {
    pub uid: u32,
    pub release: String,
    /// Which hierarchies are mounted and what they lack; the error is why none could be read.
    pub cgroups: Result<(Layout, Vec<cgroup::Lack>), String>,
    /// The file with the kernel's command line, on a board that has one.
    pub command_line: Option<&'static str>,
    pub mount_namespace: Tried,
    pub tmpfs: Tried,
    /// On a tmpfs, so that it is the kernel that is judged.
    pub overlay: Tried,
    /// What the network lacks; the error is why it could not be tried at all.
    pub network: Result<Vec<net::model::Lack>, String>,
    /// What the proxy's tables lack; likewise.
    pub packet_filter: Result<Vec<proxy::lacks::Lack>, String>,
    /// Other people's tables on this host.
    pub foreign: proxy::observe::Foreign,
    /// Parameters of connection tracking, and whether the one that matters can be written.
    pub tracking: proxy::tuning::Seen,
    pub tracking_writable: bool,
    /// bridge-nf-call-iptables; None: not loaded.
    pub bridge_netfilter: Option<String>,
    /// The actions that seccomp filters can take.
    pub seccomp: Result<String, String>,
    pub pidfd: Tried,
    pub openat2: Tried,
    pub mount_setattr: Tried,
    pub memfd: Tried,
    pub apparmor: bool,
    /// Effective capabilities; None: /proc does not tell.
    pub capabilities: Option<u64>,
    pub swap_devices: usize,
    /// Wall-clock nanoseconds.
    pub now: i64,
    pub inotify_instances: Option<u64>,
    pub inotify_watches: Option<u64>,
    pub state: Place,
    pub logs: Place,
    /// Whether mounts made below the kubelet's directory are seen by others.
    pub kubelet_shared: bool,
}

/// The file system that a directory lies on, or will.
#[derive(Clone)]
pub struct Place {
    /// The directory, or what exists of the path to it.
    pub at: String,
    /// statfs(2)'s f_type.
    pub kind: i64,
    pub free: Result<u64, String>,
    /// None: the file system counts none.
    pub free_inodes: Option<u64>,
    pub writable: Tried,
    /// Whether it can hold a container's writable layer. Tried for the state directory only, and
    /// only where it can be written to.
    pub layers: Option<Tried>,
}
