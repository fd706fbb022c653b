//! subPath by descriptor: what a pod puts in the way (links, exchanged directories) never leads
//! out of the volume, at no moment. CVE-2017-1002101, CVE-2021-25741.
//!
//! The kernel resolves each part with RESOLVE_BENEATH, links inside the volume included; what was
//! opened is what is bound, by /proc/self/fd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::sys::dir;
use crate::sys::file::{Resolve, openat2};

/// Opens (O_PATH) what `sub_path` names in `volume`. What is missing is made as directories with
/// the mode of the volume's root.
pub fn open(volume: BorrowedFd<'_>, sub_path: &str) -> io::Result<OwnedFd> {
    let parts: Vec<&str> = sub_path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    if sub_path.starts_with('/') || parts.contains(&"..") {
        return Err(io::Error::other("must be a relative path without '..'"));
    }
    let mut found = volume.try_clone_to_owned()?;
    let mut path = PathBuf::new();
    for part in parts {
        let parent = found;
        path.push(part);
        found = match openat2(volume, &path, OFlag::O_PATH, 0, Resolve::Beneath) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let mode = dir::stat_of(volume)?.st_mode & 0o777;
                make(parent.as_fd(), part, mode)?
            }
            other => other?,
        };
    }
    Ok(found)
}

/// A directory right in `parent`, which is already known to lie in the volume. A link or a file
/// that was put there in this moment is refused.
fn make(parent: BorrowedFd<'_>, name: &str, mode: u32) -> io::Result<OwnedFd> {
    match dir::make_dir(parent, name, mode) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let made = openat2(parent, Path::new(name), OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0, Resolve::BeneathNoSymlinks)?;
    // The process's umask took bits away.
    dir::chmod_of(&made, mode | dir::stat_of(&made)?.st_mode & 0o7000)?;
    Ok(made)
}

/// The kernel's refusals in words.
pub fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EXDEV) => "it leads out of the volume: links in it must stay inside".to_owned(),
        Some(libc::ELOOP) => "a link stands in its way".to_owned(),
        Some(libc::ENOTDIR) => "a part of it is a file".to_owned(),
        _ => error.to_string(),
    }
}
