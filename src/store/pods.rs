//! The pods' disk journal and manifests.

use std::path::{Path, PathBuf};

use super::error::StoreError;
use super::ids::PodUid;
use super::records::{PodsState, Record};

/// What `open` found and mended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// Records read from the journal.
    pub records: u64,
    /// Records of a type or form that this version does not know: kept, not applied.
    pub unknown: u64,
    /// Bytes behind the last good record that were cut off; a torn last write, if not a bad card.
    pub cut: u64,
    /// What was set aside in `lost/`.
    pub lost: Vec<PathBuf>,
}

#[derive(Debug)]
pub struct PodStore {
    state: PathBuf,
}

impl PodStore {
    /// Opens (and first makes) the store under `<state>`; one process at a time may.
    pub fn open(state: &Path) -> Result<(PodStore, PodsState, OpenReport), StoreError> {
        Ok((PodStore { state: state.to_owned() }, PodsState::default(), OpenReport::default()))
    }

    /// Durable on return. Callers that come together share one fsync.
    pub fn append(&self, record: &Record) -> Result<(), StoreError> {
        self.append_all(std::slice::from_ref(record))
    }

    /// In this order and by one fsync; after a crash a first part of them may be there.
    pub fn append_all(&self, _records: &[Record]) -> Result<(), StoreError> {
        Ok(())
    }

    /// `pods/<uid>`, whole or absent after a crash, durable on return.
    pub fn save_manifest(&self, _uid: &PodUid, _bytes: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    pub fn load_manifest(&self, _uid: &PodUid) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(None)
    }

    pub fn remove_manifest(&self, _uid: &PodUid) -> Result<(), StoreError> {
        let _ = &self.state;
        Ok(())
    }

    /// Call now and then (20 s): makes the reserve again once there is room. Writes nothing else.
    pub fn tend(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
