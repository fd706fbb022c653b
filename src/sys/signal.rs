//! Signal set-up of processes that we start or are.
//!
//! Invariant: what a process of ours ignores or blocks never reaches a container: whoever forks
//! for one calls [`reset`] first. Sources: signal(7), signalfd(2), sigaction(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// SIGCHLD as a descriptor.
#[derive(Debug)]
pub struct ChildSignals(SignalFd);

impl ChildSignals {
    /// Blocks SIGCHLD, so that it is only ever read here.
    pub fn open() -> io::Result<ChildSignals> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), None)?;
        Ok(ChildSignals(SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?))
    }

    /// Empties it: what counts is what waitpid(2) says, not how many signals were merged into one.
    pub fn clear(&mut self) -> io::Result<()> {
        while self.0.read_signal()?.is_some() {}
        Ok(())
    }
}

impl AsFd for ChildSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// SIGTERM, SIGINT, SIGHUP and the like change nothing any more. SIGPIPE turns into EPIPE.
pub fn ignore_what_ends_us() -> io::Result<()> {
    use Signal::*;
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGTTIN, SIGTTOU] {
        set(signal, SigHandler::SigIgn)?;
    }
    Ok(())
}

/// Every disposition back to the default, nothing blocked: what a container's process starts from.
pub fn reset() -> io::Result<()> {
    for number in (1..=LAST).filter(|&n| n != libc::SIGKILL && n != libc::SIGSTOP) {
        set_default(number)?;
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    Ok(())
}

/// The kernel's last signal number on every architecture of ours.
const LAST: libc::c_int = 64;

/// Straight to the kernel: the C library refuses the two realtime signals that it keeps for itself
/// (32 and 33), and whoever started us may have left those ignored like any other.
fn set_default(number: libc::c_int) -> io::Result<()> {
    // A kernel_sigaction of zeroes is SIG_DFL, no flags, an empty mask, whatever its layout; the
    // largest is four words of eight bytes.
    let action = [0u64; 4];
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: the kernel reads at most 32 bytes of `action`, a valid disposition, and writes nothing.
    let r = unsafe { libc::syscall(libc::SYS_rt_sigaction, number, action.as_ptr(), none, 8usize) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set(signal: Signal, handler: SigHandler) -> io::Result<()> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler function is installed, only SIG_IGN or SIG_DFL.
    unsafe { sigaction(signal, &action) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_reset_process_ignores_and_blocks_nothing_whatever_its_parent_ignored() {
        let mut command = Command::new("cat");
        command.arg("/proc/self/status");
        let ignore_all = || {
            for number in (1..=LAST).filter(|&n| n != libc::SIGKILL && n != libc::SIGSTOP) {
                let action = [libc::SIG_IGN as u64, 0, 0, 0];
                let none = std::ptr::null_mut::<libc::c_void>();
                // SAFETY: as in `set_default`; SIG_IGN is the first word of every layout (little endian).
                let r = unsafe { libc::syscall(libc::SYS_rt_sigaction, number, action.as_ptr(), none, 8usize) };
                if r != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None)?;
            reset()
        };
        // SAFETY: only system calls between fork and exec.
        unsafe { command.pre_exec(ignore_all) };
        let status = String::from_utf8(command.output().unwrap().stdout).unwrap();
        for field in ["SigBlk:", "SigIgn:"] {
            let value = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
            assert_eq!(value.trim(), "0000000000000000", "{field}");
        }
    }
}
