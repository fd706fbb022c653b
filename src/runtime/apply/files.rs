//! Our own small files in a pod's run directory.
//!
//! Invariant: a file appears whole (temp and rename; /run is memory: no fsync), and one that is not
//! there is no error.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use super::super::RuntimeError;
use super::super::layout::{PodRun, SANDBOX, Sandbox};
use crate::store::ids::{ContainerId, PodUid};

pub(in crate::runtime) fn read_sandbox(run: &PodRun) -> Result<Option<Sandbox>, RuntimeError> {
    read_json(&run.join(SANDBOX))
}

/// None where there is no file. Our own files are small; a spec may have some hundred mounts.
pub(in crate::runtime) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, RuntimeError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(RuntimeError::io("read", path)(e)),
    };
    let mut text = Vec::new();
    file.take(4 << 20).read_to_end(&mut text).map_err(RuntimeError::io("read", path))?;
    serde_json::from_slice(&text).map(Some).map_err(|e| RuntimeError::io("read", path)(e.into()))
}

/// Temp and rename; /run is memory: no fsync.
pub(in crate::runtime) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> Result<(), RuntimeError> {
    let wrap = |e| RuntimeError::io("write", path)(e);
    let text = serde_json::to_vec(value).map_err(|e| wrap(e.into()))?;
    let mut temp = path.as_os_str().to_owned();
    temp.push(".tmp");
    fs::write(&temp, text).and_then(|()| fs::rename(&temp, path)).map_err(wrap)
}

/// Ids of the containers that have a run directory.
pub(in crate::runtime) fn containers_of(run: &PodRun) -> Result<Vec<ContainerId>, RuntimeError> {
    ids(&run.containers(), |name| ContainerId::parse(name).ok())
}

/// Uids of the pods that have a directory below the run root.
pub(in crate::runtime) fn pods_of(run: &Path) -> Result<Vec<PodUid>, RuntimeError> {
    ids(&run.join("pods"), |name| PodUid::parse(name).ok())
}

/// The names of a directory that are ids (nothing else is put there); none where it is not there.
fn ids<T>(dir: &Path, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, RuntimeError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(RuntimeError::io("read", dir)(e)),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let name = entry.map_err(RuntimeError::io("read", dir))?.file_name();
        ids.extend(name.to_str().and_then(&parse));
    }
    Ok(ids)
}

pub(in crate::runtime) fn gone_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub(super) fn remove_tree(path: &Path) -> Result<(), RuntimeError> {
    gone_is_fine(fs::remove_dir_all(path)).map_err(RuntimeError::io("remove", path))
}
