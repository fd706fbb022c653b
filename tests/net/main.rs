//! The network room against the real kernel, in throw-away network namespaces: a node, the
//! outside behind its uplink, pods. Independent oracles: `ip -j`, `nft`, the crates `rtnetlink`
//! and `nftables`, and packets that arrive or do not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod crash;
mod datapath;
mod leaks;
mod life;
mod oracle;
mod sctp;
// Other tests use what is not used here.
#[allow(dead_code)]
#[path = "../support/node.rs"]
mod support;
mod uevent;
mod uninstall;
mod world;
