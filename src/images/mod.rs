//! Images: references, registries, layers and the image store.
//!
//! ```text
//! reference ─> registry ─> blob: network ─> sha256 ─> disk and ─┐ pipe
//!   (plan)     (auth)                                           └─> child `coracle unpack`:
//!                                                   gunzip/zstd ─> sha256 ─> tar entries ─> staging
//! all layers there ─> finish (implied parents, whiteouts) ─> one syncfs ─> rename ─> record
//! ```
//!
//! Invariant: an image is in [`Images::find`] only when its manifest, config and every layer were
//! checked by digest, synced and recorded, in that order. Whatever a crash leaves behind is in
//! `staging/` or unrecorded, and gone after the next [`Images::open`].

pub mod archive;
mod assemble;
pub mod auth;
mod blobs;
pub mod digest;
pub mod endpoint;
mod error;
mod finish;
mod import;
pub mod layer;
pub mod make;
pub mod manifest;
pub mod model;
mod pull;
pub mod records;
pub mod reference;
mod registry;
mod stage;
mod store;
mod transport;
pub mod unpack;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use assemble::{Assembly, Document};
use blobs::{BlobSource, Offline};
use digest::Digest;
use error::PullError;
pub use model::{Image, ImageConfig, ImageError, ImagesConfig, ImportOptions, PullAuth};
use records::{ImageRecord, Record};
use store::{Making, Store};

use crate::sys::chain::chain;

/// The image room's front door; clones share one store.
#[derive(Clone, Debug)]
pub struct Images {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: ImagesConfig,
    store: Arc<Store>,
    flights: pull::Flights,
    cancelled: AtomicBool,
}

impl Images {
    /// Opens the store: replays its journal, checks the layers that it names and clears staging.
    pub fn open(config: ImagesConfig) -> Result<Images, ImageError> {
        let store = Store::open(&config.dir).map_err(|e| e.into_image(""))?;
        Ok(Images {
            inner: Arc::new(Inner { config, store, flights: pull::Flights::default(), cancelled: AtomicBool::new(false) }),
        })
    }

    /// The image that `reference` (name, digest or image id) means here; None: not present. A layer
    /// that was lost is rebuilt from its blob first.
    pub fn find(&self, reference: &str) -> Result<Option<Image>, ImageError> {
        let inspect = |e: PullError| ImageError::Inspect { reference: reference.to_owned(), why: chain(&e).to_string() };
        let Some(manifest) = self.resolve(reference)? else { return Ok(None) };
        if !self.mend(&manifest).map_err(inspect)? {
            return Ok(None);
        }
        self.image(&manifest).map_err(inspect)
    }

    /// Asks the registry what `reference` means now, and fetches and unpacks what is missing.
    /// Pulls of one reference at the same time share one download.
    pub fn pull(&self, reference: &str, auth: &[PullAuth]) -> Result<Image, ImageError> {
        let name = reference::normalize(reference)?;
        self.inner.flights.share(&name, auth, || self.pull_now(&name, auth).map_err(|e| e.into_image(reference)))
    }

    /// Takes in an OCI layout (directory or tar) or a docker archive, gzipped or not, and pins it.
    pub fn import(&self, path: &Path, options: &ImportOptions) -> Result<Vec<Image>, ImageError> {
        if let Some(name) = &options.name {
            reference::normalize(name)?;
        }
        let failed = |e: PullError| e.into_import(path);
        let inner = &self.inner;
        let scratch = inner.store.staging_dir();
        let (files, found) =
            import::open(path, &scratch, options, &inner.config.platform, &inner.config.limits).map_err(failed)?;
        let mut images = Vec::new();
        for image in found {
            let document = Document { digest: image.digest, bytes: &image.bytes, manifest: &image.manifest };
            let run = self.assembly(&files).run(&document, &image.names, true);
            if run.is_err() {
                // The archive is still there: what was copied of it is not resumed from.
                for layer in &image.manifest.layers {
                    let _claim = inner.store.claim(Making::Blob(layer.digest));
                    store::remove(&inner.store.part(&layer.digest)).map_err(failed)?;
                }
            }
            let claim = run.map_err(failed)?;
            images.extend(self.image(&image.digest).map_err(failed)?);
            drop(claim);
        }
        // A name that moved may have left an image without one.
        inner.store.sweep().map_err(failed)?;
        Ok(images)
    }

    /// Every image that is present, by its first name.
    pub fn list(&self) -> Result<Vec<Image>, ImageError> {
        let manifests: Vec<Digest> = self.inner.store.read(|s| s.images.keys().copied().collect());
        let mut images: Vec<Image> = Vec::new();
        for manifest in manifests {
            let found = self
                .image(&manifest)
                .map_err(|e| ImageError::Inspect { reference: manifest.to_string(), why: chain(&e).to_string() })?;
            let Some(image) = found else { continue };
            // Two manifests of one config (compressed differently) are one image with two digests.
            match images.iter_mut().find(|known| known.id == image.id) {
                Some(known) => {
                    known.tags.extend(image.tags);
                    known.digests.extend(image.digests);
                    known.pinned |= image.pinned;
                }
                None => images.push(image),
            }
        }
        images.sort_by(|a, b| (a.tags.first(), &a.id).cmp(&(b.tags.first(), &b.id)));
        Ok(images)
    }

    /// Forgets one name (or, by id, the image) and frees what nothing else needs. False: not here.
    /// Whether a container still uses the image is the caller's question.
    pub fn remove(&self, reference: &str) -> Result<bool, ImageError> {
        let store = &self.inner.store;
        let Some(manifest) = self.resolve(reference)? else { return Ok(false) };
        // A pull of the same image ends first; what the name means may have changed then.
        let claim = store.claim(Making::Image(manifest));
        if self.resolve(reference)? != Some(manifest) {
            drop(claim);
            return self.remove(reference);
        }
        let name = name_of(reference);
        let records = store.read(|s| {
            let Some(name) = name else {
                let config = s.images.get(&manifest).map(|i| i.config);
                let same = s.images.iter().filter(|(_, i)| Some(i.config) == config);
                return same.map(|(m, _)| Record::ImageGone { manifest: *m }).collect();
            };
            // The digest names of an image go with its last tag.
            let tags = s.names.iter().filter(|(n, m)| **m == manifest && **n != name && !n.contains('@')).count();
            if tags == 0 { vec![Record::ImageGone { manifest }] } else { vec![Record::NameGone { name }] }
        });
        store.record(records).and_then(|()| store.sweep()).map_err(|e| e.into_image(reference))?;
        Ok(true)
    }

    /// Makes every running pull and import end soon with an error.
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::Relaxed);
    }

    fn assembly<'a>(&'a self, source: &'a dyn BlobSource) -> Assembly<'a> {
        Assembly { config: &self.inner.config, store: &self.inner.store, source, cancelled: &self.inner.cancelled }
    }

    /// The manifest that a name, a name with digest, or an image id (with or without `sha256:`)
    /// leads to.
    fn resolve(&self, reference: &str) -> Result<Option<Digest>, ImageError> {
        let store = &self.inner.store;
        if let Some(id) = Digest::parse(reference).or_else(|| Digest::from_hex(reference)) {
            return Ok(
                store.read(|s| s.images.iter().find(|(manifest, image)| image.config == id || **manifest == id).map(|(m, _)| *m))
            );
        }
        let reference = reference::normalize(reference)?;
        let name = match &reference.digest {
            Some(digest) => format!("{}@{digest}", reference.name()),
            None => reference.to_string(),
        };
        Ok(store.read(|s| s.names.get(&name).copied()))
    }

    /// Rebuilds layers of the image that are gone from disk; false: it cannot be made whole here.
    fn mend(&self, manifest: &Digest) -> Result<bool, PullError> {
        let store = &self.inner.store;
        let Some(chains) = store.read(|s| s.images.get(manifest).map(|i| i.chains.clone())) else { return Ok(false) };
        for chain in &chains {
            store.check_layer(*chain)?;
        }
        let layers: Vec<_> = store.read(|s| chains.iter().map(|c| s.layers.get(c).cloned()).collect());
        if layers.iter().all(|l| l.as_ref().is_some_and(|l| store.has_layer(l))) {
            return Ok(true);
        }
        let Some(bytes) = store.read_blob(manifest, manifest::MAX_DOCUMENT)? else { return Ok(false) };
        let manifest::Document::Manifest(parsed) = manifest::parse(&bytes, None, self.inner.config.limits.layers)? else {
            return Ok(false);
        };
        tracing::warn!(image = %manifest, "a layer is missing from the image store: rebuilding it from its blob");
        let document = Document { digest: *manifest, bytes: &bytes, manifest: &parsed };
        match self.assembly(&Offline).run(&document, &[], false) {
            Ok(_) => Ok(true),
            Err(PullError::Refused(why)) => {
                tracing::warn!(image = %manifest, %why, "the layer cannot be rebuilt: the image has to be pulled again");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Reads a present image's description; None: it is not, or its documents are damaged.
    fn image(&self, manifest: &Digest) -> Result<Option<Image>, PullError> {
        let store = &self.inner.store;
        let (Some(record), names) = store.read(|s| {
            let names: Vec<String> = s.names.iter().filter(|(_, m)| *m == manifest).map(|(n, _)| n.clone()).collect();
            (s.images.get(manifest).cloned(), names)
        }) else {
            return Ok(None);
        };
        let Some(bytes) = store.read_blob(&record.config, manifest::MAX_DOCUMENT)? else { return Ok(None) };
        let config = manifest::parse_config(&bytes)?.config;
        let Some(layers) = self.layers(&record) else { return Ok(None) };
        let (digests, tags) = names.into_iter().partition(|n: &String| n.contains('@'));
        Ok(Some(Image {
            id: record.config.to_string(),
            tags,
            digests,
            size: record.blobs.iter().map(|(_, size)| size).sum(),
            layers,
            config,
            pinned: record.pinned,
        }))
    }

    /// Topmost first; None: one is not recorded.
    fn layers(&self, record: &ImageRecord) -> Option<Vec<std::path::PathBuf>> {
        let store = &self.inner.store;
        let dirs: Option<Vec<u64>> = store.read(|s| record.chains.iter().rev().map(|c| s.layers.get(c).map(|l| l.dir)).collect());
        Some(dirs?.into_iter().map(|dir| store.layer(dir)).collect())
    }
}

/// The name that `reference` is recorded under; None: it is an id.
fn name_of(reference: &str) -> Option<String> {
    let reference = reference::normalize(reference).ok()?;
    Some(match &reference.digest {
        Some(digest) => format!("{}@{digest}", reference.name()),
        None => reference.to_string(),
    })
}
