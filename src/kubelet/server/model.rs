//! What is said over the local socket. One request a connection; its answers are frames of
//! [`Answer`], the last one `End` or `Error`.
//!
//! Invariant: N-1 and N read each other. A field that is not known is ignored, one that is
//! missing has a default, an unknown verb or answer is an error that says so.

use std::error::Error;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::api::status::PodStatus;
pub use crate::kubelet::services::policies::{AllowedView, DirectionView, PolicyView};
pub use crate::kubelet::services::view::{PortView, ServiceView};

pub const PROTOCOL: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    pub protocol: u32,
    pub ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    /// Every pod, then every problem of the manifests directory.
    Pods(PodsAsk),
    Info {},
    /// Every Service, as it is served.
    Services {},
    /// What NetworkPolicies say of a pod; `pod` as in exec.
    Policies {
        pod: String,
    },
    /// The proxy's tables as they are wanted; answers `Text`.
    Tables {},
    /// Where a connection goes; answers `Text`. `from`: an address, `node`, or a pod as in exec;
    /// `to`: `10.96.0.10:80/tcp`.
    Trace {
        from: String,
        to: String,
    },
    /// Answers `Started` with descriptors; the process is the client's from then on.
    Exec(ExecAsk),
    Images {},
    Pull {
        reference: String,
        #[serde(default)]
        username: String,
        #[serde(default)]
        password: String,
    },
    /// `path` is absolute on this host.
    Import {
        path: String,
        #[serde(default)]
        name: Option<String>,
    },
    /// Ends every pod, gracefully within `seconds`, and starts none until the agent is started
    /// anew. Answers `Said` lines, then `End`.
    StopAll {
        seconds: u64,
    },
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PodsAsk {
    /// With each pod's manifest as received.
    pub manifests: bool,
    /// With pids, which the pod's monitor is asked for.
    pub processes: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecAsk {
    /// `namespace/name`, `name` (namespace default) or a uid.
    pub pod: String,
    /// Empty: the pod's first container.
    pub container: String,
    pub argv: Vec<String>,
    pub stdin: bool,
    pub tty: bool,
    /// Rows and columns of the terminal at the start.
    pub size: Option<(u16, u16)>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    Pod(Box<PodView>),
    Problem(ProblemView),
    Info(Box<AgentInfo>),
    Image(ImageView),
    Service(Box<ServiceView>),
    Policies(Box<PolicyView>),
    /// Descriptors ride along: the connection to the pod's monitor that tells the end and takes
    /// signals and sizes, then the pty's master with a tty, else stdin (if asked for), stdout,
    /// stderr.
    Started {
        pid: i32,
        /// Which of stdin, stdout, stderr, pty came, in this order.
        streams: Vec<StreamKind>,
    },
    /// Lines for stdout.
    Text {
        text: String,
    },
    /// A line for stderr.
    Said {
        text: String,
    },
    End {},
    Error(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    Stdin,
    Stdout,
    Stderr,
    Pty,
}

/// An error on its way through the socket: a kind for programs, the chain for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}", chain.join(": "))]
pub struct Failure {
    pub kind: FailureKind,
    pub chain: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// The named object is not here.
    NotFound,
    /// The request makes no sense; sending it again changes nothing.
    Invalid,
    /// Not now: too many clients, or the agent is stopping.
    Busy,
    /// Who asks may not: neither root nor the agent's own user.
    Denied,
    /// It was tried and failed.
    Failed,
    /// exec: the program is not there (127).
    NoProgram,
    /// exec: it is there but cannot be executed (126).
    NotExecutable,
    /// From a newer peer.
    #[serde(other)]
    Other,
}

impl Failure {
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Failure {
        Failure { kind, chain: vec![text.into()] }
    }

    /// Keeps the whole chain of an error.
    pub fn of(kind: FailureKind, error: &(dyn Error + 'static)) -> Failure {
        let mut chain = vec![error.to_string()];
        let mut next = error.source();
        while let Some(source) = next {
            chain.push(source.to_string());
            next = source.source();
        }
        Failure { kind, chain }
    }
}

/// One pod as the agent sees it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PodView {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// `web.yaml#2`: where it came from; empty once that is gone.
    pub origin: String,
    /// RFC 3339; set while it ends: it shows as Terminating.
    pub deletion: Option<String>,
    /// Spec order: init containers first.
    pub containers: Vec<ContainerView>,
    pub status: PodStatus,
    /// Fields not honoured, values clamped: `spec.containers[0].livenessProbe: …`.
    pub warnings: Vec<String>,
    /// What goes wrong now and is not in the status.
    pub problems: Vec<String>,
    /// Pid of its monitor; only when processes were asked for.
    pub monitor: Option<i32>,
    /// The manifest as received, as JSON; only when it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Box<RawValue>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerView {
    pub name: String,
    pub init: bool,
    pub tty: bool,
    pub stdin: bool,
    /// None: never attempted.
    pub current: Option<AttemptView>,
    pub previous: Option<AttemptView>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AttemptView {
    pub id: String,
    pub number: u32,
    /// The live log file; rotated ones lie beside it.
    pub log: PathBuf,
    pub pid: Option<i32>,
    pub running: bool,
}

/// Something wrong that is not one pod's own state: a file that cannot be read, a name twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProblemView {
    /// `bad.yaml document 1 line 7:3`; empty for a problem of the node.
    pub place: String,
    /// `namespace/name` where known.
    pub pod: String,
    /// `Service default/web`, where it is about such an object.
    pub object: String,
    pub field: String,
    pub message: String,
    /// The last good version goes on.
    pub kept: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageView {
    pub id: String,
    pub tags: Vec<String>,
    pub digests: Vec<String>,
    /// Compressed bytes.
    pub size: u64,
    pub pinned: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentInfo {
    pub version: String,
    pub pid: i32,
    pub node: String,
    pub instance: String,
    /// Wall-clock nanoseconds.
    pub started_at: i64,
    pub manifests: String,
    pub run: String,
    pub state: String,
    pub kubelet: String,
    pub logs: String,
    pub cgroup_parent: String,
    /// The systemd unit that the agent runs in; empty without one.
    pub unit: String,
    pub pod_cidrs: Vec<String>,
    /// Where the DNS server answers; empty: nowhere.
    pub dns: Vec<String>,
    /// Its counters, by the names that metrics have.
    pub dns_counters: Vec<(String, u64)>,
    /// Whether Services are served, and why not.
    pub proxy: String,
    pub pods: u32,
    pub containers_running: u32,
    pub images: u32,
    /// Resident and anonymous bytes of the agent itself.
    pub rss: u64,
    pub anonymous: u64,
}
