//! Flags to `Config`, parsed once. No defaults live elsewhere.
//!
//! `--root DIR` moves every root together; `--instance NAME` moves every name on the host
//! (bridge, cgroup, nftables table). An agent with its own `--root` and no `--instance` gets an
//! instance name derived from the root, so two agents never share a name by accident.

use std::path::{Path, PathBuf};

/// Where everything of one agent lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// tmpfs of our own: sockets, exit files, bundles, namespace pins, effects journal.
    pub run: PathBuf,
    /// Disk journal, images, upper directories.
    pub state: PathBuf,
    /// `/var/lib/kubelet`: pods' volumes, where others look for them.
    pub kubelet: PathBuf,
    /// `/var/log`: holds `pods/` and `containers/`.
    pub logs: PathBuf,
}

impl Roots {
    /// The paths that the field expects, or all below `root`.
    pub fn at(root: Option<&Path>) -> Roots {
        match root {
            None => Roots {
                run: "/run/coracle".into(),
                state: "/var/lib/coracle".into(),
                kubelet: "/var/lib/kubelet".into(),
                logs: "/var/log".into(),
            },
            Some(root) => {
                Roots { run: root.join("run"), state: root.join("state"), kubelet: root.join("kubelet"), logs: root.join("log") }
            }
        }
    }

    /// The agent's socket for the client verbs, mode 0600.
    pub fn socket(&self) -> PathBuf {
        self.run.join("agent.sock")
    }
    /// `<run>/pods/<uid>`: a pod's run directory (monitor socket, exit files, bundles).
    pub fn pod_run(&self, uid: &str) -> PathBuf {
        self.run.join("pods").join(uid)
    }
    /// `<kubelet>/pods/<uid>`.
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.kubelet.join("pods").join(uid)
    }
    /// `<logs>/pods/<ns>_<pod>_<uid>`.
    pub fn pod_logs(&self, namespace: &str, pod: &str, uid: &str) -> PathBuf {
        self.logs.join("pods").join(format!("{namespace}_{pod}_{uid}"))
    }
}
