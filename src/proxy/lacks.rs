//! What a kernel withholds from the proxy: consequence and cure, and the probe.
//!
//! Invariant: the probe tries each thing for real, in a network namespace that is gone when it
//! ends; this host's tables are not touched.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use super::table::acts::plan;
use super::table::encode::encode;
use super::table::ir::{
    Base, Chain, ChainType, CtStates, Dynamic, Family, Field, Hook, Name, Reject, Rule, SetSpec, Step, Table, Type,
};
use super::table::needs::Need;
use crate::sys::netlink::NetlinkError;
use crate::sys::{netns, nftables, sysctl};

/// Something that this kernel or host withholds, what follows from it, and the line that mends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    pub feature: Feature,
    pub consequence: &'static str,
    pub cure: &'static str,
    /// What the kernel said.
    pub said: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    NfTables,
    Table {
        family: Family,
        need: Need,
    },
    Sctp,
    /// Somebody else's firewall lets forwarded packets through.
    Forwarding,
}

impl Feature {
    pub fn name(self) -> &'static str {
        match self {
            Feature::NfTables => "nftables",
            Feature::Table { family: Family::Ip, need } => match need {
                Need::Nat => "masquerade IPv4",
                Need::Fib => "nft_fib IPv4",
                Need::Random => "numgen IPv4",
                Need::Conntrack => "ct IPv4",
                Need::Reject => "reject IPv4",
                Need::Update => "dynamic sets IPv4",
                Need::Ranges => "ranges IPv4",
            },
            Feature::Table { family: Family::Ip6, need } => match need {
                Need::Nat => "masquerade IPv6",
                Need::Fib => "nft_fib IPv6",
                Need::Random => "numgen IPv6",
                Need::Conntrack => "ct IPv6",
                Need::Reject => "reject IPv6",
                Need::Update => "dynamic sets IPv6",
                Need::Ranges => "ranges IPv6",
            },
            Feature::Sctp => "SCTP",
            Feature::Forwarding => "other firewalls",
        }
    }
    /// All that the probe tries.
    pub fn all() -> impl Iterator<Item = Feature> {
        let tables =
            Need::ALL.into_iter().flat_map(|need| [Family::Ip, Family::Ip6].map(|family| Feature::Table { family, need }));
        std::iter::once(Feature::NfTables).chain(tables).chain([Feature::Sctp])
    }
    /// Without it hardly any pod is of use.
    pub fn is_vital(self) -> bool {
        matches!(self, Feature::NfTables | Feature::Table { family: Family::Ip, need: Need::Nat | Need::Conntrack })
    }
}

/// The words for a feature that is not there.
pub fn lack(feature: Feature, said: String) -> Lack {
    let v4 = |family| family == Family::Ip;
    let (consequence, cure) = match feature {
        Feature::NfTables => (
            "pods reach the node and each other, not the outside; no Service, hostPort or NetworkPolicy",
            "modprobe nf_tables, or build the kernel with CONFIG_NF_TABLES and CONFIG_NETFILTER_NETLINK",
        ),
        Feature::Table { family, need: Need::Nat } if v4(family) => (
            "pods reach the outside by IPv4 only where it routes back to them; no Service and no hostPort by IPv4",
            "modprobe -a nft_chain_nat nft_masq nft_nat nft_ct, or build the kernel with CONFIG_NF_TABLES_IPV4, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT",
        ),
        Feature::Table { need: Need::Nat, .. } => (
            "pods reach the outside by IPv6 only where it routes back to them; no Service and no hostPort by IPv6",
            "modprobe -a nft_chain_nat nft_masq nft_nat nft_ct, or build the kernel with CONFIG_NF_TABLES_IPV6, CONFIG_NFT_NAT, CONFIG_NFT_MASQ and CONFIG_NFT_CT",
        ),
        Feature::Table { family, need: Need::Fib } if v4(family) => {
            ("no hostPort by IPv4", "modprobe nft_fib_ipv4, or build the kernel with CONFIG_NFT_FIB_IPV4")
        }
        Feature::Table { need: Need::Fib, .. } => {
            ("no hostPort by IPv6", "modprobe nft_fib_ipv6, or build the kernel with CONFIG_NFT_FIB_IPV6")
        }
        Feature::Table { need: Need::Random, .. } => {
            ("no Service", "modprobe nft_numgen, or build the kernel with CONFIG_NFT_NUMGEN")
        }
        Feature::Table { need: Need::Conntrack, .. } => {
            ("no Service and no NetworkPolicy", "modprobe nft_ct, or build the kernel with CONFIG_NFT_CT and CONFIG_NF_CONNTRACK")
        }
        Feature::Table { need: Need::Reject, .. } => (
            "connections to a Service without endpoints time out instead of being refused",
            "modprobe nft_reject, or build the kernel with CONFIG_NFT_REJECT",
        ),
        Feature::Table { need: Need::Update, .. } => ("no session affinity", "use Linux 5.7 or later, with CONFIG_NF_TABLES"),
        Feature::Table { need: Need::Ranges, .. } => {
            ("loadBalancerSourceRanges and port ranges of NetworkPolicies do not work", "use Linux 5.6 or later")
        }
        Feature::Sctp => (
            "SCTP ports of Services and pods are not translated",
            "build the kernel with CONFIG_NF_CT_PROTO_SCTP, or modprobe nf_conntrack_proto_sctp where it is a module",
        ),
        Feature::Forwarding => (
            "another firewall may drop what pods send and get",
            "accept the pods' bridge there: nft insert rule ip filter FORWARD iifname coracle0 accept, and the same with oifname; with ufw: ufw route allow in on coracle0, and out on it; with firewalld: firewall-cmd --permanent --zone=trusted --add-interface=coracle0",
        ),
    };
    Lack { feature, consequence, cure, said }
}

/// Tries everything that we need of nf_tables and conntrack.
pub fn probe() -> io::Result<Vec<Lack>> {
    let mut lacks = netns::throw_away(|| {
        let mut lacks = Vec::new();
        for family in [Family::Ip, Family::Ip6] {
            match try_table(&Table::new(family, "probe")) {
                Ok(()) => lacks.extend(Need::ALL.into_iter().filter_map(|need| {
                    let said = try_table(&table_with(family, need)).err()?;
                    Some(lack(Feature::Table { family, need }, words(&said)))
                })),
                // Without IPv6 there is no such table either, and nothing lacks.
                Err(said) if family == Family::Ip => lacks.push(lack(Feature::NfTables, words(&said))),
                Err(_) => {}
            }
        }
        lacks
    })?;
    // Only this host's own namespace has loaded what conntrack needs.
    if sysctl::read("net/netfilter/nf_conntrack_max")?.is_some()
        && sysctl::read("net/netfilter/nf_conntrack_sctp_timeout_established")?.is_none()
    {
        lacks.push(lack(Feature::Sctp, "there is no /proc/sys/net/netfilter/nf_conntrack_sctp_timeout_established".into()));
    }
    lacks.sort_by_key(|l| l.feature);
    Ok(lacks)
}

/// What of it tables of that family have to do without.
pub fn needs(lacks: &[Lack], of: Family) -> BTreeSet<Need> {
    let need = |lack: &Lack| match lack.feature {
        Feature::Table { family, need } if family == of => Some(need),
        Feature::Table { .. } | Feature::NfTables | Feature::Sctp | Feature::Forwarding => None,
    };
    lacks.iter().filter_map(need).collect()
}

fn try_table(table: &Table) -> Result<(), NetlinkError> {
    let mut socket = nftables::open()?;
    let acts = plan(None, table);
    let mut encoded = encode(table.family, &table.name, &acts.main);
    encoded.batch.delete_table();
    nftables::commit(&mut socket, "try a table", &mut encoded.batch).map_err(|refused| refused.error)
}

fn table_with(family: Family, need: Need) -> Table {
    let mut table = Table::new(family, "probe");
    let key = vec![Field::Source];
    let (hook, kind, steps) = match need {
        Need::Nat => (Hook::Postrouting, ChainType::Nat, vec![Step::Masquerade { fully_random: false }]),
        Need::Fib => (Hook::Prerouting, ChainType::Filter, vec![Step::DestinationIsLocal { not: false }]),
        Need::Random => {
            table.sets.insert("s".into(), SetSpec::set(&[Type::Address, Type::Index]));
            let key = vec![Field::Source, Field::Random { modulus: 2, offset: 0 }];
            (Hook::Forward, ChainType::Filter, vec![Step::InSet { key, set: "s".into(), not: false }])
        }
        Need::Conntrack => (Hook::Forward, ChainType::Filter, vec![Step::CtState { states: CtStates::NEW, not: false }]),
        Need::Reject => (Hook::Forward, ChainType::Filter, vec![Step::Reject(Reject::PortUnreachable)]),
        Need::Update => {
            let dynamic = Dynamic { timeout: Duration::from_secs(1), size: 1 };
            table.sets.insert("s".into(), SetSpec::set(&[Type::Address]).of_rules(dynamic));
            let steps = vec![Step::Delete { key: key.clone(), set: "s".into() }, Step::Update { key, set: "s".into() }];
            (Hook::Forward, ChainType::Filter, steps)
        }
        Need::Ranges => {
            table.sets.insert("s".into(), SetSpec::set(&[Type::Address, Type::Port]).of_ranges());
            let key = vec![Field::Source, Field::DestinationPort];
            (Hook::Forward, ChainType::Filter, vec![Step::InSet { key, set: "s".into(), not: false }])
        }
    };
    let base = Some(Base { kind, hook, priority: 0 });
    table.chains.insert(Name::from("c"), Chain { base, rules: vec![Rule::new("probe", steps)] });
    if need == Need::Nat {
        let base = Some(Base { kind, hook: Hook::Prerouting, priority: 0 });
        let to = if family == Family::Ip { [192, 0, 2, 1].into() } else { [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into() };
        let steps = vec![Step::Protocol { number: 6, not: false }, Step::Dnat { address: to, port: 80 }];
        table.chains.insert(Name::from("d"), Chain { base, rules: vec![Rule::new("probe", steps)] });
    }
    table
}

pub(super) fn words(error: &NetlinkError) -> String {
    format!("{error}: {}", error.source)
}
