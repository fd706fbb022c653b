//! v1 ConfigMap and Secret.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::meta::{ObjectMeta, null_default};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigMap {
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "null_default")]
    pub data: BTreeMap<String, String>,
    /// Values are base64.
    #[serde(deserialize_with = "null_default")]
    pub binary_data: BTreeMap<String, String>,
    pub immutable: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Secret {
    pub metadata: ObjectMeta,
    /// Values are base64.
    #[serde(deserialize_with = "null_default")]
    pub data: BTreeMap<String, String>,
    #[serde(deserialize_with = "null_default")]
    pub string_data: BTreeMap<String, String>,
    #[serde(rename = "type")]
    pub kind: String,
    pub immutable: Option<bool>,
}
