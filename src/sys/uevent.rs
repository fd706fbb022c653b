//! The kernel's announcements of devices and modules.
//!
//! Source: lib/kobject_uevent.c. A datagram is `ACTION@DEVPATH` and then `KEY=value` texts, each
//! ended by a NUL byte.

use super::netlink::{NetlinkError, Protocol, Socket};

/// The kernel's own group; group 2 is what udevd re-sends.
const KERNEL_GROUP: u32 = 1;

/// A non-blocking socket that hears them.
pub fn listen() -> Result<Socket, NetlinkError> {
    Socket::listen(Protocol::KobjectUevent, KERNEL_GROUP)
}

/// Action and device path, e.g. `("add", "/module/br_netfilter")`.
pub fn parse(datagram: &[u8]) -> Option<(&str, &str)> {
    let end = datagram.iter().position(|b| *b == 0)?;
    std::str::from_utf8(datagram.get(..end)?).ok()?.split_once('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_text_names_action_and_path() {
        assert_eq!(parse(b"add@/module/br_netfilter\0ACTION=add\0"), Some(("add", "/module/br_netfilter")));
        assert_eq!(parse(b"libudev\0\xfe\xed"), None);
        assert_eq!(parse(b"add@/x"), None);
    }
}
