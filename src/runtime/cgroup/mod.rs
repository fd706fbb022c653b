//! Cgroups of pods, containers and monitors, on cgroup v1, hybrid and v2.
//!
//! Every directory is ours, the leaves included: libcontainer finds its leaf made and only
//! attaches. (Its own manager, when a leaf is missing, switches on every controller from the
//! root down.) We switch on only the controllers that we use, from the delegated parent down, and
//! only for cgroups that get limits. On v1 and hybrid a path exists in every mounted hierarchy, so
//! that nothing joins one halfway.
//!
//! Invariant: nothing outside the delegated parent is ever written or removed. What a host lacks
//! is left out and told once through [`Cgroups::lacks`]. All verbs are idempotent.
//!
//! Sources: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.

mod hierarchy;
mod limits;
mod lookout;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::model::CgroupResources;
use crate::sys::pidfd;
use hierarchy::{Hierarchy, Kind};

/// How this host mounts its cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    V1,
    /// v1 controllers, and a v2 hierarchy without any beside them.
    Hybrid,
    V2,
}

/// Something that this host withholds; the rest works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    pub what: &'static str,
    pub effect: &'static str,
    pub cure: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("cgroup: cannot {operation} {path}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cgroup: cannot write \"{value}\" to {path}")]
    Write { value: String, path: PathBuf, source: std::io::Error },
    #[error("cgroup path \"{path}\" is refused: {cure}")]
    BadPath { path: String, cure: &'static str },
    #[error("no cgroup hierarchy is mounted at {root}: mount cgroup2 there")]
    NotMounted { root: PathBuf },
    #[error("cgroup {path} cannot be removed: {pids} processes still live in it")]
    Busy { path: String, pids: usize },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes, page cache included.
    pub memory: Option<u64>,
    pub cpu_nanos: Option<u64>,
    pub pids: Option<u64>,
}

/// See [`Cgroups::door`].
#[derive(Debug, Default)]
pub struct Door {
    /// v1: `tasks` of each hierarchy, for writing: a thread that writes 0 moves itself.
    pub tasks: Vec<File>,
    /// v2: the directory, for CLONE_INTO_CGROUP.
    pub directory: Option<OwnedFd>,
}

/// The cgroup hierarchies of this host, as far as we may use them. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cgroups(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    layout: Layout,
    /// The delegated parent, `/` or a path without a trailing slash.
    parent: String,
    hierarchies: Vec<Hierarchy>,
    lacks: Vec<Lack>,
}

impl Cgroups {
    /// Where every distribution mounts them, and libcontainer looks for them.
    pub const MOUNT: &'static str = "/sys/fs/cgroup";

    /// `parent`: the delegated cgroup below which all of ours lie, `/` without systemd. Controllers
    /// are switched on from there down. Paths given to the other verbs are from the hierarchy's
    /// root and must lie below `parent`.
    pub fn detect(parent: &str) -> Result<Cgroups, CgroupError> {
        Cgroups::detect_at(Path::new(Cgroups::MOUNT), parent)
    }

    /// As [`Cgroups::detect`] with the hierarchies mounted elsewhere.
    pub fn detect_at(root: &Path, parent: &str) -> Result<Cgroups, CgroupError> {
        let parent = if parent == "/" { parent } else { parent.trim_end_matches('/') };
        if parent != "/" {
            check_path(parent)?;
        }
        let (layout, hierarchies) = hierarchy::detect(root, parent)?;
        let lacks = hierarchy::lacks(layout, &hierarchies);
        Ok(Cgroups(Arc::new(Inner { layout, parent: parent.to_owned(), hierarchies, lacks })))
    }

    pub fn layout(&self) -> Layout {
        self.0.layout
    }

    /// What limits and accounts will not work here; the same list for the life of this value.
    pub fn lacks(&self) -> &[Lack] {
        &self.0.lacks
    }

    /// Makes the cgroup and every missing parent, and writes its limits. Idempotent. The limits
    /// are in force before any process can be inside.
    pub fn create(&self, path: &str, limits: &CgroupResources) -> Result<(), CgroupError> {
        self.inside(path)?;
        for hierarchy in &self.0.hierarchies {
            hierarchy.make(&self.0.parent, path, limits.asks_for_anything())?;
        }
        self.write(path, limits)?;
        if let Some(rules) = &limits.devices {
            for hierarchy in &self.0.hierarchies {
                hierarchy.filter_devices(path, rules)?;
            }
        }
        Ok(())
    }

    /// Writes the limits of an existing cgroup; None goes back to "no limit". Device rules are
    /// set once, by [`Cgroups::create`].
    pub fn update(&self, path: &str, limits: &CgroupResources) -> Result<(), CgroupError> {
        self.inside(path)?;
        self.write(path, limits)
    }

    /// Sets the CPU weight of `path` alone, in cpu.shares; absent is fine.
    pub fn weigh(&self, path: &str, shares: u64) -> Result<(), CgroupError> {
        self.inside(path)?;
        let mut with_cpu = self.0.hierarchies.iter().filter(|h| h.controllers.iter().any(|c| c == "cpu"));
        with_cpu.try_for_each(|h| limits::write_shares(&h.dir(path), h.kind, shares))
    }

    /// Gives `path` the CPU weight that its children have together, as kubelet does for the class
    /// of burstable pods: the class then competes with the others by what its pods asked for.
    pub fn weigh_by_children(&self, path: &str) -> Result<(), CgroupError> {
        self.inside(path)?;
        for hierarchy in self.0.hierarchies.iter().filter(|h| h.controllers.iter().any(|c| c == "cpu")) {
            let dir = hierarchy.dir(path);
            let mut shares = 0u64;
            for child in hierarchy::subdirs(&dir)? {
                shares = shares.saturating_add(limits::shares_of(&dir.join(child), hierarchy.kind)?.unwrap_or(0));
            }
            limits::write_shares(&dir, hierarchy.kind, shares)?;
        }
        Ok(())
    }

    fn write(&self, path: &str, limits: &CgroupResources) -> Result<(), CgroupError> {
        for hierarchy in &self.0.hierarchies {
            match hierarchy.kind {
                Kind::V1 => limits::write_v1(&hierarchy.dir(path), &hierarchy.controllers, limits)?,
                Kind::V2 => limits::write_v2(&hierarchy.dir(path), &hierarchy.controllers, limits)?,
                Kind::Bare => {}
            }
        }
        Ok(())
    }

    /// Removes it with all below, children first; absent is fine. A process that was just killed
    /// holds its cgroup for a moment: that is waited for, up to two seconds.
    pub fn remove(&self, path: &str) -> Result<(), CgroupError> {
        self.inside(path)?;
        for hierarchy in &self.0.hierarchies {
            let mut pause = Duration::from_millis(1);
            let mut waited = Duration::ZERO;
            while !hierarchy.remove(path)? {
                if waited > Duration::from_secs(2) {
                    return Err(CgroupError::Busy { path: path.to_owned(), pids: hierarchy.pids(path)?.len() });
                }
                std::thread::sleep(pause);
                waited += pause;
                pause = (pause * 2).min(Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// SIGKILL to everything in it and below until nothing is left; how many processes still live
    /// after `limit`. Kills again while it waits: one that was being forked may have slipped through.
    pub fn end(&self, path: &str, limit: Duration) -> Result<usize, CgroupError> {
        let deadline = Instant::now() + limit;
        loop {
            // A zombie that its parent has yet to reap does nothing any more.
            let left = self.pids(path)?.iter().filter(|pid| !pidfd::is_dead(**pid).unwrap_or(false)).count();
            if left == 0 || Instant::now() > deadline {
                return Ok(left);
            }
            self.kill(path)?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// SIGKILL to everything in it and below; absent is fine. Does not wait for the deaths.
    pub fn kill(&self, path: &str) -> Result<(), CgroupError> {
        self.inside(path)?;
        for hierarchy in &self.0.hierarchies {
            if hierarchy.kind == Kind::V2 && hierarchy.kill(path)? {
                return Ok(());
            }
        }
        // Without cgroup.kill (v1, and v2 before 5.14): no more forks, then by pid until a pass
        // finds nobody. Membership is read again after each pidfd is held, so that a reused pid is
        // never hit.
        for hierarchy in &self.0.hierarchies {
            hierarchy.stop_forks(path)?;
        }
        for _ in 0..20 {
            let held: Vec<_> = self.pids(path)?.into_iter().filter_map(|pid| pidfd::open(pid).ok().map(|fd| (pid, fd))).collect();
            if held.is_empty() {
                break;
            }
            let still = self.pids(path)?;
            for (pid, fd) in &held {
                if still.contains(pid) {
                    pidfd::send_signal(fd, libc::SIGKILL).or_else(gone_is_fine).map_err(|source| CgroupError::Io {
                        operation: "kill the processes of",
                        path: path.into(),
                        source,
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Moves a process, with all of its threads, into the cgroup.
    pub fn add_pid(&self, path: &str, pid: i32) -> Result<(), CgroupError> {
        self.inside(path)?;
        for hierarchy in &self.0.hierarchies {
            hierarchy::write(&hierarchy.dir(path).join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// The cgroup's files, open, for a process that moves itself. (Moving another one, by its pid,
    /// makes the kernel stop all forks of the machine and wait for a grace period: 5 to 15 ms.)
    pub fn door(&self, path: &str) -> Result<Door, CgroupError> {
        self.inside(path)?;
        let mut door = Door::default();
        for hierarchy in &self.0.hierarchies {
            hierarchy.open(path, &mut door)?;
        }
        Ok(door)
    }

    /// Moves this process, which has one thread.
    pub fn join(&self, path: &str) -> Result<(), CgroupError> {
        self.inside(path)?;
        self.0.hierarchies.iter().try_for_each(|hierarchy| hierarchy.join(path))
    }

    /// Pids in it and below, in our own pid namespace; empty when it is absent.
    pub fn pids(&self, path: &str) -> Result<Vec<i32>, CgroupError> {
        self.inside(path)?;
        let mut pids = Vec::new();
        for hierarchy in &self.0.hierarchies {
            pids.extend(hierarchy.pids(path)?);
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Whether any hierarchy still has its directory.
    pub fn exists(&self, path: &str) -> Result<bool, CgroupError> {
        self.inside(path)?;
        Ok(self.0.hierarchies.iter().any(|h| h.dir(path).is_dir()))
    }

    /// Directories directly below it, from the hierarchy's root; empty when it is absent.
    pub fn children(&self, path: &str) -> Result<Vec<String>, CgroupError> {
        self.inside(path)?;
        let mut children = Vec::new();
        for hierarchy in &self.0.hierarchies {
            children.extend(hierarchy::subdirs(&hierarchy.dir(path))?.into_iter().map(|name| format!("{path}/{name}")));
        }
        children.sort_unstable();
        children.dedup();
        Ok(children)
    }

    /// How many processes the kernel's OOM killer took inside; 0 without a memory controller or
    /// when the cgroup is gone.
    pub fn oom_kills(&self, path: &str) -> Result<u64, CgroupError> {
        self.inside(path)?;
        lookout::oom_kills(&self.0.hierarchies, path)
    }

    pub fn usage(&self, path: &str) -> Result<Usage, CgroupError> {
        self.inside(path)?;
        lookout::usage(&self.0.hierarchies, path)
    }

    /// Refuses paths that are not strictly below the delegated parent.
    fn inside(&self, path: &str) -> Result<(), CgroupError> {
        check_path(path)?;
        let parent = self.0.parent.as_str();
        let below = parent == "/" || path.strip_prefix(parent).is_some_and(|rest| rest.starts_with('/'));
        if !below {
            return Err(CgroupError::BadPath { path: path.to_owned(), cure: "it must lie below the delegated cgroup" });
        }
        Ok(())
    }
}

fn check_path(path: &str) -> Result<(), CgroupError> {
    let refuse = |cure| Err(CgroupError::BadPath { path: path.chars().take(200).collect(), cure });
    let Some(rest) = path.strip_prefix('/') else { return refuse("it must begin with /") };
    if rest.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
        return refuse("empty parts, . and .. are not allowed");
    }
    if path.bytes().any(|b| b == 0 || b == b'\n') {
        return refuse("zero bytes and line ends are not allowed");
    }
    Ok(())
}

fn gone_is_fine(error: std::io::Error) -> std::io::Result<()> {
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for bad in ["", "/", "kubepods", "/a//b", "/a/", "/a/../b", "/..", "/./a", "/a\nb"] {
            assert!(check_path(bad).is_err(), "{bad:?}");
        }
        check_path("/kubepods/burstable/pod1/2").unwrap();
    }

    #[test]
    fn only_what_lies_below_the_parent_is_touched() {
        let cgroups =
            Cgroups(Arc::new(Inner { layout: Layout::V2, parent: "/a/b".into(), hierarchies: Vec::new(), lacks: Vec::new() }));
        for bad in ["/a", "/a/b", "/a/bc", "/c"] {
            assert!(matches!(cgroups.inside(bad), Err(CgroupError::BadPath { .. })), "{bad}");
        }
        cgroups.inside("/a/b/c").unwrap();
    }
}
