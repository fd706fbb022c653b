//! File system steps relative to a directory's fd: open, make, link, remove, stamp. None of them
//! follows a symbolic link in the last part of the name. openat(2) and its family.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::NixPath;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, SFlag, UtimensatFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags};

/// Opens `name` in `dir`, never following a link that it is; the fd closes on exec.
pub fn open<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, flags: OFlag, mode: u32) -> io::Result<OwnedFd> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let fd = nix::fcntl::openat(Some(dir.as_fd().as_raw_fd()), name, flags, Mode::from_bits_truncate(mode))?;
    // SAFETY: openat(2) just returned this fd to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A directory's fd for use as the start of further steps.
pub fn open_dir<P: ?Sized + NixPath>(dir: impl AsFd, name: &P) -> io::Result<OwnedFd> {
    open(dir, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0)
}

/// The directory at an absolute path of our own; the last part may not be a link.
pub fn open_root(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let fd = nix::fcntl::open(path, flags, Mode::empty())?;
    // SAFETY: open(2) just returned this fd to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What `name` itself is; None: nothing there.
pub fn stat<P: ?Sized + NixPath>(dir: impl AsFd, name: &P) -> io::Result<Option<FileStat>> {
    match nix::sys::stat::fstatat(Some(dir.as_fd().as_raw_fd()), name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(nix::errno::Errno::ENOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

pub fn stat_of(fd: impl AsFd) -> io::Result<FileStat> {
    Ok(nix::sys::stat::fstat(fd.as_fd().as_raw_fd())?)
}

pub fn read_link<P: ?Sized + NixPath>(dir: impl AsFd, name: &P) -> io::Result<OsString> {
    Ok(nix::fcntl::readlinkat(Some(dir.as_fd().as_raw_fd()), name)?)
}

pub fn make_dir<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, mode: u32) -> io::Result<()> {
    Ok(nix::sys::stat::mkdirat(Some(dir.as_fd().as_raw_fd()), name, Mode::from_bits_truncate(mode))?)
}

pub fn make_node<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, kind: SFlag, mode: u32, device: (u32, u32)) -> io::Result<()> {
    let device = nix::sys::stat::makedev(device.0.into(), device.1.into());
    Ok(nix::sys::stat::mknodat(Some(dir.as_fd().as_raw_fd()), name, kind, Mode::from_bits_truncate(mode), device)?)
}

pub fn make_link<T: ?Sized + NixPath, P: ?Sized + NixPath>(target: &T, dir: impl AsFd, name: &P) -> io::Result<()> {
    Ok(nix::unistd::symlinkat(target, Some(dir.as_fd().as_raw_fd()), name)?)
}

/// A hard link; a symbolic link is linked itself.
pub fn hard_link<P: ?Sized + NixPath>(from: impl AsFd, old: &P, to: impl AsFd, new: &P) -> io::Result<()> {
    let (from, to) = (from.as_fd().as_raw_fd(), to.as_fd().as_raw_fd());
    Ok(nix::unistd::linkat(Some(from), old, Some(to), new, AtFlags::empty())?)
}

pub fn rename<P: ?Sized + NixPath, Q: ?Sized + NixPath>(from: impl AsFd, old: &P, to: impl AsFd, new: &Q) -> io::Result<()> {
    Ok(nix::fcntl::renameat(Some(from.as_fd().as_raw_fd()), old, Some(to.as_fd().as_raw_fd()), new)?)
}

pub fn unlink<P: ?Sized + NixPath>(dir: impl AsFd, name: &P) -> io::Result<()> {
    Ok(nix::unistd::unlinkat(Some(dir.as_fd().as_raw_fd()), name, UnlinkatFlags::NoRemoveDir)?)
}

pub fn remove_dir<P: ?Sized + NixPath>(dir: impl AsFd, name: &P) -> io::Result<()> {
    Ok(nix::unistd::unlinkat(Some(dir.as_fd().as_raw_fd()), name, UnlinkatFlags::RemoveDir)?)
}

pub fn chown<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    Ok(nix::unistd::fchownat(Some(dir.as_fd().as_raw_fd()), name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW)?)
}

pub fn chown_of(fd: impl AsFd, uid: u32, gid: u32) -> io::Result<()> {
    Ok(nix::unistd::fchown(fd.as_fd().as_raw_fd(), Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?)
}

pub fn chmod_of(fd: impl AsFd, mode: u32) -> io::Result<()> {
    Ok(nix::sys::stat::fchmod(fd.as_fd().as_raw_fd(), Mode::from_bits_truncate(mode))?)
}

/// Sets both times of `name` itself.
pub fn set_time<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, seconds: i64, nanos: u32) -> io::Result<()> {
    let time = TimeSpec::new(seconds as _, nanos as _);
    Ok(nix::sys::stat::utimensat(Some(dir.as_fd().as_raw_fd()), name, &time, &time, UtimensatFlags::NoFollowSymlink)?)
}

pub fn set_time_of(fd: impl AsFd, seconds: i64, nanos: u32) -> io::Result<()> {
    let time = TimeSpec::new(seconds as _, nanos as _);
    Ok(nix::sys::stat::futimens(fd.as_fd().as_raw_fd(), &time, &time)?)
}

/// Writes out everything that the file system of `fd` holds in memory; syncfs(2).
pub fn sync_filesystem(fd: impl AsFd) -> io::Result<()> {
    Ok(nix::unistd::syncfs(fd.as_fd().as_raw_fd())?)
}

/// The names in a directory, in the kernel's order, without `.` and `..`.
pub fn names(dir: impl AsFd) -> io::Result<Vec<std::ffi::CString>> {
    names_up_to(dir, usize::MAX)
}

/// The first `limit` names: a directory of somebody else's making may hold millions.
pub fn names_up_to(dir: impl AsFd, limit: usize) -> io::Result<Vec<std::ffi::CString>> {
    let own = open_dir(&dir, ".")?;
    let mut listing = nix::dir::Dir::from(own)?;
    let mut names = Vec::new();
    for entry in listing.iter() {
        let entry = entry?;
        if names.len() >= limit {
            break;
        }
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// Removes `name` with all below it, crossing no mount's link: every step is by fd. Nothing there
/// is no error. At most `depth` levels.
pub fn remove_tree<P: ?Sized + NixPath>(dir: impl AsFd, name: &P, depth: usize) -> io::Result<()> {
    match stat(&dir, name)? {
        None => return Ok(()),
        Some(s) if SFlag::from_bits_truncate(s.st_mode) & SFlag::S_IFMT != SFlag::S_IFDIR => return unlink(dir, name),
        Some(_) => {}
    }
    if depth == 0 {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    let own = open_dir(&dir, name)?;
    for child in names(&own)? {
        remove_tree(&own, child.as_c_str(), depth - 1)?;
    }
    remove_dir(dir, name)
}
