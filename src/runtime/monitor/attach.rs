//! Clients joined to a container's streams while it runs.
//!
//! Invariant: the container and its log never wait for a client. Output is copied to each; one
//! that cannot take it at once loses the stream. Input comes from one client at a time, and is
//! read only as fast as the container takes it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::sys::process;

/// Copies of one output stream.
#[derive(Debug, Default)]
pub struct Tees(Vec<OwnedFd>);

/// Clients of one stream at a time.
const MAX_TEES: usize = 32;

impl Tees {
    /// False where there are too many already.
    pub fn add(&mut self, to: OwnedFd) -> std::io::Result<bool> {
        if self.0.len() >= MAX_TEES {
            return Ok(false);
        }
        process::set_nonblocking(to.as_fd())?;
        self.0.push(to);
        Ok(true)
    }

    /// To be polled for errors: the only word of a client that goes while the container is silent.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter()
    }

    /// Lets go of clients that have gone.
    pub fn prune(&mut self) {
        self.0.retain(|to| {
            let mut fds = [PollFd::new(to.as_fd(), PollFlags::empty())];
            // Nothing to tell, or interrupted: looked at again by the next poll.
            !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
        });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn write(&mut self, bytes: &[u8]) {
        // Short or refused: too slow, or gone.
        self.0.retain(|to| nix::unistd::write(to, bytes) == Ok(bytes.len()));
    }
}

/// The way in.
#[derive(Debug)]
pub struct Stdin {
    /// The container's end; None where it has no stdin, or has had its last byte.
    pub to: Option<OwnedFd>,
    /// The attached client's end.
    pub from: Option<OwnedFd>,
    /// Read from the client and not yet taken by the container.
    waiting: Vec<u8>,
    /// stdinOnce: the first client's end is the container's.
    once: bool,
}

impl Stdin {
    pub fn new(to: Option<OwnedFd>, once: bool) -> Stdin {
        Stdin { to, from: None, waiting: Vec::new(), once }
    }

    /// False where there is no stdin, or another client holds it.
    pub fn attach(&mut self, from: OwnedFd) -> std::io::Result<bool> {
        if self.to.is_none() || self.from.is_some() {
            return Ok(false);
        }
        process::set_nonblocking(from.as_fd())?;
        self.from = Some(from);
        Ok(true)
    }

    pub fn wants_to_read(&self) -> bool {
        self.from.is_some() && self.waiting.is_empty()
    }

    pub fn wants_to_write(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Moves what can be moved now.
    pub fn pump(&mut self, buffer: &mut [u8]) {
        if self.waiting.is_empty()
            && let Some(from) = &self.from
        {
            match nix::unistd::read(from.as_raw_fd(), buffer) {
                Ok(n) if n > 0 => self.waiting.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Ok(_) | Err(_) => {
                    self.from = None;
                    if self.once {
                        self.to = None;
                    }
                }
            }
        }
        let Some(to) = &self.to else {
            self.waiting = Vec::new();
            return;
        };
        if self.waiting.is_empty() {
            return;
        }
        match nix::unistd::write(to, &self.waiting) {
            Ok(n) => drop(self.waiting.drain(..n)),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // The container has closed its stdin.
            Err(_) => *self = Stdin::new(None, self.once),
        }
        if self.waiting.is_empty() {
            self.waiting = Vec::new();
        }
    }
}
