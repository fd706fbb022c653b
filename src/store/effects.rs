//! The effects journal on `/run`: what we made in this kernel and have not yet taken away.
//!
//! `intent` is written before an effect, `done` after it, `undone` after it was taken away. What
//! stands at open is what recovery must adopt or undo in reverse, and all that `uninstall` may remove.
//!
//! Invariant: whatever exists of ours is named here, though not everything named need exist. No
//! fsync: a power cut takes the objects along with the journal, and another boot_id voids it.
//! A write that kill -9 cuts short is a bad tail, which the journal cuts off.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::error::StoreError;
use super::frame::Entry;
use super::fs::Disk;
use super::ids::{ContainerId, PodUid};
use super::journal::{Fold, Journal, Options, peek};

/// One thing made in the kernel or on a file system. Each can be undone by what it names alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Effect {
    Mount {
        target: PathBuf,
    },
    /// Relative to the hierarchy's root, beginning with `/`; on v1 in every hierarchy that we use.
    Cgroup {
        path: String,
    },
    /// A namespace kept by a bind mount on this file.
    NsPin {
        path: PathBuf,
    },
    /// A network interface of the host's namespace.
    Link {
        name: String,
    },
    NftTable {
        family: String,
        name: String,
    },
    /// `was`: the value to put back. Two of one name are the same effect; the older `was` counts.
    Sysctl {
        name: String,
        was: String,
    },
    /// A directory with all that is in it, on one file system.
    Dir {
        path: PathBuf,
    },
    File {
        path: PathBuf,
    },
    /// `start`: field 22 of /proc/PID/stat, so that a reused pid is told apart.
    Monitor {
        uid: PodUid,
        pid: i32,
        start: u64,
    },
    Container {
        uid: PodUid,
        id: ContainerId,
    },
}

impl Effect {
    /// What tells it from other effects: all of it but the value that a sysctl had.
    fn key(&self) -> Effect {
        match self {
            Effect::Sysctl { name, .. } => Effect::Sysctl { name: name.clone(), was: String::new() },
            other => other.clone(),
        }
    }

    fn key_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match self {
            Effect::Sysctl { name, .. } => name.hash(&mut hasher),
            other => other.hash(&mut hasher),
        }
        hasher.finish()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub effect: Effect,
    /// False where only the intent was written: the effect may be there, in part or not at all.
    pub done: bool,
}

pub struct Effects {
    path: PathBuf,
    journal: Journal<Disk, Tally>,
    /// Standing effects by hash of their key → done; so that a repeated `intent` writes nothing.
    known: Mutex<HashMap<u64, bool>>,
}

impl std::fmt::Debug for Effects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Effects").field("path", &self.path).finish_non_exhaustive()
    }
}

const INTENT: u16 = 1;
const DONE: u16 = 2;
const UNDONE: u16 = 3;
const BOOT: u16 = 4;

impl Effects {
    /// Standing effects, oldest first. A `boot_id` that is not the journal's voids all of them.
    pub fn open(run: &Path, boot_id: &str) -> Result<(Effects, Vec<Effect>), StoreError> {
        let options = Options { durable: false, floor: 32 << 10, step: 16 << 10, room: Box::new(|| false) };
        let (journal, mut fold, _) = Journal::<Disk, Tally>::open(Arc::new(Disk), run, "effects.journal", options)?;
        if fold.boot_id != boot_id {
            fold = Tally { boot_id: boot_id.to_owned(), ..Tally::default() };
            journal.replace(&fold)?;
        }
        let standing = fold.standing();
        let known = standing.iter().map(|s| (s.effect.key_hash(), s.done)).collect();
        let effects = Effects { path: run.join("effects.journal"), journal, known: Mutex::new(known) };
        Ok((effects, standing.into_iter().map(|s| s.effect).collect()))
    }

    /// What stands, for one who does not own the journal (`coracle uninstall` asks before it acts).
    /// Nothing where there is no journal.
    pub fn peek(run: &Path) -> Result<Vec<Standing>, StoreError> {
        let path = run.join("effects.journal");
        if !path.exists() {
            return Ok(Vec::new());
        }
        Ok(peek::<Disk, Tally>(&Disk, &path)?.standing())
    }

    /// About to make it. While it stands this writes nothing.
    pub fn intent(&self, effect: &Effect) -> Result<(), StoreError> {
        let hash = effect.key_hash();
        if self.known().contains_key(&hash) {
            return Ok(());
        }
        self.write(INTENT, effect)?;
        self.known().entry(hash).or_insert(false);
        Ok(())
    }

    /// It is made.
    pub fn done(&self, effect: &Effect) -> Result<(), StoreError> {
        let hash = effect.key_hash();
        if self.known().get(&hash) == Some(&true) {
            return Ok(());
        }
        self.write(DONE, effect)?;
        self.known().insert(hash, true);
        Ok(())
    }

    /// It is gone (or was never made).
    pub fn undone(&self, effect: &Effect) -> Result<(), StoreError> {
        let hash = effect.key_hash();
        if !self.known().contains_key(&hash) {
            return Ok(());
        }
        self.write(UNDONE, effect)?;
        self.known().remove(&hash);
        Ok(())
    }

    /// What stands now, oldest first, read from the journal.
    pub fn standing(&self) -> Result<Vec<Standing>, StoreError> {
        Ok(self.journal.read()?.standing())
    }

    fn write(&self, kind: u16, effect: &Effect) -> Result<(), StoreError> {
        let encode = |e| StoreError::Encode { path: self.path.clone(), source: Arc::new(e) };
        self.journal.append(vec![entry(kind, effect).map_err(encode)?], false)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<u64, bool>> {
        // Nothing panics while it is held.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry<T: Serialize>(kind: u16, payload: &T) -> Result<Entry, serde_json::Error> {
    Ok(Entry { kind, version: 1, payload: serde_json::to_vec(payload)? })
}

/// What the records add up to. Effects of a form that is not known here stay in the journal.
#[derive(Default)]
struct Tally {
    boot_id: String,
    count: u64,
    effects: BTreeMap<Effect, Mark>,
}

struct Mark {
    order: u64,
    standing: Standing,
}

impl Tally {
    fn standing(&self) -> Vec<Standing> {
        let mut marks: Vec<&Mark> = self.effects.values().collect();
        marks.sort_unstable_by_key(|m| m.order);
        marks.into_iter().map(|m| m.standing.clone()).collect()
    }
}

impl Fold for Tally {
    fn apply(&mut self, entry: &Entry) -> bool {
        if entry.kind == BOOT {
            let Ok(boot_id) = serde_json::from_slice(&entry.payload) else { return false };
            *self = Tally { boot_id, ..Tally::default() };
            return true;
        }
        let Ok(effect) = serde_json::from_slice::<Effect>(&entry.payload) else { return false };
        match entry.kind {
            INTENT | DONE => {
                self.count += 1;
                let mark = Mark { order: self.count, standing: Standing { effect: effect.clone(), done: false } };
                self.effects.entry(effect.key()).or_insert(mark).standing.done |= entry.kind == DONE;
            }
            UNDONE => {
                self.effects.remove(&effect.key());
            }
            _ => return false,
        }
        true
    }

    fn snapshot(&self) -> Result<Vec<Entry>, serde_json::Error> {
        let mut entries = vec![entry(BOOT, &self.boot_id)?];
        for Standing { effect, done } in self.standing() {
            entries.push(entry(if done { DONE } else { INTENT }, &effect)?);
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str) -> Effect {
        Effect::Link { name: name.to_owned() }
    }

    #[test]
    fn what_is_not_undone_stands_in_its_order() {
        let run = tempfile::tempdir().unwrap();
        let sysctl = |was: &str| Effect::Sysctl { name: "net.ipv4.ip_forward".to_owned(), was: was.to_owned() };
        {
            let (effects, standing) = Effects::open(run.path(), "boot").unwrap();
            assert_eq!(standing, []);
            for effect in [link("a"), sysctl("0"), link("b"), link("c")] {
                effects.intent(&effect).unwrap();
            }
            effects.done(&link("b")).unwrap();
            effects.intent(&sysctl("1")).unwrap();
            effects.undone(&link("a")).unwrap();
            effects.undone(&link("never")).unwrap();
            let standing = effects.standing().unwrap();
            let expected = [(sysctl("0"), false), (link("b"), true), (link("c"), false)];
            assert_eq!(standing, expected.map(|(effect, done)| Standing { effect, done }));
        }
        let (effects, standing) = Effects::open(run.path(), "boot").unwrap();
        assert_eq!(standing, [sysctl("0"), link("b"), link("c")]);
        effects.undone(&sysctl("0")).unwrap();
        drop(effects);
        let (_, standing) = Effects::open(run.path(), "another boot").unwrap();
        assert_eq!(standing, []);
        let (_, standing) = Effects::open(run.path(), "another boot").unwrap();
        assert_eq!(standing, []);
    }

    #[test]
    fn repeats_write_nothing_and_the_journal_stays_small() {
        let run = tempfile::tempdir().unwrap();
        let (effects, _) = Effects::open(run.path(), "boot").unwrap();
        let size = || std::fs::metadata(run.path().join("effects.journal")).unwrap().len();
        effects.intent(&link("kept")).unwrap();
        effects.done(&link("kept")).unwrap();
        let before = size();
        for _ in 0..3 {
            effects.intent(&link("kept")).unwrap();
            effects.done(&link("kept")).unwrap();
        }
        assert_eq!(size(), before);
        for n in 0..2_000 {
            let effect = Effect::Mount { target: format!("/run/x/{n}").into() };
            effects.intent(&effect).unwrap();
            effects.done(&effect).unwrap();
            effects.undone(&effect).unwrap();
        }
        assert!(size() < 40 << 10, "{}", size());
        drop(effects);
        assert_eq!(Effects::open(run.path(), "boot").unwrap().1, [link("kept")]);
    }

    #[test]
    fn an_effect_of_a_newer_version_stays_for_it() {
        let run = tempfile::tempdir().unwrap();
        let newer = entry(INTENT, &serde_json::json!({ "Tunnel": { "name": "t" } })).unwrap();
        {
            let (effects, _) = Effects::open(run.path(), "boot").unwrap();
            effects.journal.append(vec![newer.clone()], false).unwrap();
            for n in 0..1_000 {
                effects.intent(&link(&format!("l{n}"))).unwrap();
                effects.undone(&link(&format!("l{n}"))).unwrap();
            }
        }
        let (_, standing) = Effects::open(run.path(), "boot").unwrap();
        assert_eq!(standing, []);
        let bytes = std::fs::read(run.path().join("effects.journal")).unwrap();
        assert!(bytes.windows(newer.payload.len()).any(|w| w == newer.payload));
    }
}
