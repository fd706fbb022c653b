//! The network room against the real kernel, in throw-away network namespaces: a node, the
//! outside behind its uplink, pods. Independent oracles: `ip -j`, `nft`, the crates `rtnetlink` and `nftables`,
//! and packets that arrive or do not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod crash;
mod datapath;
mod life;
mod oracle;
mod world;
