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
    for signal in Signal::iterator().filter(|s| !matches!(s, Signal::SIGKILL | Signal::SIGSTOP)) {
        set(signal, SigHandler::SigDfl)?;
    }
    // The realtime signals have no names here. The C library refuses the two that it keeps for itself.
    for number in libc::SIGRTMIN()..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL is a valid disposition for any signal number.
        unsafe { libc::signal(number, libc::SIG_DFL) };
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    Ok(())
}

fn set(signal: Signal, handler: SigHandler) -> io::Result<()> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: no handler function is installed, only SIG_IGN or SIG_DFL.
    unsafe { sigaction(signal, &action) }?;
    Ok(())
}
