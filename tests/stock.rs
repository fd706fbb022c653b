//! A container is what a stock node would make of the same pod: containerd and runc, built here
//! from their released source and driven as a kubelet drives them, beside our agent.
//!
//! Every pod of `stock/cases.rs` runs on both sides; a script inside tells what it sees (also
//! through exec): credentials, capabilities, seccomp, signals, limits, oom_score_adj, mounts,
//! cgroup values, devices, environment, umask, working directory, what it is able to do, and what 80
//! system calls answer. Each difference fails the test, unless [`EXCEPTIONS`] names it with its
//! reason.
//!
//! Needs root, Go 1.25, gcc, pkg-config, libseccomp-dev, busybox-static. The stock side is built
//! once into `target/cluster` (or $CORACLE_STOCK_BIN): about 5 minutes on two idle cores, 120 MB,
//! and 1.8 GB of Go caches. The pods take about a minute.

#[path = "stock/cases.rs"]
mod cases;
#[path = "stock/containerd.rs"]
mod containerd;
#[path = "stock/coracle.rs"]
mod coracle_agent;
#[path = "stock/facts.rs"]
mod facts;
#[path = "stock/image.rs"]
mod image;
#[cfg(target_arch = "x86_64")]
#[path = "stock/syscalls.rs"]
mod syscalls;

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// A difference that stays. `*` at the end of a name stands for any text.
struct Exception {
    pods: &'static str,
    fact: &'static str,
    /// Words of the difference, so that another one at the same place is not let through.
    difference: &'static str,
    reason: &'static str,
}

const fn exception(pods: &'static str, fact: &'static str, difference: &'static str, reason: &'static str) -> Exception {
    Exception { pods, fact, difference, reason }
}

const MASK: &str = "a mask over a directory is read-only and empty, but not limited to one inode as well";
const CGROUP_TMPFS: &str = "v1: the tmpfs that holds the hierarchies is read-only, too";
const OWN_MOUNTS: &str = "only what is bound in is shared; the container's own mounts stay its own";

const EXCEPTIONS: &[Exception] = &[
    exception("*", "cgroup/*", "| ours: ", "a cgroup namespace on v1 too, where containerd has none; privileged: another parent"),
    exception(
        "*",
        "mountinfo//sys",
        "super ro  | ours: sysfs ro,",
        "the mount is read-only; the flag of its superblock is left alone",
    ),
    exception("*", "mountinfo//sys/fs/cgroup", "| ours: tmpfs ro,", CGROUP_TMPFS),
    exception("*", "able/mkdir /sys/fs/cgroup/sub", "yes | ours: no", CGROUP_TMPFS),
    exception("*", "mountinfo//proc/*", "nr_inodes=1  | ours: tmpfs ro,", MASK),
    exception("*", "mountinfo//sys/*", "nr_inodes=1  | ours: tmpfs ro,", MASK),
    exception("volume-both-ways", "mountinfo//dev*", "shared | ours: ", OWN_MOUNTS),
    exception("volume-both-ways", "mountinfo//etc/*", "shared | ours: ", OWN_MOUNTS),
    exception("volume-both-ways", "mountinfo//proc", "shared | ours: ", OWN_MOUNTS),
    exception("volume-both-ways", "mountinfo//sys*", "shared | ours: ", OWN_MOUNTS),
];

#[test]
fn a_container_is_what_a_stock_node_makes_of_it() {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "this test needs root");
        eprintln!("SKIP: comparing with containerd needs root");
        return;
    }
    let bin = containerd::build();
    let dir = tempfile::tempdir().unwrap();
    let _mounts = Mounts(dir.path().to_owned());
    let archive = dir.path().join("images.tar");
    image::write_archive(&archive);
    let shared = dir.path().join("shared");
    make_shared(&shared);
    let cases = cases::all(&shared, facts::SCRIPT);
    assert!(cases.len() >= 15);

    let ours = coracle_agent::Coracle::start(&dir.path().join("ours"), &archive);
    ours.submit(&cases);
    let stock = containerd::Containerd::start(&bin, &dir.path().join("stock"), &archive);
    let mut wrong = Vec::new();
    let mut used = std::collections::BTreeSet::new();
    for case in &cases {
        let stock = stock.run(case.name, case.sandbox.clone(), case.container.clone(), facts::SCRIPT);
        let ours = ours.read(case);
        for (how, stock, ours) in [("main", stock.0, ours.0), ("exec", stock.1, ours.1)] {
            let (stock, ours) = (facts::parse(&stock), facts::parse(&ours));
            // A script that told nothing compares equal with anything.
            assert!(stock.len() > 100 && ours.len() > 100, "{} {how}: {} and {} facts", case.name, stock.len(), ours.len());
            for (who, facts) in [("stock", &stock), ("ours", &ours)] {
                let calls = facts.keys().filter(|fact| fact.starts_with("calls/")).count();
                assert!(calls > 70 || cfg!(not(target_arch = "x86_64")), "{} {how}: {calls} system calls of {who}", case.name);
            }
            for (fact, difference) in facts::differences(&stock, &ours) {
                let excused = |e: &Exception| fits(e.pods, case.name) && fits(e.fact, &fact) && difference.contains(e.difference);
                match EXCEPTIONS.iter().position(excused) {
                    Some(at) => drop(used.insert(at)),
                    None => wrong.push(format!("{} {how}: {fact}: {difference}", case.name)),
                }
            }
        }
    }
    mounts_propagate_as_asked(&ours, &shared);
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    // Those that stand for nothing any more are to go. Some are only for one cgroup layout.
    for (_, exception) in EXCEPTIONS.iter().enumerate().filter(|(at, _)| !used.contains(at)) {
        eprintln!("not needed here: {} {}: {}", exception.pods, exception.fact, exception.reason);
    }
}

/// The flags in mountinfo were compared; this is what they are for.
fn mounts_propagate_as_asked(ours: &coracle_agent::Coracle, shared: &Path) {
    let sees = |pod: &str| ours.exec(pod, "grep -q ' /v/late ' /proc/self/mountinfo").is_ok();
    let none: Option<&str> = None;
    std::fs::create_dir(shared.join("late")).unwrap();
    nix::mount::mount(Some("tmpfs"), &shared.join("late"), Some("tmpfs"), nix::mount::MsFlags::empty(), none).unwrap();
    assert!(!sees("volume"), "mountPropagation None: a later mount of the host shows inside");
    assert!(sees("volume-from-host") && sees("volume-both-ways"), "a later mount of the host does not show inside");
    ours.exec("volume-both-ways", "mkdir /v/back && mount -t tmpfs none /v/back").unwrap();
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(table.contains(&format!(" {}/back ", shared.display())), "Bidirectional: a mount made inside does not show outside");
}

fn fits(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => text == pattern,
    }
}

/// Takes away what is mounted below it.
struct Mounts(PathBuf);

impl Drop for Mounts {
    fn drop(&mut self) {
        clean_mounts(&self.0);
    }
}

/// A shared mount, with another mount below it.
fn make_shared(dir: &Path) {
    use nix::mount::{MsFlags, mount};
    let none: Option<&str> = None;
    std::fs::create_dir_all(dir).unwrap();
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID, none).unwrap();
    mount(none, dir, none, MsFlags::MS_SHARED, none).unwrap();
    std::fs::create_dir(dir.join("below")).unwrap();
    mount(Some("tmpfs"), &dir.join("below"), Some("tmpfs"), MsFlags::MS_NODEV, none).unwrap();
}

/// What a container has logged, without the CRI framing, once it says `== end`.
fn wait_for_log(name: &str, path: &Path) -> String {
    let start = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter_map(|l| l.splitn(4, ' ').nth(3)).collect();
        if lines.iter().any(|l| l.trim_end() == "== end") {
            return lines.join("\n");
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{name}: no end in {}:\n{text}", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// SIGTERM, and SIGKILL when that does not do.
fn stop(child: &mut Child) {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Unmounts everything below `dir`, innermost first.
fn clean_mounts(dir: &Path) {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut points: Vec<&str> =
        table.lines().filter_map(|l| l.split(' ').nth(4)).filter(|p| Path::new(p).starts_with(dir)).collect();
    points.sort_unstable();
    for point in points.iter().rev() {
        if let Err(e) = nix::mount::umount2(*point, nix::mount::MntFlags::MNT_DETACH) {
            eprintln!("umount {point}: {e}");
        }
    }
}

fn clean_cgroups(path: &str) {
    let cgroups = coracle::runtime::cgroup::Cgroups::detect("/").unwrap();
    if let Err(e) = cgroups.kill(path).and_then(|()| cgroups.remove(path)) {
        eprintln!("{path}: {e}");
    }
}
