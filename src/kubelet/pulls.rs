//! Pulls that failed, kept beside the pods' run directories, so that a new agent asks no registry
//! earlier than the old one would have: `<run>/pulls/<uid>/<container>`.
//!
//! Invariant: only the latest failure is there, and only until a pull succeeds or the pod goes. It
//! lies on /run: a reboot voids it, and no disk is written to for it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::model::Failure;
use crate::store::StoreError;
use crate::store::atomic;
use crate::store::ids::PodUid;

/// Of each pod, by container.
pub type FailedPulls = BTreeMap<PodUid, BTreeMap<String, Failure>>;

/// Far above what a message and two numbers take.
const MAX: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum PullsError {
    #[error("{operation} {}", path.display())]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("keep a failed pull")]
    Store(#[from] StoreError),
}

pub struct Pulls {
    dir: PathBuf,
}

impl Pulls {
    pub fn at(run: &Path) -> Pulls {
        Pulls { dir: run.join("pulls") }
    }

    /// Names of containers were checked when the pod was read: no separator, no dots.
    pub fn failed(&self, uid: &PodUid, container: &str, failure: &Failure) -> Result<(), PullsError> {
        let dir = self.dir.join(uid.as_str());
        fs::create_dir_all(&dir).map_err(|source| PullsError::Io { operation: "make", path: dir.clone(), source })?;
        let path = dir.join(container);
        let bytes = serde_json::to_vec(failure).map_err(|e| PullsError::Io {
            operation: "write",
            path: path.clone(),
            source: e.into(),
        })?;
        Ok(atomic::write(&path, &bytes, 0o600)?)
    }

    pub fn succeeded(&self, uid: &PodUid, container: &str) -> Result<(), PullsError> {
        let path = self.dir.join(uid.as_str()).join(container);
        gone(fs::remove_file(&path)).map_err(|source| PullsError::Io { operation: "remove", path, source })
    }

    pub fn forget(&self, uid: &PodUid) -> Result<(), PullsError> {
        let path = self.dir.join(uid.as_str());
        gone(fs::remove_dir_all(&path)).map_err(|source| PullsError::Io { operation: "remove", path, source })
    }

    /// What cannot be read is as if it had never failed, and is told.
    pub fn all(&self) -> FailedPulls {
        let mut all = FailedPulls::new();
        // Absent until the first failure.
        for pod in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let Some(uid) = pod.file_name().to_str().and_then(|name| PodUid::parse(name).ok()) else { continue };
            for entry in fs::read_dir(pod.path()).into_iter().flatten().flatten() {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let read = || -> Result<Option<Failure>, StoreError> {
                    let bytes = atomic::read_bounded(&entry.path(), MAX)?;
                    // Half a file there cannot be; one of a newer version may be.
                    Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
                };
                match read() {
                    Ok(Some(failure)) => drop(all.entry(uid.clone()).or_default().insert(name, failure)),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(pod = %uid, container = name, error = %crate::obs::chain(&error), "a pull's back-off begins anew");
                    }
                }
            }
        }
        all
    }
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_failure_is_kept_until_a_pull_succeeds_or_the_pod_goes() {
        let run = tempfile::tempdir().unwrap();
        let (a, b) = (PodUid::parse("a").unwrap(), PodUid::parse("b").unwrap());
        let failure = |delay| Failure { reason: "ErrImagePull".into(), message: "no".into(), at: 5, delay };
        let pulls = Pulls::at(run.path());
        assert!(pulls.all().is_empty());
        pulls.succeeded(&a, "c").unwrap();
        pulls.forget(&a).unwrap();
        for (uid, container, delay) in [(&a, "c", 10), (&a, "c", 20), (&a, "d", 10), (&b, "c", 40)] {
            pulls.failed(uid, container, &failure(delay)).unwrap();
        }
        pulls.succeeded(&a, "d").unwrap();
        fs::write(run.path().join("pulls/b/broken"), "{").unwrap();
        let all = Pulls::at(run.path()).all();
        assert_eq!(all[&a], BTreeMap::from([("c".to_owned(), failure(20))]));
        assert_eq!(all[&b], BTreeMap::from([("c".to_owned(), failure(40))]));
        pulls.forget(&b).unwrap();
        assert_eq!(pulls.all().len(), 1);
    }
}
