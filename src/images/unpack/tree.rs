//! Puts entries below one directory's fd.
//!
//! Invariant: every step opens one name in an open directory without following links; links on the
//! way are resolved here, part by part, with `/` and `..` ending at the layer's root. So nothing
//! outside the root can be reached even if another process changed the tree meanwhile.
//!
//! Whiteouts become overlay's character devices 0:0; what overlay would take for its own state
//! (a literal device 0:0, `trusted.overlay.*`) is refused. Layers: image-spec layer.md; overlay:
//! kernel.org overlayfs.html "whiteouts and opaque directories".

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::rc::Rc;

use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, SFlag};

use super::UnpackError;
use super::marks::{Mark, MarkWriter};
use super::names::{self, MAX_DEPTH, Place};
use crate::images::archive::{Entry, Kind, show};
use crate::sys::{dir, xattr};

/// As many links on one way as Linux follows.
const MAX_LINKS: usize = 40;

pub struct Tree {
    root: OwnedFd,
    /// The lowest layer has nothing to hide: its whiteouts mean nothing.
    base: bool,
    marks: MarkWriter,
    /// The last parent directory by its name in the archive: entries come sorted.
    last: Option<(Vec<u8>, Rc<Dir>)>,
    buffer: Vec<u8>,
}

struct Dir {
    fd: OwnedFd,
    /// Where it really is, links resolved: parts joined by `/`.
    path: Vec<u8>,
}

impl Dir {
    fn child(&self, name: &[u8]) -> Vec<u8> {
        if self.path.is_empty() { name.to_vec() } else { [&self.path, &b"/"[..], name].concat() }
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

/// Overlay's whiteout.
pub fn is_whiteout(stat: &FileStat) -> bool {
    kind(stat) == SFlag::S_IFCHR && stat.st_rdev == 0
}

pub fn is_dir(stat: &FileStat) -> bool {
    kind(stat) == SFlag::S_IFDIR
}

impl Tree {
    pub fn new(root: OwnedFd, marks: File, base: bool) -> Tree {
        Tree { root, base, marks: MarkWriter::new(marks), last: None, buffer: vec![0; 64 * 1024] }
    }

    /// Applies one entry; a file's bytes come from `data`.
    pub fn apply(&mut self, entry: &Entry, data: &mut impl Read) -> Result<(), UnpackError> {
        let refuse = |why: &str| UnpackError::Entry { name: show(&entry.name), why: why.to_owned() };
        let failed = |operation: &'static str| {
            let name = show(&entry.name);
            move |source| UnpackError::Io { operation, name, source }
        };
        match names::place(&entry.name).map_err(refuse)? {
            // As in containerd: the root stays what it is.
            Place::Root if entry.kind == Kind::Dir => Ok(()),
            Place::Root => Err(refuse("only a directory can be the root")),
            Place::Skip => Ok(()),
            Place::Whiteout { .. } | Place::Opaque { .. } if self.base => Ok(()),
            Place::Opaque { dir } => {
                let dir = self.parent(&dir, entry)?;
                self.marks.write(&Mark::Opaque(dir.path.clone())).map_err(failed("note"))
            }
            Place::Whiteout { parents, name } => {
                let parent = self.parent(&parents, entry)?;
                self.whiteout(&parent, name).map_err(failed("hide"))
            }
            Place::At { parents, name } => {
                check_xattrs(entry).map_err(refuse)?;
                let parent = self.parent(&parents, entry)?;
                self.place(&parent, name, entry, data)
            }
        }
    }

    /// Sets the directories' times, in the archive's order, so that the last one given counts.
    /// What follows for `finish` stays in the file.
    pub fn end(self) -> io::Result<()> {
        for mark in self.marks.into_reader()? {
            let Mark::Time { path, seconds, nanos } = mark? else { continue };
            // A directory that a later entry replaced is not there any more.
            if let Some(fd) = walk(&self.root, &path)? {
                dir::set_time_of(&fd, seconds, nanos)?;
            }
        }
        Ok(())
    }

    fn parent(&mut self, parts: &[&[u8]], entry: &Entry) -> Result<Rc<Dir>, UnpackError> {
        let key = parts.join(&b'/');
        if let Some((last, dir)) = &self.last
            && *last == key
        {
            return Ok(dir.clone());
        }
        let dir = Rc::new(self.resolve(parts, true).map_err(|e| match e {
            Resolve::Refused(why) => UnpackError::Entry { name: show(&entry.name), why: why.to_owned() },
            Resolve::Io(source) => UnpackError::Io { operation: "reach", name: show(&entry.name), source },
        })?);
        self.last = Some((key, dir.clone()));
        Ok(dir)
    }

    /// The directory that `parts` lead to from the root; `make` makes what is missing.
    fn resolve(&mut self, parts: &[&[u8]], make: bool) -> Result<Dir, Resolve> {
        let mut open = vec![self.root.try_clone()?];
        let mut path: Vec<Vec<u8>> = Vec::new();
        let mut ahead: VecDeque<Vec<u8>> = parts.iter().map(|p| p.to_vec()).collect();
        let mut links = 0;
        while let Some(part) = ahead.pop_front() {
            // The root is never popped.
            let Some(here) = open.last() else { return Err(Resolve::Refused("its parents lead nowhere")) };
            match part.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    if path.pop().is_some() {
                        open.pop();
                    }
                    continue;
                }
                _ => {}
            }
            if path.len() >= MAX_DEPTH {
                return Err(Resolve::Refused("it lies deeper than 256 directories"));
            }
            let name = part.as_slice();
            let fd = match dir::stat(here, name)? {
                Some(stat) if is_dir(&stat) => dir::open_dir(here, name)?,
                Some(stat) if kind(&stat) == SFlag::S_IFLNK => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Resolve::Refused("there are too many symbolic links on its way"));
                    }
                    let target = dir::read_link(here, name)?.into_vec();
                    if target.starts_with(b"/") {
                        open.truncate(1);
                        path.clear();
                    }
                    for part in target.split(|b| *b == b'/').rev() {
                        ahead.push_front(part.to_vec());
                    }
                    continue;
                }
                Some(stat) if is_whiteout(&stat) && make => {
                    // The layer hides the one below and begins a new one.
                    dir::unlink(here, name)?;
                    let full = [path.as_slice(), std::slice::from_ref(&part)].concat().join(&b'/');
                    self.marks.write(&Mark::Opaque(full))?;
                    dir::make_dir(here, name, 0o755)?;
                    dir::open_dir(here, name)?
                }
                Some(_) => return Err(Resolve::Refused("one of its parents is no directory")),
                None if make => {
                    dir::make_dir(here, name, 0o755)?;
                    let full = [path.as_slice(), std::slice::from_ref(&part)].concat().join(&b'/');
                    self.marks.write(&Mark::Implied(full))?;
                    dir::open_dir(here, name)?
                }
                None => return Err(Resolve::Refused("it is not in this layer")),
            };
            open.push(fd);
            path.push(part);
        }
        match open.pop() {
            Some(fd) => Ok(Dir { fd, path: path.join(&b'/') }),
            None => Err(Resolve::Refused("its parents lead nowhere")),
        }
    }

    /// Hides `name` of the layers below. What this layer itself has there stays: a directory
    /// becomes opaque.
    fn whiteout(&mut self, parent: &Dir, name: &[u8]) -> io::Result<()> {
        match dir::stat(&parent.fd, name)? {
            None => {
                dir::make_node(&parent.fd, name, SFlag::S_IFCHR, 0, (0, 0))?;
                self.marks.write(&Mark::Whiteout(parent.child(name)))
            }
            Some(stat) if is_dir(&stat) => self.marks.write(&Mark::Opaque(parent.child(name))),
            Some(_) => Ok(()),
        }
    }

    fn place(&mut self, parent: &Dir, name: &[u8], entry: &Entry, data: &mut impl Read) -> Result<(), UnpackError> {
        let refuse = |why: &str| UnpackError::Entry { name: show(&entry.name), why: why.to_owned() };
        let failed = |operation: &'static str| move |source| UnpackError::Io { operation, name: show(&entry.name), source };
        let before = dir::stat(&parent.fd, name).map_err(failed("look at"))?;
        let keep = entry.kind == Kind::Dir && before.as_ref().is_some_and(is_dir);
        if let Some(before) = before.as_ref().filter(|_| !keep) {
            if entry.kind == Kind::HardLink && self.same_file(parent, name, entry)? {
                return Ok(());
            }
            dir::remove_tree(&parent.fd, name, MAX_DEPTH).map_err(failed("replace"))?;
            self.last = None;
            if is_whiteout(before) && entry.kind == Kind::Dir {
                self.marks.write(&Mark::Opaque(parent.child(name))).map_err(failed("note"))?;
            }
        }
        match entry.kind {
            Kind::Dir => {
                if !keep {
                    dir::make_dir(&parent.fd, name, 0o700).map_err(failed("make directory"))?;
                }
                let fd = dir::open_dir(&parent.fd, name).map_err(failed("open directory"))?;
                stamp(&fd, entry).map_err(failed("set owner and mode of"))?;
                let (seconds, nanos) = entry.mtime;
                self.marks.write(&Mark::Time { path: parent.child(name), seconds, nanos }).map_err(failed("note"))
            }
            Kind::File => {
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
                let mut file = File::from(dir::open(&parent.fd, name, flags, 0o600).map_err(failed("make file"))?);
                self.copy(data, &mut file, entry)?;
                stamp(&file, entry).map_err(failed("set owner and mode of"))?;
                dir::set_time_of(&file, entry.mtime.0, entry.mtime.1).map_err(failed("set the time of"))
            }
            Kind::Symlink => {
                if entry.link.is_empty() {
                    return Err(refuse("a symbolic link to nothing"));
                }
                dir::make_link(entry.link.as_slice(), &parent.fd, name).map_err(failed("make link"))?;
                self.owner_and_time(parent, name, entry)
            }
            Kind::HardLink => {
                let (from, target) = self.link_target(entry)?;
                dir::hard_link(&from.fd, target.as_slice(), &parent.fd, name).map_err(failed("make hard link"))
            }
            Kind::Char | Kind::Block | Kind::Fifo => {
                if entry.kind == Kind::Char && entry.device == (0, 0) {
                    return Err(refuse("a character device 0:0 would be taken for a whiteout"));
                }
                let flag = match entry.kind {
                    Kind::Char => SFlag::S_IFCHR,
                    Kind::Block => SFlag::S_IFBLK,
                    _ => SFlag::S_IFIFO,
                };
                dir::make_node(&parent.fd, name, flag, entry.mode, entry.device).map_err(failed("make device"))?;
                self.owner_and_time(parent, name, entry)
            }
        }
    }

    fn copy(&mut self, data: &mut impl Read, file: &mut File, entry: &Entry) -> Result<(), UnpackError> {
        loop {
            let n = match data.read(&mut self.buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(UnpackError::Stream(source)),
            };
            let bytes = self.buffer.get(..n).unwrap_or_default();
            file.write_all(bytes).map_err(|source| UnpackError::Io { operation: "write", name: show(&entry.name), source })?;
        }
    }

    fn owner_and_time(&self, parent: &Dir, name: &[u8], entry: &Entry) -> Result<(), UnpackError> {
        dir::chown(&parent.fd, name, entry.uid, entry.gid)
            .and_then(|()| dir::set_time(&parent.fd, name, entry.mtime.0, entry.mtime.1))
            .map_err(|source| UnpackError::Io { operation: "set owner and time of", name: show(&entry.name), source })
    }

    /// The directory and the name that a hard link means: only a file of this layer.
    fn link_target(&mut self, entry: &Entry) -> Result<(Dir, Vec<u8>), UnpackError> {
        let refuse = |why: &str| UnpackError::Entry {
            name: show(&entry.name),
            why: format!("as a hard link to {} is refused: {why}", show(&entry.link)),
        };
        let mut parts = names::parts(&entry.link).map_err(refuse)?;
        let target = parts.pop().ok_or_else(|| refuse("it is the root"))?.to_vec();
        let from = self.resolve(&parts, false).map_err(|e| match e {
            Resolve::Refused(why) => refuse(why),
            Resolve::Io(source) => UnpackError::Io { operation: "reach", name: show(&entry.link), source },
        })?;
        let stat = dir::stat(&from.fd, target.as_slice());
        match stat.map_err(|source| UnpackError::Io { operation: "look at", name: show(&entry.link), source })? {
            Some(stat) if is_whiteout(&stat) => Err(refuse("it is not in this layer")),
            Some(stat) if is_dir(&stat) => Err(refuse("it is a directory")),
            Some(_) => Ok((from, target)),
            None => Err(refuse("it is not in this layer")),
        }
    }

    /// A link to itself must not remove the only name before it links.
    fn same_file(&mut self, parent: &Dir, name: &[u8], entry: &Entry) -> Result<bool, UnpackError> {
        let (from, target) = self.link_target(entry)?;
        let failed = |source| UnpackError::Io { operation: "look at", name: show(&entry.name), source };
        let (a, b) = (dir::stat(&parent.fd, name).map_err(failed)?, dir::stat(&from.fd, target.as_slice()).map_err(failed)?);
        Ok(matches!((a, b), (Some(a), Some(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)))
    }
}

/// Follows `path` without links; None: it does not lead to a directory.
pub fn walk(root: impl AsFd, path: &[u8]) -> io::Result<Option<OwnedFd>> {
    let mut here = root.as_fd().try_clone_to_owned()?;
    for part in path.split(|b| *b == b'/').filter(|p| !p.is_empty()) {
        match dir::stat(&here, part)? {
            Some(stat) if is_dir(&stat) => here = dir::open_dir(&here, part)?,
            _ => return Ok(None),
        }
    }
    Ok(Some(here))
}

enum Resolve {
    Refused(&'static str),
    Io(io::Error),
}

impl From<io::Error> for Resolve {
    fn from(error: io::Error) -> Resolve {
        Resolve::Io(error)
    }
}

/// Owner first: chown(2) takes set-user-ID and capabilities away.
fn stamp(fd: impl AsFd, entry: &Entry) -> io::Result<()> {
    dir::chown_of(&fd, entry.uid, entry.gid)?;
    dir::chmod_of(&fd, entry.mode)?;
    for (name, value) in entry.xattrs.iter().filter(|(name, _)| kept(name)) {
        // Names with a NUL were refused with the archive.
        let Ok(name) = CString::new(name.as_slice()) else { continue };
        match xattr::set(&fd, &name, value) {
            // As in containerd: a file system without attributes does without.
            Err(e) if e.raw_os_error() == Some(nix::libc::EOPNOTSUPP) => {}
            result => result?,
        }
    }
    Ok(())
}

/// File capabilities and users' own attributes; labels of other machines' policies are not kept.
fn kept(name: &[u8]) -> bool {
    name == b"security.capability" || (name.starts_with(b"user.") && !name.starts_with(b"user.overlay."))
}

fn check_xattrs(entry: &Entry) -> Result<(), &'static str> {
    if entry.xattrs.iter().any(|(name, _)| name.starts_with(b"trusted.overlay.")) {
        return Err("its attribute trusted.overlay.* would be taken for overlay's own");
    }
    let user: usize = entry.xattrs.iter().filter(|(name, _)| kept(name)).map(|(name, value)| name.len() + value.len()).sum();
    // What ext4 can hold beside an inode.
    if user > 3500 {
        return Err("it has more than 3500 bytes of extended attributes");
    }
    Ok(())
}
