//! Pod + container + image config to the runtime's [`SpecInput`]. Pure.
//!
//! Invariant: what this takes from a pod is what kubelet and containerd would take: container over
//! pod over image, with the kubelet's words where it would refuse (CreateContainerConfigError).
//! One default differs, on purpose: a container that names no seccomp profile gets RuntimeDefault,
//! unless the node is told otherwise (--seccomp-default=false).
//!
//! Sources: kubelet's pkg/kubelet/kuberuntime/security_context*.go and pkg/securitycontext.
#![deny(clippy::disallowed_methods)]

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::LinuxSeccomp;

use super::env::Resolved;
use super::qos::{self, NodeCapacity};
use crate::api::pod::{Container, Pod, SeccompProfile, SupplementalGroupsPolicy};
use crate::images::model::ImageConfig;
use crate::runtime::model::{Pins, ResolvedUser};
use crate::runtime::seccomp::{self, Machine};
use crate::runtime::spec::{CapabilityChoice, HostFacts, SpecInput, SpecMount, SpecPropagation, granted_capabilities};
use crate::runtime::user::UserRequest;
use crate::volumes::model::{MountPlan, Propagation};

/// Waiting reason CreateContainerConfigError, with the kubelet's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TranslateError(pub String);

/// Which seccomp profile a container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeccompChoice {
    Unconfined,
    RuntimeDefault,
    /// Path below `<kubelet>/seccomp`, checked: relative and without `..`.
    Localhost(String),
}

/// Everything else that a container's spec depends on.
pub struct TranslateInput<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub image: &'a ImageConfig,
    pub user: ResolvedUser,
    /// Environment, command and args, expanded.
    pub resolved: Resolved,
    /// Volumes and the kubelet's own files; see [`node_files`].
    pub mounts: Vec<MountPlan>,
    pub hostname: &'a str,
    pub pins: Pins,
    /// Leaf cgroup.
    pub cgroup: String,
    /// The parsed profile where [`seccomp_choice`] gave Localhost.
    pub localhost_profile: Option<LinuxSeccomp>,
    /// Of the node: whether RuntimeDefault holds where no profile is named.
    pub seccomp_default: bool,
    pub node: NodeCapacity,
    pub host: HostFacts,
}

pub fn translate(input: TranslateInput) -> Result<SpecInput, TranslateError> {
    let security = Security::of(input.pod, input.container);
    let choice = CapabilityChoice { add: security.add.clone(), drop: security.drop.clone() };
    let seccomp = match seccomp_choice(input.pod, input.container, input.seccomp_default)? {
        SeccompChoice::Unconfined => None,
        SeccompChoice::RuntimeDefault => {
            let granted = granted_capabilities(&choice, security.privileged, &input.host);
            Some(seccomp::runtime_default(Machine::OWN, &granted))
        }
        SeccompChoice::Localhost(name) => match input.localhost_profile {
            Some(profile) => Some(profile),
            None => return Err(TranslateError(format!("seccomp profile {name} was not loaded"))),
        },
    };
    let working_dir = input.container.working_dir.as_deref().filter(|d| !d.is_empty());
    Ok(SpecInput {
        args: args(&input.resolved, input.image)?,
        image_env: input.image.env.clone(),
        env: input.resolved.env,
        cwd: working_dir.unwrap_or(&input.image.working_dir).to_owned(),
        hostname: input.hostname.to_owned(),
        user: input.user,
        tty: input.container.tty,
        capabilities: choice,
        privileged: security.privileged,
        no_new_privileges: security.allow_privilege_escalation == Some(false),
        read_only_root: security.read_only_root,
        seccomp,
        oom_score_adj: qos::oom_score_adj(input.pod, input.container, &input.node),
        host_pid: input.pod.spec.host_pid,
        pins: input.pins,
        cgroup: input.cgroup,
        mounts: input.mounts.iter().map(mount).collect(),
        host: input.host,
    })
}

/// Docker's rules: a command replaces entrypoint and cmd, args replace cmd only.
fn args(resolved: &Resolved, image: &ImageConfig) -> Result<Vec<String>, TranslateError> {
    let (command, args) = match (resolved.command.is_empty(), resolved.args.is_empty()) {
        (false, _) => (&resolved.command, &resolved.args),
        (true, false) => (&image.entrypoint, &resolved.args),
        (true, true) => (&image.entrypoint, &image.cmd),
    };
    let argv: Vec<String> = command.iter().chain(args).cloned().collect();
    if argv.is_empty() { Err(TranslateError("no command specified".into())) } else { Ok(argv) }
}

fn mount(plan: &MountPlan) -> SpecMount {
    SpecMount {
        source: plan.source.clone(),
        destination: plan.destination.clone(),
        read_only: plan.read_only,
        propagation: match plan.propagation {
            Propagation::Private => SpecPropagation::Private,
            Propagation::HostToContainer => SpecPropagation::Slave,
            Propagation::Bidirectional => SpecPropagation::Shared,
        },
    }
}

/// Mounts of the pod's hosts, resolv.conf and hostname files, but for those that the container
/// mounts something else over.
pub fn node_files(container: &Container, hosts: &Path, resolv_conf: &Path, hostname: &Path) -> Vec<MountPlan> {
    let read_only = container.security_context.as_ref().and_then(|s| s.read_only_root_filesystem) == Some(true);
    [(hosts, "/etc/hosts", false), (resolv_conf, "/etc/resolv.conf", read_only), (hostname, "/etc/hostname", read_only)]
        .into_iter()
        .filter(|(_, destination, _)| !container.volume_mounts.iter().any(|m| same_path(&m.mount_path, destination)))
        .map(|(source, destination, read_only)| MountPlan {
            source: source.into(),
            destination: destination.into(),
            read_only,
            propagation: Propagation::Private,
        })
        .collect()
}

/// Paths that the image declares as volumes and the pod mounts nothing on, cleaned. The root and the
/// kernel's own file systems are no volumes.
pub fn image_volumes(image: &ImageConfig, mounts: &[MountPlan]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for volume in &image.volumes {
        let mut path = PathBuf::from("/");
        for part in Path::new(volume).components() {
            match part {
                Component::Normal(name) => path.push(name),
                Component::ParentDir => drop(path.pop()),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
        let taken = |other: &Path| other == path || same_path(&other.to_string_lossy(), &path.to_string_lossy());
        let ours = ["/proc", "/sys", "/dev"].iter().any(|kernels| path.starts_with(kernels));
        if path != Path::new("/") && !ours && !mounts.iter().any(|m| taken(&m.destination)) && !paths.iter().any(|p| taken(p)) {
            paths.push(path);
        }
    }
    paths
}

fn same_path(a: &str, b: &str) -> bool {
    let parts = |p| Path::new(p).components().filter(|c| matches!(c, Component::Normal(_))).map(|c| c.as_os_str().to_owned());
    parts(a).eq(parts(b))
}

/// What user::resolve is to look up in the image. As with kubelet and containerd, the group
/// behind an image's `user:group` plays no part: runAsGroup or the image's passwd decides.
pub fn user_request(pod: &Pod, container: &Container, image: &ImageConfig) -> Result<UserRequest, TranslateError> {
    let security = Security::of(pod, container);
    let pod_context = pod.spec.security_context.as_ref();
    let groups = pod_context
        .into_iter()
        .flat_map(|c| c.fs_group.iter().chain(&c.supplemental_groups))
        .map(|gid| id("supplementalGroups", *gid))
        .collect::<Result<_, _>>()?;
    Ok(UserRequest {
        image_user: image.user.clone(),
        run_as_user: security.run_as_user.map(|uid| id("runAsUser", uid)).transpose()?,
        run_as_group: security.run_as_group.map(|gid| id("runAsGroup", gid)).transpose()?,
        supplemental_groups: groups,
        strict: pod_context.and_then(|c| c.supplemental_groups_policy) == Some(SupplementalGroupsPolicy::Strict),
    })
}

fn id(field: &str, number: i64) -> Result<u32, TranslateError> {
    // The bound that the API server and runc have, too.
    u32::try_from(number)
        .ok()
        .filter(|n| *n <= i32::MAX as u32)
        .ok_or_else(|| TranslateError(format!("securityContext.{field} {number} is out of range: use 0 to 2147483647")))
}

/// runAsNonRoot, before and (by the user as resolved) after the image was asked.
pub fn verify_non_root(pod: &Pod, container: &Container, image: &ImageConfig, user: &ResolvedUser) -> Result<(), TranslateError> {
    let security = Security::of(pod, container);
    if security.run_as_non_root != Some(true) {
        return Ok(());
    }
    let whose = format!(
        "(pod: \"{}_{}({})\", container: {})",
        pod.metadata.name, pod.metadata.namespace, pod.metadata.uid, container.name
    );
    let refuse = |why: String| Err(TranslateError(format!("{why} {whose}")));
    match security.run_as_user {
        Some(0) => return refuse("container's runAsUser breaks non-root policy".into()),
        Some(_) => return Ok(()),
        None => {}
    }
    let name = image.user.split(':').next().unwrap_or_default();
    if !name.is_empty() && !name.bytes().all(|b| b.is_ascii_digit()) {
        return refuse(format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root"
        ));
    }
    if user.uid == 0 {
        return refuse("container has runAsNonRoot and image will run as root".into());
    }
    Ok(())
}

pub fn seccomp_choice(pod: &Pod, container: &Container, seccomp_default: bool) -> Result<SeccompChoice, TranslateError> {
    let security = Security::of(pod, container);
    if security.privileged {
        return Ok(SeccompChoice::Unconfined);
    }
    let Some(profile) = security.seccomp else {
        return Ok(if seccomp_default { SeccompChoice::RuntimeDefault } else { SeccompChoice::Unconfined });
    };
    match (profile.kind.as_str(), profile.localhost_profile.as_deref()) {
        ("Unconfined", _) => Ok(SeccompChoice::Unconfined),
        ("RuntimeDefault", _) => Ok(SeccompChoice::RuntimeDefault),
        ("Localhost", None | Some("")) => {
            Err(TranslateError("localhostProfile must be set if seccompProfile type is Localhost.".into()))
        }
        ("Localhost", Some(name)) => {
            let inside = Path::new(name).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
            if inside && !name.contains('\0') {
                Ok(SeccompChoice::Localhost(name.to_owned()))
            } else {
                Err(TranslateError(format!(
                    "seccompProfile.localhostProfile \"{name}\" must be a relative path without .., below the kubelet's seccomp folder"
                )))
            }
        }
        (other, _) => Err(TranslateError(format!(
            "seccompProfile.type \"{other}\" is unknown: use RuntimeDefault, Localhost or Unconfined"
        ))),
    }
}

/// A container's effective security context: its own fields over the pod's.
struct Security<'a> {
    run_as_user: Option<i64>,
    run_as_group: Option<i64>,
    run_as_non_root: Option<bool>,
    privileged: bool,
    read_only_root: bool,
    allow_privilege_escalation: Option<bool>,
    add: Vec<String>,
    drop: Vec<String>,
    seccomp: Option<&'a SeccompProfile>,
}

impl<'a> Security<'a> {
    fn of(pod: &'a Pod, container: &'a Container) -> Security<'a> {
        let of_pod = pod.spec.security_context.as_ref();
        let own = container.security_context.as_ref();
        let capabilities = own.and_then(|c| c.capabilities.clone()).unwrap_or_default();
        Security {
            run_as_user: own.and_then(|c| c.run_as_user).or(of_pod.and_then(|c| c.run_as_user)),
            run_as_group: own.and_then(|c| c.run_as_group).or(of_pod.and_then(|c| c.run_as_group)),
            run_as_non_root: own.and_then(|c| c.run_as_non_root).or(of_pod.and_then(|c| c.run_as_non_root)),
            privileged: own.and_then(|c| c.privileged) == Some(true),
            read_only_root: own.and_then(|c| c.read_only_root_filesystem) == Some(true),
            allow_privilege_escalation: own.and_then(|c| c.allow_privilege_escalation),
            add: capabilities.add,
            drop: capabilities.drop,
            seccomp: own.and_then(|c| c.seccomp_profile.as_ref()).or(of_pod.and_then(|c| c.seccomp_profile.as_ref())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::pod::{PodSecurityContext, SecurityContext, VolumeMount};

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|t| (*t).to_owned()).collect()
    }

    fn pod_and_container() -> (Pod, Container) {
        let mut pod = Pod::default();
        pod.metadata.name = "web".into();
        pod.metadata.namespace = "default".into();
        pod.metadata.uid = "u1".into();
        (pod, Container { name: "c".into(), ..Container::default() })
    }

    #[test]
    fn an_images_volumes_are_those_that_the_pod_does_not_mount() {
        let image = ImageConfig {
            volumes: texts(&["/data", "var/lib/x/", "/mine", "/a/../b", "/b/.", "/", "/proc/x", "/dev", "/..", "/sysx"]),
            ..ImageConfig::default()
        };
        let mine =
            MountPlan { source: "/s".into(), destination: "/mine/".into(), read_only: true, propagation: Propagation::Private };
        let found = image_volumes(&image, &[mine]);
        assert_eq!(found, ["/data", "/var/lib/x", "/b", "/sysx"].map(PathBuf::from));
    }

    #[test]
    fn command_and_args_replace_what_docker_says() {
        let image = ImageConfig { entrypoint: texts(&["/entry"]), cmd: texts(&["x", "y"]), ..ImageConfig::default() };
        for (command, given, want) in [
            (vec![], vec![], vec!["/entry", "x", "y"]),
            (vec![], vec!["z"], vec!["/entry", "z"]),
            (vec!["/sh"], vec![], vec!["/sh"]),
            (vec!["/sh"], vec!["-c"], vec!["/sh", "-c"]),
        ] {
            let resolved = Resolved { command: texts(&command), args: texts(&given), ..Resolved::default() };
            assert_eq!(args(&resolved, &image).unwrap(), want);
        }
        assert_eq!(args(&Resolved::default(), &ImageConfig::default()).unwrap_err().0, "no command specified");
    }

    #[test]
    fn the_container_is_heard_before_the_pod_and_the_image() {
        let (mut pod, mut container) = pod_and_container();
        let image = ImageConfig { user: "7:8".into(), ..ImageConfig::default() };
        assert_eq!(user_request(&pod, &container, &image).unwrap().image_user, "7:8");
        pod.spec.security_context = Some(PodSecurityContext {
            run_as_user: Some(1),
            run_as_group: Some(2),
            fs_group: Some(30),
            supplemental_groups: vec![40],
            supplemental_groups_policy: Some(SupplementalGroupsPolicy::Strict),
            ..PodSecurityContext::default()
        });
        container.security_context = Some(SecurityContext { run_as_user: Some(9), ..SecurityContext::default() });
        let request = user_request(&pod, &container, &image).unwrap();
        assert_eq!((request.run_as_user, request.run_as_group), (Some(9), Some(2)));
        assert_eq!((request.supplemental_groups, request.strict), (vec![30, 40], true));
        for bad in [-1, 1 << 31, i64::MAX] {
            container.security_context = Some(SecurityContext { run_as_user: Some(bad), ..SecurityContext::default() });
            assert!(user_request(&pod, &container, &image).unwrap_err().0.contains("runAsUser"), "{bad}");
        }
    }

    #[test]
    fn run_as_non_root_in_the_kubelets_words() {
        let (pod, mut container) = pod_and_container();
        let mut ask = |run_as_user, image_user: &str, uid| {
            container.security_context =
                Some(SecurityContext { run_as_non_root: Some(true), run_as_user, ..SecurityContext::default() });
            let image = ImageConfig { user: image_user.into(), ..ImageConfig::default() };
            verify_non_root(&pod, &container, &image, &ResolvedUser { uid, ..ResolvedUser::default() })
        };
        ask(Some(5), "root", 5).unwrap();
        ask(None, "5:0", 5).unwrap();
        let whose = "(pod: \"web_default(u1)\", container: c)";
        assert_eq!(ask(Some(0), "5", 0).unwrap_err().0, format!("container's runAsUser breaks non-root policy {whose}"));
        for root in ["", "0", "0:5", "0000"] {
            assert_eq!(
                ask(None, root, 0).unwrap_err().0,
                format!("container has runAsNonRoot and image will run as root {whose}")
            );
        }
        assert_eq!(
            ask(None, "app:app", 5).unwrap_err().0,
            format!("container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root {whose}")
        );
    }

    #[test]
    fn a_seccomp_profile_is_never_less_than_asked_for() {
        let (mut pod, mut container) = pod_and_container();
        let profile = |kind: &str, name: Option<&str>| {
            Some(SeccompProfile { kind: kind.into(), localhost_profile: name.map(str::to_owned) })
        };
        assert_eq!(seccomp_choice(&pod, &container, true).unwrap(), SeccompChoice::RuntimeDefault);
        assert_eq!(
            seccomp_choice(&pod, &container, false).unwrap(),
            SeccompChoice::Unconfined,
            "the node's word where no profile is named"
        );
        pod.spec.security_context =
            Some(PodSecurityContext { seccomp_profile: profile("Unconfined", None), ..PodSecurityContext::default() });
        assert_eq!(seccomp_choice(&pod, &container, true).unwrap(), SeccompChoice::Unconfined);
        let mut own = |p| {
            container.security_context = Some(SecurityContext { seccomp_profile: p, ..SecurityContext::default() });
            // What is named counts whatever the node says.
            assert_eq!(seccomp_choice(&pod, &container, true), seccomp_choice(&pod, &container, false));
            seccomp_choice(&pod, &container, true)
        };
        assert_eq!(own(profile("RuntimeDefault", None)).unwrap(), SeccompChoice::RuntimeDefault);
        assert_eq!(own(profile("Localhost", Some("a/b.json"))).unwrap(), SeccompChoice::Localhost("a/b.json".into()));
        for bad in [
            profile("Localhost", None),
            profile("Localhost", Some("")),
            profile("Localhost", Some("../x")),
            profile("Localhost", Some("a/../../x")),
            profile("Localhost", Some("/etc/x")),
            profile("localhost", Some("x")),
            profile("", None),
        ] {
            assert!(own(bad.clone()).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_pods_files_give_way_to_what_the_container_mounts_there() {
        let (_, mut container) = pod_and_container();
        container.volume_mounts.push(VolumeMount { mount_path: "/etc//hosts/".into(), ..VolumeMount::default() });
        container.security_context =
            Some(SecurityContext { read_only_root_filesystem: Some(true), ..SecurityContext::default() });
        let files = node_files(&container, Path::new("/h"), Path::new("/r"), Path::new("/n"));
        let brief: Vec<_> = files.iter().map(|m| (m.destination.to_str().unwrap(), m.read_only)).collect();
        assert_eq!(brief, [("/etc/resolv.conf", true), ("/etc/hostname", true)]);
    }
}
