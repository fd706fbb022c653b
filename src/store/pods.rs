//! The pods' store on disk: their journal, each one's manifest, and the reserve for a full disk.
//!
//! ```text
//! <state>/pods.journal   records.rs, folded into PodsState      <state>/lock      one agent
//! <state>/pods/<uid>     a manifest's bytes as received         <state>/reserve   16 MB
//! <state>/lost/          what could not be read
//! ```
//!
//! Invariant: what `append` and `save_manifest` acknowledged is there after a power cut, and
//! what `open` returned is durable before it returns. Nothing is written while no pod changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::atomic;
use super::error::StoreError;
use super::frame::Entry;
use super::fs::{Disk, Fs};
use super::ids::PodUid;
use super::journal::{Fold, Journal, Options, peek};
use super::lock::StoreLock;
use super::records::{PodsState, Record};
use super::reserve::{self, Reserve};

/// A Pod object in etcd may have 1.5 MiB; a manifest of ours at most this.
pub const MANIFEST_MAX: u64 = 4 << 20;

/// What `open` found and mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// Records read from the journal.
    pub records: u64,
    /// Records of a type or form that this version does not know: kept, not applied.
    pub unknown: u64,
    /// Bytes behind the last good record that were cut off; a torn last write, if not a bad card.
    pub cut: u64,
    /// Records that had been durable and that the disk did not give back; those around them were read.
    pub spoilt: u64,
    /// What was set aside in `lost/`.
    pub lost: Vec<PathBuf>,
    /// Manifests of pods that the journal does not know, removed.
    pub orphans: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the reserve; 0: none.
    pub reserve: u64,
    /// The journal is not compacted below this.
    pub floor: u64,
    /// Blocks that the journal takes ahead.
    pub step: u64,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { reserve: reserve::DEFAULT_SIZE, floor: 64 << 10, step: 64 << 10 }
    }
}

pub struct PodStore<F: Fs = Disk> {
    fs: Arc<F>,
    manifests: PathBuf,
    journal: Journal<F, PodsState>,
    reserve: Arc<Reserve<F>>,
    /// None only on a file system in memory, which no other process can see.
    _lock: Option<StoreLock>,
}

impl<F: Fs> std::fmt::Debug for PodStore<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodStore").field("manifests", &self.manifests).finish_non_exhaustive()
    }
}

impl PodStore {
    /// Opens (and first makes) the store under `<state>`; one process at a time may.
    pub fn open(state: &Path) -> Result<(PodStore, PodsState, OpenReport), StoreError> {
        PodStore::open_sized(state, Sizes::default())
    }

    pub fn open_sized(state: &Path, sizes: Sizes) -> Result<(PodStore, PodsState, OpenReport), StoreError> {
        atomic::make_dirs(&Disk, state)?;
        let lock = StoreLock::take(state)?;
        PodStore::open_on(Disk, state, sizes, Some(lock))
    }
}

impl PodStore {
    /// The pods as journalled, for one who does not own the store. No pods where there is no journal.
    pub fn peek(state: &Path) -> Result<PodsState, StoreError> {
        let path = state.join("pods.journal");
        if path.exists() { peek(&Disk, &path) } else { Ok(PodsState::default()) }
    }
}

impl<F: Fs + 'static> PodStore<F> {
    pub fn open_on(
        fs: F,
        state: &Path,
        sizes: Sizes,
        lock: Option<StoreLock>,
    ) -> Result<(PodStore<F>, PodsState, OpenReport), StoreError> {
        let fs = Arc::new(fs);
        let manifests = state.join("pods");
        let reserve = Arc::new(Reserve::new(fs.clone(), state.join("reserve"), sizes.reserve));
        let room = {
            let reserve = reserve.clone();
            Box::new(move || reserve.release())
        };
        let options = Options { durable: true, floor: sizes.floor, step: sizes.step, room };
        let (journal, pods, found) = Journal::open(fs.clone(), state, "pods.journal", options)?;
        let store = PodStore { fs, manifests, journal, reserve, _lock: lock };
        let orphans = store.settle_manifests(&pods, found.cut == 0 && found.lost.is_empty())?;
        store.reserve.ensure()?;
        let report = OpenReport {
            records: found.records,
            unknown: found.unknown,
            cut: found.cut,
            spoilt: found.spoilt,
            lost: found.lost,
            orphans,
        };
        Ok((store, pods, report))
    }

    /// Durable on return. Callers that come together share one fsync.
    pub fn append(&self, record: &Record) -> Result<(), StoreError> {
        self.append_all(std::slice::from_ref(record))
    }

    /// In this order and by one fsync; after a crash before the return, a first part of them
    /// may be there. On a full disk ends and removals may use the reserve, beginnings may not.
    pub fn append_all(&self, records: &[Record]) -> Result<(), StoreError> {
        let entries: Result<Vec<_>, _> = records.iter().map(entry).collect();
        let encode = |e| StoreError::Encode { path: self.manifests.clone(), source: Arc::new(e) };
        self.journal.append(entries.map_err(encode)?, records.iter().any(is_urgent))?;
        if !self.reserve.is_held() {
            self.reserve.ensure()?;
        }
        Ok(())
    }

    /// `pods/<uid>`, whole or absent after a crash, durable on return. Save it before `Admitted`
    /// is appended: a manifest without a record is removed by the next `open`.
    pub fn save_manifest(&self, uid: &PodUid, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.len() as u64 > MANIFEST_MAX {
            let path = self.manifest(uid);
            return Err(StoreError::FileTooLarge { path, len: bytes.len() as u64, max: MANIFEST_MAX });
        }
        atomic::write_on(&*self.fs, &self.manifest(uid), bytes, 0o600)
    }

    pub fn load_manifest(&self, uid: &PodUid) -> Result<Option<Vec<u8>>, StoreError> {
        atomic::read_on(&*self.fs, &self.manifest(uid), MANIFEST_MAX)
    }

    /// Gone already is fine. Not fsynced: what a power cut brings back is removed by `open`.
    pub fn remove_manifest(&self, uid: &PodUid) -> Result<(), StoreError> {
        remove(&*self.fs, &self.manifest(uid))
    }

    /// Call now and then (20 s): makes the reserve again once there is room. Writes nothing else.
    pub fn tend(&self) -> Result<(), StoreError> {
        self.reserve.ensure()
    }

    fn manifest(&self, uid: &PodUid) -> PathBuf {
        self.manifests.join(uid.as_str())
    }

    /// Temp files go, names become durable, and manifests without a pod go too, but not where
    /// the journal itself lost something: then they are all that is left of their pods.
    fn settle_manifests(&self, pods: &PodsState, whole: bool) -> Result<u64, StoreError> {
        atomic::make_dirs(&*self.fs, &self.manifests)?;
        atomic::sweep_on(&*self.fs, &self.manifests)?;
        let failed = |e| StoreError::io("read", &self.manifests, e);
        let mut orphans = 0;
        if whole {
            for name in self.fs.names(&self.manifests).map_err(failed)? {
                // A name that is no uid is nothing of ours.
                let Some(uid) = name.to_str().and_then(|n| PodUid::parse(n).ok()) else { continue };
                if !pods.pods.contains_key(&uid) {
                    self.remove_manifest(&uid)?;
                    orphans += 1;
                }
            }
        }
        self.fs.sync_dir(&self.manifests).map_err(|e| StoreError::io("sync", &self.manifests, e))?;
        Ok(orphans)
    }
}

fn remove<F: Fs>(fs: &F, path: &Path) -> Result<(), StoreError> {
    match fs.remove(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// A type's number never changes. A new field of a type must have a default; what must not get
/// lost when an older version compacts the journal is a new type.
fn kind(record: &Record) -> u16 {
    match record {
        Record::Admitted { .. } => 1,
        Record::Attempt { .. } => 2,
        Record::Exit { .. } => 3,
        Record::Finished { .. } => 4,
        Record::Removed { .. } => 5,
        Record::Aged { .. } => 6,
    }
}

fn is_urgent(record: &Record) -> bool {
    match record {
        Record::Exit { .. } | Record::Finished { .. } | Record::Removed { .. } => true,
        Record::Admitted { .. } | Record::Attempt { .. } | Record::Aged { .. } => false,
    }
}

fn entry(record: &Record) -> Result<Entry, serde_json::Error> {
    Ok(Entry { kind: kind(record), version: 1, payload: serde_json::to_vec(record)? })
}

impl Fold for PodsState {
    fn apply(&mut self, entry: &Entry) -> bool {
        match serde_json::from_slice::<Record>(&entry.payload) {
            Ok(record) if kind(&record) == entry.kind => {
                PodsState::apply(self, &record);
                true
            }
            _ => false,
        }
    }

    fn snapshot(&self) -> Result<Vec<Entry>, serde_json::Error> {
        self.records().iter().map(entry).collect()
    }
}
