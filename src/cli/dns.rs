//! `coracle dns serve`: the DNS room alone, without an agent or a pod.

use std::io::Read;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use nix::sys::signal::{SigSet, Signal};
use serde::Deserialize;

use super::agent::CLUSTER_DOMAIN;
use super::args::{Body, Flag, Given, LOG_FORMAT, LOG_LEVEL, NO_OPERANDS, Verb};
use super::exit::{CliError, Exit};
use crate::api::cidr::Cidr;
use crate::api::endpoint_slice::EndpointSlice;
use crate::api::service::Service;
use crate::api::yaml::{self, Limits};
use crate::config::{self, CLUSTER_DOMAIN as DOMAIN};
use crate::dns::Dns;
use crate::dns::model::{CACHE_BYTES, Config};
use crate::dns::zone::{Objects, Zone};
use crate::obs;

const LISTEN: Flag =
    Flag { long: "listen", short: None, value: Some("IP"), help: "answer at this address; may be given many times; required" };
const PORT: Flag = Flag { long: "port", short: None, value: Some("N"), help: "UDP and TCP port (default: 53)" };
const ALLOW: Flag =
    Flag { long: "allow", short: None, value: Some("CIDR"), help: "who may ask; may be given many times (default: loopback)" };
const OBJECTS: Flag =
    Flag { long: "objects", short: None, value: Some("FILE"), help: "YAML or JSON with the Services and EndpointSlices to name" };
const RESOLV_CONF: Flag = Flag {
    long: "resolv-conf",
    short: None,
    value: Some("FILE"),
    help: "names the upstream servers (default: /etc/resolv.conf)",
};

pub const SERVE: Verb = Verb {
    name: "dns serve",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Answers for the Services and EndpointSlices of a file as the agent does for its own, and asks upstream servers for \
            the rest, until SIGTERM or SIGINT; then prints what was counted. Made for tests and for whoever wants to see what \
            the room does.",
    flags: &[&LISTEN, &PORT, &ALLOW, &OBJECTS, &RESOLV_CONF, &CLUSTER_DOMAIN, &LOG_LEVEL, &LOG_FORMAT],
    examples: &["coracle dns serve --listen 127.0.0.1 --port 5353 --objects services.yaml"],
    body: Body::Parsed(serve),
};

/// Of a file of objects no more is read.
const MOST: u64 = 256 << 20;

fn serve(given: &Given) -> Result<Exit, CliError> {
    obs::init(&super::agent::log_options(given)?).map_err(|e| CliError::because("set up logging", e))?;
    let usage =
        |flag: &Flag, text: &str, expected: &str| CliError::Usage(format!("--{} \"{text}\": expected {expected}", flag.long));
    let mut listen: Vec<IpAddr> = Vec::new();
    for text in given.all(&LISTEN)? {
        listen.push(text.parse().map_err(|_| usage(&LISTEN, text, "an address such as 127.0.0.1"))?);
    }
    if listen.is_empty() {
        return Err(CliError::Usage("--listen is needed".into()));
    }
    let mut allow: Vec<Cidr> = Vec::new();
    for text in given.all(&ALLOW)? {
        allow.push(text.parse().map_err(|e| CliError::because("--allow", e))?);
    }
    if allow.is_empty() {
        allow = config::loopback().to_vec();
    }
    let domain = given.text(&CLUSTER_DOMAIN)?.unwrap_or(DOMAIN);
    let objects = match given.path(&OBJECTS) {
        Some(path) => read(path)?,
        None => Named::default(),
    };
    let zone = Zone::build(&Objects {
        domain,
        servers: &listen,
        ranges: &[],
        serial: 1,
        services: &objects.services.iter().collect::<Vec<_>>(),
        slices: &objects.slices.iter().collect::<Vec<_>>(),
        pods: &[],
    })
    .map_err(|e| CliError::because("--cluster-domain", e))?;
    // Before there is a second thread.
    let mut quit = SigSet::empty();
    quit.extend([Signal::SIGTERM, Signal::SIGINT]);
    quit.thread_block().map_err(|e| CliError::because("block signals", e))?;
    let config = Config {
        domain: zone.domain().to_owned(),
        listen,
        port: given.parse(&PORT, "a port")?.unwrap_or(53),
        allow,
        resolv_conf: given.path(&RESOLV_CONF).unwrap_or(Path::new("/etc/resolv.conf")).to_owned(),
        behind_stub: config::behind_stub(),
        cache_bytes: CACHE_BYTES,
    };
    drop(objects);
    let dns = Dns::start(config).map_err(|e| CliError::because("serve names", e))?;
    dns.set_zone(Arc::new(zone));
    tracing::info!(servers = ?dns.servers(), "DNS: answers");
    quit.wait().map_err(|e| CliError::because("wait for a signal", e))?;
    let counted: String = dns.counters().read().iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    super::print(&counted)?;
    Ok(Exit::Ok)
}

#[derive(Default)]
struct Named {
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Kind {
    kind: String,
}

fn read(path: &Path) -> Result<Named, CliError> {
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(CliError::io("open", path))?;
    file.take(MOST).read_to_end(&mut text).map_err(CliError::io("read", path))?;
    let mut objects = Named::default();
    for document in yaml::documents(&text, Limits::default()) {
        let failed = |e| CliError::because(format!("read {}", path.display()), e);
        let node = document.map_err(failed)?;
        let (kind, _) = node.read::<Kind>().map_err(failed)?;
        match kind.kind.as_str() {
            "Service" => objects.services.push(node.read().map_err(failed)?.0),
            "EndpointSlice" => objects.slices.push(node.read().map_err(failed)?.0),
            other => return Err(CliError::Usage(format!("{}: kind \"{other}\" has no names", path.display()))),
        }
    }
    for metadata in objects.services.iter_mut().map(|s| &mut s.metadata).chain(objects.slices.iter_mut().map(|s| &mut s.metadata))
    {
        if metadata.namespace.is_empty() {
            metadata.namespace = "default".to_owned();
        }
    }
    Ok(objects)
}
