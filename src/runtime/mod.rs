//! ROOM 2: the OCI runtime. Sandboxes and containers, in CRI's nouns and verbs.

pub mod model;
