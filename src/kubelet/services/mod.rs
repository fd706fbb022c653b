//! Services as this node serves them when it is alone: the objects of the manifests, addresses
//! and node ports for those without, slices of the pods that run here, resolved by `proxy`.
//!
//! Plain decisions of the planner's thread; it stores what [`Services::objects`] gives and never
//! waits for that. Invariant: what is served follows from the last objects and pods told, and a
//! pod that changes costs the Services that select it, no others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::model::{Desired, Observed, Sandbox};
use super::source::network::Kind;
use super::source::{NetworkChange, NetworkObject, NetworkObjects};
use super::status::render;
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::service::Service;
use crate::proxy::alone::{self, Memory, Pod};
use crate::proxy::model::{Cidr, LocalPod, NodeFacts, ServicePort, Skipped};
use crate::proxy::service::{Cache, Change, Name};

pub mod env;
pub mod policies;
pub mod view;

#[cfg(test)]
mod tests;

pub struct Services {
    node: NodeFacts,
    /// One a family at most.
    ranges: Vec<Cidr>,
    memory: Memory,
    objects: NetworkObjects,
    /// Services and the names of their slices in the manifests.
    written: BTreeSet<(Name, String)>,
    /// With their addresses.
    services: BTreeMap<Name, Arc<Service>>,
    /// What could not be allotted.
    refused: Vec<Skipped>,
    pods: Vec<Pod>,
    /// Slices made here, by Service.
    made: BTreeMap<Name, Made>,
    cache: Cache,
    revision: u64,
}

#[derive(Default)]
struct Made {
    slices: Vec<EndpointSlice>,
    skipped: Vec<Skipped>,
}

impl Services {
    /// `memory`: what [`Services::objects`] gave in an earlier life.
    pub fn new(node: NodeFacts, ranges: Vec<Cidr>, memory: Memory) -> Services {
        let cache = Cache::new(&node);
        Services {
            node,
            ranges,
            memory,
            objects: NetworkObjects::default(),
            written: BTreeSet::new(),
            services: BTreeMap::new(),
            refused: Vec::new(),
            pods: Vec::new(),
            made: BTreeMap::new(),
            cache,
            revision: 0,
        }
    }

    /// Takes in what the manifests hold otherwise now. Some: addresses that are to be stored.
    pub fn objects(&mut self, changes: Vec<NetworkChange>) -> Option<Memory> {
        let mut services = false;
        for change in changes {
            let name = Name::new(&change.key.namespace, &change.key.name);
            match (&change.object, change.key.kind) {
                (Some(NetworkObject::Slice(slice)), _) => self.slice(&name, Some(slice)),
                (None, EndpointSlice::KIND) => self.slice(&name, None),
                (Some(NetworkObject::Service(_)), _) | (None, Service::KIND) => services = true,
                (Some(NetworkObject::Policy(_) | NetworkObject::Namespace(_)) | None, _) => {}
            }
            self.objects.take(change);
        }
        if !services {
            return None;
        }
        self.revision += 1;
        let allotted = alone::allot(self.objects.services.values(), &self.ranges, &self.memory);
        let before = std::mem::replace(&mut self.services, allotted.services);
        let names: BTreeSet<Name> = before.keys().chain(self.services.keys()).cloned().collect();
        for name in names {
            let now = self.services.get(&name);
            if before.get(&name) != now {
                self.cache.put_service(&name, now.map(|s| &**s));
                self.make(&name);
            }
        }
        self.refused = allotted.skipped;
        let changed = self.memory != allotted.memory;
        self.memory = allotted.memory;
        changed.then(|| self.memory.clone())
    }

    /// A slice that is written in a manifest.
    fn slice(&mut self, name: &Name, slice: Option<&EndpointSlice>) {
        self.revision += 1;
        let home = |slice: &EndpointSlice| slice.service().map(|service| Name::new(&name.namespace, service));
        let before = self.objects.slices.get(&(name.namespace.clone(), name.name.clone()));
        if let Some(before) = before.and_then(|slice| home(slice)) {
            self.written.remove(&(before, name.name.clone()));
        }
        self.written.extend(slice.and_then(home).map(|now| (now, name.name.clone())));
        self.cache.put_slice(name, slice);
    }

    /// The pods that could take connections now; sorted as [`pods`] gives them.
    pub fn pods(&mut self, pods: Vec<Pod>) {
        if self.pods == pods {
            return;
        }
        self.revision += 1;
        let before = std::mem::replace(&mut self.pods, pods);
        let changed: Vec<&Pod> =
            before.iter().filter(|p| !self.pods.contains(p)).chain(self.pods.iter().filter(|p| !before.contains(p))).collect();
        let touched = |name: &Name, service: &Service| {
            let selector = &service.spec.selector;
            changed.iter().any(|pod| {
                pod.local.namespace == name.namespace
                    && !selector.is_empty()
                    && selector.iter().all(|(key, value)| pod.local.labels.get(key) == Some(value))
            })
        };
        let touched: Vec<Name> = self.services.iter().filter(|(n, s)| touched(n, s)).map(|(n, _)| n.clone()).collect();
        for name in touched {
            self.make(&name);
        }
    }

    /// Makes the slices of one Service anew.
    fn make(&mut self, name: &Name) {
        let made = match self.services.get(name) {
            Some(service) => {
                let (slices, skipped) = alone::slices_of(name, service, &self.pods, &self.node);
                Made { slices, skipped }
            }
            None => Made::default(),
        };
        let before = self.made.remove(name).unwrap_or_default();
        for old in before.slices.iter().filter(|old| made.slices.iter().all(|s| s.metadata.name != old.metadata.name)) {
            self.cache.put_slice(&Name::new(&name.namespace, &old.metadata.name), None);
        }
        for new in made.slices.iter().filter(|new| !before.slices.contains(new)) {
            self.cache.put_slice(&Name::new(&name.namespace, &new.metadata.name), Some(new));
        }
        if !made.slices.is_empty() || !made.skipped.is_empty() {
            self.made.insert(name.clone(), made);
        }
    }

    /// Ports that are served otherwise since the last call.
    pub fn changes(&mut self) -> Vec<Change> {
        self.cache.changes()
    }

    /// Every port of every Service.
    pub fn ports(&self) -> impl Iterator<Item = ServicePort> + '_ {
        self.cache.all()
    }

    /// Another one whenever objects or pods are others.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn node(&self) -> &NodeFacts {
        &self.node
    }

    /// Policies, namespaces and the rest, as the manifests have them.
    pub fn manifest_objects(&self) -> &NetworkObjects {
        &self.objects
    }

    /// Services with their addresses, by name.
    pub fn services(&self) -> &BTreeMap<Name, Arc<Service>> {
        &self.services
    }

    /// All slices of a Service: those of the manifests, then those made of pods.
    pub fn slices(&self, name: &Name) -> impl Iterator<Item = &EndpointSlice> {
        let written = self.written.range((name.clone(), String::new())..).take_while(move |(home, _)| home == name);
        let written = written.filter_map(|(_, slice)| self.objects.slices.get(&(name.namespace.clone(), slice.clone())));
        written.map(|slice| &**slice).chain(self.made.get(name).into_iter().flat_map(|made| &made.slices))
    }

    pub fn local_pods(&self) -> &[Pod] {
        &self.pods
    }

    /// What of a Service is not served, and why.
    pub fn skipped(&self, name: &Name) -> Vec<Skipped> {
        let object = format!("Service {name}");
        let mut all: Vec<Skipped> = self.refused.iter().filter(|s| s.object == object).cloned().collect();
        all.extend(self.made.get(name).into_iter().flat_map(|made| made.skipped.iter().cloned()));
        all.extend(self.cache.skipped(name));
        all
    }
}

/// The pods of this node that have addresses and have not finished; by namespace and name.
pub fn pods(desired: &Desired, observed: &Observed) -> Vec<Pod> {
    let mut pods: Vec<Pod> = observed
        .pods
        .iter()
        .filter_map(|(uid, state)| {
            let pod = state.pod.as_deref()?;
            let Sandbox::Up { addresses, .. } = &state.sandbox else { return None };
            let host_network = pod.spec.host_network;
            let addresses = if host_network { desired.node.ips.clone() } else { addresses.clone() };
            if addresses.is_empty() || state.finished.is_some() {
                return None;
            }
            let local = LocalPod {
                uid: uid.as_str().to_owned(),
                namespace: state.namespace.clone(),
                name: state.name.clone(),
                addresses,
                labels: policies::labels(desired, uid, pod),
                ports: policies::named_ports(pod),
                host_network,
            };
            let (hostname, subdomain) = (pod.spec.hostname.clone(), pod.spec.subdomain.clone());
            Some(Pod { local, ready: render::is_ready(pod, state), ending: state.ending.is_some(), hostname, subdomain })
        })
        .collect();
    pods.sort_by(|a, b| {
        (&a.local.namespace, &a.local.name, &a.local.uid).cmp(&(&b.local.namespace, &b.local.name, &b.local.uid))
    });
    pods
}
