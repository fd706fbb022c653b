//! ROOM 4: Services, host ports and network policies in one nftables table a family.

pub mod alone;
pub mod apply;
pub mod conntrack;
pub mod lacks;
pub mod layout;
pub mod model;
pub mod observe;
pub mod service;
pub mod table;
