//! The pod's namespaces, made in one forked step: what is set once for all containers is set here.
//!
//! Invariant: the step changes nothing of the monitor's own; a failure leaves no namespace behind
//! (they live in the child and in the descriptors it sends).
//!
//! Sources: namespaces(7); containerd 2.2 pkg/cri sandbox_run_linux.go for the defaults
//! (unprivileged ports from 0, ping for all groups; neither with the host's network).

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};

use super::wire::{Failure, Kind};
use crate::runtime::layout::Sandbox;
use crate::sys::{process, seqpacket};

/// Kinds (`net`, `ipc`, `uts`) and a descriptor for each.
pub type Namespaces = (Vec<String>, Vec<OwnedFd>);

pub fn make(sandbox: &Sandbox) -> Result<Namespaces, Failure> {
    let failed = |e: io::Error| Failure::new(Kind::Io, format!("making the pod's namespaces: {e}"));
    let (ours, theirs) = seqpacket::pair().map_err(failed)?;
    let child = match process::fork().map_err(failed)? {
        process::Side::Child => {
            let code = i32::from(child(sandbox, &theirs).is_err());
            process::exit_child(code)
        }
        process::Side::Parent { child } => child,
    };
    drop(theirs);
    // A namespace takes a millisecond; the monitor has nothing else to do before the pod has any.
    let answered = seqpacket::wait(ours.as_fd(), Some(Duration::from_secs(20))).map_err(failed)?;
    let mut buffer = [0; 8192];
    let received =
        if answered { seqpacket::receive(ours.as_fd(), &mut buffer).map_err(failed)? } else { seqpacket::Received::Nothing };
    process::kill_child(child);
    match received {
        seqpacket::Received::Message { len, fds } => {
            let answer: Result<Vec<String>, Failure> = serde_json::from_slice(buffer.get(..len).unwrap_or_default())
                .unwrap_or_else(|e| Err(Failure::new(Kind::Io, e.to_string())));
            Ok((answer?, fds))
        }
        _ => Err(Failure::new(Kind::HelperDied, "the step that makes namespaces died or did not end within 20 s")),
    }
}

fn child(sandbox: &Sandbox, channel: &OwnedFd) -> io::Result<()> {
    process::set_name(super::helper::NAME)?;
    process::close_all_but(&[channel.as_fd()])?;
    let (answer, fds) = match make_here(sandbox) {
        Ok((kinds, fds)) => (Ok(kinds), fds),
        Err(failure) => (Err(failure), Vec::new()),
    };
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    seqpacket::send(channel.as_fd(), &serde_json::to_vec::<Result<Vec<String>, Failure>>(&answer)?, &fds)
}

fn make_here(sandbox: &Sandbox) -> Result<Namespaces, Failure> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: io::Error| Failure::new(Kind::Refused, format!("{what}: {e}"))
    };
    let mut flags = CloneFlags::empty();
    let mut kinds = Vec::new();
    // The host's network goes with the host's name, as containerd has it.
    if !sandbox.host_network {
        flags |= CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS;
        kinds.extend(["net", "uts"]);
    }
    if !sandbox.host_ipc {
        flags |= CloneFlags::CLONE_NEWIPC;
        kinds.push("ipc");
    }
    unshare(flags).map_err(io::Error::from).map_err(failed("unshare"))?;
    if !sandbox.host_network {
        nix::unistd::sethostname(&sandbox.hostname).map_err(io::Error::from).map_err(failed("hostname"))?;
        process::loopback_up().map_err(failed("loopback interface"))?;
        for (name, value) in [("net.ipv4.ip_unprivileged_port_start", "0"), ("net.ipv4.ping_group_range", "0 2147483647")] {
            // Absent in a kernel without IPv4 alone: then there is nothing to open.
            if let Err(e) = set_sysctl(name, value)
                && e.kind() != io::ErrorKind::NotFound
            {
                return Err(failed(name)(e));
            }
        }
    }
    for (name, value) in &sandbox.sysctls {
        if !is_the_pods(name, sandbox) {
            let cure = "only sysctls of the pod's own network or IPC namespace can be set";
            return Err(Failure::new(Kind::Refused, format!("sysctl {name}: {cure}")));
        }
        set_sysctl(name, value).map_err(failed(&format!("sysctl {name}={value}")))?;
    }
    let open = |kind: &&str| fs::File::open(format!("/proc/self/ns/{kind}")).map(OwnedFd::from).map_err(failed(kind));
    let fds = kinds.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    Ok((kinds.into_iter().map(str::to_owned).collect(), fds))
}

/// Does a write here stay in the namespaces that were just made? Anything else would be the host's.
fn is_the_pods(name: &str, sandbox: &Sandbox) -> bool {
    let name = name.replace('/', ".");
    let ipc =
        ["kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall", "kernel.shmmax", "kernel.shmmni"];
    if ipc.contains(&name.as_str()) || name == "kernel.shm_rmid_forced" || name.starts_with("fs.mqueue.") {
        return !sandbox.host_ipc;
    }
    name.starts_with("net.") && !sandbox.host_network
}

/// Dots separate, or slashes do where a name has dots of its own; sysctl.d(5).
fn set_sysctl(name: &str, value: &str) -> io::Result<()> {
    let path = match name.find(['.', '/']).and_then(|at| name.as_bytes().get(at)) {
        Some(b'/') => name.to_owned(),
        _ => name.replace('.', "/"),
    };
    if path.split('/').any(|part| part.is_empty() || part == "..") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    fs::write(format!("/proc/sys/{path}"), value)
}
