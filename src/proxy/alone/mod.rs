//! What a control plane does for Services, on a node alone: addresses and node ports for those
//! that name none, EndpointSlices from the pods that run here. Pure.
//!
//! Invariant: what is served comes from the same objects that a cluster would have, so that one
//! resolver ([`super::service`]) serves both.

use std::ops::RangeInclusive;

use super::model::LocalPod;

mod allot;
mod ranges;
mod slices;

pub use allot::{Allotted, Memory, allot};
pub use ranges::{BadServiceRange, service_ranges};
pub use slices::of_service as slices_of;

/// The API server's default --service-node-port-range.
pub const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// A pod of this node that has addresses and has not finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    pub local: LocalPod,
    /// Its condition Ready.
    pub ready: bool,
    /// It is being ended.
    pub ending: bool,
    pub hostname: Option<String>,
    pub subdomain: Option<String>,
}
