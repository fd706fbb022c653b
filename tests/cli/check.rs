//! `coracle check` on hosts that lack things, made in mount namespaces: each lack is named with the
//! line that mends it, and only what blocks makes the exit code 1.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::node::possible;

const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");

/// What one look found, by name.
struct Look {
    code: Option<i32>,
    found: BTreeMap<String, Value>,
}

impl Look {
    fn run(command: &mut Command) -> Look {
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
        let findings = value["findings"].as_array().unwrap().iter();
        let found: BTreeMap<String, Value> = findings.map(|f| (f["name"].as_str().unwrap().to_owned(), f.clone())).collect();
        let blocked = found.values().any(|f| f["state"] == "missing");
        assert_eq!(output.status.code(), Some(i32::from(blocked)), "{value}");
        assert_eq!(value["ok"], !blocked);
        for finding in found.values().filter(|f| f["state"] == "missing" || f["state"] == "degraded") {
            assert!(finding["effect"] != "" && finding["detail"] != "", "{finding}");
        }
        Look { code: output.status.code(), found }
    }

    /// After `setup`, a line of shell in a mount namespace of its own, which sees the root as `$1`.
    fn after(root: &Path, setup: &str) -> Look {
        let script = format!("set -e; {setup}; exec \"$0\" check -o json --root \"$1\"");
        Look::run(Command::new("unshare").args(["-m", "--propagation", "private", "sh", "-c", &script, CORACLE]).arg(root))
    }

    fn is(&self, name: &str, state: &str, cure: &str) {
        let finding = self.found.get(name).unwrap_or_else(|| panic!("nothing about {name}: {:?}", self.found.keys()));
        assert!(finding["state"] == state && finding["cure"].as_str().unwrap().contains(cure), "{name}: {finding}");
    }

    /// Every finding that is not as on the host as it is, by name and state.
    fn beside(&self, host: &Look) -> Vec<String> {
        let other = |(name, f): &(&String, &Value)| host.found.get(*name).is_none_or(|h| h["state"] != f["state"]);
        self.found.iter().filter(other).map(|(name, f)| format!("{name} {}", f["state"].as_str().unwrap())).collect()
    }
}

#[test]
fn hosts_that_lack_things_are_told_which_and_how_to_mend_it() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("state")).unwrap();
    fs::create_dir_all(root.join("log")).unwrap();
    let before: Vec<_> = fs::read_dir(root.join("state")).unwrap().collect();
    let host = Look::after(&root, "true");
    assert_eq!(host.code, Some(0), "this host runs pods: {:?}", host.found);
    host.is("writable layers", "ok", "");

    let look = Look::after(&root, "umount -R /sys/fs/cgroup");
    look.is("cgroups", "missing", "mount -t cgroup2 cgroup2 /sys/fs/cgroup");

    if Path::new("/sys/fs/cgroup/pids").is_dir() {
        let look = Look::after(&root, "umount /sys/fs/cgroup/pids");
        look.is("pids controller", "degraded", "CONFIG_CGROUP_PIDS");
        assert_eq!(look.code, Some(0), "it runs on without");
        let look = Look::after(&root, "umount /sys/fs/cgroup/memory");
        look.is("memory controller", "degraded", "cgroup_enable=memory cgroup_memory=1");
        assert_eq!(look.code, Some(0));
    } else {
        eprintln!("SKIP: cgroup v2 alone: a controller cannot be taken away in a mount namespace");
    }

    let look = Look::after(&root, "mount -t tmpfs -o size=1g none \"$1/state\"");
    assert_eq!(look.beside(&host), ["writable layers note"]);
    look.is("writable layers", "note", "mount a disk there");

    let look = Look::after(&root, "mount -t tmpfs -o ro none \"$1/state\"");
    look.is("disk for images", "missing", "mount -o remount,rw");
    assert!(!look.found.contains_key("writable layers"), "what cannot be tried is not judged");

    let look = Look::after(&root, "mount -t tmpfs -o size=20m none \"$1/state\"");
    look.is("disk for images", "missing", "df -h");
    let look = Look::after(&root, "mount -t tmpfs -o size=1g,nr_inodes=500 none \"$1/log\"");
    look.is("disk for logs", "missing", "df -i");
    assert_eq!(look.beside(&host), ["disk for logs missing"]);

    // As in a container: overlay takes no overlay for an upper layer.
    let setup = "cd \"$1/..\"; mkdir low up work; mount -t overlay none -o lowerdir=low,upperdir=up,workdir=work \"$1/state\"";
    let look = Look::after(&root, setup);
    look.is("disk for images", "ok", "");
    look.is("writable layers", "missing", "ext4, xfs, btrfs or f2fs");
    assert!(look.found["writable layers"]["detail"].as_str().unwrap().contains("(overlay)"));
    // ramfs counts no blocks: that there is room cannot be said.
    let look = Look::after(&root, "mount -t ramfs none \"$1/state\"");
    look.is("disk for images", "missing", "--root DIR");

    let look = Look::after(&root, "umount -l /proc");
    look.is("capabilities", "missing", "mount -t proc proc /proc");

    let left: Vec<_> = fs::read_dir(root.join("state")).unwrap().collect();
    assert_eq!((before.len(), left.len()), (0, 0), "what was tried is gone");
    assert_eq!(fs::read_dir(&root).unwrap().count(), 2);
}

#[test]
fn without_rights_it_says_which_are_missing() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("coracle");
    fs::copy(CORACLE, &program).unwrap();
    for (path, mode) in [(dir.path(), 0o755), (program.as_path(), 0o755)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let look = Look::run(Command::new(&program).args(["check", "-o", "json"]).uid(65534).gid(65534));
    look.is("user", "missing", "sudo coracle check");
    look.is("mount namespaces", "missing", "run as root");
    look.is("capabilities", "missing", "run as root");

    // Root in a container that keeps rights back.
    for (lacking, name) in [("net_admin", "NET_ADMIN"), ("sys_admin", "SYS_ADMIN")] {
        let drop = format!("-{lacking}");
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", &drop, "--inh-caps", &drop]).arg(CORACLE).args(["check", "-o", "json"]);
        let look = Look::run(&mut command);
        look.is("user", "ok", "");
        look.is("capabilities", "missing", "bounding set");
        assert!(look.found["capabilities"]["detail"].as_str().unwrap().contains(name), "{lacking}");
        let blocked = if lacking == "net_admin" { "bridge" } else { "mount namespaces" };
        look.is(blocked, "missing", "");
    }
}
