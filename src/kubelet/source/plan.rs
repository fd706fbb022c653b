//! What is wanted, from one look at the directory and everything that was known before. Pure.
//!
//! Keeps, for each file, the objects of its last good version: a file that breaks changes nothing
//! until it is mended. Of several that claim one name the one that runs stays, else the first in
//! glob order wins.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::model::{ConfigObjects, DesiredPod, NetworkChange, NetworkObject, Problem, SourceUpdate};
use super::network::{self, Keep};
use super::object::{self, Body, Contents, Key, Object};
use crate::api::yaml::{self, Limits, YamlError};
use crate::store::ids::PodUid;

/// What was found at one file's name.
pub enum Found {
    /// Not touched since the last look.
    Same,
    /// Somebody is writing it: the last good version stands, without a word.
    Busy,
    Text(Vec<u8>),
    /// It cannot be read, or is no regular file.
    Unreadable(String),
}

/// One look. `Err`: the directory cannot be trusted now, and why.
pub type Look = Result<BTreeMap<String, Found>, String>;

#[derive(Default)]
struct FileState {
    /// Objects in effect: the newest version's, and older ones in place of what is broken in it.
    objects: Vec<Object>,
    problems: Vec<Problem>,
    others: Vec<String>,
    /// Of the text that `objects` were read from.
    digest: Option<[u8; 32]>,
}

/// Who holds a name now.
struct Holder {
    uid: Option<PodUid>,
    file: String,
}

/// What follows from the files: kept, so that a file that changes costs what it holds itself.
#[derive(Default)]
struct Rendered {
    pods: BTreeMap<Key, DesiredPod>,
    /// Readers tell by the pointer whether anything of it has changed.
    configs: Arc<ConfigObjects>,
    network: BTreeMap<Key, NetworkObject>,
    /// Who did not get a name.
    lost: BTreeMap<Key, Vec<Problem>>,
}

#[derive(Default)]
pub struct Desired {
    node_name: String,
    files: BTreeMap<String, FileState>,
    holders: BTreeMap<Key, Holder>,
    /// Since when each wanted pod is wanted.
    seen: BTreeMap<PodUid, String>,
    /// Pods of an earlier life of the agent whose file was not yet looked at.
    stored: Vec<DesiredPod>,
    /// And what packets were served from: files and their objects.
    stored_network: Vec<(String, Object)>,
    /// What is wanted now.
    rendered: Rendered,
    /// Whether the directory was ever seen in this life.
    looked: bool,
}

impl Desired {
    /// `known`: what the store has, the last good versions of files that may be broken now.
    pub fn new(node_name: String, known: Vec<DesiredPod>) -> Desired {
        let mut holders = BTreeMap::new();
        let mut seen = BTreeMap::new();
        for pod in &known {
            let meta = &pod.pod.metadata;
            let key = Key { kind: "Pod", namespace: meta.namespace.clone(), name: meta.name.clone() };
            holders.insert(key, Holder { uid: Some(pod.uid.clone()), file: pod.origin.file.clone() });
            if let Some(at) = meta.annotations.get(object::SEEN) {
                seen.insert(pod.uid.clone(), at.clone());
            }
        }
        Desired {
            node_name,
            files: BTreeMap::new(),
            holders,
            seen,
            stored: known,
            stored_network: Vec::new(),
            rendered: Rendered::default(),
            looked: false,
        }
    }

    /// With what [`Desired::remember`] gave in an earlier life.
    pub fn recalling(mut self, stored: Vec<(String, Object)>) -> Desired {
        for (file, object) in &stored {
            self.holders.insert(object.key.clone(), Holder { uid: None, file: file.clone() });
        }
        self.stored_network = stored;
        self
    }

    /// The last good versions of what packets are served from, for [`network::recall`].
    pub fn remember(&self, keep: Keep) -> Option<Vec<u8>> {
        network::remember(self.objects(), keep)
    }

    /// Whether any pod is wanted, by a file or by the store.
    pub fn any_pod(&self) -> bool {
        !self.stored.is_empty() || self.objects().any(|(_, o)| matches!(o.body, Body::Pod(_)))
    }

    /// Files that are in effect and that a look has not found: the caller looks twice before it
    /// believes that, since a rename may hide a file from one reading of the directory.
    pub fn missing<'a>(&'a self, found: &BTreeMap<String, Found>) -> Vec<&'a str> {
        self.files.iter().filter(|(name, f)| !f.objects.is_empty() && !found.contains_key(*name)).map(|(n, _)| &**n).collect()
    }

    fn objects(&self) -> impl Iterator<Item = (&String, &Object)> {
        objects(&self.files)
    }

    /// Takes a look in; `now` is RFC 3339.
    pub fn look(&mut self, look: Look, now: &str) -> SourceUpdate {
        let found = match look {
            Ok(found) => found,
            Err(message) => {
                let mut update = self.render(&BTreeSet::new());
                update.complete = false;
                if !self.looked {
                    for (_, object) in &self.stored_network {
                        if let Body::Network(body) = &object.body {
                            self.rendered.serve(&object.key, Some(body), &mut update.network);
                        }
                    }
                }
                let wanted: BTreeSet<PodUid> = update.pods.iter().map(|p| p.uid.clone()).collect();
                update.pods.extend(self.stored.iter().filter(|p| !wanted.contains(&p.uid)).cloned());
                update.problems.insert(0, Problem { message, kept: self.any_pod(), ..Problem::default() });
                return update;
            }
        };
        let mut old = std::mem::take(&mut self.files);
        // What stands in no file any more. A broken file that nobody knows may be its new home.
        let mut leaving = self.stored_objects(|file| !found.contains_key(file));
        leaving.extend(old.iter().filter(|(name, _)| !found.contains_key(*name)).flat_map(|(_, f)| f.objects.iter().cloned()));
        let mut touched: BTreeSet<Key> = BTreeSet::new();
        for (name, found) in found {
            let before = old.remove(&name);
            let stays = before.is_some() && matches!(found, Found::Same | Found::Busy);
            let digest = before.as_ref().and_then(|file| file.digest);
            let keys: Vec<Key> = match &before {
                Some(file) if !stays => file.keys().cloned().collect(),
                _ => Vec::new(),
            };
            let state = self.file(&name, found, before, &leaving, now);
            if !stays && (digest.is_none() || digest != state.digest) {
                touched.extend(keys);
                touched.extend(state.keys().cloned());
            }
            self.files.insert(name, state);
        }
        touched.extend(old.values().flat_map(FileState::keys).cloned());
        if !self.looked {
            // What an earlier life held stands in some file, or is gone.
            touched.extend(self.holders.keys().chain(self.rendered.network.keys()).cloned());
        }
        self.looked = true;
        // What the store knew is now part of some file's state, or gone.
        self.stored.clear();
        self.stored_network.clear();
        self.render(&touched)
    }

    fn file(&self, name: &str, found: Found, before: Option<FileState>, leaving: &[Object], now: &str) -> FileState {
        // The first look in this life: what the store knows of this file was its last good version.
        let fresh = before.is_none();
        let mut before = before.unwrap_or_default();
        if fresh {
            before.objects = self.stored_objects(|file| file == name);
        }
        let known = |state: &mut FileState| {
            if state.objects.is_empty() && fresh {
                // Line 0: these do not stand in this file.
                state.objects = leaving.iter().map(|o| Object { line: 0, ..o.clone() }).collect();
            }
        };
        match found {
            Found::Same => before,
            Found::Busy => {
                known(&mut before);
                before
            }
            Found::Unreadable(message) => {
                known(&mut before);
                broken(before, Problem { file: name.to_owned(), message, ..Problem::default() })
            }
            Found::Text(mut text) => {
                let digest = sha256(&text);
                if before.digest == Some(digest) {
                    return before;
                }
                let read = self.read(name, &text, now);
                // It may have held a Secret.
                text.fill(0);
                std::hint::black_box(&text);
                match read {
                    (contents, None) => {
                        if contents.broken.contains(&None) {
                            known(&mut before);
                        }
                        merged(before.objects, contents, digest)
                    }
                    (part, Some(problem)) => {
                        known(&mut before);
                        let mut state = FileState { digest: Some(digest), ..broken(before, problem) };
                        if fresh {
                            // The store has pods but no ConfigMaps and Secrets: those that can be
                            // read keep the pods alive that use them.
                            let stored = |o: &Object| matches!(o.body, Body::Pod(_) | Body::Network(_));
                            state.objects.extend(part.objects.into_iter().filter(|o| !stored(o)));
                        }
                        state
                    }
                }
            }
        }
    }

    /// What the file holds; with a problem: what stands before the place where it becomes unreadable.
    fn read(&self, name: &str, text: &[u8], now: &str) -> (Contents, Option<Problem>) {
        let whole = |document: u32, e: YamlError| Problem {
            file: name.to_owned(),
            document,
            line: e.line,
            column: e.column,
            field: e.field,
            message: e.message,
            ..Problem::default()
        };
        if text.iter().all(|b| b.is_ascii_whitespace() || *b == 0) {
            let why = "the file is empty: write the manifest again, or remove the file";
            let empty = YamlError { line: 0, column: 0, field: String::new(), message: why.to_owned() };
            return (Contents::default(), Some(whole(0, empty)));
        }
        let seen = |uid: &PodUid| self.seen.get(uid).cloned().unwrap_or_else(|| now.to_owned());
        let reader = object::Reader { node_name: &self.node_name, file: name, seen: &seen };
        let mut contents = Contents::default();
        for (index, tree) in yaml::documents(text, Limits::default()).enumerate() {
            let number = index as u32 + 1;
            match tree {
                Ok(tree) => object::read(&reader, number, tree, &mut contents),
                Err(error) => return (contents, Some(whole(number, error))),
            }
        }
        (contents, None)
    }

    fn stored_objects(&self, wanted: impl Fn(&str) -> bool) -> Vec<Object> {
        let stored = self.stored.iter().filter(|pod| wanted(&pod.origin.file));
        let object = |pod: &DesiredPod| {
            let meta = &pod.pod.metadata;
            let key = Key { kind: "Pod", namespace: meta.namespace.clone(), name: meta.name.clone() };
            Object { key, document: pod.origin.document, line: 0, body: Body::Pod(pod.clone()) }
        };
        let network = self.stored_network.iter().filter(|(file, _)| wanted(file)).map(|(_, object)| object.clone());
        stored.map(object).chain(network).collect()
    }

    /// Settles who holds the names that are touched.
    fn render(&mut self, touched: &BTreeSet<Key>) -> SourceUpdate {
        let Desired { files, holders, rendered, .. } = self;
        let mut claims: BTreeMap<&Key, Vec<(&String, &Object)>> = touched.iter().map(|key| (key, Vec::new())).collect();
        if !touched.is_empty() {
            for (file, object) in objects(files) {
                if let Some(claims) = claims.get_mut(&object.key) {
                    claims.push((file, object));
                }
            }
        }
        let mut network = Vec::new();
        for (key, claims) in claims {
            rendered.lost.remove(key);
            let winner = winner(holders.get(key), &claims);
            let Some(&(file, object)) = claims.get(winner) else {
                holders.remove(key);
                rendered.put(key, None, &mut network);
                continue;
            };
            // One that stands in for a broken file's unknown contents: that is told already.
            let losers = claims.iter().enumerate().filter(|(at, (_, loser))| *at != winner && loser.line > 0);
            let lost: Vec<Problem> = losers.map(|(_, (its, loser))| lost(key, (its, loser), (file, object))).collect();
            if !lost.is_empty() {
                rendered.lost.insert(key.clone(), lost);
            }
            let uid = match &object.body {
                Body::Pod(pod) => Some(pod.uid.clone()),
                Body::ConfigMap(_) | Body::Secret(_) | Body::Network(_) => None,
            };
            rendered.put(key, Some(&object.body), &mut network);
            holders.insert(key.clone(), Holder { uid, file: file.clone() });
        }
        let pods: Vec<DesiredPod> = rendered.pods.values().cloned().collect();
        if self.looked {
            let seen =
                |p: &DesiredPod| (p.uid.clone(), p.pod.metadata.annotations.get(object::SEEN).cloned().unwrap_or_default());
            self.seen = pods.iter().map(seen).collect();
        }
        let problems = self.files.values().flat_map(|f| &f.problems).chain(self.rendered.lost.values().flatten());
        let mut problems: Vec<Problem> = problems.cloned().collect();
        problems.sort();
        SourceUpdate { complete: self.looked, pods, configs: Arc::clone(&self.rendered.configs), network, problems }
    }

    /// Other known kinds that stand in the directory, with one file each.
    pub fn others(&self) -> BTreeMap<&str, &str> {
        let all = self.files.iter().rev();
        all.flat_map(|(name, file)| file.others.iter().map(move |kind| (&**kind, &**name))).collect()
    }
}

impl FileState {
    fn keys(&self) -> impl Iterator<Item = &Key> {
        self.objects.iter().map(|object| &object.key)
    }
}

impl Rendered {
    /// Another object, or none, has the name; what packets are served from is told in `network`.
    fn put(&mut self, key: &Key, body: Option<&Body>, network: &mut Vec<NetworkChange>) {
        let name = || (key.namespace.clone(), key.name.clone());
        let configs = &mut self.configs;
        match body {
            Some(Body::Pod(pod)) => drop(self.pods.insert(key.clone(), pod.clone())),
            Some(Body::ConfigMap(data)) if configs.config_maps.get(&name()) != Some(data) => {
                Arc::make_mut(configs).config_maps.insert(name(), Arc::clone(data));
            }
            Some(Body::Secret(data)) if configs.secrets.get(&name()) != Some(data) => {
                Arc::make_mut(configs).secrets.insert(name(), Arc::clone(data));
            }
            Some(Body::ConfigMap(_) | Body::Secret(_)) => {}
            Some(Body::Network(object)) => self.serve(key, Some(object), network),
            None => match key.kind {
                "Pod" => drop(self.pods.remove(key)),
                "ConfigMap" if configs.config_maps.contains_key(&name()) => {
                    Arc::make_mut(configs).config_maps.remove(&name());
                }
                "Secret" if configs.secrets.contains_key(&name()) => {
                    Arc::make_mut(configs).secrets.remove(&name());
                }
                "ConfigMap" | "Secret" => {}
                _ => self.serve(key, None, network),
            },
        }
    }

    fn serve(&mut self, key: &Key, object: Option<&NetworkObject>, changes: &mut Vec<NetworkChange>) {
        if self.network.get(key) == object {
            return;
        }
        match object {
            Some(object) => drop(self.network.insert(key.clone(), object.clone())),
            None => drop(self.network.remove(key)),
        }
        changes.push(NetworkChange { key: key.clone(), object: object.cloned() });
    }
}

fn objects(files: &BTreeMap<String, FileState>) -> impl Iterator<Item = (&String, &Object)> {
    files.iter().flat_map(|(name, file)| file.objects.iter().map(move |object| (name, object)))
}

/// A version whose text could be read: the old object stands in for each broken one.
fn merged(known: Vec<Object>, new: Contents, digest: [u8; 32]) -> FileState {
    let fresh: BTreeSet<&Key> = new.objects.iter().map(|o| &o.key).collect();
    // A broken object whose name cannot be read may be any that stood here.
    let nameless = new.broken.contains(&None);
    let stands = |o: &Object| !fresh.contains(&o.key) && (nameless || new.broken.iter().flatten().any(|key| *key == o.key));
    let kept: Vec<Object> = known.into_iter().filter(stands).collect();
    let mut state = FileState { digest: Some(digest), others: new.others, problems: new.problems, objects: new.objects };
    for problem in &mut state.problems {
        let meant = |o: &Object| match (problem.pod.as_str(), problem.object.as_str()) {
            ("", "") => true,
            ("", object) => o.key.network_object().as_deref() == Some(object),
            (pod, _) => o.key.kind == "Pod" && pod == o.key.named(),
        };
        problem.kept = kept.iter().any(meant);
    }
    state.objects.extend(kept);
    state
}

/// A version of which nothing can be read: everything stays as it was.
fn broken(before: FileState, mut problem: Problem) -> FileState {
    problem.kept = !before.objects.is_empty();
    FileState { problems: vec![problem], digest: None, ..before }
}

/// Index of the claim that holds: the instance that runs, else the file that held the name, else
/// the first in glob order.
fn winner(holder: Option<&Holder>, claims: &[(&String, &Object)]) -> usize {
    let Some(holder) = holder else { return 0 };
    let uid = |object: &Object| match &object.body {
        Body::Pod(pod) => Some(pod.uid.clone()),
        Body::ConfigMap(_) | Body::Secret(_) | Body::Network(_) => None,
    };
    let same_file = |claim: &(&String, &Object)| *claim.0 == holder.file;
    let same_uid = |claim: &(&String, &Object)| holder.uid.is_some() && uid(claim.1) == holder.uid;
    let by_both = claims.iter().position(|c| same_file(c) && same_uid(c));
    by_both.or_else(|| claims.iter().position(same_uid)).or_else(|| claims.iter().position(same_file)).unwrap_or(0)
}

fn lost(key: &Key, (file, loser): (&str, &Object), (winning_file, winner): (&str, &Object)) -> Problem {
    let name = key.named();
    let place = |o: &Object| if o.line > 0 { format!(", line {}", o.line) } else { String::new() };
    let kind = key.kind.to_lowercase();
    Problem {
        file: file.to_owned(),
        document: loser.document,
        line: loser.line,
        column: u32::from(loser.line > 0),
        pod: if key.kind == "Pod" { name.clone() } else { String::new() },
        object: key.network_object().unwrap_or_default(),
        field: "metadata.name".to_owned(),
        message: format!(
            "{kind} {name} is already defined in {winning_file} (document {}{}), which counts: remove one of the two or rename this one",
            winner.document,
            place(winner)
        ),
        kept: false,
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    for (to, from) in out.iter_mut().zip(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref()) {
        *to = *from;
    }
    out
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "network_tests.rs"]
mod network_tests;
