//! The mounts: containerd's defaults, then the pod's own, shallow destinations first.

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::Mount;

use super::{SpecError, SpecInput, SpecMount, SpecPropagation};

/// Longest path that mount(2) takes, its zero byte included.
const PATH_MAX: usize = 4096;
/// More than any pod has use for; each one costs every later mount and unmount of the host.
const MOST: usize = 1000;

pub fn mounts(input: &SpecInput) -> Result<Vec<Mount>, SpecError> {
    if input.mounts.len() > MOST {
        return Err(SpecError::Bad {
            field: "volumeMounts",
            value: input.mounts.len().to_string(),
            cure: "at most 1000 mounts a container",
        });
    }
    let mut own = input.mounts.clone();
    if let Some(shm) = &input.pins.shm
        && !own.iter().any(|m| lexical(&m.destination) == Path::new("/dev/shm"))
    {
        own.push(SpecMount {
            source: shm.clone(),
            destination: "/dev/shm".into(),
            read_only: false,
            propagation: SpecPropagation::Private,
        });
    }
    for mount in &own {
        check(mount)?;
    }
    own.sort_by_key(|m| lexical(&m.destination).components().count());

    let taken: Vec<PathBuf> = own.iter().map(|m| lexical(&m.destination)).collect();
    let own_dev = taken.iter().any(|d| d == Path::new("/dev"));
    let mut mounts: Vec<Mount> = defaults(input.privileged)
        .into_iter()
        .filter(|m| !(taken.contains(m.destination()) || own_dev && m.destination().starts_with("/dev")))
        .collect();
    mounts.extend(own.iter().map(bind));
    Ok(mounts)
}

fn defaults(privileged: bool) -> Vec<Mount> {
    let writable = if privileged { "rw" } else { "ro" };
    [
        ("/proc", "proc", "proc", "nosuid noexec nodev"),
        ("/dev", "tmpfs", "tmpfs", "nosuid strictatime mode=755 size=65536k"),
        ("/dev/pts", "devpts", "devpts", "nosuid noexec newinstance ptmxmode=0666 mode=0620 gid=5"),
        ("/dev/mqueue", "mqueue", "mqueue", "nosuid noexec nodev"),
        ("/sys", "sysfs", "sysfs", "nosuid noexec nodev {w}"),
        ("/sys/fs/cgroup", "cgroup", "cgroup", "nosuid noexec nodev relatime {w}"),
    ]
    .into_iter()
    .map(|(destination, kind, source, options)| {
        let options = options.split(' ').map(|o| if o == "{w}" { writable } else { o }.to_owned()).collect();
        mount(destination.into(), kind, source.into(), options)
    })
    .collect()
}

fn bind(own: &SpecMount) -> Mount {
    let propagation = match own.propagation {
        SpecPropagation::Private => "rprivate",
        SpecPropagation::Slave => "rslave",
        SpecPropagation::Shared => "rshared",
    };
    let options = ["rbind", propagation, if own.read_only { "ro" } else { "rw" }];
    mount(own.destination.clone(), "bind", own.source.clone(), options.map(str::to_owned).to_vec())
}

fn mount(destination: PathBuf, kind: &str, source: PathBuf, options: Vec<String>) -> Mount {
    let mut mount = Mount::default();
    mount.set_destination(destination).set_typ(Some(kind.to_owned())).set_source(Some(source)).set_options(Some(options));
    mount
}

fn check(mount: &SpecMount) -> Result<(), SpecError> {
    let bad = |field, path: &Path, cure| {
        let value: String = path.to_string_lossy().chars().take(200).collect();
        Err(SpecError::Bad { field, value: value.replace('\0', "\\0"), cure })
    };
    for (field, path) in [("mountPath", &mount.destination), ("volume", &mount.source)] {
        if !path.is_absolute() {
            return bad(field, path, "it must be an absolute path");
        }
        if path.as_os_str().len() >= PATH_MAX {
            return bad(field, path, "it is longer than 4095 bytes");
        }
        if path.as_os_str().as_encoded_bytes().contains(&0) || path.to_str().is_none() {
            return bad(field, path, "it must be UTF-8 without zero bytes");
        }
    }
    if mount.destination.components().any(|c| c == Component::ParentDir) {
        return bad("mountPath", &mount.destination, "it must not contain ..");
    }
    if lexical(&mount.destination) == Path::new("/") {
        return bad("mountPath", &mount.destination, "the root itself cannot be replaced");
    }
    Ok(())
}

/// Without `.` and doubled or trailing slashes; `..` was refused.
fn lexical(path: &Path) -> PathBuf {
    path.components().filter(|c| *c != Component::CurDir).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(source: &str, destination: &str) -> SpecMount {
        SpecMount {
            source: source.into(),
            destination: destination.into(),
            read_only: true,
            propagation: SpecPropagation::Private,
        }
    }

    fn destinations(mounts: Vec<SpecMount>) -> Vec<String> {
        let input = SpecInput { mounts, ..SpecInput::default() };
        super::mounts(&input).unwrap().iter().map(|m| m.destination().display().to_string()).collect()
    }

    #[test]
    fn shallow_destinations_come_first() {
        let all = destinations(vec![own("/a", "/x/y/z"), own("/b", "/x"), own("/c", "/x//y/")]);
        assert_eq!(all[6..], ["/x", "/x//y/", "/x/y/z"]);
    }

    #[test]
    fn a_mount_of_the_pod_replaces_the_default_one() {
        assert!(destinations(vec![own("/s", "/sys/")]).iter().filter(|d| d.trim_end_matches('/') == "/sys").count() == 1);
        let dev = destinations(vec![own("/dev", "/dev")]);
        assert_eq!(dev, ["/proc", "/sys", "/sys/fs/cgroup", "/dev"]);
    }

    #[test]
    fn impossible_mounts_are_refused() {
        let long = format!("/{}", "x".repeat(5000));
        for (source, destination, field) in [
            ("/a", "/x/../etc", "mountPath"),
            ("/a", "x", "mountPath"),
            ("a", "/x", "volume"),
            ("/a", "/", "mountPath"),
            ("/a", long.as_str(), "mountPath"),
            (long.as_str(), "/a", "volume"),
            ("/a\0b", "/a", "volume"),
        ] {
            let input = SpecInput { mounts: vec![own(source, destination)], ..SpecInput::default() };
            let SpecError::Bad { field: told, .. } = mounts(&input).unwrap_err();
            assert_eq!(told, field);
        }
        let many = SpecInput { mounts: vec![own("/a", "/b"); 1001], ..SpecInput::default() };
        assert!(mounts(&many).is_err());
    }
}
