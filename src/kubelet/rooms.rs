//! The rooms of one agent, opened in the order in which they need each other, and what a start
//! finds in them. Opening makes nothing for pods; recovery believes the kernel first, the store
//! second.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, mpsc};

use super::host_ports::HostPorts;
use super::instance::{self, InstanceError, InstanceLock};
use super::orphans;
use super::proxying;
use super::pulls::Pulls;
use super::qos::NodeCapacity;
use super::recover::Found;
use super::remembered::{self, RememberError};
use super::source::{self, DesiredPod};
use crate::api::yaml;
use crate::config::{self, Config};
use crate::dns::{self, Dns};
use crate::images::model::RegistryConfig;
use crate::images::{ImageError, Images, ImagesConfig};
use crate::net::model::{Cidr, NetConfig, NetError};
use crate::net::{Net, ipam};
use crate::proxy::alone::{self, Memory};
use crate::proxy::model::NodeFacts;
use crate::proxy::serve::Servers;
use crate::proxy::{Proxy, ProxyConfig, ProxyError};
use crate::runtime::cgroup::{CgroupError, Cgroups};
use crate::runtime::model::RuntimeEvent;
use crate::runtime::spec::HostFacts;
use crate::runtime::{self, Runtime, RuntimeConfig, RuntimeError};
use crate::store::StoreError;
use crate::store::effects::Effects;
use crate::store::ids::PodUid;
use crate::store::pods::PodStore;
use crate::store::records::PodsState;
use crate::sys::{clock, inet};
use crate::volumes::Volumes;
use crate::volumes::model::VolumeError;

/// All that effects need. Shared by the workers; nothing in it is decided after the start.
pub struct Rooms {
    pub config: Config,
    pub boot_id: String,
    pub store: Arc<PodStore>,
    pub runtime: Runtime,
    pub cgroups: Cgroups,
    pub net: Net,
    pub proxy: Proxy,
    _servers: Option<Servers>,
    pub images: Images,
    pub volumes: Volumes,
    pub pulls: Pulls,
    /// The node's own DNS server, where it runs one.
    pub dns: Option<Arc<Dns>>,
    pub host: HostFacts,
    pub capacity: NodeCapacity,
    pub node_ips: Vec<IpAddr>,
    pub facts: NodeFacts,
    /// One a family at most; the first one's family is the default.
    pub service_ranges: Vec<Cidr>,
    _instance: Option<InstanceLock>,
}

impl Rooms {
    /// Where pods ask the node's own DNS server; none where they ask somebody else.
    pub fn dns_servers(&self) -> Vec<IpAddr> {
        if self.dns.is_some() && self.config.cluster_dns.is_empty() { self.net.gateways() } else { Vec::new() }
    }

    /// What Services were given: the next start gives them the same.
    pub fn save_addresses(&self, addresses: &Memory) -> Result<(), StoreError> {
        // Names and numbers: they always have a form in JSON.
        let bytes = serde_json::to_vec(addresses).unwrap_or_default();
        crate::store::atomic::write(&self.config.roots.state.join(ADDRESSES), &bytes, 0o600)
    }
}

const ADDRESSES: &str = "services.json";

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("read this host's {what}")]
    Host { what: &'static str, source: std::io::Error },
    #[error("make {}", path.display())]
    Dir { path: PathBuf, source: std::io::Error },
    #[error("registries file {}: {why}", path.display())]
    Registries { path: PathBuf, why: String },
    #[error("--pod-cidr")]
    Cidr(#[from] crate::net::model::BadRange),
    #[error("start")]
    Instance(#[from] InstanceError),
    #[error("--service-cidr")]
    ServiceCidr(#[from] alone::BadServiceRange),
    #[error("open the store")]
    Store(#[from] StoreError),
    #[error("open the runtime")]
    Runtime(#[from] RuntimeError),
    #[error("open the network")]
    Net(#[from] NetError),
    #[error("open the proxy")]
    Proxy(#[from] ProxyError),
    #[error("open the images")]
    Images(#[from] ImageError),
    #[error("open the volumes")]
    Volumes(#[from] VolumeError),
    #[error(transparent)]
    Dns(#[from] dns::DnsError),
    #[error("use this host's cgroups")]
    Cgroups(#[from] CgroupError),
    #[error("keep the agent's flags")]
    Remember(#[from] RememberError),
}

/// What a start found, and what the source may need of it.
pub struct Start {
    pub rooms: Rooms,
    pub found: Found,
    pub known: Vec<DesiredPod>,
    /// Of Services, as they were stored.
    pub addresses: Memory,
}

pub fn open(config: Config, events: Sender<RuntimeEvent>) -> Result<Start, OpenError> {
    // Who only ends pods serves nothing, and was not told the agent's ranges.
    let service_ranges = match &config.manifests {
        Some(_) => alone::service_ranges(&config.service_cidrs, &config.pod_cidrs)?,
        None => Vec::new(),
    };
    for dir in [&config.roots.run, &config.roots.state, &config.roots.kubelet, &config.roots.logs] {
        std::fs::create_dir_all(dir).map_err(|source| OpenError::Dir { path: dir.clone(), source })?;
    }
    // What containers write may be setuid, and secrets of the images' and pods' lie there: nobody
    // else gets below it, also where it was made by hand.
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(&config.roots.state, private)
        .map_err(|source| OpenError::Dir { path: config.roots.state.clone(), source })?;
    let boot_id = clock::boot_id().map_err(|source| OpenError::Host { what: "boot id", source })?;
    // Its lock comes first: one agent a root.
    let (store, state, report) = PodStore::open(&config.roots.state)?;
    let held = match instance::take(&config.instance) {
        Ok(held) => Some(held),
        // One that only ends the pods of its own root makes nothing under that name.
        Err(InstanceError::InUse { .. }) if config.manifests.is_none() => None,
        Err(error) => return Err(error.into()),
    };
    if report.cut > 0 || !report.lost.is_empty() || report.unknown > 0 {
        tracing::warn!(
            records = report.records,
            cut_bytes = report.cut,
            spoilt = report.spoilt,
            unknown = report.unknown,
            lost = ?report.lost,
            "the pods' journal was not whole; what could be read goes on"
        );
    }
    runtime::mount_run(&config.roots.run)?;
    // Without manifests we are here to end pods: nothing is made for them.
    let keeps = config.manifests.is_some();
    if keeps {
        remembered::remember(&config)?;
    }
    let (effects, _) = Effects::open(&config.roots.run, &boot_id)?;
    let effects = Arc::new(effects);
    let cgroups = Cgroups::detect(&config.cgroup_parent)?;
    for lack in cgroups.lacks() {
        tracing::warn!(what = lack.what, effect = lack.effect, cure = lack.cure, "cgroups: this host withholds something");
    }
    let runtime = Runtime::open(
        RuntimeConfig { run: config.roots.run.clone(), cgroups: cgroups.clone(), cgroup_parent: config.cgroup_parent.clone() },
        Arc::clone(&effects),
        events,
    )?;
    let sandboxes = runtime.recover()?;
    let journalled = state.pods.keys().map(|uid| uid.as_str()).collect();
    let known = sandboxes.iter().map(|s| s.uid.as_str()).collect();
    let orphans = orphans::end(&cgroups, &config.cgroup_parent, &journalled, &known)?;
    if !orphans.is_empty() {
        tracing::warn!(pods = ?orphans, "processes of pods that nobody could reach any more were ended: their run directories are gone");
    }
    let cidrs = config.pod_cidrs.iter().map(|text| crate::net::model::pod_range(text)).collect::<Result<Vec<_>, _>>()?;
    let node_ips = if config.node_ips.is_empty() { default_ips() } else { config.node_ips.clone() };
    let capacity = NodeCapacity {
        memory: memory().map_err(|source| OpenError::Host { what: "memory", source })?,
        milli_cpu: std::thread::available_parallelism().map_or(1, |n| n.get() as u64) * 1000,
        pod_pids_limit: config.pod_pids_limit,
    };
    let facts = NodeFacts {
        name: config.node_name.clone(),
        zone: None,
        addresses: node_ips.clone(),
        pod_cidrs: cidrs.clone(),
        node_port_addresses: proxying::node_port_addresses(&config),
        ignored: proxying::ignored(&config),
        bridge: format!("{}0", config.instance),
        resolvers: if serves_names(&config) { cidrs.iter().map(|cidr| ipam::gateway(*cidr)).collect() } else { Vec::new() },
    };
    let proxy = ProxyConfig { table: config.instance.clone(), node: facts.clone(), service_cidrs: service_ranges.clone() };
    let proxy = Proxy::open_with(proxy, proxying::options(&config, &capacity), Arc::clone(&effects))?;
    let servers = proxying::serve(&config, &cidrs).map(|served| proxy.serve(served)).transpose()?;
    let net_config =
        NetConfig { instance: config.instance.clone(), cidrs: cidrs.clone(), run: config.roots.run.clone(), mtu: config.mtu };
    let net = Net::open(net_config, Arc::clone(&effects), Arc::new(HostPorts(proxy.clone())))?;
    // Before, so that what lives has a bridge; and after, since more may have been found to live.
    // A host without a bridge still runs hostNetwork pods; each other pod says why it cannot.
    let ensure = || {
        if keeps && let Err(error) = net.ensure() {
            tracing::error!(error = %crate::obs::chain(&error), "the pods' network is not whole; it is tried again");
        }
    };
    ensure();
    let dns = names(&config, &net, &cidrs)?;
    let living: Vec<(String, PathBuf)> =
        sandboxes.iter().filter(|s| s.alive).filter_map(|s| Some((s.uid.as_str().to_owned(), s.pins.net.clone()?))).collect();
    let attached = net
        .recover(&living)?
        .into_iter()
        .filter_map(|(uid, attachment)| Some((PodUid::parse(&uid).ok()?, attachment.addresses))) // keys are ours, of `living`
        .collect();
    ensure();
    let volumes = Volumes::open(&config.roots.kubelet, Arc::clone(&effects))?;
    // Pods whose volumes ask for no propagation run without it.
    if keeps && let Err(error) = volumes.share() {
        tracing::warn!(error = %crate::obs::chain(&error), "volumes with mountPropagation cannot be mounted in pods");
    }
    let pulls = Pulls::at(&config.roots.run);
    let images = Images::open(images_config(&config)?)?;
    let (known, manifests) = manifests(&store, &state);
    let host = HostFacts::observe().map_err(|source| OpenError::Host { what: "capabilities and devices", source })?;
    let found = Found { store: state, sandboxes, attached, manifests, boot: boot_id.clone(), pulls: pulls.all() };
    let addresses = addresses(&config.roots.state);
    let rooms = Rooms {
        facts,
        service_ranges,
        config,
        boot_id,
        store: Arc::new(store),
        runtime,
        cgroups,
        net,
        proxy,
        _servers: servers,
        images,
        volumes,
        pulls,
        dns,
        host,
        capacity,
        node_ips,
        _instance: held,
    };
    Ok(Start { rooms, found, known, addresses })
}

/// One that cannot be read is told and done without: most addresses follow from names anyway.
fn addresses(state: &std::path::Path) -> Memory {
    let path = state.join(ADDRESSES);
    let read = crate::store::atomic::read_bounded(&path, 16 << 20).map_err(|e| crate::obs::chain(&e).to_string());
    let parsed = read.and_then(|bytes| bytes.map(|b| serde_json::from_slice(&b)).transpose().map_err(|e| e.to_string()));
    parsed.map(Option::unwrap_or_default).unwrap_or_else(|why| {
        tracing::warn!(path = %path.display(), why, "the stored addresses of Services cannot be read; they are looked for anew");
        Memory::default()
    })
}

/// Who only ends pods names none.
fn serves_names(config: &Config) -> bool {
    matches!(config.dns, config::Dns::On | config::Dns::Auto) && config.manifests.is_some()
}

/// Where the bridge's gateways are.
fn names(config: &Config, net: &Net, pods: &[Cidr]) -> Result<Option<Arc<Dns>>, OpenError> {
    let listen = net.gateways();
    if !serves_names(config) || listen.is_empty() {
        return Ok(None);
    }
    let allow = pods.iter().copied().chain(config::loopback()).collect();
    let dns = Dns::start(dns::model::Config {
        domain: config.cluster_domain.clone(),
        listen,
        port: 53,
        allow,
        resolv_conf: "/etc/resolv.conf".into(),
        behind_stub: config::behind_stub(),
        cache_bytes: dns::model::CACHE_BYTES,
    })?;
    Ok(Some(Arc::new(dns)))
}

fn images_config(config: &Config) -> Result<ImagesConfig, OpenError> {
    let mut images = ImagesConfig::at(&config.roots.state);
    if let Some(path) = &config.registries {
        let bad = |why: String| OpenError::Registries { path: path.clone(), why };
        let text = crate::store::atomic::read_bounded(path, 1 << 20)?.ok_or_else(|| bad("there is no such file".to_owned()))?;
        let mut documents = yaml::documents(&text, yaml::Limits::default());
        if let Some(document) = documents.next() {
            let (registries, unknown) =
                document.and_then(|node| node.read::<RegistryConfig>()).map_err(|error| bad(error.to_string()))?;
            for field in unknown {
                tracing::warn!(file = %path.display(), field = field.field, "this field of the registries file has no effect");
            }
            images.registries = registries;
        }
    }
    Ok(images)
}

/// Stored pods, for the source and for the planner. One that cannot be read is told and left out:
/// it can still be ended, and the manifests directory may still have it.
fn manifests(store: &PodStore, state: &PodsState) -> (Vec<DesiredPod>, BTreeMap<PodUid, Arc<crate::api::pod::Pod>>) {
    let mut known = Vec::new();
    let mut pods = BTreeMap::new();
    for uid in state.pods.keys() {
        match store.load_manifest(uid) {
            Ok(Some(raw)) => match source::restore(uid, &raw) {
                Ok(pod) => {
                    pods.insert(uid.clone(), Arc::clone(&pod.pod));
                    known.push(pod);
                }
                Err(error) => tracing::error!(pod = %uid, error = %crate::obs::chain(&error), "a stored pod cannot be read"),
            },
            Ok(None) => tracing::warn!(pod = %uid, "the manifest of a stored pod is missing"),
            Err(error) => tracing::error!(pod = %uid, error = %crate::obs::chain(&error), "a stored pod cannot be read"),
        }
    }
    (known, pods)
}

/// Loopback where no route leads out of the host.
fn default_ips() -> Vec<IpAddr> {
    let found = inet::outward();
    if found.is_empty() { vec![IpAddr::from([127, 0, 0, 1])] } else { found }
}

/// MemTotal in bytes.
fn memory() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| std::io::Error::other("/proc/meminfo has no MemTotal"))
}

/// A channel for runtime events whose receiver is drained into another channel by `forward`.
pub fn forward<T: Send + 'static>(
    name: &'static str,
    mut deliver: impl FnMut(T) -> bool + Send + 'static,
) -> std::io::Result<mpsc::Sender<T>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name(name.to_owned()).stack_size(64 * 1024).spawn(move || {
        for event in receiver {
            if !deliver(event) {
                return;
            }
        }
    })?;
    Ok(sender)
}
