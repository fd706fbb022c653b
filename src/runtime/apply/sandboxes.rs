//! Sandboxes: a pod's cgroups, its monitor and its namespaces, made in order and undone in reverse.
//!
//! Invariant: the monitor waits for a go-ahead that is given once it is written down, so none lives
//! unknown; `ready` is written last.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use super::super::RuntimeError;
use super::super::layout::{Meta, PodRun, SANDBOX, Sandbox};
use super::super::model::{Pins, SandboxSpec, SandboxState};
use super::super::monitor::wire::{self, Empty, Reply, Request};
use super::files::{containers_of, read_json, read_sandbox, remove_tree, write_json};
use super::{ENDING, Inner, META, QUICK, hit, unexpected};
use crate::store::effects::Effect;
use crate::store::ids::PodUid;
use crate::sys::{clock, exe, mount, pidfd, seqpacket};

impl Inner {
    pub fn run_sandbox(&self, spec: &SandboxSpec) -> Result<SandboxState, RuntimeError> {
        if let Some(state) = self.sandbox(&spec.uid)?
            && state.alive
        {
            return Ok(state);
        }
        // Half of one, or one whose monitor has died.
        self.remove_sandbox(&spec.uid)?;
        match self.make_sandbox(spec) {
            Ok(state) => Ok(state),
            Err(e) => {
                // What failed is what the caller hears; what could not be undone the next try meets again.
                let _ = self.remove_sandbox(&spec.uid);
                Err(e)
            }
        }
    }

    fn make_sandbox(&self, spec: &SandboxSpec) -> Result<SandboxState, RuntimeError> {
        let run = self.pod(&spec.uid);
        self.make(&Effect::Dir { path: run.path().to_owned() }, || make_dirs(&run))?;
        hit("runtime.sandbox.dir", run.path())?;
        let sandbox = Sandbox {
            uid: spec.uid.clone(),
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            hostname: spec.hostname.clone(),
            host_network: spec.host_network,
            host_ipc: spec.host_ipc,
            sysctls: spec.sysctls.clone(),
            dir: run.path().to_owned(),
            cgroup_parent: self.config.cgroup_parent.clone(),
            cgroup: spec.cgroup.clone(),
            monitor_cgroup: spec.monitor_cgroup.clone(),
            created_at: clock::wall_nanos(),
        };
        write_json(&run.join(SANDBOX), &sandbox)?;
        hit("runtime.sandbox.written", run.path())?;
        for (path, limits) in [(&spec.cgroup, &spec.resources), (&spec.monitor_cgroup, &Default::default())] {
            self.make_cgroup(path, limits)?;
        }
        hit("runtime.sandbox.cgroups", run.path())?;
        let shm = run.shm();
        self.make(&Effect::Mount { target: shm.clone() }, || {
            fs::create_dir_all(&shm).map_err(RuntimeError::io("create", &shm))?;
            mount::tmpfs("shm", &shm, &format!("mode=1777,size={}", spec.shm_size)).map_err(RuntimeError::io("mount", &shm))
        })?;
        hit("runtime.sandbox.shm", run.path())?;
        self.start_monitor(&sandbox, &run)?;
        hit("runtime.sandbox.monitor", run.path())?;
        self.pin_namespaces(&spec.uid, &run)?;
        hit("runtime.sandbox.pinned", run.path())?;
        fs::write(run.ready(), "").map_err(RuntimeError::io("write", run.ready()))?;
        hit("runtime.sandbox.ready", run.path())?;
        self.sandbox(&spec.uid)?.ok_or_else(|| RuntimeError::NoSandbox { uid: spec.uid.clone() })
    }

    /// The monitor waits for our go-ahead, so that it never lives unknown: cut off before, it ends.
    fn start_monitor(&self, sandbox: &Sandbox, run: &PodRun) -> Result<(), RuntimeError> {
        let failed = |op| RuntimeError::io(op, run.path());
        let mut errors = fs::OpenOptions::new();
        let errors =
            errors.create(true).append(true).mode(0o600).open(run.join("monitor.err")).map_err(failed("write monitor.err in"))?;
        let mut command = exe::command(["monitor", &format!("{}/{}", sandbox.namespace, sandbox.name)])
            .map_err(failed("start the monitor of"))?;
        command.current_dir(run.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut child = command.spawn().map_err(failed("start the monitor of"))?;
        let (mut go, mut said) = match (child.stdin.take(), child.stdout.take()) {
            (Some(go), Some(said)) => (go, said),
            _ => return Err(failed("start the monitor of")(io::ErrorKind::BrokenPipe.into())),
        };
        let pid = child.id() as i32;
        let start = pidfd::start_time(pid).map_err(failed("look at the monitor of"))?.unwrap_or(0);
        let monitor = Monitor { pid, start };
        let effect = Effect::Monitor { uid: sandbox.uid.clone(), pid, start };
        self.make(&effect, || write_json(&run.join(MONITOR), &monitor))?;
        hit("runtime.sandbox.spawned", run.path())?;
        go.write_all(b"!").map_err(failed("give the go-ahead to the monitor of"))?;
        drop(go);
        let heard = seqpacket::wait(said.as_fd(), Some(QUICK)).map_err(failed("hear the monitor of"))?;
        let mut word = [0u8; 1];
        if !heard || said.read(&mut word).map_err(failed("hear the monitor of"))? != 1 {
            let words = fs::read_to_string(run.join("monitor.err")).unwrap_or_default();
            let words = words.lines().last().unwrap_or("no word of it within 5 s").to_owned();
            return Err(failed("start the monitor of")(io::Error::other(words)));
        }
        Ok(())
    }

    fn pin_namespaces(&self, uid: &PodUid, run: &PodRun) -> Result<(), RuntimeError> {
        let (reply, fds) = self.ask(uid, None, "namespaces", &Request::Namespaces(Empty {}), &[], QUICK * 5)?;
        let Reply::Namespaces(reply) = reply else { return Err(unexpected(uid, "namespaces", &reply)) };
        for (kind, fd) in reply.kinds.iter().zip(&fds) {
            // The words become a path: only those that we know.
            if !["net", "ipc", "uts"].contains(&kind.as_str()) {
                continue;
            }
            let pin = run.namespace(kind);
            self.make(&Effect::NsPin { path: pin.clone() }, || {
                fs::write(&pin, "").map_err(RuntimeError::io("create", &pin))?;
                mount::bind_fd(fd.as_fd(), &pin).map_err(RuntimeError::io("pin a namespace on", &pin))
            })?;
        }
        Ok(())
    }

    pub fn pins(&self, uid: &PodUid) -> Result<Pins, RuntimeError> {
        let run = self.pod(uid);
        let sandbox = read_sandbox(&run)?.ok_or_else(|| RuntimeError::NoSandbox { uid: uid.clone() })?;
        Ok(pins(&run, &sandbox))
    }

    pub fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let run = self.pod(uid);
        self.watch.forget(uid);
        let sandbox = read_sandbox(&run)?;
        if let Some(sandbox) = &sandbox {
            self.cgroup("kill", &sandbox.cgroup, |c, path| c.kill(path))?;
        }
        self.end_monitor(uid, &run)?;
        hit("runtime.remove.monitor", run.path())?;
        if let Some(sandbox) = &sandbox {
            self.wait_for_end(uid, &sandbox.cgroup)?;
        }
        for id in containers_of(&run)? {
            self.unmount(&run.rootfs(&id))?;
        }
        self.unmount(&run.shm())?;
        for kind in ["net", "ipc", "uts"] {
            let pin = run.namespace(kind);
            mount::detach(&pin).map_err(RuntimeError::io("unpin", &pin))?;
            self.undone(&Effect::NsPin { path: pin })?;
        }
        hit("runtime.remove.mounts", run.path())?;
        if let Some(sandbox) = &sandbox {
            for id in containers_of(&run)? {
                if let Some(meta) = read_json::<Meta>(&run.container(&id).join(META))? {
                    self.remove_cgroup(&meta.cgroup)?;
                }
            }
            self.remove_cgroup(&sandbox.cgroup)?;
            self.remove_cgroup(&sandbox.monitor_cgroup)?;
        }
        hit("runtime.remove.cgroups", run.path())?;
        // sandbox.json names the cgroups: it goes with the directory, after them.
        remove_tree(run.path())?;
        self.undone(&Effect::Dir { path: run.path().to_owned() })
    }

    /// Asks first, so that its children are reaped by their parent; then it is killed.
    fn end_monitor(&self, uid: &PodUid, run: &PodRun) -> Result<(), RuntimeError> {
        let Some(monitor) = read_json::<Monitor>(&run.join(MONITOR))? else { return Ok(()) };
        let effect = Effect::Monitor { uid: uid.clone(), pid: monitor.pid, start: monitor.start };
        if let Some(fd) = monitor.living().map_err(RuntimeError::io("look at the monitor of", run.path()))? {
            if self.quit(uid).is_err() {
                // It may not have come as far as to listen, or be stuck: either way it is to go.
                pidfd::signal(fd.as_fd(), libc::SIGKILL).map_err(RuntimeError::io("kill the monitor of", run.path()))?;
            }
            wait_for_death(run, &fd)?;
        }
        pidfd::reap(monitor.pid);
        self.undone(&effect)
    }

    pub fn kill_monitor(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let run = self.pod(uid);
        if let Some(fd) = monitor_of(&run)? {
            pidfd::signal(fd.as_fd(), libc::SIGKILL).map_err(RuntimeError::io("kill the monitor of", run.path()))?;
            wait_for_death(&run, &fd)?;
        }
        Ok(())
    }

    fn quit(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let (reply, _) = self.ask(uid, None, "state", &Request::State(Empty {}), &[], QUICK)?;
        let Reply::State(state) = reply else { return Err(unexpected(uid, "state", &reply)) };
        for container in state.containers {
            let which = wire::Which { id: container.id.clone() };
            self.ask(uid, Some(&container.id), "remove", &Request::Remove(which), &[], ENDING)?;
        }
        self.ask(uid, None, "quit", &Request::Quit(Empty {}), &[], QUICK).map(|_| ())
    }

    /// Makes the pod's monitor go on as this program, if it is of another release (or `always`).
    /// False where there was nothing to do.
    pub fn renew_monitor(&self, uid: &PodUid, always: bool) -> Result<bool, RuntimeError> {
        let release = || match self.ask(uid, None, "hello", &Request::Hello(wire::Hello::default()), &[], QUICK)?.0 {
            Reply::Hello(hello) => Ok(hello.release),
            other => Err(unexpected(uid, "hello", &other)),
        };
        if !always && release()? == wire::RELEASE {
            return Ok(false);
        }
        let program = exe::own_exe().map_err(RuntimeError::io("make a read-only copy of", "/proc/self/exe"))?;
        match self.ask(uid, None, "reexec", &Request::Reexec(Empty {}), &[program], QUICK * 2) {
            // Its end of the connection went with the old program.
            Err(RuntimeError::Monitor { source, .. }) if source.kind() == io::ErrorKind::UnexpectedEof => release().map(|_| true),
            Err(e) => Err(e),
            Ok((reply, _)) => Err(unexpected(uid, "reexec", &reply)),
        }
    }
}

pub(in crate::runtime) const MONITOR: &str = "monitor.json";

/// Which process the monitor is; the start time tells it from a later one of the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(in crate::runtime) struct Monitor {
    pub pid: i32,
    pub start: u64,
}

impl Monitor {
    /// A handle on it; None once it has ended.
    pub fn living(&self) -> io::Result<Option<OwnedFd>> {
        let fd = match pidfd::open(self.pid) {
            Ok(fd) => fd,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            Err(e) => return Err(e),
        };
        // Looked at after the handle was taken: so the handle is of the process that was looked at.
        let same = pidfd::start_time(self.pid)? == Some(self.start) && !pidfd::is_dead(self.pid)?;
        Ok(same.then_some(fd))
    }
}

/// A handle on the monitor that the run directory names, while it lives.
pub(in crate::runtime) fn monitor_of(run: &PodRun) -> Result<Option<OwnedFd>, RuntimeError> {
    let Some(monitor) = read_json::<Monitor>(&run.join(MONITOR))? else { return Ok(None) };
    monitor.living().map_err(RuntimeError::io("look at the monitor of", run.path()))
}

fn wait_for_death(run: &PodRun, monitor: &OwnedFd) -> Result<(), RuntimeError> {
    let deadline = Instant::now() + ENDING;
    while !pidfd::ended(monitor.as_fd(), 200).map_err(RuntimeError::io("wait for the monitor of", run.path()))? {
        if Instant::now() > deadline {
            return Err(RuntimeError::io("end the monitor of", run.path())(io::ErrorKind::TimedOut.into()));
        }
    }
    Ok(())
}

pub(in crate::runtime) fn pins(run: &PodRun, sandbox: &Sandbox) -> Pins {
    let pin = |kind, hosts: bool| (!hosts).then(|| run.namespace(kind));
    Pins {
        net: pin("net", sandbox.host_network),
        uts: pin("uts", sandbox.host_network),
        ipc: pin("ipc", sandbox.host_ipc),
        // The host's IPC is System V's, POSIX queues' and what lies here.
        shm: Some(if sandbox.host_ipc { PathBuf::from("/dev/shm") } else { run.shm() }),
    }
}

fn make_dirs(run: &PodRun) -> Result<(), RuntimeError> {
    for dir in [run.path().to_owned(), run.join("ns"), run.exits(), run.containers(), run.scratch()] {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(RuntimeError::io("create", &dir))?;
    }
    Ok(())
}
