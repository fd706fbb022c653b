//! One pod: what is due for it now. Order matters and is this file's subject: exits first, then
//! what has to end, then what was left dead, then what it still needs, old containers last.
#![deny(clippy::disallowed_methods)]

use super::Plan;
use super::restart::{self, Next};
use crate::api::pod::{Container, ImagePullPolicy, Pod, RestartPolicy};
use crate::kubelet::model::{
    Action, ContainerState, Desired, EndReason, Ending, Finished, ImageState, NewAttempt, Now, Phase, PodState, SECOND, Sandbox,
    Step,
};
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::ExitCause;

/// Nobody is killed earlier than this after the signal (the kubelet's minimum).
const MIN_GRACE: i64 = 2;
const DEFAULT_GRACE: i64 = 30;
/// A process that survives SIGKILL hangs in the kernel; it is tried again.
const KILL_AGAIN: i64 = 10 * SECOND;
/// A monitor of an ending pod that does not answer is waited for this long after the kill: a slow
/// card may block it.
const HUNG: i64 = 60 * SECOND;

pub const DEADLINE_REASON: &str = "DeadlineExceeded";
const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";
const SHUTDOWN_REASON: &str = "Terminated";
const SHUTDOWN_MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";

pub(super) fn plan(uid: &PodUid, state: &PodState, desired: &Desired, now: Now, plan: &mut Plan) {
    let mut turn = Turn { uid, state, now, plan };
    if state.busy {
        // The report brings the next turn.
        return;
    }
    if turn.record_exits() {
        return;
    }
    if let Some(ending) = turn.due_ending(desired) {
        turn.act(Action::End { uid: uid.clone(), ending });
        return;
    }
    // Also of a pod that is ending: an exit that was missed would be waited for for ever.
    if state.unheard && state.sandbox != Sandbox::Dead && turn.step(Step::Listen, Action::Listen { uid: uid.clone() }) {
        return;
    }
    match (&state.ending, &state.finished) {
        (Some(ending), _) => turn.end(*ending),
        (None, _) if state.sandbox == Sandbox::Dead => turn.clear_dead(),
        (None, _) if state.unheard => {}
        (None, Some(_)) => turn.clean_up(),
        (None, None) if state.admitted_at == 0 => {
            if !desired.stopping {
                turn.step(Step::Admit, Action::Admit { uid: uid.clone() });
            }
        }
        (None, None) => {
            if let Some(pod) = &state.pod {
                turn.run(pod, desired);
            }
        }
    }
}

struct Turn<'a> {
    uid: &'a PodUid,
    state: &'a PodState,
    now: Now,
    plan: &'a mut Plan,
}

impl Turn<'_> {
    fn act(&mut self, action: Action) {
        self.plan.actions.push(action);
    }

    /// Acts unless that step failed and its next try is not due. True: acted.
    fn step(&mut self, step: Step, action: Action) -> bool {
        if let Some(failure) = self.state.failures.get(&step)
            && failure.due() > self.now.boot
        {
            self.plan.wake_at(failure.due());
            return false;
        }
        self.act(action);
        true
    }

    /// True: nothing else is to be decided before an exit is in the journal.
    fn record_exits(&mut self) -> bool {
        for (name, container) in &self.state.containers {
            for attempt in &container.attempts {
                if let Phase::Ended { exit, journalled: false, .. } = &attempt.phase {
                    let action = Action::RecordExit {
                        uid: self.uid.clone(),
                        container: name.clone(),
                        number: attempt.number,
                        id: attempt.id.clone(),
                        exit: exit.clone(),
                    };
                    if self.step(Step::Exit, action) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// An ending that begins now, or becomes a deletion.
    fn due_ending(&mut self, desired: &Desired) -> Option<Ending> {
        let state = self.state;
        let pod = state.pod.as_deref();
        let why = state.ending.map(|ending| ending.why);
        let grace = pod.and_then(|p| p.spec.termination_grace_period_seconds).unwrap_or(DEFAULT_GRACE).max(MIN_GRACE);
        let since = state.ending.map_or(self.now.boot, |ending| ending.since);
        let ending = |why, grace| Some(Ending { why, since, at: self.now.wall, grace });
        if desired.complete && !desired.pods.contains_key(self.uid) && !desired.stopping && why != Some(EndReason::Deleted) {
            return ending(EndReason::Deleted, grace);
        }
        if why.is_some() || state.admitted_at == 0 {
            return None;
        }
        if desired.stopping {
            return ending(EndReason::Stopped, grace.min(desired.stop_grace).max(MIN_GRACE));
        }
        if state.finished.is_some() {
            return None;
        }
        let deadline = pod?.spec.active_deadline_seconds?;
        let due = state.admitted_boot.saturating_add(deadline.saturating_mul(SECOND));
        if due <= self.now.boot {
            return ending(EndReason::Deadline, grace);
        }
        self.plan.wake_at(due);
        None
    }

    fn end(&mut self, ending: Ending) {
        if self.state.sandbox == Sandbox::Dead {
            self.clear_dead();
            return;
        }
        let (mut ask, mut kill) = (Vec::new(), Vec::new());
        let kill_due = ending.since.saturating_add(ending.grace.saturating_mul(SECOND));
        for (name, container) in &self.state.containers {
            for attempt in container.attempts.iter().filter(|a| a.lives()) {
                let target: (String, ContainerId) = (name.clone(), attempt.id.clone());
                let again = attempt.killed.map(|at| at.saturating_add(KILL_AGAIN));
                // One that was never started has nobody to hear a signal.
                if attempt.phase == Phase::Created || kill_due <= self.now.boot {
                    match again {
                        Some(at) if at > self.now.boot => self.plan.wake_at(at),
                        _ => kill.push(target),
                    }
                } else {
                    self.plan.wake_at(kill_due);
                    if attempt.signalled.is_none() {
                        ask.push(target);
                    }
                }
            }
        }
        let uid = self.uid.clone();
        let hung = kill_due.saturating_add(HUNG);
        if self.state.failures.contains_key(&Step::Listen) && matches!(self.state.sandbox, Sandbox::Up { .. }) {
            if hung <= self.now.boot {
                self.step(Step::Stop, Action::KillMonitor { uid });
                return;
            }
            self.plan.wake_at(hung);
        }
        if !kill.is_empty() {
            self.step(Step::Signal, Action::Kill { uid, targets: kill });
            return;
        }
        if !ask.is_empty() {
            self.step(Step::Signal, Action::Signal { uid, targets: ask });
            return;
        }
        if self
            .state
            .containers
            .values()
            .flat_map(|c| &c.attempts)
            .any(|a| a.lives() || a.exit().is_some() && !journalled(&a.phase))
        {
            return; // their ends are still to come
        }
        let never = self.state.pod.as_deref().is_some_and(|p| policy(p) == RestartPolicy::Never);
        let begun = self.state.containers.values().any(|c| !c.attempts.is_empty());
        let finished = match ending.why {
            EndReason::Deleted => {
                self.step(Step::Remove, Action::Remove { uid });
                return;
            }
            _ if self.state.finished.is_some() => None,
            EndReason::Deadline => Some((DEADLINE_REASON, DEADLINE_MESSAGE)),
            EndReason::Stopped if never && begun => Some((SHUTDOWN_REASON, SHUTDOWN_MESSAGE)),
            EndReason::Stopped => None,
        };
        match finished {
            Some((reason, message)) => {
                let finished =
                    Finished { phase: "Failed".into(), reason: reason.into(), message: message.into(), at: self.now.wall };
                self.step(Step::Finish, Action::Finish { uid, finished });
            }
            None => self.clean_up(),
        }
    }

    /// First what its containers came to, which its run directory still tells and which is
    /// journalled before all else; then it may go.
    fn clear_dead(&mut self) {
        let uid = self.uid.clone();
        let unknown = self.state.containers.values().flat_map(|c| &c.attempts).any(|a| a.lives());
        let action = if unknown { Action::Inspect { uid } } else { Action::StopSandbox { uid } };
        self.step(Step::Stop, action);
    }

    /// Nothing runs any more: let go of the sandbox, keep logs and the newest containers.
    fn clean_up(&mut self) {
        if self.state.sandbox != Sandbox::None {
            self.step(Step::Stop, Action::StopSandbox { uid: self.uid.clone() });
        } else if self.state.finished.is_some() && self.state.volumes.is_some() {
            self.step(Step::Volumes, Action::ReleaseVolumes { uid: self.uid.clone() });
        } else {
            self.collect();
        }
    }

    fn collect(&mut self) {
        for (name, container) in &self.state.containers {
            if let Some((number, id)) = container.stale.first() {
                let action =
                    Action::RemoveContainer { uid: self.uid.clone(), container: name.clone(), number: *number, id: id.clone() };
                self.step(Step::Collect, action);
                return;
            }
        }
    }

    fn run(&mut self, pod: &Pod, desired: &Desired) {
        let sandbox = match &self.state.sandbox {
            Sandbox::Up { created_at, .. } => Some(*created_at),
            Sandbox::None | Sandbox::Dead => None,
        };
        let work = work(pod, self.state, sandbox);
        let needs = match work {
            Work::Finish { succeeded } => {
                let finished = Finished {
                    phase: if succeeded { "Succeeded" } else { "Failed" }.into(),
                    reason: String::new(),
                    message: String::new(),
                    at: self.now.wall,
                };
                self.step(Step::Finish, Action::Finish { uid: self.uid.clone(), finished });
                return;
            }
            Work::Needs(needs) => needs,
        };
        // Pulls go beside everything else.
        let mut ready = Vec::new();
        for (container, next) in needs {
            if self.image_ready(container, next) {
                ready.push((container, next));
            }
        }
        if self.set_up(pod, desired) {
            return;
        }
        if let Sandbox::Up { created_at, attached, .. } = self.state.sandbox
            && (attached || pod.spec.host_network)
            && self.state.volumes.is_some()
        {
            for (container, next) in ready {
                if self.begin(pod, container, next, created_at) {
                    return;
                }
            }
        }
        if self.state.volumes.is_some_and(|configs| configs < desired.configs) && uses_configs(pod) {
            let action = Action::SetUpVolumes { uid: self.uid.clone(), configs: desired.configs };
            if self.step(Step::Volumes, action) {
                return;
            }
        }
        self.collect();
    }

    /// Volumes, sandbox, network, in this order. True: one of them is under way or has to wait.
    fn set_up(&mut self, pod: &Pod, desired: &Desired) -> bool {
        let uid = self.uid.clone();
        if self.state.volumes.is_none() {
            self.step(Step::Volumes, Action::SetUpVolumes { uid, configs: desired.configs });
            return true;
        }
        match self.state.sandbox {
            Sandbox::Up { attached, .. } if attached || pod.spec.host_network => false,
            Sandbox::Up { .. } => {
                self.step(Step::Network, Action::Attach { uid });
                true
            }
            Sandbox::None | Sandbox::Dead => {
                self.step(Step::Sandbox, Action::RunSandbox { uid });
                true
            }
        }
    }

    /// Plans a pull where one is due. True: the create step may look for the image.
    fn image_ready(&mut self, container: &Container, next: Next) -> bool {
        let empty = ContainerState::default();
        let state = self.state.containers.get(&container.name).unwrap_or(&empty);
        let number = match next {
            Next::Attempt { number, due, .. } if due <= self.now.boot => number,
            Next::Create => state.current().map_or(0, |a| a.number),
            Next::Attempt { due, .. } => {
                self.plan.wake_at(due);
                return false;
            }
            Next::Start => return true,
            Next::Done | Next::Busy => return false,
        };
        let cut_off = state.current().and_then(|a| a.exit()).is_some_and(|exit| exit.cause == ExitCause::Reboot);
        let pull_policy = match container.image_pull_policy.unwrap_or(ImagePullPolicy::IfNotPresent) {
            // After a reboot a pod runs from what is on disk before any network is asked.
            ImagePullPolicy::Always if cut_off => ImagePullPolicy::IfNotPresent,
            policy => policy,
        };
        let pull = match (&state.image, pull_policy) {
            (ImageState::Pulling { .. }, _) => return false,
            (ImageState::Failed { failure }, _) if failure.due() > self.now.boot => {
                self.plan.wake_at(failure.due());
                return false;
            }
            (_, ImagePullPolicy::Never) => return true,
            (ImageState::Ready { attempt }, ImagePullPolicy::Always) => *attempt != number,
            (ImageState::Unknown | ImageState::Ready { .. }, ImagePullPolicy::IfNotPresent) => false,
            (ImageState::Missing | ImageState::Failed { .. }, _) | (ImageState::Unknown, ImagePullPolicy::Always) => true,
        };
        if pull {
            let (uid, image) = (self.uid.clone(), container.image.clone());
            let delay = state.pull_delay;
            self.act(Action::Pull { uid, container: container.name.clone(), attempt: number, image, delay });
        }
        !pull
    }

    /// True: create or start is under way.
    fn begin(&mut self, pod: &Pod, container: &Container, next: Next, sandbox: i64) -> bool {
        let state = self.state.containers.get(&container.name);
        if let Some(failure) = state.and_then(|c| c.failure.as_ref())
            && failure.due() > self.now.boot
        {
            self.plan.wake_at(failure.due());
            return false;
        }
        let init = pod.spec.init_containers.iter().any(|c| c.name == container.name);
        let (uid, name) = (self.uid.clone(), container.name.clone());
        let current = state.and_then(|c| c.current());
        let attempt = match (next, current) {
            (Next::Start, Some(current)) => {
                self.act(Action::Start { uid, container: name, id: current.id.clone() });
                return true;
            }
            (Next::Create, Some(current)) => {
                NewAttempt { number: current.number, id: current.id.clone(), init, sandbox, backoff: current.backoff, new: false }
            }
            (Next::Attempt { number, backoff, .. }, _) => {
                NewAttempt { number, id: restart::attempt_id(&uid, &name, number, sandbox), init, sandbox, backoff, new: true }
            }
            (Next::Done | Next::Busy, _) | (Next::Start | Next::Create, None) => return false,
        };
        self.act(Action::Create { uid, container: name, attempt });
        true
    }
}

/// What a pod as a whole still has to do.
pub enum Work<'a> {
    /// Every container has run and none runs again.
    Finish { succeeded: bool },
    /// Containers that are to be looked at now: the next init container, or all the others.
    Needs(Vec<(&'a Container, Next)>),
}

pub fn work<'a>(pod: &'a Pod, state: &PodState, sandbox: Option<i64>) -> Work<'a> {
    let policy = policy(pod);
    let current = |container: &Container| state.containers.get(&container.name).and_then(|c| c.current());
    let mains: Vec<(&Container, Next)> =
        pod.spec.containers.iter().map(|c| (c, restart::next(policy, false, current(c), sandbox))).collect();
    if mains.iter().all(|(_, next)| *next == Next::Done) {
        let succeeded = pod.spec.containers.iter().all(|c| current(c).and_then(|a| a.exit()).is_some_and(|e| e.code == 0));
        return Work::Finish { succeeded };
    }
    for container in &pod.spec.init_containers {
        let attempt = current(container);
        match restart::next(policy, true, attempt, sandbox) {
            Next::Done if attempt.and_then(|a| a.exit()).is_some_and(|exit| exit.code != 0) => {
                // Under Never a failed init container ends the pod, once the others are down.
                return Work::Finish { succeeded: false };
            }
            Next::Done => {}
            next => return Work::Needs(vec![(container, next)]),
        }
    }
    Work::Needs(mains)
}

pub fn policy(pod: &Pod) -> RestartPolicy {
    pod.spec.restart_policy.unwrap_or_default()
}

fn journalled(phase: &Phase) -> bool {
    matches!(phase, Phase::Ended { journalled: true, .. })
}

/// Some volume takes its contents from a ConfigMap or Secret.
fn uses_configs(pod: &Pod) -> bool {
    pod.spec.volumes.iter().any(|v| v.config_map.is_some() || v.secret.is_some())
}
