//! Containers of a sandbox: mounts, cgroup and bundle made ready here, the process by the monitor.
//!
//! Invariant: what only the kernel has (mount, cgroup) is named by the journal or by `meta.json`
//! before it is made; a container that failed by its own doing leaves only its rootfs.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxNamespaceType, RootBuilder, Spec};

use super::super::layout::Meta;
use super::super::model::{ContainerSpec, Rootfs};
use super::super::monitor::wire::{self, Empty, Reply, Request};
use super::super::{RuntimeError, rootfs};
use super::files::{gone_is_fine, read_json, read_sandbox, remove_tree, write_json};
use super::{ENDING, Inner, META, QUICK, SLOW, hit, unexpected};
use crate::store::effects::Effect;
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::mount;

const CONFIG: &str = "config.json";

impl Inner {
    pub fn prepare_rootfs(&self, uid: &PodUid, id: &ContainerId, spec: &Rootfs) -> Result<PathBuf, RuntimeError> {
        let run = self.pod(uid);
        if read_sandbox(&run)?.is_none() {
            return Err(RuntimeError::NoSandbox { uid: uid.clone() });
        }
        let target = run.rootfs(id);
        fs::create_dir_all(&target).map_err(RuntimeError::io("create", &target))?;
        if !mount::is_mount_point(&target).map_err(RuntimeError::io("look at", &target))? {
            self.make(&Effect::Mount { target: target.clone() }, || rootfs::mount_overlay(&self.skeleton(), spec, &target))?;
        }
        hit("runtime.create.rootfs", &target)?;
        rootfs::check(&target)?;
        Ok(target)
    }

    pub fn image_volume(&self, uid: &PodUid, id: &ContainerId, path: &Path) -> Result<PathBuf, RuntimeError> {
        rootfs::volume(&self.pod(uid).rootfs(id), path)
    }

    pub fn create_container(&self, spec: &ContainerSpec) -> Result<(), RuntimeError> {
        self.create(spec, None).map(|_| ())
    }

    /// With `streams` the container has those for its own (none of them with a tty: its master side is
    /// the result then).
    pub fn create(&self, spec: &ContainerSpec, streams: Option<&[BorrowedFd<'_>]>) -> Result<Option<OwnedFd>, RuntimeError> {
        let run = self.pod(&spec.uid);
        let target = self.prepare_rootfs(&spec.uid, &spec.id, &spec.rootfs)?;
        let dir = run.container(&spec.id);
        // First the name of the cgroup, then the cgroup: recovery goes by the name.
        let meta = Meta { name: spec.name.clone(), attempt: spec.attempt, cgroup: spec.cgroup.clone() };
        write_json(&dir.join(META), &meta)?;
        self.make_cgroup(&spec.cgroup, &spec.resources)?;
        hit("runtime.create.cgroup", &dir)?;
        if let Some(parent) = spec.log.as_ref().and_then(|log| log.path.parent()) {
            fs::create_dir_all(parent).map_err(RuntimeError::io("create", parent))?;
        }
        let mut oci = spec.oci.clone();
        complete(&mut oci, &target, &spec.cgroup);
        if let Some(process) = oci.process_mut() {
            self.complete_process(process);
        }
        if let Some(process) = oci.process() {
            rootfs::make_directory(&target, process.cwd())?;
        }
        let config = dir.join(CONFIG);
        oci.save(&config).map_err(|e| RuntimeError::io("write", &config)(io::Error::other(e)))?;
        let create = wire::Create {
            id: spec.id.clone(),
            name: spec.name.clone(),
            attempt: spec.attempt,
            cgroup: spec.cgroup.clone(),
            log: spec.log.as_ref().map(|log| wire::Log {
                path: log.path.clone(),
                max_size: log.max_size,
                max_files: log.max_files,
            }),
            stdin: spec.stdin,
            stdin_once: spec.stdin_once,
            tty: spec.tty,
            user: oci.process().as_ref().map_or(0, |process| process.user().uid()),
            own_streams: streams.is_some(),
            own_pid_namespace: has_own_pid_namespace(&oci),
        };
        hit("runtime.create.bundle", &dir)?;
        let created = self.ask(&spec.uid, Some(&spec.id), "create", &Request::Create(create), streams.unwrap_or_default(), SLOW);
        hit("runtime.create.asked", &dir)?;
        match created {
            // Made by an earlier try whose answer was lost.
            Err(RuntimeError::WrongState { .. }) => Ok(None),
            Err(e @ RuntimeError::Start { .. }) => {
                self.remove_cgroup(&spec.cgroup)?;
                Err(e)
            }
            other => other.map(|(_, fds)| fds.into_iter().next()),
        }
    }

    pub fn start_container(&self, uid: &PodUid, id: &ContainerId) -> Result<i64, RuntimeError> {
        let which = wire::Which { id: id.clone() };
        let (reply, _) = match self.ask(uid, Some(id), "start", &Request::Start(which), &[], SLOW) {
            Err(RuntimeError::WrongState { state, .. }) => return self.started_before(uid, id, state),
            other => other?,
        };
        hit("runtime.start.asked", self.pod(uid).path())?;
        let Reply::Started(started) = reply else { return Err(unexpected(uid, "start", &reply)) };
        Ok(started.started_at)
    }

    /// An earlier try may have started it, whose answer was lost.
    fn started_before(&self, uid: &PodUid, id: &ContainerId, state: String) -> Result<i64, RuntimeError> {
        let (reply, _) = self.ask(uid, None, "state", &Request::State(Empty {}), &[], QUICK)?;
        let Reply::State(now) = reply else { return Err(unexpected(uid, "state", &reply)) };
        match now.containers.iter().find(|container| container.id == *id) {
            Some(container) if container.started_at != 0 => Ok(container.started_at),
            _ => Err(RuntimeError::WrongState { id: id.clone(), verb: "start", state, needs: "created" }),
        }
    }

    pub fn signal_container(&self, uid: &PodUid, id: &ContainerId, signal: i32) -> Result<(), RuntimeError> {
        let request = Request::Signal(wire::Signal { id: id.clone(), signal });
        self.ask(uid, Some(id), "signal", &request, &[], QUICK).map(|_| ())
    }

    pub fn kill_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let meta = read_json::<Meta>(&self.pod(uid).container(id).join(META))?;
        let meta = meta.ok_or_else(|| RuntimeError::NoContainer { uid: uid.clone(), id: id.clone() })?;
        self.cgroup("kill", &meta.cgroup, |c, path| c.kill(path))
    }

    pub fn acknowledge_exit(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let file = self.pod(uid).exit(id);
        gone_is_fine(fs::remove_file(&file)).map_err(RuntimeError::io("remove", &file))
    }

    pub fn remove_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let run = self.pod(uid);
        let dir = run.container(id);
        if !dir.exists() {
            return self.acknowledge_exit(uid, id);
        }
        let meta = read_json::<Meta>(&dir.join(META))?;
        if let Some(meta) = &meta {
            self.cgroup("kill", &meta.cgroup, |c, path| c.kill(path))?;
        }
        if self.monitor_lives(&run)? {
            let which = wire::Which { id: id.clone() };
            self.ask(uid, Some(id), "remove", &Request::Remove(which), &[], ENDING)?;
        }
        hit("runtime.remove_container.forgotten", &dir)?;
        if let Some(meta) = &meta {
            self.wait_for_end(uid, &meta.cgroup)?;
            self.remove_cgroup(&meta.cgroup)?;
        }
        self.unmount(&run.rootfs(id))?;
        hit("runtime.remove_container.unmounted", &dir)?;
        self.acknowledge_exit(uid, id)?;
        remove_tree(&run.scratch().join(id.as_str()))?;
        remove_tree(&dir)
    }

    pub fn container_spec(&self, uid: &PodUid, id: &ContainerId) -> Result<Spec, RuntimeError> {
        let config = self.pod(uid).container(id).join(CONFIG);
        read_json::<Spec>(&config)?.ok_or_else(|| RuntimeError::NoContainer { uid: uid.clone(), id: id.clone() })
    }
}

/// What only the runtime knows: where the root is, and which leaf is the container's.
fn complete(oci: &mut Spec, rootfs: &Path, cgroup: &str) {
    let read_only = oci.root().as_ref().and_then(oci_spec::runtime::Root::readonly).unwrap_or(false);
    // Both fields are given: it cannot fail.
    if let Ok(root) = RootBuilder::default().path(rootfs).readonly(read_only).build() {
        oci.set_root(Some(root));
    }
    if let Some(linux) = oci.linux_mut() {
        linux.set_cgroups_path(Some(PathBuf::from(cgroup)));
    }
}

fn has_own_pid_namespace(oci: &Spec) -> bool {
    let namespaces = oci.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
    namespaces.is_some_and(|all| all.iter().any(|ns| ns.typ() == LinuxNamespaceType::Pid && ns.path().is_none()))
}
