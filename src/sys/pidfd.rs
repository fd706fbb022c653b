//! Processes by descriptor: a pid may be given to another process, a pidfd never is.
//!
//! Sources: pidfd_open(2), pidfd_send_signal(2), waitid(2), proc_pid_stat(5).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// ESRCH where there is no such process (a zombie still counts as one).
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if r < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(r).map_err(io::Error::other)?;
    // SAFETY: pidfd_open has just returned this descriptor and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// False where the process has been reaped already.
pub fn signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<bool> {
    let none = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a null siginfo is allowed; the rest are plain numbers.
    let r = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, none, 0) };
    if r == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        e => Err(e),
    }
}

/// Has it ended (it may be a zombie)? Waits up to `milliseconds`.
pub fn ended(pidfd: BorrowedFd<'_>, milliseconds: u16) -> io::Result<bool> {
    let mut fds = [PollFd::new(pidfd, PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::from(milliseconds)) {
        Ok(n) => Ok(n > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// As [`signal`], for the owner of the descriptor: ESRCH where it has been reaped already.
pub fn send_signal(pidfd: &OwnedFd, signal_number: i32) -> io::Result<()> {
    use std::os::fd::AsFd;
    if signal(pidfd.as_fd(), signal_number)? { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
}

/// When the process started, in clock ticks since boot: with the pid it names a process for ever.
/// None where there is none.
pub fn start_time(pid: i32) -> io::Result<Option<u64>> {
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    // The second field, the name in parentheses, may hold anything; the 22nd is the 20th after it.
    let field = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse().ok());
    field.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat: {stat}")))
}

/// Is it a zombie, or gone?
pub fn is_dead(pid: i32) -> io::Result<bool> {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => Ok(stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => Ok(true),
        Err(e) => Err(e),
    }
}

/// Reaps a child of ours that has ended; nothing where it runs, or is nobody of ours.
pub fn reap(pid: i32) {
    // The caller asked for no status; ECHILD (not ours, or reaped before) is as good an end.
    let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), Some(nix::sys::wait::WaitPidFlag::WNOHANG));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_process_is_told_from_its_successor() {
        let me = std::process::id() as i32;
        assert!(start_time(me).unwrap().unwrap() > 0);
        let mut child =
            std::process::Command::new("/proc/self/exe").arg("--list").stdout(std::process::Stdio::null()).spawn().unwrap();
        let pid = child.id() as i32;
        let fd = open(pid).unwrap();
        child.wait().unwrap();
        assert!(ended(fd.as_fd(), 0).unwrap());
        assert!(!signal(fd.as_fd(), 9).unwrap());
        assert_eq!(start_time(pid).unwrap(), None);
    }
}
