//! Plain types of the images' front door.

use std::path::PathBuf;

/// An image that is whole on this node: manifest, config, every layer unpacked and recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// `sha256:<hex>` of the config blob: the image's id, as in CRI.
    pub id: String,
    /// Names it is known by: `docker.io/library/busybox:1.36`.
    pub tags: Vec<String>,
    /// `docker.io/library/busybox@sha256:…`; the manifest's (or index's) digest.
    pub digests: Vec<String>,
    /// Compressed bytes of all its blobs.
    pub size: u64,
    /// Unpacked layer directories, topmost first.
    pub layers: Vec<PathBuf>,
    pub config: ImageConfig,
    /// Never collected: it was imported or pinned by the operator.
    pub pinned: bool,
}

/// The part of an OCI image config that starting a container needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// As written: `user`, `uid`, `user:group`, `uid:gid`; empty is root.
    pub user: String,
    pub env: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub working_dir: String,
    /// Name or number: `SIGTERM`, `15`, `SIGRTMIN+3`; empty is SIGTERM.
    pub stop_signal: String,
    /// Paths that the image declares as volumes.
    pub volumes: Vec<String>,
}

/// Credentials for one pull. They go only to the host they are for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PullAuth {
    pub username: String,
    pub password: String,
}

/// Why an image is not here. `kubelet::status` maps kinds to waiting reasons.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// InvalidImageName.
    #[error("invalid image reference \"{reference}\": {why}")]
    InvalidName { reference: String, why: String },
    /// ErrImagePull, worth retrying with back-off.
    #[error("failed to pull image \"{reference}\": {why}")]
    Pull { reference: String, why: String },
    /// RegistryUnavailable: the registry could not be reached at all.
    #[error("failed to pull image \"{reference}\": registry {host} is unavailable: {why}")]
    Unavailable { reference: String, host: String, why: String },
    /// ErrImageNeverPull is decided by the plan; this is "not here".
    #[error("image \"{0}\" is not present on this node")]
    NotPresent(String),
    /// ImageInspectError: here, but unreadable.
    #[error("image \"{reference}\" cannot be read: {why}")]
    Inspect { reference: String, why: String },
    #[error("image store: {operation} {path}: {source}")]
    Store { operation: &'static str, path: PathBuf, source: std::io::Error },
}
