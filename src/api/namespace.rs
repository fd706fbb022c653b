//! v1 Namespace: its labels, which policies select by.
#![deny(clippy::disallowed_methods)]

use serde::{Deserialize, Serialize};

use super::meta::ObjectMeta;

/// Every namespace carries its name as this label.
pub const NAME_LABEL: &str = "kubernetes.io/metadata.name";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Namespace {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
}
