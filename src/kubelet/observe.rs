//! How OBSERVED changes: what the runtime tells and what reports say. Plain folds without effects,
//! so that any order of them can be tested.
//!
//! Invariant: an attempt's end is taken once, the first that is told; one whose end nobody saw has
//! ended with `ContainerStatusUnknown`, never silently.
#![deny(clippy::disallowed_methods)]

use std::sync::Arc;

use super::model::{
    Action, AttemptState, Desired, EndReason, FailReason, Failure, ImageState, NewAttempt, Now, Observed, Outcome, Phase,
    PodState, SECOND, Sandbox, Step,
};
use crate::api::pod::ImagePullPolicy;
use crate::runtime::model::{ContainerPhase, RuntimeEvent, SandboxState};
use crate::store::ids::ContainerId;
use crate::store::records::{ExitCause, ExitRecord};

/// Before an action's effect: the pod is busy with it (pulls aside).
pub fn dispatched(observed: &mut Observed, desired: &Desired, action: &Action) {
    if let Action::Admit { uid } = action
        && let Some(pod) = desired.pods.get(uid)
    {
        let state = observed.pods.entry(uid.clone()).or_default();
        state.namespace.clone_from(&pod.metadata.namespace);
        state.name.clone_from(&pod.metadata.name);
        state.pod = Some(Arc::clone(pod));
    }
    let Some(state) = observed.pods.get_mut(action.uid()) else { return };
    match action {
        Action::End { ending, .. } => state.ending = Some(*ending),
        Action::Pull { container, .. } => {
            let container = state.containers.entry(container.clone()).or_default();
            let last = match std::mem::take(&mut container.image) {
                ImageState::Failed { failure } => Some(failure),
                _ => None,
            };
            container.image = ImageState::Pulling { last };
        }
        _ => state.busy = true,
    }
}

/// What the runtime tells without being asked.
pub fn told(observed: &mut Observed, event: RuntimeEvent, now: Now) {
    match event {
        RuntimeEvent::Exited { uid, id, exit } => {
            let Some(state) = observed.pods.get_mut(&uid) else { return };
            let stopped = state.ending.is_some_and(|e| e.why == EndReason::Stopped);
            let attempt = state.containers.values_mut().flat_map(|c| &mut c.attempts).find(|a| a.id == id);
            match attempt {
                Some(attempt) if attempt.lives() => end(attempt, exit, stopped, now),
                Some(AttemptState { phase: Phase::Ended { .. }, .. }) => {}
                Some(_) | None => {
                    if state.busy {
                        state.early.insert(id, exit);
                    }
                }
            }
        }
        RuntimeEvent::MonitorDied { uid } => {
            if let Some(state) = observed.pods.get_mut(&uid)
                && (state.busy || state.sandbox != Sandbox::None)
            {
                state.sandbox = Sandbox::Dead;
            }
        }
    }
}

fn end(attempt: &mut AttemptState, mut exit: ExitRecord, stopped: bool, now: Now) {
    if stopped {
        exit.cause = ExitCause::Stopped;
    }
    attempt.phase = Phase::Ended { exit, journalled: false, boot: now.boot };
}

/// Every monitor is to be asked what it has, in case a word of it was missed.
pub fn listen_again(observed: &mut Observed) {
    for state in observed.pods.values_mut() {
        state.unheard |= matches!(state.sandbox, Sandbox::Up { .. });
    }
}

/// Somebody took these pods' links away: they get their network again, at the same addresses.
pub fn severed(observed: &mut Observed, pods: &[String]) {
    for (uid, state) in &mut observed.pods {
        if let (Sandbox::Up { attached, .. }, true) = (&mut state.sandbox, pods.iter().any(|pod| pod == uid.as_str())) {
            *attached = false;
        }
    }
}

/// Newer ConfigMaps or Secrets: what waited for one need not wait longer.
pub fn configs_changed(observed: &mut Observed) {
    for state in observed.pods.values_mut() {
        state.failures.remove(&Step::Volumes);
        for container in state.containers.values_mut() {
            if container.failure.as_ref().is_some_and(|f| f.reason == FailReason::CreateConfig.waiting()) {
                container.failure = None;
            }
        }
    }
}

/// Images came: what waited for one need not wait longer.
pub fn images_changed(observed: &mut Observed) {
    for container in observed.pods.values_mut().flat_map(|state| state.containers.values_mut()) {
        if matches!(container.image, ImageState::Failed { .. } | ImageState::Missing) {
            container.image = ImageState::Unknown;
            container.pull_delay = 0;
        }
    }
}

/// What became of an action.
pub fn reported(observed: &mut Observed, action: &Action, outcome: Outcome, now: Now) {
    if let (Action::Remove { uid }, Outcome::Done) = (action, &outcome) {
        observed.pods.remove(uid);
        return;
    }
    let Some(state) = observed.pods.get_mut(action.uid()) else { return };
    if !matches!(action, Action::Pull { .. }) {
        state.busy = false;
    }
    let stopped = state.ending.is_some_and(|e| e.why == EndReason::Stopped);
    match action {
        Action::End { .. } => {}
        Action::Admit { .. } => {
            if let Outcome::Admitted { at } = outcome {
                state.admitted_at = at;
                state.admitted_boot = now.boot;
            }
            settle(state, Step::Admit, outcome, now);
        }
        Action::SetUpVolumes { configs, .. } => {
            if outcome == Outcome::Done {
                state.volumes = Some(*configs);
            }
            settle(state, Step::Volumes, outcome, now);
        }
        Action::RunSandbox { .. } => {
            if let Outcome::Sandbox { created_at } = outcome
                && state.sandbox == Sandbox::None
            {
                state.sandbox = Sandbox::Up { created_at, attached: false, addresses: Vec::new() };
            }
            settle(state, Step::Sandbox, outcome, now);
        }
        Action::Attach { .. } => {
            if let (Outcome::Attached { addresses: got }, Sandbox::Up { attached, addresses, .. }) =
                (&outcome, &mut state.sandbox)
            {
                *attached = true;
                addresses.clone_from(got);
            }
            settle(state, Step::Network, outcome, now);
        }
        Action::Listen { .. } => {
            if let Outcome::Heard { state: heard } = &outcome {
                state.unheard = false;
                match heard {
                    Some(heard) if heard.alive => hear(state, heard, stopped, now),
                    // It died meanwhile, or something took it away.
                    Some(_) | None => state.sandbox = Sandbox::Dead,
                }
            }
            settle(state, Step::Listen, outcome, now);
        }
        Action::KillMonitor { .. } => {
            if outcome == Outcome::Done {
                state.sandbox = Sandbox::Dead;
            }
            settle(state, Step::Stop, outcome, now);
        }
        Action::Inspect { .. } => {
            if let Outcome::Exits { exits } = &outcome {
                // What was met in that sandbox says nothing about the next.
                state.containers.values_mut().for_each(|c| c.failure = None);
                for attempt in state.containers.values_mut().flat_map(|c| &mut c.attempts).filter(|a| a.lives()) {
                    let started_at = match attempt.phase {
                        Phase::Running { started_at } => started_at,
                        _ => attempt.at,
                    };
                    let told = exits.iter().find(|(id, _)| *id == attempt.id).map(|(_, exit)| exit.clone());
                    end(attempt, told.unwrap_or_else(|| lost(started_at, now)), stopped, now);
                }
                state.early.clear();
            }
            settle(state, Step::Stop, outcome, now);
        }
        Action::StopSandbox { .. } => {
            if outcome == Outcome::Done {
                state.sandbox = Sandbox::None;
                state.containers.values_mut().for_each(|c| c.failure = None);
            }
            settle(state, Step::Stop, outcome, now);
        }
        Action::Pull { uid: _, container, attempt, .. } => pulled(state, container, *attempt, outcome, now),
        Action::Create { container, attempt, .. } => created(state, container, attempt, outcome, stopped, now),
        Action::Start { container, id, .. } => started(state, container, id, outcome, stopped, now),
        Action::Signal { targets, .. } | Action::Kill { targets, .. } => {
            let kill = matches!(action, Action::Kill { .. });
            if outcome == Outcome::Done {
                for attempt in state.containers.values_mut().flat_map(|c| &mut c.attempts) {
                    if targets.iter().any(|(_, id)| *id == attempt.id) {
                        let at = if kill { &mut attempt.killed } else { &mut attempt.signalled };
                        *at = Some(now.boot);
                    }
                }
            }
            settle(state, Step::Signal, outcome, now);
        }
        Action::RecordExit { container, id, .. } => {
            if let Outcome::Recorded { exit: recorded } = &outcome
                && let Some(attempt) = attempt_mut(state, container, id)
                && let Phase::Ended { exit, journalled, .. } = &mut attempt.phase
            {
                *journalled = true;
                exit.clone_from(recorded);
            }
            settle(state, Step::Exit, outcome, now);
        }
        Action::RemoveContainer { container, id, .. } => {
            if outcome == Outcome::Done
                && let Some(container) = state.containers.get_mut(container)
            {
                container.stale.retain(|(_, stale)| stale != id);
            }
            settle(state, Step::Collect, outcome, now);
        }
        Action::ReleaseVolumes { .. } => {
            if outcome == Outcome::Done {
                state.volumes = None;
            }
            settle(state, Step::Volumes, outcome, now);
        }
        Action::Finish { finished, .. } => {
            if outcome == Outcome::Done {
                state.finished = Some(finished.clone());
            }
            settle(state, Step::Finish, outcome, now);
        }
        Action::Remove { .. } => settle(state, Step::Remove, outcome, now),
    }
}

/// What a monitor says when it answers at last.
fn hear(state: &mut PodState, heard: &SandboxState, stopped: bool, now: Now) {
    for attempt in state.containers.values_mut().flat_map(|c| &mut c.attempts) {
        let Some(told) = heard.containers.iter().find(|c| c.id == attempt.id) else { continue };
        match (&told.phase, &attempt.phase) {
            (_, Phase::Ended { .. }) => {}
            (ContainerPhase::Exited(exit), _) => end(attempt, exit.clone(), stopped, now),
            (ContainerPhase::Created { .. }, _) => attempt.phase = Phase::Created,
            (ContainerPhase::Running { started_at, .. }, _) => attempt.phase = Phase::Running { started_at: *started_at },
        }
    }
}

fn attempt_mut<'a>(state: &'a mut PodState, container: &str, id: &ContainerId) -> Option<&'a mut AttemptState> {
    state.containers.get_mut(container)?.attempts.iter_mut().find(|a| a.id == *id)
}

/// Keeps or clears a step's failure.
fn settle(state: &mut PodState, step: Step, outcome: Outcome, now: Now) {
    if let Outcome::Failed { reason, message } = outcome {
        let failure = failure(state.failures.get(&step), reason, message, now);
        state.failures.insert(step, failure);
    } else {
        state.failures.remove(&step);
    }
}

/// The next failure of a step: its delay doubles from the kubelet's first to its longest.
fn failure(before: Option<&Failure>, reason: FailReason, message: String, now: Now) -> Failure {
    let (first, most) = match reason {
        FailReason::Mount => (SECOND / 2, 122 * SECOND),
        FailReason::Silent => (SECOND, 10 * SECOND),
        FailReason::Sandbox | FailReason::Network => (SECOND, 15 * SECOND),
        FailReason::InvalidImageName => (300 * SECOND, 300 * SECOND),
        FailReason::ImagePull | FailReason::RegistryUnavailable | FailReason::ImageInspect => (10 * SECOND, 300 * SECOND),
        FailReason::NeverPull => (10 * SECOND, 10 * SECOND),
        FailReason::Journal | FailReason::CreateConfig | FailReason::Create | FailReason::Kill => (SECOND, 10 * SECOND),
    };
    let delay = before.map_or(first, |f| f.delay.saturating_mul(2).clamp(first, most));
    Failure { reason: reason.waiting().to_owned(), message, at: now.boot, delay }
}

/// A pull that failed after a back-off of `delay` nanoseconds.
pub fn pull_failure(delay: i64, reason: FailReason, message: String, now: Now) -> Failure {
    let last = Failure { reason: String::new(), message: String::new(), at: 0, delay };
    failure((delay > 0).then_some(&last), reason, message, now)
}

fn pulled(state: &mut PodState, container: &str, attempt: u32, outcome: Outcome, now: Now) {
    let container = state.containers.entry(container.to_owned()).or_default();
    container.image = match outcome {
        Outcome::Failed { reason, message } => {
            let failure = pull_failure(container.pull_delay, reason, message, now);
            container.pull_delay = failure.delay;
            ImageState::Failed { failure }
        }
        _ => {
            container.pull_delay = 0;
            ImageState::Ready { attempt }
        }
    };
}

fn created(state: &mut PodState, name: &str, new: &NewAttempt, outcome: Outcome, stopped: bool, now: Now) {
    let never = state.pod.as_deref().is_some_and(|pod| {
        let mut all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        all.any(|c| c.name == name && c.image_pull_policy == Some(ImagePullPolicy::Never))
    });
    let early = state.early.remove(&new.id);
    let container = state.containers.entry(name.to_owned()).or_default();
    container.init = new.init;
    let mut journalled = |image: String, at: i64, phase: Phase| {
        container.image = ImageState::Ready { attempt: new.number };
        if let Some(known) = container.attempts.iter_mut().find(|a| a.id == new.id) {
            known.phase = phase;
            known.image = image;
            return;
        }
        // The same attempt in a sandbox that was made anew takes the place of the one cut off.
        if let Some(cut) = container.attempts.pop_if(|a| a.number == new.number && a.exit().is_none()) {
            container.stale.push((cut.number, cut.id));
        }
        container.attempts.push(AttemptState {
            number: new.number,
            id: new.id.clone(),
            image,
            at,
            at_boot: now.boot,
            sandbox: new.sandbox,
            backoff: new.backoff,
            phase,
            signalled: None,
            killed: None,
        });
        if container.attempts.len() > 2 {
            let old = container.attempts.remove(0);
            container.stale.push((old.number, old.id));
        }
    };
    match outcome {
        Outcome::Created { image, at } => {
            journalled(image, at, Phase::Created);
            container.failure = None;
            if let (Some(exit), Some(attempt)) = (early, container.attempts.last_mut()) {
                end(attempt, exit, stopped, now);
            }
        }
        Outcome::NotStarted { image, at, exit } => {
            journalled(image, at, Phase::Created);
            container.failure = None;
            if let Some(attempt) = container.attempts.last_mut() {
                end(attempt, exit, stopped, now);
            }
        }
        Outcome::NotCreated { image, at, reason, message } => {
            journalled(image, at, Phase::Journalled);
            container.failure = Some(failure(container.failure.as_ref(), reason, message, now));
        }
        Outcome::ImageMissing => {
            container.failure = None;
            container.image = match container.image {
                // It was pulled a moment ago: something removes images, so do not spin.
                ImageState::Ready { .. } => {
                    let message = "the image was removed right after it had been pulled".to_owned();
                    ImageState::Failed { failure: failure(None, FailReason::ImageInspect, message, now) }
                }
                _ if never => {
                    let message = String::new();
                    ImageState::Failed { failure: failure(None, FailReason::NeverPull, message, now) }
                }
                _ => ImageState::Missing,
            };
        }
        Outcome::Failed { reason, message } => {
            container.failure = Some(failure(container.failure.as_ref(), reason, message, now));
        }
        _ => {}
    }
}

fn started(state: &mut PodState, name: &str, id: &ContainerId, outcome: Outcome, stopped: bool, now: Now) {
    let early = state.early.remove(id);
    let Some(container) = state.containers.get_mut(name) else { return };
    let Some(attempt) = container.attempts.iter_mut().find(|a| a.id == *id) else { return };
    match outcome {
        Outcome::Started { started_at } => {
            container.failure = None;
            // Its end may have been told already.
            if attempt.phase == Phase::Created {
                attempt.phase = Phase::Running { started_at };
            }
        }
        Outcome::NotStarted { exit, .. } => {
            container.failure = None;
            if attempt.lives() {
                end(attempt, exit, stopped, now);
            }
        }
        Outcome::Failed { reason, message } => {
            container.failure = Some(failure(container.failure.as_ref(), reason, message, now));
        }
        _ => {}
    }
    if let Some(exit) = early
        && attempt.lives()
    {
        end(attempt, exit, stopped, now);
    }
}

/// The end of a container that nobody saw; the kubelet's words.
pub(super) fn lost(started_at: i64, now: Now) -> ExitRecord {
    ExitRecord {
        code: 137,
        started_at,
        finished_at: now.wall,
        reason: "ContainerStatusUnknown".to_owned(),
        message: "The container could not be located when the pod was terminated".to_owned(),
        ..ExitRecord::default()
    }
}
