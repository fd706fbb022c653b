//! The ranges of ClusterIPs that a node alone is told.
#![deny(clippy::disallowed_methods)]

use crate::api::cidr::{BadCidr, Cidr};
use crate::proxy::service::address;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadServiceRange {
    #[error(transparent)]
    Text(#[from] BadCidr),
    #[error("{0} cannot be a range of Services: use one with 16 addresses or more that are routed, like 10.96.0.0/16")]
    Unfit(Cidr),
    #[error("{0} and {1} are of one family: give one of IPv4 and one of IPv6")]
    TwoOfAFamily(Cidr, Cidr),
    #[error("{0} has addresses in common with the pods' range {1}: choose another")]
    Overlap(Cidr, Cidr),
}

/// In the order given. Pod ranges that cannot be read are another's business.
pub fn service_ranges(texts: &[String], pod_ranges: &[String]) -> Result<Vec<Cidr>, BadServiceRange> {
    let mut ranges: Vec<Cidr> = Vec::new();
    for text in texts {
        let range: Cidr = text.parse()?;
        let longest = if range.is_v4() { 28 } else { 124 };
        if range.prefix == 0
            || range.prefix > longest
            || [range.address, range.last()].into_iter().any(|ip| address::unfit(ip).is_some())
        {
            return Err(BadServiceRange::Unfit(range));
        }
        if let Some(other) = ranges.iter().find(|other| other.is_v4() == range.is_v4()) {
            return Err(BadServiceRange::TwoOfAFamily(*other, range));
        }
        let mut pods = pod_ranges.iter().filter_map(|text| text.parse::<Cidr>().ok());
        if let Some(pods) = pods.find(|pods| pods.covers(&range) || range.covers(pods)) {
            return Err(BadServiceRange::Overlap(range, pods));
        }
        ranges.push(range);
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_cannot_serve_are_refused_with_a_cure() {
        let of = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
            let pods = ["10.88.0.0/16".to_owned(), "fd88:88::/64".to_owned(), String::new()];
            service_ranges(&texts, &pods).map(|r| r.iter().map(Cidr::to_string).collect::<Vec<_>>()).map_err(|e| e.to_string())
        };
        assert_eq!(of(&[]).unwrap(), [""; 0]);
        assert_eq!(of(&["fd96::7/112", "10.96.0.0/16"]).unwrap(), ["fd96::/112", "10.96.0.0/16"]);
        for (texts, why) in [
            (&["10.96.0.0"][..], "no range of addresses"),
            (&["10.96.0.0/29"], "16 addresses or more"),
            (&["0.0.0.0/0"], "16 addresses or more"),
            (&["127.0.0.0/16"], "16 addresses or more"),
            (&["10.96.0.0/16", "10.97.0.0/16"], "are of one family"),
            (&["10.0.0.0/8"], "in common with the pods' range 10.88.0.0/16"),
            (&["10.88.7.0/24"], "in common"),
        ] {
            assert!(of(texts).unwrap_err().contains(why), "{texts:?}: {:?}", of(texts));
        }
    }
}
