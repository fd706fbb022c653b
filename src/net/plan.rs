//! What the host's network has to look like, and the steps from what it looks like to that.
//!
//! Pure. Invariant: a pass over a host that is as it should be plans nothing. The rule about port
//! isolation is measured, pod to Service to pod: a port is isolated exactly while bridge traffic does not
//! pass iptables; isolated and passing, address-translated traffic between two pods is lost.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::ipam::gateway;
use super::model::{Cidr, NetError};
use crate::sys::rtnl::{Link, Mac, Port};

/// Names on the host that an instance gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    pub instance: String,
    /// `<instance>0`.
    pub bridge: String,
    /// The nftables table of each family.
    pub table: String,
    /// IFLA_IFALIAS of the bridge: what tells ours from a bridge of the same name.
    pub bridge_alias: String,
}

impl Names {
    pub fn new(instance: &str) -> Result<Names, NetError> {
        let ok = (1..=13).contains(&instance.len())
            && instance.starts_with(|c: char| c.is_ascii_lowercase())
            && instance.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_');
        if !ok {
            return Err(NetError::BadInstance(instance.chars().take(80).collect()));
        }
        Ok(Names {
            instance: instance.to_owned(),
            bridge: format!("{instance}0"),
            table: instance.to_owned(),
            bridge_alias: format!("coracle {instance}"),
        })
    }

    /// The host's end of a pod's veth pair: 15 characters, the longest that a link may have. As a
    /// hash of instance and uid it also proves, together with the alias, that a link is ours.
    pub fn veth(&self, uid: &str) -> String {
        let digest = ring::digest::digest(&ring::digest::SHA256, format!("{}/{uid}", self.instance).as_bytes());
        let hex: String = digest.as_ref().iter().take(6).map(|b| format!("{b:02x}")).collect();
        format!("veth{}", hex.get(..11).unwrap_or(&hex))
    }

    /// Whether a link is the host's end of a pod of ours.
    pub fn is_veth(&self, link: &Link) -> bool {
        link.kind == "veth" && !link.alias.is_empty() && self.veth(&link.alias) == link.name
    }
}

/// Whether a link that the journal names still looks like one that we made, under whatever
/// instance name: a veth, or a bridge with our alias or none yet.
pub fn is_journalled(link: &Link) -> bool {
    let alias = |instance: &str| format!("coracle {instance}");
    match link.kind.as_str() {
        "veth" => true,
        "bridge" => link.alias.is_empty() || link.name.strip_suffix('0').is_some_and(|instance| link.alias == alias(instance)),
        _ => false,
    }
}

/// A link-layer address made of the network address, as CNI's plugins once made it: whoever
/// remembers the address of an earlier pod remembers the right one.
pub fn mac_of(addresses: &[IpAddr]) -> Mac {
    let [a, b, c, d] = match addresses.first() {
        Some(IpAddr::V4(ip)) => ip.octets(),
        Some(IpAddr::V6(ip)) => {
            let o = ip.octets();
            [o[12], o[13], o[14], o[15]]
        }
        None => [0; 4],
    };
    [0x0a, 0x58, a, b, c, d]
}

/// What the host has to look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    pub names: Names,
    pub cidrs: Vec<Cidr>,
    /// None: the uplinks' smallest.
    pub mtu: Option<u32>,
    /// By uid.
    pub pods: BTreeMap<String, PodWant>,
    /// The journal says that we began to make the bridge: it may be there without its alias.
    pub bridge_journalled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodWant {
    pub link: String,
    pub addresses: Vec<IpAddr>,
}

/// What it looks like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub links: Vec<Link>,
    /// Global addresses of the bridge.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Permanent neighbours on the bridge.
    pub neighbours: Vec<(IpAddr, Mac)>,
    /// Of those that [`sysctl_names`] asks for, the ones that this kernel has.
    pub sysctls: BTreeMap<String, String>,
    /// Bridge traffic passes iptables or ip6tables.
    pub bridge_calls_iptables: bool,
    pub uplink_mtu: Option<u32>,
}

/// One step; each may be repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    CreateBridge {
        mac: Mac,
        mtu: u32,
    },
    SetBridge {
        index: u32,
        mtu: Option<u32>,
        mac: Option<Mac>,
    },
    AddAddress {
        index: u32,
        ip: IpAddr,
        prefix: u8,
    },
    DeleteAddress {
        index: u32,
        ip: IpAddr,
        prefix: u8,
    },
    /// `was` is journalled first, so that it can be put back; None: the parameter goes with the bridge.
    Sysctl {
        name: String,
        value: &'static str,
        was: Option<String>,
    },
    /// `adopt`: make it a port of that bridge and pin its pod's link-layer address.
    SetPort {
        uid: String,
        link: String,
        index: u32,
        adopt: Option<(u32, Mac)>,
        port: Port,
        mtu: Option<u32>,
    },
    SetNeighbour {
        index: u32,
        ip: IpAddr,
        mac: Mac,
    },
    DeleteNeighbour {
        index: u32,
        ip: IpAddr,
    },
}

/// The port settings that pods' links have.
pub fn port(bridge_calls_iptables: bool) -> Port {
    Port { hairpin: true, isolated: !bridge_calls_iptables, learning: false }
}

/// The MTU where nothing says otherwise.
const ETHERNET: u32 = 1500;
/// IPv6 needs this much of every link.
const SMALLEST: u32 = 1280;

pub fn mtu(want: Option<u32>, uplink: Option<u32>) -> u32 {
    want.or(uplink).unwrap_or(ETHERNET).max(SMALLEST)
}

pub fn plan(want: &Want, seen: &Seen) -> Result<Vec<Action>, NetError> {
    let mut actions = Vec::new();
    let mtu = mtu(want.mtu, seen.uplink_mtu);
    let gateways: Vec<IpAddr> = want.cidrs.iter().map(|c| gateway(*c)).collect();
    let mac = mac_of(&gateways);
    let bridge = seen.links.iter().find(|l| l.name == want.names.bridge);
    if let Some(bridge) = bridge {
        let ours = bridge.alias == want.names.bridge_alias || (bridge.alias.is_empty() && want.bridge_journalled);
        if bridge.kind != "bridge" || !ours {
            let what = format!("kind \"{}\", alias \"{}\"", bridge.kind, bridge.alias);
            return Err(NetError::ForeignLink { name: bridge.name.clone(), what });
        }
    }
    match bridge {
        None => actions.push(Action::CreateBridge { mac, mtu }),
        Some(bridge) => {
            let change = |differs, value| if differs { Some(value) } else { None };
            let new_mtu = change(bridge.mtu != mtu, mtu);
            let new_mac = if bridge.mac != Some(mac) { Some(mac) } else { None };
            if new_mtu.is_some() || new_mac.is_some() || !bridge.up || bridge.alias.is_empty() {
                actions.push(Action::SetBridge { index: bridge.index, mtu: new_mtu, mac: new_mac });
            }
        }
    }
    plan_sysctls(want, seen, bridge.is_some(), &mut actions);
    if let Some(bridge) = bridge {
        plan_addresses(want, seen, bridge.index, &gateways, &mut actions);
        plan_pods(want, seen, bridge.index, mtu, &mut actions);
    }
    Ok(actions)
}

fn plan_addresses(want: &Want, seen: &Seen, index: u32, gateways: &[IpAddr], actions: &mut Vec<Action>) {
    let wanted: Vec<(IpAddr, u8)> = gateways.iter().copied().zip(want.cidrs.iter().map(|c| c.prefix)).collect();
    for (ip, prefix) in seen.addresses.iter().filter(|a| !wanted.contains(a)) {
        actions.push(Action::DeleteAddress { index, ip: *ip, prefix: *prefix });
    }
    for (ip, prefix) in wanted.into_iter().filter(|a| !seen.addresses.contains(a)) {
        actions.push(Action::AddAddress { index, ip, prefix });
    }
}

fn plan_pods(want: &Want, seen: &Seen, index: u32, mtu: u32, actions: &mut Vec<Action>) {
    let mut neighbours: BTreeMap<IpAddr, Mac> = BTreeMap::new();
    for (uid, pod) in &want.pods {
        // A pod without its link lost it, or is about to get it: attach is asked for that.
        let Some(link) = seen.links.iter().find(|l| l.name == pod.link) else { continue };
        let mac = mac_of(&pod.addresses);
        neighbours.extend(pod.addresses.iter().map(|ip| (*ip, mac)));
        let adopt = if link.master != Some(index) { Some((index, mac)) } else { None };
        let port = port(seen.bridge_calls_iptables);
        let new_mtu = if link.mtu != mtu { Some(mtu) } else { None };
        if adopt.is_some() || link.port != Some(port) || new_mtu.is_some() || !link.up {
            let (uid, link, index) = (uid.clone(), link.name.clone(), link.index);
            actions.push(Action::SetPort { uid, link, index, adopt, port, mtu: new_mtu });
        }
    }
    for (ip, mac) in neighbours.iter().filter(|(ip, mac)| !seen.neighbours.contains(&(**ip, **mac))) {
        actions.push(Action::SetNeighbour { index, ip: *ip, mac: *mac });
    }
    // Multicast and such entries are the kernel's own; only what could be a pod's is ours to remove.
    let stale = |ip: &IpAddr| want.cidrs.iter().any(|c| c.contains(*ip)) && !neighbours.contains_key(ip);
    for (ip, _) in seen.neighbours.iter().filter(|(ip, _)| stale(ip)) {
        actions.push(Action::DeleteNeighbour { index, ip: *ip });
    }
}

// ---- sysctls -------------------------------------------------------------------------------

const FORWARD_V4: &str = "net/ipv4/ip_forward";
const FORWARD_V6: &str = "net/ipv6/conf/all/forwarding";
const SEND_REDIRECTS_V4: &str = "net/ipv4/conf/all/send_redirects";
/// The kernel changes it by itself when forwarding changes.
const ACCEPT_REDIRECTS_V4: &str = "net/ipv4/conf/all/accept_redirects";

/// Of the bridge itself; they go when it goes. A pod is a stranger on this link: it announces no
/// routers and redirects nobody.
const BRIDGE_V4: [(&str, &str); 3] = [("send_redirects", "0"), ("accept_redirects", "0"), ("rp_filter", "1")];
/// The IPv6 ones also where pods have no IPv6: the bridge is a link all the same, and a pod on it
/// could announce itself as the host's router. There it has no IPv6 either: by link-local
/// addresses, which every link gives itself, pods would reach this node past all policies.
const BRIDGE_V6: [(&str, &str); 5] =
    [("disable_ipv6", "0"), ("accept_dad", "0"), ("accept_ra", "0"), ("autoconf", "0"), ("accept_redirects", "0")];

/// Those that [`plan`] looks at. `interfaces`: the entries of `net/ipv6/conf`.
pub fn sysctl_names(names: &Names, ipv6: bool, interfaces: &[String]) -> Vec<String> {
    let bridge = &names.bridge;
    let mut all: Vec<String> = [FORWARD_V4, SEND_REDIRECTS_V4, ACCEPT_REDIRECTS_V4].iter().map(|n| n.to_string()).collect();
    all.extend(BRIDGE_V4.iter().map(|(name, _)| format!("net/ipv4/conf/{bridge}/{name}")));
    all.extend(BRIDGE_V6.iter().map(|(name, _)| format!("net/ipv6/conf/{bridge}/{name}")));
    if ipv6 {
        all.push(FORWARD_V6.to_owned());
        for interface in interfaces.iter().filter(|i| *i != "all" && *i != bridge) {
            all.push(format!("net/ipv6/conf/{interface}/accept_ra"));
            all.push(format!("net/ipv6/conf/{interface}/forwarding"));
        }
    }
    all
}

/// What we set a journalled parameter to; None: the kernel set it in consequence of another one.
pub fn sysctl_ours(name: &str) -> Option<&'static str> {
    match name {
        FORWARD_V4 | FORWARD_V6 => Some("1"),
        SEND_REDIRECTS_V4 => Some("0"),
        _ if name.ends_with("/accept_ra") => Some("2"),
        _ => None,
    }
}

fn plan_sysctls(want: &Want, seen: &Seen, bridge_is_there: bool, actions: &mut Vec<Action>) {
    let value = |name: &str| seen.sysctls.get(name).map(String::as_str);
    let change = |name: String, wanted: &'static str, journal: bool| {
        let is = value(&name).filter(|is| *is != wanted)?;
        let was = journal.then(|| is.to_owned());
        Some(Action::Sysctl { name, value: wanted, was })
    };
    if want.cidrs.iter().any(Cidr::is_v4) {
        if value(FORWARD_V4).is_some_and(|is| is != "1") {
            // Forwarding turns it off for all; going back turns it on, whatever it was before.
            if let Some(was) = value(ACCEPT_REDIRECTS_V4).map(str::to_owned) {
                let name = ACCEPT_REDIRECTS_V4.to_owned();
                actions.push(Action::Sysctl { name, value: "0", was: Some(was) });
            }
            actions.extend(change(FORWARD_V4.to_owned(), "1", true));
        }
        // Redirects are sent where this or the interface's own says so: without it the bridge's
        // own 0 means nothing, and with it other interfaces go by their own.
        actions.extend(change(SEND_REDIRECTS_V4.to_owned(), "0", true));
    }
    if want.cidrs.iter().any(|c| !c.is_v4()) {
        // A forwarding host ignores router advertisements unless accept_ra is 2. Where they were
        // heard before they are heard after; where they were not, nothing changes.
        let heard: BTreeSet<String> = seen
            .sysctls
            .keys()
            .filter_map(|name| name.strip_prefix("net/ipv6/conf/")?.strip_suffix("/accept_ra").map(str::to_owned))
            .filter(|interface| *interface != want.names.bridge)
            .filter(|interface| {
                let own = |what: &str| value(&format!("net/ipv6/conf/{interface}/{what}"));
                own("accept_ra") == Some("1") && own("forwarding") == Some("0")
            })
            .collect();
        for interface in heard {
            actions.extend(change(format!("net/ipv6/conf/{interface}/accept_ra"), "2", true));
        }
        actions.extend(change(FORWARD_V6.to_owned(), "1", true));
    }
    if bridge_is_there {
        for (name, wanted) in BRIDGE_V4 {
            actions.extend(change(format!("net/ipv4/conf/{}/{name}", want.names.bridge), wanted, false));
        }
        let ipv6 = want.cidrs.iter().any(|c| !c.is_v4());
        for (name, wanted) in BRIDGE_V6 {
            let wanted = if name == "disable_ipv6" && !ipv6 { "1" } else { wanted };
            actions.extend(change(format!("net/ipv6/conf/{}/{name}", want.names.bridge), wanted, false));
        }
    }
}

/// Parameters of a pod's own namespace, set before its link is made, so that the link is born
/// with them. Not set where the kernel has none of that name.
pub const POD_SYSCTLS: [(&str, &str); 12] = [
    ("net/ipv6/conf/all/accept_dad", "0"),
    ("net/ipv6/conf/default/accept_dad", "0"),
    ("net/ipv6/conf/all/accept_ra", "0"),
    ("net/ipv6/conf/default/accept_ra", "0"),
    ("net/ipv6/conf/default/autoconf", "0"),
    ("net/ipv6/conf/all/accept_redirects", "0"),
    ("net/ipv6/conf/default/accept_redirects", "0"),
    ("net/ipv6/conf/default/ndisc_notify", "1"),
    ("net/ipv4/conf/all/accept_redirects", "0"),
    ("net/ipv4/conf/default/accept_redirects", "0"),
    // A gratuitous ARP when the link comes up.
    ("net/ipv4/conf/default/arp_notify", "1"),
    ("net/ipv4/conf/all/send_redirects", "0"),
];

/// And where pods have no IPv6, so that they have no link-local address either: nobody judges it.
pub const POD_WITHOUT_IPV6: [(&str, &str); 1] = [("net/ipv6/conf/default/disable_ipv6", "1")];

#[cfg(test)]
mod tests {
    use super::*;

    fn want() -> Want {
        let pod = PodWant { link: "vethx".into(), addresses: vec!["10.88.0.2".parse().unwrap(), "fd88::2".parse().unwrap()] };
        Want {
            names: Names::new("coracle").unwrap(),
            cidrs: vec!["10.88.0.0/24".parse().unwrap(), "fd88::/64".parse().unwrap()],
            mtu: None,
            pods: BTreeMap::from([("u".to_owned(), pod)]),
            bridge_journalled: false,
        }
    }

    /// Carries actions out on the picture of a host.
    fn carry_out(seen: &mut Seen, actions: &[Action]) {
        let bridge = |seen: &mut Seen| seen.links.iter().position(|l| l.name == "coracle0").unwrap();
        for action in actions.iter().cloned() {
            match action {
                Action::CreateBridge { mac, mtu } => {
                    let (name, kind, alias) = ("coracle0".into(), "bridge".into(), "coracle coracle".into());
                    seen.links.push(Link { index: 7, name, kind, alias, mtu, up: true, mac: Some(mac), ..Link::default() });
                    for (name, _) in BRIDGE_V4 {
                        seen.sysctls.insert(format!("net/ipv4/conf/coracle0/{name}"), "9".into());
                    }
                    for (name, _) in BRIDGE_V6 {
                        seen.sysctls.insert(format!("net/ipv6/conf/coracle0/{name}"), "1".into());
                    }
                }
                Action::SetBridge { mtu, mac, .. } => {
                    let at = bridge(seen);
                    let link = &mut seen.links[at];
                    (link.up, link.alias) = (true, "coracle coracle".into());
                    link.mtu = mtu.unwrap_or(link.mtu);
                    link.mac = mac.or(link.mac);
                }
                Action::AddAddress { ip, prefix, .. } => seen.addresses.push((ip, prefix)),
                Action::DeleteAddress { ip, .. } => seen.addresses.retain(|(a, _)| *a != ip),
                Action::Sysctl { name, value, .. } => {
                    if name == FORWARD_V6 {
                        seen.sysctls.iter_mut().filter(|(n, _)| n.ends_with("/forwarding")).for_each(|(_, v)| *v = "1".into());
                    }
                    seen.sysctls.insert(name, value.into());
                }
                Action::SetPort { link, adopt, port, mtu, .. } => {
                    let link = seen.links.iter_mut().find(|l| l.name == link).unwrap();
                    link.master = adopt.map(|(master, _)| master).or(link.master);
                    (link.port, link.up) = (Some(port), true);
                    link.mtu = mtu.unwrap_or(link.mtu);
                }
                Action::SetNeighbour { ip, mac, .. } => {
                    seen.neighbours.retain(|(a, _)| *a != ip);
                    seen.neighbours.push((ip, mac));
                }
                Action::DeleteNeighbour { ip, .. } => seen.neighbours.retain(|(a, _)| *a != ip),
            }
        }
    }

    fn fresh_host() -> Seen {
        let sysctls = [
            (FORWARD_V4, "0"),
            (SEND_REDIRECTS_V4, "1"),
            (ACCEPT_REDIRECTS_V4, "1"),
            (FORWARD_V6, "0"),
            ("net/ipv6/conf/eth0/accept_ra", "1"),
            ("net/ipv6/conf/eth0/forwarding", "0"),
            ("net/ipv6/conf/docker0/accept_ra", "1"),
            ("net/ipv6/conf/docker0/forwarding", "1"),
            ("net/ipv6/conf/off0/accept_ra", "0"),
            ("net/ipv6/conf/off0/forwarding", "0"),
        ];
        Seen { sysctls: sysctls.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect(), ..Seen::default() }
    }

    #[test]
    fn two_passes_make_a_fresh_host_right_and_the_third_plans_nothing() {
        let (want, mut seen) = (want(), fresh_host());
        seen.links.push(Link { index: 9, name: "vethx".into(), kind: "veth".into(), ..Link::default() });
        for _ in 0..2 {
            let actions = plan(&want, &seen).unwrap();
            assert!(!actions.is_empty());
            carry_out(&mut seen, &actions);
        }
        assert_eq!(plan(&want, &seen).unwrap(), []);
        assert_eq!(seen.addresses, [("10.88.0.1".parse().unwrap(), 24), ("fd88::1".parse().unwrap(), 64)]);
        // Another range: the bridge's addresses follow, stale neighbours go.
        let mut moved = want.clone();
        moved.cidrs[0] = "10.99.0.0/16".parse().unwrap();
        for _ in 0..2 {
            let actions = plan(&moved, &seen).unwrap();
            carry_out(&mut seen, &actions);
        }
        assert!(seen.addresses.contains(&("10.99.0.1".parse().unwrap(), 16)) && seen.addresses.len() == 2);
        assert_eq!(plan(&moved, &seen).unwrap(), []);
    }

    #[test]
    fn router_advertisements_are_heard_exactly_where_they_were() {
        let actions = plan(&want(), &fresh_host()).unwrap();
        let set: Vec<_> = actions
            .iter()
            .filter_map(|a| {
                if let Action::Sysctl { name, value, was } = a { Some((name.as_str(), *value, was.as_deref())) } else { None }
            })
            .collect();
        assert_eq!(
            set,
            [
                (ACCEPT_REDIRECTS_V4, "0", Some("1")),
                (FORWARD_V4, "1", Some("0")),
                (SEND_REDIRECTS_V4, "0", Some("1")),
                ("net/ipv6/conf/eth0/accept_ra", "2", Some("1")),
                (FORWARD_V6, "1", Some("0")),
            ]
        );
    }

    #[test]
    fn ports_are_isolated_exactly_while_bridge_traffic_passes_no_iptables() {
        let (want, mut seen) = (want(), fresh_host());
        seen.links.push(Link { index: 9, name: "vethx".into(), kind: "veth".into(), ..Link::default() });
        for calls in [false, true, false] {
            seen.bridge_calls_iptables = calls;
            for _ in 0..2 {
                let actions = plan(&want, &seen).unwrap();
                carry_out(&mut seen, &actions);
            }
            let port = seen.links.iter().find(|l| l.name == "vethx").unwrap().port.unwrap();
            assert_eq!(port, Port { hairpin: true, isolated: !calls, learning: false });
            assert_eq!(plan(&want, &seen).unwrap(), []);
        }
    }

    #[test]
    fn a_bridge_of_somebody_else_is_refused() {
        let (mut want, mut seen) = (want(), fresh_host());
        seen.links.push(Link { name: "coracle0".into(), kind: "bridge".into(), ..Link::default() });
        assert!(matches!(plan(&want, &seen), Err(NetError::ForeignLink { .. })));
        want.bridge_journalled = true;
        assert!(plan(&want, &seen).is_ok());
        seen.links[0].alias = "mine".into();
        assert!(matches!(plan(&want, &seen), Err(NetError::ForeignLink { .. })));
    }

    #[test]
    fn a_link_is_ours_when_its_name_follows_from_its_alias() {
        let names = Names::new("coracle").unwrap();
        let name = names.veth("uid-1");
        assert_eq!(name.len(), 15);
        let link =
            |name: &str, alias: &str| Link { name: name.into(), kind: "veth".into(), alias: alias.into(), ..Link::default() };
        assert!(names.is_veth(&link(&name, "uid-1")));
        assert!(
            !names.is_veth(&link(&name, "uid-2")) && !names.is_veth(&link("veth0", "uid-1")) && !names.is_veth(&link(&name, ""))
        );
        assert!(!Names::new("other").unwrap().is_veth(&link(&name, "uid-1")));
        for bad in ["", "0abc", "waytoolongnameforit", "a b", "A", "a/b"] {
            assert!(Names::new(bad).is_err(), "{bad}");
        }
    }
}
