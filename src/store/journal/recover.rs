//! Opening a journal: reads it, sets aside what is no record, and writes it anew.
//!
//! Invariant: each step may be cut off and is taken again by the next open; what an open
//! returned is durable. Only a file system that cannot be written at all stops it.

use std::io;
use std::path::PathBuf;

use super::super::error::{StoreError, is_full};
use super::super::frame::{Entry, Next, Scan};
use super::super::fs::Fs;
use super::super::lost;
use super::{Fold, Found, Journal, Writer};
use crate::sys::failpoint;

impl<F: Fs, S: Fold> Journal<F, S> {
    pub(super) fn recover(&self, state: &mut S, found: &mut Found) -> Result<Writer<F>, StoreError> {
        self.remove_temp().map_err(|e| StoreError::io("remove", self.temp(), e))?;
        let file = match self.fs.open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return self.fresh(),
            Err(e) if is_unreadable(&e) => {
                found.lost.push(self.set_aside()?);
                return self.fresh();
            }
            Err(e) => return Err(StoreError::io("open", &self.path, e)),
        };
        let len = self.fs.len(&file).map_err(|e| StoreError::io("read", &self.path, e))?;
        let mut unknown = Vec::new();
        let mut scan = Scan::new(&*self.fs, &file, len);
        let stop = loop {
            match scan.step() {
                Next::Record(entry) if entry.is_mark() => {}
                Next::Record(entry) => {
                    found.records += 1;
                    if !state.apply(&entry) {
                        unknown.push(entry);
                    }
                }
                stop @ (Next::Bad | Next::Unreadable(_)) => {
                    match scan.resync().map_err(|e| StoreError::io("read", &self.path, e))? {
                        Some(spoilt) => found.spoilt += spoilt,
                        None => break stop,
                    }
                }
                stop => break stop,
            }
        };
        if found.spoilt > 0 {
            found.lost.push(self.set_aside()?);
        }
        found.unknown = unknown.len() as u64;
        let (good, seq) = (scan.good, scan.seq);
        let Some(seq) = seq else {
            // Not even a first record, which is never so after a crash alone.
            found.lost.push(self.set_aside()?);
            return self.fresh();
        };
        match stop {
            Next::End | Next::Record(_) => {}
            Next::Bad => {
                found.cut = len - good;
                match self.with_room(|| lost::copy_tail(&*self.fs, &self.dir, &self.path, &file, good)) {
                    Ok(aside) => found.lost.extend(aside),
                    // Bytes that are no record must not keep the node down on a full disk.
                    Err(e) if is_full(&e) => {
                        tracing::warn!(journal = %self.path.display(), "no room to set {} bad bytes aside", found.cut);
                    }
                    Err(e) => return Err(StoreError::io("set aside the end of", &self.path, e)),
                }
            }
            Next::Unreadable(_) => {
                found.cut = len - good;
                found.lost.push(self.set_aside()?);
            }
        }
        let mut writer = Writer { file, len: good, seq, base: good, allocated: good, trusted: true };
        self.settle(&mut writer, state, &unknown, found.cut > 0)?;
        Ok(writer)
    }

    /// A killed process may have left records that only the page cache has, even ones whose
    /// fsync failed. They are believed from here on, so they are written anew; and nothing of a bad
    /// tail may show up again behind what is appended next.
    fn settle(&self, writer: &mut Writer<F>, state: &S, unknown: &[Entry], cut: bool) -> Result<(), StoreError> {
        if self.options.durable {
            let mut write = || self.write_new(writer, state, unknown, &[]);
            match write() {
                Err(e) if e.is_no_space() && (self.options.room)() && write().is_ok() => return Ok(()),
                // No room for that either: the old file serves, made as durable as it can be.
                Err(e) if e.is_no_space() => {}
                outcome => return outcome,
            }
        }
        let failed = |e| StoreError::io("settle", &self.path, e);
        if cut {
            self.fs.set_len(&writer.file, writer.len).map_err(failed)?;
            failpoint::hit("store.journal.cut").map_err(failed)?;
        }
        if self.options.durable {
            self.fs.sync(&writer.file).and_then(|()| self.fs.sync_dir(&self.dir)).map_err(failed)?;
        }
        Ok(())
    }

    fn fresh(&self) -> Result<Writer<F>, StoreError> {
        let failed = |e: io::Error| StoreError::io("sync", &self.dir, e);
        let prepare = || self.prepare(1, &S::default(), &[], &[]);
        let writer = match prepare() {
            Err(e) if e.is_no_space() && (self.options.room)() => prepare(),
            prepared => prepared,
        }?;
        if self.options.durable {
            self.fs.sync_dir(&self.dir).map_err(failed)?;
        }
        Ok(writer)
    }

    fn set_aside(&self) -> Result<PathBuf, StoreError> {
        self.with_room(|| lost::set_aside(&*self.fs, &self.dir, &self.path))
            .map_err(|e| StoreError::io("set aside", &self.path, e))
    }

    fn with_room<T>(&self, step: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match step() {
            Err(e) if is_full(&e) && (self.options.room)() => step(),
            outcome => outcome,
        }
    }
}

/// Errors that say the file is bad, not that this process may not or cannot open it now.
fn is_unreadable(e: &io::Error) -> bool {
    use nix::libc::{EBADMSG, EIO, EISDIR, ELOOP, ENXIO, EUCLEAN};
    e.raw_os_error().is_some_and(|errno| [EIO, EISDIR, ELOOP, ENXIO, EUCLEAN, EBADMSG].contains(&errno))
}
