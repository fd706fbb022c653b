//! The atomic writer: files of a volume change all at once, or not at all.
//!
//! ```text
//! NAME/key        -> ..data/key                    (what containers open)
//! NAME/..data     -> ..2026_11_30_10_23_01.123     (renamed over: the swap)
//! NAME/..2026_11_30_10_23_01.123/key               (the files)
//! ```
//!
//! Every step is relative to the volume's fd and follows no link that it did not read itself; a
//! crash at any step leaves the old or the new files in effect, and the next call sweeps up.
//! kubernetes/pkg/volume/util/atomic_writer.go.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;

use nix::fcntl::OFlag;

use super::plan::Files;
use crate::sys::{dir, failpoint};

const DATA: &str = "..data";
const DATA_TMP: &str = "..data_tmp";

/// Makes `volume` hold `files` and nothing else that a former call put there. `group`: fsGroup.
/// `name`: the new directory's, `..` and a time. False: it held them already, nothing was written.
pub fn write(volume: BorrowedFd<'_>, files: &Files<'_>, group: Option<u32>, name: &str) -> io::Result<bool> {
    let current = match dir::read_link(volume, DATA) {
        Ok(target) => Some(target.into_string().unwrap_or_default()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(e),
    };
    // Only a name of our own making is believed.
    let current = current.filter(|t| t.starts_with("..") && !t.contains('/') && t.len() > 2);
    let mut stale = BTreeSet::new();
    let mut changed = true;
    if let Some(current) = &current {
        let old = dir::open_dir(volume, current.as_str());
        if let Ok(old) = old {
            let paths = tops(&old)?;
            changed = !same(&old, files)? || paths != tops_of(files);
            stale = paths;
        }
    }
    if changed {
        make(volume, files, group, name)?;
        failpoint::hit("volumes.write.tree")?;
        match dir::unlink(volume, DATA_TMP) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => dir::make_link(name, volume, DATA_TMP)?,
        }
        dir::rename(volume, DATA_TMP, volume, DATA)?;
        failpoint::hit("volumes.write.swap")?;
    }
    let wanted = tops_of(files);
    let linked = links(volume, &wanted)?;
    failpoint::hit("volumes.write.links")?;
    for old in stale.difference(&wanted) {
        unlink_link(volume, old)?;
    }
    // Swept on every call: an earlier one may have been cut off after its swap.
    let keep = if changed { name } else { current.as_deref().unwrap_or(name) };
    for entry in dir::names(volume)? {
        let entry = OsString::from_vec(entry.into_bytes());
        match entry.to_str() {
            Some(text) if text.starts_with("..") && text != DATA && text != keep => dir::remove_tree(volume, text, 64)?,
            _ => {}
        }
    }
    failpoint::hit("volumes.write.sweep")?;
    Ok(changed || linked)
}

/// First parts of all paths: what stands in the volume's own directory.
fn tops_of(files: &Files<'_>) -> BTreeSet<String> {
    files.keys().map(|path| path.split('/').next().unwrap_or(path).to_owned()).collect()
}

fn tops(old: &OwnedFd) -> io::Result<BTreeSet<String>> {
    let name = |n: CString| n.into_string().map_err(io::Error::other);
    dir::names(old)?.into_iter().map(name).collect()
}

/// Whether every wanted file stands there with its bytes and mode. (Whether more stands there is
/// seen by the first parts, and below them only our own items can stand.)
fn same(old: &OwnedFd, files: &Files<'_>) -> io::Result<bool> {
    let mut count = 0;
    for (path, wanted) in files {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
        let resolve = crate::sys::file::Resolve::BeneathNoSymlinks;
        let file = match crate::sys::file::openat2(old.as_fd(), path.as_ref(), flags, 0, resolve) {
            Ok(fd) => File::from(fd),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        let meta = file.metadata()?;
        use std::os::unix::fs::PermissionsExt;
        // fsGroup adds read for the group; it is a constant of the pod.
        if meta.len() != wanted.bytes.len() as u64 || meta.permissions().mode() & wanted.mode != wanted.mode {
            return Ok(false);
        }
        let mut bytes = Vec::with_capacity(wanted.bytes.len());
        file.take(wanted.bytes.len() as u64 + 1).read_to_end(&mut bytes)?;
        let same = bytes == wanted.bytes;
        bytes.fill(0);
        std::hint::black_box(&bytes);
        if !same {
            return Ok(false);
        }
        count += 1;
    }
    Ok(count == count_files(old.as_fd(), 64)?)
}

fn count_files(at: BorrowedFd<'_>, depth: usize) -> io::Result<usize> {
    let mut count = 0;
    for name in dir::names(at)? {
        match dir::stat(at, name.as_c_str())? {
            Some(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFDIR && depth > 0 => {
                count += count_files(dir::open_dir(at, name.as_c_str())?.as_fd(), depth - 1)?;
            }
            Some(_) => count += 1,
            None => {}
        }
    }
    Ok(count)
}

fn make(volume: BorrowedFd<'_>, files: &Files<'_>, group: Option<u32>, name: &str) -> io::Result<()> {
    dir::remove_tree(volume, name, 64)?;
    let top = make_dir(volume, name, group)?;
    for (path, file) in files {
        let mut parts: Vec<&str> = path.split('/').collect();
        let Some(last) = parts.pop() else { continue };
        let mut above = top.try_clone()?;
        for part in parts {
            above = match dir::open_dir(&above, part) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => make_dir(above.as_fd(), part, group)?,
                other => other?,
            };
        }
        let fd = dir::open(&above, last, OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL, 0o600)?;
        let mut out = File::from(fd);
        out.write_all(file.bytes)?;
        let mut mode = file.mode;
        if let Some(group) = group {
            dir::chown_of(&out, 0, group)?;
            mode |= 0o440;
        }
        dir::chmod_of(&out, mode)?;
    }
    Ok(())
}

fn make_dir(at: BorrowedFd<'_>, name: &str, group: Option<u32>) -> io::Result<OwnedFd> {
    dir::make_dir(at, name, 0o755)?;
    let made = dir::open_dir(at, name)?;
    let mut mode = 0o755;
    if let Some(group) = group {
        dir::chown_of(&made, 0, group)?;
        mode |= 0o2550;
    }
    dir::chmod_of(&made, mode)?;
    Ok(made)
}

/// `key -> ..data/key` for each wanted name that has no link yet. True: one was made.
fn links(volume: BorrowedFd<'_>, wanted: &BTreeSet<String>) -> io::Result<bool> {
    let mut made = false;
    for name in wanted {
        let target = format!("{DATA}/{name}");
        match dir::read_link(volume, name.as_str()) {
            Ok(old) if old.to_str() == Some(&target) => continue,
            Ok(_) => dir::unlink(volume, name.as_str())?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            // No link: a directory that a subPath made here before the key was there.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => dir::remove_tree(volume, name.as_str(), 64)?,
            Err(e) => return Err(e),
        }
        dir::make_link(target.as_str(), volume, name.as_str())?;
        made = true;
    }
    Ok(made)
}

fn unlink_link(volume: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match dir::stat(volume, name)? {
        Some(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFLNK => dir::unlink(volume, name),
        _ => Ok(()),
    }
}
