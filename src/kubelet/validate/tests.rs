//! One wrong field at a time, in the API server's words.

use crate::api::pod::Pod;
use crate::api::yaml::{Limits, documents};

fn faults(metadata: &str, spec: &str) -> Vec<String> {
    let text = format!("apiVersion: v1\nkind: Pod\nmetadata: {metadata}\nspec: {spec}\n");
    let (mut pod, _) = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap().read::<Pod>().unwrap();
    crate::kubelet::defaults::pod(&mut pod);
    super::pod(&pod).into_iter().map(|i| i.to_string()).collect()
}

/// A fault's beginning, or none, for the fields of one container.
fn container(fields: &str) -> Vec<String> {
    faults("{name: p}", &format!("{{volumes: [{{name: v, emptyDir: {{}}}}], containers: [{{name: c, image: i, {fields}}}]}}"))
}

#[test]
fn a_sound_pod_has_no_faults() {
    let none: Vec<String> = Vec::new();
    assert_eq!(
        container(
            "ports: [{containerPort: 80, hostPort: 80}, {containerPort: 80, hostPort: 80, protocol: UDP}], env: [{name: A.b-c, value: x}, {name: B, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['a/b']\"}}}], volumeMounts: [{name: v, mountPath: /a, subPath: x/y}], resources: {limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 500m}}"
        ),
        none
    );
    assert_eq!(faults("{name: a.b-c, namespace: ns, labels: {a.b/c: D_e, x: ''}}", "{containers: [{name: c, image: i}]}"), none);
}

#[test]
fn each_wrong_field_is_named_in_the_servers_words() {
    for (fields, wanted) in [
        ("image: ''", "spec.containers[0].image: Required value: name the image to run"),
        ("ports: [{containerPort: 0}]", "spec.containers[0].ports[0].containerPort: Required value"),
        (
            "ports: [{containerPort: 1, name: UPPER}]",
            "spec.containers[0].ports[0].name: Invalid value: \"UPPER\": must be no more than 15",
        ),
        (
            "ports: [{containerPort: 1, hostPort: 9}, {containerPort: 2, hostPort: 9}]",
            "spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//9\"",
        ),
        (
            "ports: [{containerPort: 1, hostPort: 9, hostIP: here}]",
            "spec.containers[0].ports[0].hostIP: Invalid value: \"here\": must be a valid IP address",
        ),
        ("env: [{name: 'A=B'}]", "spec.containers[0].env[0].name: Invalid value: \"A=B\": a valid environment variable name"),
        ("env: [{name: A, valueFrom: {}}]", "spec.containers[0].env[0].valueFrom: Invalid value: \"\": must specify one of"),
        (
            "env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.x}}}]",
            "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: \"spec.x\"",
        ),
        (
            "env: [{name: A, valueFrom: {configMapKeyRef: {name: m}}}]",
            "spec.containers[0].env[0].valueFrom.configMapKeyRef.key: Required value",
        ),
        (
            "env: [{name: A, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 2}}}]",
            "spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor: Unsupported value: \"2\"",
        ),
        ("envFrom: [{}]", "spec.containers[0].envFrom[0]: Invalid value: \"\": must specify one of"),
        (
            "resources: {limits: {cpu: 1}, requests: {cpu: 2}}",
            "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ),
        (
            "resources: {requests: {cpu: -1}}",
            "spec.containers[0].resources.requests[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
        ),
        (
            "resources: {requests: {gpu: 1}}",
            "spec.containers[0].resources.requests[gpu]: Invalid value: \"gpu\": this node has no such resource",
        ),
        ("volumeMounts: [{name: w, mountPath: /a}]", "spec.containers[0].volumeMounts[0].name: Not found: \"w\""),
        (
            "volumeMounts: [{name: v, mountPath: a}]",
            "spec.containers[0].volumeMounts[0].mountPath: Invalid value: \"a\": must be an absolute path",
        ),
        (
            "volumeMounts: [{name: v, mountPath: /a/../b}]",
            "spec.containers[0].volumeMounts[0].mountPath: Invalid value: \"/a/../b\": must not contain '..'",
        ),
        (
            "volumeMounts: [{name: v, mountPath: //proc/./sys}]",
            "spec.containers[0].volumeMounts[0].mountPath: Invalid value: \"//proc/./sys\": must not be / or lie in /proc",
        ),
        (
            "volumeMounts: [{name: v, mountPath: /a}, {name: v, mountPath: /a/}]",
            "spec.containers[0].volumeMounts[1].mountPath: Invalid value: \"/a/\": must be unique",
        ),
        (
            "volumeMounts: [{name: v, mountPath: /a, subPath: ../x}]",
            "spec.containers[0].volumeMounts[0].subPath: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            "volumeMounts: [{name: v, mountPath: /a, mountPropagation: Bidirectional}]",
            "spec.containers[0].volumeMounts[0].mountPropagation: Forbidden: Bidirectional",
        ),
        (
            "securityContext: {runAsUser: -1}",
            "spec.containers[0].securityContext.runAsUser: Invalid value: \"-1\": must be between 0 and 2147483647, inclusive",
        ),
        (
            "securityContext: {privileged: true, allowPrivilegeEscalation: false}",
            "spec.containers[0].securityContext: Invalid value: \"\": cannot set",
        ),
        (
            "securityContext: {seccompProfile: {type: Localhost, localhostProfile: ../x}}",
            "spec.containers[0].securityContext.seccompProfile.localhostProfile: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            "terminationMessagePath: x",
            "spec.containers[0].terminationMessagePath: Invalid value: \"x\": must be an absolute path",
        ),
    ] {
        // A later key wins over `image: i` only by replacing it.
        let found = if fields.starts_with("image") {
            faults("{name: p}", &format!("{{containers: [{{name: c, {fields}}}]}}"))
        } else {
            container(fields)
        };
        assert!(found.len() == 1 && found[0].starts_with(wanted), "{fields}: {found:?}");
    }
}

#[test]
fn pods_volumes_and_their_names_are_held_to_the_rules() {
    let c = "containers: [{name: c, image: i}]";
    for (metadata, spec, wanted) in [
        ("{}", format!("{{{c}}}"), "metadata.name: Required value"),
        ("{name: ../x}", format!("{{{c}}}"), "metadata.name: Invalid value: \"../x\": a lowercase RFC 1123 subdomain"),
        (
            "{name: p, namespace: a.b}",
            format!("{{{c}}}"),
            "metadata.namespace: Invalid value: \"a.b\": a lowercase RFC 1123 label",
        ),
        ("{name: p, labels: {a: -x}}", format!("{{{c}}}"), "metadata.labels[a]: Invalid value: \"-x\""),
        ("{name: p}", "{}".to_owned(), "spec.containers: Required value"),
        (
            "{name: p}",
            format!("{{{c}, initContainers: [{{name: x, image: i}}, {{name: x, image: i}}]}}"),
            "spec.initContainers[1].name: Duplicate value: \"x\"",
        ),
        ("{name: p}", "{containers: [{name: c_d, image: i}]}".to_owned(), "spec.containers[0].name: Invalid value: \"c_d\""),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, hostPath: {{path: /a/../b}}}}]}}"),
            "spec.volumes[0].hostPath.path: Invalid value",
        ),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, hostPath: {{path: /a, type: Dir}}}}]}}"),
            "spec.volumes[0].hostPath.type: Unsupported value: \"Dir\"",
        ),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, hostPath: {{path: /a}}, emptyDir: {{}}}}]}}"),
            "spec.volumes[0]: Forbidden: may not specify more than 1 volume type",
        ),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, configMap: {{name: m, defaultMode: 0o1777}}}}]}}"),
            "spec.volumes[0].configMap.defaultMode: Invalid value: \"1023\": must be a number between 0 and 0777 (octal)",
        ),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, secret: {{secretName: m, items: [{{key: k, path: a/../../b}}]}}}}]}}"),
            "spec.volumes[0].secret.items[0].path: Invalid value",
        ),
        (
            "{name: p}",
            format!("{{{c}, volumes: [{{name: v, emptyDir: {{medium: Disk}}}}]}}"),
            "spec.volumes[0].emptyDir.medium: Unsupported value: \"Disk\"",
        ),
        ("{name: p}", format!("{{{c}, dnsPolicy: None}}"), "spec.dnsConfig.nameservers: Required value"),
        (
            "{name: p}",
            format!("{{{c}, activeDeadlineSeconds: 0}}"),
            "spec.activeDeadlineSeconds: Invalid value: \"0\": must be between 1",
        ),
        (
            "{name: p}",
            format!("{{{c}, securityContext: {{sysctls: [{{name: kernel.core_pattern, value: x}}]}}}}"),
            "spec.securityContext.sysctls[0].name: Forbidden: forbidden sysctl: \"kernel.core_pattern\" not allowlisted",
        ),
        (
            "{name: p}",
            format!("{{{c}, hostNetwork: true, securityContext: {{sysctls: [{{name: net/ipv4/tcp_syncookies, value: '1'}}]}}}}"),
            "spec.securityContext.sysctls[0].name: Invalid value: \"net.ipv4.tcp_syncookies\": may not be specified when 'hostNetwork' is true",
        ),
        (
            "{name: p}",
            format!("{{{c}, hostAliases: [{{ip: x, hostnames: [a]}}]}}"),
            "spec.hostAliases[0].ip: Invalid value: \"x\"",
        ),
    ] {
        let found = faults(metadata, &spec);
        assert!(found.len() == 1 && found[0].starts_with(wanted), "{spec}: {found:?}");
    }
    assert!(super::names::config_key("../etc/passwd").is_some() && super::names::config_key("..data").is_some());
}
