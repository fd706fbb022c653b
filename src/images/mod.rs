//! Images: references, registries, layers and the image store.

pub mod model;
