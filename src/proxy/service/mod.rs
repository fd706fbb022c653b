//! Services, EndpointSlices and the node → ports and where their connections end. Pure.
//!
//! ```text
//! Service ──> Frame ─┐
//!                    ├─ derive: topology, claims ─> ServicePorts of both families
//! slices ──> Digests ┘
//! ```
//!
//! A [`Cache`] keeps a digest of each object (an endpoint takes 56 bytes) and derives the ports
//! of one Service when they are asked for: a change to one slice costs what that Service costs.
//! Invariant: what is derived depends on the objects that stand now, never on the order in which
//! they came; so the changes told since the start add up to what a new cache would tell at once.
//!
//! Semantics are those of kube-proxy (pkg/proxy: serviceport.go, endpointslicecache.go,
//! topology.go). Departures: an address that two Services claim has one owner ([`claims`]), and
//! what is left out is named ([`Skipped`]).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::sync::Arc;

use super::model::{Ignored, NodeFacts, ServicePort, Skipped};
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::service::Service;

pub mod address;
mod claims;
mod frame;
mod slice;
mod topology;

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;

use claims::Claims;
use frame::Frame;
use slice::{Digest, Place};

/// `namespace/name` of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    pub namespace: String,
    pub name: String,
}

impl Name {
    pub fn new(namespace: &str, name: &str) -> Name {
        Name { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The ports of one Service before and after, of both families; they differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub service: Arc<Name>,
    pub before: Vec<ServicePort>,
    pub after: Vec<ServicePort>,
}

#[derive(Default)]
struct Entry {
    frame: Option<Frame>,
    slices: Slices,
}

/// Sorted by the slices' names. Most Services have one: a map of that would take ten times its room.
#[derive(Default)]
struct Slices(Vec<(Box<str>, Digest)>);

impl Slices {
    fn find(&self, name: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| (**known).cmp(name))
    }
    fn insert(&mut self, name: &str, digest: Digest) {
        match self.find(name).map(|at| self.0.get_mut(at)) {
            Ok(Some((_, known))) => *known = digest,
            Ok(None) => {}
            Err(at) => {
                self.0.reserve_exact(1);
                self.0.insert(at, (name.into(), digest));
            }
        }
    }
    fn remove(&mut self, name: &str) {
        if let Ok(at) = self.find(name) {
            self.0.remove(at);
        }
    }
    fn values(&self) -> impl Iterator<Item = &Digest> {
        self.0.iter().map(|(_, digest)| digest)
    }
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// All Services of the cluster, as this node serves them.
pub struct Cache {
    place: Place,
    ignored: Ignored,
    services: BTreeMap<Arc<Name>, Entry>,
    /// Slice → the Service that it was last known to belong to.
    homes: BTreeMap<Name, Arc<Name>>,
    claims: Claims,
    /// Services that may have changed since [`Cache::changes`], as they were then.
    pending: BTreeMap<Arc<Name>, Vec<ServicePort>>,
}

impl Cache {
    pub fn new(node: &NodeFacts) -> Cache {
        Cache {
            place: Place::new(node),
            ignored: node.ignored,
            services: BTreeMap::new(),
            homes: BTreeMap::new(),
            claims: Claims::default(),
            pending: BTreeMap::new(),
        }
    }

    /// The node has another zone: what topology says of every Service may change.
    pub fn move_to(&mut self, node: &NodeFacts) {
        if self.place.is_at(node) {
            return;
        }
        let all: Vec<_> = self.services.keys().cloned().collect();
        all.iter().for_each(|name| self.touch(name));
        self.place.move_to(node);
    }

    /// A Service as it is now; None: it is gone.
    pub fn put_service(&mut self, name: &Name, service: Option<&Service>) {
        let name = self.known(name);
        let frame = service.and_then(|s| Frame::of(&name, s, self.ignored));
        self.touch(&name);
        let old = self.services.get(&name).and_then(|e| e.frame.as_ref()).map(|f| f.claims(&name)).unwrap_or_default();
        let new = frame.as_ref().map(|f| f.claims(&name)).unwrap_or_default();
        // Whoever shares a claim that comes, goes or weighs otherwise may win or lose it.
        for (claim, holder) in
            old.iter().filter(|(c, h)| new.get(c) != Some(h)).chain(new.iter().filter(|(c, h)| old.get(c) != Some(h)))
        {
            for rival in self.claims.rivals(claim, holder) {
                self.touch(&rival);
            }
        }
        old.iter().filter(|(c, h)| new.get(c) != Some(h)).for_each(|(claim, holder)| self.claims.release(claim, holder));
        for (claim, holder) in new {
            if old.get(&claim) != Some(&holder) {
                self.claims.take(claim, holder);
            }
        }
        match self.services.entry(name) {
            Slot::Vacant(slot) => {
                if frame.is_some() {
                    slot.insert(Entry { frame, ..Entry::default() });
                }
            }
            Slot::Occupied(mut slot) => {
                slot.get_mut().frame = frame;
                if slot.get().frame.is_none() && slot.get().slices.is_empty() {
                    slot.remove();
                }
            }
        }
    }

    /// An EndpointSlice as it is now; None: it is gone. It may have moved to another Service.
    pub fn put_slice(&mut self, slice: &Name, object: Option<&EndpointSlice>) {
        let digest = object.and_then(|o| Some((Name::new(&slice.namespace, o.service()?), self.place.digest(slice, o)?)));
        let home = digest.as_ref().map(|(home, _)| self.known(home));
        let last = match &home {
            Some(home) => self.homes.insert(slice.clone(), home.clone()),
            None => self.homes.remove(slice),
        };
        if let Some(last) = last.filter(|last| Some(last) != home.as_ref()) {
            self.touch(&last);
            if let Slot::Occupied(mut slot) = self.services.entry(last) {
                slot.get_mut().slices.remove(&slice.name);
                if slot.get().frame.is_none() && slot.get().slices.is_empty() {
                    slot.remove();
                }
            }
        }
        if let (Some(home), Some((_, digest))) = (home, digest) {
            self.touch(&home);
            self.services.entry(home).or_default().slices.insert(&slice.name, digest);
        }
    }

    /// What has changed since the last call, by Service; sorted by name.
    pub fn changes(&mut self) -> Vec<Change> {
        let pending = std::mem::take(&mut self.pending);
        let changed = pending.into_iter().map(|(service, before)| Change { after: self.ports(&service), service, before });
        changed.filter(|c| c.before != c.after).collect()
    }

    /// Every port of every Service, derived one Service at a time.
    pub fn all(&self) -> impl Iterator<Item = ServicePort> + '_ {
        self.services.keys().flat_map(|name| self.ports(name))
    }

    /// The ports of one Service, of both families, IPv4 first.
    pub fn ports(&self, name: &Name) -> Vec<ServicePort> {
        let Some((entry, frame)) = self.services.get(name).and_then(|e| Some((e, e.frame.as_ref()?))) else {
            return Vec::new();
        };
        let mut ports = frame.ports(name);
        ports.retain_mut(|port| self.claims.settle(port, name));
        topology::fill(&mut ports, entry.slices.values(), &self.place);
        ports
    }

    /// What of one Service and its slices is not served, and why.
    pub fn skipped(&self, name: &Name) -> Vec<Skipped> {
        let Some(entry) = self.services.get(name) else { return Vec::new() };
        let mut all = Vec::new();
        if let Some(frame) = &entry.frame {
            all.extend(frame.skipped.iter().cloned());
            let mut ports = frame.ports(name);
            all.extend(ports.iter().flat_map(|port| self.claims.lost(port, name)));
            all.sort();
            all.dedup();
            ports.retain_mut(|port| self.claims.settle(port, name));
            all.extend(topology::too_much(name, &ports, entry.slices.values()));
        }
        all.extend(entry.slices.values().flat_map(|d| d.skipped.iter().cloned()));
        all
    }

    /// Of every Service.
    pub fn all_skipped(&self) -> impl Iterator<Item = Skipped> + '_ {
        self.services.keys().flat_map(|name| self.skipped(name))
    }

    /// Remembers how a Service is served, before something that it depends on changes.
    fn touch(&mut self, name: &Arc<Name>) {
        if !self.pending.contains_key(name) {
            let before = self.ports(name);
            self.pending.insert(name.clone(), before);
        }
    }

    /// The one allocation that all mentions of a Service share.
    fn known(&self, name: &Name) -> Arc<Name> {
        match self.services.get_key_value(name) {
            Some((known, _)) => known.clone(),
            None => Arc::new(name.clone()),
        }
    }
}

/// Everything at once: [`Cache`] for those who do not follow changes.
pub fn resolve<'a>(
    node: &NodeFacts,
    services: impl IntoIterator<Item = &'a Service>,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
) -> (Vec<ServicePort>, Vec<Skipped>) {
    let mut cache = Cache::new(node);
    for service in services {
        cache.put_service(&Name::new(&service.metadata.namespace, &service.metadata.name), Some(service));
    }
    for slice in slices {
        cache.put_slice(&Name::new(&slice.metadata.namespace, &slice.metadata.name), Some(slice));
    }
    (cache.all().collect(), cache.all_skipped().collect())
}
