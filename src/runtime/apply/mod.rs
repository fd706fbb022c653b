//! The verbs, step by step: what is journalled, made, and taken away again in reverse.
//!
//! Invariant: each step is safe to repeat and legal to be cut off after; the journal names a
//! thing before it is made and until it is gone. Nothing here decides whether a pod should live.

mod containers;
mod files;
mod sandboxes;
mod streams;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::layout::PodRun;
use super::model::{CgroupResources, RuntimeEvent};
use super::monitor::client::{CallError, Client};
use super::monitor::wire::{Failure, Kind, Reply, Request};
use super::watch::Watch;
use super::{FailureKind, RuntimeConfig, RuntimeError, rootfs};
use crate::store::effects::{Effect, Effects};
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::{exe, failpoint, mount, process};

pub(super) use self::files::{containers_of, gone_is_fine, pods_of, read_json, read_sandbox, write_json};
pub(super) use self::sandboxes::{MONITOR, Monitor, monitor_of, pins};

/// Questions that only need a turn of the monitor's loop.
pub(in crate::runtime) const QUICK: Duration = Duration::from_secs(5);
/// Questions that wait for a helper; the monitor itself gives up after 120 s.
const SLOW: Duration = Duration::from_secs(150);
/// How long processes that were killed are waited for.
const ENDING: Duration = Duration::from_secs(15);

pub struct Inner {
    pub(in crate::runtime) config: RuntimeConfig,
    pub(in crate::runtime) effects: Arc<Effects>,
    pub(in crate::runtime) watch: Watch,
    execs: AtomicU64,
    /// This process's own.
    oom_score_adj: i32,
}

pub(in crate::runtime) const META: &str = "meta.json";

impl Inner {
    pub fn open(
        config: RuntimeConfig,
        effects: Arc<Effects>,
        events: mpsc::Sender<RuntimeEvent>,
    ) -> Result<Arc<Inner>, RuntimeError> {
        // Before an upgrade can replace the file that we were started from.
        exe::own_exe().map_err(RuntimeError::io("make a read-only copy of", "/proc/self/exe"))?;
        let watch = Watch::start(events).map_err(RuntimeError::io("watch pods in", &config.run))?;
        let oom_score_adj = process::oom_score_adj().map_err(RuntimeError::io("read", "/proc/self/oom_score_adj"))?;
        let inner = Inner { config, effects, watch, execs: AtomicU64::new(0), oom_score_adj };
        if mount::is_mount_point(&inner.config.run).map_err(RuntimeError::io("look at", &inner.config.run))? {
            let run = Effect::Mount { target: inner.config.run.clone() };
            inner.intent(&run)?;
            inner.done(&run)?;
        }
        let skeleton = Effect::Mount { target: inner.skeleton() };
        inner.intent(&skeleton)?;
        rootfs::make_skeleton(&inner.skeleton()).map_err(RuntimeError::io("make", inner.skeleton()))?;
        inner.done(&skeleton)?;
        Ok(Arc::new(inner))
    }

    pub fn run_root(&self) -> &Path {
        &self.config.run
    }

    fn skeleton(&self) -> PathBuf {
        self.config.run.join("skeleton")
    }

    pub(in crate::runtime) fn pod(&self, uid: &PodUid) -> PodRun {
        PodRun::of(&self.config.run, uid)
    }

    // ---- steps

    fn connect(&self, uid: &PodUid, verb: &'static str) -> Result<Client, RuntimeError> {
        let run = self.pod(uid);
        Client::connect(&run).map_err(|source| {
            if run.path().exists() {
                RuntimeError::Monitor { uid: uid.clone(), verb, source }
            } else {
                RuntimeError::NoSandbox { uid: uid.clone() }
            }
        })
    }

    pub(in crate::runtime) fn ask(
        &self,
        uid: &PodUid,
        id: Option<&ContainerId>,
        verb: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), RuntimeError> {
        self.connect(uid, verb)?.call(request, fds, limit).map_err(|e| call_error(uid, id, verb, e))
    }

    pub(in crate::runtime) fn monitor_lives(&self, run: &PodRun) -> Result<bool, RuntimeError> {
        Ok(monitor_of(run)?.is_some())
    }

    /// Journalled before and after.
    fn make(&self, effect: &Effect, make: impl FnOnce() -> Result<(), RuntimeError>) -> Result<(), RuntimeError> {
        self.intent(effect)?;
        make()?;
        self.done(effect)
    }

    fn make_cgroup(&self, path: &str, limits: &CgroupResources) -> Result<(), RuntimeError> {
        self.make(&Effect::Cgroup { path: path.to_owned() }, || self.cgroup("create", path, |c, path| c.create(path, limits)))
    }

    fn remove_cgroup(&self, path: &str) -> Result<(), RuntimeError> {
        self.cgroup("remove", path, |c, path| c.remove(path))?;
        self.undone(&Effect::Cgroup { path: path.to_owned() })
    }

    pub(in crate::runtime) fn unmount(&self, target: &Path) -> Result<(), RuntimeError> {
        while mount::detach(target).map_err(RuntimeError::io("unmount", target))? {}
        self.undone(&Effect::Mount { target: target.to_owned() })
    }

    pub(in crate::runtime) fn cgroup<T>(
        &self,
        op: &'static str,
        path: &str,
        run: impl FnOnce(&super::cgroup::Cgroups, &str) -> Result<T, super::cgroup::CgroupError>,
    ) -> Result<T, RuntimeError> {
        run(&self.config.cgroups, path).map_err(|source| RuntimeError::Cgroup { op, path: path.to_owned(), source })
    }

    pub(in crate::runtime) fn wait_for_end(&self, uid: &PodUid, cgroup: &str) -> Result<(), RuntimeError> {
        match self.cgroup("end", cgroup, |c, path| c.end(path, ENDING))? {
            0 => Ok(()),
            left => Err(RuntimeError::WillNotEnd { uid: uid.clone(), path: cgroup.to_owned(), left }),
        }
    }

    fn intent(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.intent(effect).map_err(|source| journal(effect, source))
    }
    fn done(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.done(effect).map_err(|source| journal(effect, source))
    }
    pub(in crate::runtime) fn undone(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.undone(effect).map_err(|source| journal(effect, source))
    }
}

fn journal(effect: &Effect, source: crate::store::StoreError) -> RuntimeError {
    RuntimeError::Journal { what: format!("{effect:?}"), source }
}

pub(super) fn call_error(uid: &PodUid, id: Option<&ContainerId>, verb: &'static str, error: CallError) -> RuntimeError {
    let (Failure { kind, message }, id) = match (error, id) {
        (CallError::Io(source), _) => return RuntimeError::Monitor { uid: uid.clone(), verb, source },
        (CallError::Failed(failure), None) => {
            return RuntimeError::Protocol { uid: uid.clone(), verb, message: failure.message };
        }
        (CallError::Failed(failure), Some(id)) => (failure, id.clone()),
    };
    let start = |kind| RuntimeError::Start { id: id.clone(), verb, kind, message: message.clone() };
    match kind {
        Kind::NotFound => RuntimeError::NoContainer { uid: uid.clone(), id },
        Kind::WrongState => RuntimeError::WrongState { id, verb, state: message, needs: "otherwise" },
        Kind::NoProgram => start(FailureKind::NoProgram),
        Kind::NotExecutable => start(FailureKind::NotExecutable),
        Kind::HelperDied => start(FailureKind::HelperDied),
        Kind::Refused => start(FailureKind::Refused),
        Kind::UnknownType | Kind::BadRequest | Kind::Io => RuntimeError::Protocol { uid: uid.clone(), verb, message },
    }
}

fn unexpected(uid: &PodUid, verb: &'static str, reply: &Reply) -> RuntimeError {
    RuntimeError::Protocol { uid: uid.clone(), verb, message: format!("answered with {}", reply.kind()) }
}

fn hit(name: &'static str, path: &Path) -> Result<(), RuntimeError> {
    failpoint::hit(name).map_err(RuntimeError::io(name, path))
}
