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

use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::blobs::BlobSource;
use super::digest::Digest;
use super::error::PullError;
use super::finish::finish;
use super::manifest::{self, Descriptor, Manifest, ParsedConfig};
use super::model::ImagesConfig;
use super::records::{ImageRecord, LayerRecord, Record};
use super::stage::{self, FeedError, Staged};
use super::store::{Claim, Making, Store};
use crate::sys::{dir, failpoint, file};

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
        let claims: Vec<Claim> = chains.iter().map(|chain| self.store.claim(Making::Chain(*chain))).collect();
        let placed = self.make_layers(manifest, &config, &chains)?;
        let mut records = placed.records.clone();
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
            failpoint::hit("images.commit.named").map_err(PullError::store("record in", self.store.staging()))?;
            self.store.record(records)?;
        }
        placed.keep();
        failpoint::hit("images.commit.recorded").map_err(PullError::store("record in", self.store.staging()))?;
        drop((claims, lease, chain_lease));
        Ok(image_claim)
    }

    /// Stages what is missing, syncs it once and moves it into place; gives its records.
    fn make_layers(&self, manifest: &Manifest, config: &ParsedConfig, chains: &[Digest]) -> Result<Placed, PullError> {
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
        self.check_room(&jobs)?;
        let staged = StagedLayers(self.stage(&jobs)?);
        let mut trees: Vec<PathBuf> = Vec::new();
        let mut placed = Placed::default();
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
            failpoint::hit("images.finish.done").map_err(PullError::store("finish the layer in", &made.dir))?;
            trees.push(made.dir.join(super::unpack::TREE));
            placed.records.push(Record::Layer {
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
            return Ok(placed);
        }
        self.store.sync_data()?;
        failpoint::hit("images.commit.synced").map_err(PullError::store("sync", self.store.staging()))?;
        for ((_, made), record) in staged.0.iter().zip(&placed.records) {
            let Record::Layer { layer, .. } = record else { continue };
            let (from, to) = (made.dir.join(super::unpack::TREE), self.store.layer(layer.dir));
            placed.dirs.push(to.clone());
            let renamed = fs::rename(&from, &to).and_then(|()| failpoint::hit("images.commit.renamed"));
            renamed.map_err(PullError::store("rename", &to))?;
        }
        for job in &jobs {
            let _claim = self.store.claim(Making::Blob(job.layer.digest));
            self.keep_part(&job.layer.digest)?;
            if !self.store.blob(&job.layer.digest).exists() {
                self.fetch_blob(job.layer, &mut |_| Ok(()))?;
            }
        }
        Ok(placed)
    }

    /// Refuses what cannot fit before it fills the disk: each layer takes its compressed size, and
    /// at least as much again unpacked.
    fn check_room(&self, jobs: &[Job<'_>]) -> Result<(), PullError> {
        let staging = self.store.staging();
        let here = |path: PathBuf| fs::metadata(path).map_or(0, |m| m.len());
        let coming = |j: &Job<'_>| {
            let have = here(self.store.blob(&j.layer.digest)).max(here(self.store.part(&j.layer.digest)));
            j.layer.size.saturating_sub(have).saturating_add(j.layer.size)
        };
        let need = jobs.iter().map(coming).fold(0, u64::saturating_add);
        let free = file::free_bytes(&staging).map_err(PullError::store("ask for the room of", &staging))?;
        if need <= free {
            return Ok(());
        }
        let why = format!("the image's missing layers need at least {need} bytes, and {free} are free");
        Err(PullError::Store {
            operation: "unpack into",
            path: staging,
            source: std::io::Error::new(std::io::ErrorKind::StorageFull, why),
        })
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
}

/// Layers that are in place and not yet recorded: removed again unless they are kept.
#[derive(Default)]
struct Placed {
    records: Vec<Record>,
    dirs: Vec<PathBuf>,
}

impl Placed {
    fn keep(mut self) {
        self.dirs.clear();
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        for dir in &self.dirs {
            // What stays is cleared at the next start.
            let _ = fs::remove_dir_all(dir);
        }
    }
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
