//! The ACTIONS between what is wanted and what is observed, and the OUTCOMES that come back.
//!
//! Invariant: an action names all that its effect depends on; repeating one is safe.

use std::fmt;
use std::net::IpAddr;

use super::model::{Ending, Finished};
use crate::runtime::model::SandboxState;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::ExitRecord;

/// One effect on one pod. `apply` carries it out and decides nothing. Every one may be cut off
/// at any point and is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Journals the pod and keeps its manifest.
    Admit {
        uid: PodUid,
    },
    /// From now on the pod is ending. No effect outside the planner.
    End {
        uid: PodUid,
        ending: Ending,
    },
    /// Makes the volumes, or refreshes them from newer ConfigMaps and Secrets.
    SetUpVolumes {
        uid: PodUid,
        configs: u64,
    },
    RunSandbox {
        uid: PodUid,
    },
    Attach {
        uid: PodUid,
    },
    /// Asks a monitor for all of its containers: one that did not answer, or whose word is old.
    Listen {
        uid: PodUid,
    },
    /// SIGKILL to a monitor that does not answer: then its sandbox is dead.
    KillMonitor {
        uid: PodUid,
    },
    /// Of a sandbox whose monitor has died: ends what is left and reads how its containers ended.
    Inspect {
        uid: PodUid,
    },
    /// Ends whatever runs, lets go of network and namespaces; ends its monitor.
    StopSandbox {
        uid: PodUid,
    },
    /// `delay`: back-off after the failure before, nanoseconds; 0: none.
    Pull {
        uid: PodUid,
        container: String,
        attempt: u32,
        image: String,
        delay: i64,
    },
    /// Journals the attempt (where it is new), then creates it.
    Create {
        uid: PodUid,
        container: String,
        attempt: NewAttempt,
    },
    Start {
        uid: PodUid,
        container: String,
        id: ContainerId,
    },
    /// Asks containers to end: each by its own stop signal.
    Signal {
        uid: PodUid,
        targets: Vec<(String, ContainerId)>,
    },
    /// SIGKILL to everything in their cgroups.
    Kill {
        uid: PodUid,
        targets: Vec<(String, ContainerId)>,
    },
    /// Journals an exit with its termination message; then its exit file may go.
    RecordExit {
        uid: PodUid,
        container: String,
        number: u32,
        id: ContainerId,
        exit: ExitRecord,
    },
    /// Removes an old container with its log, layers and links.
    RemoveContainer {
        uid: PodUid,
        container: String,
        number: u32,
        id: ContainerId,
    },
    /// Of a pod that has finished: its volumes hold memory and mounts that nobody needs.
    ReleaseVolumes {
        uid: PodUid,
    },
    /// Journals the pod's own end.
    Finish {
        uid: PodUid,
        finished: Finished,
    },
    /// Removes all of the pod and journals that.
    Remove {
        uid: PodUid,
    },
}

/// The attempt to create, with all that its journal record says.
#[derive(Clone, Debug, PartialEq)]
pub struct NewAttempt {
    pub number: u32,
    pub id: ContainerId,
    pub init: bool,
    pub sandbox: i64,
    pub backoff: u32,
    /// False: it is in the journal already, and was cut off or failed before it was created.
    pub new: bool,
}

impl Action {
    pub fn uid(&self) -> &PodUid {
        match self {
            Action::Admit { uid }
            | Action::End { uid, .. }
            | Action::SetUpVolumes { uid, .. }
            | Action::RunSandbox { uid }
            | Action::Attach { uid }
            | Action::Listen { uid }
            | Action::KillMonitor { uid }
            | Action::Inspect { uid }
            | Action::StopSandbox { uid }
            | Action::Pull { uid, .. }
            | Action::Create { uid, .. }
            | Action::Start { uid, .. }
            | Action::Signal { uid, .. }
            | Action::Kill { uid, .. }
            | Action::RecordExit { uid, .. }
            | Action::RemoveContainer { uid, .. }
            | Action::ReleaseVolumes { uid }
            | Action::Finish { uid, .. }
            | Action::Remove { uid } => uid,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            |targets: &[(String, ContainerId)]| targets.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",");
        match self {
            Action::Admit { uid } => write!(f, "admit {uid}"),
            Action::End { uid, ending } => write!(f, "end {uid} {:?} grace={}s", ending.why, ending.grace),
            Action::SetUpVolumes { uid, configs } => write!(f, "set-up-volumes {uid} configs={configs}"),
            Action::RunSandbox { uid } => write!(f, "run-sandbox {uid}"),
            Action::Attach { uid } => write!(f, "attach {uid}"),
            Action::Listen { uid } => write!(f, "listen {uid}"),
            Action::KillMonitor { uid } => write!(f, "kill-monitor {uid}"),
            Action::Inspect { uid } => write!(f, "inspect {uid}"),
            Action::StopSandbox { uid } => write!(f, "stop-sandbox {uid}"),
            Action::Pull { uid, container, image, .. } => write!(f, "pull {uid} {container} image={image}"),
            Action::Create { uid, container, attempt } => write!(
                f,
                "create {uid} {container} attempt={}{} backoff={}s",
                attempt.number,
                if attempt.new { "" } else { " again" },
                attempt.backoff
            ),
            Action::Start { uid, container, .. } => write!(f, "start {uid} {container}"),
            Action::Signal { uid, targets } => write!(f, "signal {uid} {}", names(targets)),
            Action::Kill { uid, targets } => write!(f, "kill {uid} {}", names(targets)),
            Action::RecordExit { uid, container, exit, .. } => write!(f, "record-exit {uid} {container} code={}", exit.code),
            Action::RemoveContainer { uid, container, number, .. } => {
                write!(f, "remove-container {uid} {container} attempt={number}")
            }
            Action::ReleaseVolumes { uid } => write!(f, "release-volumes {uid}"),
            Action::Finish { uid, finished } => write!(f, "finish {uid} {} {}", finished.phase, finished.reason),
            Action::Remove { uid } => write!(f, "remove {uid}"),
        }
    }
}

/// What became of an action.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Done,
    /// Admit: when.
    Admitted {
        at: i64,
    },
    Sandbox {
        created_at: i64,
    },
    Attached {
        addresses: Vec<IpAddr>,
    },
    /// Listen: what the monitor says; None: there is no sandbox any more.
    Heard {
        state: Option<Box<SandboxState>>,
    },
    /// Inspect: every container of the dead sandbox that has ended.
    Exits {
        exits: Vec<(ContainerId, ExitRecord)>,
    },
    /// Create: the image is not on this node; nothing was journalled.
    ImageMissing,
    Created {
        image: String,
        at: i64,
    },
    /// Create: journalled, then something failed that may work the next time.
    NotCreated {
        image: String,
        at: i64,
        reason: FailReason,
        message: String,
    },
    /// Create or Start: it will never run; its exit (StartError) is to be journalled.
    NotStarted {
        image: String,
        at: i64,
        exit: ExitRecord,
    },
    Started {
        started_at: i64,
    },
    /// RecordExit: the exit as journalled, message included.
    Recorded {
        exit: ExitRecord,
    },
    Failed {
        reason: FailReason,
        message: String,
    },
}

/// Kinds of failure, each with the kubelet's waiting reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailReason {
    /// The journal could not be written.
    Journal,
    Mount,
    Sandbox,
    Network,
    /// The monitor does not answer.
    Silent,
    CreateConfig,
    Create,
    ImagePull,
    RegistryUnavailable,
    InvalidImageName,
    ImageInspect,
    /// imagePullPolicy Never, and it is not here.
    NeverPull,
    Kill,
}

impl FailReason {
    /// As in `state.waiting.reason`.
    pub fn waiting(self) -> &'static str {
        match self {
            FailReason::Journal | FailReason::Mount => "ContainerCreating",
            FailReason::Silent => "ContainerStatusUnknown",
            FailReason::Sandbox | FailReason::Network => "CreatePodSandboxError",
            FailReason::CreateConfig => "CreateContainerConfigError",
            FailReason::Create => "CreateContainerError",
            FailReason::ImagePull => "ErrImagePull",
            FailReason::RegistryUnavailable => "RegistryUnavailable",
            FailReason::InvalidImageName => "InvalidImageName",
            FailReason::ImageInspect => "ImageInspectError",
            FailReason::NeverPull => "ErrImageNeverPull",
            FailReason::Kill => "KillContainerError",
        }
    }
}
