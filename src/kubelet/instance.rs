//! One agent an instance: two agents of one instance name, each with its own root, would take
//! bridge, tables and cgroups from each other, and the pods' network with them.
//!
//! The name is held as an abstract socket: those are of a network namespace, as the bridge is, and
//! the kernel lets it go with the process. Invariant: only a holder that is root
//! and no container counts, so that neither another user nor a pod of the host's network keeps the
//! node from starting. unix(7).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use crate::sys::socket::{self, Peer};

/// Held for as long as the value lives.
#[derive(Debug)]
pub struct InstanceLock {
    _held: Option<UnixListener>,
}

#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    #[error(
        "instance {instance:?} is in use in this network namespace by process {pid} (another --root?): \
         stop that agent, or give this one another --instance"
    )]
    InUse { instance: String, pid: i32 },
    #[error("take the name of instance {instance:?}")]
    Io { instance: String, source: io::Error },
}

/// An agent that was just killed may have a child between fork and exec that still holds it.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(25);

pub fn take(instance: &str) -> Result<InstanceLock, InstanceError> {
    let failed = |source| InstanceError::Io { instance: instance.to_owned(), source };
    let name = SocketAddr::from_abstract_name(format!("coracle/instance/{instance}")).map_err(failed)?;
    let mut holder = None;
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        match UnixListener::bind_addr(&name) {
            Ok(held) => return Ok(InstanceLock { _held: Some(held) }),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            Err(e) => return Err(failed(e)),
        }
        // It may go between the two calls; its queue may be full.
        if let Ok(stream) = UnixStream::connect_addr(&name) {
            holder = Some(socket::peer(&stream).map_err(failed)?);
        }
    }
    match holder {
        Some(peer) if !may_be_an_agent(peer).map_err(failed)? => {
            tracing::warn!(
                instance,
                pid = peer.pid,
                uid = peer.uid,
                "a process that is no agent holds the name of this instance"
            );
            Ok(InstanceLock { _held: None })
        }
        holder => Err(InstanceError::InUse { instance: instance.to_owned(), pid: holder.map_or(0, |peer| peer.pid) }),
    }
}

/// Containers have a pid namespace of their own.
fn may_be_an_agent(peer: Peer) -> io::Result<bool> {
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid"));
    match namespace(&peer.pid.to_string()) {
        Ok(theirs) => Ok(peer.uid == 0 && theirs == namespace("self")?),
        // It has just ended.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_the_second_learns_who_it_is() {
        let name = format!("test-{}", std::process::id());
        let held = take(&name).unwrap();
        let error = take(&name).unwrap_err();
        let ours = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(&error, InstanceError::InUse { pid, .. } if *pid == ours), "{error}");
        assert!(error.to_string().contains("--instance"));
        drop(held);
        take(&name).unwrap();
    }
}
