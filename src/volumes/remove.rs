//! Removes a tree that a pod has filled: links are removed, not followed; a mount is never
//! entered; millions of names and thousands of levels cost neither memory nor stack.
//! CVE-2017-1002102.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::fcntl::OFlag;
use std::os::unix::ffi::OsStrExt;

use crate::sys::dir;
use crate::sys::file::{Resolve, openat2};

/// Levels that are walked down before a directory is lifted up to the top.
const DEPTH: usize = 24;
/// Names held at a time.
const BATCH: usize = 512;

/// Removes `name` in `parent` with all below it. Nothing there is no error; a mount in it is one
/// (EXDEV or EBUSY), and what lies in that mount stays.
pub fn tree(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    match dir::stat(parent, name)? {
        None => return Ok(()),
        Some(stat) if stat.st_mode & libc::S_IFMT != libc::S_IFDIR => return dir::unlink(parent, name),
        Some(_) => {}
    }
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    let top = openat2(parent, Path::new(std::ffi::OsStr::from_bytes(name.to_bytes())), flags, 0, Resolve::BeneathSameMount)?;
    let mut lifted = 0;
    clear(top.as_fd(), top.as_fd(), 0, &mut lifted)?;
    dir::remove_dir(parent, name)
}

/// Empties `at`; recursion is bounded by [`DEPTH`], what is deeper is moved to `top` and met again.
fn clear(top: BorrowedFd<'_>, at: BorrowedFd<'_>, depth: usize, lifted: &mut u64) -> io::Result<()> {
    loop {
        let names = dir::names_up_to(at, BATCH)?;
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            let name = name.as_c_str();
            match dir::stat(at, name)? {
                None => continue,
                Some(stat) if stat.st_mode & libc::S_IFMT != libc::S_IFDIR => {
                    dir::unlink(at, name)?;
                    continue;
                }
                Some(_) => {}
            }
            if depth >= DEPTH {
                lift(top, at, name, lifted)?;
                continue;
            }
            let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
            let below = openat2(at, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0, Resolve::BeneathSameMount)?;
            clear(top, below.as_fd(), depth + 1, lifted)?;
            dir::remove_dir(at, name)?;
        }
    }
}

/// Moves a deep directory to the top under a name that is free there.
fn lift(top: BorrowedFd<'_>, at: BorrowedFd<'_>, name: &CStr, lifted: &mut u64) -> io::Result<()> {
    loop {
        *lifted += 1;
        let free = format!("..lifted-{lifted}");
        match dir::rename(at, name, top, free.as_str()) {
            // The pod has made something of that name.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EEXIST | libc::ENOTEMPTY | libc::ENOTDIR)) => {}
            other => return other,
        }
    }
}
