//! Work inside another network namespace.
//!
//! Invariant: no thread of ours changes its namespace and lives on. A throw-away thread enters,
//! does its work (opens a socket, which stays in the namespace for good; writes sysctls) and ends.
//!
//! Sources: setns(2), network_namespaces(7), namespaces(7) on bind-mounted nsfs files.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, fstatfs};

/// `NSFS_MAGIC` of linux/magic.h; nix has no name for it.
const NSFS_MAGIC: i64 = 0x6e73_6673;
const STACK: usize = 128 * 1024;

/// Opens a pinned namespace; a file that is none (the pin's mount is gone) is an error.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    let kind = fstatfs(&file)?.filesystem_type();
    // The width of both differs by target.
    #[allow(clippy::unnecessary_cast)]
    if kind != FsType(NSFS_MAGIC as _) {
        return Err(io::Error::new(io::ErrorKind::NotFound, "no namespace is mounted there"));
    }
    Ok(file)
}

/// Runs `work` in the network namespace `netns`.
pub fn within<T: Send>(netns: &impl AsFd, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let fd = netns.as_fd();
    on_thread("netns", move || {
        setns(fd, CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    })
}

/// Runs `work` in a network namespace that is gone afterwards.
pub fn throw_away<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_thread("netns-probe", move || {
        unshare(CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    })
}

fn on_thread<T: Send>(name: &str, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn_scoped(scope, work)?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_namespace_is_taken_for_one() {
        assert!(open(Path::new("/proc/self/ns/net")).is_ok());
        assert_eq!(open(Path::new("/proc/self/status")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
