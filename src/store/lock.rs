//! One process at a time owns a store: `<state>/lock` under flock(2), with the owner's pid in it.
//!
//! Invariant: the kernel lets the lock go with the process, so a kill leaves nothing to clean up.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use nix::fcntl::Flock;

use super::error::StoreError;
use crate::sys::file::try_lock;

#[derive(Debug)]
pub struct StoreLock {
    _held: Flock<File>,
}

/// An agent that was just killed may have a child between fork and exec that still has the
/// descriptor, so a taken lock is tried again for this long: 20 × 25 ms.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(25);

impl StoreLock {
    pub fn take(state: &Path) -> Result<StoreLock, StoreError> {
        let path = state.join("lock");
        let failed = |e| StoreError::io("lock", &path, e);
        for attempt in 0..TRIES {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            let file = open(&path).map_err(failed)?;
            if let Some(held) = try_lock(file).map_err(failed)? {
                write_pid(&held).map_err(failed)?;
                return Ok(StoreLock { _held: held });
            }
        }
        Err(StoreError::Locked { pid: owner(&path), path: state.to_owned() })
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Only for the message of whom it keeps out, so a full disk is no reason to stop.
fn write_pid(file: &File) -> io::Result<()> {
    let text = format!("{}\n", std::process::id());
    let mut old = [0; 16];
    let n = file.read_at(&mut old, 0)?;
    if old.get(..n) == Some(text.as_bytes()) {
        return Ok(());
    }
    match file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0)) {
        Err(e) if !super::error::is_full(&e) => Err(e),
        _ => Ok(()),
    }
}

fn owner(path: &Path) -> Option<i32> {
    let mut text = [0; 16];
    let n = File::open(path).and_then(|f| f.read_at(&mut text, 0)).ok()?; // the pid is a courtesy
    std::str::from_utf8(text.get(..n)?).ok()?.trim().parse().ok()
}
