//! Which device nodes a container has and may use.
use super::model::DeviceRule;

/// containerd's allow list over default-deny for an ordinary container.
pub fn default_rules() -> Vec<DeviceRule> {
    todo!()
}

/// Everything: privileged containers.
pub fn all_rules() -> Vec<DeviceRule> {
    todo!()
}
