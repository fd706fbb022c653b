//! Our nftables tables, one a family: masquerade to the outside, host ports, hairpin.
//!
//! ```text
//! table ip <instance> {
//!   map hostports        { inet_proto . inet_service : ipv4_addr . inet_service }
//!   map hostip-hostports { inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service }
//!   set hairpin          { ipv4_addr . ipv4_addr }
//!   chain hostports      { ip daddr 127.0.0.0/8 return
//!                          dnat ip to meta l4proto . ip daddr . th dport map @hostip-hostports
//!                          dnat ip to meta l4proto . th dport map @hostports }
//!   chain prerouting     { nat dstnat:  fib daddr type local jump hostports }
//!   chain output         { nat -100:    fib daddr type local jump hostports }
//!   chain postrouting    { nat srcnat:  ct status dnat ip saddr . ip daddr @hairpin masquerade
//!                                       ip saddr <range> ip daddr != <range> oifname != <bridge> masquerade }
//! }
//! ```
//!
//! Pure: builds transactions, compares what the kernel shows. Invariants: a pod changes elements
//! only; only packets to an address of this host are translated (CVE-2025-67499), never those to
//! loopback (no route_localnet, CVE-2020-8558); each rule's comment carries a fingerprint of the
//! whole layout, so that a table of another version or range is seen and replaced in one piece.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::model::{Cidr, Feature, HostPort};
use crate::sys::nftables::expr::{
    self, Base, Compare, Ct, Expr, Meta, Register, Side, bits, compare, dnat, fib_type, in_set, map, masquerade, meta, payload,
};
use crate::sys::nftables::{self, Batch, ChainType, Content, Family, Field, Hook, RuleSeen, Set, SetData, Verdict};

pub const HOST_PORTS: &str = "hostports";
pub const HOST_IP_PORTS: &str = "hostip-hostports";
pub const HAIRPIN: &str = "hairpin";
/// All of them.
pub const SETS: [&str; 3] = [HOST_PORTS, HOST_IP_PORTS, HAIRPIN];
/// IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const CT_DST_NAT: u32 = 1 << 5;

fn equal(register: Register, bytes: &[u8]) -> Expr {
    compare(register, Compare::Equal, bytes)
}
fn not_equal(register: Register, bytes: &[u8]) -> Expr {
    compare(register, Compare::NotEqual, bytes)
}
/// RTN_LOCAL.
const LOCAL: u32 = 2;

/// What a family's table is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub table: String,
    pub bridge: String,
    pub cidr: Cidr,
    /// False where the kernel has no fib expression.
    pub host_ports: bool,
}

/// One element; key and data are the fields' bytes, each padded to 4.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Element {
    pub key: Vec<u8>,
    pub data: Vec<u8>,
    pub comment: String,
}

pub fn written(elements: &[Element]) -> impl Iterator<Item = nftables::Element<'_>> {
    elements.iter().map(|e| nftables::Element {
        key: &e.key,
        key_end: None,
        is_end: false,
        content: if e.data.is_empty() { Content::None } else { Content::Data(&e.data) },
        comment: &e.comment,
    })
}

/// Elements by the set that holds them.
pub type Elements = BTreeMap<&'static str, Vec<Element>>;

/// The transaction that makes a table anew, and for each message what it needs of the kernel.
pub struct Install {
    pub batch: Batch,
    pub needs: Vec<Feature>,
}

impl Layout {
    pub fn family(&self) -> Family {
        if self.cidr.is_v4() { Family::Ip } else { Family::Ip6 }
    }
    fn nat(&self) -> Feature {
        if self.cidr.is_v4() { Feature::NatIpv4 } else { Feature::NatIpv6 }
    }
    fn fib(&self) -> Feature {
        if self.cidr.is_v4() { Feature::FibIpv4 } else { Feature::FibIpv6 }
    }
    /// Where the addresses are in the packet: source offset, destination offset, length.
    fn places(&self) -> (u32, u32, u32) {
        if self.cidr.is_v4() { (12, 16, 4) } else { (8, 24, 16) }
    }
    fn words(&self) -> u32 {
        if self.cidr.is_v4() { 1 } else { 4 }
    }

    fn sets(&self) -> Vec<Set<'static>> {
        let ip = if self.cidr.is_v4() { Field::Ipv4 } else { Field::Ipv6 };
        let mut sets = Vec::new();
        if self.host_ports {
            sets.push(Set {
                name: HOST_PORTS,
                key: vec![Field::Protocol, Field::Port],
                data: SetData::Fields(vec![ip, Field::Port]),
                interval: false,
                dynamic: None,
            });
            sets.push(Set {
                name: HOST_IP_PORTS,
                key: vec![Field::Protocol, ip, Field::Port],
                data: SetData::Fields(vec![ip, Field::Port]),
                interval: false,
                dynamic: None,
            });
        }
        sets.push(Set { name: HAIRPIN, key: vec![ip, ip], data: SetData::None, interval: false, dynamic: None });
        sets
    }

    /// Chain, expressions, what it is for, what it needs.
    fn rules(&self) -> Vec<(&'static str, Vec<Expr>, &'static str, Feature)> {
        let first = Register::FIRST;
        let (source, destination, length) = self.places();
        let mut rules = Vec::new();
        if self.host_ports {
            let loopback = match self.cidr.is_v4() {
                true => vec![payload(Base::Network, destination, 1, first), equal(first, &[127])],
                false => {
                    let one = std::net::Ipv6Addr::LOCALHOST.octets();
                    vec![payload(Base::Network, destination, 16, first), equal(first, &one)]
                }
            };
            rules.push((
                "hostports",
                [loopback, vec![expr::verdict(&Verdict::Return)]].concat(),
                "loopback stays on the node",
                self.nat(),
            ));
            let port = Register::after(self.words());
            let by_address = vec![
                meta(Meta::L4Protocol, first),
                payload(Base::Network, destination, length, Register::after(1)),
                payload(Base::Transport, 2, 2, Register::after(1 + self.words())),
                map(HOST_IP_PORTS),
                dnat(self.family().number(), port),
            ];
            rules.push(("hostports", by_address, "hostPort with hostIP", self.nat()));
            let by_port = vec![
                meta(Meta::L4Protocol, first),
                payload(Base::Transport, 2, 2, Register::after(1)),
                map(HOST_PORTS),
                dnat(self.family().number(), port),
            ];
            rules.push(("hostports", by_port, "hostPort", self.nat()));
            for chain in ["prerouting", "output"] {
                let local = vec![
                    fib_type(Side::Destination, first),
                    equal(first, &LOCAL.to_ne_bytes()),
                    expr::verdict(&Verdict::Jump("hostports".into())),
                ];
                rules.push((chain, local, "to an address of this node", self.fib()));
            }
        }
        let to_itself = vec![
            expr::ct(Ct::Status, first),
            bits(first, &CT_DST_NAT.to_ne_bytes(), &[0; 4]),
            not_equal(first, &[0; 4]),
            payload(Base::Network, source, length, first),
            payload(Base::Network, destination, length, Register::after(self.words())),
            in_set(HAIRPIN, false),
            masquerade(false),
        ];
        rules.push(("postrouting", to_itself, "a pod by its own hostPort", self.nat()));
        let mut outside = in_range(self.cidr, source, true);
        outside.extend(in_range(self.cidr, destination, false));
        let mut name = self.bridge.clone().into_bytes();
        name.resize(16, 0);
        outside.extend([meta(Meta::OutInterface, first), not_equal(first, &name), masquerade(false)]);
        rules.push(("postrouting", outside, "pods to the outside", self.nat()));
        rules
    }

    /// Comments as they are in the kernel, with the fingerprint.
    fn comment(what: &str, print: &str) -> String {
        format!("{what} [{print}]")
    }

    fn fingerprint(&self) -> String {
        let (batch, _) = self.build(None, &Elements::new());
        let digest = ring::digest::digest(&ring::digest::SHA256, batch.bytes());
        digest.as_ref().iter().take(4).map(|b| format!("{b:02x}")).collect()
    }

    /// Replaces whatever table of that name there is, atomically.
    pub fn install(&self, elements: &Elements) -> Install {
        let print = self.fingerprint();
        let (batch, needs) = self.build(Some(&print), elements);
        Install { batch, needs }
    }

    fn build(&self, print: Option<&str>, elements: &Elements) -> (Batch, Vec<Feature>) {
        let mut batch = Batch::new(self.family(), &self.table);
        let mut needs = Vec::new();
        batch.add_table();
        batch.delete_table();
        batch.add_table();
        for set in &self.sets() {
            batch.add_set(set);
        }
        for (set, elements) in elements {
            batch.add_elements(set, &mut written(elements), usize::MAX);
        }
        needs.resize(batch.len(), Feature::NfTables);
        if self.host_ports {
            batch.add_chain("hostports");
            batch.add_base_chain("prerouting", ChainType::Nat, Hook::Prerouting, -100);
            batch.add_base_chain("output", ChainType::Nat, Hook::Output, -100);
        }
        batch.add_base_chain("postrouting", ChainType::Nat, Hook::Postrouting, 100);
        needs.resize(batch.len(), self.nat());
        for (chain, exprs, what, feature) in self.rules() {
            batch.add_rule(chain, &exprs, &Layout::comment(what, print.unwrap_or_default()));
            needs.resize(batch.len(), feature);
        }
        (batch, needs)
    }

    /// Whether what the kernel shows is this layout.
    pub fn is_installed(&self, rules: &[RuleSeen]) -> bool {
        let print = self.fingerprint();
        let mut wanted: Vec<RuleSeen> = self
            .rules()
            .into_iter()
            .map(|(chain, _, what, _)| RuleSeen { chain: chain.to_owned(), comment: Layout::comment(what, &print) })
            .collect();
        // The order inside a chain counts, that of chains does not.
        let mut seen = rules.to_vec();
        wanted.sort_by(|a, b| a.chain.cmp(&b.chain));
        seen.sort_by(|a, b| a.chain.cmp(&b.chain));
        wanted == seen
    }

    /// The elements of one pod: none where the family has no address of it.
    pub fn elements(&self, pod: &str, addresses: &[IpAddr], ports: &[HostPort]) -> Elements {
        let mut all = Elements::new();
        let Some(ip) = addresses.iter().find(|ip| ip.is_ipv4() == self.cidr.is_v4()) else { return all };
        let bytes = octets(*ip);
        if !self.host_ports || ports.is_empty() {
            return all;
        }
        let mut push = |set, key: Vec<u8>, data: Vec<u8>| {
            all.entry(set).or_default().push(Element { key, data, comment: pod.to_owned() });
        };
        let mut any = false;
        for port in ports {
            let protocol = [port.protocol.number(), 0, 0, 0].to_vec();
            let data = [bytes.clone(), padded_port(port.container_port)].concat();
            let host_port = padded_port(port.host_port);
            match port.host_ip.filter(|ip| !ip.is_unspecified()) {
                Some(host) if host.is_ipv4() != self.cidr.is_v4() => continue,
                Some(host) => push(HOST_IP_PORTS, [protocol, octets(host), host_port].concat(), data),
                // 0.0.0.0 means IPv4 only, :: IPv6 only.
                None if port.host_ip.is_some_and(|wild| wild.is_ipv4() != self.cidr.is_v4()) => continue,
                None => push(HOST_PORTS, [protocol, host_port].concat(), data),
            }
            any = true;
        }
        if any {
            push(HAIRPIN, [bytes.clone(), bytes].concat(), Vec::new());
        }
        all
    }
}

/// Compares an address of the packet with the range; loads no more than the prefix's bytes where
/// it ends at one, as nft does.
fn in_range(cidr: Cidr, offset: u32, inside: bool) -> Vec<Expr> {
    let first = Register::FIRST;
    let check = if inside { equal } else { not_equal };
    let bytes = octets(cidr.address);
    let whole = usize::from(cidr.prefix / 8);
    if cidr.prefix.is_multiple_of(8) {
        return vec![payload(Base::Network, offset, whole as u32, first), check(first, bytes.get(..whole).unwrap_or(&bytes))];
    }
    let mut mask = vec![0xff; whole];
    mask.push(0xff << (8 - cidr.prefix % 8));
    mask.resize(bytes.len(), 0);
    vec![
        payload(Base::Network, offset, bytes.len() as u32, first),
        bits(first, &mask, &vec![0; bytes.len()]),
        check(first, &bytes),
    ]
}

/// What to delete and what to add so that `seen` becomes `wanted`.
pub fn difference(wanted: &[Element], seen: &[Element]) -> (Vec<Element>, Vec<Element>) {
    let differing = |all: &[Element], from: &[Element]| {
        all.iter().filter(|e| !from.iter().any(|f| (&f.key, &f.data) == (&e.key, &e.data))).cloned().collect::<Vec<_>>()
    };
    (differing(seen, wanted), differing(wanted, seen))
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn padded_port(port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    vec![high, low, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::model::L4;

    fn layout(cidr: &str) -> Layout {
        Layout { table: "coracle".into(), bridge: "coracle0".into(), cidr: cidr.parse().unwrap(), host_ports: true }
    }

    #[test]
    fn the_fingerprint_changes_with_anything_that_the_rules_hold() {
        let base = layout("10.88.0.0/16");
        assert_eq!(base.fingerprint(), base.clone().fingerprint());
        let others = [
            layout("10.88.0.0/17"),
            Layout { bridge: "x0".into(), ..base.clone() },
            Layout { host_ports: false, ..base.clone() },
        ];
        assert!(others.iter().all(|o| o.fingerprint() != base.fingerprint()));
    }

    #[test]
    fn elements_go_where_host_ip_and_family_say() {
        let port =
            |ip: &str, number| HostPort { protocol: L4::Udp, host_ip: ip.parse().ok(), host_port: number, container_port: 53 };
        let ports = [port("", 1), port("0.0.0.0", 2), port("::", 3), port("192.0.2.1", 4), port("2001:db8::1", 5)];
        let addresses = ["10.88.0.2".parse().unwrap(), "fd88::2".parse().unwrap()];
        let count = |l: &Layout| {
            let e = l.elements("shop/web", &addresses, &ports);
            SETS.map(|set| e.get(set).map_or(0, Vec::len))
        };
        assert_eq!(count(&layout("10.88.0.0/16")), [2, 1, 1]);
        assert_eq!(count(&layout("fd88::/64")), [2, 1, 1]);
        assert_eq!(count(&Layout { host_ports: false, ..layout("fd88::/64") }), [0, 0, 0]);
        let first = &layout("10.88.0.0/16").elements("shop/web", &addresses, &ports)[HOST_PORTS][0];
        assert_eq!(first.key, [17, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(first.data, [10, 88, 0, 2, 0, 53, 0, 0]);
    }

    #[test]
    fn differences_are_by_key_and_data_not_by_comment() {
        let element = |k: u8, d: u8, c: &str| Element { key: vec![k], data: vec![d], comment: c.into() };
        let (gone, new) = difference(
            &[element(1, 1, "a"), element(2, 2, "a"), element(3, 3, "a")],
            &[element(1, 1, "b"), element(2, 9, "a"), element(4, 4, "a")],
        );
        assert_eq!((gone, new), (vec![element(2, 9, "a"), element(4, 4, "a")], vec![element(2, 2, "a"), element(3, 3, "a")]));
    }
}
