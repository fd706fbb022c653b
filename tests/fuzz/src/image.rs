//! What registries and image archives send.

use std::io::Read;

use coracle::api::yaml::{self, Limits};
use coracle::images::archive::{Archive, Kind};
use coracle::images::layer::{DecodeLimits, decompress};
use coracle::images::manifest as documents;
use coracle::images::model::{HostAuth, Platform, PullAuth, RegistryConfig};
use coracle::images::unpack::marks::MarkReader;
use coracle::images::unpack::names::{self, MAX_DEPTH, Place};
use coracle::images::{auth, endpoint, reference as references};

/// A reference's own text means the same reference, and is safe in a URL.
pub fn reference(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(found) = references::normalize(&text) else { return };
    let shown = found.to_string();
    assert_eq!(references::normalize(&shown).expect("a whole name"), found, "{shown}");
    assert!(shown.bytes().all(|b| b.is_ascii_graphic() && !b"?#%\\\"<>".contains(&b)), "{shown}");
    assert!(!found.repository.split('/').any(|p| matches!(p, "" | "." | "..")), "{shown}");
    assert!(found.tag.is_some() || found.digest.is_some());
}

/// Whatever mirrors are configured, the registry itself comes last; rewrites end.
pub fn registries(data: &[u8]) {
    let limits = Limits { nodes: 10_000, depth: 32 };
    let Some(Ok(tree)) = yaml::documents(data, limits).next() else { return };
    let Ok((config, _)) = tree.read::<RegistryConfig>() else { return };
    for name in ["busybox", "quay.io/a/b:1", "localhost:5000/x"] {
        let image = references::normalize(name).expect("a good name");
        let Ok(endpoints) = endpoint::endpoints(&image, &config) else { continue };
        assert!(endpoints.iter().any(|e| e.own || e.repository == image.repository));
        for endpoint in endpoints {
            let url = endpoint.url("manifests/latest");
            assert!(url.starts_with("http") && url.bytes().all(|b| b.is_ascii_graphic() && b != b'#'), "{url}");
        }
    }
}

/// Nothing of a challenge holds a control character; credentials are only offered by host.
pub fn challenge(data: &[u8]) {
    let [header, key, host] = crate::texts(data);
    for challenge in auth::challenges(&header) {
        assert!(!challenge.scheme.is_empty());
        if let Some(realm) = challenge.param("realm") {
            assert!(realm.len() <= header.len());
            auth::may_have(realm, &host);
        }
    }
    let one = PullAuth { host: key.clone(), username: "u".into(), password: "p".into(), ..PullAuth::default() };
    let chosen = auth::choose(&[one], &host, false, "a/b");
    assert!(chosen.is_empty() || !key.is_empty());
    drop(auth::Credentials::configured(&HostAuth { auth: header.clone(), ..HostAuth::default() }));
    assert_eq!(auth::base64_decode(&auth::base64(header.as_bytes())).as_deref(), Some(header.as_bytes()));
}

pub fn manifest(data: &[u8]) {
    let wanted = Platform { os: "linux".into(), architecture: "amd64".into(), variant: String::new() };
    match documents::parse(data, None, 100) {
        Ok(documents::Document::Index(entries)) => {
            if let Ok(one) = documents::choose(&entries, &wanted) {
                assert!(entries.contains(one));
            }
        }
        Ok(documents::Document::Manifest(manifest)) => {
            assert!(manifest.layers.len() <= 100);
            let layers: Vec<_> = manifest.layers.iter().map(|l| (l.digest, l.size, l.media_type.as_str())).collect();
            let composed = documents::compose((manifest.config.digest, manifest.config.size), &layers);
            assert!(matches!(documents::parse(&composed, None, 100), Ok(documents::Document::Manifest(m)) if m.layers.len() == layers.len()));
        }
        Err(e) => assert!(e.to_string().len() < 2000, "a message of {} bytes", e.to_string().len()),
    }
}

pub fn config(data: &[u8]) {
    let config = match documents::parse_config(data) {
        Ok(config) => config,
        Err(e) => return assert!(e.to_string().len() < 2000, "a message of {} bytes", e.to_string().len()),
    };
    let layers = config.diff_ids.len();
    assert_eq!(documents::chains(&config.diff_ids).len(), layers);
    assert!(documents::check_config(&config, layers + 1, &config.platform).is_err());
    let all = config.config.env.iter().chain(&config.config.cmd).chain(&config.config.entrypoint);
    assert!(all.chain([&config.config.user]).all(|t| !t.contains('\0')));
}

const LIMITS: DecodeLimits = DecodeLimits { bytes: 256 << 10, ratio: 20, ratio_floor: 64 << 10, window: 1 << 20 };

fn drain(mut plain: impl Read, most: u64) -> Vec<u8> {
    let (mut out, mut buffer) = (Vec::new(), vec![0; 8192]);
    while let Ok(n @ 1..) = plain.read(&mut buffer) {
        out.extend_from_slice(&buffer[..n]);
        assert!(out.len() as u64 <= most, "{} bytes came out", out.len());
    }
    out
}

/// No more comes out than the limits allow, whatever the stream says of itself.
pub fn inflate(data: &[u8]) {
    if let Ok(plain) = decompress(data, LIMITS) {
        let packed = data.starts_with(&[0x1f, 0x8b]) || data.get(1..4) == Some(&[0xb5, 0x2f, 0xfd]);
        let swell = LIMITS.ratio_floor.max((LIMITS.ratio + 1) * data.len() as u64);
        drain(plain, if packed { swell.min(LIMITS.bytes) } else { LIMITS.bytes });
    }
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, data).expect("to memory");
    let packed = packed.finish().expect("to memory");
    let limits = DecodeLimits { bytes: 1 << 30, ratio: 1 << 20, ..LIMITS };
    assert_eq!(drain(decompress(&packed[..], limits).expect("our own gzip"), 1 << 30), data);
}

fn entries(plain: impl Read) {
    let mut archive = Archive::new(plain);
    let mut buffer = [0; 4096];
    for _ in 0..10_000 {
        let Ok(Some(entry)) = archive.next_entry() else { return };
        assert!(entry.name.len() <= 4096 && entry.link.len() <= 4096 && entry.mode <= 0o7777);
        assert!(entry.uid != u32::MAX && entry.gid != u32::MAX && entry.mtime.1 < 1_000_000_000);
        assert!(entry.kind == Kind::File || entry.size == 0);
        placed(&entry.name);
        // What is left of an entry's data is skipped by the next one.
        let mut got = 0;
        while got < entry.size && entry.uid % 2 == 0 {
            match archive.read(&mut buffer) {
                Ok(n) => {
                    assert!(n > 0, "short data without an error");
                    got += n as u64;
                }
                Err(_) => return,
            }
        }
        assert!(got <= entry.size);
    }
}

/// Only plain names reach the file system.
fn placed(name: &[u8]) {
    let Ok(place) = names::place(name) else { return };
    let parts = match place {
        Place::Root | Place::Skip => return,
        Place::At { mut parents, name } | Place::Whiteout { mut parents, name } => {
            parents.push(name);
            parents
        }
        Place::Opaque { dir } => dir,
    };
    assert!(parts.len() <= MAX_DEPTH);
    for part in parts {
        assert!(!part.is_empty() && part.len() <= 255 && part != b"." && part != b"..");
        assert!(!part.contains(&b'/') && !part.contains(&0));
    }
}

/// As a layer arrives: compressed or not.
pub fn layer(data: &[u8]) {
    if let Ok(plain) = decompress(data, LIMITS) {
        entries(plain);
    }
}

/// The archive itself, with the checksum of each block that looks like a header put right: else
/// hardly any input would get past it.
pub fn tar(data: &[u8]) {
    let mut data = data.to_vec();
    for block in data.chunks_exact_mut(512).filter(|b| b[156].is_ascii_alphanumeric()) {
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|b| u64::from(*b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    entries(&data[..]);
    placed(&data);
}

/// The file of marks that a confined child left is read to its end or to an error.
pub fn marks(data: &[u8]) {
    for mark in MarkReader::new(data) {
        if mark.is_err() {
            return;
        }
    }
}
