//! Frames of the local socket: four bytes of length (big endian), then that many bytes of JSON;
//! descriptors ride on the first byte.
//!
//! Invariant: a peer can make us hold `max` bytes and `MAX_FDS` descriptors, and keep us waiting
//! until the socket's own time limit or `deadline`, no more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::sys::socket::{MAX_FDS, recv_with_fds, send_with_fds};

/// Largest request: an exec's argv is the biggest thing in one.
pub const MAX_REQUEST: usize = 256 * 1024;
/// Largest answer: one pod with its manifest; longer answers are many frames.
pub const MAX_ANSWER: usize = 4 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the peer closed the connection in the middle of a frame")]
    Cut,
    #[error("a frame of {0} bytes is more than the {1} that are allowed")]
    TooLong(usize, usize),
    #[error("more than {MAX_FDS} descriptors with one frame")]
    TooManyFds,
    #[error("the peer did not send or take a whole frame in time")]
    Late,
    #[error("local socket")]
    Io(#[source] io::Error),
}

/// Sends one frame. The socket's write timeout bounds how long a slow reader is waited for.
pub fn send(socket: &UnixStream, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
    let length = u32::try_from(payload.len()).map_err(|_| FrameError::TooLong(payload.len(), MAX_ANSWER))?;
    let mut frame = Vec::with_capacity(4 + payload.len());
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(payload);
    let mut rest = frame.as_slice();
    let mut riding = fds;
    while !rest.is_empty() {
        match send_with_fds(socket.as_fd(), rest, riding) {
            Ok(sent) => {
                riding = &[];
                rest = rest.get(sent..).unwrap_or_default();
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error(e)),
        }
    }
    Ok(())
}

/// A frame's bytes and the descriptors that came with it.
pub type Frame = (Vec<u8>, Vec<OwnedFd>);

/// Receives one frame; None where the peer closed between frames. With a deadline the whole
/// frame must be here by then, byte by byte or not.
pub fn receive(socket: &UnixStream, max: usize, deadline: Option<Instant>) -> Result<Option<Frame>, FrameError> {
    let mut fds = Vec::new();
    let mut head = [0; 4];
    match fill(socket, &mut head, &mut fds, deadline)? {
        0 => return Ok(None),
        4 => {}
        _ => return Err(FrameError::Cut),
    }
    let length = u32::from_be_bytes(head) as usize;
    if length > max {
        return Err(FrameError::TooLong(length, max));
    }
    let mut payload = vec![0; length];
    if fill(socket, &mut payload, &mut fds, deadline)? < length {
        return Err(FrameError::Cut);
    }
    Ok(Some((payload, fds)))
}

fn fill(socket: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>, deadline: Option<Instant>) -> Result<usize, FrameError> {
    let mut at = 0;
    while at < buffer.len() {
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(FrameError::Late);
            }
            // A zero timeout would mean "for ever".
            socket.set_read_timeout(Some(left.max(Duration::from_millis(1)))).map_err(FrameError::Io)?;
        }
        match recv_with_fds(socket.as_fd(), buffer.get_mut(at..).unwrap_or_default()) {
            Ok((0, _)) => break,
            Ok((n, came)) => {
                at += n;
                fds.extend(came);
                if fds.len() > MAX_FDS {
                    return Err(FrameError::TooManyFds);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(io_error(e)),
        }
    }
    Ok(at)
}

fn io_error(error: io::Error) -> FrameError {
    match error.kind() {
        // SO_RCVTIMEO and SO_SNDTIMEO end as EAGAIN.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => FrameError::Late,
        io::ErrorKind::InvalidData => FrameError::TooManyFds,
        _ => FrameError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn frames_of_any_size_come_back_whole_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            for size in [0usize, 1, 5, 70_000, 1_000_000] {
                send(&a, &vec![7; size], &[a.as_fd()]).unwrap();
            }
        });
        for size in [0usize, 1, 5, 70_000, 1_000_000] {
            let (payload, fds) = receive(&b, MAX_ANSWER, None).unwrap().unwrap();
            assert_eq!((payload.len(), fds.len()), (size, 1));
        }
        writer.join().unwrap();
        assert!(receive(&b, MAX_ANSWER, None).unwrap().is_none());
    }

    #[test]
    fn hostile_frames_end_in_typed_errors() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert!(matches!(receive(&b, 100, None), Err(FrameError::TooLong(_, 100))));

        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[0, 0]).unwrap();
        drop(a);
        assert!(matches!(receive(&b, 100, None), Err(FrameError::Cut)));

        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[0, 0, 0, 9, b'x']).unwrap();
        let started = Instant::now();
        let deadline = Some(started + Duration::from_millis(80));
        assert!(matches!(receive(&b, 100, deadline), Err(FrameError::Late)));
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}
