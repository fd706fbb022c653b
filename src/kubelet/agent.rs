//! The planner: the one owner of DESIRED and OBSERVED. A thread that takes messages, folds them
//! in, plans, hands actions to workers, and sleeps until the next message or due time.
//!
//! ```text
//! source ──> Source(update) ──┐
//! runtime ─> Runtime(event) ──┤                       ┌─> pool "worker"  ┐
//! workers ─> Report(outcome) ─┼─> fold ─> plan ─> ────┤                  ├─> kernel, disk
//! clients ─> Request ─────────┘                       └─> pool "puller"  ┘
//! ```
//!
//! Invariant: it never waits for disk, network or a monitor; all of that happens in workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::apply::{self, Job, Left};
use super::handle::{AgentHandle, Request, StopReport};
use super::model::{Action, Desired, Node, Now, Observed, Outcome, Sandbox};
use super::names::Names;
use super::observe;
use super::plan;
use super::recover;
use super::rooms::{self, OpenError, Rooms, Start};
use super::services::policies::{self, Policies};
use super::services::{self, Services};
use super::source::{DesiredPod, Source, SourceConfig, SourceError, SourceUpdate};
use super::views;
use super::worker::Pool;
use crate::config::Config;
use crate::obs::notify::Notifier;
use crate::proxy::ServiceChange;
use crate::proxy::alone::Memory;
use crate::runtime::model::RuntimeEvent;
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::clock;

/// Everything that can wake the planner.
pub enum Message {
    Source(SourceUpdate),
    Runtime(RuntimeEvent),
    Report {
        action: Action,
        outcome: Outcome,
    },
    /// Pods that had a network and have lost their link.
    Severed(Vec<String>),
    Request(Request),
    /// Addresses of Services were written to the disk; `failed`: those that could not be, and why.
    Saved {
        failed: Option<(Memory, String)>,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("watch the manifests")]
    Source(#[from] SourceError),
    #[error("start a thread")]
    Thread(#[source] std::io::Error),
}

/// Effects at once: enough to hide the kernel's and the disk's waits, few enough to stay small.
const WORKERS: usize = 8;
const PULLERS: usize = 2;
const STACK: usize = 256 * 1024;
/// How often the planner asks what nobody tells.
const TEND: i64 = 60 * super::model::SECOND;

/// An agent whose rooms are open and whose pods of before are known again.
pub struct Agent {
    pub rooms: Arc<Rooms>,
    planner: Planner,
    messages: Receiver<Message>,
    sender: Sender<Message>,
    known: Vec<DesiredPod>,
}

impl Agent {
    /// Opens everything and adopts what lives. Nothing is started yet.
    pub fn open(config: Config) -> Result<Agent, AgentError> {
        let (sender, messages) = channel();
        let events = sender.clone();
        let runtime_events = rooms::forward("runtime-events", move |event| events.send(Message::Runtime(event)).is_ok())
            .map_err(AgentError::Thread)?;
        let Start { rooms, found, known, addresses } = rooms::open(config, runtime_events)?;
        let now = now();
        let node = Node {
            name: rooms.config.node_name.clone(),
            ips: rooms.node_ips.clone(),
            milli_cpu: i64::try_from(rooms.capacity.milli_cpu).unwrap_or(i64::MAX),
            memory: i64::try_from(rooms.capacity.memory).unwrap_or(i64::MAX),
            max_pods: rooms.config.max_pods,
        };
        let desired = Desired { stop_grace: rooms.config.stop_grace, node, ..Desired::default() };
        let observed = recover::recovered(found, now);
        let rooms = Arc::new(rooms);
        let services = Services::new(rooms.facts.clone(), rooms.service_ranges.clone(), addresses);
        let planner = Planner {
            services,
            served: false,
            policies: Policies::new(rooms.config.policy, rooms.dns_servers()),
            unsaved: None,
            unsaved_why: None,
            saving: false,
            rooms: Arc::clone(&rooms),
            desired,
            observed,
            update: SourceUpdate::default(),
            sources: BTreeMap::new(),
            told: false,
            workers: Pool::new("worker", WORKERS, STACK),
            pullers: Pool::new("puller", PULLERS, STACK),
            sender: sender.clone(),
            stopping: Vec::new(),
            started: now.wall,
            swept: false,
            tended: now.boot,
            names: Names::default(),
        };
        Ok(Agent { rooms, planner, messages, sender, known })
    }

    pub fn handle(&self) -> AgentHandle {
        AgentHandle::new(self.sender.clone(), Arc::clone(&self.rooms.store))
    }

    /// How many pods were found and how many of them live.
    pub fn adopted(&self) -> (usize, usize) {
        let pods = &self.planner.observed.pods;
        (pods.len(), pods.values().filter(|p| matches!(p.sandbox, Sandbox::Up { .. })).count())
    }

    /// Runs pods until somebody asks it to quit; pods stay.
    pub fn run(mut self, notifier: &Notifier) -> Result<(), AgentError> {
        let source = match &self.rooms.config.manifests {
            Some(dir) => {
                let sender = self.sender.clone();
                let config = SourceConfig {
                    dir: dir.clone(),
                    node: self.rooms.config.node_name.clone(),
                    memory: self.rooms.config.roots.state.join("manifests.json"),
                    boot_id: self.rooms.boot_id.clone(),
                    known: std::mem::take(&mut self.known),
                };
                Some(Source::start(config, move |update| sender.send(Message::Source(update)).is_ok())?)
            }
            None => {
                self.planner.keep(std::mem::take(&mut self.known));
                None
            }
        };
        let watch = self.rooms.net.watch();
        if let Err(error) = &watch {
            tracing::warn!(error = %crate::obs::chain(error), "nobody watches over the pods' network");
        }
        self.planner.run(&self.messages, notifier);
        drop((source, watch));
        Ok(())
    }

    /// Without a source: ends every pod, then returns.
    pub fn stop_all(mut self) -> StopReport {
        let (reply, answer) = channel();
        self.planner.request(Request::StopAll { grace: self.rooms.config.stop_grace, reply });
        self.planner.keep(std::mem::take(&mut self.known));
        loop {
            let wake = self.planner.turn();
            match answer.try_recv() {
                Ok(report) => return report,
                // The planner holds the other end until it answers.
                Err(_) => self.planner.wait(&self.messages, wake, None),
            };
        }
    }
}

/// What [`Agent::remove_all`] leaves.
pub struct Emptied {
    pub rooms: Arc<Rooms>,
    /// `namespace/name` of pods that would not go in time.
    pub left: Vec<String>,
}

impl Agent {
    /// Without a source: ends every pod and removes all that was ever made for it, as if the
    /// manifests directory were empty. For `coracle uninstall`.
    pub fn remove_all(mut self, until: Instant) -> Emptied {
        self.planner.source(SourceUpdate { complete: true, ..SourceUpdate::default() });
        loop {
            let wake = self.planner.turn();
            if self.planner.observed.pods.is_empty() || Instant::now() >= until {
                break;
            }
            self.planner.wait(&self.messages, wake, Some(Duration::from_secs(1)));
        }
        let left = self.planner.observed.pods.values().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
        Emptied { rooms: self.rooms, left }
    }
}

pub fn now() -> Now {
    Now { boot: clock::boot_nanos(), wall: clock::wall_nanos() }
}

struct Planner {
    rooms: Arc<Rooms>,
    desired: Desired,
    observed: Observed,
    /// The last one, without its pods.
    update: SourceUpdate,
    sources: BTreeMap<PodUid, DesiredPod>,
    /// The source has spoken.
    told: bool,
    workers: Pool,
    pullers: Pool,
    sender: Sender<Message>,
    /// Who waits for the end of all pods.
    stopping: Vec<Sender<StopReport>>,
    services: Services,
    /// The proxy knows which Services there are.
    served: bool,
    policies: Policies,
    /// Addresses of Services that are not on the disk yet.
    unsaved: Option<Memory>,
    /// Said once.
    unsaved_why: Option<String>,
    saving: bool,
    /// Wall time.
    started: i64,
    swept: bool,
    tended: i64,
    names: Names,
}

impl Planner {
    fn run(&mut self, messages: &Receiver<Message>, notifier: &Notifier) {
        // The source's first word decides what is wanted; until then nothing is planned.
        while !self.told && self.rooms.config.manifests.is_some() {
            let Ok(message) = messages.recv() else { return };
            if !self.take(message) {
                return;
            }
        }
        loop {
            let wake = self.turn();
            if let Err(error) = notifier.watchdog() {
                tracing::warn!(error = %crate::obs::chain(&error), "the service manager does not hear us");
            }
            if !self.wait(messages, wake, notifier.watchdog_interval()) {
                return;
            }
        }
    }

    /// Folds in what came, until nothing more is there. False: leave.
    fn wait(&mut self, messages: &Receiver<Message>, wake: Option<i64>, at_most: Option<Duration>) -> bool {
        let due = wake.map(|at| Duration::from_nanos(u64::try_from(at - clock::boot_nanos()).unwrap_or(0)));
        let tend = Duration::from_nanos(TEND.unsigned_abs());
        let limit = tend.min(due.unwrap_or(tend)).min(at_most.unwrap_or(tend));
        let mut message = match messages.recv_timeout(limit) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        };
        loop {
            if !self.take(message) {
                return false;
            }
            match messages.try_recv() {
                Ok(next) => message = next,
                Err(_) => return true,
            }
        }
    }

    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Source(update) => self.source(update),
            Message::Runtime(event) => {
                views::log_event(&self.observed, &event);
                observe::told(&mut self.observed, event, now());
            }
            Message::Report { action, outcome } => {
                views::log_outcome(&self.observed, &action, &outcome);
                observe::reported(&mut self.observed, &action, outcome, now());
            }
            Message::Severed(pods) => observe::severed(&mut self.observed, &pods),
            Message::Saved { failed } => {
                self.saving = false;
                match failed {
                    // Again with the next change, or when the planner tends.
                    Some((addresses, why)) => {
                        if self.unsaved_why.as_ref() != Some(&why) {
                            tracing::warn!(error = why, "addresses of Services are not stored; trying again");
                            self.unsaved_why = Some(why);
                        }
                        self.unsaved = self.unsaved.take().or(Some(addresses));
                    }
                    None => {
                        if self.unsaved_why.take().is_some() {
                            tracing::info!("addresses of Services are stored again");
                        }
                        self.save();
                    }
                }
            }
            Message::Request(Request::Quit) => return false,
            Message::Request(request) => self.request(request),
        }
        true
    }

    fn source(&mut self, mut update: SourceUpdate) {
        self.told = true;
        let pods = std::mem::take(&mut update.pods);
        if !Arc::ptr_eq(&self.update.configs, &update.configs) {
            self.desired.configs += 1;
            observe::configs_changed(&mut self.observed);
        }
        if let Some(addresses) = self.services.objects(std::mem::take(&mut update.network)) {
            self.unsaved = Some(addresses);
            self.save();
        }
        self.desired.complete = update.complete;
        self.update = update;
        self.sources = pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect();
        self.desired.pods = self.sources.iter().map(|(uid, pod)| (uid.clone(), Arc::clone(&pod.pod))).collect();
        // An admitted pod whose stored manifest was lost is admitted anew by the one in the directory.
        for (uid, pod) in &self.desired.pods {
            if let Some(state) = self.observed.pods.get_mut(uid)
                && state.pod.is_none()
            {
                state.pod = Some(Arc::clone(pod));
                state.admitted_at = 0;
            }
        }
    }

    /// Without a source: what is stored is what is wanted.
    fn keep(&mut self, known: Vec<DesiredPod>) {
        self.source(SourceUpdate { pods: known, ..SourceUpdate::default() });
    }

    fn request(&mut self, request: Request) {
        match request {
            Request::Pods { filter, reply } => {
                let views = views::pods(&self.rooms.config.roots, &self.desired, &self.observed, &self.sources, &filter, now());
                // Who asked may have gone meanwhile; here and below.
                let _ = reply.send(views);
            }
            Request::Services { reply } => {
                let _ = reply.send(self.services.views());
            }
            Request::Policies { namespace, name, reply } => {
                let pods = policies::pods(&self.desired, &self.observed);
                let _ = reply.send(self.policies.view(self.services.manifest_objects(), pods, &namespace, &name));
            }
            Request::Problems { reply } => {
                let _ = reply.send(self.update.problems.clone());
            }
            Request::ImagesInUse { reply } => {
                let attempts = self.observed.pods.values().flat_map(|p| p.containers.values()).flat_map(|c| &c.attempts);
                let _ = reply.send(attempts.map(|a| a.image.clone()).collect());
            }
            Request::ImagesChanged => observe::images_changed(&mut self.observed),
            Request::StopAll { grace, reply } => {
                tracing::info!(pods = self.observed.pods.len(), grace, "all pods are to end");
                self.desired.stopping = true;
                self.desired.stop_grace = grace;
                self.stopping.push(reply);
            }
            Request::Wake | Request::Quit => {}
        }
    }

    /// Plans and hands out, until nothing more is due now. Gives the next due time.
    fn turn(&mut self) -> Option<i64> {
        self.tend();
        self.police();
        let wake = loop {
            let now = now();
            let plan = plan::plan(&self.desired, &self.observed, now);
            let again = plan.actions.iter().any(|action| matches!(action, Action::End { .. }));
            for action in plan.actions {
                self.dispatch(action);
            }
            if !again {
                break plan.wake;
            }
        };
        self.services.pods(services::pods(&self.desired, &self.observed));
        self.serve();
        let name = self.name();
        self.answer_stops();
        self.sweep();
        wake.into_iter().chain(name).min()
    }

    /// What an earlier agent left of Services stays until the source has spoken. Who only ends pods
    /// serves nothing.
    fn serve(&mut self) {
        if !self.told || self.rooms.config.manifests.is_none() {
            return;
        }
        let (v4, v6) = ServiceChange::of(self.services.changes());
        if self.served && v4.is_empty() && v6.is_empty() {
            return;
        }
        self.served = true;
        if let Err(error) = self.rooms.proxy.tell_services(v4, v6) {
            tracing::error!(error = %crate::obs::chain(&error), "Services are not served any more");
        }
    }

    /// Ahead of what the turn hands out: a pod that is attached was told of before. What an earlier
    /// agent left of policies stays until the source has spoken: where neither the directory nor what
    /// is remembered of it can be read, none is known, and that is not to say that there are none.
    fn police(&mut self) {
        let unknown = !self.update.complete && self.services.manifest_objects().policies.is_empty();
        if !self.told || self.rooms.config.manifests.is_none() || (unknown && !self.policies.have_told()) {
            return;
        }
        let pods = policies::pods(&self.desired, &self.observed);
        let Some(world) = self.policies.news(self.services.manifest_objects(), pods) else { return };
        if let Err(error) = self.rooms.proxy.tell_policies(world) {
            tracing::error!(error = %crate::obs::chain(&error), "NetworkPolicies are not followed any more");
        }
    }

    /// Before the source has spoken nothing is denied a name.
    fn name(&mut self) -> Option<i64> {
        let dns = self.rooms.dns.as_ref().filter(|_| self.told)?;
        self.names.tell(&self.rooms, dns, &self.services)
    }

    fn dispatch(&mut self, action: Action) {
        tracing::debug!(action = %action, "begin");
        observe::dispatched(&mut self.observed, &self.desired, &action);
        if let Action::End { uid, ending } = &action {
            views::log_ending(&self.observed, uid, ending);
            return;
        }
        let Some(job) = self.job(action) else { return };
        let (rooms, sender) = (Arc::clone(&self.rooms), self.sender.clone());
        let pool = if matches!(job.action, Action::Pull { .. }) { &self.pullers } else { &self.workers };
        pool.submit(move || {
            let outcome = apply::run(&rooms, &job);
            // A planner that has left plans again at the next start.
            let _ = sender.send(Message::Report { action: job.action, outcome });
        });
    }

    fn job(&self, action: Action) -> Option<Job> {
        let state = self.observed.pods.get(action.uid())?;
        let addresses = match &state.sandbox {
            _ if state.pod.as_deref().is_some_and(|p| p.spec.host_network) => self.rooms.node_ips.clone(),
            Sandbox::Up { addresses, .. } => addresses.clone(),
            Sandbox::None | Sandbox::Dead => Vec::new(),
        };
        let mut attempts = Vec::new();
        for (container, known) in &state.containers {
            let left = |number: u32, id: &ContainerId, image: &str| Left {
                container: container.clone(),
                number,
                id: id.clone(),
                image: image.to_owned(),
            };
            attempts.extend(known.attempts.iter().map(|a| left(a.number, &a.id, &a.image)));
            attempts.extend(known.stale.iter().map(|(number, id)| left(*number, id, "")));
        }
        Some(Job {
            namespace: state.namespace.clone(),
            name: state.name.clone(),
            pod: state.pod.clone(),
            raw: self.sources.get(action.uid()).map(|source| Arc::clone(&source.raw)),
            configs: Arc::clone(&self.update.configs),
            addresses,
            attempts,
            services: match (&action, state.pod.as_deref()) {
                (Action::Create { .. }, Some(pod)) => services::env::of(pod, self.services.services()),
                _ => Vec::new(),
            },
            action,
        })
    }

    /// One write at a time, of the newest.
    fn save(&mut self) {
        if self.saving {
            return;
        }
        let Some(addresses) = self.unsaved.take() else { return };
        self.saving = true;
        let (rooms, sender) = (Arc::clone(&self.rooms), self.sender.clone());
        self.workers.submit(move || {
            let saved = rooms.save_addresses(&addresses);
            let failed = saved.err().map(|error| (addresses, crate::obs::chain(&error).to_string()));
            // A planner that has left reads what is stored at the next start.
            let _ = sender.send(Message::Saved { failed });
        });
    }

    fn answer_stops(&mut self) {
        let quiet = |state: &super::model::PodState| {
            let ended = state.ending.is_some() && state.sandbox == Sandbox::None;
            let unrecorded = state.containers.values().flat_map(|c| &c.attempts).any(|a| a.lives());
            !state.busy && (ended || state.admitted_at == 0) && !unrecorded
        };
        if self.stopping.is_empty() || !self.observed.pods.values().all(quiet) {
            return;
        }
        let report = StopReport { stopped: self.observed.pods.len(), left: Vec::new() };
        for waiting in self.stopping.drain(..) {
            let _ = waiting.send(report.clone());
        }
    }

    /// Once, after the first pods are on their way: what no record names may go.
    fn sweep(&mut self) {
        if std::mem::replace(&mut self.swept, true) {
            return;
        }
        let containers = self.observed.pods.values().flat_map(|p| p.containers.values());
        let known: std::collections::BTreeSet<ContainerId> = containers
            .flat_map(|c| c.attempts.iter().map(|a| a.id.clone()).chain(c.stale.iter().map(|(_, id)| id.clone())))
            .collect();
        let begun = self.started;
        let rooms = Arc::clone(&self.rooms);
        self.workers.submit(move || apply::sweep_containers(&rooms, &known, begun));
    }

    /// Now and then, also on an idle node: the store's reserve, and what monitors say when asked
    /// (a relist; events alone would make one that is missed last for ever).
    fn tend(&mut self) {
        let now = clock::boot_nanos();
        if now - self.tended < TEND {
            return;
        }
        self.tended = now;
        observe::listen_again(&mut self.observed);
        self.save();
        let (rooms, sender) = (Arc::clone(&self.rooms), self.sender.clone());
        self.workers.submit(move || {
            match rooms.net.severed() {
                Ok(pods) if pods.is_empty() => {}
                // Nobody listens any more: the agent leaves.
                Ok(pods) => drop(sender.send(Message::Severed(pods))),
                Err(error) => tracing::warn!(error = %crate::obs::chain(&error), "the pods' links cannot be looked at"),
            }
            if let Err(error) = rooms.store.tend() {
                tracing::warn!(error = %crate::obs::chain(&error), "the store's reserve is not whole");
            }
        });
    }
}
