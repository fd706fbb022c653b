//! The run root: a tmpfs of our own, gone with the boot that it is stamped with.
//!
//! Invariant: it is private and unbindable, so that a pod which binds `/` does not pin what lies
//! below (root file systems, namespaces) in its own mount namespace. One that is stamped with another
//! boot is thrown away only when no monitor that it names lives: the kernel is believed before the
//! stamp.

use std::fs;
use std::io;
use std::path::Path;

use super::RuntimeError;
use super::apply::{monitor_of, pods_of};
use super::layout::PodRun;
use crate::sys::{clock, mount};

const STAMP: &str = "boot_id";

/// Makes `run` such a mount; one of this boot that is there already is kept.
pub fn mount_run(run: &Path) -> Result<(), RuntimeError> {
    let boot = clock::boot_id().map_err(RuntimeError::io("read the boot id for", run))?;
    fs::create_dir_all(run).map_err(RuntimeError::io("create", run))?;
    if mount::is_mount_point(run).map_err(RuntimeError::io("look at", run))? {
        match fs::read(run.join(STAMP)) {
            Ok(stamp) if stamp == boot.as_bytes() => return Ok(()),
            // A tmpfs does not outlive a boot: somebody changed the stamp.
            Ok(_) if has_living(run)? => return stamp_run(run, &boot),
            // Cut off between mount and stamp: it is empty.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return stamp_run(run, &boot),
            Ok(_) => unmount_run(run)?,
            Err(e) => return Err(RuntimeError::io("read the stamp of", run)(e)),
        }
        fs::create_dir_all(run).map_err(RuntimeError::io("create", run))?;
    }
    mount::tmpfs("coracle", run, "mode=0700,size=64m").map_err(RuntimeError::io("mount a tmpfs on", run))?;
    stamp_run(run, &boot)
}

/// Whether a monitor that is named below it is a process of this boot.
fn has_living(run: &Path) -> Result<bool, RuntimeError> {
    for uid in pods_of(run)? {
        if monitor_of(&PodRun::of(run, &uid))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn stamp_run(run: &Path, boot: &str) -> Result<(), RuntimeError> {
    mount::make_private(run).and_then(|()| mount::make_unbindable(run)).map_err(RuntimeError::io("make unbindable", run))?;
    fs::write(run.join(STAMP), boot).map_err(RuntimeError::io("stamp", run))
}

/// Takes it away with all that is in it.
pub fn unmount_run(run: &Path) -> Result<(), RuntimeError> {
    while mount::detach(run).map_err(RuntimeError::io("unmount", run))? {}
    match fs::remove_dir(run) {
        // Something lies below the mount that is not ours.
        Err(e) if e.raw_os_error() == Some(libc::ENOTEMPTY) || e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(RuntimeError::io("remove", run)),
    }
}
