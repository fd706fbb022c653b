//! Whether Services are ours to serve: `--proxy=on|off|auto`.
//!
//! Two proxies that translate the same addresses spread connections twice and masquerade by
//! chance, so one of them has to stand back; as the newcomer it is us. Invariant: host ports,
//! hairpin and masquerading of pods are no kube-proxy's, and go on whatever is said here. A
//! kube-proxy shows by its nftables table, or (iptables, ipvs) by its chain KUBE-SERVICES; one
//! that uses legacy iptables is not seen: say `--proxy=off` beside it.
#![deny(clippy::disallowed_methods)]

use super::observe::Foreign;

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    On,
    Off,
    /// On while nobody else is a kube-proxy here.
    #[default]
    Auto,
}

/// What follows from it here and now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Nobody has looked yet.
    #[default]
    Unknown,
    Serving,
    Off,
    /// Somebody else serves: what of his was seen.
    Yielding(String),
}

impl Role {
    pub fn of(mode: Mode, foreign: &Foreign) -> Role {
        match (mode, foreign.kube_proxy_seen()) {
            (Mode::On, _) | (Mode::Auto, None) => Role::Serving,
            (Mode::Off, _) => Role::Off,
            (Mode::Auto, Some(seen)) => Role::Yielding(seen),
        }
    }

    pub fn serves(&self) -> bool {
        *self == Role::Serving
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Role::Unknown => f.write_str("no Services are known yet"),
            Role::Serving => f.write_str("on"),
            Role::Off => f.write_str("off, as --proxy=off says: another proxy has to serve Services"),
            Role::Yielding(seen) => {
                write!(f, "off while another kube-proxy serves Services here ({seen}); --proxy=on serves them all the same")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::table::ir::Family;

    #[test]
    fn only_auto_minds_who_else_is_there() {
        let nobody = Foreign::default();
        let nft = Foreign { kube_proxy: vec![Family::Ip], ..Foreign::default() };
        let iptables = Foreign { kube_services: vec![Family::Ip6], ..Foreign::default() };
        for foreign in [&nobody, &nft, &iptables] {
            assert_eq!(Role::of(Mode::On, foreign), Role::Serving);
            assert_eq!(Role::of(Mode::Off, foreign), Role::Off);
        }
        assert_eq!(Role::of(Mode::Auto, &nobody), Role::Serving);
        assert_eq!(Role::of(Mode::Auto, &nft), Role::Yielding("nftables table ip kube-proxy".into()));
        assert_eq!(Role::of(Mode::Auto, &iptables), Role::Yielding("chain KUBE-SERVICES of table ip6 nat".into()));
    }
}
