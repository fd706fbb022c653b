//! The store: on a file system model that enumerates what power cuts leave, on the real kernel
//! with full disks and kill -9, and under many callers at once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "store/crash.rs"]
mod crash;
#[path = "store/kernel.rs"]
mod kernel;
#[cfg(feature = "failpoints")]
#[path = "store/killed.rs"]
mod killed;
#[path = "store/model.rs"]
mod model;
#[path = "store/points.rs"]
mod points;
