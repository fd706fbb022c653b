//! The run root: a tmpfs of our own.
use std::path::Path;

use super::RuntimeError;

/// Makes `run` a private, unbindable tmpfs; one that is there already is kept.
pub fn mount_run(_run: &Path) -> Result<(), RuntimeError> {
    todo!()
}

/// Takes it away with all that is in it.
pub fn unmount_run(_run: &Path) -> Result<(), RuntimeError> {
    todo!()
}
