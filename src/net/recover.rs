//! At start: adopt what lives, free the rest. At the end: remove what we made and nothing else.
//!
//! Invariant: the kernel is believed first (a link that is ours by name and alias, and what is in
//! the pod's namespace), leases second. Only links that a hash of our instance and their alias
//! names, or that our journal names, are ever removed; and whatever the journal names is removed,
//! also what an agent of this root made under another instance name: nobody else would.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::apply::{journal, reached};
use super::leases::Lease;
use super::model::{Attachment, NetError};
use super::pod::PodLink;
use super::{Inner, Pod, observe, plan};
use crate::store::effects::Effect;
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
        // Cut off between making a pair and naming it after its pod, or of another instance name.
        let named: Vec<String> = living.keys().map(|uid| self.names.veth(uid)).collect();
        for standing in journal(self.effects.standing())? {
            match &standing.effect {
                Effect::Link { name } if *name != self.names.bridge && !named.contains(name) => self.remove_link(name)?,
                Effect::NftTable { family, name } if *name != self.names.table => self.remove_table(family, name)?,
                _ => continue,
            }
            journal(self.effects.undone(&standing.effect))?;
        }
        Ok(())
    }

    /// A link that the journal names, unless it is visibly somebody else's by now.
    fn remove_link(&self, name: &str) -> Result<(), NetError> {
        let kernel = |source| NetError::Kernel { operation: "remove the link", object: name.to_owned(), source };
        let mut socket = self.route_socket()?;
        let Some(link) = rtnl::link(&mut socket, name).map_err(kernel)? else { return Ok(()) };
        if !plan::is_journalled(&link) {
            tracing::warn!(
                name,
                kind = link.kind,
                alias = link.alias,
                "a link that our journal names is somebody else's: it stays"
            );
            return Ok(());
        }
        rtnl::delete_link(&mut socket, name).map_err(kernel)?;
        tracing::info!(name, "removed a link that our journal names");
        Ok(())
    }

    pub(super) fn remove_all(&self) -> Result<(), NetError> {
        let mut socket = self.route_socket()?;
        let kernel = |source| NetError::Kernel { operation: "look at links", object: String::new(), source };
        let links = rtnl::links(&mut socket).map_err(kernel)?;
        self.remove_dead(&BTreeMap::new(), &links)?;
        reached("net.remove.pods", "")?;

        self.ports.remove_all().map_err(NetError::ports("remove what leads to pods", ""))?;
        // Pods and strange names are gone; what is left is this instance's.
        for standing in journal(self.effects.standing())? {
            let Effect::NftTable { family, name } = &standing.effect else { continue };
            self.remove_table(family, name)?;
            journal(self.effects.undone(&standing.effect))?;
        }
        reached("net.remove.tables", "")?;

        for standing in journal(self.effects.standing())? {
            let Effect::Link { name } = &standing.effect else { continue };
            self.remove_link(name)?;
            journal(self.effects.undone(&standing.effect))?;
        }
        reached("net.remove.bridge", "")?;

        for standing in journal(self.effects.standing())?.into_iter().rev() {
            if let Effect::Sysctl { name, was } = &standing.effect {
                self.put_back(name, was)?;
                journal(self.effects.undone(&standing.effect))?;
            }
        }
        self.leases.remove_all().map_err(self.lease_io("remove", "all leases"))
    }

    fn remove_table(&self, family: &str, name: &str) -> Result<(), NetError> {
        let object = || format!("{family} {name}");
        let kernel = |source| NetError::Kernel { operation: "remove nftables table", object: object(), source };
        let unknown = || NetError::Io {
            operation: "remove nftables table",
            object: object(),
            source: std::io::Error::other("this version makes no tables of this family: `nft delete table` does it"),
        };
        let family = [Family::Ip, Family::Ip6].into_iter().find(|f| f.name() == family).ok_or_else(unknown)?;
        let mut socket = nftables::open().map_err(kernel)?;
        let mut batch = Batch::new(family, name);
        // Adding it first makes deleting it right where it is gone already.
        batch.add_table();
        batch.delete_table();
        nftables::commit(&mut socket, "remove our table", &mut batch).map_err(|refused| kernel(refused.error))
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
