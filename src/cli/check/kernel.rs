//! What the kernel can do, by trying it.

use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MemFdCreateFlag, memfd_create};

use super::{Finding, State};
use crate::net;
use crate::runtime::cgroup::{Cgroups, Layout};
use crate::sys::file::{self, Resolve};
use crate::sys::{mount as mounts, pidfd};

pub fn findings() -> Vec<Finding> {
    let mut found = vec![version()];
    found.extend(cgroups());
    found.extend(filesystems());
    found.extend(network());
    found.extend([bridge_netfilter(), seccomp(), pidfds(), openat2(), clone_mount(), memfd(), apparmor()]);
    found
}

fn version() -> Finding {
    const NAME: &str = "kernel";
    let release = match nix::sys::utsname::uname() {
        Ok(name) => name.release().to_string_lossy().into_owned(),
        Err(e) => return Finding::not(State::Missing, NAME, e.to_string(), "the kernel does not tell its version", ""),
    };
    if at_least(&release, (5, 10)) {
        Finding::ok(NAME, release)
    } else {
        Finding::not(State::Missing, NAME, release, "coracle needs Linux 5.10 or newer", "install a newer kernel")
    }
}

fn at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= wanted,
        _ => false,
    }
}

fn cgroups() -> Vec<Finding> {
    let cgroups = match Cgroups::detect("/") {
        Ok(cgroups) => cgroups,
        Err(e) => {
            return vec![Finding::not(
                State::Missing,
                "cgroups",
                crate::obs::chain(&e).to_string(),
                "no pod can run",
                "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
            )];
        }
    };
    let legacy = "pressure stall figures and killing a whole cgroup at once need v2";
    let v2 = "boot with systemd.unified_cgroup_hierarchy=1, or use an init that mounts cgroup2 alone";
    let mut found = vec![match cgroups.layout() {
        Layout::V2 => Finding::ok("cgroups", "v2"),
        Layout::Hybrid => Finding::not(State::Note, "cgroups", "v1 controllers beside v2 (hybrid)", legacy, v2),
        Layout::V1 => Finding::not(State::Note, "cgroups", "v1", legacy, v2),
    }];
    for lack in cgroups.lacks() {
        let (state, cure) = match lack.what {
            "memory controller" => (State::Degraded, memory_cure(lack.cure)),
            _ => (State::Degraded, lack.cure.to_owned()),
        };
        found.push(Finding { effect: lack.effect.to_owned(), cure, ..Finding::not(state, lack.what, "not there", "", "") });
    }
    if cgroups.lacks().is_empty() {
        found.push(Finding::ok("controllers", "cpu, memory, pids"));
    }
    found
}

/// On a Raspberry Pi the kernel's command line is a file, and the memory controller is off by
/// default.
fn memory_cure(otherwise: &str) -> String {
    let line = ["/boot/firmware/cmdline.txt", "/boot/cmdline.txt"].into_iter().find(|path| Path::new(path).is_file());
    match line {
        Some(path) => {
            format!("sed -i 's/$/ cgroup_enable=memory cgroup_memory=1/' {path} && reboot")
        }
        None => otherwise.to_owned(),
    }
}

/// tmpfs and overlay, in a mount namespace that ends with the thread that tried.
fn filesystems() -> Vec<Finding> {
    let tried = std::thread::Builder::new().name("probe".into()).spawn(try_mounts).map(std::thread::JoinHandle::join);
    match tried {
        Ok(Ok(findings)) => findings,
        Ok(Err(_)) => vec![Finding::not(State::Missing, "mounts", "the probe panicked", "this is a fault of coracle check", "")],
        Err(e) => vec![Finding::not(State::Missing, "mounts", e.to_string(), "no thread could be started", "")],
    }
}

fn try_mounts() -> Vec<Finding> {
    let own = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>));
    if let Err(e) = own {
        let cure = "run as root, on a kernel with CONFIG_NAMESPACES";
        return vec![Finding::not(State::Missing, "mount namespaces", e.desc(), "no container can run", cure)];
    }
    let base = Path::new("/tmp");
    if let Err(e) = mounts::tmpfs("probe", base, "mode=0700,size=1m") {
        return vec![Finding::not(
            State::Missing,
            "tmpfs",
            e.to_string(),
            "neither our run directory nor secrets can be mounted",
            "build the kernel with CONFIG_TMPFS",
        )];
    }
    let mut found = vec![Finding::ok("tmpfs", "mounts")];
    found.push(match try_overlay(base) {
        Ok(()) => Finding::ok("overlay", "mounts, and keeps what is written in the upper layer"),
        Err(e) => Finding::not(
            State::Missing,
            "overlay",
            e.to_string(),
            "no container can have a root file system",
            "modprobe overlay, or build the kernel with CONFIG_OVERLAY_FS",
        ),
    });
    found
}

fn try_overlay(base: &Path) -> io::Result<()> {
    let dir = |name: &str| -> io::Result<PathBuf> {
        let path = base.join(name);
        std::fs::create_dir(&path)?;
        Ok(path)
    };
    let (low, upper, work, merged) = (dir("low")?, dir("upper")?, dir("work")?, dir("merged")?);
    std::fs::write(low.join("file"), "below")?;
    mounts::overlay(&[&low], &upper, &work, &merged)?;
    std::fs::write(merged.join("file"), "above")?;
    let seen = std::fs::read_to_string(upper.join("file"))?;
    if seen == "above" { Ok(()) } else { Err(io::Error::other("what was written did not reach the upper layer")) }
}

fn network() -> Vec<Finding> {
    let lacks = match net::probe() {
        Ok(lacks) => lacks,
        Err(e) => {
            let cure = "run as root, on a kernel with CONFIG_NET_NS";
            return vec![Finding::not(
                State::Missing,
                "network",
                crate::obs::chain(&e).to_string(),
                "it could not be tried",
                cure,
            )];
        }
    };
    let features = [
        (net::model::Feature::Bridge, "bridge", State::Missing),
        (net::model::Feature::Veth, "veth", State::Missing),
        (net::model::Feature::Ipv6, "IPv6", State::Degraded),
        (net::model::Feature::NfTables, "nftables", State::Missing),
        (net::model::Feature::NatIpv4, "masquerade IPv4", State::Missing),
        (net::model::Feature::NatIpv6, "masquerade IPv6", State::Degraded),
        (net::model::Feature::FibIpv4, "nft_fib IPv4", State::Degraded),
        (net::model::Feature::FibIpv6, "nft_fib IPv6", State::Degraded),
        (net::model::Feature::Conntrack, "conntrack netlink", State::Degraded),
    ];
    let finding = |(feature, name, state)| match lacks.iter().find(|lack| lack.feature == feature) {
        Some(lack) => Finding::not(state, name, lack.said.clone(), lack.consequence, lack.cure),
        None => Finding::ok(name, "works"),
    };
    features.into_iter().map(finding).collect()
}

fn bridge_netfilter() -> Finding {
    const NAME: &str = "br_netfilter";
    match std::fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables") {
        Ok(text) if text.trim() == "1" => Finding::not(
            State::Note,
            NAME,
            "bridge-nf-call-iptables is 1 (docker or kubeadm set it)",
            "pods' ports are not isolated from each other on the bridge; policies still see all traffic",
            "",
        ),
        Ok(text) => Finding::ok(NAME, format!("bridge-nf-call-iptables is {}", text.trim())),
        Err(_) => Finding::ok(NAME, "not loaded; it is not needed"),
    }
}

fn seccomp() -> Finding {
    const NAME: &str = "seccomp";
    match std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail") {
        Ok(actions) if actions.split_whitespace().any(|a| a == "errno") => Finding::ok(NAME, "filters with errno"),
        Ok(actions) => Finding::not(
            State::Missing,
            NAME,
            actions.trim(),
            "containers have no system call filter",
            "build the kernel with CONFIG_SECCOMP_FILTER",
        ),
        Err(e) => Finding::not(
            State::Missing,
            NAME,
            e.to_string(),
            "containers have no system call filter",
            "build the kernel with CONFIG_SECCOMP_FILTER",
        ),
    }
}

fn pidfds() -> Finding {
    call("pidfd_open", pidfd::open(nix::unistd::getpid().as_raw()).map(drop), "processes cannot be watched and signalled safely")
}

fn openat2() -> Finding {
    let tried = file::open_dir_path(Path::new("/"))
        .and_then(|root| file::openat2(std::os::fd::AsFd::as_fd(&root), Path::new("proc"), OFlag::O_PATH, 0, Resolve::InRoot));
    call("openat2", tried.map(drop), "paths in images and volumes cannot be resolved safely")
}

fn clone_mount() -> Finding {
    match mounts::read_only_clone(Path::new("/proc/self/exe")) {
        Ok(_) => Finding::ok("mount_setattr", "our program is executed from a read-only clone"),
        Err(e) => Finding::not(
            State::Note,
            "mount_setattr",
            e.to_string(),
            "our program is executed from a sealed copy in memory, which costs its size once",
            "",
        ),
    }
}

fn memfd() -> Finding {
    let tried = memfd_create(c"probe", MemFdCreateFlag::MFD_CLOEXEC | MemFdCreateFlag::MFD_ALLOW_SEALING);
    call("memfd_create", tried.map(drop).map_err(io::Error::from), "our program cannot be protected from containers")
}

fn call(name: &'static str, tried: io::Result<()>, effect: &str) -> Finding {
    match tried {
        Ok(()) => Finding::ok(name, "works"),
        Err(e) => {
            Finding::not(State::Missing, name, e.to_string(), effect, "use Linux 5.10 or newer; no filter may forbid the call")
        }
    }
}

fn apparmor() -> Finding {
    const NAME: &str = "AppArmor";
    match std::fs::read_to_string("/sys/module/apparmor/parameters/enabled") {
        Ok(text) if text.trim() == "Y" => Finding::ok(NAME, "on"),
        _ => Finding::not(State::Note, NAME, "off or not there", "AppArmor profiles of pods cannot be applied", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_compare_as_numbers() {
        for (release, ok) in
            [("5.10.0-rpi", true), ("6.1.0-28-amd64", true), ("5.9.16", false), ("10.2", true), ("5.4", false), ("x", false)]
        {
            assert_eq!(at_least(release, (5, 10)), ok, "{release}");
        }
    }
}
