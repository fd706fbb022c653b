//! Plain types of the source: what is wanted, where it was read, what could not be read.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

pub use super::network::{NetworkChange, NetworkObject, NetworkObjects};
use crate::api::pod::Pod;
use crate::store::ids::PodUid;
use crate::volumes::model::{Contents, Data};

/// One look at the manifests directory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceUpdate {
    /// False: pods may be missing here that are still wanted (the directory is gone, unreadable,
    /// another device, or a file broke whose last good version nobody knows). Nothing may end
    /// on the word of an incomplete set.
    pub complete: bool,
    /// One a namespace/name, each valid and defaulted, sorted by namespace and name.
    pub pods: Vec<DesiredPod>,
    pub configs: Arc<ConfigObjects>,
    /// What is served otherwise than the updates before said; in the first one all of it.
    pub network: Vec<NetworkChange>,
    /// Everything that stands wrong now; gone from the next update once it is mended.
    pub problems: Vec<Problem>,
}

/// A pod that is to run here.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredPod {
    /// Hash of node, namespace/name and the spec as received. Another spec is another pod.
    pub uid: PodUid,
    /// Validated, defaults filled in, `metadata.uid` and the kubernetes.io/config.* annotations set.
    pub pod: Arc<Pod>,
    /// Canonical JSON of the object as received (also fields that we do not honour), with uid,
    /// namespace and annotations filled in. [`super::restore`] reads it back.
    pub raw: Arc<[u8]>,
    pub origin: Origin,
    /// Fields that this version does not honour, in the order of the file.
    pub warnings: Vec<Warning>,
}

/// `web.yaml#2`: the second document of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Origin {
    /// Name inside the manifests directory.
    pub file: String,
    /// From 1.
    pub document: u32,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.file, self.document)
    }
}

/// A field that has no effect here, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// `spec.containers[0].livenessProbe`
    pub field: String,
    pub line: u32,
    pub message: String,
}

/// Something wrong in the manifests directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Name inside the directory; empty where the directory itself is meant.
    pub file: String,
    /// From 1; 0 where the whole file is meant.
    pub document: u32,
    /// From 1; 0 where there is none.
    pub line: u32,
    pub column: u32,
    /// `namespace/name` of the pod that this is about, where it is known.
    pub pod: String,
    /// `Service default/web`: an object that packets are served from.
    pub object: String,
    /// `spec.containers[0].name`; may be empty.
    pub field: String,
    /// What is wrong and what mends it.
    pub message: String,
    /// The last good version of what stands here goes on.
    pub kept: bool,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.file.is_empty() { "manifests directory" } else { &self.file })?;
        if self.document > 0 {
            write!(f, " document {}", self.document)?;
        }
        if self.line > 0 {
            write!(f, " line {}:{}", self.line, self.column)?;
        }
        if !self.pod.is_empty() {
            write!(f, ", pod {}", self.pod)?;
        }
        if !self.object.is_empty() {
            write!(f, ", {}", self.object)?;
        }
        if !self.field.is_empty() {
            write!(f, ", {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

/// ConfigMaps and Secrets of the manifests, ready to be read by key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ConfigObjects {
    pub(super) config_maps: BTreeMap<(String, String), Arc<Data>>,
    pub(super) secrets: BTreeMap<(String, String), Arc<SecretData>>,
}

/// A Secret's values: wiped when dropped, never printed.
#[derive(Default, PartialEq, Eq)]
pub struct SecretData(pub(super) Data);

impl Drop for SecretData {
    fn drop(&mut self) {
        for value in self.0.values_mut() {
            value.fill(0);
            // The compiler may not drop the stores: the buffer is looked at once more.
            std::hint::black_box(value);
        }
    }
}

impl fmt::Debug for ConfigObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConfigObjects({} config maps, {} secrets)", self.config_maps.len(), self.secrets.len())
    }
}

impl Contents for ConfigObjects {
    fn config_map(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.config_maps.get(&(namespace.to_owned(), name.to_owned())).map(|data| &**data)
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.secrets.get(&(namespace.to_owned(), name.to_owned())).map(|data| &data.0)
    }
}
