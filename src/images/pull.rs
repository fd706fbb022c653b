//! A pull from reference to present image, and the sharing of pulls that run at the same time.
//!
//! Invariant: of pulls with equal reference and credentials one does the work; the others get its
//! outcome. Different credentials never share (T15).

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Images;
use super::assemble::Document;
use super::digest::Digest;
use super::endpoint::endpoints;
use super::error::{PullError, copy};
use super::manifest;
use super::model::{Image, ImageError, PullAuth};
use super::reference::Reference;
use super::registry::Registry;
use super::transport::Transport;

#[derive(Debug, Default)]
pub struct Flights(Mutex<Vec<Arc<Flight>>>);

#[derive(Debug)]
struct Flight {
    reference: Reference,
    auth: Vec<PullAuth>,
    outcome: Mutex<Option<Result<Image, ImageError>>>,
    landed: Condvar,
}

impl Flights {
    /// Does `work`, or waits for somebody who does the same.
    pub fn share(
        &self,
        reference: &Reference,
        auth: &[PullAuth],
        work: impl FnOnce() -> Result<Image, ImageError>,
    ) -> Result<Image, ImageError> {
        let flight = Arc::new(Flight {
            reference: reference.clone(),
            auth: auth.to_vec(),
            outcome: Mutex::new(None),
            landed: Condvar::new(),
        });
        {
            let mut flights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(other) = flights.iter().find(|f| f.reference == *reference && f.auth == auth) {
                let other = other.clone();
                drop(flights);
                return other.wait();
            }
            flights.push(flight.clone());
        }
        let outcome = work();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|f| !Arc::ptr_eq(f, &flight));
        *flight.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(again(&outcome));
        flight.landed.notify_all();
        outcome
    }
}

impl Flight {
    fn wait(&self) -> Result<Image, ImageError> {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = outcome.as_ref() {
                return again(outcome);
            }
            outcome = self.landed.wait(outcome).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// io::Error has no Clone.
fn again(outcome: &Result<Image, ImageError>) -> Result<Image, ImageError> {
    match outcome {
        Ok(image) => Ok(image.clone()),
        Err(error) => Err(match error {
            ImageError::InvalidName { reference, why } => {
                ImageError::InvalidName { reference: reference.clone(), why: why.clone() }
            }
            ImageError::Pull { reference, why } => ImageError::Pull { reference: reference.clone(), why: why.clone() },
            ImageError::Unavailable { reference, host, why } => {
                ImageError::Unavailable { reference: reference.clone(), host: host.clone(), why: why.clone() }
            }
            ImageError::NotPresent(reference) => ImageError::NotPresent(reference.clone()),
            ImageError::Import { path, why } => ImageError::Import { path: path.clone(), why: why.clone() },
            ImageError::Inspect { reference, why } => ImageError::Inspect { reference: reference.clone(), why: why.clone() },
            ImageError::Store { operation, path, source } => {
                ImageError::Store { operation, path: path.clone(), source: copy(source) }
            }
        }),
    }
}

impl Images {
    pub(super) fn pull_now(&self, reference: &Reference, auth: &[PullAuth]) -> Result<Image, PullError> {
        let inner = &self.inner;
        let registries = &inner.config.registries;
        let stall = Duration::from_secs(inner.config.limits.stall_seconds);
        let mut last: Option<PullError> = None;
        for endpoint in endpoints(reference, registries).map_err(PullError::Refused)? {
            let transport = Transport::new(registries, &endpoint.authority, stall, &inner.cancelled);
            let own = endpoint.own;
            let registry = Registry::new(endpoint, registries, transport, auth);
            match self.pull_from(reference, &registry) {
                Ok(image) => return Ok(image),
                // The store's troubles are the same at every endpoint.
                Err(e @ (PullError::Store { .. } | PullError::Cancelled)) => return Err(e),
                Err(e) => {
                    if !own {
                        tracing::warn!(image = %reference, mirror = %registry.endpoint.authority, error = %e, "a mirror failed; trying the next place");
                    }
                    last = Some(e);
                }
            }
        }
        Err(last.unwrap_or_else(|| PullError::refused("there is nowhere to pull it from")))
    }

    fn pull_from(&self, reference: &Reference, registry: &Registry<'_>) -> Result<Image, PullError> {
        let platform = &self.inner.config.platform;
        let max_layers = self.inner.config.limits.layers;
        let mut wanted = reference.digest.clone().or_else(|| reference.tag.clone()).unwrap_or_else(|| "latest".to_owned());
        let mut top: Option<Digest> = None;
        for _ in 0..3 {
            let fetched = registry.manifest(&wanted)?;
            let digest = Digest::of(&fetched.bytes);
            if Digest::parse(&wanted).is_some_and(|d| d != digest) {
                return Err(PullError::refused(format!("manifest {wanted} has the digest {digest}")));
            }
            top = top.or(Some(digest));
            match manifest::parse(&fetched.bytes, fetched.content_type.as_deref(), max_layers)? {
                manifest::Document::Index(entries) => wanted = manifest::choose(&entries, platform)?.digest.to_string(),
                manifest::Document::Manifest(parsed) => {
                    let document = Document { digest, bytes: &fetched.bytes, manifest: &parsed };
                    let mut names = vec![format!("{}@{}", reference.name(), top.unwrap_or(digest))];
                    if reference.digest.is_none() {
                        names.push(reference.to_string());
                    }
                    let claim = self.assembly(registry).run(&document, &names, false).inspect_err(|_| {
                        // Blobs that no image came of; what cannot go now goes with the next sweep.
                        let _ = self.inner.store.sweep();
                    })?;
                    let image = self.image(&digest)?;
                    drop(claim);
                    // A tag that moved may have left an image without a name.
                    self.inner.store.sweep()?;
                    return image.ok_or_else(|| PullError::Store {
                        operation: "read back",
                        path: self.inner.store.blob(&digest),
                        source: io::ErrorKind::NotFound.into(),
                    });
                }
            }
        }
        Err(PullError::refused("its indexes are nested too deeply"))
    }
}
