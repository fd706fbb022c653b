//! ROOM 2: the OCI runtime. Sandboxes and containers, in CRI's nouns and verbs.

pub mod cgroup;
pub mod devices;
pub mod model;
pub mod seccomp;
pub mod spec;
pub mod user;
