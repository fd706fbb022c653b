//! Never silence: every field of a v1 Pod is honoured, or named in a warning or a refusal. The list
//! is tests/golden/pod-fields.txt; k8s-openapi watches over its completeness in known.rs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use coracle::api::yaml::{self, Limits};
use coracle::kubelet::source::object::{self, Contents, Reader};
use serde_json::{Value, json};

const GOLDEN: &str = include_str!("../golden/pod-fields.txt");

fn golden() -> BTreeMap<&'static str, &'static str> {
    let lines = GOLDEN.lines().filter(|l| !l.starts_with('#'));
    lines.map(|l| l.split_once(' ').map(|(field, fate)| (field, fate.trim())).unwrap()).collect()
}

fn read(pod: &Value) -> Contents {
    let text = pod.to_string();
    let tree = yaml::documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap();
    let mut out = Contents::default();
    object::read(&Reader { node_name: "node", file: "f", seen: &|_| "2026-11-30T10:00:00Z".into() }, 1, tree, &mut out);
    out
}

/// What is said about the fields of a pod: (field, is it a refusal).
fn told(pod: &Value) -> Vec<(String, bool)> {
    let contents = read(pod);
    let warned = contents.objects.iter().flat_map(|o| match &o.body {
        object::Body::Pod(pod) => pod.warnings.iter().map(|w| (w.field.clone(), false)).collect::<Vec<_>>(),
        object::Body::ConfigMap(_) | object::Body::Secret(_) | object::Body::Network(_) => Vec::new(),
    });
    warned.chain(contents.problems.iter().map(|p| (p.field.clone(), true))).collect()
}

/// Every honoured field at least once, in two pods, since some exclude each other.
fn whole() -> [Value; 2] {
    let env = |from: Value| json!({"name": "A", "valueFrom": from});
    let seccomp = json!({"type": "Localhost", "localhostProfile": "p.json"});
    let items = json!([{"key": "k", "path": "p", "mode": 0o400}]);
    let security = json!({
        "runAsUser": 1, "runAsGroup": 2, "runAsNonRoot": true, "privileged": false, "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false, "capabilities": {"add": ["NET_RAW"], "drop": ["ALL"]}, "seccompProfile": seccomp,
    });
    let container = json!({
        "name": "c", "image": "i", "imagePullPolicy": "Always", "command": ["x"], "args": ["y"], "workingDir": "/w",
        "ports": [{"name": "http", "containerPort": 80, "hostPort": 8080, "hostIP": "192.0.2.1", "protocol": "UDP"}],
        "env": [
            {"name": "V", "value": "v"},
            env(json!({"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}})),
            env(json!({"resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}})),
            env(json!({"configMapKeyRef": {"name": "m", "key": "k", "optional": true}})),
            env(json!({"secretKeyRef": {"name": "s", "key": "k", "optional": true}})),
        ],
        "envFrom": [
            {"prefix": "P", "configMapRef": {"name": "m", "optional": true}},
            {"secretRef": {"name": "s", "optional": true}},
        ],
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [
            {"name": "h", "mountPath": "/h", "readOnly": true, "subPath": "x", "mountPropagation": "HostToContainer"},
        ],
        "securityContext": security, "stdin": true, "stdinOnce": true, "tty": true,
        "terminationMessagePath": "/t", "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    let all = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}, "annotations": {"a": "b"}},
        "spec": {
            "containers": [container], "initContainers": [{"name": "i", "image": "i"}],
            "volumes": [
                {"name": "e", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {"name": "h", "hostPath": {"path": "/h", "type": "Directory"}},
                {"name": "m", "configMap": {"name": "m", "items": items, "defaultMode": 0o640, "optional": true}},
                {"name": "s", "secret": {"secretName": "s", "items": items, "defaultMode": 0o640, "optional": true}},
            ],
            "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 5, "activeDeadlineSeconds": 100,
            "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["192.0.2.2"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "2"}]},
            "hostname": "h", "subdomain": "s", "setHostnameAsFQDN": true,
            "hostAliases": [{"ip": "192.0.2.3", "hostnames": ["a"]}], "nodeName": "node",
            "securityContext": {
                "runAsUser": 1, "runAsGroup": 2, "runAsNonRoot": true, "supplementalGroups": [3],
                "supplementalGroupsPolicy": "Strict", "fsGroup": 4, "seccompProfile": seccomp,
                "sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}],
            },
            "imagePullSecrets": [{"name": "s"}], "enableServiceLinks": false,
        },
    });
    let host = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"hostNetwork": true, "hostPID": true, "hostIPC": true, "priorityClassName": "system-node-critical",
                 "containers": [{"name": "c", "image": "i"}]},
    });
    [all, host]
}

fn parts(field: &str) -> Vec<&str> {
    field.split(['.', '[', ']']).filter(|p| !p.is_empty()).collect()
}

/// Whether the field is there, in any element of the lists on the way.
fn has(value: &Value, parts: &[&str]) -> bool {
    match (value, parts) {
        (_, []) => true,
        (Value::Array(items), [_, rest @ ..]) => items.iter().any(|item| has(item, rest)),
        (Value::Object(map), [name, rest @ ..]) => map.get(*name).is_some_and(|inner| has(inner, rest)),
        _ => false,
    }
}

/// Sets it in the first element of the lists on the way.
fn set(value: &mut Value, parts: &[&str], new: Value) {
    match (value, parts) {
        (value, []) => *value = new,
        (Value::Array(items), [_, rest @ ..]) => set(&mut items[0], rest, new),
        (Value::Object(map), [name, rest @ ..]) => set(map.entry(*name).or_insert(Value::Null), rest, new),
        (value, _) => {
            *value = json!({});
            set(value, parts, new);
        }
    }
}

#[test]
fn every_field_of_a_pod_is_honoured_or_named() {
    let golden = golden();
    assert!(golden.len() > 200, "{}", golden.len());
    let whole = whole();
    for pod in &whole {
        assert_eq!(told(pod), [], "what is honoured is nothing to speak of");
    }
    for (field, fate) in &golden {
        let parts = parts(field);
        if *fate == "honoured" {
            assert!(whole.iter().any(|pod| has(pod, &parts)), "{field} is in neither pod: is it honoured?");
            continue;
        }
        let sample = match *field {
            "spec.priority" => json!(7),
            "spec.priorityClassName" => json!("high"),
            "metadata.creationTimestamp" | "metadata.deletionTimestamp" => json!("2026-11-30T10:00:00Z"),
            "metadata.generation" | "metadata.deletionGracePeriodSeconds" => json!(1),
            "metadata.uid" | "metadata.resourceVersion" | "metadata.selfLink" => json!("x"),
            _ => json!({"x": "y"}),
        };
        let mut pod = whole[0].clone();
        set(&mut pod, &parts, sample);
        let told = told(&pod);
        match *fate {
            "silent" => assert_eq!(told, [], "{field}"),
            "warned" => assert_eq!(told, [((*field).to_owned(), false)], "{field}"),
            "refused" => assert!(told.contains(&((*field).to_owned(), true)), "{field}: {told:?}"),
            other => panic!("{field}: {other} is no fate"),
        }
    }
}

#[test]
fn fields_that_hold_only_in_some_places_are_named_in_the_others() {
    let mut pod = whole()[0].clone();
    let spec = &mut pod["spec"];
    spec["volumes"][0]["emptyDir"]["medium"] = json!("");
    spec["nodeName"] = json!("another");
    spec["containers"][0]["resources"]["limits"]["ephemeral-storage"] = json!("1Gi");
    spec["initContainers"][0]["resources"] = json!({"requests": {"ephemeral-storage": "1Gi"}});
    let mut told: Vec<String> = told(&pod).into_iter().map(|(field, refused)| format!("{field} {refused}")).collect();
    told.sort();
    let want = [
        "spec.containers[0].resources.limits[ephemeral-storage] false",
        "spec.initContainers[0].resources.requests[ephemeral-storage] false",
        "spec.nodeName false",
        "spec.volumes[0].emptyDir.sizeLimit false",
    ];
    assert_eq!(told, want);
}

/// A field that only its validation reads is not honoured, whatever the table says.
#[test]
fn what_is_called_honoured_is_read_by_somebody() {
    fn walk(dir: &Path, into: &mut String) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("api") && !path.ends_with("validate") {
                walk(&path, into);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("defaults.rs") {
                // Its tests come last in a file.
                into.push_str(fs::read_to_string(&path).unwrap().split("#[cfg(test)]").next().unwrap());
            }
        }
    }
    let mut source = String::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut source);
    // Ours where Rust has another use for the word, or our word is longer.
    let renamed = BTreeMap::from([
        ("type", "kind"),
        ("hostPID", "host_pid"),
        ("hostIPC", "host_ipc"),
        ("hostIP", "host_ip"),
        ("setHostnameAsFQDN", "set_hostname_as_fqdn"),
    ]);
    // Informative in Kubernetes, too: v1 is the only version, and ports are named for Services.
    let informative = ["spec.containers[0].env[0].valueFrom.fieldRef.apiVersion", "spec.containers[0].ports[0].name"];
    for (field, fate) in golden() {
        if fate != "honoured" || informative.contains(&field) {
            continue;
        }
        let name = field.rsplit('.').next().unwrap();
        let snake = match renamed.get(name) {
            Some(ours) => (*ours).to_owned(),
            None => {
                name.chars().flat_map(|c| if c.is_uppercase() { vec!['_', c.to_ascii_lowercase()] } else { vec![c] }).collect()
            }
        };
        assert!(source.contains(&format!(".{snake}")), "nothing reads {field} (.{snake})");
    }
}
