//! The decision: what is wanted, what is observed and the time give the actions that are due now
//! and the moment at which more may be due. Pure; `coracle pod plan` prints it.
//!
//! Invariants, held by property tests: a second pass over an unchanged world plans nothing; an
//! incomplete set ends nothing; no two pods of one namespace/name are ever admitted at once.

pub mod admit;
pub mod pod;
pub mod restart;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use super::model::{Action, Desired, Now, Observed};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub actions: Vec<Action>,
    /// On the boot clock; None: nothing happens by itself.
    pub wake: Option<i64>,
}

impl Plan {
    /// Something is due at `at` at the latest.
    pub(super) fn wake_at(&mut self, at: i64) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }
}

pub fn plan(desired: &Desired, observed: &Observed, now: Now) -> Plan {
    let mut plan = Plan::default();
    // What is there comes first: a pass removes before it adds.
    for (uid, state) in &observed.pods {
        pod::plan(uid, state, desired, now, &mut plan);
    }
    if !desired.stopping {
        for (uid, verdict) in admit::verdicts(desired, observed) {
            if verdict == admit::Verdict::Admit {
                plan.actions.push(Action::Admit { uid: uid.clone() });
            }
        }
    }
    plan
}
