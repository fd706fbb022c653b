//! Transport protocols that Services, host ports and policies name.
#![deny(clippy::disallowed_methods)]

use std::fmt;

use serde::{Deserialize, Serialize};

use super::pod::Protocol;

/// TCP where nothing is said, as in the API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum L4 {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

impl L4 {
    /// IPPROTO_*.
    pub fn number(self) -> u8 {
        match self {
            L4::Tcp => 6,
            L4::Udp => 17,
            L4::Sctp => 132,
        }
    }
}

impl From<Protocol> for L4 {
    fn from(protocol: Protocol) -> L4 {
        match protocol {
            Protocol::TCP => L4::Tcp,
            Protocol::UDP => L4::Udp,
            Protocol::SCTP => L4::Sctp,
        }
    }
}

impl fmt::Display for L4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            L4::Tcp => "TCP",
            L4::Udp => "UDP",
            L4::Sctp => "SCTP",
        })
    }
}
