//! A world for tests: a kernel, a journal and a clock that behave as the real ones do, driven by
//! the real `plan`, `observe` and `render`. It can be cut off at any point: the agent dies between
//! an effect and its report, a monitor dies, the machine reboots.
//!
//! Invariant checked at each step: no id is created twice, no attempt number is given out twice,
//! at most one pod of a name has a sandbox, and a second pass plans nothing.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::api::pod::{Container, ImagePullPolicy, Pod, RestartPolicy};
use crate::api::status::PodStatus;
use crate::kubelet::model::{Action, Desired, FailReason, Node, Now, Observed, Outcome, SECOND};
use crate::kubelet::observe;
use crate::kubelet::plan::{Plan, plan};
use crate::kubelet::pulls::FailedPulls;
use crate::kubelet::recover::{self, Found};
use crate::kubelet::status::render;
use crate::runtime::model::{ContainerPhase, ContainerState, Pins, RuntimeEvent, SandboxState};
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::{BootStamp, ExitRecord, PodsState, Record};

/// 2026-11-30, so that wall times look like themselves.
const WALL: i64 = 1_796_000_000 * SECOND;

pub struct World {
    pub desired: Desired,
    pub observed: Observed,
    pub store: PodsState,
    pub manifests: BTreeMap<PodUid, Arc<Pod>>,
    pub kernel: BTreeMap<PodUid, SandboxState>,
    pub attached: BTreeSet<PodUid>,
    /// Images that are here, and what a pull of others says.
    pub images: BTreeSet<String>,
    pub registry: Result<(), (FailReason, String)>,
    /// Containers whose start fails, by name.
    pub unstartable: BTreeSet<String>,
    /// Containers that lack a ConfigMap, by name.
    pub unconfigured: BTreeSet<String>,
    /// Signals are ignored.
    pub deaf: bool,
    /// Monitors do not answer: ends happen, and nobody is told.
    pub hung: bool,
    pub boot: String,
    pub now: Now,
    /// Actions that were handed out and have not reported.
    pub under_way: Vec<Action>,
    pub log: Vec<String>,
    pulls: FailedPulls,
    created: BTreeSet<ContainerId>,
    attempts: BTreeSet<(PodUid, i64, String, u32)>,
    boots: u32,
    sandboxes: i64,
}

pub fn uid(text: &str) -> PodUid {
    PodUid::parse(text).unwrap()
}

pub fn pod(name: &str, policy: RestartPolicy, init: &[&str], main: &[&str]) -> Pod {
    let container = |name: &&str| Container {
        name: (*name).to_owned(),
        image: "busybox".to_owned(),
        image_pull_policy: Some(ImagePullPolicy::IfNotPresent),
        ..Container::default()
    };
    let mut pod = Pod::default();
    pod.metadata.name = name.to_owned();
    pod.metadata.namespace = "default".to_owned();
    pod.spec.restart_policy = Some(policy);
    pod.spec.init_containers = init.iter().map(container).collect();
    pod.spec.containers = main.iter().map(container).collect();
    pod
}

impl World {
    pub fn new() -> World {
        World {
            desired: Desired {
                complete: true,
                stop_grace: 60,
                node: Node { name: "n".into(), ips: vec!["192.0.2.1".parse().unwrap()], max_pods: 110, ..Node::default() },
                ..Desired::default()
            },
            observed: Observed::default(),
            store: PodsState::default(),
            manifests: BTreeMap::new(),
            kernel: BTreeMap::new(),
            attached: BTreeSet::new(),
            images: BTreeSet::from(["busybox".to_owned()]),
            registry: Ok(()),
            unstartable: BTreeSet::new(),
            unconfigured: BTreeSet::new(),
            deaf: false,
            hung: false,
            boot: "boot-0".to_owned(),
            now: Now { boot: 1_000 * SECOND, wall: WALL },
            under_way: Vec::new(),
            log: Vec::new(),
            pulls: FailedPulls::new(),
            created: BTreeSet::new(),
            attempts: BTreeSet::new(),
            boots: 0,
            sandboxes: 0,
        }
    }

    pub fn with(pod: Pod) -> World {
        let mut world = World::new();
        world.want("u1", pod);
        world
    }

    pub fn want(&mut self, id: &str, mut pod: Pod) {
        pod.metadata.uid = id.to_owned();
        self.desired.pods.insert(uid(id), Arc::new(pod));
    }

    pub fn unwant(&mut self, id: &str) {
        self.desired.pods.remove(&uid(id));
    }

    fn stamp(&self) -> BootStamp {
        BootStamp { boot: self.boot.clone(), nanos: self.now.boot }
    }

    pub fn advance(&mut self, seconds: i64) {
        self.now.boot += seconds * SECOND;
        self.now.wall += seconds * SECOND;
    }

    /// Plans and hands out; afterwards a second pass plans nothing.
    pub fn begin(&mut self) -> Plan {
        loop {
            let first = plan(&self.desired, &self.observed, self.now);
            for action in &first.actions {
                self.log.push(action.to_string());
                observe::dispatched(&mut self.observed, &self.desired, action);
                if !matches!(action, Action::End { .. }) {
                    self.under_way.push(action.clone());
                }
            }
            if !first.actions.iter().any(|a| matches!(a, Action::End { .. })) {
                let second = plan(&self.desired, &self.observed, self.now);
                assert_eq!(second.actions, Vec::new(), "a second pass plans nothing");
                return second;
            }
        }
    }

    /// Carries out one action that is under way; its report is folded in unless the agent died.
    pub fn finish_one(&mut self, at: usize, reports: bool) {
        let action = self.under_way.remove(at);
        let outcome = self.effect(&action);
        if reports {
            observe::reported(&mut self.observed, &action, outcome, self.now);
        }
    }

    /// Plans and carries out until nothing is due now. Gives the next due time.
    pub fn settle(&mut self) -> Option<i64> {
        for _ in 0..10_000 {
            let next = self.begin();
            if self.under_way.is_empty() {
                return next.wake;
            }
            while !self.under_way.is_empty() {
                self.finish_one(0, true);
            }
        }
        panic!("never settles: {:?}", self.log.iter().rev().take(20).collect::<Vec<_>>());
    }

    /// Settles, then time passes to each due moment, for so many seconds.
    pub fn live(&mut self, seconds: i64) {
        let until = self.now.boot + seconds * SECOND;
        while let Some(due) = self.settle().filter(|due| *due <= until) {
            assert!(due > self.now.boot, "something due now was not planned");
            self.now.wall += due - self.now.boot;
            self.now.boot = due;
        }
        self.now.wall += until - self.now.boot;
        self.now.boot = until;
        self.settle();
    }

    /// A container's process ends.
    pub fn exit(&mut self, container: &str, code: i32) {
        self.exit_of("u1", container, ExitRecord { code, ..ExitRecord::default() });
    }

    pub fn exit_of(&mut self, id: &str, container: &str, exit: ExitRecord) {
        let Some(event) = self.end_process(&uid(id), container, exit) else { return };
        observe::told(&mut self.observed, event, self.now);
    }

    fn end_process(&mut self, uid: &PodUid, container: &str, mut exit: ExitRecord) -> Option<RuntimeEvent> {
        let sandbox = self.kernel.get_mut(uid)?;
        let known =
            sandbox.containers.iter_mut().find(|c| c.name == container && !matches!(c.phase, ContainerPhase::Exited(_)))?;
        if let ContainerPhase::Running { started_at, .. } = known.phase {
            exit.started_at = started_at;
        }
        exit.finished_at = self.now.wall;
        known.phase = ContainerPhase::Exited(exit.clone());
        Some(RuntimeEvent::Exited { uid: uid.clone(), id: known.id.clone(), exit })
    }

    /// A container's process ends and nobody is told.
    pub fn exit_unheard(&mut self, id: &str, container: &str, code: i32) {
        self.end_process(&uid(id), container, ExitRecord { code, ..ExitRecord::default() });
    }

    pub fn running(&self, id: &str) -> Vec<String> {
        let sandbox = self.kernel.get(&uid(id));
        let running = sandbox.iter().flat_map(|s| &s.containers).filter(|c| matches!(c.phase, ContainerPhase::Running { .. }));
        running.map(|c| format!("{}#{}", c.name, c.attempt)).collect()
    }

    /// The agent is killed and starts again: what was under way is lost, done or not.
    pub fn crash(&mut self) {
        self.under_way.clear();
        let found = Found {
            store: self.store.clone(),
            sandboxes: self.kernel.values().cloned().collect(),
            attached: self.attached.iter().map(|uid| (uid.clone(), vec!["10.88.0.2".parse().unwrap()])).collect(),
            manifests: self.manifests.clone(),
            boot: self.boot.clone(),
            pulls: self.pulls.clone(),
        };
        self.observed = recover::recovered(found, self.now);
    }

    /// The machine reboots: the kernel forgets everything, the clock since boot starts anew.
    pub fn reboot(&mut self, seconds_off: i64) {
        self.kernel.clear();
        self.pulls.clear();
        self.attached.clear();
        self.boots += 1;
        self.boot = format!("boot-{}", self.boots);
        self.now = Now { boot: 5 * SECOND, wall: self.now.wall + seconds_off * SECOND };
        self.crash();
    }

    pub fn monitor_dies(&mut self, id: &str) {
        if let Some(sandbox) = self.kernel.get_mut(&uid(id)).filter(|s| s.alive) {
            sandbox.alive = false;
            observe::told(&mut self.observed, RuntimeEvent::MonitorDied { uid: uid(id) }, self.now);
        }
    }

    pub fn status(&self, id: &str) -> PodStatus {
        let uid = uid(id);
        let state = &self.observed.pods[&uid];
        render::pod_status(&uid, state.pod.as_deref().unwrap(), state, &self.desired.node, self.now)
    }

    fn journal(&mut self, record: Record) {
        // What is on disk is bytes: what cannot be read back was never written.
        let bytes = serde_json::to_vec(&record).unwrap();
        self.store.apply(&serde_json::from_slice(&bytes).unwrap());
    }

    fn effect(&mut self, action: &Action) -> Outcome {
        let stamp = self.stamp();
        match action {
            Action::End { .. } => Outcome::Done,
            Action::Admit { uid } => {
                let pod = Arc::clone(self.observed.pods.get(uid).and_then(|s| s.pod.as_ref()).unwrap());
                self.sandboxes += 1;
                let at = self.now.wall + self.sandboxes;
                self.journal(Record::Admitted {
                    uid: uid.clone(),
                    namespace: pod.metadata.namespace.clone(),
                    name: pod.metadata.name.clone(),
                    at,
                    stamp,
                });
                self.manifests.insert(uid.clone(), pod);
                Outcome::Admitted { at: self.store.pods[uid].admitted_at }
            }
            Action::SetUpVolumes { .. } => Outcome::Done,
            Action::RunSandbox { uid } => {
                let state = &self.observed.pods[uid];
                for (other, sandbox) in &self.kernel {
                    let theirs = &self.observed.pods[other];
                    assert!(
                        other == uid || (&theirs.namespace, &theirs.name) != (&state.namespace, &state.name),
                        "two pods of one name: {other} and {uid}"
                    );
                    assert!(other != uid || sandbox.alive, "a sandbox over what a dead one left");
                }
                // Two are never made in the same nanosecond.
                self.sandboxes += 1;
                let sandbox = self.kernel.entry(uid.clone()).or_insert_with(|| SandboxState {
                    uid: uid.clone(),
                    monitor: 1,
                    created_at: self.now.wall + self.sandboxes,
                    pins: Pins::default(),
                    containers: Vec::new(),
                    alive: true,
                    answers: true,
                });
                Outcome::Sandbox { created_at: sandbox.created_at }
            }
            Action::Attach { uid } => {
                assert!(self.kernel.contains_key(uid));
                self.attached.insert(uid.clone());
                Outcome::Attached { addresses: vec!["10.88.0.2".parse().unwrap()] }
            }
            Action::Listen { .. } if self.hung => {
                Outcome::Failed { reason: FailReason::Silent, message: "it does not answer".into() }
            }
            Action::Kill { .. } if self.hung => Outcome::Done,
            Action::KillMonitor { uid } => {
                let id = uid.to_string();
                self.monitor_dies(&id);
                Outcome::Done
            }
            Action::Listen { uid } => Outcome::Heard { state: self.kernel.get(uid).cloned().map(Box::new) },
            Action::Inspect { uid } => {
                let containers = self.kernel.get(uid).into_iter().flat_map(|s| &s.containers);
                let exits = containers.filter_map(|c| match &c.phase {
                    ContainerPhase::Exited(exit) => Some((c.id.clone(), exit.clone())),
                    _ => None,
                });
                Outcome::Exits { exits: exits.collect() }
            }
            Action::StopSandbox { uid } => {
                let known = self.store.pods.get(uid).into_iter().flat_map(|p| p.containers.values()).flat_map(|c| &c.attempts);
                let ended: BTreeSet<_> = known.filter(|a| a.exit.is_some()).map(|a| a.id.clone()).collect();
                let told = self.kernel.get(uid).into_iter().flat_map(|s| &s.containers);
                for container in told.filter(|c| matches!(c.phase, ContainerPhase::Exited(_))) {
                    let newest = |a: &&ContainerId| **a == container.id;
                    let stale = self.observed.pods[uid].containers.values().flat_map(|c| &c.stale).map(|(_, id)| id);
                    assert!(ended.contains(&container.id) || stale.into_iter().any(|id| newest(&id)), "an exit is lost");
                }
                self.attached.remove(uid);
                self.kernel.remove(uid);
                Outcome::Done
            }
            Action::Pull { uid, container, image, delay, .. } => match &self.registry {
                Ok(()) => {
                    if let Some(pulls) = self.pulls.get_mut(uid) {
                        pulls.remove(container);
                    }
                    self.images.insert(image.clone());
                    Outcome::Done
                }
                Err((reason, message)) => {
                    let failure = observe::pull_failure(*delay, *reason, message.clone(), self.now);
                    self.pulls.entry(uid.clone()).or_default().insert(container.clone(), failure);
                    Outcome::Failed { reason: *reason, message: message.clone() }
                }
            },
            Action::Create { uid, container, attempt } => {
                let Some(sandbox) = self.kernel.get_mut(uid).filter(|s| s.alive) else {
                    return Outcome::Failed { reason: FailReason::Create, message: "no monitor".into() };
                };
                let pod = self.observed.pods[uid].pod.clone().unwrap();
                let all = || pod.spec.init_containers.iter().chain(&pod.spec.containers);
                let spec = all().find(|c| c.name == *container).unwrap();
                if !self.images.contains(&spec.image) {
                    return Outcome::ImageMissing;
                }
                if self.unconfigured.contains(container) {
                    return Outcome::Failed { reason: FailReason::CreateConfig, message: "configmap \"c\" not found".into() };
                }
                let again = sandbox.containers.iter().any(|c| c.id == attempt.id);
                assert!(!again, "{container} attempt {} is there already", attempt.number);
                assert!(self.created.insert(attempt.id.clone()) || !attempt.new, "id {} was used before", attempt.id);
                sandbox.containers.push(ContainerState {
                    id: attempt.id.clone(),
                    name: container.clone(),
                    attempt: attempt.number,
                    phase: ContainerPhase::Created { pid: 2 },
                });
                if attempt.new {
                    let admitted = self.store.pods[uid].admitted_at;
                    let key = (uid.clone(), admitted, container.clone(), attempt.number);
                    let unused = self.attempts.insert(key);
                    assert!(unused, "attempt {} of {container} was given out before", attempt.number);
                    self.journal(Record::Attempt {
                        uid: uid.clone(),
                        name: container.clone(),
                        init: attempt.init,
                        attempt: attempt.number,
                        id: attempt.id.clone(),
                        image: "sha256:b".into(),
                        at: self.now.wall,
                        stamp,
                        sandbox: attempt.sandbox,
                        backoff: attempt.backoff,
                    });
                }
                Outcome::Created { image: "sha256:b".into(), at: self.now.wall }
            }
            Action::Start { uid, container, id } => {
                let sandbox = self.kernel.get_mut(uid).filter(|s| s.alive);
                let Some(known) = sandbox.and_then(|s| s.containers.iter_mut().find(|c| c.id == *id)) else {
                    return Outcome::Failed { reason: FailReason::Create, message: "no monitor".into() };
                };
                if self.unstartable.contains(container) {
                    let exit = ExitRecord {
                        code: 128,
                        reason: "StartError".into(),
                        message: "exec: \"nope\": not found".into(),
                        finished_at: self.now.wall,
                        ..ExitRecord::default()
                    };
                    known.phase = ContainerPhase::Exited(exit.clone());
                    return Outcome::NotStarted { image: String::new(), at: 0, exit };
                }
                if matches!(known.phase, ContainerPhase::Created { .. }) {
                    known.phase = ContainerPhase::Running { pid: 2, started_at: self.now.wall };
                }
                Outcome::Started { started_at: self.now.wall }
            }
            Action::Signal { uid, targets } => {
                if !self.deaf {
                    self.end_all(uid, targets, 143);
                }
                Outcome::Done
            }
            Action::Kill { uid, targets } => {
                self.end_all(uid, targets, 137);
                Outcome::Done
            }
            Action::RecordExit { uid, container, id, exit, .. } => {
                self.journal(Record::Exit {
                    uid: uid.clone(),
                    name: container.clone(),
                    id: id.clone(),
                    exit: exit.clone(),
                    stamp,
                });
                Outcome::Recorded { exit: exit.clone() }
            }
            Action::ReleaseVolumes { uid } => {
                assert!(!self.kernel.contains_key(uid), "volumes are released under a sandbox");
                Outcome::Done
            }
            Action::RemoveContainer { uid, id, .. } => {
                if let Some(sandbox) = self.kernel.get_mut(uid) {
                    sandbox.containers.retain(|c| c.id != *id || !matches!(c.phase, ContainerPhase::Exited(_)));
                }
                Outcome::Done
            }
            Action::Finish { uid, finished } => {
                self.journal(Record::Finished {
                    uid: uid.clone(),
                    phase: finished.phase.clone(),
                    reason: finished.reason.clone(),
                    message: finished.message.clone(),
                    at: finished.at,
                });
                Outcome::Done
            }
            Action::Remove { uid } => {
                let live = self.kernel.get(uid).into_iter().flat_map(|s| &s.containers);
                assert_eq!(
                    live.filter(|c| matches!(c.phase, ContainerPhase::Running { .. })).count(),
                    0,
                    "removed while it runs"
                );
                self.kernel.remove(uid);
                self.attached.remove(uid);
                self.manifests.remove(uid);
                self.pulls.remove(uid);
                self.journal(Record::Removed { uid: uid.clone() });
                Outcome::Done
            }
        }
    }

    fn end_all(&mut self, uid: &PodUid, targets: &[(String, ContainerId)], code: i32) {
        for (container, _) in targets {
            let exit = ExitRecord { code, signal: Some(code - 128), ..ExitRecord::default() };
            if let Some(event) = self.end_process(uid, container, exit) {
                observe::told(&mut self.observed, event, self.now);
            }
        }
    }
}
