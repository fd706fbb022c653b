//! Services, EndpointSlices and Namespaces, in the API server's words
//! (pkg/apis/core/validation, pkg/apis/discovery/validation).

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{Faults, Invalid, meta, names};
use crate::api::cidr::Cidr;
use crate::api::endpoint_slice::{AddressType, EndpointSlice};
use crate::api::namespace::Namespace;
use crate::api::selector::IntOrString;
use crate::api::service::{IpFamily, IpFamilyPolicy, Service, ServiceSpec, ServiceType, SessionAffinity, TrafficPolicy};
use crate::proxy::alone::NODE_PORTS;
use crate::proxy::service::address;

pub fn service(service: &Service) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(&service.metadata, &mut faults);
    if !service.metadata.name.is_empty() {
        faults.check("metadata.name", &service.metadata.name, names::service);
    }
    let spec = &service.spec;
    ports(spec, &mut faults);
    addresses(spec, &mut faults);
    families(spec, &mut faults);
    kind(spec, &mut faults);
    for (key, value) in &spec.selector {
        faults.check("spec.selector", key, names::qualified);
        faults.check(format!("spec.selector[{key}]"), value, names::label_value);
    }
    for (i, ip) in spec.external_ips.iter().enumerate() {
        endpoint_ip(format!("spec.externalIPs[{i}]"), ip, &mut faults);
    }
    for (i, ingress) in service.status.load_balancer.ingress.iter().enumerate() {
        if !ingress.ip.is_empty() {
            endpoint_ip(format!("status.loadBalancer.ingress[{i}].ip"), &ingress.ip, &mut faults);
        }
    }
    let seconds = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref()?.timeout_seconds);
    match (spec.session_affinity, seconds) {
        (Some(SessionAffinity::ClientIP), Some(seconds)) => {
            faults.range("spec.sessionAffinityConfig.clientIP.timeoutSeconds", seconds.into(), 1, 86_400);
        }
        (Some(SessionAffinity::None) | None, Some(_)) => {
            faults.push("spec.sessionAffinityConfig", "Forbidden: must not be set when session affinity is None".to_owned());
        }
        (_, None) => {}
    }
    const DISTRIBUTIONS: &[&str] = &["PreferClose", "PreferSameZone", "PreferSameNode"];
    if let Some(distribution) = spec.traffic_distribution.as_deref().filter(|d| !DISTRIBUTIONS.contains(d)) {
        faults.unsupported("spec.trafficDistribution", distribution, DISTRIBUTIONS);
    }
    faults.0
}

fn ports(spec: &ServiceSpec, faults: &mut Faults) {
    if spec.ports.is_empty() && !spec.is_headless() && spec.kind != ServiceType::ExternalName {
        faults.required("spec.ports", "name the ports that it serves");
    }
    let external = matches!(spec.kind, ServiceType::NodePort | ServiceType::LoadBalancer);
    let (mut seen, mut numbers, mut node_ports) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for (i, port) in spec.ports.iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{i}].{name}");
        if port.name.is_empty() {
            if spec.ports.len() > 1 {
                faults.required(field("name"), "every port of a Service with several needs a name");
            }
        } else {
            faults.check(field("name"), &port.name, names::label);
        }
        if !seen.insert(&port.name) && !port.name.is_empty() {
            faults.duplicate(field("name"), &port.name);
        }
        faults.range(field("port"), port.port.into(), 1, 65_535);
        if !numbers.insert((port.port, port.protocol)) {
            faults.duplicate(format!("spec.ports[{i}]"), format_args!("{}/{:?}", port.port, port.protocol));
        }
        match &port.target_port {
            Some(IntOrString::Int(number)) => faults.range(field("targetPort"), (*number).into(), 1, 65_535),
            Some(IntOrString::Text(name)) => faults.check(field("targetPort"), name, names::port_name),
            None => {}
        }
        if port.node_port != 0 {
            if !external {
                faults
                    .push(field("nodePort"), "Forbidden: may not be used when `type` is not NodePort or LoadBalancer".to_owned());
            }
            faults.range(field("nodePort"), port.node_port.into(), (*NODE_PORTS.start()).into(), (*NODE_PORTS.end()).into());
            if !node_ports.insert((port.node_port, port.protocol)) {
                faults.duplicate(field("nodePort"), port.node_port);
            }
        }
    }
}

fn addresses(spec: &ServiceSpec, faults: &mut Faults) {
    if spec.cluster_ips.len() > 2 {
        faults.push("spec.clusterIPs", "Too many: only one address of each family".to_owned());
    }
    if !spec.cluster_ip.is_empty() && spec.cluster_ips.first().is_some_and(|first| *first != spec.cluster_ip) {
        faults.invalid("spec.clusterIP", &spec.cluster_ip, "must be the first of clusterIPs");
    }
    let single = std::slice::from_ref(&spec.cluster_ip);
    let listed = if spec.cluster_ips.is_empty() { single } else { &spec.cluster_ips };
    let mut of = BTreeSet::new();
    for (i, text) in listed.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
        let field = if spec.cluster_ips.is_empty() { "spec.clusterIP".to_owned() } else { format!("spec.clusterIPs[{i}]") };
        if text == "None" {
            if listed.len() > 1 {
                faults.invalid(field.clone(), text, "None stands alone");
            }
            if matches!(spec.kind, ServiceType::NodePort | ServiceType::LoadBalancer) {
                faults.invalid(field, text, "may not be set to 'None' for NodePort and LoadBalancer services");
            }
        } else if spec.kind == ServiceType::ExternalName {
            faults.push(field, "Forbidden: may not be set for ExternalName services".to_owned());
        } else if let Some(ip) = endpoint_ip(field.clone(), text, faults)
            && !of.insert(address::family(ip))
        {
            faults.invalid(field, text, "clusterIPs must be of different families");
        }
    }
}

fn families(spec: &ServiceSpec, faults: &mut Faults) {
    let asked: BTreeSet<IpFamily> = spec.ip_families.iter().copied().collect();
    if asked.len() < spec.ip_families.len() {
        faults.push("spec.ipFamilies", "Duplicate value: name each family once".to_owned());
    }
    let both = asked.len() > 1 || spec.cluster_ips.len() > 1;
    if both && spec.ip_family_policy == Some(IpFamilyPolicy::SingleStack) {
        let why = "may not be SingleStack where two families are named: PreferDualStack or RequireDualStack";
        faults.invalid("spec.ipFamilyPolicy", "SingleStack", why);
    }
    let given = spec.cluster_ips.iter().chain((spec.cluster_ips.is_empty()).then_some(&spec.cluster_ip));
    for (i, (family, text)) in spec.ip_families.iter().zip(given).enumerate() {
        if text.parse::<IpAddr>().is_ok_and(|ip| address::family(ip) != *family) {
            faults.invalid(
                format!("spec.ipFamilies[{i}]"),
                format_args!("{family:?}"),
                "the ClusterIP in its place is of the other family",
            );
        }
    }
}

/// What only some types may have.
fn kind(spec: &ServiceSpec, faults: &mut Faults) {
    if spec.kind == ServiceType::ExternalName {
        if spec.external_name.is_empty() {
            faults.required("spec.externalName", "name the host that it stands for");
        } else {
            // A name may be absolute.
            let name = spec.external_name.strip_suffix('.').unwrap_or(&spec.external_name);
            faults.check("spec.externalName", name, names::subdomain);
        }
    }
    let balanced = spec.kind == ServiceType::LoadBalancer;
    for (i, range) in spec.load_balancer_source_ranges.iter().enumerate() {
        if let Err(why) = range.parse::<Cidr>() {
            faults.invalid(format!("spec.loadBalancerSourceRanges[{i}]"), range, why);
        }
    }
    if !spec.load_balancer_source_ranges.is_empty() && !balanced {
        let why = "Forbidden: may only be used when `type` is 'LoadBalancer'";
        faults.push("spec.loadBalancerSourceRanges", why.to_owned());
    }
    let external = balanced || spec.kind == ServiceType::NodePort || !spec.external_ips.is_empty();
    if spec.external_traffic_policy.is_some() && !external {
        let why = "may only be set for externally-accessible services";
        faults.invalid("spec.externalTrafficPolicy", format_args!("{:?}", spec.external_traffic_policy.unwrap_or_default()), why);
    }
    if spec.health_check_node_port != 0 {
        if !balanced || spec.external_traffic_policy != Some(TrafficPolicy::Local) {
            let why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
            faults.invalid("spec.healthCheckNodePort", spec.health_check_node_port, why);
        }
        let (low, high) = ((*NODE_PORTS.start()).into(), (*NODE_PORTS.end()).into());
        faults.range("spec.healthCheckNodePort", spec.health_check_node_port.into(), low, high);
    }
}

/// ValidateNonSpecialIP.
fn endpoint_ip(field: String, text: &str, faults: &mut Faults) -> Option<IpAddr> {
    match address::parse(text) {
        Ok(ip) => Some(ip),
        Err(why) => {
            faults.invalid(field, text, why);
            None
        }
    }
}

pub fn endpoint_slice(slice: &EndpointSlice) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(&slice.metadata, &mut faults);
    const ENDPOINTS: usize = 1000;
    const PORTS: usize = 20_000;
    if slice.endpoints.len() > ENDPOINTS {
        faults.push(
            "endpoints",
            format!("Too many: {}: must have at most {ENDPOINTS} items: use several slices", slice.endpoints.len()),
        );
        return faults.0;
    }
    for (i, endpoint) in slice.endpoints.iter().enumerate() {
        let field = |name: &str| format!("endpoints[{i}].{name}");
        if endpoint.addresses.is_empty() {
            faults.required(field("addresses"), "must contain at least 1 address");
        }
        if endpoint.addresses.len() > 100 {
            faults.push(field("addresses"), "Too many: must have at most 100 items".to_owned());
        }
        for (j, text) in endpoint.addresses.iter().take(100).enumerate() {
            let at = field(&format!("addresses[{j}]"));
            let wanted = match slice.address_type {
                AddressType::FQDN => {
                    faults.check(at, text, names::subdomain);
                    continue;
                }
                AddressType::IPv4 => IpFamily::IPv4,
                AddressType::IPv6 => IpFamily::IPv6,
            };
            if let Some(ip) = endpoint_ip(at.clone(), text, &mut faults)
                && address::family(ip) != wanted
            {
                faults.invalid(at, text, format_args!("must be an {wanted:?} address, as addressType says"));
            }
        }
        if let Some(name) = &endpoint.hostname {
            faults.check(field("hostname"), name, names::label);
        }
        if let Some(name) = &endpoint.node_name {
            faults.check(field("nodeName"), name, names::subdomain);
        }
        let hints = endpoint.hints.iter();
        let hints = hints.flat_map(|h| [("hints.forZones", &h.for_zones), ("hints.forNodes", &h.for_nodes)]);
        for (name, list) in hints {
            if list.len() > 8 {
                faults.push(field(name), "Too many: must have at most 8 items".to_owned());
            }
            for hint in list.iter().take(8).filter(|h| h.name.is_empty()) {
                faults.invalid(field(name), &hint.name, "must not be empty");
            }
        }
    }
    if slice.ports.len() > PORTS {
        faults.push("ports", format!("Too many: must have at most {PORTS} items"));
        return faults.0;
    }
    let mut seen = BTreeSet::new();
    for (i, port) in slice.ports.iter().enumerate() {
        if !port.name.is_empty() {
            faults.check(format!("ports[{i}].name"), &port.name, names::label);
        }
        if !seen.insert(&port.name) {
            faults.duplicate(format!("ports[{i}].name"), &port.name);
        }
        if let Some(number) = port.port {
            faults.range(format!("ports[{i}].port"), number.into(), 1, 65_535);
        }
    }
    faults.0
}

pub fn namespace(namespace: &Namespace) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(&namespace.metadata, &mut faults);
    faults.check("metadata.name", &namespace.metadata.name, names::label);
    faults.0
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
