//! Internet sockets where std's calls would wait, or tell too little.
//!
//! Invariant: nothing here waits. connect(2), socket(7), if_nametoindex(3).

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};

/// Begins a TCP connection. It stands once the stream is writable and `take_error` gives none.
pub fn connect_tcp(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, None)?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(socket)),
        Err(errno) => Err(errno.into()),
    }
}

/// The number of an interface; None: there is none of this name.
pub fn interface(name: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(name).ok() // a name that is none is no interface either
}
