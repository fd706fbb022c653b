//! Flows of pods that are gone.
//!
//! Connection tracking remembers a translation for as long as packets come, so a client of a UDP
//! hostPort would go on to the removed pod's address and to whoever has it next. TCP ends by
//! itself. Invariant: only flows that the pod's address answers are forgotten.

use nix::errno::Errno;

use super::leases::Lease;
use super::model::{Feature, L4, NetError, PodPorts};
use super::{Inner, lacks, note_lack};
use crate::sys::chain::chain;
use crate::sys::conntrack::{self, Filter};

impl Lease {
    pub(super) fn ports(&self) -> PodPorts {
        let (uid, pod) = (self.uid.clone(), self.pod.clone());
        PodPorts { uid, pod, addresses: self.addresses.clone(), host_ports: self.host_ports.clone() }
    }
}

impl Inner {
    /// The kernel walks its whole table for this, so only where there is something to forget.
    pub(super) fn forget_flows(&self, lease: &Lease) -> Result<(), NetError> {
        if lease.host_ports.iter().all(|p| p.protocol == L4::Tcp) {
            return Ok(());
        }
        let answering = |ip| Filter { answering: Some(ip), ..Filter::default() };
        let filters: Vec<Filter> = lease.addresses.iter().map(|ip| answering(*ip)).collect();
        if self.state().lacks.contains_key(&Feature::Conntrack) {
            return Ok(());
        }
        match conntrack::open().and_then(|mut socket| conntrack::forget(&mut socket, &filters)) {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.errno(), Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EINVAL) => {
                note_lack(&mut self.state().lacks, lacks::lack(Feature::Conntrack, chain(&e).to_string()));
                Ok(())
            }
            Err(source) => {
                let object = format!("pod {}", lease.pod);
                Err(NetError::Kernel { operation: "forget the flows of", object, source })
            }
        }
    }
}
