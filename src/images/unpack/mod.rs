//! The child `coracle unpack DIR`: one layer's compressed bytes on stdin become a tree in
//! `DIR/fs`; a [`Report`] goes to stdout.
//!
//! Invariant: it trusts nothing that it reads and can harm nothing outside `DIR`, which is its
//! root by then. What needs the layers below is noted in `DIR/marks` for `finish`.

mod confine;
pub mod marks;
pub mod names;
pub mod tree;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::archive::{Archive, ArchiveError};
use super::digest::HashReader;
use super::layer::{self, DecodeLimits};
use crate::sys::chain::chain;
use crate::sys::dir;

pub const TREE: &str = "fs";
pub const MARKS: &str = "marks";

/// What the child is started with.
#[derive(Clone, Debug)]
pub struct UnpackArgs {
    /// A directory that holds an empty `fs` and is nobody else's.
    pub dir: PathBuf,
    /// It is the image's lowest layer.
    pub base: bool,
    pub entries: u64,
    pub limits: DecodeLimits,
}

/// What the child found, as one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Report {
    /// Digest of the uncompressed tar: the layer's diffID.
    pub diff_id: String,
    pub entries: u64,
    /// Uncompressed bytes.
    pub bytes: u64,
}

/// Why it stopped, as one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Failure {
    pub error: String,
    /// The errno, where the system and not the layer is to blame.
    pub errno: Option<i32>,
}

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("unpacking could not be confined to its directory")]
    Confine(#[source] io::Error),
    #[error("the layer could not be read")]
    Stream(#[source] io::Error),
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error("entry {name} is refused: {why}")]
    Entry { name: String, why: String },
    #[error("the layer has more than {0} entries")]
    TooMany(u64),
    #[error("cannot {operation} {name}")]
    Io { operation: &'static str, name: String, source: io::Error },
}

impl UnpackError {
    pub fn failure(&self) -> Failure {
        let error = chain(self).to_string();
        let errno = match self {
            UnpackError::Confine(e) | UnpackError::Io { source: e, .. } => e.raw_os_error(),
            UnpackError::Stream(_) | UnpackError::Archive(_) | UnpackError::Entry { .. } | UnpackError::TooMany(_) => None,
        };
        Failure { error, errno }
    }
}

/// Confines this process for good and unpacks `input`.
pub fn run(args: &UnpackArgs, input: impl Read) -> Result<Report, UnpackError> {
    confine::confine(&args.dir, args.limits.bytes).map_err(UnpackError::Confine)?;
    unpack(Path::new("/"), args, input)
}

fn unpack(dir: &Path, args: &UnpackArgs, input: impl Read) -> Result<Report, UnpackError> {
    let failed = |operation, what: &Path| {
        let name = what.display().to_string();
        move |source| UnpackError::Io { operation, name, source }
    };
    let (tree, marks) = (dir.join(TREE), dir.join(MARKS));
    let root = dir::open_root(&tree).map_err(failed("open", &tree))?;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&marks)
        .map_err(failed("open", &marks))?;
    let mut tree = tree::Tree::new(root, file, args.base);
    let plain = layer::decompress(input, args.limits).map_err(UnpackError::Stream)?;
    let mut archive = Archive::new(HashReader::new(plain));
    let mut entries = 0;
    while let Some(entry) = archive.next_entry()? {
        entries += 1;
        if entries > args.entries {
            return Err(UnpackError::TooMany(args.entries));
        }
        tree.apply(&entry, &mut archive)?;
    }
    archive.drain()?;
    tree.end().map_err(failed("set times below", dir))?;
    let hasher = archive.into_inner().hasher;
    let bytes = hasher.count;
    Ok(Report { diff_id: hasher.digest().to_string(), entries, bytes })
}
