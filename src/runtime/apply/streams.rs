//! Processes and streams in a running container.
//!
//! Invariant: the pipes are made here and handed on, so that no byte of an exec passes through the
//! monitor; its process.json, which holds the environment, does not outlive the call.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;

use oci_spec::runtime::Process;

use super::super::RuntimeError;
use super::super::exec::{Attachment, ExecProcess};
use super::super::model::ExecSpec;
use super::super::monitor::wire::{self, Reply, Request};
use super::{Inner, QUICK, SLOW, call_error, unexpected};
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::{clock, process};

impl Inner {
    pub fn exec(&self, spec: &ExecSpec, process: &Process) -> Result<ExecProcess, RuntimeError> {
        let dir = self.pod(&spec.uid).container(&spec.id);
        if !dir.exists() {
            return Err(RuntimeError::NoContainer { uid: spec.uid.clone(), id: spec.id.clone() });
        }
        let number = self.execs.fetch_add(1, Ordering::Relaxed);
        let name = format!("exec-{}-{number}.json", clock::boot_nanos());
        let mut process = process.clone();
        process.set_terminal(Some(spec.tty));
        self.complete_process(&mut process);
        let text = serde_json::to_vec(&process).map_err(|e| RuntimeError::io("write", dir.join(&name))(e.into()))?;
        let mut file = fs::OpenOptions::new();
        let written = file.write(true).create_new(true).mode(0o600).open(dir.join(&name)).and_then(|mut f| f.write_all(&text));
        written.map_err(RuntimeError::io("write", dir.join(&name)))?;

        let pipes = (!spec.tty).then(|| ExecPipes::make(spec.stdin, process.user().uid())).transpose();
        let pipes = pipes.map_err(RuntimeError::io("make pipes for", &dir))?;
        let theirs: Vec<BorrowedFd<'_>> = pipes.iter().flat_map(|p| p.theirs.iter().map(AsFd::as_fd)).collect();
        let request = Request::Exec(wire::Exec { id: spec.id.clone(), process: name, tty: spec.tty, stdin: spec.stdin });
        let mut client = self.connect(&spec.uid, "exec")?;
        let answer = client.call(&request, &theirs, SLOW).map_err(|e| call_error(&spec.uid, Some(&spec.id), "exec", e));
        let (reply, fds) = answer?;
        let Reply::Execed(created) = reply else { return Err(unexpected(&spec.uid, "exec", &reply)) };
        let (stdin, stdout, stderr) = pipes.map_or((None, None, None), |p| (p.stdin, Some(p.stdout), Some(p.stderr)));
        Ok(ExecProcess { pid: created.pid, stdin, stdout, stderr, pty: fds.into_iter().next(), client, exit: None })
    }

    /// The monitor is protected from the OOM killer, and its children would be: who says nothing
    /// else has what the agent has.
    pub(super) fn complete_process(&self, process: &mut Process) {
        if process.oom_score_adj().is_none() {
            process.set_oom_score_adj(Some(self.oom_score_adj));
        }
    }

    pub fn attach(&self, uid: &PodUid, id: &ContainerId) -> Result<Attachment, RuntimeError> {
        let spec = self.container_spec(uid, id)?;
        let tty = spec.process().as_ref().and_then(Process::terminal).unwrap_or(false);
        let wrap = |e| RuntimeError::io("make pipes for", self.pod(uid).container(id))(e);
        let (stdin_theirs, stdin) = process::pipe().map_err(wrap)?;
        let (stdout, stdout_theirs) = process::pipe().map_err(wrap)?;
        let stderr = if tty { None } else { Some(process::pipe().map_err(wrap)?) };
        let out: Vec<BorrowedFd<'_>> =
            std::iter::once(stdout_theirs.as_fd()).chain(stderr.iter().map(|(_, w)| w.as_fd())).collect();
        let with_stdin: Vec<BorrowedFd<'_>> = std::iter::once(stdin_theirs.as_fd()).chain(out.iter().copied()).collect();
        let ask = |stdin, fds: &[BorrowedFd<'_>]| {
            self.ask(uid, Some(id), "attach", &Request::Attach(wire::Attach { id: id.clone(), stdin }), fds, QUICK)
        };
        let stdin = match ask(true, &with_stdin) {
            Ok(_) => Some(stdin),
            // No stdin, or another has it: the output is still to be had.
            Err(RuntimeError::WrongState { .. }) => ask(false, &out).map(|_| None)?,
            Err(e) => return Err(e),
        };
        Ok(Attachment { stdin, stdout, stderr: stderr.map(|(read, _)| read) })
    }

    pub fn resize(&self, uid: &PodUid, id: &ContainerId, rows: u16, columns: u16) -> Result<(), RuntimeError> {
        let request = Request::Resize(wire::Resize { id: id.clone(), rows, columns });
        self.ask(uid, Some(id), "resize", &request, &[], QUICK).map(|_| ())
    }
}

/// The caller's ends and the process's.
struct ExecPipes {
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: OwnedFd,
    theirs: Vec<OwnedFd>,
}

impl ExecPipes {
    /// Owned by the process's user, who may want to open /dev/stdout again.
    fn make(with_stdin: bool, user: u32) -> io::Result<ExecPipes> {
        let mut theirs = Vec::new();
        let mut stdin = None;
        if with_stdin {
            let (read, write) = process::pipe()?;
            stdin = Some(write);
            theirs.push(read);
        }
        let (stdout, out) = process::pipe()?;
        let (stderr, err) = process::pipe()?;
        theirs.extend([out, err]);
        for fd in &theirs {
            nix::unistd::fchown(fd.as_raw_fd(), Some(nix::unistd::Uid::from_raw(user)), None)?;
        }
        Ok(ExecPipes { stdin, stdout, stderr, theirs })
    }
}
