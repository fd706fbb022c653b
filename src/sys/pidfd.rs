//! Process file descriptors: a handle that never means another process. pidfd_open(2),
//! pidfd_send_signal(2).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Opens a handle on a living process (or zombie) of our pid namespace. Close-on-exec.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// ESRCH: it is dead and reaped.
pub fn send_signal(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo means "as kill(2) would"; the other arguments are integers.
    let rc =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, std::ptr::null::<libc::siginfo_t>(), 0) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_reaches_its_process_and_says_when_it_is_gone() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let handle = open(child.id() as i32).unwrap();
        send_signal(&handle, libc::SIGKILL).unwrap();
        child.wait().unwrap();
        assert_eq!(send_signal(&handle, 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
