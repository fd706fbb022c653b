//! Services, EndpointSlices, NetworkPolicies and Namespaces of the manifests, and the small file
//! that keeps their last good versions over a restart of the agent.
//!
//! Invariant: an object in here is valid, its namespace is filled in. Fields that nobody knows
//! are told and ignored, except in a NetworkPolicy: there a typing error would open what was
//! meant to be closed, so it is refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::object::{Body, Key, Object};
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::meta::ObjectMeta;
use crate::api::namespace::Namespace;
use crate::api::network_policy::NetworkPolicy;
use crate::api::service::Service;
use crate::kubelet::validate::{self, Invalid};

/// What packets and names are served from; by namespace and name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkObjects {
    pub services: BTreeMap<(String, String), Arc<Service>>,
    pub slices: BTreeMap<(String, String), Arc<EndpointSlice>>,
    pub policies: BTreeMap<(String, String), Arc<NetworkPolicy>>,
    /// By name. A namespace needs no object to be there; kubernetes.io/metadata.name is implied.
    pub namespaces: BTreeMap<String, Arc<Namespace>>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum NetworkObject {
    Service(Arc<Service>),
    Slice(Arc<EndpointSlice>),
    Policy(Arc<NetworkPolicy>),
    Namespace(Arc<Namespace>),
}

/// One object as it is now.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkChange {
    pub key: Key,
    /// None: it is gone.
    pub object: Option<NetworkObject>,
}

impl NetworkObjects {
    pub fn take(&mut self, change: NetworkChange) {
        let NetworkChange { key, object } = change;
        let kind = key.kind;
        let name = (key.namespace, key.name);
        // An object that was there is dropped.
        match object {
            Some(NetworkObject::Service(service)) => drop(self.services.insert(name, service)),
            Some(NetworkObject::Slice(slice)) => drop(self.slices.insert(name, slice)),
            Some(NetworkObject::Policy(policy)) => drop(self.policies.insert(name, policy)),
            Some(NetworkObject::Namespace(namespace)) => drop(self.namespaces.insert(name.1, namespace)),
            None if kind == Service::KIND => drop(self.services.remove(&name)),
            None if kind == EndpointSlice::KIND => drop(self.slices.remove(&name)),
            None if kind == NetworkPolicy::KIND => drop(self.policies.remove(&name)),
            None => drop(self.namespaces.remove(&name.1)),
        }
    }
}

/// A kind that [`super::object`] reads like any other of its sort.
pub trait Kind: DeserializeOwned {
    const KIND: &'static str;
    const VERSION: &'static str;
    /// Objects of it live in a namespace.
    const NAMESPACED: bool = true;
    /// An unknown field refuses the object.
    const STRICT: bool = false;
    fn meta(&mut self) -> &mut ObjectMeta;
    fn invalid(&self) -> Vec<Invalid>;
    fn object(self) -> NetworkObject;
}

impl Kind for Service {
    const KIND: &'static str = "Service";
    const VERSION: &'static str = "v1";
    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
    fn invalid(&self) -> Vec<Invalid> {
        validate::service(self)
    }
    fn object(self) -> NetworkObject {
        NetworkObject::Service(Arc::new(self))
    }
}

impl Kind for EndpointSlice {
    const KIND: &'static str = "EndpointSlice";
    const VERSION: &'static str = "discovery.k8s.io/v1";
    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
    fn invalid(&self) -> Vec<Invalid> {
        validate::endpoint_slice(self)
    }
    fn object(self) -> NetworkObject {
        NetworkObject::Slice(Arc::new(self))
    }
}

impl Kind for NetworkPolicy {
    const KIND: &'static str = "NetworkPolicy";
    const VERSION: &'static str = "networking.k8s.io/v1";
    const STRICT: bool = true;
    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
    fn invalid(&self) -> Vec<Invalid> {
        validate::network_policy(self)
    }
    fn object(self) -> NetworkObject {
        NetworkObject::Policy(Arc::new(self))
    }
}

impl Kind for Namespace {
    const KIND: &'static str = "Namespace";
    const VERSION: &'static str = "v1";
    const NAMESPACED: bool = false;
    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
    fn invalid(&self) -> Vec<Invalid> {
        validate::namespace(self)
    }
    fn object(self) -> NetworkObject {
        NetworkObject::Namespace(Arc::new(self))
    }
}

/// One object as the small file keeps it.
#[derive(Serialize, Deserialize)]
struct Stored {
    file: String,
    document: u32,
    object: StoredObject,
}

#[derive(Serialize, Deserialize)]
enum StoredObject {
    Service(Service),
    EndpointSlice(EndpointSlice),
    NetworkPolicy(NetworkPolicy),
    Namespace(Namespace),
}

/// The largest file that is read back; more objects than that are only remembered while we run.
pub const MEMORY_MAX: u64 = 16 << 20;

/// What of the objects is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    All,
    /// NetworkPolicies and what they speak of: a Service that is forgotten is not served, a policy
    /// that is forgotten is an open door.
    Policies,
}

/// The bytes that [`recall`] reads back; None where there are too many, or nothing to keep.
pub fn remember<'a>(objects: impl Iterator<Item = (&'a String, &'a Object)>, keep: Keep) -> Option<Vec<u8>> {
    let stored: Vec<Stored> = objects
        .filter_map(|(file, object)| {
            let Body::Network(body) = &object.body else { return None };
            let body = match body {
                NetworkObject::Service(_) | NetworkObject::Slice(_) if keep == Keep::Policies => return None,
                NetworkObject::Service(s) => StoredObject::Service(Service::clone(s)),
                NetworkObject::Slice(s) => StoredObject::EndpointSlice(EndpointSlice::clone(s)),
                NetworkObject::Policy(p) => StoredObject::NetworkPolicy(NetworkPolicy::clone(p)),
                NetworkObject::Namespace(n) => StoredObject::Namespace(Namespace::clone(n)),
            };
            Some(Stored { file: file.clone(), document: object.document, object: body })
        })
        .collect();
    // Texts and numbers only: it cannot fail, and without the file a restart knows less.
    let bytes = serde_json::to_vec(&stored).ok()?;
    (bytes.len() as u64 <= MEMORY_MAX).then_some(bytes)
}

/// Files and their objects. One that is no longer valid for this version is left out.
pub fn recall(bytes: &[u8]) -> Result<Vec<(String, Object)>, serde_json::Error> {
    let stored: Vec<Stored> = serde_json::from_slice(bytes)?;
    let objects = stored.into_iter().filter_map(|s| {
        let (key, body) = match s.object {
            StoredObject::Service(object) => whole(object),
            StoredObject::EndpointSlice(object) => whole(object),
            StoredObject::NetworkPolicy(object) => whole(object),
            StoredObject::Namespace(object) => whole(object),
        }?;
        Some((s.file, Object { key, document: s.document, line: 0, body: Body::Network(body) }))
    });
    Ok(objects.collect())
}

fn whole<T: Kind>(mut object: T) -> Option<(Key, NetworkObject)> {
    let meta = object.meta();
    let key = Key { kind: T::KIND, namespace: meta.namespace.clone(), name: meta.name.clone() };
    object.invalid().is_empty().then(|| (key, object.object()))
}
