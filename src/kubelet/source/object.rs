//! One document's tree to objects. Pure: node name, file name and text in; objects, problems and
//! warnings out.
//!
//! Invariant: an object that comes out is valid and defaulted; for one that does not, a problem
//! says why, and which object it would have been where that much could be read.

use std::sync::Arc;

use ring::digest;

use super::known::{self, Fate};
use super::model::{DesiredPod, Origin, Problem, SecretData, Warning};
use super::network::{Kind, NetworkObject};
use crate::api::config::{ConfigMap, Secret};
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::namespace::Namespace;
use crate::api::network_policy::NetworkPolicy;
use crate::api::pod::Pod;
use crate::api::service::Service;
use crate::api::yaml::{Node, Unknown, Value, YamlError};
use crate::api::{base64, meta::ObjectMeta};
use crate::kubelet::{defaults, validate};
use crate::store::ids::PodUid;
use crate::volumes::model::Data;

/// What names one object in the whole directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
}

impl Key {
    /// `namespace/name`
    pub fn named(&self) -> String {
        let slash = if self.namespace.is_empty() { "" } else { "/" };
        format!("{}{slash}{}", self.namespace, self.name)
    }

    /// `service default/web`, for the kinds that packets are served from.
    pub fn network_object(&self) -> Option<String> {
        let concerned = !matches!(self.kind, "Pod" | "ConfigMap" | "Secret");
        concerned.then(|| format!("{} {}", self.kind, self.named()))
    }
}

#[derive(Clone)]
pub struct Object {
    pub key: Key,
    pub document: u32,
    pub line: u32,
    pub body: Body,
}

#[derive(Clone)]
pub enum Body {
    Pod(DesiredPod),
    ConfigMap(Arc<Data>),
    Secret(Arc<SecretData>),
    Network(NetworkObject),
}

/// Everything that one file holds.
#[derive(Clone, Default)]
pub struct Contents {
    pub objects: Vec<Object>,
    pub problems: Vec<Problem>,
    /// Objects that stand in the file but cannot be used; None where it is not even known which.
    pub broken: Vec<Option<Key>>,
    /// Other known kinds, for one log line.
    pub others: Vec<String>,
}

/// What all documents of a file have in common.
pub struct Reader<'a> {
    pub node_name: &'a str,
    pub file: &'a str,
    /// Since when a pod is wanted, as RFC 3339: now, unless it is known already.
    pub seen: &'a dyn Fn(&PodUid) -> String,
}

/// Reads all objects of one document of a file.
pub fn read(reader: &Reader<'_>, document: u32, tree: Node, out: &mut Contents) {
    if tree.is_null() {
        return;
    }
    let kind = tree.field("kind").and_then(Node::text).unwrap_or_default().to_owned();
    let Some(item_kind) = kind.strip_suffix("List").filter(|_| tree.field("items").is_some()) else {
        let context = Context { reader, document, prefix: String::new(), line: tree.line };
        return context.object(tree, out);
    };
    // `List` and `PodList`: items of the second need not repeat their kind.
    let version = tree.field("apiVersion").cloned();
    let Value::Map(entries) = tree.value else { return };
    for items in entries.into_iter().filter(|e| e.key == "items") {
        let Value::List(items) = items.node.value else { continue };
        for (index, mut item) in items.into_iter().enumerate() {
            if !item_kind.is_empty() && item.field("kind").is_none() && matches!(item.value, Value::Map(_)) {
                item.set("kind", Value::Text(item_kind.to_owned()));
                if let Some(version) = version.clone().filter(|_| item.field("apiVersion").is_none()) {
                    item.set("apiVersion", version.value);
                }
            }
            let context = Context { reader, document, prefix: format!("items[{index}]"), line: item.line };
            context.object(item, out);
        }
    }
}

struct Context<'a> {
    reader: &'a Reader<'a>,
    document: u32,
    /// `items[3]` inside a List.
    prefix: String,
    line: u32,
}

impl Context<'_> {
    fn object(&self, tree: Node, out: &mut Contents) {
        if !matches!(tree.value, Value::Map(_)) {
            return self.broken(
                None,
                "",
                (tree.line, tree.column),
                "this document is no Kubernetes object: an object begins with apiVersion and kind".to_owned(),
                out,
            );
        }
        let text = |name: &str| tree.field(name).and_then(Node::text).unwrap_or_default().to_owned();
        let (kind, version) = (text("kind"), text("apiVersion"));
        for (name, value) in [("kind", &kind), ("apiVersion", &version)] {
            if value.is_empty() {
                let place = (tree.line, tree.column);
                return self.broken(
                    None,
                    name,
                    place,
                    "Required value: an object begins with apiVersion and kind".to_owned(),
                    out,
                );
            }
        }
        let place = tree.locate("apiVersion");
        match (kind.as_str(), version.as_str()) {
            ("Pod", "v1") => self.pod(tree, out),
            ("ConfigMap", "v1") => self.config_map(tree, out),
            ("Secret", "v1") => self.secret(tree, out),
            (Service::KIND, Service::VERSION) => self.network::<Service>(tree, out),
            (EndpointSlice::KIND, EndpointSlice::VERSION) => self.network::<EndpointSlice>(tree, out),
            (NetworkPolicy::KIND, NetworkPolicy::VERSION) => self.network::<NetworkPolicy>(tree, out),
            (Namespace::KIND, Namespace::VERSION) => self.network::<Namespace>(tree, out),
            ("Pod" | "ConfigMap" | "Secret" | Service::KIND | EndpointSlice::KIND | NetworkPolicy::KIND | Namespace::KIND, _) => {
                let right = match kind.as_str() {
                    EndpointSlice::KIND => EndpointSlice::VERSION,
                    NetworkPolicy::KIND => NetworkPolicy::VERSION,
                    _ => "v1",
                };
                let why = format!("no kind \"{kind}\" is registered for version \"{version}\": write apiVersion: {right}");
                self.broken(None, "apiVersion", place, why, out);
            }
            (other, _) if known::is_kept_for_later(other) => out.others.push(format!("{version}/{other}")),
            _ => {
                let why = format!(
                    "unknown kind \"{kind}\": Pod, ConfigMap, Secret, Service, EndpointSlice, NetworkPolicy and Namespace are run here"
                );
                self.broken(None, "kind", tree.locate("kind"), why, out);
            }
        }
    }

    fn pod(&self, mut tree: Node, out: &mut Contents) {
        let key = key("Pod", &tree);
        let (mut pod, unknown) = match tree.read::<Pod>() {
            Ok(read) => read,
            Err(error) => return self.refused(key, error, out),
        };
        defaults::pod(&mut pod);
        // A refused field is an error of the pod; everything that is wrong is told at once.
        let mut invalid: Vec<(String, String)> = validate::pod(&pod).into_iter().map(|i| (i.field, i.message)).collect();
        let mut warnings = self.unenforced(&pod, &tree);
        for Unknown { field, line, .. } in unknown {
            match known::fate(&field) {
                Fate::Silent => {}
                Fate::NotYet => warnings.push(Warning { field, line, message: "not honoured by this version".to_owned() }),
                Fate::Unknown => warnings.push(Warning { field, line, message: "unknown field, ignored".to_owned() }),
                Fate::Refused => invalid.push((field, "not supported by this version: remove it".to_owned())),
            }
        }
        if !invalid.is_empty() {
            for (field, message) in invalid {
                self.problem(key.as_ref(), &field, tree.locate(&field), message, out);
            }
            out.broken.push(key);
            return;
        }
        let Some(key) = key else { return };
        let uid = match uid(self.reader.node_name, &key, &tree) {
            Ok(uid) => uid,
            Err(error) => return self.refused(Some(key), error, out),
        };
        pod.metadata.uid = uid.as_str().to_owned();
        pod.spec.node_name = Some(self.reader.node_name.to_owned());
        tree.remove("status");
        let seen = (self.reader.seen)(&uid);
        let origin = Origin { file: self.reader.file.to_owned(), document: self.document };
        match stamp(uid, pod, tree, origin, &seen, warnings) {
            Ok(pod) => out.objects.push(Object { key, document: self.document, line: self.line, body: Body::Pod(pod) }),
            Err(error) => self.refused(Some(key), error, out),
        }
    }

    /// Fields that are read but do not, or not in this place, what they do elsewhere.
    fn unenforced(&self, pod: &Pod, tree: &Node) -> Vec<Warning> {
        let mut found = known::unenforced(pod);
        if let Some(node) = pod.spec.node_name.as_deref().filter(|n| !n.is_empty() && *n != self.reader.node_name) {
            let message = format!("this node is {} and runs the pod all the same, not {node}", self.reader.node_name);
            found.push(("spec.nodeName".to_owned(), message));
        }
        found.into_iter().map(|(field, message)| Warning { line: tree.locate(&field).0, field, message }).collect()
    }

    fn config_map(&self, tree: Node, out: &mut Contents) {
        let key = key("ConfigMap", &tree);
        let map = match tree.read::<ConfigMap>() {
            Ok((map, unknown)) => {
                self.unknown(unknown, out);
                map
            }
            Err(error) => return self.refused(key, error, out),
        };
        let mut data: Data = map.data.into_iter().map(|(k, v)| (k, v.into_bytes())).collect();
        let mut wrong = Vec::new();
        for (name, text) in &map.binary_data {
            match base64::decode(text) {
                Some(bytes) => {
                    if data.insert(name.clone(), bytes).is_some() {
                        wrong.push((format!("binaryData[{name}]"), "duplicate of a key in data: remove one".to_owned()));
                    }
                }
                None => wrong.push((format!("binaryData[{name}]"), "this is no base64".to_owned())),
            }
        }
        if let Some(key) = self.checked("ConfigMap", key, &tree, &map.metadata, &data, wrong, out) {
            out.objects.push(Object { key, document: self.document, line: self.line, body: Body::ConfigMap(Arc::new(data)) });
        }
    }

    fn secret(&self, mut tree: Node, out: &mut Contents) {
        let key = key("Secret", &tree);
        let secret = match tree.read::<Secret>() {
            Ok((secret, unknown)) => {
                self.unknown(unknown, out);
                secret
            }
            Err(error) => {
                tree.wipe();
                return self.refused(key, error, out);
            }
        };
        let mut data = Data::new();
        let mut wrong = Vec::new();
        for (name, text) in secret.data {
            match base64::decode(&text) {
                Some(bytes) => drop(data.insert(name, bytes)),
                None => wrong.push((format!("data[{name}]"), "this is no base64: write plain text under stringData".to_owned())),
            }
            wipe(text);
        }
        for (name, text) in secret.string_data {
            data.insert(name, text.into_bytes());
        }
        let key = self.checked("Secret", key, &tree, &secret.metadata, &data, wrong, out);
        tree.wipe();
        let body = Body::Secret(Arc::new(SecretData(data)));
        if let Some(key) = key {
            out.objects.push(Object { key, document: self.document, line: self.line, body });
        }
    }

    fn network<T: Kind>(&self, tree: Node, out: &mut Contents) {
        let mut key = key(T::KIND, &tree);
        if let Some(key) = key.as_mut().filter(|_| !T::NAMESPACED) {
            key.namespace.clear();
        }
        let (mut object, unknown) = match tree.read::<T>() {
            Ok(read) => read,
            Err(error) => return self.refused(key, error, out),
        };
        let meta = object.meta();
        meta.namespace = key.as_ref().map(|k| k.namespace.clone()).unwrap_or_default();
        let mut wrong: Vec<(String, String)> = object.invalid().into_iter().map(|i| (i.field, i.message)).collect();
        for Unknown { field, line, column } in unknown {
            match known::network_fate(T::KIND, &field) {
                Fate::Silent => {}
                Fate::NotYet => {
                    self.problem(key.as_ref(), &field, (line, column), "not honoured by this version".to_owned(), out)
                }
                Fate::Refused | Fate::Unknown if T::STRICT => {
                    let why = "unknown field: without it this would mean something else, so it is refused: correct or remove it";
                    wrong.push((field, why.to_owned()));
                }
                Fate::Refused | Fate::Unknown => {
                    self.problem(key.as_ref(), &field, (line, column), "unknown field, ignored".to_owned(), out);
                }
            }
        }
        match key {
            Some(key) if wrong.is_empty() => {
                let body = Body::Network(object.object());
                out.objects.push(Object { key, document: self.document, line: self.line, body });
            }
            key => {
                for (field, message) in wrong {
                    self.problem(key.as_ref(), &field, tree.locate(&field), message, out);
                }
                out.broken.push(key);
            }
        }
    }

    /// Fields of a ConfigMap or Secret that mean nothing: told, and the rest is used.
    fn unknown(&self, unknown: Vec<Unknown>, out: &mut Contents) {
        for Unknown { field, line, column } in unknown {
            if !matches!(field.as_str(), "apiVersion" | "kind") && known::fate(&field) == Fate::Unknown {
                self.problem(None, &field, (line, column), "unknown field, ignored".to_owned(), out);
            }
        }
    }

    /// Name and keys of a ConfigMap or Secret; the key only where nothing is wrong.
    #[allow(clippy::too_many_arguments)] // one call site a kind, and each is a plain fact
    fn checked(
        &self,
        kind: &str,
        key: Option<Key>,
        tree: &Node,
        meta: &ObjectMeta,
        data: &Data,
        mut wrong: Vec<(String, String)>,
        out: &mut Contents,
    ) -> Option<Key> {
        wrong.extend(validate::config(kind, meta, data).into_iter().map(|i| (i.field, i.message)));
        if wrong.is_empty() {
            return key;
        }
        for (field, message) in wrong {
            self.problem(key.as_ref(), &field, tree.locate(&field), message, out);
        }
        out.broken.push(key);
        None
    }

    fn refused(&self, key: Option<Key>, error: YamlError, out: &mut Contents) {
        self.broken(key, &error.field, (error.line, error.column), error.message, out);
    }

    fn broken(&self, key: Option<Key>, field: &str, place: (u32, u32), message: String, out: &mut Contents) {
        self.problem(key.as_ref(), field, place, message, out);
        out.broken.push(key);
    }

    fn problem(&self, key: Option<&Key>, field: &str, place: (u32, u32), message: String, out: &mut Contents) {
        let dot = if self.prefix.is_empty() || field.is_empty() { "" } else { "." };
        out.problems.push(Problem {
            file: self.reader.file.to_owned(),
            document: self.document,
            line: place.0,
            column: place.1,
            pod: key.filter(|k| k.kind == "Pod").map(Key::named).unwrap_or_default(),
            object: key.and_then(Key::network_object).unwrap_or_default(),
            field: format!("{}{dot}{field}", self.prefix),
            message,
            kept: false,
        });
    }
}

fn wipe(text: String) {
    let mut bytes = text.into_bytes();
    bytes.fill(0);
    // Keeps the compiler from dropping the stores.
    std::hint::black_box(&bytes);
}

/// The object's name as far as it can be read from a tree that may be wrong elsewhere.
fn key(kind: &'static str, tree: &Node) -> Option<Key> {
    let meta = tree.field("metadata")?;
    let name = meta.field("name").and_then(Node::text).filter(|n| !n.is_empty())?.to_owned();
    let namespace = meta.field("namespace").and_then(Node::text).filter(|n| !n.is_empty()).unwrap_or("default").to_owned();
    Some(Key { kind, namespace, name })
}

/// Hash of node, namespace/name and the spec as received, canonical; 32 hex digits as the
/// kubelet's. Neither the file's name nor our version, defaults or labels are part of it.
fn uid(node_name: &str, key: &Key, tree: &Node) -> Result<PodUid, YamlError> {
    let mut context = digest::Context::new(&digest::SHA256);
    for part in ["coracle pod 1", node_name, &key.namespace, &key.name] {
        context.update(part.as_bytes());
        context.update(b"\0");
    }
    if let Some(spec) = tree.field("spec") {
        context.update(&spec.to_json()?);
    }
    let hex: String = context.finish().as_ref().iter().take(16).map(|b| format!("{b:02x}")).collect();
    PodUid::parse(&hex).map_err(|e| YamlError::at(tree.line, tree.column, e.to_string()))
}

/// Gives a pod what the kubelet gives its static pods, and since when it is wanted.
fn stamp(
    uid: PodUid,
    mut pod: Pod,
    mut tree: Node,
    origin: Origin,
    seen: &str,
    warnings: Vec<Warning>,
) -> Result<DesiredPod, YamlError> {
    let notes = [(HASH, uid.as_str()), (SOURCE, "file"), (SEEN, seen), (MANIFEST, &origin.to_string())]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    let meta = &mut pod.metadata;
    meta.creation_timestamp = Some(seen.to_owned());
    // An exported object carries its old life along.
    meta.deletion_timestamp = None;
    meta.deletion_grace_period_seconds = None;
    meta.resource_version = None;
    meta.generation = None;
    if let (Some(spec), Some(node)) = (tree.field_mut("spec"), &pod.spec.node_name) {
        spec.set("nodeName", Value::Text(node.clone()));
    }
    if let Some(meta) = tree.field_mut("metadata") {
        meta.set("namespace", Value::Text(pod.metadata.namespace.clone()));
        meta.set("uid", Value::Text(pod.metadata.uid.clone()));
        meta.set("creationTimestamp", Value::Text(seen.to_owned()));
        for old in ["deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion", "generation", "managedFields"] {
            meta.remove(old);
        }
        if meta.field("annotations").is_none_or(Node::is_null) {
            meta.set("annotations", Value::Map(Vec::new()));
        }
        if let Some(annotations) = meta.field_mut("annotations") {
            for (key, value) in &notes {
                annotations.set(key, Value::Text(value.clone()));
            }
        }
    }
    pod.metadata.annotations.extend(notes);
    let raw = tree.to_json()?.into();
    Ok(DesiredPod { uid, pod: Arc::new(pod), raw, origin, warnings })
}

pub const HASH: &str = "kubernetes.io/config.hash";
pub const SOURCE: &str = "kubernetes.io/config.source";
pub const SEEN: &str = "kubernetes.io/config.seen";
/// Where a pod was read: `web.yaml#2`.
pub const MANIFEST: &str = "coracle/manifest";
