//! One container's OCI runtime spec: what containerd's CRI plug-in and runc would make of it.
//!
//! In: everything that decides, resolved ([`SpecInput`]). Out: the config.json. Pure: the same
//! input gives the same spec, and nothing is looked up. `tests/golden/` holds its answers, and
//! `tests/stock.rs` holds them against containerd and runc.
//!
//! Invariant: no cgroup limits and no device rules are in the spec. Those are written by
//! `runtime::cgroup` before anything runs; libcontainer would otherwise write defaults of its own.
//!
//! Source: OCI runtime-spec 1.2, containerd's internal/cri (behaviour, not text).

mod capabilities;
mod host;
mod mounts;
mod process;

use std::collections::BTreeSet;
use std::path::PathBuf;

use oci_spec::runtime::{
    Linux, LinuxDevice, LinuxDeviceType, LinuxNamespace, LinuxNamespaceType, LinuxSeccomp, Process, Root, Spec,
};

use super::model::{Pins, ResolvedUser};

pub use capabilities::CapabilityChoice;
pub use host::{HostDevice, HostFacts};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    #[error("{field} \"{value}\" cannot be used: {cure}")]
    Bad { field: &'static str, value: String, cure: &'static str },
}

/// Everything that decides a container's spec, resolved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecInput {
    pub args: Vec<String>,
    /// The image's `KEY=value` list.
    pub image_env: Vec<String>,
    /// The pod's environment, resolved, in order; later wins over earlier and over the image's.
    pub env: Vec<(String, String)>,
    /// Empty: `/`.
    pub cwd: String,
    pub hostname: String,
    pub user: ResolvedUser,
    pub tty: bool,
    pub capabilities: CapabilityChoice,
    pub privileged: bool,
    /// securityContext.allowPrivilegeEscalation is false.
    pub no_new_privileges: bool,
    pub read_only_root: bool,
    /// None: unconfined. Not used when privileged.
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
    /// Later mounts of the host show up inside.
    Slave,
    /// And those made inside show up on the host.
    Shared,
}

/// kubelet's default masks of /proc and /sys; for each CPU its thermal_throttle comes on top.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

pub fn container_spec(input: &SpecInput) -> Result<Spec, SpecError> {
    let mut root = Root::default();
    // The runtime puts the mounted overlay's path here.
    root.set_path("rootfs".into()).set_readonly(Some(input.read_only_root));

    let mut spec = Spec::default();
    spec.set_version("1.2.0".to_owned())
        .set_root(Some(root))
        .set_mounts(Some(mounts::mounts(input)?))
        .set_process(Some(process::process(input)?))
        // The pod's UTS namespace has it.
        .set_hostname(None)
        .set_domainname(None)
        .set_hooks(None)
        .set_annotations(None)
        .set_linux(Some(linux(input)));
    Ok(spec)
}

/// Names (without `CAP_`) of what the container will hold.
pub fn granted_capabilities(choice: &CapabilityChoice, privileged: bool, host: &HostFacts) -> BTreeSet<String> {
    capabilities::granted(choice, privileged, &host.capabilities)
}

/// A process beside a container's first one: its own argv and terminal, all else as the container's.
pub fn exec_process(container: &Spec, argv: &[String], tty: bool) -> Result<Process, SpecError> {
    process::exec(container, argv, tty)
}

fn linux(input: &SpecInput) -> Linux {
    let masked = (!input.privileged).then(|| {
        let cpus = (0..input.host.cpus).map(|n| format!("/sys/devices/system/cpu/cpu{n}/thermal_throttle"));
        MASKED.iter().map(|p| (*p).to_owned()).chain(cpus).collect()
    });
    let read_only = (!input.privileged).then(|| READ_ONLY.iter().map(|p| (*p).to_owned()).collect());
    let shared = input.mounts.iter().any(|m| m.propagation == SpecPropagation::Shared);

    let mut linux = Linux::default();
    linux
        .set_resources(None)
        .set_cgroups_path(Some(input.cgroup.clone().into()))
        .set_namespaces(Some(namespaces(input)))
        .set_devices(input.privileged.then(|| input.host.devices.iter().map(device).collect()))
        .set_seccomp(if input.privileged { None } else { input.seccomp.clone() })
        // Only then do mounts made inside leave the container; libcontainer's default is slave.
        .set_rootfs_propagation(shared.then(|| "shared".to_owned()))
        .set_masked_paths(masked)
        .set_readonly_paths(read_only);
    linux
}

fn namespaces(input: &SpecInput) -> Vec<LinuxNamespace> {
    let of = |kind, path: Option<PathBuf>| {
        let mut namespace = LinuxNamespace::default();
        namespace.set_typ(kind).set_path(path);
        namespace
    };
    let mut namespaces = vec![of(LinuxNamespaceType::Mount, None)];
    if !input.host_pid {
        namespaces.push(of(LinuxNamespaceType::Pid, None));
    }
    // A privileged container sees the node's whole cgroup tree, as with containerd.
    if !input.privileged {
        namespaces.push(of(LinuxNamespaceType::Cgroup, None));
    }
    let pins = &input.pins;
    for (kind, path) in
        [(LinuxNamespaceType::Network, &pins.net), (LinuxNamespaceType::Ipc, &pins.ipc), (LinuxNamespaceType::Uts, &pins.uts)]
    {
        if path.is_some() {
            namespaces.push(of(kind, path.clone()));
        }
    }
    namespaces
}

fn device(host: &HostDevice) -> LinuxDevice {
    let mut device = LinuxDevice::default();
    device
        .set_path(host.path.clone())
        .set_typ(if host.block { LinuxDeviceType::B } else { LinuxDeviceType::C })
        .set_major(host.major.into())
        .set_minor(host.minor.into())
        .set_file_mode(Some(host.mode))
        .set_uid(Some(host.uid))
        .set_gid(Some(host.gid));
    device
}
