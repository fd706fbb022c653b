//! Mounts: overlay, tmpfs, bind, detached clones.
//!
//! Invariant: a new mount appears at its target whole or not at all (it is configured while
//! detached, then moved). Nothing here follows what the target's last component links to, except
//! where mount(2) itself must.
//!
//! Sources: mount(2), open_tree(2), mount_setattr(2), fsopen(2), fsconfig(2), move_mount(2);
//! Documentation/filesystems/overlayfs.rst.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags};

// Linux' own numbers; the libc crate has them for glibc only.
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const FSOPEN_CLOEXEC: u32 = 1;
const FSMOUNT_CLOEXEC: u32 = 1;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
const OPEN_TREE_CLONE: u32 = 1;
const OPEN_TREE_CLOEXEC: u32 = libc::O_CLOEXEC as u32;
const MOUNT_ATTR_RDONLY: u64 = 1;

/// A copy of the mount that `path` lies on, with `path` as its root, attached nowhere and read-only.
/// ENOSYS below kernel 5.12 (mount_setattr).
pub fn read_only_clone(path: &Path) -> io::Result<OwnedFd> {
    let tree = open_tree(libc::AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)?;
    let attr = libc::mount_attr { attr_set: MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the path is a valid empty C string, attr outlives the call and its size is given.
    let r = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            std::mem::size_of::<libc::mount_attr>(),
        )
    };
    check(r)?;
    Ok(tree)
}

/// A tmpfs at `target`. `options` as mount(8)'s -o, e.g. `mode=0700,size=64m`.
pub fn tmpfs(source: &str, target: &Path, options: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(nix::mount::mount(Some(source), target, Some("tmpfs"), flags, Some(options))?)
}

/// Binds `source` over `target`, both of which exist and are of one kind.
pub fn bind(source: &Path, target: &Path) -> io::Result<()> {
    Ok(nix::mount::mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// Binds an open file (a namespace, say) over the existing file `target`.
pub fn bind_fd(source: BorrowedFd<'_>, target: &Path) -> io::Result<()> {
    bind(Path::new(&format!("/proc/self/fd/{}", source.as_raw_fd())), target)
}

/// Cuts `target` off from its peers: nothing propagates in or out.
pub fn make_private(target: &Path) -> io::Result<()> {
    Ok(nix::mount::mount(None::<&str>, target, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>)?)
}

/// Private, and left out of recursive binds of what is above, with all that is mounted below it.
pub fn make_unbindable(target: &Path) -> io::Result<()> {
    Ok(nix::mount::mount(None::<&str>, target, None::<&str>, MsFlags::MS_UNBINDABLE, None::<&str>)?)
}

/// Takes the topmost mount off `target`, at once from everyone's sight; its file system goes when
/// its last user does. False where nothing was mounted there.
pub fn detach(target: &Path) -> io::Result<bool> {
    match nix::mount::umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(true),
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Is `path` the root of a mount? False where it does not exist.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: an all-zero statx is a valid value of that plain C struct.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string and stat is writable for the length of the call.
    let r = unsafe { libc::statx(libc::AT_FDCWD, name.as_ptr(), libc::AT_SYMLINK_NOFOLLOW, 0, &raw mut stat) };
    match check(r.into()) {
        Ok(_) => Ok(stat.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// An overlay at `target`. Layers are given topmost first, any number of them up to overlay's 500.
pub fn overlay(lower: &[&Path], upper: &Path, work: &Path, target: &Path) -> io::Result<()> {
    let fs = match overlay_context(lower, upper, work) {
        // `lowerdir+` came with 6.5; before it the layers are one string.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return overlay_in_one_string(lower, upper, work, target),
        other => other?,
    };
    // SAFETY: plain numbers.
    let mount = check(unsafe { libc::syscall(libc::SYS_fsmount, fs.as_raw_fd(), FSMOUNT_CLOEXEC, 0) }).and_then(owned)?;
    let target = CString::new(target.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: both paths are C strings that outlive the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            target.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    })?;
    Ok(())
}

fn overlay_context(lower: &[&Path], upper: &Path, work: &Path) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string.
    let fs = check(unsafe { libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), FSOPEN_CLOEXEC) }).and_then(owned)?;
    set(fs.as_fd(), c"source", OsStr::new("overlay"))?;
    for layer in lower {
        set(fs.as_fd(), c"lowerdir+", layer.as_os_str())?;
    }
    set(fs.as_fd(), c"upperdir", upper.as_os_str())?;
    set(fs.as_fd(), c"workdir", work.as_os_str())?;
    // SAFETY: the command takes no key, value or number.
    check(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            fs.as_raw_fd(),
            FSCONFIG_CMD_CREATE,
            std::ptr::null::<libc::c_char>(),
            std::ptr::null::<libc::c_char>(),
            0,
        )
    })
    .map_err(|e| explain(&fs, e))?;
    Ok(fs)
}

/// Every layer by the number of an open descriptor: short enough for a page of options
/// (about 200 layers), whatever the paths' lengths.
fn overlay_in_one_string(lower: &[&Path], upper: &Path, work: &Path, target: &Path) -> io::Result<()> {
    let open: Vec<OwnedFd> =
        lower.iter().chain([&upper, &work]).map(|dir| super::file::open_dir_path(dir)).collect::<io::Result<_>>()?;
    let path = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    let names: Vec<String> = open.iter().take(lower.len()).map(path).collect();
    // The last two are upper and work, chained above.
    let rest: Vec<String> = open.iter().skip(lower.len()).map(path).collect();
    let options = format!("lowerdir={},upperdir={}", names.join(":"), rest.join(",workdir="));
    Ok(nix::mount::mount(Some("overlay"), target, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?)
}

/// Values of 256 bytes and more are refused by the kernel: such a path goes by its descriptor.
fn set(fs: BorrowedFd<'_>, key: &CStr, value: &OsStr) -> io::Result<()> {
    let by_fd;
    let mut text = value.to_owned();
    if value.len() > 250 {
        by_fd = super::file::open_dir_path(Path::new(value))?;
        text = format!("/proc/self/fd/{}", by_fd.as_raw_fd()).into();
    }
    let value = CString::new(text.as_bytes()).map_err(io::Error::other)?;
    // SAFETY: key and value are C strings that outlive the call; the number is unused.
    check(unsafe { libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr(), 0) })?;
    Ok(())
}

/// The file system's own words, which it leaves in its context, in place of a bare errno.
fn explain(fs: &OwnedFd, error: io::Error) -> io::Error {
    let mut text = [0u8; 512];
    match nix::unistd::read(fs.as_raw_fd(), &mut text) {
        Ok(n) if error.raw_os_error() != Some(libc::EINVAL) => {
            let words = String::from_utf8_lossy(text.get(..n).unwrap_or_default());
            io::Error::new(error.kind(), format!("{}: {error}", words.trim().trim_start_matches("e ")))
        }
        _ => error,
    }
}

fn open_tree(dir: i32, path: &Path, flags: u32) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: the path is a C string that outlives the call.
    check(unsafe { libc::syscall(libc::SYS_open_tree, dir, path.as_ptr(), flags) }).and_then(owned)
}

// A c_long has 32 bits on armv7.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the system call has just returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
