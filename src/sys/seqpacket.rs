//! Unix sockets that keep message boundaries and carry descriptors.
//!
//! Invariant: nothing here blocks but [`wait`]; received descriptors are close-on-exec and owned
//! from the first moment, also those of a message that is refused. Sources: unix(7), sendmsg(2).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    connect as sys_connect, listen as sys_listen, recvmsg, sendmsg, socket, socketpair,
};

/// Most descriptors in one message.
pub const MAX_FDS: usize = 8;

const FLAGS: SockFlag = SockFlag::SOCK_CLOEXEC.union(SockFlag::SOCK_NONBLOCK);

/// A listening socket at `name` in the open directory `dir`; the path's length does not matter.
pub fn listen(dir: BorrowedFd<'_>, name: &str, mode: u32) -> io::Result<OwnedFd> {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None)?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    // The mode of the socket file is the umask's: nobody gets in between bind and a chmod.
    let old = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(!mode & 0o777));
    let bound = bind(fd.as_raw_fd(), &UnixAddr::new(Path::new(&path))?);
    nix::sys::stat::umask(old);
    bound?;
    sys_listen(&fd, Backlog::new(64)?)?;
    Ok(fd)
}

/// EAGAIN where the listener's queue is full.
pub fn connect(dir: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, FLAGS, None)?;
    let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
    sys_connect(fd.as_raw_fd(), &UnixAddr::new(Path::new(&path))?)?;
    Ok(fd)
}

/// Two ends of a connection; both block unless told otherwise.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// None where nobody waits.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    match accept4(listener.as_raw_fd(), FLAGS) {
        // SAFETY: accept4 has just returned this descriptor and nothing else owns it.
        Ok(fd) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Pid of the process that made the other end (for a client: that called listen).
pub fn peer_pid(fd: BorrowedFd<'_>) -> io::Result<i32> {
    Ok(nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::PeerCredentials)?.pid())
}

/// One whole message. WouldBlock where the other side's buffer is full.
pub fn send(fd: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage] = if raw.is_empty() { &[] } else { &rights };
    sendmsg::<()>(fd.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_EOR, None)?;
    Ok(())
}

/// What [`receive`] found.
#[derive(Debug)]
pub enum Received {
    Message {
        len: usize,
        fds: Vec<OwnedFd>,
    },
    /// Longer than the buffer: its rest is lost.
    TooLong,
    Nothing,
    Closed,
}

/// One message into `buffer`.
pub fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut control = nix::cmsg_space!([RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = match recvmsg::<()>(fd.as_raw_fd(), &mut slices, Some(&mut control), flags) {
        Ok(message) => message,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Received::Nothing),
        Err(Errno::ECONNRESET) => return Ok(Received::Closed),
        Err(e) => return Err(e.into()),
    };
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just put these descriptors into our table for us alone.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.contains(MsgFlags::MSG_TRUNC) {
        return Ok(Received::TooLong);
    }
    // On a connection of packets an empty one without descriptors is its end; nobody sends those.
    if message.bytes == 0 {
        return Ok(Received::Closed);
    }
    Ok(Received::Message { len: message.bytes, fds })
}

/// Waits until there is something to read (or the end). False where the time is over.
pub fn wait(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let deadline = timeout.map(|t| std::time::Instant::now() + t);
    loop {
        let left = match deadline {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(std::time::Instant::now());
                // Rounded up: a wait of under a millisecond must not spin.
                PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
        match poll(&mut fds, left) {
            Ok(0) if deadline.is_some_and(|d| std::time::Instant::now() >= d) => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => return Ok(true),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn messages_keep_their_bounds_and_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let deep = crate::sys::file::open_dir_path(&deep).unwrap();
        let listener = listen(deep.as_fd(), "s", 0o600).unwrap();
        let client = connect(deep.as_fd(), "s").unwrap();
        let server = accept(listener.as_fd()).unwrap().unwrap();
        assert!(accept(listener.as_fd()).unwrap().is_none());
        let (read, write) = crate::sys::process::pipe().unwrap();
        send(client.as_fd(), b"one", &[write.as_fd()]).unwrap();
        send(client.as_fd(), b"longer than eight", &[read.as_fd()]).unwrap();
        let mut buffer = [0; 8];
        let Received::Message { len: 3, fds } = receive(server.as_fd(), &mut buffer).unwrap() else { panic!() };
        nix::unistd::write(&fds[0], b"x").unwrap();
        assert_eq!(nix::unistd::read(read.as_raw_fd(), &mut [0; 4]).unwrap(), 1);
        assert!(matches!(receive(server.as_fd(), &mut buffer).unwrap(), Received::TooLong));
        assert!(matches!(receive(server.as_fd(), &mut buffer).unwrap(), Received::Nothing));
        drop(client);
        assert!(matches!(receive(server.as_fd(), &mut buffer).unwrap(), Received::Closed));
    }
}
