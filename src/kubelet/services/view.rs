//! What `coracle services` shows.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::Services;
use crate::api::endpoint_slice::AddressType;
use crate::api::service::{IpFamily, Service};
use crate::proxy::model::{Endpoint, L4};
use crate::proxy::service::{Name, address};

/// One Service, as it is served by this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceView {
    pub namespace: String,
    pub name: String,
    /// `ClusterIP`; `ExternalName` too.
    #[serde(rename = "type")]
    pub kind: String,
    pub headless: bool,
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Vec<String>,
    /// externalIPs and the load balancer's addresses.
    #[serde(rename = "externalIPs")]
    pub external_ips: Vec<String>,
    pub external_name: String,
    pub ports: Vec<PortView>,
    /// `EndpointSlice default/web, endpoints[0].addresses: why`.
    pub skipped: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortView {
    pub name: String,
    pub protocol: String,
    pub port: i32,
    /// 0: none.
    pub node_port: i32,
    /// `10.88.0.2:8080`, of both families: where connections go now.
    pub endpoints: Vec<String>,
    /// The same of traffic policy Local.
    pub local_endpoints: Vec<String>,
}

impl Services {
    /// By namespace and name.
    pub fn views(&self) -> Vec<ServiceView> {
        self.services.iter().map(|(name, service)| self.view(name, service)).collect()
    }

    fn view(&self, name: &Name, service: &Service) -> ServiceView {
        let spec = &service.spec;
        let balancer = service.status.load_balancer.ingress.iter().map(|i| if i.ip.is_empty() { &i.hostname } else { &i.ip });
        let headless = spec.is_headless();
        let served = self.cache.ports(name);
        let ports = spec.ports.iter().map(|port| {
            let mine = |protocol: L4, port_name: &str| protocol == L4::from(port.protocol) && port_name == port.name;
            let of: Vec<_> = served.iter().filter(|p| mine(p.protocol, &p.name.port)).collect();
            let shown = |ends: &[Endpoint]| ends.iter().map(|e| SocketAddr::new(e.ip, e.port).to_string()).collect::<Vec<_>>();
            PortView {
                name: port.name.clone(),
                protocol: L4::from(port.protocol).to_string(),
                port: port.port,
                node_port: port.node_port,
                endpoints: match headless {
                    true => self.published(name, &port.name, port.protocol.into()),
                    false => of.iter().flat_map(|p| shown(if p.uses_cluster() { &p.cluster } else { &p.local })).collect(),
                },
                local_endpoints: of.iter().flat_map(|p| shown(&p.local)).collect(),
            }
        });
        ServiceView {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            kind: format!("{:?}", spec.kind),
            headless,
            cluster_ips: if headless { vec!["None".to_owned()] } else { spec.cluster_ips.clone() },
            external_ips: spec.external_ips.iter().chain(balancer).cloned().collect(),
            external_name: spec.external_name.clone(),
            ports: ports.collect(),
            skipped: self.skipped(name).iter().map(ToString::to_string).collect(),
        }
    }

    /// Ready endpoints of a headless Service: what names resolve to.
    fn published(&self, name: &Name, port: &str, protocol: L4) -> Vec<String> {
        let mut found: BTreeMap<SocketAddr, ()> = BTreeMap::new();
        for slice in self.slices(name).filter(|s| s.address_type != AddressType::FQDN) {
            let numbers = slice.ports.iter().filter(|p| p.name == port && L4::from(p.protocol) == protocol);
            for number in numbers.filter_map(|p| u16::try_from(p.port?).ok()) {
                let ready = slice.endpoints.iter().filter(|e| e.conditions.is_ready());
                let addresses = ready.filter_map(|e| address::parse(e.addresses.first()?).ok());
                let family = if slice.address_type == AddressType::IPv6 { IpFamily::IPv6 } else { IpFamily::IPv4 };
                found.extend(addresses.filter(|ip| address::family(*ip) == family).map(|ip| (SocketAddr::new(ip, number), ())));
            }
        }
        found.into_keys().map(|at| at.to_string()).collect()
    }
}
