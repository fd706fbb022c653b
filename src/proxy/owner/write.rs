//! The owner's way to the kernel: a change where one does, else the whole table compared and
//! mended; what the kernel cannot do left out and named.
//!
//! Invariant: the table is journalled before it is made; a failure is kept with the time of its
//! next try.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{FROM_THE_START, Failure, Owner, Shared, note};
use crate::proxy::ProxyError;
use crate::proxy::apply::{ApplyError, Done, Keeper, Reach};
use crate::proxy::lacks::{self, Feature};
use crate::proxy::policy::part::PREFIX;
use crate::proxy::table::changes::Changes;
use crate::proxy::table::needs::Need;
use crate::sys::chain::chain;
use crate::sys::{failpoint, process};

const RETRY: Duration = Duration::from_secs(1);
const RETRY_MOST: Duration = Duration::from_secs(60);

impl Owner {
    pub(super) fn change(&mut self, at: usize, changes: &Changes) -> Result<(), ProxyError> {
        let Some(of) = self.families.get_mut(at) else { return Ok(()) };
        if changes.is_empty() && of.was_whole && of.failure.is_none() {
            self.settled(at);
            return Ok(());
        }
        // A smaller table than the layout's: whole tables only.
        let begun = Instant::now();
        let plain = of.needs.is_empty() || of.needs.iter().all(|n| *n == Need::Fib);
        // Where a change cannot be made the whole table is compared.
        let sound = reached("proxy.table.change", of.family.name()).is_ok();
        if plain && sound && of.keeper.as_mut().and_then(|keeper| keeper.change(changes)).is_some() {
            self.tell();
            self.wrote(at, false, begun, true);
            return Ok(());
        }
        self.bring(at).map(|_| ())
    }

    pub(super) fn bring_all(&mut self) -> Result<(), ProxyError> {
        let mut result = Ok(());
        for at in 0..self.families.len() {
            result = result.and(self.bring(at).map(|_| ()));
        }
        result
    }

    /// Compares the whole table with the kernel's and mends what differs.
    pub(super) fn bring(&mut self, at: usize) -> Result<Done, ProxyError> {
        self.idle = false;
        let begun = Instant::now();
        let result = self.try_bring(at);
        self.wrote(at, true, begun, result.is_ok());
        let Some(of) = self.families.get_mut(at) else { return result };
        match &result {
            Ok(done) => {
                let (family, table) = (of.family.name(), &self.config.table);
                if let Some(failure) = of.failure.take() {
                    tracing::info!(family, table, was = failure.said, "our nftables table is as it should be again");
                }
                if !done.was_there && !of.was_whole {
                    tracing::info!(family, table, "installed our nftables table");
                }
                of.was_whole = true;
                if done.acts > 0 {
                    self.end_denied_of(at);
                    self.forget_wrong(at);
                }
            }
            Err(error) => {
                let said = chain(error).to_string();
                let tries = of.failure.as_ref().map_or(0, |f| f.tries) + 1;
                let wait = RETRY.saturating_mul(1 << (tries - 1).min(10)).min(RETRY_MOST);
                of.failure = Some(Failure { said, tries, again: Instant::now() + wait });
            }
        }
        self.tell();
        result
    }

    pub(super) fn try_bring(&mut self, at: usize) -> Result<Done, ProxyError> {
        let (services, policies) = (self.services_known, self.policies.known);
        let known = |name: &str| match name.starts_with(PREFIX) {
            true => policies,
            false => services || FROM_THE_START.contains(&name),
        };
        let reach = if services && policies { Reach::All } else { Reach::Named(&known) };
        let Some(of) = self.families.get(at) else { return Ok(Done::default()) };
        let (family, there) = (of.family, of.was_whole);
        let effect = self.effect(family);
        if !there {
            self.effects.intent(&effect).map_err(ProxyError::Store)?;
            reached("proxy.table.intent", family.name())?;
        }
        let mut probed = false;
        loop {
            let Some(of) = self.families.get_mut(at) else { return Ok(Done::default()) };
            let table = of.wanted();
            let brought = match &mut of.keeper {
                Some(keeper) => keeper.bring(table, reach, Instant::now()),
                none => Keeper::new().and_then(|keeper| none.insert(keeper).bring(table, reach, Instant::now())),
            };
            match brought {
                Ok(done) => {
                    if !there {
                        reached("proxy.table.install", family.name())?;
                    }
                    // The table was much larger than what stays.
                    process::trim_heap();
                    // What we keep is in the journal, also after that was lost.
                    self.effects.done(&effect).map_err(ProxyError::Store)?;
                    return Ok(done);
                }
                Err(error) if error.is_lack() && !probed => {
                    probed = true;
                    if !self.probe(at, &error) {
                        self.effects.undone(&effect).map_err(ProxyError::Store)?;
                        return Err(ProxyError::Apply(error));
                    }
                }
                Err(error) => return Err(ProxyError::Apply(error)),
            }
        }
    }

    /// True where the table can do without what is missing.
    pub(super) fn probe(&mut self, at: usize, error: &ApplyError) -> bool {
        let lacks = match lacks::probe() {
            Ok(lacks) => lacks,
            Err(e) => {
                tracing::warn!(error = %e, "cannot find out what this kernel lacks");
                return false;
            }
        };
        let Some(of) = self.families.get_mut(at) else { return false };
        let needs = lacks::needs(&lacks, of.family);
        let smaller = !needs.is_subset(&of.needs);
        of.needs.extend(needs);
        if let Some(ground) = self.ground_of(at)
            && let Some(of) = self.families.get_mut(at)
        {
            of.layout.move_to(ground);
        }
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let ApplyError::Open(source) = error {
            note(&mut shared.lacks, lacks::lack(Feature::NfTables, lacks::words(source)));
        }
        lacks.into_iter().for_each(|lack| note(&mut shared.lacks, lack));
        smaller
    }

    pub(super) fn shared(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self) {
        let refused = self.families.iter().filter_map(|of| of.keeper.as_ref()).flat_map(|k| k.refused().collect::<Vec<_>>());
        let refused: Vec<String> = refused.collect();
        self.shared().refused = refused;
    }
}

/// A named place at which a test may cut us off.
fn reached(place: &'static str, object: &str) -> Result<(), ProxyError> {
    failpoint::hit(place).map_err(|source| ProxyError::Io { operation: place, object: object.to_owned(), source })
}
