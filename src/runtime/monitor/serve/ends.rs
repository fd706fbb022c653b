//! Starts that have happened, and ends: every child is reaped, exits are written down, then told.
//!
//! Invariant: an exit is in its file before anyone hears of it, and after all of its output is in
//! the log.

use std::io;

use super::super::attach::Stdin;
use super::super::container::{Ends, write_exit, write_whole};
use super::super::engine;
use super::super::helper::Verb;
use super::super::peers::PeerId;
use super::super::wire::{self, Empty, Exited, Reply};
use super::Monitor;
use super::jobs::Job;
use crate::runtime::layout::{STARTED, Started};
use crate::store::records::ExitRecord;
use crate::sys::process::Ended;
use crate::sys::{clock, failpoint, process};

/// How soon what failed for want of space (an exit file) is tried again.
const RETRY_NANOS: i64 = 200_000_000;

/// A process that was started in a container, and the connection that it is for.
#[derive(Debug)]
pub(super) struct Exec {
    pub(super) pid: i32,
    pub(super) peer: PeerId,
    pub(super) started_at: i64,
}

impl Monitor {
    /// The report has ended (the program runs) or says why it does not.
    pub(super) fn check_started(&mut self, n: usize) -> io::Result<()> {
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
        let file = self.run.container(&container.asked.id).join(STARTED);
        // Only a monitor's death makes anyone read it; without it the start time is unknown then.
        let _ = serde_json::to_vec(&started)
            .map_err(io::Error::from)
            .and_then(|bytes| write_whole(&file, &bytes))
            .and_then(|()| failpoint::hit("runtime.monitor.started"));
        self.peers.answer(asker, &Reply::Started(wire::Started { started_at: at }));
        Ok(())
    }

    /// Reaps every child that has ended.
    pub(super) fn reap(&mut self) -> io::Result<()> {
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

    pub(super) fn main_ended(&mut self, pid: i32, how: Ended) {
        let Some(container) = self.containers.iter_mut().find(|c| c.pid == pid && c.ended.is_none()) else { return };
        container.note_end(how);
        if !container.asked.own_pid_namespace {
            let cgroup = container.asked.cgroup.clone();
            self.kill_cgroup(&cgroup);
        }
    }

    pub(super) fn exec_ended(&mut self, pid: i32, how: Ended) {
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

    pub(super) fn tell_rotations(&mut self) {
        let Monitor { containers, peers, .. } = self;
        for path in containers.iter_mut().filter_map(|c| c.log.as_mut()?.take_rotated()) {
            peers.tell_subscribers(&Reply::Rotated(wire::Rotated { path }));
        }
    }

    /// Exits whose output is all in the log are written down, then told.
    pub(super) fn finish_ended(&mut self) {
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
            container.stdin = Stdin::new(None, false);
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

    /// An exec'd process whose client has gone away has nobody to run for, as containerd has it.
    pub(super) fn end_lonely_execs(&mut self) {
        let Monitor { execs, peers, .. } = self;
        for exec in execs.iter().filter(|exec| peers.find(exec.peer).is_none()) {
            process::kill(exec.pid);
        }
    }
}
