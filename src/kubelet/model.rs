//! What the planner knows: the DESIRED set, what is OBSERVED of each pod, the ACTIONS between
//! them and the REPORTS that come back. Plain data; JSON for `coracle pod plan`.
//!
//! ```text
//! a pod:      wanted ─Admit─> admitted ─volumes─> ─sandbox─> ─network─> up ──────────┐
//!                                ^                                       │ containers │ none left
//!                                └──StopSandbox── monitor dead <─────────┤            v
//!             gone <─Remove── all ended <─Signal, Kill─ ending <─────────┘   Finish ─> finished
//!
//! an attempt: Journalled ─Create─> Created ─Start─> Running ─exit─> Ended ─RecordExit─> Ended,
//!             (id is fixed)           └─────exit or failure──────────^                  journalled
//! ```
//!
//! Invariants: one action at a time is under way for a pod (`busy`), pulls aside, which no order
//! depends on; an attempt is journalled before it is created and its exit before it is published.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use super::action::{Action, FailReason, NewAttempt, Outcome};
use crate::api::pod::Pod;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::ExitRecord;

/// One reading of both clocks, nanoseconds. Durations are measured on `boot` (CLOCK_BOOTTIME)
/// only; `wall` is only rendered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Now {
    pub boot: i64,
    pub wall: i64,
}

pub const SECOND: i64 = 1_000_000_000;

/// What is to run here.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// False: a pod that is missing here may still be wanted, so nothing ends.
    pub complete: bool,
    /// All pods are to end and stay ended until the next start of the agent.
    pub stopping: bool,
    /// Longest time that a pod may take to end while `stopping`, seconds.
    pub stop_grace: i64,
    pub pods: BTreeMap<PodUid, Arc<Pod>>,
    /// Goes up whenever ConfigMaps or Secrets may have changed.
    pub configs: u64,
    pub node: Node,
}

/// What admission and status need to know of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// First one is `status.hostIP`.
    pub ips: Vec<IpAddr>,
    pub milli_cpu: i64,
    pub memory: i64,
    pub max_pods: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Observed {
    pub pods: BTreeMap<PodUid, PodState>,
}

/// One pod that was admitted here and is not yet removed (or is just being admitted).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodState {
    pub namespace: String,
    pub name: String,
    /// As it was admitted. None: the stored manifest cannot be read; it can only be ended.
    #[serde(with = "shared")]
    pub pod: Option<Arc<Pod>>,
    /// Wall time of admission: `status.startTime`. 0: not yet.
    pub admitted_at: i64,
    /// On the boot clock; earlier boots count, so it may be negative.
    pub admitted_boot: i64,
    /// An action is under way; nothing else is planned for this pod until its report.
    pub busy: bool,
    pub sandbox: Sandbox,
    /// Its monitor has not answered yet, or is to be asked again: what is known may be old.
    pub unheard: bool,
    /// Revision of [`Desired::configs`] that its volumes hold.
    pub volumes: Option<u64>,
    pub containers: BTreeMap<String, ContainerState>,
    pub ending: Option<Ending>,
    pub finished: Option<Finished>,
    /// Exits that were told before the report of the step that made their containers.
    #[serde(skip)]
    pub early: BTreeMap<ContainerId, ExitRecord>,
    /// Steps for the pod as a whole that failed; each is cleared by its next success.
    pub failures: BTreeMap<Step, Failure>,
}

/// What can be tried again for a pod as a whole; each waits for its own due time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    Admit,
    Volumes,
    Sandbox,
    Network,
    Listen,
    Exit,
    Signal,
    Stop,
    Finish,
    Collect,
    Remove,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Sandbox {
    /// Nothing of it is there.
    #[default]
    None,
    /// Its monitor lives.
    Up { created_at: i64, attached: bool, addresses: Vec<IpAddr> },
    /// Its monitor has died: what is left is to be ended before anything new is made.
    Dead,
}

/// All that is known of one container of a pod, by the name in its spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerState {
    pub init: bool,
    /// Newest last: the current one and the one before it.
    pub attempts: Vec<AttemptState>,
    /// Older ones that still hold disk space.
    pub stale: Vec<(u32, ContainerId)>,
    pub image: ImageState,
    /// Delay that the next failed pull gets at least doubled, nanoseconds.
    pub pull_delay: i64,
    /// The last step for this container failed; cleared by the next success.
    pub failure: Option<Failure>,
}

impl ContainerState {
    pub fn current(&self) -> Option<&AttemptState> {
        self.attempts.last()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttemptState {
    /// 0 for the first one: `status.restartCount`.
    pub number: u32,
    pub id: ContainerId,
    /// The image's id or digest, as journalled.
    #[serde(default)]
    pub image: String,
    /// Wall time of the journal record.
    #[serde(default)]
    pub at: i64,
    /// The same on the boot clock.
    #[serde(default)]
    pub at_boot: i64,
    /// `created_at` of the sandbox that it was made for.
    #[serde(default)]
    pub sandbox: i64,
    /// Crash back-off after this start, seconds; 0: none yet.
    #[serde(default)]
    pub backoff: u32,
    pub phase: Phase,
    /// When it was asked to end, on the boot clock.
    #[serde(default)]
    pub signalled: Option<i64>,
    /// When it was last killed, on the boot clock.
    #[serde(default)]
    pub killed: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "phase")]
pub enum Phase {
    /// In the journal, not yet in the runtime.
    Journalled,
    Created,
    /// `started_at`: wall time.
    Running {
        started_at: i64,
    },
    Ended {
        exit: ExitRecord,
        /// Not before the exit is journalled may anything follow from it.
        journalled: bool,
        /// When it became known, on the boot clock.
        boot: i64,
    },
}

impl AttemptState {
    pub fn exit(&self) -> Option<&ExitRecord> {
        match &self.phase {
            Phase::Ended { exit, .. } => Some(exit),
            _ => None,
        }
    }
    /// Something of it may be in the kernel.
    pub fn lives(&self) -> bool {
        matches!(self.phase, Phase::Created | Phase::Running { .. })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum ImageState {
    /// Not asked yet; the create step will see.
    #[default]
    Unknown,
    Missing,
    /// `last`: why the pull before failed.
    Pulling {
        last: Option<Failure>,
    },
    /// Pulled for this attempt (imagePullPolicy Always asks again for each).
    Ready {
        attempt: u32,
    },
    Failed {
        failure: Failure,
    },
}

/// Why and since when a pod is being ended. Once set, it is never taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ending {
    pub why: EndReason,
    /// On the boot clock.
    pub since: i64,
    /// Wall time, for `metadata.deletionTimestamp`.
    pub at: i64,
    /// Seconds from the signal to the kill.
    pub grace: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndReason {
    /// Nobody asks for it any more, or a newer pod has its name: it goes away.
    Deleted,
    /// activeDeadlineSeconds: it stays as Failed.
    Deadline,
    /// The node is told to stop all pods: it stays in the store and runs again at the next start.
    Stopped,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finished {
    /// `Succeeded` or `Failed`.
    pub phase: String,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
    pub at: i64,
}

/// A step that did not work and when it is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// The waiting reason that users see: `CreatePodSandboxError`.
    pub reason: String,
    pub message: String,
    /// On the boot clock.
    pub at: i64,
    /// Nanoseconds from `at` to the next try.
    pub delay: i64,
}

impl Failure {
    pub fn due(&self) -> i64 {
        self.at.saturating_add(self.delay)
    }
}

/// `Option<Arc<Pod>>` as the pod's JSON.
mod shared {
    use super::{Arc, Pod};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(pod: &Option<Arc<Pod>>, serializer: S) -> Result<S::Ok, S::Error> {
        pod.as_deref().serialize(serializer)
    }
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Arc<Pod>>, D::Error> {
        Ok(Option::<Pod>::deserialize(deserializer)?.map(Arc::new))
    }
}
