//! ROOM 4: Services, host ports and network policies in one nftables table a family.

pub mod alone;
pub mod model;
pub mod service;
pub mod table;
