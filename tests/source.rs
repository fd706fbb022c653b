//! The manifests directory as people and programs change it, watched by the real thread.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "source/fields.rs"]
mod fields;

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use coracle::kubelet::source::{DesiredPod, Source, SourceConfig, SourceUpdate, restore};
use coracle::volumes::model::Contents;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

const SOON: Duration = Duration::from_secs(5);

struct World {
    _root: tempfile::TempDir,
    dir: PathBuf,
    memory: PathBuf,
}

struct Watched {
    updates: Receiver<SourceUpdate>,
    _source: Source,
}

impl World {
    fn new() -> World {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("manifests");
        fs::create_dir(&dir).unwrap();
        World { dir, memory: root.path().join("memory.json"), _root: root }
    }

    fn start(&self) -> Watched {
        self.start_knowing(Vec::new(), "boot")
    }

    fn start_knowing(&self, known: Vec<DesiredPod>, boot_id: &str) -> Watched {
        let (sender, updates) = channel();
        let config = SourceConfig {
            dir: self.dir.clone(),
            node: "node".into(),
            memory: self.memory.clone(),
            boot_id: boot_id.into(),
            known,
        };
        let source = Source::start(config, move |update| sender.send(update).is_ok()).unwrap();
        Watched { updates, _source: source }
    }

    /// As an editor or a package does it.
    fn put(&self, name: &str, text: &str) {
        let temp = self.dir.join(format!(".{name}.tmp"));
        fs::write(&temp, text).unwrap();
        fs::rename(temp, self.dir.join(name)).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.dir.join(name)).unwrap();
    }
}

impl Watched {
    fn next(&self) -> SourceUpdate {
        self.updates.recv_timeout(SOON).expect("an update within 5 s")
    }

    /// Updates until one is as wanted; a change may be seen in two steps.
    fn until(&self, wanted: impl Fn(&SourceUpdate) -> bool) -> SourceUpdate {
        let end = Instant::now() + SOON;
        let mut last = None;
        while let Ok(update) = self.updates.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if wanted(&update) {
                return update;
            }
            last = Some(update);
        }
        panic!("never came; last: {last:#?}");
    }

    fn silent(&self, time: Duration) {
        match self.updates.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => {}
            other => panic!("{other:?}"),
        }
    }
}

fn pod(name: &str, image: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - name: main\n    image: {image}\n")
}

fn images(update: &SourceUpdate) -> Vec<String> {
    update.pods.iter().map(|p| format!("{}={}", p.pod.metadata.name, p.pod.spec.containers[0].image)).collect()
}

fn with_own_mounts(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "this test needs root");
        eprintln!("SKIP: this test needs root");
        return;
    }
    let run = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        test();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn files_that_come_change_and_go_are_seen_at_once() {
    let w = World::new();
    w.put("a.yaml", &pod("a", "one"));
    let s = w.start();
    let first = s.next();
    assert!(first.complete && first.problems.is_empty());
    assert_eq!(images(&first), ["a=one"]);
    let uid = |u: &SourceUpdate| u.pods[0].uid.clone();

    let began = Instant::now();
    w.put("a.yaml", &pod("a", "two"));
    let second = s.next();
    println!("rename to update: {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(images(&second), ["a=two"]);
    assert_ne!(uid(&first), uid(&second));
    // A plain write, a hard link, a link.
    fs::write(
        w.dir.join("b.json"),
        r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"b"},"spec":{"containers":[{"name":"c","image":"j"}]}}"#,
    )
    .unwrap();
    assert_eq!(images(&s.until(|u| u.pods.len() == 2)), ["a=two", "b=j"]);
    fs::hard_link(w.dir.join("b.json"), w.dir.join("c.json")).unwrap();
    assert!(s.next().problems[0].message.contains("already defined in b.json"));
    w.remove("b.json");
    assert!(s.until(|u| u.problems.is_empty()).pods.len() == 2);
    // A rename is the same instance; nothing ends in between.
    let before = uid(&second);
    fs::rename(w.dir.join("a.yaml"), w.dir.join("z.yaml")).unwrap();
    let renamed = s.next();
    assert_eq!((renamed.pods.len(), uid(&renamed), renamed.pods[0].origin.file.as_str()), (2, before, "z.yaml"));
    w.remove("z.yaml");
    assert_eq!(images(&s.next()), ["b=j"]);
    w.remove("c.json");
    let last = s.next();
    assert!(last.complete && last.pods.is_empty());
    s.silent(Duration::from_millis(300));
}

#[test]
fn a_file_is_read_once_its_writer_has_closed_it() {
    let w = World::new();
    let s = w.start();
    assert!(s.next().pods.is_empty());
    // The first half is good YAML of another pod than the one that is meant.
    let whole = pod("slow", "image") + "    args: [--safe]\n";
    let (half, rest) = whole.split_at(whole.find("    args").unwrap());
    let mut file = fs::File::create(w.dir.join("slow.yaml")).unwrap();
    file.write_all(half.as_bytes()).unwrap();
    s.silent(Duration::from_millis(400));
    file.write_all(rest.as_bytes()).unwrap();
    drop(file);
    let update = s.next();
    assert_eq!(update.pods[0].pod.spec.containers[0].args, ["--safe"]);
    // Rewritten in place: the old one stands until the new one is whole.
    let mut file = fs::OpenOptions::new().write(true).truncate(true).open(w.dir.join("slow.yaml")).unwrap();
    w.put("other.yaml", &pod("other", "x"));
    let meanwhile = s.next();
    assert!(meanwhile.problems.is_empty() && meanwhile.pods.iter().any(|p| p.uid == update.pods[0].uid));
    file.write_all(pod("slow", "new").as_bytes()).unwrap();
    drop(file);
    assert_eq!(images(&s.next()), ["other=x", "slow=new"]);
}

#[test]
fn half_written_files_keep_their_pod_and_say_where() {
    let w = World::new();
    w.put("a.yaml", &pod("a", "one"));
    let s = w.start();
    let good = s.next();
    w.put("a.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: [");
    let broken = s.next();
    assert_eq!(broken.pods, good.pods);
    let problem = &broken.problems[0];
    assert_eq!((problem.file.as_str(), problem.document, problem.kept), ("a.yaml", 1, true));
    assert!(problem.line >= 6, "{problem}");
    fs::write(w.dir.join("a.yaml"), "").unwrap();
    assert_eq!(s.until(|u| u.problems[0].message.contains("is empty")).pods, good.pods);
    w.put("a.yaml", &pod("a", "one"));
    assert!(s.until(|u| u.problems.is_empty()).pods == good.pods);
}

#[test]
fn what_is_no_manifest_is_ignored_or_named_and_never_waited_for() {
    let w = World::new();
    fs::create_dir(w.dir.join("sub")).unwrap();
    fs::write(w.dir.join("sub/x.yaml"), pod("x", "x")).unwrap();
    w.put("good.yaml", &pod("good", "x"));
    fs::write(w.dir.join(".hidden.yaml"), pod("hidden", "x")).unwrap();
    mknod(&w.dir.join("pipe"), SFlag::S_IFIFO, Mode::S_IRWXU, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(w.dir.join("socket")).unwrap();
    symlink("nowhere", w.dir.join("dangling")).unwrap();
    symlink("/proc/kmsg", w.dir.join("log")).unwrap();
    fs::File::create(w.dir.join("huge.yaml")).unwrap().set_len(1 << 40).unwrap();
    fs::write(w.dir.join("binary"), [0xff, 0xfe, 0, 1]).unwrap();
    fs::write(w.dir.join("README.md"), "# not: a manifest\nsome words\n").unwrap();
    // The thread's stack is small.
    let nest = |open: &str, close: &str, n: usize| format!("{}1{}", open.repeat(n), close.repeat(n));
    let meta = "apiVersion: v1, kind: Pod, metadata: {name: deep}, spec:";
    fs::write(
        w.dir.join("deep.yaml"),
        format!("{{{meta} {{containers: [{{name: c, image: i, odd: {}}}]}}}}", nest("{a: [", "]}", 28)),
    )
    .unwrap();
    fs::write(w.dir.join("deeper.json"), nest("{\"a\":", "}", 100_000)).unwrap();
    fs::write(w.dir.join("deeper.yaml"), nest("[", "]", 100_000)).unwrap();
    if nix::unistd::geteuid().is_root() {
        mknod(&w.dir.join("device"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(10, 130)).unwrap();
    }
    let began = Instant::now();
    let s = w.start();
    let update = s.next();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(images(&update), ["deep=i", "good=x"]);
    assert_eq!(update.pods[0].warnings[0].field, "spec.containers[0].odd");
    let told: Vec<String> = update.problems.iter().map(ToString::to_string).collect();
    for words in [
        "pipe: is a named pipe, not a file: remove it",
        "socket: is a socket, not a file: remove it",
        "dangling: is a link to nothing",
        "huge.yaml: has 1099511627776 bytes, more than the 10485760 that are read: split it",
        "binary document 1 line 1:1: not UTF-8: save the file as UTF-8 text",
        "README.md document 1",
        "deeper.json document 1 line 1:",
        "deeper.yaml document 1 line 1:",
        "log: ",
    ] {
        assert!(told.iter().any(|t| t.starts_with(words)), "{words}: {told:#?}");
    }
    assert!(update.complete);
}

#[test]
fn a_directory_that_vanishes_ends_nothing_and_comes_back_as_it_was() {
    let w = World::new();
    w.put("a.yaml", &pod("a", "one"));
    let s = w.start();
    let good = s.next();
    let away = w.dir.with_extension("away");
    fs::rename(&w.dir, &away).unwrap();
    let gone = s.next();
    assert!(!gone.complete && gone.problems[0].message.contains("nothing ends"), "{gone:?}");
    assert_eq!(gone.pods, good.pods);
    fs::rename(&away, &w.dir).unwrap();
    let back = s.until(|u| u.complete);
    assert_eq!((back.pods, back.problems.len()), (good.pods.clone(), 0));
    // And it is watched again.
    w.put("b.yaml", &pod("b", "one"));
    assert_eq!(images(&s.next()), ["a=one", "b=one"]);
    // An empty directory in its place is doubted until there is something in it.
    fs::rename(&w.dir, &away).unwrap();
    fs::create_dir(&w.dir).unwrap();
    let doubted = s.until(|u| u.problems.iter().any(|p| p.message.contains("replaced by an empty directory")));
    assert_eq!((doubted.complete, doubted.pods.len()), (false, 2));
    fs::write(w.dir.join(".keep"), "").unwrap();
    assert!(s.until(|u| u.complete).pods.is_empty());
}

#[test]
fn another_file_system_in_its_place_ends_nothing() {
    with_own_mounts(|| {
        let w = World::new();
        w.put("a.yaml", &pod("a", "one"));
        let s = w.start();
        let good = s.next();
        mount(Some("tmpfs"), &w.dir, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(w.dir.join("b.yaml"), pod("b", "two")).unwrap();
        // inotify says nothing of a mount: the poll does.
        let end = Instant::now() + Duration::from_secs(30);
        let covered = s.updates.recv_timeout(end - Instant::now()).unwrap();
        assert!(!covered.complete && covered.problems[0].message.contains("another file system"), "{covered:?}");
        assert_eq!(covered.pods, good.pods);
        umount2(&w.dir, MntFlags::MNT_DETACH).unwrap();
        assert_eq!(s.until(|u| u.complete).pods, good.pods);
    });
}

#[test]
fn a_mounted_config_map_is_followed_through_its_links() {
    let w = World::new();
    let version = |name: &str, image: &str| {
        fs::create_dir(w.dir.join(name)).unwrap();
        fs::write(w.dir.join(name).join("pod.yaml"), pod("p", image)).unwrap();
        symlink(name, w.dir.join("..data_tmp")).unwrap();
        fs::rename(w.dir.join("..data_tmp"), w.dir.join("..data")).unwrap();
    };
    version("..1", "one");
    symlink("..data/pod.yaml", w.dir.join("pod.yaml")).unwrap();
    let s = w.start();
    assert_eq!(images(&s.next()), ["p=one"]);
    version("..2", "two");
    assert_eq!(images(&s.next()), ["p=two"]);
}

#[test]
fn over_restarts_the_store_stands_in_for_what_cannot_be_read() {
    let w = World::new();
    w.put("a.yaml", &pod("a", "one"));
    w.put("conf.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: v}\n");
    let first = w.start().next();
    assert_eq!(first.configs.secret("default", "s").unwrap()["k"], b"v");
    let stored = || vec![restore(&first.pods[0].uid, &first.pods[0].raw).unwrap()];
    let remembered = fs::metadata(&w.memory).unwrap().modified().unwrap();
    // The same directory, unchanged: the very same pods, and nothing is written.
    let again = w.start_knowing(stored(), "boot").next();
    assert_eq!(again.pods, first.pods);
    assert_eq!(fs::metadata(&w.memory).unwrap().modified().unwrap(), remembered);
    // Broken now.
    w.put("a.yaml", "kind: [");
    let broken = w.start_knowing(stored(), "boot").next();
    assert_eq!((broken.pods.len(), broken.pods[0].uid.clone(), broken.complete), (1, first.pods[0].uid.clone(), true));
    // Gone, as after a reboot without its disk: told, incomplete, and what is stored is wanted.
    let away = w.dir.with_extension("away");
    fs::rename(&w.dir, &away).unwrap();
    let gone = w.start_knowing(stored(), "boot").next();
    assert_eq!((gone.pods.len(), gone.complete), (1, false));
    fs::create_dir(&w.dir).unwrap();
    let s = w.start_knowing(stored(), "another boot");
    let empty = s.next();
    assert!(!empty.complete && empty.pods.len() == 1 && empty.problems[0].message.contains("is empty"), "{empty:?}");
    // The disk comes: its files count.
    w.put("b.yaml", &pod("b", "one"));
    assert_eq!(images(&s.until(|u| u.complete)), ["b=one"]);
    // Emptied by its operator while we were away, surely the same directory: its pods go.
    drop(s);
    w.remove("b.yaml");
    let emptied = w.start_knowing(stored(), "another boot").next();
    assert!(emptied.complete && emptied.pods.is_empty(), "{emptied:?}");
}

#[test]
fn storms_end_in_the_newest_version() {
    let w = World::new();
    let s = w.start();
    assert!(s.next().complete);
    for n in 0..300 {
        w.put("a.yaml", &pod("a", &format!("i{n}")));
        w.put(&format!("b{}.yaml", n % 7), &pod("b", "same"));
        if n % 3 == 0 {
            w.remove(&format!("b{}.yaml", n % 7));
        }
    }
    let last = s.until(|u| images(u).first().is_some_and(|i| i == "a=i299"));
    assert!(last.complete);
    s.updates.recv_timeout(Duration::from_millis(300)).ok();
    drop(s);
    let fresh: Vec<_> = w.start().next().pods;
    assert_eq!(fresh.len(), 2);
    assert!(Path::new(&w.memory).exists());
}
