//! v1 Service: what the proxy, the node's DNS server and Service environment variables need.
//!
//! Numbers are as wide as the API's (i32), so that a value out of range is an error that names
//! its field and not one of the parser; `proxy` takes them over as u16 once they are checked.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::meta::{ObjectMeta, null_default};
use super::pod::{Protocol, is_false};
use super::selector::IntOrString;

/// `service.kubernetes.io/headless`: not for the proxy.
pub const HEADLESS: &str = "service.kubernetes.io/headless";
/// `service.kubernetes.io/service-proxy-name`: another proxy serves it.
pub const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Service {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "null_default")]
    pub spec: ServiceSpec,
    #[serde(deserialize_with = "null_default")]
    pub status: ServiceStatus,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub kind: ServiceType,
    /// "" (none given), "None" (headless) or the first of `cluster_ips`.
    #[serde(rename = "clusterIP", skip_serializing_if = "String::is_empty")]
    pub cluster_ip: String,
    #[serde(rename = "clusterIPs", deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub cluster_ips: Vec<String>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ip_families: Vec<IpFamily>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_family_policy: Option<IpFamilyPolicy>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<ServicePort>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub selector: BTreeMap<String, String>,
    #[serde(rename = "externalIPs", deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub external_ips: Vec<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub external_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_traffic_policy: Option<TrafficPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_traffic_policy: Option<TrafficPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_affinity: Option<SessionAffinity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_affinity_config: Option<SessionAffinityConfig>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub load_balancer_source_ranges: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocate_load_balancer_node_ports: Option<bool>,
    #[serde(skip_serializing_if = "is_zero")]
    pub health_check_node_port: i32,
    #[serde(skip_serializing_if = "is_false")]
    pub publish_not_ready_addresses: bool,
    /// PreferClose, PreferSameZone, PreferSameNode; others mean nothing, as the API has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic_distribution: Option<String>,
}

impl ServiceSpec {
    pub fn is_headless(&self) -> bool {
        self.cluster_ip == "None" || self.cluster_ips.iter().any(|ip| ip == "None")
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
    ExternalName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum IpFamily {
    IPv4,
    IPv6,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum IpFamilyPolicy {
    #[default]
    SingleStack,
    PreferDualStack,
    RequireDualStack,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrafficPolicy {
    #[default]
    Cluster,
    Local,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionAffinity {
    #[default]
    None,
    ClientIP,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionAffinityConfig {
    #[serde(rename = "clientIP", skip_serializing_if = "Option::is_none")]
    pub client_ip: Option<ClientIpConfig>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientIpConfig {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<i32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServicePort {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "String::is_empty")]
    pub name: String,
    pub protocol: Protocol,
    pub port: i32,
    /// None: as `port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_port: Option<IntOrString>,
    #[serde(skip_serializing_if = "is_zero")]
    pub node_port: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceStatus {
    #[serde(deserialize_with = "null_default")]
    pub load_balancer: LoadBalancerStatus,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerStatus {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub ingress: Vec<LoadBalancerIngress>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerIngress {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// None is VIP; the proxy serves an address of any other mode not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_mode: Option<String>,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}
