//! Makes an image without a registry or a container tool: one layer of given files, as an OCI
//! layout in one tar.
//!
//! Invariant: equal input gives equal bytes: no clock is read, no owner is asked for. The demo
//! image is made from the running binary, so `make demo` needs nothing from anywhere.
//! image-spec image-layout.md.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use serde::Serialize;
use tar::{Builder, EntryType, Header};

use super::digest::{Digest, Hasher};
use super::manifest::{OCI_INDEX, OCI_MANIFEST, compose};
use super::model::Platform;

/// What an image is made of.
pub struct Recipe<'a> {
    /// Names, whole: `docker.io/library/demo:latest`.
    pub names: &'a [&'a str],
    pub platform: &'a Platform,
    pub entrypoint: &'a [&'a str],
    pub cmd: &'a [&'a str],
    pub env: &'a [&'a str],
    /// In this order; parents before what is in them.
    pub files: &'a [Item<'a>],
}

pub enum Item<'a> {
    Dir {
        name: &'a str,
        mode: u32,
    },
    Text {
        name: &'a str,
        mode: u32,
        text: &'a str,
    },
    /// A file of this host.
    Copy {
        name: &'a str,
        mode: u32,
        from: &'a Path,
    },
    HardLink {
        name: &'a str,
        to: &'a str,
    },
}

/// The demo image: this program as `/bin/coracle`, and what a container expects around it.
pub fn demo(binary: &Path, out: &Path) -> io::Result<()> {
    let passwd = "root:x:0:0:root:/root:/bin/coracle\nnobody:x:65534:65534:nobody:/:/bin/coracle\n";
    make(
        &Recipe {
            names: &["docker.io/library/coracle-demo:latest"],
            platform: &Platform::host(),
            entrypoint: &["/bin/coracle", "demo"],
            cmd: &["web"],
            env: &["PATH=/bin"],
            files: &[
                Item::Dir { name: "bin", mode: 0o755 },
                Item::Copy { name: "bin/coracle", mode: 0o755, from: binary },
                Item::Dir { name: "dev", mode: 0o755 },
                Item::Dir { name: "etc", mode: 0o755 },
                Item::Text { name: "etc/passwd", mode: 0o644, text: passwd },
                Item::Text { name: "etc/group", mode: 0o644, text: "root:x:0:\nnogroup:x:65534:\n" },
                Item::Dir { name: "proc", mode: 0o755 },
                Item::Dir { name: "root", mode: 0o700 },
                Item::Dir { name: "sys", mode: 0o755 },
                Item::Dir { name: "tmp", mode: 0o1777 },
            ],
        },
        out,
    )
}

/// Writes the image to `out`. The layer is not compressed: it is read back at once, from the
/// same disk.
pub fn make(recipe: &Recipe<'_>, out: &Path) -> io::Result<()> {
    let mut hasher = Hasher::default();
    layer(recipe, &mut HashWriter(&mut hasher))?;
    let (layer_size, diff) = (hasher.count, hasher.digest());
    let config = config(recipe, &diff)?;
    let config_digest = Digest::of(&config);
    let manifest = compose((config_digest, config.len() as u64), &[(diff, layer_size, "tar")]);
    let index = index(recipe, &manifest)?;
    let mut tar = Builder::new(BufWriter::new(File::create(out)?));
    let blob = |digest: &Digest| format!("blobs/sha256/{}", digest.hex());
    add(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add(&mut tar, "index.json", &index)?;
    add(&mut tar, &blob(&Digest::of(&manifest)), &manifest)?;
    add(&mut tar, &blob(&config_digest), &config)?;
    // The layer is written as a stream, so its header comes by hand.
    let mut header = header(EntryType::Regular, 0o644, layer_size);
    header.set_path(blob(&diff))?;
    header.set_cksum();
    let file = tar.get_mut();
    file.write_all(header.as_bytes())?;
    layer(recipe, file)?;
    let pad = layer_size.wrapping_neg() % 512;
    file.write_all(&[0; 512][..pad as usize])?;
    tar.into_inner()?.into_inner().map_err(|e| e.into_error())?.sync_all()
}

struct HashWriter<'h>(&'h mut Hasher);

impl Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
    header
}

fn add(tar: &mut Builder<impl Write>, name: &str, bytes: &[u8]) -> io::Result<()> {
    tar.append_data(&mut header(EntryType::Regular, 0o644, bytes.len() as u64), name, bytes)
}

fn layer(recipe: &Recipe<'_>, out: &mut impl Write) -> io::Result<()> {
    let mut tar = Builder::new(out);
    for item in recipe.files {
        match item {
            Item::Dir { name, mode } => tar.append_data(&mut header(EntryType::Directory, *mode, 0), name, io::empty())?,
            Item::Text { name, mode, text } => {
                tar.append_data(&mut header(EntryType::Regular, *mode, text.len() as u64), name, text.as_bytes())?;
            }
            Item::Copy { name, mode, from } => {
                let file = File::open(from)?;
                let size = file.metadata()?.len();
                tar.append_data(&mut header(EntryType::Regular, *mode, size), name, file.take(size))?;
            }
            Item::HardLink { name, to } => tar.append_link(&mut header(EntryType::Link, 0o755, 0), name, to)?,
        }
    }
    tar.finish()
}

fn config(recipe: &Recipe<'_>, diff: &Digest) -> io::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Config<'a> {
        os: &'a str,
        architecture: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        variant: &'a str,
        config: Inner<'a>,
        rootfs: Rootfs,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct Inner<'a> {
        entrypoint: &'a [&'a str],
        cmd: &'a [&'a str],
        env: &'a [&'a str],
    }
    #[derive(Serialize)]
    struct Rootfs {
        r#type: &'static str,
        diff_ids: [String; 1],
    }
    let Platform { os, architecture, variant } = recipe.platform;
    let config = Inner { entrypoint: recipe.entrypoint, cmd: recipe.cmd, env: recipe.env };
    let rootfs = Rootfs { r#type: "layers", diff_ids: [diff.to_string()] };
    Ok(serde_json::to_vec(&Config { os, architecture, variant, config, rootfs })?)
}

fn index(recipe: &Recipe<'_>, manifest: &[u8]) -> io::Result<Vec<u8>> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Index<'a> {
        schema_version: u32,
        media_type: &'a str,
        manifests: Vec<Item<'a>>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Item<'a> {
        media_type: &'a str,
        digest: String,
        size: usize,
        annotations: Annotations<'a>,
    }
    #[derive(Serialize)]
    struct Annotations<'a> {
        #[serde(rename = "io.containerd.image.name")]
        name: &'a str,
    }
    let item = |name| Item {
        media_type: OCI_MANIFEST,
        digest: Digest::of(manifest).to_string(),
        size: manifest.len(),
        annotations: Annotations { name },
    };
    let manifests = recipe.names.iter().map(|&name| item(name)).collect();
    Ok(serde_json::to_vec(&Index { schema_version: 2, media_type: OCI_INDEX, manifests })?)
}
