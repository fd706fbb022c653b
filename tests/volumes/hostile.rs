//! What a pod may leave in its volumes, and what it may try while we look at them. The canary is
//! a directory of the host that nothing may touch or show.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{RenameFlags, renameat2};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, mkdirat, mknod};

use crate::world::{World, in_own_mounts, pod, read};

/// A directory outside everything of ours, whole at the end.
struct Canary(PathBuf);

impl Canary {
    fn new(w: &World) -> Canary {
        let dir = w.root.join("canary");
        fs::create_dir_all(dir.join("sub")).unwrap();
        fs::write(dir.join("file"), "alive").unwrap();
        fs::write(dir.join("sub/file"), "alive").unwrap();
        Canary(dir)
    }
    fn check(&self) {
        assert_eq!((read(self.0.join("file")), read(self.0.join("sub/file"))), ("alive".into(), "alive".into()));
        assert_eq!(fs::read_dir(&self.0).unwrap().count(), 2);
    }
}

fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

#[test]
fn teardown_follows_no_link_and_no_mount() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = World::at(dir.path());
        let canary = Canary::new(&w);
        let pod = pod("{name: e, emptyDir: {}}, {name: m, emptyDir: {medium: Memory}}", "{name: e, mountPath: /a, subPath: s}");
        w.setup(&pod).unwrap();
        w.mounts(&pod).unwrap();
        let e = w.volume("empty-dir", "e");
        symlink(&canary.0, e.join("link")).unwrap();
        symlink(canary.0.join("file"), e.join("file-link")).unwrap();
        symlink("loop", e.join("loop")).unwrap();
        for name in ["bound", "twice", "fifo-dir"] {
            fs::create_dir(e.join(name)).unwrap();
        }
        bind(&canary.0, &e.join("bound"));
        bind(&canary.0, &e.join("twice"));
        bind(&canary.0, &e.join("twice"));
        bind(&canary.0, &e.join("twice/sub"));
        fs::write(e.join("mounted-file"), "").unwrap();
        bind(&canary.0.join("file"), &e.join("mounted-file"));
        fs::create_dir(w.volume("empty-dir", "m").join("x")).unwrap();
        bind(&canary.0, &w.volume("empty-dir", "m").join("x"));
        mknod(&e.join("fifo-dir/fifo"), SFlag::S_IFIFO, Mode::S_IRWXU, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(e.join("socket")).unwrap();
        fs::write(e.join("new\nline \u{1f600} \\040"), "x").unwrap();
        // A directory that the pod took from itself.
        fs::create_dir(e.join("closed")).unwrap();
        fs::write(e.join("closed/x"), "").unwrap();
        fs::set_permissions(e.join("closed"), std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
        w.teardown();
        canary.check();
    });
}

#[test]
fn depth_and_number_cost_neither_stack_nor_memory() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = World::at(dir.path());
        w.setup(&pod("{name: e, emptyDir: {}}", "")).unwrap();
        let e = w.volume("empty-dir", "e");
        // 3,000 levels: far beyond PATH_MAX, so made one by one.
        let mut at = fs::File::open(&e).unwrap();
        for _ in 0..3_000 {
            mkdirat(Some(at.as_raw_fd()), "..lifted-1", Mode::S_IRWXU).unwrap();
            at = nix::fcntl::openat(Some(at.as_raw_fd()), "..lifted-1", nix::fcntl::OFlag::O_RDONLY, Mode::empty())
                .map(|fd| fs::File::from(unsafe_free::owned(fd)))
                .unwrap();
        }
        drop(at);
        fs::create_dir(e.join("many")).unwrap();
        for n in 0..5_000 {
            fs::write(e.join("many").join(n.to_string()), "").unwrap();
        }
        w.teardown();
    });
}

/// nix 0.29 gives raw descriptors; this takes them over without unsafe code.
mod unsafe_free {
    use std::os::fd::{OwnedFd, RawFd};

    pub fn owned(fd: RawFd) -> OwnedFd {
        let own = std::fs::File::open(format!("/proc/self/fd/{fd}")).unwrap();
        nix::unistd::close(fd).unwrap();
        own.into()
    }
}

#[test]
fn sub_paths_never_leave_the_volume() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = World::at(dir.path());
        let canary = Canary::new(&w);
        let refused = |sub_path: &str| {
            let pod = pod("{name: e, emptyDir: {}}", &format!("{{name: e, mountPath: /a, subPath: {sub_path}}}"));
            w.setup(&pod).unwrap();
            w.mounts(&pod).unwrap_err().to_string()
        };
        w.setup(&pod("{name: e, emptyDir: {}}", "")).unwrap();
        let e = w.volume("empty-dir", "e");
        symlink(&canary.0, e.join("absolute")).unwrap();
        symlink("../../../../../../../canary", e.join("relative")).unwrap();
        symlink("/proc/self/root", e.join("magic")).unwrap();
        symlink("missing", e.join("dangling")).unwrap();
        symlink("loop", e.join("loop")).unwrap();
        fs::write(e.join("file"), "").unwrap();
        let head = |sub: &str| format!("failed to prepare subPath \"{sub}\" of volume \"e\" for container \"c\": ");
        for (sub_path, why) in [
            ("absolute", "it leads out of the volume: links in it must stay inside"),
            ("absolute/sub", "it leads out of the volume: links in it must stay inside"),
            ("absolute/new", "it leads out of the volume: links in it must stay inside"),
            ("relative/sub", "it leads out of the volume: links in it must stay inside"),
            ("magic", "it leads out of the volume: links in it must stay inside"),
            ("../x", "must be a relative path without '..'"),
            ("a/../../x", "must be a relative path without '..'"),
            ("/etc", "must be a relative path without '..'"),
            ("loop", "a link stands in its way"),
            ("dangling", "a link stands in its way"),
            ("file/x", "a part of it is a file"),
        ] {
            assert_eq!(refused(sub_path), format!("{}{why}", head(sub_path)));
        }
        canary.check();
        w.teardown();
    });
}

/// CVE-2021-25741: directories and links change places while we walk.
#[test]
fn racing_exchanges_never_show_the_canary() {
    in_own_mounts(|| {
        const ROUNDS: usize = 5_000;
        let dir = tempfile::tempdir().unwrap();
        let w = World::at(dir.path());
        let canary = Canary::new(&w);
        let pod = pod("{name: e, emptyDir: {}}", "{name: e, mountPath: /a, subPath: x/sub/new}");
        w.setup(&pod).unwrap();
        let e = w.volume("empty-dir", "e");
        fs::create_dir_all(e.join("x/sub")).unwrap();
        fs::create_dir_all(e.join("y")).unwrap();
        symlink(canary.0.join("sub"), e.join("y/sub")).unwrap();
        symlink(&canary.0, e.join("z")).unwrap();
        let done = AtomicBool::new(false);
        let (mut bound, mut refused) = (0, 0);
        // By descriptors of their directories: the test itself must not follow its own links.
        let place = |path: &str| fs::File::open(e.join(path)).unwrap();
        let (top, x, y) = (place("."), place("x"), place("y"));
        let exchange = |from: &fs::File, a: &str, to: &fs::File, b: &str| {
            let (from, to) = (Some(from.as_raw_fd()), Some(to.as_raw_fd()));
            while !done.load(Ordering::Relaxed) {
                // Who loses a race tries again.
                let _ = renameat2(from, a, to, b, RenameFlags::RENAME_EXCHANGE);
            }
        };
        /// Ends the exchanges also where an assertion fails.
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        std::thread::scope(|scope| {
            let _end = End(&done);
            scope.spawn(|| exchange(&top, "x", &top, "y"));
            scope.spawn(|| exchange(&top, "x", &top, "z"));
            scope.spawn(|| exchange(&x, "sub", &y, "sub"));
            for _ in 0..ROUNDS {
                match w.mounts(&pod) {
                    Ok(plans) => {
                        bound += 1;
                        assert!(!plans[0].source.join("file").exists(), "the canary was bound");
                    }
                    Err(_) => refused += 1,
                }
                // Nothing was made outside either.
                assert!(!canary.0.join("new").exists() && !canary.0.join("sub/new").exists());
            }
        });
        println!("{ROUNDS} races: {bound} bound inside, {refused} refused, 0 outside");
        assert!(bound > 0 && refused > 0, "{bound} bound, {refused} refused: no race was run");
        canary.check();
        w.teardown();
    });
}
