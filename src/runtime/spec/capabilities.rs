//! Which capabilities a container holds. Bounding, permitted and effective are one set;
//! inheritable and ambient are empty, always (CVE-2022-24769 and its family).

use std::collections::BTreeSet;

use oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StrDeserializer};

/// Names with or without `CAP_`, in any case; `ALL` too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapabilityChoice {
    pub add: Vec<String>,
    pub drop: Vec<String>,
}

/// What containerd gives a container that asks for nothing.
pub const DEFAULT: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// Names without `CAP_`, sorted. `available`: those of our own bounding set; what is not among
/// them cannot be handed on and is left out, as runc does.
pub fn granted(choice: &CapabilityChoice, privileged: bool, available: &[String]) -> BTreeSet<String> {
    let available: BTreeSet<String> = available.iter().map(|c| plain(c)).collect();
    if privileged {
        return available;
    }
    let has_all = |list: &[String]| list.iter().any(|c| plain(c) == "ALL");
    let mut granted: BTreeSet<String> = if has_all(&choice.drop) {
        BTreeSet::new()
    } else if has_all(&choice.add) {
        available.clone()
    } else {
        DEFAULT.iter().map(|c| (*c).to_owned()).collect()
    };
    granted.extend(choice.add.iter().map(|c| plain(c)).filter(|c| c != "ALL"));
    for dropped in &choice.drop {
        granted.remove(&plain(dropped));
    }
    granted.retain(|c| available.contains(c));
    granted
}

pub fn sets(granted: &BTreeSet<String>) -> LinuxCapabilities {
    let set: Capabilities = granted.iter().filter_map(|name| known(name)).collect();
    let mut sets = LinuxCapabilities::default();
    sets.set_bounding(Some(set.clone()))
        .set_permitted(Some(set.clone()))
        .set_effective(Some(set))
        .set_inheritable(Some(Capabilities::new()))
        .set_ambient(Some(Capabilities::new()));
    sets
}

fn plain(name: &str) -> String {
    let upper = name.to_ascii_uppercase();
    upper.strip_prefix("CAP_").unwrap_or(&upper).to_owned()
}

fn known(name: &str) -> Option<Capability> {
    let deserializer: StrDeserializer<Error> = name.into_deserializer();
    // A capability that is newer than this program is not handed on.
    Capability::deserialize(deserializer).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|c| (*c).to_owned()).collect()
    }

    #[test]
    fn add_and_drop_over_the_default_set() {
        let mut host = names(&DEFAULT);
        host.extend(names(&["NET_ADMIN", "SYS_ADMIN"]));
        let of = |add: &[&str], drop: &[&str]| {
            let choice = CapabilityChoice { add: names(add), drop: names(drop) };
            granted(&choice, false, &host).into_iter().collect::<Vec<_>>().join(" ")
        };
        let mut defaults = names(&DEFAULT);
        defaults.sort();
        assert_eq!(of(&[], &[]), defaults.join(" "));
        assert_eq!(of(&[], &["ALL"]), "");
        assert_eq!(of(&["net_admin"], &["ALL"]), "NET_ADMIN");
        assert_eq!(of(&["CAP_NET_ADMIN"], &["all"]), "NET_ADMIN");
        assert_eq!(of(&["ALL"], &["ALL"]), "");
        assert!(of(&["ALL"], &["CHOWN"]).contains("SYS_ADMIN"));
        assert!(!of(&["ALL"], &["CHOWN"]).contains("CHOWN "));
        // Not in the host's bounding set: cannot be given.
        assert_eq!(of(&["SYS_RESOURCE", "NO_SUCH"], &[]), defaults.join(" "));
    }

    #[test]
    fn privileged_is_all_that_the_host_has() {
        let choice = CapabilityChoice { add: Vec::new(), drop: names(&["ALL"]) };
        assert_eq!(granted(&choice, true, &names(&["CAP_CHOWN", "SYS_ADMIN"])).len(), 2);
    }

    #[test]
    fn nothing_is_ever_inheritable_or_ambient() {
        let sets = sets(&["KILL".to_owned()].into_iter().collect());
        assert_eq!(sets.bounding().as_ref().map(|c| c.len()), Some(1));
        assert_eq!(sets.inheritable().as_ref().map(|c| c.len()), Some(0));
        assert_eq!(sets.ambient().as_ref().map(|c| c.len()), Some(0));
    }
}
