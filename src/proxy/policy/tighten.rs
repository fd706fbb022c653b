//! Whether flows that were allowed may be denied now: only then are they looked at.
#![deny(clippy::disallowed_methods)]

use super::model::{Direction, Peers, PolicyModel, Ports, Rule};

/// False: what `before` allows, `after` does. True may be said too often.
pub fn may_tighten(before: &PolicyModel, after: &PolicyModel) -> bool {
    let isolated = after.subjects.iter().any(|(ip, new)| match before.subjects.get(ip) {
        None => true,
        Some(old) => Direction::BOTH.iter().any(|d| {
            let new = new.policies(*d);
            // Another pod may have the address now.
            new.is_some() && old.policies(*d) != new
        }),
    });
    isolated
        || !before.servers.is_subset(&after.servers)
        || after.subjects.iter().any(|(ip, new)| before.subjects.get(ip).is_some_and(|old| old.pod != new.pod))
        || before.policies.iter().any(|(name, old)| {
            // One that selects nobody any more isolates nobody, as the subjects say.
            let Some(new) = after.policies.get(name) else { return false };
            Direction::BOTH.iter().any(|d| {
                let (old, new) = (old.rules(*d), new.rules(*d));
                old.len() != new.len() || old.iter().zip(new).any(|(old, new)| !includes(new, old))
            })
        })
}

/// `new` allows all that `old` does.
fn includes(new: &Rule, old: &Rule) -> bool {
    let peers = match (&new.peers, &old.peers) {
        (Peers::Everybody, _) => true,
        (Peers::These { pods, blocks, .. }, Peers::These { pods: old_pods, blocks: old_blocks, .. }) => {
            old_pods.is_subset(pods) && blocks == old_blocks
        }
        (Peers::These { .. }, Peers::Everybody) => false,
    };
    let ports = match (&new.ports, &old.ports) {
        (Ports::Every, _) => true,
        (Ports::These { ranges, named, .. }, Ports::These { ranges: old_ranges, named: old_named, .. }) => {
            ranges == old_ranges && old_named.is_subset(named)
        }
        (Ports::These { .. }, Ports::Every) => false,
    };
    peers && ports && old.resolves.is_subset(&new.resolves)
}
