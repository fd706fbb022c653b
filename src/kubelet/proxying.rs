//! What the agent's flags make of its proxy. Pure.
#![deny(clippy::disallowed_methods)]

use std::net::{IpAddr, SocketAddr};

use serde_json::json;

use super::qos::NodeCapacity;
use crate::config::Config;
use crate::config::proxying::{NodePorts, ProxyMode};
use crate::proxy::Options;
use crate::proxy::mode::Mode;
use crate::proxy::model::{Cidr, Ignored, NodePortAddresses};
use crate::proxy::serve::ServeConfig;
use crate::proxy::tuning::Limits;

pub fn node_port_addresses(config: &Config) -> NodePortAddresses {
    match &config.proxying.node_ports {
        NodePorts::All => NodePortAddresses::All,
        NodePorts::Primary => NodePortAddresses::Primary,
        NodePorts::Cidrs(cidrs) => NodePortAddresses::Cidrs(cidrs.clone()),
    }
}

pub fn ignored(config: &Config) -> Ignored {
    let of = &config.proxying;
    Ignored { external_ips: of.ignore_external_ips, load_balancer_ips: of.ignore_load_balancer_ips }
}

/// Who only ends pods serves nothing, and leaves the host as it is.
pub fn options(config: &Config, capacity: &NodeCapacity) -> Options {
    if config.manifests.is_none() {
        return Options { mode: Mode::On, ..Options::default() };
    }
    let mode = match config.proxying.mode {
        ProxyMode::On => Mode::On,
        ProxyMode::Off => Mode::Off,
        ProxyMode::Auto => Mode::Auto,
    };
    Options { mode, follow: Some(config.node_ips.clone()), conntrack: Some(limits(config, capacity)) }
}

fn limits(config: &Config, capacity: &NodeCapacity) -> Limits {
    let of = config.proxying.conntrack;
    Limits {
        cores: capacity.milli_cpu / 1000,
        memory: capacity.memory,
        max_per_core: of.max_per_core,
        min: of.min,
        established: of.established,
        close_wait: of.close_wait,
        liberal: of.liberal,
    }
}

/// None: nothing is to be served.
pub fn serve(config: &Config, pods: &[Cidr]) -> Option<ServeConfig> {
    config.manifests.as_ref()?;
    let of = &config.proxying;
    Some(ServeConfig { metrics: of.metrics, healthz: of.healthz, configz: configz(config, pods) })
}

/// In the form of a KubeProxyConfiguration: the fields that have a meaning here.
fn configz(config: &Config, pods: &[Cidr]) -> String {
    let of = &config.proxying;
    let address = |at: Option<SocketAddr>| at.map(|at| at.to_string()).unwrap_or_default();
    let node_ports = match &of.node_ports {
        NodePorts::All => Vec::new(),
        NodePorts::Primary => vec!["primary".to_owned()],
        NodePorts::Cidrs(cidrs) => cidrs.iter().map(Cidr::to_string).collect(),
    };
    let pods: Vec<String> = pods.iter().map(Cidr::to_string).collect();
    let bind = config.node_ips.first().copied().unwrap_or(IpAddr::from([0, 0, 0, 0]));
    let time = |seconds: Option<u64>, usual: u64| format!("{}s", seconds.unwrap_or(usual));
    let body = json!({ "kubeproxy.config.k8s.io": {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": config.node_name,
        "bindAddress": bind.to_string(),
        "clusterCIDR": pods.join(","),
        "metricsBindAddress": address(of.metrics),
        "healthzBindAddress": address(of.healthz),
        "bindAddressHardFail": false,
        "enableProfiling": false,
        "nodePortAddresses": node_ports,
        "detectLocalMode": "InterfaceNamePrefix",
        "detectLocal": {"interfaceNamePrefix": format!("{}0", config.instance)},
        "nftables": {"masqueradeAll": false, "masqueradeBit": 14},
        "conntrack": {
            "maxPerCore": of.conntrack.max_per_core.unwrap_or(32_768),
            "min": of.conntrack.min.unwrap_or(131_072),
            "tcpEstablishedTimeout": time(of.conntrack.established, 86_400),
            "tcpCloseWaitTimeout": time(of.conntrack.close_wait, 3_600),
            "tcpBeLiberal": of.conntrack.liberal,
        },
    }});
    body.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_told_in_kube_proxys_form() {
        let mut config = Config::at(None, None);
        assert_eq!(serve(&config, &[]), None, "without manifests nothing is served");
        assert_eq!(options(&config, &NodeCapacity { memory: 0, milli_cpu: 0, pod_pids_limit: None }).follow, None);
        config.manifests = Some("/m".into());
        config.node_name = "n".into();
        config.proxying.healthz = None;
        config.proxying.node_ports = NodePorts::Cidrs(vec!["192.0.2.0/24".parse().unwrap()]);
        let served = serve(&config, &["10.88.0.0/16".parse().unwrap()]).unwrap();
        let body: serde_json::Value = serde_json::from_str(&served.configz).unwrap();
        let body = &body["kubeproxy.config.k8s.io"];
        assert_eq!(body["kind"], "KubeProxyConfiguration");
        assert_eq!((&body["metricsBindAddress"], &body["healthzBindAddress"]), (&json!("127.0.0.1:10249"), &json!("")));
        assert_eq!((&body["nodePortAddresses"], &body["clusterCIDR"]), (&json!(["192.0.2.0/24"]), &json!("10.88.0.0/16")));
        assert_eq!(body["conntrack"]["tcpEstablishedTimeout"], "86400s");
    }
}
