//! Names of Kubernetes 1.34 that this version does not act on. Tables; a test holds them against
//! k8s-openapi, so that none is missing and none is invented.

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
        "spec.containers[].volumeMounts[]" | "spec.initContainers[].volumeMounts[]" if name == "recursiveReadOnly" => Fate::NotYet,
        "spec.containers[].securityContext" | "spec.initContainers[].securityContext" if listed(SECURITY) => Fate::NotYet,
        "spec.containers[].resources" | "spec.initContainers[].resources" if name == "claims" => Fate::NotYet,
        "spec.containers[].env[].valueFrom" | "spec.initContainers[].env[].valueFrom" if name == "fileKeyRef" => Fate::Refused,
        _ => Fate::Unknown,
    }
}

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
    "enableServiceLinks",
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

const CONTAINER: &[&str] = &[
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resizePolicy",
    "restartPolicy",
    "restartPolicyRules",
    "startupProbe",
];

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
    "EndpointSlice",
    "Endpoints",
    "Event",
    "HorizontalPodAutoscaler",
    "Ingress",
    "IngressClass",
    "Job",
    "Lease",
    "LimitRange",
    "MutatingWebhookConfiguration",
    "Namespace",
    "NetworkPolicy",
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
    "Service",
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
}
