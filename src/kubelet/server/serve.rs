//! Accepts clients, reads their one request, writes the answers; a thread each, all of them
//! bounded by `slots`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::model::{Answer, Ask, Failure, FailureKind, Request, StreamKind};
use super::slots::{Doing, Place, Slots, busy};
use super::{Agent, FrameError, MAX_ANSWER, MAX_REQUEST, receive, send};
use crate::runtime::{ExecParts, ExecProcess};
use crate::sys::socket;

/// How long a client may take to send its request.
const ASK: Duration = Duration::from_secs(5);
/// How long one write to a client that does not read may take.
const TAKE: Duration = Duration::from_secs(10);
/// Milliseconds between two looks at the socket's name.
const LOOK: u16 = 20_000;
/// A pull checks certificates and parses manifests on this stack.
const STACK: usize = 256 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("listen at {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("start the thread that serves {}", path.display())]
    Thread {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The listening socket and its thread. Dropping it takes no more clients; those that are being
/// served are served.
pub struct Server {
    path: PathBuf,
    /// Its other end tells the thread to leave.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// The caller holds the lock of this root: a socket that lies there is a dead agent's.
    pub fn start(path: &Path, agent: Arc<dyn Agent>) -> Result<Server, ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        let listener = socket::listen_private(path).map_err(failed)?;
        // A client may be gone between poll and accept: accept must not block then.
        listener.set_nonblocking(true).map_err(failed)?;
        let (stop, told) = UnixStream::pair().map_err(failed)?;
        let at = path.to_owned();
        let thread = Builder::new()
            .name("socket".into())
            .stack_size(64 * 1024)
            .spawn(move || accept_all(listener, &at, &told, &agent))
            .map_err(|source| ServerError::Thread { path: path.to_owned(), source })?;
        Ok(Server { path: path.to_owned(), stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(socket = %self.path.display(), "the socket's thread had panicked");
        }
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(socket = %self.path.display(), %error, "could not remove the socket");
            }
            _ => {}
        }
    }
}

fn accept_all(mut listener: UnixListener, path: &Path, told: &UnixStream, agent: &Arc<dyn Agent>) {
    let slots = Arc::new(Slots::default());
    loop {
        // Somebody took the socket's name away: nobody could ask us anything for ever.
        if !path.exists() {
            match socket::listen_private(path).and_then(|new| new.set_nonblocking(true).map(|()| new)) {
                Ok(new) => {
                    tracing::warn!(socket = %path.display(), "the local socket was removed: made anew");
                    listener = new;
                }
                // Its directory may be away as well; the next look tries again.
                Err(error) => {
                    tracing::warn!(socket = %path.display(), %error, "the local socket was removed and cannot be made anew")
                }
            }
        }
        let mut waits = [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(told.as_fd(), PollFlags::POLLIN)];
        if let Err(error) = poll(&mut waits, PollTimeout::from(LOOK))
            && error != nix::Error::EINTR
        {
            tracing::error!(%error, "poll of the local socket failed; it serves nobody any more");
            return;
        }
        let leave = waits.last().and_then(|w| w.revents()).is_some_and(|e| !e.is_empty());
        if leave {
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => admit(stream, &slots, agent),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                _ => {
                    // Out of descriptors or memory: it passes, and spinning would not help.
                    tracing::warn!(%error, "could not accept a client of the local socket");
                    std::thread::sleep(Duration::from_millis(200));
                }
            },
        }
    }
}

fn admit(stream: UnixStream, slots: &Arc<Slots>, agent: &Arc<dyn Agent>) {
    let peer = match socket::peer(&stream) {
        Ok(peer) => peer,
        Err(error) => return tracing::warn!(%error, "client of the local socket without credentials: refused"),
    };
    // The file's mode lets nobody else connect; it may have been loosened, or a descriptor passed on.
    if peer.uid != 0 && peer.uid != nix::unistd::geteuid().as_raw() {
        let denied = format!("the agent serves root only, not uid {}: run this as root (sudo coracle …)", peer.uid);
        // It fits in an empty socket's buffer; a client that is gone needs no answer.
        let _ = answer(&stream, &Answer::Error(Failure::new(FailureKind::Denied, denied)), &[]);
        // Nobody else's clients write our log full.
        return tracing::debug!(
            uid = peer.uid,
            pid = peer.pid,
            "client of the local socket is neither root nor our user: refused"
        );
    }
    let stream = Arc::new(stream);
    if let Err(error) = stream.set_write_timeout(Some(TAKE)) {
        return tracing::warn!(%error, "client of the local socket: could not set its time limit");
    }
    let Some(place) = slots.enter(&stream, Instant::now()) else {
        // It fits in an empty socket's buffer; a client that is gone needs no answer.
        let _ = answer(&stream, &Answer::Error(busy()), &[]);
        return;
    };
    let agent = Arc::clone(agent);
    let spawned = Builder::new().name("client".into()).stack_size(STACK).spawn(move || serve(&stream, &place, &*agent));
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for a client of the local socket");
    }
}

fn serve(stream: &UnixStream, place: &Place, agent: &dyn Agent) {
    let request = match receive(stream, MAX_REQUEST, Some(Instant::now() + ASK)) {
        Ok(None) => return,
        // Descriptors that came along are closed here: no request has any.
        Ok(Some((payload, _))) => serde_json::from_slice::<Request>(&payload)
            .map_err(|e| Failure::new(FailureKind::Invalid, format!("this agent does not understand the request: {e}"))),
        Err(e) => Err(Failure::of(FailureKind::Invalid, &e)),
    };
    let done = request.and_then(|request| handle(stream, place, agent, request.ask));
    let last = match done {
        Ok(()) => Answer::End {},
        Err(failure) => Answer::Error(failure),
    };
    if let Err(error) = answer(stream, &last, &[]) {
        tracing::debug!(error = %crate::obs::chain(&error), "a client of the local socket left early");
    }
}

fn handle(stream: &UnixStream, place: &Place, agent: &dyn Agent, ask: Ask) -> Result<(), Failure> {
    let doing = match ask {
        Ask::Pods(_) | Ask::Info {} | Ask::Services {} | Ask::Images {} | Ask::Exec(_) => Doing::Short,
        Ask::Policies { .. } | Ask::Tables {} | Ask::Trace { .. } => Doing::Short,
        Ask::Pull { .. } | Ask::Import { .. } | Ask::StopAll { .. } => Doing::Long,
    };
    if !place.begins(doing) {
        return Err(busy());
    }
    let give = |one: &Answer| answer(stream, one, &[]).map_err(|e| Failure::of(FailureKind::Failed, &e));
    match ask {
        Ask::Pods(ask) => {
            agent.pods(&ask, &mut |pod| give(&Answer::Pod(Box::new(pod))))?;
            agent.problems()?.into_iter().try_for_each(|problem| give(&Answer::Problem(problem)))
        }
        Ask::Services {} => agent.services()?.into_iter().try_for_each(|s| give(&Answer::Service(Box::new(s)))),
        Ask::Policies { pod } => give(&Answer::Policies(Box::new(agent.policies(&pod)?))),
        Ask::Tables {} => agent.tables(&mut |text| give(&Answer::Text { text })),
        Ask::Trace { from, to } => give(&Answer::Text { text: agent.trace(&from, &to)? }),
        Ask::Info {} => give(&Answer::Info(Box::new(agent.info()?))),
        Ask::Exec(ask) => {
            let (started, parts) = started(agent.exec(&ask)?);
            let fds: Vec<BorrowedFd<'_>> = std::iter::once(parts.connection.as_fd())
                .chain([&parts.stdin, &parts.stdout, &parts.stderr, &parts.pty].into_iter().flatten().map(AsFd::as_fd))
                .collect();
            answer(stream, &started, &fds).map_err(|e| Failure::of(FailureKind::Failed, &e))
        }
        Ask::Images {} => agent.images()?.into_iter().try_for_each(|image| give(&Answer::Image(image))),
        Ask::Pull { reference, username, password } => give(&Answer::Image(agent.pull(&reference, &username, &password)?)),
        Ask::Import { path, name } => {
            agent.import(&path, name.as_deref())?.into_iter().try_for_each(|image| give(&Answer::Image(image)))
        }
        Ask::StopAll { seconds } => {
            // The pods end whether the client listens or not.
            agent.stop_all(Duration::from_secs(seconds), &mut |text| {
                let _ = give(&Answer::Said { text });
            })
        }
    }
}

/// The answer to an exec, and the descriptors that ride on it in the answer's order. Should the
/// client be gone, dropping them ends the process.
fn started(process: ExecProcess) -> (Answer, ExecParts) {
    let parts = process.into_parts();
    let streams = [
        (StreamKind::Stdin, parts.stdin.is_some()),
        (StreamKind::Stdout, parts.stdout.is_some()),
        (StreamKind::Stderr, parts.stderr.is_some()),
        (StreamKind::Pty, parts.pty.is_some()),
    ];
    let streams = streams.into_iter().filter(|(_, there)| *there).map(|(kind, _)| kind).collect();
    (Answer::Started { pid: parts.pid, streams }, parts)
}

pub(super) fn answer(stream: &UnixStream, answer: &Answer, fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
    let payload = serde_json::to_vec(answer).map_err(|e| FrameError::Io(e.into()))?;
    if payload.len() > MAX_ANSWER {
        return Err(FrameError::TooLong(payload.len(), MAX_ANSWER));
    }
    send(stream, &payload, fds)
}
