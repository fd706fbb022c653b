//! Crash-safe records: the disk journal, the effects journal, small files that are whole or absent.
//!
//! Invariant: whatever is published (status, exit files removed, images used) was first made
//! durable here, and no state that a crash can leave stops a start.

pub mod atomic;
pub mod effects;
pub mod error;
pub mod frame;
pub mod fs;
pub mod ids;
pub mod journal;
pub mod lock;
mod lost;
pub mod pods;
pub mod records;
mod reserve;

pub use error::StoreError;
