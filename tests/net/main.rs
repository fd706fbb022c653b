//! The network room against the real kernel, in throw-away network namespaces: a node, the
//! outside behind its uplink, pods. Independent oracles: `ip -j`, `nft`, the `nftables` crate,
//! and packets that arrive or do not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod crash;
mod datapath;
mod life;
mod world;
