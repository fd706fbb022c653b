//! What one agent is told: directories, names, limits. Parsed once; no defaults live elsewhere.
//!
//! `--root DIR` moves every root together; `--instance NAME` moves every name on the host
//! (bridge, cgroup, nftables table). An agent with its own `--root` and no `--instance` gets an
//! instance name derived from the root, so two agents never share a name by accident.

pub mod proxying;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::api::cidr::Cidr;
use crate::api::quantity::Quantity;
use proxying::Proxying;

/// Everything that `coracle agent` can be told.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub roots: Roots,
    /// Names bridge `<instance>0`, the nftables tables and, where it is not the default, the cgroup.
    pub instance: String,
    /// Where Pods, Services and the rest are read from. None: only what is stored runs on.
    pub manifests: Option<PathBuf>,
    pub node_name: String,
    /// Empty: the address of the interface of the default route.
    pub node_ips: Vec<IpAddr>,
    /// `address/prefix`, one a family at most.
    pub pod_cidrs: Vec<String>,
    /// `address/prefix` of the ClusterIPs, one a family at most; the first one's family is the default.
    pub service_cidrs: Vec<String>,
    /// None: the smallest MTU among the links of the default routes.
    pub mtu: Option<u32>,
    /// The delegated cgroup below which all of ours lie.
    pub cgroup_parent: String,
    /// Mirrors, CAs and credentials, in the form of k3s's registries.yaml.
    pub registries: Option<PathBuf>,
    pub log_max_size: u64,
    pub log_max_files: u32,
    pub max_pods: usize,
    pub pod_pids_limit: Option<i64>,
    /// A container that names no seccomp profile gets RuntimeDefault; false: none.
    pub seccomp_default: bool,
    /// Seconds that a pod may take to end when the node stops.
    pub stop_grace: i64,
    pub cluster_domain: String,
    /// Whether the node's own DNS server runs.
    pub dns: Dns,
    /// Nameservers of pods that ask for the cluster's. Empty: the node's own server.
    pub cluster_dns: Vec<IpAddr>,
    pub proxying: Proxying,
    /// NetworkPolicies are enforced.
    pub policy: bool,
}

/// `--dns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dns {
    On,
    Off,
    /// On while the node is alone: nobody else names Services there.
    #[default]
    Auto,
}

pub const INSTANCE: &str = "coracle";
pub const CLUSTER_DOMAIN: &str = "cluster.local";

impl Config {
    /// What holds where nothing else is said.
    pub fn at(root: Option<&Path>, instance: Option<&str>) -> Config {
        let instance = match (instance, root) {
            (Some(name), _) => name.to_owned(),
            (None, None) => INSTANCE.to_owned(),
            (None, Some(root)) => derived_instance(root),
        };
        Config {
            roots: Roots::at(root),
            cgroup_parent: if instance == INSTANCE { "/".to_owned() } else { format!("/{instance}") },
            instance,
            manifests: None,
            node_name: String::new(),
            node_ips: Vec::new(),
            service_cidrs: vec!["10.96.0.0/16".to_owned(), "fd88:96::/112".to_owned()],
            pod_cidrs: vec!["10.88.0.0/16".to_owned(), "fd88:88::/64".to_owned()],
            mtu: None,
            registries: None,
            log_max_size: 10 << 20,
            log_max_files: 5,
            max_pods: 110,
            pod_pids_limit: None,
            seccomp_default: true,
            stop_grace: 60,
            cluster_domain: CLUSTER_DOMAIN.to_owned(),
            dns: Dns::Auto,
            cluster_dns: Vec::new(),
            proxying: Proxying::default(),
            policy: true,
        }
    }
}

/// `c` and 8 hex digits of the root: short enough for the name of a bridge.
fn derived_instance(root: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let hash = ring::digest::digest(&ring::digest::SHA256, root.as_os_str().as_bytes());
    let hex: String = hash.as_ref().iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("c{hex}")
}

/// 1 to 13 of `a-z0-9-`, a letter first: what a bridge, a table and a cgroup can be called.
pub fn instance_name(text: &str) -> Option<&str> {
    let ok = (1..=13).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    ok.then_some(text)
}

/// `10Mi`, `500k`, `1048576`; at least 1 KiB.
pub fn size(text: &str) -> Option<u64> {
    let size = u64::try_from(Quantity::parse(text).ok()?.units()).ok()?;
    (size >= 1024).then_some(size)
}

/// Files that may name the servers behind a resolver on the node's loopback (systemd-resolved,
/// NetworkManager's dnsmasq), best first.
pub fn behind_stub() -> Vec<PathBuf> {
    ["/run/systemd/resolve/resolv.conf", "/run/NetworkManager/no-stub-resolv.conf"].map(PathBuf::from).to_vec()
}

pub fn loopback() -> [Cidr; 2] {
    [IpAddr::from([127, 0, 0, 0]), IpAddr::from(std::net::Ipv6Addr::LOCALHOST)]
        .map(|address| Cidr { address, prefix: if address.is_ipv4() { 8 } else { 128 } })
}

/// Where everything of one agent lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// tmpfs of our own: sockets, exit files, bundles, namespace pins, effects journal.
    pub run: PathBuf,
    /// Disk journal, images, upper directories.
    pub state: PathBuf,
    /// `/var/lib/kubelet`: pods' volumes, where others look for them.
    pub kubelet: PathBuf,
    /// `/var/log`: holds `pods/` and `containers/`.
    pub logs: PathBuf,
}

impl Roots {
    /// The paths that the field expects, or all below `root`.
    pub fn at(root: Option<&Path>) -> Roots {
        match root {
            None => Roots {
                run: "/run/coracle".into(),
                state: "/var/lib/coracle".into(),
                kubelet: "/var/lib/kubelet".into(),
                logs: "/var/log".into(),
            },
            Some(root) => {
                Roots { run: root.join("run"), state: root.join("state"), kubelet: root.join("kubelet"), logs: root.join("log") }
            }
        }
    }

    /// The agent's socket for the client verbs, mode 0600.
    pub fn socket(&self) -> PathBuf {
        self.run.join("agent.sock")
    }
    /// `<run>/pods/<uid>`: a pod's run directory (monitor socket, exit files, bundles).
    pub fn pod_run(&self, uid: &str) -> PathBuf {
        self.run.join("pods").join(uid)
    }
    /// `<kubelet>/pods/<uid>`.
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.kubelet.join("pods").join(uid)
    }
    /// `<state>/containers/<id>`: a container's upper and work directories.
    pub fn container_dir(&self, id: &str) -> PathBuf {
        self.state.join("containers").join(id)
    }
    /// `<logs>/containers/<pod>_<ns>_<container>-<id>.log`: a link for log shippers.
    pub fn log_link(&self, namespace: &str, pod: &str, container: &str, id: &str) -> PathBuf {
        self.logs.join("containers").join(format!("{pod}_{namespace}_{container}-{id}.log"))
    }
    /// `<logs>/pods/<ns>_<pod>_<uid>`.
    pub fn pod_logs(&self, namespace: &str, pod: &str, uid: &str) -> PathBuf {
        self.logs.join("pods").join(format!("{namespace}_{pod}_{uid}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_roots_never_share_a_name_by_accident() {
        let a = Config::at(Some(Path::new("/srv/a")), None);
        let b = Config::at(Some(Path::new("/srv/b")), None);
        assert_ne!(a.instance, b.instance);
        assert!(instance_name(&a.instance).is_some(), "{}", a.instance);
        assert_eq!(a.cgroup_parent, format!("/{}", a.instance));
        assert_eq!(Config::at(None, None).cgroup_parent, "/");
        assert_eq!(Config::at(None, Some("edge")).roots, Roots::at(None));
    }

    #[test]
    fn names_and_sizes_that_cannot_be_are_refused() {
        for bad in ["", "A", "0a", "a_b", "a/b", "abcdefghijklmn", "é"] {
            assert_eq!(instance_name(bad), None, "{bad}");
        }
        assert_eq!(size("10Mi"), Some(10 << 20));
        assert_eq!((size("12"), size("-1Mi"), size("x")), (None, None, None));
    }
}
