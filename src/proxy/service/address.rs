//! Which addresses connections may be sent to.
//!
//! Invariant: nothing here lets a Service reach what only the node itself may (CVE-2021-25737):
//! loopback, link-local (cloud metadata services), multicast, broadcast. The API server refuses
//! the same (ValidateNonSpecialIP). The node's own addresses are fine: a pod with hostNetwork has
//! them, and on a control plane's node `default/kubernetes` does, without naming the node.
#![deny(clippy::disallowed_methods)]

use std::net::{IpAddr, Ipv4Addr};

use crate::api::service::IpFamily;

pub fn family(ip: IpAddr) -> IpFamily {
    if ip.is_ipv4() { IpFamily::IPv4 } else { IpFamily::IPv6 }
}

/// Why packets cannot be sent there, if so.
pub fn unfit(ip: IpAddr) -> Option<&'static str> {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if ip.is_unspecified() {
        Some("it is the unspecified address")
    } else if ip.is_loopback() {
        Some("a loopback address is each node's own")
    } else if link_local {
        Some("a link-local address (169.254.0.0/16, fe80::/10) is not routed")
    } else if ip.is_multicast() {
        Some("a multicast address is no endpoint")
    } else if ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        Some("it is the broadcast address")
    } else {
        None
    }
}

/// An address as it stands in an object; Err says why it cannot be used.
pub fn parse(text: &str) -> Result<IpAddr, String> {
    let shown: String = text.chars().take(64).collect();
    let ip: IpAddr = text.parse().map_err(|_| format!("{shown:?} is no IP address"))?;
    match ip {
        // Go reads ::ffff:10.0.0.1 as IPv4 in some places and as IPv6 in others.
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => {
            Err(format!("{shown} is an IPv4 address in IPv6 dress: write it as IPv4"))
        }
        ip => match unfit(ip) {
            Some(why) => Err(format!("{shown}: {why}")),
            None => Ok(ip),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_that_are_routed_somewhere_are_fit() {
        for good in ["10.0.0.1", "192.0.2.7", "fd00::1", "2001:db8::1", "100.64.0.1"] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in [
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "0.0.0.0",
            "::",
            "169.254.169.254",
            "fe80::1",
            "224.0.0.1",
            "239.1.1.1",
            "ff02::1",
            "ff0e::1",
            "255.255.255.255",
            "::ffff:10.0.0.1",
            "010.0.0.1",
            "10.0.0",
            "web",
            "",
            "10.0.0.1:80",
            "fe80::1%eth0",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
