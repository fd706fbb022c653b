//! ROOM 2: the OCI runtime. Sandboxes and containers, in CRI's nouns and verbs.
//!
//! A sandbox is one monitor process (`coracle monitor ns/pod`) with the pod's namespaces; the
//! monitor is the parent of every process of the pod and outlives the agent. This side of the
//! wire makes what only the kernel and the disk know of (cgroups, mounts, namespace pins, run
//! directories), each journalled before it is made, and asks the monitor for the rest.
//!
//! Invariant: every verb is idempotent and may be cut off after any step; [`Runtime::recover`]
//! finds what lives, and undoes what is only half there. An exit is never told before it lies in
//! `<run>/pods/<uid>/exit/<container>`.

mod apply;
pub mod cgroup;
pub mod devices;
pub mod error;
mod exec;
mod layout;
pub mod logs;
pub mod model;
pub mod monitor;
mod observe;
mod rootfs;
mod run_dir;
pub mod seccomp;
pub mod spec;
pub mod user;
mod watch;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use crate::store::effects::Effects;
use crate::store::ids::{ContainerId, PodUid};

pub use error::{FailureKind, RuntimeError};
pub use exec::{ExecParts, ExecProcess};
pub use run_dir::{mount_run, unmount_run};

/// What the room needs to know of its surroundings.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// A mount of its own, see [`mount_run`].
    pub run: PathBuf,
    pub cgroups: cgroup::Cgroups,
    /// What `cgroups` was detected with; monitors detect it again.
    pub cgroup_parent: String,
}

/// The front door. Cheap to clone; every method may block on the monitor it talks to, and only
/// on that one.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<apply::Inner>,
}

impl Runtime {
    /// `events` gets what happens without being asked, after [`Runtime::recover`] or
    /// [`Runtime::run_sandbox`] has found the pod's monitor.
    pub fn open(
        config: RuntimeConfig,
        effects: Arc<Effects>,
        events: mpsc::Sender<model::RuntimeEvent>,
    ) -> Result<Runtime, RuntimeError> {
        Ok(Runtime { inner: apply::Inner::open(config, effects, events)? })
    }

    /// Finds every sandbox that an earlier agent left: living ones are adopted (`alive`), exits
    /// that nobody acknowledged are among their containers. Of dead monitors everything is ended;
    /// the exits are those of the exit files, or `ContainerStatusUnknown` with 137. Half-made
    /// sandboxes and containers are undone.
    pub fn recover(&self) -> Result<Vec<model::SandboxState>, RuntimeError> {
        self.inner.recover()
    }

    /// Makes the pod's cgroups, monitor, namespaces and pins. For a sandbox that lives: its state.
    pub fn run_sandbox(&self, spec: &model::SandboxSpec) -> Result<model::SandboxState, RuntimeError> {
        self.inner.run_sandbox(spec)
    }

    /// What the monitor says now; None without a sandbox.
    pub fn sandbox(&self, uid: &PodUid) -> Result<Option<model::SandboxState>, RuntimeError> {
        self.inner.sandbox(uid)
    }

    /// Makes the monitor of a long-lived pod go on as this program, if it runs another release of it
    /// (or `always`): false where it does not. A busy one is [`RuntimeError::Protocol`]: later.
    pub fn renew_monitor(&self, uid: &PodUid, always: bool) -> Result<bool, RuntimeError> {
        self.inner.renew_monitor(uid, always)
    }

    /// SIGKILL to the pod's monitor and to nothing else; returns after its death, which is told as any
    /// other. Nothing happens where it is gone.
    pub fn kill_monitor(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.inner.kill_monitor(uid)
    }

    /// Where the pod's namespaces are pinned, as container specs name them.
    pub fn pins(&self, uid: &PodUid) -> Result<model::Pins, RuntimeError> {
        self.inner.pins(uid)
    }

    /// Mounts the container's root file system; the path is the mount. Idempotent.
    pub fn prepare_rootfs(&self, uid: &PodUid, id: &ContainerId, rootfs: &model::Rootfs) -> Result<PathBuf, RuntimeError> {
        self.inner.prepare_rootfs(uid, id, rootfs)
    }

    /// The directory of a path that the image declares a volume, to be bound there; after
    /// [`Runtime::prepare_rootfs`]. It is the container's own and goes with it.
    pub fn image_volume(&self, uid: &PodUid, id: &ContainerId, path: &Path) -> Result<PathBuf, RuntimeError> {
        self.inner.image_volume(uid, id, path)
    }

    /// Everything up to the container's first instruction. A failure of its own doing is
    /// [`RuntimeError::Start`]; nothing of it is left then but the rootfs.
    pub fn create_container(&self, spec: &model::ContainerSpec) -> Result<(), RuntimeError> {
        self.inner.create_container(spec)
    }

    /// The same, with streams that are the caller's own: stdin, stdout, stderr, or none of them
    /// with a tty, whose master side is the result then. Nothing is logged.
    pub fn create_container_with(
        &self,
        spec: &model::ContainerSpec,
        streams: &[BorrowedFd<'_>],
    ) -> Result<Option<OwnedFd>, RuntimeError> {
        self.inner.create(spec, Some(streams))
    }

    /// Lets it run; returns the wall-clock nanoseconds of its start. A program that cannot be
    /// executed is [`RuntimeError::Start`].
    pub fn start_container(&self, uid: &PodUid, id: &ContainerId) -> Result<i64, RuntimeError> {
        self.inner.start_container(uid, id)
    }

    /// A signal to the container's main process. One that has ended is no error.
    pub fn signal_container(&self, uid: &PodUid, id: &ContainerId, signal: i32) -> Result<(), RuntimeError> {
        self.inner.signal_container(uid, id, signal)
    }

    /// SIGKILL to everything in the container's cgroup; works without the monitor's help.
    pub fn kill_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        self.inner.kill_container(uid, id)
    }

    /// The exit is journalled: its file may go.
    pub fn acknowledge_exit(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        self.inner.acknowledge_exit(uid, id)
    }

    /// Ends it where it still runs; takes away its mounts, cgroup, bundle and exit file. Upper
    /// directories and logs are the caller's. Idempotent.
    pub fn remove_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        self.inner.remove_container(uid, id)
    }

    /// Ends everything of the pod, its monitor too, and leaves nothing of it. Idempotent.
    pub fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.inner.remove_sandbox(uid)
    }

    /// Runs `process` inside the container. Its streams never pass through monitor or agent: the
    /// pipe ends in the result are the caller's, to hand on as it likes.
    pub fn exec(&self, spec: &model::ExecSpec, process: &oci_spec::runtime::Process) -> Result<ExecProcess, RuntimeError> {
        self.inner.exec(spec, process)
    }

    /// Joins stdin and output of a container that runs. Output is a copy: a reader that is too
    /// slow loses the stream, never the container or its log.
    pub fn attach(&self, uid: &PodUid, id: &ContainerId) -> Result<exec::Attachment, RuntimeError> {
        self.inner.attach(uid, id)
    }

    /// The size of the terminal of a container with a tty.
    pub fn resize(&self, uid: &PodUid, id: &ContainerId, rows: u16, columns: u16) -> Result<(), RuntimeError> {
        self.inner.resize(uid, id, rows, columns)
    }

    /// The config.json that the container was made with, for exec.
    pub fn container_spec(&self, uid: &PodUid, id: &ContainerId) -> Result<oci_spec::runtime::Spec, RuntimeError> {
        self.inner.container_spec(uid, id)
    }

    pub fn run_root(&self) -> &Path {
        self.inner.run_root()
    }
}
