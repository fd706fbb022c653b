//! `address/prefix`, as pod ranges, Service ranges and IP blocks are written.
//!
//! Invariant: the address has no bits beyond the prefix, so that equal ranges are equal values.
//! Leading zeros in IPv4 numbers are refused (Go's ParseCIDR refuses them too).
#![deny(clippy::disallowed_methods)]

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    pub address: IpAddr,
    pub prefix: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is no range of addresses: write it like 10.96.0.0/16 or fd96::/112")]
pub struct BadCidr {
    pub text: String,
}

impl Cidr {
    /// The range of `prefix` bits around `address`; None where an address has fewer bits.
    pub fn around(address: IpAddr, prefix: u8) -> Option<Cidr> {
        (prefix <= bits(address)).then(|| Cidr { address: masked(address, prefix), prefix })
    }
    /// The one address: /32 or /128.
    pub fn only(address: IpAddr) -> Cidr {
        Cidr { address, prefix: bits(address) }
    }
    pub fn is_v4(&self) -> bool {
        self.address.is_ipv4()
    }
    pub fn contains(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.is_v4() && masked(ip, self.prefix) == self.address
    }
    /// Every address of `other` lies in this range.
    pub fn covers(&self, other: &Cidr) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }
    pub fn last(&self) -> IpAddr {
        match self.address {
            IpAddr::V4(ip) => IpAddr::from((u32::from(ip) | !v4_mask(self.prefix)).to_be_bytes()),
            IpAddr::V6(ip) => IpAddr::from((u128::from(ip) | !v6_mask(self.prefix)).to_be_bytes()),
        }
    }
}

impl FromStr for Cidr {
    type Err = BadCidr;
    fn from_str(text: &str) -> Result<Cidr, BadCidr> {
        let bad = || BadCidr { text: text.chars().take(80).collect() };
        let (address, prefix) = text.trim().split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        if prefix.is_empty() || !prefix.bytes().all(|b| b.is_ascii_digit()) || (prefix.len() > 1 && prefix.starts_with('0')) {
            return Err(bad());
        }
        Cidr::around(address, prefix.parse().map_err(|_| bad())?).ok_or_else(bad)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn v4_mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0)
}

fn v6_mask(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0)
}

/// `ip` without the bits beyond `prefix`.
fn masked(ip: IpAddr, prefix: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => IpAddr::from((u32::from(ip) & v4_mask(prefix)).to_be_bytes()),
        IpAddr::V6(ip) => IpAddr::from((u128::from(ip) & v6_mask(prefix)).to_be_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_lose_their_host_bits_and_nonsense_is_refused() {
        let range = |text: &str| text.parse::<Cidr>().map(|c| (c.to_string(), c.last().to_string()));
        assert_eq!(range("10.88.3.7/16").unwrap(), ("10.88.0.0/16".to_owned(), "10.88.255.255".to_owned()));
        assert_eq!(range(" 0.0.0.0/0 ").unwrap(), ("0.0.0.0/0".to_owned(), "255.255.255.255".to_owned()));
        assert_eq!(range("10.1.2.3/32").unwrap(), ("10.1.2.3/32".to_owned(), "10.1.2.3".to_owned()));
        assert_eq!(range("fd88::5/127").unwrap(), ("fd88::4/127".to_owned(), "fd88::5".to_owned()));
        assert_eq!(range("::/0").unwrap().1, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        for bad in [
            "10.88.0.0",
            "10.88.0.0/33",
            "fd88::/129",
            "x/8",
            "10.0.0.0/-1",
            "10.0.0.0/+8",
            "10.0.0.0/08",
            "10.0.0.0/",
            "010.0.0.0/8",
            "/8",
            "",
        ] {
            assert!(range(bad).is_err(), "{bad}");
        }
        let cidr: Cidr = "10.88.0.0/24".parse().unwrap();
        assert!(cidr.contains("10.88.0.255".parse().unwrap()));
        assert!(!cidr.contains("10.88.1.0".parse().unwrap()) && !cidr.contains("::1".parse().unwrap()));
        assert!(cidr.covers(&"10.88.0.128/25".parse().unwrap()) && cidr.covers(&cidr));
        assert!(!cidr.covers(&"10.88.0.0/16".parse().unwrap()) && !cidr.covers(&"::/0".parse().unwrap()));
    }
}
