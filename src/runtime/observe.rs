//! What lives of the sandboxes, asked of kernel, monitors and run directories; what is half made
//! or half dead is brought to one of two states: alive, or ended with every exit written down.
//!
//! Invariant: a monitor counts as dead only when its process is gone. One that does not answer
//! keeps its pod, and is described by what it last wrote down.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::RuntimeError;
use super::apply::{
    Inner, META, MONITOR, Monitor, QUICK, containers_of, gone_is_fine, pins, pods_of, read_json, read_sandbox, write_json,
};
use super::layout::{Meta, PodRun, SANDBOX, STARTED, Sandbox, Started};
use super::model::{ContainerPhase, ContainerState, Pins, SandboxState};
use super::monitor::wire::{Empty, Reply, Request, StateReply};
use crate::store::effects::Effect;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::ExitRecord;
use crate::sys::chain::chain;
use crate::sys::{clock, failpoint, pidfd};

/// So many monitors are asked at once when an agent starts.
const ASKERS: usize = 8;
const STACK: usize = 256 << 10;

impl Inner {
    pub fn recover(&self) -> Result<Vec<SandboxState>, RuntimeError> {
        let dir = self.config.run.join("pods");
        let found = self.recover_all(&pods_of(&self.config.run)?).map_err(RuntimeError::io("recover", &dir))?;
        failpoint::hit("runtime.recover.done").map_err(RuntimeError::io("recover", &dir))?;
        Ok(found)
    }

    /// Side by side: a monitor that hangs is waited for, and must not hold up the others.
    fn recover_all(&self, uids: &[PodUid]) -> io::Result<Vec<SandboxState>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            while let Some(uid) = uids.get(next.fetch_add(1, Ordering::Relaxed)) {
                found.extend(self.recovered(uid));
            }
            found
        };
        std::thread::scope(|scope| {
            let spawn = |_| std::thread::Builder::new().name("recover".into()).stack_size(STACK).spawn_scoped(scope, work);
            let threads = (0..ASKERS.min(uids.len())).map(spawn).collect::<io::Result<Vec<_>>>()?;
            let mut found = Vec::new();
            for thread in threads {
                found.extend(thread.join().map_err(|_| io::Error::other("a thread of the recovery has panicked"))?);
            }
            Ok(found)
        })
    }

    /// What of one pod cannot be settled now must not keep the others from starting: it counts as
    /// one that does not answer, and is asked for (and settled) again.
    fn recovered(&self, uid: &PodUid) -> Option<SandboxState> {
        self.recover_one(uid).unwrap_or_else(|_| {
            Some(SandboxState {
                uid: uid.clone(),
                monitor: 0,
                created_at: 0,
                pins: Pins::default(),
                containers: Vec::new(),
                alive: true,
                answers: false,
            })
        })
    }

    fn recover_one(&self, uid: &PodUid) -> Result<Option<SandboxState>, RuntimeError> {
        let run = self.pod(uid);
        if !run.ready().exists() {
            return self.remove_sandbox(uid).map(|()| None);
        }
        let state = match self.sandbox(uid) {
            // It cannot be adopted, and would be kept from ending for ever: what lives of it is an
            // orphan from here on.
            Err(e) if is_spoilt(&e) => {
                tracing::error!(%uid, error = %chain(&e), "the run directory of a pod is damaged: the pod is made anew");
                for name in [SANDBOX, MONITOR] {
                    gone_is_fine(fs::remove_file(run.join(name))).map_err(RuntimeError::io("remove", run.join(name)))?;
                }
                return self.remove_sandbox(uid).map(|()| None);
            }
            state => state?,
        };
        let Some(state) = state else { return Ok(None) };
        if state.alive && state.answers {
            self.undo_half_made(uid, &run, &state)?;
            // One that is busy, or of a release that knows nothing of it, goes on as it is.
            let _ = self.renew_monitor(uid, false);
        }
        Ok(Some(state))
    }

    /// A run directory of a container that its monitor does not know is of a create or a remove
    /// that was cut off. (A create that is still under way is waited for and removed by this too:
    /// nobody remembers it.)
    fn undo_half_made(&self, uid: &PodUid, run: &PodRun, state: &SandboxState) -> Result<(), RuntimeError> {
        for id in containers_of(run)? {
            if !state.containers.iter().any(|container| container.id == id) {
                self.remove_container(uid, &id)?;
            }
        }
        Ok(())
    }

    pub fn sandbox(&self, uid: &PodUid) -> Result<Option<SandboxState>, RuntimeError> {
        let run = self.pod(uid);
        let (Some(sandbox), true) = (read_sandbox(&run)?, run.ready().exists()) else { return Ok(None) };
        let monitor = read_json::<Monitor>(&run.join(MONITOR))?.unwrap_or(Monitor { pid: 0, start: 0 });
        let mut state = SandboxState {
            uid: uid.clone(),
            monitor: monitor.pid,
            created_at: sandbox.created_at,
            pins: pins(&run, &sandbox),
            containers: Vec::new(),
            alive: false,
            answers: false,
        };
        let living = if monitor.pid > 0 {
            monitor.living().map_err(RuntimeError::io("look at the monitor of", run.path()))?
        } else {
            None
        };
        let Some(pidfd) = living else {
            self.end_what_is_left(uid, &run, &sandbox, monitor)?;
            state.containers = written_down(&run, true)?;
            return Ok(Some(state));
        };
        state.alive = true;
        // First the events, then the question: nothing falls in between.
        let asked = self
            .watch
            .add(uid, &run, monitor.pid, pidfd)
            .map_err(|source| RuntimeError::Monitor { uid: uid.clone(), verb: "subscribe", source })
            .and_then(|()| self.ask(uid, None, "state", &Request::State(Empty {}), &[], QUICK));
        match asked {
            Ok((Reply::State(reply), _)) => {
                state.answers = true;
                state.containers = as_states(reply);
            }
            Ok((reply, _)) => {
                let message = format!("answered with {}", reply.kind());
                return Err(RuntimeError::Protocol { uid: uid.clone(), verb: "state", message });
            }
            Err(RuntimeError::Monitor { .. }) => state.containers = written_down(&run, false)?,
            Err(e) => return Err(e),
        }
        Ok(Some(state))
    }

    /// Its parent is dead: what still runs has lost its streams and its exit codes. It is ended,
    /// and every container gets its exit file.
    fn end_what_is_left(&self, uid: &PodUid, run: &PodRun, sandbox: &Sandbox, monitor: Monitor) -> Result<(), RuntimeError> {
        pidfd::reap(monitor.pid);
        self.cgroup("kill", &sandbox.cgroup, |c, path| c.kill(path))?;
        self.wait_for_end(uid, &sandbox.cgroup)?;
        // Helpers and what they were just making sit in the monitor's own cgroup.
        self.cgroup("kill", &sandbox.monitor_cgroup, |c, path| c.kill(path))?;
        self.wait_for_end(uid, &sandbox.monitor_cgroup)?;
        for id in containers_of(run)? {
            let Some(_) = read_json::<Meta>(&run.container(&id).join(META))? else { continue };
            if read_json::<ExitRecord>(&run.exit(&id))?.is_none() {
                write_json(&run.exit(&id), &lost(read_started(run, &id)?))?;
            }
        }
        failpoint::hit("runtime.recover.ended").map_err(RuntimeError::io("end", run.path()))?;
        self.undone(&Effect::Monitor { uid: uid.clone(), pid: monitor.pid, start: monitor.start })
    }
}

/// A file of ours that is there and says nothing.
fn is_spoilt(error: &RuntimeError) -> bool {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    matches!(error, RuntimeError::Io { op: "read", source, .. } if matches!(source.kind(), InvalidData | UnexpectedEof))
}

/// What the kubelet says of a container whose end nobody saw.
fn lost(started: Option<Started>) -> ExitRecord {
    ExitRecord {
        code: 137,
        started_at: started.map_or(0, |started| started.at),
        finished_at: clock::wall_nanos(),
        reason: "ContainerStatusUnknown".to_owned(),
        message: "The container's monitor died; how the container ended is not known".to_owned(),
        ..ExitRecord::default()
    }
}

fn read_started(run: &PodRun, id: &ContainerId) -> Result<Option<Started>, RuntimeError> {
    read_json(&run.container(id).join(STARTED))
}

/// Containers by what lies in the run directory.
fn written_down(run: &PodRun, ended: bool) -> Result<Vec<ContainerState>, RuntimeError> {
    let mut found = Vec::new();
    for id in containers_of(run)? {
        let dir = run.container(&id);
        let Some(meta) = read_json::<Meta>(&dir.join(META))? else { continue };
        let exit = read_json::<ExitRecord>(&run.exit(&id))?;
        let phase = match (exit, read_started(run, &id)?) {
            (Some(exit), _) => ContainerPhase::Exited(exit),
            (None, started) if ended => ContainerPhase::Exited(lost(started)),
            (None, Some(started)) => ContainerPhase::Running { pid: started.pid, started_at: started.at },
            (None, None) => ContainerPhase::Created { pid: 0 },
        };
        found.push(ContainerState { id, name: meta.name, attempt: meta.attempt, phase });
    }
    Ok(found)
}

fn as_states(reply: StateReply) -> Vec<ContainerState> {
    let state = |c: super::monitor::wire::Container| {
        let phase = match c.exit {
            Some(exit) => ContainerPhase::Exited(exit),
            None if c.started_at != 0 => ContainerPhase::Running { pid: c.pid, started_at: c.started_at },
            None => ContainerPhase::Created { pid: c.pid },
        };
        ContainerState { id: c.id, name: c.name, attempt: c.attempt, phase }
    };
    reply.containers.into_iter().map(state).collect()
}
