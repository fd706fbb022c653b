//! Calls of libcontainer: they wait for their turn, run in a helper, and are undone where they fail.
//!
//! Invariant: one at a time. What a failed one has left in the kernel (processes, files) is gone
//! before anybody hears of the failure.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use super::super::container::Ends;
use super::super::engine;
use super::super::helper::{self, Answer, Call, Helper, Verb};
use super::super::peers::Asker;
use super::super::wire::{Created, Empty, Failure, Kind, Reply};
use super::Monitor;
use super::ends::Exec;
use crate::store::ids::ContainerId;
use crate::sys::process::Ended;
use crate::sys::{clock, failpoint, pidfd, process};

/// A call that takes longer is given up: its helper is killed and its work undone.
const HELPER_NANOS: i64 = 120_000_000_000;

/// A call that waits for its turn, or is running.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) asker: Asker,
    pub(super) id: ContainerId,
    pub(super) verb: Verb,
    pub(super) tty: bool,
    pub(super) ends: Ends,
    /// Ours, of the report pipe.
    pub(super) report: Option<OwnedFd>,
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) helper: Helper,
    pub(super) job: Job,
    pub(super) deadline: i64,
    /// Its process has been reaped.
    pub(super) ended: bool,
}

impl Monitor {
    pub(super) fn start_next(&mut self) -> io::Result<()> {
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
                cgroups: self.cgroups.clone(),
                cgroup: self.find(&job.id).map(|c| c.asked.cgroup.clone()).unwrap_or_default(),
                filters: self.run.filters(),
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

    pub(super) fn check_helper(&mut self) -> io::Result<()> {
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
    pub(super) fn job_failed(&mut self, job: Job, failure: Failure) -> io::Result<()> {
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
    fn end_noted_pid(&mut self, file: &Path) {
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

    fn claim(&mut self, pid: i32) -> Option<Ended> {
        let at = self.unclaimed.iter().position(|(p, _)| *p == pid)?;
        Some(self.unclaimed.swap_remove(at).1)
    }
}
