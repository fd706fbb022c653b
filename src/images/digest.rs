//! sha256 digests: parsed before any path or URL is made of them, computed while bytes pass by.
//!
//! Invariant: a [`Digest`] came from 64 lower-case hex digits or from hashing. OCI descriptors,
//! github.com/opencontainers/image-spec/blob/main/descriptor.md#digests.

use std::fmt;
use std::io::{self, Read};

use ring::digest::{Context, SHA256};

use super::reference::is_digest;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// `sha256:<64 lower-case hex>`; anything else is none.
    pub fn parse(text: &str) -> Option<Digest> {
        if !is_digest(text) {
            return None;
        }
        Digest::from_hex(text.get(7..)?)
    }

    pub fn from_hex(hex: &str) -> Option<Digest> {
        if hex.len() != 64 || !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Digest(bytes))
    }

    pub fn of(bytes: &[u8]) -> Digest {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.digest()
    }

    /// The 64 digits alone: a blob's file name.
    pub fn hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Digest::parse(&text).ok_or_else(|| serde::de::Error::custom("a digest is sha256: and 64 lower-case hex digits"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Counts and hashes what it is given.
#[derive(Clone)]
pub struct Hasher {
    context: Context,
    pub count: u64,
}

impl Default for Hasher {
    fn default() -> Hasher {
        Hasher { context: Context::new(&SHA256), count: 0 }
    }
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.count += bytes.len() as u64;
    }

    pub fn digest(self) -> Digest {
        let mut bytes = [0; 32];
        // SHA-256 gives 32 bytes.
        bytes.copy_from_slice(self.context.finish().as_ref());
        Digest(bytes)
    }
}

/// Passes bytes on and hashes them.
pub struct HashReader<R> {
    pub inner: R,
    pub hasher: Hasher,
}

impl<R: Read> HashReader<R> {
    pub fn new(inner: R) -> HashReader<R> {
        HashReader { inner, hasher: Hasher::default() }
    }
}

impl<R: Read> Read for HashReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        if let Some(bytes) = buffer.get(..n) {
            self.hasher.update(bytes);
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sha256_of_64_lower_case_digits() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::parse(empty), Some(Digest::of(b"")));
        assert_eq!(Digest::of(b"").to_string(), empty);
        for bad in [
            "",
            "sha256:",
            "sha512:00",
            "../../x",
            &empty.to_uppercase(),
            &format!("{empty}0"),
            &empty[..70],
            "sha256:../../../../etc/passwd",
        ] {
            assert_eq!(Digest::parse(bad), None, "{bad:?}");
        }
    }
}
