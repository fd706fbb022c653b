//! The pods, each twice: as a manifest, and as the CRI configs that a kubelet (with seccompDefault)
//! sends for it. The second is written by hand, so that a mistake in our translation shows.

use std::path::Path;

use serde_json::{Value, json};

use super::coracle_agent::literal;
use super::image;

pub struct Case {
    pub name: &'static str,
    /// Laid over the manifest: the pod's and the container's part.
    pub pod_spec: Value,
    pub container_spec: Value,
    /// Laid over the CRI configs.
    pub sandbox: Value,
    pub container: Value,
}

fn case(name: &'static str, pod_spec: Value, container_spec: Value, sandbox: Value, container: Value) -> Case {
    Case { name, pod_spec, container_spec, sandbox, container }
}

fn security(context: Value) -> Value {
    json!({"linux": {"security_context": context}})
}

/// `shared`: a host directory on a shared mount with another mount below it; `script` is the
/// shell line that containers run.
pub fn all(shared: &Path, script: &str) -> Vec<Case> {
    let volume =
        |mounts: Value| (json!({"volumes": [{"name": "v", "hostPath": {"path": shared}}]}), json!({"volumeMounts": mounts}));
    let none = || json!({});
    let mut cases = vec![
        case("plain", none(), none(), none(), none()),
        case(
            "user-in-passwd",
            none(),
            json!({"securityContext": {"runAsUser": 1000}}),
            none(),
            security(json!({"run_as_user": {"value": 1000}})),
        ),
        case(
            "user-and-groups",
            json!({"securityContext": {"runAsUser": 12345, "runAsGroup": 3000, "fsGroup": 2000, "supplementalGroups": [50, 44]}}),
            none(),
            none(),
            security(json!({
                "run_as_user": {"value": 12345}, "run_as_group": {"value": 3000}, "supplemental_groups": [2000, 50, 44],
            })),
        ),
        case(
            "groups-strict",
            json!({"securityContext": {"runAsUser": 1000, "supplementalGroups": [60], "supplementalGroupsPolicy": "Strict"}}),
            none(),
            none(),
            security(json!({
                "run_as_user": {"value": 1000}, "supplemental_groups": [60], "supplemental_groups_policy": 1,
            })),
        ),
        // kubelet hands on the image's user, never its group.
        case(
            "user-of-the-image",
            none(),
            json!({"image": image::PROBE_USER}),
            none(),
            json!({
                "image": {"image": image::PROBE_USER},
                "linux": {"security_context": {"run_as_user": null, "run_as_username": "app"}},
            }),
        ),
        case(
            "entrypoint-args-env",
            none(),
            json!({
                "image": image::PROBE_USER, "command": null, "args": [format!("{}\nexec sleep 1000000", literal(script))],
                "workingDir": "/tmp", "securityContext": {"runAsUser": 0},
                "env": [{"name": "OVER", "value": "pod"}, {"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$$2"}],
            }),
            none(),
            json!({
                "image": {"image": image::PROBE_USER}, "command": null, "args": [format!("{script}\nexec sleep 1000000")],
                "working_dir": "/tmp",
                "envs": [{"key": "OVER", "value": "pod"}, {"key": "A", "value": "1"}, {"key": "B", "value": "1$2"}],
            }),
        ),
        case(
            "drop-all",
            none(),
            json!({"securityContext": {"capabilities": {"drop": ["ALL"]}}}),
            none(),
            security(json!({"capabilities": {"drop_capabilities": ["ALL"]}})),
        ),
        case(
            "drop-all-add-one-non-root",
            none(),
            json!({"securityContext": {"runAsUser": 1000, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}}),
            none(),
            security(json!({
                "run_as_user": {"value": 1000},
                "capabilities": {"drop_capabilities": ["ALL"], "add_capabilities": ["NET_BIND_SERVICE"]},
            })),
        ),
        case(
            "add-admin",
            none(),
            json!({"securityContext": {"capabilities": {"add": ["SYS_ADMIN", "NET_ADMIN", "SYS_TIME"], "drop": ["CHOWN"]}}}),
            none(),
            security(json!({
                "capabilities": {"add_capabilities": ["SYS_ADMIN", "NET_ADMIN", "SYS_TIME"], "drop_capabilities": ["CHOWN"]},
            })),
        ),
        case(
            "add-all",
            none(),
            json!({"securityContext": {"capabilities": {"add": ["ALL"]}}}),
            none(),
            security(json!({"capabilities": {"add_capabilities": ["ALL"]}})),
        ),
        case(
            "privileged",
            none(),
            json!({"securityContext": {"privileged": true}}),
            security(json!({"privileged": true})),
            security(json!({"privileged": true, "masked_paths": null, "readonly_paths": null, "seccomp": {"profile_type": 1}})),
        ),
        case(
            "read-only-root",
            none(),
            json!({"securityContext": {"readOnlyRootFilesystem": true}}),
            none(),
            security(json!({"readonly_rootfs": true})),
        ),
        case(
            "no-escalation",
            none(),
            json!({"securityContext": {"allowPrivilegeEscalation": false, "runAsUser": 1000}}),
            none(),
            security(json!({"no_new_privs": true, "run_as_user": {"value": 1000}})),
        ),
        case(
            "limits",
            none(),
            json!({"resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "250m", "memory": "128Mi"}}}),
            none(),
            json!({"linux": {"resources": {
                "cpu_shares": 102, "cpu_quota": 25_000, "memory_limit_in_bytes": 128 << 20,
                "memory_swap_limit_in_bytes": 128 << 20, "oom_score_adj": burstable(64 << 20),
            }}}),
        ),
        case(
            "guaranteed",
            none(),
            json!({"resources": {"limits": {"cpu": "500m", "memory": "100Mi"}}}),
            none(),
            json!({"linux": {"resources": {
                "cpu_shares": 512, "cpu_quota": 50_000, "memory_limit_in_bytes": 100 << 20,
                "memory_swap_limit_in_bytes": 100 << 20, "oom_score_adj": -997,
            }}}),
        ),
        case(
            "host-network",
            json!({"hostNetwork": true}),
            none(),
            json!({
                // The node's, which kubelet leaves to containerd.
                "hostname": "",
                "linux": {"security_context": {"namespace_options": {"network": 2}}},
            }),
            security(json!({"namespace_options": {"network": 2}})),
        ),
        case(
            "host-pid-and-ipc",
            json!({"hostPID": true, "hostIPC": true}),
            none(),
            security(json!({"namespace_options": {"pid": 2, "ipc": 2}})),
            security(json!({"namespace_options": {"pid": 2, "ipc": 2}})),
        ),
        case(
            "unconfined",
            json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}),
            none(),
            security(json!({"seccomp": {"profile_type": 1}})),
            security(json!({"seccomp": {"profile_type": 1}})),
        ),
        case("tty", none(), json!({"tty": true, "stdin": true}), none(), json!({"tty": true, "stdin": true})),
    ];
    for (name, read_only, propagation, number) in
        [("volume", false, "None", 0), ("volume-read-only", true, "None", 0), ("volume-from-host", false, "HostToContainer", 1)]
    {
        let (pod, container) =
            volume(json!([{"name": "v", "mountPath": "/v", "readOnly": read_only, "mountPropagation": propagation}]));
        let mount = json!({"container_path": "/v", "host_path": shared, "readonly": read_only, "propagation": number});
        cases.push(case(name, pod, container, none(), json!({"more_mounts": [mount]})));
    }
    let (pod, mut container) = volume(json!([{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}]));
    container["securityContext"] = json!({"privileged": true});
    let mut cri = security(json!({
        "privileged": true, "masked_paths": null, "readonly_paths": null, "seccomp": {"profile_type": 1},
    }));
    cri["more_mounts"] = json!([{"container_path": "/v", "host_path": shared, "propagation": 2}]);
    cases.push(case("volume-both-ways", pod, container, security(json!({"privileged": true})), cri));
    cases
}

/// kubelet's formula, by this machine's memory.
fn burstable(request: i64) -> i64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib: i64 = meminfo.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
    (1000 - 1000 * request / (kib * 1024)).clamp(3, 999)
}
