//! The host's resolver files: read when somebody asks, and only when they changed.
//!
//! Invariant: no question waits for more than a stat of each file, and that at most every
//! [`EVERY`]; a file that cannot be read leaves the servers as they were.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::upstreams;
use crate::sys::inet;

const EVERY: i64 = 2_000_000_000;
/// No resolv.conf is longer.
const MOST: u64 = 64 << 10;

pub struct Files {
    resolv_conf: PathBuf,
    behind_stub: Vec<PathBuf>,
    ours: Vec<SocketAddr>,
    seen: Option<Vec<Option<Stamp>>>,
    looked: i64,
}

/// What changes with a file's contents: device, inode, size, mtime.
type Stamp = (u64, u64, u64, i64, i64);

impl Files {
    pub fn new(resolv_conf: PathBuf, behind_stub: Vec<PathBuf>, ours: Vec<SocketAddr>) -> Files {
        Files { resolv_conf, behind_stub, ours, seen: None, looked: i64::MIN }
    }

    /// The servers, when they may have changed since the last call.
    pub fn servers(&mut self, now: i64) -> Option<Vec<SocketAddr>> {
        if self.seen.is_some() && now.saturating_sub(self.looked) < EVERY {
            return None;
        }
        self.looked = now;
        let stamps = [&self.resolv_conf].into_iter().chain(&self.behind_stub).map(|path| stamp(path)).collect();
        if self.seen.as_ref() == Some(&stamps) {
            return None;
        }
        let node = match read(&self.resolv_conf) {
            Ok(text) => text,
            Err(error) => {
                if self.seen.is_none() {
                    tracing::warn!(file = %self.resolv_conf.display(), %error, "DNS: no upstream servers are known");
                }
                // Told once a change; the servers stay what they were.
                return self.seen.replace(stamps).is_none().then(Vec::new);
            }
        };
        self.seen = Some(stamps);
        // Whatever cannot be read names no server.
        let behind: Vec<String> = self.behind_stub.iter().map(|path| read(path).unwrap_or_default()).collect();
        let servers = upstreams::servers(&node, &behind, &self.ours, &inet::interface);
        if servers.is_empty() {
            tracing::warn!(file = %self.resolv_conf.display(), "DNS: no upstream server is named; only names of the cluster are answered");
        } else {
            tracing::debug!(?servers, "DNS: upstream servers");
        }
        Some(servers)
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?; // not there: also a state
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
