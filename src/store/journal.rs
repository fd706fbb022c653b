//! An append-only journal: what was appended is there after any crash, whole and in order.
//!
//! ```text
//! append ─> queue ─┐   one of the waiting callers takes the file and writes for all of them:
//! append ─> queue ─┼─> write, fsync ─> all return          (group commit; no lock over I/O)
//! append ─> queue ─┘        │ fsync failed                 │ grown well past the live state
//!                           └────> new file: temp, fsync, rename, fsync of the directory
//! ```
//!
//! Invariant: an acknowledged record survives; one that was not acknowledged is there whole, behind all
//! that were acknowledged before it, or not at all. After a failed fsync the kernel may have
//! dropped the data (fsync(2); "fsyncgate", LWN 752063), so such a file is never synced again but
//! written anew. Replay stops at the first bad record; what lies behind it is set aside in `lost/` and
//! cut off. Only where a later record proves that the bad one had been durable is it stepped over: a bit
//! that the card lost costs one record, not all that came after. Records that the [`Fold`] does not know are kept through every rewriting.

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::StoreError;
use super::frame::{self, Entry, Next, Scan};
use super::fs::Fs;
use super::{atomic, lost};
use crate::sys::failpoint;

mod recover;

/// What the records of a journal add up to.
pub trait Fold: Default {
    /// False: of a type or form that is not known here; the journal keeps the record.
    fn apply(&mut self, entry: &Entry) -> bool;
    /// Records that give this state again.
    fn snapshot(&self) -> Result<Vec<Entry>, serde_json::Error>;
}

pub struct Options {
    /// False on /run, where a power cut takes the journal's objects along: no fsync.
    pub durable: bool,
    /// Below this size it is not compacted.
    pub floor: u64,
    /// Blocks are taken ahead in steps of this size, so that a full disk does not stop appends at once.
    pub step: u64,
    /// Makes room on a full disk for urgent records; false: there is none to make.
    pub room: Box<dyn Fn() -> bool + Send + Sync>,
}

/// What opening found and mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub records: u64,
    pub unknown: u64,
    /// Bytes behind the last good record that were cut off.
    pub cut: u64,
    /// Records that had been durable and that the disk did not give back.
    pub spoilt: u64,
    pub lost: Vec<PathBuf>,
}

pub struct Journal<F: Fs, S> {
    fs: Arc<F>,
    dir: PathBuf,
    path: PathBuf,
    options: Options,
    shared: Mutex<Shared<F>>,
    /// The file came back, or a batch has its outcome.
    turn: Condvar,
    fold: PhantomData<fn() -> S>,
}

struct Shared<F: Fs> {
    /// None while somebody writes.
    writer: Option<Writer<F>>,
    queue: Vec<Entry>,
    urgent: bool,
    /// The batch that the queue will be.
    gathering: Arc<Batch>,
}

#[derive(Default)]
struct Batch {
    outcome: OnceLock<Result<(), StoreError>>,
}

/// The live file. `[0, len)` holds acknowledged records only.
struct Writer<F: Fs> {
    file: F::File,
    len: u64,
    seq: u64,
    /// Length right after the last rewriting, or what it would be.
    base: u64,
    /// Blocks are there up to here.
    allocated: u64,
    /// False after an I/O error: the next append writes a new file.
    trusted: bool,
}

/// What a journal says, for one who does not own it: nothing is made, mended or locked.
pub fn peek<F: Fs, S: Fold>(fs: &F, path: &Path) -> Result<S, StoreError> {
    let failed = |e| StoreError::io("read", path, e);
    let file = fs.open(path).map_err(failed)?;
    let mut state = S::default();
    let mut scan = Scan::new(fs, &file, fs.len(&file).map_err(failed)?);
    loop {
        match scan.step() {
            Next::Record(entry) => {
                state.apply(&entry);
            }
            // A record that is being written now.
            Next::End | Next::Bad => return Ok(state),
            Next::Unreadable(e) => return Err(failed(e)),
        }
    }
}

impl<F: Fs, S: Fold> Journal<F, S> {
    /// Reads `<dir>/<name>` (made where it is missing) into a state, and mends what a crash left.
    pub fn open(fs: Arc<F>, dir: &Path, name: &str, options: Options) -> Result<(Journal<F, S>, S, Found), StoreError> {
        atomic::make_dirs(&*fs, dir)?;
        let shared = Shared { writer: None, queue: Vec::new(), urgent: false, gathering: Arc::default() };
        let journal = Journal {
            fs,
            dir: dir.to_owned(),
            path: dir.join(name),
            options,
            shared: Mutex::new(shared),
            turn: Condvar::new(),
            fold: PhantomData,
        };
        let (mut state, mut found) = (S::default(), Found::default());
        let writer = journal.recover(&mut state, &mut found)?;
        journal.lock().writer = Some(writer);
        Ok((journal, state, found))
    }

    /// On disk in this order when it returns. `urgent` ones may use what `room` gives.
    pub fn append(&self, entries: Vec<Entry>, urgent: bool) -> Result<(), StoreError> {
        if let Some(entry) = entries.iter().find(|e| e.payload.len() > frame::MAX) {
            return Err(StoreError::TooLarge { path: self.path.clone(), len: entry.payload.len(), max: frame::MAX });
        }
        if entries.is_empty() {
            return Ok(());
        }
        let mut shared = self.lock();
        shared.queue.extend(entries);
        shared.urgent |= urgent;
        let batch = shared.gathering.clone();
        loop {
            if let Some(outcome) = batch.outcome.get() {
                return outcome.clone();
            }
            // Our batch has no outcome, so while the file is here it is still the gathering one.
            let Some(mut writer) = shared.writer.take() else {
                shared = self.turn.wait(shared).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let queue = std::mem::take(&mut shared.queue);
            let urgent = std::mem::take(&mut shared.urgent);
            shared.gathering = Arc::default();
            drop(shared);

            let outcome = self.commit(&mut writer, &queue, urgent);
            let grown = writer.len > self.options.floor.max(writer.base.saturating_mul(4));
            if outcome.is_ok() && grown {
                self.compact(&mut writer);
            }

            shared = self.lock();
            // Only the one that took the batch sets its outcome.
            let _ = batch.outcome.set(outcome);
            shared.writer = Some(writer);
            self.turn.notify_all();
        }
    }

    /// Everything acknowledged so far, read from the file.
    pub fn read(&self) -> Result<S, StoreError> {
        peek(&*self.fs, &self.path)
    }

    /// Makes `state` the whole content.
    pub fn replace(&self, state: &S) -> Result<(), StoreError> {
        let mut shared = self.lock();
        let mut writer = loop {
            match shared.writer.take() {
                Some(writer) => break writer,
                None => shared = self.turn.wait(shared).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(shared);
        let outcome = self.write_new(&mut writer, state, &[], &[]);
        self.lock().writer = Some(writer);
        self.turn.notify_all();
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, Shared<F>> {
        // Nothing panics while it is held, so a poisoned lock guards whole data.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(&self, writer: &mut Writer<F>, batch: &[Entry], urgent: bool) -> Result<(), StoreError> {
        match self.try_commit(writer, batch) {
            Err(e) if e.is_no_space() && urgent && (self.options.room)() => self.try_commit(writer, batch),
            outcome => outcome,
        }
    }

    fn try_commit(&self, writer: &mut Writer<F>, batch: &[Entry]) -> Result<(), StoreError> {
        if !writer.trusted {
            return self.rewrite(writer, batch);
        }
        let (mut bytes, mut seq) = (Vec::new(), writer.seq);
        self.mark(&mut bytes, &mut seq);
        frame::encode_all(&mut bytes, &mut seq, batch);
        self.allocate_ahead(writer, bytes.len() as u64);
        let written = self.fs.write_at(&writer.file, &bytes, writer.len).and_then(|()| failpoint::hit("store.journal.write"));
        if let Err(e) = written {
            // Any part of it may be there: cut it off again.
            let cut = self.fs.set_len(&writer.file, writer.len);
            writer.allocated = writer.len;
            let e = StoreError::io("append to", &self.path, e);
            writer.trusted = cut.is_ok() && e.is_no_space();
            return if e.is_no_space() { Err(e) } else { self.rewrite_after(&e, writer, batch) };
        }
        if self.options.durable
            && let Err(e) = self.fs.sync(&writer.file).and_then(|()| failpoint::hit("store.journal.sync"))
        {
            writer.trusted = false;
            return self.rewrite_after(&StoreError::io("sync", &self.path, e), writer, batch);
        }
        writer.len += bytes.len() as u64;
        writer.seq = seq;
        Ok(())
    }

    /// Whatever is written behind it, what lies before it is on the disk: a batch is written after
    /// the one before it was synced, a new file gets its name after it was.
    fn mark(&self, bytes: &mut Vec<u8>, seq: &mut u64) {
        if self.options.durable {
            frame::encode_all(bytes, seq, [&Entry::settled()]);
        }
    }

    /// Appends that fit into these blocks cannot meet a full disk.
    fn allocate_ahead(&self, writer: &mut Writer<F>, more: u64) {
        let end = writer.len + more;
        if self.options.step == 0 || end <= writer.allocated {
            return;
        }
        let to = end + self.options.step;
        // Only an advance: where it fails (no room, no such call) the write itself decides.
        writer.allocated = match self.fs.allocate(&writer.file, writer.len, to - writer.len, true) {
            Ok(()) => to,
            Err(e) if e.raw_os_error() == Some(nix::libc::EOPNOTSUPP) => u64::MAX,
            Err(_) => end,
        };
    }

    fn rewrite_after(&self, e: &StoreError, writer: &mut Writer<F>, batch: &[Entry]) -> Result<(), StoreError> {
        let source = std::error::Error::source(e).map(ToString::to_string).unwrap_or_default();
        tracing::warn!(journal = %self.path.display(), "{e}: {source}; its records go into a new file");
        self.rewrite(writer, batch)
    }

    /// A new file with what the old one adds up to, then `batch`.
    fn rewrite(&self, writer: &mut Writer<F>, batch: &[Entry]) -> Result<(), StoreError> {
        let (mut state, mut unknown) = (S::default(), Vec::new());
        let mut scan = Scan::new(&*self.fs, &writer.file, writer.len);
        let mut bad = None;
        let bad = loop {
            match scan.step() {
                Next::Record(entry) if entry.is_mark() || state.apply(&entry) => {}
                Next::Record(entry) => unknown.push(entry),
                Next::End => break bad,
                stop => {
                    let why = match stop {
                        Next::Unreadable(e) => e.to_string(),
                        _ => "its checksum is wrong".to_owned(),
                    };
                    bad.get_or_insert((scan.good, why));
                    if !matches!(scan.resync(), Ok(Some(_))) {
                        break bad;
                    }
                }
            }
        };
        if let Some((at, why)) = bad {
            // Acknowledged records that the disk does not give back: keep what can be read, go on.
            let aside =
                lost::set_aside(&*self.fs, &self.dir, &self.path).map_err(|e| StoreError::io("set aside", &self.path, e))?;
            tracing::error!(journal = %self.path.display(), aside = %aside.display(), "unreadable at byte {at}: {why}");
        }
        self.write_new(writer, &state, &unknown, batch)
    }

    fn compact(&self, writer: &mut Writer<F>) {
        let before = writer.len;
        if let Err(e) = self.rewrite(writer, &[]) {
            // All records are in the old file; again when it has doubled.
            tracing::warn!(journal = %self.path.display(), "not compacted at {before} bytes: {e}");
            writer.base = writer.base.max(before / 2);
        }
    }

    /// On an error before the rename the old file is as it was; behind it the new one is the live
    /// one, but not trusted before it has been written once more.
    fn write_new(&self, writer: &mut Writer<F>, state: &S, unknown: &[Entry], batch: &[Entry]) -> Result<(), StoreError> {
        let new = self.prepare(writer.seq, state, unknown, batch)?;
        let (kept, kept_seq) = (new.base, new.seq - batch.len() as u64);
        *writer = new;
        let synced = failpoint::hit("store.journal.rename")
            .and_then(|()| if self.options.durable { self.fs.sync_dir(&self.dir) } else { Ok(()) });
        if let Err(e) = synced {
            (writer.len, writer.seq, writer.trusted) = (kept, kept_seq, false);
            return Err(StoreError::io("sync", &self.dir, e));
        }
        Ok(())
    }

    fn prepare(&self, seq: u64, state: &S, unknown: &[Entry], batch: &[Entry]) -> Result<Writer<F>, StoreError> {
        let encode = |e| StoreError::Encode { path: self.path.clone(), source: Arc::new(e) };
        let (mut bytes, mut seq) = (Vec::new(), seq);
        frame::encode_all(&mut bytes, &mut seq, [&Entry::base()]);
        frame::encode_all(&mut bytes, &mut seq, &state.snapshot().map_err(encode)?);
        frame::encode_all(&mut bytes, &mut seq, unknown);
        self.mark(&mut bytes, &mut seq);
        let base = bytes.len() as u64;
        frame::encode_all(&mut bytes, &mut seq, batch);

        let temp = self.temp();
        let file = (|| {
            self.remove_temp()?;
            let file = self.fs.create(&temp, 0o600)?;
            self.fs.write_at(&file, &bytes, 0)?;
            if self.options.durable {
                self.fs.sync(&file)?;
            }
            failpoint::hit("store.journal.new")?;
            self.fs.rename(&temp, &self.path)?;
            Ok(file)
        })();
        let file = file.map_err(|e| {
            // The first error is the one to tell; the next try removes it too.
            let _ = self.remove_temp();
            StoreError::io("write anew", &self.path, e)
        })?;
        let len = bytes.len() as u64;
        Ok(Writer { file, len, seq, base, allocated: len, trusted: true })
    }

    fn temp(&self) -> PathBuf {
        let mut name = std::ffi::OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(".tmp");
        self.dir.join(name)
    }

    fn remove_temp(&self) -> io::Result<()> {
        match self.fs.remove(&self.temp()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
