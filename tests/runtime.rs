//! The runtime room alone: real monitors, real containers, real kernel; under a root of its own.
//!
//! Needs root, cgroups, and Debian's busybox-static.

#[path = "runtime/bounds.rs"]
mod bounds;
#[path = "runtime/bundle.rs"]
mod bundle;
#[path = "runtime/crash.rs"]
mod crash;
#[path = "runtime/life.rs"]
mod life;
#[cfg(feature = "failpoints")]
#[path = "runtime/points.rs"]
mod points;
#[path = "runtime/races.rs"]
mod races;
#[path = "runtime/streams.rs"]
mod streams;
#[path = "runtime/wire.rs"]
mod wire;
#[path = "runtime/world.rs"]
mod world;
