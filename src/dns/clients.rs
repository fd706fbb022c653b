//! TCP connections of those who ask: one question at a time each, read and answered by the one
//! thread.
//!
//! Invariant: there are at most [`MOST`], a few of each address; one that has not brought a whole
//! question, or not taken its reply, within [`PATIENCE`] is closed, however busy it looks; where
//! all places are taken the one that has idled longest makes room; whoever sends question upon
//! question has one answered a turn, as everybody else. RFC 7766.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use nix::poll::PollFlags;

use super::wire;

const MOST: usize = 32;
const EACH: usize = 8;
/// A question is a name and a few numbers.
const QUESTION: usize = 1024;
pub const PATIENCE: i64 = 10_000_000_000;

#[derive(Default)]
pub struct Clients {
    open: BTreeMap<u32, Connection>,
    next: u32,
}

struct Connection {
    stream: TcpStream,
    ip: IpAddr,
    got: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    /// Its question is being answered.
    asked: bool,
    /// Since when it does what it does.
    since: i64,
}

impl Clients {
    /// A connection that there is no place for is closed.
    pub fn add(&mut self, stream: TcpStream, ip: IpAddr, now: i64) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        if self.open.values().filter(|c| c.ip == ip).count() >= EACH {
            return Ok(());
        }
        if self.open.len() >= MOST {
            let idle = self.open.iter().filter(|(_, c)| !c.asked).min_by_key(|(_, c)| c.since).map(|(number, _)| *number);
            let Some(idle) = idle else { return Ok(()) };
            self.open.remove(&idle);
        }
        self.next = self.next.wrapping_add(1);
        let connection = Connection { stream, ip, got: Vec::new(), out: Vec::new(), sent: 0, asked: false, since: now };
        self.open.insert(self.next, connection);
        Ok(())
    }

    pub fn ip(&self, number: u32) -> Option<IpAddr> {
        self.open.get(&number).map(|c| c.ip)
    }

    pub fn waits(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>, PollFlags)> {
        self.open.iter().map(|(number, c)| {
            let flags = match (c.sent < c.out.len() || c.has_question(), c.asked) {
                // A question that is here already is no reason to wait for bytes.
                (true, _) => PollFlags::POLLOUT,
                (false, true) => PollFlags::empty(),
                (false, false) => PollFlags::POLLIN,
            };
            (*number, c.stream.as_fd(), flags)
        })
    }

    /// Does what the socket is ready for; a question once it is whole.
    pub fn ready(&mut self, number: u32, now: i64) -> Option<Vec<u8>> {
        let connection = self.open.get_mut(&number)?;
        match connection.go_on(now) {
            Ok(question) => question,
            Err(e) if is_passing(&e) => None,
            // Whoever left wants nothing more.
            Err(_) => {
                self.open.remove(&number);
                None
            }
        }
    }

    /// A reply for it. Its next question waits for the next turn, also where it has come already.
    pub fn reply(&mut self, number: u32, message: &[u8], now: i64) {
        let Some(connection) = self.open.get_mut(&number) else { return };
        let Ok(length) = u16::try_from(message.len()) else { return }; // replies are sealed: no longer than 65535
        connection.out = [&length.to_be_bytes(), message].concat();
        (connection.sent, connection.asked, connection.since) = (0, false, now);
        match connection.send(now) {
            Ok(_) => {}
            Err(e) if is_passing(&e) => {}
            // Whoever left wants nothing more.
            Err(_) => self.close(number),
        }
    }

    pub fn close(&mut self, number: u32) {
        self.open.remove(&number);
    }

    pub fn due(&self) -> Option<i64> {
        self.open.values().map(|c| c.since + PATIENCE).min()
    }

    pub fn pass(&mut self, now: i64) {
        self.open.retain(|_, c| now < c.since + PATIENCE);
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Connection {
    /// True: nothing is left to be sent.
    fn send(&mut self, now: i64) -> io::Result<bool> {
        if self.sent < self.out.len() {
            self.sent += self.stream.write(self.out.get(self.sent..).unwrap_or_default())?;
            if self.sent < self.out.len() {
                return Ok(false);
            }
            (self.out, self.sent, self.since) = (Vec::new(), 0, now);
        }
        Ok(true)
    }

    /// Bytes for a whole question have come, or for one that can be none.
    fn has_question(&self) -> bool {
        let length = wire::u16_at(&self.got, 0).map(usize::from);
        !self.asked && length.is_some_and(|length| length > QUESTION || self.got.len() >= 2 + length)
    }

    fn go_on(&mut self, now: i64) -> io::Result<Option<Vec<u8>>> {
        if !self.send(now)? {
            return Ok(None);
        }
        if self.asked {
            // Polled for nothing: only an end or an error wakes it.
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if let Some(question) = self.whole(now)? {
            return Ok(Some(question));
        }
        let mut buffer = [0; QUESTION];
        match self.stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            got => {
                self.got.extend_from_slice(buffer.get(..got).unwrap_or_default());
                self.whole(now)
            }
        }
    }

    /// Cuts the first question off what came.
    fn whole(&mut self, now: i64) -> io::Result<Option<Vec<u8>>> {
        let Some(length) = wire::u16_at(&self.got, 0).map(usize::from) else { return Ok(None) };
        if !(wire::HEADER..=QUESTION).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if self.got.len() < 2 + length {
            return Ok(None);
        }
        let rest = self.got.split_off(2 + length);
        let question = std::mem::replace(&mut self.got, rest).split_off(2);
        (self.asked, self.since) = (true, now);
        Ok(Some(question))
    }
}
