//! Objects → zone.
//!
//! Invariant: what is no name, address or port number is left out; it never keeps the rest from
//! being served. Who reads the objects says what is wrong with them (proxy/service).
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::{Endpoint, Group, Kind, Owner, Port, Service, Zone};
use crate::api;
use crate::api::endpoint_slice::{AddressType, EndpointSlice};
use crate::api::service::ServiceType;
use crate::dns::wire;
use crate::proxy::model::{Cidr, L4};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no domain for a cluster: write names of a-z, 0-9 and - with dots between, such as cluster.local")]
pub struct BadDomain(pub String);

/// What a zone is made of.
#[derive(Clone, Copy, Debug)]
pub struct Objects<'a> {
    pub domain: &'a str,
    /// Addresses of this server.
    pub servers: &'a [IpAddr],
    /// Of pods and of Services.
    pub ranges: &'a [Cidr],
    /// Anything that differs between two zones; the SOA's.
    pub serial: u32,
    pub services: &'a [&'a api::service::Service],
    pub slices: &'a [&'a EndpointSlice],
    /// Namespace and addresses of each pod that is there.
    pub pods: &'a [(&'a str, &'a [IpAddr])],
}

impl Zone {
    pub fn build(objects: &Objects<'_>) -> Result<Zone, BadDomain> {
        let domain = objects.domain.strip_suffix('.').unwrap_or(objects.domain).to_ascii_lowercase();
        if !domain.split('.').all(is_label) || wire::name_of(&domain).is_none_or(|name| name.len() > 128) {
            return Err(BadDomain(objects.domain.chars().take(80).collect()));
        }
        let mut slices: BTreeMap<(&str, &str), Vec<&EndpointSlice>> = BTreeMap::new();
        for slice in objects.slices {
            if let Some(service) = slice.service() {
                slices.entry((&slice.metadata.namespace, service)).or_default().push(slice);
            }
        }
        let mut services: Vec<Service> = objects
            .services
            .iter()
            .filter_map(|object| {
                let key = (object.metadata.namespace.as_str(), object.metadata.name.as_str());
                service(object, slices.get(&key).map_or(&[][..], Vec::as_slice))
            })
            .collect();
        services.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        services.dedup_by(|b, a| (&a.namespace, &a.name) == (&b.namespace, &b.name));

        let mut pods: Vec<(Box<str>, IpAddr)> = objects
            .pods
            .iter()
            .filter(|(namespace, _)| is_label(namespace))
            .flat_map(|(namespace, ips)| ips.iter().map(|ip| (lower(namespace), *ip)))
            .collect();
        pods.sort();
        pods.dedup();
        let names: BTreeSet<Box<str>> =
            services.iter().map(|s| s.namespace.clone()).chain(pods.iter().map(|(ns, _)| ns.clone())).collect();
        let reverse = reverse(&services);
        Ok(Zone {
            domain,
            servers: objects.servers.to_vec(),
            ranges: objects.ranges.to_vec(),
            serial: objects.serial,
            services,
            namespaces: names.into_iter().collect(),
            pods,
            reverse,
        })
    }
}

fn service(object: &api::service::Service, slices: &[&EndpointSlice]) -> Option<Service> {
    let (namespace, name, spec) = (&object.metadata.namespace, &object.metadata.name, &object.spec);
    if !is_label(namespace) || !is_label(name) {
        return None;
    }
    let kind = match spec.kind {
        ServiceType::ExternalName => {
            let target = spec.external_name.strip_suffix('.').unwrap_or(&spec.external_name).to_ascii_lowercase();
            // An alias leads to a name; one that looks like an address leads nowhere.
            if !target.split('.').all(is_label) || wire::name_of(&target).is_none() || target.parse::<IpAddr>().is_ok() {
                return None;
            }
            Kind::ExternalName(target.into())
        }
        _ if spec.is_headless() => Kind::Headless,
        ServiceType::ClusterIP | ServiceType::NodePort | ServiceType::LoadBalancer => {
            let all = spec.cluster_ips.iter().chain([&spec.cluster_ip]);
            let mut ips: Vec<IpAddr> = all.filter_map(|text| text.parse().ok()).collect(); // "" has none yet
            ips.sort();
            ips.dedup();
            Kind::ClusterIp(ips.into())
        }
    };
    let external = matches!(kind, Kind::ExternalName(_));
    let ports = spec.ports.iter().filter(|_| !external).filter_map(|p| port(&p.name, p.protocol.into(), Some(p.port)));
    let groups = slices.iter().filter(|_| !external).map(|slice| group(slice, spec.publish_not_ready_addresses));
    Some(Service {
        namespace: lower(namespace),
        name: lower(name),
        kind,
        ports: ports.collect(),
        groups: groups.filter(|group| !group.endpoints.is_empty()).collect(),
    })
}

fn group(slice: &EndpointSlice, also_unready: bool) -> Group {
    let ready = slice.endpoints.iter().filter(|e| also_unready || e.conditions.is_ready());
    let mut endpoints: Vec<Endpoint> = ready
        .flat_map(|endpoint| {
            let hostname = endpoint.hostname.as_deref().filter(|name| is_label(name)).map(lower);
            let ips = endpoint.addresses.iter().filter_map(|text| text.parse::<IpAddr>().ok());
            ips.map(move |ip| Endpoint { ip, hostname: hostname.clone() })
        })
        .filter(|endpoint| match slice.address_type {
            AddressType::IPv4 => endpoint.ip.is_ipv4(),
            AddressType::IPv6 => endpoint.ip.is_ipv6(),
            AddressType::FQDN => false,
        })
        .collect();
    endpoints.sort_by(|a, b| (a.ip, &a.hostname).cmp(&(b.ip, &b.hostname)));
    endpoints.dedup();
    let ports = slice.ports.iter().filter_map(|p| port(&p.name, p.protocol.into(), p.port));
    Group { ports: ports.collect(), endpoints: endpoints.into() }
}

fn port(name: &str, protocol: L4, number: Option<i32>) -> Option<Port> {
    let number = u16::try_from(number?).ok().filter(|n| *n > 0)?;
    (name.is_empty() || is_label(name)).then(|| Port { name: lower(name), protocol, number })
}

fn reverse(services: &[Service]) -> Vec<(IpAddr, Owner)> {
    let mut reverse = Vec::new();
    // Counts fit: there is memory for far fewer than 2³² of each.
    for (service, at) in services.iter().zip(0u32..) {
        if let Kind::ClusterIp(ips) = &service.kind {
            reverse.extend(ips.iter().map(|ip| (*ip, Owner { service: at, endpoint: None })));
        }
        for (group, g) in service.groups.iter().zip(0u32..) {
            let owners = group.endpoints.iter().zip(0u32..);
            reverse.extend(owners.map(|(e, i)| (e.ip, Owner { service: at, endpoint: Some((g, i)) })));
        }
    }
    reverse.sort();
    reverse.shrink_to_fit();
    reverse
}

/// Letters, digits, `-` and `_`: what can be asked for and read back without escapes.
pub(super) fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

fn lower(text: &str) -> Box<str> {
    text.to_ascii_lowercase().into()
}
