//! NetworkPolicies, in the API server's words (pkg/apis/networking/validation).

use std::collections::BTreeSet;

use super::{Faults, Invalid, meta, names};
use crate::api::cidr::Cidr;
use crate::api::network_policy::{IpBlock, NetworkPolicy, PolicyPeer, PolicyPort};
use crate::api::selector::{IntOrString, LabelSelector, Operator};

pub fn network_policy(policy: &NetworkPolicy) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(&policy.metadata, &mut faults);
    let spec = &policy.spec;
    selector("spec.podSelector", &spec.pod_selector, &mut faults);
    let types: BTreeSet<_> = spec.policy_types.iter().collect();
    if types.len() < spec.policy_types.len() {
        faults.push("spec.policyTypes", "Duplicate value: name Ingress and Egress once each".to_owned());
    }
    for (i, rule) in spec.ingress.iter().enumerate() {
        peers(&format!("spec.ingress[{i}].from"), &rule.from, &mut faults);
        ports(&format!("spec.ingress[{i}].ports"), &rule.ports, &mut faults);
    }
    for (i, rule) in spec.egress.iter().enumerate() {
        peers(&format!("spec.egress[{i}].to"), &rule.to, &mut faults);
        ports(&format!("spec.egress[{i}].ports"), &rule.ports, &mut faults);
    }
    faults.0
}

fn peers(field: &str, peers: &[PolicyPeer], faults: &mut Faults) {
    for (i, peer) in peers.iter().enumerate() {
        let field = format!("{field}[{i}]");
        let selects = peer.pod_selector.is_some() || peer.namespace_selector.is_some();
        match (&peer.ip_block, selects) {
            (None, false) => faults.required(field.clone(), "must specify a peer: podSelector, namespaceSelector or ipBlock"),
            (Some(_), true) => {
                faults.push(field.clone(), "Forbidden: may not specify both ipBlock and another peer".to_owned());
            }
            (Some(block), false) => ip_block(&format!("{field}.ipBlock"), block, faults),
            (None, true) => {}
        }
        for (name, one) in [("podSelector", &peer.pod_selector), ("namespaceSelector", &peer.namespace_selector)] {
            if let Some(one) = one {
                selector(&format!("{field}.{name}"), one, faults);
            }
        }
    }
}

fn ip_block(field: &str, block: &IpBlock, faults: &mut Faults) {
    if block.cidr.is_empty() {
        return faults.required(format!("{field}.cidr"), "write it like 10.0.0.0/8");
    }
    let cidr = match block.cidr.parse::<Cidr>() {
        Ok(cidr) => cidr,
        Err(why) => return faults.invalid(format!("{field}.cidr"), &block.cidr, why),
    };
    for (i, text) in block.except.iter().enumerate() {
        let field = format!("{field}.except[{i}]");
        match text.parse::<Cidr>() {
            Err(why) => faults.invalid(field, text, why),
            Ok(except) if !cidr.covers(&except) || except.prefix <= cidr.prefix => {
                faults.invalid(field, text, format_args!("must be a strict subset of `cidr` {cidr}"));
            }
            Ok(_) => {}
        }
    }
}

fn ports(field: &str, ports: &[PolicyPort], faults: &mut Faults) {
    for (i, port) in ports.iter().enumerate() {
        let field = |name: &str| format!("{field}[{i}].{name}");
        match (&port.port, port.end_port) {
            (Some(IntOrString::Int(first)), end) => {
                faults.range(field("port"), (*first).into(), 1, 65_535);
                if let Some(end) = end {
                    faults.range(field("endPort"), end.into(), 1, 65_535);
                    if end < *first {
                        faults.invalid(field("endPort"), end, "must be greater than or equal to `port`");
                    }
                }
            }
            (Some(IntOrString::Text(name)), end) => {
                faults.check(field("port"), name, names::port_name);
                if let Some(end) = end {
                    faults.invalid(field("endPort"), end, "may not be specified when `port` is non-numeric");
                }
            }
            (None, Some(end)) => faults.invalid(field("endPort"), end, "may not be specified when `port` is not specified"),
            (None, None) => {}
        }
    }
}

fn selector(field: &str, selector: &LabelSelector, faults: &mut Faults) {
    for (key, value) in &selector.match_labels {
        faults.check(format!("{field}.matchLabels"), key, names::qualified);
        faults.check(format!("{field}.matchLabels[{key}]"), value, names::label_value);
    }
    for (i, requirement) in selector.match_expressions.iter().enumerate() {
        let field = |name: &str| format!("{field}.matchExpressions[{i}].{name}");
        faults.check(field("key"), &requirement.key, names::qualified);
        match (requirement.operator, requirement.values.is_empty()) {
            (Operator::In | Operator::NotIn, true) => {
                faults.required(field("values"), "must be specified when `operator` is 'In' or 'NotIn'");
            }
            (Operator::Exists | Operator::DoesNotExist, false) => {
                let why = "Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                faults.push(field("values"), why.to_owned());
            }
            _ => {}
        }
        for value in &requirement.values {
            faults.check(field("values"), value, names::label_value);
        }
    }
}
