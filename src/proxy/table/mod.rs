//! One nftables table as data: what it holds, how it is written, what differs, what a packet
//! meets. Pure: the kernel is `proxy/apply.rs`'s and `observe.rs`'s.

pub mod acts;
mod bytes;
pub mod changes;
pub mod encode;
pub mod ir;
pub mod needs;
pub mod ranges;
pub mod read_back;
mod story;
pub mod text;
pub mod trace;
