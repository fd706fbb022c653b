//! Names of Kubernetes 1.34 that this version does not act on. Tables; a test holds them against
//! k8s-openapi, so that none is missing and none is invented.

use crate::api::pod::Pod;
use crate::kubelet::qos;

/// What becomes of a field that our structs do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The API server owns it; an exported object carries it along. Nothing is said.
    Silent,
    /// Kubernetes knows it, we do not honour it yet: a warning.
    NotYet,
    /// Running without it would do something else than asked: the pod is refused.
    Refused,
    /// No Kubernetes knows it: a warning, it is most likely a typing error.
    Unknown,
}

/// Of `field`, a path in a Pod such as `spec.containers[0].livenessProbe`.
pub fn fate(field: &str) -> Fate {
    let (parent, name) = split(field);
    let listed = |table: &[&str]| table.contains(&name);
    match parent.as_str() {
        "" if name == "status" => Fate::Silent,
        "metadata" if listed(META_SILENT) => Fate::Silent,
        "metadata" if listed(META) => Fate::NotYet,
        "spec" if listed(POD_SPEC) => Fate::NotYet,
        "spec.securityContext" if listed(POD_SECURITY) => Fate::NotYet,
        "spec.volumes[]" if listed(VOLUME_TYPES) => Fate::Refused,
        "spec.initContainers[]" if name == "restartPolicy" => Fate::Refused,
        "spec.containers[]" | "spec.initContainers[]" if name == "volumeDevices" => Fate::Refused,
        "spec.containers[]" | "spec.initContainers[]" if listed(CONTAINER) => Fate::NotYet,
        "spec.containers[].volumeMounts[]" | "spec.initContainers[].volumeMounts[]" if name == "subPathExpr" => Fate::Refused,
        "spec.containers[].volumeMounts[]" | "spec.initContainers[].volumeMounts[]" if name == "recursiveReadOnly" => {
            Fate::NotYet
        }
        "spec.containers[].securityContext" | "spec.initContainers[].securityContext" if listed(SECURITY) => Fate::NotYet,
        "spec.containers[].resources" | "spec.initContainers[].resources" if name == "claims" => Fate::NotYet,
        "spec.containers[].env[].valueFrom" | "spec.initContainers[].env[].valueFrom" if name == "fileKeyRef" => Fate::Refused,
        _ => Fate::Unknown,
    }
}

/// Of `field` of a Service, EndpointSlice, NetworkPolicy or Namespace.
pub fn network_fate(kind: &str, field: &str) -> Fate {
    let (parent, name) = split(field);
    match (kind, parent.as_str()) {
        (_, "metadata") if META_SILENT.contains(&name) || META.contains(&name) => Fate::Silent,
        ("Service", "spec") if SERVICE_SPEC.contains(&name) => Fate::NotYet,
        // A hint for people and for proxies of other layers.
        ("Service", "spec.ports[]") | ("EndpointSlice", "ports[]") if name == "appProtocol" => Fate::Silent,
        ("Service", "status") if name == "conditions" => Fate::Silent,
        ("Service", "status.loadBalancer.ingress[]") if name == "ports" => Fate::Silent,
        ("EndpointSlice", "endpoints[]") if name == "deprecatedTopology" => Fate::Silent,
        ("EndpointSlice", "endpoints[].targetRef") if matches!(name, "apiVersion" | "fieldPath" | "resourceVersion") => {
            Fate::Silent
        }
        ("Namespace", "") if matches!(name, "spec" | "status") => Fate::Silent,
        // Kubernetes had one for a while.
        ("NetworkPolicy", "") if name == "status" => Fate::Silent,
        _ => Fate::Unknown,
    }
}

/// Fields that our structs have and that this version does not act on, or not there: field, why.
pub fn unenforced(pod: &Pod) -> Vec<(String, String)> {
    const NOT_YET: &str = "not honoured by this version";
    let mut found = Vec::new();
    let mut tell = |field: String, why: &str| found.push((field, why.to_owned()));
    for (i, volume) in pod.spec.volumes.iter().enumerate() {
        let on_disk = volume.empty_dir.as_ref().filter(|e| e.medium != "Memory");
        if on_disk.is_some_and(|e| e.size_limit.is_some()) {
            let why = "not enforced on disk: nothing is evicted by this version; medium: Memory is held to it";
            tell(format!("spec.volumes[{i}].emptyDir.sizeLimit"), why);
        }
    }
    for (list, containers) in [("initContainers", &pod.spec.init_containers), ("containers", &pod.spec.containers)] {
        for (i, container) in containers.iter().enumerate() {
            let resources = &container.resources;
            for (kind, amounts) in [("limits", &resources.limits), ("requests", &resources.requests)] {
                // A limit is a request by default: told once.
                let told = kind == "requests" && resources.limits.contains_key(STORAGE);
                if amounts.contains_key(STORAGE) && !told {
                    tell(format!("spec.{list}[{i}].resources.{kind}[{STORAGE}]"), NOT_YET);
                }
            }
        }
    }
    if pod.spec.priority.is_some() {
        tell("spec.priority".to_owned(), NOT_YET);
    }
    if pod.spec.priority_class_name.as_deref().is_some_and(|c| !c.is_empty() && c != qos::NODE_CRITICAL) {
        tell("spec.priorityClassName".to_owned(), NOT_YET);
    }
    found
}

const STORAGE: &str = "ephemeral-storage";

/// `spec.containers[0].lifecycle` → (`spec.containers[]`, `lifecycle`).
fn split(field: &str) -> (String, &str) {
    let (parent, name) = field.rsplit_once('.').unwrap_or(("", field));
    let mut plain = String::with_capacity(parent.len());
    let mut inside = false;
    for c in parent.chars() {
        inside = (inside || c == '[') && c != ']';
        if !inside || c == '[' {
            plain.push(c);
        }
    }
    (plain, name)
}

const META_SILENT: &[&str] = &["managedFields", "selfLink", "deletionGracePeriodSeconds", "deletionTimestamp", "ownerReferences"];
const META: &[&str] = &["finalizers", "generateName"];

const POD_SPEC: &[&str] = &[
    "affinity",
    "automountServiceAccountToken",
    "ephemeralContainers",
    "hostUsers",
    "hostnameOverride",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "readinessGates",
    "resourceClaims",
    "resources",
    "runtimeClassName",
    "schedulerName",
    "schedulingGates",
    "serviceAccount",
    "serviceAccountName",
    "shareProcessNamespace",
    "tolerations",
    "topologySpreadConstraints",
];

const POD_SECURITY: &[&str] =
    &["appArmorProfile", "fsGroupChangePolicy", "seLinuxChangePolicy", "seLinuxOptions", "windowsOptions"];

const CONTAINER: &[&str] =
    &["lifecycle", "livenessProbe", "readinessProbe", "resizePolicy", "restartPolicy", "restartPolicyRules", "startupProbe"];

const SERVICE_SPEC: &[&str] = &["loadBalancerClass", "loadBalancerIP"];

const SECURITY: &[&str] = &["appArmorProfile", "procMount", "seLinuxOptions", "windowsOptions"];

const VOLUME_TYPES: &[&str] = &[
    "awsElasticBlockStore",
    "azureDisk",
    "azureFile",
    "cephfs",
    "cinder",
    "csi",
    "downwardAPI",
    "ephemeral",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "gitRepo",
    "glusterfs",
    "image",
    "iscsi",
    "nfs",
    "persistentVolumeClaim",
    "photonPersistentDisk",
    "portworxVolume",
    "projected",
    "quobyte",
    "rbd",
    "scaleIO",
    "storageos",
    "vsphereVolume",
];

/// Kinds that are named in the log once and otherwise left alone.
pub fn is_kept_for_later(kind: &str) -> bool {
    KINDS.contains(&kind.strip_suffix("List").unwrap_or(kind))
}

const KINDS: &[&str] = &[
    "CSIDriver",
    "ClusterRole",
    "ClusterRoleBinding",
    "ControllerRevision",
    "CronJob",
    "CustomResourceDefinition",
    "DaemonSet",
    "Deployment",
    "Endpoints",
    "Event",
    "HorizontalPodAutoscaler",
    "Ingress",
    "IngressClass",
    "Job",
    "Lease",
    "LimitRange",
    "MutatingWebhookConfiguration",
    "Node",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "PodTemplate",
    "PriorityClass",
    "ReplicaSet",
    "ReplicationController",
    "ResourceQuota",
    "Role",
    "RoleBinding",
    "RuntimeClass",
    "ServiceAccount",
    "StatefulSet",
    "StorageClass",
    "ValidatingWebhookConfiguration",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_apart_by_their_place() {
        for (field, fate_of_it) in [
            ("status", Fate::Silent),
            ("metadata.managedFields", Fate::Silent),
            ("spec.containers[12].livenessProbe", Fate::NotYet),
            ("spec.livenessProbe", Fate::Unknown),
            ("spec.volumes[0].nfs", Fate::Refused),
            ("spec.initContainers[0].restartPolicy", Fate::Refused),
            ("spec.containers[0].restartPolicy", Fate::NotYet),
            ("spec.containers[0].volumeMounts[1].subPathExpr", Fate::Refused),
            ("spec.containers[0].imagee", Fate::Unknown),
            ("shape", Fate::Unknown),
        ] {
            assert_eq!(fate(field), fate_of_it, "{field}");
        }
    }

    /// Takes the field names that a type's Deserialize asks for.
    struct Names<'a>(&'a mut Vec<&'static str>);

    impl<'de> serde::Deserializer<'de> for Names<'_> {
        type Error = serde::de::value::Error;
        fn deserialize_any<V: serde::de::Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(serde::de::Error::custom("a struct was expected"))
        }
        fn deserialize_struct<V: serde::de::Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            self.0.extend(fields);
            Err(serde::de::Error::custom("names are all that is wanted"))
        }
        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    fn names<'de, T: serde::Deserialize<'de>>() -> std::collections::BTreeSet<&'static str> {
        let mut found = Vec::new();
        // It ends with the error that says so; the names are what counts.
        drop(T::deserialize(Names(&mut found)));
        assert!(!found.is_empty());
        found.into_iter().collect()
    }

    /// The same for the kinds that packets are served from.
    fn compare_network<'de, Theirs: serde::Deserialize<'de>, Ours: serde::Deserialize<'de>>(kind: &str, place: &str) {
        let (theirs, ours) = (names::<Theirs>(), names::<Ours>());
        let invented: Vec<_> = ours.difference(&theirs).collect();
        assert!(invented.is_empty(), "{kind} {place}: Kubernetes has no {invented:?}");
        let told = |name: &&&str| network_fate(kind, &format!("{place}{name}")) != Fate::Unknown;
        let forgotten: Vec<_> = theirs.difference(&ours).filter(|name| !told(name)).collect();
        assert!(forgotten.is_empty(), "{kind} {place}: the tables lack {forgotten:?}");
    }

    #[test]
    fn what_packets_are_served_from_is_read_whole() {
        use crate::api::{endpoint_slice as slice, namespace, network_policy as policy, selector, service};
        use k8s_openapi::api::{core::v1 as k8s, discovery::v1 as discovery, networking::v1 as networking};
        use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
        compare_network::<k8s::Service, service::Service>("Service", "");
        compare_network::<k8s::ServiceSpec, service::ServiceSpec>("Service", "spec.");
        compare_network::<k8s::ServicePort, service::ServicePort>("Service", "spec.ports[0].");
        compare_network::<k8s::SessionAffinityConfig, service::SessionAffinityConfig>("Service", "spec.sessionAffinityConfig.");
        compare_network::<k8s::ClientIPConfig, service::ClientIpConfig>("Service", "spec.sessionAffinityConfig.clientIP.");
        compare_network::<k8s::ServiceStatus, service::ServiceStatus>("Service", "status.");
        compare_network::<k8s::LoadBalancerStatus, service::LoadBalancerStatus>("Service", "status.loadBalancer.");
        compare_network::<k8s::LoadBalancerIngress, service::LoadBalancerIngress>("Service", "status.loadBalancer.ingress[0].");
        compare_network::<discovery::EndpointSlice, slice::EndpointSlice>("EndpointSlice", "");
        compare_network::<discovery::Endpoint, slice::SliceEndpoint>("EndpointSlice", "endpoints[0].");
        compare_network::<discovery::EndpointConditions, slice::EndpointConditions>("EndpointSlice", "endpoints[0].conditions.");
        compare_network::<discovery::EndpointHints, slice::EndpointHints>("EndpointSlice", "endpoints[0].hints.");
        compare_network::<discovery::EndpointPort, slice::EndpointPort>("EndpointSlice", "ports[0].");
        compare_network::<k8s::ObjectReference, slice::TargetRef>("EndpointSlice", "endpoints[0].targetRef.");
        compare_network::<networking::NetworkPolicy, policy::NetworkPolicy>("NetworkPolicy", "");
        compare_network::<networking::NetworkPolicySpec, policy::NetworkPolicySpec>("NetworkPolicy", "spec.");
        compare_network::<networking::NetworkPolicyIngressRule, policy::IngressRule>("NetworkPolicy", "spec.ingress[0].");
        compare_network::<networking::NetworkPolicyEgressRule, policy::EgressRule>("NetworkPolicy", "spec.egress[0].");
        compare_network::<networking::NetworkPolicyPeer, policy::PolicyPeer>("NetworkPolicy", "spec.ingress[0].from[0].");
        compare_network::<networking::NetworkPolicyPort, policy::PolicyPort>("NetworkPolicy", "spec.ingress[0].ports[0].");
        compare_network::<networking::IPBlock, policy::IpBlock>("NetworkPolicy", "spec.ingress[0].from[0].ipBlock.");
        compare_network::<meta::LabelSelector, selector::LabelSelector>("NetworkPolicy", "spec.podSelector.");
        compare_network::<meta::LabelSelectorRequirement, selector::Requirement>(
            "NetworkPolicy",
            "spec.podSelector.matchExpressions[0].",
        );
        compare_network::<k8s::Namespace, namespace::Namespace>("Namespace", "");
        assert_eq!(network_fate("NetworkPolicy", "spec.podSelectr"), Fate::Unknown);
    }

    /// What Kubernetes has and we have not, told by k8s-openapi, is exactly what the tables list.
    fn compare<'de, Theirs: serde::Deserialize<'de>, Ours: serde::Deserialize<'de>>(place: &str, fates: &[Fate]) {
        let (theirs, ours) = (names::<Theirs>(), names::<Ours>());
        let invented: Vec<_> = ours.difference(&theirs).collect();
        assert!(invented.is_empty(), "{place}: Kubernetes has no {invented:?}");
        let forgotten: Vec<_> =
            theirs.difference(&ours).filter(|name| !fates.contains(&fate(&format!("{place}{name}")))).collect();
        assert!(forgotten.is_empty(), "{place}: the tables lack {forgotten:?}");
    }

    #[test]
    fn the_tables_are_those_of_kubernetes() {
        use crate::api::{meta, pod};
        use k8s_openapi::api::core::v1 as k8s;
        const TOLD: &[Fate] = &[Fate::NotYet, Fate::Refused];
        compare::<k8s::Pod, pod::Pod>("", &[Fate::Silent]);
        compare::<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta, meta::ObjectMeta>(
            "metadata.",
            &[Fate::Silent, Fate::NotYet],
        );
        compare::<k8s::PodSpec, pod::PodSpec>("spec.", TOLD);
        compare::<k8s::PodSecurityContext, pod::PodSecurityContext>("spec.securityContext.", TOLD);
        compare::<k8s::Volume, pod::Volume>("spec.volumes[0].", &[Fate::Refused]);
        for list in ["containers", "initContainers"] {
            let at = format!("spec.{list}[0].");
            compare::<k8s::Container, pod::Container>(&at, TOLD);
            compare::<k8s::VolumeMount, pod::VolumeMount>(&format!("{at}volumeMounts[0]."), TOLD);
            compare::<k8s::SecurityContext, pod::SecurityContext>(&format!("{at}securityContext."), TOLD);
            compare::<k8s::ResourceRequirements, pod::ResourceRequirements>(&format!("{at}resources."), TOLD);
            compare::<k8s::EnvVarSource, pod::EnvVarSource>(&format!("{at}env[0].valueFrom."), TOLD);
        }
        // And the tables name nothing that Kubernetes does not have.
        let spec = names::<k8s::PodSpec>();
        let volumes = names::<k8s::Volume>();
        let containers = names::<k8s::Container>();
        let invented =
            POD_SPEC.iter().filter(|n| !spec.contains(*n)).chain(VOLUME_TYPES.iter().filter(|n| !volumes.contains(*n)));
        let invented: Vec<_> = invented.chain(CONTAINER.iter().filter(|n| !containers.contains(*n))).collect();
        assert!(invented.is_empty(), "{invented:?}");
    }
}
