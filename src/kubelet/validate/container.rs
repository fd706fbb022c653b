//! Containers of a pod: names, images, ports, environment, resources, mounts, security.

use std::collections::BTreeSet;

use super::{Faults, id, names, seccomp};
use crate::api::pod::{
    Container, ContainerPort, EnvVar, EnvVarSource, MountPropagation, PodSpec, ResourceRequirements, SecurityContext,
};

pub(super) fn all(spec: &PodSpec, volumes: &BTreeSet<&str>, faults: &mut Faults) {
    if spec.containers.is_empty() {
        faults.required("spec.containers", "a pod needs at least one container");
    }
    let mut seen = BTreeSet::new();
    // Init containers run one after the other: each may use a host port that the next uses too.
    let mut host_ports = BTreeSet::new();
    let lists = [("initContainers", &spec.init_containers), ("containers", &spec.containers)];
    for (list, containers) in lists {
        for (i, container) in containers.iter().enumerate() {
            let field = format!("spec.{list}[{i}]");
            if container.name.is_empty() {
                faults.required(format!("{field}.name"), "name the container");
            } else {
                faults.check(format!("{field}.name"), &container.name, names::label);
                if !seen.insert(container.name.as_str()) {
                    faults.duplicate(format!("{field}.name"), &container.name);
                }
            }
            if list == "initContainers" {
                host_ports.clear();
            }
            one(&field, container, spec, volumes, &mut host_ports, faults);
        }
        host_ports.clear();
    }
}

type HostPorts = BTreeSet<(String, String, u16)>;

fn one(
    field: &str,
    container: &Container,
    spec: &PodSpec,
    volumes: &BTreeSet<&str>,
    host_ports: &mut HostPorts,
    faults: &mut Faults,
) {
    let image = &container.image;
    if image.is_empty() {
        faults.required(format!("{field}.image"), "name the image to run");
    } else if image.trim() != image {
        faults.invalid(format!("{field}.image"), image, "must not have leading or trailing whitespace");
    }
    let mut port_names = BTreeSet::new();
    for (i, port) in container.ports.iter().enumerate() {
        let field = format!("{field}.ports[{i}]");
        if !port.name.is_empty() {
            faults.check(format!("{field}.name"), &port.name, names::port_name);
            if !port_names.insert(&port.name) {
                faults.duplicate(format!("{field}.name"), &port.name);
            }
        }
        self::port(&field, port, spec.host_network, host_ports, faults);
    }
    for (i, var) in container.env.iter().enumerate() {
        env(&format!("{field}.env[{i}]"), var, spec, faults);
    }
    for (i, from) in container.env_from.iter().enumerate() {
        let field = format!("{field}.envFrom[{i}]");
        if !from.prefix.is_empty() {
            faults.check(format!("{field}.prefix"), &from.prefix, names::env_name);
        }
        match (&from.config_map_ref, &from.secret_ref) {
            (None, None) => {
                faults.push(&field, "Invalid value: \"\": must specify one of: `configMapRef` or `secretRef`".to_owned())
            }
            (Some(_), Some(_)) => {
                faults.push(&field, "Invalid value: \"\": may not have more than one field specified at a time".to_owned());
            }
            (Some(map), None) if map.name.is_empty() => {
                faults.required(format!("{field}.configMapRef.name"), "name the ConfigMap")
            }
            (None, Some(secret)) if secret.name.is_empty() => {
                faults.required(format!("{field}.secretRef.name"), "name the Secret")
            }
            _ => {}
        }
    }
    resources(&format!("{field}.resources"), &container.resources, faults);
    mounts(field, container, volumes, faults);
    if let Some(path) = &container.termination_message_path {
        faults.check(format!("{field}.terminationMessagePath"), path, names::absolute_path);
    }
    if let Some(context) = &container.security_context {
        security(&format!("{field}.securityContext"), context, faults);
    }
}

fn port(field: &str, port: &ContainerPort, host_network: bool, host_ports: &mut HostPorts, faults: &mut Faults) {
    if port.container_port == 0 {
        faults.required(format!("{field}.containerPort"), "must be between 1 and 65535, inclusive");
    }
    let address = port.host_ip.as_deref().unwrap_or_default();
    if !address.is_empty() {
        faults.check(format!("{field}.hostIP"), address, names::ip);
    }
    let Some(host_port) = port.host_port.filter(|p| *p != 0) else { return };
    if host_network && host_port != port.container_port {
        faults.invalid(format!("{field}.containerPort"), port.container_port, "must match `hostPort` when `hostNetwork` is true");
    }
    let protocol = format!("{:?}", port.protocol);
    if !host_ports.insert((protocol.clone(), address.to_owned(), host_port)) {
        faults.duplicate(format!("{field}.hostPort"), format_args!("{protocol}/{address}/{host_port}"));
    }
}

fn env(field: &str, var: &EnvVar, spec: &PodSpec, faults: &mut Faults) {
    if var.name.is_empty() {
        faults.required(format!("{field}.name"), "name the variable");
    } else {
        faults.check(format!("{field}.name"), &var.name, names::env_name);
    }
    let Some(from) = &var.value_from else { return };
    let field = format!("{field}.valueFrom");
    let count = usize::from(from.field_ref.is_some())
        + usize::from(from.resource_field_ref.is_some())
        + usize::from(from.config_map_key_ref.is_some())
        + usize::from(from.secret_key_ref.is_some());
    match count {
        0 => faults.push(
            &field,
            "Invalid value: \"\": must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
                .to_owned(),
        ),
        1 => value_from(&field, from, spec, faults),
        _ => faults.push(&field, "Invalid value: \"\": may not have more than one field specified at a time".to_owned()),
    }
    if !var.value.is_empty() {
        faults.push(&field, "Invalid value: \"\": may not be specified when `value` is not empty".to_owned());
    }
}

fn value_from(field: &str, from: &EnvVarSource, spec: &PodSpec, faults: &mut Faults) {
    if let Some(selector) = &from.field_ref {
        let path = &selector.field_path;
        if path.is_empty() {
            faults.required(format!("{field}.fieldRef.fieldPath"), "name a field such as metadata.name");
        } else if !FIELD_PATHS.contains(&path.as_str()) && subscript(path).is_none() {
            faults.unsupported(format!("{field}.fieldRef.fieldPath"), path, FIELD_PATHS);
        }
    }
    if let Some(selector) = &from.resource_field_ref {
        if !RESOURCE_FIELDS.contains(&selector.resource.as_str()) {
            faults.unsupported(format!("{field}.resourceFieldRef.resource"), &selector.resource, RESOURCE_FIELDS);
        }
        if let Some(name) = selector.container_name.as_deref().filter(|n| !n.is_empty())
            && !spec.containers.iter().chain(&spec.init_containers).any(|c| c.name == name)
        {
            faults.invalid(format!("{field}.resourceFieldRef.containerName"), name, "no container of the pod has this name");
        }
        if let Some(divisor) = &selector.divisor {
            let allowed = match selector.resource.ends_with(".cpu") {
                true => ["0", "1", "1m"].as_slice(),
                false => &["0", "1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"],
            };
            if !allowed.contains(&divisor.to_string().as_str()) {
                faults.unsupported(format!("{field}.resourceFieldRef.divisor"), &divisor.to_string(), allowed);
            }
        }
    }
    for (kind, selector) in [("configMapKeyRef", &from.config_map_key_ref), ("secretKeyRef", &from.secret_key_ref)] {
        let Some(selector) = selector else { continue };
        if selector.name.is_empty() {
            faults.required(format!("{field}.{kind}.name"), "name the object");
        }
        if selector.key.is_empty() {
            faults.required(format!("{field}.{kind}.key"), "name the key");
        } else {
            faults.check(format!("{field}.{kind}.key"), &selector.key, names::config_key);
        }
    }
}

const FIELD_PATHS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

const RESOURCE_FIELDS: &[&str] =
    &["limits.cpu", "limits.ephemeral-storage", "limits.memory", "requests.cpu", "requests.ephemeral-storage", "requests.memory"];

/// `metadata.labels['key']` → (`labels`, `key`); only where it is one of the two maps.
pub(in crate::kubelet) fn subscript(path: &str) -> Option<(&str, &str)> {
    let rest = path.strip_prefix("metadata.")?;
    let (map, key) = rest.split_once("['")?;
    let key = key.strip_suffix("']").filter(|k| !k.is_empty())?;
    matches!(map, "labels" | "annotations").then_some((map, key))
}

fn resources(field: &str, resources: &ResourceRequirements, faults: &mut Faults) {
    for (list, amounts) in [("limits", &resources.limits), ("requests", &resources.requests)] {
        for (name, amount) in amounts {
            let field = format!("{field}.{list}[{name}]");
            if amount.is_negative() {
                faults.invalid(field, amount, "must be greater than or equal to 0");
            } else if !matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
                faults.invalid(field, name, "this node has no such resource: cpu, memory and ephemeral-storage are known");
            }
        }
    }
    for (name, request) in &resources.requests {
        if let Some(limit) = resources.limits.get(name)
            && request.nano() > limit.nano()
        {
            let why = format!("must be less than or equal to {name} limit of {limit}");
            faults.invalid(format!("{field}.requests"), request, why);
        }
    }
}

fn mounts(field: &str, container: &Container, volumes: &BTreeSet<&str>, faults: &mut Faults) {
    let mut seen = BTreeSet::new();
    for (i, mount) in container.volume_mounts.iter().enumerate() {
        let field = format!("{field}.volumeMounts[{i}]");
        if mount.name.is_empty() {
            faults.required(format!("{field}.name"), "name the volume");
        } else if !volumes.contains(mount.name.as_str()) {
            faults.push(format!("{field}.name"), format!("Not found: \"{}\": no volume of the pod has this name", mount.name));
        }
        let path = &mount.mount_path;
        if path.is_empty() {
            faults.required(format!("{field}.mountPath"), "name a path of the container");
        } else {
            faults.check(format!("{field}.mountPath"), path, names::absolute_path);
        }
        let plain = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect::<Vec<_>>().join("/");
        // What lies over /proc would stand in for the masks and the runtime's own look at it.
        if path.starts_with('/') && (plain.is_empty() || plain == "proc" || plain.starts_with("proc/")) {
            faults.invalid(format!("{field}.mountPath"), path, "must not be / or lie in /proc");
        } else if !seen.insert(plain) {
            faults.invalid(format!("{field}.mountPath"), path, "must be unique");
        }
        faults.check(format!("{field}.subPath"), &mount.sub_path, names::relative_path);
        let privileged = container.security_context.as_ref().and_then(|c| c.privileged).unwrap_or(false);
        if mount.mount_propagation == Some(MountPropagation::Bidirectional) && !privileged {
            faults.push(
                format!("{field}.mountPropagation"),
                "Forbidden: Bidirectional mount propagation is available only to privileged containers".to_owned(),
            );
        }
    }
}

fn security(field: &str, context: &SecurityContext, faults: &mut Faults) {
    id(format!("{field}.runAsUser"), context.run_as_user, faults);
    id(format!("{field}.runAsGroup"), context.run_as_group, faults);
    if let Some(profile) = &context.seccomp_profile {
        seccomp(&format!("{field}.seccompProfile"), profile, faults);
    }
    if context.allow_privilege_escalation == Some(false) {
        let adds = context.capabilities.as_ref().map_or(&[][..], |c| &c.add);
        let admin = adds.iter().any(|c| matches!(c.to_uppercase().as_str(), "SYS_ADMIN" | "CAP_SYS_ADMIN"));
        if context.privileged == Some(true) {
            faults.invalid(field, "", "cannot set `allowPrivilegeEscalation` to false and `privileged` to true");
        } else if admin {
            faults.invalid(field, "", "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN");
        }
    }
}
