//! From a manifest, a config and somewhere to read layers from to a present image; the same for
//! pulls, imports and repairs.
//!
//! ```text
//! lease ─> missing layers, two at a time: blob ─> child ─> staging     (any crash: staging goes)
//!       ─> diffIDs right? ─> finish each on those below ─> one syncfs ─> rename ─> record
//! ```
//!
//! Invariant: nothing is renamed into place before all of it was checked and synced, nothing
//! recorded before it was renamed.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::digest::{Digest, Hasher};
use super::error::PullError;
use super::finish::finish;
use super::manifest::{self, Descriptor, Manifest, ParsedConfig};
use super::model::ImagesConfig;
use super::records::{ImageRecord, LayerRecord, Record};
use super::stage::{self, FeedError, Staged};
use super::store::{Claim, Making, Store};
use crate::sys::dir;

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

pub struct Assembly<'a> {
    pub config: &'a ImagesConfig,
    pub store: &'a Arc<Store>,
    pub source: &'a dyn BlobSource,
    pub cancelled: &'a AtomicBool,
}

/// A manifest with the bytes that its digest is over.
pub struct Document<'a> {
    pub digest: Digest,
    pub bytes: &'a [u8],
    pub manifest: &'a Manifest,
}

/// One layer that has to be made.
struct Job<'a> {
    at: usize,
    layer: &'a Descriptor,
}

impl Assembly<'_> {
    /// Makes the image present and records it under `names`. Nobody takes it away while the
    /// result is held.
    pub fn run(&self, document: &Document<'_>, names: &[String], pinned: bool) -> Result<Claim, PullError> {
        let manifest = document.manifest;
        let image_claim = self.store.claim(Making::Image(document.digest));
        let blobs = [document.digest, manifest.config.digest];
        let lease = self.store.lease(blobs.into_iter().chain(manifest.layers.iter().map(|l| l.digest)));
        let config_bytes = self.small_blob(&manifest.config)?;
        let config = manifest::parse_config(&config_bytes)?;
        manifest::check_config(&config, manifest.layers.len(), &self.config.platform)?;
        let chains = manifest::chains(&config.diff_ids);
        let chain_lease = self.store.lease(chains.iter().copied());
        let claims: Vec<Claim> = distinct(&chains).into_iter().map(|chain| self.store.claim(Making::Chain(chain))).collect();
        let mut records = self.make_layers(manifest, &config, &chains)?;
        self.keep_document(&document.digest, document.bytes)?;
        self.keep_document(&manifest.config.digest, &config_bytes)?;
        let mut sizes = vec![(document.digest, document.bytes.len() as u64), (manifest.config.digest, config_bytes.len() as u64)];
        sizes.extend(manifest.layers.iter().map(|l| (l.digest, l.size)));
        sizes.sort();
        sizes.dedup();
        let pinned = pinned || self.store.read(|s| s.images.get(&document.digest).is_some_and(|i| i.pinned));
        let image = ImageRecord { config: manifest.config.digest, chains, blobs: sizes, pinned };
        if self.store.read(|s| s.images.get(&document.digest) != Some(&image)) {
            records.push(Record::Image { manifest: document.digest, image });
        }
        for name in names {
            if self.store.read(|s| s.names.get(name) != Some(&document.digest)) {
                records.push(Record::Name { name: name.clone(), manifest: document.digest });
            }
        }
        if !records.is_empty() {
            self.store.sync_names()?;
            self.store.record(records)?;
        }
        drop((claims, lease, chain_lease));
        Ok(image_claim)
    }

    /// Stages what is missing, syncs it once and moves it into place; gives its records.
    fn make_layers(&self, manifest: &Manifest, config: &ParsedConfig, chains: &[Digest]) -> Result<Vec<Record>, PullError> {
        let have = |at: usize| {
            chains.get(at).and_then(|c| self.store.read(|s| s.layers.get(c).cloned())).filter(|l| self.store.has_layer(l))
        };
        let jobs: Vec<Job<'_>> = manifest
            .layers
            .iter()
            .enumerate()
            .filter(|(at, _)| have(*at).is_none())
            .map(|(at, layer)| Job { at, layer })
            .collect();
        // A blob that is gone is fetched again even where its layer is there: it is the repair kit.
        let mut lost: Vec<&Descriptor> = Vec::new();
        for layer in &manifest.layers {
            let here = fs::metadata(self.store.blob(&layer.digest)).is_ok_and(|m| m.len() == layer.size);
            let staged = jobs.iter().any(|j| j.layer.digest == layer.digest);
            if !here && !staged && !lost.iter().any(|l| l.digest == layer.digest) {
                lost.push(layer);
            }
        }
        for blob in lost {
            let _claim = self.store.claim(Making::Blob(blob.digest));
            self.fetch_blob(blob, &mut |_| Ok(()))?;
        }
        let staged = StagedLayers(self.stage(&jobs)?);
        let mut trees: Vec<PathBuf> = Vec::new();
        let mut records = Vec::new();
        for (at, layer) in manifest.layers.iter().enumerate() {
            let (Some(diff), Some(chain)) = (config.diff_ids.get(at), chains.get(at)) else { continue };
            let Some(made) = staged.0.iter().find(|(n, _)| *n == at).map(|(_, s)| s) else {
                let there = have(at).ok_or_else(|| PullError::refused(format!("layer {chain} went away during the pull")))?;
                trees.push(self.store.layer(there.dir));
                continue;
            };
            if made.report.diff_id != diff.to_string() {
                let why =
                    format!("layer {} unpacks to {}, but the image's config says {diff}", layer.digest, made.report.diff_id);
                return Err(PullError::Refused(why));
            }
            let below: Result<Vec<OwnedFd>, PullError> =
                trees.iter().rev().map(|t| dir::open_root(t).map_err(PullError::store("open", t))).collect();
            let listing = finish(&made.dir, &below?).map_err(PullError::store("finish the layer in", &made.dir))?;
            trees.push(made.dir.join(super::unpack::TREE));
            records.push(Record::Layer {
                chain: *chain,
                layer: LayerRecord {
                    dir: self.store.fresh(),
                    blob: layer.digest,
                    blob_size: layer.size,
                    diff: *diff,
                    entries: made.report.entries,
                    bytes: made.report.bytes,
                    listing,
                },
            });
        }
        if staged.0.is_empty() {
            return Ok(records);
        }
        self.store.sync_data()?;
        for ((_, made), record) in staged.0.iter().zip(&records) {
            let Record::Layer { layer, .. } = record else { continue };
            let (from, to) = (made.dir.join(super::unpack::TREE), self.store.layer(layer.dir));
            fs::rename(&from, &to).map_err(PullError::store("rename", &to))?;
        }
        for job in &jobs {
            let _claim = self.store.claim(Making::Blob(job.layer.digest));
            self.keep_part(&job.layer.digest)?;
            if !self.store.blob(&job.layer.digest).exists() {
                self.fetch_blob(job.layer, &mut |_| Ok(()))?;
            }
        }
        Ok(records)
    }

    /// Unpacks the jobs' layers, at most `parallel` at once, each on a thread of its own. The
    /// result is in the layers' order.
    fn stage(&self, jobs: &[Job<'_>]) -> Result<Vec<(usize, Staged)>, PullError> {
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let done = Mutex::new(Vec::new());
        let error = Mutex::new(None);
        let work = || {
            while !failed.load(Ordering::Relaxed)
                && let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed))
            {
                match self.stage_one(job, &failed) {
                    Ok(staged) => done.lock().unwrap_or_else(PoisonError::into_inner).push((job.at, staged)),
                    Err(e) => {
                        failed.store(true, Ordering::Relaxed);
                        error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                    }
                }
            }
        };
        let threads = self.config.limits.parallel.clamp(1, 8).min(jobs.len());
        std::thread::scope(|scope| {
            for n in 0..threads {
                let thread = std::thread::Builder::new().name(format!("layer-{n}")).stack_size(256 * 1024);
                if let Err(e) = thread.spawn_scoped(scope, work) {
                    failed.store(true, Ordering::Relaxed);
                    error
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(PullError::store("start a thread for", "layers")(e));
                }
            }
        });
        let mut staged = StagedLayers(done.into_inner().unwrap_or_else(PoisonError::into_inner));
        if let Some(error) = error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        staged.0.sort_by_key(|(at, _)| *at);
        Ok(std::mem::take(&mut staged.0))
    }

    fn stage_one(&self, job: &Job<'_>, failed: &AtomicBool) -> Result<Staged, PullError> {
        // The same blob may be wanted by another layer or image: one of them downloads it.
        let _claim = self.store.claim(Making::Blob(job.layer.digest));
        let dir = self.store.staging_dir();
        let staged = stage::unpack(self.config, &dir, job.at == 0, |pipe| {
            self.fetch_blob_to(job.layer, &mut |bytes| {
                if failed.load(Ordering::Relaxed) {
                    return Err(FeedError::Source(PullError::Cancelled));
                }
                pipe.write_all(bytes).map_err(FeedError::Pipe)
            })
        });
        if matches!(staged, Err(PullError::Refused(_))) {
            super::store::remove(&self.store.part(&job.layer.digest))?;
        }
        staged
    }

    fn fetch_blob(&self, blob: &Descriptor, sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>) -> Result<(), PullError> {
        match self.fetch_blob_to(blob, sink) {
            Ok(()) => self.keep_part(&blob.digest),
            Err(FeedError::Source(e)) => Err(e),
            Err(FeedError::Pipe(e)) => Err(PullError::store("fetch into", self.store.staging())(e)),
        }
    }

    /// Brings a blob into the store (or its `.part`) and through `sink`, checked to its last
    /// byte. What an earlier attempt left is used first.
    fn fetch_blob_to(&self, blob: &Descriptor, sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>) -> Result<(), FeedError> {
        let source = FeedError::Source;
        let mut hasher = Hasher::default();
        let whole = self.store.blob(&blob.digest);
        if let Some(mut file) = open_if_there(&whole).map_err(source)? {
            replay(&mut file, blob.size, &mut hasher, sink)?;
            if hasher.count == blob.size && hasher.clone().digest() == blob.digest {
                return Ok(());
            }
            // The child has seen bytes that are wrong: this attempt is lost, the next one loads anew.
            super::store::remove(&whole).map_err(source)?;
            return Err(source(PullError::refused(format!(
                "blob {} was damaged on disk and is removed; try again",
                blob.digest
            ))));
        }
        let path = self.store.part(&blob.digest);
        let options = File::options().read(true).append(true).create(true).clone();
        let mut part = options.open(&path).map_err(|e| source(PullError::store("open", &path)(e)))?;
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
            super::store::remove(&path).map_err(source)?;
            let why = if count != blob.size {
                format!("blob {} has {count} bytes instead of {}", blob.digest, blob.size)
            } else {
                format!("blob {} has the digest {digest}", blob.digest)
            };
            return Err(source(PullError::Refused(why)));
        }
        Ok(())
    }

    /// Moves a complete download to its name. Its data is synced by then, or here if it is alone.
    fn keep_part(&self, digest: &Digest) -> Result<(), PullError> {
        let (from, to) = (self.store.part(digest), self.store.blob(digest));
        let Some(file) = open_if_there(&from)? else { return Ok(()) };
        file.sync_data().map_err(PullError::store("sync", &from))?;
        fs::rename(&from, &to).map_err(PullError::store("rename", &to))
    }

    /// A config: from the store or the source, checked.
    fn small_blob(&self, blob: &Descriptor) -> Result<Vec<u8>, PullError> {
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

    fn keep_document(&self, digest: &Digest, bytes: &[u8]) -> Result<(), PullError> {
        let to = self.store.blob(digest);
        if self.store.read_blob(digest, manifest::MAX_DOCUMENT)?.is_some() {
            return Ok(());
        }
        let temp = self.store.staging().join(format!("document-{}", self.store.fresh()));
        let write = || {
            let mut file = File::create(&temp)?;
            file.write_all(bytes)?;
            file.sync_data()?;
            fs::rename(&temp, &to)
        };
        write().map_err(PullError::store("write", &to))
    }
}

fn distinct(chains: &[Digest]) -> Vec<Digest> {
    let mut distinct: Vec<Digest> = Vec::with_capacity(chains.len());
    for chain in chains {
        if !distinct.contains(chain) {
            distinct.push(*chain);
        }
    }
    distinct
}

/// Staged directories that are removed unless they were renamed away.
struct StagedLayers(Vec<(usize, Staged)>);

impl Drop for StagedLayers {
    fn drop(&mut self) {
        for (_, staged) in &self.0 {
            // What stays is cleared at the next start.
            let _ = fs::remove_dir_all(&staged.dir);
        }
    }
}

fn open_if_there(path: &std::path::Path) -> Result<Option<File>, PullError> {
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
fn discard_if_wrong(error: &FeedError, path: &std::path::Path) {
    let full = matches!(error, FeedError::Source(PullError::Store { source, .. })
        if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded));
    if full || matches!(error, FeedError::Source(PullError::Refused(_))) {
        // Where it stays, the next attempt finds out by its digest.
        let _ = fs::remove_file(path);
    }
}
