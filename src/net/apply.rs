//! Carries one action of the plan out. Decides nothing.
//!
//! Invariant: what outlives us on the host is journalled before it is made; each action may be
//! carried out again after any kill.

use std::path::Path;

use super::model::NetError;
use super::observe::POD_LINK;
use super::plan::{Action, Names};
use crate::store::effects::{Effect, Effects};
use crate::sys::netlink::Socket;
use crate::sys::rtnl::{self, Change};
use crate::sys::{failpoint, netns, sysctl};

/// `netns_of` finds a pod's pinned namespace by its uid.
pub fn carry_out(
    socket: &mut Socket,
    names: &Names,
    effects: &Effects,
    netns_of: &impl Fn(&str) -> Option<std::path::PathBuf>,
    action: &Action,
) -> Result<(), NetError> {
    let bridge = names.bridge.as_str();
    let kernel = |operation| move |source| NetError::Kernel { operation, object: bridge.to_owned(), source };
    match action {
        Action::CreateBridge { mac, mtu } => {
            let effect = Effect::Link { name: bridge.to_owned() };
            journal(effects.intent(&effect))?;
            reached("net.ensure.intent", bridge)?;
            rtnl::create_bridge(socket, bridge, *mac).map_err(kernel("make the bridge"))?;
            reached("net.ensure.bridge", bridge)?;
            if let Some(link) = rtnl::link(socket, bridge).map_err(kernel("look at the bridge"))? {
                let up = Change { alias: Some(&names.bridge_alias), up: true, mtu: Some(*mtu), ..Change::default() };
                rtnl::change(socket, bridge, link.index, &up).map_err(kernel("bring up the bridge"))?;
            }
            journal(effects.done(&effect))?;
            tracing::info!(bridge, mtu, "made the pods' bridge");
        }
        Action::SetBridge { index, mtu, mac } => {
            let change = Change { alias: Some(&names.bridge_alias), up: true, mtu: *mtu, mac: *mac, ..Change::default() };
            rtnl::change(socket, bridge, *index, &change).map_err(kernel("change the bridge"))?;
            journal(effects.done(&Effect::Link { name: bridge.to_owned() }))?;
        }
        Action::AddAddress { index, ip, prefix } => {
            rtnl::add_address(socket, *index, *ip, *prefix).map_err(kernel("give an address to"))?;
        }
        Action::DeleteAddress { index, ip, prefix } => {
            rtnl::delete_address(socket, *index, *ip, *prefix).map_err(kernel("take an address from"))?;
            tracing::info!(bridge, %ip, prefix, "took an address that is not the gateway's");
        }
        Action::Sysctl { name, value, was } => {
            let effect = was.as_ref().map(|was| Effect::Sysctl { name: name.clone(), was: was.clone() });
            if let Some(effect) = &effect {
                journal(effects.intent(effect))?;
                reached("net.ensure.sysctl", name)?;
            }
            let set = |source| NetError::Io { operation: "set kernel parameter", object: format!("{name} to {value}"), source };
            sysctl::write(name, value).map_err(set)?;
            if let (Some(effect), Some(was)) = (&effect, was) {
                journal(effects.done(effect))?;
                tracing::info!(name, was, value, "set a kernel parameter; uninstall puts it back");
            }
        }
        Action::SetPort { uid, link, index, adopt, port, mtu } => {
            if let Some((master, mac)) = adopt {
                let adopted = Change { master: Some(*master), ..Change::default() };
                rtnl::change(socket, link, *index, &adopted).map_err(kernel("make a port of"))?;
                rtnl::pin_mac(socket, *index, *mac).map_err(kernel("pin a pod's link-layer address on"))?;
            }
            let change = Change { up: true, port: Some(*port), mtu: *mtu, ..Change::default() };
            rtnl::change(socket, link, *index, &change).map_err(kernel("change a port of"))?;
            if let (Some(mtu), Some(path)) = (mtu, netns_of(uid)) {
                set_pod_mtu(&path, *mtu)?;
            }
        }
        Action::SetNeighbour { index, ip, mac } => {
            rtnl::set_neighbour(socket, *index, *ip, *mac).map_err(kernel("set a neighbour on"))?;
        }
        Action::DeleteNeighbour { index, ip } => {
            rtnl::delete_neighbour(socket, *index, *ip).map_err(kernel("delete a neighbour from"))?;
        }
    }
    Ok(())
}

fn set_pod_mtu(path: &Path, mtu: u32) -> Result<(), NetError> {
    let io = |source| NetError::Io { operation: "enter network namespace", object: path.display().to_string(), source };
    let kernel = |source| NetError::Kernel { operation: "set the MTU in", object: path.display().to_string(), source };
    let netns = netns::open(path).map_err(io)?;
    let mut socket = netns::within(&netns, rtnl::open).map_err(io)?.map_err(kernel)?;
    match rtnl::link(&mut socket, POD_LINK).map_err(kernel)? {
        Some(link) => {
            rtnl::change(&mut socket, POD_LINK, link.index, &Change { mtu: Some(mtu), ..Change::default() }).map_err(kernel)
        }
        None => Ok(()),
    }
}

pub fn journal<T>(result: Result<T, crate::store::StoreError>) -> Result<T, NetError> {
    result.map_err(|source| NetError::Store { operation: "journal the network's effects", source })
}

/// A named place at which a test may cut us off.
pub fn reached(place: &'static str, object: &str) -> Result<(), NetError> {
    failpoint::hit(place).map_err(|source| NetError::Io { operation: place, object: object.to_owned(), source })
}
