//! What the API server fills in before a kubelet sees a pod. Pure.
//! kubernetes/pkg/apis/core/v1/defaults.go.
#![deny(clippy::disallowed_methods)]

use crate::api::pod::{
    Container, DnsPolicy, EmptyDirVolume, ImagePullPolicy, Pod, RestartPolicy, TerminationMessagePolicy, Volume,
};

/// Fills in what is absent; a second call changes nothing.
pub fn pod(pod: &mut Pod) {
    pod.api_version = "v1".to_owned();
    pod.kind = "Pod".to_owned();
    if pod.metadata.namespace.is_empty() {
        pod.metadata.namespace = "default".to_owned();
    }
    let spec = &mut pod.spec;
    spec.restart_policy.get_or_insert(RestartPolicy::Always);
    spec.dns_policy.get_or_insert(DnsPolicy::ClusterFirst);
    spec.security_context.get_or_insert_default();
    let grace = spec.termination_grace_period_seconds.get_or_insert(30);
    if *grace < 0 {
        *grace = 1;
    }
    let host_network = spec.host_network;
    for container in spec.init_containers.iter_mut().chain(&mut spec.containers) {
        self::container(container, host_network);
    }
    spec.volumes.iter_mut().for_each(volume);
}

fn container(container: &mut Container, host_network: bool) {
    container.image_pull_policy.get_or_insert(pull_policy(&container.image));
    let path = container.termination_message_path.get_or_insert_default();
    if path.is_empty() {
        *path = "/dev/termination-log".to_owned();
    }
    container.termination_message_policy.get_or_insert(TerminationMessagePolicy::File);
    for (name, limit) in &container.resources.limits {
        container.resources.requests.entry(name.clone()).or_insert_with(|| limit.clone());
    }
    if host_network {
        for port in &mut container.ports {
            if port.host_port.unwrap_or_default() == 0 {
                port.host_port = Some(port.container_port);
            }
        }
    }
    for field in container.env.iter_mut().filter_map(|v| v.value_from.as_mut()?.field_ref.as_mut()) {
        field.api_version.get_or_insert_with(|| "v1".to_owned());
    }
}

/// Always for `:latest` and no tag at all; a digest is as good as a tag.
fn pull_policy(image: &str) -> ImagePullPolicy {
    let name = image.rsplit('/').next().unwrap_or(image);
    let tag = match name.split_once('@') {
        Some((name, _)) => name.split_once(':').map_or("by digest", |(_, tag)| tag),
        None => name.split_once(':').map_or("latest", |(_, tag)| tag),
    };
    if tag == "latest" { ImagePullPolicy::Always } else { ImagePullPolicy::IfNotPresent }
}

fn volume(volume: &mut Volume) {
    const MODE: i32 = 0o644;
    if let Some(map) = &mut volume.config_map {
        map.default_mode.get_or_insert(MODE);
    }
    if let Some(secret) = &mut volume.secret {
        secret.default_mode.get_or_insert(MODE);
    }
    if let Some(host) = &mut volume.host_path {
        host.kind.get_or_insert_default();
    }
    let none = volume.config_map.is_none() && volume.secret.is_none() && volume.host_path.is_none();
    if none && volume.empty_dir.is_none() {
        volume.empty_dir = Some(EmptyDirVolume::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_absent_is_filled_in_once() {
        let text = br#"{"metadata":{"name":"p"},"spec":{"hostNetwork":true,"terminationGracePeriodSeconds":-5,
            "containers":[{"name":"c","image":"i","ports":[{"containerPort":80}],"resources":{"limits":{"cpu":"1"},"requests":{"memory":"1Gi"}}}],
            "volumes":[{"name":"v"},{"name":"m","configMap":{"name":"x"}}]}}"#;
        let mut pod: Pod = serde_json::from_slice(text).unwrap();
        super::pod(&mut pod);
        let spec = &pod.spec;
        let c = &spec.containers[0];
        assert_eq!((spec.restart_policy, spec.termination_grace_period_seconds), (Some(RestartPolicy::Always), Some(1)));
        assert_eq!((c.ports[0].host_port, c.resources.requests["cpu"].to_string()), (Some(80), "1".to_owned()));
        assert!(spec.volumes[0].empty_dir.is_some());
        assert_eq!(spec.volumes[1].config_map.as_ref().unwrap().default_mode, Some(0o644));
        assert_eq!(pod.metadata.namespace, "default");
        let once = pod.clone();
        super::pod(&mut pod);
        assert_eq!(pod, once);
    }

    #[test]
    fn the_pull_policy_follows_the_tag() {
        use ImagePullPolicy::*;
        for (image, policy) in [
            ("busybox", Always),
            ("busybox:latest", Always),
            ("busybox:1.36", IfNotPresent),
            ("host:5000/busybox", Always),
            ("host:5000/busybox:1", IfNotPresent),
            ("busybox@sha256:0", IfNotPresent),
            ("busybox:latest@sha256:0", Always),
        ] {
            assert_eq!(pull_policy(image), policy, "{image}");
        }
    }
}
