//! `coracle agent`: the node itself.

use std::sync::Arc;

use nix::sys::signal::{SigSet, Signal};

use super::agent_proxy as proxy;
use super::args::{Body, Flag, Given, INSTANCE, LOG_FORMAT, LOG_LEVEL, NO_OPERANDS, ROOT, Verb};
use super::exit::{CliError, Exit};
use super::version;
use crate::config::{self, Config};
use crate::kubelet::agent::Agent;
use crate::kubelet::remembered;
use crate::kubelet::server::{Door, Facts, Server};
use crate::obs;
use crate::obs::notify::Notifier;
use crate::obs::{Format, LogOptions};
use crate::sys::{clock, process};

const MANIFESTS: Flag = Flag {
    long: "manifests",
    short: None,
    value: Some("DIR"),
    help: "run every Pod of the YAML and JSON files in DIR (also ConfigMaps, Secrets, Services and policies); required",
};
const NODE_NAME: Flag = Flag {
    long: "node-name",
    short: None,
    value: Some("NAME"),
    help: "this node's name (default: the host's name in lower case)",
};
const NODE_IP: Flag = Flag {
    long: "node-ip",
    short: None,
    value: Some("IP"),
    help: "this node's address; once a family (default: that of the default route)",
};
const POD_CIDR: Flag = Flag {
    long: "pod-cidr",
    short: None,
    value: Some("CIDR"),
    help: "range of the pods' addresses; once a family (default: 10.88.0.0/16 and fd88:88::/64)",
};
const SERVICE_CIDR: Flag = Flag {
    long: "service-cidr",
    short: None,
    value: Some("CIDR"),
    help: "range of the Services' ClusterIPs; once a family (default: 10.96.0.0/16 and fd88:96::/112)",
};
const MTU: Flag = Flag {
    long: "mtu",
    short: None,
    value: Some("BYTES"),
    help: "MTU of the pods' links (default: the smallest among the links of the default routes)",
};
pub const CGROUP_PARENT: Flag = Flag {
    long: "cgroup-parent",
    short: None,
    value: Some("PATH"),
    help: "delegated cgroup below which pods and monitors live (default: /, or /NAME with --instance)",
};
const REGISTRIES: Flag = Flag {
    long: "registries",
    short: None,
    value: Some("FILE"),
    help: "mirrors, CAs and credentials of registries, in the form of k3s's registries.yaml",
};
const CONTAINER_LOG_MAX_SIZE: Flag = Flag {
    long: "container-log-max-size",
    short: None,
    value: Some("SIZE"),
    help: "a container's log file is rotated at this size (default: 10Mi)",
};
const CONTAINER_LOG_MAX_FILES: Flag = Flag {
    long: "container-log-max-files",
    short: None,
    value: Some("N"),
    help: "log files kept for each container, at least 2 (default: 5)",
};
const MAX_PODS: Flag =
    Flag { long: "max-pods", short: None, value: Some("N"), help: "pods that may be here at once (default: 110)" };
const POD_PIDS_LIMIT: Flag =
    Flag { long: "pod-pids-limit", short: None, value: Some("N"), help: "processes that one pod may have (default: no limit)" };
const SECCOMP_DEFAULT: Flag = Flag {
    long: "seccomp-default",
    short: None,
    value: Some("BOOL"),
    help: "false: a container that names no seccomp profile runs without one (default: true, with RuntimeDefault)",
};
const STOP_GRACE: Flag = Flag {
    long: "stop-grace",
    short: None,
    value: Some("SECONDS"),
    help: "the longest that a pod may take to end when the node stops (default: 60)",
};

const DNS: Flag = Flag {
    long: "dns",
    short: None,
    value: Some("on|off|auto"),
    help: "the node's own DNS server at port 53 of the pods' gateway: names of Services, a cache for the rest (default: auto, \
           which is on while the node is in no cluster)",
};
const CLUSTER_DNS: Flag = Flag {
    long: "cluster-dns",
    short: None,
    value: Some("IP"),
    help: "nameserver of pods that ask for the cluster's; may be given three times (default: the node's own server)",
};
const POLICY: Flag = Flag {
    long: "policy",
    short: None,
    value: Some("on|off"),
    help: "enforce NetworkPolicies; off for clusters that bring their own (default: on)",
};
pub const CLUSTER_DOMAIN: Flag = Flag {
    long: "cluster-domain",
    short: None,
    value: Some("DOMAIN"),
    help: "domain of the names of Services and pods (default: cluster.local)",
};

pub const VERB: Verb = Verb {
    name: "agent",
    operands: NO_OPERANDS,
    command: false,
    summary: "run this node: every pod of a directory of manifests",
    about: "Runs every Pod that it finds in the manifests directory and keeps it running. Pods outlive the agent: \
            SIGTERM, a crash or an upgrade leave them as they are, and the next agent takes them over. \
            `coracle stop-all` ends them.",
    flags: &[
        &MANIFESTS,
        &ROOT,
        &INSTANCE,
        &NODE_NAME,
        &NODE_IP,
        &POD_CIDR,
        &SERVICE_CIDR,
        &MTU,
        &DNS,
        &CLUSTER_DNS,
        &CLUSTER_DOMAIN,
        &proxy::PROXY,
        &proxy::METRICS_BIND_ADDRESS,
        &proxy::HEALTHZ_BIND_ADDRESS,
        &proxy::NODEPORT_ADDRESSES,
        &proxy::IGNORE_EXTERNAL_IPS,
        &proxy::IGNORE_LOAD_BALANCER_IPS,
        &proxy::CONNTRACK_MAX_PER_CORE,
        &proxy::CONNTRACK_MIN,
        &proxy::CONNTRACK_ESTABLISHED,
        &proxy::CONNTRACK_CLOSE_WAIT,
        &proxy::CONNTRACK_BE_LIBERAL,
        &POLICY,
        &CGROUP_PARENT,
        &REGISTRIES,
        &CONTAINER_LOG_MAX_SIZE,
        &CONTAINER_LOG_MAX_FILES,
        &MAX_PODS,
        &POD_PIDS_LIMIT,
        &SECCOMP_DEFAULT,
        &STOP_GRACE,
        &LOG_LEVEL,
        &LOG_FORMAT,
    ],
    examples: &[
        "coracle agent --manifests /etc/coracle/manifests",
        "coracle agent --manifests ./pods --root /tmp/node --pod-cidr 10.99.0.0/24",
    ],
    body: Body::Parsed(run),
};

/// Flags that decide where an agent's things are; also for verbs that work without the agent.
pub fn config(given: &Given) -> Result<Config, CliError> {
    let usage =
        |flag: &Flag, text: &str, expected: &str| CliError::Usage(format!("--{} \"{text}\": expected {expected}", flag.long));
    let instance = match given.text(&INSTANCE)? {
        Some(name) => {
            Some(config::instance_name(name).ok_or_else(|| usage(&INSTANCE, name, "1 to 13 of a-z, 0-9 and -, a letter first"))?)
        }
        None => None,
    };
    let mut config = Config::at(None, instance);
    if given.path(&ROOT).is_some() {
        let roots = given.roots()?;
        // Every root lies below the one given.
        config = Config::at(roots.run.parent(), instance);
    }
    if let Some(dir) = given.path(&MANIFESTS) {
        config.manifests = Some(std::path::absolute(dir).map_err(CliError::io("resolve", dir))?);
    }
    config.node_name = match given.text(&NODE_NAME)? {
        Some(name) => name.to_owned(),
        None => nix::unistd::gethostname()
            .map_err(|e| CliError::because("read the host's name; give --node-name", e))?
            .to_string_lossy()
            .to_ascii_lowercase(),
    };
    if !is_dns_name(&config.node_name) {
        return Err(usage(&NODE_NAME, &config.node_name, "a DNS name of a-z, 0-9, - and ."));
    }
    for text in given.all(&NODE_IP)? {
        config.node_ips.push(text.parse().map_err(|_| usage(&NODE_IP, text, "an address such as 192.0.2.7"))?);
    }
    let cidrs = given.all(&POD_CIDR)?;
    if !cidrs.is_empty() {
        config.pod_cidrs = cidrs.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
    }
    let cidrs = given.all(&SERVICE_CIDR)?;
    if !cidrs.is_empty() {
        config.service_cidrs = cidrs.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
    }
    config.mtu = given.parse(&MTU, "a number of bytes")?;
    if let Some(text) = given.text(&DNS)? {
        config.dns = match text {
            "on" => config::Dns::On,
            "off" => config::Dns::Off,
            "auto" => config::Dns::Auto,
            other => return Err(usage(&DNS, other, "on, off or auto")),
        };
    }
    for text in given.all(&CLUSTER_DNS)? {
        config.cluster_dns.push(text.parse().map_err(|_| usage(&CLUSTER_DNS, text, "an address such as 10.96.0.10"))?);
    }
    if let Some(text) = given.text(&POLICY)? {
        config.policy = match text {
            "on" => true,
            "off" => false,
            other => return Err(usage(&POLICY, other, "on or off")),
        };
    }
    if let Some(text) = given.text(&CLUSTER_DOMAIN)? {
        let domain = text.strip_suffix('.').unwrap_or(text);
        if !is_dns_name(domain) {
            return Err(usage(&CLUSTER_DOMAIN, text, "a DNS name of a-z, 0-9, - and ., such as cluster.local"));
        }
        config.cluster_domain = domain.to_owned();
    }
    config.proxying = proxy::proxying(given)?;
    if let Some(parent) = given.text(&CGROUP_PARENT)? {
        if !parent.starts_with('/') || parent.split('/').any(|part| part == "..") {
            return Err(usage(
                &CGROUP_PARENT,
                parent,
                "a path from the hierarchy's root, such as /system.slice/coracle-pods.service",
            ));
        }
        config.cgroup_parent = parent.to_owned();
    }
    config.registries = given.path(&REGISTRIES).map(Into::into);
    if let Some(text) = given.text(&CONTAINER_LOG_MAX_SIZE)? {
        config.log_max_size =
            config::size(text).ok_or_else(|| usage(&CONTAINER_LOG_MAX_SIZE, text, "a size of 1Ki or more, such as 10Mi"))?;
    }
    if let Some(files) = given.parse::<u32>(&CONTAINER_LOG_MAX_FILES, "a number")? {
        if files < 2 {
            return Err(usage(&CONTAINER_LOG_MAX_FILES, &files.to_string(), "2 or more"));
        }
        config.log_max_files = files;
    }
    if let Some(max) = given.parse(&MAX_PODS, "a number")? {
        config.max_pods = max;
    }
    config.pod_pids_limit = given.parse::<i64>(&POD_PIDS_LIMIT, "a number")?.filter(|limit| *limit > 0);
    if let Some(seccomp_default) = given.parse(&SECCOMP_DEFAULT, "true or false")? {
        config.seccomp_default = seccomp_default;
    }
    if let Some(grace) = given.parse::<u32>(&STOP_GRACE, "seconds")? {
        config.stop_grace = i64::from(grace);
    }
    Ok(config)
}

/// RFC 1123: what names a node.
fn is_dns_name(name: &str) -> bool {
    let label = |label: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        edge(label.chars().next())
            && edge(label.chars().next_back())
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// [`config`], or what the last agent of this root was told: for verbs that end its pods.
pub fn remembered(given: &Given) -> Result<Config, CliError> {
    remembered::recall(config(given)?).map_err(|e| CliError::because("find out how the agent was started", e))
}

pub fn log_options(given: &Given) -> Result<LogOptions, CliError> {
    let level = given.parse(&LOG_LEVEL, "error, warn, info, debug or trace")?.unwrap_or(tracing::Level::INFO);
    let format = match given.text(&LOG_FORMAT)? {
        None | Some("text") => Format::Text,
        Some("json") => Format::Json,
        Some(other) => return Err(CliError::Usage(format!("--log-format \"{other}\": expected text or json"))),
    };
    Ok(LogOptions { level, format })
}

fn run(given: &Given) -> Result<Exit, CliError> {
    let config = config(given)?;
    let Some(manifests) = config.manifests.clone() else {
        return Err(CliError::Usage("--manifests is missing: name the directory that holds the Pods".into()));
    };
    obs::init(&log_options(given)?).map_err(|e| CliError::because("set up logging", e))?;
    let started_at = clock::wall_nanos();
    process::share_one_heap();
    let notifier = Notifier::from_env().map_err(|e| CliError::because("find the service manager", e))?;
    // Before there is any other thread, so that all of them have these blocked; processes that
    // we start do not: std empties their mask.
    let mut quit = SigSet::empty();
    quit.extend([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    quit.thread_block().map_err(|e| CliError::because("block signals", e))?;
    let agent = Agent::open(config).map_err(|e| CliError::because("start the agent", e))?;
    let (pods, living) = agent.adopted();
    let config = &agent.rooms.config;
    tracing::info!(
        version = version::VERSION,
        node = config.node_name,
        instance = config.instance,
        manifests = %manifests.display(),
        pods,
        living,
        "the agent begins"
    );
    let door = Door {
        handle: agent.handle(),
        runtime: agent.rooms.runtime.clone(),
        images: agent.rooms.images.clone(),
        dns: agent.rooms.dns.clone(),
        proxy: agent.rooms.proxy.clone(),
        facts: Facts {
            version: version::VERSION,
            node: config.node_name.clone(),
            instance: config.instance.clone(),
            started_at,
            manifests,
            roots: config.roots.clone(),
            cgroup_parent: config.cgroup_parent.clone(),
            pod_cidrs: config.pod_cidrs.clone(),
        },
    };
    let server = Server::start(&config.roots.socket(), Arc::new(door)).map_err(|e| CliError::because("serve clients", e))?;
    let handle = agent.handle();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .stack_size(64 * 1024)
        .spawn(move || {
            match quit.wait() {
                Ok(signal) => tracing::info!(signal = signal.as_str(), "the agent leaves; pods stay"),
                Err(error) => tracing::error!(error = %error, "signals cannot be waited for: the agent leaves; pods stay"),
            }
            // It may be leaving already.
            let _ = handle.quit();
        })
        .map_err(|e| CliError::because("start a thread", e))?;
    if let Err(error) = notifier.ready(&format!("{pods} pods")) {
        tracing::warn!(error = %obs::chain(&error), "the service manager was not told that the agent is ready");
    }
    agent.run(&notifier).map_err(|e| CliError::because("run the agent", e))?;
    if let Err(error) = notifier.stopping() {
        tracing::debug!(error = %obs::chain(&error), "the service manager was not told that the agent leaves");
    }
    drop(server);
    Ok(Exit::Ok)
}
