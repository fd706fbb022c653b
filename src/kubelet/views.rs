//! What readers are told of the planner's world, and the one log line a change of it makes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::handle::{AttemptView, ContainerView, PodFilter, PodView};
use super::model::{Action, AttemptState, Desired, EndReason, Ending, ImageState, Now, Observed, Outcome, Phase, PodState};
use super::plan::admit;
use super::source::DesiredPod;
use super::status::render;
use crate::api::pod::{Container, Pod};
use crate::api::status::PodStatus;
use crate::api::time::WallTime;
use crate::config::Roots;
use crate::runtime::model::RuntimeEvent;
use crate::store::ids::PodUid;

/// By namespace and name.
pub fn pods(
    roots: &Roots,
    desired: &Desired,
    observed: &Observed,
    sources: &BTreeMap<PodUid, DesiredPod>,
    filter: &PodFilter,
    now: Now,
) -> Vec<PodView> {
    let wanted = |namespace: &str, name: &str| {
        filter.namespace.as_deref().is_none_or(|n| n == namespace) && filter.name.as_deref().is_none_or(|n| n == name)
    };
    let mut views: Vec<PodView> = observed
        .pods
        .iter()
        .filter(|(_, state)| wanted(&state.namespace, &state.name))
        .map(|(uid, state)| here(roots, uid, state, desired, sources.get(uid), now))
        .collect();
    for (uid, verdict) in admit::verdicts(desired, observed) {
        if let Some(source) = sources.get(uid)
            && wanted(&source.pod.metadata.namespace, &source.pod.metadata.name)
        {
            let status = render::unadmitted(&source.pod, &verdict, &desired.node);
            let problems = if status.message.is_empty() { Vec::new() } else { vec![status.message.clone()] };
            views.push(PodView {
                uid: uid.clone(),
                namespace: source.pod.metadata.namespace.clone(),
                name: source.pod.metadata.name.clone(),
                origin: Some(source.origin.clone()),
                raw: Some(Arc::clone(&source.raw)),
                status,
                deletion: None,
                containers: containers(&source.pod).map(|(c, init)| container(c, init, None)).collect(),
                warnings: source.warnings.clone(),
                problems,
            });
        }
    }
    views.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    views
}

fn here(roots: &Roots, uid: &PodUid, state: &PodState, desired: &Desired, source: Option<&DesiredPod>, now: Now) -> PodView {
    let status = match state.pod.as_deref() {
        Some(pod) => render::pod_status(uid, pod, state, &desired.node, now),
        None => PodStatus {
            phase: "Unknown".into(),
            message: "the stored manifest of this pod cannot be read: put it into the manifests directory again".into(),
            ..PodStatus::default()
        },
    };
    let attempts = |container: &str| {
        let known = state.containers.get(container).map(|c| c.attempts.as_slice()).unwrap_or_default();
        let view = |attempt: &AttemptState| AttemptView {
            id: attempt.id.clone(),
            number: attempt.number,
            log: roots
                .pod_logs(&state.namespace, &state.name, uid.as_str())
                .join(container)
                .join(format!("{}.log", attempt.number)),
            running: matches!(attempt.phase, Phase::Running { .. }),
        };
        (known.last().map(view), known.len().checked_sub(2).and_then(|i| known.get(i)).map(view))
    };
    let failures = state.failures.values().map(|f| format!("{}: {}", f.reason, f.message));
    PodView {
        uid: uid.clone(),
        namespace: state.namespace.clone(),
        name: state.name.clone(),
        origin: source.map(|s| s.origin.clone()),
        raw: source.filter(|_| state.admitted_at == 0).map(|s| Arc::clone(&s.raw)),
        status,
        deletion: state.ending.filter(|e| e.why == EndReason::Deleted).map(|e| WallTime(e.at).seconds()),
        containers: state
            .pod
            .iter()
            .flat_map(|pod| containers(pod))
            .map(|(c, init)| container(c, init, Some(attempts(&c.name))))
            .collect(),
        warnings: source.map(|s| s.warnings.clone()).unwrap_or_default(),
        problems: failures.collect(),
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = (&Container, bool)> {
    pod.spec.init_containers.iter().map(|c| (c, true)).chain(pod.spec.containers.iter().map(|c| (c, false)))
}

fn container(container: &Container, init: bool, attempts: Option<(Option<AttemptView>, Option<AttemptView>)>) -> ContainerView {
    let (current, previous) = attempts.unwrap_or_default();
    ContainerView { name: container.name.clone(), init, tty: container.tty, stdin: container.stdin, current, previous }
}

fn name(observed: &Observed, uid: &PodUid) -> String {
    observed.pods.get(uid).map_or_else(|| uid.to_string(), |state| format!("{}/{}", state.namespace, state.name))
}

/// One line for each change that a person may look for.
pub fn log_outcome(observed: &Observed, action: &Action, outcome: &Outcome) {
    let uid = action.uid();
    let pod = name(observed, uid);
    match outcome {
        // Once is enough: `coracle pods` shows it for as long as it lasts.
        Outcome::Failed { message, .. } | Outcome::NotCreated { message, .. } if known(observed, uid, message) => {
            tracing::debug!(pod, action = %action, "failed again: {message}");
            return;
        }
        Outcome::Failed { reason, message } => {
            tracing::warn!(pod, uid = %uid, action = %action, reason = ?reason, "failed: {message}");
            return;
        }
        Outcome::NotCreated { reason, message, .. } => {
            tracing::warn!(pod, uid = %uid, action = %action, reason = ?reason, "failed: {message}");
            return;
        }
        Outcome::NotStarted { exit, .. } => {
            tracing::warn!(pod, uid = %uid, action = %action, "the container could not be started: {}", exit.message);
            return;
        }
        Outcome::ImageMissing => {
            tracing::debug!(pod, action = %action, "its image is not here");
            return;
        }
        _ => {}
    }
    match action {
        Action::Admit { .. } => tracing::info!(pod, uid = %uid, "admitted"),
        Action::Pull { container, image, .. } => tracing::info!(pod, container, image, "pulled"),
        Action::Start { container, id, .. } => tracing::info!(pod, container, id = %id, "started"),
        Action::RecordExit { container, id, .. } => {
            if let Outcome::Recorded { exit } = outcome {
                let reason = render::exit_reason(exit);
                tracing::info!(pod, container, id = %id, code = exit.code, reason, "ended");
            }
        }
        Action::Finish { finished, .. } => {
            tracing::info!(pod, uid = %uid, phase = finished.phase, reason = finished.reason, "finished");
        }
        Action::Remove { .. } => tracing::info!(pod, uid = %uid, "removed"),
        Action::Kill { targets, .. } => {
            tracing::warn!(pod, uid = %uid, containers = targets.len(), "killed: the grace period is over");
        }
        Action::KillMonitor { .. } => {
            tracing::warn!(pod, uid = %uid, "the monitor of an ending pod does not answer: killed");
        }
        Action::StopSandbox { .. } => tracing::info!(pod, uid = %uid, "sandbox gone"),
        Action::End { .. }
        | Action::SetUpVolumes { .. }
        | Action::RunSandbox { .. }
        | Action::Attach { .. }
        | Action::Inspect { .. }
        | Action::Listen { .. }
        | Action::ReleaseVolumes { .. }
        | Action::Create { .. }
        | Action::Signal { .. }
        | Action::RemoveContainer { .. } => tracing::debug!(pod, action = %action, "done"),
    }
}

/// Whether something of the pod has failed with these words before.
fn known(observed: &Observed, uid: &PodUid, message: &str) -> bool {
    let Some(state) = observed.pods.get(uid) else { return false };
    let of_containers = state.containers.values().flat_map(|container| {
        let image = match &container.image {
            ImageState::Failed { failure } | ImageState::Pulling { last: Some(failure) } => Some(failure),
            ImageState::Unknown | ImageState::Missing | ImageState::Pulling { last: None } | ImageState::Ready { .. } => None,
        };
        container.failure.iter().chain(image)
    });
    state.failures.values().chain(of_containers).any(|failure| failure.message == message)
}

pub fn log_ending(observed: &Observed, uid: &PodUid, ending: &Ending) {
    let why = match ending.why {
        EndReason::Deleted => "nobody asks for it any more",
        EndReason::Deadline => "its deadline is over",
        EndReason::Stopped => "the node stops",
    };
    tracing::info!(pod = name(observed, uid), uid = %uid, why, grace_seconds = ending.grace, "ending");
}

pub fn log_event(observed: &Observed, event: &RuntimeEvent) {
    if let RuntimeEvent::MonitorDied { uid } = event {
        tracing::error!(pod = name(observed, uid), uid = %uid, "its monitor has died: the pod is made anew");
    }
}
