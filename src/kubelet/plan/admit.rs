//! Which wanted pods may begin: names, host ports and the node's size. The words are those of
//! the kubelet's admission handlers (pkg/kubelet/lifecycle/predicate.go, v1.34).
//!
//! Invariant: a verdict follows from what is there now, so a pod that was rejected begins as soon
//! as the reason is gone; whatever is admitted fits beside everything admitted before.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use crate::api::pod::{Container, Pod, Protocol};
use crate::kubelet::model::{Desired, Observed};
use crate::store::ids::PodUid;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Admit,
    /// Another pod has to be gone first.
    Wait {
        message: String,
    },
    /// `status.reason` and `status.message` of a Failed pod.
    Reject {
        reason: &'static str,
        message: String,
    },
}

/// A verdict for each wanted pod that is not yet here, by namespace and name.
pub fn verdicts<'a>(desired: &'a Desired, observed: &Observed) -> Vec<(&'a PodUid, Verdict)> {
    let mut waiting: Vec<_> = desired.pods.iter().filter(|(uid, _)| !observed.pods.contains_key(*uid)).collect();
    if waiting.is_empty() {
        return Vec::new();
    }
    waiting.sort_by_key(|(_, pod)| (&pod.metadata.namespace, &pod.metadata.name));
    let mut taken = Taken::default();
    for state in observed.pods.values().filter(|state| state.finished.is_none()) {
        if let Some(pod) = &state.pod {
            taken.add(pod, state.ending.is_some());
        }
    }
    let mut verdicts = Vec::with_capacity(waiting.len());
    for (uid, pod) in waiting {
        let named = observed.pods.values().find(|s| s.namespace == pod.metadata.namespace && s.name == pod.metadata.name);
        let verdict = match named {
            Some(_) => Verdict::Wait { message: "the earlier pod of this name is still ending".to_owned() },
            None => taken.judge(pod, desired),
        };
        if verdict == Verdict::Admit {
            taken.add(pod, false);
        }
        verdicts.push((uid, verdict));
    }
    verdicts
}

type Port = (Protocol, u16, String);

#[derive(Default)]
struct Taken {
    /// Port to "its pod is ending".
    ports: BTreeMap<Port, bool>,
    milli_cpu: i64,
    memory: i64,
    pods: usize,
    /// Some of it will be free soon.
    ending: bool,
}

impl Taken {
    fn add(&mut self, pod: &Pod, ending: bool) {
        for port in host_ports(pod) {
            self.ports.insert(port, ending);
        }
        self.milli_cpu = self.milli_cpu.saturating_add(request(pod, "cpu"));
        self.memory = self.memory.saturating_add(request(pod, "memory"));
        self.pods += 1;
        self.ending |= ending;
    }

    fn judge(&self, pod: &Pod, desired: &Desired) -> Verdict {
        for wanted in host_ports(pod) {
            let Some((_, ending)) = self.ports.iter().find(|(taken, _)| collide(taken, &wanted)) else { continue };
            return if *ending {
                Verdict::Wait { message: format!("host port {} belongs to a pod that is still ending", wanted.1) }
            } else {
                Verdict::Reject {
                    reason: "NodePorts",
                    message:
                        "Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports"
                            .to_owned(),
                }
            };
        }
        let node = &desired.node;
        let sizes = [
            ("OutOfpods", "pods", 1, self.pods as i64, node.max_pods as i64),
            ("OutOfcpu", "cpu", request(pod, "cpu"), self.milli_cpu, node.milli_cpu),
            ("OutOfmemory", "memory", request(pod, "memory"), self.memory, node.memory),
        ];
        for (reason, resource, requested, used, capacity) in sizes {
            // A capacity of 0 is one that nobody gave.
            if capacity == 0 || requested == 0 || used.saturating_add(requested) <= capacity {
                continue;
            }
            let fits_alone = requested <= capacity;
            return if self.ending && fits_alone {
                Verdict::Wait { message: format!("not enough {resource} until another pod has ended") }
            } else {
                Verdict::Reject {
                    reason,
                    message: format!(
                        "Pod was rejected: Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
                    ),
                }
            };
        }
        Verdict::Admit
    }
}

fn host_ports(pod: &Pod) -> impl Iterator<Item = Port> + '_ {
    pod.spec.containers.iter().chain(&pod.spec.init_containers).flat_map(|c| &c.ports).filter_map(|port| {
        let number = port.host_port.filter(|p| *p != 0)?;
        let ip = port.host_ip.clone().unwrap_or_default();
        let any = ip.is_empty() || ip == "0.0.0.0" || ip == "::";
        Some((port.protocol, number, if any { String::new() } else { ip }))
    })
}

/// The address "any" collides with each.
fn collide(a: &Port, b: &Port) -> bool {
    a.0 == b.0 && a.1 == b.1 && (a.2 == b.2 || a.2.is_empty() || b.2.is_empty())
}

/// Of the scheduler: the sum of the containers, or the largest init container if that is more.
/// Milli-CPU, or bytes.
fn request(pod: &Pod, resource: &str) -> i64 {
    let of = |container: &Container| {
        let quantity = container.resources.requests.get(resource).or_else(|| container.resources.limits.get(resource));
        quantity.map_or(0, |q| if resource == "cpu" { q.milli() } else { q.units() })
    };
    let sum = pod.spec.containers.iter().map(of).fold(0i64, i64::saturating_add);
    pod.spec.init_containers.iter().map(of).fold(sum, i64::max)
}
