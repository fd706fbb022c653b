//! Exit codes and the errors of client verbs. Invariant: one error is one line on stderr with its
//! whole chain, and its exit code says which kind it was.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use crate::kubelet::server::FrameError;
use crate::kubelet::server::model::{Failure, FailureKind};

/// What the process ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Ok,
    /// It was tried and failed; `check` found something missing.
    Failed,
    /// The command line makes no sense.
    Usage,
    /// Nobody listens at the agent's socket.
    NoAgent,
    /// The named pod, container or image is not here.
    NotFound,
    /// `exec` could not run the command at all.
    ExecFailed,
    /// stdout was closed: 128 + SIGPIPE, as of a program that the signal ended.
    Pipe,
    /// The exit code of a command that `exec` or `runtime run` ran.
    Passed(u8),
}

impl Exit {
    pub fn code(self) -> i32 {
        match self {
            Exit::Ok => 0,
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::NoAgent => 3,
            Exit::NotFound => 4,
            Exit::ExecFailed => 125,
            Exit::Pipe => 141,
            Exit::Passed(code) => i32::from(code),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CliError {
    #[error("{0}")]
    Usage(String),
    #[error("the agent is not running: nobody answers at {}; start it with `coracle agent`, or name its --root", socket.display())]
    NoAgent {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent's socket {} belongs to root: run this as root (sudo coracle …)", socket.display())]
    NotAllowed {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent went away before it had answered")]
    Hangup,
    #[error(transparent)]
    Refused(#[from] Failure),
    #[error("talk to the agent")]
    Frame(#[from] FrameError),
    #[error("read what the agent said")]
    Answer(#[source] serde_json::Error),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Failed(String),
    #[error("write to stdout")]
    Stdout(#[source] io::Error),
    #[error("{operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{what}")]
    Because {
        what: String,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

impl CliError {
    pub fn because(what: impl Into<String>, source: impl Into<Box<dyn Error + Send + Sync>>) -> CliError {
        CliError::Because { what: what.into(), source: source.into() }
    }

    pub fn io(operation: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> CliError {
        let path = path.into();
        move |source| CliError::Io { operation, path, source }
    }

    pub fn exit(&self) -> Exit {
        match self {
            CliError::Usage(_) => Exit::Usage,
            CliError::NoAgent { .. } | CliError::NotAllowed { .. } | CliError::Hangup => Exit::NoAgent,
            CliError::NotFound(_) => Exit::NotFound,
            CliError::Refused(failure) => match failure.kind {
                FailureKind::NotFound => Exit::NotFound,
                FailureKind::Denied => Exit::NoAgent,
                FailureKind::NoProgram => Exit::Passed(127),
                FailureKind::NotExecutable => Exit::Passed(126),
                FailureKind::Invalid | FailureKind::Busy | FailureKind::Failed | FailureKind::Other => Exit::Failed,
            },
            CliError::Stdout(e) if e.kind() == io::ErrorKind::BrokenPipe => Exit::Pipe,
            CliError::Stdout(_)
            | CliError::Frame(_)
            | CliError::Answer(_)
            | CliError::Failed(_)
            | CliError::Io { .. }
            | CliError::Because { .. } => Exit::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts rely on these numbers: they never change.
    #[test]
    fn exit_codes_are_what_the_help_says() {
        let all = [Exit::Ok, Exit::Failed, Exit::Usage, Exit::NoAgent, Exit::NotFound, Exit::ExecFailed, Exit::Pipe];
        assert_eq!(all.map(Exit::code), [0, 1, 2, 3, 4, 125, 141]);
        assert_eq!(Exit::Passed(137).code(), 137);
        assert_eq!(CliError::Refused(Failure::new(FailureKind::NotFound, "x")).exit(), Exit::NotFound);
        assert_eq!(CliError::Stdout(io::ErrorKind::BrokenPipe.into()).exit(), Exit::Pipe);
    }
}
