//! What well-formed layers become: owners, modes, times, whiteouts in overlay form, implied parents.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::kit::*;

/// The image as overlay shows it, unmounted with the value.
struct Merged(tempfile::TempDir);

impl Merged {
    fn of(image: &coracle::images::Image) -> Merged {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        let at = dir.path().join("merged");
        fs::create_dir(&empty).unwrap();
        fs::create_dir(&at).unwrap();
        let mut lower: Vec<String> = image.layers.iter().map(|l| l.to_str().unwrap().to_owned()).collect();
        lower.push(empty.to_str().unwrap().to_owned());
        let options = format!("lowerdir={}", lower.join(":"));
        mount(Some("overlay"), &at, Some("overlay"), MsFlags::MS_RDONLY, Some(options.as_str())).unwrap();
        Merged(dir)
    }
    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("merged")
    }
    fn list(&self) -> Vec<String> {
        let mut found = Vec::new();
        fn walk(root: &Path, here: &Path, into: &mut Vec<String>) {
            for entry in fs::read_dir(here).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                match fs::symlink_metadata(&path) {
                    Ok(meta) if meta.is_dir() => {
                        into.push(format!("{name}/"));
                        walk(root, &path, into);
                    }
                    Ok(_) => into.push(name),
                    // A whiteout that shows.
                    Err(e) => into.push(format!("{name} !{}", e.raw_os_error().unwrap())),
                }
            }
        }
        walk(&self.path(), &self.path(), &mut found);
        found.sort();
        found
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        umount2(&self.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn owners_modes_times_links_and_devices() {
    let world = world();
    let capability = [1u8, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let image = world
        .import(&layers(&[vec![
            dir("d").mode(0o1777).owner(7, 8),
            file("d/f", "text").mode(0o4755).owner(1000, 1001).pax("mtime", "1234.5"),
            hard("d/h", "d/f"),
            hard("d/again", "/d/h"),
            hard("d/f", "d/f"),
            link("d/l", "/nowhere").owner(5, 6),
            E { device: (1, 3), ..e("null", b'3') }.mode(0o666),
            E { device: (7, 0), ..e("loop", b'4') }.mode(0o660),
            e("pipe", b'6').mode(0o600),
            file("cap", "x").pax("SCHILY.xattr.security.capability", capability).pax("SCHILY.xattr.user.a", "b\nc=d").mode(0o755),
            file("selinux", "x").pax("SCHILY.xattr.security.selinux", "system_u:object_r:x:s0\0"),
            file(b"\xff\xfe", "not text"),
            file("x".repeat(255), "long"),
            file(format!("{}/f", vec!["p"; 200].join("/")), "deep"),
            file("old", "1"),
            file("old", "22"),
            dir("became/x"),
            file("became", "file"),
            link("l2d", "d"),
            dir("l2d").mode(0o700),
            file("l2d/inside", "x"),
        ]]))
        .unwrap();
    let root = &image.layers[0];
    let meta = |name: &str| fs::symlink_metadata(root.join(name)).unwrap();
    let d = meta("d");
    assert_eq!((d.mode() & 0o7777, d.uid(), d.gid(), d.mtime()), (0o1777, 7, 8, 1_000_000_000));
    let f = meta("d/f");
    assert_eq!((f.mode() & 0o7777, f.uid(), f.gid(), f.mtime(), f.mtime_nsec()), (0o4755, 1000, 1001, 1234, 500_000_000));
    assert_eq!((f.ino(), f.nlink()), (meta("d/again").ino(), 3));
    let l = meta("d/l");
    assert_eq!(
        (l.uid(), l.gid(), l.mtime(), fs::read_link(root.join("d/l")).unwrap().to_str().unwrap()),
        (5, 6, 1_000_000_000, "/nowhere")
    );
    assert!(
        meta("null").file_type().is_char_device()
            && meta("null").rdev() == nix::libc::makedev(1, 3)
            && meta("null").mode() & 0o777 == 0o666
    );
    assert!(meta("loop").file_type().is_block_device() && meta("pipe").file_type().is_fifo());
    assert_eq!(xattr(&root.join("cap"), "security.capability").unwrap().len(), 20);
    assert_eq!(xattr(&root.join("cap"), "user.a").unwrap(), b"b\nc=d");
    assert_eq!(xattr(&root.join("selinux"), "security.selinux"), None);
    assert_eq!(fs::read(root.join("old")).unwrap(), b"22");
    assert!(meta("became").is_file());
    assert!(meta("l2d").is_dir() && !root.join("d/inside").exists());
    assert!(root.join("x".repeat(255)).exists());
    assert_eq!(fs::read(root.join(format!("{}/f", vec!["p"; 200].join("/")))).unwrap(), b"deep");
    world.assert_clean();
}

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut buffer = [0; 256];
    let name = std::ffi::CString::new(name).unwrap();
    coracle::sys::xattr::read(fs::File::open(path).unwrap(), &name, &mut buffer).unwrap().map(<[u8]>::to_vec)
}

#[test]
fn packings_and_empty_layers() {
    let world = world();
    let (a, b, c) = (tar(&[file("a", "1")]), tar(&[file("b", "2")]), tar(&[file("c", "3")]));
    let empty = tar(&[]);
    let made = image(&[(&a, "gzip"), (&empty, "gzip"), (&b, "zstd"), (&empty, "gzip"), (&c, "tar"), (&[], "tar")]);
    let image = world.import(&made).unwrap();
    assert_eq!(image.layers.len(), 6);
    assert_eq!(Merged::of(&image).list(), ["a", "b", "c"]);
    let none = world.import(&super::kit::image(&[])).unwrap();
    assert!(none.layers.is_empty());
    world.assert_clean();
}

#[test]
fn whiteouts_hide_and_only_what_is_below() {
    let world = world();
    let image = world
        .import(&layers(&[
            vec![
                dir("a"),
                file("a/one", ""),
                file("a/two", ""),
                dir("o"),
                file("o/below", ""),
                dir("o/sub"),
                file("o/sub/x", ""),
                file("gone", ""),
                dir("dir"),
                file("dir/below", ""),
                file("kept", "below"),
                file(".wh.base", ""),
            ],
            vec![
                file("a/.wh.one", ""),
                file("a/.wh.never", ""),
                file("new/.wh.never", ""),
                dir("o"),
                file("o/.wh..wh..opq", ""),
                file("o/.wh.below", ""),
                file("o/above", ""),
                file("o/sub/.wh.x", ""),
                file(".wh.gone", ""),
                // Both orders of hiding and bringing again.
                file(".wh.dir", ""),
                dir("dir"),
                file("dir/above", ""),
                file("kept", "above"),
                file(".wh.kept", ""),
                file(".wh..wh.plnk/1.2", ""),
                file(".wh..wh.aufs", ""),
            ],
            vec![dir("dir"), file("dir/top", ""), file(".wh.kept", "")],
        ]))
        .unwrap();
    let want = ["a/", "a/two", "dir/", "dir/above", "dir/top", "new/", "o/", "o/above", "o/sub/"];
    assert_eq!(Merged::of(&image).list(), want);
    // Nothing of it shows as a broken entry in the layer itself where it merges with nothing.
    assert!(!image.layers[1].join("new/.wh.never").exists() && fs::symlink_metadata(image.layers[1].join("new/never")).is_err());
}

#[test]
fn an_opaque_root_hides_all() {
    let world = world();
    let image = world
        .import(&layers(&[
            vec![dir("a"), file("a/x", ""), file("b", ""), dir("c"), file("c/x", "")],
            vec![file("more", "")],
            vec![file(".wh..wh..opq", ""), dir("c"), file("c/new", ""), file("d", "")],
        ]))
        .unwrap();
    assert_eq!(Merged::of(&image).list(), ["c/", "c/new", "d"]);
}

#[test]
fn implied_parents_are_like_the_ones_below() {
    let world = world();
    let image = world
        .import(&layers(&[
            vec![
                dir("home").mode(0o711).owner(3, 4),
                dir("home/u").mode(0o700).owner(1000, 1000),
                dir("usr"),
                dir("usr/lib").mode(0o751),
                link("lib", "usr/lib"),
                link("loop", "loop"),
            ],
            vec![file("home/u/f", "").owner(1000, 1000), file("lib/x", "moved"), file("only/here/f", ""), file("loop/f", "")],
            vec![file("home/u/g", ""), file("lib/y", "moved too")],
        ]))
        .unwrap();
    let merged = Merged::of(&image);
    let meta = |name: &str| fs::symlink_metadata(merged.path().join(name)).unwrap();
    assert_eq!((meta("home").mode() & 0o777, meta("home").uid(), meta("home").gid()), (0o711, 3, 4));
    assert_eq!((meta("home/u").mode() & 0o777, meta("home/u").uid(), meta("home/u").mtime()), (0o700, 1000, 1_000_000_000));
    assert!(meta("lib").file_type().is_symlink());
    assert_eq!(meta("usr/lib").mode() & 0o777, 0o751);
    assert_eq!(fs::read_to_string(merged.path().join("usr/lib/x")).unwrap(), "moved");
    assert_eq!(fs::read_to_string(merged.path().join("lib/y")).unwrap(), "moved too");
    assert_eq!(meta("only/here").mode() & 0o777, 0o755);
}
