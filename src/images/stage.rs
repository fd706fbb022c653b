//! Runs one `coracle unpack` child and feeds it; the parent's half of unpacking.
//!
//! Invariant: when this returns, the child is gone and reaped; on an error its directory is too.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::error::PullError;
use super::model::ImagesConfig;
use super::unpack::{Failure, Report, TREE};
use crate::sys::failpoint;

/// A layer's tree that is unpacked but neither finished nor synced: `<dir>/fs`, `<dir>/marks`.
#[derive(Debug)]
pub struct Staged {
    pub dir: PathBuf,
    pub report: Report,
}

/// Unpacks into the new directory `dir` what `feed` writes.
pub fn unpack(
    config: &ImagesConfig,
    dir: &Path,
    base: bool,
    feed: impl FnOnce(&mut dyn Write) -> Result<(), FeedError>,
) -> Result<Staged, PullError> {
    let result = run(config, dir, base, feed);
    if result.is_err() {
        // Whatever cannot be removed now is cleared at the next start; the first error counts.
        let _ = fs::remove_dir_all(dir);
    }
    Ok(Staged { dir: dir.to_owned(), report: result? })
}

/// Why feeding stopped.
#[derive(Debug)]
pub enum FeedError {
    /// The child's end of the pipe: what it says counts.
    Pipe(io::Error),
    Source(PullError),
}

fn run(
    config: &ImagesConfig,
    dir: &Path,
    base: bool,
    feed: impl FnOnce(&mut dyn Write) -> Result<(), FeedError>,
) -> Result<Report, PullError> {
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700).create(dir).map_err(PullError::store("make", dir))?;
    let tree = dir.join(TREE);
    builder.mode(0o755).create(&tree).map_err(PullError::store("make", &tree))?;
    failpoint::hit("images.stage.made").map_err(PullError::store("make", dir))?;
    let mut child = Reaped(spawn(config, dir, base).map_err(PullError::store("run unpack for", dir))?);
    let mut stdin = child.0.stdin.take();
    let fed = match stdin.as_mut() {
        Some(pipe) => feed(pipe),
        None => Ok(()),
    };
    drop(stdin);
    if let Err(FeedError::Source(error)) = fed {
        return Err(error);
    }
    let mut said = Vec::new();
    if let Some(out) = child.0.stdout.take() {
        out.take(64 * 1024).read_to_end(&mut said).map_err(PullError::store("hear unpack of", dir))?;
    }
    let status = child.0.wait().map_err(PullError::store("wait for unpack of", dir))?;
    if status.success() {
        if let Err(FeedError::Pipe(source)) = fed {
            return Err(PullError::Store { operation: "feed unpack of", path: dir.to_owned(), source });
        }
        failpoint::hit("images.stage.unpacked").map_err(PullError::store("unpack into", dir))?;
        return serde_json::from_slice(&said).map_err(|e| PullError::refused(format!("unpack said nothing useful: {e}")));
    }
    match serde_json::from_slice::<Failure>(&said) {
        Ok(Failure { errno: Some(errno), .. }) if is_full(errno) => Err(PullError::Store {
            operation: "unpack a layer into",
            path: dir.to_owned(),
            source: io::Error::from_raw_os_error(errno),
        }),
        Ok(failure) => Err(PullError::refused(format!("failed to extract layer: {}", failure.error))),
        Err(_) => Err(PullError::refused(format!("failed to extract layer: the unpack child ended early ({status})"))),
    }
}

fn is_full(errno: i32) -> bool {
    matches!(io::Error::from_raw_os_error(errno).kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn spawn(config: &ImagesConfig, dir: &Path, base: bool) -> io::Result<Child> {
    let limits = &config.limits;
    let mut command = Command::new(&config.program);
    command.arg0("coracle").arg("unpack").arg(dir);
    for (option, value) in [
        ("--entries", limits.layer_entries),
        ("--bytes", limits.layer_bytes),
        ("--ratio", limits.ratio),
        ("--ratio-floor", limits.ratio_floor),
        ("--window", limits.window),
    ] {
        command.arg(option).arg(value.to_string());
    }
    if base {
        command.arg("--base");
    }
    command.env_clear().current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
}

/// Never leaves a zombie or a running child behind.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Both fail only where the child is reaped already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
