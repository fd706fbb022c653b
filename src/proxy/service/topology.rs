//! Which endpoints a port's connections may go to (kube-proxy's CategorizeEndpoints).
//!
//! Cluster: the ready ones, of this node or zone where *every* ready endpoint carries such a hint
//! and one of them names us; where none is ready, those that serve while they end. Local: the
//! ready ones on this node, else those that end here; topology has no say.
//!
//! Invariant: an address and port stands in a list once, however many slices name it (an endpoint
//! that moves between slices is in both for a while); the lists are sorted.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use super::slice::{Backend, Digest, Nodes, Place, State, Zones};
use super::{Name, address};
use crate::proxy::model::{Endpoint, L4, ServicePort, Skipped};

/// Ports times endpoints of one Service beyond which it is not served: what a hostile pair of
/// objects could otherwise make of a few megabytes of names and addresses.
const MOST: usize = 1 << 20;

/// Slices by the names of their ports: a Service of 10,000 ports reads each slice once.
type Sources<'a> = BTreeMap<&'a str, Vec<(&'a Digest, L4, u16)>>;

fn sources<'a>(slices: impl Iterator<Item = &'a Digest>) -> Sources<'a> {
    let mut sources = Sources::new();
    for digest in slices {
        for (name, protocol, number) in &digest.ports {
            sources.entry(name).or_default().push((digest, *protocol, *number));
        }
    }
    sources
}

/// The slices that serve a port, and by which number.
fn of_port<'a>(sources: &Sources<'a>, port: &ServicePort) -> Vec<(&'a Digest, u16)> {
    let family = port.cluster_ip.map(address::family);
    let named = sources.get(port.name.port.as_str()).into_iter().flatten();
    named.filter(|(d, protocol, _)| Some(d.family) == family && *protocol == port.protocol).map(|(d, _, n)| (*d, *n)).collect()
}

fn size(sources: &Sources<'_>, ports: &[ServicePort]) -> usize {
    ports.iter().flat_map(|port| of_port(sources, port)).map(|(digest, _)| digest.endpoints.len()).sum()
}

/// Fills in the endpoint lists. Linear in ports, slices' ports and endpoints, but for sorting.
pub fn fill<'a>(ports: &mut [ServicePort], slices: impl Iterator<Item = &'a Digest>, place: &Place) {
    let sources = sources(slices);
    if size(&sources, ports) > MOST {
        return;
    }
    for port in ports {
        let candidates = merged(&of_port(&sources, port));
        categorize(port, &candidates, place);
    }
}

/// Names it where [`fill`] gives up.
pub fn too_much<'a>(name: &Name, ports: &[ServicePort], slices: impl Iterator<Item = &'a Digest>) -> Option<Skipped> {
    let size = size(&sources(slices), ports);
    let why = format!(
        "its ports have {size} endpoints together, more than {MOST}, so they have none here: split it into several Services"
    );
    (size > MOST).then(|| Skipped { object: format!("Service {name}"), field: "spec.ports".to_owned(), why })
}

struct Candidate<'a> {
    endpoint: Endpoint,
    state: State,
    nodes: Nodes,
    zones: std::borrow::Cow<'a, Zones>,
}

/// Of several mentions the best counts, so that the order of slices does not.
fn merged<'a>(found: &[(&'a Digest, u16)]) -> Vec<Candidate<'a>> {
    let mut all: Vec<(u16, &Backend)> = found.iter().flat_map(|(d, number)| d.endpoints.iter().map(|e| (*number, e))).collect();
    all.sort_by_key(|(number, e)| (e.ip, *number));
    let mut unique: Vec<Candidate<'a>> = Vec::with_capacity(all.len());
    for (port, backend) in all {
        match unique.last_mut().filter(|last| (last.endpoint.ip, last.endpoint.port) == (backend.ip, port)) {
            Some(last) => {
                last.endpoint.local |= backend.local;
                last.state = last.state.max(backend.state);
                last.nodes = last.nodes.max(backend.nodes);
                last.zones = std::borrow::Cow::Owned(last.zones.join(&backend.zones));
            }
            None => unique.push(Candidate {
                endpoint: Endpoint { ip: backend.ip, port, local: backend.local },
                state: backend.state,
                nodes: backend.nodes,
                zones: std::borrow::Cow::Borrowed(&backend.zones),
            }),
        }
    }
    unique
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Anywhere,
    SameNode,
    SameZone,
}

fn mode(candidates: &[Candidate<'_>], place: &Place) -> Mode {
    let ready = || candidates.iter().filter(|c| c.state == State::Ready);
    // Where none is ready "every one" holds, and "one of them" does not.
    if ready().all(|c| c.nodes != Nodes::None) && ready().any(|c| c.nodes == Nodes::Here) {
        Mode::SameNode
    } else if ready().all(|c| *c.zones != Zones::None) && ready().any(|c| place.is_here(&c.zones)) {
        Mode::SameZone
    } else {
        Mode::Anywhere
    }
}

fn categorize(port: &mut ServicePort, candidates: &[Candidate<'_>], place: &Place) {
    let pick =
        |chosen: &dyn Fn(&Candidate<'_>) -> bool| candidates.iter().filter(|c| chosen(c)).map(|c| c.endpoint).collect::<Vec<_>>();
    port.has_any = !candidates.is_empty();
    if let Some(check) = &mut port.health_check_node_port {
        check.ready = candidates.iter().filter(|c| c.endpoint.local && c.state == State::Ready).map(|c| c.endpoint.ip).collect();
        check.ready.dedup();
    }
    if port.uses_cluster() {
        let mode = mode(candidates, place);
        port.cluster = pick(&|c| {
            c.state == State::Ready
                && match mode {
                    Mode::Anywhere => true,
                    Mode::SameNode => c.nodes == Nodes::Here,
                    Mode::SameZone => place.is_here(&c.zones),
                }
        });
        if port.cluster.is_empty() {
            port.cluster = pick(&|c| c.state == State::Ending);
        }
    }
    if port.uses_local() {
        port.local = pick(&|c| c.endpoint.local && c.state == State::Ready);
        if port.local.is_empty() {
            port.local = pick(&|c| c.endpoint.local && c.state == State::Ending);
        }
    }
}
