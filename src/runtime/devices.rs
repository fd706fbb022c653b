//! Which device nodes a container may use: default deny, with the few that every program needs.
//!
//! The list is the one that runc adds to every container. mknod of any node is allowed (opening
//! it is not): tools that unpack archives as root need it.

use super::model::{DeviceKind, DeviceRule};

/// For an ordinary container: null, zero, full, tty, random, urandom, pseudo terminals, tun.
pub fn default_rules() -> Vec<DeviceRule> {
    let any = |kind| DeviceRule { kind, major: None, minor: None, read: false, write: false, mknod: true };
    let char =
        |major, minor| DeviceRule { kind: DeviceKind::Char, major: Some(major), minor, read: true, write: true, mknod: true };
    vec![
        any(DeviceKind::Char),
        any(DeviceKind::Block),
        char(1, Some(3)),
        char(1, Some(5)),
        char(1, Some(7)),
        char(1, Some(8)),
        char(1, Some(9)),
        char(5, Some(0)),
        char(5, Some(2)),
        char(136, None),
        char(10, Some(200)),
    ]
}

/// Everything: privileged containers.
pub fn all_rules() -> Vec<DeviceRule> {
    vec![DeviceRule { kind: DeviceKind::All, major: None, minor: None, read: true, write: true, mknod: true }]
}
