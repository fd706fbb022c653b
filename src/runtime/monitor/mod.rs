//! `coracle monitor <namespace>/<pod>`: the parent of all of a pod's processes.
//!
//! One a pod, one thread, an exec of our own binary. It owns the stdio pipes, writes the logs and
//! the exit files, and outlives the agent: SIGTERM, SIGINT and SIGHUP change nothing. It takes no
//! decision: what runs, and whether it runs again, the agent says over its socket.
//!
//! Invariant: it never needs the agent. What it knows and the agent must learn lies in its run
//! directory (`exit/<id>`) before it is told.

mod attach;
pub mod client;
mod container;
mod engine;
mod filter;
mod helper;
pub mod log_writer;
mod namespaces;
mod peers;
mod resume;
mod serve;
pub mod wire;

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use super::cgroup::Cgroups;
use super::layout::{SANDBOX, SOCKET, Sandbox};
use crate::sys::{file, process, seqpacket, signal};

/// Why a monitor could not begin.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    #[error("failed to {op}")]
    Io {
        op: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("sandbox.json")]
    Sandbox(#[source] serde_json::Error),
    #[error("cgroups")]
    Cgroups(#[source] super::cgroup::CgroupError),
    #[error("the agent that started this monitor is gone")]
    NoAgent,
}

fn io(op: &'static str) -> impl FnOnce(io::Error) -> MonitorError {
    move |source| MonitorError::Io { op, source }
}

/// Runs in the working directory that is the pod's run directory. stdin: the agent's go-ahead,
/// given once it has written down who we are; stdout: where we say that the socket is there.
pub fn run() -> Result<(), MonitorError> {
    process::set_name(c"coracle monitor").map_err(io("set the process's name"))?;
    signal::ignore_what_ends_us().map_err(io("ignore signals"))?;
    if let Some(resume::Resumed { sandbox, listener, containers }) = resume::resume().map_err(io("go on as a newer program"))? {
        let signals = signal::ChildSignals::open().map_err(io("open signalfd"))?;
        let cgroups = Cgroups::detect(&sandbox.cgroup_parent).map_err(MonitorError::Cgroups)?;
        serve::Monitor::new(sandbox, cgroups, listener, signals, containers).serve();
        return Ok(());
    }
    process::close_all_but(&[]).map_err(io("close inherited descriptors"))?;
    let mut go = [0u8; 1];
    if io::stdin().read(&mut go).map_err(io("hear the agent"))? == 0 {
        return Err(MonitorError::NoAgent);
    }
    process::new_session().map_err(io("begin a session"))?;
    process::become_subreaper().map_err(io("become a subreaper"))?;
    process::protect_from_oom(-999).map_err(io("set oom_score_adj"))?;
    let signals = signal::ChildSignals::open().map_err(io("open signalfd"))?;

    let dir = file::open_dir_path(Path::new(".")).map_err(io("open the run directory"))?;
    let text = std::fs::read(SANDBOX).map_err(io("read sandbox.json"))?;
    let sandbox: Sandbox = serde_json::from_slice(&text).map_err(MonitorError::Sandbox)?;
    drop(text);
    std::env::set_current_dir("/").map_err(io("leave the run directory"))?;
    let cgroups = Cgroups::detect(&sandbox.cgroup_parent).map_err(MonitorError::Cgroups)?;
    cgroups.join(&sandbox.monitor_cgroup).map_err(MonitorError::Cgroups)?;
    let listener = seqpacket::listen(dir.as_fd(), SOCKET, 0o600).map_err(io("listen"))?;
    drop(dir);

    io::stdout().write_all(b"+").and_then(|()| io::stdout().flush()).map_err(io("tell the agent"))?;
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(io("open /dev/null"))?;
    for number in [0, 1] {
        process::replace_stdio(null.as_fd(), number).map_err(io("let go of the agent's pipes"))?;
    }
    drop(null);
    serve::Monitor::new(sandbox, cgroups, listener, signals, Vec::new()).serve();
    Ok(())
}
