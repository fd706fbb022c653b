//! Pod + container + image config to the runtime's SpecInput. Pure.
use oci_spec::runtime::LinuxSeccomp;

use super::qos::NodeCapacity;
use crate::api::pod::{Container, Pod};
use crate::images::model::ImageConfig;
use crate::runtime::model::{Pins, ResolvedUser};
use crate::runtime::spec::{HostFacts, SpecInput, SpecMount};
use crate::runtime::user::UserRequest;

/// Waiting reason CreateContainerConfigError, with the kubelet's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TranslateError(pub String);

/// What user::resolve is to look up in the image.
pub fn user_request(_pod: &Pod, _container: &Container, _image: &ImageConfig) -> Result<UserRequest, TranslateError> {
    todo!()
}

/// runAsNonRoot against the user as resolved.
pub fn verify_non_root(
    _pod: &Pod,
    _container: &Container,
    _image: &ImageConfig,
    _user: &ResolvedUser,
) -> Result<(), TranslateError> {
    todo!()
}

/// Which seccomp profile a container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeccompChoice {
    Unconfined,
    RuntimeDefault,
    /// Path below `<kubelet>/seccomp`, checked: relative and without `..`.
    Localhost(String),
}

pub fn seccomp_choice(_pod: &Pod, _container: &Container) -> Result<SeccompChoice, TranslateError> {
    todo!()
}

/// Everything else that a container's spec depends on.
pub struct TranslateInput<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub image: &'a ImageConfig,
    pub user: ResolvedUser,
    /// Resolved by kubelet::env, in order.
    pub env: Vec<(String, String)>,
    /// Volumes and the kubelet's own files (hosts, resolv.conf, hostname, termination log), in order.
    pub mounts: Vec<SpecMount>,
    pub hostname: &'a str,
    pub pins: Pins,
    /// Leaf cgroup.
    pub cgroup: String,
    /// The parsed profile where [`seccomp_choice`] gave Localhost.
    pub localhost_profile: Option<LinuxSeccomp>,
    pub node: NodeCapacity,
    pub host: HostFacts,
}

pub fn translate(_input: TranslateInput) -> Result<SpecInput, TranslateError> {
    todo!()
}
