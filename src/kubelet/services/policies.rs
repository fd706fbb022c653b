//! NetworkPolicies as this node enforces them when it is alone, and what `coracle policies` shows.
//!
//! Plain decisions of the planner's thread. Invariant: the proxy hears of a pod's labels in a turn
//! before the one that has it attached, so that its verdicts are there when its addresses are.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::api::pod::Pod;
use crate::kubelet::model::{Desired, Observed};
use crate::kubelet::source::NetworkObjects;
use crate::proxy::model::{LocalPod, NamedPort, Skipped};
use crate::proxy::policy::words::{self, Isolation};
use crate::proxy::policy::{self, World};
use crate::store::ids::PodUid;

pub struct Policies {
    /// False: none are enforced.
    on: bool,
    /// The node's own DNS server, where pods ask it.
    servers: Vec<IpAddr>,
    /// What was told last.
    told: Option<World>,
}

/// The policies of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyView {
    pub namespace: String,
    pub name: String,
    /// Policies are not about it: it is the node.
    pub host_network: bool,
    /// The agent was started with --policy=off.
    pub off: bool,
    pub ingress: DirectionView,
    pub egress: DirectionView,
    /// `NetworkPolicy default/web, spec.ingress[0].from[0]: why`.
    pub skipped: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DirectionView {
    /// False: everything is allowed.
    pub isolated: bool,
    /// `namespace/name` of those that isolate the pod.
    pub policies: Vec<String>,
    pub allowed: Vec<AllowedView>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedView {
    pub policy: String,
    pub rule: String,
}

impl Policies {
    pub fn new(on: bool, servers: Vec<IpAddr>) -> Policies {
        Policies { on, servers, told: None }
    }

    pub fn have_told(&self) -> bool {
        self.told.is_some()
    }

    /// What the proxy has to hear; None: nothing is new.
    pub fn news(&mut self, objects: &NetworkObjects, pods: Vec<LocalPod>) -> Option<World> {
        // Where none are enforced, those of an earlier agent go, once.
        let world = if self.on { self.world(objects, pods) } else { World::default() };
        if self.told.as_ref() == Some(&world) {
            return None;
        }
        self.told = Some(world.clone());
        Some(world)
    }

    fn world(&self, objects: &NetworkObjects, pods: Vec<LocalPod>) -> World {
        World {
            policies: objects.policies.clone(),
            namespaces: objects.namespaces.clone(),
            pods,
            // Alone there are no other nodes.
            peers: Arc::default(),
            servers: self.servers.clone(),
        }
    }

    pub fn view(&self, objects: &NetworkObjects, pods: Vec<LocalPod>, namespace: &str, name: &str) -> Option<PolicyView> {
        let mut world = self.world(objects, pods);
        // Nobody is housed here: an address that is nobody's makes the reader look at each policy.
        world.pods.iter_mut().for_each(|pod| pod.addresses = vec![IpAddr::from([0; 4])]);
        let pod = world.pods.iter().find(|pod| pod.namespace == namespace && pod.name == name)?;
        let [ingress, egress] = words::isolation(&world, pod).map(direction);
        let isolating: Vec<&String> = ingress.policies.iter().chain(&egress.policies).collect();
        let (_, skipped) = policy::model(&world);
        let of_pod =
            |s: &&Skipped| s.object.strip_prefix("NetworkPolicy ").is_some_and(|name| isolating.iter().any(|p| *p == name));
        let skipped = skipped.iter().filter(of_pod).map(ToString::to_string).collect();
        Some(PolicyView {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            host_network: pod.host_network,
            off: !self.on,
            ingress,
            egress,
            skipped,
        })
    }
}

fn direction(of: Isolation) -> DirectionView {
    let allowed = of.allows.into_iter().map(|allow| AllowedView { policy: allow.policy, rule: allow.words });
    DirectionView { isolated: !of.policies.is_empty(), policies: of.policies, allowed: allowed.collect() }
}

/// Every pod of this node whose manifest is known, by uid; its addresses are the network's to say.
pub fn pods(desired: &Desired, observed: &Observed) -> Vec<LocalPod> {
    let pods = observed.pods.iter().filter_map(|(uid, state)| {
        let pod = state.pod.as_deref()?;
        let host_network = pod.spec.host_network;
        Some(LocalPod {
            uid: uid.as_str().to_owned(),
            namespace: state.namespace.clone(),
            name: state.name.clone(),
            addresses: if host_network { desired.node.ips.clone() } else { Vec::new() },
            labels: labels(desired, uid, pod),
            ports: named_ports(pod),
            host_network,
        })
    });
    pods.collect()
}

/// Labels may change while the pod runs: its uid is its spec's.
pub fn labels(desired: &Desired, uid: &PodUid, pod: &Pod) -> BTreeMap<String, String> {
    desired.pods.get(uid).map_or(&pod.metadata.labels, |now| &now.metadata.labels).clone()
}

/// Of all containers that run side by side.
pub fn named_ports(pod: &Pod) -> Vec<NamedPort> {
    let ports = pod.spec.containers.iter().flat_map(|c| &c.ports).filter(|p| !p.name.is_empty());
    ports.map(|p| NamedPort { name: p.name.clone(), number: p.container_port, protocol: p.protocol.into() }).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::api::network_policy::NetworkPolicy;

    fn objects() -> NetworkObjects {
        let spec = "{\"spec\":{\"podSelector\":{},\"ingress\":[{\"from\":[{}]}]}}";
        let policy: NetworkPolicy = serde_json::from_str(spec).unwrap();
        let policies = [(("shop".to_owned(), "p".to_owned()), Arc::new(policy))].into();
        NetworkObjects { policies, ..NetworkObjects::default() }
    }

    fn pod(host_network: bool) -> LocalPod {
        LocalPod { uid: "u".into(), namespace: "shop".into(), name: "web".into(), host_network, ..LocalPod::default() }
    }

    #[test]
    fn what_is_new_is_told_once_and_with_policies_off_that_there_are_none() {
        let mut on = Policies::new(true, vec!["10.88.0.1".parse().unwrap()]);
        let world = on.news(&objects(), vec![pod(false)]).unwrap();
        assert_eq!((world.policies.len(), world.pods.len(), world.servers.len()), (1, 1, 1));
        assert!(on.news(&objects(), vec![pod(false)]).is_none());
        assert!(on.news(&objects(), Vec::new()).is_some() && on.news(&NetworkObjects::default(), Vec::new()).is_some());
        let mut off = Policies::new(false, Vec::new());
        assert_eq!(off.news(&objects(), vec![pod(false)]), Some(World::default()), "those of an earlier agent go");
        assert!(off.news(&objects(), Vec::new()).is_none());
    }

    #[test]
    fn a_view_names_what_isolates_a_pod_and_what_of_it_cannot_be_read() {
        let policies = Policies::new(true, Vec::new());
        let view = policies.view(&objects(), vec![pod(false)], "shop", "web").unwrap();
        assert_eq!(view.ingress.policies, ["shop/p"]);
        assert!(view.ingress.isolated && !view.egress.isolated && view.skipped[0].contains("spec.ingress[0].from[0]"));
        let host = policies.view(&objects(), vec![pod(true)], "shop", "web").unwrap();
        assert!(host.host_network && !host.ingress.isolated);
        assert_eq!(policies.view(&objects(), vec![pod(false)], "shop", "other"), None);
    }
}
