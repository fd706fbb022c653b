//! What the pods' disk journal holds, and the fold of its records into the state at start.
//!
//! Order of writes (each fsynced before the next effect): `Admitted` before anything of a pod is
//! made; `Attempt` before a container is created (so an id is never run twice, and a restart
//! count is never given out twice); `Exit` before an exit is published or its exit file removed;
//! `Finished` once a pod has reached its end by restartPolicy; `Removed` after all of a pod is gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ids::{ContainerId, PodUid};

/// How a container ended. Times are wall-clock nanoseconds since 1970, only ever rendered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// 0 to 255; 128 + signal where a signal ended it.
    pub code: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    #[serde(default)]
    pub oom: bool,
    /// 0 where it never started.
    #[serde(default)]
    pub started_at: i64,
    #[serde(default)]
    pub finished_at: i64,
    /// `StartError`, `ContainerStatusUnknown`…; empty: derived from code and oom.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The pod is ours now. `spec_hash` is also in its uid.
    Admitted {
        uid: PodUid,
        namespace: String,
        name: String,
        at: i64,
    },
    /// Container `name` is about to be created for the `attempt`-th time (0 = first) as `id`.
    Attempt {
        uid: PodUid,
        name: String,
        init: bool,
        attempt: u32,
        id: ContainerId,
        image: String,
        at: i64,
    },
    Exit {
        uid: PodUid,
        name: String,
        id: ContainerId,
        exit: ExitRecord,
    },
    /// The pod's own end: `phase` Succeeded or Failed.
    Finished {
        uid: PodUid,
        phase: String,
        reason: String,
        message: String,
        at: i64,
    },
    Removed {
        uid: PodUid,
    },
}

/// One container's newest attempts, newest last, two at most: the current and the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerRecord {
    pub init: bool,
    pub attempts: Vec<Attempt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub number: u32,
    pub id: ContainerId,
    pub image: String,
    pub at: i64,
    pub exit: Option<ExitRecord>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRecord {
    pub namespace: String,
    pub name: String,
    pub admitted_at: i64,
    pub containers: BTreeMap<String, ContainerRecord>,
    /// phase, reason, message, at.
    pub finished: Option<(String, String, String, i64)>,
}

/// All pods that were admitted and not yet removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodsState {
    pub pods: BTreeMap<PodUid, PodRecord>,
}

impl PodsState {
    /// Applies one record. Records that fit nothing (of a removed pod, a second exit of one id)
    /// change nothing, so that replay after any cut gives a state that was once true.
    pub fn apply(&mut self, record: &Record) {
        match record {
            Record::Admitted { uid, namespace, name, at } => {
                let pod = self.pods.entry(uid.clone()).or_default();
                pod.namespace.clone_from(namespace);
                pod.name.clone_from(name);
                if pod.admitted_at == 0 {
                    pod.admitted_at = *at;
                }
            }
            Record::Attempt { uid, name, init, attempt, id, image, at } => {
                let Some(pod) = self.pods.get_mut(uid) else { return };
                let container = pod.containers.entry(name.clone()).or_default();
                container.init = *init;
                if container.attempts.iter().any(|a| a.id == *id) {
                    return;
                }
                container.attempts.push(Attempt { number: *attempt, id: id.clone(), image: image.clone(), at: *at, exit: None });
                if container.attempts.len() > 2 {
                    container.attempts.remove(0);
                }
            }
            Record::Exit { uid, name, id, exit } => {
                let attempt = self
                    .pods
                    .get_mut(uid)
                    .and_then(|pod| pod.containers.get_mut(name))
                    .and_then(|c| c.attempts.iter_mut().find(|a| a.id == *id));
                if let Some(attempt) = attempt {
                    attempt.exit.get_or_insert_with(|| exit.clone());
                }
            }
            Record::Finished { uid, phase, reason, message, at } => {
                if let Some(pod) = self.pods.get_mut(uid) {
                    pod.finished.get_or_insert_with(|| (phase.clone(), reason.clone(), message.clone(), *at));
                }
            }
            Record::Removed { uid } => {
                self.pods.remove(uid);
            }
        }
    }
}
