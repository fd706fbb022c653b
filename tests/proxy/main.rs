//! The proxy room against the real kernel, in throw-away network namespaces. Independent oracles:
//! the host's nft and Debian 13's, the `nftables` crate, and packets that arrive or do not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bounds;
mod cost;
mod faults;
mod flows;
mod front;
mod ground;
mod moves;
mod nft;
mod packets;
mod policies;
mod print;
mod sample;
mod size;
