//! Unix sockets: descriptors beside bytes (SCM_RIGHTS), who is at the other end (SO_PEERCRED),
//! a listening socket that nobody else may connect to, paths longer than sun_path.
//!
//! Invariant: a received descriptor is owned at once (and close-on-exec), so that none leaks
//! whatever a peer sends. unix(7), cmsg(3).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, getsockopt, listen, sendmsg,
    socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};

/// Most descriptors that one message may carry here.
pub const MAX_FDS: usize = 4;

/// Sends some of `bytes` and, with the first of them, `fds`. Returns how many bytes went.
pub fn send_with_fds(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let raw: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    Ok(sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?)
}

/// Receives up to `buffer.len()` bytes and whatever descriptors came with them. 0 bytes: the end.
///
/// nix gives no descriptors at all where the control data was cut, although the kernel has
/// installed those that fitted: they would leak. So this reads the control data itself.
pub fn recv_with_fds(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut control = [0u64; 16];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all zeroes is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // Room for MAX_FDS and their header; more than that is told as MSG_CTRUNC.
    // SAFETY: pure arithmetic.
    message.msg_controllen = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<i32>()) as u32) } as _;
    // SAFETY: `message` points at `part` and `control`, which live until the end of this function,
    // and `part` at `buffer`; msg_controllen (32 here) is less than control's 128 bytes.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut fds = Vec::new();
    // SAFETY: recvmsg filled in msg_control and msg_controllen; the CMSG macros stay within them.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(&raw const message);
        while !head.is_null() {
            if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(head).cast::<i32>();
                for i in 0..bytes / size_of::<i32>() {
                    // The kernel installed this descriptor for this message just now; nobody else
                    // in the process knows its number.
                    fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            head = libc::CMSG_NXTHDR(&raw const message, head);
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors than a message may carry"));
    }
    Ok((got as usize, fds))
}

/// Credentials of the process that connected (or listened).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

pub fn peer(socket: &UnixStream) -> io::Result<Peer> {
    let credentials = getsockopt(socket, sockopt::PeerCredentials)?;
    Ok(Peer { pid: credentials.pid(), uid: credentials.uid(), gid: credentials.gid() })
}

/// A listening stream socket at `path`, mode 0600 from its first moment, in place of whatever
/// socket a dead process left there.
pub fn listen_private(path: &Path) -> io::Result<UnixListener> {
    let (parent, name) = split(path)?;
    let dir = open_dir(&parent)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // bind(2) makes the file with the mode of the socket's own inode; no umask games, no moment
    // in which others could connect.
    fchmod(socket.as_raw_fd(), Mode::S_IRUSR | Mode::S_IWUSR)?;
    let fresh = format!(".{name}.{}", std::process::id());
    let stale = parent.join(&fresh);
    match std::fs::remove_file(&stale) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    bind(socket.as_raw_fd(), &UnixAddr::new(through(&dir, &fresh).as_str())?)?;
    listen(&socket, Backlog::MAXCONN)?;
    std::fs::rename(&stale, path)?;
    Ok(UnixListener::from(socket))
}

/// Connects to the stream socket at `path`.
pub fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let (parent, name) = split(path)?;
    let dir = open_dir(&parent)?;
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(through(&dir, &name).as_str())?)?;
    Ok(UnixStream::from(socket))
}

fn split(path: &Path) -> io::Result<(PathBuf, String)> {
    let bad = || io::Error::new(io::ErrorKind::InvalidInput, "a socket's path needs a directory and a name");
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).ok_or_else(bad)?;
    let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(bad)?;
    Ok((parent.to_owned(), name.to_owned()))
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let raw = open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    // SAFETY: open(2) returned this descriptor just now; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// sun_path holds 107 bytes; a way through a directory's descriptor is short whatever its path.
fn through(dir: &OwnedFd, name: &str) -> String {
    format!("/proc/self/fd/{}/{name}", dir.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    #[test]
    fn a_private_socket_is_0600_at_any_path_length_and_replaces_a_stale_one() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("agent.sock");
        drop(listen_private(&path).unwrap());
        assert_eq!(connect_to(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let listener = listen_private(&path).unwrap();
        let meta = std::fs::symlink_metadata(&path).unwrap();
        assert!(meta.file_type().is_socket());
        assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 1, "no temporary name stays");
        let client = connect_to(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert_eq!(peer(&server).unwrap().pid, std::process::id() as i32);
        drop(client);
    }

    #[test]
    fn descriptors_travel_and_too_many_are_refused_without_a_leak() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut reader, writer) = UnixStream::pair().unwrap();
        assert_eq!(send_with_fds(a.as_fd(), b"x", &[writer.as_fd()]).unwrap(), 1);
        let mut buffer = [0; 8];
        let (n, fds) = recv_with_fds(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((n, fds.len()), (1, 1));
        drop(writer);
        std::fs::File::from(fds.into_iter().next().unwrap()).write_all(b"hi").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hi");

        let many = vec![a.as_fd(); MAX_FDS + 5];
        let open =
            || std::fs::read_dir("/proc/self/task/self/fd").or_else(|_| std::fs::read_dir("/proc/self/fd")).unwrap().count();
        for _ in 0..20 {
            send_with_fds(a.as_fd(), b"x", &many).unwrap();
        }
        let before = open();
        for _ in 0..20 {
            assert!(recv_with_fds(b.as_fd(), &mut buffer).is_err());
        }
        // Other tests of this process open descriptors too, but not eighty.
        assert!(open() < before + 60, "descriptors of refused messages stay open");
    }
}
