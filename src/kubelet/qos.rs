//! Quality of service: class, cgroup limits and oom_score_adj of a pod and its containers. Pure.
use crate::api::pod::{Container, Pod};
use crate::runtime::model::CgroupResources;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QosClass {
    Guaranteed,
    Burstable,
    BestEffort,
}

impl QosClass {
    pub fn of(_pod: &Pod) -> QosClass {
        todo!()
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
    pub fn cgroup(self, _parent: &str) -> String {
        todo!()
    }
}

/// `<parent>/kubepods{,/burstable,/besteffort}/pod<uid>`.
pub fn pod_cgroup(_parent: &str, _class: QosClass, _uid: &str) -> String {
    todo!()
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

pub fn pod_resources(_pod: &Pod, _node: &NodeCapacity) -> CgroupResources {
    todo!()
}

pub fn container_resources(_pod: &Pod, _container: &Container) -> CgroupResources {
    todo!()
}

pub fn oom_score_adj(_pod: &Pod, _container: &Container, _node: &NodeCapacity) -> i32 {
    todo!()
}
