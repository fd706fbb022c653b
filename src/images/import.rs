//! Takes images in from files: an OCI layout (a directory, or a tar of one) or what `docker save`
//! writes, each plain, gzipped or zstd-compressed.
//!
//! Invariant: what a file calls itself is not believed: blobs are looked up by digest and checked
//! like a registry's. A tar is copied once, into a scratch directory under names of our own.
//! image-spec image-layout.md; moby image/tarexport.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::archive::{Archive, Kind, show};
use super::blobs::BlobSource;
use super::digest::{Digest, HashReader};
use super::error::PullError;
use super::layer::{self, DecodeLimits};
use super::manifest::{self, Descriptor, Document, MAX_DOCUMENT};
use super::model::{ImportOptions, Limits, Platform};
use super::reference;
use super::stage::FeedError;
use crate::sys::chain::chain;

/// Files of an archive, at most.
const MAX_FILES: usize = 10_000;

/// An image that was found, with the names it is to get.
pub struct Found {
    pub digest: Digest,
    pub bytes: Vec<u8>,
    pub manifest: manifest::Manifest,
    pub names: Vec<String>,
}

/// Blobs by digest, wherever they lie.
#[derive(Default)]
pub struct Files {
    blobs: BTreeMap<Digest, PathBuf>,
    /// Removed with the value.
    scratch: Option<PathBuf>,
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Some(scratch) = &self.scratch {
            // What stays is cleared at the next start.
            let _ = fs::remove_dir_all(scratch);
        }
    }
}

impl BlobSource for Files {
    fn copy(
        &self,
        blob: &Descriptor,
        offset: u64,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
    ) -> Result<(), FeedError> {
        let source = FeedError::Source;
        let Some(path) = self.blobs.get(&blob.digest) else {
            return Err(source(PullError::refused(format!("blob {} is missing from it", blob.digest))));
        };
        let mut file = File::open(path).map_err(|e| source(PullError::store("open", path)(e)))?;
        io::Seek::seek(&mut file, io::SeekFrom::Start(offset)).map_err(|e| source(PullError::store("read", path)(e)))?;
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => sink(buffer.get(..n).unwrap_or_default())?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(source(PullError::store("read", path)(e))),
            }
        }
    }
}

impl Files {
    fn document(&self, digest: &Digest) -> Result<Vec<u8>, PullError> {
        let Some(path) = self.blobs.get(digest) else {
            return Err(PullError::refused(format!("blob {digest} is missing from it")));
        };
        let bytes = bounded(path)?;
        if Digest::of(&bytes) != *digest {
            return Err(PullError::refused(format!("blob {digest} has other bytes than its name says")));
        }
        Ok(bytes)
    }
}

fn bounded(path: &Path) -> Result<Vec<u8>, PullError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(PullError::store("open", path))?;
    file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes).map_err(PullError::store("read", path))?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(PullError::refused(format!("{} is larger than {MAX_DOCUMENT} bytes", path.display())));
    }
    Ok(bytes)
}

/// Opens `path` and lists the images in it that run here. `scratch` is a new directory's path.
pub fn open(
    path: &Path,
    scratch: &Path,
    options: &ImportOptions,
    platform: &Platform,
    limits: &Limits,
) -> Result<(Files, Vec<Found>), PullError> {
    let meta = fs::metadata(path).map_err(PullError::store("open", path))?;
    let (mut files, others) = if meta.is_dir() { (Files::default(), layout_dir(path)?) } else { spread(path, scratch, limits)? };
    if let Some(others) = others.get("index.json") {
        let index = bounded(others)?;
        if meta.is_dir() {
            files.blobs = layout_blobs(path)?;
        }
        let found = layout(&files, &index, options, platform, limits)?;
        return Ok((files, found));
    }
    if let Some(list) = others.get("manifest.json") {
        let list = bounded(list)?;
        let found = docker(&mut files, &others, &list, options)?;
        return Ok((files, found));
    }
    Err(PullError::refused("it is neither an OCI layout (index.json) nor a docker archive (manifest.json)"))
}

fn layout_dir(path: &Path) -> Result<BTreeMap<String, PathBuf>, PullError> {
    let index = path.join("index.json");
    Ok(if index.is_file() { BTreeMap::from([("index.json".to_owned(), index)]) } else { BTreeMap::new() })
}

fn layout_blobs(path: &Path) -> Result<BTreeMap<Digest, PathBuf>, PullError> {
    let dir = path.join("blobs/sha256");
    let mut blobs = BTreeMap::new();
    for entry in fs::read_dir(&dir).map_err(PullError::store("list", &dir))? {
        let entry = entry.map_err(PullError::store("list", &dir))?;
        if let Some(digest) = entry.file_name().to_str().and_then(Digest::from_hex) {
            blobs.insert(digest, entry.path());
        }
    }
    Ok(blobs)
}

/// Copies an archive's files to `scratch/<n>`, blobs by their digest, others by their name. Links
/// (old `docker save` links equal layers) are names for what they lead to.
fn spread(path: &Path, scratch: &Path, limits: &Limits) -> Result<(Files, BTreeMap<String, PathBuf>), PullError> {
    let malformed = |e: &dyn std::fmt::Display| PullError::refused(format!("it is no readable archive: {e}"));
    fs::create_dir(scratch).map_err(PullError::store("make", scratch))?;
    let mut files = Files { blobs: BTreeMap::new(), scratch: Some(scratch.to_owned()) };
    let file = File::open(path).map_err(PullError::store("open", path))?;
    // The layers inside are compressed already; the archive around them cannot be a bomb's first
    // stage larger than all layers of an image may be.
    let decode = DecodeLimits {
        bytes: limits.layer_bytes.saturating_mul(4),
        ratio: limits.ratio,
        ratio_floor: limits.ratio_floor,
        window: 128 << 20,
    };
    let mut archive = Archive::new(layer::decompress(file, decode).map_err(|e| malformed(&e))?);
    let mut others = BTreeMap::new();
    let mut links: Vec<(String, String)> = Vec::new();
    let mut count = 0usize;
    while let Some(entry) = archive.next_entry().map_err(|e| malformed(&chain(&e).to_string()))? {
        let name = match std::str::from_utf8(&entry.name) {
            Ok(name) => name.trim_start_matches("./").trim_start_matches('/').to_owned(),
            Err(_) => return Err(PullError::refused(format!("it holds a name that is no text: {}", show(&entry.name)))),
        };
        // Links count too: a round over them is work.
        count += 1;
        if count > MAX_FILES {
            return Err(PullError::refused(format!("it holds more than {MAX_FILES} files")));
        }
        match entry.kind {
            Kind::File => {}
            Kind::Symlink | Kind::HardLink => {
                let target = String::from_utf8_lossy(&entry.link).into_owned();
                let base = if entry.kind == Kind::Symlink { name.rsplit_once('/').map_or("", |(dir, _)| dir) } else { "" };
                let target = lexical(base, &target);
                links.push((name, target));
                continue;
            }
            Kind::Dir | Kind::Char | Kind::Block | Kind::Fifo => continue,
        }
        let to = scratch.join(count.to_string());
        let mut out = File::create(&to).map_err(PullError::store("make", &to))?;
        copy(&mut archive, &mut out, &to)?;
        match name.strip_prefix("blobs/sha256/").map(Digest::from_hex) {
            Some(Some(digest)) => drop(files.blobs.insert(digest, to.clone())),
            Some(None) => {}
            None => {}
        }
        others.insert(name, to);
    }
    // A link may lead to another one, in any order; a chain longer than this is nobody's.
    for _ in 0..4 {
        links.retain(|(name, target)| match others.get(target).cloned() {
            Some(path) => {
                others.insert(name.clone(), path);
                false
            }
            None => true,
        });
    }
    Ok((files, others))
}

fn copy(from: &mut impl Read, to: &mut File, path: &Path) -> Result<(), PullError> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(PullError::refused(format!("it could not be read: {e}"))),
        };
        to.write_all(buffer.get(..n).unwrap_or_default()).map_err(PullError::store("write", path))?;
    }
}

/// `a/b` and `../c/d` → `a/c/d`; never above the archive's top.
fn lexical(base: &str, target: &str) -> String {
    let mut parts: Vec<&str> =
        if target.starts_with('/') { Vec::new() } else { base.split('/').filter(|p| !p.is_empty()).collect() };
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn layout(
    files: &Files,
    index: &[u8],
    options: &ImportOptions,
    platform: &Platform,
    limits: &Limits,
) -> Result<Vec<Found>, PullError> {
    let entries = match manifest::parse(index, None, limits.layers)? {
        Document::Index(entries) => entries,
        Document::Manifest(_) => return Err(PullError::refused("its index.json is no index")),
    };
    // One name may have an entry a platform; an entry may be an index of platforms itself.
    let mut named: Vec<(Vec<String>, Vec<Descriptor>)> = Vec::new();
    for entry in entries {
        let names = names_of(&entry)?;
        match named.iter_mut().find(|(n, _)| *n == names) {
            Some((_, group)) => group.push(entry),
            None => named.push((names, vec![entry])),
        }
    }
    let mut found = Vec::new();
    let only = named.len() == 1;
    for (names, group) in named {
        let entry = match manifest::choose(&group, platform) {
            Ok(entry) => entry,
            Err(e) if only => return Err(e.into()),
            // An archive of many images may hold some of other machines.
            Err(_) => continue,
        };
        found.push(resolve(files, entry, names, platform, limits)?);
    }
    if found.is_empty() {
        return Err(PullError::refused("it holds no image for this machine"));
    }
    rename(found, options)
}

fn resolve(
    files: &Files,
    entry: &Descriptor,
    names: Vec<String>,
    platform: &Platform,
    limits: &Limits,
) -> Result<Found, PullError> {
    let mut digest = entry.digest;
    for _ in 0..3 {
        let bytes = files.document(&digest)?;
        match manifest::parse(&bytes, None, limits.layers)? {
            Document::Manifest(manifest) => return Ok(Found { digest, bytes, manifest, names }),
            Document::Index(entries) => digest = manifest::choose(&entries, platform)?.digest,
        }
    }
    Err(PullError::refused("its indexes are nested too deeply"))
}

/// `io.containerd.image.name` is a whole name; `ref.name` may be one, or only a tag (then it
/// names nothing).
fn names_of(entry: &Descriptor) -> Result<Vec<String>, PullError> {
    let whole = entry.image_name.as_deref().or(entry.ref_name.as_deref().filter(|n| n.contains(['/', ':', '.'])));
    whole.into_iter().map(normal).collect()
}

fn normal(name: &str) -> Result<String, PullError> {
    reference::normalize(name).map(|r| r.to_string()).map_err(|e| PullError::refused(e.to_string()))
}

fn rename(mut found: Vec<Found>, options: &ImportOptions) -> Result<Vec<Found>, PullError> {
    if let Some(name) = &options.name {
        match found.as_mut_slice() {
            [only] => only.names = vec![normal(name)?],
            all => return Err(PullError::refused(format!("it holds {} images; a name fits only one", all.len()))),
        }
    }
    Ok(found)
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// What `docker save` wrote before it wrote layouts: uncompressed layers and a list of them.
fn docker(
    files: &mut Files,
    others: &BTreeMap<String, PathBuf>,
    list: &[u8],
    options: &ImportOptions,
) -> Result<Vec<Found>, PullError> {
    let list: Vec<Saved> =
        serde_json::from_slice(list).map_err(|e| PullError::refused(format!("its manifest.json is not valid: {e}")))?;
    let mut found = Vec::new();
    for saved in list {
        let file = |name: &str| others.get(name).ok_or_else(|| PullError::refused(format!("file {name} is missing from it")));
        let config = bounded(file(&saved.config)?)?;
        let config_digest = Digest::of(&config);
        files.blobs.insert(config_digest, file(&saved.config)?.clone());
        let mut layers = Vec::new();
        for name in &saved.layers {
            let path = file(name)?;
            let (digest, size, kind) = describe(path)?;
            files.blobs.insert(digest, path.clone());
            layers.push((digest, size, kind));
        }
        let bytes = manifest::compose((config_digest, config.len() as u64), &layers);
        let manifest = match manifest::parse(&bytes, None, usize::MAX)? {
            Document::Manifest(manifest) => manifest,
            Document::Index(_) => return Err(PullError::refused("its manifest.json is not valid")),
        };
        let names: Result<Vec<String>, PullError> = saved.repo_tags.unwrap_or_default().iter().map(|t| normal(t)).collect();
        found.push(Found { digest: Digest::of(&bytes), bytes, manifest, names: names? });
    }
    if found.is_empty() {
        return Err(PullError::refused("it holds no image"));
    }
    rename(found, options)
}

fn describe(path: &Path) -> Result<(Digest, u64, &'static str), PullError> {
    let file = File::open(path).map_err(PullError::store("open", path))?;
    let mut reader = HashReader::new(file);
    let mut head = [0; 4];
    let n = reader.read(&mut head).map_err(PullError::store("read", path))?;
    io::copy(&mut reader, &mut io::sink()).map_err(PullError::store("read", path))?;
    let kind = match head.get(..n) {
        Some([0x1f, 0x8b, ..]) => "gzip",
        Some([0x28, 0xb5, 0x2f, 0xfd]) => "zstd",
        _ => "tar",
    };
    let size = reader.hasher.count;
    Ok((reader.hasher.digest(), size, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_end_at_the_archives_top() {
        assert_eq!(lexical("a", "../b/layer.tar"), "b/layer.tar");
        assert_eq!(lexical("a/b", "../../../../etc/passwd"), "etc/passwd");
        assert_eq!(lexical("a", "/x/./y"), "x/y");
        assert_eq!(lexical("", "x"), "x");
    }
}
