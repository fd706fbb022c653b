//! discovery.k8s.io/v1 EndpointSlice.
//!
//! Conditions stay optional: an absent `ready` or `serving` counts as true, an absent
//! `terminating` as false; the readers below say so once.
#![deny(clippy::disallowed_methods)]

use serde::{Deserialize, Serialize};

use super::meta::{ObjectMeta, null_default};
use super::pod::Protocol;

/// Names the Service that a slice belongs to.
pub const SERVICE_NAME: &str = "kubernetes.io/service-name";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointSlice {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub address_type: AddressType,
    #[serde(deserialize_with = "null_default")]
    pub endpoints: Vec<SliceEndpoint>,
    #[serde(deserialize_with = "null_default")]
    pub ports: Vec<EndpointPort>,
}

impl EndpointSlice {
    /// None: the slice belongs to no Service.
    pub fn service(&self) -> Option<&str> {
        self.metadata.labels.get(SERVICE_NAME).map(String::as_str).filter(|name| !name.is_empty())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AddressType {
    #[default]
    IPv4,
    IPv6,
    FQDN,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SliceEndpoint {
    #[serde(deserialize_with = "null_default")]
    pub addresses: Vec<String>,
    #[serde(deserialize_with = "null_default")]
    pub conditions: EndpointConditions,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hints: Option<EndpointHints>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointConditions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminating: Option<bool>,
}

impl EndpointConditions {
    pub fn is_ready(&self) -> bool {
        self.ready.unwrap_or(true)
    }
    pub fn is_serving(&self) -> bool {
        self.serving.unwrap_or(true)
    }
    pub fn is_terminating(&self) -> bool {
        self.terminating.unwrap_or(false)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TargetRef {
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointHints {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub for_zones: Vec<Hint>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub for_nodes: Vec<Hint>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hint {
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointPort {
    /// The Service port's name; "" for a Service of one nameless port.
    #[serde(deserialize_with = "null_default")]
    pub name: String,
    pub protocol: Protocol,
    /// None: all ports, which no proxy can serve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<i32>,
}
