//! Quality of service: class, cgroup limits and oom_score_adj of a pod and its containers. Pure.
//!
//! Only cpu and memory count. A request that is absent is its limit (the API server's default).
//!
//! Sources: kubelet's pkg/kubelet/cm/helpers_linux.go, pkg/kubelet/qos/policy.go and
//! pkg/apis/core/v1/helper/qos, by behaviour.
#![deny(clippy::disallowed_methods)]

use crate::api::pod::{Container, Pod};
use crate::api::quantity::Quantity;
use crate::runtime::devices;
use crate::runtime::model::CgroupResources;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QosClass {
    Guaranteed,
    Burstable,
    BestEffort,
}

/// Node numbers that the formulae need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCapacity {
    /// Bytes.
    pub memory: u64,
    pub milli_cpu: u64,
    /// podPidsLimit; None: no limit.
    pub pod_pids_limit: Option<i64>,
}

/// CFS period of every quota, in microseconds.
const PERIOD: u64 = 100_000;
/// What nobody asked for weighs this: best-effort containers, pods, and their class.
pub const MIN_SHARES: u64 = 2;
const MAX_SHARES: u64 = 262_144;
/// The kernel refuses a shorter quota.
const MIN_QUOTA: i64 = 1000;

impl QosClass {
    pub fn of(pod: &Pod) -> QosClass {
        let mut any = false;
        let mut guaranteed = true;
        for container in all(pod) {
            for resource in ["cpu", "memory"] {
                let (request, limit) = (request(container, resource), positive(container.resources.limits.get(resource)));
                any |= request.is_some() || limit.is_some();
                guaranteed &= limit.is_some() && request.map(Quantity::nano) == limit.map(Quantity::nano);
            }
        }
        match (any, guaranteed) {
            (false, _) => QosClass::BestEffort,
            (true, true) => QosClass::Guaranteed,
            (true, false) => QosClass::Burstable,
        }
    }

    /// As status.qosClass has it.
    pub fn as_str(self) -> &'static str {
        match self {
            QosClass::Guaranteed => "Guaranteed",
            QosClass::Burstable => "Burstable",
            QosClass::BestEffort => "BestEffort",
        }
    }

    /// `<parent>/kubepods{,/burstable,/besteffort}`; `parent` is `/` or begins with one.
    pub fn cgroup(self, parent: &str) -> String {
        let below = match self {
            QosClass::Guaranteed => "",
            QosClass::Burstable => "/burstable",
            QosClass::BestEffort => "/besteffort",
        };
        format!("{}/kubepods{below}", parent.trim_end_matches('/'))
    }
}

/// `<parent>/kubepods{,/burstable,/besteffort}/pod<uid>`.
pub fn pod_cgroup(parent: &str, class: QosClass, uid: &str) -> String {
    format!("{}/pod{uid}", class.cgroup(parent))
}

/// The pod's own cgroup: sums over its containers, as far as all of them are limited.
pub fn pod_resources(pod: &Pod, node: &NodeCapacity) -> CgroupResources {
    let class = QosClass::of(pod);
    let every_has = |resource| all(pod).all(|c| positive(c.resources.limits.get(resource)).is_some());
    let cpu_limit = (class != QosClass::BestEffort && every_has("cpu")).then(|| pod_milli(pod, limit));
    let memory_limit = (class != QosClass::BestEffort && every_has("memory")).then(|| pod_bytes(pod, limit));
    CgroupResources {
        cpu_shares: Some(match class {
            QosClass::BestEffort => MIN_SHARES,
            QosClass::Guaranteed | QosClass::Burstable => shares(pod_milli(pod, request)),
        }),
        cpu_quota: cpu_limit.map(quota),
        cpu_period: cpu_limit.map(|_| PERIOD),
        memory_limit,
        oom_group: false,
        no_swap: false,
        pids_limit: node.pod_pids_limit,
        devices: None,
    }
}

/// A container's leaf.
pub fn container_resources(_pod: &Pod, container: &Container) -> CgroupResources {
    let limit = |resource| positive(container.resources.limits.get(resource));
    let privileged = container.security_context.as_ref().and_then(|s| s.privileged) == Some(true);
    CgroupResources {
        cpu_shares: Some(shares(request(container, "cpu").map_or(0, Quantity::milli))),
        cpu_quota: limit("cpu").map(|cpu| quota(cpu.milli())),
        cpu_period: limit("cpu").map(|_| PERIOD),
        memory_limit: limit("memory").map(Quantity::units),
        oom_group: true,
        no_swap: true,
        pids_limit: None,
        devices: Some(if privileged { devices::all_rules() } else { devices::default_rules() }),
    }
}

/// The priority class that the OOM killer spares as if it were guaranteed.
pub const NODE_CRITICAL: &str = "system-node-critical";

pub fn oom_score_adj(pod: &Pod, container: &Container, node: &NodeCapacity) -> i32 {
    const GUARANTEED: i32 = -997;
    const BEST_EFFORT: i32 = 1000;
    if pod.spec.priority_class_name.as_deref() == Some(NODE_CRITICAL) {
        return GUARANTEED;
    }
    match QosClass::of(pod) {
        QosClass::Guaranteed => GUARANTEED,
        QosClass::BestEffort => BEST_EFFORT,
        QosClass::Burstable => {
            let wanted = i128::from(request(container, "memory").map_or(0, Quantity::units));
            let score = 1000 - 1000 * wanted / i128::from(node.memory.max(1));
            // Above every guaranteed pod, below every best-effort one.
            score.clamp((1000 + GUARANTEED).into(), (BEST_EFFORT - 1).into()) as i32
        }
    }
}

fn all(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.containers.iter().chain(&pod.spec.init_containers)
}

fn positive(quantity: Option<&Quantity>) -> Option<&Quantity> {
    quantity.filter(|q| !q.is_zero() && !q.is_negative())
}

/// An explicit zero is a request of its own, and none.
fn request<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    let resources = &container.resources;
    positive(resources.requests.get(resource).or_else(|| resources.limits.get(resource)))
}

fn limit<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    positive(container.resources.limits.get(resource))
}

type Read = for<'a> fn(&'a Container, &str) -> Option<&'a Quantity>;

/// Init containers run one at a time, before the others: the larger of the two needs counts.
fn total(pod: &Pod, one: impl Fn(&Container) -> i64) -> i64 {
    let main = pod.spec.containers.iter().map(&one).fold(0i64, i64::saturating_add);
    pod.spec.init_containers.iter().map(&one).fold(main, i64::max)
}

fn pod_milli(pod: &Pod, read: Read) -> i64 {
    total(pod, |c| read(c, "cpu").map_or(0, Quantity::milli))
}

fn pod_bytes(pod: &Pod, read: Read) -> i64 {
    total(pod, |c| read(c, "memory").map_or(0, Quantity::units))
}

fn shares(milli: i64) -> u64 {
    (u64::try_from(milli).unwrap_or(0).saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

fn quota(milli: i64) -> i64 {
    (milli.saturating_mul(PERIOD as i64) / 1000).max(MIN_QUOTA)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeCapacity = NodeCapacity { memory: 4_000_000_000, milli_cpu: 4000, pod_pids_limit: Some(1024) };

    /// `"100m/200m 64Mi/64Mi"`: cpu and memory, request/limit, each may be empty.
    fn container(text: &str) -> Container {
        let mut container = Container::default();
        for (resource, pair) in ["cpu", "memory"].iter().zip(text.split(' ')) {
            let (request, limit) = pair.split_once('/').unwrap();
            for (map, value) in [(&mut container.resources.requests, request), (&mut container.resources.limits, limit)] {
                if !value.is_empty() {
                    map.insert((*resource).to_owned(), Quantity::parse(value).unwrap());
                }
            }
        }
        container
    }

    fn pod(containers: &[&str], init: &[&str]) -> Pod {
        let mut pod = Pod::default();
        pod.spec.containers = containers.iter().map(|c| container(c)).collect();
        pod.spec.init_containers = init.iter().map(|c| container(c)).collect();
        pod
    }

    #[test]
    fn classes_are_the_api_servers() {
        use QosClass::*;
        for (containers, init, class) in [
            (vec!["/ /"], vec![], BestEffort),
            (vec!["0/0 0/0"], vec![], BestEffort),
            (vec!["100m/100m 64Mi/64Mi"], vec![], Guaranteed),
            (vec!["/100m /64Mi"], vec![], Guaranteed),
            (vec!["0.1/100m 65536Ki/64Mi"], vec![], Guaranteed),
            (vec!["100m/200m 64Mi/64Mi"], vec![], Burstable),
            (vec!["100m/100m /"], vec![], Burstable),
            (vec!["/ 64Mi/"], vec![], Burstable),
            (vec!["100m/100m 64Mi/64Mi", "/ /"], vec![], Burstable),
            (vec!["100m/100m 64Mi/64Mi"], vec!["/ /"], Burstable),
            (vec!["/ /"], vec!["/ 1/1"], Burstable),
            (vec!["0/100m 64Mi/64Mi"], vec![], Burstable),
        ] {
            assert_eq!(QosClass::of(&pod(&containers, &init)), class, "{containers:?} {init:?}");
        }
    }

    #[test]
    fn the_tree_is_the_kubelets() {
        assert_eq!(pod_cgroup("/", QosClass::Guaranteed, "u"), "/kubepods/podu");
        assert_eq!(pod_cgroup("/", QosClass::Burstable, "u"), "/kubepods/burstable/podu");
        assert_eq!(pod_cgroup("/system.slice/x", QosClass::BestEffort, "u"), "/system.slice/x/kubepods/besteffort/podu");
    }

    #[test]
    fn shares_and_quotas() {
        for (milli, want) in [(0, 2), (1, 2), (2, 2), (100, 102), (500, 512), (1000, 1024), (1500, 1536), (10_000_000, 262_144)] {
            assert_eq!(shares(milli), want, "{milli}");
        }
        for (milli, want) in [(1, 1000), (9, 1000), (10, 1000), (100, 10_000), (2500, 250_000)] {
            assert_eq!(quota(milli), want, "{milli}");
        }
    }

    #[test]
    fn a_pod_is_limited_where_all_of_its_containers_are() {
        let of = |containers: &[&str], init: &[&str]| {
            let r = pod_resources(&pod(containers, init), &NODE);
            (r.cpu_shares.unwrap(), r.cpu_quota, r.memory_limit.map(|m| m >> 20))
        };
        assert_eq!(of(&["/ /"], &[]), (2, None, None));
        assert_eq!(of(&["100m/200m 64Mi/64Mi", "100m/200m 64Mi/64Mi"], &[]), (204, Some(40_000), Some(128)));
        assert_eq!(of(&["100m/200m 64Mi/64Mi", "100m/200m 64Mi/"], &[]), (204, Some(40_000), None));
        assert_eq!(of(&["100m/ 64Mi/64Mi"], &[]), (102, None, Some(64)));
        // An init container that needs more than all the others together.
        assert_eq!(of(&["100m/100m 64Mi/64Mi"], &["1/1 256Mi/256Mi"]), (1024, Some(100_000), Some(256)));
        assert_eq!(of(&["100m/100m 64Mi/64Mi"], &["/ /"]), (102, None, None));
        assert_eq!(pod_resources(&pod(&["/ /"], &[]), &NODE).pids_limit, Some(1024));
    }

    #[test]
    fn a_container_without_a_request_asks_for_its_limit() {
        let r = container_resources(&Pod::default(), &container("/500m /32Mi"));
        assert_eq!((r.cpu_shares, r.cpu_quota, r.cpu_period), (Some(512), Some(50_000), Some(100_000)));
        assert_eq!((r.memory_limit, r.no_swap, r.oom_group), (Some(32 << 20), true, true));
        let none = container_resources(&Pod::default(), &container("/ /"));
        assert_eq!((none.cpu_shares, none.cpu_quota, none.memory_limit), (Some(2), None, None));
        assert_eq!(none.devices, Some(devices::default_rules()));
    }

    #[test]
    fn oom_scores_are_the_kubelets() {
        for (containers, want) in [
            (vec!["/ /"], 1000),
            (vec!["1/1 1Gi/1Gi"], -997),
            (vec!["100m/ /"], 999),
            (vec!["/ 1G/"], 750),
            (vec!["/ 4G/"], 3),
            (vec!["/ 3999M/"], 3),
            (vec!["/ 1M/"], 999),
            (vec!["/ 8G/"], 3),
        ] {
            let pod = pod(&containers, &[]);
            assert_eq!(oom_score_adj(&pod, &pod.spec.containers[0], &NODE), want, "{containers:?}");
        }
        let mut critical = pod(&["/ /"], &[]);
        critical.spec.priority_class_name = Some("system-node-critical".into());
        assert_eq!(oom_score_adj(&critical, &critical.spec.containers[0], &NODE), -997);
    }
}
