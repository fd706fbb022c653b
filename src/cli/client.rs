//! The client's end of the local socket. Invariant: an agent that is down, slow or of another
//! version ends in an error that names the socket and the cure.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use super::exit::CliError;
use crate::config::Roots;
use crate::kubelet::server::model::{Answer, Ask, PROTOCOL, Request};
use crate::kubelet::server::{FrameError, MAX_ANSWER, receive, send};
use crate::sys::socket;

pub struct Client {
    stream: UnixStream,
}

impl Client {
    pub fn connect(roots: &Roots) -> Result<Client, CliError> {
        let socket = roots.socket();
        let stream = socket::connect_to(&socket).map_err(|source| no_agent(socket, source))?;
        Ok(Client { stream })
    }

    /// None where no agent listens: for verbs that can do without.
    pub fn if_running(roots: &Roots) -> Result<Option<Client>, CliError> {
        match Client::connect(roots) {
            Ok(client) => Ok(Some(client)),
            Err(CliError::NoAgent { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends the one request of this connection.
    pub fn ask(self, ask: Ask) -> Result<Answers, CliError> {
        let request = Request { protocol: PROTOCOL, ask };
        let payload = serde_json::to_vec(&request).map_err(CliError::Answer)?;
        match send(&self.stream, &payload, &[]) {
            // It was answered before it was asked: the answer says why.
            Err(FrameError::Io(e)) if e.kind() == io::ErrorKind::BrokenPipe => {}
            sent => sent?,
        }
        Ok(Answers { stream: self.stream })
    }
}

fn no_agent(socket: PathBuf, source: io::Error) -> CliError {
    match source.kind() {
        io::ErrorKind::PermissionDenied => CliError::NotAllowed { socket, source },
        _ => CliError::NoAgent { socket, source },
    }
}

pub struct Answers {
    pub stream: UnixStream,
}

impl Answers {
    /// The next answer; None at `End`. An `Error` answer is an `Err`.
    pub fn next(&mut self) -> Result<Option<Answer>, CliError> {
        Ok(self.next_with_fds()?.map(|(answer, _)| answer))
    }

    pub fn next_with_fds(&mut self) -> Result<Option<(Answer, Vec<OwnedFd>)>, CliError> {
        let (payload, fds) = receive(&self.stream, MAX_ANSWER, None)?.ok_or(CliError::Hangup)?;
        match serde_json::from_slice(&payload).map_err(CliError::Answer)? {
            Answer::End {} => Ok(None),
            Answer::Error(failure) => Err(CliError::Refused(failure)),
            answer => Ok(Some((answer, fds))),
        }
    }
}
