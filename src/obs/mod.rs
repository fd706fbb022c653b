//! Logs and the service manager: one line per change of state on stderr, made for the journal
//! or as JSON; sd_notify datagrams.
//!
//! Invariant: an event is one line whatever its values hold, and nothing that a pod can trigger
//! floods the log (`limit`). Sources: sd-daemon(3) for `<N>` prefixes, systemd.exec(5) for
//! JOURNAL_STREAM, sd_notify(3).

mod limit;
mod line;
mod log;
pub mod notify;

pub use crate::sys::chain::chain;
pub use log::{AlreadySet, Format, LogOptions, init};
