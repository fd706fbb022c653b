//! kill -9 at any moment, damaged stores, full disks: never wrongly present, nothing left over.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle::images::{ImageError, Images, ImportOptions};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::kit::*;

/// Not a test: another process's pull, started by the tests below with these variables.
#[test]
#[ignore = "run by other tests"]
fn helper_pull() {
    let (dir, name) = (std::env::var("HELPER_DIR").unwrap(), std::env::var("HELPER_NAME").unwrap());
    let images = Images::open(config(Path::new(&dir))).unwrap();
    let outcome = match std::env::var("HELPER_IMPORT") {
        Ok(path) => images.import(Path::new(&path), &ImportOptions::default()).map(drop),
        Err(_) => images.pull(&name, &[]).map(drop),
    };
    outcome.unwrap();
    if std::env::var_os("HELPER_REMOVE").is_some() {
        images.remove(&name).unwrap();
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let own: u64 = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap().trim().trim_end_matches(" kB").parse().unwrap();
    let children = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    println!("peak own {own} child {children}");
}

pub fn helper(dir: &Path, name: &str, import: Option<&Path>) -> Child {
    helper_command(dir, name, import).spawn().unwrap()
}

pub fn helper_command(dir: &Path, name: &str, import: Option<&Path>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "crash::helper_pull", "--nocapture"]);
    command.env("HELPER_DIR", dir).env("HELPER_NAME", name).env_remove("HELPER_IMPORT");
    if let Some(path) = import {
        command.env("HELPER_IMPORT", path);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command
}

/// Every recorded image is whole, byte for byte, and there is nothing on disk beside it.
pub fn audit(dir: &Path, name: &str, files: &[(&str, Vec<u8>)]) -> bool {
    // A child that was forked and had not yet executed holds the lock a moment longer than the killed.
    let end = std::time::Instant::now() + Duration::from_secs(10);
    let images = loop {
        match Images::open(config(dir)) {
            Err(e) if e.to_string().contains("lock") && std::time::Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => break opened.unwrap(),
        }
    };
    let found = images.find(name).unwrap();
    if let Some(image) = &found {
        for (at, (file, bytes)) in files.iter().enumerate() {
            assert_eq!(&fs::read(image.layers[files.len() - 1 - at].join(file)).unwrap(), bytes);
        }
    }
    let count = |part: &str| fs::read_dir(dir.join("images").join(part)).unwrap().count();
    assert_eq!(count("layers"), found.as_ref().map_or(0, |i| i.layers.len()));
    assert_eq!(count("blobs/sha256"), found.as_ref().map_or(0, |i| i.layers.len() + 2));
    let rest = fs::read_dir(dir.join("images/staging"))
        .unwrap()
        .filter(|e| e.as_ref().unwrap().path().extension().is_none_or(|x| x != "part"));
    assert_eq!(rest.count(), 0);
    found.is_some()
}

/// No `coracle unpack` of this store runs on.
pub fn assert_no_children(dir: &Path) {
    let start = Instant::now();
    loop {
        let running = fs::read_dir("/proc").unwrap().flatten().any(|p| {
            let line = fs::read(p.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("unpack") && line.contains(dir.to_str().unwrap())
        });
        if !running {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "an unpack child outlived its agent");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn kill_9_at_any_moment() {
    let files = [("a", noise(3_000_000, 5)), ("b", noise(2_000_000, 6)), ("c", noise(1_000_000, 7))];
    let image = layers(&files.iter().map(|(n, d)| vec![file(n, d)]).collect::<Vec<_>>());
    let server = Server::start(move |seen| serve_image(&image, seen));
    let name = format!("{}/x:1", server.host());
    let dir = tempfile::tempdir().unwrap();
    let mut helper_once = helper(dir.path(), &name, None);
    let start = Instant::now();
    assert!(helper_once.wait().unwrap().success());
    let whole = start.elapsed();
    assert!(audit(dir.path(), &name, &files));
    let (mut present, rounds) = (0, 24u32);
    for round in 0..rounds {
        let dir = tempfile::tempdir().unwrap();
        for again in 0..3 {
            let mut child = helper(dir.path(), &name, None);
            std::thread::sleep(whole * (round + again * 7 % rounds) / rounds);
            let _ = child.kill();
            child.wait().unwrap();
            assert_no_children(dir.path());
        }
        present += u32::from(audit(dir.path(), &name, &files));
        // However it ended, the next pull makes it whole.
        let images = Images::open(config(dir.path())).unwrap();
        images.pull(&name, &[]).unwrap();
        drop(images);
        assert!(audit(dir.path(), &name, &files));
        assert_eq!(fs::read_dir(dir.path().join("images/staging")).unwrap().count(), 0);
    }
    println!("{rounds} rounds of 3 kills, {present} with the image already whole");
}

#[test]
fn kill_9_of_an_unpack_child() {
    let image = layers(&[vec![file("a", noise(200_000, 8))], vec![file("b", noise(3_000_000, 9))]]);
    let served = image.clone();
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_owned();
    let server = Server::start(move |seen| {
        if seen.path.contains(&served.layers[1].hex()) {
            // By now the child is there and waits for its bytes.
            std::thread::sleep(Duration::from_millis(300));
            for p in fs::read_dir("/proc").unwrap().flatten() {
                let line = String::from_utf8_lossy(&fs::read(p.path().join("cmdline")).unwrap_or_default()).into_owned();
                if line.contains("unpack") && line.contains(at.to_str().unwrap()) {
                    let pid = p.file_name().to_str().unwrap().parse().unwrap();
                    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
                }
            }
        }
        serve_image(&served, seen)
    });
    let images = Images::open(config(dir.path())).unwrap();
    let error = images.pull(&format!("{}/x:1", server.host()), &[]).unwrap_err().to_string();
    assert!(error.contains("ended early") || error.contains("unpack"), "{error}");
    assert!(images.list().unwrap().is_empty());
    assert_eq!(fs::read_dir(dir.path().join("images/layers")).unwrap().count(), 0);
}

#[test]
fn a_damaged_store_is_mended_or_says_so() {
    let image = layers(&[vec![file("a", noise(100_000, 1))], vec![file("b", "b"), file("a/.wh.x", "")]]);
    let served = image.clone();
    let server = Server::start(move |seen| serve_image(&served, seen));
    let name = format!("{}/x:1", server.host());
    let world = world();
    // The second layer's whiteout needs a directory where the first has a file: it replaces it.
    let pulled = world.images.pull(&name, &[]).unwrap();
    let blob = |n: usize| world.dir.path().join("images/blobs/sha256").join(image.layers[n].hex());

    fs::remove_dir_all(&pulled.layers[0]).unwrap();
    fs::remove_dir_all(&pulled.layers[1]).unwrap();
    let mended = world.images.find(&name).unwrap().unwrap();
    assert_eq!(fs::read(mended.layers[1].join("a")).unwrap(), noise(100_000, 1));
    assert_eq!(world.count("layers"), 2);

    // Layer and blob gone: not present, and a pull brings it back.
    fs::remove_dir_all(&mended.layers[1]).unwrap();
    fs::remove_file(blob(0)).unwrap();
    assert_eq!(world.images.find(&name).unwrap(), None);
    let pulled = world.images.pull(&name, &[]).unwrap();
    assert!(world.images.find(&name).unwrap().is_some() && blob(0).exists());

    // A blob with other bytes is noticed when it is used.
    let mut bytes = fs::read(blob(0)).unwrap();
    bytes[500] ^= 0xff;
    fs::write(blob(0), bytes).unwrap();
    fs::remove_dir_all(&pulled.layers[1]).unwrap();
    assert_eq!(world.images.find(&name).unwrap(), None);
    world.images.pull(&name, &[]).unwrap();
    assert!(world.images.find(&name).unwrap().is_some());

    // A config or manifest that is not what its name says.
    for (digest, _) in image.blobs.iter().filter(|(_, b)| b.starts_with(b"{")) {
        fs::write(world.dir.path().join("images/blobs/sha256").join(digest.hex()), "{}").unwrap();
    }
    assert_eq!(world.images.find(&name).unwrap(), None);
    world.images.pull(&name, &[]).unwrap();
    assert!(world.images.find(&name).unwrap().is_some());
    world.assert_clean();
}

/// What a power cut did to a layer shows at its first use after the machine's next start.
#[test]
fn a_layer_that_a_power_cut_hurt_is_rebuilt() {
    type Harm = fn(&Path);
    let harms: [Harm; 5] = [
        |l| fs::File::options().write(true).open(l.join("d/a")).unwrap().set_len(0).unwrap(),
        |l| fs::remove_file(l.join("d/a")).unwrap(),
        |l| fs::write(l.join("d/new"), "").unwrap(),
        |l| fs::set_permissions(l.join("d/a"), std::os::unix::fs::PermissionsExt::from_mode(0o4777)).unwrap(),
        |l| std::os::unix::fs::chown(l.join("d"), Some(9), None).unwrap(),
    ];
    let image = layers(&[vec![dir("d"), file("d/a", "content")], vec![file("b", "b")]]);
    for harm in harms {
        let world = world();
        let before = world.import(&image).unwrap();
        let World { dir, images } = world;
        harm(&before.layers[1]);
        // Within one run of the machine nothing is looked at again.
        assert_eq!(images.find(&before.id).unwrap().as_ref(), Some(&before));
        drop(images);
        fs::write(dir.path().join("images/boot"), "another boot").unwrap();
        let images = Images::open(config(dir.path())).unwrap();
        let mended = images.find(&before.id).unwrap().unwrap();
        assert_eq!(mended.layers[0], before.layers[0]);
        assert_ne!(mended.layers[1], before.layers[1]);
        assert!(!before.layers[1].exists());
        assert_eq!(fs::read(mended.layers[1].join("d/a")).unwrap(), b"content");
        drop(images);
        // The same without a blob to mend it from: not present.
        fs::write(dir.path().join("images/boot"), "another boot").unwrap();
        fs::remove_file(dir.path().join("images/blobs/sha256").join(image.layers[0].hex())).unwrap();
        harm(&mended.layers[1]);
        let images = Images::open(config(dir.path())).unwrap();
        assert_eq!(images.find(&before.id).unwrap(), None);
    }
}

#[test]
fn a_second_agent_is_kept_out() {
    let world = world();
    let error = Images::open(config(world.dir.path())).unwrap_err();
    assert!(matches!(&error, ImageError::Store { operation: "lock", .. }), "{error}");
}

struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(options: &str) -> Tmpfs {
        let dir = tempfile::tempdir().unwrap();
        mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
        Tmpfs(dir)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_is_an_error_and_passes() {
    let big = layers(&[vec![file("small", "s")], vec![file("big", noise(20 << 20, 3))]]);
    let served = big.clone();
    let server = Server::start(move |seen| serve_image(&served, seen));
    let name = format!("{}/x:1", server.host());
    // Too small by the manifest's sizes; too small for what it unpacks to; out of inodes.
    let zeros = layers(&[vec![file("small", "s")], vec![file("zeros", vec![0; 20 << 20])]]);
    let swells = Server::start(move |seen| serve_image(&zeros, seen));
    let swells = format!("{}/x:1", swells.host());
    for (options, name) in [("size=12m", &name), ("size=30m", &name), ("size=12m", &swells), ("size=64m,nr_inodes=14", &name)] {
        let disk = Tmpfs::new(options);
        let images = Images::open(config(disk.0.path())).unwrap();
        let error = images.pull(name, &[]).unwrap_err();
        assert!(
            matches!(&error, ImageError::Store { source, .. } if source.kind() == std::io::ErrorKind::StorageFull),
            "{options}: {error}"
        );
        assert!(images.list().unwrap().is_empty());
        let left: Vec<_> = fs::read_dir(disk.0.path().join("images/staging")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(left.iter().all(|n| n.to_str().unwrap().ends_with(".part")), "{left:?}");
        mount(None::<&str>, disk.0.path(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=100m,nr_inodes=1000")).unwrap();
        images.pull(name, &[]).unwrap();
        assert!(images.find(name).unwrap().is_some());
        drop(images);
    }
}

#[test]
fn removing_while_pulling() {
    let image = layers(&[vec![file("a", noise(500_000, 4))], vec![file("b", "b")]]);
    let server = Server::start(move |seen| serve_image(&image, seen));
    let world = world();
    let names: Vec<String> = ["x", "y"].iter().map(|r| format!("{}/{r}:1", server.host())).collect();
    std::thread::scope(|scope| {
        for name in &names {
            let images = world.images.clone();
            scope.spawn(move || {
                for _ in 0..15 {
                    let image = images.pull(name, &[]).unwrap();
                    assert!(image.layers.iter().all(|l| l.is_dir()), "pulled and not there");
                    images.remove(name).unwrap();
                }
            });
        }
    });
    assert!(world.images.list().unwrap().is_empty());
    world.assert_clean();
    assert_eq!((world.count("layers"), world.count("blobs/sha256")), (0, 0));
}
