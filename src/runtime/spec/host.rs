//! What this host lets us hand on to containers, read once at start.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Plain facts; [`super::container_spec`] only looks at these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Names (without `CAP_`) of the capabilities in our own bounding set.
    pub capabilities: Vec<String>,
    /// Lowest oom_score_adj that we may set; lower values are clamped to it.
    pub oom_floor: i32,
    /// Device nodes below /dev, for privileged containers.
    pub devices: Vec<HostDevice>,
    /// CPUs that the kernel counts.
    pub cpus: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    pub path: PathBuf,
    pub block: bool,
    pub major: u32,
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// By number, capability.h. A number beyond is newer than this program and is not handed on.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

impl HostFacts {
    /// Reads /proc and walks /dev.
    pub fn observe() -> io::Result<HostFacts> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let bounding = status
            .lines()
            .find_map(|line| line.strip_prefix("CapBnd:"))
            .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .unwrap_or(0);
        let has = |name: &str| CAPABILITIES.iter().position(|c| *c == name).is_some_and(|bit| bounding >> bit & 1 == 1);
        let oom_floor = if has("SYS_RESOURCE") {
            -1000
        } else {
            // Raising is free, and back down to what it was at the start: the last floor is ours.
            std::fs::read_to_string("/proc/self/oom_score_adj")?.trim().parse().map_err(io::Error::other)?
        };
        let mut devices = Vec::new();
        walk(Path::new("/dev"), &mut devices)?;
        devices.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(HostFacts {
            capabilities: CAPABILITIES.iter().filter(|c| has(c)).map(|c| (*c).to_owned()).collect(),
            oom_floor,
            devices,
            cpus: possible_cpus(&std::fs::read_to_string("/sys/devices/system/cpu/possible")?),
        })
    }
}

/// What containers have of their own, or must not have, is skipped as runc does.
fn walk(dir: &Path, devices: &mut Vec<HostDevice>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        // Removed meanwhile: devices come and go.
        let Ok(meta) = entry.metadata() else { continue };
        let kind = meta.file_type();
        if kind.is_dir() {
            let own = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];
            if !own.iter().any(|o| name == *o) {
                walk(&entry.path(), devices)?;
            }
        } else if (kind.is_block_device() || kind.is_char_device()) && name != "console" {
            devices.push(HostDevice {
                path: entry.path(),
                block: kind.is_block_device(),
                major: libc::major(meta.rdev()),
                minor: libc::minor(meta.rdev()),
                mode: meta.mode() & 0o7777,
                uid: meta.uid(),
                gid: meta.gid(),
            });
        }
    }
    Ok(())
}

/// `0-3,8-11`: the count up to the highest number.
fn possible_cpus(list: &str) -> u32 {
    list.trim()
        .rsplit([',', '-'])
        .next()
        .and_then(|last| last.parse::<u32>().ok())
        .map_or(1, |last| last.saturating_add(1).min(8192))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_can_be_read() {
        let facts = HostFacts::observe().unwrap();
        assert!(facts.devices.iter().any(|d| d.path == Path::new("/dev/null") && (d.major, d.minor) == (1, 3)));
        assert!(!facts.devices.iter().any(|d| d.path.starts_with("/dev/pts")));
        assert!(facts.cpus >= 1);
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(possible_cpus("0-3\n"), 4);
        assert_eq!(possible_cpus("0\n"), 1);
        assert_eq!(possible_cpus("0-1,4-7"), 8);
        assert_eq!(possible_cpus(""), 1);
    }
}
