//! What the image store's journal holds, and the fold of its records. Pure.
//!
//! Order of writes: blobs and layer trees are synced first, then their `Layer` records, then
//! `Image`, then `Name`; backwards where things go. So a name never leads to something that a
//! power cut took.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::digest::Digest;
use crate::store::frame::Entry;
use crate::store::journal::Fold;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// `layers/<dir>`: short, since overlay's options are one page.
    pub dir: u64,
    /// The compressed layer that it can be made from again.
    pub blob: Digest,
    pub blob_size: u64,
    /// diffID.
    pub diff: Digest,
    pub entries: u64,
    pub bytes: u64,
    /// Digest over names, modes, owners, sizes and times of the tree.
    pub listing: Digest,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    pub config: Digest,
    /// Chain ids, lowest first.
    pub chains: Vec<Digest>,
    /// Manifest, config and layers, with their sizes.
    pub blobs: Vec<(Digest, u64)>,
    #[serde(default)]
    pub pinned: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    Layer {
        chain: Digest,
        #[serde(flatten)]
        layer: LayerRecord,
    },
    LayerGone {
        chain: Digest,
    },
    /// Keyed by the manifest's digest.
    Image {
        manifest: Digest,
        #[serde(flatten)]
        image: ImageRecord,
    },
    ImageGone {
        manifest: Digest,
    },
    /// `docker.io/library/busybox:1` or `…@sha256:…` means this manifest now.
    Name {
        name: String,
        manifest: Digest,
    },
    NameGone {
        name: String,
    },
}

/// A record as the journal keeps it. The number of each kind is for ever.
pub fn entry(record: &Record) -> Result<Entry, serde_json::Error> {
    let kind = match record {
        Record::Layer { .. } => 1,
        Record::LayerGone { .. } => 2,
        Record::Image { .. } => 3,
        Record::ImageGone { .. } => 4,
        Record::Name { .. } => 5,
        Record::NameGone { .. } => 6,
    };
    Ok(Entry { kind, version: 1, payload: serde_json::to_vec(record)? })
}

impl Fold for State {
    fn apply(&mut self, entry: &Entry) -> bool {
        match serde_json::from_slice::<Record>(&entry.payload) {
            Ok(record) => {
                State::apply(self, record);
                true
            }
            Err(_) => false,
        }
    }

    fn snapshot(&self) -> Result<Vec<Entry>, serde_json::Error> {
        State::snapshot(self).iter().map(entry).collect()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub layers: BTreeMap<Digest, LayerRecord>,
    pub images: BTreeMap<Digest, ImageRecord>,
    pub names: BTreeMap<String, Digest>,
}

impl State {
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Layer { chain, layer } => {
                self.layers.insert(chain, layer);
            }
            Record::LayerGone { chain } => {
                self.layers.remove(&chain);
            }
            Record::Image { manifest, image } => {
                self.images.insert(manifest, image);
            }
            Record::ImageGone { manifest } => {
                self.images.remove(&manifest);
                self.names.retain(|_, m| *m != manifest);
            }
            Record::Name { name, manifest } => {
                if self.images.contains_key(&manifest) {
                    self.names.insert(name, manifest);
                }
            }
            Record::NameGone { name } => {
                self.names.remove(&name);
            }
        }
    }

    /// Records that give this state again.
    pub fn snapshot(&self) -> Vec<Record> {
        let layers = self.layers.iter().map(|(chain, layer)| Record::Layer { chain: *chain, layer: layer.clone() });
        let images = self.images.iter().map(|(manifest, image)| Record::Image { manifest: *manifest, image: image.clone() });
        let names = self.names.iter().map(|(name, manifest)| Record::Name { name: name.clone(), manifest: *manifest });
        layers.chain(images).chain(names).collect()
    }

    /// Blobs that some image needs.
    pub fn blobs(&self) -> BTreeSet<Digest> {
        self.images.values().flat_map(|i| i.blobs.iter().map(|(digest, _)| *digest)).collect()
    }

    /// Recorded layers that no image needs.
    pub fn loose_layers(&self) -> Vec<Digest> {
        let used: BTreeSet<&Digest> = self.images.values().flat_map(|i| &i.chains).collect();
        self.layers.keys().filter(|chain| !used.contains(chain)).copied().collect()
    }

    /// Images that no name leads to and nobody pinned.
    pub fn nameless(&self) -> Vec<Digest> {
        let named: BTreeSet<&Digest> = self.names.values().collect();
        self.images.iter().filter(|(manifest, image)| !named.contains(manifest) && !image.pinned).map(|(m, _)| *m).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str) -> Digest {
        Digest::of(text.as_bytes())
    }

    fn layer(n: u64) -> LayerRecord {
        LayerRecord {
            dir: n,
            blob: digest("blob"),
            blob_size: 1,
            diff: digest("diff"),
            entries: 2,
            bytes: 3,
            listing: digest("listing"),
        }
    }

    #[test]
    fn a_snapshot_gives_the_state_again() {
        let image = ImageRecord { config: digest("c"), chains: vec![digest("l1")], blobs: vec![(digest("c"), 5)], pinned: true };
        let mut state = State::default();
        for record in [
            Record::Layer { chain: digest("l1"), layer: layer(1) },
            Record::Layer { chain: digest("l2"), layer: layer(2) },
            Record::Image { manifest: digest("m"), image },
            Record::Name { name: "a:b".into(), manifest: digest("m") },
            Record::Name { name: "nothing:there".into(), manifest: digest("x") },
        ] {
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
            state.apply(record);
        }
        assert_eq!(state.names.len(), 1);
        assert_eq!(state.loose_layers(), [digest("l2")]);
        let mut again = State::default();
        state.snapshot().into_iter().for_each(|r| again.apply(r));
        assert_eq!(again, state);
        state.apply(Record::ImageGone { manifest: digest("m") });
        assert!(state.names.is_empty() && state.blobs().is_empty());
        assert_eq!(state.loose_layers().len(), 2);
    }
}
