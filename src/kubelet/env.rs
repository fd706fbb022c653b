//! A container's environment, command and arguments, as the kubelet makes them. Pure.
//!
//! Services first, then envFrom, then env; a later name wins: `$(NAME)` in values, command and args stands for
//! what was defined before, `$$` for `$`, an unknown name for itself. What a ConfigMap or Secret
//! lacks is an error with the kubelet's words (CreateContainerConfigError) unless it is optional.
//! kubernetes/pkg/kubelet/kubelet_pods.go, third_party/forked/golang/expansion.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::api::pod::{Container, EnvFromSource, EnvVarSource, KeySelector, OptionalReference, Pod, ResourceFieldSelector};
use crate::api::quantity::Quantity;
use crate::kubelet::validate::{self, names};
use crate::volumes::model::{Contents, Data};

/// What the kubelet knows about a pod and its node beyond the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    pub node_name: String,
    /// First one is `status.podIP`; the host's with hostNetwork.
    pub pod_ips: Vec<IpAddr>,
    pub host_ips: Vec<IpAddr>,
    /// What the node can give to pods: default of absent limits in resourceFieldRef.
    pub allocatable_milli_cpu: i64,
    pub allocatable_memory: i64,
    pub allocatable_storage: i64,
    /// Of Services; anything that the container names itself goes before them.
    pub services: Vec<(String, String)>,
}

/// Command and args are empty where the image's own apply.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// By name, one value each; to be laid over the image's environment. May hold secrets.
    pub env: Vec<(String, String)>,
    pub command: Vec<String>,
    pub args: Vec<String>,
    /// Names that envFrom skipped: for one log line.
    pub warnings: Vec<String>,
}

/// Values may be secrets: only names are printed.
impl std::fmt::Debug for Resolved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.env.iter().map(|(name, _)| name.as_str()).collect();
        write!(f, "Resolved({names:?}, {} + {} arguments)", self.command.len(), self.args.len())
    }
}

/// CreateContainerConfigError; the messages are the kubelet's own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey { key: String, kind: &'static str, namespace: String, name: String },
    #[error(
        "key {key} in {kind} {namespace}/{name} is no UTF-8 text without NUL bytes, so it cannot be an environment variable: mount it as a file"
    )]
    NoText { key: String, kind: &'static str, namespace: String, name: String },
    #[error("field label not supported: {0}")]
    Field(String),
    #[error("container {0} not found")]
    NoContainer(String),
    #[error(
        "its environment takes {kib} KiB and a program is started with {} KiB at most (execve(2)); {services} of its variables are of Services: set enableServiceLinks: false, or mount large values as files",
        MOST / 1024
    )]
    TooLarge { kib: usize, services: usize },
}

/// Bytes of variables and arguments: a quarter of the usual stack limit of 8 MiB.
const MOST: usize = 2 << 20;

/// Everything that the environment of one container depends on.
struct Scope<'a> {
    pod: &'a Pod,
    container: &'a Container,
    facts: &'a Facts,
    contents: &'a dyn Contents,
}

pub fn resolve(pod: &Pod, container: &Container, facts: &Facts, contents: &dyn Contents) -> Result<Resolved, EnvError> {
    let scope = Scope { pod, container, facts, contents };
    let mut env: BTreeMap<String, String> = facts.services.iter().cloned().collect();
    let mut warnings = Vec::new();
    for from in &container.env_from {
        scope.whole(from, &mut env, &mut warnings)?;
    }
    for var in &container.env {
        let value = match &var.value_from {
            Some(source) if var.value.is_empty() => match scope.value_from(source)? {
                Some(value) => value,
                None => continue,
            },
            _ => expand(&var.value, &env),
        };
        env.insert(var.name.clone(), value);
    }
    let expanded = |texts: &[String]| texts.iter().map(|text| expand(text, &env)).collect();
    let (command, args) = (expanded(&container.command), expanded(&container.args));
    // Each has a NUL and a pointer, a variable also its `=`.
    let texts = env.iter().map(|(name, value)| name.len() + value.len() + 10);
    let texts = texts.chain([&command, &args].into_iter().flatten().map(|text: &String| text.len() + 9));
    let size: usize = texts.sum();
    if size > MOST {
        let services = facts.services.iter().filter(|(name, _)| env.contains_key(name)).count();
        return Err(EnvError::TooLarge { kib: size / 1024, services });
    }
    Ok(Resolved { env: env.into_iter().collect(), command, args, warnings })
}

impl Scope<'_> {
    fn namespace(&self) -> &str {
        &self.pod.metadata.namespace
    }

    /// All keys of a ConfigMap or Secret.
    fn whole(
        &self,
        from: &EnvFromSource,
        env: &mut BTreeMap<String, String>,
        warnings: &mut Vec<String>,
    ) -> Result<(), EnvError> {
        let (kind, reference, data): (_, &OptionalReference, _) = match (&from.config_map_ref, &from.secret_ref) {
            (Some(map), _) => ("configMap", map, self.contents.config_map(self.namespace(), &map.name)),
            (None, Some(secret)) => ("secret", secret, self.contents.secret(self.namespace(), &secret.name)),
            (None, None) => return Ok(()),
        };
        let name = &reference.name;
        let Some(data) = data else {
            return match (reference.optional, kind) {
                (Some(true), _) => Ok(()),
                (_, "secret") => Err(EnvError::NoSecret(name.clone())),
                _ => Err(EnvError::NoConfigMap(name.clone())),
            };
        };
        let mut skipped = Vec::new();
        for (key, value) in data {
            let key = format!("{}{key}", from.prefix);
            match text(value) {
                Some(value) if names::env_name(&key).is_none() => drop(env.insert(key, value)),
                _ => skipped.push(key),
            }
        }
        if !skipped.is_empty() {
            warnings.push(format!(
                "Keys [{}] from the EnvFrom {kind} {}/{name} were skipped since they are considered invalid environment variable names or values.",
                skipped.join(", "),
                self.namespace()
            ));
        }
        Ok(())
    }

    /// None: an optional key that is not there; the variable is left out.
    fn value_from(&self, source: &EnvVarSource) -> Result<Option<String>, EnvError> {
        if let Some(field) = &source.field_ref {
            return self.field(&field.field_path).map(Some);
        }
        if let Some(selector) = &source.resource_field_ref {
            return self.resource(selector).map(Some);
        }
        if let Some(selector) = &source.config_map_key_ref {
            let data = self.contents.config_map(self.namespace(), &selector.name);
            return self.key("ConfigMap", selector, data);
        }
        if let Some(selector) = &source.secret_key_ref {
            let data = self.contents.secret(self.namespace(), &selector.name);
            return self.key("Secret", selector, data);
        }
        Ok(Some(String::new()))
    }

    fn key(&self, kind: &'static str, selector: &KeySelector, data: Option<&Data>) -> Result<Option<String>, EnvError> {
        let (name, key) = (selector.name.clone(), selector.key.clone());
        let optional = selector.optional == Some(true);
        let namespace = self.namespace().to_owned();
        match data.map(|data| data.get(&key)) {
            Some(Some(value)) => text(value).map(Some).ok_or(EnvError::NoText { key, kind, namespace, name }),
            _ if optional => Ok(None),
            None if kind == "Secret" => Err(EnvError::NoSecret(name)),
            None => Err(EnvError::NoConfigMap(name)),
            Some(None) => Err(EnvError::NoKey { key, kind, namespace, name }),
        }
    }

    fn field(&self, path: &str) -> Result<String, EnvError> {
        let meta = &self.pod.metadata;
        if let Some((map, key)) = validate::subscript(path) {
            let map = if map == "labels" { &meta.labels } else { &meta.annotations };
            return Ok(map.get(key).cloned().unwrap_or_default());
        }
        let joined = |ips: &[IpAddr]| ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(",");
        let first = |ips: &[IpAddr]| ips.first().map(IpAddr::to_string).unwrap_or_default();
        Ok(match path {
            "metadata.name" => meta.name.clone(),
            "metadata.namespace" => meta.namespace.clone(),
            "metadata.uid" => meta.uid.clone(),
            "spec.nodeName" => self.facts.node_name.clone(),
            // Nobody gives a pod of a node alone an account.
            "spec.serviceAccountName" => String::new(),
            "status.podIP" => first(&self.facts.pod_ips),
            "status.podIPs" => joined(&self.facts.pod_ips),
            "status.hostIP" => first(&self.facts.host_ips),
            "status.hostIPs" => joined(&self.facts.host_ips),
            other => return Err(EnvError::Field(other.to_owned())),
        })
    }

    fn resource(&self, selector: &ResourceFieldSelector) -> Result<String, EnvError> {
        let container = match selector.container_name.as_deref().filter(|n| !n.is_empty()) {
            None => self.container,
            Some(name) => {
                let all = self.pod.spec.containers.iter().chain(&self.pod.spec.init_containers);
                all.into_iter().find(|c| c.name == name).ok_or_else(|| EnvError::NoContainer(name.to_owned()))?
            }
        };
        let unknown = || EnvError::Field(selector.resource.clone());
        let (list, name) = selector.resource.split_once('.').ok_or_else(unknown)?;
        let milli = name == "cpu";
        let measure = |q: &Quantity| if milli { q.milli() } else { q.units() };
        let limits = list == "limits";
        let amounts = if limits { &container.resources.limits } else { &container.resources.requests };
        let allocatable = match name {
            "cpu" => self.facts.allocatable_milli_cpu,
            "memory" => self.facts.allocatable_memory,
            "ephemeral-storage" => self.facts.allocatable_storage,
            _ => return Err(unknown()),
        };
        let amount = amounts.get(name).map(measure).filter(|a| *a != 0);
        let amount = amount.unwrap_or(if limits { allocatable } else { 0 });
        let one = if milli { 1000 } else { 1 };
        let divisor = selector.divisor.as_ref().map(measure).filter(|d| *d > 0).unwrap_or(one);
        let up = i64::from(amount.rem_euclid(divisor) != 0);
        Ok((amount.div_euclid(divisor) + up).to_string())
    }
}

/// What can be an environment variable's value.
fn text(value: &[u8]) -> Option<String> {
    if value.contains(&0) { None } else { String::from_utf8(value.to_vec()).ok() }
}

/// Replaces `$(NAME)` by its value where it has one, and `$$` by `$`; all else stays.
pub fn expand(input: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(input.len());
    let mut rest = input;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        rest = after;
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|inner| inner.split_once(')')) {
            match env.get(name) {
                Some(value) => out.push_str(value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                }
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
