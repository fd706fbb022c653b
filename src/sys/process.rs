//! This process: fork, names, descriptors, children.
//!
//! Invariant: [`fork`] refuses a process with more than one thread, whose locks (malloc's first)
//! would stay held for ever in the child. Sources: fork(2), prctl(2), close_range(2), wait(2).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};

/// Which side of a fork we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Parent { child: i32 },
    Child,
}

/// EBUSY in a process that has other threads.
pub fn fork() -> io::Result<Side> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(Errno::EBUSY.into());
    }
    // SAFETY: the process has one thread, so no lock is held by another one in the child.
    Ok(match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Side::Parent { child: child.as_raw() },
        ForkResult::Child => Side::Child,
    })
}

/// Ends a forked child: no destructors, no buffers of the parent's written twice.
pub fn exit_child(code: i32) -> ! {
    // SAFETY: _exit is always allowed.
    unsafe { libc::_exit(code) }
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Exited(i32),
    Signaled(i32),
}

/// Reaps one child that has ended, whichever it is; None where none has (or there is none).
pub fn reap_any() -> io::Result<Option<(i32, Ended)>> {
    loop {
        return match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(pid, code)) => Ok(Some((pid.as_raw(), Ended::Exited(code)))),
            Ok(WaitStatus::Signaled(pid, signal, _)) => Ok(Some((pid.as_raw(), Ended::Signaled(signal as i32)))),
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => Ok(None),
            // Stops and continues are not asked for.
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(e) => Err(e.into()),
        };
    }
}

/// Our children's pids, zombies included.
pub fn children() -> io::Result<Vec<i32>> {
    let me = std::process::id();
    match std::fs::read_to_string(format!("/proc/self/task/{me}/children")) {
        Ok(text) => Ok(text.split_whitespace().filter_map(|word| word.parse().ok()).collect()),
        // The kernel was built without CONFIG_PROC_CHILDREN: ask every process who its parent is.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let pids = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
            Ok(pids.filter(|pid| parent(*pid) == Some(me)).collect())
        }
        Err(e) => Err(e),
    }
}

fn parent(pid: i32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The short name of a process; None where there is none.
pub fn name_of(pid: i32) -> Option<String> {
    let mut name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    name.truncate(name.trim_end().len());
    Some(name)
}

/// The short name, 15 bytes at most, that `ps -o comm` and `top` show.
pub fn set_name(name: &CStr) -> io::Result<()> {
    Ok(nix::sys::prctl::set_name(name)?)
}

/// Orphans among our descendants become our children.
pub fn become_subreaper() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

pub fn new_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

pub fn oom_score_adj() -> io::Result<i32> {
    std::fs::read_to_string("/proc/self/oom_score_adj")?.trim().parse().map_err(io::Error::other)
}

/// As hard to pick for the OOM killer as this host lets us be: without CAP_SYS_RESOURCE the value
/// can only go back to what it was, which then is the best there is.
pub fn protect_from_oom(score: i32) -> io::Result<()> {
    const PATH: &str = "/proc/self/oom_score_adj";
    match std::fs::write(PATH, score.to_string()) {
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => match std::fs::write(PATH, "0") {
            Err(e) if e.raw_os_error() != Some(libc::EACCES) => Err(e),
            _ => Ok(()),
        },
        other => other,
    }
}

/// Closes every descriptor but 0, 1, 2 and those given. Owners of others must not drop them: for
/// a forked child that ends by [`exit_child`], or the first thing in a process.
pub fn close_all_but(keep: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut numbers: Vec<i32> = keep.iter().map(|fd| fd.as_raw_fd()).filter(|n| *n > 2).collect();
    numbers.sort_unstable();
    let mut first = 3;
    for number in numbers.into_iter().chain([i32::MAX]) {
        if first < number {
            close_range(first, number - 1)?;
        }
        first = number.saturating_add(1);
    }
    Ok(())
}

fn close_range(first: i32, last: i32) -> io::Result<()> {
    // SAFETY: nothing in this process uses these descriptors any more, see close_all_but.
    let r = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts `fd` in the place of 0, 1 or 2.
pub fn replace_stdio(fd: BorrowedFd<'_>, number: i32) -> io::Result<()> {
    nix::unistd::dup2(fd.as_raw_fd(), number)?;
    Ok(())
}

/// (read, write), both close-on-exec.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::unistd::pipe2(OFlag::O_CLOEXEC)?)
}

pub fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = nix::fcntl::fcntl(fd.as_raw_fd(), nix::fcntl::FcntlArg::F_GETFL)?;
    let flags = OFlag::from_bits_retain(flags) | OFlag::O_NONBLOCK;
    nix::fcntl::fcntl(fd.as_raw_fd(), nix::fcntl::FcntlArg::F_SETFL(flags))?;
    Ok(())
}

/// Sets the loopback interface of our network namespace up; netdevice(7).
pub fn loopback_up() -> io::Result<()> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: an all-zero ifreq is a valid value of that plain C struct.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one ifreq with a terminated name, which outlives the call.
    let r = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes over a descriptor that this process was started with.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    nix::fcntl::fcntl(number, nix::fcntl::FcntlArg::F_GETFD)?;
    // SAFETY: it is open, and the caller takes each number once, at the start of the process.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Ends and reaps one child of ours, which nobody has reaped yet.
pub fn kill_child(pid: i32) {
    // ESRCH cannot be while it is not reaped; ECHILD only if it was.
    let _ = nix::sys::signal::kill(Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
    while waitpid(Pid::from_raw(pid), None) == Err(Errno::EINTR) {}
}

/// SIGKILL to a child of ours that nobody has reaped yet.
pub fn kill(pid: i32) {
    // As above: it may be a zombie, then nothing happens.
    let _ = nix::sys::signal::kill(Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
}

/// How a child of ours has ended, reaped by this; None while it runs.
pub fn try_reap(pid: i32) -> io::Result<Option<Ended>> {
    match waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::Exited(_, code)) => Ok(Some(Ended::Exited(code))),
        Ok(WaitStatus::Signaled(_, signal, _)) => Ok(Some(Ended::Signaled(signal as i32))),
        Ok(_) | Err(Errno::EINTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Whether the descriptor ends with execve(2).
pub fn set_close_on_exec(fd: BorrowedFd<'_>, ends: bool) -> io::Result<()> {
    let flags = if ends { nix::fcntl::FdFlag::FD_CLOEXEC } else { nix::fcntl::FdFlag::empty() };
    nix::fcntl::fcntl(fd.as_raw_fd(), nix::fcntl::FcntlArg::F_SETFD(flags))?;
    Ok(())
}

/// Lets all threads share one heap. glibc gives threads that meet a heap of their own each, up to
/// eight for each core, and none of them ever shrinks: an agent that had run 300 pods held 5.3 MB
/// instead of what it uses. Before there is a second thread.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a setting of the allocator; no pointer is passed.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives freed memory back to the kernel, for a process that is idle for long.
pub fn trim_heap() {
    // SAFETY: it takes the allocator's own locks and touches free memory only.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
