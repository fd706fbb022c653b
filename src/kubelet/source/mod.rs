//! Where pods come from when the node is alone: a directory of manifests.
//!
//! A thread looks at the directory (inotify, and every 20 s) and hands over a [`SourceUpdate`]
//! whenever what is wanted, or what is wrong, has changed. Invariant: a pod leaves the set only
//! when a complete look showed that nobody asks for it any more; a broken file, a missing
//! directory or another file system in its place never ends one.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use crate::api::yaml::{self, Limits};
use crate::kubelet::defaults;
use crate::store::ids::PodUid;

mod directory;
mod identity;
mod known;
pub mod model;
pub mod network;
pub mod object;
mod plan;
mod watch;

pub use model::{
    ConfigObjects, DesiredPod, NetworkChange, NetworkObject, NetworkObjects, Origin, Problem, SourceUpdate, Warning,
};

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
pub struct Source {
    /// The thread ends when this end closes.
    _stop: UnixStream,
}

impl Source {
    /// Starts the thread `source`; `deliver` gets every update, the first one at once, and
    /// returns false when nobody listens any more.
    pub fn start(
        config: SourceConfig,
        deliver: impl FnMut(SourceUpdate) -> bool + Send + 'static,
    ) -> Result<Source, SourceError> {
        let failed = |operation| move |source| SourceError::System { operation, source };
        let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        let directory = directory::Directory::new(config.dir, config.boot_id);
        let desired = plan::Desired::new(config.node, config.known);
        let watcher = watch::Watcher::new(directory, desired, config.memory, theirs, deliver);
        std::thread::Builder::new()
            .name("source".to_owned())
            .stack_size(STACK)
            .spawn(move || watcher.run())
            .map_err(failed("start its thread"))?;
        Ok(Source { _stop: ours })
    }
}

/// Reading recurses with the depth of a document, which `yaml::Limits` bounds.
const STACK: usize = 256 << 10;

/// Reads back a pod from the bytes that [`DesiredPod::raw`] gave to the store.
pub fn restore(uid: &PodUid, raw: &[u8]) -> Result<DesiredPod, SourceError> {
    let failed = |why: String| SourceError::Stored { uid: uid.clone(), why };
    let tree = match yaml::documents(raw, Limits::default()).next() {
        Some(tree) => tree.map_err(|e| failed(e.to_string()))?,
        None => return Err(failed("it is empty".to_owned())),
    };
    let (pod, _) = tree.read::<crate::api::pod::Pod>().map_err(|e| failed(e.to_string()))?;
    let mut pod = pod;
    defaults::pod(&mut pod);
    if pod.metadata.uid != uid.as_str() {
        return Err(failed(format!("it is the manifest of pod {}", pod.metadata.uid)));
    }
    let origin = pod.metadata.annotations.get(object::MANIFEST).and_then(|text| text.rsplit_once('#'));
    let origin = origin.and_then(|(file, document)| Some(Origin { file: file.to_owned(), document: document.parse().ok()? }));
    Ok(DesiredPod {
        uid: uid.clone(),
        pod: pod.into(),
        raw: raw.into(),
        origin: origin.unwrap_or_default(),
        warnings: Vec::new(),
    })
}
