//! `lost/`: where unreadable bytes are set aside, for a person to look at.
//!
//! Invariant: what is set aside is durable there before its old place is changed. The newest
//! [`KEPT`] entries are kept, so that a dying card cannot fill itself with them.

use std::io;
use std::path::{Path, PathBuf};

use super::fs::Fs;

const KEPT: usize = 64;
/// Of one bad tail at most this much is copied.
const TAIL_MAX: u64 = 16 << 20;

/// Gives a whole file a second name in `<dir>/lost`; a directory (which has no second name) moves.
pub fn set_aside<F: Fs>(fs: &F, dir: &Path, path: &Path) -> io::Result<PathBuf> {
    let to = place(fs, dir, path)?;
    if fs.link(path, &to).is_err() {
        fs.rename(path, &to)?;
    }
    fs.sync_dir(&dir.join("lost"))?;
    Ok(to)
}

/// Copies what a file holds from `offset` on. None: only zeros lie there, as where a power cut
/// came between a file's new size and its data.
pub fn copy_tail<F: Fs>(fs: &F, dir: &Path, path: &Path, file: &F::File, offset: u64) -> io::Result<Option<PathBuf>> {
    let end = fs.len(file)?.min(offset.saturating_add(TAIL_MAX));
    let mut chunk = vec![0; 4096];
    let mut copy: Option<(PathBuf, F::File)> = None;
    let mut at = offset;
    while at < end {
        let n = fs.read_at(file, &mut chunk, at)?;
        let bytes = chunk.get(..n).unwrap_or_default();
        if n == 0 {
            break;
        }
        if copy.is_none() && bytes.iter().any(|b| *b != 0) {
            let to = place(fs, dir, path)?;
            let file = fs.create(&to, 0o600)?;
            copy = Some((to, file));
        }
        if let Some((_, file)) = &copy {
            fs.write_at(file, bytes, at - offset)?;
        }
        at += n as u64;
    }
    let Some((to, file)) = copy else { return Ok(None) };
    fs.sync(&file)?;
    fs.sync_dir(&dir.join("lost"))?;
    Ok(Some(to))
}

/// A free name in `<dir>/lost` for something from `path`; makes room among the older ones.
fn place<F: Fs>(fs: &F, dir: &Path, path: &Path) -> io::Result<PathBuf> {
    let lost = dir.join("lost");
    fs.make_dir(&lost)?;
    // Also where it was there: whoever made it may have been killed before this.
    fs.sync_dir(dir)?;
    let mut taken: Vec<(u64, std::ffi::OsString)> = Vec::new();
    for name in fs.names(&lost)? {
        let number = name.to_str().and_then(|n| n.rsplit('.').next()).and_then(|n| n.parse().ok());
        taken.extend(number.map(|n| (n, name)));
    }
    taken.sort_unstable();
    for (_, name) in taken.iter().take(taken.len().saturating_sub(KEPT - 1)) {
        // A directory that was set aside stays, and takes its place among the kept ones.
        let _ = fs.remove(&lost.join(name));
    }
    let next = taken.last().map_or(1, |(n, _)| n.saturating_add(1));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(lost.join(format!("{name}.{next}")))
}
