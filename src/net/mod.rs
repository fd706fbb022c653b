//! ROOM 3: the bridge network of pods.

pub mod model;
