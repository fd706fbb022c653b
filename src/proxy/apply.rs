//! One family's table in the kernel: brought to what is wanted, transaction by transaction.
//!
//! ```text
//! change ──ok──> done (elements only, or chains and sets too: one transaction, nothing is read)
//!    └─refused, or nobody knows what is there─┐
//! bring ──> look at what is there ──> acts ──ok──> done
//!                                      └─refused──> by message, by element ──> done but for these
//! ```
//!
//! What is wanted is others' to keep: here are only the chains and sets that the kernel has
//! acknowledged, and what it refused. Invariants: [`Done`] means that the kernel has acknowledged
//! all of it but what [`Keeper::refused`] names; an element that the kernel refuses keeps no other
//! one out, is named once, and is tried again ever more rarely; what is not our table is never
//! written. Time is an argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::observe;
use super::table::acts::{Act, Acts, plan_changes};
use super::table::changes::Changes;
use super::table::encode::{encode, single_range};
use super::table::ir::{Data, Element, Key, Name, Table};
use super::table::read_back;
use crate::sys::netlink::{BatchError, NetlinkError, Socket};
use crate::sys::nftables;

/// A refused element is tried again after this, then after twice as long, and so on.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MOST: Duration = Duration::from_secs(60);
/// A refused transaction costs the kernel some 8 ms: no more of them in a row than this.
const TRIES: usize = 200;

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("open an nf_tables socket")]
    Open(#[source] NetlinkError),
    #[error("look at nftables table {table}")]
    Look { table: String, source: NetlinkError },
    /// `act` says what of it was refused.
    #[error("{act} of nftables table {table}")]
    Refused { table: String, act: String, source: NetlinkError },
}

impl ApplyError {
    pub fn errno(&self) -> Errno {
        match self {
            ApplyError::Open(source) | ApplyError::Look { source, .. } | ApplyError::Refused { source, .. } => source.errno(),
        }
    }
    /// The kernel does not have what the rules need.
    pub fn is_lack(&self) -> bool {
        matches!(
            self.errno(),
            Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT | Errno::ENOPROTOOPT
        )
    }
}

/// An element that the kernel does not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    element: Element,
    why: String,
    tries: u32,
    again: Instant,
}

/// What a call did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Acts that were carried out.
    pub acts: usize,
    /// There was a table before.
    pub was_there: bool,
}

/// Whose elements, chains and sets a call may take out.
#[derive(Clone, Copy)]
pub enum Reach<'a> {
    /// Everybody's: what is wanted is all that is wanted.
    All,
    /// Those of chains and sets with such names; of the rest nobody has said yet what is wanted.
    Named(&'a dyn Fn(&str) -> bool),
}

#[derive(Debug)]
pub struct Keeper {
    socket: Socket,
    /// Without elements. None: nobody knows what is there.
    held: Option<Table>,
    /// Transactions that the kernel carried out.
    transactions: u32,
    refused: BTreeMap<(Name, Key), Refused>,
    /// Empty chains that the kernel would not let go at the first try.
    left_over: u64,
}

impl Keeper {
    pub fn new() -> Result<Keeper, ApplyError> {
        Ok(Keeper {
            socket: nftables::open().map_err(ApplyError::Open)?,
            held: None,
            transactions: 0,
            refused: BTreeMap::new(),
            left_over: 0,
        })
    }

    /// The netlink port that our transactions come from.
    pub fn port(&self) -> Result<u32, ApplyError> {
        self.socket.port().map_err(ApplyError::Open)
    }

    /// How many transactions we have changed the tables' generation by.
    pub fn transactions(&self) -> u32 {
        self.transactions
    }

    /// How often an empty chain had to stay until the next look.
    pub fn left_over(&self) -> u64 {
        self.left_over
    }

    /// Chains and sets that the kernel has acknowledged last; no elements.
    pub fn held(&self) -> Option<&Table> {
        self.held.as_ref()
    }

    /// When a refused element is to be tried again.
    pub fn next(&self) -> Option<Instant> {
        self.refused.values().map(|r| r.again).min()
    }

    /// Whether the kernel refused one of the elements that the changes put in.
    pub fn has_refused(&self, changes: &Changes) -> Option<String> {
        let new = changes.elements.iter().flat_map(|(set, all)| all.keys().map(move |key| (set, key)));
        new.filter_map(|(set, key)| {
            let refused = self.refused.get(&(Name::clone(set), key.clone()))?;
            Some(named(set, key, &refused.element, &refused.why))
        })
        .next()
    }

    /// Refused elements, for people.
    pub fn refused(&self) -> impl Iterator<Item = String> {
        self.refused.iter().map(|((set, key), r)| named(set, key, &r.element, &r.why))
    }

    /// Makes the table what is wanted, whatever is there.
    pub fn bring(&mut self, mut wanted: Table, reach: Reach, now: Instant) -> Result<Done, ApplyError> {
        self.held = None;
        self.leave_out(&mut wanted, now);
        let look = observe::look(&mut self.socket, &wanted);
        let look = look.map_err(|source| ApplyError::Look { table: said(&wanted), source })?;
        if look.dormant {
            self.wake(&wanted)?;
        }
        let mut acts = read_back::plan(look.structure.as_ref(), &wanted, &look.wrong);
        if let Reach::Named(known) = reach {
            leave_others(&mut acts, &wanted, known);
        }
        let done =
            Done { acts: acts.main.len() + acts.sweep.len() + usize::from(look.dormant), was_there: look.structure.is_some() };
        let (bad, committed) = commit_most(&mut self.socket, &wanted, acts.main.clone())?;
        let swept = sweep(&mut self.socket, &wanted, &acts);
        self.transactions += u32::from(committed) + swept;
        self.left_over += (acts.sweep.len() as u64).saturating_sub(swept.into());
        drop(acts);
        self.note(&mut wanted, bad, now);
        self.held = Some(wanted.clone_structure());
        Ok(done)
    }

    /// In a transaction of its own: no kernel takes base chains into a table that is just waking up.
    fn wake(&mut self, table: &Table) -> Result<(), ApplyError> {
        let mut batch = nftables::Batch::new(table.family, &table.name);
        batch.add_table();
        let refused = |source| ApplyError::Refused { table: said(table), act: "awakening".to_owned(), source };
        nftables::commit(&mut self.socket, "wake our nftables table", &mut batch).map_err(|e| refused(e.error))?;
        self.transactions += 1;
        Ok(())
    }

    /// Carries out changes to what the kernel has. None: they do not fit what is there, so bring
    /// the whole table.
    pub fn change(&mut self, changes: &Changes) -> Option<Done> {
        let held = self.held.take()?;
        let refused = |set: &Name, key: &Key| self.refused.contains_key(&(Name::clone(set), key.clone()));
        let touches =
            !self.refused.is_empty() && changes.elements.iter().any(|(set, all)| all.keys().any(|key| refused(set, key)));
        // What was refused is not there to be taken out: all of it is looked at.
        if touches {
            return None;
        }
        let after = (!changes.keeps_structure()).then(|| {
            let (sets, chains) = (changes.sets.clone(), changes.chains.clone());
            let mut after = held.clone_structure();
            Changes { sets, chains, elements: BTreeMap::new() }.apply_to(&mut after);
            after
        });
        let acts = plan_changes(&held, after.as_ref().unwrap_or(&held), changes);
        if let Err(refused) = commit(&mut self.socket, &held, &acts.main) {
            tracing::debug!(error = %refused.error, source = %refused.error.source, table = said(&held), "a change was refused");
            return None;
        }
        let swept = sweep(&mut self.socket, &held, &acts);
        self.transactions += u32::from(!acts.main.is_empty()) + swept;
        self.left_over += (acts.sweep.len() as u64).saturating_sub(swept.into());
        let done = Done { acts: acts.main.len(), was_there: true };
        drop(acts);
        self.held = after.or(Some(held));
        Some(done)
    }

    /// Removes the table with all that is in it.
    pub fn remove(&mut self, table: &Table) -> Result<(), ApplyError> {
        self.held = None;
        self.refused.clear();
        let mut batch = nftables::Batch::new(table.family, &table.name);
        // Adding it first makes deleting it right where it is gone already.
        batch.add_table();
        batch.delete_table();
        let refused = |source| ApplyError::Refused { table: said(table), act: "removal".to_owned(), source };
        nftables::commit(&mut self.socket, "remove our table", &mut batch).map_err(|e| refused(e.error))?;
        self.transactions += 1;
        Ok(())
    }

    /// Refused elements whose time has not come are not tried; those that nobody wants are forgotten.
    fn leave_out(&mut self, wanted: &mut Table, now: Instant) {
        self.refused.retain(|(set, key), refused| {
            let Some(elements) = wanted.elements.get_mut(set) else { return false };
            // With other data it is another element.
            let same = elements.get(key).is_some_and(|e| e.data == refused.element.data);
            if same && refused.again > now {
                elements.remove(key);
            }
            same
        });
    }

    /// Keeps in mind what was refused, and that it is not there.
    fn note(&mut self, wanted: &mut Table, bad: Vec<Bad>, now: Instant) {
        let tried = |r: &Refused| r.again <= now;
        let mut refused = BTreeMap::new();
        for Bad { set, key, why } in bad {
            let Some(element) = wanted.elements.get_mut(&set).and_then(|elements| elements.remove(&key)) else { continue };
            let before = self.refused.remove(&(Name::clone(&set), key.clone()));
            let tries = before.as_ref().map_or(0, |r| r.tries) + 1;
            if before.is_none() {
                tracing::warn!(table = said(wanted), "{}; tried again, the rest is in place", named(&set, &key, &element, &why));
            }
            let wait = AGAIN.saturating_mul(1 << (tries - 1).min(10)).min(AGAIN_MOST);
            refused.insert((set, key), Refused { element, why, tries, again: now + wait });
        }
        for ((set, key), taken) in std::mem::take(&mut self.refused) {
            match tried(&taken) {
                true => tracing::info!(table = said(wanted), "the kernel takes {} now", named(&set, &key, &taken.element, "")),
                false => drop(refused.insert((set, key), taken)),
            }
        }
        self.refused = refused;
    }
}

struct Bad {
    set: Name,
    key: Key,
    why: String,
}

fn said(table: &Table) -> String {
    format!("{} {}", table.family.name(), table.name)
}

/// `element 0a00… of set svc (shop/web:http): why`
fn named(set: &str, key: &Key, element: &Element, why: &str) -> String {
    let whose = element.comment.as_ref().map(|c| format!(" ({c})")).unwrap_or_default();
    let leads = match &element.data {
        Data::Verdict(verdict) => format!(" to {verdict:?}"),
        Data::Fields(bytes) => format!(" to {bytes:?}"),
        Data::None => String::new(),
    };
    let why = if why.is_empty() { String::new() } else { format!(": the kernel refuses it: {why}") };
    format!("element {key:?}{leads} of set {set}{whose}{why}")
}

fn commit(socket: &mut Socket, table: &Table, acts: &[Act]) -> Result<(), BatchError> {
    let mut encoded = encode(table.family, &table.name, acts);
    nftables::commit(socket, "change our nftables table", &mut encoded.batch)
}

/// Chains that nobody uses any more: no harm if the kernel still holds on to one.
fn sweep(socket: &mut Socket, table: &Table, acts: &Acts) -> u32 {
    let mut transactions = 0;
    for act in &acts.sweep {
        match commit(socket, table, std::slice::from_ref(act)) {
            Ok(()) => transactions += 1,
            Err(refused) => tracing::debug!(?act, error = %refused.error.source, "an empty chain stays until the next look"),
        }
    }
    transactions
}

/// Takes out of the acts what would remove what somebody else has still to say whether he wants it.
fn leave_others(acts: &mut Acts, wanted: &Table, known: &dyn Fn(&str) -> bool) {
    acts.sweep.retain(|act| matches!(act, Act::DeleteChain(name) if known(name)));
    acts.main.retain(|act| match act {
        // A chain that is wanted empty is one that those fill who have not spoken yet.
        Act::FlushChain(name) => wanted.chains.get(*name).is_some_and(|chain| !chain.rules.is_empty()) || known(name),
        Act::DeleteChain(name) => wanted.chains.contains_key(*name) || known(name),
        Act::DeleteSet(name) => wanted.sets.contains_key(*name) || known(name),
        Act::DeleteElements { set, .. } => known(set),
        Act::AddTable | Act::AddChain(..) | Act::AddSet(..) | Act::AddElements { .. } | Act::AddRules(..) => true,
    });
}

/// All of it but the elements that the kernel refuses, found by what it says or by halves.
/// The second value: there was something to commit.
fn commit_most(socket: &mut Socket, table: &Table, mut acts: Vec<Act>) -> Result<(Vec<Bad>, bool), ApplyError> {
    let mut bad = Vec::new();
    let mut tries = 0;
    loop {
        tries += 1;
        let mut encoded = encode(table.family, &table.name, &acts);
        let refused = match nftables::commit(socket, "change our nftables table", &mut encoded.batch) {
            Ok(()) => return Ok((bad, !encoded.batch.is_empty())),
            Err(refused) => refused,
        };
        let failed = |act: &str, source| ApplyError::Refused { table: said(table), act: act.to_owned(), source };
        let Some(first) = refused.message else { return Err(failed("a transaction", refused.error)) };
        let mut messages: Vec<(usize, NetlinkError)> = vec![(first, refused.error)];
        messages.extend(refused.others);
        // From the last to the first, so that what is split does not move what is still to come.
        for (message, error) in messages.into_iter().rev() {
            let Some(origin) = encoded.origins.get(message).copied() else { return Err(failed("a transaction", error)) };
            let at = encoded.batch.element_at(message, error.offset.unwrap_or(0));
            let Some(act) = acts.get_mut(origin.change) else { continue };
            let Act::AddElements { set, spec, elements } = act else { return Err(failed(&describe(act), error)) };
            if tries >= TRIES {
                return Err(failed(&format!("an element of set {set}"), error));
            }
            let element = match (origin.count, at) {
                (1, _) => Some(origin.from),
                // A range of one field is two elements to the kernel.
                (_, Some(at)) if !single_range(spec) => Some(origin.from + at),
                _ => None,
            };
            match element.filter(|at| *at < elements.len()) {
                Some(at) => {
                    let (key, _) = elements.remove(at);
                    let why = format!("{} ({})", error.source, error.what);
                    bad.push(Bad { set: Name::clone(set), key: key.clone(), why });
                }
                None => {
                    let (set, spec) = (*set, *spec);
                    let after = elements.split_off((origin.from + origin.count).min(elements.len()));
                    let suspects = elements.split_off(origin.from.min(elements.len()));
                    let (one, other) = suspects.split_at(suspects.len() / 2);
                    let parts = [one.to_vec(), other.to_vec(), after];
                    let parts =
                        parts.into_iter().filter(|e| !e.is_empty()).map(|elements| Act::AddElements { set, spec, elements });
                    let parts: Vec<_> = parts.collect();
                    acts.splice(origin.change + 1..origin.change + 1, parts);
                }
            }
        }
        acts.retain(|act| !matches!(act, Act::AddElements { elements, .. } if elements.is_empty()));
    }
}

fn describe(act: &Act) -> String {
    match act {
        Act::AddTable => "creation".to_owned(),
        Act::FlushChain(name) | Act::DeleteChain(name) | Act::AddChain(name, _) | Act::AddRules(name, _) => {
            format!("chain {name}")
        }
        Act::DeleteSet(name) | Act::AddSet(name, _) => format!("set {name}"),
        Act::DeleteElements { set, .. } | Act::AddElements { set, .. } => format!("elements of set {set}"),
    }
}
