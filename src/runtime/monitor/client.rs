//! The agent's side of the wire: one connection a question, its own time limit.
//!
//! Invariant: no call waits longer than its limit, and none holds a lock. A monitor that does not
//! answer is not dead: only its pidfd or its start time says so.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::super::layout::{PodRun, SOCKET};
use super::wire::{Failure, Frame, Kind, MAX_FRAME, Reply, Request};
use crate::sys::{file, seqpacket};

/// A connection to one monitor.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    next: u64,
}

/// What came of a question.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// No answer: not there, too slow, or gone in the middle.
    #[error("no answer")]
    Io(#[from] io::Error),
    /// An answer that says no.
    #[error("{}", .0.message)]
    Failed(Failure),
}

impl Client {
    pub fn connect(run: &PodRun) -> io::Result<Client> {
        let dir = file::open_dir_path(run.path())?;
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            match seqpacket::connect(dir.as_fd(), SOCKET) {
                // Its queue of connections is full: it has not had a turn for a while.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return Ok(Client { socket: other?, next: 0 }),
            }
        }
    }

    /// A connection that another process of ours has made.
    pub fn from_fd(socket: OwnedFd) -> Client {
        Client { socket, next: 1 << 32 }
    }

    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }

    /// Pid of the process that listens.
    pub fn peer_pid(&self) -> io::Result<i32> {
        seqpacket::peer_pid(self.socket.as_fd())
    }

    /// Asks and waits for the answer; events that come in between are not for this connection.
    pub fn call(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), CallError> {
        let id = self.ask(request, fds)?;
        let deadline = Instant::now() + limit;
        loop {
            match self.hear(Some(deadline.saturating_duration_since(Instant::now())))? {
                None => return Err(io::Error::from(io::ErrorKind::TimedOut).into()),
                Some((answered, Reply::Error(failure), _)) if answered == id => return Err(CallError::Failed(failure)),
                Some((answered, reply, fds)) if answered == id => return Ok((reply, fds)),
                Some(_) => {}
            }
        }
    }

    /// Only asks; the answer's number is returned.
    pub fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<u64, CallError> {
        self.next += 1;
        let bytes = request.encode(self.next).map_err(|e| CallError::Failed(e.into()))?;
        seqpacket::send(self.socket.as_fd(), &bytes, fds)?;
        Ok(self.next)
    }

    /// The next thing it says, with its number (0: an event); None when the time is over.
    /// What a newer monitor says and this version does not know is skipped.
    pub fn hear(&mut self, limit: Option<Duration>) -> io::Result<Option<(u64, Reply, Vec<OwnedFd>)>> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut buffer = vec![0; MAX_FRAME];
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !seqpacket::wait(self.socket.as_fd(), left)? {
                return Ok(None);
            }
            match seqpacket::receive(self.socket.as_fd(), &mut buffer)? {
                seqpacket::Received::Nothing | seqpacket::Received::TooLong => {}
                seqpacket::Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                seqpacket::Received::Message { len, fds } => {
                    let Ok(frame) = Frame::parse(buffer.get(..len).unwrap_or_default()) else { continue };
                    match Reply::decode(&frame) {
                        Ok(reply) => return Ok(Some((frame.id, reply, fds))),
                        Err(e) if frame.id != 0 => return Ok(Some((frame.id, Reply::Error(e.into()), fds))),
                        Err(_) => {}
                    }
                }
            }
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl CallError {
    pub fn kind(&self) -> Option<Kind> {
        match self {
            CallError::Io(_) => None,
            CallError::Failed(failure) => Some(failure.kind),
        }
    }
}
