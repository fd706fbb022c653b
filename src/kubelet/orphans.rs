//! Pods of ours that live in the kernel and that no run directory knows: somebody emptied `/run`
//! under a dead agent. Nobody can reach them any more (their socket, pins and exits are gone), so a
//! start ends them; the pods themselves run again from the store.
//!
//! Invariant: an orphan is a pod of our own journal whose monitor's cgroup is there and whose run
//! directory is not. What else bears the instance's name may be of an agent with another root.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::qos::{self, QosClass};
use crate::runtime::cgroup::{CgroupError, Cgroups};

/// Killed processes are waited for this long, all together.
const ENDING: Duration = Duration::from_secs(15);

/// Where the monitors' cgroups are.
pub fn monitors(parent: &str) -> String {
    format!("{}/coracle", parent.trim_end_matches('/'))
}

/// Ends every pod of `journalled` that has a monitor's cgroup and is not among `known`; returns
/// their uids.
pub fn end(
    cgroups: &Cgroups,
    parent: &str,
    journalled: &BTreeSet<&str>,
    known: &BTreeSet<&str>,
) -> Result<Vec<String>, CgroupError> {
    let mut ended = Vec::new();
    let deadline = Instant::now() + ENDING;
    for monitor in cgroups.children(&monitors(parent))? {
        let Some((_, uid)) = monitor.rsplit_once('/') else { continue };
        if known.contains(uid) || !journalled.contains(uid) {
            continue;
        }
        // The monitor last: while it lives its containers' ends are seen and logged.
        let classes = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];
        let pods = classes.map(|class| qos::pod_cgroup(parent, class, uid));
        for path in pods.iter().chain([&monitor]) {
            // Whatever still lives keeps the directory, and is told as its error.
            cgroups.end(path, deadline.saturating_duration_since(Instant::now()))?;
            cgroups.remove(path)?;
        }
        ended.push(uid.to_owned());
    }
    Ok(ended)
}
