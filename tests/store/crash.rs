//! R1: after every change that a workload makes on the model, every state that a power cut may
//! leave then is recovered and judged. So is a kill -9 there, with a power cut during the
//! recovery; and a second power cut during the recovery from the first.
//!
//! Judged: `open` succeeds; every acknowledged record is there in order; others are there whole,
//! in order, or not at all; manifests are whole, and those of admitted pods are there; what one
//! open returned, the next one returns too.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use coracle::store::frame::Entry;
use coracle::store::ids::{ContainerId, PodUid};
use coracle::store::journal::{Fold, Journal, Options};
use coracle::store::pods::{PodStore, Sizes};
use coracle::store::records::{BootStamp, ExitRecord, PodsState, Record};
use nix::errno::Errno;

use crate::model::{Lie, Model, Random, World};

const STATE: &str = "/s/state";

/// Only the workloads on a nearly full disk have a reserve.
fn sizes(seed: u64) -> Sizes {
    Sizes { reserve: if seed % 3 == 2 { 1_200 } else { 0 }, floor: 3_000, step: 0 }
}

/// How much more work `make soak` wants than `make test`.
fn soak() -> u64 {
    if std::env::var_os("CORACLE_SOAK").is_some() { 8 } else { 1 }
}

/// Distinct states that were judged.
#[derive(Default)]
struct Tally {
    seen: HashSet<u64>,
    steps: u64,
    cuts: u64,
    kills: u64,
    nested: u64,
}

impl Tally {
    fn tell(&self, what: &str, least: usize) {
        let Tally { seen, steps, cuts, kills, nested } = self;
        println!("{what}: {} distinct states after a power cut, 0 broken", seen.len());
        println!("  {steps} changes; {cuts} states of cuts, {nested} of cuts in a recovery; {kills} kills between changes");
        assert!(seen.len() >= least, "only {} states", seen.len());
    }
}

/// Goes over the worlds of a workload. `judge` opens one, and says what it saw or panics.
struct Walk<'a> {
    random: Random,
    tally: &'a mut Tally,
    salt: u64,
    /// States per world, and how rarely a recovery is itself cut.
    most: u64,
    nest: u64,
}

impl Walk<'_> {
    fn go<T>(&mut self, worlds: &[World], judge: &dyn Fn(&Model, usize) -> T, again: &dyn Fn(&Model, &T)) {
        for world in worlds {
            let mut random = self.random.clone();
            let mut states = Vec::new();
            world.crash_states(self.most, &mut random, &mut |digest, state| {
                if self.tally.seen.insert(digest ^ self.salt) {
                    states.push(state);
                }
            });
            self.random = random;
            for state in states {
                self.tally.cuts += 1;
                if self.random.below(self.nest) == 0 {
                    self.cut_recovery(state, judge, again);
                } else {
                    let mark = state.mark;
                    judge(&Model::new(state), mark);
                }
            }
            if self.random.below(3) == 0 {
                self.tally.kills += 1;
                self.cut_recovery(world.clone(), judge, again);
            }
        }
    }

    /// Opens a world, and cuts the power at each step of that. What the open returned, every
    /// later one returns too.
    fn cut_recovery<T>(&mut self, world: World, judge: &dyn Fn(&Model, usize) -> T, again: &dyn Fn(&Model, &T)) {
        let mark = world.mark;
        let model = Model::new(world);
        model.start_recording();
        let returned = judge(&model, mark);
        let steps = model.take_recording();
        let last = steps.len() - 1;
        for (n, step) in steps.into_iter().enumerate() {
            let mut random = self.random.clone();
            step.crash_states(6, &mut random, &mut |digest, state| {
                if self.tally.seen.insert(digest ^ self.salt) || n == last {
                    self.tally.nested += 1;
                    let model = Model::new(state);
                    if n == last {
                        again(&model, &returned);
                    } else {
                        judge(&model, mark);
                    }
                }
            });
            self.random = random;
        }
    }
}

// --- The journal alone, with numbered records -------------------------------------------------

/// Known records are of kind 1; with NEWER those of kind 200 too.
#[derive(Default, Debug, Clone, PartialEq)]
struct Numbers<const NEWER: bool> {
    known: Vec<u64>,
    newer: Vec<u64>,
}

impl<const NEWER: bool> Fold for Numbers<NEWER> {
    fn apply(&mut self, entry: &Entry) -> bool {
        // Half a record would have another checksum, so its content has to be right as well.
        let n = u64::from_le_bytes(entry.payload[..8].try_into().unwrap());
        assert_eq!(entry.payload, payload(n), "record {n} is torn");
        match entry.kind {
            1 => self.known.push(n),
            200 if NEWER => self.newer.push(n),
            _ => return false,
        }
        true
    }
    fn snapshot(&self) -> Result<Vec<Entry>, serde_json::Error> {
        let of = |kind, numbers: &[u64]| numbers.iter().map(|n| entry(kind, *n)).collect::<Vec<_>>();
        Ok([of(1, &self.known), of(200, &self.newer)].concat())
    }
}

/// Up to 700 bytes, so that records cross blocks.
fn payload(n: u64) -> Vec<u8> {
    let mut random = Random::new(n + 1);
    let len = if random.below(3) == 0 { random.below(700) } else { random.below(60) };
    let mut bytes = n.to_le_bytes().to_vec();
    bytes.extend((0..len).map(|_| random.below(256) as u8));
    bytes
}

fn entry(kind: u16, n: u64) -> Entry {
    Entry { kind, version: 1, payload: payload(n) }
}

fn kind_of(n: u64) -> u16 {
    if n % 5 == 4 { 200 } else { 1 }
}

fn journal_options() -> Options {
    Options { durable: true, floor: 1_200, step: 0, room: Box::new(|| false) }
}

/// Which numbers must and may be there, by `World::mark`.
#[derive(Clone)]
struct Expect {
    acked: Vec<u64>,
    maybe: Vec<u64>,
}

fn journal_workload(seed: u64, lie: Option<Lie>, tally: &mut Tally) {
    let mut random = Random::new(seed);
    let model = Model::new(World::new("/s", lie));
    model.start_recording();
    let mut expect = vec![Expect { acked: vec![], maybe: vec![] }];
    let (mut next, mut journal) = (0, None);
    // From the third workload on something fails in every second one.
    if seed > 2 && seed.is_multiple_of(2) {
        let errno = [Errno::EIO, Errno::ENOSPC][(seed / 2 % 2) as usize];
        model.with(|w| w.fault = Some((random.below(60), errno)));
    }
    for _ in 0..14 {
        if journal.is_none() || random.below(6) == 0 {
            drop(journal.take());
            // An open may meet the injected error: then the next one is the retry.
            journal =
                Journal::<Model, Numbers<false>>::open(Arc::new(model.clone()), Path::new(STATE), "j", journal_options()).ok();
        }
        let Some((journal, ..)) = &journal else { continue };
        let batch: Vec<u64> = (0..=random.below(4)).map(|n| next + n).collect();
        next += batch.len() as u64;
        let mut now = expect.last().unwrap().clone();
        now.maybe.extend(&batch);
        expect.push(now.clone());
        model.with(|w| w.mark = expect.len() - 1);
        let entries = batch.iter().map(|n| entry(kind_of(*n), *n)).collect();
        if journal.append(entries, false).is_ok() {
            now.acked.extend(&batch);
            expect.push(now);
            model.with(|w| w.mark = expect.len() - 1);
        }
    }
    model.with(|w| w.fault = None);
    drop(journal);
    let worlds = model.take_recording();
    tally.steps += worlds.len() as u64;
    let open = |model: &Model| {
        let opened = Journal::<Model, Numbers<true>>::open(Arc::new(model.clone()), Path::new(STATE), "j", journal_options());
        opened.unwrap_or_else(|e| panic!("seed {seed}: {e:?}")).1
    };
    let judge = |model: &Model, mark: usize| {
        let state = open(model);
        let expect = &expect[mark];
        for (kind, got) in [(1, &state.known), (200, &state.newer)] {
            let of = |numbers: &[u64]| -> Vec<u64> { numbers.iter().copied().filter(|n| kind_of(*n) == kind).collect() };
            let mut rest = got.iter();
            for n in of(&expect.acked) {
                assert!(rest.any(|g| *g == n), "seed {seed}: acknowledged {n} is missing in {got:?}");
            }
            assert!(got.is_sorted_by(|a, b| a < b), "seed {seed}: out of order {got:?}");
            let may = of(&expect.maybe);
            assert!(got.iter().all(|g| may.contains(g)), "seed {seed}: {got:?} is more than {may:?}");
        }
        state
    };
    let again = |model: &Model, returned: &Numbers<true>| assert_eq!(open(model), *returned, "seed {seed}");
    Walk { random, tally, salt: seed << 40, most: 500, nest: 24 }.go(&worlds, &judge, &again);
}

#[test]
fn journal_states_after_power_cuts() {
    let mut tally = Tally::default();
    (0..160 * soak()).for_each(|seed| journal_workload(seed, None, &mut tally));
    tally.tell("journal", 60_000);
}

/// A judge that cannot say no proves nothing: on a file system that only claims to sync, or whose
/// rename is not atomic, every one of these must be found out.
#[test]
fn a_lying_file_system_is_found_out() {
    for lie in [Lie::FileSync, Lie::DirSync, Lie::Rename] {
        let found =
            (0..4).any(|seed| std::panic::catch_unwind(|| journal_workload(seed, Some(lie), &mut Tally::default())).is_err());
        let pods = (0..4).any(|seed| std::panic::catch_unwind(|| pods_workload(seed, Some(lie), &mut Tally::default())).is_err());
        assert!(found && pods, "{lie:?}: journal {found}, pods {pods}");
    }
}

// --- The pods' store ---------------------------------------------------------------------------

fn uid(n: u64) -> PodUid {
    PodUid::parse(&format!("pod-{n}")).unwrap()
}

fn manifest(n: u64, version: u64) -> Vec<u8> {
    let mut random = Random::new(n * 100 + version);
    let mut text = format!("{n}/{version}/").into_bytes();
    text.extend((0..random.below(1_500)).map(|_| random.below(256) as u8));
    text.extend_from_slice(b"/end");
    text
}

/// What a driver knows at one moment.
#[derive(Clone, Default)]
struct Known {
    /// Each record, and whether it was acknowledged.
    records: Vec<(Record, bool)>,
    /// Index of the first record of the batch that is being appended.
    in_flight: Option<usize>,
    /// By pod: contents that the file may have; None: it may be absent.
    manifests: BTreeMap<u64, Vec<Option<Vec<u8>>>>,
}

impl Known {
    /// All states that the journal may add up to: acknowledged records count, failed ones may,
    /// and of the batch in flight a first part may.
    fn states(&self) -> Vec<PodsState> {
        let end = self.in_flight.unwrap_or(self.records.len());
        let mut states = vec![PodsState::default()];
        for (record, acked) in &self.records[..end] {
            let mut with = states.clone();
            with.iter_mut().for_each(|s| s.apply(record));
            if *acked {
                states = with;
            } else {
                with.retain(|s| !states.contains(s));
                states.extend(with);
            }
        }
        let mut last = states.clone();
        for (record, _) in &self.records[end..] {
            last.iter_mut().for_each(|s| s.apply(record));
            states.extend(last.iter().cloned());
        }
        states
    }
}

struct Driver {
    model: Model,
    random: Random,
    known: Vec<Known>,
    pods: u64,
    ids: u64,
    living: Vec<(u64, Option<ContainerId>)>,
}

impl Driver {
    /// What is known from here on; worlds carry its index.
    fn know(&mut self, change: impl FnOnce(&mut Known)) {
        let mut now = self.known.last().unwrap().clone();
        change(&mut now);
        self.known.push(now);
        let mark = self.known.len() - 1;
        self.model.with(|w| w.mark = mark);
    }

    fn append(&mut self, store: &PodStore<Model>, records: Vec<Record>) -> bool {
        self.know(|k| {
            k.in_flight = Some(k.records.len());
            k.records.extend(records.iter().map(|r| (r.clone(), false)));
        });
        let acked = store.append_all(&records).is_ok();
        self.know(|k| {
            let from = k.in_flight.take().unwrap();
            k.records[from..].iter_mut().for_each(|(_, a)| *a = acked);
        });
        acked
    }

    fn save(&mut self, store: &PodStore<Model>, pod: u64, version: u64) -> bool {
        let bytes = manifest(pod, version);
        self.know(|k| k.manifests.entry(pod).or_insert_with(|| vec![None]).push(Some(bytes.clone())));
        let saved = store.save_manifest(&uid(pod), &bytes).is_ok();
        if saved {
            self.know(|k| {
                k.manifests.insert(pod, vec![Some(bytes)]);
            });
        }
        saved
    }

    fn step(&mut self, store: &PodStore<Model>) {
        match self.random.below(8) {
            0 | 1 => {
                self.pods += 1;
                let pod = self.pods;
                let admitted = Record::Admitted {
                    uid: uid(pod),
                    namespace: "default".into(),
                    name: format!("p{pod}"),
                    at: pod as i64,
                    stamp: BootStamp { boot: "b".into(), nanos: pod as i64 },
                };
                if self.save(store, pod, 0) && self.append(store, vec![admitted]) {
                    self.living.push((pod, None));
                }
            }
            2 if !self.living.is_empty() => {
                let at = self.random.below(self.living.len() as u64) as usize;
                let (pod, _) = self.living[at];
                if self.append(store, vec![Record::Removed { uid: uid(pod) }]) {
                    self.living.remove(at);
                    self.know(|k| k.manifests.entry(pod).or_default().push(None));
                    store.remove_manifest(&uid(pod)).unwrap();
                }
            }
            3 if !self.living.is_empty() => {
                let (pod, _) = self.living[self.random.below(self.living.len() as u64) as usize];
                let version = self.random.below(9) + 1;
                self.save(store, pod, version);
            }
            _ => {
                let mut records = Vec::new();
                for at in 0..self.living.len() {
                    let (pod, running) = self.living[at].clone();
                    let (uid, name) = (uid(pod), "main".to_owned());
                    let stamp = BootStamp { boot: "b".into(), nanos: 100 + self.ids as i64 };
                    if let Some(id) = running {
                        let message = "m".repeat(self.random.below(600) as usize);
                        let exit = ExitRecord { code: at as i32, message, ..ExitRecord::default() };
                        records.push(Record::Exit { uid, name, id, exit, stamp });
                        self.living[at].1 = None;
                    } else {
                        self.ids += 1;
                        let id = ContainerId::parse(&format!("{:064x}", self.ids)).unwrap();
                        self.living[at].1 = Some(id.clone());
                        let (attempt, at) = (self.ids as u32, self.ids as i64);
                        let (image, sandbox, backoff) = ("i".into(), at, 10);
                        records.push(Record::Attempt { uid, name, init: false, attempt, id, image, at, stamp, sandbox, backoff });
                    }
                }
                if !records.is_empty() {
                    self.append(store, records);
                }
            }
        }
    }
}

type Seen = (PodsState, BTreeMap<u64, Option<Vec<u8>>>);

fn open_pods(model: &Model, seed: u64, pods: u64) -> Seen {
    let opened = PodStore::open_on(model.clone(), Path::new(STATE), sizes(seed), None);
    let (store, state, _) = opened.unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
    (state, (1..=pods).map(|pod| (pod, store.load_manifest(&uid(pod)).unwrap())).collect())
}

fn judge_pods((state, manifests): &Seen, known: &Known, may_be: &[PodsState], seed: u64) {
    assert!(may_be.contains(state), "seed {seed}: {state:#?}\nis none of what {:#?} allows", known.records);
    for (pod, content) in manifests {
        let admitted = state.pods.contains_key(&uid(*pod));
        let mut may = known.manifests.get(pod).cloned().unwrap_or_else(|| vec![None]);
        if !admitted {
            may.push(None);
        }
        assert!(
            may.contains(content),
            "seed {seed}: manifest of pod {pod} (admitted: {admitted}) is {:?}",
            content.as_ref().map(Vec::len)
        );
    }
}

fn pods_workload(seed: u64, lie: Option<Lie>, tally: &mut Tally) {
    let mut random = Random::new(1_000 + seed);
    let mut world = World::new("/s", lie);
    // Every third workload meets an error, every third a disk that is nearly full.
    match seed % 3 {
        1 if seed > 3 => world.fault = Some((random.below(90), Errno::EIO)),
        2 => world.capacity = Some(4_000 + random.below(4_000) as usize),
        _ => {}
    }
    let model = Model::new(world);
    model.start_recording();
    let known = vec![Known::default()];
    let mut driver = Driver { model: model.clone(), random, known, pods: 0, ids: 0, living: vec![] };
    let mut store = None;
    for _ in 0..14 {
        if store.is_none() || driver.random.below(7) == 0 {
            drop(store.take());
            store = PodStore::open_on(model.clone(), Path::new(STATE), sizes(seed), None).ok();
        }
        if let Some((store, ..)) = &store {
            driver.step(store);
        }
    }
    drop(store);
    model.with(|w| w.fault = None);
    let worlds = model.take_recording();
    tally.steps += worlds.len() as u64;
    let Driver { known, pods, random, .. } = driver;
    let states = RefCell::new(BTreeMap::new());
    let judge = |model: &Model, mark: usize| {
        let seen = open_pods(model, seed, pods);
        let mut states = states.borrow_mut();
        let may_be = states.entry(mark).or_insert_with(|| known[mark].states());
        judge_pods(&seen, &known[mark], may_be, seed);
        seen
    };
    // Manifests of pods that are not admitted may go at any open.
    let admitted = |(state, mut manifests): Seen| {
        manifests.retain(|pod, _| state.pods.contains_key(&uid(*pod)));
        (state, manifests)
    };
    let again = |model: &Model, returned: &Seen| {
        assert!(admitted(open_pods(model, seed, pods)) == admitted(returned.clone()), "seed {seed}: {:?}", returned.0);
    };
    Walk { random, tally, salt: (seed + 1_000) << 40, most: 400, nest: 24 }.go(&worlds, &judge, &again);
}

#[test]
fn pod_store_states_after_power_cuts() {
    let mut tally = Tally::default();
    (0..110 * soak()).for_each(|seed| pods_workload(seed, None, &mut tally));
    tally.tell("pod store", 40_000);
}
