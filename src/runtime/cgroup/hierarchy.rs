//! One mounted cgroup hierarchy: finding it, making and removing directories in it.
//!
//! Invariant: a directory made here has what it needs before anything joins it: v1 cpusets copied
//! from the parent, v2 controllers switched on in every ancestor from the delegated parent down.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::super::model::DeviceRule;
use super::{CgroupError, Door, Lack, Layout};
use crate::sys::{bpf, file};

/// v1 only: the threads of a cgroup.
const TASKS: &str = "tasks";

/// The controllers that we set limits or read counts of.
const USED: [&str; 3] = ["cpu", "memory", "pids"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    V1,
    V2,
    /// Controls nothing: v1's name=systemd, and the v2 side of a hybrid host. Processes are moved
    /// there too, or systemd would count them as part of the agent's unit.
    Bare,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    pub kind: Kind,
    pub mount: PathBuf,
    /// v1: all that are mounted here. v2: those of [`USED`] that the parent can hand on.
    pub controllers: Vec<String>,
}

impl Hierarchy {
    pub fn dir(&self, path: &str) -> PathBuf {
        self.mount.join(path.trim_start_matches('/'))
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|c| c == controller)
    }

    /// Makes `path` and all that is missing above it. `limited`: it will carry limits, so the
    /// controllers are switched on above it (v2).
    pub fn make(&self, parent: &str, path: &str, limited: bool) -> Result<(), CgroupError> {
        let mut at = String::new();
        for part in path.trim_start_matches('/').split('/') {
            if self.kind == Kind::V2 && limited && within(parent, &at) {
                self.switch_on(&self.dir(&at))?;
            }
            at.push('/');
            at.push_str(part);
            let dir = self.dir(&at);
            match fs::create_dir(&dir) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => return Err(CgroupError::Io { operation: "make", path: dir, source }),
            }
            if self.kind == Kind::V1 && self.has("cpuset") {
                inherit_cpuset(&dir)?;
            }
        }
        Ok(())
    }

    /// Hands the controllers that we use on to the children of `dir`.
    fn switch_on(&self, dir: &Path) -> Result<(), CgroupError> {
        let file = dir.join("cgroup.subtree_control");
        let on = read(&file)?;
        let missing: Vec<String> =
            self.controllers.iter().filter(|c| !on.split_whitespace().any(|o| o == *c)).map(|c| format!("+{c}")).collect();
        if missing.is_empty() { Ok(()) } else { write(&file, &missing.join(" ")) }
    }

    /// Device rules over default-deny: v1's devices controller, v2's device program.
    pub fn filter_devices(&self, path: &str, rules: &[DeviceRule]) -> Result<(), CgroupError> {
        let dir = self.dir(path);
        match self.kind {
            Kind::V1 if self.has("devices") => {
                write(&dir.join("devices.deny"), "a")?;
                rules.iter().try_for_each(|rule| write(&dir.join("devices.allow"), &v1_device_rule(rule)))
            }
            Kind::V2 => {
                let program: Vec<bpf::DeviceMatch> = rules.iter().map(device_match).collect();
                bpf::attach_device_filter(&dir, &program).map_err(|source| CgroupError::Io {
                    operation: "attach the device rules of",
                    path: dir,
                    source,
                })
            }
            Kind::V1 | Kind::Bare => Ok(()),
        }
    }

    /// Removes `path` and all below it, children first. False: something still lives there.
    pub fn remove(&self, path: &str) -> Result<bool, CgroupError> {
        remove_tree(&self.dir(path))
    }

    /// v2's cgroup.kill, since 5.14. False where there is none.
    pub fn kill(&self, path: &str) -> Result<bool, CgroupError> {
        let dir = self.dir(path);
        match write(&dir.join("cgroup.kill"), "1") {
            Ok(()) => Ok(true),
            Err(CgroupError::Write { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(!dir.exists()),
            Err(e) => Err(e),
        }
    }

    /// Nothing in `path` can fork any more. Where there is no pids controller, passes must do.
    pub fn stop_forks(&self, path: &str) -> Result<(), CgroupError> {
        if !self.has("pids") {
            return Ok(());
        }
        match write(&self.dir(path).join("pids.max"), "0") {
            Err(CgroupError::Write { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    pub fn join(&self, path: &str) -> Result<(), CgroupError> {
        let dir = self.dir(path);
        match write(&dir.join(TASKS), "0") {
            Err(CgroupError::Write { source, .. }) if source.kind() == ErrorKind::NotFound => {
                write(&dir.join("cgroup.procs"), "0")
            }
            other => other,
        }
    }

    pub fn open(&self, path: &str, door: &mut Door) -> Result<(), CgroupError> {
        let dir = self.dir(path);
        let fail = |source| CgroupError::Io { operation: "open", path: dir.clone(), source };
        // v2 has no such file.
        match fs::OpenOptions::new().write(true).open(dir.join(TASKS)) {
            Ok(tasks) => door.tasks.push(tasks),
            Err(e) if e.kind() == ErrorKind::NotFound => door.directory = Some(file::open_dir_path(&dir).map_err(fail)?),
            Err(e) => return Err(fail(e)),
        }
        Ok(())
    }

    /// Pids in `path` and below; none when it is absent.
    pub fn pids(&self, path: &str) -> Result<Vec<i32>, CgroupError> {
        let mut pids = Vec::new();
        collect_pids(&self.dir(path), &mut pids)?;
        Ok(pids)
    }
}

/// Reads mountinfo and takes what is mounted at or right below `root`.
pub fn detect(root: &Path, parent: &str) -> Result<(Layout, Vec<Hierarchy>), CgroupError> {
    let mountinfo = Path::new("/proc/self/mountinfo");
    let text = read(mountinfo)?;
    let mut found = parse(&text, root);
    let layout = match found.iter().find(|h| h.mount == root) {
        Some(unified) if unified.kind == Kind::V2 => {
            found = vec![unified.clone()];
            Layout::V2
        }
        _ if found.iter().any(|h| h.kind == Kind::V1) => {
            let hybrid = found.iter().any(|h| h.kind == Kind::V2);
            for hierarchy in &mut found {
                if hierarchy.kind == Kind::V2 {
                    hierarchy.kind = Kind::Bare;
                }
            }
            if hybrid { Layout::Hybrid } else { Layout::V1 }
        }
        _ => return Err(CgroupError::NotMounted { root: root.into() }),
    };
    for hierarchy in &mut found {
        if hierarchy.kind == Kind::V2 {
            hierarchy.controllers = delegated(&hierarchy.mount, parent)?;
        }
    }
    Ok((layout, found))
}

/// Hierarchies among mountinfo's lines; of several mounts at one place the last one counts.
fn parse(mountinfo: &str, root: &Path) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        // "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue"
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(mount) = left.split(' ').nth(4).map(PathBuf::from) else { continue };
        if mount != root && mount.parent() != Some(root) {
            continue;
        }
        let mut right = right.split(' ');
        let (kind, options) = (right.next().unwrap_or_default(), right.nth(1).unwrap_or_default());
        let hierarchy = match kind {
            "cgroup2" => Hierarchy { kind: Kind::V2, mount, controllers: Vec::new() },
            "cgroup" => {
                let options: Vec<&str> = options.split(',').collect();
                let named = options.iter().any(|o| o.starts_with("name="));
                let controllers: Vec<String> = options
                    .iter()
                    .filter(|o| !matches!(**o, "rw" | "ro" | "xattr" | "noprefix" | "clone_children") && !o.contains('='))
                    .map(|o| (*o).to_owned())
                    .collect();
                Hierarchy { kind: if named { Kind::Bare } else { Kind::V1 }, mount, controllers }
            }
            _ => {
                // Something else was mounted over it.
                found.retain(|h| h.mount != mount);
                continue;
            }
        };
        found.retain(|h| h.mount != hierarchy.mount);
        found.push(hierarchy);
    }
    found
}

/// The controllers of [`USED`] that `parent`, or what exists of it, can hand on.
fn delegated(mount: &Path, parent: &str) -> Result<Vec<String>, CgroupError> {
    let mut dir = mount.join(parent.trim_start_matches('/'));
    while !dir.is_dir() && dir != mount && dir.pop() {}
    let offered = read(&dir.join("cgroup.controllers"))?;
    Ok(USED.iter().filter(|c| offered.split_whitespace().any(|o| o == **c)).map(|c| (*c).to_owned()).collect())
}

pub fn lacks(layout: Layout, hierarchies: &[Hierarchy]) -> Vec<Lack> {
    let has = |controller: &str| hierarchies.iter().any(|h| h.has(controller));
    let mut lacks = Vec::new();
    if !has("memory") {
        lacks.push(Lack {
            what: "memory controller",
            effect: "memory limits and OOM counts do not work",
            cure: "add \"cgroup_enable=memory cgroup_memory=1\" to the kernel's command line and reboot",
        });
    }
    if !has("cpu") {
        lacks.push(Lack {
            what: "cpu controller",
            effect: "cpu requests and limits do not work",
            cure: "hand it on to our cgroup (Delegate=yes), or use a kernel with CONFIG_CGROUP_SCHED",
        });
    }
    if !has("pids") {
        lacks.push(Lack {
            what: "pids controller",
            effect: "pids limits do not work: a fork bomb in one pod can take the node's process table",
            cure: "hand it on to our cgroup (Delegate=yes), or use a kernel with CONFIG_CGROUP_PIDS",
        });
    }
    if layout != Layout::V2 && !has("devices") {
        lacks.push(Lack {
            what: "devices controller",
            effect: "containers with CAP_MKNOD can open every device of the host",
            cure: "use a kernel with CONFIG_CGROUP_DEVICE, or cgroup v2",
        });
    }
    lacks
}

/// True for `parent` itself and all below; `at` is "" for the root.
fn within(parent: &str, at: &str) -> bool {
    parent == "/" || at == parent || at.strip_prefix(parent).is_some_and(|rest| rest.starts_with('/'))
}

/// A new v1 cpuset has no CPU and no memory node, and nothing can join it.
fn inherit_cpuset(dir: &Path) -> Result<(), CgroupError> {
    let Some(parent) = dir.parent() else { return Ok(()) };
    for name in ["cpuset.cpus", "cpuset.mems"] {
        if read(&dir.join(name))?.trim().is_empty() {
            write(&dir.join(name), read(&parent.join(name))?.trim())?;
        }
    }
    Ok(())
}

fn v1_device_rule(rule: &DeviceRule) -> String {
    use super::super::model::DeviceKind;
    let kind = match rule.kind {
        DeviceKind::All => 'a',
        DeviceKind::Char => 'c',
        DeviceKind::Block => 'b',
    };
    let number = |n: Option<u32>| n.map_or("*".to_owned(), |n| n.to_string());
    let mut access = String::new();
    for (on, letter) in [(rule.read, 'r'), (rule.write, 'w'), (rule.mknod, 'm')] {
        if on {
            access.push(letter);
        }
    }
    format!("{kind} {}:{} {access}", number(rule.major), number(rule.minor))
}

fn device_match(rule: &DeviceRule) -> bpf::DeviceMatch {
    use super::super::model::DeviceKind;
    bpf::DeviceMatch {
        kind: match rule.kind {
            DeviceKind::All => None,
            DeviceKind::Char => Some(bpf::DeviceType::Char),
            DeviceKind::Block => Some(bpf::DeviceType::Block),
        },
        major: rule.major,
        minor: rule.minor,
        read: rule.read,
        write: rule.write,
        mknod: rule.mknod,
    }
}

fn remove_tree(dir: &Path) -> Result<bool, CgroupError> {
    let mut all = true;
    for name in subdirs(dir)? {
        all &= remove_tree(&dir.join(name))?;
    }
    if !all {
        return Ok(false);
    }
    match fs::remove_dir(dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
        // EBUSY: a process or a child came or has not gone yet.
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(false),
        Err(source) => Err(CgroupError::Io { operation: "remove", path: dir.into(), source }),
    }
}

fn collect_pids(dir: &Path, pids: &mut Vec<i32>) -> Result<(), CgroupError> {
    let file = dir.join("cgroup.procs");
    match fs::read_to_string(&file) {
        // 0 stands for a process of another pid namespace, which we cannot signal.
        Ok(text) => pids.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()).filter(|pid| *pid > 0)),
        Err(e) if is_gone(&e) => return Ok(()),
        // A threaded cgroup of a container that divides itself; its parent lists the processes.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        Err(source) => return Err(CgroupError::Io { operation: "read", path: file, source }),
    }
    for name in subdirs(dir)? {
        collect_pids(&dir.join(name), pids)?;
    }
    Ok(())
}

/// Names of the directories in `dir`; none when it is absent.
pub fn subdirs(dir: &Path) -> Result<Vec<String>, CgroupError> {
    let fail = |source| CgroupError::Io { operation: "list", path: dir.into(), source };
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if is_gone(&e) => return Ok(Vec::new()),
        Err(e) => return Err(fail(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(e) if is_gone(&e) => return Ok(names),
            Err(e) => return Err(fail(e)),
        };
        if entry.file_type().map_err(fail)?.is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// ENODEV is what kernfs gives for a directory that was removed while it was open.
pub fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

pub fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|source| CgroupError::Io { operation: "read", path: path.into(), source })
}

/// One write(2): the kernel takes a control file's value whole or not at all. Never creates.
pub fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    use std::io::Write;
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|source| CgroupError::Write { value: value.to_owned(), path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 23 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/x,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
35 30 0:31 / /mnt/cgroup rw,relatime - cgroup cgroup rw,pids";

    #[test]
    fn mountinfo_tells_the_hierarchies() {
        let found = parse(HYBRID, Path::new("/sys/fs/cgroup"));
        let brief: Vec<_> = found.iter().map(|h| (h.kind, h.controllers.join("+"))).collect();
        assert_eq!(
            brief,
            [
                (Kind::V1, "cpu+cpuacct".to_owned()),
                (Kind::V1, "memory".to_owned()),
                (Kind::Bare, String::new()),
                (Kind::V2, String::new())
            ]
        );
        let over = format!("{HYBRID}\n36 30 0:32 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw");
        assert_eq!(parse(&over, Path::new("/sys/fs/cgroup")).last().map(|h| h.mount.clone()), Some("/sys/fs/cgroup".into()));
    }

    #[test]
    fn controllers_are_switched_on_from_the_parent_down() {
        assert!(within("/", ""));
        assert!(within("/", "/a"));
        assert!(within("/a/b", "/a/b"));
        assert!(within("/a/b", "/a/b/c"));
        assert!(!within("/a/b", "/a"));
        assert!(!within("/a/b", ""));
        assert!(!within("/a/b", "/a/bc"));
    }

    #[test]
    fn a_device_rule_in_v1_words() {
        use super::super::super::model::DeviceKind;
        let rule = DeviceRule { kind: DeviceKind::Char, major: Some(136), minor: None, read: true, write: true, mknod: true };
        assert_eq!(v1_device_rule(&rule), "c 136:* rwm");
        let rule = DeviceRule { kind: DeviceKind::All, major: None, minor: None, read: false, write: false, mknod: true };
        assert_eq!(v1_device_rule(&rule), "a *:* m");
    }

    #[test]
    fn missing_controllers_are_told_with_a_cure() {
        let only_cpu = [Hierarchy { kind: Kind::V2, mount: "/x".into(), controllers: vec!["cpu".into()] }];
        let told: Vec<_> = lacks(Layout::V2, &only_cpu).iter().map(|l| l.what).collect();
        assert_eq!(told, ["memory controller", "pids controller"]);
    }
}
