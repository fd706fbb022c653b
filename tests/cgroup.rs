//! runtime::cgroup against the kernel's real hierarchies: whichever layout this host has, and
//! v2 beside it on a hybrid host. Each test works below a cgroup of its own and removes it.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coracle::runtime::cgroup::{CgroupError, Cgroups, Layout};
use coracle::runtime::model::{CgroupResources, DeviceKind, DeviceRule};

/// A cgroup of this test only, gone when the test ends, however it ends.
struct Room {
    cgroups: Cgroups,
    path: String,
}

impl Room {
    fn new(cgroups: Cgroups) -> Room {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Room { cgroups, path: format!("/coracle-test-{}-{number}", std::process::id()) }
    }
    fn at(&self, below: &str) -> String {
        format!("{}/{below}", self.path)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(e) = self.cgroups.kill(&self.path).and_then(|()| self.cgroups.remove(&self.path)) {
            eprintln!("{}: {e}", self.path);
        }
    }
}

/// This host's layout, and v2 beside it where the host is hybrid.
fn rooms() -> Vec<Room> {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "cgroup tests need root");
        eprintln!("SKIP: cgroup tests need root");
        return Vec::new();
    }
    let host = Cgroups::detect("/").unwrap();
    let beside = (host.layout() == Layout::Hybrid).then(|| {
        let unified = Cgroups::detect_at(Path::new("/sys/fs/cgroup/unified"), "/").unwrap();
        assert_eq!(unified.layout(), Layout::V2);
        Room::new(unified)
    });
    std::iter::once(Room::new(host)).chain(beside).collect()
}

fn has(room: &Room, controller: &str) -> bool {
    !room.cgroups.lacks().iter().any(|l| l.what == controller)
}

/// A shell that waits until it is inside `path` and then runs `script`.
fn run_in(room: &Room, path: &str, script: &str) -> Child {
    let mut child = Command::new("sh")
        .args(["-c", &format!("read go\n{script}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    room.cgroups.add_pid(path, child.id() as i32).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    child
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn file(room: &Room, v1: &str, v2: &str, path: &str) -> Option<String> {
    let root = match room.cgroups.layout() {
        Layout::V2 if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() => "/sys/fs/cgroup".to_owned(),
        Layout::V2 => "/sys/fs/cgroup/unified".to_owned(),
        _ => format!("/sys/fs/cgroup/{}", v1.split('.').next().unwrap()),
    };
    let name = if room.cgroups.layout() == Layout::V2 { v2 } else { v1 };
    std::fs::read_to_string(format!("{root}{path}/{name}")).ok().map(|t| t.trim().to_owned())
}

#[test]
fn limits_are_written_changed_and_lifted() {
    for room in rooms() {
        let leaf = room.at("kubepods/burstable/pod1/abc");
        let limits = CgroupResources {
            cpu_shares: Some(512),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            memory_limit: Some(64 << 20),
            oom_group: true,
            no_swap: true,
            pids_limit: Some(77),
            devices: None,
        };
        for _ in 0..2 {
            room.cgroups.create(&leaf, &limits).unwrap();
        }
        if has(&room, "cpu controller") {
            let shares = file(&room, "cpu.shares", "cpu.weight", &leaf).unwrap();
            assert!(shares == "512" || shares == "20", "{shares}");
            let quota = file(&room, "cpu.cfs_quota_us", "cpu.max", &leaf).unwrap();
            assert!(quota == "50000" || quota == "50000 100000", "{quota}");
        }
        if has(&room, "memory controller") {
            assert_eq!(file(&room, "memory.limit_in_bytes", "memory.max", &leaf).unwrap(), "67108864");
        }
        if has(&room, "pids controller") {
            assert_eq!(file(&room, "pids.max", "pids.max", &leaf).unwrap(), "77");
        }
        room.cgroups.update(&leaf, &CgroupResources { memory_limit: Some(128 << 20), ..limits.clone() }).unwrap();
        if has(&room, "memory controller") {
            assert_eq!(file(&room, "memory.limit_in_bytes", "memory.max", &leaf).unwrap(), "134217728");
        }
        room.cgroups.update(&leaf, &CgroupResources::default()).unwrap();
        if has(&room, "pids controller") {
            assert_eq!(file(&room, "pids.max", "pids.max", &leaf).unwrap(), "max");
        }
        assert_eq!(room.cgroups.children(&room.at("kubepods/burstable")).unwrap(), [room.at("kubepods/burstable/pod1")]);
        for _ in 0..2 {
            room.cgroups.remove(&leaf).unwrap();
        }
        assert!(!room.cgroups.exists(&leaf).unwrap());
        assert!(room.cgroups.exists(&room.at("kubepods/burstable/pod1")).unwrap());
    }
}

#[test]
fn a_class_weighs_what_its_pods_weigh() {
    for room in rooms().into_iter().filter(|r| has(r, "cpu controller")) {
        let class = room.at("kubepods/burstable");
        for (pod, shares) in [("pod1", 512), ("pod2", 1024)] {
            let limits = CgroupResources { cpu_shares: Some(shares), ..CgroupResources::default() };
            room.cgroups.create(&format!("{class}/{pod}"), &limits).unwrap();
        }
        room.cgroups.weigh_by_children(&class).unwrap();
        let shares = file(&room, "cpu.shares", "cpu.weight", &class).unwrap();
        assert!(shares == "1536" || (57..=59).contains(&shares.parse::<u64>().unwrap()), "{shares}");
        room.cgroups.weigh_by_children(&room.at("nobody")).unwrap();
    }
}

#[test]
fn a_cgroup_without_limits_switches_no_controller_on() {
    for room in rooms().into_iter().filter(|r| r.cgroups.layout() == Layout::V2) {
        room.cgroups.create(&room.at("monitor/one"), &CgroupResources::default()).unwrap();
        assert_eq!(file(&room, "", "cgroup.subtree_control", &room.at("monitor")).unwrap(), "");
    }
}

#[test]
fn kill_reaches_every_process_below_and_remove_waits_for_the_last() {
    for room in rooms() {
        let (pod, leaf) = (room.at("pod"), room.at("pod/leaf"));
        room.cgroups.create(&leaf, &CgroupResources { pids_limit: Some(100), ..CgroupResources::default() }).unwrap();
        let mut child = run_in(&room, &leaf, "sleep 600 & sleep 600 & (trap '' TERM; sleep 600) & wait");
        until("the children start", || room.cgroups.pids(&pod).unwrap().len() >= 4);
        assert!(matches!(room.cgroups.remove(&pod), Err(CgroupError::Busy { .. })));
        room.cgroups.kill(&pod).unwrap();
        child.wait().unwrap();
        room.cgroups.remove(&pod).unwrap();
        assert!(room.cgroups.pids(&pod).unwrap().is_empty());
        // Of what is not there, nothing is wrong.
        room.cgroups.kill(&pod).unwrap();
        room.cgroups.remove(&pod).unwrap();
        assert_eq!(room.cgroups.oom_kills(&pod).unwrap(), 0);
    }
}

#[test]
fn a_fork_storm_dies() {
    for room in rooms().into_iter().filter(|r| has(r, "pids controller")) {
        let leaf = room.at("storm");
        room.cgroups.create(&leaf, &CgroupResources { pids_limit: Some(50), ..CgroupResources::default() }).unwrap();
        let mut child = run_in(&room, &leaf, "f() { while :; do f & done; }; f");
        until("it fills its limit", || room.cgroups.usage(&leaf).unwrap().pids >= Some(50));
        room.cgroups.kill(&leaf).unwrap();
        child.wait().unwrap();
        room.cgroups.remove(&leaf).unwrap();
    }
}

#[test]
fn an_oom_kill_is_counted_where_it_struck() {
    for room in rooms().into_iter().filter(|r| has(r, "memory controller")) {
        let (leaf, calm) = (room.at("pod/greedy"), room.at("pod/calm"));
        let limits = CgroupResources { memory_limit: Some(16 << 20), no_swap: true, ..CgroupResources::default() };
        room.cgroups.create(&leaf, &limits).unwrap();
        room.cgroups.create(&calm, &limits).unwrap();
        let mut child = run_in(&room, &leaf, "exec tail /dev/zero");
        let status = child.wait().unwrap();
        assert!(!status.success());
        assert!(room.cgroups.oom_kills(&leaf).unwrap() >= 1);
        assert_eq!(room.cgroups.oom_kills(&calm).unwrap(), 0);
        assert!(room.cgroups.usage(&leaf).unwrap().memory.is_some());
    }
}

#[test]
fn devices_are_denied_unless_a_rule_allows_them() {
    let null = DeviceRule { kind: DeviceKind::Char, major: Some(1), minor: Some(3), read: true, write: true, mknod: true };
    let make = DeviceRule { kind: DeviceKind::Char, major: None, minor: None, read: false, write: false, mknod: true };
    for room in rooms() {
        let leaf = room.at("filtered");
        let limits = CgroupResources { devices: Some(vec![null.clone(), make.clone()]), ..CgroupResources::default() };
        for _ in 0..2 {
            room.cgroups.create(&leaf, &limits).unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        for (script, works) in [
            ("exec 3<>/dev/null".to_string(), true),
            ("exec 3</dev/zero".to_string(), false),
            (format!("exec mknod {at}/char c 1 5"), true),
            (format!("exec mknod {at}/block b 8 0"), false),
        ] {
            let status = run_in(&room, &leaf, &script).wait().unwrap();
            assert_eq!(status.success(), works, "{:?}: {script}", room.cgroups.layout());
        }
    }
}

#[test]
fn device_rules_survive_a_thousand_rounds() {
    for room in rooms() {
        let leaf = room.at("again");
        let limits = CgroupResources { devices: Some(Vec::new()), ..CgroupResources::default() };
        for _ in 0..1000 {
            room.cgroups.create(&leaf, &limits).unwrap();
            room.cgroups.remove(&leaf).unwrap();
        }
    }
}

#[test]
fn what_lies_outside_the_delegated_parent_is_refused() {
    for room in rooms() {
        let below = Cgroups::detect(&format!("{}/delegated", room.path)).unwrap();
        for path in ["/kubepods", room.path.as_str()] {
            assert!(matches!(below.create(path, &CgroupResources::default()), Err(CgroupError::BadPath { .. })), "{path}");
            assert!(matches!(below.remove(path), Err(CgroupError::BadPath { .. })), "{path}");
            assert!(matches!(below.kill(path), Err(CgroupError::BadPath { .. })), "{path}");
        }
        assert!(Cgroups::detect("/a/../b").is_err());
    }
}
