//! Thin typed system call wrappers, the only `unsafe` of the crate: one wrapper a call, its
//! arguments in the error.

pub mod clock;
