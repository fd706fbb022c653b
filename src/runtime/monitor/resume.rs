//! Going on as a newer program: an idle monitor executes it with its state in a memfd. Children,
//! pipes, the session and the subreaper flag survive execve(2); connections do not, and clients
//! come back by themselves.
//!
//! Invariant: the pod never hangs on it. The newer program is first asked, as a child, whether it
//! can read the state; only then does this process become it. What is busy (a helper, an exec, an
//! attached client, an exit being written) says so and goes on as it is.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MemFdCreateFlag, memfd_create};
use serde::{Deserialize, Serialize};

use super::attach::{Stdin, Tees};
use super::container::{Container, Stream};
use super::log_writer::{LogWriter, Pending};
use super::wire::Create;
use crate::runtime::cgroup::Cgroups;
use crate::runtime::layout::Sandbox;
use crate::store::records::ExitRecord;
use crate::sys::{pidfd, process};

/// Number of the memfd; in the second form only whether it can be read is asked.
const RESUME: &str = "CORACLE_RESUME";
const CHECK: &str = "CORACLE_RESUME_CHECK";

/// A monitor between two programs. Numbers are descriptors. Fields that come later have defaults,
/// and those that are not known are skipped, as on the wire.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    sandbox: Sandbox,
    listener: i32,
    containers: Vec<SavedContainer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedContainer {
    asked: Create,
    pid: i32,
    started_at: i64,
    #[serde(default)]
    exit: Option<ExitRecord>,
    #[serde(default)]
    report: Option<i32>,
    #[serde(default)]
    stdin: Option<i32>,
    #[serde(default)]
    streams: Vec<SavedStream>,
    #[serde(default)]
    lost_lines: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedStream {
    name: String,
    fd: Option<i32>,
    /// The line that has not ended yet.
    pending: Vec<u8>,
}

/// What a monitor goes on with.
pub struct Resumed {
    pub sandbox: Sandbox,
    pub listener: OwnedFd,
    pub containers: Vec<Container>,
}

/// Becomes `program`. Only returns where it cannot: then everything is as it was.
pub fn become_program(program: BorrowedFd<'_>, sandbox: &Sandbox, listener: &OwnedFd, containers: &[Container]) -> io::Error {
    match prepare(program, sandbox, listener, containers) {
        Err(e) => e,
        Ok(state) => {
            let kept = descriptors(listener, containers);
            let all = || kept.iter().copied().chain([state.as_fd()]);
            let stays = all().try_for_each(|fd| process::set_close_on_exec(fd, false));
            let e = stays.and_then(|()| execute(program, sandbox, RESUME, state.as_fd())).err();
            for fd in all() {
                // It was set before: what can be cleared can be set.
                let _ = process::set_close_on_exec(fd, true);
            }
            e.unwrap_or_else(|| io::ErrorKind::Other.into())
        }
    }
}

/// Writes the state down and has the program read it.
fn prepare(program: BorrowedFd<'_>, sandbox: &Sandbox, listener: &OwnedFd, containers: &[Container]) -> io::Result<OwnedFd> {
    let saved =
        Saved { sandbox: sandbox.clone(), listener: listener.as_raw_fd(), containers: containers.iter().map(save).collect() };
    let mut file = File::from(memfd_create(c"monitor", MemFdCreateFlag::MFD_CLOEXEC)?);
    file.write_all(&serde_json::to_vec(&saved)?)?;
    file.rewind()?;
    let state = OwnedFd::from(file);
    match process::fork()? {
        process::Side::Child => {
            let kept = process::close_all_but(&[program, state.as_fd()])
                .and_then(|()| process::set_close_on_exec(state.as_fd(), false))
                .and_then(|()| execute(program, sandbox, CHECK, state.as_fd()));
            process::exit_child(if kept.is_ok() { 0 } else { 2 })
        }
        process::Side::Parent { child } => {
            let deadline = Instant::now() + Duration::from_secs(5);
            loop {
                match process::try_reap(child)? {
                    Some(process::Ended::Exited(0)) => break,
                    Some(how) => return Err(io::Error::other(format!("the newer program cannot read the state: {how:?}"))),
                    None if Instant::now() > deadline => {
                        process::kill_child(child);
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    None => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        }
    }
    // The child has read it: the place in the file is shared.
    let mut file = File::from(state);
    file.rewind()?;
    Ok(file.into())
}

fn execute(program: BorrowedFd<'_>, sandbox: &Sandbox, name: &str, state: BorrowedFd<'_>) -> io::Result<()> {
    let pod = CString::new(format!("{}/{}", sandbox.namespace, sandbox.name))?;
    let mut env = vec![CString::new(format!("{name}={}", state.as_raw_fd()))?];
    for name in ["CORACLE_FAILPOINTS", "CORACLE_FAILPOINTS_TRACE"] {
        if let Some(value) = std::env::var_os(name) {
            env.push(CString::new(format!("{name}={}", value.to_string_lossy()))?);
        }
    }
    let args: [&CStr; 3] = [c"coracle", c"monitor", &pod];
    match nix::unistd::fexecve(program.as_raw_fd(), &args, &env) {
        Ok(never) => match never {},
        Err(e) => Err(e.into()),
    }
}

fn descriptors<'a>(listener: &'a OwnedFd, containers: &'a [Container]) -> Vec<BorrowedFd<'a>> {
    let mut all = vec![listener.as_fd()];
    for container in containers {
        all.extend(container.report.as_ref().map(AsFd::as_fd));
        all.extend(container.stdin.to.as_ref().map(AsFd::as_fd));
        all.extend(container.streams.iter().filter_map(|stream| stream.fd.as_ref()).map(AsFd::as_fd));
    }
    all
}

fn save(container: &Container) -> SavedContainer {
    let number = |fd: &Option<OwnedFd>| fd.as_ref().map(AsRawFd::as_raw_fd);
    SavedContainer {
        asked: container.asked.clone(),
        pid: container.pid,
        started_at: container.started_at,
        exit: container.exit.clone(),
        report: number(&container.report),
        stdin: number(&container.stdin.to),
        streams: container
            .streams
            .iter()
            .map(|s| SavedStream { name: s.name.to_owned(), fd: number(&s.fd), pending: s.pending.0.clone() })
            .collect(),
        lost_lines: container.log.as_ref().map_or(0, LogWriter::lost_ever),
    }
}

/// Is this process one that goes on? Some with its state; a process that is only asked whether it
/// could ends here.
pub fn resume() -> io::Result<Option<Resumed>> {
    if let Some((saved, _)) = read(CHECK)? {
        // All that could fail once there is no way back.
        let able = Cgroups::detect(&saved.sandbox.cgroup_parent).is_ok();
        process::exit_child(i32::from(!able));
    }
    let Some((saved, state)) = read(RESUME)? else { return Ok(None) };
    drop(state);
    let own = |number: Option<i32>| -> io::Result<Option<OwnedFd>> {
        let Some(number) = number else { return Ok(None) };
        let fd = process::inherited(number)?;
        process::set_close_on_exec(fd.as_fd(), true)?;
        Ok(Some(fd))
    };
    let listener = own(Some(saved.listener))?.ok_or(io::ErrorKind::InvalidData)?;
    let mut containers = Vec::new();
    for c in saved.containers {
        let mut streams = Vec::new();
        for stream in c.streams {
            let name = if stream.name == "stderr" { "stderr" } else { "stdout" };
            streams.push(Stream { name, fd: own(stream.fd)?, pending: Pending(stream.pending), tees: Tees::default() });
        }
        let lives = c.exit.is_none() && c.pid > 0;
        containers.push(Container {
            pid: c.pid,
            // Still our child and not reaped: the pid is its own. Without, its cgroup ends it.
            pidfd: if lives { pidfd::open(c.pid).ok() } else { None },
            report: own(c.report)?,
            started_at: c.started_at,
            starting: None,
            ended: None,
            drain_until: 0,
            exit: c.exit,
            removing: Vec::new(),
            streams,
            stdin: Stdin::new(own(c.stdin)?, c.asked.stdin_once),
            log: c.asked.log.clone().map(|log| LogWriter::resumed(log, c.lost_lines)),
            asked: c.asked,
        });
    }
    Ok(Some(Resumed { sandbox: saved.sandbox, listener, containers }))
}

fn read(name: &str) -> io::Result<Option<(Saved, OwnedFd)>> {
    let Some(number) = std::env::var_os(name) else { return Ok(None) };
    let number = number.to_str().and_then(|n| n.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    let mut file = File::from(process::inherited(number)?);
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    Ok(Some((serde_json::from_slice(&text)?, file.into())))
}
