//! NetworkPolicies with the shipped binary, real pods and real packets: truth tables in the manner
//! of sig-network's Netpol suite, judged by what is written in [`cases`] by hand and by
//! `PolicyModel::verdict`; pods that come and go; the first instruction of a pod; flows that end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cases;
mod field;
mod live;
#[path = "../support/node.rs"]
#[allow(dead_code)]
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use coracle::api::namespace::Namespace;
use coracle::api::network_policy::NetworkPolicy;
use coracle::api::yaml;
use coracle::proxy::model::{L4, LocalPod, NamedPort};
use coracle::proxy::policy::{self, Flow, PolicyModel, Verdict, World};

use cases::{CASES, Case, SIBLING};
use field::{Field, PORTS, Probe, namespaces, pods};
use support::privileged;

fn documents(case: &Case) -> String {
    let one = |(namespace, name, spec): &(&str, &str, &str)| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: \"{namespace}\"}}\nspec: {spec}\n"
        )
    };
    case.policies.iter().map(one).collect::<Vec<_>>().join("---\n")
}

fn labels(case: &Case) -> fn(char) -> String {
    case.namespaces.unwrap_or(|ns| format!("ns: \"{ns}\""))
}

/// What the library makes of the same texts.
fn model(field: &Field, case: &Case) -> PolicyModel {
    fn read<T: serde::de::DeserializeOwned>(text: &str) -> Vec<T> {
        let documents = yaml::documents(text.as_bytes(), yaml::Limits::default()).map(Result::unwrap);
        documents.filter(|d| !d.is_null()).map(|d| d.read::<T>().unwrap().0).collect()
    }
    let port = |port: u16, protocol: L4| NamedPort {
        name: format!("serve-{port}-{}", protocol.to_string().to_lowercase()),
        number: port,
        protocol,
    };
    let local = |pod: (char, char)| LocalPod {
        uid: format!("{}-{}", pod.0, pod.1),
        namespace: pod.0.to_string(),
        name: pod.1.to_string(),
        addresses: field.pods[&pod].addresses.to_vec(),
        labels: [("pod".to_owned(), pod.1.to_string())].into(),
        ports: PORTS.iter().flat_map(|p| [L4::Tcp, L4::Udp, L4::Sctp].map(|l4| port(*p, l4))).collect(),
        host_network: false,
    };
    let policies = read::<NetworkPolicy>(&field.filled(&documents(case)));
    let (model, skipped) = policy::model(&World {
        policies: policies.into_iter().map(|p| ((p.metadata.namespace.clone(), p.metadata.name.clone()), Arc::new(p))).collect(),
        namespaces: read::<Namespace>(&namespaces(labels(case)))
            .into_iter()
            .map(|n| (n.metadata.name.clone(), Arc::new(n)))
            .collect(),
        pods: pods().map(local).collect(),
        ..World::default()
    });
    assert_eq!(skipped, [], "{}", case.title);
    model
}

/// Those that went otherwise, in words.
pub fn wrong(field: &Field, case: &Case, model: &PolicyModel, reached: &BTreeMap<Probe, bool>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (probe, went) in reached {
        let by_hand = (case.allowed)(probe);
        let address = |pod| field.pods[&pod].addresses[usize::from(probe.v6)];
        let flow =
            Flow { source: address(probe.from), destination: address(probe.to), protocol: probe.l4.number(), port: probe.port };
        let by_model = model.verdict(&flow, false) == Verdict::Allowed;
        if (by_hand, by_model) != (*went, *went) {
            wrong.push(format!("{probe:?}: went {went}, by hand {by_hand}, by the model {by_model}"));
        }
    }
    wrong
}

#[test]
fn truth_tables() {
    if !privileged() {
        return;
    }
    assert!(CASES.len() >= 50);
    let mut field = Field::new();
    let probes = field.all();
    let (ya, sibling) = (field.pods[&('y', 'a')].addresses[0], |pod: &(char, char)| field.pods[pod].addresses[0]);
    let other =
        pods().find(|pod| *pod != ('y', 'a') && coracle::proxy::model::Cidr::around(ya, 31).unwrap().contains(sibling(pod)));
    SIBLING.with(|s| s.set(other));
    let begun = Instant::now();
    let mut failures = Vec::new();
    let mut last_labels = namespaces(|ns| format!("ns: \"{ns}\""));
    for case in CASES {
        let labels = namespaces(labels(case));
        if labels != last_labels {
            field.node.put("namespaces.yaml", &labels);
            last_labels = labels;
        }
        field.say(&documents(case));
        let model = model(&field, case);
        // A packet that a busy machine was late with is asked for again; one that policies let
        // through by mistake stays wrong.
        let mut reached = field.reach(&probes);
        for _ in 0..3 {
            let late: Vec<Probe> = reached.iter().filter(|(p, went)| (case.allowed)(p) != **went).map(|(p, _)| *p).collect();
            if late.is_empty() || reached.iter().any(|(p, went)| *went && !(case.allowed)(p)) {
                break;
            }
            reached.extend(field.reach(&late));
        }
        let wrong = wrong(&field, case, &model, &reached);
        if !wrong.is_empty() {
            failures.push(format!(
                "{} ({} of {}):\n  {}",
                case.title,
                wrong.len(),
                reached.len(),
                wrong[..wrong.len().min(6)].join("\n  ")
            ));
        }
    }
    let took = begun.elapsed();
    eprintln!("{} policies' tables, {} packets each: {took:?}", CASES.len(), probes.len());
    assert!(
        failures.is_empty(),
        "{} of {} cases\n{}\n{}",
        failures.len(),
        CASES.len(),
        failures.join("\n"),
        field.node.ok(&["proxy", "--dry-run"])
    );
    // No policy, no chains.
    field.node.take_away("policies.yaml");
    field.node.wait("the chains go", 5, |node| !node.ok(&["proxy", "--dry-run"]).contains("policy-"));
    let rules = field.node.command("nft").args(["list", "ruleset"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&rules.stdout).contains("policy-"));
}
