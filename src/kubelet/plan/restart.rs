//! When a container that has ended runs again. Pure.
//!
//! ```text
//! first end:   at once, and a back-off of 10 s stands from then on
//! next ends:   end + back-off, which doubles with each start up to 300 s
//! ran > 600 s: as if it were the first end
//! ```
//!
//! The same table as client-go's flowcontrol/backoff.go, but the state is in the journal (each
//! attempt's back-off and both of its times), so neither an agent's death nor a reboot resets it.
#![deny(clippy::disallowed_methods)]

use ring::digest;

use crate::api::pod::RestartPolicy;
use crate::kubelet::model::{AttemptState, Phase, SECOND};
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::{ExitCause, ExitRecord};

/// Seconds.
const FIRST: u32 = 10;
const MAX: u32 = 300;
const RESET: i64 = 2 * MAX as i64 * SECOND;

/// What a container needs next, its sandbox aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It has run and does not run again.
    Done,
    /// It lives, or its end is not yet journalled.
    Busy,
    /// In the journal, not in the runtime: to be created as it is.
    Create,
    /// Created: to be started.
    Start,
    /// A new attempt, at `due` on the boot clock. `wait`: the back-off that it waits for, seconds.
    Attempt { number: u32, backoff: u32, wait: u32, due: i64 },
}

/// `sandbox`: which one is up; None: none is.
pub fn next(policy: RestartPolicy, init: bool, current: Option<&AttemptState>, sandbox: Option<i64>) -> Next {
    let Some(attempt) = current else { return Next::Attempt { number: 0, backoff: 0, wait: 0, due: i64::MIN } };
    match &attempt.phase {
        Phase::Journalled if Some(attempt.sandbox) == sandbox => Next::Create,
        // It never ran, and its sandbox is gone: the same attempt in another one.
        Phase::Journalled => Next::Attempt { number: attempt.number, backoff: attempt.backoff, wait: 0, due: i64::MIN },
        Phase::Created => Next::Start,
        Phase::Running { .. } | Phase::Ended { journalled: false, .. } => Next::Busy,
        Phase::Ended { exit, journalled: true, boot } => {
            let again = if init && exit.code == 0 && exit.cause == ExitCause::Own {
                // Init containers run once a sandbox.
                Some(attempt.sandbox) != sandbox
            } else {
                runs_again(policy, exit)
            };
            if !again {
                return Next::Done;
            }
            let (backoff, wait) = if init && exit.code == 0 || exit.cause != ExitCause::Own {
                (attempt.backoff, 0)
            } else if attempt.backoff == 0 || boot - attempt.at_boot > RESET {
                (FIRST, 0)
            } else {
                (attempt.backoff.saturating_mul(2).min(MAX), attempt.backoff)
            };
            Next::Attempt { number: attempt.number.saturating_add(1), backoff, wait, due: boot + i64::from(wait) * SECOND }
        }
    }
}

/// restartPolicy, and what the machine did to it.
pub fn runs_again(policy: RestartPolicy, exit: &ExitRecord) -> bool {
    match (exit.cause, policy) {
        (ExitCause::Reboot, _) | (_, RestartPolicy::Always) => true,
        (_, RestartPolicy::Never) => false,
        (ExitCause::Stopped, RestartPolicy::OnFailure) => true,
        (ExitCause::Own, RestartPolicy::OnFailure) => exit.code != 0,
    }
}

/// An id for an attempt in a sandbox; no other attempt ever gets the same one.
pub fn attempt_id(uid: &PodUid, container: &str, number: u32, sandbox: i64) -> ContainerId {
    let text = format!("{uid}/{container}/{number}/{sandbox}");
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    match ContainerId::parse(&hex) {
        Ok(id) => id,
        // SHA-256 is 32 bytes: 64 lower-case hex digits, which is what an id is.
        Err(bad) => unreachable!("{bad}"),
    }
}

/// As Go prints a duration: `10s`, `1m20s`, `5m0s`.
pub fn duration(seconds: u32) -> String {
    match (seconds / 60, seconds % 60) {
        (0, s) => format!("{s}s"),
        (m, s) => format!("{m}m{s}s"),
    }
}
