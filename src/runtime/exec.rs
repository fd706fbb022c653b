//! A process that was started inside a running container, and streams joined to one.
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use super::RuntimeError;
use crate::store::records::ExitRecord;

/// Dropping it closes its connection: a process that still runs is killed then, as containerd
/// does it when a client goes away.
#[derive(Debug)]
pub struct ExecProcess {
    pub pid: i32,
    /// Write end; None without stdin and with a tty.
    pub stdin: Option<OwnedFd>,
    /// Read ends; None with a tty.
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// Master side of the terminal, both directions.
    pub pty: Option<OwnedFd>,
}

impl ExecProcess {
    /// Blocks until it has ended or the time is over (None then). Its output may still be in the
    /// pipes, and a background child may keep them open: drain with a deadline.
    pub fn wait(&mut self, _timeout: Option<Duration>) -> Result<Option<ExitRecord>, RuntimeError> {
        todo!()
    }
    pub fn signal(&self, _signal: i32) -> Result<(), RuntimeError> {
        todo!()
    }
    pub fn resize(&self, _rows: u16, _columns: u16) -> Result<(), RuntimeError> {
        todo!()
    }
    /// Readable once [`ExecProcess::wait`] would not block: a client polls it beside its terminal.
    pub fn connection(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// Takes it apart for another process of ours to own: the agent hands an exec to `coracle
    /// exec` over its socket (SCM_RIGHTS) and is out of the game, so that the exec and its exit
    /// code outlive the agent. Nothing is killed by this.
    pub fn into_parts(self) -> ExecParts {
        todo!()
    }
    /// The other half of [`ExecProcess::into_parts`].
    pub fn from_parts(_parts: ExecParts) -> ExecProcess {
        todo!()
    }
}

/// An [`ExecProcess`] in transit between two processes.
#[derive(Debug)]
pub struct ExecParts {
    pub pid: i32,
    /// To the monitor: tells the end, takes signals and sizes.
    pub connection: OwnedFd,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub pty: Option<OwnedFd>,
}

/// Streams of a container's main process, copied by the monitor.
#[derive(Debug)]
pub struct Attachment {
    /// None where the container was made without stdin, or another client holds it.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    /// None with a tty.
    pub stderr: Option<OwnedFd>,
}
