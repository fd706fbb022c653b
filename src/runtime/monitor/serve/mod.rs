//! The monitor's loop: one thread, one poll(2), everything else follows from what is ready.
//!
//! Invariant: nothing in it waits for a client, a container or a disk that is full. Helpers run
//! one at a time, so whatever unknown child appears while one runs is that helper's doing. Every
//! child is reaped, known or not (an unreaped one inside a pid namespace keeps its PID 1 from
//! ending), and an exit is in its file before anyone hears of it.
//!
//! ```text
//! requests ──> jobs ──> ends
//!    └── each turn: hear who asks, reap, write down what ended, look at the helper, start the next
//! ```

mod ends;
mod jobs;
mod requests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::ends::Exec;
use self::jobs::{Job, Running};
use super::container::Container;
use super::peers::{PeerId, Peers};
use super::wire::{Failure, Kind};
use crate::runtime::cgroup::Cgroups;
use crate::runtime::layout::{PodRun, Sandbox};
use crate::store::ids::ContainerId;
use crate::sys::process::Ended;
use crate::sys::signal::ChildSignals;
use crate::sys::{clock, process};

/// Larger than a frame may be, so that the allocator maps it by itself (from 128 KiB up): only pages
/// that were touched cost memory.
const BUFFER: usize = 256 * 1024;

/// What poll(2) was asked about.
#[derive(Clone, Copy, Debug)]
enum Source {
    Listener,
    Children,
    Helper,
    Peer(PeerId),
    Report(usize),
    Stream(usize, usize),
    Tee(usize, usize),
    Stdin(usize),
}

pub struct Monitor {
    run: PodRun,
    sandbox: Sandbox,
    cgroups: Cgroups,
    listener: OwnedFd,
    signals: ChildSignals,
    peers: Peers,
    containers: Vec<Container>,
    execs: Vec<Exec>,
    queue: VecDeque<Job>,
    running: Option<Running>,
    /// Ends of children that nobody has announced yet; kept while a helper runs.
    unclaimed: Vec<(i32, Ended)>,
    /// Shared by all reads: frames and output.
    buffer: Vec<u8>,
    lines: Vec<u8>,
    retry_at: Option<i64>,
    quit: bool,
}

impl Monitor {
    pub fn new(
        sandbox: Sandbox,
        cgroups: Cgroups,
        listener: OwnedFd,
        signals: ChildSignals,
        containers: Vec<Container>,
    ) -> Monitor {
        Monitor {
            run: PodRun::at(sandbox.dir.clone()),
            sandbox,
            cgroups,
            listener,
            signals,
            peers: Peers::default(),
            containers,
            execs: Vec::new(),
            queue: VecDeque::new(),
            running: None,
            unclaimed: Vec::new(),
            buffer: vec![0; BUFFER],
            lines: Vec::new(),
            retry_at: None,
            quit: false,
        }
    }

    /// Until the pod is told to end. No error ends it: containers would end with it.
    pub fn serve(&mut self) {
        // Ends whose signals came before there was a descriptor for them.
        let mut reaped = self.reap();
        // Reading the host's mounts took more than is kept.
        process::trim_heap();
        while !self.quit {
            if let Err(e) = std::mem::replace(&mut reaped, Ok(())).and_then(|()| self.turn()) {
                eprintln!("coracle monitor: {e}");
                // Out of descriptors or memory: what lacks now may be there soon.
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        self.peers.drain();
    }

    fn turn(&mut self) -> io::Result<()> {
        for (source, flags) in self.wait()? {
            self.handle(source, flags)?;
        }
        self.reap()?;
        self.finish_ended();
        self.tell_rotations();
        self.check_helper()?;
        self.end_lonely_execs();
        self.start_next()
    }

    fn wait(&mut self) -> io::Result<Vec<(Source, PollFlags)>> {
        let mut sources = vec![Source::Listener, Source::Children];
        let mut fds =
            vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN), PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        let mut add = |source, fd, flags| {
            sources.push(source);
            fds.push(PollFd::new(fd, flags));
        };
        if let Some(running) = &self.running {
            add(Source::Helper, running.helper.channel.as_fd(), PollFlags::POLLIN);
        }
        for peer in self.peers.iter() {
            let write = if peer.wants_to_write() { PollFlags::POLLOUT } else { PollFlags::empty() };
            add(Source::Peer(peer.id), peer.as_fd(), PollFlags::POLLIN | write);
        }
        for (n, container) in self.containers.iter().enumerate() {
            // Before the start there is nothing to learn from the report; its end would spin.
            if let (Some(report), Some(_)) = (&container.report, &container.starting) {
                add(Source::Report(n), report.as_fd(), PollFlags::POLLIN);
            }
            for (s, stream) in container.streams.iter().enumerate() {
                if let Some(fd) = &stream.fd {
                    add(Source::Stream(n, s), fd.as_fd(), PollFlags::POLLIN);
                }
                for tee in stream.tees.iter() {
                    add(Source::Tee(n, s), tee.as_fd(), PollFlags::empty());
                }
            }
            let stdin = &container.stdin;
            if let (Some(from), true) = (&stdin.from, stdin.wants_to_read()) {
                add(Source::Stdin(n), from.as_fd(), PollFlags::POLLIN);
            }
            if let (Some(to), true) = (&stdin.to, stdin.wants_to_write()) {
                add(Source::Stdin(n), to.as_fd(), PollFlags::POLLOUT);
            }
        }
        match poll(&mut fds, self.timeout()) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let ready = fds.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        Ok(sources.into_iter().zip(ready).filter(|(_, flags)| !flags.is_empty()).collect())
    }

    /// Until the next thing that happens by itself.
    fn timeout(&self) -> PollTimeout {
        let drains = self.containers.iter().filter(|c| c.ended.is_some() && c.exit.is_none()).map(|c| c.drain_until);
        let next = drains.chain(self.running.as_ref().map(|r| r.deadline)).chain(self.retry_at).min();
        let Some(next) = next else { return PollTimeout::NONE };
        // Rounded up, so that it is over when we wake.
        let milliseconds = (next - clock::boot_nanos()).max(0) / 1_000_000 + 1;
        i32::try_from(milliseconds).ok().and_then(|ms| PollTimeout::try_from(ms).ok()).unwrap_or(PollTimeout::MAX)
    }

    fn handle(&mut self, source: Source, flags: PollFlags) -> io::Result<()> {
        match source {
            Source::Listener => self.peers.accept(self.listener.as_fd())?,
            Source::Children => self.signals.clear()?,
            // After all that is ready, in `check_helper`.
            Source::Helper => {}
            Source::Peer(id) => {
                if flags.contains(PollFlags::POLLOUT) {
                    self.peers.flush(id);
                }
                if flags.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
                    self.hear(id);
                }
            }
            Source::Report(n) => self.check_started(n)?,
            Source::Stream(n, s) => {
                if let Some(container) = self.containers.get_mut(n) {
                    container.pump(s, &mut self.buffer, &mut self.lines);
                }
            }
            Source::Tee(n, s) => {
                if let Some(stream) = self.containers.get_mut(n).and_then(|c| c.streams.get_mut(s)) {
                    stream.tees.prune();
                }
            }
            Source::Stdin(n) => {
                if let Some(container) = self.containers.get_mut(n) {
                    container.stdin.pump(&mut self.buffer);
                }
            }
        }
        Ok(())
    }

    // ---- what all of it needs

    fn find(&mut self, id: &ContainerId) -> Result<&mut Container, Failure> {
        let found = self.containers.iter_mut().find(|container| container.asked.id == *id);
        found.ok_or_else(|| Failure::new(Kind::NotFound, format!("there is no container {id}")))
    }

    fn forget(&mut self, id: &ContainerId) {
        self.containers.retain(|container| container.asked.id != *id);
        // Scratch that is not there any more is what is wanted; /run has no other errors worth a word.
        let _ = std::fs::remove_dir_all(self.run.scratch().join(id.as_str()));
    }

    fn is_known(&self, pid: i32) -> bool {
        self.containers.iter().any(|c| c.pid == pid)
            || self.execs.iter().any(|e| e.pid == pid)
            || self.running.as_ref().is_some_and(|r| r.helper.pid == pid)
    }

    fn kill_cgroup(&self, cgroup: &str) {
        if cgroup.is_empty() {
            return;
        }
        // A cgroup that is not there has no processes; anything else, the agent's own kill meets too.
        let _ = self.cgroups.kill(cgroup);
    }
}
