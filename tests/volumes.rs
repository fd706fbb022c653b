//! Volumes on the real kernel: each test in a mount namespace of its own thread.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "volumes/hostile.rs"]
mod hostile;
#[path = "volumes/kernel.rs"]
mod kernel;
#[cfg(feature = "failpoints")]
#[path = "volumes/killed.rs"]
mod killed;
#[path = "volumes/world.rs"]
mod world;
