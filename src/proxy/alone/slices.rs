//! EndpointSlices of the pods that a Service selects, as the EndpointSlice controller makes them
//! (k8s.io/endpointslice: reconciler.go, utils.go, trafficdist).
//!
//! Invariant: a slice's name has an `@`, which no manifest's can have, so the two never meet.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};

use super::Pod;
use crate::api::endpoint_slice::{
    AddressType, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, Hint, SERVICE_NAME, SliceEndpoint, TargetRef,
};
use crate::api::meta::ObjectMeta;
use crate::api::pod::Protocol;
use crate::api::selector::IntOrString;
use crate::api::service::{HEADLESS, IpFamily, Service, ServicePort, ServiceType};
use crate::proxy::model::{L4, NodeFacts, Skipped};
use crate::proxy::service::{Name, address};

const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";

/// Name, protocol and number of each: pods that differ in one stand in different slices.
type Ports = Vec<(String, Protocol, i32)>;

/// Slices of one Service, and target ports that some of its pods do not have.
pub fn of_service(name: &Name, service: &Service, pods: &[Pod], node: &NodeFacts) -> (Vec<EndpointSlice>, Vec<Skipped>) {
    let spec = &service.spec;
    if spec.selector.is_empty() || spec.kind == ServiceType::ExternalName {
        return (Vec::new(), Vec::new());
    }
    let selected = |pod: &&Pod| {
        pod.local.namespace == name.namespace && spec.selector.iter().all(|(key, value)| pod.local.labels.get(key) == Some(value))
    };
    let mut groups: BTreeMap<(IpFamily, Ports), Vec<SliceEndpoint>> = BTreeMap::new();
    let mut skipped = BTreeSet::new();
    for pod in pods.iter().filter(selected) {
        let mut ports = Vec::new();
        for (index, port) in spec.ports.iter().enumerate() {
            match target(port, pod) {
                Some(number) => ports.push((port.name.clone(), port.protocol, number)),
                None => drop(skipped.insert(no_port(name, index, port, pod))),
            }
        }
        for family in &spec.ip_families {
            if let Some(ip) = pod.local.addresses.iter().find(|ip| address::family(**ip) == *family) {
                let endpoint = endpoint(name, service, pod, ip.to_string(), node);
                groups.entry((*family, ports.clone())).or_default().push(endpoint);
            }
        }
    }
    let mut slices = Vec::new();
    for (index, ((family, ports), endpoints)) in groups.into_iter().enumerate() {
        let (address_type, short) = match family {
            IpFamily::IPv4 => (AddressType::IPv4, "ipv4"),
            IpFamily::IPv6 => (AddressType::IPv6, "ipv6"),
        };
        slices.push(EndpointSlice {
            api_version: "discovery.k8s.io/v1".to_owned(),
            kind: "EndpointSlice".to_owned(),
            metadata: ObjectMeta {
                name: format!("{}@{short}-{index}", name.name),
                namespace: name.namespace.clone(),
                labels: labels(service),
                ..ObjectMeta::default()
            },
            address_type,
            endpoints,
            ports: ports.into_iter().map(|(name, protocol, port)| EndpointPort { name, protocol, port: Some(port) }).collect(),
        });
    }
    (slices, skipped.into_iter().collect())
}

fn labels(service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.metadata.labels.clone();
    // The label says what the Service's address says, whatever stands on the Service.
    labels.remove(HEADLESS);
    if service.spec.is_headless() {
        labels.insert(HEADLESS.to_owned(), String::new());
    }
    labels.insert(SERVICE_NAME.to_owned(), service.metadata.name.clone());
    labels.insert(MANAGED_BY.to_owned(), "coracle".to_owned());
    labels
}

/// The number of a Service's port in one pod.
fn target(port: &ServicePort, pod: &Pod) -> Option<i32> {
    match &port.target_port {
        None => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::Text(name)) => {
            let named = pod.local.ports.iter().find(|p| p.name == *name && p.protocol == L4::from(port.protocol));
            named.map(|p| p.number.into())
        }
    }
}

fn no_port(name: &Name, index: usize, port: &ServicePort, pod: &Pod) -> Skipped {
    let wanted = port.target_port.as_ref().map(ToString::to_string).unwrap_or_default();
    let why = format!(
        "pod {}/{} has no {} port named \"{wanted}\", so this port does not reach it: name a container port so, or use its number",
        pod.local.namespace,
        pod.local.name,
        L4::from(port.protocol)
    );
    Skipped { object: format!("Service {name}"), field: format!("spec.ports[{index}].targetPort"), why }
}

fn endpoint(name: &Name, service: &Service, pod: &Pod, ip: String, node: &NodeFacts) -> SliceEndpoint {
    let ready = service.spec.publish_not_ready_addresses || (pod.ready && !pod.ending);
    let hint = |name: &str| vec![Hint { name: name.to_owned() }];
    let zone = node.zone.as_deref().filter(|z| !z.is_empty());
    let distribution = service.spec.traffic_distribution.as_deref();
    let near = matches!(distribution, Some("PreferClose" | "PreferSameZone" | "PreferSameNode"));
    let hints = (near && ready).then(|| EndpointHints {
        for_zones: zone.map(hint).unwrap_or_default(),
        for_nodes: if distribution == Some("PreferSameNode") { hint(&node.name) } else { Vec::new() },
    });
    let named = pod.hostname.as_ref().filter(|h| !h.is_empty() && pod.subdomain.as_deref() == Some(name.name.as_str()));
    SliceEndpoint {
        addresses: vec![ip],
        conditions: EndpointConditions { ready: Some(ready), serving: Some(pod.ready), terminating: Some(pod.ending) },
        hostname: named.cloned(),
        target_ref: Some(TargetRef {
            kind: "Pod".to_owned(),
            namespace: pod.local.namespace.clone(),
            name: pod.local.name.clone(),
            uid: pod.local.uid.clone(),
        }),
        node_name: Some(node.name.clone()),
        zone: zone.map(str::to_owned),
        hints: hints.filter(|h| *h != EndpointHints::default()),
    }
}

#[cfg(test)]
#[path = "slices_tests.rs"]
mod tests;
