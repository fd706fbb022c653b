//! From what was seen to what it means: each lack named, what follows from it, and the line that
//! mends it. Pure.
//!
//! Invariant: `Missing` is what keeps ordinary pods from running, and nothing else: it alone makes
//! the exit code 1. What works less well, but works, is `Degraded`.
#![deny(clippy::disallowed_methods)]

use super::facts::{Facts, Place, Tried};
use super::{Finding, State};
use crate::api::time::WallTime;
use crate::cli::table;
use crate::net::model::Feature;
use crate::proxy;
use crate::runtime::cgroup::Layout;

pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = vec![user(facts), version(facts)];
    found.extend(cgroups(facts));
    found.extend(mounts(facts));
    found.extend(network(facts));
    found.extend(calls(facts));
    found.extend(capabilities(facts));
    found.extend([swap(facts), clock(facts)]);
    found.extend(inotify(facts));
    found.extend(state(&facts.state));
    found.push(disk("disk for logs", &facts.logs, "container logs cannot be kept"));
    found.push(propagation(facts));
    found
}

fn user(facts: &Facts) -> Finding {
    if facts.uid == 0 {
        return Finding::ok("user", "root");
    }
    let effect = "pods need root; most checks below cannot try anything";
    Finding::not(State::Missing, "user", format!("uid {}", facts.uid), effect, "sudo coracle check")
}

/// libcontainer makes every mount of a container by mount_setattr(2).
const FLOOR: (u32, u32) = (5, 12);

fn version(facts: &Facts) -> Finding {
    const NAME: &str = "kernel";
    if at_least(&facts.release, FLOOR) {
        Finding::ok(NAME, facts.release.clone())
    } else {
        let effect = "coracle needs Linux 5.12 or newer";
        Finding::not(State::Missing, NAME, facts.release.clone(), effect, "install a newer kernel")
    }
}

fn at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= wanted,
        _ => false,
    }
}

fn cgroups(facts: &Facts) -> Vec<Finding> {
    let (layout, lacks) = match &facts.cgroups {
        Ok(seen) => seen,
        Err(why) => {
            let cure = "mount -t cgroup2 cgroup2 /sys/fs/cgroup";
            return vec![Finding::not(State::Missing, "cgroups", why.clone(), "no pod can run", cure)];
        }
    };
    let legacy = "pressure stall figures and killing a whole cgroup at once need v2";
    let v2 = "boot with systemd.unified_cgroup_hierarchy=1, or use an init that mounts cgroup2 alone";
    let mut found = vec![match layout {
        Layout::V2 => Finding::ok("cgroups", "v2"),
        Layout::Hybrid => Finding::not(State::Note, "cgroups", "v1 controllers beside v2 (hybrid)", legacy, v2),
        Layout::V1 => Finding::not(State::Note, "cgroups", "v1", legacy, v2),
    }];
    for lack in lacks {
        // On a Raspberry Pi the kernel's command line is a file, and memory is off by default.
        let cure = match facts.command_line.filter(|_| lack.what == "memory controller") {
            Some(path) => format!("sed -i 's/$/ cgroup_enable=memory cgroup_memory=1/' {path} && reboot"),
            None => lack.cure.to_owned(),
        };
        found.push(Finding::not(State::Degraded, lack.what, "not there", lack.effect, &cure));
    }
    if lacks.is_empty() {
        found.push(Finding::ok("controllers", "cpu, memory, pids"));
    }
    found
}

fn mounts(facts: &Facts) -> Vec<Finding> {
    if let Err(why) = &facts.mount_namespace {
        let cure = "run as root, on a kernel with CONFIG_NAMESPACES";
        return vec![Finding::not(State::Missing, "mount namespaces", why.clone(), "no container can run", cure)];
    }
    if let Err(why) = &facts.tmpfs {
        let effect = "neither our run directory nor secrets can be mounted";
        return vec![Finding::not(State::Missing, "tmpfs", why.clone(), effect, "build the kernel with CONFIG_TMPFS")];
    }
    let overlay = match &facts.overlay {
        Ok(()) => Finding::ok("overlay", "mounts, and keeps what is written in the upper layer"),
        Err(why) => Finding::not(
            State::Missing,
            "overlay",
            why.clone(),
            "no container can have a root file system",
            "modprobe overlay, or build the kernel with CONFIG_OVERLAY_FS",
        ),
    };
    vec![Finding::ok("tmpfs", "mounts"), overlay]
}

fn network(facts: &Facts) -> Vec<Finding> {
    const FEATURES: [(Feature, &str, State); 4] = [
        (Feature::Bridge, "bridge", State::Missing),
        (Feature::Veth, "veth", State::Missing),
        (Feature::Ipv6, "IPv6", State::Degraded),
        (Feature::Conntrack, "conntrack netlink", State::Degraded),
    ];
    let mut found: Vec<Finding> = match &facts.network {
        Err(why) => {
            let cure = "run as root, on a kernel with CONFIG_NET_NS";
            vec![Finding::not(State::Missing, "network", why.clone(), "no pod can have a network of its own", cure)]
        }
        Ok(lacks) => FEATURES
            .into_iter()
            .map(|(feature, name, state)| match lacks.iter().find(|lack| lack.feature == feature) {
                Some(lack) => Finding::not(state, name, lack.said.clone(), lack.consequence, lack.cure),
                None => Finding::ok(name, "works"),
            })
            .collect(),
    };
    found.extend(packet_filter(facts));
    found.push(match facts.bridge_netfilter.as_deref() {
        Some("1") => Finding::not(
            State::Note,
            "br_netfilter",
            "bridge-nf-call-iptables is 1 (docker or kubeadm set it)",
            "pods' ports are not isolated from each other on the bridge; policies still see all traffic",
            "",
        ),
        Some(other) => Finding::ok("br_netfilter", format!("bridge-nf-call-iptables is {other}")),
        None => Finding::ok("br_netfilter", "not loaded; it is not needed"),
    });
    found
}

/// What the proxy's tables need, and who else has tables.
fn packet_filter(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<Finding> = match &facts.packet_filter {
        Err(why) => {
            let cure = "run as root, on a kernel with CONFIG_NET_NS";
            vec![Finding::not(State::Degraded, "nftables", why.clone(), "it could not be tried", cure)]
        }
        Ok(lacks) => proxy::lacks::Feature::all()
            .map(|feature| match lacks.iter().find(|lack| lack.feature == feature) {
                Some(lack) => Finding::not(State::Degraded, feature.name(), lack.said.clone(), lack.consequence, lack.cure),
                None => Finding::ok(feature.name(), "works"),
            })
            .collect(),
    };
    if let Some(chain) = &facts.foreign.drops_forwarded {
        let said = format!("chain {} of nftables table {} drops what it does not accept", chain.name, chain.table);
        let lack = proxy::lacks::lack(proxy::lacks::Feature::Forwarding, said);
        found.push(Finding::not(State::Degraded, lack.feature.name(), lack.said, lack.consequence, lack.cure));
    }
    found.extend(tracking(facts));
    if let Some(seen) = facts.foreign.kube_proxy_seen() {
        found.push(Finding::not(
            State::Note,
            "kube-proxy",
            format!("there is {seen}"),
            "Services are left to that kube-proxy, unless the agent runs with --proxy=on",
            "stop kube-proxy on this node and run kube-proxy --cleanup; within 20 s the agent serves Services",
        ));
    }
    found
}

/// None where connection tracking is not loaded: the agent's table loads it.
fn tracking(facts: &Facts) -> Option<Finding> {
    const NAME: &str = "connection tracking";
    let proxy::tuning::Seen { max, established, close_wait, .. } = facts.tracking;
    let (max, established, close_wait) = (max?, established?, close_wait?);
    let seen = format!("room for {max} connections, established kept for {established} s, close_wait for {close_wait} s");
    if facts.tracking_writable {
        return Some(Finding::ok(NAME, seen));
    }
    let effect = "the agent cannot set them for Services: /proc/sys is read-only here";
    let cure =
        "sysctl -w net.netfilter.nf_conntrack_max=131072 net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600, on the host";
    Some(Finding::not(State::Note, NAME, seen, effect, cure))
}

fn calls(facts: &Facts) -> Vec<Finding> {
    let call = |name, tried: &Tried, effect: &str| match tried {
        Ok(()) => Finding::ok(name, "works"),
        Err(why) => {
            let cure = "use Linux 5.12 or newer; no seccomp filter around coracle may forbid the call";
            Finding::not(State::Missing, name, why.clone(), effect, cure)
        }
    };
    let no_filter = |seen: &str| {
        let (effect, cure) = (
            "containers get no system call filter, so those that ask for RuntimeDefault cannot start",
            "build the kernel with CONFIG_SECCOMP_FILTER, or run coracle agent --seccomp-default=false",
        );
        Finding::not(State::Missing, "seccomp", seen, effect, cure)
    };
    let apparmor = if facts.apparmor {
        Finding::ok("AppArmor", "on")
    } else {
        Finding::not(State::Note, "AppArmor", "off or not there", "AppArmor profiles of pods cannot be applied", "")
    };
    vec![
        match &facts.seccomp {
            Ok(actions) if actions.split_whitespace().any(|a| a == "errno") => Finding::ok("seccomp", "filters with errno"),
            Ok(actions) => no_filter(actions),
            Err(why) => no_filter(why),
        },
        call("pidfd_open", &facts.pidfd, "processes cannot be watched and signalled safely"),
        call("openat2", &facts.openat2, "paths in images and volumes cannot be resolved safely"),
        call("mount_setattr", &facts.mount_setattr, "no container's mounts can be made"),
        call("memfd_create", &facts.memfd, "our program cannot be protected from containers"),
        apparmor,
    ]
}

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

fn capabilities(facts: &Facts) -> Vec<Finding> {
    let Some(held) = facts.capabilities else {
        let (seen, effect) = ("/proc/self/status tells none", "nothing can be seen of the host or of pods");
        return vec![Finding::not(State::Missing, "capabilities", seen, effect, "mount -t proc proc /proc")];
    };
    let lacking: Vec<&str> = NEEDED.iter().filter(|(bit, _)| held & (1 << bit) == 0).map(|(_, name)| *name).collect();
    let first = if lacking.is_empty() {
        Finding::ok("capabilities", "all that pods need")
    } else {
        let cure = "run as root and without a bounding set (CapabilityBoundingSet=, docker's default set)";
        Finding::not(State::Missing, "capabilities", format!("without {}", lacking.join(", ")), "containers cannot be made", cure)
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

fn swap(facts: &Facts) -> Finding {
    if facts.swap_devices == 0 {
        return Finding::ok("swap", "none");
    }
    let effect =
        "a pod over its memory limit may be slow for a while before it is killed; a stock kubelet refuses to start with swap";
    Finding::not(State::Note, "swap", format!("{} in use", facts.swap_devices), effect, "")
}

fn clock(facts: &Facts) -> Finding {
    let now = WallTime(facts.now);
    // Certificates of registries are not valid in 1970.
    if now.0 > 1_700_000_000_000_000_000 {
        return Finding::ok("clock", now.seconds());
    }
    let effect = "images cannot be pulled over HTTPS until the clock is right";
    Finding::not(State::Degraded, "clock", now.seconds(), effect, "set the clock, or wait for NTP")
}

fn inotify(facts: &Facts) -> Vec<Finding> {
    let limit = |name, file: &str, seen: Option<u64>, enough: u64| match seen {
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
            format!("/proc/sys/fs/inotify/{file} cannot be read"),
            "manifests are looked at only every 20 s",
            "build the kernel with CONFIG_INOTIFY_USER",
        ),
    };
    vec![
        limit("inotify instances", "max_user_instances", facts.inotify_instances, 128),
        limit("inotify watches", "max_user_watches", facts.inotify_watches, 8192),
    ]
}

/// The state directory: room, and what containers' writable layers take.
fn state(place: &Place) -> Vec<Finding> {
    let mut found = vec![disk("disk for images", place, "images cannot be unpacked")];
    // Without room nothing can be tried, and that is told already.
    let roomy = found.iter().all(|f| f.state < State::Missing);
    let kind = file_system(place.kind);
    match place.layers.as_ref().filter(|_| roomy) {
        Some(Err(why)) => found.push(Finding::not(
            State::Missing,
            "writable layers",
            format!("{why} on {} ({kind})", place.at),
            "this file system cannot hold the upper layer of an overlay, so no container can start",
            "put it on ext4, xfs, btrfs or f2fs: mount one there (in a container: a volume), or --root DIR",
        )),
        Some(Ok(())) if matches!(kind, "tmpfs" | "ramfs") => found.push(Finding::not(
            State::Note,
            "writable layers",
            format!("{} is a {kind}", place.at),
            "images, restart counts and exits are gone after a reboot, and all of it takes memory",
            "mount a disk there, or --root DIR",
        )),
        Some(Ok(())) => found.push(Finding::ok("writable layers", format!("on {} ({kind})", place.at))),
        None => {}
    }
    found
}

fn disk(name: &'static str, place: &Place, effect: &str) -> Finding {
    let at = &place.at;
    if let Err(why) = &place.writable {
        let cure = if why.contains("ead-only") {
            format!("mount -o remount,rw \"$(findmnt -no TARGET -T {at})\", or move it: --root DIR")
        } else {
            format!("run as root, or move it: --root DIR (ls -ld {at})")
        };
        return Finding::not(State::Missing, name, format!("{at} cannot be written to: {why}"), effect, &cure);
    }
    let free = match &place.free {
        Ok(free) => *free,
        Err(why) => return Finding::not(State::Missing, name, format!("{at}: {why}"), "it could not be looked at", ""),
    };
    let seen = format!("{} free on {at}", table::bytes(free));
    let cure = format!("make room there, or move it: --root DIR (df -h {at})");
    if let Some(inodes) = place.free_inodes.filter(|n| *n < 10_000) {
        let state = if inodes < 1000 { State::Missing } else { State::Degraded };
        let cure = format!("remove files there, or move it: --root DIR (df -i {at})");
        return Finding::not(state, name, format!("{inodes} inodes free on {at}"), effect, &cure);
    }
    match free {
        0..100_000_000 => Finding::not(State::Missing, name, seen, effect, &cure),
        100_000_000..1_000_000_000 => Finding::not(State::Degraded, name, seen, "larger images may not fit", &cure),
        _ => Finding::ok(name, seen),
    }
}

/// Of linux/magic.h, what people put a node on.
fn file_system(magic: i64) -> &'static str {
    match magic & 0xffff_ffff {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0xf2f5_2010 => "f2fs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x4d44 => "vfat",
        0x2011_bab0 => "exfat",
        0x6969 => "nfs",
        0x794c_7630 => "overlay",
        0x6573_5546 => "fuse",
        0x7371_7368 | 0x7371_7366 => "squashfs",
        _ => "a file system that we do not know by name",
    }
}

fn propagation(facts: &Facts) -> Finding {
    const NAME: &str = "mount propagation";
    if facts.kubelet_shared {
        return Finding::ok(NAME, "shared");
    }
    Finding::not(
        State::Note,
        NAME,
        "the mount that volumes lie on is private",
        "the agent shares its own volumes' directory by itself; a hostPath elsewhere with mountPropagation stays refused",
        "mount --make-rshared /",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::lacks::lack;
    use crate::proxy::table::ir::Family;
    use crate::proxy::table::needs::Need;
    use crate::runtime::cgroup::Lack;

    fn place() -> Place {
        Place {
            at: "/var/lib".into(),
            kind: 0xef53,
            free: Ok(10_000_000_000),
            free_inodes: Some(1_000_000),
            writable: Ok(()),
            layers: Some(Ok(())),
        }
    }

    /// A host that has everything.
    fn whole() -> Facts {
        Facts {
            uid: 0,
            release: "6.1.0-28-amd64".into(),
            cgroups: Ok((Layout::V2, Vec::new())),
            command_line: None,
            mount_namespace: Ok(()),
            tmpfs: Ok(()),
            overlay: Ok(()),
            network: Ok(Vec::new()),
            packet_filter: Ok(Vec::new()),
            foreign: proxy::observe::Foreign::default(),
            tracking: proxy::tuning::Seen {
                max: Some(262_144),
                established: Some(86_400),
                close_wait: Some(3_600),
                liberal: Some(0),
            },
            tracking_writable: true,
            bridge_netfilter: None,
            seccomp: Ok("kill_process errno allow".into()),
            pidfd: Ok(()),
            openat2: Ok(()),
            mount_setattr: Ok(()),
            memfd: Ok(()),
            apparmor: true,
            capabilities: Some(u64::MAX),
            swap_devices: 0,
            now: 1_900_000_000_000_000_000,
            inotify_instances: Some(128),
            inotify_watches: Some(8192),
            state: place(),
            logs: Place { layers: None, ..place() },
            kubelet_shared: true,
        }
    }

    #[test]
    fn a_host_that_has_everything_has_nothing_to_mend() {
        let found = findings(&whole());
        let not: Vec<_> = found.iter().filter(|f| f.state != State::Ok).collect();
        assert!(not.is_empty(), "{not:?}");
    }

    /// What is changed, the name of the one finding that it makes, its state, a part of its cure.
    type Case = (fn(&mut Facts), &'static str, State, &'static str);

    fn no() -> Tried {
        Err("no".into())
    }

    fn pids() -> Lack {
        Lack { what: "pids controller", effect: "a fork bomb", cure: "CONFIG_CGROUP_PIDS" }
    }

    fn memory() -> Lack {
        Lack { what: "memory controller", effect: "no limits", cure: "add it to the command line" }
    }

    fn without(facts: &mut Facts, feature: Feature) {
        facts.network = Ok(vec![lack(feature, "no".into())]);
    }

    fn lacking(facts: &mut Facts, need: Need, family: Family) {
        let feature = proxy::lacks::Feature::Table { family, need };
        facts.packet_filter = Ok(vec![proxy::lacks::lack(feature, "no".into())]);
    }

    #[test]
    fn each_lack_is_named_with_its_weight_and_its_cure() {
        use State::{Degraded, Missing, Note};
        const CASES: &[Case] = &[
            (|f| f.uid = 1000, "user", Missing, "sudo coracle check"),
            (|f| f.release = "5.10.0-rpi".into(), "kernel", Missing, "newer kernel"),
            (|f| f.cgroups = Err("not mounted".into()), "cgroups", Missing, "mount -t cgroup2 cgroup2 /sys/fs/cgroup"),
            (|f| f.cgroups = Ok((Layout::V1, vec![])), "cgroups", Note, "systemd.unified_cgroup_hierarchy=1"),
            (|f| f.cgroups = Ok((Layout::V2, vec![pids()])), "pids controller", Degraded, "CONFIG_CGROUP_PIDS"),
            (|f| f.cgroups = Ok((Layout::V2, vec![memory()])), "memory controller", Degraded, "add it to the command line"),
            (
                |f| (f.cgroups, f.command_line) = (Ok((Layout::V2, vec![memory()])), Some("/boot/cmdline.txt")),
                "memory controller",
                Degraded,
                "cgroup_enable=memory cgroup_memory=1/' /boot/cmdline.txt && reboot",
            ),
            (|f| f.mount_namespace = no(), "mount namespaces", Missing, "CONFIG_NAMESPACES"),
            (|f| f.tmpfs = no(), "tmpfs", Missing, "CONFIG_TMPFS"),
            (|f| f.overlay = no(), "overlay", Missing, "modprobe overlay"),
            (|f| f.network = Err("no".into()), "network", Missing, "CONFIG_NET_NS"),
            (|f| without(f, Feature::Bridge), "bridge", Missing, "modprobe bridge"),
            (|f| without(f, Feature::Veth), "veth", Missing, "modprobe veth"),
            (|f| without(f, Feature::Ipv6), "IPv6", Degraded, "disable_ipv6=0"),
            (
                |f| f.packet_filter = Ok(vec![proxy::lacks::lack(proxy::lacks::Feature::NfTables, "no".into())]),
                "nftables",
                Degraded,
                "modprobe nf_tables",
            ),
            (|f| lacking(f, Need::Nat, Family::Ip), "masquerade IPv4", Degraded, "modprobe -a nft_chain_nat"),
            (|f| lacking(f, Need::Nat, Family::Ip6), "masquerade IPv6", Degraded, "modprobe -a nft_chain_nat"),
            (|f| lacking(f, Need::Fib, Family::Ip), "nft_fib IPv4", Degraded, "modprobe nft_fib_ipv4"),
            (|f| lacking(f, Need::Fib, Family::Ip6), "nft_fib IPv6", Degraded, "modprobe nft_fib_ipv6"),
            (|f| without(f, Feature::Conntrack), "conntrack netlink", Degraded, "modprobe nf_conntrack_netlink"),
            (|f| f.bridge_netfilter = Some("1".into()), "br_netfilter", Note, ""),
            (|f| f.seccomp = Err("no".into()), "seccomp", Missing, "CONFIG_SECCOMP_FILTER"),
            (|f| f.seccomp = Ok("kill_thread allow".into()), "seccomp", Missing, "CONFIG_SECCOMP_FILTER"),
            (|f| f.pidfd = no(), "pidfd_open", Missing, "5.12"),
            (|f| f.openat2 = no(), "openat2", Missing, "5.12"),
            (|f| f.mount_setattr = no(), "mount_setattr", Missing, "5.12"),
            (|f| f.memfd = no(), "memfd_create", Missing, "5.12"),
            (|f| f.apparmor = false, "AppArmor", Note, ""),
            (|f| f.capabilities = None, "capabilities", Missing, "mount -t proc proc /proc"),
            (|f| f.capabilities = Some(!(1 << 12)), "capabilities", Missing, "bounding set"),
            (|f| f.capabilities = Some(!(1 << 24)), "CAP_SYS_RESOURCE", Degraded, "give it"),
            (|f| f.swap_devices = 1, "swap", Note, ""),
            (|f| f.now = 0, "clock", Degraded, "NTP"),
            (|f| f.inotify_instances = Some(8), "inotify instances", Degraded, "sysctl -w fs.inotify.max_user_instances=512"),
            (|f| f.inotify_watches = None, "inotify watches", Degraded, "CONFIG_INOTIFY_USER"),
            (|f| f.state.free = Ok(5), "disk for images", Missing, "df -h /var/lib"),
            (|f| f.state.free = Ok(500_000_000), "disk for images", Degraded, "df -h /var/lib"),
            (|f| f.state.free_inodes = Some(5), "disk for images", Missing, "df -i /var/lib"),
            (|f| f.state.free_inodes = Some(5000), "disk for images", Degraded, "df -i /var/lib"),
            (|f| f.state.layers = Some(no()), "writable layers", Missing, "ext4, xfs, btrfs or f2fs"),
            (|f| f.state.kind = 0x0102_1994, "writable layers", Note, "mount a disk there"),
            (
                |f| f.logs.writable = Err("Read-only file system".into()),
                "disk for logs",
                Missing,
                "mount -o remount,rw \"$(findmnt -no TARGET -T /var/lib)\"",
            ),
            (|f| f.logs.writable = Err("Permission denied".into()), "disk for logs", Missing, "run as root"),
            (|f| f.kubelet_shared = false, "mount propagation", Note, "mount --make-rshared /"),
        ];
        for (n, (change, name, state, cure)) in CASES.iter().enumerate() {
            let mut facts = whole();
            change(&mut facts);
            let found = findings(&facts);
            let not: Vec<&Finding> = found.iter().filter(|f| f.state != State::Ok).collect();
            let [only] = not.as_slice() else { panic!("case {n}, {name}: {not:?}") };
            assert_eq!((only.name, only.state), (*name, *state), "case {n}: {only:?}");
            assert!(only.cure.contains(cure) && (cure.is_empty() == only.cure.is_empty()), "case {n}: {only:?}");
            assert!(!only.effect.is_empty() && !only.detail.is_empty(), "case {n}: {only:?}");
        }
    }

    #[test]
    fn kernel_releases_compare_as_numbers() {
        for (release, ok) in
            [("5.12.0-rpi", true), ("6.1.0-28-amd64", true), ("5.9.16", false), ("10.2", true), ("5.4", false), ("x", false)]
        {
            assert_eq!(at_least(release, FLOOR), ok, "{release}");
        }
    }
}
