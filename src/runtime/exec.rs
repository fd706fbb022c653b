//! A process that was started inside a running container, and streams joined to one.
//!
//! Invariant: an exec belongs to its connection to the monitor. Who holds the connection hears of
//! the end; when nobody does any more, the process is killed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::RuntimeError;
use super::monitor::client::{CallError, Client};
use super::monitor::wire::{Reply, Request, SignalExec};
use crate::store::records::ExitRecord;
use crate::sys::tty;

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
    pub(super) client: Client,
    pub(super) exit: Option<ExitRecord>,
}

impl ExecProcess {
    /// Blocks until it has ended or the time is over (None then). Its output may still be in the
    /// pipes, and a background child may keep them open: drain with a deadline.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<ExitRecord>, RuntimeError> {
        let deadline = timeout.map(|timeout| std::time::Instant::now() + timeout);
        while self.exit.is_none() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(std::time::Instant::now()));
            match self.client.hear(left) {
                Ok(None) => return Ok(None),
                Ok(Some((0, Reply::ExecExited(exit), _))) => self.exit = Some(exit),
                // Answers to signals that nobody waited for.
                Ok(Some(_)) => {}
                Err(source) => return Err(RuntimeError::ExecLost { pid: self.pid, source }),
            }
        }
        Ok(self.exit.clone())
    }

    /// To the process alone. One that has ended is no error.
    pub fn signal(&mut self, signal: i32) -> Result<(), RuntimeError> {
        match self.client.ask(&Request::SignalExec(SignalExec { signal }), &[]) {
            Ok(_) => Ok(()),
            Err(CallError::Io(source)) => Err(RuntimeError::ExecLost { pid: self.pid, source }),
            Err(CallError::Failed(failure)) => {
                Err(RuntimeError::ExecLost { pid: self.pid, source: io::Error::other(failure.message) })
            }
        }
    }

    /// The size of its terminal; nothing without one.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<(), RuntimeError> {
        let Some(pty) = &self.pty else { return Ok(()) };
        let lost = |source| RuntimeError::ExecLost { pid: self.pid, source };
        tty::set_size(pty.as_fd(), rows, columns).map_err(lost)
    }

    /// Readable once [`ExecProcess::wait`] would not block: a client polls it beside its terminal.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }

    /// Takes it apart for another process of ours to own: the agent hands an exec to `coracle
    /// exec` over its socket (SCM_RIGHTS) and is out of the game, so that the exec and its exit
    /// code outlive the agent. Nothing is killed by this.
    pub fn into_parts(self) -> ExecParts {
        let ExecProcess { pid, stdin, stdout, stderr, pty, client, exit: _ } = self;
        ExecParts { pid, connection: client.into_fd(), stdin, stdout, stderr, pty }
    }

    /// The other half of [`ExecProcess::into_parts`].
    pub fn from_parts(parts: ExecParts) -> ExecProcess {
        let ExecParts { pid, connection, stdin, stdout, stderr, pty } = parts;
        ExecProcess { pid, stdin, stdout, stderr, pty, client: Client::from_fd(connection), exit: None }
    }
}

/// An [`ExecProcess`] in transit between two processes, before anyone has waited for it.
#[derive(Debug)]
pub struct ExecParts {
    pub pid: i32,
    /// To the monitor: tells the end, takes signals.
    pub connection: OwnedFd,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub pty: Option<OwnedFd>,
}

/// Streams of a container's main process, copied by the monitor.
#[derive(Debug)]
pub struct Attachment {
    /// None where the container was made without stdin.
    pub stdin: Option<OwnedFd>,
    pub stdout: OwnedFd,
    /// None with a tty.
    pub stderr: Option<OwnedFd>,
}
