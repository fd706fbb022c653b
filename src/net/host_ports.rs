//! Which host ports a pod may have beside those of the others. Plain.
//!
//! Invariant: of two pods that a packet could mean by one port of the node, the second is refused
//! and told who has it. Source: the scheduler's NodePorts filter.

use std::net::IpAddr;

use super::model::{Cidr, HostPort, NetError};

/// A host port of a pod.
#[derive(Clone, Copy, Debug)]
pub struct Holding<'a> {
    pub uid: &'a str,
    pub pod: &'a str,
    pub port: &'a HostPort,
}

/// Whether a packet could mean either: the rule of the scheduler's NodePorts filter, by family.
fn overlap(a: &HostPort, b: &HostPort) -> bool {
    let wild = |ip: Option<IpAddr>| ip.is_none_or(|ip| ip.is_unspecified());
    let of_family = |p: &HostPort, v4: bool| p.host_ip.is_none_or(|ip| ip.is_ipv4() == v4);
    let meet = [true, false].into_iter().any(|v4| of_family(a, v4) && of_family(b, v4));
    (a.protocol, a.host_port) == (b.protocol, b.host_port)
        && meet
        && (wild(a.host_ip) || wild(b.host_ip) || a.host_ip == b.host_ip)
}

/// Refuses what another pod (or the same one, twice) holds, and what cannot work on this node.
pub fn check<'a>(
    uid: &str,
    pod: &str,
    ports: &[HostPort],
    held: impl Iterator<Item = Holding<'a>> + Clone,
    cidrs: &[Cidr],
) -> Result<(), NetError> {
    for (at, port) in ports.iter().enumerate() {
        let (pod, port_of) = (pod.to_owned(), port.clone());
        if port.host_port == 0 || port.container_port == 0 {
            return Err(NetError::HostPortZero { pod, port: port_of });
        }
        match port.host_ip {
            Some(ip) if ip.is_loopback() => return Err(NetError::HostPortLoopback { pod, port: port_of }),
            Some(ip) if !cidrs.iter().any(|c| c.is_v4() == ip.is_ipv4()) => {
                return Err(NetError::HostPortFamily { pod, port: port_of });
            }
            _ => {}
        }
        let twice = ports.iter().take(at).any(|other| overlap(other, port));
        let taken = held.clone().find(|h| h.uid != uid && overlap(h.port, port));
        if let Some(holder) = taken.map(|h| h.pod.to_owned()).or(twice.then(|| pod.clone())) {
            return Err(NetError::HostPortTaken { pod, port: port_of, holder });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::model::L4;

    fn host_port(protocol: L4, ip: &str, port: u16) -> HostPort {
        HostPort { protocol, host_ip: ip.parse().ok(), host_port: port, container_port: 80 }
    }

    #[test]
    fn host_ports_conflict_by_address_protocol_and_port() {
        use L4::{Tcp, Udp};
        let cases = [
            (("", Tcp, 80), ("", Tcp, 80), true),
            (("", Tcp, 80), ("", Udp, 80), false),
            (("", Tcp, 80), ("", Tcp, 81), false),
            (("192.0.2.1", Tcp, 80), ("192.0.2.2", Tcp, 80), false),
            (("192.0.2.1", Tcp, 80), ("", Tcp, 80), true),
            (("192.0.2.1", Tcp, 80), ("0.0.0.0", Tcp, 80), true),
            (("192.0.2.1", Tcp, 80), ("::", Tcp, 80), false),
            (("fd00::1", Tcp, 80), ("", Tcp, 80), true),
            (("0.0.0.0", Tcp, 80), ("::", Tcp, 80), false),
        ];
        let cidrs: Vec<Cidr> = ["10.88.0.0/24", "fd88::/64"].iter().map(|c| c.parse().unwrap()).collect();
        for (a, b, conflict) in cases {
            let (a, b) = (host_port(a.1, a.0, a.2), host_port(b.1, b.0, b.2));
            let held = [Holding { uid: "other", pod: "shop/other", port: &a }];
            let result = check("u", "shop/web", std::slice::from_ref(&b), held.iter().copied(), &cidrs);
            match result {
                Ok(()) => assert!(!conflict, "{a} {b}"),
                Err(NetError::HostPortTaken { holder, .. }) => assert!(conflict && holder == "shop/other", "{a} {b}"),
                Err(e) => panic!("{e}"),
            }
            let itself = [Holding { uid: "u", ..held[0] }];
            assert!(check("u", "shop/web", std::slice::from_ref(&b), itself.into_iter(), &cidrs).is_ok());
        }
        let twice = [host_port(Tcp, "", 80), host_port(Tcp, "192.0.2.1", 80)];
        assert!(matches!(check("u", "p", &twice, [].into_iter(), &cidrs), Err(NetError::HostPortTaken { .. })));
        let v4_only = &cidrs[..1];
        let v6 = [host_port(Tcp, "fd00::1", 80)];
        assert!(matches!(check("u", "p", &v6, [].into_iter(), v4_only), Err(NetError::HostPortFamily { .. })));
        let local = [host_port(Tcp, "127.0.0.1", 80)];
        assert!(matches!(check("u", "p", &local, [].into_iter(), &cidrs), Err(NetError::HostPortLoopback { .. })));
    }
}
