//! Environment variables by which pods find Services: `{NAME}_SERVICE_HOST` and those of
//! docker's links. kubernetes/pkg/kubelet/envvars, kubelet_pods.go (getServiceEnvVarMap).
//!
//! Of the pod's own namespace unless `enableServiceLinks: false`; `default/kubernetes`, where there
//! is one, in every pod. Only Services with a ClusterIP.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use crate::api::pod::Pod;
use crate::api::service::Service;
use crate::proxy::model::L4;
use crate::proxy::service::Name;

/// In every pod, whatever its namespace and its links.
const MASTER: (&str, &str) = ("default", "kubernetes");

pub fn of(pod: &Pod, services: &BTreeMap<Name, Arc<Service>>) -> Vec<(String, String)> {
    let links = pod.spec.enable_service_links.unwrap_or(true);
    let mut seen: BTreeMap<&str, &Service> = BTreeMap::new();
    for (name, service) in services.iter().filter(|(_, s)| host(s).is_some()) {
        if (name.namespace.as_str(), name.name.as_str()) == MASTER {
            // One of the pod's own namespace and this name goes before it.
            seen.entry(&name.name).or_insert(service);
        } else if links && name.namespace == pod.metadata.namespace {
            seen.insert(&name.name, service);
        }
    }
    seen.into_iter().flat_map(|(name, service)| variables(name, service)).collect()
}

fn host(service: &Service) -> Option<IpAddr> {
    service.spec.cluster_ip.parse().ok()
}

fn variables(name: &str, service: &Service) -> Vec<(String, String)> {
    let (Some(ip), Some(first)) = (host(service), service.spec.ports.first()) else { return Vec::new() };
    let name = upper(name);
    let mut all =
        vec![(format!("{name}_SERVICE_HOST"), ip.to_string()), (format!("{name}_SERVICE_PORT"), first.port.to_string())];
    for port in service.spec.ports.iter().filter(|p| !p.name.is_empty()) {
        all.push((format!("{name}_SERVICE_PORT_{}", upper(&port.name)), port.port.to_string()));
    }
    let host = if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() };
    for (index, port) in service.spec.ports.iter().enumerate() {
        let protocol = L4::from(port.protocol).to_string();
        let lower = protocol.to_lowercase();
        let url = format!("{lower}://{host}:{}", port.port);
        if index == 0 {
            all.push((format!("{name}_PORT"), url.clone()));
        }
        let prefix = format!("{name}_PORT_{}_{protocol}", port.port);
        all.push((prefix.clone(), url));
        all.push((format!("{prefix}_PROTO"), lower));
        all.push((format!("{prefix}_PORT"), port.port.to_string()));
        all.push((format!("{prefix}_ADDR"), ip.to_string()));
    }
    all
}

fn upper(text: &str) -> String {
    text.to_uppercase().replace('-', "_")
}
