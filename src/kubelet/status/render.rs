//! OBSERVED to v1 PodStatus, by the kubelet's tables (pkg/kubelet/kubelet_pods.go getPhase and
//! convertToAPIContainerStatuses, pkg/kubelet/status/generate.go, v1.34). Pure.
//!
//! Invariants: nothing that is not journalled is shown (an exit before its record still reads
//! Running); every time comes from the journal or the monitor, so that an agent's restart changes
//! no `lastTransitionTime`.
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

use crate::api::pod::{Container, Pod};
use crate::api::status::{
    ContainerState as ApiState, ContainerStatus, Ip, PodCondition, PodStatus, Running, Terminated, Waiting,
};
use crate::api::time::WallTime;
use crate::images::reference;
use crate::kubelet::model::{AttemptState, ContainerState, ImageState, Node, Now, Phase, PodState, SECOND, Sandbox};
use crate::kubelet::plan::admit::Verdict;
use crate::kubelet::plan::pod::policy;
use crate::kubelet::plan::restart::{self, Next};
use crate::kubelet::qos::QosClass;
use crate::store::ids::PodUid;
use crate::store::records::{ExitCause, ExitRecord};

/// How long the first word about a failure stands before the back-off's.
const FRESH: i64 = 2 * SECOND;

/// A pod that is wanted but not admitted.
pub fn unadmitted(pod: &Pod, verdict: &Verdict, node: &Node) -> PodStatus {
    let mut status = PodStatus { phase: "Pending".into(), qos_class: QosClass::of(pod).as_str().into(), ..PodStatus::default() };
    match verdict {
        Verdict::Reject { reason, message } => {
            status.phase = "Failed".into();
            status.reason = (*reason).into();
            status.message.clone_from(message);
        }
        Verdict::Wait { message } => {
            status.conditions.push(PodCondition {
                kind: "PodScheduled".into(),
                status: "True".into(),
                ..PodCondition::default()
            });
            status.message.clone_from(message);
        }
        Verdict::Admit => {}
    }
    host_ips(&mut status, node);
    status
}

/// A pod that is here. `pod` is its spec as admitted.
pub fn pod_status(uid: &PodUid, pod: &Pod, state: &PodState, node: &Node, now: Now) -> PodStatus {
    let mut view = View { uid, pod, state, now, initializing: false };
    let init: Vec<ContainerStatus> = pod.spec.init_containers.iter().map(|c| view.container(c, true)).collect();
    view.initializing = init.iter().any(|status| !status.ready);
    let main: Vec<ContainerStatus> = pod.spec.containers.iter().map(|c| view.container(c, false)).collect();
    let mut status = PodStatus {
        phase: view.phase(&init, &main).into(),
        qos_class: QosClass::of(pod).as_str().into(),
        start_time: (state.admitted_at > 0).then(|| WallTime(state.admitted_at).seconds()),
        ..PodStatus::default()
    };
    if let Some(finished) = &state.finished {
        status.reason.clone_from(&finished.reason);
        status.message.clone_from(&finished.message);
    }
    status.conditions = view.conditions(&status.phase, &init, &main);
    host_ips(&mut status, node);
    if let Sandbox::Up { addresses, .. } = &state.sandbox {
        let ips = if pod.spec.host_network { &node.ips } else { addresses };
        status.pod_ip = ips.first().map(IpAddr::to_string).unwrap_or_default();
        status.pod_ips = ips.iter().map(|ip| Ip { ip: ip.to_string() }).collect();
    }
    status.init_container_statuses = init;
    status.container_statuses = main;
    status
}

/// Whether connections may be sent to a pod. Its condition Ready says the same, but for the moment
/// between a container's end and its journal record, which is told to nobody yet.
pub fn is_ready(pod: &Pod, state: &PodState) -> bool {
    let runs = |name: &str| {
        let current = state.containers.get(name).and_then(ContainerState::current);
        current.is_some_and(|attempt| matches!(attempt.phase, Phase::Running { .. }))
    };
    state.finished.is_none() && pod.spec.containers.iter().all(|c| runs(&c.name))
}

fn host_ips(status: &mut PodStatus, node: &Node) {
    status.host_ip = node.ips.first().map(IpAddr::to_string).unwrap_or_default();
    status.host_ips = node.ips.iter().map(|ip| Ip { ip: ip.to_string() }).collect();
}

struct View<'a> {
    uid: &'a PodUid,
    pod: &'a Pod,
    state: &'a PodState,
    now: Now,
    /// Another container has to end first: what was met on an earlier way here does not hold.
    initializing: bool,
}

impl View<'_> {
    fn container(&self, container: &Container, init: bool) -> ContainerStatus {
        let empty = ContainerState::default();
        let state = self.state.containers.get(&container.name).unwrap_or(&empty);
        let mut status = ContainerStatus {
            name: container.name.clone(),
            image: full_name(&container.image),
            started: Some(false),
            ..ContainerStatus::default()
        };
        let previous = state.attempts.len().checked_sub(2).and_then(|i| state.attempts.get(i));
        if let Some(exit) = previous.and_then(terminated) {
            status.last_state.terminated = Some(exit);
        }
        let Some(current) = state.current() else {
            status.state.waiting = Some(self.waiting(container, state));
            return status;
        };
        status.restart_count = current.number;
        status.image_id.clone_from(&current.image);
        status.container_id = format!("coracle://{}", current.id);
        match &current.phase {
            Phase::Journalled | Phase::Created => {
                status.state.waiting = Some(self.waiting(container, state));
                // The runtime has not got it yet: the one before it is what is known.
                if current.phase == Phase::Journalled {
                    status.container_id = String::new();
                }
            }
            Phase::Running { started_at } => status.state = running(*started_at),
            // Not published before it is journalled; but what a reboot ended does not run.
            Phase::Ended { exit, journalled: false, .. }
                if exit.started_at > 0 && matches!(self.state.sandbox, Sandbox::Up { .. }) =>
            {
                status.state = running(exit.started_at);
            }
            Phase::Ended { journalled: false, .. } => status.state.waiting = Some(self.waiting(container, state)),
            Phase::Ended { exit, journalled: true, boot } => {
                status.state.terminated = terminated(current);
                if init && exit.code == 0 {
                    status.ready = true;
                } else if let Some(waiting) = self.waits_to_restart(container, init, state, *boot) {
                    status.last_state =
                        std::mem::replace(&mut status.state, ApiState { waiting: Some(waiting), ..ApiState::default() });
                }
            }
        }
        if status.state.running.is_some() && !init {
            status.ready = true;
            status.started = Some(true);
        }
        status
    }

    /// Of one that has ended: the word for what it waits for, if it will run again.
    fn waits_to_restart(&self, container: &Container, init: bool, state: &ContainerState, ended: i64) -> Option<Waiting> {
        if self.state.ending.is_some() || self.state.finished.is_some() {
            return None;
        }
        let sandbox = match &self.state.sandbox {
            Sandbox::Up { created_at, .. } => Some(*created_at),
            Sandbox::None | Sandbox::Dead => None,
        };
        let current = state.current()?;
        let Next::Attempt { wait, due, .. } = restart::next(policy(self.pod), init, Some(current), sandbox) else { return None };
        if self.initializing {
            return None;
        }
        if let Some(failure) = image_waiting(&container.image, &state.image, self.now) {
            return Some(failure);
        }
        if let Some(failure) = &state.failure {
            return Some(Waiting { reason: failure.reason.clone(), message: failure.message.clone() });
        }
        if due <= self.now.boot {
            // Under Never an end that was not its own would read as the pod's.
            let cut_off = current.exit().is_some_and(|exit| exit.cause != ExitCause::Own);
            return cut_off.then(|| self.waiting(container, state));
        }
        if let Some(exit) = current.exit()
            && exit.reason == "StartError"
            && self.now.boot - ended < FRESH
        {
            return Some(Waiting { reason: "RunContainerError".into(), message: exit.message.clone() });
        }
        let message = format!(
            "back-off {} restarting failed container={} pod={}_{}({})",
            restart::duration(wait),
            container.name,
            self.state.name,
            self.state.namespace,
            self.uid
        );
        Some(Waiting { reason: "CrashLoopBackOff".into(), message })
    }

    /// Of one that was not started yet.
    fn waiting(&self, container: &Container, state: &ContainerState) -> Waiting {
        if self.initializing {
            return Waiting { reason: "PodInitializing".into(), message: String::new() };
        }
        if let Some(waiting) = image_waiting(&container.image, &state.image, self.now) {
            return waiting;
        }
        if let Some(failure) = &state.failure {
            return Waiting { reason: failure.reason.clone(), message: failure.message.clone() };
        }
        let reason = if self.pod.spec.init_containers.is_empty() { "ContainerCreating" } else { "PodInitializing" };
        // The kubelet tells these by events only; here they are seen where one looks first.
        let message = self.state.failures.values().next().map(|f| f.message.clone()).unwrap_or_default();
        Waiting { reason: reason.into(), message }
    }

    fn phase(&self, init: &[ContainerStatus], main: &[ContainerStatus]) -> &'static str {
        if let Some(finished) = &self.state.finished {
            return if finished.phase == "Succeeded" { "Succeeded" } else { "Failed" };
        }
        // Succeeded and Failed are the planner's words, once they are journalled. Until then the
        // kubelet's order: what was never started makes it Pending, what was started Running.
        let pending_init = init.iter().any(|s| s.state.terminated.is_none());
        let begun =
            |s: &&ContainerStatus| s.state.running.is_some() || s.state.terminated.is_some() || s.last_state.terminated.is_some();
        let begun = main.iter().filter(begun).count();
        if pending_init && begun == 0 || begun < main.len() { "Pending" } else { "Running" }
    }

    fn conditions(&self, phase: &str, init: &[ContainerStatus], main: &[ContainerStatus]) -> Vec<PodCondition> {
        let state = self.state;
        let admitted = state.admitted_at;
        let attempts = || state.containers.values().flat_map(|c| &c.attempts);
        let last_end = attempts().filter_map(AttemptState::exit).map(|e| e.finished_at).max();
        let last_start = attempts()
            .filter_map(|a| match a.phase {
                Phase::Running { started_at } => Some(started_at),
                _ => None,
            })
            .max();
        let done_at = state.finished.as_ref().map(|f| f.at);

        let (sandbox, sandbox_at) = match &state.sandbox {
            Sandbox::Up { created_at, attached, .. } if *attached || self.pod.spec.host_network => (true, *created_at),
            _ => (false, done_at.or(last_end).unwrap_or(admitted)),
        };

        let incomplete: Vec<&str> = init.iter().filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
        let begun =
            main.iter().any(|s| s.state.running.is_some() || s.state.terminated.is_some() || s.last_state.terminated.is_some());
        let initialized = incomplete.is_empty() || begun;
        let init_end =
            state.containers.values().filter(|c| c.init).filter_map(|c| c.current()?.exit()).map(|e| e.finished_at).max();
        let (reason, message) = match phase {
            "Succeeded" => ("PodCompleted", String::new()),
            _ if initialized => ("", String::new()),
            _ => ("ContainersNotInitialized", format!("containers with incomplete status: [{}]", incomplete.join(" "))),
        };
        let init_condition = condition("Initialized", initialized, init_end.unwrap_or(admitted), reason, message);

        let unready: Vec<&str> = main.iter().filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
        let ready = unready.is_empty() && !matches!(phase, "Succeeded" | "Failed");
        let (reason, message) = match phase {
            "Succeeded" => ("PodCompleted", String::new()),
            "Failed" => ("PodFailed", String::new()),
            _ if ready => ("", String::new()),
            _ => ("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" "))),
        };
        let ready_at = if ready { last_start } else { done_at.or(last_end) }.unwrap_or(admitted);
        vec![
            condition("PodReadyToStartContainers", sandbox, sandbox_at, "", String::new()),
            init_condition,
            condition("Ready", ready, ready_at, reason, message.clone()),
            condition("ContainersReady", ready, ready_at, reason, message),
            condition("PodScheduled", true, admitted, "", String::new()),
        ]
    }
}

fn condition(kind: &str, holds: bool, since: i64, reason: &str, message: String) -> PodCondition {
    PodCondition {
        kind: kind.into(),
        status: if holds { "True" } else { "False" }.into(),
        last_transition_time: Some(WallTime(since).seconds()),
        reason: reason.into(),
        message,
        ..PodCondition::default()
    }
}

fn running(started_at: i64) -> ApiState {
    ApiState { running: Some(Running { started_at: Some(WallTime(started_at).seconds()) }), ..ApiState::default() }
}

/// The published end of an attempt.
fn terminated(attempt: &AttemptState) -> Option<Terminated> {
    let Phase::Ended { exit, journalled: true, .. } = &attempt.phase else { return None };
    Some(Terminated {
        exit_code: exit.code,
        // The kubelet leaves it out: runtimes fold a signal into the code, 128 + signal.
        signal: None,
        reason: exit_reason(exit).into(),
        message: exit.message.clone(),
        started_at: Some(WallTime(exit.started_at).seconds()),
        finished_at: Some(WallTime(exit.finished_at).seconds()),
        container_id: format!("coracle://{}", attempt.id),
    })
}

/// The runtime's word for an end.
pub fn exit_reason(exit: &ExitRecord) -> &str {
    match (exit.reason.as_str(), exit.oom, exit.code) {
        ("", true, _) => "OOMKilled",
        ("", false, 0) => "Completed",
        ("", false, _) => "Error",
        (reason, _, _) => reason,
    }
}

/// As runtimes tell it: `docker.io/library/busybox:latest`; as written where it is no reference.
fn full_name(image: &str) -> String {
    reference::normalize(image).map_or_else(|_| image.to_owned(), |reference| reference.to_string())
}

fn image_waiting(image: &str, state: &ImageState, now: Now) -> Option<Waiting> {
    let failure = match state {
        ImageState::Failed { failure } | ImageState::Pulling { last: Some(failure) } => failure,
        ImageState::Unknown | ImageState::Missing | ImageState::Pulling { last: None } | ImageState::Ready { .. } => return None,
    };
    let reason = failure.reason.as_str();
    if reason == "ErrImageNeverPull" {
        let message = format!("Container image \"{image}\" is not present with pull policy of Never");
        return Some(Waiting { reason: reason.into(), message });
    }
    let pull = matches!(reason, "ErrImagePull" | "RegistryUnavailable");
    if pull && now.boot - failure.at >= FRESH {
        let message = format!("Back-off pulling image \"{image}\": {reason}: {}", failure.message);
        return Some(Waiting { reason: "ImagePullBackOff".into(), message });
    }
    Some(Waiting { reason: reason.into(), message: failure.message.clone() })
}
