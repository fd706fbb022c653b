//! volumeMounts of one container to [`MountPlan`]s; subPaths and shared propagation are prepared.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use super::*;
use crate::api::pod::{MountPropagation, VolumeMount};
use crate::volumes::model::Propagation;

/// Shallow destinations first, so that none hides another.
pub(super) fn of_container(
    volumes: &Volumes,
    top: &Path,
    pod: &Pod,
    container: &Container,
) -> Result<Vec<MountPlan>, VolumeError> {
    let mut plans = Vec::new();
    for (index, wanted) in container.volume_mounts.iter().enumerate() {
        let refused = |why: String| VolumeError::Mount { volume: wanted.name.clone(), container: container.name.clone(), why };
        let volume = pod.spec.volumes.iter().find(|v| v.name == wanted.name);
        let volume = volume.ok_or_else(|| refused("no volume of the pod has this name".to_owned()))?;
        let root = match &volume.host_path {
            Some(host) => PathBuf::from(&host.path),
            None => volume_dir(top, volume),
        };
        let propagation = match wanted.mount_propagation.unwrap_or_default() {
            MountPropagation::None => Propagation::Private,
            MountPropagation::HostToContainer => Propagation::HostToContainer,
            MountPropagation::Bidirectional => Propagation::Bidirectional,
        };
        if propagation != Propagation::Private {
            peers(&root, propagation)?.map_err(refused)?;
        }
        let source = if wanted.sub_path.is_empty() {
            root
        } else {
            let target = top.join("volume-subpaths").join(&volume.name).join(&container.name).join(index.to_string());
            volumes.sub_path(&root, wanted, container, &target)?
        };
        // The kubelet's own files may be read, never written, whatever the pod says.
        let read_only = wanted.read_only || volume.config_map.is_some() || volume.secret.is_some();
        plans.push(MountPlan { source, destination: clean(&wanted.mount_path), read_only, propagation });
    }
    plans.sort_by_key(|plan| plan.destination.components().count());
    Ok(plans)
}

/// Without `.`, doubled and trailing slashes; `..` was refused by validation.
fn clean(path: &str) -> PathBuf {
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    PathBuf::from(format!("/{}", parts.join("/")))
}

/// A mount that is to propagate needs peers; systemd shares `/` at boot. The inner error is the
/// container runtime's word.
fn peers(root: &Path, propagation: Propagation) -> Result<Result<(), String>, VolumeError> {
    let path = fs::canonicalize(root).map_err(VolumeError::system("resolve", root))?;
    let Some(at) = mount_table::of(&path).map_err(VolumeError::system("look up", &path))? else { return Ok(Ok(())) };
    if at.shared || (at.slave && propagation == Propagation::HostToContainer) {
        return Ok(Ok(()));
    }
    let kind = if propagation == Propagation::Bidirectional { "shared" } else { "shared or slave" };
    let (path, target) = (path.display(), at.target.display());
    Ok(Err(format!("path \"{path}\" is mounted on \"{target}\" but it is not a {kind} mount: run mount --make-rshared {target}")))
}

impl Volumes {
    /// Binds what the subPath names to a place of ours, by descriptor.
    fn sub_path(&self, root: &Path, wanted: &VolumeMount, container: &Container, target: &Path) -> Result<PathBuf, VolumeError> {
        let failed = |e: &io::Error| VolumeError::SubPath {
            volume: wanted.name.clone(),
            container: container.name.clone(),
            sub_path: wanted.sub_path.clone(),
            why: sub_path::explain(e),
        };
        let opened =
            open_path(root).and_then(|volume| sub_path::open(volume.as_fd(), &wanted.sub_path)).map_err(|e| failed(&e))?;
        let opened = fs::File::from(opened);
        let found = opened.metadata().map_err(|e| failed(&e))?;
        match fs::symlink_metadata(target) {
            // Still bound to the same file, from an earlier start of the container.
            Ok(meta) if (meta.dev(), meta.ino()) == (found.dev(), found.ino()) => return Ok(target.to_owned()),
            Ok(_) => self.unmount_below(target)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(VolumeError::system("look up", target)(e)),
        }
        prepare(target, found.is_dir()).map_err(VolumeError::system("make", target))?;
        let effect = Effect::Mount { target: target.to_owned() };
        self.effects.intent(&effect)?;
        mount(Some(&by_fd(&opened)), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|e| VolumeError::system("bind to", target)(e.into()))?;
        failpoint::hit("volumes.mounts.bind").map_err(VolumeError::system("bind to", target))?;
        self.effects.done(&effect)?;
        Ok(target.to_owned())
    }
}

/// A volume's root by O_PATH: for a hostPath the operator's links are followed; our own
/// directories have none.
fn open_path(root: &Path) -> io::Result<OwnedFd> {
    let root = fs::canonicalize(root)?;
    let slash = file::open_dir_path(Path::new("/"))?;
    let inside = root.strip_prefix("/").map_err(io::Error::other)?;
    let inside = if inside.as_os_str().as_bytes().is_empty() { Path::new(".") } else { inside };
    file::openat2(slash.as_fd(), inside, OFlag::O_PATH, 0, file::Resolve::NoSymlinks)
}

/// An empty directory or file to bind over; one of the other kind makes room.
fn prepare(target: &Path, is_dir: bool) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(parent)?;
    }
    match fs::symlink_metadata(target) {
        Ok(meta) if meta.is_dir() == is_dir => return Ok(()),
        Ok(meta) if meta.is_dir() => fs::remove_dir(target)?,
        Ok(_) => fs::remove_file(target)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    if is_dir {
        DirBuilder::new().mode(0o750).create(target)
    } else {
        OpenOptions::new().write(true).create_new(true).mode(0o640).open(target).map(drop)
    }
}
