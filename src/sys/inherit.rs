//! What a process has from its parent and hands on to what it executes: put back to the kernel's
//! defaults before a container's process is made of it.
//!
//! Resource limits are not among it: containers get those that the agent was started with, as
//! containerd's get containerd's (`LimitNOFILE=` of our unit is theirs too). What cannot be taken
//! back (no_new_privs, PR_SET_MDWE, a seccomp filter around us) stays.
//!
//! Invariant: what this host does not let us reset is left as it is; a container never has more by it
//! than the agent had.
//!
//! Sources: execve(2), fork(2) "attributes preserved"; sched(7), ioprio_set(2), set_mempolicy(2),
//! personality(2), capabilities(7), session-keyring(7); runc's init_linux.go for affinity and keyring.

use std::ffi::CStr;
use std::io;

use super::signal;

/// The kernel's default for init and all that it starts.
const TIMER_SLACK_NANOS: libc::c_ulong = 50_000;
/// Of a personality: the domain, which a 32-bit user land on a 64-bit kernel may need; the rest are
/// flags (no address randomisation and the like).
const PERSONALITY_DOMAIN: libc::c_ulong = 0xff;

/// Signals, umask 022, no supplementary groups; scheduling, memory policy, execution flags.
pub fn reset() -> io::Result<()> {
    signal::reset()?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    nix::unistd::setgroups(&[])?;
    reset_scheduling();
    reset_execution();
    Ok(())
}

/// CPUs, policy, nice value, io priority, timer slack. Without CAP_SYS_NICE some of it can only get
/// worse, and stays.
fn reset_scheduling() {
    // More CPUs than a machine has are none; cpusets, which a container joins later, still bind.
    let all_cpus = [u8::MAX; 1024];
    let priority: libc::c_int = 0;
    // SAFETY: each call reads at most what its pointer and length name (sched_param is one int), and
    // changes this thread only. Straight to the kernel, as musl has no sched_setscheduler.
    unsafe {
        libc::syscall(libc::SYS_sched_setaffinity, 0, all_cpus.len(), all_cpus.as_ptr());
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, &raw const priority);
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
        // IOPRIO_WHO_PROCESS, ourselves, IOPRIO_CLASS_NONE: by the nice value again.
        libc::syscall(libc::SYS_ioprio_set, 1, 0, 0);
        libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NANOS, 0 as libc::c_ulong, 0 as libc::c_ulong, 0 as libc::c_ulong);
    }
}

/// Where memory comes from and how programs are loaded. Not all kernels have all of it.
fn reset_execution() {
    let none = std::ptr::null::<libc::c_ulong>();
    let zero: libc::c_ulong = 0;
    // SAFETY: no call takes memory of ours; each changes this process only.
    unsafe {
        // MPOL_DEFAULT.
        libc::syscall(libc::SYS_set_mempolicy, 0, none, 0 as libc::c_ulong);
        libc::prctl(libc::PR_SET_THP_DISABLE, zero, zero, zero, zero);
        libc::prctl(libc::PR_SET_SECUREBITS, zero, zero, zero, zero);
        // All ones only asks.
        let now = libc::personality(0xffff_ffff);
        if now >= 0 {
            libc::personality(now as libc::c_ulong & PERSONALITY_DOMAIN);
        }
    }
}

/// Joins the session keyring of that name, a new one the first time, in place of our parent's. Where
/// there are no keyrings, or a filter keeps them from us, there is nothing to leave.
pub fn join_session_keyring(name: &CStr) -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    const SET_PERMISSIONS: libc::c_int = 5;
    // The kernel's for a new one (all to who has it; view, read and link to its user), and search for
    // its user, without which an exec could not join.
    const PERMISSIONS: libc::c_ulong = 0x3f1b_0000;
    // SAFETY: the name ends with a zero byte and outlives the call.
    let ring = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, name.as_ptr()) };
    if ring < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOSYS | libc::EPERM) => Ok(()),
            _ => Err(error),
        };
    }
    // SAFETY: plain numbers.
    let set = unsafe { libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, ring, PERMISSIONS) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
