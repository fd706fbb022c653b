//! What policies are read from.
#![deny(clippy::disallowed_methods)]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::super::model::{LocalPod, Peer};
use crate::api::namespace::{NAME_LABEL, Namespace};
use crate::api::network_policy::NetworkPolicy;

pub type Labels = BTreeMap<String, String>;

/// Everything that policies speak of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// By namespace and name.
    pub policies: BTreeMap<(String, String), Arc<NetworkPolicy>>,
    /// By name; one without an object has the label of its name.
    pub namespaces: BTreeMap<String, Arc<Namespace>>,
    /// Of this node. Whoever lays the addresses out knows them better, so that a pod of the proxy's
    /// gets those that it holds.
    pub pods: Vec<LocalPod>,
    /// Of other nodes; without those that have hostNetwork.
    pub peers: Arc<[Peer]>,
    /// Where pods of this node ask for names: addresses of this node.
    pub servers: Vec<IpAddr>,
}

impl World {
    /// Of a namespace; that of its name is always there.
    pub(super) fn labels(&self, namespace: &str) -> Cow<'_, Labels> {
        let object = self.namespaces.get(namespace).map(|n| &n.metadata.labels);
        match object {
            Some(labels) if labels.get(NAME_LABEL).is_some_and(|name| name == namespace) => Cow::Borrowed(labels),
            _ => {
                let mut labels = object.cloned().unwrap_or_default();
                labels.insert(NAME_LABEL.to_owned(), namespace.to_owned());
                Cow::Owned(labels)
            }
        }
    }

    /// Pods that have addresses of their own.
    pub(super) fn housed(&self) -> impl Iterator<Item = &LocalPod> {
        self.pods.iter().filter(|pod| !pod.host_network && !pod.addresses.is_empty())
    }
}
