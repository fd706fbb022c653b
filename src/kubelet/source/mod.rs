//! Where pods come from when the node is alone: a directory of manifests.
//!
//! A thread looks at the directory (inotify, and every 20 s) and hands over a [`SourceUpdate`]
//! whenever what is wanted, or what is wrong, has changed. Invariant: a pod leaves the set only
//! when a complete look showed that nobody asks for it any more; a broken file, a missing
//! directory or another file system in its place never ends one.

use std::path::PathBuf;

use crate::store::ids::PodUid;

pub mod model;

pub use model::{ConfigObjects, DesiredPod, Origin, Problem, SourceUpdate, Warning};

/// What a source needs to know.
pub struct SourceConfig {
    pub dir: PathBuf,
    /// Part of each pod's uid.
    pub node: String,
    /// A small file of ours (`<state>/manifests.json`): which file system the directory was on.
    pub memory: PathBuf,
    pub boot_id: String,
    /// Pods that the store knows, as [`restore`] gives them: the last good versions of files
    /// that may be broken now.
    pub known: Vec<DesiredPod>,
}

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("manifests directory: {operation}")]
    System { operation: &'static str, source: std::io::Error },
    #[error("stored manifest of pod {uid} is unreadable: {why}")]
    Stored { uid: PodUid, why: String },
}

/// The running source; dropping it ends its thread.
pub struct Source {}

impl Source {
    /// Starts the thread `source`; `deliver` gets every update, the first one at once, and
    /// returns false when nobody listens any more.
    pub fn start(
        _config: SourceConfig,
        _deliver: impl FnMut(SourceUpdate) -> bool + Send + 'static,
    ) -> Result<Source, SourceError> {
        Ok(Source {})
    }
}

/// Reads back a pod from the bytes that [`DesiredPod::raw`] gave to the store.
pub fn restore(uid: &PodUid, _raw: &[u8]) -> Result<DesiredPod, SourceError> {
    Err(SourceError::Stored { uid: uid.clone(), why: String::new() })
}
