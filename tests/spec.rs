//! Pod in, OCI spec and cgroup limits out, against the files of `tests/golden/spec`: every pod
//! there is `NAME.pod.json`, what becomes of its first container `NAME.json`.
//!
//! `UPDATE_GOLDEN=1 cargo test --test spec` writes them anew: read the difference before you
//! commit it.

use std::path::{Path, PathBuf};

use coracle::api::pod::Pod;
use coracle::images::model::ImageConfig;
use coracle::kubelet::env::Resolved;
use coracle::kubelet::qos::{self, NodeCapacity, QosClass};
use coracle::kubelet::translate::{self, TranslateInput};
use coracle::runtime::model::{Pins, ResolvedUser};
use coracle::runtime::spec::{HostDevice, HostFacts, container_spec};
use coracle::volumes::model::{MountPlan, Propagation};
use serde_json::{Value, json};

#[test]
fn a_pods_container_becomes_what_the_golden_files_say() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/spec");
    let mut pods: Vec<PathBuf> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    pods.retain(|p| p.to_string_lossy().ends_with(".pod.json"));
    pods.sort();
    assert!(pods.len() >= 6);
    let mut wrong = Vec::new();
    for path in pods {
        let pod: Pod = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let made = serde_json::to_string_pretty(&translated(&pod)).unwrap() + "\n";
        let golden = PathBuf::from(path.to_string_lossy().replace(".pod.json", ".json"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&golden, made).unwrap();
        } else if std::fs::read_to_string(&golden).unwrap_or_default() != made {
            let told = std::env::temp_dir().join(golden.file_name().unwrap());
            std::fs::write(&told, made).unwrap();
            wrong.push(format!("{} is not {}", told.display(), golden.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn translated(pod: &Pod) -> Value {
    let node = NodeCapacity { memory: 4 << 30, milli_cpu: 4000, pod_pids_limit: Some(1024) };
    let container = &pod.spec.containers[0];
    let class = QosClass::of(pod);
    let cgroup = qos::pod_cgroup("/", class, &pod.metadata.uid);
    let image = ImageConfig {
        env: vec!["PATH=/app/bin:/bin".into(), "LANG=C".into()],
        entrypoint: vec!["/app/run".into()],
        cmd: vec!["--serve".into()],
        working_dir: "/app".into(),
        ..ImageConfig::default()
    };
    let request = translate::user_request(pod, container, &image).unwrap();
    let uid = request.run_as_user.unwrap_or(0);
    let gid = request.run_as_group.unwrap_or(0);
    let mut groups: Vec<u32> = request.supplemental_groups.iter().copied().chain([gid]).collect();
    groups.sort_unstable();
    groups.dedup();
    let file = |name: &str| PathBuf::from("/var/lib/kubelet/pods/uid").join(name);
    let mut mounts: Vec<MountPlan> = container
        .volume_mounts
        .iter()
        .map(|m| MountPlan {
            source: file("volumes/kubernetes.io~empty-dir").join(&m.name),
            destination: m.mount_path.clone().into(),
            read_only: m.read_only,
            propagation: Propagation::Private,
        })
        .collect();
    mounts.extend(translate::node_files(container, &file("etc-hosts"), &file("resolv.conf"), &file("hostname")));
    let input = translate::translate(TranslateInput {
        pod,
        container,
        image: &image,
        user: ResolvedUser { uid, gid, groups, home: "/".into() },
        resolved: Resolved {
            env: container.env.iter().map(|e| (e.name.clone(), e.value.clone())).collect(),
            command: container.command.clone(),
            args: container.args.clone(),
            ..Resolved::default()
        },
        mounts,
        hostname: "node-or-pod",
        pins: Pins {
            net: (!pod.spec.host_network).then(|| "/run/coracle/pods/uid/ns/net".into()),
            ipc: (!pod.spec.host_ipc).then(|| "/run/coracle/pods/uid/ns/ipc".into()),
            uts: (!pod.spec.host_network).then(|| "/run/coracle/pods/uid/ns/uts".into()),
            shm: Some(if pod.spec.host_ipc { "/dev/shm".into() } else { "/run/coracle/pods/uid/shm".into() }),
        },
        cgroup: format!("{cgroup}/{}", "c".repeat(8)),
        localhost_profile: None,
        seccomp_default: true,
        node,
        host: host(),
    })
    .unwrap();
    let mut spec = serde_json::to_value(container_spec(&input).unwrap()).unwrap();
    sort_capabilities(&mut spec);
    if let Some(seccomp) = spec.pointer_mut("/linux/seccomp") {
        // Its table has tests of its own; the sum notices a change.
        let names: usize = seccomp["syscalls"].as_array().unwrap().iter().map(|r| r["names"].as_array().unwrap().len()).sum();
        *seccomp = json!(format!("RuntimeDefault over {names} names, default {}", seccomp["defaultAction"]));
    }
    json!({
        "qosClass": class.as_str(),
        "pod": format!("{:?}", qos::pod_resources(pod, &node)),
        "container": format!("{:?}", qos::container_resources(pod, container)),
        "spec": spec,
    })
}

/// A machine of the test's own.
fn host() -> HostFacts {
    let capabilities = "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT \
                        KILL AUDIT_WRITE SYS_ADMIN NET_ADMIN SYS_TIME";
    let device =
        |path: &str, block, major, minor| HostDevice { path: path.into(), block, major, minor, mode: 0o660, uid: 0, gid: 6 };
    HostFacts {
        capabilities: capabilities.split_whitespace().map(str::to_owned).collect(),
        oom_floor: -1000,
        devices: vec![device("/dev/gpiochip0", false, 254, 0), device("/dev/mmcblk0", true, 179, 0)],
        cpus: 2,
    }
}

/// They are sets, in no order.
fn sort_capabilities(spec: &mut Value) {
    if let Some(sets) = spec.pointer_mut("/process/capabilities").and_then(Value::as_object_mut) {
        for set in sets.values_mut().filter_map(Value::as_array_mut) {
            set.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
        }
    }
}
