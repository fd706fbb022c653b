//! Shuts the unpacking process in: the staging directory becomes its root, it keeps the few
//! capabilities that owners, modes, devices and file capabilities need, and has no network.
//!
//! Invariant: after [`confine`] no path of the host exists for this process, and nothing that it
//! executes could get more rights. pivot_root(2), capabilities(7), mount_namespaces(7).

use std::io;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, umask};

use crate::sys::capability::{self, CHOWN, DAC_OVERRIDE, FOWNER, FSETID, MKNOD, SETFCAP};

pub fn confine(dir: &Path, file_bytes: u64) -> io::Result<()> {
    // The agent's death ends us at once; its pipe's end would only do so at the next read.
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    umask(Mode::empty());
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC)?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    mount(Some(dir), dir, none, MsFlags::MS_BIND, none)?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(none, dir, none, flags, none)?;
    nix::unistd::chdir(dir)?;
    // Old and new root on one place, then the upper one is let go: pivot_root(2), NOTES.
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    nix::unistd::chdir("/")?;
    setrlimit(Resource::RLIMIT_FSIZE, file_bytes, file_bytes)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // Lowering needs no right; a host's own lower limit stays.
    let (_, hard) = nix::sys::resource::getrlimit(Resource::RLIMIT_NOFILE)?;
    let files = hard.min(1024);
    setrlimit(Resource::RLIMIT_NOFILE, files, files)?;
    let memory = 512 << 20;
    setrlimit(Resource::RLIMIT_AS, memory, memory)?;
    capability::keep_only(&[CHOWN, DAC_OVERRIDE, FOWNER, FSETID, MKNOD, SETFCAP])?;
    prctl::set_no_new_privs()?;
    Ok(())
}
