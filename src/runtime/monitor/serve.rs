//! The monitor's loop: one thread, one poll(2), everything else follows from what is ready.
//!
//! Invariant: nothing in it waits for a client, a container or a disk that is full. Helpers run
//! one at a time, so whatever unknown child appears while one runs is that helper's doing. Every
//! child is reaped, known or not (an unreaped one inside a pid namespace keeps its PID 1 from
//! ending), and an exit is in its file before anyone hears of it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::container::{Container, Ends, write_exit, write_whole};
use super::helper::{self, Answer, Call, Helper, Verb};
use super::peers::{Asker, PeerId, Peers};
use super::wire::{
    self, Created, Empty, Exited, Failure, Frame, HelloReply, Kind, MAX_FRAME, NamespacesReply, Reply, Request, StateReply,
};
use super::{engine, namespaces};
use crate::runtime::cgroup::Cgroups;
use crate::runtime::layout::{PodRun, Sandbox, Started};
use crate::store::ids::ContainerId;
use crate::store::records::ExitRecord;
use crate::sys::process::Ended;
use crate::sys::signal::ChildSignals;
use crate::sys::{clock, failpoint, pidfd, process, seqpacket, tty};

/// A libcontainer call that takes longer is given up: its helper is killed and its work undone.
const HELPER_NANOS: i64 = 120_000_000_000;
/// Larger than a frame may be, so that the allocator maps it by itself (from 128 KiB up): only pages
/// that were touched cost memory.
const BUFFER: usize = 256 * 1024;
/// How soon what failed for want of space (an exit file) is tried again.
const RETRY_NANOS: i64 = 200_000_000;

/// A process that was started in a container, and the connection that it is for.
#[derive(Debug)]
struct Exec {
    pid: i32,
    peer: PeerId,
    started_at: i64,
}

/// A call that waits for its turn, or is running.
#[derive(Debug)]
struct Job {
    asker: Asker,
    id: ContainerId,
    verb: Verb,
    tty: bool,
    ends: Ends,
    /// Ours, of the report pipe.
    report: Option<OwnedFd>,
}

#[derive(Debug)]
struct Running {
    helper: Helper,
    job: Job,
    deadline: i64,
    /// Its process has been reaped.
    ended: bool,
}

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

    // ---- what peers ask

    fn hear(&mut self, id: PeerId) {
        let Some(peer) = self.peers.find(id) else { return };
        // A connection that fails is a connection that is gone.
        let frame = self.buffer.get_mut(..MAX_FRAME).unwrap_or_default();
        let received = seqpacket::receive(peer.as_fd(), frame).unwrap_or(seqpacket::Received::Closed);
        match received {
            seqpacket::Received::Nothing => {}
            seqpacket::Received::Closed => self.peers.drop_peer(id),
            seqpacket::Received::TooLong => {
                let failure = Failure::new(Kind::BadRequest, format!("a frame is longer than {MAX_FRAME} bytes"));
                self.peers.fail(Asker { peer: id, request: 0 }, failure);
            }
            seqpacket::Received::Message { len, fds } => {
                let bytes = std::mem::take(&mut self.buffer);
                let parsed = Frame::parse(bytes.get(..len).unwrap_or_default());
                let asker = Asker { peer: id, request: parsed.as_ref().map_or(0, |frame| frame.id) };
                match parsed.and_then(|frame| Request::decode(&frame)) {
                    Ok(request) => self.obey(asker, request, fds),
                    Err(e) => self.peers.fail(asker, e.into()),
                }
                self.buffer = bytes;
            }
        }
    }

    /// An exec'd process whose client has gone away has nobody to run for, as containerd has it.
    fn end_lonely_execs(&mut self) {
        let Monitor { execs, peers, .. } = self;
        for exec in execs.iter().filter(|exec| peers.find(exec.peer).is_none()) {
            process::kill(exec.pid);
        }
    }

    fn obey(&mut self, asker: Asker, request: Request, fds: Vec<OwnedFd>) {
        let done = match request {
            Request::Hello(_) => Ok(Some(Reply::Hello(HelloReply {
                release: wire::RELEASE.to_owned(),
                pod: self.sandbox.uid.to_string(),
                pid: std::process::id() as i32,
            }))),
            Request::Namespaces(Empty {}) => match namespaces::make(&self.sandbox) {
                Ok((kinds, fds)) => {
                    self.peers.send(asker.peer, asker.request, &Reply::Namespaces(NamespacesReply { kinds }), fds);
                    Ok(None)
                }
                Err(failure) => Err(failure),
            },
            Request::Create(create) => self.ask_create(asker, create, fds).map(|()| None),
            Request::Start(wire::Which { id }) => self.ask_start(asker, id).map(|()| None),
            Request::Signal(wire::Signal { id, signal }) => self.send_signal(&id, signal).map(done_reply),
            Request::Remove(wire::Which { id }) => self.ask_remove(asker, &id),
            Request::State(Empty {}) => Ok(Some(Reply::State(self.state()))),
            Request::Subscribe(Empty {}) => {
                if let Some(peer) = self.peers.find(asker.peer) {
                    peer.subscribed = true;
                }
                Ok(done_reply(()))
            }
            Request::Exec(exec) => self.ask_exec(asker, exec, fds).map(|()| None),
            Request::SignalExec(wire::SignalExec { signal }) => self.signal_exec(asker.peer, signal).map(done_reply),
            Request::Attach(attach) => self.attach(&attach, fds).map(done_reply),
            Request::Resize(wire::Resize { id, rows, columns }) => self.resize(&id, rows, columns).map(done_reply),
            Request::Quit(Empty {}) => self.ask_quit().map(done_reply),
            Request::Reexec(Empty {}) => Err(self.become_program(fds)),
        };
        match done {
            Ok(Some(reply)) => self.peers.answer(asker, &reply),
            Ok(None) => {}
            Err(failure) => self.peers.fail(asker, failure),
        }
    }

    fn find(&mut self, id: &ContainerId) -> Result<&mut Container, Failure> {
        let found = self.containers.iter_mut().find(|container| container.asked.id == *id);
        found.ok_or_else(|| Failure::new(Kind::NotFound, format!("there is no container {id}")))
    }

    fn state(&self) -> StateReply {
        let containers = self.containers.iter().filter(|c| c.pid != 0).map(|c| wire::Container {
            id: c.asked.id.clone(),
            name: c.asked.name.clone(),
            attempt: c.asked.attempt,
            pid: c.pid,
            started_at: c.started_at,
            exit: c.exit.clone(),
            lost_lines: c.log.as_ref().map_or(0, |log| log.lost_ever()),
        });
        StateReply { containers: containers.collect() }
    }

    fn ask_create(&mut self, asker: Asker, create: wire::Create, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        if self.find(&create.id).is_ok() {
            return Err(Failure::new(Kind::WrongState, format!("container {} is there already", create.id)));
        }
        let io = |e: io::Error| Failure::new(Kind::Io, format!("streams of the container: {e}"));
        let (id, tty) = (create.id.clone(), create.tty);
        let (container, ends) = Container::prepare(create, fds).map_err(io)?;
        self.containers.push(container);
        self.queue.push_back(Job { asker, id, verb: Verb::Create, tty, ends, report: None });
        Ok(())
    }

    fn ask_start(&mut self, asker: Asker, id: ContainerId) -> Result<(), Failure> {
        let container = self.find(&id)?;
        if !container.lives() || container.started_at != 0 || container.starting.is_some() {
            return Err(Failure::new(Kind::WrongState, format!("container {id} is not waiting for its start")));
        }
        self.queue.push_back(Job { asker, id, verb: Verb::Start, tty: false, ends: Ends::default(), report: None });
        Ok(())
    }

    fn ask_exec(&mut self, asker: Asker, exec: wire::Exec, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        // A name within the container's run directory, never a path.
        if exec.process.contains('/') || !exec.process.ends_with(".json") || exec.process.starts_with('.') {
            return Err(Failure::new(Kind::BadRequest, "process is not a name of a .json file"));
        }
        let file = self.run.container(&exec.id).join(&exec.process);
        let refuse = |failure| {
            // It holds the environment; refused or run, it does not stay. Absent is as good.
            let _ = std::fs::remove_file(&file);
            Err(failure)
        };
        let container = match self.find(&exec.id) {
            Ok(container) => container,
            Err(failure) => return refuse(failure),
        };
        if !container.lives() || container.started_at == 0 {
            return refuse(Failure::new(Kind::WrongState, format!("container {} does not run", exec.id)));
        }
        let (ours, theirs) = match process::pipe() {
            Ok(pipe) => pipe,
            Err(e) => return refuse(Failure::new(Kind::Io, format!("report pipe: {e}"))),
        };
        let mut fds = fds.into_iter();
        let mut ends = Ends { report: Some(theirs), ..Ends::default() };
        if exec.stdin && !exec.tty {
            ends.stdin = fds.next();
        }
        if !exec.tty {
            (ends.stdout, ends.stderr) = (fds.next(), fds.next());
            if ends.stdout.is_none() || ends.stderr.is_none() {
                return refuse(Failure::new(Kind::BadRequest, "exec without its streams"));
            }
        }
        let verb = Verb::Exec(exec.process);
        self.queue.push_back(Job { asker, id: exec.id, verb, tty: exec.tty, ends, report: Some(ours) });
        Ok(())
    }

    fn send_signal(&mut self, id: &ContainerId, signal: i32) -> Result<(), Failure> {
        let container = self.find(id)?;
        match &container.pidfd {
            Some(fd) if container.ended.is_none() => match pidfd::signal(fd.as_fd(), signal) {
                Ok(_) => Ok(()),
                Err(e) => Err(Failure::new(Kind::BadRequest, format!("signal {signal}: {e}"))),
            },
            None if container.lives() => Err(Failure::new(Kind::Io, "no descriptor was free for the process")),
            _ => Ok(()),
        }
    }

    /// The pid is a child's that nobody has reaped: it cannot be another's.
    fn signal_exec(&mut self, peer: PeerId, signal: i32) -> Result<(), Failure> {
        let Some(exec) = self.execs.iter().find(|exec| exec.peer == peer) else { return Ok(()) };
        let sent = pidfd::open(exec.pid).and_then(|fd| pidfd::signal(fd.as_fd(), signal));
        sent.map(|_| ()).map_err(|e| Failure::new(Kind::BadRequest, format!("signal {signal}: {e}")))
    }

    /// Answered at once where it has ended; else killed, and answered by `finish_ended`.
    fn ask_remove(&mut self, asker: Asker, id: &ContainerId) -> Result<Option<Reply>, Failure> {
        let Ok(container) = self.find(id) else { return Ok(done_reply(())) };
        if container.exit.is_some() {
            self.forget(id);
            return Ok(done_reply(()));
        }
        container.removing.push(asker);
        let (cgroup, pid) = (container.asked.cgroup.clone(), if container.lives() { container.pid } else { 0 });
        if pid != 0 {
            process::kill(pid);
            self.kill_cgroup(&cgroup);
        }
        Ok(None)
    }

    fn forget(&mut self, id: &ContainerId) {
        self.containers.retain(|container| container.asked.id != *id);
        // Scratch that is not there any more is what is wanted; /run has no other errors worth a word.
        let _ = std::fs::remove_dir_all(self.run.scratch().join(id.as_str()));
    }

    fn attach(&mut self, attach: &wire::Attach, fds: Vec<OwnedFd>) -> Result<(), Failure> {
        let container = self.find(&attach.id)?;
        if !container.lives() {
            return Err(Failure::new(Kind::WrongState, format!("container {} does not run", attach.id)));
        }
        let io = |e: io::Error| Failure::new(Kind::Io, format!("attach: {e}"));
        let mut fds = fds.into_iter();
        if attach.stdin {
            let from = fds.next().ok_or_else(|| Failure::new(Kind::BadRequest, "attach without its stdin"))?;
            if !container.stdin.attach(from).map_err(io)? {
                let why = "the container has no stdin, or somebody else is attached to it";
                return Err(Failure::new(Kind::WrongState, why));
            }
        }
        for (stream, to) in container.streams.iter_mut().zip(fds) {
            if !stream.tees.add(to).map_err(io)? {
                return Err(Failure::new(Kind::Io, "too many clients are attached to the container"));
            }
        }
        Ok(())
    }

    /// Returns only why not.
    fn become_program(&mut self, fds: Vec<OwnedFd>) -> Failure {
        let Some(program) = fds.into_iter().next() else {
            return Failure::new(Kind::BadRequest, "reexec without a program");
        };
        let busy = |c: &Container| {
            let attached = c.stdin.from.is_some() || c.stdin.wants_to_write() || c.streams.iter().any(|s| !s.tees.is_empty());
            attached || c.pid == 0 || c.starting.is_some() || !c.removing.is_empty() || (c.ended.is_some() && c.exit.is_none())
        };
        let helpers = self.running.is_some() || !self.queue.is_empty() || !self.execs.is_empty();
        if helpers || self.containers.iter().any(busy) {
            return Failure::new(Kind::WrongState, "the monitor is busy");
        }
        let e = super::resume::become_program(program.as_fd(), &self.sandbox, &self.listener, &self.containers);
        Failure::new(Kind::Io, format!("becoming the newer program: {e}"))
    }

    fn resize(&mut self, id: &ContainerId, rows: u16, columns: u16) -> Result<(), Failure> {
        let container = self.find(id)?;
        let terminal = container.streams.first().and_then(|stream| stream.fd.as_ref()).filter(|_| container.asked.tty);
        let terminal = terminal.ok_or_else(|| Failure::new(Kind::WrongState, format!("container {id} has no terminal")))?;
        tty::set_size(terminal.as_fd(), rows, columns).map_err(|e| Failure::new(Kind::Io, format!("resize: {e}")))
    }

    fn ask_quit(&mut self) -> Result<(), Failure> {
        if self.containers.iter().any(|c| c.exit.is_none()) || !self.execs.is_empty() || self.running.is_some() {
            return Err(Failure::new(Kind::WrongState, "processes of the pod still live"));
        }
        self.quit = true;
        Ok(())
    }

    // ---- helpers

    fn start_next(&mut self) -> io::Result<()> {
        while self.running.is_none() {
            let Some(mut job) = self.queue.pop_front() else { return Ok(()) };
            if let Some(failure) = self.outdated(&job) {
                self.peers.fail(job.asker, failure);
                continue;
            }
            let ends = std::mem::take(&mut job.ends);
            let call = Call {
                verb: job.verb.clone(),
                id: job.id.to_string(),
                dir: self.run.container(&job.id),
                state: self.run.scratch(),
                stdin: ends.stdin,
                stdout: ends.stdout,
                stderr: ends.stderr,
                tty: job.tty,
                report: ends.report,
            };
            self.unclaimed.clear();
            match helper::spawn(call) {
                Ok(helper) => {
                    let deadline = clock::boot_nanos() + HELPER_NANOS;
                    self.running = Some(Running { helper, job, deadline, ended: false });
                }
                Err(e) => {
                    let failure = Failure::new(Kind::Io, format!("fork: {e}"));
                    self.job_failed(job, failure)?;
                }
            }
        }
        Ok(())
    }

    /// Why a call that has waited must not be made any more.
    fn outdated(&mut self, job: &Job) -> Option<Failure> {
        let dir = self.run.container(&job.id);
        let alive = self.find(&job.id).is_ok_and(|c| c.lives());
        match &job.verb {
            Verb::Create => None,
            Verb::Start if alive => None,
            Verb::Exec(_) if alive && self.peers.find(job.asker.peer).is_some() => None,
            verb => {
                if let Verb::Exec(process) = verb {
                    // The environment is in it.
                    let _ = std::fs::remove_file(dir.join(process));
                }
                Some(Failure::new(Kind::WrongState, format!("container {} has ended", job.id)))
            }
        }
    }

    fn check_helper(&mut self) -> io::Result<()> {
        let Some(running) = &self.running else { return Ok(()) };
        let answer = helper::answer(&running.helper).unwrap_or_else(|e| {
            let words = format!("the helper's channel: {e}");
            Some((Answer::Failed(Failure::new(Kind::HelperDied, words)), Vec::new()))
        });
        let overdue = clock::boot_nanos() >= running.deadline;
        let answer = match answer {
            Some(answer) => answer,
            // What it started may still hold its channel open: its own end is what counts.
            None if running.ended => (Answer::Failed(Failure::new(Kind::HelperDied, "the helper process died")), Vec::new()),
            None if overdue => {
                let seconds = HELPER_NANOS / 1_000_000_000;
                (Answer::Failed(Failure::new(Kind::HelperDied, format!("no end after {seconds} s"))), Vec::new())
            }
            None => return Ok(()),
        };
        let Some(running) = self.running.take() else { return Ok(()) };
        if !running.ended && matches!(&answer.0, Answer::Failed(failure) if failure.kind == Kind::HelperDied) {
            process::kill(running.helper.pid);
        }
        match answer {
            (Answer::Done { pid }, fds) => self.job_done(running.job, pid, fds.into_iter().next()),
            (Answer::Failed(failure), _) => self.job_failed(running.job, failure),
        }
    }

    fn job_done(&mut self, job: Job, pid: i32, pty: Option<OwnedFd>) -> io::Result<()> {
        match job.verb {
            Verb::Create => {
                let early = self.claim(pid);
                let Ok(container) = self.find(&job.id) else { return Ok(()) };
                container.pid = pid;
                // Nothing reaps it but us, so the pid is its own still; only a lack of descriptors
                // fails here, and a container without one is ended by its cgroup.
                container.pidfd = pidfd::open(pid).ok();
                let (to_asker, ours) = if container.asked.own_streams { (pty, None) } else { (None, pty) };
                let terminal = ours.map_or(Ok(()), |pty| container.take_terminal(pty));
                let unwanted = !container.removing.is_empty();
                if unwanted && early.is_none() {
                    process::kill(pid);
                }
                match terminal.and_then(|()| failpoint::hit("runtime.monitor.created")) {
                    Ok(()) => {
                        let reply = Reply::Created(Created { pid });
                        self.peers.send(job.asker.peer, job.asker.request, &reply, to_asker.into_iter().collect());
                    }
                    Err(e) => {
                        return self.job_failed(job, Failure::new(Kind::Refused, format!("taking over the container: {e}")));
                    }
                }
                if let Some(how) = early {
                    self.main_ended(pid, how);
                }
            }
            Verb::Start => {
                // Runs once the report closes.
                if let Ok(container) = self.find(&job.id) {
                    container.starting = Some(job.asker);
                }
            }
            Verb::Exec(process) => {
                self.clear_exec(&job.id, &process);
                let early = self.claim(pid);
                let started_at = clock::wall_nanos();
                self.execs.push(Exec { pid, peer: job.asker.peer, started_at });
                self.peers.send(job.asker.peer, job.asker.request, &Reply::Execed(Created { pid }), pty.into_iter().collect());
                if let Some(how) = early {
                    self.exec_ended(pid, how);
                }
            }
        }
        Ok(())
    }

    /// Undoes what a failed call has left in the kernel, then says why it failed.
    fn job_failed(&mut self, job: Job, failure: Failure) -> io::Result<()> {
        let report = match job.verb {
            Verb::Create | Verb::Start => self.find(&job.id).ok().and_then(|c| c.report.take()),
            Verb::Exec(_) => job.report,
        };
        // The program's own word on it is the better one.
        let words = match &report {
            Some(pipe) => {
                process::set_nonblocking(pipe.as_fd())?;
                engine::read_report(pipe)?
            }
            None => None,
        };
        let failure = words.unwrap_or(failure);
        let dir = self.run.container(&job.id);
        if let Verb::Exec(process) = &job.verb {
            self.end_noted_pid(&helper::pid_file(&dir, &job.verb));
            self.clear_exec(&job.id, process);
            self.end_strays()?;
        } else {
            let cgroup = self.find(&job.id).map(|c| c.asked.cgroup.clone()).unwrap_or_default();
            self.kill_cgroup(&cgroup);
            self.end_noted_pid(&helper::pid_file(&dir, &Verb::Create));
            self.end_strays()?;
            let waiting = self.find(&job.id).map(|c| std::mem::take(&mut c.removing)).unwrap_or_default();
            self.forget(&job.id);
            for asker in waiting {
                self.peers.answer(asker, &Reply::Done(Empty {}));
            }
        }
        self.peers.fail(job.asker, failure);
        Ok(())
    }

    /// The environment is in it; and libcontainer leaves its sockets behind.
    fn clear_exec(&mut self, id: &ContainerId, process: &str) {
        let dir = self.run.container(id);
        let mut files = vec![dir.join(process), dir.join("exec.pid")];
        if let Ok(entries) = std::fs::read_dir(self.run.scratch().join(id.as_str())) {
            files.extend(entries.filter_map(Result::ok).filter_map(|entry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|name| name.starts_with("tenant-")).then(|| entry.path())
            }));
        }
        for file in files {
            // Not there is what is wanted.
            let _ = std::fs::remove_file(file);
        }
    }

    /// A process that a dead helper had made, if it is a child of ours that we do not know.
    fn end_noted_pid(&mut self, file: &std::path::Path) {
        let noted = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<i32>().ok());
        if let Some(pid) = noted
            && !self.is_known(pid)
            && process::children().is_ok_and(|children| children.contains(&pid))
        {
            process::kill(pid);
        }
        // Not there is what is wanted.
        let _ = std::fs::remove_file(file);
    }

    /// Ends libcontainer's in-between processes, which nobody will come back for.
    fn end_strays(&mut self) -> io::Result<()> {
        for _ in 0..200 {
            self.reap()?;
            let strays: Vec<i32> = process::children()?
                .into_iter()
                .filter(|pid| !self.is_known(*pid))
                .filter(|pid| {
                    process::name_of(*pid)
                        .is_some_and(|name| name.starts_with("youki:[") || name.as_bytes() == helper::NAME.to_bytes())
                })
                .collect();
            if strays.is_empty() {
                return Ok(());
            }
            strays.into_iter().for_each(process::kill);
            // They need a moment to end; a dying one may just have cloned the next.
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // One that cannot be killed (it waits for a disk) is reaped whenever it ends.
        Ok(())
    }

    fn is_known(&self, pid: i32) -> bool {
        self.containers.iter().any(|c| c.pid == pid)
            || self.execs.iter().any(|e| e.pid == pid)
            || self.running.as_ref().is_some_and(|r| r.helper.pid == pid)
    }

    fn claim(&mut self, pid: i32) -> Option<Ended> {
        let at = self.unclaimed.iter().position(|(p, _)| *p == pid)?;
        Some(self.unclaimed.swap_remove(at).1)
    }

    fn kill_cgroup(&self, cgroup: &str) {
        if cgroup.is_empty() {
            return;
        }
        // A cgroup that is not there has no processes; anything else, the agent's own kill meets too.
        let _ = self.cgroups.kill(cgroup);
    }

    // ---- starts and ends

    /// The report has ended (the program runs) or says why it does not.
    fn check_started(&mut self, n: usize) -> io::Result<()> {
        let Some(container) = self.containers.get_mut(n) else { return Ok(()) };
        let (Some(report), Some(asker)) = (container.report.take(), container.starting.take()) else { return Ok(()) };
        if let Some(failure) = engine::read_report(&report)? {
            let job =
                Job { asker, id: container.asked.id.clone(), verb: Verb::Start, tty: false, ends: Ends::default(), report: None };
            return self.job_failed(job, failure);
        }
        // One that was quick has ended before anybody looked.
        let at = container.ended.map_or_else(clock::wall_nanos, |(_, ended)| ended);
        container.started_at = at;
        let started = Started { pid: container.pid, at };
        let file = self.run.container(&container.asked.id).join(crate::runtime::layout::STARTED);
        // Only a monitor's death makes anyone read it; without it the start time is unknown then.
        let _ = serde_json::to_vec(&started)
            .map_err(io::Error::from)
            .and_then(|bytes| write_whole(&file, &bytes))
            .and_then(|()| failpoint::hit("runtime.monitor.started"));
        self.peers.answer(asker, &Reply::Started(wire::Started { started_at: at }));
        Ok(())
    }

    /// Reaps every child that has ended.
    fn reap(&mut self) -> io::Result<()> {
        while let Some((pid, how)) = process::reap_any()? {
            if let Some(running) = self.running.as_mut().filter(|r| r.helper.pid == pid) {
                running.ended = true;
            } else if self.containers.iter().any(|c| c.pid == pid && c.ended.is_none()) {
                self.main_ended(pid, how);
            } else if self.execs.iter().any(|e| e.pid == pid) {
                self.exec_ended(pid, how);
            } else if self.running.is_some() {
                self.unclaimed.push((pid, how));
            }
        }
        Ok(())
    }

    fn main_ended(&mut self, pid: i32, how: Ended) {
        let Some(container) = self.containers.iter_mut().find(|c| c.pid == pid && c.ended.is_none()) else { return };
        container.note_end(how);
        if !container.asked.own_pid_namespace {
            let cgroup = container.asked.cgroup.clone();
            self.kill_cgroup(&cgroup);
        }
    }

    fn exec_ended(&mut self, pid: i32, how: Ended) {
        let Some(at) = self.execs.iter().position(|e| e.pid == pid) else { return };
        let exec = self.execs.swap_remove(at);
        let (code, signal) = match how {
            Ended::Exited(code) => (code, None),
            Ended::Signaled(signal) => (128 + signal, Some(signal)),
        };
        let record =
            ExitRecord { code, signal, started_at: exec.started_at, finished_at: clock::wall_nanos(), ..ExitRecord::default() };
        self.peers.send(exec.peer, 0, &Reply::ExecExited(record), Vec::new());
    }

    fn tell_rotations(&mut self) {
        let Monitor { containers, peers, .. } = self;
        for path in containers.iter_mut().filter_map(|c| c.log.as_mut()?.take_rotated()) {
            peers.tell_subscribers(&Reply::Rotated(wire::Rotated { path }));
        }
    }

    /// Exits whose output is all in the log are written down, then told.
    fn finish_ended(&mut self) {
        self.retry_at = None;
        let mut removed = Vec::new();
        let mut trim = false;
        for n in 0..self.containers.len() {
            let Some(container) = self.containers.get_mut(n).filter(|c| c.ended.is_some() && c.exit.is_none()) else { continue };
            // Its start is not answered yet: first that, then the end.
            let starts = self.running.as_ref().is_some_and(|r| r.job.verb == Verb::Start && r.job.id == container.asked.id);
            if starts || (container.starting.is_some() && container.report.is_some()) {
                continue;
            }
            if !container.drained(&mut self.buffer, &mut self.lines) {
                continue;
            }
            // No memory controller: nobody was killed for it.
            let oom = self.cgroups.oom_kills(&container.asked.cgroup).unwrap_or(0) > 0;
            let Some(record) = container.record(oom) else { continue };
            let written = failpoint::hit("runtime.monitor.exit").and_then(|()| write_exit(&self.run, container, &record));
            if written.is_err() {
                self.retry_at = Some(clock::boot_nanos() + RETRY_NANOS);
                continue;
            }
            container.exit = Some(record.clone());
            trim = true;
            container.stdin = super::attach::Stdin::new(None, false);
            let id = container.asked.id.clone();
            let waiting = std::mem::take(&mut container.removing);
            self.peers.tell_subscribers(&Reply::Exited(Exited { id: id.clone(), exit: record }));
            if !waiting.is_empty() {
                removed.push((id, waiting));
            }
        }
        if trim {
            self.lines = Vec::new();
            process::trim_heap();
        }
        for (id, waiting) in removed {
            self.forget(&id);
            for asker in waiting {
                self.peers.answer(asker, &Reply::Done(Empty {}));
            }
        }
    }
}

fn done_reply((): ()) -> Option<Reply> {
    Some(Reply::Done(Empty {}))
}
