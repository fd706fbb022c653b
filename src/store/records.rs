//! What the pods' disk journal holds, and the fold of its records into the state at start.
//!
//! Order of writes (each fsynced before the next effect): `Admitted` before anything of a pod is
//! made; `Attempt` before a container is created (so an id is never run twice, and a restart
//! count is never given out twice); `Exit` before an exit is published or its exit file removed;
//! `Finished` once a pod has reached its end by restartPolicy; `Removed` after all of a pod is gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ids::{ContainerId, PodUid};

/// An instant of CLOCK_BOOTTIME: nanoseconds since the boot with this id, comparable only within
/// that boot. Durations are carried over a reboot as what both boots have proved ([`Age`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootStamp {
    pub boot: String,
    pub nanos: i64,
}

/// What ended a container, where that changes what comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitCause {
    /// Itself, a signal, a limit, or its pod's end: restartPolicy decides.
    #[default]
    Own,
    /// The machine went down under it: it runs again, whatever its restartPolicy.
    Reboot,
    /// The node was told to stop all pods: it runs again at the next start, except under Never.
    Stopped,
}

impl ExitCause {
    fn is_own(&self) -> bool {
        *self == ExitCause::Own
    }
}

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
    /// Filled in by the agent when it journals the exit.
    #[serde(default, skip_serializing_if = "ExitCause::is_own")]
    pub cause: ExitCause,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The pod is ours now. `spec_hash` is also in its uid.
    Admitted {
        uid: PodUid,
        namespace: String,
        name: String,
        at: i64,
        #[serde(default)]
        stamp: BootStamp,
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
        #[serde(default)]
        stamp: BootStamp,
        /// When the sandbox that it runs in was made (wall nanoseconds): which one that is.
        #[serde(default)]
        sandbox: i64,
        /// The crash back-off in force after this start, seconds; 0: none yet.
        #[serde(default)]
        backoff: u32,
    },
    Exit {
        uid: PodUid,
        name: String,
        id: ContainerId,
        exit: ExitRecord,
        #[serde(default)]
        stamp: BootStamp,
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
    /// Written by compaction alone: how old the pod is, since the records that proved it go.
    Aged {
        uid: PodUid,
        age: Age,
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
    pub stamp: BootStamp,
    pub sandbox: i64,
    pub backoff: u32,
    pub exit: Option<ExitRecord>,
    /// When the exit was journalled.
    pub exit_stamp: BootStamp,
}

/// How long something has lasted, as far as the journal proves it: the whole of each earlier boot
/// up to its last record, and this boot since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Age {
    boot: String,
    since: i64,
    last: i64,
    carried: i64,
}

impl Age {
    /// One more record was written at this instant.
    fn touch(&mut self, stamp: &BootStamp) {
        if stamp.boot.is_empty() {
            return;
        }
        if self.boot.is_empty() {
            self.since = stamp.nanos;
        } else if self.boot != stamp.boot {
            self.carried = self.carried.saturating_add(self.last.saturating_sub(self.since));
            self.since = 0;
        }
        self.boot.clone_from(&stamp.boot);
        self.last = stamp.nanos;
    }

    /// Nanoseconds from the first record until now.
    pub fn elapsed(&self, now: &BootStamp) -> i64 {
        if self.boot.is_empty() {
            return 0;
        }
        let since = |instant: i64| instant.saturating_sub(self.since);
        let here = if self.boot == now.boot { since(now.nanos) } else { since(self.last).saturating_add(now.nanos) };
        self.carried.saturating_add(here).max(0)
    }

    /// Nanoseconds from one of the records until now.
    pub fn elapsed_since(&self, stamp: &BootStamp, now: &BootStamp) -> i64 {
        if stamp.boot == now.boot {
            return now.nanos.saturating_sub(stamp.nanos).max(0);
        }
        let before = if stamp.boot == self.boot { self.last.saturating_sub(stamp.nanos) } else { 0 };
        before.saturating_add(now.nanos).max(0)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodRecord {
    pub namespace: String,
    pub name: String,
    pub admitted_at: i64,
    pub age: Age,
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
            Record::Admitted { uid, namespace, name, at, stamp } => {
                let pod = self.pods.entry(uid.clone()).or_default();
                pod.namespace.clone_from(namespace);
                pod.name.clone_from(name);
                if pod.admitted_at == 0 {
                    pod.admitted_at = *at;
                }
                pod.age.touch(stamp);
            }
            Record::Attempt { uid, name, init, attempt, id, image, at, stamp, sandbox, backoff } => {
                let Some(pod) = self.pods.get_mut(uid) else { return };
                pod.age.touch(stamp);
                let container = pod.containers.entry(name.clone()).or_default();
                container.init = *init;
                if container.attempts.iter().any(|a| a.id == *id) {
                    return;
                }
                // The same attempt in a sandbox that was made anew: it had not run.
                if container.attempts.last().is_some_and(|a| a.number == *attempt && a.exit.is_none()) {
                    container.attempts.pop();
                }
                container.attempts.push(Attempt {
                    number: *attempt,
                    id: id.clone(),
                    image: image.clone(),
                    at: *at,
                    stamp: stamp.clone(),
                    sandbox: *sandbox,
                    backoff: *backoff,
                    exit: None,
                    exit_stamp: BootStamp::default(),
                });
                if container.attempts.len() > 2 {
                    container.attempts.remove(0);
                }
            }
            Record::Exit { uid, name, id, exit, stamp } => {
                let Some(pod) = self.pods.get_mut(uid) else { return };
                let attempt = pod.containers.get_mut(name).and_then(|c| c.attempts.iter_mut().find(|a| a.id == *id));
                let Some(attempt) = attempt else { return };
                if attempt.exit.is_none() {
                    attempt.exit = Some(exit.clone());
                    attempt.exit_stamp = stamp.clone();
                    pod.age.touch(stamp);
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
            Record::Aged { uid, age } => {
                if let Some(pod) = self.pods.get_mut(uid) {
                    pod.age.clone_from(age);
                }
            }
        }
    }

    /// Records that give this state again, and no more than that.
    pub fn records(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for (uid, pod) in &self.pods {
            let uid = || uid.clone();
            let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
            records.push(Record::Admitted { uid: uid(), namespace, name, at: pod.admitted_at, stamp: BootStamp::default() });
            for (name, container) in &pod.containers {
                for a in &container.attempts {
                    records.push(Record::Attempt {
                        uid: uid(),
                        name: name.clone(),
                        init: container.init,
                        attempt: a.number,
                        id: a.id.clone(),
                        image: a.image.clone(),
                        at: a.at,
                        stamp: a.stamp.clone(),
                        sandbox: a.sandbox,
                        backoff: a.backoff,
                    });
                    if let Some(exit) = &a.exit {
                        let (name, id, stamp) = (name.clone(), a.id.clone(), a.exit_stamp.clone());
                        records.push(Record::Exit { uid: uid(), name, id, exit: exit.clone(), stamp });
                    }
                }
            }
            if let Some((phase, reason, message, at)) = pod.finished.clone() {
                records.push(Record::Finished { uid: uid(), phase, reason, message, at });
            }
            // Last: the records before it have their stamps, which would make it anew.
            records.push(Record::Aged { uid: uid(), age: pod.age.clone() });
        }
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(boot: &str, nanos: i64) -> BootStamp {
        BootStamp { boot: boot.into(), nanos }
    }

    #[test]
    fn an_age_grows_over_reboots_by_what_was_proved() {
        let mut age = Age::default();
        assert_eq!(age.elapsed(&stamp("a", 50)), 0);
        age.touch(&stamp("a", 100));
        age.touch(&stamp("a", 400));
        assert_eq!(age.elapsed(&stamp("a", 1_000)), 900);
        assert_eq!(age.elapsed(&stamp("b", 20)), 320);
        age.touch(&stamp("b", 30));
        assert_eq!(age.elapsed(&stamp("b", 50)), 350);
        assert_eq!(age.elapsed(&stamp("c", 7)), 337);
        assert_eq!(age.elapsed_since(&stamp("b", 10), &stamp("c", 7)), 27);
        assert_eq!(age.elapsed_since(&stamp("a", 100), &stamp("c", 7)), 7);
    }

    #[test]
    fn an_age_of_nonsense_is_an_age() {
        let mut age = Age { boot: "a".into(), since: i64::MIN, last: i64::MAX, carried: i64::MAX };
        assert_eq!(age.elapsed(&stamp("b", 1)), i64::MAX);
        assert_eq!(age.elapsed(&stamp("a", i64::MIN)), i64::MAX);
        assert_eq!(age.elapsed_since(&stamp("a", i64::MIN), &stamp("b", 1)), i64::MAX);
        age.touch(&stamp("b", i64::MIN));
        assert_eq!(age.elapsed_since(&stamp("b", i64::MAX), &stamp("b", i64::MIN)), 0);
    }

    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = Record> {
        let uid = prop_oneof!["a", "b"].prop_map(|u| PodUid::parse(&u).unwrap());
        let name = prop_oneof!["x", "y"].prop_map(|n| n.to_string());
        let id = (0u8..6).prop_map(|n| ContainerId::parse(&format!("{n:064x}")).unwrap());
        let stamp = (prop_oneof!["", "b1", "b2"], 0i64..100).prop_map(|(boot, nanos)| BootStamp { boot, nanos });
        (0u8..5, uid, name, id, stamp, 0i64..100, any::<bool>()).prop_map(|(kind, uid, name, id, stamp, at, init)| match kind {
            0 => Record::Admitted { uid, namespace: "ns".into(), name, at, stamp },
            1 => {
                let (attempt, image, sandbox, backoff) = (at as u32, "i".into(), at, 10);
                Record::Attempt { uid, name, init, attempt, id, image, at, stamp, sandbox, backoff }
            }
            2 => Record::Exit { uid, name, id, exit: ExitRecord { code: at as i32, ..ExitRecord::default() }, stamp },
            3 => Record::Finished { uid, phase: "Failed".into(), reason: name, message: String::new(), at },
            _ => Record::Removed { uid },
        })
    }

    proptest! {
        /// Compaction changes nothing, and what is appended behind it adds up as before.
        #[test]
        fn a_snapshot_gives_the_same_state(first in prop::collection::vec(record(), 0..40), then in prop::collection::vec(record(), 0..10)) {
            let mut state = PodsState::default();
            first.iter().for_each(|r| state.apply(r));
            let mut again = PodsState::default();
            state.records().iter().for_each(|r| again.apply(r));
            prop_assert_eq!(&again, &state);
            then.iter().for_each(|r| state.apply(r));
            then.iter().for_each(|r| again.apply(r));
            prop_assert_eq!(again, state);
        }
    }
}
