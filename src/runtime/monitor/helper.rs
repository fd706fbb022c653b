//! One libcontainer call in a forked child of the monitor, gone when the call is done.
//!
//! Invariant: a helper answers once (success or why not, in one packet) or dies; there is no
//! third way, since its channel ends with it. It starts from defaults (signals, umask, groups)
//! and holds no descriptor of the monitor's but those of its call.
//!
//! ```text
//! monitor ─fork─> helper ─clone─> youki:[1:INTER] ─clone─> youki:[2:INIT] ─exec─> program
//!    └─────────────── parent of all of them (as_sibling) ──────────────┘
//! ```

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::engine::{self, Stdio};
use super::filter;
use super::wire::{Failure, Kind};
use crate::runtime::cgroup::Cgroups;
use crate::sys::chain::chain;
use crate::sys::{failpoint, inherit, process, seqpacket};

/// The name of its process, so that what is left of a dead one can be told.
pub const NAME: &std::ffi::CStr = c"coracle helper";

/// Which call, and what it needs.
#[derive(Debug)]
pub struct Call {
    pub verb: Verb,
    pub id: String,
    /// The container's run directory: bundle and scratch.
    pub dir: PathBuf,
    /// libcontainer's state directory.
    pub state: PathBuf,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub tty: bool,
    /// Write end of the program's report; not for `Start`.
    pub report: Option<OwnedFd>,
    pub cgroups: Cgroups,
    /// The container's own.
    pub cgroup: String,
    /// Where compiled filters are kept.
    pub filters: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb {
    Create,
    Start,
    /// Name of the process.json in the container's run directory.
    Exec(String),
}

/// A helper at work.
#[derive(Debug)]
pub struct Helper {
    pub pid: i32,
    pub channel: OwnedFd,
}

/// What it answers. `pid` is 0 for `Start`.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Done { pid: i32 },
    Failed(Failure),
}

/// Where a call notes the pid of the process that it makes, before the process may run.
pub fn pid_file(dir: &Path, verb: &Verb) -> PathBuf {
    dir.join(if *verb == Verb::Create { "create.pid" } else { "exec.pid" })
}

pub fn spawn(call: Call) -> io::Result<Helper> {
    let (ours, theirs) = seqpacket::pair()?;
    process::set_nonblocking(ours.as_fd())?;
    match process::fork()? {
        process::Side::Parent { child } => Ok(Helper { pid: child, channel: ours }),
        process::Side::Child => {
            let code = i32::from(child(call, &theirs).is_err());
            process::exit_child(code)
        }
    }
}

/// None while it works; an answer; or the failure that it died.
pub fn answer(helper: &Helper) -> io::Result<Option<(Answer, Vec<OwnedFd>)>> {
    let mut buffer = [0u8; 8192];
    Ok(match seqpacket::receive(helper.channel.as_fd(), &mut buffer)? {
        seqpacket::Received::Nothing => None,
        seqpacket::Received::Message { len, fds } => {
            let answer = serde_json::from_slice(buffer.get(..len).unwrap_or_default());
            Some((answer.unwrap_or_else(|e| Answer::Failed(Failure::new(Kind::HelperDied, format!("helper: {e}")))), fds))
        }
        seqpacket::Received::TooLong | seqpacket::Received::Closed => {
            Some((Answer::Failed(Failure::new(Kind::HelperDied, "the helper process died")), Vec::new()))
        }
    })
}

fn child(call: Call, channel: &OwnedFd) -> io::Result<()> {
    process::set_name(NAME)?;
    let ends = [&call.stdin, &call.stdout, &call.stderr, &call.report];
    let mut keep: Vec<BorrowedFd<'_>> = ends.into_iter().flatten().map(AsFd::as_fd).collect();
    keep.push(channel.as_fd());
    process::close_all_but(&keep)?;
    inherit::reset()?;
    failpoint::hit("runtime.helper.begin")?;
    let (answer, fds) = match run(call) {
        Ok((pid, pty)) => (Answer::Done { pid }, pty),
        Err(failure) => (Answer::Failed(failure), None),
    };
    failpoint::hit("runtime.helper.called")?;
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    seqpacket::send(channel.as_fd(), &serde_json::to_vec(&answer)?, &fds)
}

fn run(call: Call) -> Result<(i32, Option<OwnedFd>), Failure> {
    let Call { verb, id, dir, state, stdin, stdout, stderr, tty, report, cgroups, cgroup, filters } = call;
    if verb != Verb::Start {
        let ring = CString::new(format!("_ses.{id}")).unwrap_or_default();
        inherit::join_session_keyring(&ring).map_err(|e| Failure::new(Kind::Io, format!("session keyring: {e}")))?;
        let door = cgroups.door(&cgroup).map_err(|e| Failure::new(Kind::Io, chain(&e).to_string()))?;
        engine::prepare(door, filter::ready(&filters, &dir));
    }
    let pid_file = pid_file(&dir, &verb);
    let io = |e: io::Error| Failure::new(Kind::Io, format!("console socket in {}: {e}", dir.display()));
    let console = if tty { Some(Console::open(&dir).map_err(io)?) } else { None };
    let stdio = Stdio { stdin, stdout, stderr, console: console.as_ref().map(|c| c.path.clone()) };
    let report = report.ok_or_else(|| Failure::new(Kind::BadRequest, "no report pipe"));
    let pid = match verb {
        Verb::Create => engine::create(&state, &id, &dir, &pid_file, stdio, report?)?,
        Verb::Start => engine::start(&state, &id).map(|()| 0)?,
        Verb::Exec(process) => engine::exec(&state, &id, &dir.join(process), &pid_file, stdio, report?)?,
    };
    let pty = console.map(|console| console.receive().map_err(io)).transpose()?;
    Ok((pid, pty))
}

/// The socket that the terminal's master side arrives at.
struct Console {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
}

impl Console {
    fn open(dir: &Path) -> io::Result<Console> {
        let path = dir.join("console.sock");
        // Of an earlier call that died.
        if let Err(e) = std::fs::remove_file(&path)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(e);
        }
        // A helper has its own working directory: paths of any length fit into a socket address.
        std::env::set_current_dir(dir)?;
        let listener = std::os::unix::net::UnixListener::bind("console.sock")?;
        std::env::set_current_dir("/")?;
        listener.set_nonblocking(true)?;
        Ok(Console { listener, path })
    }

    /// The other side has sent it before the call returned.
    fn receive(self) -> io::Result<OwnedFd> {
        let (stream, _) = self.listener.accept()?;
        stream.set_nonblocking(true)?;
        let mut name = [0u8; 256];
        let received = seqpacket::receive(stream.as_fd(), &mut name)?;
        std::fs::remove_file(&self.path)?;
        match received {
            seqpacket::Received::Message { fds, .. } => {
                fds.into_iter().next().ok_or_else(|| io::Error::other("a message without a terminal"))
            }
            other => Err(io::Error::other(format!("no terminal arrived: {other:?}"))),
        }
    }
}
