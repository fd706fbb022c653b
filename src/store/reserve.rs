//! The reserve: blocks taken in good times, let go on a full disk so that exits, removals and
//! the journal's own clean-up still go through.
//!
//! Invariant: nothing is written while the reserve is there, and it is made again only where
//! that leaves more free than it takes. Source: fallocate(2).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{StoreError, is_full};
use super::fs::Fs;
use crate::sys::failpoint;

pub const DEFAULT_SIZE: u64 = 16 << 20;

#[derive(Debug)]
pub struct Reserve<F> {
    fs: Arc<F>,
    path: PathBuf,
    size: u64,
    held: AtomicBool,
}

impl<F: Fs> Reserve<F> {
    /// 0 is "no reserve".
    pub fn new(fs: Arc<F>, path: PathBuf, size: u64) -> Reserve<F> {
        let held = size == 0 || is_whole(&*fs, &path, size);
        Reserve { fs, path, size, held: AtomicBool::new(held) }
    }

    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Lets it go. True: there was one, so trying again makes sense.
    pub fn release(&self) -> bool {
        if self.size == 0 || !self.held.swap(false, Ordering::Relaxed) {
            return false;
        }
        let released = failpoint::hit("store.reserve.release").and_then(|()| self.fs.remove(&self.path)).is_ok();
        // What could not be let go is still there for the next one who asks.
        self.held.store(!released, Ordering::Relaxed);
        released
    }

    /// Makes it where it is missing and twice its size stays free. A disk without room for it
    /// is no error: that is what the reserve is for.
    pub fn ensure(&self) -> Result<(), StoreError> {
        if self.is_held() {
            return Ok(());
        }
        let failed = |e| StoreError::io("make the reserve", &self.path, e);
        let dir = super::atomic::parent(&self.path).map_err(failed)?;
        if self.fs.free(dir).map_err(failed)? < self.size.saturating_mul(3) {
            return Ok(());
        }
        match self.make() {
            Ok(()) => self.held.store(true, Ordering::Relaxed),
            Err(e) => {
                // Half a reserve is none; what stays of it is removed by the next try.
                let _ = self.fs.remove(&self.path);
                // A file system that cannot reserve blocks: running without is all that is left.
                let unable = e.raw_os_error() == Some(nix::libc::EOPNOTSUPP);
                if !is_full(&e) && !unable {
                    return Err(failed(e));
                }
                self.held.store(unable, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn make(&self) -> io::Result<()> {
        match self.fs.remove(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = self.fs.create(&self.path, 0o600)?;
        failpoint::hit("store.reserve.make")?;
        self.fs.allocate(&file, 0, self.size, false)
    }
}

/// A sparse or short file (a crash came before its blocks were on disk) reserves nothing.
fn is_whole<F: Fs>(fs: &F, path: &std::path::Path, size: u64) -> bool {
    fs.open(path).and_then(|file| Ok(fs.len(&file)? == size && fs.allocated(&file)? >= size)).unwrap_or(false)
}
