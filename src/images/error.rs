//! Why getting an image failed, before it is known which reference it was for.

use std::io;
use std::path::{Path, PathBuf};

use super::manifest::ManifestError;
use super::model::ImageError;
use crate::store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The registry, or what it sent, is to blame.
    #[error("{0}")]
    Refused(String),
    /// The connection broke off; what came so far is kept and resumed from.
    #[error("{0}")]
    Broken(String),
    #[error("{host} is unavailable: {why}")]
    Unavailable { host: String, why: String },
    #[error("{operation} {}", path.display())]
    Store { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("cancelled: the agent is stopping")]
    Cancelled,
}

impl PullError {
    pub fn refused(why: impl Into<String>) -> PullError {
        PullError::Refused(why.into())
    }

    pub fn store(operation: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> PullError {
        let path = path.as_ref().to_owned();
        move |source| PullError::Store { operation, path, source }
    }

    pub fn into_image(self, reference: &str) -> ImageError {
        let reference = reference.to_owned();
        match self {
            PullError::Refused(why) | PullError::Broken(why) => ImageError::Pull { reference, why },
            PullError::Unavailable { host, why } => ImageError::Unavailable { reference, host, why },
            PullError::Store { operation, path, source } => ImageError::Store { operation, path, source },
            PullError::Cancelled => ImageError::Pull { reference, why: PullError::Cancelled.to_string() },
        }
    }

    pub fn into_import(self, path: &Path) -> ImageError {
        match self {
            PullError::Store { operation, path, source } => ImageError::Store { operation, path, source },
            PullError::Refused(_) | PullError::Broken(_) | PullError::Unavailable { .. } | PullError::Cancelled => {
                ImageError::Import { path: path.to_owned(), why: self.to_string() }
            }
        }
    }
}

impl From<ManifestError> for PullError {
    fn from(error: ManifestError) -> PullError {
        PullError::Refused(error.to_string())
    }
}

impl From<StoreError> for PullError {
    fn from(error: StoreError) -> PullError {
        match error {
            StoreError::Io { operation, path, source } | StoreError::NoSpace { operation, path, source } => {
                PullError::Store { operation, path, source: copy(&source) }
            }
            other => PullError::Store {
                operation: "record images in",
                path: PathBuf::new(),
                source: io::Error::other(other.to_string()),
            },
        }
    }
}

/// The same error once more: every waiter of one pull is told.
pub fn copy(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}
