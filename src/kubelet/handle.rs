//! How others ask the planner: requests over a channel, answered with plain copies. Readers own
//! nothing and hold no lock; manifests are read from disk in the caller's own thread.
//!
//! Invariant: an answer is one moment of the planner's world, never a mix of two.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::services::policies::PolicyView;
use super::services::view::ServiceView;
use super::source::{Origin, Problem, Warning};
use crate::api::status::PodStatus;
use crate::store::StoreError;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::pods::PodStore;

/// A clone may be given to every thread that serves clients.
#[derive(Clone)]
pub struct AgentHandle {
    planner: Sender<super::agent::Message>,
    store: Arc<PodStore>,
}

/// What can be asked of the planner.
pub enum Request {
    Pods {
        filter: PodFilter,
        reply: Sender<Vec<PodView>>,
    },
    Problems {
        reply: Sender<Vec<Problem>>,
    },
    Services {
        reply: Sender<Vec<ServiceView>>,
    },
    /// None: there is no such pod.
    Policies {
        namespace: String,
        name: String,
        reply: Sender<Option<PolicyView>>,
    },
    /// End all pods now, within that many seconds each; answers when they have ended.
    StopAll {
        grace: i64,
        reply: Sender<StopReport>,
    },
    /// Images came or went: pods that wait for one need not wait longer.
    ImagesChanged,
    /// Image ids and digests that containers were made from.
    ImagesInUse {
        reply: Sender<Vec<String>>,
    },
    /// Look at everything again.
    Wake,
    /// Leave; pods stay.
    Quit,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFilter {
    pub namespace: Option<String>,
    pub name: Option<String>,
}

/// One pod as a reader sees it.
#[derive(Clone, Debug)]
pub struct PodView {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    /// None: it is no longer in the manifests directory.
    pub origin: Option<Origin>,
    /// Of a pod that is not stored yet; see [`AgentHandle::manifest`].
    pub raw: Option<Arc<[u8]>>,
    pub status: PodStatus,
    /// RFC 3339; set while it ends because nobody asks for it any more.
    pub deletion: Option<String>,
    /// Spec order: init containers first.
    pub containers: Vec<ContainerView>,
    /// Fields that this version does not honour.
    pub warnings: Vec<Warning>,
    /// What goes wrong now, for people: `CreatePodSandboxError: …`.
    pub problems: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct ContainerView {
    pub name: String,
    pub init: bool,
    pub tty: bool,
    pub stdin: bool,
    /// None: it was never attempted.
    pub current: Option<AttemptView>,
    pub previous: Option<AttemptView>,
}

#[derive(Clone, Debug)]
pub struct AttemptView {
    pub id: ContainerId,
    pub number: u32,
    /// Its live CRI log file; older rotated ones lie beside it.
    pub log: PathBuf,
    pub running: bool,
}

/// What `stop_all` came to.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StopReport {
    pub stopped: usize,
    /// `namespace/name: why` of pods that did not end in time.
    pub left: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    #[error("the agent is leaving")]
    Gone,
    #[error("the agent did not answer within {0:?}")]
    Slow(Duration),
}

/// After the last grace is over: SIGKILL, unmounting, the journal.
pub const STOP_MARGIN: Duration = Duration::from_secs(20);
const ANSWER: Duration = Duration::from_secs(10);

impl AgentHandle {
    pub fn new(planner: Sender<super::agent::Message>, store: Arc<PodStore>) -> AgentHandle {
        AgentHandle { planner, store }
    }

    /// A pod's canonical JSON as received, without status; None where it is lost.
    pub fn manifest(&self, pod: &PodView) -> Result<Option<Vec<u8>>, StoreError> {
        match &pod.raw {
            Some(raw) => Ok(Some(raw.to_vec())),
            None => self.store.load_manifest(&pod.uid),
        }
    }

    /// All pods, by namespace and name.
    pub fn pods(&self) -> Result<Vec<PodView>, AskError> {
        self.pods_of(PodFilter::default())
    }

    pub fn pods_of(&self, filter: PodFilter) -> Result<Vec<PodView>, AskError> {
        self.ask(|reply| Request::Pods { filter, reply })
    }

    /// The one pod of that name.
    pub fn pod(&self, namespace: &str, name: &str) -> Result<Option<PodView>, AskError> {
        let filter = PodFilter { namespace: Some(namespace.to_owned()), name: Some(name.to_owned()) };
        Ok(self.pods_of(filter)?.into_iter().next())
    }

    /// What is wrong in the manifests directory.
    pub fn problems(&self) -> Result<Vec<Problem>, AskError> {
        self.ask(|reply| Request::Problems { reply })
    }

    /// Every Service as it is served, by namespace and name.
    pub fn services(&self) -> Result<Vec<ServiceView>, AskError> {
        self.ask(|reply| Request::Services { reply })
    }

    /// What NetworkPolicies say of a pod.
    pub fn policies(&self, namespace: &str, name: &str) -> Result<Option<PolicyView>, AskError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        self.ask(|reply| Request::Policies { namespace, name, reply })
    }

    pub fn images_in_use(&self) -> Result<Vec<String>, AskError> {
        self.ask(|reply| Request::ImagesInUse { reply })
    }

    /// Ends all pods gracefully, none with more than `grace`; blocks until they have ended, or
    /// a while longer than that. They start again only with the next start of the agent.
    pub fn stop_all(&self, grace: Duration) -> Result<StopReport, AskError> {
        let (reply, answer) = channel();
        self.send(Request::StopAll { grace: i64::try_from(grace.as_secs()).unwrap_or(i64::MAX), reply })?;
        let limit = grace + STOP_MARGIN;
        answer.recv_timeout(limit).map_err(|e| ask_error(e, limit))
    }

    pub fn images_changed(&self) -> Result<(), AskError> {
        self.send(Request::ImagesChanged)
    }

    pub fn wake(&self) -> Result<(), AskError> {
        self.send(Request::Wake)
    }

    /// The agent leaves; pods stay.
    pub fn quit(&self) -> Result<(), AskError> {
        self.send(Request::Quit)
    }

    fn ask<T>(&self, request: impl FnOnce(Sender<T>) -> Request) -> Result<T, AskError> {
        let (reply, answer): (Sender<T>, Receiver<T>) = channel();
        self.send(request(reply))?;
        answer.recv_timeout(ANSWER).map_err(|e| ask_error(e, ANSWER))
    }

    fn send(&self, request: Request) -> Result<(), AskError> {
        self.planner.send(super::agent::Message::Request(request)).map_err(|_| AskError::Gone)
    }
}

fn ask_error(error: std::sync::mpsc::RecvTimeoutError, limit: Duration) -> AskError {
    match error {
        std::sync::mpsc::RecvTimeoutError::Timeout => AskError::Slow(limit),
        std::sync::mpsc::RecvTimeoutError::Disconnected => AskError::Gone,
    }
}
