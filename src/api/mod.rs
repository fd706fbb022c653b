//! The Kubernetes objects that we read and write: own structs with exactly the fields that we
//! honour. What a struct lacks is what this version does not support; `serde_ignored` collects
//! such fields and a warning names them. k8s-openapi is the oracle for names in tests.

pub mod base64;
pub mod cidr;
pub mod config;
pub mod endpoint_slice;
pub mod l4;
pub mod meta;
pub mod namespace;
pub mod network_policy;
pub mod pod;
pub mod quantity;
pub mod selector;
pub mod service;
pub mod status;
pub mod time;
pub mod yaml;
