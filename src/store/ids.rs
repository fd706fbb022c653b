//! Identities that records, paths and cgroups are keyed by. A value of these types is safe as
//! a path component: it was checked when it was made.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is wrong with an identity that came from outside.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is no {what}: {cure}")]
pub struct BadId {
    pub what: &'static str,
    pub text: String,
    pub cure: &'static str,
}

/// A pod's uid: 1 to 63 of `[a-z0-9-]`, the first one alphanumeric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PodUid(String);

impl PodUid {
    pub fn parse(text: &str) -> Result<PodUid, BadId> {
        let ok = (1..=63).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !text.starts_with('-');
        if !ok {
            return Err(BadId { what: "pod uid", text: text.chars().take(80).collect(), cure: "use 1 to 63 of a-z, 0-9 and -" });
        }
        Ok(PodUid(text.to_owned()))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A container's id: 64 lower-case hex digits, shown as `coracle://<id>`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerId(String);

impl ContainerId {
    pub fn parse(text: &str) -> Result<ContainerId, BadId> {
        if text.len() != 64 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(BadId {
                what: "container id",
                text: text.chars().take(80).collect(),
                cure: "use 64 lower-case hex digits",
            });
        }
        Ok(ContainerId(text.to_owned()))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! text_type {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl TryFrom<String> for $name {
            type Error = BadId;
            fn try_from(text: String) -> Result<$name, BadId> {
                $name::parse(&text)
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}
text_type!(PodUid);
text_type!(ContainerId);
