//! Thin typed system call wrappers, the only `unsafe` of the crate: one wrapper a call, its
//! arguments in the error.

#![allow(unsafe_code)]

mod attrs;
pub mod bpf;
pub mod capability;
pub mod chain;
pub mod clock;
pub mod conntrack;
pub mod dir;
pub mod exe;
pub mod failpoint;
pub mod file;
pub mod inet;
pub mod inherit;
pub mod mount;
pub mod mount_table;
pub mod netlink;
pub mod netns;
pub mod nftables;
pub mod pidfd;
pub mod process;
pub mod rtnl;
pub mod seqpacket;
pub mod signal;
pub mod socket;
pub mod sysctl;
pub mod tty;
pub mod uevent;
pub mod wire;
pub mod xattr;
