//! Runs one action. Decides nothing: what to do is in the action, what became of it in the
//! outcome. Every action may be cut off after any step and is safe to repeat.

mod container;
mod create;
mod exit;
mod pod;

pub use pod::sweep_containers;

use std::net::IpAddr;
use std::sync::Arc;

use super::model::{Action, FailReason, Outcome};
use super::rooms::Rooms;
use super::source::ConfigObjects;
use crate::api::pod::Pod;
use crate::obs::chain;
use crate::store::StoreError;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::{BootStamp, Record};
use crate::sys::clock;

/// An action with the facts that it needs, copied out of the planner's world.
pub struct Job {
    pub action: Action,
    pub namespace: String,
    pub name: String,
    /// None: its manifest cannot be read.
    pub pod: Option<Arc<Pod>>,
    /// Canonical manifest, for `Admit`.
    pub raw: Option<Arc<[u8]>>,
    pub configs: Arc<ConfigObjects>,
    /// Of the pod; the node's with hostNetwork.
    pub addresses: Vec<IpAddr>,
    /// Every attempt that may have left something.
    pub attempts: Vec<Left>,
    /// Environment variables of Services, for `Create`.
    pub services: Vec<(String, String)>,
}

pub struct Left {
    pub container: String,
    pub number: u32,
    pub id: ContainerId,
    /// What it was made from; empty where that is not known any more.
    pub image: String,
}

impl Job {
    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
    fn image_of(&self, id: &ContainerId) -> String {
        self.attempts.iter().find(|left| left.id == *id).map(|left| left.image.clone()).unwrap_or_default()
    }
}

pub fn run(rooms: &Rooms, job: &Job) -> Outcome {
    let result = match &job.action {
        // The planner keeps that one to itself.
        Action::End { .. } => Ok(Outcome::Done),
        Action::Admit { uid } => pod::admit(rooms, job, uid),
        Action::SetUpVolumes { uid, .. } => pod::set_up_volumes(rooms, job, uid),
        Action::RunSandbox { uid } => pod::run_sandbox(rooms, job, uid),
        Action::Attach { uid } => pod::attach(rooms, job, uid),
        Action::Listen { uid } => pod::listen(rooms, uid),
        Action::KillMonitor { uid } => pod::kill_monitor(rooms, uid),
        Action::Inspect { uid } => pod::inspect(rooms, uid),
        Action::StopSandbox { uid } => pod::stop_sandbox(rooms, uid),
        Action::Pull { uid, container, image, delay, .. } => container::pull(rooms, job, uid, container, image, *delay),
        Action::Create { uid, container, attempt } => create::create(rooms, job, uid, container, attempt),
        Action::Start { uid, container, id } => container::start(rooms, job, uid, container, id),
        Action::Signal { uid, targets } => container::signal(rooms, job, uid, targets),
        Action::Kill { uid, targets } => container::kill(rooms, uid, targets),
        Action::RecordExit { uid, container, number, id, exit } => exit::record(rooms, job, uid, container, *number, id, exit),
        Action::RemoveContainer { uid, container, number, id } => container::remove(rooms, job, uid, container, *number, id),
        Action::ReleaseVolumes { uid } => pod::release_volumes(rooms, uid),
        Action::Finish { uid, finished } => pod::finish(rooms, uid, finished),
        Action::Remove { uid } => pod::remove(rooms, job, uid),
    };
    result.unwrap_or_else(|failed| Outcome::Failed { reason: failed.reason, message: failed.message })
}

/// Why an action failed, in the words that users read.
struct Failed {
    reason: FailReason,
    message: String,
}

impl Failed {
    fn new(reason: FailReason, error: &(dyn std::error::Error + 'static)) -> Failed {
        Failed { reason, message: chain(error).to_string() }
    }
    /// For `map_err`.
    fn because<E: std::error::Error + 'static>(reason: FailReason) -> impl Fn(E) -> Failed {
        move |error| Failed::new(reason, &error)
    }
}

fn journal(rooms: &Rooms, record: &Record) -> Result<(), Failed> {
    rooms.store.append(record).map_err(Failed::because::<StoreError>(FailReason::Journal))
}

fn stamp(rooms: &Rooms) -> BootStamp {
    BootStamp { boot: rooms.boot_id.clone(), nanos: clock::boot_nanos() }
}

/// The spec of a pod whose manifest can be read; actions on others are never planned.
fn spec<'a>(job: &'a Job, uid: &PodUid) -> Result<&'a Pod, Failed> {
    let missing =
        || Failed { reason: FailReason::CreateConfig, message: format!("the stored manifest of pod {uid} cannot be read") };
    job.pod.as_deref().ok_or_else(missing)
}
