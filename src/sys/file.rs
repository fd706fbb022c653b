//! Files: making them durable, and opening paths that someone else may be changing.
//!
//! Invariant: errors keep the kernel's errno (the caller's error names operation and path). After
//! a failed fsync the kernel may have dropped the data: the caller writes a new file, it does not
//! call fsync again.
//!
//! Sources: fsync(2), syncfs(2), openat2(2), fallocate(2), flock(2), statvfs(3).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::Mode;

/// Makes what happened to the names in `dir` durable.
pub fn fsync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Writes out the whole file system that `path` lies on.
pub fn syncfs(path: &Path) -> io::Result<()> {
    Ok(nix::unistd::syncfs(File::open(path)?.as_raw_fd())?)
}

/// Where a path may lead; openat2(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// `dir` is the root: absolute links and `..` stay inside it.
    InRoot,
    /// Whatever would leave `dir` is an error (EXDEV).
    Beneath,
    /// Beneath, and any symbolic link is an error (ELOOP).
    BeneathNoSymlinks,
    /// That, and another mount on the way is an error (EXDEV).
    BeneathSameMount,
    /// Anywhere, but any symbolic link is an error (ELOOP).
    NoSymlinks,
}

/// openat2(2) with close-on-exec set and magic links always refused. A rename that races with the
/// walk makes the kernel answer EAGAIN; it is tried again a bounded number of times.
pub fn openat2(dir: BorrowedFd<'_>, path: &Path, flags: OFlag, mode: u32, resolve: Resolve) -> io::Result<OwnedFd> {
    let resolve = ResolveFlag::RESOLVE_NO_MAGICLINKS
        | match resolve {
            Resolve::InRoot => ResolveFlag::RESOLVE_IN_ROOT,
            Resolve::Beneath => ResolveFlag::RESOLVE_BENEATH,
            Resolve::BeneathNoSymlinks => ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS,
            Resolve::BeneathSameMount => {
                ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV
            }
            Resolve::NoSymlinks => ResolveFlag::RESOLVE_NO_SYMLINKS,
        };
    // The kernel refuses a mode where nothing is created.
    let creates = flags.contains(OFlag::O_CREAT) || flags.contains(OFlag::O_TMPFILE);
    let mode = if creates { Mode::from_bits_truncate(mode) } else { Mode::empty() };
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).mode(mode).resolve(resolve);
    let mut tries = 0;
    loop {
        match nix::fcntl::openat2(dir.as_raw_fd(), path, how) {
            // SAFETY: openat2 has just returned this descriptor and nothing else owns it.
            Ok(fd) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(Errno::EAGAIN) if tries < 64 => tries += 1,
            Err(e) => return Err(e.into()),
        }
    }
}

/// Reserves blocks for `[offset, offset + len)`; with `keep_size` the file's size stays.
pub fn allocate(file: &File, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
    let mode = if keep_size { FallocateFlags::FALLOC_FL_KEEP_SIZE } else { FallocateFlags::empty() };
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    let len = i64::try_from(len).map_err(io::Error::other)?;
    Ok(nix::fcntl::fallocate(file.as_raw_fd(), mode, offset, len)?)
}

/// Bytes that a write by root can still take on the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let v = nix::sys::statvfs::statvfs(path)?;
    // Their width differs by target (32 bits on armv7).
    #[allow(clippy::useless_conversion)]
    Ok(u64::from(v.blocks_free()) * u64::from(v.fragment_size()))
}

/// Takes an exclusive flock(2) on `file` without waiting; None where another process holds it.
/// The lock goes with the last descriptor, so also when the process is killed.
pub fn try_lock(file: File) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e.into()),
    }
}

/// A directory to be the `dir` of [`openat2`]: O_PATH, never through a final symbolic link.
pub fn open_dir_path(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let fd = nix::fcntl::open(dir, flags, Mode::empty())?;
    // SAFETY: open has just returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// mkdirat(2); a name that is there already, a dangling link too, is EEXIST.
pub fn make_dir_at(dir: BorrowedFd<'_>, name: &Path, mode: u32) -> io::Result<()> {
    Ok(nix::sys::stat::mkdirat(Some(dir.as_raw_fd()), name, Mode::from_bits_truncate(mode))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_path_stays_where_resolve_says() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("canary"), "outside").unwrap();
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("canary"), "inside").unwrap();
        symlink(outside.path(), root.path().join("away")).unwrap();
        symlink("/canary", root.path().join("absolute")).unwrap();
        let dir = open_dir_path(root.path()).unwrap();
        let open = |path: &str, resolve| openat2(dir.as_fd(), Path::new(path), OFlag::O_RDONLY, 0, resolve);

        let text = std::io::read_to_string(File::from(open("absolute", Resolve::InRoot).unwrap())).unwrap();
        assert_eq!(text, "inside");
        let text = std::io::read_to_string(File::from(open("../../canary", Resolve::InRoot).unwrap())).unwrap();
        assert_eq!(text, "inside");
        open("away/canary", Resolve::InRoot).unwrap_err();
        open("away/canary", Resolve::Beneath).unwrap_err();
        open("absolute", Resolve::BeneathNoSymlinks).unwrap_err();
        open("canary", Resolve::BeneathNoSymlinks).unwrap();
        let e = open("nothing", Resolve::Beneath).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_second_lock_is_refused_until_the_first_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = try_lock(File::create(&path).unwrap()).unwrap();
        assert!(first.is_some());
        assert!(try_lock(File::open(&path).unwrap()).unwrap().is_none());
        drop(first);
        assert!(try_lock(File::open(&path).unwrap()).unwrap().is_some());
    }
}
