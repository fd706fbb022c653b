//! What the host gives us: rights, limits, disk.

use std::path::{Path, PathBuf};

use super::{Finding, State};
use crate::config::Roots;
use crate::sys::file;

/// Named in linux/capability.h; what we cannot do without.
const NEEDED: [(u32, &str); 15] = [
    (0, "CHOWN"),
    (1, "DAC_OVERRIDE"),
    (3, "FOWNER"),
    (4, "FSETID"),
    (5, "KILL"),
    (6, "SETGID"),
    (7, "SETUID"),
    (8, "SETPCAP"),
    (10, "NET_BIND_SERVICE"),
    (12, "NET_ADMIN"),
    (13, "NET_RAW"),
    (18, "SYS_CHROOT"),
    (21, "SYS_ADMIN"),
    (27, "MKNOD"),
    (31, "SETFCAP"),
];
const SYS_RESOURCE: u32 = 24;

pub fn findings(roots: &Roots) -> Vec<Finding> {
    let mut found = capabilities();
    found.extend([swap(), clock()]);
    found.extend(inotify());
    found.extend([("state", &roots.state), ("logs", &roots.logs)].map(|(name, path)| disk(name, path)));
    found
}

pub fn root() -> Finding {
    let uid = nix::unistd::geteuid();
    if uid.is_root() {
        Finding::ok("user", "root")
    } else {
        Finding::not(
            State::Missing,
            "user",
            format!("uid {uid}"),
            "pods need root; most checks below cannot try anything",
            "sudo coracle check",
        )
    }
}

fn capabilities() -> Vec<Finding> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let Some(held) = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()) else {
        return vec![Finding::not(
            State::Missing,
            "capabilities",
            "/proc/self/status tells none",
            "is /proc mounted?",
            "mount -t proc proc /proc",
        )];
    };
    let lacking: Vec<&str> = NEEDED.iter().filter(|(bit, _)| held & (1 << bit) == 0).map(|(_, name)| *name).collect();
    let first = if lacking.is_empty() {
        Finding::ok("capabilities", "all that pods need")
    } else {
        Finding::not(
            State::Missing,
            "capabilities",
            format!("without {}", lacking.join(", ")),
            "containers cannot be made",
            "run as root and without a bounding set (CapabilityBoundingSet=, docker's default set)",
        )
    };
    let second = if held & (1 << SYS_RESOURCE) != 0 {
        Finding::ok("CAP_SYS_RESOURCE", "held")
    } else {
        Finding::not(
            State::Degraded,
            "CAP_SYS_RESOURCE",
            "withheld",
            "oom_score_adj cannot be lowered and rlimits not raised: guaranteed pods are not kept from the OOM killer",
            "give it to the service or virtual machine that coracle runs in",
        )
    };
    vec![first, second]
}

fn swap() -> Finding {
    let devices = std::fs::read_to_string("/proc/swaps").unwrap_or_default().lines().skip(1).count();
    if devices == 0 {
        Finding::ok("swap", "none")
    } else {
        Finding::not(
            State::Note,
            "swap",
            format!("{devices} in use"),
            "a pod over its memory limit may be slow for a while before it is killed; a stock kubelet refuses to start with swap",
            "",
        )
    }
}

fn clock() -> Finding {
    let now = crate::api::time::WallTime(crate::sys::clock::wall_nanos());
    // Certificates of registries are not valid in 1970.
    if now.0 > 1_700_000_000_000_000_000 {
        Finding::ok("clock", now.seconds())
    } else {
        Finding::not(
            State::Degraded,
            "clock",
            now.seconds(),
            "images cannot be pulled over HTTPS until the clock is right",
            "set the clock, or wait for NTP",
        )
    }
}

fn inotify() -> Vec<Finding> {
    let limit = |name: &'static str, file: &str, enough: u64| {
        let path = format!("/proc/sys/fs/inotify/{file}");
        match std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok()) {
            Some(value) if value >= enough => Finding::ok(name, value.to_string()),
            Some(value) => Finding::not(
                State::Degraded,
                name,
                value.to_string(),
                "many pods that watch files may see \"too many open files\"",
                &format!("sysctl -w fs.inotify.{file}={}", enough * 4),
            ),
            None => Finding::not(
                State::Degraded,
                name,
                format!("{path} is not there"),
                "manifests are looked at only every 20 s",
                "build the kernel with CONFIG_INOTIFY_USER",
            ),
        }
    };
    vec![limit("inotify instances", "max_user_instances", 128), limit("inotify watches", "max_user_watches", 8192)]
}

/// Free space of the file system that `path` lies on, or will.
fn disk(name: &'static str, path: &Path) -> Finding {
    let name = if name == "state" { "disk for images" } else { "disk for logs" };
    let mut at = PathBuf::from(path);
    while !at.exists() && at.pop() {}
    let free = match file::free_bytes(&at) {
        Ok(free) => free,
        Err(e) => return Finding::not(State::Missing, name, format!("{}: {e}", at.display()), "it could not be looked at", ""),
    };
    let seen = format!("{} free on {}", super::table::bytes(free), at.display());
    let cure = format!("make room there, or move it: --root DIR (df -h {})", at.display());
    match free {
        0..100_000_000 => Finding::not(State::Missing, name, seen, "images cannot be unpacked", &cure),
        100_000_000..1_000_000_000 => Finding::not(State::Degraded, name, seen, "larger images may not fit", &cure),
        _ => Finding::ok(name, seen),
    }
}
