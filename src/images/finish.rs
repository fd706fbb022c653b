//! The last steps on an unpacked layer, which need the layers below it or a right that the child
//! gave up: opaque marks, whiteouts that hide nothing, owners of directories that it only implied.
//!
//! Invariant: afterwards the layer shows through overlay as it would had it been unpacked on top of
//! a mounted image: a whiteout that would hide nothing is gone (a directory that merges with none
//! would show it), and an implied directory has mode, owner and time of the one below. Steps are
//! by fd, without links. Overlay ignores an opaque mark on a layer's root, so that one is spelt out.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use nix::sys::stat::{FileStat, SFlag};

use super::digest::{Digest, Hasher};
use super::unpack::marks::{Mark, MarkReader};
use super::unpack::tree::{is_dir, is_whiteout, walk};
use super::unpack::{MARKS, TREE};
use crate::sys::{dir, xattr};

const OPAQUE: &std::ffi::CStr = c"trusted.overlay.opaque";

/// Finishes `staged` (holding `fs` and `marks`); `below` are the trees under it, topmost first.
/// Returns the tree's listing digest.
pub fn finish(staged: &Path, below: &[OwnedFd]) -> io::Result<Digest> {
    let layer = dir::open_root(&staged.join(TREE))?;
    let marks = || -> io::Result<_> { Ok(MarkReader::new(File::open(staged.join(MARKS))?)) };
    for mark in marks()? {
        if let Mark::Opaque(path) = mark? {
            match walk(&layer, &path)? {
                Some(_) if path.is_empty() => hide_all(&layer, below)?,
                Some(fd) => xattr::set(fd, OPAQUE, b"y")?,
                None => {}
            }
        }
    }
    for mark in marks()? {
        if let Mark::Whiteout(path) = mark? {
            let seen = !below_opaque(&layer, &path)? && lookup(below, &path)?.is_some();
            if !seen {
                drop_whiteout(&layer, &path)?;
            }
        }
    }
    for mark in marks()? {
        if let Mark::Implied(path) = mark?
            && !below_opaque(&layer, &path)?
            && let Some(stat) = lookup(below, &path)?
            && let Some(fd) = walk(&layer, &path)?
        {
            if is_dir(&stat) {
                resemble(&fd, &stat)?;
            } else if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFLNK {
                drop(fd);
                move_to_target(&layer, below, &path)?;
            }
        }
    }
    listing(&layer)
}

#[allow(clippy::unnecessary_cast)] // times are 32 bits wide on armv7
fn resemble(fd: &OwnedFd, stat: &FileStat) -> io::Result<()> {
    dir::chown_of(fd, stat.st_uid, stat.st_gid)?;
    dir::chmod_of(fd, stat.st_mode & 0o7777)?;
    // Nanoseconds are below 10^9.
    dir::set_time_of(fd, stat.st_mtime as i64, stat.st_mtime_nsec as u32)
}

fn is_opaque(fd: impl AsFd) -> io::Result<bool> {
    let mut value = [0; 8];
    Ok(matches!(xattr::read(fd, OPAQUE, &mut value), Ok(Some(b"y"))))
}

fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty())
}

/// Whether a directory above `path` hides what lies below this layer.
fn below_opaque(layer: &OwnedFd, path: &[u8]) -> io::Result<bool> {
    let mut here = layer.try_clone()?;
    let count = parts(path).count();
    for part in parts(path).take(count.saturating_sub(1)) {
        match dir::stat(&here, part)? {
            Some(stat) if is_dir(&stat) => here = dir::open_dir(&here, part)?,
            _ => return Ok(false),
        }
        if is_opaque(&here)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What the merged layers (topmost first) show at `path`, links not followed.
fn lookup(layers: &[OwnedFd], path: &[u8]) -> io::Result<Option<FileStat>> {
    let count = parts(path).count();
    'layers: for layer in layers {
        let mut here = layer.try_clone()?;
        let mut hides = false;
        for (at, part) in parts(path).enumerate() {
            match dir::stat(&here, part)? {
                None if hides => return Ok(None),
                None => continue 'layers,
                Some(stat) if is_whiteout(&stat) => return Ok(None),
                Some(stat) if at + 1 == count => return Ok(Some(stat)),
                Some(stat) if is_dir(&stat) => {
                    here = dir::open_dir(&here, part)?;
                    hides |= is_opaque(&here)?;
                }
                Some(_) => return Ok(None),
            }
        }
    }
    Ok(None)
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(slash) => (path.get(..slash).unwrap_or_default(), path.get(slash + 1..).unwrap_or_default()),
        None => (b"", path),
    }
}

#[allow(clippy::unnecessary_cast)] // times are 32 bits wide on armv7
fn drop_whiteout(layer: &OwnedFd, path: &[u8]) -> io::Result<()> {
    let (parent, name) = split(path);
    let Some(fd) = walk(layer, parent)? else { return Ok(()) };
    // A later entry may have taken its place.
    if dir::stat(&fd, name)?.is_some_and(|stat| is_whiteout(&stat)) {
        let before = dir::stat_of(&fd)?;
        dir::unlink(&fd, name)?;
        dir::set_time_of(&fd, before.st_mtime as i64, before.st_mtime_nsec as u32)?;
    }
    Ok(())
}

/// An opaque root: every name of the layers below is hidden by itself.
#[allow(clippy::unnecessary_cast)] // times are 32 bits wide on armv7
fn hide_all(layer: &OwnedFd, below: &[OwnedFd]) -> io::Result<()> {
    let before = dir::stat_of(layer)?;
    for root in below {
        for name in dir::names(root)? {
            match dir::stat(layer, name.as_c_str())? {
                None => dir::make_node(layer, name.as_c_str(), SFlag::S_IFCHR, 0, (0, 0))?,
                Some(stat) if is_dir(&stat) => xattr::set(dir::open_dir(layer, name.as_c_str())?, OPAQUE, b"y")?,
                Some(_) => {}
            }
        }
    }
    dir::set_time_of(layer, before.st_mtime as i64, before.st_mtime_nsec as u32)
}

/// The layer wrote below `path`, which is a symbolic link further down: on a mounted image its
/// files would have gone to the link's target, so there they go (`lib/x` where `lib` → `usr/lib`).
fn move_to_target(layer: &OwnedFd, below: &[OwnedFd], path: &[u8]) -> io::Result<()> {
    let Some(target) = resolve_below(below, path)? else { return Ok(()) };
    if target == path || target.starts_with(&[path, b"/"].concat()) {
        return Ok(());
    }
    let mut here = layer.try_clone()?;
    let mut so_far = Vec::new();
    for part in parts(&target) {
        if !so_far.is_empty() {
            so_far.push(b'/');
        }
        so_far.extend_from_slice(part);
        match dir::stat(&here, part)? {
            Some(stat) if is_dir(&stat) => here = dir::open_dir(&here, part)?,
            Some(_) => return Ok(()),
            None => {
                dir::make_dir(&here, part, 0o755)?;
                here = dir::open_dir(&here, part)?;
                if let Some(stat) = lookup(below, &so_far)?.filter(is_dir) {
                    resemble(&here, &stat)?;
                }
            }
        }
    }
    let (parent, name) = split(path);
    let Some(parent) = walk(layer, parent)? else { return Ok(()) };
    let from = dir::open_dir(&parent, name)?;
    merge(&from, &here, 256)?;
    dir::remove_tree(&parent, name, 256)
}

/// Moves all of `from` into `to`; what `to` has already stays.
fn merge(from: &OwnedFd, to: &OwnedFd, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::from_raw_os_error(nix::libc::ELOOP));
    }
    for name in dir::names(from)? {
        let name = name.as_c_str();
        match (dir::stat(from, name)?, dir::stat(to, name)?) {
            (Some(_), None) => dir::rename(from, name, to, name)?,
            (Some(a), Some(b)) if is_dir(&a) && is_dir(&b) => {
                merge(&dir::open_dir(from, name)?, &dir::open_dir(to, name)?, depth - 1)?
            }
            _ => {}
        }
    }
    Ok(())
}

/// Where a link of the merged layers leads; None: nowhere, or round in a circle.
fn resolve_below(below: &[OwnedFd], path: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut links = 0;
    let mut done: Vec<Vec<u8>> = Vec::new();
    let mut ahead: Vec<Vec<u8>> = parts(path).map(<[u8]>::to_vec).collect();
    ahead.reverse();
    while let Some(part) = ahead.pop() {
        match part.as_slice() {
            b"" | b"." => continue,
            b".." => {
                done.pop();
                continue;
            }
            _ => {}
        }
        done.push(part);
        let here = done.join(&b'/');
        let stat = lookup(below, &here)?;
        if stat.is_none_or(|s| SFlag::from_bits_truncate(s.st_mode) & SFlag::S_IFMT != SFlag::S_IFLNK) {
            continue;
        }
        links += 1;
        let Some(target) = link_at(below, &here)?.filter(|_| links <= 40) else { return Ok(None) };
        done.pop();
        if target.starts_with(b"/") {
            done.clear();
        }
        ahead.extend(target.split(|b| *b == b'/').rev().map(<[u8]>::to_vec));
        if ahead.len() + done.len() > 256 {
            return Ok(None);
        }
    }
    Ok(Some(done.join(&b'/')))
}

fn link_at(layers: &[OwnedFd], path: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let (parent, name) = split(path);
    for layer in layers {
        if let Some(fd) = walk(layer, parent)?
            && dir::stat(&fd, name)?.is_some()
        {
            return Ok(Some(dir::read_link(&fd, name)?.into_vec()));
        }
    }
    Ok(None)
}

/// A digest over everything of a tree but its files' bytes: it shows files that were lost, cut
/// short or changed, at the price of a stat each.
pub fn listing(layer: &OwnedFd) -> io::Result<Digest> {
    let mut hasher = Hasher::default();
    list(layer, &mut hasher, 256)?;
    Ok(hasher.digest())
}

#[allow(clippy::unnecessary_cast)] // times and devices are 32 bits wide on armv7
fn list(here: &OwnedFd, hasher: &mut Hasher, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::from_raw_os_error(nix::libc::ELOOP));
    }
    let mut names = dir::names(here)?;
    names.sort();
    for name in names {
        let Some(stat) = dir::stat(here, name.as_c_str())? else { continue };
        hasher.update(name.to_bytes_with_nul());
        let size = if is_dir(&stat) { 0 } else { stat.st_size as u64 };
        let numbers = [
            u64::from(stat.st_mode),
            u64::from(stat.st_uid),
            u64::from(stat.st_gid),
            size,
            stat.st_rdev,
            stat.st_mtime as u64,
            stat.st_mtime_nsec as u64,
        ];
        for number in numbers {
            hasher.update(&number.to_le_bytes());
        }
        if is_dir(&stat) {
            list(&dir::open_dir(here, name.as_c_str())?, hasher, depth - 1)?;
            hasher.update(&[0xff]);
        }
    }
    Ok(())
}
