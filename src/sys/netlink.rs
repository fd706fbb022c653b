//! A blocking netlink socket, and the encoding of netlink messages and attributes.
use std::io;

/// A request that the kernel refused, or that could not be made.
#[derive(Debug, thiserror::Error)]
#[error("netlink: {what}")]
pub struct NetlinkError {
    /// What was asked, and the kernel's own words where it had some.
    pub what: String,
    pub source: io::Error,
}
