//! Our own program as something to execute, out of the reach of what we run.
//!
//! A container that gets hold of /proc/PID/exe of one of our processes could write to our binary
//! once no process runs it (CVE-2019-5736). So children are executed from a read-only clone of
//! the mount that it lies on, which is attached nowhere: writing through it is EROFS for ever.
//! Below kernel 5.12 it is a sealed memfd, a private copy in memory.
//!
//! Sources: open_tree(2), mount_setattr(2), memfd_create(2), fcntl(2) F_ADD_SEALS.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MemFdCreateFlag, memfd_create};

static EXE: OnceLock<OwnedFd> = OnceLock::new();

/// The safe copy. It is of the program that runs now, also when the file was replaced since: call
/// it early once.
pub fn own_exe() -> io::Result<BorrowedFd<'static>> {
    if let Some(exe) = EXE.get() {
        return Ok(exe.as_fd());
    }
    use_program(Path::new("/proc/self/exe"))
}

/// Makes the copy of another file: of a program that is not coracle itself but embeds its library,
/// as tests do. What was made first stays.
pub fn use_program(path: &Path) -> io::Result<BorrowedFd<'static>> {
    let exe = super::mount::read_only_clone(path).or_else(|_| sealed_copy(path))?;
    Ok(EXE.get_or_init(|| exe).as_fd())
}

/// A command that executes it: argv is `coracle`, then the arguments; the environment is empty
/// but for what arms failpoints in tests.
pub fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> io::Result<Command> {
    // The number names the same file in the child: its descriptors are a copy of ours, and
    // close-on-exec comes after the kernel has opened the program.
    let mut command = Command::new(format!("/proc/self/fd/{}", own_exe()?.as_raw_fd()));
    command.arg0("coracle").args(args).env_clear();
    for name in ["CORACLE_FAILPOINTS", "CORACLE_FAILPOINTS_TRACE"] {
        if let (true, Some(value)) = (cfg!(feature = "failpoints"), std::env::var_os(name)) {
            command.env(name, value);
        }
    }
    Ok(command)
}

fn sealed_copy(path: &Path) -> io::Result<OwnedFd> {
    let fd = memfd_create(c"coracle", MemFdCreateFlag::MFD_CLOEXEC | MemFdCreateFlag::MFD_ALLOW_SEALING)?;
    let mut copy = File::from(fd);
    io::copy(&mut File::open(path)?, &mut copy)?;
    copy.flush()?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(copy.as_raw_fd(), FcntlArg::F_ADD_SEALS(seals))?;
    Ok(copy.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_copy_refuse_to_be_written() {
        let sealed = sealed_copy(Path::new("/proc/self/exe")).unwrap();
        assert!(File::from(sealed).write_all(b"x").is_err());
        // Not of the program that runs: that one refuses with ETXTBSY already.
        let idle = tempfile::NamedTempFile::new().unwrap();
        match crate::sys::mount::read_only_clone(idle.path()) {
            Ok(clone) => {
                let again = std::fs::OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", clone.as_raw_fd()));
                assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::EROFS));
            }
            Err(e) => {
                assert!(std::env::var_os("CI").is_none(), "no read-only clone: {e}");
                eprintln!("SKIP: no read-only clone on this kernel or without root: {e}");
            }
        }
    }
}
