//! What peers ask the monitor: each question answered, refused, or queued for a helper.
//!
//! Invariant: a question that cannot be obeyed changes nothing, and whoever asked is told why.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::super::container::{Container, Ends};
use super::super::helper::Verb;
use super::super::namespaces;
use super::super::peers::{Asker, PeerId};
use super::super::wire::{self, Empty, Failure, Frame, HelloReply, Kind, MAX_FRAME, NamespacesReply, Reply, Request, StateReply};
use super::Monitor;
use super::jobs::Job;
use crate::store::ids::ContainerId;
use crate::sys::{pidfd, process, seqpacket, tty};

impl Monitor {
    pub(super) fn hear(&mut self, id: PeerId) {
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
        let e = super::super::resume::become_program(program.as_fd(), &self.sandbox, &self.listener, &self.containers);
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
}

fn done_reply((): ()) -> Option<Reply> {
    Some(Reply::Done(Empty {}))
}
