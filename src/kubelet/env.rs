//! A container's environment, command and arguments, as the kubelet makes them. Pure.

use std::net::IpAddr;

use crate::api::pod::{Container, Pod};
use crate::volumes::model::Contents;

/// What the kubelet knows about a pod and its node beyond the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub node_name: String,
    /// First one is `status.podIP`; the host's with hostNetwork.
    pub pod_ips: Vec<IpAddr>,
    pub host_ips: Vec<IpAddr>,
    /// What the node can give to pods: default of absent limits in resourceFieldRef.
    pub allocatable_milli_cpu: i64,
    pub allocatable_memory: i64,
    pub allocatable_storage: i64,
}

/// Command and args are None-like (empty) where the image's own apply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// In order, one value a name; to be laid over the image's environment.
    pub env: Vec<(String, String)>,
    pub command: Vec<String>,
    pub args: Vec<String>,
    /// Names that envFrom skipped, and such: for one log line.
    pub warnings: Vec<String>,
}

/// CreateContainerConfigError; the messages are the kubelet's own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey { key: String, kind: &'static str, namespace: String, name: String },
    #[error("{0}")]
    Field(String),
}

pub fn resolve(_pod: &Pod, _container: &Container, _facts: &Facts, _contents: &dyn Contents) -> Result<Resolved, EnvError> {
    Ok(Resolved::default())
}
