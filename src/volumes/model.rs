//! Plain types of the volumes' front door.

use std::collections::BTreeMap;
use std::path::PathBuf;

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
    /// CreateContainerConfigError: subPath leaves the volume, is missing, cannot be made.
    #[error("failed to prepare subPath \"{sub_path}\" of volume \"{volume}\" for container \"{container}\": {why}")]
    SubPath { volume: String, container: String, sub_path: String, why: String },
    #[error("volumes: {operation} {path}")]
    System { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("volumes: {0}")]
    Journal(String),
}
