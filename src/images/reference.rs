//! Image references as docker and containerd read them: `busybox` is
//! `docker.io/library/busybox:latest`. Grammar: github.com/distribution/reference.
//!
//! Invariant: a [`Reference`] is safe as a part of a URL; its digest is `sha256:<64 hex>`.
#![deny(clippy::disallowed_methods)]

use std::fmt;

use super::model::ImageError;

/// A whole name: host, repository, and a tag or a digest (or both; the digest wins).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    /// `docker.io`, `registry.example:5000`.
    pub host: String,
    /// `library/busybox`.
    pub repository: String,
    pub tag: Option<String>,
    /// `sha256:<64 hex>`.
    pub digest: Option<String>,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl Reference {
    /// `docker.io/library/busybox`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.host, self.repository)
    }
}

/// Fills in what docker fills in: the host `docker.io`, `library/`, the tag `latest`.
pub fn normalize(text: &str) -> Result<Reference, ImageError> {
    let bad = |why: &str| ImageError::InvalidName { reference: text.chars().take(300).collect(), why: why.to_owned() };
    if text.is_empty() {
        return Err(bad("it is empty"));
    }
    if text.len() > 1024 {
        return Err(bad("it is longer than 1024 bytes"));
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => {
            if !is_digest(digest) {
                return Err(bad("after @ it needs sha256: and 64 lower-case hex digits"));
            }
            (rest, Some(digest.to_owned()))
        }
        None => (text, None),
    };
    // A colon after the last slash begins a tag; before it, a port.
    let slash = rest.rfind('/').map_or(0, |at| at + 1);
    let (name, tag) = match rest.get(slash..).and_then(|last| last.find(':')) {
        Some(at) => (&rest[..slash + at], Some(&rest[slash + at + 1..])),
        None => (rest, None),
    };
    if let Some(tag) = tag
        && !is_tag(tag)
    {
        return Err(bad("a tag is 1 to 128 of A-Z a-z 0-9 _ . - and begins with neither . nor -"));
    }
    // The first part is a host only if it looks like one.
    let (host, repository) = match name.split_once('/') {
        Some((first, rest))
            if first.contains(['.', ':', '[']) || first == "localhost" || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            (first, rest.to_owned())
        }
        Some(_) => ("docker.io", name.to_owned()),
        None => ("docker.io", format!("library/{name}")),
    };
    if name.bytes().any(|b| b.is_ascii_uppercase()) && repository.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(bad("a repository name must be lower case"));
    }
    if !is_host(host) {
        return Err(bad("the registry host is malformed"));
    }
    let host = if host == "index.docker.io" { "docker.io" } else { host };
    let repository = if host == "docker.io" && !repository.contains('/') { format!("library/{repository}") } else { repository };
    if repository.len() + host.len() > 255 {
        return Err(bad("a name is at most 255 bytes"));
    }
    if !repository.split('/').all(is_path_part) {
        return Err(bad("a repository is parts of a-z 0-9 joined by . _ __ - and /"));
    }
    if digest.is_none() && name.len() == 64 && !name.contains('/') && is_hex(name) {
        return Err(bad("it is an image id, not a name; use sha256: before it"));
    }
    let tag = match (tag, &digest) {
        (Some(tag), _) => Some(tag.to_owned()),
        (None, None) => Some("latest".to_owned()),
        (None, Some(_)) => None,
    };
    Ok(Reference { host: host.to_owned(), repository, tag, digest })
}

/// `sha256:<64 lower-case hex>`, the only digest that we trust or make a path of.
pub fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 64 && is_hex(hex))
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.len())
        && !tag.starts_with(['.', '-'])
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// `[a-z0-9]+ ((\.|_|__|-+) [a-z0-9]+)*`.
fn is_path_part(part: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    let (Some(&first), Some(&last)) = (bytes.first(), bytes.last()) else { return false };
    if !alnum(first) || !alnum(last) {
        return false;
    }
    part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .all(|joint| matches!(joint, "" | "." | "_" | "__") || joint.bytes().all(|b| b == b'-'))
}

/// Labels joined by dots, or `[IPv6]`, and an optional port.
fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, rest)) if address.parse::<std::net::Ipv6Addr>().is_ok() => match rest.strip_prefix(':') {
                Some(port) => ("", Some(port)),
                None if rest.is_empty() => ("", None),
                None => return false,
            },
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    let port_ok = port.is_none_or(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()) && p.parse::<u16>().is_ok());
    let label = |l: &str| {
        !l.is_empty() && !l.starts_with('-') && !l.ends_with('-') && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    port_ok && (host.starts_with('[') || name.split('.').all(label))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn golden_names() {
        for (text, want) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
            ("docker.io/busybox", "docker.io/library/busybox:latest"),
            ("docker.io/library/busybox", "docker.io/library/busybox:latest"),
            ("team/app", "docker.io/team/app:latest"),
            ("ghcr.io/team/app:v1", "ghcr.io/team/app:v1"),
            ("localhost/app", "localhost/app:latest"),
            ("localhost:5000/app", "localhost:5000/app:latest"),
            ("127.0.0.1:5000/a/b/c:x", "127.0.0.1:5000/a/b/c:x"),
            ("[::1]:5000/app", "[::1]:5000/app:latest"),
            ("Host/app", "Host/app:latest"),
            ("a__b/c-d---e.f", "docker.io/a__b/c-d---e.f:latest"),
            ("busybox:5000", "docker.io/library/busybox:5000"),
            ("registry.k8s.io/pause:3.10.1", "registry.k8s.io/pause:3.10.1"),
        ] {
            assert_eq!(normalize(text).map(|r| r.to_string()).ok().as_deref(), Some(want), "{text}");
        }
        let with_digest = format!("busybox:1@sha256:{HEX}");
        assert_eq!(normalize(&with_digest).unwrap().to_string(), format!("docker.io/library/busybox:1@sha256:{HEX}"));
        let digest_only = format!("x.io/a@sha256:{HEX}");
        assert_eq!(normalize(&digest_only).unwrap().to_string(), digest_only);
    }

    #[test]
    fn what_is_no_name() {
        for text in [
            "",
            "UPPER",
            "docker.io/Busybox",
            "a//b",
            "/a",
            "a/",
            "a b",
            "a:",
            "a:-x",
            "a:.x",
            "a@sha256:12",
            "a@",
            "-a/b.c",
            "a.-b.c/d",
            "../etc",
            "a/../b",
            "a___b",
            "a._b",
            "https://x.io/a",
            "x.io:70000/a",
            "x.io:/a",
            "[::1/a",
            "[zz]/a",
            "a\0",
            "a?b",
            "a#b",
            "é",
        ] {
            assert!(normalize(text).is_err(), "{text:?} was taken");
        }
        for digest in [
            format!("a@sha512:{HEX}{HEX}"),
            format!("a@sha256:{}", HEX.to_uppercase()),
            format!("a@SHA256:{HEX}"),
            format!("a@sha256:{HEX}0"),
            "a@sha256:../../x".to_owned(),
            format!("a@sha256:{HEX}@sha256:{HEX}"),
            HEX.to_owned(),
            "x".repeat(300),
            format!("a:{}", "t".repeat(129)),
        ] {
            assert!(normalize(&digest).is_err(), "{digest:?} was taken");
        }
    }
}
