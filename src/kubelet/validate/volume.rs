//! Volumes of a pod.

use std::collections::BTreeSet;

use super::{Faults, names};
use crate::api::pod::{KeyToPath, Volume};

/// Checks all; gives the names that mounts may refer to.
pub(super) fn all<'a>(volumes: &'a [Volume], faults: &mut Faults) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    for (i, volume) in volumes.iter().enumerate() {
        let field = format!("spec.volumes[{i}]");
        if volume.name.is_empty() {
            faults.required(format!("{field}.name"), "name the volume");
        } else {
            faults.check(format!("{field}.name"), &volume.name, names::label);
        }
        if !seen.insert(volume.name.as_str()) {
            faults.duplicate(format!("{field}.name"), &volume.name);
        }
        one(&field, volume, faults);
    }
    seen
}

fn one(field: &str, volume: &Volume, faults: &mut Faults) {
    let sources = [volume.empty_dir.is_some(), volume.host_path.is_some(), volume.config_map.is_some(), volume.secret.is_some()];
    if sources.iter().filter(|s| **s).count() > 1 {
        faults.push(field, "Forbidden: may not specify more than 1 volume type".to_owned());
    }
    if let Some(empty) = &volume.empty_dir {
        match empty.medium.as_str() {
            "" | "Memory" => {}
            other if other.starts_with("HugePages") => {
                faults.invalid(format!("{field}.emptyDir.medium"), other, "huge pages are not supported by this version");
            }
            other => faults.unsupported(format!("{field}.emptyDir.medium"), other, &["", "Memory"]),
        }
        if let Some(limit) = empty.size_limit.as_ref().filter(|l| l.is_negative()) {
            faults.invalid(format!("{field}.emptyDir.sizeLimit"), limit, "must be greater than or equal to 0");
        }
    }
    if let Some(host) = &volume.host_path {
        if host.path.is_empty() {
            faults.required(format!("{field}.hostPath.path"), "name a path of the node");
        } else {
            faults.check(format!("{field}.hostPath.path"), &host.path, names::absolute_path);
        }
        let kind = host.kind.as_deref().unwrap_or_default();
        if !HOST_PATH_TYPES.contains(&kind) {
            faults.unsupported(format!("{field}.hostPath.type"), kind, HOST_PATH_TYPES);
        }
    }
    if let Some(map) = &volume.config_map {
        if map.name.is_empty() {
            faults.required(format!("{field}.configMap.name"), "name the ConfigMap");
        }
        files(&format!("{field}.configMap"), map.default_mode, &map.items, faults);
    }
    if let Some(secret) = &volume.secret {
        if secret.secret_name.is_empty() {
            faults.required(format!("{field}.secret.secretName"), "name the Secret");
        }
        files(&format!("{field}.secret"), secret.default_mode, &secret.items, faults);
    }
}

const HOST_PATH_TYPES: &[&str] =
    &["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

fn files(field: &str, default_mode: Option<i32>, items: &[KeyToPath], faults: &mut Faults) {
    let mode = |field: String, mode: Option<i32>, faults: &mut Faults| {
        if let Some(mode) = mode.filter(|m| !(0..=0o777).contains(m)) {
            faults.invalid(field, mode, "must be a number between 0 and 0777 (octal), both inclusive");
        }
    };
    mode(format!("{field}.defaultMode"), default_mode, faults);
    for (i, item) in items.iter().enumerate() {
        let field = format!("{field}.items[{i}]");
        if item.key.is_empty() {
            faults.required(format!("{field}.key"), "name the key");
        }
        if item.path.is_empty() {
            faults.required(format!("{field}.path"), "name the file");
        } else if item.path.starts_with("..") {
            faults.invalid(format!("{field}.path"), &item.path, "must not start with '..'");
        } else {
            faults.check(format!("{field}.path"), &item.path, names::relative_path);
        }
        mode(format!("{field}.mode"), item.mode, faults);
    }
}
