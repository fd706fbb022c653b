//! What a start finds: kernel first, store second, memory never. A plain fold of the journal, the
//! monitors' words and the clock into OBSERVED.
//!
//! Invariant: an attempt that was ever journalled keeps its number. One that nobody heard of again
//! has ended unknown; only a living monitor's word makes it "never created".
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::model::{AttemptState, ContainerState, Finished, ImageState, Now, Observed, Phase, PodState, Sandbox};
use super::observe::lost;
use super::pulls::FailedPulls;
use crate::api::pod::Pod;
use crate::runtime::model::{ContainerPhase, SandboxState};
use crate::store::ids::PodUid;
use crate::store::records::{Attempt, BootStamp, ExitCause, ExitRecord, PodRecord, PodsState};

/// What a start finds.
pub struct Found {
    pub store: PodsState,
    pub sandboxes: Vec<SandboxState>,
    /// Addresses of living pods whose network is whole.
    pub attached: BTreeMap<PodUid, Vec<IpAddr>>,
    pub manifests: BTreeMap<PodUid, Arc<Pod>>,
    pub boot: String,
    pub pulls: FailedPulls,
}

pub fn recovered(found: Found, now: Now) -> Observed {
    let stamp = BootStamp { boot: found.boot.clone(), nanos: now.boot };
    let mut sandboxes: BTreeMap<PodUid, SandboxState> = found.sandboxes.into_iter().map(|s| (s.uid.clone(), s)).collect();
    let mut observed = Observed::default();
    for (uid, record) in found.store.pods {
        let mut state = PodState {
            namespace: record.namespace.clone(),
            name: record.name.clone(),
            pod: found.manifests.get(&uid).cloned(),
            admitted_at: record.admitted_at.max(1),
            admitted_boot: now.boot - record.age.elapsed(&stamp),
            finished: record.finished.as_ref().map(|(phase, reason, message, at)| Finished {
                phase: phase.clone(),
                reason: reason.clone(),
                message: message.clone(),
                at: *at,
            }),
            ..PodState::default()
        };
        // Whether they are there still is not written down; letting go of them twice does no harm.
        state.volumes = state.finished.as_ref().map(|_| 0);
        let sandbox = sandboxes.remove(&uid);
        state.sandbox = match &sandbox {
            None => Sandbox::None,
            Some(s) if !s.alive => Sandbox::Dead,
            Some(s) => {
                let addresses = found.attached.get(&uid);
                Sandbox::Up {
                    created_at: s.created_at,
                    attached: addresses.is_some(),
                    addresses: addresses.cloned().unwrap_or_default(),
                }
            }
        };
        state.unheard = sandbox.as_ref().is_some_and(|s| s.alive && !s.answers);
        containers(&mut state, &record, sandbox.as_ref(), &stamp, now);
        for (name, failure) in found.pulls.get(&uid).into_iter().flatten() {
            let container = state.containers.entry(name.clone()).or_default();
            container.pull_delay = failure.delay;
            container.image = ImageState::Failed { failure: failure.clone() };
        }
        observed.pods.insert(uid, state);
    }
    // Sandboxes that the store does not know: nobody asks for them, so a complete set ends them.
    for (uid, sandbox) in sandboxes {
        let up = Sandbox::Up { created_at: sandbox.created_at, attached: true, addresses: Vec::new() };
        let state = PodState {
            name: uid.as_str().to_owned(),
            admitted_at: now.wall,
            admitted_boot: now.boot,
            sandbox: if sandbox.alive { up } else { Sandbox::Dead },
            ..PodState::default()
        };
        observed.pods.insert(uid, state);
    }
    observed
}

fn containers(state: &mut PodState, record: &PodRecord, sandbox: Option<&SandboxState>, stamp: &BootStamp, now: Now) {
    for (name, container) in &record.containers {
        let attempts = container
            .attempts
            .iter()
            .map(|attempt| AttemptState {
                number: attempt.number,
                id: attempt.id.clone(),
                image: attempt.image.clone(),
                at: attempt.at,
                at_boot: now.boot - record.age.elapsed_since(&attempt.stamp, stamp),
                sandbox: attempt.sandbox,
                backoff: attempt.backoff,
                phase: phase(attempt, record, sandbox, stamp, now),
                signalled: None,
                killed: None,
            })
            .collect();
        state.containers.insert(name.clone(), ContainerState { init: container.init, attempts, ..ContainerState::default() });
    }
    // What the monitor still keeps of attempts that the journal has let go.
    for container in sandbox.iter().flat_map(|s| &s.containers) {
        let known = state.containers.entry(container.name.clone()).or_default();
        if !known.attempts.iter().any(|a| a.id == container.id) {
            known.stale.push((container.attempt, container.id.clone()));
        }
    }
}

fn phase(attempt: &Attempt, record: &PodRecord, sandbox: Option<&SandboxState>, stamp: &BootStamp, now: Now) -> Phase {
    if let Some(exit) = &attempt.exit {
        let boot = now.boot - record.age.elapsed_since(&attempt.exit_stamp, stamp);
        return Phase::Ended { exit: exit.clone(), journalled: true, boot };
    }
    let ended = |exit| Phase::Ended { exit, journalled: false, boot: now.boot };
    let told = sandbox.and_then(|s| s.containers.iter().find(|c| c.id == attempt.id)).map(|c| &c.phase);
    match (told, sandbox) {
        (Some(ContainerPhase::Exited(exit)), _) => ended(exit.clone()),
        (Some(ContainerPhase::Created { .. }), Some(s)) if s.alive => Phase::Created,
        (Some(ContainerPhase::Running { started_at, .. }), Some(s)) if s.alive => Phase::Running { started_at: *started_at },
        // A living monitor has never heard of it: it was cut off before it was created.
        (None, Some(s)) if s.alive && s.created_at == attempt.sandbox => Phase::Journalled,
        _ if attempt.stamp.boot != stamp.boot => ended(ExitRecord {
            cause: ExitCause::Reboot,
            message: "The node went down while the container was running".to_owned(),
            ..lost(attempt.at, now)
        }),
        _ => ended(lost(attempt.at, now)),
    }
}
