//! Blobs on their way into the store: from where they come, checked to the last byte, resumed.
//!
//! Invariant: a file in `blobs/` was hashed whole and synced before it got its name. A `.part` is
//! what came of one so far, in order; it is believed only as far as the digest at the end fits.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::Ordering;

use super::assemble::Assembly;
use super::digest::{Digest, Hasher};
use super::error::PullError;
use super::manifest::{self, Descriptor};
use super::stage::FeedError;
use super::store;
use crate::sys::failpoint;

/// Where blobs come from when the store lacks them.
pub trait BlobSource: Sync {
    /// Writes the blob's bytes from `offset` on to `sink`, in pieces. It need not check them. An
    /// error from `sink` is passed on.
    fn copy(&self, blob: &Descriptor, offset: u64, sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>)
    -> Result<(), FeedError>;
}

/// A store without a registry behind it: what is missing stays missing.
pub struct Offline;

impl BlobSource for Offline {
    fn copy(&self, blob: &Descriptor, _: u64, _: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>) -> Result<(), FeedError> {
        Err(FeedError::Source(PullError::refused(format!("blob {} is not in the store", blob.digest))))
    }
}

impl Assembly<'_> {
    pub(super) fn fetch_blob(
        &self,
        blob: &Descriptor,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
    ) -> Result<(), PullError> {
        match self.fetch_blob_to(blob, sink) {
            Ok(()) => self.keep_part(&blob.digest),
            Err(FeedError::Source(e)) => Err(e),
            Err(FeedError::Pipe(e)) => Err(PullError::store("fetch into", self.store.staging())(e)),
        }
    }

    /// Brings a blob into the store (or its `.part`) and through `sink`, checked to its last
    /// byte. What an earlier attempt left is used first.
    pub(super) fn fetch_blob_to(
        &self,
        blob: &Descriptor,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
    ) -> Result<(), FeedError> {
        let source = FeedError::Source;
        let mut hasher = Hasher::default();
        let whole = self.store.blob(&blob.digest);
        if let Some(mut file) = open_if_there(&whole).map_err(source)? {
            replay(&mut file, blob.size, &mut hasher, sink)?;
            if hasher.count == blob.size && hasher.clone().digest() == blob.digest {
                return Ok(());
            }
            // The child has seen bytes that are wrong: this attempt is lost, the next one loads anew.
            store::remove(&whole).map_err(source)?;
            return Err(source(PullError::refused(format!(
                "blob {} was damaged on disk and is removed; try again",
                blob.digest
            ))));
        }
        let path = self.store.part(&blob.digest);
        let options = File::options().read(true).append(true).create(true).clone();
        let mut part = options.open(&path).map_err(|e| source(PullError::store("open", &path)(e)))?;
        failpoint::hit("images.fetch.opened").map_err(|e| source(PullError::store("write", &path)(e)))?;
        replay(&mut part, blob.size, &mut hasher, sink)?;
        if hasher.count < blob.size {
            self.source
                .copy(blob, hasher.count, &mut |bytes| {
                    if self.cancelled.load(Ordering::Relaxed) {
                        return Err(source(PullError::Cancelled));
                    }
                    if hasher.count + bytes.len() as u64 > blob.size {
                        return Err(source(PullError::refused(format!(
                            "blob {} is longer than the {} bytes announced",
                            blob.digest, blob.size
                        ))));
                    }
                    hasher.update(bytes);
                    part.write_all(bytes).map_err(|e| source(PullError::store("write", &path)(e)))?;
                    sink(bytes)
                })
                .inspect_err(|e| discard_if_wrong(e, &path))?;
        }
        let (count, digest) = (hasher.count, hasher.digest());
        if count != blob.size || digest != blob.digest {
            store::remove(&path).map_err(source)?;
            let why = if count != blob.size {
                format!("blob {} has {count} bytes instead of {}", blob.digest, blob.size)
            } else {
                format!("blob {} has the digest {digest}", blob.digest)
            };
            return Err(source(PullError::Refused(why)));
        }
        failpoint::hit("images.fetch.whole").map_err(|e| source(PullError::store("write", &path)(e)))
    }

    /// Moves a complete download to its name. Its data is synced by then, or here if it is alone.
    pub(super) fn keep_part(&self, digest: &Digest) -> Result<(), PullError> {
        let (from, to) = (self.store.part(digest), self.store.blob(digest));
        let Some(file) = open_if_there(&from)? else { return Ok(()) };
        file.sync_data().map_err(PullError::store("sync", &from))?;
        fs::rename(&from, &to).and_then(|()| failpoint::hit("images.blob.kept")).map_err(PullError::store("rename", &to))
    }

    /// A config: from the store or the source, checked.
    pub(super) fn small_blob(&self, blob: &Descriptor) -> Result<Vec<u8>, PullError> {
        if let Some(bytes) = self.store.read_blob(&blob.digest, manifest::MAX_DOCUMENT)? {
            return Ok(bytes);
        }
        let mut bytes = Vec::new();
        let copied = self.source.copy(blob, 0, &mut |piece| {
            if bytes.len() as u64 + piece.len() as u64 > blob.size.min(manifest::MAX_DOCUMENT) {
                return Err(FeedError::Source(PullError::refused(format!("blob {} is longer than announced", blob.digest))));
            }
            bytes.extend_from_slice(piece);
            Ok(())
        });
        match copied {
            Ok(()) => {}
            Err(FeedError::Source(e)) => return Err(e),
            Err(FeedError::Pipe(e)) => return Err(PullError::refused(e.to_string())),
        }
        if bytes.len() as u64 != blob.size || Digest::of(&bytes) != blob.digest {
            return Err(PullError::refused(format!("blob {} does not have the size and digest announced", blob.digest)));
        }
        Ok(bytes)
    }

    pub(super) fn keep_document(&self, digest: &Digest, bytes: &[u8]) -> Result<(), PullError> {
        let to = self.store.blob(digest);
        if self.store.read_blob(digest, manifest::MAX_DOCUMENT)?.is_some() {
            return Ok(());
        }
        let temp = self.store.staging().join(format!("document-{}", self.store.fresh()));
        let write = || {
            let mut file = File::create(&temp)?;
            file.write_all(bytes)?;
            file.sync_data()?;
            failpoint::hit("images.document.written")?;
            fs::rename(&temp, &to)
        };
        write().map_err(PullError::store("write", &to))
    }
}

fn open_if_there(path: &Path) -> Result<Option<File>, PullError> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(PullError::store("open", path)(e)),
    }
}

/// At most `size` bytes: what lies behind them in a longer file shows in the file's length.
fn replay(
    file: &mut File,
    size: u64,
    hasher: &mut Hasher,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
) -> Result<(), FeedError> {
    let failed = |e| FeedError::Source(PullError::store("read", "a blob")(e));
    let mut buffer = vec![0; 64 * 1024];
    let mut limited = file.take(size + 1);
    loop {
        let n = match limited.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(failed(e)),
        };
        let bytes = buffer.get(..n).unwrap_or_default();
        hasher.update(bytes);
        sink(bytes)?;
    }
}

/// Bytes that the registry must not have sent are not resumed from.
fn discard_if_wrong(error: &FeedError, path: &Path) {
    let full = matches!(error, FeedError::Source(PullError::Store { source, .. })
        if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded));
    if full || matches!(error, FeedError::Source(PullError::Refused(_))) {
        // Where it stays, the next attempt finds out by its digest.
        let _ = fs::remove_file(path);
    }
}
