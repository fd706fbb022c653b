//! What a volume's directory is to hold, from the pod and the contents it names. Pure.

use std::collections::BTreeMap;

use super::model::Data;
use crate::api::pod::{Container, EmptyDirVolume, KeyToPath, Pod, Volume};

/// The directory below `volumes/` for each type, as the kubelet names them.
pub fn plugin(volume: &Volume) -> &'static str {
    if volume.config_map.is_some() {
        "kubernetes.io~configmap"
    } else if volume.secret.is_some() {
        "kubernetes.io~secret"
    } else {
        "kubernetes.io~empty-dir"
    }
}

/// Files of a ConfigMap or Secret volume by their path inside it.
pub type Files<'a> = BTreeMap<String, File<'a>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File<'a> {
    pub bytes: &'a [u8],
    pub mode: u32,
}

/// What a volume asks for.
pub struct Wish<'a> {
    /// `configmap` or `secret`, for messages.
    pub kind: &'static str,
    pub name: &'a str,
    pub items: &'a [KeyToPath],
    pub default_mode: Option<i32>,
    pub optional: bool,
}

/// The files, or the kubelet's words for what is missing.
pub fn files<'a>(wish: &Wish<'a>, data: Option<&'a Data>) -> Result<Files<'a>, String> {
    let mode = |mode: Option<i32>| mode.or(wish.default_mode).unwrap_or(0o644) as u32 & 0o777;
    let mut files = Files::new();
    let Some(data) = data else {
        return if wish.optional { Ok(files) } else { Err(format!("{} \"{}\" not found", wish.kind, wish.name)) };
    };
    if wish.items.is_empty() {
        files.extend(data.iter().map(|(key, bytes)| (key.clone(), File { bytes, mode: mode(None) })));
    }
    for item in wish.items {
        match data.get(&item.key) {
            Some(bytes) => {
                let path: Vec<&str> = item.path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
                files.insert(path.join("/"), File { bytes, mode: mode(item.mode) });
            }
            None if wish.optional => {}
            None => {
                let kind = if wish.kind == "secret" { "secret" } else { "config" };
                return Err(format!("references non-existent {kind} key: {}", item.key));
            }
        }
    }
    check(&files)?;
    Ok(files)
}

/// Every path stays inside, and none is both a file and a directory.
fn check(files: &Files<'_>) -> Result<(), String> {
    for path in files.keys() {
        let parts: Vec<&str> = path.split('/').collect();
        if path.is_empty() || path.starts_with("..") || parts.contains(&"..") || path.contains('\0') {
            return Err(format!("\"{path}\" is no path inside the volume"));
        }
        for length in 1..parts.len() {
            let above = parts.get(..length).unwrap_or_default().join("/");
            if files.contains_key(&above) {
                return Err(format!("\"{above}\" cannot be a file and the directory of \"{path}\""));
            }
        }
    }
    Ok(())
}

/// Bytes of a memory emptyDir: the least of its own limit and the pod's memory limit; None: the
/// kernel's default of half the memory.
pub fn memory_size(empty: &EmptyDirVolume, pod: &Pod) -> Option<u64> {
    let own = empty.size_limit.as_ref().filter(|l| !l.is_zero()).map(|l| l.units());
    own.into_iter().chain(pod_memory_limit(pod)).filter_map(|bytes| u64::try_from(bytes).ok()).min()
}

/// Limited only where every container is: the sum of those that run side by side, or the largest
/// init container.
fn pod_memory_limit(pod: &Pod) -> Option<i64> {
    let limits = |containers: &[Container]| -> Option<Vec<i64>> {
        let limit = |c: &Container| c.resources.limits.get("memory").filter(|l| !l.is_zero()).map(|l| l.units());
        containers.iter().map(limit).collect()
    };
    let side_by_side: i64 = limits(&pod.spec.containers)?.into_iter().fold(0, i64::saturating_add);
    let init = limits(&pod.spec.init_containers)?.into_iter().max().unwrap_or(0);
    Some(side_by_side.max(init))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(key: &str, path: &str, mode: Option<i32>) -> KeyToPath {
        KeyToPath { key: key.into(), path: path.into(), mode }
    }

    #[test]
    fn items_choose_rename_and_set_modes() {
        let data = Data::from([("a".into(), b"1".to_vec()), ("b".into(), b"2".to_vec())]);
        let items = [item("a", "./x//a", Some(0o400))];
        let mut wish = Wish { kind: "configmap", name: "m", items: &[], default_mode: Some(0o640), optional: false };
        let all = files(&wish, Some(&data)).unwrap();
        assert_eq!(
            all.iter().map(|(p, f)| (p.as_str(), f.bytes, f.mode)).collect::<Vec<_>>(),
            [("a", &b"1"[..], 0o640), ("b", b"2", 0o640)]
        );
        wish.items = &items;
        let some = files(&wish, Some(&data)).unwrap();
        assert_eq!(some.iter().map(|(p, f)| (p.as_str(), f.mode)).collect::<Vec<_>>(), [("x/a", 0o400)]);
        assert_eq!(files(&wish, None).unwrap_err(), "configmap \"m\" not found");
        let missing = [item("z", "z", None)];
        wish.items = &missing;
        assert_eq!(files(&wish, Some(&data)).unwrap_err(), "references non-existent config key: z");
        wish.optional = true;
        assert!(files(&wish, Some(&data)).unwrap().is_empty() && files(&wish, None).unwrap().is_empty());
        for paths in [["x", "x/y"], ["../x", "y"], ["a/../../x", "y"], ["", "y"]] {
            let items = [item("a", paths[0], None), item("b", paths[1], None)];
            assert!(files(&Wish { items: &items, ..wish }, Some(&data)).is_err(), "{paths:?}");
        }
    }

    #[test]
    fn memory_volumes_stay_within_the_pods_limit() {
        let pod: Pod = serde_json::from_str(
            r#"{"spec":{"containers":[{"name":"a","resources":{"limits":{"memory":"10Mi"}}},{"name":"b","resources":{"limits":{"memory":"20Mi"}}}]}}"#,
        )
        .unwrap();
        let empty = |limit: Option<&str>| EmptyDirVolume {
            medium: "Memory".into(),
            size_limit: limit.map(|l| crate::api::quantity::Quantity::parse(l).unwrap()),
        };
        assert_eq!(memory_size(&empty(None), &pod), Some(30 << 20));
        assert_eq!(memory_size(&empty(Some("5Mi")), &pod), Some(5 << 20));
        assert_eq!(memory_size(&empty(Some("50Mi")), &pod), Some(30 << 20));
        let unlimited: Pod = serde_json::from_str(r#"{"spec":{"containers":[{"name":"a"}]}}"#).unwrap();
        assert_eq!((memory_size(&empty(None), &unlimited), memory_size(&empty(Some("1Ki")), &unlimited)), (None, Some(1024)));
    }
}
