//! What the API server would refuse, in its words, and what mends it. Pure.
//!
//! kubernetes/pkg/apis/core/validation. Invariant: a pod that passes has names that are safe as
//! parts of paths, mount paths that are absolute and free of `..`, and no number out of range.

use std::collections::BTreeSet;
use std::fmt;

use crate::api::meta::ObjectMeta;
use crate::api::pod::{DnsPolicy, Pod, PodDnsConfig, PodSecurityContext, PodSpec, SeccompProfile};
use crate::volumes::model::Data;

mod container;
pub(super) use container::subscript;
pub mod names;
mod policy;
mod service;
mod volume;

pub use policy::network_policy;
pub use service::{endpoint_slice, namespace, service};

/// `spec.containers[0].name: Required value`, and the cure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct Invalid {
    pub field: String,
    pub message: String,
}

/// Collects what is wrong, in the API server's kinds of words.
#[derive(Default)]
struct Faults(Vec<Invalid>);

impl Faults {
    fn push(&mut self, field: impl Into<String>, message: String) {
        self.0.push(Invalid { field: field.into(), message });
    }

    fn required(&mut self, field: impl Into<String>, cure: &str) {
        self.push(field, format!("Required value: {cure}"));
    }

    fn invalid(&mut self, field: impl Into<String>, value: impl fmt::Display, why: impl fmt::Display) {
        let value: String = value.to_string().chars().take(80).collect();
        self.push(field, format!("Invalid value: {value:?}: {why}"));
    }

    fn duplicate(&mut self, field: impl Into<String>, value: impl fmt::Display) {
        self.push(field, format!("Duplicate value: \"{value}\""));
    }

    fn unsupported(&mut self, field: impl Into<String>, value: &str, supported: &[&str]) {
        let list: Vec<String> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        self.push(field, format!("Unsupported value: {value:?}: supported values: {}", list.join(", ")));
    }

    /// `None` from the check is fine.
    fn check(&mut self, field: impl Into<String>, value: &str, check: impl Fn(&str) -> Option<String>) {
        if let Some(why) = check(value) {
            self.invalid(field, value, why);
        }
    }

    fn range(&mut self, field: impl Into<String>, value: i64, low: i64, high: i64) {
        if !(low..=high).contains(&value) {
            self.invalid(field, value, format_args!("must be between {low} and {high}, inclusive"));
        }
    }
}

/// Everything that is wrong with a pod that already has its defaults; empty: it may run.
pub fn pod(pod: &Pod) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(&pod.metadata, &mut faults);
    spec(&pod.spec, &mut faults);
    faults.0
}

/// What is wrong with a ConfigMap or Secret.
pub fn config(kind: &str, metadata: &ObjectMeta, data: &Data) -> Vec<Invalid> {
    let mut faults = Faults::default();
    meta(metadata, &mut faults);
    for key in data.keys() {
        faults.check(format!("data[{key}]"), key, names::config_key);
    }
    // The API server's bound, for a Secret also etcd's.
    const MAX: usize = 1 << 20;
    let size: usize = data.values().map(Vec::len).sum();
    if size > MAX {
        faults.push("data", format!("Too long: {size} bytes: a {kind} may have at most {MAX}"));
    }
    faults.0
}

fn meta(meta: &ObjectMeta, faults: &mut Faults) {
    if meta.name.is_empty() {
        faults.required("metadata.name", "name is required");
    } else {
        faults.check("metadata.name", &meta.name, names::subdomain);
    }
    if !meta.namespace.is_empty() {
        faults.check("metadata.namespace", &meta.namespace, names::label);
    }
    for (key, value) in &meta.labels {
        faults.check("metadata.labels", key, names::qualified);
        faults.check(format!("metadata.labels[{key}]"), value, names::label_value);
    }
    for key in meta.annotations.keys() {
        faults.check("metadata.annotations", &key.to_lowercase(), names::qualified);
    }
    const MAX: usize = 256 << 10;
    if meta.annotations.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>() > MAX {
        faults.push("metadata.annotations", format!("Too long: may not be more than {MAX} bytes"));
    }
}

fn spec(spec: &PodSpec, faults: &mut Faults) {
    let volumes = volume::all(&spec.volumes, faults);
    container::all(spec, &volumes, faults);
    if let Some(seconds) = spec.active_deadline_seconds {
        faults.range("spec.activeDeadlineSeconds", seconds, 1, i64::from(i32::MAX));
    }
    if let Some(seconds) = spec.termination_grace_period_seconds {
        faults.range("spec.terminationGracePeriodSeconds", seconds, 0, i64::from(i32::MAX));
    }
    for (field, name) in [("spec.hostname", &spec.hostname), ("spec.subdomain", &spec.subdomain)] {
        if let Some(name) = name.as_deref().filter(|n| !n.is_empty()) {
            faults.check(field, name, names::label);
        }
    }
    for (i, alias) in spec.host_aliases.iter().enumerate() {
        faults.check(format!("spec.hostAliases[{i}].ip"), &alias.ip, names::ip);
        for (j, name) in alias.hostnames.iter().enumerate() {
            faults.check(format!("spec.hostAliases[{i}].hostnames[{j}]"), name, names::subdomain);
        }
    }
    for (i, secret) in spec.image_pull_secrets.iter().enumerate() {
        if secret.name.is_empty() {
            faults.required(format!("spec.imagePullSecrets[{i}].name"), "name the Secret");
        }
    }
    dns(spec.dns_policy, spec.dns_config.as_ref(), faults);
    if let Some(context) = &spec.security_context {
        security(context, spec, faults);
    }
}

fn dns(policy: Option<DnsPolicy>, config: Option<&PodDnsConfig>, faults: &mut Faults) {
    let servers = config.map_or(&[][..], |c| &c.nameservers);
    if policy == Some(DnsPolicy::None) && servers.is_empty() {
        faults.required("spec.dnsConfig.nameservers", "must provide at least one DNS nameserver when `dnsPolicy` is None");
    }
    let Some(config) = config else { return };
    if servers.len() > 3 {
        faults.invalid("spec.dnsConfig.nameservers", servers.len(), "must not have more than 3 nameservers");
    }
    for (i, server) in servers.iter().enumerate() {
        faults.check(format!("spec.dnsConfig.nameservers[{i}]"), server, names::ip);
    }
    if config.searches.len() > 32 || config.searches.iter().map(|s| s.len() + 1).sum::<usize>() > 2049 {
        faults.push("spec.dnsConfig.searches", "Too long: must not have more than 32 search paths or 2048 characters".to_owned());
    }
    for (i, search) in config.searches.iter().enumerate() {
        // A name may be absolute, and `_tcp.x` is a search path too.
        let plain = search.strip_suffix('.').unwrap_or(search).replace('_', "a");
        if search != "." {
            faults.check(format!("spec.dnsConfig.searches[{i}]"), &plain, names::subdomain);
        }
    }
    for (i, option) in config.options.iter().enumerate() {
        let field = format!("spec.dnsConfig.options[{i}]");
        if option.name.is_empty() {
            faults.required(format!("{field}.name"), "name the option");
        }
        let text = format!("{}{}", option.name, option.value.as_deref().unwrap_or_default());
        if text.contains(char::is_whitespace) {
            faults.invalid(field, text, "must not contain white space");
        }
    }
}

/// The largest id that the API takes; one more bit would be -1 to some calls.
const MAX_ID: i64 = i32::MAX as i64;

fn id(field: String, id: Option<i64>, faults: &mut Faults) {
    if let Some(id) = id {
        faults.range(field, id, 0, MAX_ID);
    }
}

fn security(context: &PodSecurityContext, spec: &PodSpec, faults: &mut Faults) {
    const FIELD: &str = "spec.securityContext";
    id(format!("{FIELD}.runAsUser"), context.run_as_user, faults);
    id(format!("{FIELD}.runAsGroup"), context.run_as_group, faults);
    id(format!("{FIELD}.fsGroup"), context.fs_group, faults);
    for (i, group) in context.supplemental_groups.iter().enumerate() {
        id(format!("{FIELD}.supplementalGroups[{i}]"), Some(*group), faults);
    }
    if let Some(profile) = &context.seccomp_profile {
        seccomp(&format!("{FIELD}.seccompProfile"), profile, faults);
    }
    let mut seen = BTreeSet::new();
    for (i, sysctl) in context.sysctls.iter().enumerate() {
        let field = format!("{FIELD}.sysctls[{i}]");
        let name = sysctl.name.replace('/', ".");
        if name.is_empty() {
            faults.required(format!("{field}.name"), "name the sysctl");
        } else if !SAFE_SYSCTLS.contains(&name.as_str()) {
            faults.push(format!("{field}.name"), format!("Forbidden: forbidden sysctl: {name:?} not allowlisted"));
        } else if spec.host_network && name.starts_with("net.") {
            faults.invalid(format!("{field}.name"), &name, "may not be specified when 'hostNetwork' is true");
        } else if spec.host_ipc && name.starts_with("kernel.shm") {
            faults.invalid(format!("{field}.name"), &name, "may not be specified when 'hostIPC' is true");
        }
        if !seen.insert(name.clone()) {
            faults.duplicate(format!("{field}.name"), name);
        }
        if sysctl.value.is_empty() || !sysctl.value.chars().all(|c| c.is_ascii_graphic() || c == ' ' || c == '\t') {
            faults.invalid(format!("{field}.value"), &sysctl.value, "must be one line of printable ASCII");
        }
    }
}

/// The kubelet's safe list: namespaced, and harmless to other pods and the node.
const SAFE_SYSCTLS: &[&str] = &[
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

fn seccomp(field: &str, profile: &SeccompProfile, faults: &mut Faults) {
    const TYPES: &[&str] = &["Localhost", "RuntimeDefault", "Unconfined"];
    let local = profile.localhost_profile.as_deref();
    match profile.kind.as_str() {
        "" => faults.required(format!("{field}.type"), "type is required when seccompProfile is set"),
        "Localhost" => match local {
            None | Some("") => faults.required(
                format!("{field}.localhostProfile"),
                "must be set when seccomp type is Localhost: a path below the kubelet's seccomp directory",
            ),
            Some(path) => faults.check(format!("{field}.localhostProfile"), path, names::relative_path),
        },
        "RuntimeDefault" | "Unconfined" => {
            if let Some(path) = local {
                faults.invalid(format!("{field}.localhostProfile"), path, "can only be set when seccomp type is Localhost");
            }
        }
        other => faults.unsupported(format!("{field}.type"), other, TYPES),
    }
}

#[cfg(test)]
mod tests;
