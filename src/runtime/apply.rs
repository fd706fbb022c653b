//! The verbs, step by step: what is journalled, made, and taken away again in reverse.
//!
//! Invariant: each step is safe to repeat and legal to be cut off after; the journal names a
//! thing before it is made and until it is gone. Nothing here decides whether a pod should live.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use oci_spec::runtime::{LinuxNamespaceType, Process, RootBuilder, Spec};

use super::exec::{Attachment, ExecProcess};
use super::layout::{Meta, PodRun, SANDBOX, Sandbox};
use super::model::{ContainerSpec, ExecSpec, Pins, Rootfs, RuntimeEvent, SandboxSpec, SandboxState};
use super::monitor::client::{CallError, Client};
use super::monitor::wire::{self, Empty, Failure, Kind, Reply, Request};
use super::watch::Watch;
use super::{FailureKind, RuntimeConfig, RuntimeError, rootfs};
use crate::store::effects::{Effect, Effects};
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::{clock, exe, failpoint, mount, pidfd, process, seqpacket};

/// Questions that only need a turn of the monitor's loop.
pub(super) const QUICK: Duration = Duration::from_secs(5);
/// Questions that wait for a helper; the monitor itself gives up after 120 s.
const SLOW: Duration = Duration::from_secs(150);
/// How long processes that were killed are waited for.
const ENDING: Duration = Duration::from_secs(15);

pub struct Inner {
    pub(super) config: RuntimeConfig,
    pub(super) effects: Arc<Effects>,
    pub(super) watch: Watch,
    execs: AtomicU64,
}

impl Inner {
    pub fn open(
        config: RuntimeConfig,
        effects: Arc<Effects>,
        events: mpsc::Sender<RuntimeEvent>,
    ) -> Result<Arc<Inner>, RuntimeError> {
        // Before an upgrade can replace the file that we were started from.
        exe::own_exe().map_err(RuntimeError::io("make a read-only copy of", "/proc/self/exe"))?;
        let watch = Watch::start(events).map_err(RuntimeError::io("watch pods in", &config.run))?;
        let inner = Inner { config, effects, watch, execs: AtomicU64::new(0) };
        if mount::is_mount_point(&inner.config.run).map_err(RuntimeError::io("look at", &inner.config.run))? {
            let run = Effect::Mount { target: inner.config.run.clone() };
            inner.intent(&run)?;
            inner.done(&run)?;
        }
        let skeleton = Effect::Mount { target: inner.skeleton() };
        inner.intent(&skeleton)?;
        rootfs::make_skeleton(&inner.skeleton()).map_err(RuntimeError::io("make", inner.skeleton()))?;
        inner.done(&skeleton)?;
        Ok(Arc::new(inner))
    }

    pub fn run_root(&self) -> &Path {
        &self.config.run
    }

    fn skeleton(&self) -> PathBuf {
        self.config.run.join("skeleton")
    }

    pub(super) fn pod(&self, uid: &PodUid) -> PodRun {
        PodRun::of(&self.config.run, uid)
    }

    // ---- sandboxes

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
        self.cgroup("enter", &sandbox.monitor_cgroup, |c, path| c.add_pid(path, pid))?;
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
            let deadline = Instant::now() + ENDING;
            while !pidfd::ended(fd.as_fd(), 200).map_err(RuntimeError::io("wait for the monitor of", run.path()))? {
                if Instant::now() > deadline {
                    return Err(RuntimeError::io("end the monitor of", run.path())(io::ErrorKind::TimedOut.into()));
                }
            }
        }
        pidfd::reap(monitor.pid);
        self.undone(&effect)
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

    // ---- containers

    pub fn prepare_rootfs(&self, uid: &PodUid, id: &ContainerId, spec: &Rootfs) -> Result<PathBuf, RuntimeError> {
        let run = self.pod(uid);
        if read_sandbox(&run)?.is_none() {
            return Err(RuntimeError::NoSandbox { uid: uid.clone() });
        }
        let target = run.rootfs(id);
        fs::create_dir_all(&target).map_err(RuntimeError::io("create", &target))?;
        if !mount::is_mount_point(&target).map_err(RuntimeError::io("look at", &target))? {
            self.make(&Effect::Mount { target: target.clone() }, || rootfs::mount_overlay(&self.skeleton(), spec, &target))?;
        }
        hit("runtime.create.rootfs", &target)?;
        rootfs::check(&target)?;
        Ok(target)
    }

    pub fn create_container(&self, spec: &ContainerSpec) -> Result<(), RuntimeError> {
        self.create(spec, None).map(|_| ())
    }

    /// With `streams` the container has those for its own (none of them with a tty: its master side is
    /// the result then).
    pub fn create(&self, spec: &ContainerSpec, streams: Option<&[BorrowedFd<'_>]>) -> Result<Option<OwnedFd>, RuntimeError> {
        let run = self.pod(&spec.uid);
        let target = self.prepare_rootfs(&spec.uid, &spec.id, &spec.rootfs)?;
        let dir = run.container(&spec.id);
        // First the name of the cgroup, then the cgroup: recovery goes by the name.
        let meta = Meta { name: spec.name.clone(), attempt: spec.attempt, cgroup: spec.cgroup.clone() };
        write_json(&dir.join(META), &meta)?;
        self.make_cgroup(&spec.cgroup, &spec.resources)?;
        hit("runtime.create.cgroup", &dir)?;
        if let Some(parent) = spec.log.as_ref().and_then(|log| log.path.parent()) {
            fs::create_dir_all(parent).map_err(RuntimeError::io("create", parent))?;
        }
        let mut oci = spec.oci.clone();
        complete(&mut oci, &target, &spec.cgroup);
        if let Some(process) = oci.process() {
            rootfs::make_directory(&target, process.cwd())?;
        }
        let config = dir.join(CONFIG);
        oci.save(&config).map_err(|e| RuntimeError::io("write", &config)(io::Error::other(e)))?;
        let create = wire::Create {
            id: spec.id.clone(),
            name: spec.name.clone(),
            attempt: spec.attempt,
            cgroup: spec.cgroup.clone(),
            log: spec.log.as_ref().map(|log| wire::Log {
                path: log.path.clone(),
                max_size: log.max_size,
                max_files: log.max_files,
            }),
            stdin: spec.stdin,
            stdin_once: spec.stdin_once,
            tty: spec.tty,
            user: oci.process().as_ref().map_or(0, |process| process.user().uid()),
            own_streams: streams.is_some(),
            own_pid_namespace: has_own_pid_namespace(&oci),
        };
        hit("runtime.create.bundle", &dir)?;
        let created = self.ask(&spec.uid, Some(&spec.id), "create", &Request::Create(create), streams.unwrap_or_default(), SLOW);
        hit("runtime.create.asked", &dir)?;
        match created {
            // Made by an earlier try whose answer was lost.
            Err(RuntimeError::WrongState { .. }) => Ok(None),
            Err(e @ RuntimeError::Start { .. }) => {
                self.remove_cgroup(&spec.cgroup)?;
                Err(e)
            }
            other => other.map(|(_, fds)| fds.into_iter().next()),
        }
    }

    pub fn start_container(&self, uid: &PodUid, id: &ContainerId) -> Result<i64, RuntimeError> {
        let which = wire::Which { id: id.clone() };
        let (reply, _) = match self.ask(uid, Some(id), "start", &Request::Start(which), &[], SLOW) {
            Err(RuntimeError::WrongState { state, .. }) => return self.started_before(uid, id, state),
            other => other?,
        };
        hit("runtime.start.asked", self.pod(uid).path())?;
        let Reply::Started(started) = reply else { return Err(unexpected(uid, "start", &reply)) };
        Ok(started.started_at)
    }

    /// An earlier try may have started it, whose answer was lost.
    fn started_before(&self, uid: &PodUid, id: &ContainerId, state: String) -> Result<i64, RuntimeError> {
        let (reply, _) = self.ask(uid, None, "state", &Request::State(Empty {}), &[], QUICK)?;
        let Reply::State(now) = reply else { return Err(unexpected(uid, "state", &reply)) };
        match now.containers.iter().find(|container| container.id == *id) {
            Some(container) if container.started_at != 0 => Ok(container.started_at),
            _ => Err(RuntimeError::WrongState { id: id.clone(), verb: "start", state, needs: "created" }),
        }
    }

    pub fn signal_container(&self, uid: &PodUid, id: &ContainerId, signal: i32) -> Result<(), RuntimeError> {
        let request = Request::Signal(wire::Signal { id: id.clone(), signal });
        self.ask(uid, Some(id), "signal", &request, &[], QUICK).map(|_| ())
    }

    pub fn kill_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let meta = read_json::<Meta>(&self.pod(uid).container(id).join(META))?;
        let meta = meta.ok_or_else(|| RuntimeError::NoContainer { uid: uid.clone(), id: id.clone() })?;
        self.cgroup("kill", &meta.cgroup, |c, path| c.kill(path))
    }

    pub fn acknowledge_exit(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let file = self.pod(uid).exit(id);
        gone_is_fine(fs::remove_file(&file)).map_err(RuntimeError::io("remove", &file))
    }

    pub fn remove_container(&self, uid: &PodUid, id: &ContainerId) -> Result<(), RuntimeError> {
        let run = self.pod(uid);
        let dir = run.container(id);
        if !dir.exists() {
            return self.acknowledge_exit(uid, id);
        }
        let meta = read_json::<Meta>(&dir.join(META))?;
        if let Some(meta) = &meta {
            self.cgroup("kill", &meta.cgroup, |c, path| c.kill(path))?;
        }
        if self.monitor_lives(&run)? {
            let which = wire::Which { id: id.clone() };
            self.ask(uid, Some(id), "remove", &Request::Remove(which), &[], ENDING)?;
        }
        hit("runtime.remove_container.forgotten", &dir)?;
        if let Some(meta) = &meta {
            self.wait_for_end(uid, &meta.cgroup)?;
            self.remove_cgroup(&meta.cgroup)?;
        }
        self.unmount(&run.rootfs(id))?;
        hit("runtime.remove_container.unmounted", &dir)?;
        self.acknowledge_exit(uid, id)?;
        remove_tree(&run.scratch().join(id.as_str()))?;
        remove_tree(&dir)
    }

    pub fn container_spec(&self, uid: &PodUid, id: &ContainerId) -> Result<Spec, RuntimeError> {
        let config = self.pod(uid).container(id).join(CONFIG);
        read_json::<Spec>(&config)?.ok_or_else(|| RuntimeError::NoContainer { uid: uid.clone(), id: id.clone() })
    }

    // ---- processes and streams in a container

    pub fn exec(&self, spec: &ExecSpec, process: &Process) -> Result<ExecProcess, RuntimeError> {
        let dir = self.pod(&spec.uid).container(&spec.id);
        if !dir.exists() {
            return Err(RuntimeError::NoContainer { uid: spec.uid.clone(), id: spec.id.clone() });
        }
        let number = self.execs.fetch_add(1, Ordering::Relaxed);
        let name = format!("exec-{}-{number}.json", clock::boot_nanos());
        let mut process = process.clone();
        process.set_terminal(Some(spec.tty));
        let text = serde_json::to_vec(&process).map_err(|e| RuntimeError::io("write", dir.join(&name))(e.into()))?;
        let mut file = fs::OpenOptions::new();
        let written = file.write(true).create_new(true).mode(0o600).open(dir.join(&name)).and_then(|mut f| f.write_all(&text));
        written.map_err(RuntimeError::io("write", dir.join(&name)))?;

        let pipes = (!spec.tty).then(|| ExecPipes::make(spec.stdin, process.user().uid())).transpose();
        let pipes = pipes.map_err(RuntimeError::io("make pipes for", &dir))?;
        let theirs: Vec<BorrowedFd<'_>> = pipes.iter().flat_map(|p| p.theirs.iter().map(AsFd::as_fd)).collect();
        let request = Request::Exec(wire::Exec { id: spec.id.clone(), process: name, tty: spec.tty, stdin: spec.stdin });
        let mut client = self.connect(&spec.uid, "exec")?;
        let answer = client.call(&request, &theirs, SLOW).map_err(|e| call_error(&spec.uid, Some(&spec.id), "exec", e));
        let (reply, fds) = answer?;
        let Reply::Execed(created) = reply else { return Err(unexpected(&spec.uid, "exec", &reply)) };
        let (stdin, stdout, stderr) = pipes.map_or((None, None, None), |p| (p.stdin, Some(p.stdout), Some(p.stderr)));
        Ok(ExecProcess { pid: created.pid, stdin, stdout, stderr, pty: fds.into_iter().next(), client, exit: None })
    }

    pub fn attach(&self, uid: &PodUid, id: &ContainerId) -> Result<Attachment, RuntimeError> {
        let spec = self.container_spec(uid, id)?;
        let tty = spec.process().as_ref().and_then(Process::terminal).unwrap_or(false);
        let wrap = |e| RuntimeError::io("make pipes for", self.pod(uid).container(id))(e);
        let (stdin_theirs, stdin) = process::pipe().map_err(wrap)?;
        let (stdout, stdout_theirs) = process::pipe().map_err(wrap)?;
        let stderr = if tty { None } else { Some(process::pipe().map_err(wrap)?) };
        let out: Vec<BorrowedFd<'_>> =
            std::iter::once(stdout_theirs.as_fd()).chain(stderr.iter().map(|(_, w)| w.as_fd())).collect();
        let with_stdin: Vec<BorrowedFd<'_>> = std::iter::once(stdin_theirs.as_fd()).chain(out.iter().copied()).collect();
        let ask = |stdin, fds: &[BorrowedFd<'_>]| {
            self.ask(uid, Some(id), "attach", &Request::Attach(wire::Attach { id: id.clone(), stdin }), fds, QUICK)
        };
        let stdin = match ask(true, &with_stdin) {
            Ok(_) => Some(stdin),
            // No stdin, or another has it: the output is still to be had.
            Err(RuntimeError::WrongState { .. }) => ask(false, &out).map(|_| None)?,
            Err(e) => return Err(e),
        };
        Ok(Attachment { stdin, stdout, stderr: stderr.map(|(read, _)| read) })
    }

    pub fn resize(&self, uid: &PodUid, id: &ContainerId, rows: u16, columns: u16) -> Result<(), RuntimeError> {
        let request = Request::Resize(wire::Resize { id: id.clone(), rows, columns });
        self.ask(uid, Some(id), "resize", &request, &[], QUICK).map(|_| ())
    }

    // ---- steps

    fn connect(&self, uid: &PodUid, verb: &'static str) -> Result<Client, RuntimeError> {
        let run = self.pod(uid);
        Client::connect(&run).map_err(|source| {
            if run.path().exists() {
                RuntimeError::Monitor { uid: uid.clone(), verb, source }
            } else {
                RuntimeError::NoSandbox { uid: uid.clone() }
            }
        })
    }

    pub(super) fn ask(
        &self,
        uid: &PodUid,
        id: Option<&ContainerId>,
        verb: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), RuntimeError> {
        self.connect(uid, verb)?.call(request, fds, limit).map_err(|e| call_error(uid, id, verb, e))
    }

    pub(super) fn monitor_lives(&self, run: &PodRun) -> Result<bool, RuntimeError> {
        let Some(monitor) = read_json::<Monitor>(&run.join(MONITOR))? else { return Ok(false) };
        Ok(monitor.living().map_err(RuntimeError::io("look at the monitor of", run.path()))?.is_some())
    }

    /// Journalled before and after.
    fn make(&self, effect: &Effect, make: impl FnOnce() -> Result<(), RuntimeError>) -> Result<(), RuntimeError> {
        self.intent(effect)?;
        make()?;
        self.done(effect)
    }

    fn make_cgroup(&self, path: &str, limits: &super::model::CgroupResources) -> Result<(), RuntimeError> {
        self.make(&Effect::Cgroup { path: path.to_owned() }, || self.cgroup("create", path, |c, path| c.create(path, limits)))
    }

    fn remove_cgroup(&self, path: &str) -> Result<(), RuntimeError> {
        self.cgroup("remove", path, |c, path| c.remove(path))?;
        self.undone(&Effect::Cgroup { path: path.to_owned() })
    }

    pub(super) fn unmount(&self, target: &Path) -> Result<(), RuntimeError> {
        while mount::detach(target).map_err(RuntimeError::io("unmount", target))? {}
        self.undone(&Effect::Mount { target: target.to_owned() })
    }

    pub(super) fn cgroup<T>(
        &self,
        op: &'static str,
        path: &str,
        run: impl FnOnce(&super::cgroup::Cgroups, &str) -> Result<T, super::cgroup::CgroupError>,
    ) -> Result<T, RuntimeError> {
        run(&self.config.cgroups, path).map_err(|source| RuntimeError::Cgroup { op, path: path.to_owned(), source })
    }

    /// Kills again while it waits: a process that was being forked may have slipped through.
    pub(super) fn wait_for_end(&self, uid: &PodUid, cgroup: &str) -> Result<(), RuntimeError> {
        let deadline = Instant::now() + ENDING;
        loop {
            let pids = self.cgroup("list", cgroup, |c, path| c.pids(path))?;
            // A zombie that its parent has yet to reap does nothing any more.
            let left = pids.iter().filter(|pid| !pidfd::is_dead(**pid).unwrap_or(false)).count();
            if left == 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(RuntimeError::WillNotEnd { uid: uid.clone(), path: cgroup.to_owned(), left });
            }
            self.cgroup("kill", cgroup, |c, path| c.kill(path))?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn intent(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.intent(effect).map_err(|source| journal(effect, source))
    }
    fn done(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.done(effect).map_err(|source| journal(effect, source))
    }
    pub(super) fn undone(&self, effect: &Effect) -> Result<(), RuntimeError> {
        self.effects.undone(effect).map_err(|source| journal(effect, source))
    }
}

fn journal(effect: &Effect, source: crate::store::StoreError) -> RuntimeError {
    RuntimeError::Journal { what: format!("{effect:?}"), source }
}

pub(super) const META: &str = "meta.json";
const CONFIG: &str = "config.json";
pub(super) const MONITOR: &str = "monitor.json";

/// Which process the monitor is; the start time tells it from a later one of the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Monitor {
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

/// The caller's ends and the process's.
struct ExecPipes {
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: OwnedFd,
    theirs: Vec<OwnedFd>,
}

impl ExecPipes {
    /// Owned by the process's user, who may want to open /dev/stdout again.
    fn make(with_stdin: bool, user: u32) -> io::Result<ExecPipes> {
        let mut theirs = Vec::new();
        let mut stdin = None;
        if with_stdin {
            let (read, write) = process::pipe()?;
            stdin = Some(write);
            theirs.push(read);
        }
        let (stdout, out) = process::pipe()?;
        let (stderr, err) = process::pipe()?;
        theirs.extend([out, err]);
        for fd in &theirs {
            nix::unistd::fchown(fd.as_raw_fd(), Some(nix::unistd::Uid::from_raw(user)), None)?;
        }
        Ok(ExecPipes { stdin, stdout, stderr, theirs })
    }
}

pub(super) fn call_error(uid: &PodUid, id: Option<&ContainerId>, verb: &'static str, error: CallError) -> RuntimeError {
    let (Failure { kind, message }, id) = match (error, id) {
        (CallError::Io(source), _) => return RuntimeError::Monitor { uid: uid.clone(), verb, source },
        (CallError::Failed(failure), None) => {
            return RuntimeError::Protocol { uid: uid.clone(), verb, message: failure.message };
        }
        (CallError::Failed(failure), Some(id)) => (failure, id.clone()),
    };
    let start = |kind| RuntimeError::Start { id: id.clone(), verb, kind, message: message.clone() };
    match kind {
        Kind::NotFound => RuntimeError::NoContainer { uid: uid.clone(), id },
        Kind::WrongState => RuntimeError::WrongState { id, verb, state: message, needs: "otherwise" },
        Kind::NoProgram => start(FailureKind::NoProgram),
        Kind::NotExecutable => start(FailureKind::NotExecutable),
        Kind::HelperDied => start(FailureKind::HelperDied),
        Kind::Refused => start(FailureKind::Refused),
        Kind::UnknownType | Kind::BadRequest | Kind::Io => RuntimeError::Protocol { uid: uid.clone(), verb, message },
    }
}

fn unexpected(uid: &PodUid, verb: &'static str, reply: &Reply) -> RuntimeError {
    RuntimeError::Protocol { uid: uid.clone(), verb, message: format!("answered with {}", reply.kind()) }
}

/// What only the runtime knows: where the root is, and which leaf is the container's.
fn complete(oci: &mut Spec, rootfs: &Path, cgroup: &str) {
    let read_only = oci.root().as_ref().and_then(oci_spec::runtime::Root::readonly).unwrap_or(false);
    // Both fields are given: it cannot fail.
    if let Ok(root) = RootBuilder::default().path(rootfs).readonly(read_only).build() {
        oci.set_root(Some(root));
    }
    if let Some(linux) = oci.linux_mut() {
        linux.set_cgroups_path(Some(PathBuf::from(cgroup)));
    }
}

fn has_own_pid_namespace(oci: &Spec) -> bool {
    let namespaces = oci.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
    namespaces.is_some_and(|all| all.iter().any(|ns| ns.typ() == LinuxNamespaceType::Pid && ns.path().is_none()))
}

pub(super) fn pins(run: &PodRun, sandbox: &Sandbox) -> Pins {
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

pub(super) fn read_sandbox(run: &PodRun) -> Result<Option<Sandbox>, RuntimeError> {
    read_json(&run.join(SANDBOX))
}

/// None where there is no file. Our own files are small; a spec may have some hundred mounts.
pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, RuntimeError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(RuntimeError::io("read", path)(e)),
    };
    let mut text = Vec::new();
    file.take(4 << 20).read_to_end(&mut text).map_err(RuntimeError::io("read", path))?;
    serde_json::from_slice(&text).map(Some).map_err(|e| RuntimeError::io("read", path)(e.into()))
}

/// Temp and rename; /run is memory: no fsync.
pub(super) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), RuntimeError> {
    let wrap = |e| RuntimeError::io("write", path)(e);
    let text = serde_json::to_vec(value).map_err(|e| wrap(e.into()))?;
    let mut temp = path.as_os_str().to_owned();
    temp.push(".tmp");
    fs::write(&temp, text).and_then(|()| fs::rename(&temp, path)).map_err(wrap)
}

/// Ids of the containers that have a run directory.
pub(super) fn containers_of(run: &PodRun) -> Result<Vec<ContainerId>, RuntimeError> {
    let dir = run.containers();
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(RuntimeError::io("read", dir)(e)),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry.map_err(RuntimeError::io("read", &dir))?.file_name();
        ids.extend(name.to_str().and_then(|name| ContainerId::parse(name).ok()));
    }
    Ok(ids)
}

fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn remove_tree(path: &Path) -> Result<(), RuntimeError> {
    gone_is_fine(fs::remove_dir_all(path)).map_err(RuntimeError::io("remove", path))
}

fn hit(name: &'static str, path: &Path) -> Result<(), RuntimeError> {
    failpoint::hit(name).map_err(RuntimeError::io(name, path))
}
