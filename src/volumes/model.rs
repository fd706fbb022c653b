//! Plain types of the volumes' front door.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::store::error::StoreError;

/// Values of a ConfigMap or Secret by key.
pub type Data = BTreeMap<String, Vec<u8>>;

/// Where volumes (and the environment) find what ConfigMaps and Secrets hold.
pub trait Contents: Send + Sync {
    fn config_map(&self, namespace: &str, name: &str) -> Option<&Data>;
    fn secret(&self, namespace: &str, name: &str) -> Option<&Data>;
}

/// One mount of a container, ready for the OCI spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPlan {
    pub source: PathBuf,
    pub destination: PathBuf,
    pub read_only: bool,
    pub propagation: Propagation,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    #[default]
    Private,
    /// rslave
    HostToContainer,
    /// rshared
    Bidirectional,
}

/// Why a volume is not there. The pod waits and it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// FailedMount: `MountVolume.SetUp failed for volume "x": configmap "y" not found`.
    #[error("MountVolume.SetUp failed for volume \"{volume}\": {why}")]
    SetUp { volume: String, why: String },
    /// CreateContainerConfigError: subPath leaves the volume, is no directory, cannot be made.
    #[error("failed to prepare subPath \"{sub_path}\" of volume \"{volume}\" for container \"{container}\": {why}")]
    SubPath { volume: String, container: String, sub_path: String, why: String },
    /// CreateContainerConfigError: a mount of a container that cannot be given.
    #[error("volume \"{volume}\" for container \"{container}\": {why}")]
    Mount { volume: String, container: String, why: String },
    #[error("volumes: cannot {operation} {}", path.display())]
    System { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("volumes: the effects journal cannot be written")]
    Journal(#[from] StoreError),
}

impl VolumeError {
    pub(super) fn system(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> VolumeError {
        let path = path.into();
        move |source| VolumeError::System { operation, path, source }
    }

    /// The same error as the reason why one volume could not be set up.
    pub(super) fn in_volume(self, volume: &str) -> VolumeError {
        match self {
            VolumeError::System { operation, path, source } => {
                VolumeError::SetUp { volume: volume.to_owned(), why: format!("cannot {operation} {}: {source}", path.display()) }
            }
            other => other,
        }
    }
}
