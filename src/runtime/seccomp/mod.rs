//! Seccomp profiles: our RuntimeDefault, and the parser of Localhost profiles. Pure.
//!
//! RuntimeDefault is an allow list: what is not in it fails with EPERM. What it means is what
//! containerd's and moby's default profiles mean, in a table of our own, by purpose, so that a
//! reader can see why a call is in. A system call that libseccomp does not know by name is
//! skipped by libcontainer, and so denied.
//!
//! Invariant: a profile is never weaker than what was asked for. Nothing here falls back to
//! unconfined.

mod table;

use std::collections::BTreeSet;

use oci_spec::runtime::{Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArgBuilder, LinuxSeccompOperator, LinuxSyscall};

#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("seccomp profile {name} cannot be used: {why}")]
    Bad { name: String, why: String },
}

/// The machine that a profile is for, with the older ABIs that it runs too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    X86_64,
    Aarch64,
    Arm,
}

impl Machine {
    /// What this program was built for.
    pub const OWN: Machine = if cfg!(target_arch = "x86_64") {
        Machine::X86_64
    } else if cfg!(target_arch = "aarch64") {
        Machine::Aarch64
    } else {
        Machine::Arm
    };

    fn abis(self) -> Vec<Arch> {
        match self {
            Machine::X86_64 => vec![Arch::ScmpArchX86_64, Arch::ScmpArchX86, Arch::ScmpArchX32],
            Machine::Aarch64 => vec![Arch::ScmpArchAarch64, Arch::ScmpArchArm],
            Machine::Arm => vec![Arch::ScmpArchArm],
        }
    }
}

/// Our RuntimeDefault for a container that holds `capabilities` (names without `CAP_`).
pub fn runtime_default(machine: Machine, capabilities: &BTreeSet<String>) -> LinuxSeccomp {
    let mut rules = vec![allow(table::ALWAYS.iter().flat_map(|(_, names)| names.split_whitespace()))];
    rules.push(allow(match machine {
        Machine::X86_64 => table::X86.split_whitespace(),
        Machine::Aarch64 | Machine::Arm => table::ARM.split_whitespace(),
    }));
    let has = |capability: &str| capabilities.contains(capability);
    for (capability, names) in table::WITH_CAPABILITY {
        if has(capability) {
            rules.push(allow(names.split_whitespace()));
        }
    }
    if !has("SYS_ADMIN") {
        // No new namespaces. clone3 hides its flags behind a pointer: "not there" makes every libc
        // fall back to clone.
        rules.push(when("clone", LinuxSeccompOperator::ScmpCmpMaskedEq, table::CLONE_NAMESPACES, Some(0)));
        rules.push(errno("clone3", libc::ENOSYS as u32));
    }
    for persona in table::PERSONALITIES {
        rules.push(when("personality", LinuxSeccompOperator::ScmpCmpEq, persona, None));
    }
    // Every family but AF_ALG (38) and AF_VSOCK (40), as three ranges: two "not equal" of one
    // argument would be joined by OR.
    rules.push(when("socket", LinuxSeccompOperator::ScmpCmpLt, 38, None));
    rules.push(when("socket", LinuxSeccompOperator::ScmpCmpEq, 39, None));
    rules.push(when("socket", LinuxSeccompOperator::ScmpCmpGt, 40, None));
    // i386's multiplexer hides the family behind a pointer: everything but SYS_SOCKET (1). A
    // 32-bit libc that does not know socket(2) gets no sockets.
    rules.push(when("socketcall", LinuxSeccompOperator::ScmpCmpNe, 1, None));

    let mut profile = LinuxSeccomp::default();
    profile
        .set_default_action(LinuxSeccompAction::ScmpActErrno)
        .set_default_errno_ret(Some(libc::EPERM as u32))
        .set_architectures(Some(machine.abis()))
        .set_flags(None)
        .set_syscalls(Some(rules));
    profile
}

fn allow<'a>(names: impl Iterator<Item = &'a str>) -> LinuxSyscall {
    rule(names.map(str::to_owned).collect(), LinuxSeccompAction::ScmpActAllow)
}

/// Allowed while the first argument compares so.
fn when(name: &str, op: LinuxSeccompOperator, value: u64, value_two: Option<u64>) -> LinuxSyscall {
    let arg = LinuxSeccompArgBuilder::default().index(0usize).op(op).value(value);
    let arg = match value_two {
        Some(two) => arg.value_two(two),
        None => arg,
    };
    // Every field has a default, so build has nothing to fail on; if it did, nothing is allowed.
    let Ok(arg) = arg.build() else { return errno(name, libc::EPERM as u32) };
    let mut rule = rule(vec![name.to_owned()], LinuxSeccompAction::ScmpActAllow);
    rule.set_args(Some(vec![arg]));
    rule
}

fn errno(name: &str, errno: u32) -> LinuxSyscall {
    let mut rule = rule(vec![name.to_owned()], LinuxSeccompAction::ScmpActErrno);
    rule.set_errno_ret(Some(errno));
    rule
}

fn rule(names: Vec<String>, action: LinuxSeccompAction) -> LinuxSyscall {
    let mut rule = LinuxSyscall::default();
    rule.set_names(names).set_action(action).set_errno_ret(None).set_args(None);
    rule
}

/// Largest profile file that is read.
pub const LARGEST_PROFILE: u64 = 1 << 20;

/// A Localhost profile: the `seccomp` object of the OCI runtime spec as JSON. `name` is for the
/// message. The second part names fields that play no part in a runtime profile (docker's
/// `includes`, `archMap`): a warning should name them.
pub fn parse(name: &str, json: &[u8]) -> Result<(LinuxSeccomp, Vec<String>), SeccompError> {
    // serde_json quotes texts of any length.
    let bad = |why: String| SeccompError::Bad { name: name.to_owned(), why: why.chars().take(300).collect() };
    if json.len() as u64 > LARGEST_PROFILE {
        return Err(bad("it is larger than 1 MiB".into()));
    }
    let mut ignored = Vec::new();
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let profile: LinuxSeccomp = serde_ignored::deserialize(&mut deserializer, |path| {
        if ignored.len() < 20 {
            ignored.push(path.to_string().replace(".?", ""));
        }
    })
    .map_err(|e| bad(e.to_string()))?;
    deserializer.end().map_err(|e| bad(e.to_string()))?;
    check(&profile).map_err(|why| bad(why.to_owned()))?;
    Ok((profile, ignored))
}

fn check(profile: &LinuxSeccomp) -> Result<(), &'static str> {
    let rules = profile.syscalls().as_deref().unwrap_or_default();
    let notify = LinuxSeccompAction::ScmpActNotify;
    if profile.default_action() == notify || rules.iter().any(|r| r.action() == notify) || profile.listener_path().is_some() {
        return Err("SCMP_ACT_NOTIFY needs a supervisor, which this node has not: use another action");
    }
    if rules.iter().map(|r| r.names().len()).sum::<usize>() > 10_000 {
        return Err("it names more than 10000 system calls");
    }
    if rules.iter().any(|r| r.names().iter().any(|n| n.contains('\0'))) {
        return Err("a name holds a zero byte");
    }
    if rules.iter().flat_map(|r| r.args().iter().flatten()).any(|arg| arg.index() > 5) {
        return Err("a system call has six arguments: args.index goes from 0 to 5");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default_for(capabilities: &[&str]) -> LinuxSeccomp {
        runtime_default(Machine::X86_64, &capabilities.iter().map(|c| (*c).to_owned()).collect())
    }

    fn allowed(profile: &LinuxSeccomp, name: &str) -> bool {
        profile
            .syscalls()
            .iter()
            .flatten()
            .any(|r| r.action() == LinuxSeccompAction::ScmpActAllow && r.args().is_none() && r.names().iter().any(|n| n == name))
    }

    #[test]
    fn a_message_does_not_grow_with_the_profile() {
        let hostile = format!(r#"{{"defaultAction":"{}"}}"#, "A".repeat(100_000));
        assert!(parse("x.json", hostile.as_bytes()).unwrap_err().to_string().len() < 500);
    }

    #[test]
    fn what_reaches_the_kernels_soft_parts_is_denied() {
        let profile = default_for(&["CHOWN", "MKNOD", "SYS_CHROOT"]);
        assert_eq!(profile.default_action(), LinuxSeccompAction::ScmpActErrno);
        for name in [
            "keyctl",
            "add_key",
            "request_key",
            "bpf",
            "userfaultfd",
            "io_uring_setup",
            "io_uring_enter",
            "io_uring_register",
            "mount",
            "umount2",
            "setns",
            "unshare",
            "pivot_root",
            "kexec_load",
            "init_module",
            "finit_module",
            "ptrace_x",
            "open_by_handle_at",
            "perf_event_open",
            "reboot",
            "swapon",
            "swapoff",
            "settimeofday",
            "clock_settime",
            "iopl",
            "ioperm",
            "acct",
            "quotactl",
            "move_pages",
            "nfsservctl",
            "vm86",
            "vm86old",
            "uselib",
            "ustat",
            "sysfs",
            "_sysctl",
            "fsopen",
            "open_tree",
            "move_mount",
            "socket",
            "socketcall",
            "personality",
            "clone",
            "clone3",
            "sethostname",
            "lookup_dcookie",
            "pidfd_getfd",
            "process_madvise",
            "kcmp",
            "syslog",
            "vhangup",
            "get_kernel_syms",
            "query_module",
        ] {
            assert!(!allowed(&profile, name), "{name}");
        }
        for name in ["read", "execve", "futex", "chroot", "ptrace", "mknod", "openat2", "close_range", "rseq", "arch_prctl"] {
            assert!(allowed(&profile, name), "{name}");
        }
    }

    #[test]
    fn calls_that_libcontainer_makes_before_execve_are_allowed() {
        let profile = default_for(&[]);
        for name in [
            "accept4",
            "close",
            "connect",
            "fcntl",
            "newfstatat",
            "openat",
            "recvfrom",
            "sendmsg",
            "statx",
            "capget",
            "capset",
            "getcwd",
            "prctl",
            "execve",
            "write",
            "read",
            "rt_sigaction",
            "rt_sigprocmask",
        ] {
            assert!(allowed(&profile, name), "{name}");
        }
    }

    #[test]
    fn capabilities_open_what_they_are_for() {
        for (capability, name) in [
            ("SYS_ADMIN", "mount"),
            ("SYS_ADMIN", "clone3"),
            ("SYS_MODULE", "finit_module"),
            ("SYS_TIME", "clock_settime"),
            ("SYS_BOOT", "reboot"),
            ("DAC_READ_SEARCH", "open_by_handle_at"),
            ("BPF", "bpf"),
            ("PERFMON", "perf_event_open"),
            ("SYSLOG", "syslog"),
            ("SYS_CHROOT", "chroot"),
        ] {
            assert!(!allowed(&default_for(&[]), name), "{name}");
            assert!(allowed(&default_for(&[capability]), name), "{capability} {name}");
        }
    }

    #[test]
    fn every_call_is_listed_once() {
        let mut seen = BTreeSet::new();
        for (_, names) in table::ALWAYS {
            for name in names.split_whitespace() {
                assert!(seen.insert(name), "{name} is listed twice");
            }
        }
    }

    #[test]
    fn a_localhost_profile_is_read_as_the_runtime_spec_has_it() {
        let json = br#"{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":38,"architectures":["SCMP_ARCH_X86_64"],
            "syscalls":[{"names":["read","write"],"action":"SCMP_ACT_ALLOW","includes":{"caps":["CAP_X"]},
            "args":[{"index":1,"value":5,"valueTwo":3,"op":"SCMP_CMP_MASKED_EQ"}]}]}"#;
        let (profile, ignored) = parse("p.json", json).unwrap();
        assert_eq!(profile.syscalls().as_ref().map(Vec::len), Some(1));
        assert_eq!(profile.default_errno_ret(), Some(38));
        assert_eq!(ignored, ["syscalls.0.includes"]);
    }

    #[test]
    fn profiles_that_cannot_be_enforced_are_refused() {
        for json in [
            "",
            "{}",
            "[]",
            r#"{"defaultAction":"SCMP_ACT_WHATEVER"}"#,
            r#"{"defaultAction":"SCMP_ACT_NOTIFY"}"#,
            r#"{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}"#,
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_NOTIFY"}]}"#,
            r#"{"defaultAction":"SCMP_ACT_ALLOW"} x"#,
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_ERRNO",
                "args":[{"index":6,"value":1,"op":"SCMP_CMP_EQ"}]}]}"#,
        ] {
            assert!(parse("p", json.as_bytes()).is_err(), "{json}");
        }
    }
}
