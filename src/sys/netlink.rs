//! A blocking netlink socket, and the reading of netlink messages and attributes.
//!
//! Reading takes only the attributes that we know and never stumbles over a newer kernel's others. Invariant: a request returns
//! after the kernel has carried it out or refused it, with the kernel's own words (extended acks)
//! in the error; every message of a transaction is acknowledged or the transaction has failed.
//!
//! Sources: netlink(7), rtnetlink(7), Documentation/userspace-api/netlink/intro.rst.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::SocketAddr;
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};

pub use super::attrs::{Attrs, Message};
use super::wire::Wire;

pub const NLM_F_REQUEST: u16 = 0x1;
pub const NLM_F_ACK: u16 = 0x4;
pub const NLM_F_DUMP_INTR: u16 = 0x10;
pub const NLM_F_DUMP: u16 = 0x300;
pub const NLM_F_REPLACE: u16 = 0x100;
pub const NLM_F_EXCL: u16 = 0x200;
pub const NLM_F_CREATE: u16 = 0x400;
pub const NLM_F_APPEND: u16 = 0x800;
/// Of attributes' types.
pub const NLA_F_NESTED: u16 = 0x8000;
/// Length of nlmsghdr.
pub const HEADER: usize = 16;

const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_OVERRUN: u16 = 4;
const NLMSGERR_ATTR_MSG: u16 = 1;
const NLMSGERR_ATTR_OFFS: u16 = 2;
/// The largest datagram of a dump has 32 KiB.
const DUMP_BUFFER: usize = 64 * 1024;
const NLA_TYPE_MASK: u16 = 0x3fff;
/// A dump that the kernel's tables outran is read again this often.
const DUMP_TRIES: u32 = 16;

/// A request that the kernel refused, or that could not be made.
#[derive(Debug, thiserror::Error)]
#[error("netlink: {what}")]
pub struct NetlinkError {
    /// What was asked, and the kernel's own words where it had some.
    pub what: String,
    /// Of the attribute that the kernel refused, from the message's start, where it said.
    pub offset: Option<u32>,
    pub source: io::Error,
}

impl NetlinkError {
    fn new(what: impl Into<String>, source: impl Into<io::Error>) -> NetlinkError {
        NetlinkError { what: what.into(), offset: None, source: source.into() }
    }
    pub fn errno(&self) -> Errno {
        self.source.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Route,
    Netfilter,
    KobjectUevent,
}

/// A message that came from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub kind: u16,
    /// After the netlink header.
    pub payload: Vec<u8>,
}

/// Why a transaction was refused.
#[derive(Debug)]
pub struct BatchError {
    /// Index into the messages given; None where it concerns all of them.
    pub message: Option<usize>,
    pub error: NetlinkError,
    /// Further messages that were refused: the kernel tries all of them.
    pub others: Vec<(usize, NetlinkError)>,
}

impl BatchError {
    fn whole(error: NetlinkError) -> BatchError {
        BatchError { message: None, error, others: Vec::new() }
    }
}

#[derive(Debug)]
pub struct Socket {
    inner: netlink_sys::Socket,
    sequence: u32,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl Socket {
    /// In the network namespace of the calling thread, for good.
    pub fn open(protocol: Protocol) -> Result<Socket, NetlinkError> {
        Socket::bind(protocol, 0)
    }

    /// A socket that hears the multicast groups of the mask `groups`.
    pub fn listen(protocol: Protocol, groups: u32) -> Result<Socket, NetlinkError> {
        let socket = Socket::bind(protocol, groups)?;
        let what = || format!("{protocol:?} non-blocking");
        socket.inner.set_non_blocking(true).map_err(|e| NetlinkError::new(what(), e))?;
        Ok(socket)
    }

    fn bind(protocol: Protocol, groups: u32) -> Result<Socket, NetlinkError> {
        let number = match protocol {
            Protocol::Route => netlink_sys::protocols::NETLINK_ROUTE,
            Protocol::Netfilter => netlink_sys::protocols::NETLINK_NETFILTER,
            Protocol::KobjectUevent => netlink_sys::protocols::NETLINK_KOBJECT_UEVENT,
        };
        let fail = |e: io::Error| NetlinkError::new(format!("open a {protocol:?} socket"), e);
        let mut inner = netlink_sys::Socket::new(number).map_err(fail)?;
        inner.bind(&SocketAddr::new(0, groups)).map_err(fail)?;
        if protocol != Protocol::KobjectUevent {
            inner.set_cap_ack(true).map_err(fail)?;
            inner.set_ext_ack(true).map_err(fail)?;
        }
        if protocol == Protocol::Route {
            // Dumps then honour the filter in their request's header.
            inner.set_netlink_get_strict_chk(true).map_err(fail)?;
        }
        Ok(Socket { inner, sequence: 0 })
    }

    fn next(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends one request and waits for the kernel's acknowledgement.
    pub fn request(&mut self, what: &str, message: &Message) -> Result<(), NetlinkError> {
        self.exchange(what, message, NLM_F_ACK).map(|_| ())
    }

    /// Sends one request and returns what came before the acknowledgement.
    pub fn query(&mut self, what: &str, message: &Message) -> Result<Vec<Reply>, NetlinkError> {
        self.exchange(what, message, NLM_F_ACK)
    }

    /// Reads a whole table; a change in the middle of it makes the kernel say so and us read again.
    pub fn dump(&mut self, what: &str, message: &Message) -> Result<Vec<Reply>, NetlinkError> {
        for _ in 1..DUMP_TRIES {
            match self.exchange(what, message, NLM_F_DUMP) {
                Err(e) if e.errno() == Errno::EINTR => continue,
                other => return other,
            }
        }
        self.exchange(what, message, NLM_F_DUMP)
    }

    /// As [`Socket::dump`], but keeps nothing: each message is given to `take` with what it gathers.
    /// When the kernel's tables outran the dump, all begins again from `begin`'s value.
    pub fn dump_each<T>(
        &mut self,
        what: &str,
        message: &Message,
        begin: impl Fn() -> T,
        mut take: impl FnMut(&mut T, u16, &[u8]),
    ) -> Result<T, NetlinkError> {
        let mut buffer = Vec::with_capacity(DUMP_BUFFER);
        let mut tries = 1;
        loop {
            let mut gathered = begin();
            match self.dump_once(what, message, &mut buffer, &mut |kind, payload| take(&mut gathered, kind, payload)) {
                Ok(()) => return Ok(gathered),
                Err(e) if e.errno() == Errno::EINTR && tries < DUMP_TRIES => tries += 1,
                Err(e) => return Err(e),
            }
        }
    }

    fn dump_once(
        &mut self,
        what: &str,
        message: &Message,
        buffer: &mut Vec<u8>,
        take: &mut dyn FnMut(u16, &[u8]),
    ) -> Result<(), NetlinkError> {
        let sequence = self.next();
        let mut bytes = Vec::new();
        message.encode(NLM_F_DUMP, sequence, &mut bytes);
        self.send(what, &bytes)?;
        let mut interrupted = false;
        loop {
            self.receive_into(what, buffer)?;
            for (header, payload) in messages(buffer) {
                if header.sequence != sequence {
                    continue;
                }
                interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
                match header.kind {
                    NLMSG_ERROR => {
                        return Err(
                            error_of(what, header.flags, payload).unwrap_or_else(|| NetlinkError::new(what, Errno::EBADMSG))
                        );
                    }
                    NLMSG_DONE => {
                        return match word(payload, 0) {
                            Some(code) if (code as i32) < 0 => Err(error_at(what, code as i32, "")),
                            _ if interrupted => Err(NetlinkError::new(what, Errno::EINTR)),
                            _ => Ok(()),
                        };
                    }
                    NLMSG_OVERRUN => return Err(NetlinkError::new(what, Errno::EOVERFLOW)),
                    kind => take(kind, payload),
                }
            }
        }
    }

    fn receive_into(&self, what: &str, buffer: &mut Vec<u8>) -> Result<(), NetlinkError> {
        loop {
            buffer.clear();
            match self.inner.recv_from(buffer, 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(NetlinkError::new(what, e)),
                Ok((_, from)) if from.port_number() != 0 => continue,
                Ok(_) => return Ok(()),
            }
        }
    }

    /// What the kernel calls this socket: the port in messages about what came through it.
    pub fn port(&self) -> Result<u32, NetlinkError> {
        let mut address = SocketAddr::new(0, 0);
        self.inner.get_address(&mut address).map_err(|e| NetlinkError::new("read a socket's port", e))?;
        Ok(address.port_number())
    }

    fn exchange(&mut self, what: &str, message: &Message, flags: u16) -> Result<Vec<Reply>, NetlinkError> {
        if message.attrs.too_long {
            return Err(NetlinkError::new(what, Errno::EMSGSIZE));
        }
        let sequence = self.next();
        let mut bytes = Vec::new();
        message.encode(flags, sequence, &mut bytes);
        self.send(what, &bytes)?;
        let (mut replies, mut interrupted) = (Vec::new(), false);
        loop {
            let datagram = self.receive(what)?;
            for (header, payload) in messages(&datagram) {
                if header.sequence != sequence {
                    continue;
                }
                interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
                match header.kind {
                    NLMSG_ERROR => match error_of(what, header.flags, payload) {
                        None => return Ok(replies),
                        Some(error) => return Err(error),
                    },
                    // A dump may end in an error; it is the first word then.
                    NLMSG_DONE => match (word(payload, 0), interrupted) {
                        (Some(code), _) if (code as i32) < 0 => return Err(error_at(what, code as i32, "")),
                        (_, true) => return Err(NetlinkError::new(what, Errno::EINTR)),
                        _ => return Ok(replies),
                    },
                    NLMSG_OVERRUN => return Err(NetlinkError::new(what, Errno::EOVERFLOW)),
                    kind => replies.push(Reply { kind, payload: payload.to_vec() }),
                }
            }
        }
    }

    /// Sends several messages in one piece; the kernel works inside of send, so all answers are
    /// there when it returns. `last`: the one whose acknowledgement stands for all of them, since
    /// thousands would not fit into the socket; each that is refused answers anyway.
    pub fn transact(&mut self, what: &str, wire: &mut Wire, last: usize) -> Result<(), BatchError> {
        if let Some(at) = wire.too_long() {
            return Err(BatchError { message: Some(at), ..BatchError::whole(NetlinkError::new(what, Errno::EMSGSIZE)) });
        }
        let first = self.sequence.wrapping_add(1);
        self.sequence = self.sequence.wrapping_add(wire.messages() as u32);
        wire.number(first, last, NLM_F_ACK);
        let bytes = wire.as_slice();
        // Ordinary batches fit into the default buffer; a big one asks for room. Where that is
        // refused, send says EMSGSIZE.
        if bytes.len() > 100_000 && setsockopt(&self.inner, sockopt::SndBufForce, &(bytes.len() * 2)).is_err() {
            tracing::debug!(bytes = bytes.len(), "no larger netlink buffer");
        }
        self.send(what, bytes).map_err(BatchError::whole)?;
        let (mut acknowledged, mut refused) = (false, Vec::new());
        loop {
            let datagram = match self.receive_now(what) {
                Ok(Some(datagram)) => datagram,
                Ok(None) => break,
                // More refusals than the socket could hold; those that it holds will do.
                Err(error) if error.errno() == Errno::ENOBUFS => continue,
                Err(error) => return Err(BatchError::whole(error)),
            };
            for (header, payload) in messages(&datagram) {
                let at = header.sequence.wrapping_sub(first) as usize;
                if header.kind != NLMSG_ERROR || at >= wire.messages() {
                    continue;
                }
                match error_of(what, header.flags, payload) {
                    None => acknowledged |= at == last,
                    Some(error) => refused.push((at, error)),
                }
            }
        }
        refused.sort_by_key(|(at, _)| *at);
        let mut refused = refused.into_iter();
        match refused.next() {
            // The first message opens the transaction: what is said of it is said of all.
            Some((at, error)) => Err(BatchError { message: (at > 0).then_some(at), error, others: refused.collect() }),
            None if acknowledged => Ok(()),
            None => Err(BatchError::whole(NetlinkError::new(format!("{what}: no acknowledgement"), Errno::ENOMSG))),
        }
    }

    fn send(&self, what: &str, bytes: &[u8]) -> Result<(), NetlinkError> {
        loop {
            match self.inner.send_to(bytes, &SocketAddr::new(0, 0), 0) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(NetlinkError::new(what, e)),
                Ok(_) => return Ok(()),
            }
        }
    }

    fn receive(&self, what: &str) -> Result<Vec<u8>, NetlinkError> {
        loop {
            match self.inner.recv_from_full() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(NetlinkError::new(what, e)),
                // Only the kernel has port 0; what others send us is not for us.
                Ok((_, from)) if from.port_number() != 0 => continue,
                Ok((bytes, _)) => return Ok(bytes),
            }
        }
    }

    /// One datagram if there is one. ENOBUFS: some were lost.
    pub fn receive_now(&self, what: &str) -> Result<Option<Vec<u8>>, NetlinkError> {
        let mut buffer: Vec<u8> = Vec::with_capacity(64 * 1024);
        loop {
            buffer.clear();
            match self.inner.recv_from(&mut buffer, nix::libc::MSG_DONTWAIT) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(NetlinkError::new(what, e)),
                Ok((_, from)) if from.port_number() != 0 => continue,
                Ok(_) => return Ok(Some(buffer)),
            }
        }
    }
}

/// The parts of nlmsghdr that matter on reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    /// Of the socket that asked, also where others hear of it.
    pub port: u32,
}

/// The messages of a datagram; ends at the first malformed one.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || {
        let length = word(bytes, 0)? as usize;
        let kind = half(bytes, 4)?;
        let flags = half(bytes, 6)?;
        let sequence = word(bytes, 8)?;
        let port = word(bytes, 12)?;
        let payload = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((Header { kind, flags, sequence, port }, payload))
    })
}

/// The attributes in `bytes`, flags taken off their types; ends at the first malformed one.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(half(bytes, 0)?);
        let kind = half(bytes, 2)? & NLA_TYPE_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The first attribute of that type.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

/// A NUL-terminated text.
pub fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

/// 4 bytes at `at` in the machine's order.
pub fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

/// None: an acknowledgement.
fn error_of(what: &str, flags: u16, payload: &[u8]) -> Option<NetlinkError> {
    let code = word(payload, 0).map_or(-nix::libc::EBADMSG, |c| c as i32);
    if code == 0 {
        return None;
    }
    // Behind the code stands the header of our request, its body only where it was not capped.
    let request = word(payload, 4).map_or(HEADER, |l| l as usize);
    let skip = if flags & NLM_F_CAPPED != 0 { HEADER } else { request.next_multiple_of(4) };
    let more = if flags & NLM_F_ACK_TLVS == 0 { None } else { payload.get(4 + skip..) };
    let said = more.and_then(|more| attribute(more, NLMSGERR_ATTR_MSG)).map(text).unwrap_or_default();
    let offset = more.and_then(|more| word(attribute(more, NLMSGERR_ATTR_OFFS)?, 0));
    Some(NetlinkError { offset, ..error_at(what, code, &said) })
}

fn error_at(what: &str, code: i32, said: &str) -> NetlinkError {
    let what = if said.is_empty() { what.to_owned() } else { format!("{what} ({said})") };
    NetlinkError::new(what, io::Error::from_raw_os_error(code.wrapping_neg()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_back_as_they_went_in() {
        let attrs = Attrs::new().u8(1, 7).nest(2, Attrs::new().text(3, "abc").be16(4, 80)).bytes(5, &[]);
        let read: Vec<_> = attributes(attrs.as_slice()).collect();
        assert_eq!(read[0], (1, &[7][..]));
        assert_eq!(read[2], (5, &[][..]));
        let inner: Vec<_> = attributes(read[1].1).collect();
        assert_eq!((text(inner[0].1).as_str(), inner[1]), ("abc", (4, &[0, 80][..])));
    }

    #[test]
    fn malformed_bytes_end_the_reading_and_nothing_else() {
        assert_eq!(attributes(&[3, 0, 1, 0, 9]).count(), 0);
        assert_eq!(attributes(&[200, 0, 1, 0, 9, 9]).count(), 0);
        assert_eq!(messages(&[255; 40]).count(), 0);
        assert_eq!(messages(&[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).count(), 0);
    }

    #[test]
    fn an_attribute_beyond_64_kib_is_refused_before_it_is_sent() {
        let message = Message::new(0, 0, &[], Attrs::new().nest(1, Attrs::new().bytes(1, &vec![0; 65_532])));
        let mut socket = Socket::open(Protocol::Route).unwrap();
        assert_eq!(socket.request("too long", &message).unwrap_err().errno(), Errno::EMSGSIZE);
    }

    #[test]
    fn the_kernels_words_are_in_the_error() {
        // RTM_NEWLINK of a kind that no kernel knows.
        let info = Attrs::new().text(1, "no-such-kind");
        let message = Message::new(16, NLM_F_CREATE, &[0; 16], Attrs::new().nest(18, info));
        let error = Socket::open(Protocol::Route).unwrap().request("make a link", &message).unwrap_err();
        assert!(error.what.starts_with("make a link (") || error.errno() == Errno::EPERM, "{error:?}");
    }
}
