//! The only file that calls libcontainer, and only inside a helper (see `helper`): it changes its
//! caller's oom_score_adj, dumpable flag and working directory, and leaks on failure.
//!
//! Invariant: containers become siblings of the helper, so children of the monitor; what a failed
//! call leaves behind is the monitor's to clear up, never this file's.
//!
//! Source: libcontainer 0.7.0 with vendor/patches/libcontainer; runc's libcontainer/init_linux.go
//! for the words of exec failures.

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use libcontainer::container::Container;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::prepared; // one of our patches: where it is missing, run vendor/fetch
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::{Executor, ExecutorError, ExecutorValidationError};
use nix::errno::Errno;
use oci_spec::runtime::Spec;

use super::wire::{Failure, Kind};
use crate::runtime::cgroup::Door;
use crate::sys::chain::chain;

/// What the container's or process's program gets as its first three descriptors.
#[derive(Debug, Default)]
pub struct Stdio {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// Socket that libcontainer sends the terminal's master to.
    pub console: Option<PathBuf>,
}

/// Everything up to the first instruction. Returns the pid, as the monitor sees it.
pub fn create(state: &Path, id: &str, bundle: &Path, pid_file: &Path, stdio: Stdio, report: OwnedFd) -> Result<i32, Failure> {
    let builder = builder(state, id, pid_file, stdio, report)?.as_init(bundle);
    let container = builder.with_systemd(false).with_detach(true).as_sibling(true).build().map_err(refused)?;
    container.pid().map(|pid| pid.as_raw()).ok_or_else(|| Failure::new(Kind::Refused, "the container has no pid"))
}

pub fn start(state: &Path, id: &str) -> Result<(), Failure> {
    Container::load(state.join(id)).and_then(|mut container| container.start()).map_err(refused)
}

/// Runs the process of `process` (a process.json) in a container that runs.
pub fn exec(state: &Path, id: &str, process: &Path, pid_file: &Path, stdio: Stdio, report: OwnedFd) -> Result<i32, Failure> {
    let builder = builder(state, id, pid_file, stdio, report)?.as_tenant();
    let pid = builder.with_process(Some(process)).with_detach(true).as_sibling(true).build().map_err(refused)?;
    Ok(pid.as_raw())
}

/// What a call of this process would otherwise look for, or compute anew.
pub fn prepare(door: Door, filter: Option<Vec<libc::sock_filter>>) {
    prepared::cgroups(prepared::Cgroups { tasks: door.tasks, directory: door.directory });
    if let Some(filter) = filter {
        prepared::filter(filter);
    }
}

/// None where a profile is more than a filter, or cannot be compiled: the call itself says why.
pub fn compile(profile: &str) -> Option<Vec<libc::sock_filter>> {
    let profile = serde_json::from_str(profile).ok()?;
    libcontainer::seccomp::compile(&profile).ok()?
}

fn builder(state: &Path, id: &str, pid_file: &Path, stdio: Stdio, report: OwnedFd) -> Result<ContainerBuilder, Failure> {
    let builder = ContainerBuilder::new(id.to_owned(), SyscallType::default()).validate_id().map_err(refused)?;
    let builder = builder.with_root_path(state).and_then(|b| b.with_pid_file(Some(pid_file))).map_err(refused)?;
    let mut builder = builder.with_console_socket(stdio.console).with_executor(Program { report: Rc::new(report) });
    (builder.stdin, builder.stdout, builder.stderr) = (stdio.stdin, stdio.stdout, stdio.stderr);
    Ok(builder)
}

fn refused(error: impl Error + 'static) -> Failure {
    Failure::new(Kind::Refused, chain(&error).to_string())
}

/// Finds and executes the program as runc does, and tells the monitor through a pipe why it could
/// not: the pipe closes without a word once the program runs.
#[derive(Clone)]
struct Program {
    report: Rc<OwnedFd>,
}

impl Program {
    fn fail(&self, failure: &Failure) {
        // When nobody reads any more, nobody needs to know.
        let _ = serde_json::to_vec(failure).map(|bytes| nix::unistd::write(&*self.report, &bytes));
    }

    fn find(&self, spec: &Spec) -> Result<(PathBuf, Vec<String>), Failure> {
        let process = spec.process().as_ref();
        let args = process.and_then(|p| p.args().clone()).unwrap_or_default();
        let Some(name) = args.first() else { return Err(Failure::new(Kind::NoProgram, "no command is given")) };
        let env = process.and_then(|p| p.env().clone()).unwrap_or_default();
        let path = env.iter().rev().find_map(|e| e.strip_prefix("PATH=")).unwrap_or_default();
        look_up(name, path).map(|program| (program, args))
    }
}

/// Go's exec.LookPath, whose words runc hands on: a name with a slash is a path; else the first
/// executable file in PATH.
fn look_up(name: &str, path: &str) -> Result<PathBuf, Failure> {
    if name.contains('/') {
        return match executable(Path::new(name)) {
            Ok(()) => Ok(PathBuf::from(name)),
            Err(Errno::ENOENT | Errno::ENOTDIR) => {
                Err(Failure::new(Kind::NoProgram, format!("exec: \"{name}\": stat {name}: no such file or directory")))
            }
            Err(e) => Err(Failure::new(Kind::NotExecutable, format!("exec: \"{name}\": {}", words(e)))),
        };
    }
    let dirs = path.split(':').map(|dir| if dir.is_empty() { "." } else { dir });
    let mut found = dirs.map(|dir| Path::new(dir).join(name)).filter(|program| executable(program).is_ok());
    found.next().ok_or_else(|| Failure::new(Kind::NoProgram, format!("exec: \"{name}\": executable file not found in $PATH")))
}

/// Any of the x bits will do: the kernel decides at exec whether it is one of ours.
fn executable(path: &Path) -> Result<(), Errno> {
    let meta = std::fs::metadata(path).map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
    match (meta.is_dir(), meta.permissions().mode() & 0o111) {
        (true, _) => Err(Errno::EISDIR),
        (false, 0) => Err(Errno::EACCES),
        (false, _) => Ok(()),
    }
}

fn words(errno: Errno) -> String {
    errno.desc().to_lowercase()
}

impl Executor for Program {
    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        self.find(spec).map(|_| ()).map_err(|failure| {
            self.fail(&failure);
            ExecutorValidationError::ArgValidationError(failure.message)
        })
    }

    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let failure = match self.find(spec) {
            Err(failure) => failure,
            Ok((program, args)) => match execute(&program, &args) {
                Errno::ENOENT => Failure::new(Kind::NoProgram, format!("exec {}: no such file or directory", program.display())),
                e => Failure::new(Kind::NotExecutable, format!("exec {}: {}", program.display(), words(e))),
            },
        };
        self.fail(&failure);
        Err(ExecutorError::Other(failure.message))
    }
}

/// Only returns where it fails. The environment is the one that libcontainer has set.
fn execute(program: &Path, args: &[String]) -> Errno {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let program = CString::new(program.as_os_str().as_bytes());
    let args: Result<Vec<CString>, _> = args.iter().map(|arg| CString::new(arg.as_bytes())).collect();
    let (Ok(program), Ok(args)) = (program, args) else { return Errno::EINVAL };
    match nix::unistd::execv(&program, &args) {
        Ok(never) => match never {},
        Err(e) => e,
    }
}

/// What [`Program`] left in its pipe; None where it is empty so far, or closed.
pub fn read_report(pipe: &OwnedFd) -> io::Result<Option<Failure>> {
    use std::os::fd::AsRawFd;
    let mut text = [0u8; 4096];
    match nix::unistd::read(pipe.as_raw_fd(), &mut text) {
        Ok(0) | Err(Errno::EAGAIN) => Ok(None),
        // Longer than the pipe's one write, or not of this version: the words still count.
        Ok(n) => Ok(text.get(..n).map(|bytes| {
            serde_json::from_slice(bytes).unwrap_or_else(|_| Failure::new(Kind::Refused, String::from_utf8_lossy(bytes)))
        })),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_runcs_words() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plain");
        std::fs::write(&file, "x").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let path = dir.path().to_str().unwrap();
        let failure = look_up("nope", path).unwrap_err();
        assert_eq!(
            (failure.kind, failure.message.as_str()),
            (Kind::NoProgram, "exec: \"nope\": executable file not found in $PATH")
        );
        let failure = look_up("/nope", path).unwrap_err();
        assert_eq!(failure.message, "exec: \"/nope\": stat /nope: no such file or directory");
        let failure = look_up(file.to_str().unwrap(), path).unwrap_err();
        assert_eq!((failure.kind, failure.message.ends_with(": permission denied")), (Kind::NotExecutable, true));
        assert!(look_up(path, path).unwrap_err().message.ends_with(": is a directory"));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(look_up("plain", &format!("/nowhere:{path}")).unwrap(), file);
    }
}
