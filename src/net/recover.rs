//! At start: adopt what lives, free the rest. At the end: remove what we made and nothing else.
//!
//! Invariant: the kernel is believed first (a link that is ours by name and alias, and what is in
//! the pod's namespace), leases second. Only links that a hash of our instance and their alias
//! names, or that our journal names, are ever removed.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::apply::{journal, reached};
use super::leases::Lease;
use super::model::{Attachment, NetError};
use super::pod::PodLink;
use super::{Inner, Pod, observe, plan};
use crate::store::effects::Effect;
use crate::sys::chain::chain;
use crate::sys::nftables::{self, Batch, Family};
use crate::sys::{rtnl, sysctl};

impl Inner {
    pub(super) fn recover(&self, living: &[(String, PathBuf)]) -> Result<Vec<(String, Attachment)>, NetError> {
        let living: BTreeMap<&str, &PathBuf> = living.iter().map(|(uid, netns)| (uid.as_str(), netns)).collect();
        let mut socket = self.route_socket()?;
        let kernel = |source| NetError::Kernel { operation: "look at links", object: String::new(), source };
        let links = rtnl::links(&mut socket).map_err(kernel)?;
        self.remove_dead(&living, &links)?;

        let mut adopted = Vec::new();
        for (uid, netns) in living {
            let Some(link) = links.iter().find(|l| self.names.is_veth(l) && l.alias == uid) else { continue };
            let known = self.state().pods.get(uid).map(|p| p.lease.clone());
            let lease = match known {
                Some(lease) => Lease { netns: netns.clone(), ..lease },
                // The lease was lost; the pod itself knows its addresses, and attach its ports.
                None => match observe::pod_addresses(netns, link.index)? {
                    Some(addresses) => {
                        let (uid, pod) = (uid.to_owned(), uid.to_owned());
                        Lease { uid, pod, netns: netns.clone(), addresses, host_ports: Vec::new() }
                    }
                    None => continue,
                },
            };
            let was_leased = {
                let mut state = self.state();
                if !state.ipam.adopt(uid, &lease.addresses) {
                    continue;
                }
                state.pods.insert(uid.to_owned(), Pod { lease: lease.clone(), leaving: false }).is_some()
            };
            self.leases.save(&lease).map_err(self.lease_io("write the lease of", uid))?;
            let whole = PodLink { names: &self.names, lease: &lease, cidrs: &self.cidrs }.is_whole(&mut socket)?;
            if let (Some(mtu), true) = (whole, was_leased) {
                adopted.push((uid.to_owned(), Attachment { addresses: lease.addresses, mtu }));
            }
        }
        // A host that cannot have a bridge still runs pods with its own network: whatever is wrong
        // here is tried again by the watch, and told to each pod that needs it.
        if let Err(error) = self.ensure_host().and_then(|()| self.ensure_tables()) {
            tracing::warn!(error = %chain(&error), "the pods' network is not whole after the start; it is tried again");
        }
        Ok(adopted)
    }

    /// Pods of leases, of links that are ours and of the journal that no sandbox lives for.
    fn remove_dead(&self, living: &BTreeMap<&str, &PathBuf>, links: &[rtnl::Link]) -> Result<(), NetError> {
        let mut dead: Vec<String> = self.state().pods.keys().cloned().collect();
        dead.extend(links.iter().filter(|l| self.names.is_veth(l)).map(|l| l.alias.clone()));
        dead.retain(|uid| !living.contains_key(uid.as_str()));
        dead.sort();
        dead.dedup();
        for uid in dead {
            tracing::info!(uid, "freeing the network of a pod that does not live");
            self.detach(&uid)?;
        }
        // Cut off between making a pair and naming it after its pod.
        let named: Vec<String> = living.keys().map(|uid| self.names.veth(uid)).collect();
        for standing in journal(self.effects.standing())? {
            let Effect::Link { name } = &standing.effect else { continue };
            if *name == self.names.bridge || named.contains(name) {
                continue;
            }
            self.remove_unnamed(name)?;
            journal(self.effects.undone(&standing.effect))?;
        }
        Ok(())
    }

    /// A link that the journal names and that has no alias yet.
    fn remove_unnamed(&self, name: &str) -> Result<(), NetError> {
        let kernel = |source| NetError::Kernel { operation: "remove the link", object: name.to_owned(), source };
        let mut socket = self.route_socket()?;
        if rtnl::link(&mut socket, name).map_err(kernel)?.is_some_and(|l| l.kind == "veth" && l.alias.is_empty()) {
            rtnl::delete_link(&mut socket, name).map_err(kernel)?;
        }
        Ok(())
    }

    pub(super) fn remove_all(&self) -> Result<(), NetError> {
        let mut socket = self.route_socket()?;
        let kernel = |operation| move |source| NetError::Kernel { operation, object: String::new(), source };
        let links = rtnl::links(&mut socket).map_err(kernel("look at links"))?;
        self.remove_dead(&BTreeMap::new(), &links)?;
        reached("net.remove.pods", "")?;

        for family in [Family::Ip, Family::Ip6] {
            let effect = Effect::NftTable { family: family.name().to_owned(), name: self.names.table.clone() };
            if journal(self.effects.standing())?.iter().any(|s| s.effect == effect) {
                self.remove_table(family)?;
                journal(self.effects.undone(&effect))?;
            }
        }
        reached("net.remove.tables", "")?;

        let bridge = Effect::Link { name: self.names.bridge.clone() };
        let journalled = journal(self.effects.standing())?.iter().any(|s| s.effect == bridge);
        let ours =
            |l: &rtnl::Link| l.kind == "bridge" && (l.alias == self.names.bridge_alias || (l.alias.is_empty() && journalled));
        if rtnl::link(&mut socket, &self.names.bridge).map_err(kernel("look at the bridge"))?.is_some_and(|l| ours(&l)) {
            rtnl::delete_link(&mut socket, &self.names.bridge).map_err(kernel("delete the bridge"))?;
        }
        journal(self.effects.undone(&bridge))?;
        reached("net.remove.bridge", "")?;

        for standing in journal(self.effects.standing())?.into_iter().rev() {
            if let Effect::Sysctl { name, was } = &standing.effect {
                self.put_back(name, was)?;
                journal(self.effects.undone(&standing.effect))?;
            }
        }
        self.leases.remove_all().map_err(self.lease_io("remove", "all leases"))
    }

    fn remove_table(&self, family: Family) -> Result<(), NetError> {
        let object = || format!("{} {}", family.name(), self.names.table);
        let kernel = |source| NetError::Kernel { operation: "remove nftables table", object: object(), source };
        let mut socket = nftables::open().map_err(kernel)?;
        let mut batch = Batch::new(family, &self.names.table);
        // Adding it first makes deleting it right where it is gone already.
        batch.add_table();
        batch.delete_table();
        nftables::commit(&mut socket, "remove our table", &batch).map_err(|refused| kernel(refused.error))
    }

    /// Only where it still is what we made of it.
    fn put_back(&self, name: &str, was: &str) -> Result<(), NetError> {
        let io = |operation| move |source| NetError::Io { operation, object: name.to_owned(), source };
        let Some(is) = sysctl::read(name).map_err(io("read kernel parameter"))? else { return Ok(()) };
        if is != was && plan::sysctl_ours(name).is_none_or(|ours| ours == is) {
            sysctl::write(name, was).map_err(io("put back kernel parameter"))?;
        }
        Ok(())
    }
}
