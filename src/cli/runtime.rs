//! `coracle runtime run BUNDLE`: the runtime room alone, with an OCI bundle in the foreground.
//!
//! Everything of it (run directory, cgroups, monitor) is named after this process and gone with it.
//! Where this process was killed, the next one takes it away.
//!
//! Invariant: a run directory belongs to the process that holds its lock; the kernel lets go of that
//! with the process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::fcntl::Flock;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use oci_spec::runtime::{Process, Spec};

use super::args::{Body, Given, Operands, ROOT, Verb};
use super::exit::{CliError, Exit};
use crate::runtime::cgroup::Cgroups;
use crate::runtime::model::{CgroupResources, ContainerSpec, Rootfs, RuntimeEvent, SandboxSpec};
use crate::runtime::{FailureKind, Runtime, RuntimeConfig, mount_run, unmount_run};
use crate::store::effects::Effects;
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::{clock, file, mount, tty};

pub const RUN: Verb = Verb {
    name: "runtime run",
    operands: Operands { text: "BUNDLE", min: 1, max: 1 },
    command: false,
    summary: "run an OCI bundle in the foreground",
    about: "Runs the OCI bundle in directory BUNDLE with our stdin, stdout and stderr, passes signals on to it, and ends with \
            its exit code. No agent is needed, and nothing is left afterwards. With --root its run directory lies below DIR.",
    flags: &[&ROOT],
    examples: &["coracle runtime run ./bundle"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let bundle = given.operands.first().map(OsString::as_os_str).unwrap_or_default();
    let bundle = std::fs::canonicalize(bundle).map_err(CliError::io("open bundle", bundle))?;
    let oci = read_config(&bundle.join("config.json"))?;
    // Before there is a second thread, so that the signals come to the descriptor alone.
    let signals = take_signals()?;
    let run = given.roots()?.run;
    remove_leftovers(&run);
    let pid = std::process::id();
    let mut own = run.into_os_string();
    own.push(format!("{INFIX}{pid}"));
    let foreground = Foreground::open(PathBuf::from(own), pid)?;
    let ended = foreground.run(&bundle, oci, signals);
    let left = foreground.close();
    let exit = ended?;
    left.map(|()| exit)
}

/// Between the run directory's name and the pid.
const INFIX: &str = "-run-";
const LOCK: &str = "lock";

fn read_config(path: &Path) -> Result<Spec, CliError> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(4 << 20).read_to_end(&mut text));
    read.map_err(CliError::io("read", path))?;
    serde_json::from_slice(&text).map_err(|e| CliError::because(format!("{} is no runtime config", path.display()), e))
}

/// Ends and removes what is left of runs that were killed. What cannot be removed is told, and no
/// reason to run nothing.
fn remove_leftovers(run: &Path) {
    let (Some(parent), Some(name)) = (run.parent(), run.file_name().and_then(|name| name.to_str())) else { return };
    let prefix = format!("{name}{INFIX}");
    // A directory that is not there has nothing of ours in it.
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(&prefix)).and_then(|pid| pid.parse::<u32>().ok());
        let (Some(pid), dir) = (pid, entry.path()) else { continue };
        let removed = match dead(&dir, pid) {
            Ok(false) => Ok(()),
            Ok(true) => Foreground::open(dir.clone(), pid).and_then(Foreground::close),
            Err(e) => Err(CliError::io("lock", dir.join(LOCK))(e)),
        };
        if let Err(e) = removed {
            eprintln!("coracle runtime run: left by an earlier run in {}: {}", dir.display(), crate::obs::chain(&e));
        }
    }
}

/// Has the process that made the directory gone?
fn dead(dir: &Path, pid: u32) -> std::io::Result<bool> {
    match File::open(dir.join(LOCK)) {
        Ok(lock) => Ok(file::try_lock(lock)?.is_some()),
        // It is about to make one, or was killed before it could.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Ok(pid == std::process::id() || !Path::new(&format!("/proc/{pid}")).exists())
        }
        Err(e) => Err(e),
    }
}

struct Foreground {
    /// Before the directory's other users.
    _lock: Flock<File>,
    run: PathBuf,
    runtime: Runtime,
    events: mpsc::Receiver<RuntimeEvent>,
    cgroups: Cgroups,
    uid: PodUid,
    id: ContainerId,
    parent: String,
}

fn because<E: std::error::Error + Send + Sync + 'static>(what: &'static str) -> impl FnOnce(E) -> CliError {
    move |e| CliError::because(what, e)
}

impl Foreground {
    fn open(run: PathBuf, pid: u32) -> Result<Foreground, CliError> {
        mount_run(&run).map_err(because("make the run directory"))?;
        let lock = File::create(run.join(LOCK)).and_then(file::try_lock).map_err(CliError::io("lock", run.join(LOCK)))?;
        let lock = lock.ok_or_else(|| CliError::Failed(format!("{} is in use", run.display())))?;
        let boot = clock::boot_id().map_err(because("read the boot id"))?;
        let (effects, _) = Effects::open(&run, &boot).map_err(because("open the effects journal"))?;
        let cgroups = Cgroups::detect("/").map_err(because("find the cgroups"))?;
        let (send, events) = mpsc::channel();
        let config = RuntimeConfig { run: run.clone(), cgroups: cgroups.clone(), cgroup_parent: "/".to_owned() };
        let runtime = Runtime::open(config, Arc::new(effects), send).map_err(because("open the runtime"))?;
        Ok(Foreground {
            _lock: lock,
            run,
            runtime,
            events,
            cgroups,
            uid: PodUid::parse(&format!("run-{pid}")).map_err(because("name the sandbox"))?,
            id: ContainerId::parse(&format!("{pid:064x}")).map_err(because("name the container"))?,
            parent: format!("/coracle-run-{pid}"),
        })
    }

    fn run(&self, bundle: &Path, oci: Spec, mut signals: SignalFd) -> Result<Exit, CliError> {
        let root = oci.root().as_ref().map(|root| bundle.join(root.path()));
        let root = root.ok_or_else(|| CliError::Failed("config.json has no root".to_owned()))?;
        if !root.is_dir() {
            return Err(CliError::Failed(format!("root.path of config.json: {} is not a directory", root.display())));
        }
        let sandbox = SandboxSpec {
            uid: self.uid.clone(),
            namespace: "run".to_owned(),
            name: bundle.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            hostname: String::new(),
            // The bundle says for itself which namespaces it wants.
            host_network: true,
            host_ipc: true,
            sysctls: Vec::new(),
            cgroup: format!("{}/pod", self.parent),
            resources: CgroupResources::default(),
            monitor_cgroup: format!("{}/monitor", self.parent),
            shm_size: 64 << 20,
        };
        self.runtime.run_sandbox(&sandbox).map_err(because("start a monitor"))?;
        let terminal = oci.process().as_ref().and_then(Process::terminal).unwrap_or(false);
        let spec = ContainerSpec {
            uid: self.uid.clone(),
            id: self.id.clone(),
            name: "run".to_owned(),
            attempt: 0,
            oci,
            rootfs: Rootfs { lower: vec![root], upper: PathBuf::new(), work: PathBuf::new() },
            cgroup: format!("{}/pod/{}", self.parent, self.id),
            resources: CgroupResources::default(),
            log: None,
            stdin: true,
            stdin_once: true,
            tty: terminal,
        };
        let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
        let ours = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
        let streams: &[BorrowedFd<'_>] = if terminal { &[] } else { &ours };
        let pty = match self.runtime.create_container_with(&spec, streams) {
            Ok(pty) => pty,
            Err(e) => return cannot_run(e),
        };
        let session = pty.map(|pty| Terminal::join(pty, stdin.as_fd())).transpose()?;
        if let Err(e) = self.runtime.start_container(&self.uid, &self.id) {
            return cannot_run(e);
        }
        let code = self.until_its_end(&mut signals, session.as_ref())?;
        if let Some(session) = session {
            session.finish();
        }
        Ok(Exit::Passed(code))
    }

    fn until_its_end(&self, signals: &mut SignalFd, session: Option<&Terminal>) -> Result<u8, CliError> {
        loop {
            match self.events.recv_timeout(Duration::from_millis(20)) {
                Ok(RuntimeEvent::Exited { exit, .. }) => return Ok(u8::try_from(exit.code).unwrap_or(255)),
                Ok(RuntimeEvent::MonitorDied { .. }) => return Err(CliError::Failed("the monitor died".to_owned())),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(CliError::Hangup),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            while let Some(info) = signals.read_signal().map_err(because("read signals"))? {
                let number = info.ssi_signo as i32;
                match session {
                    Some(session) if number == libc::SIGWINCH => session.follow_size(),
                    _ if number == libc::SIGWINCH => {}
                    _ => self.runtime.signal_container(&self.uid, &self.id, number).map_err(because("pass a signal on"))?,
                }
            }
        }
    }

    fn close(self) -> Result<(), CliError> {
        self.runtime.remove_sandbox(&self.uid).map_err(because("remove the sandbox"))?;
        // Killed, it may have had a cgroup and nothing that names it.
        self.cgroups.kill(&self.parent).map_err(because("end what is in the cgroup"))?;
        self.cgroups.remove(&self.parent).map_err(because("remove the cgroup"))?;
        drop(self.runtime);
        mount::detach(&self.run.join("skeleton")).map_err(CliError::io("unmount", self.run.join("skeleton")))?;
        unmount_run(&self.run).map_err(because("remove the run directory"))
    }
}

/// 127 and 126 as a shell has them; all else is our failure.
fn cannot_run(error: crate::runtime::RuntimeError) -> Result<Exit, CliError> {
    let code = match error.start_failure() {
        Some((FailureKind::NoProgram, _)) => 127,
        Some((FailureKind::NotExecutable, _)) => 126,
        _ => return Err(CliError::because("run the bundle", error)),
    };
    eprintln!("coracle runtime run: {}", crate::obs::chain(&error));
    Ok(Exit::Passed(code))
}

fn take_signals() -> Result<SignalFd, CliError> {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
    let mut set = SigSet::empty();
    set.extend([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH]);
    set.thread_block().map_err(because("take signals"))?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(because("take signals"))
}

/// Our terminal and the container's, each copied to the other by a thread.
struct Terminal {
    pty: OwnedFd,
    _raw: Option<tty::Raw>,
    out: std::thread::JoinHandle<()>,
}

impl Terminal {
    fn join(pty: OwnedFd, here: BorrowedFd<'_>) -> Result<Terminal, CliError> {
        let copy = |from: OwnedFd| from.try_clone().map(File::from).map_err(because("copy the terminal"));
        let (mut from, mut into) = (
            copy(pty.try_clone().map_err(because("copy the terminal"))?)?,
            File::from(pty.try_clone().map_err(because("copy the terminal"))?),
        );
        // A stdin that is no terminal has no mode.
        let raw = tty::Raw::enter(here).ok();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).stack_size(64 * 1024).spawn(body).map_err(because("start a thread"))
        };
        spawn(
            "stdin",
            Box::new(move || {
                // Ends when either side does; the container's end is what counts.
                let _ = std::io::copy(&mut std::io::stdin().lock(), &mut into);
            }),
        )?;
        let out = spawn(
            "stdout",
            Box::new(move || {
                let mut buffer = [0u8; 4096];
                // The last program gone, the terminal says EIO.
                while let Ok(n @ 1..) = from.read(&mut buffer) {
                    let mut out = std::io::stdout().lock();
                    if out.write_all(buffer.get(..n).unwrap_or_default()).and_then(|()| out.flush()).is_err() {
                        return;
                    }
                }
            }),
        )?;
        let terminal = Terminal { pty, _raw: raw, out };
        terminal.follow_size();
        Ok(terminal)
    }

    fn follow_size(&self) {
        if let Ok((rows, columns)) = tty::size(std::io::stdin().as_fd()) {
            // Its last program may just have gone.
            let _ = tty::set_size(self.pty.as_fd(), rows, columns);
        }
    }

    /// What it still said is passed on, for a short time: a program in the background may hold it.
    fn finish(self) {
        for _ in 0..50 {
            if self.out.is_finished() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
