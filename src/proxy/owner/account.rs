//! The owner's books: what came, what was done and how long it took, who waits, what load
//! balancers may be told.
//!
//! Invariant: a change costs what the ports that it names cost, however many others there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::{OfFamily, Owner, ServiceChange, Shared};
use crate::proxy::model::{HealthCheck, ServicePort, ServicePortName};
use crate::proxy::serve::Check;
use crate::proxy::serve::record::Now;
use crate::proxy::service::Name;
use crate::sys::clock;

pub(super) fn now() -> Now {
    Now { boot: clock::boot_nanos(), wall: clock::wall_nanos() }
}

/// How many ports of a family have a Local policy, endpoints elsewhere and none here: internal, external.
fn without_local(service: &ServicePort) -> (u64, u64) {
    let without = service.local.is_empty() && service.has_any;
    let external = service.external_local && service.is_external();
    (u64::from(without && service.internal_local), u64::from(without && external))
}

/// They differ in their endpoints at most.
fn is_same_but_for_endpoints(a: &ServicePort, b: &ServicePort) -> bool {
    let bare = |s: &ServicePort| ServicePort {
        cluster: Vec::new(),
        local: Vec::new(),
        has_any: false,
        health_check_node_port: s.health_check_node_port.as_ref().map(|h| HealthCheck { port: h.port, ready: Vec::new() }),
        ..s.clone()
    };
    bare(a) == bare(b)
}

fn has_same_endpoints(a: &ServicePort, b: &ServicePort) -> bool {
    (&a.cluster, &a.local, a.has_any, &a.health_check_node_port) == (&b.cluster, &b.local, b.has_any, &b.health_check_node_port)
}

impl Owner {
    /// Changes that came, counted by Service as kube-proxy counts objects.
    pub(super) fn count_changes(&mut self, v4: &ServiceChange, v6: &ServiceChange) {
        let (mut services, mut endpoints) = (BTreeSet::new(), BTreeSet::new());
        let name = |of: &ServicePortName| Name::new(&of.namespace, &of.service);
        for of in &self.families {
            let change = if of.is_v4() { v4 } else { v6 };
            let old = |name: &ServicePortName| of.layout.service(name).or_else(|| of.waiting.get(name));
            for new in &change.come {
                let old = old(&new.name);
                if old.is_none_or(|old| !is_same_but_for_endpoints(old, new)) {
                    services.insert(name(&new.name));
                }
                if old.map_or(new.has_any, |old| !has_same_endpoints(old, new)) {
                    endpoints.insert(name(&new.name));
                }
            }
            let come: BTreeSet<&ServicePortName> = change.come.iter().map(|s| &s.name).collect();
            services.extend(change.gone.iter().filter(|gone| !come.contains(gone) && old(gone).is_some()).map(name));
        }
        let serves = self.role.serves();
        let now = now();
        let touched: Vec<bool> = self
            .families
            .iter()
            .map(OfFamily::is_v4)
            .filter(|is_v4| if *is_v4 { !v4.is_empty() } else { !v6.is_empty() })
            .collect();
        let mut shared = self.shared();
        shared.record.services.total += services.len() as u64;
        shared.record.endpoints.total += endpoints.len() as u64;
        if serves {
            shared.record.services.pending += services.len() as u64;
            shared.record.endpoints.pending += endpoints.len() as u64;
            touched.into_iter().for_each(|is_v4| shared.record.queued(is_v4, now));
        }
    }

    /// Before the layout of a family takes the change in. True: endpoints are among it.
    pub(super) fn account(&mut self, at: usize, gone: &[ServicePortName], come: &[ServicePort]) -> bool {
        let Some(of) = self.families.get(at) else { return false };
        let v4 = of.is_v4();
        let mut checks = BTreeMap::new();
        let (mut internal, mut external, mut moved) = (0_i64, 0_i64, false);
        let mut tally = |service: &ServicePort, sign: i64| {
            let (i, e) = without_local(service);
            internal += sign * i as i64;
            external += sign * e as i64;
        };
        let names: BTreeSet<&ServicePortName> = gone.iter().chain(come.iter().map(|s| &s.name)).collect();
        for name in names {
            if let Some(old) = of.layout.service(name) {
                tally(old, -1);
                if old.health_check_node_port.is_some() {
                    checks.insert(name.clone(), None);
                }
            }
        }
        for new in come.iter().filter(|s| s.is_v4() == Some(v4)) {
            tally(new, 1);
            moved |= of.layout.service(&new.name).map_or(new.has_any, |old| !has_same_endpoints(old, new));
            if let Some(check) = &new.health_check_node_port {
                checks.insert(new.name.clone(), Some(check.clone()));
            }
        }
        if let Some(of) = self.shared().record.family(v4) {
            of.no_local_internal = of.no_local_internal.saturating_add_signed(internal);
            of.no_local_external = of.no_local_external.saturating_add_signed(external);
        }
        if !checks.is_empty() {
            for (name, check) in checks {
                match check {
                    Some(check) => drop(self.checks.insert((v4, name), check)),
                    None => drop(self.checks.remove(&(v4, name))),
                }
            }
            self.tell_checks();
        }
        moved
    }

    /// All of it anew, when Services were taken up or given up.
    pub(super) fn count_all(&mut self) {
        self.checks.clear();
        let mut counts = Vec::new();
        for of in &self.families {
            let (mut internal, mut external) = (0, 0);
            for service in of.layout.services() {
                let (i, e) = without_local(service);
                (internal, external) = (internal + i, external + e);
                if let Some(check) = &service.health_check_node_port {
                    self.checks.insert((of.is_v4(), service.name.clone()), check.clone());
                }
            }
            counts.push((of.is_v4(), internal, external));
        }
        let mut shared = self.shared();
        for (v4, internal, external) in counts {
            if let Some(of) = shared.record.family(v4) {
                (of.no_local_internal, of.no_local_external) = (internal, external);
            }
        }
        drop(shared);
        self.tell_checks();
    }

    /// Tells the servers which Services load balancers ask for. A pod of two families counts once.
    fn tell_checks(&self) {
        let mut ready: BTreeMap<Name, (u16, [BTreeSet<IpAddr>; 2])> = BTreeMap::new();
        for ((v4, name), check) in &self.checks {
            let (_, [of4, of6]) =
                ready.entry(Name::new(&name.namespace, &name.service)).or_insert_with(|| (check.port, Default::default()));
            if *v4 { of4 } else { of6 }.extend(&check.ready);
        }
        let checks = ready.into_iter().map(|(name, (port, [of4, of6]))| (name, Check { port, ready: of4.len().max(of6.len()) }));
        let checks = checks.collect();
        self.publish(|shared| shared.checks = checks);
    }

    /// Tells the servers where NodePorts are.
    pub(super) fn tell_where(&self) {
        let node_ports: Vec<_> = self.families.iter().map(|of| (of.family, of.layout.ground().node_ports.clone())).collect();
        if self.shared().node_ports != node_ports {
            self.publish(|shared| shared.node_ports = node_ports);
        }
    }

    fn publish(&self, change: impl FnOnce(&mut Shared)) {
        change(&mut self.shared());
        if let Err(e) = self.told.write(1) {
            // Its counter is full: it is readable then anyway.
            tracing::debug!(error = %e, "cannot wake the proxy's servers");
        }
    }

    /// Nothing of what was asked for is to be written.
    pub(super) fn settled(&self, at: usize) {
        if let Some(v4) = self.families.get(at).map(OfFamily::is_v4) {
            self.shared().record.settled(v4);
        }
    }

    /// A family's table is as it should be, or cannot be.
    pub(super) fn wrote(&self, at: usize, full: bool, begun: Instant, done: bool) {
        let Some(v4) = self.families.get(at).map(OfFamily::is_v4) else { return };
        let now = now();
        let cleanup = self.families.get(at).and_then(|of| of.keeper.as_ref()).map_or(0, |k| k.left_over());
        let mut shared = self.shared();
        match done {
            true => shared.record.synced(v4, full, begun.elapsed().as_secs_f64(), now),
            false => shared.record.failed(v4, now),
        }
        if let Some(of) = shared.record.family(v4) {
            of.cleanup_failures = of.cleanup_failures.max(cleanup);
        }
    }

    /// Endpoints that were told at `since` are in the kernel.
    pub(super) fn programmed(&self, at: usize, since: Instant) {
        let Some(v4) = self.families.get(at).map(OfFamily::is_v4) else { return };
        if let Some(of) = self.shared().record.family(v4) {
            of.programming.observe(since.elapsed().as_secs_f64());
        }
    }

    pub(super) fn forgotten(&self, v4: bool, flows: usize, took: Duration) {
        if let Some(of) = self.shared().record.family(v4) {
            of.forgotten += flows as u64;
            of.forgetting.observe(took.as_secs_f64());
        }
    }
}
