//! Internet sockets where std's calls would wait, or tell too little.
//!
//! Invariant: nothing here waits. connect(2), socket(7), if_nametoindex(3).

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
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

/// Every address of this host, with its interface's name.
pub fn addresses() -> io::Result<Vec<(String, IpAddr)>> {
    let all = nix::ifaddrs::getifaddrs()?.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|a| a.ip().into()))?;
        Some((interface.interface_name, ip))
    });
    Ok(all.collect())
}

/// The addresses that this host uses towards others, one a family; none without a default route.
pub fn outward() -> Vec<IpAddr> {
    // A connected datagram socket sends nothing.
    let source = |local: &str, far: &str| -> io::Result<IpAddr> {
        let socket = UdpSocket::bind(local)?;
        socket.connect(far)?;
        Ok(socket.local_addr()?.ip())
    };
    // Documentation addresses (RFC 5737, RFC 3849): only the default route leads there. Without
    // one the family is left out.
    [source("0.0.0.0:0", "192.0.2.1:9"), source("[::]:0", "[2001:db8::1]:9")].into_iter().flatten().collect()
}

/// The number of an interface; None: there is none of this name.
pub fn interface(name: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(name).ok() // a name that is none is no interface either
}
