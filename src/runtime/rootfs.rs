//! A container's root file system: an overlay of the image's layers below a directory of its own.
//!
//! Invariant: /dev, /proc, /sys and /etc of every rootfs are real directories, whatever the image
//! says: a layer of ours that has them lies on top of the image's, and a check without following
//! links comes before anything is mounted there. (An image whose /dev is a link to a directory of
//! the host would have host files replaced otherwise.)
//!
//! Sources: Documentation/filesystems/overlayfs.rst; openat2(2).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};

use nix::fcntl::OFlag;

use super::RuntimeError;
use super::model::Rootfs;
use crate::sys::{file, mount};

const REAL: [&str; 4] = ["dev", "proc", "sys", "etc"];

/// The layer of ours: on a mount of its own, since layers cannot lie on an unbindable one.
pub fn make_skeleton(at: &Path) -> io::Result<()> {
    fs::create_dir_all(at)?;
    if !mount::is_mount_point(at)? {
        mount::tmpfs("coracle-skeleton", at, "mode=0755,size=64k")?;
    }
    for name in REAL {
        fs::create_dir_all(at.join(name))?;
        fs::set_permissions(at.join(name), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Mounts it, if it is not mounted.
pub fn mount_overlay(skeleton: &Path, rootfs: &Rootfs, target: &Path) -> Result<(), RuntimeError> {
    if let (true, Some(directory)) = (rootfs.upper.as_os_str().is_empty(), rootfs.lower.first()) {
        return mount::bind(directory, target).map_err(RuntimeError::io("bind a root file system on", target));
    }
    // Also where it is there already, with whatever mode.
    let private = |path: &Path| {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o700))
    };
    if let Some(parent) = rootfs.upper.parent() {
        // Files of containers may be setuid: nobody else gets to them.
        private(parent).map_err(RuntimeError::io("create", parent))?;
    }
    fs::create_dir_all(&rootfs.upper).map_err(RuntimeError::io("create", &rootfs.upper))?;
    private(&rootfs.work).map_err(RuntimeError::io("create", &rootfs.work))?;
    if let Some(top) = rootfs.lower.first() {
        copy_owner(top, &rootfs.upper).map_err(RuntimeError::io("set the owner of", &rootfs.upper))?;
    }
    let mut lower: Vec<&Path> = vec![skeleton];
    lower.extend(rootfs.lower.iter().map(PathBuf::as_path));
    mount::overlay(&lower, &rootfs.upper, &rootfs.work, target).map_err(RuntimeError::io("mount an overlay on", target))
}

/// The root directory's mode and owner are those of the upper one: the image's are wanted.
fn copy_owner(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::metadata(from)?;
    chown(to, Some(meta.uid()), Some(meta.gid()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(meta.mode() & 0o7777))
}

/// What is mounted on must be directories themselves.
pub fn check(target: &Path) -> Result<(), RuntimeError> {
    let root = file::open_dir_path(target).map_err(RuntimeError::io("open", target))?;
    for name in REAL {
        let opened = file::openat2(
            root.as_fd(),
            Path::new(name),
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW,
            0,
            file::Resolve::BeneathNoSymlinks,
        );
        let opened = match opened {
            // Made when it is mounted on, beneath the root.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other,
        };
        opened.map_err(|source| RuntimeError::RootfsUnsafe { path: Path::new("/").join(name), source })?;
    }
    Ok(())
}

/// Where the image's volume `path` lies in a mounted root file system, made where it is missing: to be
/// bound on `path`, so that it can be written to however the root is mounted.
///
/// The overlay is what makes it the container's own: contents are the image's until they are
/// written to, go with the container, and nothing is copied beforehand. (containerd copies all of it
/// into a directory of its own: internal/cri/opts/container.go, WithVolumes.)
pub fn volume(target: &Path, path: &Path) -> Result<PathBuf, RuntimeError> {
    make_directory(target, path)?;
    let wrap = |source| RuntimeError::Io { op: "open the image's volume in", path: target.join(path), source };
    let inside = path.strip_prefix("/").unwrap_or(path);
    let root = file::open_dir_path(target).map_err(wrap)?;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let dir = file::openat2(root.as_fd(), inside, flags, 0, file::Resolve::InRoot).map_err(wrap)?;
    // Without links now; nothing runs in it yet that could put one there.
    let real = fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd())).map_err(wrap)?;
    if real.starts_with(target) && real != target { Ok(real) } else { Err(wrap(io::ErrorKind::InvalidInput.into())) }
}

/// Makes the working directory, as runc does, with links resolved inside the rootfs.
pub fn make_directory(target: &Path, path: &Path) -> Result<(), RuntimeError> {
    let wrap = |source| RuntimeError::Io { op: "create the working directory in", path: target.join(path), source };
    let open =
        |dir: &OwnedFd, at: &Path, resolve| file::openat2(dir.as_fd(), at, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0, resolve);
    let root = file::open_dir_path(target).map_err(wrap)?;
    let mut so_far = PathBuf::new();
    for part in path.components() {
        let Component::Normal(name) = part else {
            if part == Component::RootDir {
                continue;
            }
            return Err(wrap(io::ErrorKind::InvalidInput.into()));
        };
        let parent = open(&root, if so_far.as_os_str().is_empty() { Path::new(".") } else { &so_far }, file::Resolve::InRoot);
        let parent = parent.map_err(wrap)?;
        so_far.push(name);
        match open(&root, &so_far, file::Resolve::InRoot) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                file::make_dir_at(parent.as_fd(), Path::new(name), 0o755).map_err(wrap)?
            }
            Err(e) => return Err(wrap(e)),
        }
    }
    Ok(())
}
