//! Makes one container: image, environment, journal, root file system, user, mounts, spec, create.
//!
//! Invariant: the attempt is in the journal before anything of it is made. What fails before that
//! costs nothing; what fails after it is the same attempt again, unless the container itself could
//! not be started.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::container::image_failed;
use super::pod::hostname;
use super::{Failed, Job, journal, spec, stamp};
use crate::api::pod::{Container, DnsPolicy, Pod};
use crate::config;
use crate::images::Image;
use crate::kubelet::env::{self, Facts};
use crate::kubelet::model::{FailReason, NewAttempt, Outcome};
use crate::kubelet::qos::{self, QosClass};
use crate::kubelet::rooms::Rooms;
use crate::kubelet::translate::{self, SeccompChoice, TranslateInput};
use crate::net::texts::{self, ResolvInput};
use crate::runtime::model::{ContainerSpec, LogSpec, Rootfs};
use crate::runtime::{FailureKind, RuntimeError, seccomp, spec as oci, user};
use crate::store::atomic;
use crate::store::ids::PodUid;
use crate::store::records::{ExitRecord, Record};
use crate::sys::clock;
use crate::volumes::model::{MountPlan, Propagation};

/// What containerd gives a container that could not be started.
const START_ERROR: i32 = 128;

pub(super) fn create(rooms: &Rooms, job: &Job, uid: &PodUid, name: &str, attempt: &NewAttempt) -> Result<Outcome, Failed> {
    let pod = spec(job, uid)?;
    let container = find(pod, name)?;
    let image = match rooms.images.find(&container.image) {
        Ok(Some(image)) => image,
        Ok(None) => return Ok(Outcome::ImageMissing),
        Err(error) => return Err(image_failed(error)),
    };
    let facts = Facts {
        node_name: rooms.config.node_name.clone(),
        pod_ips: job.addresses.clone(),
        host_ips: rooms.node_ips.clone(),
        allocatable_milli_cpu: clamp(rooms.capacity.milli_cpu),
        allocatable_memory: clamp(rooms.capacity.memory),
        allocatable_storage: 0,
        services: job.services.clone(),
    };
    let resolved = env::resolve(pod, container, &facts, &*job.configs).map_err(Failed::because(FailReason::CreateConfig))?;
    for warning in &resolved.warnings {
        tracing::warn!(pod = %job.full_name(), container = name, "{warning}");
    }
    let request = translate::user_request(pod, container, &image.config).map_err(Failed::because(FailReason::CreateConfig))?;

    let image_id = image.digests.first().unwrap_or(&image.id).clone();
    let at = clock::wall_nanos();
    if attempt.new {
        journal(
            rooms,
            &Record::Attempt {
                uid: uid.clone(),
                name: name.to_owned(),
                init: attempt.init,
                attempt: attempt.number,
                id: attempt.id.clone(),
                image: image_id.clone(),
                at,
                stamp: stamp(rooms),
                sandbox: attempt.sandbox,
                backoff: attempt.backoff,
            },
        )?;
    } else {
        // What was cut off may be there in part.
        rooms.runtime.remove_container(uid, &attempt.id).map_err(Failed::because(FailReason::Create))?;
    }
    let made = Making { rooms, job, uid, pod, container, attempt, image: &image, resolved, request }.make();
    Ok(match made {
        Ok(()) => Outcome::Created { image: image_id, at },
        Err(Made::NotStarted(message)) => Outcome::NotStarted { image: image_id, at, exit: start_error(message) },
        Err(Made::Failed(failed)) => Outcome::NotCreated { image: image_id, at, reason: failed.reason, message: failed.message },
    })
}

fn find<'a>(pod: &'a Pod, name: &str) -> Result<&'a Container, Failed> {
    let mut all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let missing = || Failed { reason: FailReason::CreateConfig, message: format!("the pod has no container \"{name}\"") };
    all.find(|c| c.name == name).ok_or_else(missing)
}

fn clamp(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn start_error(message: String) -> ExitRecord {
    ExitRecord {
        code: START_ERROR,
        finished_at: clock::wall_nanos(),
        reason: "StartError".to_owned(),
        message,
        ..ExitRecord::default()
    }
}

/// How a create ended that did not succeed.
enum Made {
    /// In the container's own doing: it counts as an attempt that ended.
    NotStarted(String),
    /// Tried again as the same attempt.
    Failed(Failed),
}

impl From<Failed> for Made {
    fn from(failed: Failed) -> Made {
        Made::Failed(failed)
    }
}

/// A create whose attempt is in the journal.
struct Making<'a> {
    rooms: &'a Rooms,
    job: &'a Job,
    uid: &'a PodUid,
    pod: &'a Pod,
    container: &'a Container,
    attempt: &'a NewAttempt,
    image: &'a Image,
    resolved: env::Resolved,
    request: user::UserRequest,
}

impl Making<'_> {
    fn make(self) -> Result<(), Made> {
        let config = FailReason::CreateConfig;
        let create = FailReason::Create;
        let Making { rooms, job, uid, pod, container, attempt, image, .. } = self;
        let dir = rooms.config.roots.container_dir(attempt.id.as_str());
        let rootfs = Rootfs { lower: image.layers.clone(), upper: dir.join("upper"), work: dir.join("work") };
        let root = rooms.runtime.prepare_rootfs(uid, &attempt.id, &rootfs).map_err(runtime_failed)?;
        let user = user::resolve(&root, &self.request).map_err(Failed::because(create))?;
        translate::verify_non_root(pod, container, &image.config, &user).map_err(Failed::because(config))?;
        let localhost_profile =
            match translate::seccomp_choice(pod, container, rooms.config.seccomp_default).map_err(Failed::because(config))? {
                SeccompChoice::Localhost(profile) => Some(self.localhost_profile(&profile)?),
                SeccompChoice::Unconfined | SeccompChoice::RuntimeDefault => None,
            };
        let hostname = hostname(rooms, pod).map_err(Failed::because(config))?;
        let mut mounts = self.mounts(&hostname)?;
        self.add_image_volumes(&mut mounts)?;
        let pins = rooms.runtime.pins(uid).map_err(runtime_failed)?;
        let class = QosClass::of(pod);
        let cgroup = format!("{}/{}", qos::pod_cgroup(&rooms.config.cgroup_parent, class, uid.as_str()), attempt.id);
        let input = translate::translate(TranslateInput {
            pod,
            container,
            resolved: self.resolved,
            image: &image.config,
            user,
            mounts,
            hostname: &hostname.hostname,
            pins,
            cgroup: cgroup.clone(),
            localhost_profile,
            seccomp_default: rooms.config.seccomp_default,
            node: rooms.capacity,
            host: rooms.host.clone(),
        })
        .map_err(Failed::because(config))?;
        let log = rooms.config.roots.pod_logs(&job.namespace, &job.name, uid.as_str()).join(&container.name);
        let log = log.join(format!("{}.log", attempt.number));
        let link = rooms.config.roots.log_link(&job.namespace, &job.name, &container.name, attempt.id.as_str());
        make_log(&log, &link).map_err(|e| io_failed(create, "make", &log, e))?;
        let spec = ContainerSpec {
            uid: uid.clone(),
            id: attempt.id.clone(),
            name: container.name.clone(),
            attempt: attempt.number,
            oci: oci::container_spec(&input).map_err(Failed::because(create))?,
            rootfs,
            cgroup,
            resources: qos::container_resources(pod, container),
            log: Some(LogSpec { path: log, max_size: rooms.config.log_max_size, max_files: rooms.config.log_max_files }),
            stdin: container.stdin,
            stdin_once: container.stdin_once,
            tty: container.tty,
        };
        rooms.runtime.create_container(&spec).map_err(runtime_failed)
    }

    fn localhost_profile(&self, profile: &str) -> Result<oci_spec::runtime::LinuxSeccomp, Failed> {
        let path = self.rooms.config.roots.kubelet.join("seccomp").join(profile);
        let missing =
            || Failed { reason: FailReason::Create, message: format!("seccomp profile {} is not on this node", path.display()) };
        let json = atomic::read_bounded(&path, seccomp::LARGEST_PROFILE)
            .map_err(Failed::because(FailReason::Create))?
            .ok_or_else(missing)?;
        let (profile, left_out) = seccomp::parse(profile, &json).map_err(Failed::because(FailReason::Create))?;
        for word in left_out {
            tracing::warn!(pod = %self.job.full_name(), container = self.container.name, "seccomp profile: {word}");
        }
        Ok(profile)
    }

    /// Volumes first, then the kubelet's own files where no volume takes their place.
    fn mounts(&self, hostname: &texts::Hostname) -> Result<Vec<MountPlan>, Failed> {
        let Making { rooms, job, uid, pod, container, attempt, .. } = *self;
        let mut mounts = rooms.volumes.mounts(uid, pod, container).map_err(Failed::because(FailReason::CreateConfig))?;
        let config = FailReason::CreateConfig;
        let aliases: Vec<texts::HostAlias> = pod
            .spec
            .host_aliases
            .iter()
            .map(|alias| texts::HostAlias { ip: alias.ip.clone(), hostnames: alias.hostnames.clone() })
            .collect();
        let hosts = if pod.spec.host_network {
            let node = read_text(Path::new("/etc/hosts"))?;
            texts::hosts_of_node(&node, &aliases)
        } else {
            texts::hosts(&hostname.hostname, hostname.domain.as_deref(), &job.addresses, &aliases)
        }
        .map_err(Failed::because(config))?;
        let hosts_file = rooms.volumes.hosts_file(uid, &hosts).map_err(Failed::because(config))?;
        let dir = rooms.config.roots.pod_dir(uid.as_str());
        let name_file = dir.join("hostname");
        replace(&name_file, &format!("{}\n", hostname.kernel))?;
        let resolv_file = dir.join("resolv.conf");
        replace(&resolv_file, &self.resolv_conf()?)?;
        mounts.extend(translate::node_files(container, &hosts_file, &resolv_file, &name_file));

        let message = rooms.volumes.termination_log(uid, &container.name, attempt.number).map_err(Failed::because(config))?;
        mounts.push(MountPlan {
            source: message,
            destination: container.termination_message_path.as_deref().unwrap_or("/dev/termination-log").into(),
            read_only: false,
            propagation: Propagation::Private,
        });
        Ok(mounts)
    }

    /// A writable directory of the container's own wherever its image declares a volume and the pod
    /// mounts none.
    fn add_image_volumes(&self, mounts: &mut Vec<MountPlan>) -> Result<(), Made> {
        for path in translate::image_volumes(&self.image.config, mounts) {
            let source = self.rooms.runtime.image_volume(self.uid, &self.attempt.id, &path).map_err(runtime_failed)?;
            mounts.push(MountPlan { source, destination: path, read_only: false, propagation: Propagation::Private });
        }
        Ok(())
    }

    fn resolv_conf(&self) -> Result<String, Failed> {
        let pod = self.pod;
        let node = read_text(Path::new("/etc/resolv.conf"))?;
        let (host, mut problems) = if pod.spec.host_network {
            (texts::parse_resolv_conf(&node), Vec::new())
        } else {
            let upstream = config::behind_stub();
            let upstream = upstream.iter().map(|path| read_text(path)).collect::<Result<Vec<_>, _>>()?;
            let upstream: Vec<&str> = upstream.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
            texts::host_dns(&node, &upstream)
        };
        let wish = pod.spec.dns_config.as_ref().map(|config| texts::Dns {
            nameservers: config.nameservers.clone(),
            searches: config.searches.clone(),
            options: config
                .options
                .iter()
                .map(|option| texts::DnsOption { name: option.name.clone(), value: option.value.clone() })
                .collect(),
        });
        let cluster = cluster_dns(self.rooms);
        let input = ResolvInput {
            policy: match pod.spec.dns_policy.unwrap_or_default() {
                DnsPolicy::ClusterFirst => texts::DnsPolicy::ClusterFirst,
                DnsPolicy::ClusterFirstWithHostNet => texts::DnsPolicy::ClusterFirstWithHostNet,
                DnsPolicy::Default => texts::DnsPolicy::Default,
                DnsPolicy::None => texts::DnsPolicy::None,
            },
            host_network: pod.spec.host_network,
            namespace: &self.job.namespace,
            host: &host,
            cluster: cluster.as_ref(),
            pod: wish.as_ref(),
        };
        let (text, more) = texts::resolv_conf(&input).map_err(Failed::because(FailReason::CreateConfig))?;
        problems.extend(more);
        // With --dns=off nobody expects it; while the port is taken, the server says so itself.
        for problem in problems.iter().filter(|p| !matches!(p, texts::DnsProblem::NoClusterDns)) {
            tracing::warn!(pod = %self.job.full_name(), "DNS: {problem}");
        }
        Ok(text)
    }
}

/// Who names the cluster's things to pods. One of our own addresses is enough: all of them are
/// one server, and musl's resolver would ask each of them everything.
fn cluster_dns(rooms: &Rooms) -> Option<texts::ClusterDns> {
    let config = &rooms.config;
    let own = || rooms.dns.as_ref().and_then(|dns| dns.servers().into_iter().next());
    let servers: Vec<IpAddr> =
        if config.cluster_dns.is_empty() { own().into_iter().collect() } else { config.cluster_dns.clone() };
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    (!servers.is_empty()).then(|| texts::ClusterDns { servers, domain: config.cluster_domain.clone() })
}

/// A container's own failure is an attempt that ended; all others are worth another try.
fn runtime_failed(error: RuntimeError) -> Made {
    match error.start_failure() {
        // Ours, not the container's: nothing of it has run.
        Some((FailureKind::HelperDied, _)) | None => Made::Failed(Failed::new(FailReason::Create, &error)),
        Some((_, message)) => Made::NotStarted(message.to_owned()),
    }
}

fn io_failed(reason: FailReason, operation: &str, path: &Path, error: io::Error) -> Failed {
    Failed { reason, message: format!("{operation} {}: {error}", path.display()) }
}

/// A small text of the host's; one that is absent is empty.
fn read_text(path: &Path) -> Result<String, Failed> {
    let bytes = atomic::read_bounded(path, 1 << 20).map_err(Failed::because(FailReason::CreateConfig))?;
    Ok(bytes.map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default())
}

/// In place, since containers that run have this very file mounted; only where it differs.
fn replace(path: &Path, text: &str) -> Result<(), Failed> {
    if read_text(path)? == text && path.exists() {
        return Ok(());
    }
    fs::write(path, text).map_err(|e| io_failed(FailReason::Create, "write", path, e))
}

/// The log's directory, and the link by which shippers find it.
fn make_log(log: &Path, link: &Path) -> io::Result<()> {
    for file in [log, link] {
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
    }
    match symlink(log, link) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()), // its name holds the attempt's id
        other => other,
    }
}
