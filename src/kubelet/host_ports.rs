//! Host ports of pods as the network room asks for them and the proxy serves them: the two rooms
//! do not know each other.

use std::net::IpAddr;

use crate::net::model::{PodPorts, Ports, PortsError};
use crate::proxy::model::HostPortWant;
use crate::proxy::{self, Proxy};

/// The proxy in the place of whoever writes packet filter tables.
#[derive(Clone, Debug)]
pub struct HostPorts(pub Proxy);

impl Ports for HostPorts {
    fn know(&self, pods: Vec<PodPorts>) -> Result<(), PortsError> {
        Ok(self.0.know_pods(pods.iter().map(|pod| (pod.uid.clone(), wants(pod))).collect())?)
    }
    fn open(&self, pod: &PodPorts) -> Result<(), PortsError> {
        Ok(self.0.set_pod(&pod.uid, wants(pod))?)
    }
    fn close(&self, uid: &str) -> Result<(), PortsError> {
        Ok(self.0.remove_pod(uid)?)
    }
    fn ensure(&self) -> Result<(), PortsError> {
        Ok(self.0.tend()?)
    }
    fn remove_all(&self) -> Result<(), PortsError> {
        Ok(self.0.remove_all()?)
    }
}

/// Each port once a family that the pod has an address of and that its hostIP is of.
fn wants(pod: &PodPorts) -> proxy::PodPorts {
    let of = |ip: IpAddr| {
        let ports = pod.host_ports.iter().filter(move |p| p.host_ip.is_none_or(|host| host.is_ipv4() == ip.is_ipv4()));
        ports.map(move |p| HostPortWant {
            pod: pod.pod.clone(),
            protocol: p.protocol,
            host_ip: p.host_ip,
            host_port: p.host_port,
            ip,
            port: p.container_port,
        })
    };
    proxy::PodPorts { addresses: pod.addresses.clone(), host_ports: pod.addresses.iter().flat_map(|ip| of(*ip)).collect() }
}
