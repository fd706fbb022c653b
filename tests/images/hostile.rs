//! Malicious layers, T1 to T6: each is refused or stays inside, and the canary does not change.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::kit::*;

/// Imports each layer stack in a store of its own; none may touch the canary, and whatever was
/// refused leaves nothing.
fn each(canary: &Canary, what: &str, stack: &[Vec<E>]) -> Result<coracle::images::Image, String> {
    let world = world();
    let result = world.import(&layers(stack));
    canary.assert_untouched(what);
    world.assert_clean();
    if result.is_err() {
        for part in ["layers", "blobs/sha256"] {
            assert_eq!(world.count(part), 0, "{what}: {part} is not empty");
        }
    }
    // What was accepted is looked at while the store is there.
    result.inspect(|image| {
        for layer in &image.layers {
            assert!(layer.starts_with(world.dir.path()));
            fingerprint(layer);
        }
    })
}

#[test]
fn t1_names_that_lead_out() {
    let canary = canary();
    let up = "../".repeat(30);
    let path = canary.path();
    for name in [
        format!("../{}", &path[1..]),
        format!("{up}{}/file", &path[1..]),
        format!("a/../../{}/file", &path[1..]),
        format!("/{up}{}/file", &path[1..]),
        "..".into(),
        "a/..".into(),
        "../".into(),
    ] {
        assert!(each(&canary, &name, &[vec![file(&name, "owned")]]).is_err(), "{name}");
        assert!(each(&canary, &name, &[vec![dir(&name)]]).is_err(), "{name}");
        assert!(each(&canary, &name, &[vec![link(&name, "x")]]).is_err(), "{name}");
    }
    // Absolute names stay inside.
    each(&canary, "absolute", &[vec![file(format!("{path}/file"), "owned"), file(format!("//{path}/sub/deep"), "owned")]])
        .unwrap();
    for name in ["", ".", "./", "/"] {
        each(&canary, name, &[vec![dir(name).mode(0o700)]]).unwrap();
        assert!(each(&canary, name, &[vec![link(name, &path)]]).is_err(), "a root that is a link");
        assert!(each(&canary, name, &[vec![file(name, "x")]]).is_err(), "a root that is a file");
    }
    for (what, entry) in [
        ("4097 bytes", file("a/".repeat(2048) + "b", "")),
        ("a part of 256", file("a".repeat(256), "")),
        ("257 deep", file("a/".repeat(257) + "b", "")),
        ("a NUL", file("x", "").pax("path", "a\0b")),
        ("a long target", link("l", "t".repeat(4097))),
        ("a target of nothing", link("l", "")),
    ] {
        assert!(each(&canary, what, &[vec![entry]]).is_err(), "{what}");
    }
}

#[test]
fn t2_links_on_the_way() {
    let canary = canary();
    let path = canary.path();
    for target in [
        path.clone(),
        format!("{}{path}", "../".repeat(30)),
        format!("/proc/self/root{path}"),
        "/".into(),
        "..".into(),
        ".".into(),
    ] {
        let stacks: [&[Vec<E>]; 5] = [
            &[vec![link("evil", &target), file("evil/file", "owned"), file("evil/new", "owned"), dir("evil/sub").mode(0o777)]],
            &[vec![link("evil", &target)], vec![file("evil/file", "owned"), file("evil/new", "owned")]],
            &[vec![link("evil", &target)], vec![file("evil/.wh.file", ""), file("evil/sub/.wh..wh..opq", "")]],
            &[vec![
                dir("p"),
                link("p/evil", &target),
                link("q", "p/evil/sub"),
                file("q/deep", "owned"),
                file("p/evil/sub/x", "owned"),
            ]],
            &[vec![link("evil", &target), hard("h", "evil/file"), file("h", "owned")]],
        ];
        for stack in stacks {
            // Refused or inside: `each` looks at the canary.
            let _ = each(&canary, &target, stack);
        }
    }
    assert!(each(&canary, "a loop", &[vec![link("a", "b"), link("b", "a"), file("a/x", "")]]).is_err());
}

/// Another process swaps a directory for a link while the child works below it.
#[test]
fn t2_a_racing_swap() {
    let canary = canary();
    let dir = tempfile::tempdir().unwrap();
    let entries: Vec<E> = (0..400)
        .flat_map(|n| [super::kit::dir("d"), file(format!("d/{n}"), "owned"), hard(format!("d/h{n}"), format!("d/{n}"))])
        .collect();
    let layer = tar(&entries);
    let (stop, round) = (AtomicBool::new(false), AtomicUsize::new(0));
    let staging = |n: usize| dir.path().join(n.to_string());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let fs_dir = staging(round.load(Ordering::Relaxed)).join("fs");
                let (d, aside) = (fs_dir.join("d"), fs_dir.join("aside"));
                let _ = fs::rename(&d, &aside);
                let _ = std::os::unix::fs::symlink(canary.dir.path(), &d);
                let _ = fs::remove_file(&d);
                let _ = fs::rename(&aside, &d);
            }
        });
        let unpack = || {
            for n in 0..60 {
                fs::create_dir(staging(n))?;
                fs::create_dir(staging(n).join("fs"))?;
                round.store(n, Ordering::Relaxed);
                run_unpack(&staging(n), &layer);
            }
            std::io::Result::Ok(())
        };
        let done = unpack();
        stop.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    canary.assert_untouched("a racing swap");
}

/// The child by itself; its exit code does not matter here.
pub fn run_unpack(dir: &std::path::Path, layer: &[u8]) -> std::process::Output {
    use std::io::Write;
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_coracle"))
        .arg("unpack")
        .arg(dir)
        .args([
            "--entries",
            "100000",
            "--bytes",
            "1000000000",
            "--ratio",
            "100",
            "--ratio-floor",
            "1000000000",
            "--window",
            "8388608",
        ])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // A child that gave up closes its end.
    let _ = child.stdin.take().unwrap().write_all(layer);
    child.wait_with_output().unwrap()
}

#[test]
fn t3_hard_links() {
    let canary = canary();
    let path = canary.path();
    for target in [
        format!("{path}/file"),
        format!("../{}/file", &path[1..]),
        "/etc/shadow".into(),
        "missing".into(),
        "".into(),
        "d".into(),
        ".".into(),
        "..".into(),
    ] {
        assert!(each(&canary, &target, &[vec![dir("d"), hard("h", &target)]]).is_err(), "{target}");
    }
    assert!(each(&canary, "of a layer below", &[vec![file("f", "")], vec![hard("h", "f")]]).is_err());
    assert!(each(&canary, "to a whiteout", &[vec![file("f", "")], vec![file(".wh.f", ""), hard("h", "f")]]).is_err());
    let world = world();
    let image = world.import(&layers(&[vec![link("l", format!("{path}/file")), hard("h", "l"), file("h", "inside")]])).unwrap();
    assert!(fs::symlink_metadata(image.layers[0].join("h")).unwrap().is_file());
    canary.assert_untouched("a hard link to a link");
}

#[test]
fn t4_overlay_state_is_not_forged() {
    let canary = canary();
    let path = canary.path();
    for (what, entry) in [
        ("a literal whiteout", e("x", b'3')),
        ("an opaque mark", dir("d").pax("SCHILY.xattr.trusted.overlay.opaque", "y")),
        ("a redirect", dir("d").pax("SCHILY.xattr.trusted.overlay.redirect", "/etc")),
        ("a metacopy", file("f", "").pax("SCHILY.xattr.trusted.overlay.metacopy", "")),
        ("too many attributes", file("f", "").pax("SCHILY.xattr.user.big", "x".repeat(60_000))),
        ("a whiteout of nothing", file(".wh.", "")),
        ("a whiteout of .", file("d/.wh..", "")),
        ("a whiteout of ..", file("d/.wh...", "")),
        ("below a whiteout", file(".wh.x/y", "")),
    ] {
        assert!(each(&canary, what, &[vec![file("base", "")], vec![entry]]).is_err(), "{what}");
    }
    // A directory over a link: the link goes, what it led to stays as it was.
    let world = world();
    let stack =
        vec![link("l", &path), E { uid: 77, ..dir("l").mode(0o777) }.pax("SCHILY.xattr.user.x", "y"), file("l/file", "mine")];
    let image = world.import(&layers(&[stack])).unwrap();
    assert!(fs::symlink_metadata(image.layers[0].join("l")).unwrap().is_dir());
    canary.assert_untouched("a directory over a link");
    let user = each(&canary, "user.overlay", &[vec![dir("d").pax("SCHILY.xattr.user.overlay.opaque", "y")]]);
    user.unwrap();
    // The store itself lets nobody else in, so that set-user-ID files below it are out of reach.
    let mode = |p: &str| std::os::unix::fs::MetadataExt::mode(&fs::metadata(world.dir.path().join(p)).unwrap()) & 0o777;
    assert_eq!(mode("images"), 0o700);
    assert!(!fs::metadata(&image.layers[0]).unwrap().file_type().is_fifo());
}

#[test]
fn t6_bombs_stop_at_the_limits() {
    let small = |world: &World, tar: &[u8], packing: &str| world.import(&image(&[(tar, packing)]));
    let world = world_with(|c| {
        c.limits.layer_bytes = 64 << 20;
        c.limits.layer_entries = 1000;
        c.limits.ratio_floor = 16 << 20;
    });
    let zeros = tar(&[file("zeros", vec![0; 40 << 20])]);
    let error = small(&world, &zeros, "gzip").unwrap_err();
    assert!(error.contains("times its size"), "{error}");
    small(&world, &zeros, "tar").unwrap();
    let error = small(&world, &tar(&[file("big", noise(70 << 20, 1))]), "tar").unwrap_err();
    assert!(error.contains("more than 67108864 bytes"), "{error}");
    let many: Vec<E> = (0..1001).map(|n| e(n.to_string(), b'0')).collect();
    let error = small(&world, &tar(&many), "gzip").unwrap_err();
    assert!(error.contains("more than 1000 entries"), "{error}");
    small(&world, &tar(&many[..1000]), "gzip").unwrap();
    // A file that says it is larger than the archive; a terabyte of nothing.
    for size in [1 << 30, (1u64 << 33) - 1] {
        let lie = E { size: Some(size), ..file("lie", "short") };
        assert!(small(&world, &tar(&[lie]), "gzip").is_err());
    }
    assert!(small(&world, &tar(&[E { kind: b'S', ..file("sparse", "") }]), "gzip").is_err());
    assert!(small(&world, &tar(&[file("s", "").pax("GNU.sparse.realsize", "1099511627776")]), "gzip").is_err());
    // A zstd frame that asks for 2 GB of memory.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3];
    frame.extend([0; 100]);
    let mut bomb = image(&[(&frame, "tar")]);
    let error = world.import(&bomb).unwrap_err();
    assert!(error.contains("window"), "{error}");
    // Several gzip members, junk behind the last.
    let members = [gzip(&tar(&[file("x", "1")])), b"junk".to_vec()].concat();
    bomb = image(&[(&members, "tar")]);
    assert!(world.import(&bomb).is_err());
    world.assert_clean();
}
