//! The host's part: bridge, sysctls, ports; observe, plan, apply until nothing is left to plan.
//!
//! Invariant: passes do not overlap, and one over a host that is as it should be changes nothing.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use nix::errno::Errno;

use super::apply::carry_out;
use super::model::{Feature, NetError};
use super::plan::{self, Action, PodWant, Want};
use super::{Inner, lacks, note_lack, observe};
use crate::store::effects::Effect;

/// The first pass makes the bridge, the second what needs it; the last one finds nothing to do.
const PASSES: usize = 4;

impl Inner {
    pub(super) fn want(&self) -> Result<Want, NetError> {
        let standing = super::apply::journal(self.effects.standing())?;
        let bridge = Effect::Link { name: self.names.bridge.clone() };
        let state = self.state();
        let pods: BTreeMap<String, PodWant> = state
            .pods
            .iter()
            .filter(|(_, pod)| !pod.leaving)
            .map(|(uid, pod)| (uid.clone(), PodWant { link: self.names.veth(uid), addresses: pod.lease.addresses.clone() }))
            .collect();
        Ok(Want {
            names: self.names.clone(),
            cidrs: self.cidrs.clone(),
            mtu: self.mtu,
            pods,
            bridge_journalled: standing.iter().any(|s| s.effect == bridge),
        })
    }

    pub(super) fn ensure_host(&self) -> Result<(), NetError> {
        if self.cidrs.is_empty() {
            return Ok(());
        }
        let _one_at_a_time = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        let mut socket = self.route_socket()?;
        let mut left: Vec<Action> = Vec::new();
        for _ in 0..PASSES {
            let want = self.want()?;
            let actions = plan::plan(&want, &observe::seen(&mut socket, &want)?)?;
            // Ours by its alias, and our journal lost: what we keep is named there, or nobody
            // would remove it.
            if !want.bridge_journalled && !actions.iter().any(|a| matches!(a, Action::CreateBridge { .. })) {
                super::apply::journal(self.effects.done(&Effect::Link { name: self.names.bridge.clone() }))?;
            }
            if actions.is_empty() {
                self.state().ensured = true;
                return Ok(());
            }
            let netns_of = |uid: &str| self.state().pods.get(uid).map(|p| p.lease.netns.clone());
            for action in &actions {
                carry_out(&mut socket, &self.names, &self.effects, &netns_of, action).map_err(|e| self.sort_out(action, e))?;
            }
            left = actions;
        }
        // Somebody else sets it back as often as we set it.
        tracing::warn!(?left, "the host's network does not stay as we set it");
        Ok(())
    }

    /// A kernel that cannot make a bridge says so in a general way.
    fn sort_out(&self, action: &Action, error: NetError) -> NetError {
        match (action, error) {
            (Action::CreateBridge { .. }, NetError::Kernel { source, .. }) if source.errno() == Errno::EOPNOTSUPP => {
                let lack = lacks::lack(Feature::Bridge, source.to_string());
                note_lack(&mut self.state().lacks, lack.clone());
                NetError::Lacking { what: "bridges", lack }
            }
            (_, error) => error,
        }
    }
}
