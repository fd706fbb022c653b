//! Small files that are whole or absent: temp, fsync, rename, fsync of the directory.
//!
//! Invariant: under `path` there is at any moment, and after any crash, the old content or the
//! new one. A temp file that a crash left is named `.<name>.<pid>-<n>.tmp`; [`sweep`] removes it.
//!
//! Source: rename(2) and fsync(2); that ext4's auto_da_alloc hides a missing fsync is not relied on.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::StoreError;
use super::fs::{Disk, Fs};
use crate::sys::failpoint;

/// Replaces `path` by `bytes`, with this mode whatever the umask is; durable on return. Two
/// writers of one path do not mix: the later rename wins.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    write_on(&Disk, path, bytes, mode)
}

/// All of a regular file that has at most `max` bytes; None where there is none.
pub fn read_bounded(path: &Path, max: u64) -> Result<Option<Vec<u8>>, StoreError> {
    read_on(&Disk, path, max)
}

/// Removes what crashes left of [`write`]s into `dir`. Only while nothing else writes there.
pub fn sweep(dir: &Path) -> Result<(), StoreError> {
    sweep_on(&Disk, dir)
}

pub(super) fn write_on<F: Fs>(fs: &F, path: &Path, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
    let failed = |e| StoreError::io("write", path, e);
    let dir = parent(path).map_err(failed)?;
    let temp = dir.join(temp_name(path));
    let renamed = (|| {
        let file = fs.create(&temp, mode)?;
        fs.write_at(&file, bytes, 0)?;
        failpoint::hit("store.atomic.write")?;
        fs.sync(&file)?;
        failpoint::hit("store.atomic.sync")?;
        fs.rename(&temp, path)
    })();
    if let Err(e) = renamed {
        // The first error is the one to tell; a temp file that stays is swept at the next start.
        let _ = fs.remove(&temp);
        return Err(failed(e));
    }
    failpoint::hit("store.atomic.rename").and_then(|()| fs.sync_dir(dir)).map_err(failed)
}

pub(super) fn read_on<F: Fs>(fs: &F, path: &Path, max: u64) -> Result<Option<Vec<u8>>, StoreError> {
    let failed = |e| StoreError::io("read", path, e);
    let file = match fs.open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed(e)),
    };
    let too_large = |len| StoreError::FileTooLarge { path: path.to_owned(), len, max };
    let len = fs.len(&file).map_err(failed)?;
    if len > max {
        return Err(too_large(len));
    }
    // Files of /proc and /sys say 0, and any file may grow meanwhile: read to the end.
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0).saturating_add(1));
    let mut chunk = [0; 4096];
    loop {
        match fs.read_at(&file, &mut chunk, bytes.len() as u64).map_err(failed)? {
            0 => return Ok(Some(bytes)),
            n => bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
        }
        if bytes.len() as u64 > max {
            return Err(too_large(bytes.len() as u64));
        }
    }
}

pub(super) fn sweep_on<F: Fs>(fs: &F, dir: &Path) -> Result<(), StoreError> {
    let names = match fs.names(dir) {
        Ok(names) => names,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StoreError::io("list", dir, e)),
    };
    for name in names.iter().filter(|n| is_temp(n)) {
        let path = dir.join(name);
        fs.remove(&path).map_err(|e| StoreError::io("remove", path, e))?;
    }
    Ok(())
}

fn is_temp(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".tmp")
}

fn temp_name(path: &Path) -> OsString {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}-{n}.tmp", std::process::id()));
    name
}

/// The directory of a path; a path without one names nothing that can be replaced.
pub(super) fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().filter(|p| !p.as_os_str().is_empty()).ok_or_else(|| io::Error::other("the path names no file in a directory"))
}

/// `mkdir -p`, each new name durable.
pub(super) fn make_dirs<F: Fs>(fs: &F, dir: &Path) -> Result<(), StoreError> {
    let mut missing: Vec<PathBuf> = Vec::new();
    let mut at = dir;
    loop {
        match fs.make_dir(at) {
            // Also where it was there: whoever made it may have been killed before this.
            Ok(_) => {
                sync_parent(fs, at)?;
                break;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                missing.push(at.to_owned());
                at = parent(at).map_err(|_| StoreError::io("make", dir, e))?;
            }
            Err(e) => return Err(StoreError::io("make", at, e)),
        }
    }
    for dir in missing.iter().rev() {
        fs.make_dir(dir).map_err(|e| StoreError::io("make", dir, e))?;
        sync_parent(fs, dir)?;
    }
    Ok(())
}

fn sync_parent<F: Fs>(fs: &F, dir: &Path) -> Result<(), StoreError> {
    match parent(dir) {
        Ok(parent) => fs.sync_dir(parent).map_err(|e| StoreError::io("sync", parent, e)),
        // `/`, or a name relative to the working directory: no entry of ours to sync.
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn writes_replace_whole_and_leave_no_temp() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for text in ["first, the longer one", "second"] {
            write(&path, text.as_bytes(), 0o666).unwrap();
            assert_eq!(read_bounded(&path, 100).unwrap().unwrap(), text.as_bytes());
        }
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        std::fs::write(dir.path().join(".file.1-1.tmp"), "left over").unwrap();
        sweep(dir.path()).unwrap();
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["file"]);
    }

    #[test]
    fn reads_are_bounded_and_of_regular_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read_bounded(&path, 10).unwrap(), None);
        std::fs::write(&path, "eleven byte").unwrap();
        let e = read_bounded(&path, 10).unwrap_err();
        assert!(matches!(e, StoreError::FileTooLarge { len: 11, max: 10, .. }), "{e}");
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        read_bounded(&dir.path().join("fifo"), 10).unwrap_err();
        read_bounded(dir.path(), 10).unwrap_err();
        let e = write(&dir.path().join("absent/file"), b"x", 0o600).unwrap_err();
        assert!(e.to_string().contains("cannot write"), "{e}");
    }
}
