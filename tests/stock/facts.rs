//! What a container sees of itself: one shell script run inside, and its output taken apart into
//! facts that two runtimes can be compared by.

use std::collections::BTreeMap;

/// Prints everything, ends with `== end`. `$$` is the shell, which has what the container has.
pub const SCRIPT: &str = r#"
echo "== status"; cat /proc/$$/status
echo "== limits"; cat /proc/$$/limits
echo "== oom_score_adj"; cat /proc/$$/oom_score_adj
echo "== umask"; umask
echo "== cwd"; pwd
echo "== environ"; tr '\0' '\n' </proc/$$/environ
echo "== cmdline"; tr '\0' '\n' </proc/$$/cmdline | head -n 2
echo "== mountinfo"; cat /proc/$$/mountinfo
echo "== cgroup"; cat /proc/$$/cgroup
echo "== cgroupfs"
for f in cpu/cpu.shares cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us memory/memory.limit_in_bytes \
  memory/memory.memsw.limit_in_bytes pids/pids.max devices/devices.list cpuset/cpuset.cpus \
  cpu.max cpu.weight memory.max memory.swap.max memory.oom.group pids.max; do
  [ -e /sys/fs/cgroup/$f ] && echo "$f $(cat /sys/fs/cgroup/$f | sort | tr '\n' ' ')"
done
echo "== dev"; find /dev -path /dev/shm -prune -o -path /dev/mqueue -prune -o -exec stat -c '%n %F %a %u %g %t:%T' {} +
echo "== links"; for l in fd stdin stdout stderr ptmx core; do stat -c %N /dev/$l 2>&1; done
echo "== fds"; for fd in /proc/$$/fd/*; do echo ${fd##*/}; done
echo "== namespaces"; for n in net ipc uts pid mnt user cgroup time; do stat -L -c "$n %i" /proc/$$/ns/$n; done
echo "== pid"; [ $$ = 1 ] && echo first || echo later
echo "== able"
try() { if "$@" >/dev/null 2>&1; then echo "$* yes"; else echo "$* no"; fi; }
try cat /proc/kcore_is_a_file_but_not_read; try ls /proc/acpi; try head -c 1 /proc/keys; try ls /sys/firmware/acpi
try mkdir /made; try touch /etc/hosts; try touch /proc/sys/kernel/domainname; try mknod /tmp/node b 8 0
try head -c 1 /tmp/node; try mount -t tmpfs none /tmp; try unshare -U true; try unshare -n true; try unshare -m true
try chroot / /bin/true; try mkdir /sys/fs/cgroup/cpu/sub; try mkdir /sys/fs/cgroup/sub
try touch /sys/kernel/uevent_helper; try head -c 1 /dev/zero; try head -c 1 /dev/kmsg
echo "== calls"; probe --ignored --exact syscalls::seen_from_inside --nocapture 2>&1 | grep '^call'
echo "== end"
"#;

/// `section/key` to value.
pub type Facts = BTreeMap<String, String>;

pub fn parse(output: &str) -> Facts {
    let mut facts = Facts::new();
    let mut section = String::new();
    let mut number = 0;
    for line in output.lines().map(|l| l.trim_end_matches('\r')) {
        if let Some(name) = line.strip_prefix("== ") {
            section = name.to_owned();
            number = 0;
            continue;
        }
        number += 1;
        let (key, value) = match section.as_str() {
            "" => continue,
            "status" => match line.split_once(':') {
                Some((key, value)) if STATUS.contains(&key) => {
                    (key.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" "))
                }
                _ => continue,
            },
            "limits" => (line.get(..26).unwrap_or(line).trim().to_owned(), line.get(26..).unwrap_or("").trim().to_owned()),
            "mountinfo" => mount(line),
            "environ" => match line.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None => (line.to_owned(), String::new()),
            },
            "dev" | "cgroupfs" | "able" | "namespaces" => {
                let at = if section == "able" { line.rfind(' ') } else { line.find(' ') }.unwrap_or(line.len());
                (line[..at].to_owned(), line[at..].trim().to_owned())
            }
            "calls" => match line.strip_prefix("call ").and_then(|l| l.split_once(' ')) {
                Some((name, answer)) => (name.to_owned(), answer.to_owned()),
                None => continue,
            },
            "fds" => (line.to_owned(), "open".to_owned()),
            _ => (number.to_string(), line.to_owned()),
        };
        let value = if key == "SigIgn" { without_the_callers(&value) } else { value };
        facts.insert(format!("{section}/{key}"), value);
    }
    facts
}

/// A stock node passes on what its caller ignored (signal 32 in some CI, SIGHUP under nohup); ours
/// resets all of them, which `sys::signal` tests. SIGPIPE is ignored by this test's own runtime.
fn without_the_callers(signals: &str) -> String {
    const PIPE: u64 = 1 << 12;
    let set = |text: &str| u64::from_str_radix(text.trim(), 16).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let own = set(status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap());
    format!("{:016x}", set(signals) & !(own & !PIPE))
}

const STATUS: [&str; 20] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigPnd",
    "ShdPnd",
    "SigBlk",
    "SigIgn",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed_list",
    "Mems_allowed_list",
    "THP_enabled",
    "CoreDumping",
];

/// Key: destination. Value: type, mount options, super options that are the mount's own, and
/// whether it takes part in propagation.
fn mount(line: &str) -> (String, String) {
    let (left, right) = line.split_once(" - ").unwrap_or((line, ""));
    let left: Vec<&str> = left.split(' ').collect();
    let right: Vec<&str> = right.split(' ').collect();
    let (kind, super_options) = (right.first().copied().unwrap_or(""), right.get(2).copied().unwrap_or(""));
    let mut propagation: Vec<&str> = left.iter().skip(6).map(|p| p.split(':').next().unwrap_or("")).collect();
    propagation.sort_unstable();
    let own_super = match kind {
        "tmpfs" | "devpts" | "mqueue" | "proc" | "sysfs" => super_options,
        // Its layers' paths are each runtime's own.
        _ => super_options.split(',').next().unwrap_or(""),
    };
    let destination = left.get(4).copied().unwrap_or("").to_owned();
    (destination, format!("{kind} {} super {own_super} {}", left.get(5).copied().unwrap_or(""), propagation.join(",")))
}

/// Every fact that differs, as `key: stock | ours`.
pub fn differences(stock: &Facts, ours: &Facts) -> Vec<(String, String)> {
    let keys: std::collections::BTreeSet<&String> = stock.keys().chain(ours.keys()).collect();
    let show = |facts: &Facts, key: &String| facts.get(key).cloned().unwrap_or_else(|| "(absent)".into());
    keys.into_iter()
        .filter(|key| !key.starts_with("namespaces/") && stock.get(*key) != ours.get(*key))
        .map(|key| (key.clone(), format!("stock: {} | ours: {}", show(stock, key), show(ours, key))))
        .collect()
}
