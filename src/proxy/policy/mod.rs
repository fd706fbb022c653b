//! NetworkPolicies: what they mean for the pods of this node, as plain sets of addresses and ports.
//!
//! ```text
//! NetworkPolicies, namespaces, pods ─> model() ─> PolicyModel ─┬─> part() ─> chains and sets of a family
//!                                                              └─> verdict(): what the rules have to say
//! ```
//!
//! Pure. Decisions where the API leaves room:
//! - Policies are about pods with an address of their own. A pod with hostNetwork is the node: no
//!   policy selects it, no podSelector means it (k3s#3535), an ipBlock may.
//! - What this node sends to its pods always passes: probes do.
//! - A pod always reaches itself, and answers always come back.
//! - What cannot be read allows nothing, and the policy isolates all the same.
//! - *The node's DNS server* (the address in the pod's resolv.conf, on the bridge) stands in the
//!   place of the cluster's. A policy cannot select it, so a pod whose egress is isolated may ask
//!   it (port 53, UDP or TCP) where one of its rules names port 53 of that protocol, to whomever,
//!   or takes in the pods `k8s-app: kube-dns` of namespace kube-system. So manifests written for a
//!   cluster with CoreDNS work, and a pod that may resolve nothing there resolves nothing here: a
//!   forwarder that is open to all would be a way out.
//! - Pods are told by their addresses, as everywhere in Kubernetes: what a pod sends with a forged
//!   source is not known for its own. Nobody is told by a link-local address, so pods have none
//!   that leads anywhere while somebody is isolated ([`part`]), and none at all without IPv6.
//!
//! Source: networking/v1 types.go, sig-network's test/e2e/network/netpol.
#![deny(clippy::disallowed_methods)]

mod model;
pub mod part;
mod read;
mod tighten;
mod verdict;
pub mod words;
mod world;

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;

pub use model::{Direction, Peers, Policy, PolicyModel, Ports, Rule, Subject};
pub use read::model;
pub use tighten::may_tighten;
pub use verdict::{Flow, Verdict};
pub use world::World;
