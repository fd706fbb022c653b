//! What each kind of volume looks like, refreshed, mounted and taken away.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle::store::effects::Effect;
use coracle::sys::mount_table;
use coracle::volumes::model::{Propagation, VolumeError};
use nix::mount::{MsFlags, mount};

use crate::world::{World, container, in_own_mounts, mode, pod, pod_with, read, snapshot};

fn world(dir: &tempfile::TempDir) -> World {
    World::at(dir.path())
}

#[test]
fn every_kind_is_made_as_the_kubelet_makes_it_and_a_second_setup_writes_nothing() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut w = world(&dir);
        w.map("m", &[("a", "1"), ("b", "2")]);
        w.secret("s", &[("key", "word")]);
        let pod = pod(
            "{name: e, emptyDir: {}}, {name: mem, emptyDir: {medium: Memory, sizeLimit: 1Mi}}, {name: cm, configMap: {name: m, defaultMode: 0640, items: [{key: a, path: x/y, mode: 0400}, {key: b, path: b}]}}, {name: sec, secret: {secretName: s}}, {name: opt, configMap: {name: none, optional: true}}",
            "{name: sec, mountPath: /s}, {name: e, mountPath: /deep/e}, {name: cm, mountPath: '/c//d/.', readOnly: false}, {name: mem, mountPath: /m, readOnly: true}",
        );
        w.setup(&pod).unwrap();
        let (e, mem, cm, sec) =
            (w.volume("empty-dir", "e"), w.volume("empty-dir", "mem"), w.volume("configmap", "cm"), w.volume("secret", "sec"));
        assert_eq!((mode(&e), mode(&mem), mode(&cm), mode(&sec)), (0o777, 0o1777, 0o777, 0o1777));
        assert_eq!((read(cm.join("x/y")), read(cm.join("b")), read(sec.join("key"))), ("1".into(), "2".into(), "word".into()));
        assert_eq!(fs::read_link(cm.join("b")).unwrap(), Path::new("..data/b"));
        assert_eq!(
            (mode(&fs::canonicalize(cm.join("x/y")).unwrap()), mode(&fs::canonicalize(cm.join("b")).unwrap())),
            (0o400, 0o640)
        );
        assert_eq!(mode(&fs::canonicalize(sec.join("key")).unwrap()), 0o644);
        assert_eq!(mode(&w.dir()), 0o750);
        assert!(w.volume("configmap", "opt").is_dir());
        assert_eq!(mount_table::below(&w.dir()).unwrap(), [mem.clone(), sec.clone()]);
        // The size holds.
        let mut file = fs::File::create(mem.join("big")).unwrap();
        assert_eq!(file.write_all(&vec![1; 2 << 20]).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        drop(file);
        fs::remove_file(mem.join("big")).unwrap();

        let standing = w.standing();
        assert_eq!(
            standing,
            [Effect::Dir { path: w.dir() }, Effect::Mount { target: mem.clone() }, Effect::Mount { target: sec.clone() }]
        );
        // A container may change its volume's root; that is not ours to set back.
        fs::set_permissions(&e, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let before = snapshot(&w.dir());
        w.setup(&pod).unwrap();
        assert_eq!(snapshot(&w.dir()), before);
        assert_eq!(w.standing(), standing);

        let plans = w.mounts(&pod).unwrap();
        let seen: Vec<_> = plans.iter().map(|p| (p.destination.to_str().unwrap(), p.source.clone(), p.read_only)).collect();
        assert_eq!(seen, [("/s", sec, true), ("/m", mem, true), ("/deep/e", e, false), ("/c/d", cm, true)]);
        assert!(plans.iter().all(|p| p.propagation == Propagation::Private));
        w.teardown();
        w.teardown();
    });
}

#[test]
fn fs_group_owns_what_is_made_and_hands_itself_on() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut w = world(&dir);
        w.map("m", &[("a", "1")]);
        w.secret("s", &[("key", "word")]);
        let pod = pod_with(
            "securityContext: {fsGroup: 4321},",
            "{name: e, emptyDir: {}}, {name: mem, emptyDir: {medium: Memory}}, {name: cm, configMap: {name: m, defaultMode: 0600}}, {name: sec, secret: {secretName: s}}",
            "",
        );
        w.setup(&pod).unwrap();
        for (path, bits) in [
            (w.volume("empty-dir", "e"), 0o2777),
            (w.volume("empty-dir", "mem"), 0o3777),
            (w.volume("configmap", "cm"), 0o2777),
            (w.volume("secret", "sec"), 0o3777),
            (fs::canonicalize(w.volume("configmap", "cm").join("a")).unwrap(), 0o640),
            (fs::canonicalize(w.volume("secret", "sec").join("..data")).unwrap(), 0o2755),
        ] {
            assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (bits, 4321), "{}", path.display());
        }
        fs::write(w.volume("empty-dir", "e").join("new"), "").unwrap();
        assert_eq!(fs::metadata(w.volume("empty-dir", "e").join("new")).unwrap().gid(), 4321);
        let before = snapshot(&w.dir());
        w.setup(&pod).unwrap();
        assert_eq!(snapshot(&w.dir()), before);
        w.teardown();
    });
}

#[test]
fn a_refresh_swaps_all_files_at_once() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut w = world(&dir);
        let pod = pod("{name: v, configMap: {name: m}}", "");
        w.map("m", &[("a", "0"), ("b", "0"), ("old", "x")]);
        w.setup(&pod).unwrap();
        let top = w.volume("configmap", "v");
        w.map("m", &[("a", "1"), ("b", "1"), ("new", "y")]);
        w.setup(&pod).unwrap();
        assert!(!top.join("old").exists() && read(top.join("new")) == "y" && read(top.join("a")) == "1");
        let done = AtomicBool::new(false);
        let (mut looks, mut changes) = (0, 0);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut looks, mut seen) = (0u32, std::collections::BTreeSet::new());
                while !done.load(Ordering::Relaxed) {
                    // As a container does it: one look at the link, then the files behind it.
                    let Ok(now) = fs::read_link(top.join("..data")) else { panic!("..data is gone") };
                    let pair = (fs::read_to_string(top.join(&now).join("a")), fs::read_to_string(top.join(&now).join("b")));
                    if let (Ok(a), Ok(b)) = pair {
                        assert_eq!(a, b);
                        seen.insert(a);
                        looks += 1;
                    }
                    // And by name: a walk that the swap cut in two (the old folder went between
                    // two of its steps, as with the kubelet's writer) finds it at the next look.
                    let whole = (0..20).find_map(|_| fs::read_to_string(top.join("a")).ok());
                    assert!(whole.is_some_and(|text| !text.is_empty()));
                }
                (looks, seen.len())
            });
            for n in 2..300 {
                let text = n.to_string();
                w.map("m", &[("a", &text), ("b", &text)]);
                w.setup(&pod).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            (looks, changes) = reader.join().unwrap();
        });
        assert!(looks > 50 && changes > 5, "{looks} looks saw {changes} versions");
        // One generation is left, and the files stay when the object goes.
        let names = |path: &Path| fs::read_dir(path).unwrap().count();
        assert_eq!(names(&top), 4);
        w.objects = crate::world::Objects::default();
        let error = w.setup(&pod).unwrap_err();
        assert_eq!(error.to_string(), "MountVolume.SetUp failed for volume \"v\": configmap \"m\" not found");
        assert_eq!(read(top.join("a")), "299");
        w.teardown();
    });
}

#[test]
fn what_is_missing_is_told_and_other_volumes_are_made_all_the_same() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut w = world(&dir);
        w.secret("s", &[("a", "1")]);
        let pod = pod(
            "{name: x, configMap: {name: none}}, {name: yy, secret: {secretName: s, items: [{key: z, path: z}]}}, {name: e, emptyDir: {}}",
            "",
        );
        let error = w.setup(&pod).unwrap_err();
        assert_eq!(error.to_string(), "MountVolume.SetUp failed for volume \"x\": configmap \"none\" not found");
        assert!(w.volume("empty-dir", "e").is_dir() && !w.volume("configmap", "x").exists());
        w.map("none", &[("a", "1")]);
        let error = w.setup(&pod).unwrap_err();
        assert_eq!(error.to_string(), "MountVolume.SetUp failed for volume \"yy\": references non-existent secret key: z");
        w.teardown();
    });
}

#[test]
fn host_paths_are_held_to_their_type() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = world(&dir);
        let host = w.root.join("host");
        fs::create_dir(&host).unwrap();
        fs::create_dir(host.join("dir")).unwrap();
        fs::write(host.join("file"), "x").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(host.join("socket")).unwrap();
        symlink("dir", host.join("to-dir")).unwrap();
        symlink("nowhere", host.join("dangling")).unwrap();
        let setup = |path: &str, kind: &str| {
            let path = if path.starts_with('/') { path.to_owned() } else { host.join(path).display().to_string() };
            w.setup(&pod(&format!("{{name: h, hostPath: {{path: {path}, type: {kind}}}}}"), ""))
        };
        let told = |path: &str, kind: &str, what: &str| {
            let error = setup(path, kind).unwrap_err().to_string();
            assert!(
                error.starts_with("MountVolume.SetUp failed for volume \"h\": hostPath type check failed: ")
                    && error.ends_with(what),
                "{error}"
            );
        };
        for (path, kind) in [
            ("dir", "''"),
            ("file", "''"),
            ("dir", "Directory"),
            ("to-dir", "Directory"),
            ("dir", "DirectoryOrCreate"),
            ("file", "File"),
            ("file", "FileOrCreate"),
            ("socket", "Socket"),
            ("/dev/null", "CharDevice"),
        ] {
            setup(path, kind).unwrap_or_else(|e| panic!("{path} {kind}: {e}"));
        }
        told("file", "Directory", "file is not a directory");
        told("none", "Directory", "none is not a directory");
        told("file", "DirectoryOrCreate", "file is not a directory");
        told("dir", "File", "dir is not a file");
        told("dir", "FileOrCreate", "dir is not a file");
        told("none", "File", "none is not a file");
        told("file", "Socket", "file is not a socket file");
        told("file", "CharDevice", "file is not a character device");
        told("/dev/null", "BlockDevice", "null is not a block device");
        setup("new/dir", "DirectoryOrCreate").unwrap();
        setup("new/file", "FileOrCreate").unwrap();
        setup("made", "''").unwrap();
        assert_eq!((mode(&host.join("new/dir")), mode(&host.join("new/file")), mode(&host.join("made"))), (0o755, 0o644, 0o755));
        assert!(setup("no/such/file", "FileOrCreate").is_err());
        // What we made for the operator stays the operator's.
        w.teardown();
        assert!(host.join("new/dir").is_dir());
    });
}

#[test]
fn propagation_needs_peers() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = world(&dir);
        let shared = w.root.join("shared");
        fs::create_dir(&shared).unwrap();
        let both = |path: &Path| {
            pod(
                &format!("{{name: h, hostPath: {{path: {}}}}}, {{name: e, emptyDir: {{}}}}", path.display()),
                "{name: h, mountPath: /a, mountPropagation: Bidirectional}, {name: h, mountPath: /b, mountPropagation: HostToContainer}, {name: e, mountPath: /e, mountPropagation: None}",
            )
        };
        let pod = both(&shared);
        w.setup(&pod).unwrap();
        let error = w.mounts(&pod).unwrap_err();
        assert!(
            matches!(error, VolumeError::Mount { .. }) && error.to_string().contains("but it is not a shared mount"),
            "{error}"
        );
        mount(Some("tmpfs"), &shared, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &shared, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        let plans = w.mounts(&pod).unwrap();
        let seen: Vec<_> = plans.iter().map(|p| p.propagation).collect();
        assert_eq!(seen, [Propagation::Bidirectional, Propagation::HostToContainer, Propagation::Private]);
        w.teardown();
    });
}

#[test]
fn the_kubelets_directory_is_shared_once_and_never_over_what_pods_use() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = world(&dir);
        let kubelet = w.root.join("kubelet");
        let all = || mount_table::below(&kubelet).unwrap();
        let volumes = "{name: e, emptyDir: {}}, {name: m, emptyDir: {medium: Memory}}";
        let pod = pod(volumes, "{name: e, mountPath: /e, mountPropagation: Bidirectional}");
        let only = [kubelet.clone()];
        // A pod's tmpfs is there: binding over it would hide it.
        w.setup(&pod).unwrap();
        let before = all();
        w.volumes.share().unwrap();
        assert_eq!(all(), before);
        assert!(w.mounts(&pod).unwrap_err().to_string().contains("but it is not a shared mount"));
        w.teardown();

        w.volumes.share().unwrap();
        assert_eq!(all(), only);
        assert!(mount_table::of(&kubelet).unwrap().unwrap().shared);
        w.volumes.share().unwrap();
        assert_eq!(all(), only, "once");
        w.setup(&pod).unwrap();
        assert_eq!(w.mounts(&pod).unwrap()[0].propagation, Propagation::Bidirectional);
        w.volumes.teardown(&w.uid).unwrap();
        assert_eq!(all(), only, "it is the node's, not a pod's");

        // Killed after the bind: the next start shares it and binds no second one.
        mount(None::<&str>, &kubelet, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        w.volumes.share().unwrap();
        assert_eq!(all(), only);
        assert!(mount_table::of(&kubelet).unwrap().unwrap().shared);
        let named = w.effects.standing().unwrap().into_iter().map(|s| s.effect);
        assert_eq!(named.collect::<Vec<_>>(), [Effect::Mount { target: kubelet }]);
    });
}

#[test]
fn sub_paths_are_bound_and_follow_what_changes() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut w = world(&dir);
        w.map("m", &[("conf", "one")]);
        let pod = pod(
            "{name: e, emptyDir: {}}, {name: m, configMap: {name: m}}",
            "{name: e, mountPath: /a, subPath: x/y}, {name: m, mountPath: /etc/conf, subPath: conf}, {name: e, mountPath: /b, subPath: link/z}",
        );
        w.setup(&pod).unwrap();
        let e = w.volume("empty-dir", "e");
        fs::create_dir(e.join("real")).unwrap();
        symlink("real", e.join("link")).unwrap();
        let plans = w.mounts(&pod).unwrap();
        let at = |destination: &str| plans.iter().find(|p| p.destination == Path::new(destination)).unwrap().source.clone();
        assert_eq!(at("/a"), w.dir().join("volume-subpaths/e/c/0"));
        assert_eq!(read(at("/etc/conf")), "one");
        // Missing directories get the mode of the volume's root.
        assert_eq!((mode(&e.join("x")), mode(&e.join("x/y"))), (0o777, 0o777));
        fs::write(at("/a").join("file"), "through").unwrap();
        assert_eq!(read(e.join("x/y/file")), "through");
        assert!(e.join("real/z").is_dir() && at("/b").is_dir());
        // The next start of the container: the same mounts, but for the file that was replaced.
        let before = mount_table::below(&w.dir()).unwrap();
        assert_eq!(before.len(), 3);
        w.mounts(&pod).unwrap();
        assert_eq!(mount_table::below(&w.dir()).unwrap(), before);
        w.map("m", &[("conf", "two")]);
        w.setup(&pod).unwrap();
        assert_eq!(read(at("/etc/conf")), "one");
        w.mounts(&pod).unwrap();
        assert_eq!(read(at("/etc/conf")), "two");
        assert_eq!(mount_table::below(&w.dir()).unwrap().len(), 3);
        w.teardown();
    });
}

#[test]
fn the_kubelets_own_files() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let w = world(&dir);
        let (v, uid) = (&w.volumes, &w.uid);
        let hosts = v.hosts_file(uid, "127.0.0.1 localhost and a long tail\n").unwrap();
        let inode = fs::metadata(&hosts).unwrap().ino();
        assert_eq!(v.hosts_file(uid, "::1 x\n").unwrap(), hosts);
        assert_eq!((read(&hosts), fs::metadata(&hosts).unwrap().ino(), mode(&hosts)), ("::1 x\n".into(), inode, 0o644));

        assert_eq!(v.termination_message(uid, "c", 0).unwrap(), "");
        let first = v.termination_log(uid, "c", 0).unwrap();
        assert_eq!((mode(&first), read(&first)), (0o666, String::new()));
        fs::write(&first, "the end").unwrap();
        assert_eq!(v.termination_message(uid, "c", 0).unwrap(), "the end");
        fs::write(&first, vec![b'x'; 10_000]).unwrap();
        assert_eq!(v.termination_message(uid, "c", 0).unwrap().len(), 4096);
        fs::write(&first, b"\xff\xfe").unwrap();
        assert_eq!(v.termination_message(uid, "c", 0).unwrap(), "\u{fffd}\u{fffd}");
        let second = v.termination_log(uid, "c", 1).unwrap();
        assert!(first.exists() && second.exists());
        v.termination_log(uid, "c", 2).unwrap();
        assert!(!first.exists() && second.exists());
        // A crash before the container was made: made afresh.
        fs::write(&second, "stale").unwrap();
        assert_eq!(read(v.termination_log(uid, "c", 1).unwrap()), "");
        assert_eq!(container(&pod("", "")).name, "c");
        w.setup(&pod("", "")).unwrap();
        w.teardown();
    });
}
