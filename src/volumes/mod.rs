//! Volumes: contents to files and mounts. They emit mounts as plain data; the runtime consumes them.
//!
//! ```text
//! <kubelet>/pods/<uid>/volumes/kubernetes.io~{empty-dir,configmap,secret}/NAME
//!                     /volume-subpaths/NAME/CONTAINER/INDEX     (binds)
//!                     /containers/CONTAINER/ATTEMPT             (termination messages)
//!                     /etc-hosts
//! ```
//!
//! Invariant: every mount and the pod's directory stand in the effects journal before they are
//! made; a volume directory of a pod is only entered by descriptor; teardown unmounts first and
//! removes only what is left on the directory's own mount.

use std::ffi::CString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::api::pod::{Container, Pod, Volume};
use crate::api::time::WallTime;
use crate::store::effects::{Effect, Effects};
use crate::store::ids::PodUid;
use crate::sys::{clock, dir, failpoint, file, mount_table};

mod host_path;
pub mod model;
mod mounts;
mod plan;
mod remove;
mod share;
mod sub_path;
mod writer;

use model::{Contents, MountPlan, VolumeError};

/// The front door; cheap to clone. Calls for one pod must not overlap; pods are independent.
#[derive(Clone)]
pub struct Volumes {
    /// `<kubelet>/pods`, without links: the kernel's table of mounts names paths so.
    pods: PathBuf,
    effects: Arc<Effects>,
}

impl Volumes {
    pub fn open(kubelet: &Path, effects: Arc<Effects>) -> Result<Volumes, VolumeError> {
        let pods = kubelet.join("pods");
        DirBuilder::new().recursive(true).mode(0o750).create(&pods).map_err(VolumeError::system("make", &pods))?;
        let kubelet = fs::canonicalize(kubelet).map_err(VolumeError::system("resolve", kubelet))?;
        Ok(Volumes { pods: kubelet.join("pods"), effects })
    }

    /// Makes the directory that volumes lie in a shared mount where it is not. For the agent, once.
    pub fn share(&self) -> Result<(), VolumeError> {
        match self.pods.parent() {
            Some(kubelet) => share::share(kubelet, &self.effects),
            // `pods` was joined to something.
            None => Ok(()),
        }
    }

    /// Makes every volume of the pod, or brings it up to date: a second call on an unchanged
    /// world writes nothing. Also what refreshes ConfigMaps and Secrets in running pods: where
    /// their object is gone the files stay as they are, and the error says so.
    pub fn setup(&self, uid: &PodUid, pod: &Pod, contents: &dyn Contents) -> Result<(), VolumeError> {
        let top = self.dir(uid);
        let effect = Effect::Dir { path: top.clone() };
        self.effects.intent(&effect)?;
        make_dir(&top)?;
        failpoint::hit("volumes.setup.dir").map_err(VolumeError::system("make", &top))?;
        self.effects.done(&effect)?;
        make_dir(&top.join("volumes"))?;
        let mut first = Ok(());
        for volume in &pod.spec.volumes {
            let made = self.volume(&top, volume, pod, contents).map_err(|e| e.in_volume(&volume.name));
            first = first.and(made);
        }
        first
    }

    fn volume(&self, top: &Path, volume: &Volume, pod: &Pod, contents: &dyn Contents) -> Result<(), VolumeError> {
        let failed = |why: String| VolumeError::SetUp { volume: volume.name.clone(), why };
        if let Some(host) = &volume.host_path {
            return host_path::check(Path::new(&host.path), host.kind.as_deref().unwrap_or_default()).map_err(failed);
        }
        let path = volume_dir(top, volume);
        let namespace = pod.metadata.namespace.as_str();
        let group = pod.spec.security_context.as_ref().and_then(|c| c.fs_group).and_then(|g| u32::try_from(g).ok());
        let (wish, data) = if let Some(map) = &volume.config_map {
            let wish = plan::Wish {
                kind: "configmap",
                name: &map.name,
                items: &map.items,
                default_mode: map.default_mode,
                optional: map.optional == Some(true),
            };
            (wish, contents.config_map(namespace, &map.name))
        } else if let Some(secret) = &volume.secret {
            let wish = plan::Wish {
                kind: "secret",
                name: &secret.secret_name,
                items: &secret.items,
                default_mode: secret.default_mode,
                optional: secret.optional == Some(true),
            };
            (wish, contents.secret(namespace, &secret.secret_name))
        } else {
            let empty = volume.empty_dir.clone().unwrap_or_default();
            let room = if empty.medium == "Memory" { Room::Memory(plan::memory_size(&empty, pod)) } else { Room::Disk };
            return self.made(&path, room, group);
        };
        let files = plan::files(&wish, data).map_err(failed)?;
        // Two generations of the largest object fit, and are gone with the pod.
        const SECRET_SIZE: u64 = 8 << 20;
        self.made(&path, if volume.secret.is_some() { Room::Memory(Some(SECRET_SIZE)) } else { Room::Disk }, group)?;
        let opened = dir::open_root(&path).map_err(VolumeError::system("open", &path))?;
        let name = generation(WallTime(clock::wall_nanos()));
        writer::write(opened.as_fd(), &files, group, &name).map_err(VolumeError::system("write", &path))?;
        Ok(())
    }

    /// The volume's directory, a tmpfs on it where it is to be one. Once there it is the pod's to
    /// change: nothing is set back.
    fn made(&self, path: &Path, room: Room, group: Option<u32>) -> Result<(), VolumeError> {
        let absent = fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if absent {
            whole_dir(path, group)?;
        }
        let Room::Memory(size) = room else { return Ok(()) };
        if mount_table::below(path).map_err(VolumeError::system("look up", path))?.iter().any(|m| m == path) {
            return Ok(());
        }
        let effect = Effect::Mount { target: path.to_owned() };
        self.effects.intent(&effect)?;
        let mode = group.map_or("mode=1777".to_owned(), |gid| format!("mode=3777,gid={gid}"));
        let size = size.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        let tmpfs = |options: &str| mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options));
        // Never on a swap device where the kernel knows how (6.4).
        match tmpfs(&format!("{mode}{size},noswap")) {
            Err(Errno::EINVAL) => tmpfs(&format!("{mode}{size}")),
            other => other,
        }
        .map_err(|e| VolumeError::system("mount a tmpfs on", path)(e.into()))?;
        failpoint::hit("volumes.setup.tmpfs").map_err(VolumeError::system("mount a tmpfs on", path))?;
        Ok(self.effects.done(&effect)?)
    }

    /// The mounts of one container, subPaths prepared; `setup` must have succeeded. Call it again
    /// for each start of the container.
    pub fn mounts(&self, uid: &PodUid, pod: &Pod, container: &Container) -> Result<Vec<MountPlan>, VolumeError> {
        mounts::of_container(self, &self.dir(uid), pod, container)
    }

    /// Writes the pod's /etc/hosts in place (same inode, since containers have it bound).
    pub fn hosts_file(&self, uid: &PodUid, text: &str) -> Result<PathBuf, VolumeError> {
        let top = self.dir(uid);
        make_dir(&top)?;
        let path = top.join("etc-hosts");
        let write = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o644);
            let mut file = options.custom_flags(libc::O_NOFOLLOW).open(&path)?;
            let mut old = Vec::new();
            (&file).take(text.len() as u64 + 1).read_to_end(&mut old)?;
            if old == text.as_bytes() {
                return Ok(());
            }
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(text.as_bytes())?;
            file.set_permissions(fs::Permissions::from_mode(0o644))
        };
        write().map_err(VolumeError::system("write", &path))?;
        Ok(path)
    }

    /// A fresh, empty file (0666) for the termination message of one attempt of a container; those
    /// of attempts before the last one go.
    pub fn termination_log(&self, uid: &PodUid, container: &str, attempt: u32) -> Result<PathBuf, VolumeError> {
        let top = self.dir(uid);
        let dir = top.join("containers").join(container);
        make_dir(&dir)?;
        for entry in fs::read_dir(&dir).map_err(VolumeError::system("read", &dir))?.flatten() {
            let old = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n + 1 < attempt);
            if old {
                absent_is_fine(fs::remove_file(entry.path())).map_err(VolumeError::system("remove", entry.path()))?;
            }
        }
        let path = dir.join(attempt.to_string());
        let make = || -> io::Result<()> {
            absent_is_fine(fs::remove_file(&path))?;
            let file = OpenOptions::new().write(true).create_new(true).mode(0o666).open(&path)?;
            file.set_permissions(fs::Permissions::from_mode(0o666))
        };
        make().map_err(VolumeError::system("make", &path))?;
        Ok(path)
    }

    /// The last 4096 bytes of what the container wrote there; empty where nothing was.
    pub fn termination_message(&self, uid: &PodUid, container: &str, attempt: u32) -> Result<String, VolumeError> {
        const MOST: u64 = 4096;
        let path = self.dir(uid).join("containers").join(container).join(attempt.to_string());
        let read = || -> io::Result<Vec<u8>> {
            let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path)?;
            let meta = file.metadata()?;
            let mut text = Vec::new();
            if meta.is_file() {
                file.seek(SeekFrom::Start(meta.len().saturating_sub(MOST)))?;
                file.take(MOST).read_to_end(&mut text)?;
            }
            Ok(text)
        };
        match read() {
            Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(e) => Err(VolumeError::system("read", path)(e)),
        }
    }

    /// Takes everything away: mounts first, then files, following no link and crossing no mount.
    /// Idempotent, at any point of an earlier teardown or setup.
    pub fn teardown(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let top = self.dir(uid);
        self.unmount_below(&top)?;
        // A checked uid holds no NUL.
        let name = CString::new(uid.as_str()).map_err(|e| VolumeError::system("remove", &top)(e.into()))?;
        let remove = || remove::tree(file::open_dir_path(&self.pods)?.as_fd(), &name);
        absent_is_fine(remove()).map_err(VolumeError::system("remove", &top))?;
        failpoint::hit("volumes.teardown.remove").map_err(VolumeError::system("remove", &top))?;
        for standing in self.effects.standing()? {
            let ours = match &standing.effect {
                Effect::Mount { target: path } | Effect::Dir { path } | Effect::File { path } => path.starts_with(&top),
                _ => false,
            };
            if ours {
                self.effects.undone(&standing.effect)?;
            }
        }
        Ok(())
    }

    /// Until the kernel knows of no mount at or below `top` any more, the pod's own included: one
    /// with Bidirectional propagation mounts into our directories.
    fn unmount_below(&self, top: &Path) -> Result<(), VolumeError> {
        const ROUNDS: usize = 64;
        for _ in 0..ROUNDS {
            let mounts = mount_table::below(top).map_err(VolumeError::system("look up", top))?;
            if mounts.is_empty() {
                return Ok(());
            }
            for target in mounts.iter().rev() {
                match umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                    // Gone together with another one.
                    Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
                    Err(e) => return Err(VolumeError::system("unmount", target)(e.into())),
                }
                failpoint::hit("volumes.teardown.unmount").map_err(VolumeError::system("unmount", target))?;
            }
        }
        let busy = io::Error::other("something is mounted there again and again");
        Err(VolumeError::system("unmount", top)(busy))
    }

    /// `<kubelet>/pods/<uid>`.
    fn dir(&self, uid: &PodUid) -> PathBuf {
        self.pods.join(uid.as_str())
    }
}

/// `volumes/kubernetes.io~TYPE/NAME`.
fn volume_dir(top: &Path, volume: &Volume) -> PathBuf {
    top.join("volumes").join(plan::plugin(volume)).join(&volume.name)
}

/// `..2026_11_30_10_23_01.123456789`
fn generation(now: WallTime) -> String {
    let text = now.nanos();
    format!("..{}", text.trim_end_matches('Z').replace(['-', 'T', ':'], "_"))
}

/// Where a volume's files lie.
enum Room {
    Disk,
    /// Bytes; None: the kernel's default.
    Memory(Option<u64>),
}

/// A directory of ours, with its parents up to the pod's.
fn make_dir(path: &Path) -> Result<(), VolumeError> {
    DirBuilder::new().recursive(true).mode(0o750).create(path).map_err(VolumeError::system("make", path))
}

/// A volume's directory appears with its mode and group or not at all, so that one that is there
/// is never touched again: the pod may have changed it. fsGroup's root hands the group on.
fn whole_dir(path: &Path, group: Option<u32>) -> Result<(), VolumeError> {
    let (Some(plugin), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    make_dir(plugin)?;
    // No volume's name begins with a dot.
    let mut new = std::ffi::OsString::from(".");
    new.push(name);
    let new = plugin.join(new);
    let make = || -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&new) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let opened = dir::open_root(&new)?;
        if let Some(group) = group {
            dir::chown_of(&opened, 0, group)?;
        }
        dir::chmod_of(&opened, if group.is_some() { 0o2777 } else { 0o777 })?;
        failpoint::hit("volumes.setup.volume")?;
        fs::rename(&new, path)
    };
    make().map_err(VolumeError::system("make", path))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The path of an open descriptor that mount(2) follows to exactly what is open.
fn by_fd(fd: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}
