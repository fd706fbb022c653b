//! Reads what the kernel has of our table, and what others have that concerns us. Changes nothing.
//!
//! Invariant: of foreign tables only names and hooks are read.

use std::collections::{BTreeMap, BTreeSet};

use nix::errno::Errno;

use super::table::ir::{Family, Key, Name, Table};
use super::table::read_back::{Comparison, Present, Seen, Wrong, structure};
use crate::sys::netlink::{NetlinkError, Socket};
use crate::sys::nftables::{self, ChainSeen};

/// A table of the kernel, held against what it is to be.
#[derive(Debug)]
pub struct Look {
    /// None: there is none.
    pub structure: Option<Table>,
    /// It does nothing, whatever is in it.
    pub dormant: bool,
    /// By set, of those that stay.
    pub wrong: BTreeMap<Name, Wrong>,
}

pub fn look(socket: &mut Socket, wanted: &Table) -> Result<Look, NetlinkError> {
    let (family, name) = (wanted.family, &*wanted.name);
    let seen = Seen {
        chains: nftables::chains(socket, family, name)?,
        rules: nftables::rules(socket, family, name)?,
        sets: nftables::sets(socket, family, name)?,
    };
    let structure = structure(wanted, &seen);
    let dormant = nftables::is_dormant(socket, family, name)?;
    let mut wrong = BTreeMap::new();
    for (set, spec) in wanted.sets.iter().filter(|(_, spec)| spec.dynamic.is_none()) {
        if structure.as_ref().and_then(|s| s.sets.get(set)) != Some(spec) {
            continue;
        }
        let compare = || Comparison::new(wanted, set, spec);
        let compared = nftables::elements(socket, family, name, set, compare, |c, element| c.take(&element))?;
        let of_set = match compared.unwrap_or_else(compare).end() {
            Ok(wrong) => wrong,
            Err(incomplete) => {
                let present = || Present::new(wanted, set, spec);
                let keys = nftables::elements(socket, family, name, set, present, |p, element| p.take(&element))?;
                let keys: BTreeSet<Key> = keys.unwrap_or_else(present).end();
                incomplete.end(wanted, set, &keys)
            }
        };
        if of_set != Wrong::default() {
            wrong.insert(Name::clone(set), of_set);
        }
    }
    Ok(Look { structure, dormant, wrong })
}

/// Others' tables that matter to us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Foreign {
    /// Families in which a kube-proxy in nftables mode works.
    pub kube_proxy: Vec<Family>,
    /// Families in which one in iptables or ipvs mode does, through iptables-nft.
    pub kube_services: Vec<Family>,
    /// The first chain that drops forwarded packets unless it accepts them.
    pub drops_forwarded: Option<ChainSeen>,
}

impl Foreign {
    /// What shows that somebody else is a kube-proxy here.
    pub fn kube_proxy_seen(&self) -> Option<String> {
        let table = self.kube_proxy.first().map(|family| format!("nftables table {} kube-proxy", family.name()));
        let chain = || Some(format!("chain KUBE-SERVICES of table {} nat", self.kube_services.first()?.name()));
        table.or_else(chain)
    }
}

/// Nothing where there is no nf_tables.
pub fn foreign(socket: &mut Socket) -> Result<Foreign, NetlinkError> {
    let take = |found: &mut Foreign, chain: ChainSeen| {
        let family = [Family::Ip, Family::Ip6].into_iter().find(|f| f.number() == chain.family);
        let of = match (&*chain.table, &*chain.name) {
            ("kube-proxy", _) => Some(&mut found.kube_proxy),
            ("nat", "KUBE-SERVICES") => Some(&mut found.kube_services),
            _ => None,
        };
        if let (Some(family), Some(of)) = (family, of)
            && !of.contains(&family)
        {
            of.push(family);
        }
        if found.drops_forwarded.is_none() && chain.drops_forwarded() {
            found.drops_forwarded = Some(chain);
        }
    };
    match nftables::for_each_chain(socket, Foreign::default, take) {
        Err(e) if matches!(e.errno(), Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EINVAL) => Ok(Foreign::default()),
        other => other,
    }
}
