//! What agent and monitor say to each other: one JSON object a packet, descriptors beside it.
//!
//! ```text
//! → {"v":1,"id":7,"type":"start","body":{"id":"4f2a…"}}
//! ← {"v":1,"id":7,"type":"started","body":{"started_at":1764499…}}
//! ← {"v":1,"id":7,"type":"error","body":{"kind":"not_found","message":"…"}}
//! ← {"v":1,"id":0,"type":"exited","body":{…}}          an event, to who subscribed
//! ```
//!
//! Invariant: monitors outlive agents, so both sides meet older and newer ones. `v` is what the
//! sender speaks and is never a reason to refuse; fields that are not known are skipped; fields
//! that were added later have defaults; a type that is not known is answered with the error
//! `unknown_type` (or skipped, where it is an event). A packet has at most [`MAX_FRAME`] bytes.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::store::ids::ContainerId;
use crate::store::records::ExitRecord;

pub const VERSION: u16 = 1;
/// Which program this is, for the other side.
pub const RELEASE: &str = env!("CARGO_PKG_VERSION");
pub const MAX_FRAME: usize = 64 * 1024;
/// Longest text of a failure on the wire; the rest is cut.
pub const MAX_MESSAGE: usize = 4096;

/// A packet whose body has not been looked at.
#[derive(Debug, Deserialize)]
pub struct Frame<'a> {
    pub v: u16,
    #[serde(default)]
    pub id: u64,
    #[serde(rename = "type")]
    pub kind: &'a str,
    #[serde(borrow, default)]
    pub body: Option<&'a RawValue>,
}

#[derive(Serialize)]
struct Out<'a, T: Serialize> {
    v: u16,
    id: u64,
    #[serde(rename = "type")]
    kind: &'static str,
    body: &'a T,
}

/// Why a packet cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("the packet is no frame of ours: {0}")]
    NoFrame(serde_json::Error),
    #[error("type \"{0}\" is not known to version {VERSION}")]
    UnknownType(String),
    #[error("body of {kind}: {source}")]
    BadBody { kind: String, source: serde_json::Error },
    #[error("a frame of {0} bytes is longer than {MAX_FRAME}")]
    TooLong(usize),
}

impl<'a> Frame<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Frame<'a>, WireError> {
        serde_json::from_slice(bytes).map_err(WireError::NoFrame)
    }

    fn body<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        let text = self.body.map_or("{}", RawValue::get);
        serde_json::from_str(text).map_err(|source| WireError::BadBody { kind: self.kind.to_owned(), source })
    }
}

fn encode<T: Serialize>(id: u64, kind: &'static str, body: &T) -> Result<Vec<u8>, WireError> {
    let bytes = serde_json::to_vec(&Out { v: VERSION, id, kind, body }).map_err(WireError::NoFrame)?;
    if bytes.len() > MAX_FRAME { Err(WireError::TooLong(bytes.len())) } else { Ok(bytes) }
}

/// Declares an enum whose variants each have a type name and a body.
macro_rules! frames {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident($body:ty) = $kind:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub enum $name { $($(#[$vdoc])* $variant($body),)* }

        impl $name {
            pub fn decode(frame: &Frame<'_>) -> Result<$name, WireError> {
                match frame.kind {
                    $($kind => frame.body().map($name::$variant),)*
                    other => Err(WireError::UnknownType(other.chars().take(64).collect())),
                }
            }
            pub fn encode(&self, id: u64) -> Result<Vec<u8>, WireError> {
                match self { $($name::$variant(body) => encode(id, $kind, body),)* }
            }
            pub fn kind(&self) -> &'static str {
                match self { $($name::$variant(_) => $kind,)* }
            }
        }
    };
}

frames! {
    /// What an agent asks.
    Request {
        Hello(Hello) = "hello",
        /// Makes the pod's namespaces anew and hands them over: net, ipc, uts, those that exist.
        Namespaces(Empty) = "namespaces",
        Create(Create) = "create",
        Start(Which) = "start",
        Signal(Signal) = "signal",
        /// SIGKILL to all of the container, answered once it has ended and is forgotten.
        Remove(Which) = "remove",
        State(Empty) = "state",
        /// Exits are told on this connection from now on.
        Subscribe(Empty) = "subscribe",
        /// With the process's ends of stdin (if any), stdout and stderr (if no tty). The connection
        /// is the process's from then on: its exit is told there, and its end is the process's.
        Exec(Exec) = "exec",
        /// To the process that this connection is for.
        SignalExec(SignalExec) = "signal_exec",
        /// With our ends of stdin (if any), stdout and stderr (if no tty).
        Attach(Attach) = "attach",
        Resize(Resize) = "resize",
        /// End, if no container lives.
        Quit(Empty) = "quit",
        /// Go on as the program in the descriptor beside it.
        Reexec(Empty) = "reexec",
    }
}

frames! {
    /// What a monitor answers, and tells by itself (`Exited`, `ExecExited`).
    Reply {
        Hello(HelloReply) = "hello",
        Namespaces(NamespacesReply) = "namespaces",
        Created(Created) = "created",
        Started(Started) = "started",
        Done(Empty) = "done",
        State(StateReply) = "state",
        /// With the terminal's master side, where there is one.
        Execed(Created) = "execed",
        Error(Failure) = "error",
        Exited(Exited) = "exited",
        ExecExited(ExitRecord) = "exec_exited",
        /// A log was renamed: the agent may compress older ones.
        Rotated(Rotated) = "rotated",
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The sender's release, for people.
    #[serde(default)]
    pub release: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloReply {
    #[serde(default)]
    pub release: String,
    pub pod: String,
    pub pid: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacesReply {
    /// Which kinds the descriptors beside it are, in order.
    pub kinds: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Create {
    pub id: ContainerId,
    pub name: String,
    #[serde(default)]
    pub attempt: u32,
    pub cgroup: String,
    #[serde(default)]
    pub log: Option<Log>,
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub stdin_once: bool,
    #[serde(default)]
    pub tty: bool,
    /// Owner of the pipes, so that the container may open /dev/stdout again.
    #[serde(default)]
    pub user: u32,
    /// The container's ends come beside the request: stdin, stdout, stderr; with a tty its master
    /// side goes back beside the answer. The monitor sees no byte, and there is no log.
    #[serde(default)]
    pub own_streams: bool,
    /// False where the container shares a pid namespace: its cgroup is killed with its main process.
    #[serde(default)]
    pub own_pid_namespace: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Log {
    pub path: PathBuf,
    pub max_size: u64,
    pub max_files: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Which {
    pub id: ContainerId,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    pub id: ContainerId,
    pub signal: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalExec {
    pub signal: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub id: ContainerId,
    /// Name of the process.json in the container's run directory; it is removed in any case.
    pub process: String,
    #[serde(default)]
    pub tty: bool,
    #[serde(default)]
    pub stdin: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub id: ContainerId,
    #[serde(default)]
    pub stdin: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resize {
    pub id: ContainerId,
    pub rows: u16,
    pub columns: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Created {
    pub pid: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    pub started_at: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateReply {
    pub containers: Vec<Container>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub id: ContainerId,
    pub name: String,
    #[serde(default)]
    pub attempt: u32,
    pub pid: i32,
    /// 0: created, not started.
    #[serde(default)]
    pub started_at: i64,
    #[serde(default)]
    pub exit: Option<ExitRecord>,
    /// Log lines that could not be written.
    #[serde(default)]
    pub lost_lines: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exited {
    pub id: ContainerId,
    pub exit: ExitRecord,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotated {
    /// The live log.
    pub path: PathBuf,
}

/// Kind and words of a failure. A kind that is not known is `Refused` to its reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub kind: Kind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    UnknownType,
    BadRequest,
    NotFound,
    WrongState,
    NoProgram,
    NotExecutable,
    HelperDied,
    Io,
    #[serde(other)]
    Refused,
}

impl Failure {
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        let mut message: String = message.into().replace('\0', "");
        if message.len() > MAX_MESSAGE {
            let cut = (0..=MAX_MESSAGE).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
            message.truncate(cut);
        }
        Failure { kind, message }
    }
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Failure {
        let kind = if matches!(error, WireError::UnknownType(_)) { Kind::UnknownType } else { Kind::BadRequest };
        Failure::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_survives_the_wire() {
        let id = ContainerId::parse(&"a1".repeat(32)).unwrap();
        for request in [
            Request::Start(Which { id: id.clone() }),
            Request::State(Empty {}),
            Request::Signal(Signal { id: id.clone(), signal: 15 }),
            Request::Exec(Exec { id, process: "exec-1.json".into(), tty: true, stdin: false }),
        ] {
            let bytes = request.encode(9).unwrap();
            let frame = Frame::parse(&bytes).unwrap();
            assert_eq!((frame.v, frame.id, frame.kind), (VERSION, 9, request.kind()));
            assert_eq!(Request::decode(&frame).unwrap(), request);
        }
    }

    #[test]
    fn a_newer_peer_is_understood_as_far_as_it_goes() {
        let text = r#"{"v":2,"id":3,"type":"signal","flags":["x"],"body":{"id":"ID","signal":9,"group":true}}"#;
        let text = text.replace("ID", &"0".repeat(64));
        let frame = Frame::parse(text.as_bytes()).unwrap();
        assert!(matches!(Request::decode(&frame).unwrap(), Request::Signal(Signal { signal: 9, .. })));
        let frame = Frame::parse(br#"{"v":9,"id":4,"type":"freeze","body":{}}"#).unwrap();
        let failure = Failure::from(Request::decode(&frame).unwrap_err());
        assert_eq!(failure.kind, Kind::UnknownType);
        let kind: Kind = serde_json::from_str("\"quota_exceeded\"").unwrap();
        assert_eq!(kind, Kind::Refused);
    }

    #[test]
    fn an_older_peer_leaves_fields_out() {
        let body = format!(r#"{{"v":1,"type":"create","body":{{"id":"{}","name":"c","cgroup":"/x"}}}}"#, "0".repeat(64));
        let frame = Frame::parse(body.as_bytes()).unwrap();
        let Request::Create(create) = Request::decode(&frame).unwrap() else { panic!() };
        assert!(create.log.is_none() && !create.tty && frame.id == 0);
    }

    #[test]
    fn garbage_is_a_typed_error() {
        for bytes in [&b""[..], b"{", b"[]", b"\xff\xfe", br#"{"v":1}"#] {
            assert!(Frame::parse(bytes).is_err());
        }
        let frame = Frame::parse(br#"{"v":1,"type":"start","body":{"id":"../../etc"}}"#).unwrap();
        assert_eq!(Failure::from(Request::decode(&frame).unwrap_err()).kind, Kind::BadRequest);
        assert_eq!(Failure::new(Kind::Io, "é".repeat(4000)).message.len(), MAX_MESSAGE);
        assert_eq!(Failure::new(Kind::Io, "a\0b").message, "ab");
    }
}
