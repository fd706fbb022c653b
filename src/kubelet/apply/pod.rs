//! Effects for a pod as a whole: admission, volumes, sandbox, network, and its end.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Failed, Job, journal, spec, stamp};
use crate::api::pod::{Pod, Protocol};
use crate::kubelet::model::{FailReason, Finished, Outcome};
use crate::kubelet::orphans;
use crate::kubelet::qos::{self, QosClass};
use crate::kubelet::rooms::Rooms;
use crate::net::model::{AttachRequest, HostPort, L4};
use crate::net::texts::{self, HostnameInput};
use crate::runtime::model::{ContainerPhase, SandboxSpec};
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::Record;
use crate::sys::clock;

const SHM_SIZE: u64 = 64 << 20;

/// First in the journal, then its manifest: what is admitted without one is admitted again from
/// the manifests directory, or removed.
pub(super) fn admit(rooms: &Rooms, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let at = clock::wall_nanos();
    let record =
        Record::Admitted { uid: uid.clone(), namespace: job.namespace.clone(), name: job.name.clone(), at, stamp: stamp(rooms) };
    journal(rooms, &record)?;
    if let Some(raw) = &job.raw {
        rooms.store.save_manifest(uid, raw).map_err(Failed::because(FailReason::Journal))?;
    }
    Ok(Outcome::Admitted { at })
}

pub(super) fn set_up_volumes(rooms: &Rooms, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    rooms.volumes.setup(uid, spec(job, uid)?, &*job.configs).map_err(Failed::because(FailReason::Mount))?;
    Ok(Outcome::Done)
}

pub(super) fn hostname(rooms: &Rooms, pod: &Pod) -> Result<texts::Hostname, texts::TextError> {
    if pod.spec.host_network {
        // It sees the host's UTS namespace.
        let name = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|_| rooms.config.node_name.clone());
        return Ok(texts::Hostname { hostname: name.clone(), domain: None, kernel: name });
    }
    texts::hostname(&HostnameInput {
        pod: &pod.metadata.name,
        namespace: &pod.metadata.namespace,
        hostname: pod.spec.hostname.as_deref(),
        subdomain: pod.spec.subdomain.as_deref(),
        as_fqdn: pod.spec.set_hostname_as_fqdn,
        cluster_domain: &rooms.config.cluster_domain,
    })
}

pub(super) fn run_sandbox(rooms: &Rooms, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let pod = spec(job, uid)?;
    let hostname = hostname(rooms, pod).map_err(Failed::because(FailReason::Sandbox))?;
    let spec = SandboxSpec {
        uid: uid.clone(),
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        hostname: hostname.kernel,
        host_network: pod.spec.host_network,
        host_ipc: pod.spec.host_ipc,
        sysctls: sysctls(pod),
        cgroup: qos::pod_cgroup(&rooms.config.cgroup_parent, QosClass::of(pod), uid.as_str()),
        resources: qos::pod_resources(pod, &rooms.capacity),
        monitor_cgroup: format!("{}/{uid}", orphans::monitors(&rooms.config.cgroup_parent)),
        shm_size: SHM_SIZE,
    };
    let state = rooms.runtime.run_sandbox(&spec).map_err(Failed::because(FailReason::Sandbox))?;
    weigh_classes(rooms);
    Ok(Outcome::Sandbox { created_at: state.created_at })
}

/// What containerd sets in every pod with a network of its own (low ports and ping for all),
/// under what the pod asks for.
fn sysctls(pod: &Pod) -> Vec<(String, String)> {
    let mut sysctls = Vec::new();
    if !pod.spec.host_network {
        sysctls.push(("net.ipv4.ip_unprivileged_port_start".to_owned(), "0".to_owned()));
        sysctls.push(("net.ipv4.ping_group_range".to_owned(), "0 2147483647".to_owned()));
    }
    let asked = pod.spec.security_context.iter().flat_map(|context| &context.sysctls);
    sysctls.extend(asked.map(|sysctl| (sysctl.name.clone(), sysctl.value.clone())));
    sysctls
}

pub(super) fn attach(rooms: &Rooms, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let pod = spec(job, uid)?;
    let pins = rooms.runtime.pins(uid).map_err(Failed::because(FailReason::Network))?;
    let netns = pins.net.ok_or_else(|| Failed {
        reason: FailReason::Network,
        message: "the pod's sandbox has no network namespace of its own".to_owned(),
    })?;
    let request = AttachRequest {
        uid: uid.as_str().to_owned(),
        pod: format!("{}/{}", job.namespace, job.name),
        netns,
        host_ports: host_ports(pod)?,
    };
    let attachment = rooms.net.attach(&request).map_err(Failed::because(FailReason::Network))?;
    Ok(Outcome::Attached { addresses: attachment.addresses })
}

fn host_ports(pod: &Pod) -> Result<Vec<HostPort>, Failed> {
    let ports = pod.spec.containers.iter().chain(&pod.spec.init_containers).flat_map(|c| &c.ports);
    let mapped = ports.filter_map(|port| {
        let host_port = port.host_port.filter(|p| *p != 0)?;
        let host_ip = match port.host_ip.as_deref().filter(|ip| !ip.is_empty()).map(str::parse) {
            None => None,
            Some(Ok(ip)) => Some(ip),
            Some(Err(_)) => {
                let message = format!("hostIP of port {host_port} is no address: write it like 192.0.2.1");
                return Some(Err(Failed { reason: FailReason::Network, message }));
            }
        };
        let protocol = match port.protocol {
            Protocol::TCP => L4::Tcp,
            Protocol::UDP => L4::Udp,
            Protocol::SCTP => L4::Sctp,
        };
        Some(Ok(HostPort { protocol, host_ip, host_port, container_port: port.container_port }))
    });
    mapped.collect()
}

pub(super) fn listen(rooms: &Rooms, uid: &PodUid) -> Result<Outcome, Failed> {
    let state = rooms.runtime.sandbox(uid).map_err(Failed::because(FailReason::Silent))?;
    if state.as_ref().is_some_and(|s| s.alive && !s.answers) {
        let message = "its monitor lives but does not answer; a slow disk may block it".to_owned();
        return Err(Failed { reason: FailReason::Silent, message });
    }
    Ok(Outcome::Heard { state: state.map(Box::new) })
}

pub(super) fn kill_monitor(rooms: &Rooms, uid: &PodUid) -> Result<Outcome, Failed> {
    rooms.runtime.kill_monitor(uid).map_err(Failed::because(FailReason::Kill))?;
    Ok(Outcome::Done)
}

/// The runtime ends what is left of it and writes an exit for whatever has none.
pub(super) fn inspect(rooms: &Rooms, uid: &PodUid) -> Result<Outcome, Failed> {
    let state = rooms.runtime.sandbox(uid).map_err(Failed::because(FailReason::Kill))?;
    let containers = state.into_iter().flat_map(|s| s.containers);
    let exits = containers.filter_map(|container| match container.phase {
        ContainerPhase::Exited(exit) => Some((container.id, exit)),
        ContainerPhase::Created { .. } | ContainerPhase::Running { .. } => None,
    });
    Ok(Outcome::Exits { exits: exits.collect() })
}

/// The network goes first: its names are in the namespace that the sandbox holds.
pub(super) fn stop_sandbox(rooms: &Rooms, uid: &PodUid) -> Result<Outcome, Failed> {
    rooms.net.detach(uid.as_str()).map_err(Failed::because(FailReason::Network))?;
    rooms.runtime.remove_sandbox(uid).map_err(Failed::because(FailReason::Kill))?;
    weigh_classes(rooms);
    Ok(Outcome::Done)
}

/// The classes' shares of the CPU follow their pods, as with kubelet: best effort weighs next to
/// nothing, burstable what its pods ask for together. A weight that cannot be written is told; no
/// pod is held back for it.
fn weigh_classes(rooms: &Rooms) {
    let class = |class: QosClass| class.cgroup(&rooms.config.cgroup_parent);
    let best_effort = rooms.cgroups.weigh(&class(QosClass::BestEffort), qos::MIN_SHARES);
    if let Err(error) = best_effort.and_then(|()| rooms.cgroups.weigh_by_children(&class(QosClass::Burstable))) {
        tracing::warn!(error = %crate::obs::chain(&error), "the weight of a class of pods cannot be set");
    }
}

pub(super) fn release_volumes(rooms: &Rooms, uid: &PodUid) -> Result<Outcome, Failed> {
    rooms.volumes.teardown(uid).map_err(Failed::because(FailReason::Mount))?;
    Ok(Outcome::Done)
}

pub(super) fn finish(rooms: &Rooms, uid: &PodUid, finished: &Finished) -> Result<Outcome, Failed> {
    journal(
        rooms,
        &Record::Finished {
            uid: uid.clone(),
            phase: finished.phase.clone(),
            reason: finished.reason.clone(),
            message: finished.message.clone(),
            at: finished.at,
        },
    )?;
    Ok(Outcome::Done)
}

/// Goes on past what fails, so that one stuck mount does not keep all the rest; the record comes
/// last and only when nothing is left.
pub(super) fn remove(rooms: &Rooms, job: &Job, uid: &PodUid) -> Result<Outcome, Failed> {
    let mut failures: Vec<Failed> = Vec::new();
    let mut note = |result: Result<(), Failed>| failures.extend(result.err());
    note(rooms.net.detach(uid.as_str()).map_err(Failed::because(FailReason::Network)));
    note(rooms.runtime.remove_sandbox(uid).map_err(Failed::because(FailReason::Kill)));
    note(rooms.volumes.teardown(uid).map_err(Failed::because(FailReason::Mount)));
    let roots = &rooms.config.roots;
    for left in &job.attempts {
        note(remove_tree(&roots.container_dir(left.id.as_str())));
    }
    let logs = roots.pod_logs(&job.namespace, &job.name, uid.as_str());
    note(remove_links(&roots.logs.join("containers"), &format!("{}_{}_", job.name, job.namespace), &logs));
    note(remove_tree(&logs));
    note(rooms.pulls.forget(uid).map_err(Failed::because(FailReason::Mount)));
    if let Some(first) = failures.into_iter().next() {
        return Err(first);
    }
    rooms.store.remove_manifest(uid).map_err(Failed::because(FailReason::Journal))?;
    journal(rooms, &Record::Removed { uid: uid.clone() })?;
    Ok(Outcome::Done)
}

/// `remove_dir_all` follows no link. Absent is fine.
pub(super) fn remove_tree(path: &Path) -> Result<(), Failed> {
    absent_is_fine("remove", path, fs::remove_dir_all(path))
}

pub(super) fn absent_is_fine(operation: &str, path: &Path, result: io::Result<()>) -> Result<(), Failed> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failed { reason: FailReason::Mount, message: format!("{operation} {}: {error}", path.display()) })
        }
        _ => Ok(()),
    }
}

/// Links of this pod's containers: by name, and only where they lead into its log directory.
fn remove_links(dir: &Path, prefix: &str, target: &Path) -> Result<(), Failed> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) => return absent_is_fine("read", dir, Err(error)),
    };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
        let leads_there = || fs::read_link(entry.path()).is_ok_and(|to: PathBuf| to.starts_with(target));
        if ours && leads_there() {
            let path = entry.path();
            absent_is_fine("remove", &path, fs::remove_file(&path))?;
        }
    }
    Ok(())
}

/// Directories of containers that no record names: cut off between their making and their
/// removal, or of a journal that was lost. Younger ones than `begun` (wall time) are not asked about.
pub fn sweep_containers(rooms: &Rooms, known: &BTreeSet<ContainerId>, begun: i64) {
    let dir = rooms.config.roots.state.join("containers");
    let Ok(entries) = fs::read_dir(&dir) else { return }; // none was ever made
    for entry in entries.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| ContainerId::parse(name).ok()) else { continue };
        let older = entry.metadata().is_ok_and(|meta| meta.ctime() * 1_000_000_000 + meta.ctime_nsec() < begun);
        if older
            && !known.contains(&id)
            && let Err(failed) = remove_tree(&entry.path())
        {
            tracing::warn!(container = %id, error = failed.message, "an old container's layers cannot be removed");
        }
    }
}
