//! `coracle net add|del|check`: the network room alone, without an agent.
//!
//! Made for tests and for whoever wants to see what the room does; it works on the leases of
//! `--root`, so it is refused while an agent has that root.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;

use super::args::{Body, Flag, Given, INSTANCE, NO_OPERANDS, OUTPUT, Output, ROOT, Verb};
use super::exit::{CliError, Exit};
use crate::config::Config;
use crate::kubelet::host_ports::HostPorts;
use crate::net::Net;
use crate::net::model::{AttachRequest, Attachment, HostPort, L4, NetConfig, NetError, pod_range};
use crate::net::plan::Names;
use crate::proxy::model::NodeFacts;
use crate::proxy::{Proxy, ProxyConfig};
use crate::runtime;
use crate::store::effects::Effects;
use crate::store::lock::StoreLock;
use crate::sys::clock;

const POD_CIDR: Flag = Flag {
    long: "pod-cidr",
    short: None,
    value: Some("CIDR"),
    help: "range of pods' addresses; twice for both families (default: 10.88.0.0/16 and fd88:88::/64)",
};
const MTU: Flag =
    Flag { long: "mtu", short: None, value: Some("BYTES"), help: "MTU of bridge and pods (default: the uplinks' smallest)" };
const UID: Flag = Flag { long: "uid", short: None, value: Some("UID"), help: "the pod's uid: the name of its lease" };
const POD: Flag =
    Flag { long: "pod", short: None, value: Some("NS/NAME"), help: "the pod's name in messages (default: its uid)" };
const NETNS: Flag =
    Flag { long: "netns", short: None, value: Some("FILE"), help: "a file that the pod's network namespace is mounted on" };
const HOST_PORT: Flag = Flag {
    long: "host-port",
    short: None,
    value: Some("[IP:]PORT:POD_PORT[/PROTOCOL]"),
    help: "lead a port of the node to the pod; may be given many times; IPv6 in brackets",
};

pub const ADD: Verb = Verb {
    name: "net add",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Gives a network namespace its eth0, addresses, routes and host ports, as the agent does for a pod, and prints them. \
            Again for the same uid: the same answer.",
    flags: &[&UID, &NETNS, &POD, &HOST_PORT, &POD_CIDR, &MTU, &ROOT, &INSTANCE, &OUTPUT],
    examples: &["coracle net add --root /tmp/node --uid a --netns /run/netns/a --host-port 8080:80/tcp"],
    body: Body::Parsed(add),
};

pub const DEL: Verb = Verb {
    name: "net del",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Takes the network of a pod away. Nothing happens where there is none.",
    flags: &[&UID, &POD_CIDR, &MTU, &ROOT, &INSTANCE],
    examples: &["coracle net del --root /tmp/node --uid a"],
    body: Body::Parsed(del),
};

pub const CHECK: Verb = Verb {
    name: "net check",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Makes bridge, sysctls and tables what they have to be, and prints what this host withholds. \
            With --uid: whether that pod's network is whole.",
    flags: &[&UID, &NETNS, &POD_CIDR, &MTU, &ROOT, &INSTANCE, &OUTPUT],
    examples: &["coracle net check --root /tmp/node", "coracle net check --root /tmp/node --uid a --netns /run/netns/a"],
    body: Body::Parsed(check),
};

/// The room with whom it works with, and the lock that keeps an agent out.
struct Opened {
    net: Net,
    proxy: Proxy,
    _lock: StoreLock,
}

fn open(given: &Given) -> Result<Opened, CliError> {
    let config: Config = super::agent::config(given)?;
    let texts = given.all(&POD_CIDR)?;
    let texts: Vec<&str> = if texts.is_empty() { config.pod_cidrs.iter().map(String::as_str).collect() } else { texts };
    let cidrs = texts.iter().map(|t| pod_range(t)).collect::<Result<Vec<_>, _>>();
    let cidrs = cidrs.map_err(|e| CliError::Usage(format!("--pod-cidr: {e}")))?;
    for dir in [&config.roots.run, &config.roots.state] {
        std::fs::create_dir_all(dir).map_err(CliError::io("make directory", dir))?;
    }
    let lock = StoreLock::take(&config.roots.state).map_err(|e| CliError::because("have this root for ourselves", e))?;
    // As the agent does: what is journalled here must be there when it starts.
    runtime::mount_run(&config.roots.run).map_err(|e| CliError::because("mount the run directory", e))?;
    let boot_id = clock::boot_id().map_err(|e| CliError::because("read the boot's id", e))?;
    let (effects, _) =
        Effects::open(&config.roots.run, &boot_id).map_err(|e| CliError::because("open the effects journal", e))?;
    let mtu = given.parse(&MTU, "a number")?;
    let effects = Arc::new(effects);
    let bridge = Names::new(&config.instance).map_err(failed)?.bridge;
    let node = NodeFacts { pod_cidrs: cidrs.clone(), bridge, ..NodeFacts::default() };
    let proxy = ProxyConfig { table: config.instance.clone(), node, service_cidrs: Vec::new() };
    let proxy = Proxy::open(proxy, Arc::clone(&effects)).map_err(|e| CliError::because("open the proxy", e))?;
    let net = NetConfig { instance: config.instance, cidrs, run: config.roots.run, mtu };
    let net = Net::open(net, effects, Arc::new(HostPorts(proxy.clone()))).map_err(failed)?;
    Ok(Opened { net, proxy, _lock: lock })
}

fn failed(error: NetError) -> CliError {
    CliError::because("network", error)
}

fn uid(given: &Given) -> Result<&str, CliError> {
    given.text(&UID)?.ok_or_else(|| CliError::Usage("--uid is needed".into()))
}

fn netns(given: &Given) -> Result<PathBuf, CliError> {
    let path = given.path(&NETNS).ok_or_else(|| CliError::Usage("--netns is needed".into()))?;
    std::path::absolute(path).map_err(CliError::io("resolve", path))
}

fn add(given: &Given) -> Result<Exit, CliError> {
    let uid = uid(given)?.to_owned();
    let host_ports = given.all(&HOST_PORT)?.into_iter().map(host_port).collect::<Result<Vec<_>, _>>()?;
    let pod = given.text(&POD)?.unwrap_or(&uid).to_owned();
    let request = AttachRequest { uid, pod, netns: netns(given)?, host_ports };
    let opened = open(given)?;
    let attachment = opened.net.attach(&request).map_err(failed)?;
    print_attachment(given, &attachment)
}

fn print_attachment(given: &Given, attachment: &Attachment) -> Result<Exit, CliError> {
    let addresses: Vec<String> = attachment.addresses.iter().map(ToString::to_string).collect();
    super::print(&match given.output()? {
        Output::Json => format!("{}\n", json!({ "addresses": addresses, "mtu": attachment.mtu })),
        Output::Table | Output::Wide => format!("{} mtu {}\n", addresses.join(" "), attachment.mtu),
    })?;
    Ok(Exit::Ok)
}

fn del(given: &Given) -> Result<Exit, CliError> {
    let uid = uid(given)?;
    let opened = open(given)?;
    opened.net.detach(uid).map_err(failed)?;
    Ok(Exit::Ok)
}

fn check(given: &Given) -> Result<Exit, CliError> {
    let living = match given.text(&UID)? {
        Some(uid) => Some((uid.to_owned(), netns(given)?)),
        None => None,
    };
    let Opened { net, proxy, _lock } = open(given)?;
    net.ensure().map_err(failed)?;
    if let Some((uid, netns)) = living {
        let attachment = net.attachment(&uid, &netns).map_err(failed)?;
        let attachment = attachment
            .ok_or_else(|| CliError::NotFound(format!("the network of {uid} is not whole; `coracle net add` makes it so")))?;
        return print_attachment(given, &attachment);
    }
    let of_net = net.lacks().into_iter().map(|l| (format!("{:?}", l.feature), l.said, l.consequence, l.cure));
    let of_proxy = proxy.lacks().into_iter().map(|l| (l.feature.name().to_owned(), l.said, l.consequence, l.cure));
    let lacks: Vec<_> = of_net.chain(of_proxy).collect();
    super::print(&match given.output()? {
        Output::Json => {
            let lacks: Vec<_> = lacks
                .iter()
                .map(|(feature, said, consequence, cure)| {
                    json!({ "feature": feature, "said": said, "consequence": consequence, "cure": cure })
                })
                .collect();
            format!("{}\n", json!({ "lacks": lacks }))
        }
        Output::Table | Output::Wide if lacks.is_empty() => "the network is as it should be\n".to_owned(),
        Output::Table | Output::Wide => lacks
            .iter()
            .map(|(feature, said, consequence, cure)| format!("{feature}: {consequence} ({said}); {cure}\n"))
            .collect(),
    })?;
    Ok(Exit::Ok)
}

/// `[IP:]PORT:POD_PORT[/PROTOCOL]`, as docker's and podman's --publish.
fn host_port(text: &str) -> Result<HostPort, CliError> {
    parse_host_port(text).ok_or_else(|| {
        CliError::Usage(format!(
            "--host-port \"{text}\": expected [IP:]PORT:POD_PORT[/tcp|udp|sctp], for example 192.0.2.1:8080:80/tcp"
        ))
    })
}

fn parse_host_port(text: &str) -> Option<HostPort> {
    let (rest, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = match protocol.to_ascii_lowercase().as_str() {
        "tcp" => L4::Tcp,
        "udp" => L4::Udp,
        "sctp" => L4::Sctp,
        _ => return None,
    };
    let (rest, pod_port) = rest.rsplit_once(':')?;
    let (ip, port) = match rest.rsplit_once(':') {
        None => (None, rest),
        Some((ip, port)) => (Some(ip.trim_start_matches('[').trim_end_matches(']').parse().ok()?), port),
    };
    Some(HostPort { protocol, host_ip: ip, host_port: port.parse().ok()?, container_port: pod_port.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_ports_are_written_as_others_write_them() {
        let shown = |text| parse_host_port(text).map(|p| format!("{p} {}", p.container_port));
        assert_eq!(shown("8080:80").as_deref(), Some("8080/TCP 80"));
        assert_eq!(shown("192.0.2.1:53:5353/udp").as_deref(), Some("192.0.2.1:53/UDP 5353"));
        assert_eq!(shown("[fd00::1]:53:5353/UDP").as_deref(), Some("[fd00::1]:53/UDP 5353"));
        for bad in ["80", "80:", "x:80", "1.2.3:80:80", "80:80/icmp", "70000:80", ""] {
            assert_eq!(shown(bad), None, "{bad}");
        }
    }
}
