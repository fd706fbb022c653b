//! What a container's create does to paths, while a neighbour that shares a volume exchanges them
//! for links into /proc (CVE-2025-31133, -52565, -52881).
//!
//! A create may fail or succeed; no container ever has a writable file of the host's kernel, or a
//! piece of /proc anywhere but in /proc. 100 races in `make test`, 5,000 in `make soak`.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{RenameFlags, renameat2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::world::*;

/// Opens and writes nothing: were it to succeed, the host would be unharmed.
const SCRIPT: &str = "for file in /proc/sysrq-trigger /proc/sys/kernel/core_pattern; do (: >>$file) 2>/dev/null && echo open $file; done; \
                      head -c 1 /proc/kcore 2>/dev/null | wc -c; while read line; do echo mount $line; done </proc/self/mountinfo";

/// (ours, the link that takes its place now and then)
const EXCHANGED: [(&str, &str); 5] = [
    ("null", "/proc/sys/kernel/core_pattern"),
    ("console", "/proc/sysrq-trigger"),
    ("pts", "/proc/sys"),
    ("masked", "/proc/sys/kernel"),
    ("read-only", "/proc/sys/kernel"),
];

#[test]
fn racing_links_never_open_the_hosts_kernel() {
    if !able() {
        return;
    }
    let rounds = if std::env::var_os("CORACLE_SOAK").is_some() { 5_000 } else { 100 };
    let mut world = World::new();
    world.run_sandbox(1);
    let shared = world.root.join("shared");
    for dir in ["pts", "masked", "read-only", "shm", "links"] {
        fs::create_dir_all(shared.join(dir)).unwrap();
    }
    mknod(&shared.join("null"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3)).unwrap();
    fs::write(shared.join("console"), "").unwrap();
    for (name, target) in EXCHANGED {
        symlink(target, shared.join("links").join(name)).unwrap();
    }
    let (here, links) = (File::open(&shared).unwrap(), File::open(shared.join("links")).unwrap());
    let done = AtomicBool::new(false);
    /// Ends the exchanges also where an assertion fails.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (mut ran, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let _end = End(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (name, _) in EXCHANGED {
                    // A mount on it, for a moment in a container's namespace only, refuses nothing here.
                    renameat2(Some(here.as_raw_fd()), name, Some(links.as_raw_fd()), name, RenameFlags::RENAME_EXCHANGE).unwrap();
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            }
        });
        for n in 1..=rounds {
            let mut spec = world.container(1, n, &["sh", "-c", SCRIPT]);
            // Half of them with the volume for their /dev.
            spec.oci = racing(&spec.oci, &shared, n % 2 == 0);
            let made = world.runtime().create_container(&spec);
            match made.and_then(|()| world.runtime().start_container(&uid(1), &id(n)).map(drop)) {
                Ok(()) => {
                    world.exit(n);
                    ran += 1;
                    check(&world.lines(n));
                }
                Err(_) => refused += 1,
            }
            world.runtime().remove_container(&uid(1), &id(n)).unwrap();
            fs::remove_dir_all(world.root.join(format!("upper/{n}"))).unwrap();
        }
    });
    println!("{rounds} races: {ran} containers ran, {refused} were refused, 0 with a way out");
    assert!(ran > 0, "no container ran: no race was run");
}

fn racing(oci: &oci_spec::runtime::Spec, shared: &Path, as_dev: bool) -> oci_spec::runtime::Spec {
    let mut oci = serde_json::to_value(oci).unwrap();
    let bind = |to: &str| serde_json::json!({"destination": to, "type": "bind", "source": shared, "options": ["rbind", "rprivate", "rw"]});
    let mounts = oci["mounts"].as_array_mut().unwrap();
    if as_dev {
        let dev = mounts.iter_mut().find(|mount| mount["destination"] == "/dev").unwrap();
        *dev = bind("/dev");
    }
    mounts.push(bind("/data"));
    // A mount below the volume: its destination is one of those that change.
    mounts.push(serde_json::json!({"destination": "/data/pts", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}));
    oci["linux"]["maskedPaths"] = serde_json::json!(["/proc/kcore", "/data/masked", "/data/console"]);
    oci["linux"]["readonlyPaths"] = serde_json::json!(["/proc/sys", "/proc/sysrq-trigger", "/data/read-only"]);
    serde_json::from_value(oci).unwrap()
}

fn check(lines: &[String]) {
    let lines: Vec<&str> = lines.iter().filter_map(|line| line.splitn(3, ' ').nth(2)).collect();
    assert!(!lines.iter().any(|line| line.starts_with("open ")), "{lines:#?}");
    assert!(lines.contains(&"0"), "kcore can be read: {lines:#?}");
    for mount in lines.iter().filter_map(|line| line.strip_prefix("mount ")) {
        let (left, right) = mount.split_once(" - ").unwrap();
        let left: Vec<&str> = left.split(' ').collect();
        if right.starts_with("proc ") {
            let place = format!("/proc{}", left[3].trim_end_matches('/'));
            assert_eq!(left[4], place, "a piece of /proc elsewhere: {lines:#?}");
        }
    }
}
