//! Plain types of the images' front door.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

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

/// Credentials for one registry host, from an image pull secret or from the command line. They
/// are offered to that host only, never to a redirect's target or a mirror.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PullAuth {
    /// The key as in a docker config's `auths`: `registry.example:5000`, `https://index.docker.io/v1/`,
    /// `ghcr.io/team`, `*.example.com`; empty: the host of the image that is pulled.
    pub host: String,
    pub username: String,
    pub password: String,
    /// An OAuth2 refresh token (docker's `identitytoken`); used instead of the password.
    pub identity_token: String,
    /// A bearer token to send as it is (docker's `registrytoken`).
    pub registry_token: String,
}

impl std::fmt::Debug for PullAuth {
    /// Secrets stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullAuth").field("host", &self.host).field("username", &self.username).finish_non_exhaustive()
    }
}

/// What the image store is opened with.
#[derive(Clone, Debug)]
pub struct ImagesConfig {
    /// `<state>/images`: blobs, layers, staging and their journal.
    pub dir: PathBuf,
    /// The program that is run as `<program> unpack`: our own binary.
    pub program: PathBuf,
    pub platform: Platform,
    pub registries: RegistryConfig,
    pub limits: Limits,
}

impl ImagesConfig {
    /// The store below `state`, for this machine, without special registries.
    pub fn at(state: &std::path::Path) -> ImagesConfig {
        ImagesConfig {
            dir: state.join("images"),
            program: "/proc/self/exe".into(),
            platform: Platform::host(),
            registries: RegistryConfig::default(),
            limits: Limits::default(),
        }
    }
}

/// Which image of an index is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    pub os: String,
    /// GOARCH: `amd64`, `arm64`, `arm`.
    pub architecture: String,
    /// `v8` or `v7`…; empty where the architecture has none.
    pub variant: String,
}

impl Platform {
    /// The platform that this binary was built for.
    pub fn host() -> Platform {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", ""),
            "aarch64" => ("arm64", "v8"),
            "arm" => ("arm", "v7"),
            other => (other, ""),
        };
        Platform { os: "linux".into(), architecture: architecture.into(), variant: variant.into() }
    }
}

/// Where a hostile or broken image is stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Unpacked bytes of one layer.
    pub layer_bytes: u64,
    /// Entries of one layer.
    pub layer_entries: u64,
    /// Unpacked size to compressed size, once more than `ratio_floor` bytes came out.
    pub ratio: u64,
    pub ratio_floor: u64,
    /// A decoder's window; zstd frames that ask for more are refused.
    pub window: u64,
    /// Layers of one image; overlayfs takes 500.
    pub layers: usize,
    /// Seconds without a byte until a download is given up.
    pub stall_seconds: u64,
    /// Layers that are downloaded and unpacked at the same time.
    pub parallel: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            layer_bytes: 16 << 30,
            layer_entries: 2_000_000,
            ratio: 100,
            ratio_floor: 1 << 30,
            window: 8 << 20,
            layers: 127,
            stall_seconds: 30,
            parallel: 2,
        }
    }
}

/// How registries are reached: the k3s form of `registries.yaml`, which `cli` parses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RegistryConfig {
    /// Registry host (or `*`) → where to ask instead, in order; the registry itself comes last.
    pub mirrors: BTreeMap<String, Mirror>,
    /// Host as in an endpoint's URL → how to speak with it.
    pub configs: BTreeMap<String, HostConfig>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Mirror {
    /// URLs: `https://mirror.example:5000`, `http://10.0.0.1:5000/v2`.
    pub endpoint: Vec<String>,
    /// Pattern → replacement on the repository: `^library/(.*)` → `proxy/$1`.
    pub rewrite: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HostConfig {
    pub auth: Option<HostAuth>,
    pub tls: Option<HostTls>,
}

#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HostAuth {
    pub username: String,
    pub password: String,
    /// base64 of `username:password`.
    pub auth: String,
    pub identity_token: String,
}

impl std::fmt::Debug for HostAuth {
    /// Secrets stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostAuth").field("username", &self.username).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HostTls {
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub insecure_skip_verify: bool,
}

/// How `Images::import` names what it finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// The name for an archive's only image, instead of those inside.
    pub name: Option<String>,
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
    /// An archive or layout that cannot be imported.
    #[error("failed to import {path}: {why}")]
    Import { path: PathBuf, why: String },
    /// ImageInspectError: here, but unreadable.
    #[error("image \"{reference}\" cannot be read: {why}")]
    Inspect { reference: String, why: String },
    #[error("image store: {operation} {path}: {source}")]
    Store { operation: &'static str, path: PathBuf, source: std::io::Error },
}
