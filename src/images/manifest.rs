//! Manifests, indexes and image configs: parsed, checked, and the right one chosen. Pure.
//!
//! Invariant: a [`Manifest`] has as many layers as its config must have diffIDs, every digest in it
//! is a checked sha256, and what could be read two ways (both `manifests` and `layers`,
//! CVE-2021-41190) is refused. image-spec manifest.md, image-index.md, config.md; Docker's
//! "Image Manifest Version 2, Schema 2".
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::digest::{Digest, Hasher};
use super::model::{ImageConfig, Platform};

/// Of a manifest, index or config; registries allow 4 MiB too.
pub const MAX_DOCUMENT: u64 = 4 << 20;

pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_INDEX: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    #[error("its {what} of {size} bytes is above the limit of {MAX_DOCUMENT}")]
    TooLarge { what: &'static str, size: u64 },
    #[error("its {what} is not valid: {why}")]
    Invalid { what: &'static str, why: String },
    #[error("it is no container image: {0}")]
    NoImage(String),
    #[error("it has no image for {wanted}, only for {offered}")]
    NoPlatform { wanted: String, offered: String },
}

fn invalid<T>(what: &'static str, why: impl Into<String>) -> Result<T, ManifestError> {
    // serde_json quotes texts of any length.
    let why: String = why.into();
    Err(ManifestError::Invalid { what, why: why.chars().take(300).collect() })
}

/// A checked pointer to a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    pub platform: Option<Platform>,
    /// `org.opencontainers.image.ref.name`: a tag, or by habit a whole name.
    pub ref_name: Option<String>,
    /// `io.containerd.image.name`: a whole name.
    pub image_name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    Index(Vec<Descriptor>),
    Manifest(Manifest),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub config: Descriptor,
    /// Lowest first.
    pub layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: Option<u32>,
    media_type: Option<String>,
    manifests: Option<Vec<RawDescriptor>>,
    config: Option<RawDescriptor>,
    layers: Option<Vec<RawDescriptor>>,
    fs_layers: Option<IgnoredAny>,
    artifact_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDescriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: i64,
    platform: Option<RawPlatform>,
    annotations: Option<RawAnnotations>,
}

#[derive(Deserialize)]
struct RawPlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

#[derive(Deserialize)]
struct RawAnnotations {
    #[serde(rename = "org.opencontainers.image.ref.name")]
    ref_name: Option<String>,
    #[serde(rename = "io.containerd.image.name")]
    image_name: Option<String>,
}

/// Reads a manifest or an index. `content_type` is what the registry called it; it may not
/// contradict what the document says of itself.
pub fn parse(bytes: &[u8], content_type: Option<&str>, max_layers: usize) -> Result<Document, ManifestError> {
    let what = "manifest";
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(ManifestError::TooLarge { what, size: bytes.len() as u64 });
    }
    let raw: RawDocument = serde_json::from_slice(bytes).or_else(|e| invalid(what, e.to_string()))?;
    if raw.fs_layers.is_some() || raw.schema_version == Some(1) {
        return Err(ManifestError::NoImage("Docker schema 1 is not supported; push it again with a current tool".into()));
    }
    if raw.schema_version != Some(2) {
        return invalid(what, "schemaVersion must be 2");
    }
    let known = |t: &str| matches!(t, OCI_MANIFEST | OCI_INDEX | DOCKER_MANIFEST | DOCKER_INDEX);
    if let (Some(inside), Some(outside)) = (raw.media_type.as_deref(), content_type)
        && known(outside)
        && known(inside)
        && inside != outside
    {
        return invalid(what, format!("the registry calls it {outside}, itself {inside}"));
    }
    let media_type = raw.media_type.as_deref().or(content_type).unwrap_or_default();
    match (raw.manifests, raw.config, raw.layers) {
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => invalid(what, "it has both manifests and layers"),
        (Some(manifests), None, None) => {
            if matches!(media_type, OCI_MANIFEST | DOCKER_MANIFEST) {
                return invalid(what, "it is called a manifest and has manifests");
            }
            Ok(Document::Index(manifests.into_iter().map(|d| descriptor(d, what)).collect::<Result<_, _>>()?))
        }
        (None, Some(config), Some(layers)) => {
            if matches!(media_type, OCI_INDEX | DOCKER_INDEX) {
                return invalid(what, "it is called an index and has layers");
            }
            manifest(config, layers, raw.artifact_type, max_layers).map(Document::Manifest)
        }
        _ => invalid(what, "it has neither manifests nor config and layers"),
    }
}

fn manifest(
    config: RawDescriptor,
    layers: Vec<RawDescriptor>,
    artifact: Option<String>,
    max: usize,
) -> Result<Manifest, ManifestError> {
    let config = descriptor(config, "config descriptor")?;
    if !matches!(config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG) {
        let kind = artifact.unwrap_or(config.media_type);
        return Err(ManifestError::NoImage(format!("it holds a {}", kind.chars().take(200).collect::<String>())));
    }
    if config.size > MAX_DOCUMENT {
        return Err(ManifestError::TooLarge { what: "config", size: config.size });
    }
    if layers.len() > max {
        return invalid("manifest", format!("{} layers are above the limit of {max}", layers.len()));
    }
    let layers: Vec<Descriptor> = layers.into_iter().map(|d| descriptor(d, "layer descriptor")).collect::<Result<_, _>>()?;
    for layer in &layers {
        let known = matches!(
            layer.media_type.as_str(),
            "application/vnd.oci.image.layer.v1.tar"
                | "application/vnd.oci.image.layer.v1.tar+gzip"
                | "application/vnd.oci.image.layer.v1.tar+zstd"
                | "application/vnd.oci.image.layer.nondistributable.v1.tar"
                | "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
                | "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
                | "application/vnd.docker.image.rootfs.diff.tar"
                | "application/vnd.docker.image.rootfs.diff.tar.gzip"
                | "application/vnd.docker.image.rootfs.diff.tar.zstd"
                | "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
        );
        if !known {
            return Err(ManifestError::NoImage(format!(
                "a layer is a {}",
                layer.media_type.chars().take(200).collect::<String>()
            )));
        }
    }
    Ok(Manifest { config, layers })
}

fn descriptor(raw: RawDescriptor, what: &'static str) -> Result<Descriptor, ManifestError> {
    let Some(digest) = Digest::parse(&raw.digest) else {
        let shown: String = raw.digest.chars().take(100).collect();
        return invalid(what, format!("digest {shown:?} is not sha256: and 64 lower-case hex digits"));
    };
    let Ok(size) = u64::try_from(raw.size) else { return invalid(what, "a negative size") };
    let (ref_name, image_name) = raw.annotations.map_or((None, None), |a| (a.ref_name, a.image_name));
    let platform =
        raw.platform.map(|p| Platform { os: p.os, architecture: p.architecture, variant: p.variant.unwrap_or_default() });
    Ok(Descriptor { media_type: raw.media_type, digest, size, platform, ref_name, image_name })
}

/// The entry of an index that fits `wanted` best.
pub fn choose<'d>(entries: &'d [Descriptor], wanted: &Platform) -> Result<&'d Descriptor, ManifestError> {
    let fit = |d: &&Descriptor| d.platform.as_ref().and_then(|p| rank(p, wanted));
    let best = entries
        .iter()
        .filter(|d| is_document(d))
        .filter(|d| fit(d).is_some())
        .max_by_key(|d| (fit(d), std::cmp::Reverse(position(entries, d))));
    if let Some(best) = best {
        return Ok(best);
    }
    // An index of one image may leave the platform to the config.
    let mut unnamed = entries.iter().filter(|d| is_document(d) && d.platform.is_none());
    if let (Some(only), None) = (unnamed.next(), unnamed.next()) {
        return Ok(only);
    }
    let mut offered: Vec<String> =
        entries.iter().filter_map(|d| d.platform.as_ref()).filter(|p| p.os != "unknown").map(show).collect();
    offered.dedup();
    offered.truncate(12);
    let offered = if offered.is_empty() { "no platform".to_owned() } else { offered.join(", ") };
    Err(ManifestError::NoPlatform { wanted: show(wanted), offered })
}

fn is_document(d: &Descriptor) -> bool {
    matches!(d.media_type.as_str(), "" | OCI_MANIFEST | OCI_INDEX | DOCKER_MANIFEST | DOCKER_INDEX)
}

fn position(entries: &[Descriptor], one: &Descriptor) -> usize {
    entries.iter().position(|d| std::ptr::eq(d, one)).unwrap_or(usize::MAX)
}

fn show(p: &Platform) -> String {
    let variant = if p.variant.is_empty() { String::new() } else { format!("/{}", p.variant) };
    format!("{}/{}{variant}", p.os, p.architecture).chars().take(60).collect()
}

/// How well `offered` runs here; None: not at all. A 32-bit ARM runs all older variants.
fn rank(offered: &Platform, wanted: &Platform) -> Option<u32> {
    let architecture = match offered.architecture.as_str() {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    if offered.os != wanted.os || architecture != wanted.architecture {
        return None;
    }
    let level = |p: &Platform, none: u32| match p.variant.strip_prefix('v') {
        Some(n) => n.parse::<u32>().ok(),
        None if p.variant.is_empty() => Some(none),
        None => None,
    };
    let none = match architecture {
        "arm" => 7,
        "arm64" => 8,
        "amd64" => 1,
        _ => return (offered.variant == wanted.variant).then_some(1),
    };
    let (offered, wanted) = (level(offered, none)?, level(wanted, none)?);
    (offered <= wanted).then_some(offered)
}

/// What of an image's config we use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedConfig {
    pub config: ImageConfig,
    pub platform: Platform,
    /// Lowest first.
    pub diff_ids: Vec<Digest>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
    config: Option<RawInner>,
    rootfs: RawRootfs,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase")]
struct RawInner {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    stop_signal: Option<String>,
    volumes: Option<BTreeMap<String, IgnoredAny>>,
}

#[derive(Deserialize)]
struct RawRootfs {
    #[serde(default)]
    r#type: String,
    diff_ids: Option<Vec<String>>,
}

pub fn parse_config(bytes: &[u8]) -> Result<ParsedConfig, ManifestError> {
    let what = "config";
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(ManifestError::TooLarge { what, size: bytes.len() as u64 });
    }
    let raw: RawConfig = serde_json::from_slice(bytes).or_else(|e| invalid(what, e.to_string()))?;
    if raw.rootfs.r#type != "layers" {
        return invalid(what, "rootfs.type must be \"layers\"");
    }
    let diff_ids = raw.rootfs.diff_ids.unwrap_or_default();
    let diff_ids = diff_ids
        .iter()
        .map(|d| Digest::parse(d).ok_or(()).or_else(|()| invalid(what, "a diffID is not sha256: and 64 hex digits")));
    let inner = raw.config.unwrap_or_default();
    let texts = [&inner.user, &inner.working_dir, &inner.stop_signal];
    let lists = [&inner.env, &inner.entrypoint, &inner.cmd];
    let all = texts.into_iter().flatten().chain(lists.into_iter().flatten().flatten());
    if all.chain(inner.volumes.iter().flat_map(|v| v.keys())).any(|t| t.contains('\0')) {
        return invalid(what, "a text holds a NUL");
    }
    Ok(ParsedConfig {
        diff_ids: diff_ids.collect::<Result<_, _>>()?,
        platform: Platform { os: raw.os, architecture: raw.architecture, variant: raw.variant.unwrap_or_default() },
        config: ImageConfig {
            user: inner.user.unwrap_or_default(),
            env: inner.env.unwrap_or_default(),
            entrypoint: inner.entrypoint.unwrap_or_default(),
            cmd: inner.cmd.unwrap_or_default(),
            working_dir: inner.working_dir.unwrap_or_default(),
            stop_signal: inner.stop_signal.unwrap_or_default(),
            volumes: inner.volumes.unwrap_or_default().into_keys().collect(),
        },
    })
}

/// That a config belongs to its manifest and to this machine. A config may leave the platform out.
pub fn check_config(config: &ParsedConfig, layers: usize, wanted: &Platform) -> Result<(), ManifestError> {
    if config.diff_ids.len() != layers {
        return invalid("config", format!("it has {} diffIDs and its manifest {layers} layers", config.diff_ids.len()));
    }
    let offered = &config.platform;
    if !(offered.os.is_empty() && offered.architecture.is_empty()) && rank(offered, wanted).is_none() {
        return Err(ManifestError::NoPlatform { wanted: show(wanted), offered: show(offered) });
    }
    Ok(())
}

/// The chain ids of layers with these diffIDs: what a layer is together with those below it.
pub fn chains(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chains: Vec<Digest> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        chains.push(match chains.last() {
            None => *diff_id,
            Some(below) => {
                let mut hasher = Hasher::default();
                hasher.update(format!("{below} {diff_id}").as_bytes());
                hasher.digest()
            }
        });
    }
    chains
}

/// An OCI manifest for parts that came without one (docker archives, images that we make).
pub fn compose(config: (Digest, u64), layers: &[(Digest, u64, &str)]) -> Vec<u8> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Out<'a> {
        schema_version: u32,
        media_type: &'a str,
        config: Part<'a>,
        layers: Vec<Part<'a>>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Part<'a> {
        media_type: &'a str,
        digest: String,
        size: u64,
    }
    let part = |(digest, size, media_type): (Digest, u64, &'static str)| Part { media_type, digest: digest.to_string(), size };
    let out = Out {
        schema_version: 2,
        media_type: OCI_MANIFEST,
        config: part((config.0, config.1, OCI_CONFIG)),
        layers: layers
            .iter()
            .map(|(digest, size, suffix)| Part {
                media_type: match *suffix {
                    "gzip" => "application/vnd.oci.image.layer.v1.tar+gzip",
                    "zstd" => "application/vnd.oci.image.layer.v1.tar+zstd",
                    _ => "application/vnd.oci.image.layer.v1.tar",
                },
                digest: digest.to_string(),
                size: *size,
            })
            .collect(),
    };
    // Plain strings and numbers always have a JSON form.
    serde_json::to_vec(&out).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn platform(os: &str, architecture: &str, variant: &str) -> Platform {
        Platform { os: os.into(), architecture: architecture.into(), variant: variant.into() }
    }

    fn entry(platform: Option<Platform>) -> Descriptor {
        let digest = Digest::of(format!("{platform:?}").as_bytes());
        Descriptor { media_type: OCI_MANIFEST.into(), digest, size: 1, platform, ref_name: None, image_name: None }
    }

    fn small(extra: &str) -> String {
        let layer = format!(r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"{A}","size":5}}"#);
        format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"{OCI_CONFIG}","digest":"{A}","size":2}},"layers":[{layer}]{extra}}}"#
        )
    }

    #[test]
    fn a_manifest_and_an_index() {
        let Ok(Document::Manifest(manifest)) = parse(small("").as_bytes(), None, 10) else { panic!() };
        assert_eq!(manifest.layers.len(), 1);
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"digest":"{A}","size":1,"mediaType":"{OCI_MANIFEST}","platform":{{"os":"linux","architecture":"arm","variant":"v7"}}}}]}}"#
        );
        let Ok(Document::Index(entries)) = parse(index.as_bytes(), Some(OCI_INDEX), 10) else { panic!() };
        assert_eq!(choose(&entries, &platform("linux", "arm", "v7")).unwrap().digest, Digest::parse(A).unwrap());
        let error = choose(&entries, &platform("linux", "amd64", "")).unwrap_err().to_string();
        assert!(error.contains("linux/amd64") && error.contains("linux/arm/v7"), "{error}");
    }

    #[test]
    fn a_message_does_not_grow_with_the_document() {
        let hostile = format!(r#"{{"schemaVersion":"{}"}}"#, "A".repeat(100_000));
        assert!(parse(hostile.as_bytes(), None, 10).unwrap_err().to_string().len() < 500);
        let hostile = format!(r#"{{"rootfs":"{}"}}"#, "A".repeat(100_000));
        assert!(parse_config(hostile.as_bytes()).unwrap_err().to_string().len() < 500);
    }

    #[test]
    fn what_could_be_read_two_ways_is_refused() {
        for (text, content_type) in [
            (small(r#","manifests":[]"#), None),
            (small(&format!(r#","mediaType":"{OCI_INDEX}""#)), None),
            (small(""), Some(OCI_INDEX)),
            (small(&format!(r#","mediaType":"{OCI_MANIFEST}""#)), Some(DOCKER_MANIFEST)),
            (small(r#","layers":[]"#), None),
            (small("").replace("\"schemaVersion\":2,", ""), None),
            (small("").replace(":2,\"config\"", ":1,\"config\""), None),
            (small("").replace("sha256:", "sha512:"), None),
            (small("").replace("e3b0", "E3B0"), None),
            (small("").replace(A, "../../etc/passwd"), None),
            (small("").replace("\"size\":5", "\"size\":-5"), None),
            (small("").replace(OCI_CONFIG, "application/vnd.cncf.helm.config.v1+json"), None),
            (small("").replace(".tar+gzip", ".tar+encrypted"), None),
            (small("") + "x", None),
            ("{}".into(), None),
            ("[]".into(), None),
            ("[".repeat(10_000), None),
            (format!(r#"{{"a":{}1{}}}"#, "[".repeat(10_000), "]".repeat(10_000)), None),
        ] {
            assert!(parse(text.as_bytes(), content_type, 10).is_err(), "{text:.200} was taken");
        }
        let layer = format!(r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"{A}","size":5}}"#);
        let many = format!(
            r#"{{"schemaVersion":2,"config":{{"mediaType":"{OCI_CONFIG}","digest":"{A}","size":2}},"layers":[{}]}}"#,
            vec![layer; 11].join(",")
        );
        assert!(parse(many.as_bytes(), None, 11).is_ok());
        assert!(parse(many.as_bytes(), None, 10).is_err());
        assert!(parse(&vec![b' '; (4 << 20) + 1], None, 10).is_err());
    }

    #[test]
    fn the_best_variant_that_runs_here() {
        let arm: Vec<Descriptor> = ["v5", "v6", "v7", "v8", ""].map(|v| entry(Some(platform("linux", "arm", v)))).into();
        let chosen = |v: &str| choose(&arm, &platform("linux", "arm", v)).unwrap().platform.clone().unwrap().variant;
        assert_eq!((chosen("v7").as_str(), chosen("v6").as_str(), chosen("v5").as_str()), ("v7", "v6", "v5"));
        let mixed = [
            entry(Some(platform("unknown", "unknown", ""))),
            entry(Some(platform("windows", "amd64", ""))),
            entry(Some(platform("linux", "amd64", "v3"))),
            entry(Some(platform("linux", "amd64", ""))),
            entry(Some(platform("linux", "arm64", ""))),
        ];
        assert_eq!(choose(&mixed, &platform("linux", "amd64", "")).unwrap(), &mixed[3]);
        assert_eq!(choose(&mixed, &platform("linux", "arm64", "v8")).unwrap(), &mixed[4]);
        let first =
            [entry(Some(platform("linux", "amd64", ""))), Descriptor { size: 2, ..entry(Some(platform("linux", "amd64", ""))) }];
        assert_eq!(choose(&first, &platform("linux", "amd64", "")).unwrap().size, 1);
        assert_eq!(choose(&[entry(None)], &platform("linux", "amd64", "")).unwrap(), &entry(None));
        assert!(choose(&[entry(None), entry(None)], &platform("linux", "amd64", "")).is_err());
    }

    #[test]
    fn configs_with_nulls_and_without() {
        let text = format!(
            r#"{{"architecture":"amd64","os":"linux","config":{{"User":null,"Env":["A=b"],"Cmd":null,"Entrypoint":["/x"],"Volumes":{{"/data":{{}}}},"Labels":{{"a":"b"}},"ExposedPorts":null}},"rootfs":{{"type":"layers","diff_ids":["{A}"]}},"history":[{{"x":1}}]}}"#
        );
        let parsed = parse_config(text.as_bytes()).unwrap();
        assert_eq!(parsed.config.entrypoint, ["/x"]);
        assert_eq!(parsed.config.volumes, ["/data"]);
        check_config(&parsed, 1, &platform("linux", "amd64", "")).unwrap();
        assert!(check_config(&parsed, 2, &platform("linux", "amd64", "")).is_err());
        assert!(check_config(&parsed, 1, &platform("linux", "arm64", "v8")).is_err());
        let bare = parse_config(br#"{"config":null,"rootfs":{"type":"layers","diff_ids":null}}"#).unwrap();
        check_config(&bare, 0, &platform("linux", "arm64", "v8")).unwrap();
        assert!(parse_config(br#"{"rootfs":{"type":"layers","diff_ids":["sha256:12"]}}"#).is_err());
        assert!(parse_config(br#"{"config":{"Env":["A=\u0000"]},"rootfs":{"type":"layers","diff_ids":[]}}"#).is_err());
        assert!(parse_config(br#"{}"#).is_err());
    }

    #[test]
    fn chain_ids_as_in_the_spec() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let chains = chains(&[a, b]);
        assert_eq!(chains, [a, Digest::of(format!("{a} {b}").as_bytes())]);
    }
}
