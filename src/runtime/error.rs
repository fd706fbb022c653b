//! What can go wrong in the runtime room, told apart by what the caller does about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::store::ids::{ContainerId, PodUid};

/// Why a container or process could not be made to run, as the helper saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The program is not there: exit code 127 for an exec'd process.
    NoProgram,
    /// It is there but may not or cannot be executed: 126.
    NotExecutable,
    /// Everything else that libcontainer refused: a bad spec, a mount that failed…
    Refused,
    /// The helper died or did not answer in time; what it had made is undone.
    HelperDied,
}

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("pod {uid} has no sandbox")]
    NoSandbox { uid: PodUid },
    #[error("pod {uid} has no container {id}")]
    NoContainer { uid: PodUid, id: ContainerId },
    /// The verb does not fit the state, e.g. exec into a container that has ended.
    #[error("container {id} is {state}, {verb} needs it {needs}")]
    WrongState { id: ContainerId, verb: &'static str, state: String, needs: &'static str },
    /// Create, start or exec failed in the container's own doing: what containerd reports as
    /// `StartError` (kubelet: `RunContainerError`). Nothing of the attempt is left.
    #[error("failed to {verb} container {id}: {message}")]
    Start { id: ContainerId, verb: &'static str, kind: FailureKind, message: String },
    #[error("the image's {path} must be a directory, not a link or file: rebuild the image")]
    RootfsUnsafe {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("failed to {op} {path}")]
    Io {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The monitor does not answer; it may be blocked by a slow disk. Retry later.
    #[error("the monitor of pod {uid} does not answer to {verb}")]
    Monitor {
        uid: PodUid,
        verb: &'static str,
        #[source]
        source: io::Error,
    },
    /// It answered with something that this version cannot use.
    #[error("the monitor of pod {uid} refused {verb}: {message}")]
    Protocol { uid: PodUid, verb: &'static str, message: String },
    #[error("failed to {op} cgroup {path}")]
    Cgroup {
        op: &'static str,
        path: String,
        #[source]
        source: super::cgroup::CgroupError,
    },
    /// The monitor of an exec'd process is gone, and its exit code with it.
    #[error("lost the connection to process {pid}")]
    ExecLost {
        pid: i32,
        #[source]
        source: io::Error,
    },
    #[error("failed to journal {what}")]
    Journal {
        what: String,
        #[source]
        source: crate::store::StoreError,
    },
    #[error("processes of pod {uid} do not end: {left} left in cgroup {path}")]
    WillNotEnd { uid: PodUid, path: String, left: usize },
}

impl RuntimeError {
    pub(super) fn io(op: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> RuntimeError {
        let path = path.as_ref().to_owned();
        move |source| RuntimeError::Io { op, path, source }
    }

    /// Some where containerd would report the container as exited with `StartError` and code 128.
    pub fn start_failure(&self) -> Option<(FailureKind, &str)> {
        match self {
            RuntimeError::Start { kind, message, .. } => Some((*kind, message)),
            _ => None,
        }
    }
}
