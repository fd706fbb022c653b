//! Sockets to upstreams: one for each attempt, gone with it.
//!
//! Invariant: a datagram is heard only from the server and port that its socket is connected to
//! (the kernel sees to that), and what a server says is read no further than one message.
//! RFC 5452 §9.2 (a port that cannot be guessed), RFC 7766 §8 (two bytes of length before each).

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use nix::poll::PollFlags;

use super::wire;
use crate::sys::inet;

/// More than we say we take.
const DATAGRAM: usize = 4096;

#[derive(Default)]
pub struct Links {
    open: BTreeMap<u32, Link>,
}

enum Link {
    Udp(UdpSocket),
    Tcp(Stream),
}

struct Stream {
    socket: TcpStream,
    /// What has yet to be sent, length and all.
    out: Vec<u8>,
    sent: usize,
    /// What came, length and all.
    got: Vec<u8>,
}

/// What came of a ready socket.
pub enum Heard {
    Nothing,
    Message(Vec<u8>),
    /// It is over; the socket says no more.
    Failed,
}

impl Links {
    pub fn ask(&mut self, attempt: u32, server: SocketAddr, tcp: bool, message: &[u8]) -> io::Result<()> {
        let link = if tcp {
            let length = u16::try_from(message.len()).map_err(io::Error::other)?;
            let out = [&length.to_be_bytes(), message].concat();
            Link::Tcp(Stream { socket: inet::connect_tcp(server)?, out, sent: 0, got: Vec::new() })
        } else {
            let any = if server.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
            // The kernel chooses the port, at random.
            let socket = UdpSocket::bind::<SocketAddr>(any)?;
            socket.set_nonblocking(true)?;
            socket.connect(server)?;
            socket.send(message)?;
            Link::Udp(socket)
        };
        self.open.insert(attempt, link);
        Ok(())
    }

    pub fn forget(&mut self, attempt: u32) {
        self.open.remove(&attempt);
    }

    pub fn waits(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>, PollFlags)> {
        self.open.iter().map(|(attempt, link)| match link {
            Link::Udp(socket) => (*attempt, socket.as_fd(), PollFlags::POLLIN),
            Link::Tcp(stream) if stream.sent < stream.out.len() => (*attempt, stream.socket.as_fd(), PollFlags::POLLOUT),
            Link::Tcp(stream) => (*attempt, stream.socket.as_fd(), PollFlags::POLLIN),
        })
    }

    pub fn ready(&mut self, attempt: u32) -> Heard {
        match self.open.get_mut(&attempt) {
            None => Heard::Nothing,
            Some(Link::Udp(socket)) => {
                let mut buffer = [0; DATAGRAM];
                match socket.recv(&mut buffer) {
                    Ok(length) => Heard::Message(buffer.get(..length).unwrap_or_default().to_vec()),
                    Err(e) => gone(&e),
                }
            }
            Some(Link::Tcp(stream)) => match stream.go_on() {
                Ok(Some(message)) => Heard::Message(message),
                Ok(None) => Heard::Nothing,
                Err(e) => gone(&e),
            },
        }
    }
}

fn gone(error: &io::Error) -> Heard {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Heard::Nothing,
        _ => Heard::Failed,
    }
}

impl Stream {
    fn go_on(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.sent < self.out.len() {
            if let Some(error) = self.socket.take_error()? {
                return Err(error);
            }
            self.sent += self.socket.write(self.out.get(self.sent..).unwrap_or_default())?;
            return Ok(None);
        }
        let want = match wire::u16_at(&self.got, 0) {
            Some(length) => 2 + usize::from(length) - self.got.len(),
            None => 2 - self.got.len(),
        };
        let mut buffer = [0; DATAGRAM];
        let room = buffer.get_mut(..want.min(DATAGRAM)).unwrap_or_default();
        match self.socket.read(room)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => self.got.extend_from_slice(room.get(..got).unwrap_or_default()),
        }
        let whole = wire::u16_at(&self.got, 0).is_some_and(|length| self.got.len() == 2 + usize::from(length));
        Ok(whole.then(|| self.got.split_off(2)))
    }
}
