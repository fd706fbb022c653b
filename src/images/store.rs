//! The image store on disk:
//!
//! ```text
//! <dir>/journal             records: layers, images, names        (records.rs)
//! <dir>/blobs/sha256/<hex>  manifests, configs, compressed layers  (kept: a layer can be rebuilt)
//! <dir>/layers/<n>          unpacked trees, overlay's lower directories
//! <dir>/staging/            what is being made; <hex>.part are downloads that can be resumed
//! ```
//!
//! Invariant: a recorded blob or layer was synced before its record. What is on disk and not
//! recorded is removed at start; what is recorded and not on disk is rebuilt or not shown. While
//! a pull or import holds a [`Lease`] on a digest, nothing removes it. No lock is held over I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::digest::{Digest, HashReader};
use super::error::PullError;
use super::finish;
use super::records::{LayerRecord, Record, State, entry};
use crate::store::frame::Entry;
use crate::store::fs::Disk;
use crate::store::journal::{Journal, Options};
use crate::sys::{clock, dir, failpoint, file};

/// Partial downloads older than this are nobody's any more.
const PART_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

pub struct Store {
    dir: PathBuf,
    shared: Mutex<Shared>,
    /// A dying digest is gone, or a lease ended.
    changed: Condvar,
    next: AtomicU64,
    journal: Journal<Disk, State>,
    _lock: nix::fcntl::Flock<File>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("dir", &self.dir).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: State,
    leases: BTreeMap<Digest, usize>,
    /// Being removed from disk right now.
    dying: BTreeSet<Digest>,
    /// Being made by somebody right now.
    claims: BTreeSet<Making>,
    /// Layers that were not looked at since the machine started: a power cut may have hurt them.
    unchecked: BTreeSet<Digest>,
}

/// What can be claimed. A blob and a chain may have one digest: the lowest layer, uncompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Making {
    /// Also held by who takes an image away.
    Image(Digest),
    Blob(Digest),
    Chain(Digest),
}

/// The right to make one blob or layer; others wait. Ends when dropped.
#[derive(Debug)]
pub struct Claim {
    store: Arc<Store>,
    making: Making,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.store.lock().claims.remove(&self.making);
        self.store.changed.notify_all();
    }
}

/// Keeps blobs and layers from being removed; ends when dropped.
#[derive(Debug)]
pub struct Lease {
    store: Arc<Store>,
    digests: Vec<Digest>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut shared = self.store.lock();
        for digest in &self.digests {
            if let Some(count) = shared.leases.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    shared.leases.remove(digest);
                }
            }
        }
        self.store.changed.notify_all();
    }
}

impl Store {
    pub fn open(dir: &Path) -> Result<Arc<Store>, PullError> {
        for part in ["", "blobs", "blobs/sha256", "layers", "staging"] {
            let path = dir.join(part);
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(PullError::store("make", &path))?;
        }
        let path = dir.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.and_then(file::try_lock).map_err(PullError::store("lock", &path))?;
        let Some(lock) = lock else {
            let source = io::Error::new(io::ErrorKind::ResourceBusy, "another coracle agent uses it");
            return Err(PullError::Store { operation: "lock", path, source });
        };
        let options = Options { durable: true, floor: 256 << 10, step: 64 << 10, room: Box::new(|| false) };
        let (journal, state, found): (_, State, _) = Journal::open(Arc::new(Disk), dir, "journal", options)?;
        if found.cut > 0 || !found.lost.is_empty() {
            tracing::warn!(bytes = found.cut, spoilt = found.spoilt, lost = ?found.lost, "the image store's journal had broken records, which were set aside");
        }
        let unchecked = if is_new_boot(dir)? { state.layers.keys().copied().collect() } else { BTreeSet::new() };
        let shared = Mutex::new(Shared { state, unchecked, ..Shared::default() });
        let store = Store { dir: dir.to_owned(), shared, changed: Condvar::new(), next: AtomicU64::new(1), journal, _lock: lock };
        store.clear()?;
        Ok(Arc::new(store))
    }

    /// Brings the disk in line with the records: what a crash left between the two goes.
    fn clear(&self) -> Result<(), PullError> {
        let state = self.lock().state.clone();
        let staging = self.staging();
        for entry in entries(&staging)? {
            let keep = entry.extension().is_some_and(|e| e == "part") && age(&entry).is_some_and(|age| age < PART_AGE);
            if !keep {
                remove(&entry)?;
            }
        }
        let recorded: BTreeSet<u64> = state.layers.values().map(|l| l.dir).collect();
        let mut top = recorded.last().copied().unwrap_or(0);
        for entry in entries(&self.dir.join("layers"))? {
            let number = entry.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse::<u64>().ok());
            match number {
                Some(number) if recorded.contains(&number) => {}
                _ => remove(&entry)?,
            }
            top = top.max(number.unwrap_or(0));
        }
        self.next.store(top + 1, Ordering::Relaxed);
        let needed: BTreeSet<String> = state.blobs().iter().map(Digest::hex).collect();
        for entry in entries(&self.dir.join("blobs/sha256"))? {
            if !entry.file_name().and_then(|n| n.to_str()).is_some_and(|n| needed.contains(n)) {
                remove(&entry)?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Every change under the lock is whole, so one that panicked left nothing half done.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks something up; `read` must not block.
    pub fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.lock().state)
    }

    pub fn staging(&self) -> PathBuf {
        self.dir.join("staging")
    }

    /// A name in `staging/` that nobody else has.
    pub fn staging_dir(&self) -> PathBuf {
        self.staging().join(format!("unpack-{}", self.fresh()))
    }

    pub fn fresh(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub fn part(&self, digest: &Digest) -> PathBuf {
        self.staging().join(format!("{}.part", digest.hex()))
    }

    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.dir.join("blobs/sha256").join(digest.hex())
    }

    pub fn layer(&self, number: u64) -> PathBuf {
        self.dir.join("layers").join(number.to_string())
    }

    /// Whether a recorded layer's tree is there; cheap.
    pub fn has_layer(&self, layer: &LayerRecord) -> bool {
        self.layer(layer.dir).is_dir()
    }

    /// Compares a layer with its record, once after each start of the machine; one that differs
    /// goes, so that it is rebuilt. No container uses it yet then.
    pub fn check_layer(self: &Arc<Store>, chain: Digest) -> Result<(), PullError> {
        if !self.lock().unchecked.contains(&chain) {
            return Ok(());
        }
        let _claim = self.claim(Making::Chain(chain));
        let record = self.read(|s| s.layers.get(&chain).cloned());
        if let Some(record) = record.filter(|_| self.lock().unchecked.contains(&chain)) {
            let path = self.layer(record.dir);
            let found = dir::open_root(&path).and_then(|root| finish::listing(&root));
            if !found.as_ref().is_ok_and(|listing| *listing == record.listing) {
                tracing::warn!(layer = %chain, "a layer is not what it was before the machine went down: it is removed");
                self.record(vec![Record::LayerGone { chain }])?;
                remove(&path)?;
            }
        }
        self.lock().unchecked.remove(&chain);
        Ok(())
    }

    /// A blob of at most `max` bytes, checked against its digest; None: not here, or not what its
    /// name says (then it is removed).
    pub fn read_blob(&self, digest: &Digest, max: u64) -> Result<Option<Vec<u8>>, PullError> {
        let path = self.blob(digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(PullError::store("open", &path)(e)),
        };
        let mut reader = HashReader::new(file.take(max + 1));
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(PullError::store("read", &path))?;
        if bytes.len() as u64 > max || reader.hasher.digest() != *digest {
            remove(&path)?;
            return Ok(None);
        }
        Ok(Some(bytes))
    }

    /// Keeps `digests` (blobs or chains) from being removed from now on. Waits for those that are
    /// just going.
    pub fn lease(self: &Arc<Store>, digests: impl IntoIterator<Item = Digest>) -> Lease {
        let digests: Vec<Digest> = digests.into_iter().collect();
        let mut shared = self.lock();
        while digests.iter().any(|d| shared.dying.contains(d)) {
            shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
        for digest in &digests {
            *shared.leases.entry(*digest).or_default() += 1;
        }
        drop(shared);
        Lease { store: self.clone(), digests }
    }

    /// Waits until nobody else makes it. An image is claimed before its layers,
    /// these lowest first, a blob last: as
    /// a chain id includes those below it, two images then never wait for each other.
    pub fn claim(self: &Arc<Store>, making: Making) -> Claim {
        let mut shared = self.lock();
        while !shared.claims.insert(making) {
            shared = self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
        drop(shared);
        Claim { store: self.clone(), making }
    }

    /// Makes renames in these directories durable.
    pub fn sync_names(&self) -> Result<(), PullError> {
        for part in ["layers", "blobs/sha256"] {
            let path = self.dir.join(part);
            file::fsync_dir(&path).map_err(PullError::store("sync", &path))?;
        }
        Ok(())
    }

    /// Writes out all data of the store's file system.
    pub fn sync_data(&self) -> Result<(), PullError> {
        file::syncfs(&self.dir).map_err(PullError::store("sync", &self.dir))
    }

    /// Records durably, then shows.
    pub fn record(&self, records: Vec<Record>) -> Result<(), PullError> {
        let entries: Result<Vec<Entry>, _> = records.iter().map(entry).collect();
        let entries = entries.map_err(|e| PullError::store("encode a record for", &self.dir)(e.into()))?;
        self.journal.append(entries, false)?;
        let mut shared = self.lock();
        records.into_iter().for_each(|record| shared.state.apply(record));
        Ok(())
    }

    /// Removes images without a name, and layers and blobs without an image. Records go first: a
    /// crash in between leaves files that the next start removes.
    pub fn sweep(&self) -> Result<(), PullError> {
        let listed = entries(&self.dir.join("blobs/sha256"))?;
        let listed: Vec<Digest> =
            listed.iter().filter_map(|p| p.file_name().and_then(|n| n.to_str()).and_then(Digest::from_hex)).collect();
        let (records, layers, blobs) = {
            let mut shared = self.lock();
            let mut after = shared.state.clone();
            let mut records = Vec::new();
            for manifest in after.nameless() {
                if !shared.leases.contains_key(&manifest) {
                    records.push(Record::ImageGone { manifest });
                    after.apply(Record::ImageGone { manifest });
                }
            }
            let mut layers = Vec::new();
            for chain in after.loose_layers() {
                if !shared.leases.contains_key(&chain)
                    && let Some(layer) = after.layers.get(&chain)
                {
                    layers.push((chain, layer.dir));
                    records.push(Record::LayerGone { chain });
                }
            }
            let needed = after.blobs();
            let gone: Vec<Digest> =
                listed.into_iter().filter(|d| !needed.contains(d) && !shared.leases.contains_key(d)).collect();
            shared.dying.extend(layers.iter().map(|(chain, _)| *chain).chain(gone.iter().copied()));
            (records, layers, gone)
        };
        let result = self.remove_all(records, &layers, &blobs);
        let mut shared = self.lock();
        for digest in layers.iter().map(|(chain, _)| chain).chain(&blobs) {
            shared.dying.remove(digest);
        }
        drop(shared);
        self.changed.notify_all();
        result
    }

    fn remove_all(&self, records: Vec<Record>, layers: &[(Digest, u64)], blobs: &[Digest]) -> Result<(), PullError> {
        if !records.is_empty() {
            self.record(records)?;
            failpoint::hit("images.sweep.recorded").map_err(PullError::store("sweep", &self.dir))?;
        }
        for (_, number) in layers {
            remove(&self.layer(*number))?;
            failpoint::hit("images.sweep.layer").map_err(PullError::store("sweep", &self.dir))?;
        }
        for digest in blobs {
            remove(&self.blob(digest))?;
            failpoint::hit("images.sweep.blob").map_err(PullError::store("sweep", &self.dir))?;
        }
        Ok(())
    }
}

/// Whether the machine was started anew since the store was last opened; remembers this start.
fn is_new_boot(dir: &Path) -> Result<bool, PullError> {
    let path = dir.join("boot");
    let boot = clock::boot_id().map_err(PullError::store("read the boot id for", dir))?;
    match fs::read_to_string(&path) {
        Ok(last) if last == boot => return Ok(false),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(PullError::store("read", &path)(e)),
    }
    fs::write(&path, boot).map_err(PullError::store("write", &path))?;
    Ok(true)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, PullError> {
    let listing = fs::read_dir(dir).map_err(PullError::store("list", dir))?;
    listing.map(|entry| entry.map(|e| e.path()).map_err(PullError::store("list", dir))).collect()
}

fn age(path: &Path) -> Option<Duration> {
    fs::metadata(path).ok()?.modified().ok()?.elapsed().ok()
}

/// Removes a file or a whole tree; nothing there is no error.
pub fn remove(path: &Path) -> Result<(), PullError> {
    let result = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(PullError::store("remove", path)(e)),
        _ => Ok(()),
    }
}
