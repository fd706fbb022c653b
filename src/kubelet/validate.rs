//! What the API server would refuse, in its words. Pure.

use crate::api::pod::Pod;

/// `spec.containers[0].name: Required value`, and the cure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Invalid {
    pub field: String,
    pub message: String,
}

/// Everything that is wrong with a pod that already has its defaults; empty: it may run.
pub fn pod(_pod: &Pod) -> Vec<Invalid> {
    Vec::new()
}
