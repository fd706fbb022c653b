//! The store on the real kernel: full disks, kill -9, two owners, many callers, broken files.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle::store::StoreError;
use coracle::store::effects::{Effect, Effects};
use coracle::store::frame::{self, Entry};
use coracle::store::fs::{Disk, Fs};
use coracle::store::ids::{ContainerId, PodUid};
use coracle::store::pods::{PodStore, Sizes};
use coracle::store::records::{BootStamp, ExitRecord, PodsState, Record};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::model::Random;

pub fn uid(n: u64) -> PodUid {
    PodUid::parse(&format!("pod-{n}")).unwrap()
}
pub fn id(n: u64) -> ContainerId {
    ContainerId::parse(&format!("{n:064x}")).unwrap()
}
pub fn admitted(n: u64) -> Record {
    let stamp = BootStamp { boot: "b".into(), nanos: n as i64 };
    Record::Admitted { uid: uid(n), namespace: "default".into(), name: format!("p{n}"), at: n as i64, stamp }
}
pub fn attempt(pod: u64, n: u64) -> Record {
    Record::Attempt {
        uid: uid(pod),
        name: "main".into(),
        init: false,
        attempt: n as u32,
        id: id(n),
        image: "docker.io/library/busybox:1.36".into(),
        at: n as i64,
        stamp: BootStamp { boot: "b".into(), nanos: n as i64 },
        sandbox: 1,
        backoff: 0,
    }
}
pub fn exit(pod: u64, n: u64, code: i32) -> Record {
    let exit = ExitRecord { code, finished_at: n as i64, ..ExitRecord::default() };
    Record::Exit { uid: uid(pod), name: "main".into(), id: id(n), exit, stamp: BootStamp { boot: "b".into(), nanos: n as i64 } }
}

#[test]
fn what_was_appended_is_there_after_a_reopen_and_nothing_is_written_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("deep/state");
    let expected = {
        let (store, pods, report) = PodStore::open(&state).unwrap();
        assert_eq!((pods, report.records, report.lost.len()), (PodsState::default(), 0, 0));
        let mut expected = PodsState::default();
        let records = [admitted(1), attempt(1, 1), exit(1, 1, 7), attempt(1, 2), admitted(2), Record::Removed { uid: uid(2) }];
        store.save_manifest(&uid(1), b"the manifest").unwrap();
        for record in &records {
            store.append(record).unwrap();
            expected.apply(record);
        }
        expected
    };
    let (store, pods, report) = PodStore::open(&state).unwrap();
    assert_eq!(pods, expected);
    assert_eq!((report.records, report.cut, report.unknown), (6, 0, 0));
    assert_eq!(store.load_manifest(&uid(1)).unwrap().unwrap(), b"the manifest");
    let times = || -> Vec<_> {
        ["pods.journal", "reserve", "lock", "pods", "pods/pod-1", "."]
            .iter()
            .map(|name| fs::metadata(state.join(name)).unwrap())
            .map(|m| (m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec(), m.len()))
            .collect()
    };
    let before = times();
    for _ in 0..3 {
        store.tend().unwrap();
        store.remove_manifest(&uid(9)).unwrap();
        assert_eq!(store.load_manifest(&uid(9)).unwrap(), None);
    }
    assert_eq!(times(), before);
    assert_eq!(fs::metadata(state.join("reserve")).unwrap().blocks() * 512, 16 << 20);
    for name in ["pods.journal", "pods/pod-1", "reserve", "lock"] {
        assert_eq!(fs::metadata(state.join(name)).unwrap().mode() & 0o777, 0o600, "{name}");
    }
}

#[test]
fn a_second_owner_is_told_who_the_first_is() {
    let dir = tempfile::tempdir().unwrap();
    let (first, ..) = PodStore::open(dir.path()).unwrap();
    let e = PodStore::open(dir.path()).unwrap_err();
    let me = std::process::id();
    assert!(matches!(e, StoreError::Locked { pid: Some(pid), .. } if pid as u32 == me), "{e:?}");
    assert!(e.to_string().contains(&format!("pid {me}")) && e.to_string().contains("--root"), "{e}");
    drop(first);
    PodStore::open(dir.path()).unwrap();
}

/// A real disk that counts its fsyncs, each as slow as a card's.
#[derive(Clone)]
struct Slow(Arc<AtomicU64>);

impl Fs for Slow {
    type File = fs::File;
    fn sync(&self, file: &fs::File) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        Disk.sync(file)
    }
    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        Disk.make_dir(path)
    }
    fn names(&self, dir: &Path) -> io::Result<Vec<std::ffi::OsString>> {
        Disk.names(dir)
    }
    fn create(&self, path: &Path, mode: u32) -> io::Result<fs::File> {
        Disk.create(path, mode)
    }
    fn open(&self, path: &Path) -> io::Result<fs::File> {
        Fs::open(&Disk, path)
    }
    fn len(&self, file: &fs::File) -> io::Result<u64> {
        Disk.len(file)
    }
    fn allocated(&self, file: &fs::File) -> io::Result<u64> {
        Disk.allocated(file)
    }
    fn read_at(&self, file: &fs::File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Disk.read_at(file, buffer, offset)
    }
    fn write_at(&self, file: &fs::File, bytes: &[u8], offset: u64) -> io::Result<()> {
        Disk.write_at(file, bytes, offset)
    }
    fn set_len(&self, file: &fs::File, len: u64) -> io::Result<()> {
        Disk.set_len(file, len)
    }
    fn allocate(&self, file: &fs::File, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        Disk.allocate(file, offset, len, keep_size)
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.link(from, to)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        Disk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        Disk.remove(path)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        Disk.sync_dir(dir)
    }
    fn free(&self, path: &Path) -> io::Result<u64> {
        Disk.free(path)
    }
}

#[test]
fn callers_that_come_together_share_an_fsync() {
    let dir = tempfile::tempdir().unwrap();
    let slow = Slow(Arc::default());
    let sizes = Sizes { reserve: 0, ..Sizes::default() };
    let (store, ..) = PodStore::open_on(slow.clone(), dir.path(), sizes, None).unwrap();
    slow.0.store(0, Ordering::Relaxed);
    let (threads, each) = (16, 20);
    std::thread::scope(|scope| {
        for pod in 0..threads {
            let store = &store;
            scope.spawn(move || {
                store.append(&admitted(pod)).unwrap();
                for n in 1..each {
                    store.append(&attempt(pod, pod * 100 + n)).unwrap();
                }
            });
        }
    });
    let syncs = slow.0.load(Ordering::Relaxed);
    drop(store);
    let (_, pods, _) = PodStore::open_on(slow, dir.path(), sizes, None).unwrap();
    println!("{} records by {threads} threads: {syncs} fsyncs", threads * each);
    assert!(syncs * 4 < threads * each, "{syncs} fsyncs for {} records", threads * each);
    assert_eq!(pods.pods.len() as u64, threads);
    for (pod, record) in (0..threads).zip(0..) {
        let attempts: Vec<u32> = pods.pods[&uid(pod)].containers["main"].attempts.iter().map(|a| a.number).collect();
        assert_eq!(attempts, [record * 100 + 18, record * 100 + 19].map(|n| n as u32));
    }
}

#[test]
fn records_of_a_newer_version_are_kept_through_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("pods.journal");
    let sizes = Sizes { floor: 2_000, ..Sizes::default() };
    {
        let (store, ..) = PodStore::open(dir.path()).unwrap();
        store.append(&admitted(1)).unwrap();
    }
    // What version N would write: a new type, a known one with a new field, a known one reshaped.
    let known = serde_json::to_value(admitted(2)).unwrap();
    let mut with_field = known.clone();
    with_field["Admitted"]["tenant"] = "t".into();
    let newer = [
        Entry { kind: 4711, version: 3, payload: b"\x00 not even JSON \xff".to_vec() },
        Entry { kind: 1, version: 2, payload: serde_json::to_vec(&with_field).unwrap() },
        Entry { kind: 1, version: 9, payload: br#"{"Admitted":{"uid":{"reshaped":true}}}"#.to_vec() },
    ];
    let mut bytes = fs::read(&journal).unwrap();
    let mut seq = 5; // base and mark were 1 and 2, then mark and Admitted, then these
    frame::encode_all(&mut bytes, &mut seq, &newer);
    fs::write(&journal, &bytes).unwrap();
    let (store, mut expected, report) = PodStore::open_sized(dir.path(), sizes).unwrap();
    assert_eq!((report.records, report.unknown, report.cut), (4, 2, 0), "{report:?}");
    assert!(expected.pods.contains_key(&uid(2)), "a known type with a new field is read");
    for n in 1..400 {
        for record in [attempt(1, n), exit(1, n, 3)] {
            store.append(&record).unwrap();
            expected.apply(&record);
        }
    }
    assert!(fs::metadata(&journal).unwrap().len() < 8_000, "{}", fs::metadata(&journal).unwrap().len());
    drop(store);
    let (_, pods, report) = PodStore::open(dir.path()).unwrap();
    assert_eq!(pods, expected);
    assert_eq!(report.unknown, 2);
    let bytes = fs::read(&journal).unwrap();
    for entry in [&newer[0], &newer[2]] {
        assert!(bytes.windows(entry.payload.len()).any(|w| w == entry.payload), "{entry:?}");
    }
}

#[test]
fn a_broken_journal_is_set_aside_and_never_stops_a_start() {
    let whole = tempfile::tempdir().unwrap();
    {
        let (store, ..) = PodStore::open_sized(whole.path(), Sizes { reserve: 0, ..Sizes::default() }).unwrap();
        store.save_manifest(&uid(1), b"manifest").unwrap();
        (0..20).for_each(|n| store.append(&admitted(n)).unwrap());
    }
    let good = fs::read(whole.path().join("pods.journal")).unwrap();
    let mut random = Random::new(7);
    type Break = Box<dyn Fn(&Path, &mut Random)>;
    let flip = move |path: &Path, random: &mut Random| {
        let mut bytes = good.clone();
        let at = random.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
        fs::write(path, bytes).unwrap();
    };
    let garbage = |path: &Path, random: &mut Random| {
        fs::write(path, (0..random.below(9_000)).map(|_| random.below(256) as u8).collect::<Vec<_>>()).unwrap();
    };
    let breaks: Vec<(&str, usize, Break)> = vec![
        ("one bit", 40, Box::new(flip)),
        ("garbage", 20, Box::new(garbage)),
        ("empty", 1, Box::new(|path, _| fs::write(path, b"").unwrap())),
        ("zeros", 1, Box::new(|path, _| fs::write(path, [0; 5_000]).unwrap())),
        ("a directory", 1, Box::new(|path, _| fs::create_dir(path).unwrap())),
        ("a link", 1, Box::new(|path, _| std::os::unix::fs::symlink("/etc/passwd", path).unwrap())),
    ];
    for (what, times, make) in breaks {
        for _ in 0..times {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("pods")).unwrap();
            fs::write(dir.path().join("pods/pod-1"), b"manifest").unwrap();
            let journal = dir.path().join("pods.journal");
            make(&journal, &mut random);
            let sizes = Sizes { reserve: 0, ..Sizes::default() };
            let (store, pods, report) = PodStore::open_sized(dir.path(), sizes).unwrap_or_else(|e| panic!("{what}: {e:?}"));
            assert!(!report.lost.is_empty() && report.lost.iter().all(|p| p.symlink_metadata().is_ok()), "{what}: {report:?}");
            assert_eq!(
                store.load_manifest(&uid(1)).unwrap().unwrap(),
                b"manifest",
                "{what}: manifests stay where the journal lost records"
            );
            store.append(&admitted(100)).unwrap();
            drop(store);
            let (_, again, report) = PodStore::open_sized(dir.path(), sizes).unwrap();
            assert_eq!((again.pods.len(), report.cut, report.lost.len()), (pods.pods.len() + 1, 0, 0), "{what}");
        }
    }
    assert!(fs::read_to_string("/etc/passwd").unwrap().contains("root"), "a link is not followed");
}

// --- A full disk --------------------------------------------------------------------------------

/// Runs `test` in a mount namespace of its own with a small file system on a directory. The
/// mounts go with the thread.
pub fn on_small_disk(make: fn(&Path, &Path) -> bool, test: fn(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let (path, image) = (disk.clone(), dir.path().join("image"));
    std::thread::spawn(move || {
        if let Err(e) = unshare(CloneFlags::CLONE_NEWNS) {
            assert!(std::env::var_os("CI").is_none(), "unshare: {e}");
            eprintln!("SKIP: no mount namespace: {e}");
            return;
        }
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        if make(&path, &image) {
            test(&path);
        }
    })
    .join()
    .unwrap();
}

pub fn tmpfs(on: &Path, _: &Path) -> bool {
    mount(Some("small"), on, Some("tmpfs"), MsFlags::empty(), Some("size=6m")).unwrap();
    true
}

fn ext4(on: &Path, image: &Path) -> bool {
    fs::File::create(image).unwrap().set_len(16 << 20).unwrap();
    let mkfs = Command::new("mkfs.ext4").args(["-q", "-F", "-N", "64", "-m", "0"]).arg(image).status();
    let mounted = mkfs.is_ok_and(|s| s.success())
        && Command::new("mount").args(["-o", "loop"]).arg(image).arg(on).status().is_ok_and(|s| s.success());
    if !mounted {
        assert!(std::env::var_os("CI").is_none(), "mkfs.ext4 or mount -o loop");
        eprintln!("SKIP: no ext4 on a loop device here");
    }
    mounted
}

pub fn fill(path: &Path) -> PathBuf {
    let hog = path.join("hog");
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&hog).unwrap();
    let mut size = 1 << 20;
    while size > 0 {
        match file.write_all(&vec![1; size]).and_then(|()| file.sync_all()) {
            Ok(()) => {}
            Err(_) => size /= 2,
        }
    }
    hog
}

const SMALL: Sizes = Sizes { reserve: 1 << 20, floor: 64 << 10, step: 4 << 10 };

fn ends_go_through_on_a_full_disk(disk: &Path) {
    let state = disk.join("state");
    let (store, ..) = PodStore::open_sized(&state, SMALL).unwrap();
    store.save_manifest(&uid(1), b"first").unwrap();
    store.append_all(&[admitted(1), attempt(1, 1)]).unwrap();
    let mut expected = PodsState::default();
    [admitted(1), attempt(1, 1)].iter().for_each(|r| expected.apply(r));
    let hog = fill(disk);

    // Beginnings stop with a clear word once the blocks taken ahead are used up …
    let mut n = 2;
    let e = loop {
        match store.append(&attempt(1, n)) {
            Ok(()) => expected.apply(&attempt(1, n)),
            Err(e) => break e,
        }
        n += 1;
        assert!(n < 200, "the disk is not full");
    };
    assert!(e.is_no_space() && e.to_string().contains("free some space"), "{e}");
    assert!(state.join("reserve").exists(), "a beginning lets the reserve go");
    let e = store.save_manifest(&uid(2), &[7; 100_000]).unwrap_err();
    assert!(e.is_no_space(), "{e}");
    assert_eq!(store.load_manifest(&uid(1)).unwrap().unwrap(), b"first");

    // … ends go on, by the reserve.
    for n in 2..40 {
        let end = exit(1, n, 3);
        store.append(&end).unwrap();
        expected.apply(&end);
    }
    assert!(!state.join("reserve").exists());
    store.tend().unwrap();
    assert!(!state.join("reserve").exists(), "no room for it yet");

    // Whatever took what the reserve gave: a start is still possible, and loses nothing.
    drop(store);
    fill(disk);
    let (store, pods, report) = PodStore::open_sized(&state, SMALL).unwrap();
    assert_eq!((&pods, report.cut, report.lost.len()), (&expected, 0, 0));
    fs::remove_file(hog).unwrap();
    store.tend().unwrap();
    assert_eq!(fs::metadata(state.join("reserve")).unwrap().len(), SMALL.reserve, "there is room again");
    store.append(&Record::Removed { uid: uid(1) }).unwrap();
    store.remove_manifest(&uid(1)).unwrap();
    drop(store);
    assert_eq!(PodStore::open_sized(&state, SMALL).unwrap().1, PodsState::default());
}

#[test]
fn a_full_tmpfs() {
    on_small_disk(tmpfs, ends_go_through_on_a_full_disk);
}

#[test]
fn a_full_ext4() {
    on_small_disk(ext4, ends_go_through_on_a_full_disk);
}

#[test]
fn an_ext4_without_inodes() {
    on_small_disk(ext4, |disk| {
        let state = disk.join("state");
        let (store, ..) = PodStore::open_sized(&state, SMALL).unwrap();
        store.append(&admitted(1)).unwrap();
        let taken = (0..).take_while(|n| fs::File::create(disk.join(format!("f{n}"))).is_ok()).count();
        assert!(taken > 10);
        assert!(store.save_manifest(&uid(1), b"x").unwrap_err().is_no_space());
        store.append_all(&[attempt(1, 1), exit(1, 1, 0)]).unwrap();
        drop(store);
        let (store, pods, _) = PodStore::open_sized(&state, SMALL).unwrap();
        assert_eq!(pods.pods[&uid(1)].containers["main"].attempts.len(), 1);
        fs::remove_file(disk.join("f0")).unwrap();
        fs::remove_file(disk.join("f1")).unwrap();
        store.save_manifest(&uid(1), b"x").unwrap();
    });
}

// --- kill -9 ------------------------------------------------------------------------------------

const CHILD: &str = "CORACLE_TEST_STORE_CHILD";

/// Not a test of its own: what [`kill_9_while_writing`] kills. Says each number once it is durable.
#[test]
fn child_that_writes() {
    let Some(dir) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let (store, pods, _) = PodStore::open_sized(&dir.join("state"), Sizes { reserve: 0, floor: 4_000, step: 4_000 }).unwrap();
    let (effects, _) = Effects::open(&dir.join("run"), "boot").unwrap();
    let first =
        pods.pods.get(&uid(1)).and_then(|p| p.containers.get("main")).and_then(|c| c.attempts.last()).map_or(0, |a| a.number);
    store.save_manifest(&uid(1), &[1; 3_000]).unwrap();
    store.append(&admitted(1)).unwrap();
    let mut say = io::stdout();
    for n in u64::from(first) + 1.. {
        let effect = Effect::Link { name: format!("l{n}") };
        effects.intent(&effect).unwrap();
        store.append_all(&[attempt(1, n), exit(1, n, (n % 100) as i32)]).unwrap();
        writeln!(say, "\n{n}").unwrap();
        effects.done(&effect).unwrap();
        if n % 7 != 0 {
            effects.undone(&effect).unwrap();
        }
    }
}

#[test]
fn kill_9_while_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = Random::new(std::process::id().into());
    let (mut last, mut rounds) = (0, 0);
    while rounds < 40 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["kernel::child_that_writes", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let kill_at = Instant::now() + Duration::from_millis(20 + random.below(120));
        let lines = BufReader::new(child.stdout.take().unwrap());
        let reader = std::thread::spawn(move || lines.lines().map_while(Result::ok).filter_map(|l| l.parse::<u64>().ok()).last());
        std::thread::sleep(kill_at.saturating_duration_since(Instant::now()));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{status}: the child ended by itself");
        last = reader.join().unwrap().unwrap_or(last).max(last);

        let (_, pods, report) =
            PodStore::open_sized(&dir.path().join("state"), Sizes { reserve: 0, floor: 4_000, step: 0 }).unwrap();
        assert!(report.lost.is_empty() || report.cut > 0, "{report:?}");
        if last > 0 {
            let attempts = &pods.pods[&uid(1)].containers["main"].attempts;
            let newest = attempts.last().unwrap();
            let n = u64::from(newest.number);
            assert!(n == last || n == last + 1, "acknowledged {last}, there is {n}");
            let told = attempts.iter().find(|a| u64::from(a.number) == last).unwrap();
            assert_eq!(told.exit.as_ref().unwrap().code, (last % 100) as i32);
            last = n;
        }
        let (_, standing) = Effects::open(&dir.path().join("run"), "boot").unwrap();
        let names: Vec<u64> = standing
            .iter()
            .map(|e| if let Effect::Link { name } = e { name[1..].parse().unwrap() } else { panic!("{e:?}") })
            .collect();
        for n in (1..last).filter(|n| n % 7 == 0) {
            assert!(names.contains(&n), "the effect {n} is forgotten: {names:?}");
        }
        assert!(names.iter().filter(|n| **n % 7 != 0).count() <= rounds + 1, "{names:?}");
        rounds += 1;
    }
    println!("{rounds} kills, {last} records");
    assert!(last > 40, "too few records between kills: {last}");
}
