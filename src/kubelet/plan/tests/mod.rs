//! A pod's life in a modelled world, sentence by sentence, a file a job; what they ask of a status
//! stands here.
#![deny(clippy::disallowed_methods)]

mod admission;
mod deaths;
mod ending;
mod life;
mod random;
mod waiting;

use crate::api::status::{ContainerStatus, PodStatus};

fn c(status: &PodStatus, name: &str) -> ContainerStatus {
    status.container_statuses.iter().chain(&status.init_container_statuses).find(|c| c.name == name).unwrap().clone()
}

fn waiting(status: &PodStatus, name: &str) -> (String, String) {
    let waiting = c(status, name).state.waiting.unwrap_or_else(|| panic!("{name} does not wait: {:?}", c(status, name).state));
    (waiting.reason, waiting.message)
}

fn ended(status: &PodStatus, name: &str) -> (i32, String) {
    let ended = c(status, name).state.terminated.unwrap_or_else(|| panic!("{name} has not ended: {:?}", c(status, name).state));
    (ended.exit_code, ended.reason)
}

fn condition(status: &PodStatus, kind: &str) -> (String, String, String) {
    let c = status.conditions.iter().find(|c| c.kind == kind).unwrap();
    (c.status.clone(), c.reason.clone(), c.message.clone())
}

fn t(status: &str, reason: &str, message: &str) -> (String, String, String) {
    (status.into(), reason.into(), message.into())
}
