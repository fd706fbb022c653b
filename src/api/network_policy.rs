//! networking.k8s.io/v1 NetworkPolicy.
//!
//! What is absent matters: no `podSelector` in a peer is another thing than an empty one, an
//! empty `from` means everybody, an empty `ports` every port.
#![deny(clippy::disallowed_methods)]

use serde::{Deserialize, Serialize};

use super::meta::{ObjectMeta, null_default};
use super::pod::Protocol;
use super::selector::{IntOrString, LabelSelector};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkPolicy {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "null_default")]
    pub spec: NetworkPolicySpec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkPolicySpec {
    #[serde(deserialize_with = "null_default")]
    pub pod_selector: LabelSelector,
    /// Empty: Ingress, and Egress too where egress rules stand.
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub policy_types: Vec<PolicyType>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ingress: Vec<IngressRule>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<EgressRule>,
}

impl NetworkPolicySpec {
    /// The direction is isolated for the selected pods.
    pub fn restricts(&self, direction: PolicyType) -> bool {
        match (self.policy_types.is_empty(), direction) {
            (false, _) => self.policy_types.contains(&direction),
            (true, PolicyType::Ingress) => true,
            (true, PolicyType::Egress) => !self.egress.is_empty(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PolicyType {
    Ingress,
    Egress,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IngressRule {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub from: Vec<PolicyPeer>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PolicyPort>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EgressRule {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<PolicyPeer>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PolicyPort>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyPeer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<LabelSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_block: Option<IpBlock>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IpBlock {
    pub cidr: String,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyPort {
    pub protocol: Protocol,
    /// None: every port of the protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<IntOrString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_port: Option<i32>,
}
