//! Services, slices and policies: one wrong field at a time, in the API server's words.

use crate::api::endpoint_slice::EndpointSlice;
use crate::api::namespace::Namespace;
use crate::api::network_policy::NetworkPolicy;
use crate::api::service::Service;
use crate::api::yaml::{Limits, documents};
use crate::kubelet::validate::Invalid;

fn faults<T: serde::de::DeserializeOwned>(text: &str, check: fn(&T) -> Vec<Invalid>) -> Vec<String> {
    let (object, unknown) = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap().read::<T>().unwrap();
    assert!(unknown.is_empty(), "{unknown:?}");
    check(&object).into_iter().map(|i| i.to_string()).collect()
}

fn service(name: &str, spec: &str) -> Vec<String> {
    faults::<Service>(&format!("kind: Service\nmetadata: {{name: {name}}}\nspec: {{{spec}}}"), super::super::service)
}

fn slice(text: &str) -> Vec<String> {
    faults::<EndpointSlice>(&format!("kind: EndpointSlice\nmetadata: {{name: s}}\n{text}"), super::super::endpoint_slice)
}

fn policy(spec: &str) -> Vec<String> {
    faults::<NetworkPolicy>(&format!("kind: NetworkPolicy\nmetadata: {{name: p}}\nspec: {spec}"), super::super::network_policy)
}

fn hold(found: &[String], wanted: &str, of: &str) {
    assert!(found.len() == 1 && found[0].starts_with(wanted), "{of}: {found:?}, wanted {wanted}");
}

#[test]
fn sound_objects_have_no_faults() {
    let none: Vec<String> = Vec::new();
    for spec in [
        "ports: [{port: 80}]",
        "ports: [{name: a, port: 53, protocol: UDP, targetPort: dns-udp}, {name: b, port: 53, targetPort: 5353}], selector: {app.io/x: 'y'}",
        "clusterIP: None, selector: {a: b}",
        "clusterIPs: [10.96.0.1, 'fd96::1'], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack, ports: [{port: 80}]",
        "type: ExternalName, externalName: example.com.",
        "type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30200, loadBalancerSourceRanges: [10.0.0.0/8], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 9}}, ports: [{port: 80, nodePort: 30080}], trafficDistribution: PreferClose",
        "externalIPs: [198.51.100.1], externalTrafficPolicy: Local, ports: [{port: 80}]",
    ] {
        assert_eq!(service("web", spec), none, "{spec}");
    }
    assert_eq!(
        slice(
            "addressType: IPv6\nendpoints: [{addresses: ['fd00::1'], hostname: a, nodeName: n.x, hints: {forZones: [{name: z}]}}]\nports: [{port: 1}, {name: x}]"
        ),
        none
    );
    assert_eq!(slice("addressType: FQDN\nendpoints: [{addresses: [example.com]}]"), none);
    assert_eq!(
        policy(
            "{podSelector: {matchLabels: {a: b}}, policyTypes: [Ingress, Egress], ingress: [{from: [{podSelector: {}, namespaceSelector: {}}, {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}], ports: [{port: http}, {port: 1, endPort: 9, protocol: SCTP}, {}]}], egress: [{}]}"
        ),
        none
    );
    assert_eq!(faults::<Namespace>("metadata: {name: a-b}", super::super::namespace), none);
}

#[test]
fn each_wrong_field_of_a_service_is_named() {
    for (spec, wanted) in [
        ("selector: {a: b}", "spec.ports: Required value"),
        ("ports: [{port: 0}]", "spec.ports[0].port: Invalid value: \"0\": must be between 1 and 65535, inclusive"),
        ("ports: [{port: 1}, {name: b, port: 2}]", "spec.ports[0].name: Required value"),
        ("ports: [{name: a, port: 1}, {name: a, port: 2}]", "spec.ports[1].name: Duplicate value: \"a\""),
        ("ports: [{name: a, port: 1}, {name: b, port: 1}]", "spec.ports[1]: Duplicate value: \"1/TCP\""),
        ("ports: [{name: A, port: 1}]", "spec.ports[0].name: Invalid value: \"A\""),
        ("ports: [{port: 1, targetPort: 70000}]", "spec.ports[0].targetPort: Invalid value: \"70000\""),
        ("ports: [{port: 1, targetPort: UP}]", "spec.ports[0].targetPort: Invalid value: \"UP\""),
        ("ports: [{port: 1, nodePort: 30000}]", "spec.ports[0].nodePort: Forbidden: may not be used when"),
        (
            "type: NodePort, ports: [{port: 1, nodePort: 80}]",
            "spec.ports[0].nodePort: Invalid value: \"80\": must be between 30000 and 32767",
        ),
        ("clusterIP: here, ports: [{port: 1}]", "spec.clusterIP: Invalid value: \"here\""),
        (
            "clusterIP: 127.0.0.1, ports: [{port: 1}]",
            "spec.clusterIP: Invalid value: \"127.0.0.1\": 127.0.0.1: a loopback address",
        ),
        (
            "clusterIPs: [10.0.0.1, 10.0.0.2], ports: [{port: 1}]",
            "spec.clusterIPs[1]: Invalid value: \"10.0.0.2\": clusterIPs must be of different families",
        ),
        (
            "clusterIP: 10.0.0.2, clusterIPs: [10.0.0.1], ports: [{port: 1}]",
            "spec.clusterIP: Invalid value: \"10.0.0.2\": must be the first of clusterIPs",
        ),
        (
            "type: NodePort, clusterIP: None, ports: [{port: 1}]",
            "spec.clusterIP: Invalid value: \"None\": may not be set to 'None' for NodePort",
        ),
        (
            "type: ExternalName, externalName: a.b, clusterIP: 10.0.0.1",
            "spec.clusterIP: Forbidden: may not be set for ExternalName",
        ),
        ("type: ExternalName", "spec.externalName: Required value"),
        ("type: ExternalName, externalName: 'a b'", "spec.externalName: Invalid value: \"a b\""),
        ("ipFamilies: [IPv4, IPv4], ports: [{port: 1}]", "spec.ipFamilies: Duplicate value"),
        ("ipFamilies: [IPv4, IPv6], ipFamilyPolicy: SingleStack, ports: [{port: 1}]", "spec.ipFamilyPolicy: Invalid value"),
        (
            "clusterIP: 10.0.0.1, ipFamilies: [IPv6], ports: [{port: 1}]",
            "spec.ipFamilies[0]: Invalid value: \"IPv6\": the ClusterIP in its place",
        ),
        ("externalIPs: [169.254.0.1], ports: [{port: 1}]", "spec.externalIPs[0]: Invalid value: \"169.254.0.1\""),
        (
            "externalTrafficPolicy: Local, ports: [{port: 1}]",
            "spec.externalTrafficPolicy: Invalid value: \"Local\": may only be set for externally-accessible",
        ),
        ("loadBalancerSourceRanges: [10.0.0.0/8], ports: [{port: 1}]", "spec.loadBalancerSourceRanges: Forbidden"),
        (
            "type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.0/40], ports: [{port: 1}]",
            "spec.loadBalancerSourceRanges[0]: Invalid value",
        ),
        ("type: NodePort, healthCheckNodePort: 30000, ports: [{port: 1}]", "spec.healthCheckNodePort: Invalid value"),
        (
            "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 90000}}, ports: [{port: 1}]",
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value",
        ),
        ("sessionAffinityConfig: {clientIP: {timeoutSeconds: 9}}, ports: [{port: 1}]", "spec.sessionAffinityConfig: Forbidden"),
        ("trafficDistribution: Near, ports: [{port: 1}]", "spec.trafficDistribution: Unsupported value: \"Near\""),
        ("selector: {'a b': c}, ports: [{port: 1}]", "spec.selector: Invalid value: \"a b\""),
    ] {
        hold(&service("web", spec), wanted, spec);
    }
    hold(&service("9web", "ports: [{port: 1}]"), "metadata.name: Invalid value: \"9web\": a DNS-1035 label", "name");
}

#[test]
fn each_wrong_field_of_a_slice_or_a_policy_is_named() {
    for (text, wanted) in [
        ("endpoints: [{}]", "endpoints[0].addresses: Required value"),
        (
            "endpoints: [{addresses: ['fd00::1']}]",
            "endpoints[0].addresses[0]: Invalid value: \"fd00::1\": must be an IPv4 address",
        ),
        (
            "endpoints: [{addresses: [127.0.0.1]}]",
            "endpoints[0].addresses[0]: Invalid value: \"127.0.0.1\": 127.0.0.1: a loopback",
        ),
        ("endpoints: [{addresses: [10.0.0.1], hostname: A}]", "endpoints[0].hostname: Invalid value"),
        ("endpoints: [{addresses: [10.0.0.1], hints: {forNodes: [{name: ''}]}}]", "endpoints[0].hints.forNodes: Invalid value"),
        ("addressType: FQDN\nendpoints: [{addresses: ['a b']}]", "endpoints[0].addresses[0]: Invalid value: \"a b\""),
        ("ports: [{port: 1}, {port: 2}]", "ports[1].name: Duplicate value"),
        ("ports: [{port: 70000}]", "ports[0].port: Invalid value"),
    ] {
        hold(&slice(text), wanted, text);
    }
    let many = format!("endpoints: [{}]", vec!["{addresses: [10.0.0.1]}"; 1001].join(", "));
    hold(&slice(&many), "endpoints: Too many: 1001", "many");
    for (spec, wanted) in [
        ("{ingress: [{from: [{}]}]}", "spec.ingress[0].from[0]: Required value: must specify a peer"),
        ("{egress: [{to: [{podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}}]}]}", "spec.egress[0].to[0]: Forbidden"),
        ("{egress: [{to: [{ipBlock: {cidr: 10.0.0.0}}]}]}", "spec.egress[0].to[0].ipBlock.cidr: Invalid value"),
        ("{egress: [{to: [{ipBlock: {}}]}]}", "spec.egress[0].to[0].ipBlock.cidr: Required value"),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/16]}}]}]}",
            "spec.egress[0].to[0].ipBlock.except[0]: Invalid value: \"11.0.0.0/16\": must be a strict subset of `cidr` 10.0.0.0/8",
        ),
        (
            "{egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}]}",
            "spec.egress[0].to[0].ipBlock.except[0]: Invalid value",
        ),
        ("{ingress: [{ports: [{port: 0}]}]}", "spec.ingress[0].ports[0].port: Invalid value"),
        (
            "{ingress: [{ports: [{port: 9, endPort: 8}]}]}",
            "spec.ingress[0].ports[0].endPort: Invalid value: \"8\": must be greater than or equal",
        ),
        (
            "{ingress: [{ports: [{port: http, endPort: 8}]}]}",
            "spec.ingress[0].ports[0].endPort: Invalid value: \"8\": may not be specified when `port` is non-numeric",
        ),
        (
            "{ingress: [{ports: [{endPort: 8}]}]}",
            "spec.ingress[0].ports[0].endPort: Invalid value: \"8\": may not be specified when `port` is not specified",
        ),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: In}]}}",
            "spec.podSelector.matchExpressions[0].values: Required value",
        ),
        (
            "{podSelector: {matchExpressions: [{key: a, operator: Exists, values: [b]}]}}",
            "spec.podSelector.matchExpressions[0].values: Forbidden",
        ),
        ("{podSelector: {matchLabels: {a: 'b c'}}}", "spec.podSelector.matchLabels[a]: Invalid value"),
        (
            "{ingress: [{from: [{namespaceSelector: {matchLabels: {'a b': c}}}]}]}",
            "spec.ingress[0].from[0].namespaceSelector.matchLabels: Invalid value",
        ),
        ("{policyTypes: [Ingress, Ingress]}", "spec.policyTypes: Duplicate value"),
    ] {
        hold(&policy(spec), wanted, spec);
    }
    hold(
        &faults::<Namespace>("metadata: {name: a.b}", super::super::namespace),
        "metadata.name: Invalid value: \"a.b\"",
        "namespace",
    );
}
