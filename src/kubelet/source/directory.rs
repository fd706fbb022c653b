//! Reads the manifests directory: bounded, without blocking on what is no regular file, and
//! without reading again what has not changed.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::identity::Identity;
use super::plan::Found;

/// The API server takes objects of 3 MiB; a file may hold several.
const MAX_FILE: u64 = 10 << 20;
const MAX_ENTRIES: usize = 10_000;
/// A file changed less than this before it was read may change again within one tick of the file
/// system's clock (2 s on FAT): its time stamp proves nothing yet.
const SETTLED_NANOS: i64 = 3_000_000_000;

pub struct Directory {
    path: PathBuf,
    boot_id: String,
    stamps: BTreeMap<OsString, Stamp>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: i64,
    changed: i64,
}

impl Stamp {
    fn of(meta: &Metadata) -> Stamp {
        let nanos = |s: i64, n: i64| s.saturating_mul(1_000_000_000).saturating_add(n);
        Stamp {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: nanos(meta.mtime(), meta.mtime_nsec()),
            changed: nanos(meta.ctime(), meta.ctime_nsec()),
        }
    }

    fn settled(&self, now: i64) -> bool {
        now.saturating_sub(self.modified.max(self.changed)) > SETTLED_NANOS
    }
}

pub struct Listing {
    pub identity: Identity,
    /// No entry at all, dot files counted.
    pub empty: bool,
    pub found: BTreeMap<String, Found>,
    /// A file changed while it was read: look again soon.
    pub moving: bool,
}

impl Directory {
    pub fn new(path: PathBuf, boot_id: String) -> Directory {
        Directory { path, boot_id, stamps: BTreeMap::new() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Forgets what need not be read again: the next look reads everything.
    pub fn forget(&mut self) {
        self.stamps.clear();
    }

    /// `busy`: names that somebody is writing; `now`: wall-clock nanoseconds.
    pub fn look(&mut self, busy: &BTreeSet<OsString>, now: i64) -> Result<Listing, String> {
        let failed = |e: io::Error| format!("{}: {e}: nothing ends until it can be read again", self.path.display());
        let before = self.identity().map_err(failed)?;
        let mut entries: Vec<OsString> = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            entries.push(entry.map_err(failed)?.file_name());
            if entries.len() > MAX_ENTRIES {
                return Err(format!("{} has more than {MAX_ENTRIES} entries: remove some", self.path.display()));
            }
        }
        let mut listing = Listing { identity: before, empty: entries.is_empty(), found: BTreeMap::new(), moving: false };
        let mut stamps = BTreeMap::new();
        for name in entries.into_iter().filter(|n| !n.as_bytes().starts_with(b".")) {
            let Some((found, stamp)) = self.file(&name, busy.contains(&name), now) else { continue };
            listing.moving |= matches!(found, Found::Busy) && !busy.contains(&name);
            listing.found.insert(shown(&name), found);
            if let Some(stamp) = stamp {
                stamps.insert(name, stamp);
            }
        }
        if self.identity().map_err(failed)? != listing.identity {
            return Err(format!("{} was exchanged while it was read", self.path.display()));
        }
        self.stamps = stamps;
        Ok(listing)
    }

    fn identity(&self) -> io::Result<Identity> {
        let meta = fs::metadata(&self.path)?;
        if !meta.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let fs = nix::sys::statvfs::statvfs(&self.path)?;
        // Its width differs by target (32 bits on armv7).
        #[allow(clippy::useless_conversion)]
        let file_system = u64::from(fs.filesystem_id());
        Ok(Identity { boot_id: self.boot_id.clone(), device: meta.dev(), inode: meta.ino(), file_system })
    }

    /// None: not there (any more), or a directory. The stamp only where it may be trusted.
    fn file(&self, name: &OsStr, busy: bool, now: i64) -> Option<(Found, Option<Stamp>)> {
        let path = self.path.join(name);
        let unreadable = |why: String| Some((Found::Unreadable(why), None));
        let cannot = |e: io::Error| unreadable(format!("cannot be read: {e}"));
        // Links are followed: `pod.yaml -> ..data/pod.yaml` is how a mounted ConfigMap looks.
        let meta = match fs::metadata(&path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // Gone since the directory was read, or a link to nowhere.
                return if fs::symlink_metadata(&path).is_ok() { unreadable("is a link to nothing".to_owned()) } else { None };
            }
            Err(e) => return cannot(e),
        };
        if meta.is_dir() {
            return None;
        }
        if let Some(kind) = special(&meta) {
            return unreadable(format!("is a {kind}, not a file: remove it"));
        }
        let stamp = Stamp::of(&meta);
        if busy {
            return Some((Found::Busy, None));
        }
        if self.stamps.get(name) == Some(&stamp) {
            return Some((Found::Same, Some(stamp)));
        }
        if stamp.size > MAX_FILE {
            return unreadable(format!("has {} bytes, more than the {MAX_FILE} that are read: split it", stamp.size));
        }
        match read(&path) {
            Ok((text, after)) if after == stamp => Some((Found::Text(text), stamp.settled(now).then_some(stamp))),
            Ok(_) => Some((Found::Busy, None)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => cannot(e),
        }
    }
}

/// Opens without waiting for a writer or a terminal; another kind of file put there since is no
/// danger, since it is looked at again before it is read.
fn read(path: &Path) -> io::Result<(Vec<u8>, Stamp)> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("is no regular file any more"));
    }
    let mut text = Vec::new();
    (&file).take(MAX_FILE + 1).read_to_end(&mut text)?;
    Ok((text, Stamp::of(&file.metadata()?)))
}

fn special(meta: &Metadata) -> Option<&'static str> {
    let kind = meta.file_type();
    if kind.is_fifo() {
        Some("named pipe")
    } else if kind.is_socket() {
        Some("socket")
    } else if kind.is_block_device() || kind.is_char_device() {
        Some("device")
    } else {
        None
    }
}

/// A name as it stands in messages and origins; bytes that are no UTF-8 are escaped.
pub fn shown(name: &OsStr) -> String {
    name.to_str().map_or_else(|| name.as_bytes().escape_ascii().to_string(), str::to_owned)
}
