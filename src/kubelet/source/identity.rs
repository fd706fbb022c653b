//! Is this still the directory that the pods came from? Pure.
//!
//! An unmounted disk leaves an empty mount point behind; `rm -r` and a new `mkdir` leave an empty
//! directory for a moment. Neither may end a pod.

use serde::{Deserialize, Serialize};

/// The directory as stat(2) and statvfs(3) see it. Device numbers hold for one boot; the file
/// system's own id (where it has one) for longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub boot_id: String,
    pub device: u64,
    pub inode: u64,
    pub file_system: u64,
}

impl Identity {
    fn same_directory(&self, other: &Identity) -> bool {
        let disk = if self.boot_id == other.boot_id {
            self.device == other.device
        } else {
            self.file_system != 0 && self.file_system == other.file_system
        };
        disk && self.inode == other.inode
    }
}

/// What was believed last: in this life of the agent, or in an earlier one.
pub enum Last<'a> {
    Seen(&'a Identity),
    Stored(Option<&'a Identity>),
}

/// Why a directory is not believed; None: it is. `empty`: no entry at all, not even a dot file.
pub fn doubt(last: &Last<'_>, now: &Identity, empty: bool, any_pod: bool) -> Option<&'static str> {
    match last {
        Last::Seen(seen) if seen.device != now.device => {
            Some("is on another file system than before: nothing ends until it is back; restart the agent if that is meant")
        }
        Last::Seen(seen) if empty && any_pod && seen.inode != now.inode => Some(
            "was replaced by an empty directory: nothing ends until there is something in it; create any file (such as .keep) in it if that is meant",
        ),
        Last::Stored(stored) if empty && any_pod && !stored.is_some_and(|s| s.same_directory(now)) => Some(
            "is empty and not known to be the same as before: pods run on from what is stored; create any file (such as .keep) in it if that is meant",
        ),
        Last::Seen(_) | Last::Stored(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: &str, device: u64, inode: u64, file_system: u64) -> Identity {
        Identity { boot_id: boot.into(), device, inode, file_system }
    }

    #[test]
    fn only_an_emptied_directory_that_is_surely_the_same_ends_pods() {
        let was = at("a", 1, 10, 7);
        // While we run.
        assert!(doubt(&Last::Seen(&was), &at("a", 1, 10, 7), true, true).is_none());
        assert!(doubt(&Last::Seen(&was), &at("a", 2, 2, 9), true, true).is_some());
        assert!(doubt(&Last::Seen(&was), &at("a", 2, 2, 9), false, true).is_some());
        assert!(doubt(&Last::Seen(&was), &at("a", 1, 11, 7), true, true).is_some());
        assert!(doubt(&Last::Seen(&was), &at("a", 1, 11, 7), false, true).is_none());
        // After a restart, and after a reboot that numbers devices anew.
        let stored = Last::Stored(Some(&was));
        assert!(doubt(&stored, &at("a", 1, 10, 7), true, true).is_none());
        assert!(doubt(&stored, &at("b", 3, 10, 7), true, true).is_none());
        assert!(doubt(&stored, &at("b", 1, 10, 8), true, true).is_some());
        assert!(doubt(&stored, &at("b", 1, 10, 8), false, true).is_none());
        assert!(doubt(&stored, &at("b", 1, 10, 8), true, false).is_none());
        assert!(doubt(&Last::Stored(None), &at("a", 1, 10, 7), true, true).is_some());
        // A file system without an id proves nothing across boots.
        assert!(doubt(&Last::Stored(Some(&at("a", 1, 10, 0))), &at("b", 1, 10, 0), true, true).is_some());
    }
}
