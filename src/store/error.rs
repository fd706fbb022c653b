//! What can go wrong in the store: operation, object, source.
//!
//! Cloneable, since one failed fsync is the answer to every record that waited for it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("store: cannot {operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: Arc<io::Error> },
    /// The file system is full (or out of inodes), and the reserve was not for this or is gone.
    #[error("store: no room to {operation} {}: free some space on its file system", path.display())]
    NoSpace { operation: &'static str, path: PathBuf, source: Arc<io::Error> },
    #[error(
        "{} is in use by another coracle agent (pid {}): stop that one, or give this one its own --root",
        path.display(),
        pid.map_or("unknown".to_owned(), |p| p.to_string())
    )]
    Locked { path: PathBuf, pid: Option<i32> },
    #[error("store: a record of {len} bytes for {} is longer than the {max} that one may have", path.display())]
    TooLarge { path: PathBuf, len: usize, max: usize },
    #[error("store: {} holds {len} bytes, more than the {max} that are read", path.display())]
    FileTooLarge { path: PathBuf, len: u64, max: u64 },
    #[error("store: a record for {} cannot be written as JSON", path.display())]
    Encode { path: PathBuf, source: Arc<serde_json::Error> },
}

impl StoreError {
    /// Sorts an I/O error: "full" is a state of the node that passes, not a fault of the store.
    pub(super) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> StoreError {
        let path = path.into();
        let full = is_full(&source);
        let source = Arc::new(source);
        if full { StoreError::NoSpace { operation, path, source } } else { StoreError::Io { operation, path, source } }
    }

    pub fn is_no_space(&self) -> bool {
        matches!(self, StoreError::NoSpace { .. })
    }
}

/// ENOSPC (blocks or inodes) and EDQUOT.
pub(super) fn is_full(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
