//! The thread that owns our tables: what is wanted comes to it as messages, and nobody else writes.
//!
//! ```text
//! attach, services, policies ──order──> owner ──change / bring──> kernel
//! kernel ──notification (not ours, our table; or some were lost)──> owner: doubt, bring
//! clock ──refused elements, what failed──> owner: bring again
//! ```
//!
//! Invariants: an order is answered after the kernel has acknowledged what it asked for. Until
//! somebody has said which Services and policies there are, those that an earlier agent left in the
//! kernel stay. A change of our table by somebody else is undone within a second and said once a minute
//! at most. A failure is said when it begins and when it ends.

mod account;
mod flows;
mod node;
mod policies;
mod role;
mod watch;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use super::apply::{ApplyError, Keeper};
use super::conntrack;
use super::lacks::{Feature, Lack};
use super::layout::frame::{HAIRPIN, HOST_IP_PORTS, HOST_PORTS, NODE_PORT_IPS};
use super::layout::{Ground, Layout, NodePorts};
use super::mode::Role;
use super::model::{HealthCheck, HostPortWant, NodeFacts, ServicePort, ServicePortName};
use super::observe::Foreign;
use super::policy::World;
use super::serve::Check;
use super::serve::record::Record;
use super::service::Change;
use super::table::changes::Changes;
use super::table::ir::{Family, Table};
use super::table::needs::Need;
use super::{Options, ProxyConfig, ProxyError};
use crate::store::effects::{Effect, Effects};
use crate::sys::chain::chain;
use crate::sys::netlink::Socket;
use crate::sys::nftables;
use policies::Policies;

/// A look at who else is there, and at all of it where no notification tells of changes.
const EVERY: Duration = Duration::from_secs(20);
/// Somebody who changes our table again and again is answered this often.
const RESTORE: Duration = Duration::from_secs(1);
/// What pods hold, and where NodePorts are: wanted in full from the start.
const FROM_THE_START: [&str; 4] = [HOST_PORTS, HOST_IP_PORTS, HAIRPIN, NODE_PORT_IPS];

/// What a pod of this node holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodPorts {
    pub addresses: Vec<IpAddr>,
    pub host_ports: Vec<HostPortWant>,
}

/// Services of one family that go, and that come or take another's place.
#[derive(Clone, Debug, Default)]
pub struct ServiceChange {
    pub gone: Vec<ServicePortName>,
    pub come: Vec<ServicePort>,
}

impl ServiceChange {
    /// What Services' changes are in each family, IPv4's first.
    pub fn of(changes: Vec<Change>) -> (ServiceChange, ServiceChange) {
        let (mut v4, mut v6) = (ServiceChange::default(), ServiceChange::default());
        for Change { before, after, .. } in changes {
            for (v4_too, change) in [(true, &mut v4), (false, &mut v6)] {
                let is_of = |port: &&ServicePort| port.is_v4() == Some(v4_too);
                change.gone.extend(before.iter().filter(is_of).map(|port| port.name.clone()));
                change.come.extend(after.iter().filter(is_of).cloned());
            }
        }
        (v4, v6)
    }

    pub fn is_empty(&self) -> bool {
        self.gone.is_empty() && self.come.is_empty()
    }
}

/// What is asked of the owner.
pub(super) enum Wish {
    /// All pods that hold anything; nothing is written yet.
    Pods(BTreeMap<String, PodPorts>),
    Pod(String, Option<PodPorts>),
    Services {
        v4: ServiceChange,
        v6: ServiceChange,
    },
    Node {
        node: NodeFacts,
        service_cidrs: Vec<super::model::Cidr>,
    },
    /// NetworkPolicies and all that they speak of.
    Policies(World),
    /// Tell what is wanted.
    Tables(Sender<Vec<Table>>),
    /// Compare with the kernel and mend.
    Ensure,
    /// The same, where anything can have changed.
    Tend,
    Remove,
}

pub(super) struct Order {
    pub wish: Wish,
    /// When it was asked for.
    pub since: Instant,
    pub answer: Sender<Result<(), ProxyError>>,
}

/// What others may read.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub lacks: BTreeMap<Feature, Lack>,
    pub foreign: Foreign,
    /// By table: elements that the kernel refuses.
    pub refused: Vec<String>,
    pub role: Role,
    pub record: Record,
    /// Services that load balancers ask for, and where.
    pub checks: BTreeMap<super::service::Name, Check>,
    /// Where NodePorts are, a family each.
    pub node_ports: Vec<(Family, NodePorts)>,
}

struct OfFamily {
    family: Family,
    layout: Layout,
    /// Chains and sets of policies.
    policy: Table,
    /// None until the first use, and where there is no nf_tables.
    keeper: Option<Keeper>,
    /// What the kernel cannot do.
    needs: BTreeSet<Need>,
    /// We have seen it whole: missing it now is somebody's doing.
    was_whole: bool,
    failure: Option<Failure>,
    /// Services that somebody else serves.
    waiting: BTreeMap<ServicePortName, ServicePort>,
}

impl OfFamily {
    fn is_v4(&self) -> bool {
        self.family == Family::Ip
    }
}

struct Failure {
    said: String,
    tries: u32,
    again: Instant,
}

pub(super) struct Owner {
    config: ProxyConfig,
    options: Options,
    role: Role,
    /// Tells the servers that what is shared is another.
    told: Arc<EventFd>,
    /// Of each family's ports (`v4`) that have one.
    checks: BTreeMap<(bool, ServicePortName), HealthCheck>,
    /// Hears of this host's addresses and routes.
    moves: Option<Socket>,
    /// When to look at the addresses again.
    moved: Option<Instant>,
    /// Somebody has made something of a kube-proxy's.
    glance: bool,
    /// Somebody asked us to remove all, and for nothing since.
    removed: bool,
    tuned: bool,
    effects: Arc<Effects>,
    shared: Arc<Mutex<Shared>>,
    families: Vec<OfFamily>,
    pods: BTreeMap<String, PodPorts>,
    /// Somebody has said which Services there are.
    services_known: bool,
    policies: Policies,
    /// Nobody has asked for anything since we removed all.
    idle: bool,
    notices: Option<Socket>,
    /// Of all tables, without our own transactions.
    generation: u32,
    /// All of it, by [`Wish::Tend`].
    compared: Option<Instant>,
    restored: Option<Instant>,
    said: Option<Instant>,
    touched: Touched,
}

#[derive(Default)]
struct Touched {
    families: BTreeSet<Family>,
    by: String,
}

impl Owner {
    pub fn new(
        config: ProxyConfig,
        options: Options,
        effects: Arc<Effects>,
        shared: Arc<Mutex<Shared>>,
        told: Arc<EventFd>,
    ) -> Owner {
        let families = [Family::Ip, Family::Ip6]
            .into_iter()
            .filter(|family| config.node.pod_cidrs.iter().any(|c| c.is_v4() == (*family == Family::Ip)))
            .map(|family| OfFamily {
                family,
                layout: Layout::new(Ground::of(family, &config.table, &config.node, &config.service_cidrs, true)),
                policy: Table::new(family, &config.table),
                keeper: None,
                needs: BTreeSet::new(),
                was_whole: false,
                failure: None,
                waiting: BTreeMap::new(),
            })
            .collect::<Vec<_>>();
        // Before anything is written, so that nothing that happens afterwards is missed.
        let notices = match nftables::listen() {
            Ok(socket) => Some(socket),
            Err(e) => {
                tracing::warn!(error = %chain(&e), "no word of changes to our nftables tables; they are seen within 20 s");
                None
            }
        };
        let moves = options.follow.is_some().then(node::listen).flatten();
        Owner {
            config,
            options,
            role: Role::Unknown,
            told,
            checks: BTreeMap::new(),
            moves,
            // What has changed before we listened is seen at the first turn.
            moved: Some(Instant::now()),
            glance: false,
            removed: false,
            tuned: false,
            effects,
            shared,
            families,
            pods: BTreeMap::new(),
            services_known: false,
            policies: Policies::default(),
            idle: true,
            notices,
            generation: 0,
            compared: None,
            restored: None,
            said: None,
            touched: Touched::default(),
        }
    }

    /// Until the sender of orders is gone.
    pub fn run(mut self, orders: &Receiver<Order>, wake: &EventFd) {
        let mut look = Instant::now() + EVERY;
        let families: Vec<bool> = self.families.iter().map(OfFamily::is_v4).collect();
        self.shared().record = Record::of(families.into_iter());
        self.begin();
        loop {
            if let Err(e) = self.wait(wake, look) {
                tracing::error!(error = %e, "the proxy ends");
                return;
            }
            loop {
                match orders.try_recv() {
                    Ok(Order { wish, since, answer }) => {
                        let result = self.carry_out(wish, since);
                        // Whoever asked may have gone.
                        drop(answer.send(result));
                    }
                    Err(std::sync::mpsc::TryRecvError::Empty) => break,
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
                }
            }
            self.hear();
            self.restore();
            self.retry();
            self.hear_moves();
            if self.moved.is_some_and(|at| at <= Instant::now()) {
                self.moved = None;
                self.follow();
            }
            if std::mem::take(&mut self.glance) {
                self.take_role();
            }
            if look <= Instant::now() {
                look = Instant::now() + EVERY;
                self.look();
            }
        }
    }

    fn wait(&self, wake: &EventFd, look: Instant) -> Result<(), Errno> {
        let restore = self.restored.filter(|_| !self.touched.families.is_empty()).map(|at| at + RESTORE);
        let keepers = self.families.iter().filter_map(|f| f.keeper.as_ref()?.next());
        let failures = self.families.iter().filter_map(|f| f.failure.as_ref().map(|f| f.again));
        let next = keepers.chain(failures).chain(restore).chain(self.moved).fold(look, Instant::min);
        let left = next.saturating_duration_since(Instant::now());
        // A little too late rather than again and again too early.
        let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.notices.iter().chain(&self.moves).map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(e),
        }
        if fds.first().and_then(|fd| fd.revents()).is_some_and(|events| !events.is_empty()) {
            wake.read()?;
        }
        Ok(())
    }

    // ---- orders ----------------------------------------------------------------------------

    fn carry_out(&mut self, wish: Wish, since: Instant) -> Result<(), ProxyError> {
        self.removed &= matches!(wish, Wish::Tables(_) | Wish::Remove);
        match wish {
            Wish::Pods(pods) => {
                self.pods = pods;
                // Nothing was written: what is there is compared at the first use.
                (0..self.families.len()).for_each(|at| drop(self.lay_out_pods(at)));
                self.lay_out_policies();
                Ok(())
            }
            Wish::Pod(uid, pod) => self.pod(uid, pod),
            Wish::Services { v4, v6 } => self.services(v4, v6, since),
            Wish::Policies(world) => self.policies(world),
            Wish::Node { node, service_cidrs } => {
                (self.config.node, self.config.service_cidrs) = (node, service_cidrs);
                self.move_ground();
                if self.idle { Ok(()) } else { self.bring_all() }
            }
            Wish::Tables(give) => {
                // Whoever asked may have left.
                let _ = give.send(self.families.iter().map(OfFamily::wanted).collect());
                Ok(())
            }
            Wish::Ensure => {
                self.bring_all()?;
                self.look();
                Ok(())
            }
            Wish::Tend => self.tend(),
            Wish::Remove => self.remove(),
        }
    }

    fn lay_out_pods(&mut self, at: usize) -> Changes {
        let host_ports = self.pods.values().flat_map(|p| p.host_ports.iter().cloned()).collect();
        let addresses = self.pods.values().flat_map(|p| p.addresses.iter().copied()).collect();
        let Some(of) = self.families.get_mut(at) else { return Changes::default() };
        let mut changes = of.layout.open(host_ports);
        changes.elements.extend(of.layout.house(addresses).elements);
        changes
    }

    fn pod(&mut self, uid: String, pod: Option<PodPorts>) -> Result<(), ProxyError> {
        let before = match pod.clone() {
            Some(pod) => self.pods.insert(uid, pod),
            None => self.pods.remove(&uid),
        };
        let (before, after) = (before.unwrap_or_default(), pod.unwrap_or_default());
        let (was, policies) = self.lay_out_policies();
        let mut result = Ok(());
        for (at, policy) in policies.into_iter().enumerate() {
            let changes = policy.and(self.lay_out_pods(at));
            result = result.and(self.put_pod(at, &after, &changes));
        }
        let mut stale = BTreeSet::new();
        before.host_ports.iter().filter(|p| !after.host_ports.contains(p)).for_each(|p| conntrack::closed(p, &mut stale));
        after.host_ports.iter().filter(|p| !before.host_ports.contains(p)).for_each(|p| conntrack::opened(p, &mut stale));
        self.forget(&stale);
        self.end_denied(&was);
        result
    }

    fn put_pod(&mut self, at: usize, pod: &PodPorts, changes: &Changes) -> Result<(), ProxyError> {
        // Nothing is made in order to take a pod out of it.
        if *pod == PodPorts::default() && !self.is_there(at)? {
            return Ok(());
        }
        self.change(at, changes)?;
        let Some(of) = self.families.get(at) else { return Ok(()) };
        if !pod.host_ports.is_empty() && of.needs.contains(&Need::Fib) && self.cannot_serve() {
            return Err(self.lacking(of.family, &[Need::Fib, Need::Nat]));
        }
        // Half of an isolation is none.
        if of.needs.contains(&Need::Conntrack) && pod.addresses.iter().any(|ip| self.policies.isolate(*ip)) {
            return Err(self.lacking(of.family, &[Need::Conntrack]));
        }
        match of.keeper.as_ref().and_then(|k| k.has_refused(changes)) {
            Some(why) => Err(ProxyError::Refused { why }),
            None => Ok(()),
        }
    }

    fn is_there(&self, at: usize) -> Result<bool, ProxyError> {
        let Some(of) = self.families.get(at) else { return Ok(false) };
        if of.was_whole {
            return Ok(true);
        }
        let tables = match nftables::open().and_then(|mut socket| nftables::tables(&mut socket)) {
            Ok(tables) => tables,
            // Without nf_tables there is none.
            Err(e) if matches!(e.errno(), Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EINVAL) => Vec::new(),
            Err(source) => {
                let table = format!("{} {}", of.family.name(), self.config.table);
                return Err(ProxyError::Apply(ApplyError::Look { table, source }));
            }
        };
        Ok(tables.iter().any(|(family, name)| *family == of.family.number() && *name == self.config.table))
    }

    /// No family has host ports.
    fn cannot_serve(&self) -> bool {
        self.families.iter().all(|of| of.needs.contains(&Need::Fib) || of.needs.contains(&Need::Nat) || of.keeper.is_none())
    }

    fn lacking(&self, family: Family, needs: &[Need]) -> ProxyError {
        let shared = self.shared();
        let of = |l: &&Lack| match l.feature {
            Feature::NfTables => true,
            Feature::Table { family: f, need } => f == family && needs.contains(&need),
            Feature::Sctp | Feature::Forwarding => false,
        };
        match shared.lacks.values().find(of).cloned() {
            Some(lack) => ProxyError::Lack { lack },
            None => ProxyError::Ended,
        }
    }

    fn services(&mut self, mut v4: ServiceChange, mut v6: ServiceChange, since: Instant) -> Result<(), ProxyError> {
        let first = !std::mem::replace(&mut self.services_known, true);
        self.count_changes(&v4, &v6);
        if !self.role.serves() {
            return self.put_aside(v4, v6, first);
        }
        let mut stale = BTreeSet::new();
        let mut result = Ok(());
        for at in 0..self.families.len() {
            // No table is made in order to say that there are no Services.
            let none = first && [&v4, &v6].iter().all(|change| change.come.is_empty());
            if none && !self.is_there(at)? {
                continue;
            }
            let Some(of) = self.families.get_mut(at) else { continue };
            let ServiceChange { gone, come } = std::mem::take(if of.family == Family::Ip { &mut v4 } else { &mut v6 });
            if !first && gone.is_empty() && come.is_empty() {
                continue;
            }
            // At the first word nobody knows what was before: no flow is wrong for sure.
            if !first {
                come.iter().for_each(|new| conntrack::stale(of.layout.service(&new.name), Some(new), &mut stale));
                let stay: BTreeSet<&ServicePortName> = come.iter().map(|s| &s.name).collect();
                let ended = gone.iter().filter(|name| !stay.contains(name)).filter_map(|name| of.layout.service(name));
                ended.for_each(|old| conntrack::stale(Some(old), None, &mut stale));
            }
            let moved = self.account(at, &gone, &come);
            let Some(of) = self.families.get_mut(at) else { continue };
            let changes = match first {
                true => {
                    of.layout.load(come);
                    None
                }
                false => Some(of.layout.change(&gone, come)),
            };
            let done = match changes {
                Some(changes) => self.change(at, &changes),
                None => self.bring(at).map(|done| {
                    if done.acts == 0 {
                        self.forget_wrong(at)
                    }
                }),
            };
            if done.is_ok() && moved {
                self.programmed(at, since);
            }
            result = result.and(done);
        }
        self.forget(&stale);
        self.tune();
        result
    }

    fn remove(&mut self) -> Result<(), ProxyError> {
        (self.idle, self.removed) = (true, true);
        for of in &mut self.families {
            of.failure = None;
            of.waiting.clear();
            of.was_whole = false;
        }
        for family in [Family::Ip, Family::Ip6] {
            let effect = self.effect(family);
            if !self.effects.standing().map_err(ProxyError::Store)?.iter().any(|s| s.effect == effect) {
                continue;
            }
            let table = Table::new(family, &self.config.table);
            let kept = self.families.iter_mut().find(|of| of.family == family).and_then(|of| of.keeper.as_mut());
            match kept {
                Some(keeper) => keeper.remove(&table).map_err(ProxyError::Apply)?,
                None => Keeper::new().and_then(|mut keeper| keeper.remove(&table)).map_err(ProxyError::Apply)?,
            }
            self.effects.undone(&effect).map_err(ProxyError::Store)?;
        }
        self.pods.clear();
        (0..self.families.len()).for_each(|at| drop(self.lay_out_pods(at)));
        self.lay_out_policies();
        Ok(())
    }

    fn effect(&self, family: Family) -> Effect {
        Effect::NftTable { family: family.name().to_owned(), name: self.config.table.clone() }
    }
}

/// Keeps it, and says it once.
fn note(lacks: &mut BTreeMap<Feature, Lack>, lack: Lack) {
    lacks.entry(lack.feature).or_insert_with(|| {
        tracing::warn!(feature = ?lack.feature, said = lack.said, cure = lack.cure, "{}", lack.consequence);
        lack
    });
}
