//! Plain types of the volumes' front door.

use std::path::PathBuf;

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
