//! Notifications: who changed which table.
//!
//! The kernel tells of a transaction's changes message by message and of the transaction last.
//! Each names the socket that asked for it, so our own are told from others'.

use super::{NEWGEN, SUBSYSTEM};
use crate::sys::netlink::{NetlinkError, Protocol, Socket, attribute, messages, text};

/// NFNLGRP_NFTABLES as a bit of the bind mask.
const NOTIFY_GROUP: u32 = 1 << 6;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something of a table changed.
    Table {
        /// NFPROTO_*.
        family: u8,
        table: String,
        /// Of the socket that asked.
        port: u32,
    },
    /// A transaction ended.
    Transaction { pid: u32, program: String },
}

/// A non-blocking socket that hears of every change to any table.
pub fn listen() -> Result<Socket, NetlinkError> {
    Socket::listen(Protocol::Netfilter, NOTIFY_GROUP)
}

/// What a datagram of [`listen`]'s socket tells.
pub fn events(datagram: &[u8]) -> impl Iterator<Item = Event> {
    messages(datagram).filter_map(|(header, payload)| {
        if header.kind >> 8 != SUBSYSTEM {
            return None;
        }
        let body = payload.get(4..)?;
        if header.kind & 0xff == NEWGEN {
            let pid = attribute(body, 2).and_then(|b| b.try_into().ok()).map_or(0, u32::from_be_bytes);
            return Some(Event::Transaction { pid, program: attribute(body, 3).map(text).unwrap_or_default() });
        }
        Some(Event::Table { family: *payload.first()?, table: text(attribute(body, 1)?), port: header.port })
    })
}
