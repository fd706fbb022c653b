//! The monitor's side of its connections.
//!
//! Invariant: nothing here blocks. A peer that does not read has at most [`MAX_QUEUED`] packets
//! waiting and is then dropped; one that sends rubbish is answered, or dropped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::wire::{Failure, Reply};
use crate::sys::seqpacket;

const MAX_QUEUED: usize = 64;
/// Connections at a time; more are closed at once.
const MAX_PEERS: usize = 128;

/// A connection, by a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerId(u64);

/// Whom an answer goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    pub peer: PeerId,
    pub request: u64,
}

#[derive(Debug)]
pub struct Peer {
    pub id: PeerId,
    pub subscribed: bool,
    socket: OwnedFd,
    queue: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
}

impl Peer {
    pub fn wants_to_write(&self) -> bool {
        !self.queue.is_empty()
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[derive(Debug, Default)]
pub struct Peers {
    all: Vec<Peer>,
    next: u64,
}

impl Peers {
    pub fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.all.iter()
    }

    pub fn find(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.all.iter_mut().find(|peer| peer.id == id)
    }

    pub fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        while let Some(socket) = seqpacket::accept(listener)? {
            if self.all.len() < MAX_PEERS {
                self.next += 1;
                let id = PeerId(self.next);
                self.all.push(Peer { id, subscribed: false, socket, queue: VecDeque::new() });
            }
        }
        Ok(())
    }

    pub fn answer(&mut self, to: Asker, reply: &Reply) {
        self.send(to.peer, to.request, reply, Vec::new());
    }

    pub fn fail(&mut self, to: Asker, failure: Failure) {
        self.answer(to, &Reply::Error(failure));
    }

    /// Events have request number 0.
    pub fn tell_subscribers(&mut self, reply: &Reply) {
        let to: Vec<PeerId> = self.all.iter().filter(|peer| peer.subscribed).map(|peer| peer.id).collect();
        for id in to {
            self.send(id, 0, reply, Vec::new());
        }
    }

    /// To a peer that is gone: nothing happens.
    pub fn send(&mut self, to: PeerId, request: u64, reply: &Reply, fds: Vec<OwnedFd>) {
        let bytes = reply.encode(request).or_else(|e| Reply::Error(Failure::from(e)).encode(request));
        // The second encoding is of a short text and cannot be too long.
        let (Some(peer), Ok(bytes)) = (self.find(to), bytes) else { return };
        peer.queue.push_back((bytes, fds));
        self.flush(to);
    }

    /// Sends what waits; drops a peer that is gone or too slow.
    pub fn flush(&mut self, id: PeerId) {
        let Some(peer) = self.find(id) else { return };
        let mut gone = false;
        while let Some((bytes, fds)) = peer.queue.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match seqpacket::send(peer.socket.as_fd(), bytes, &fds) {
                Ok(()) => drop(peer.queue.pop_front()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    gone = true;
                    break;
                }
            }
        }
        if gone || peer.queue.len() > MAX_QUEUED {
            self.drop_peer(id);
        }
    }

    pub fn drop_peer(&mut self, id: PeerId) {
        self.all.retain(|peer| peer.id != id);
    }

    /// What can still be said without waiting, before the process ends.
    pub fn drain(&mut self) {
        for id in self.all.iter().map(|peer| peer.id).collect::<Vec<_>>() {
            self.flush(id);
        }
    }
}
