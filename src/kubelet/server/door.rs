//! The real [`Agent`]: answers from the planner's handle, the runtime and the images.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::Agent;
use super::model::{
    AgentInfo, AttemptView, ContainerView, ExecAsk, Failure, FailureKind, ImageView, PodView, PodsAsk, PolicyView, ProblemView,
    ServiceView,
};
use crate::config::Roots;
use crate::dns::Dns;
use crate::images::{Image, ImageError, Images, ImportOptions, PullAuth};
use crate::kubelet::handle::{self, AgentHandle, AskError};
use crate::kubelet::source::{Origin, Problem};
use crate::proxy::way::{self, Target, WayError};
use crate::proxy::{Proxy, ProxyError};
use crate::runtime::model::{ContainerPhase, ExecSpec, SandboxState};
use crate::runtime::{ExecProcess, FailureKind as StartFailure, Runtime, RuntimeError, spec};

/// Bytes of one answer, to the next end of a line.
const PIECE: usize = 256 * 1024;

pub struct Door {
    pub handle: AgentHandle,
    pub runtime: Runtime,
    pub images: Images,
    pub dns: Option<Arc<Dns>>,
    pub proxy: Proxy,
    pub facts: Facts,
}

/// What does not change while the agent runs.
#[derive(Clone, Debug)]
pub struct Facts {
    pub version: &'static str,
    pub node: String,
    pub instance: String,
    /// Wall-clock nanoseconds.
    pub started_at: i64,
    pub manifests: PathBuf,
    pub roots: Roots,
    pub cgroup_parent: String,
    pub pod_cidrs: Vec<String>,
}

impl Agent for Door {
    fn pods(&self, ask: &PodsAsk, give: &mut dyn FnMut(PodView) -> Result<(), Failure>) -> Result<(), Failure> {
        for pod in self.handle.pods()? {
            let mut view = view(&pod);
            if ask.manifests {
                let stored = self.handle.manifest(&pod).map_err(|e| Failure::of(FailureKind::Failed, &e))?;
                match stored.as_deref().map(manifest) {
                    Some(Ok(raw)) => view.manifest = Some(raw),
                    Some(Err(e)) => view.problems.push(format!("the stored manifest cannot be read: {e}")),
                    None => view.problems.push("the stored manifest is missing".into()),
                }
            }
            if ask.processes
                && let Some(state) = self.runtime.sandbox(&pod.uid).map_err(|e| runtime_failure(&e))?
            {
                processes(&mut view, &state);
            }
            give(view)?;
        }
        Ok(())
    }

    fn problems(&self) -> Result<Vec<ProblemView>, Failure> {
        Ok(self.handle.problems()?.into_iter().map(problem).collect())
    }

    fn services(&self) -> Result<Vec<ServiceView>, Failure> {
        Ok(self.handle.services()?)
    }

    fn policies(&self, pod: &str) -> Result<PolicyView, Failure> {
        let pods = self.handle.pods()?;
        let found = find(&pods, pod)?;
        let gone = || Failure::new(FailureKind::NotFound, format!("pod {}/{} is gone", found.namespace, found.name));
        self.handle.policies(&found.namespace, &found.name)?.ok_or_else(gone)
    }

    fn tables(&self, give: &mut dyn FnMut(String) -> Result<(), Failure>) -> Result<(), Failure> {
        for table in self.proxy.tables().map_err(proxy_failure)? {
            let text = table.to_string();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let end = rest.get(PIECE..).and_then(|tail| tail.find('\n')).map_or(rest.len(), |at| PIECE + at + 1);
                let (piece, after) = rest.split_at(end);
                give(piece.to_owned())?;
                rest = after;
            }
        }
        Ok(())
    }

    fn trace(&self, from: &str, to: &str) -> Result<String, Failure> {
        let to: Target = to.parse().map_err(|e| Failure::of(FailureKind::Invalid, &e))?;
        let source = match from.parse::<IpAddr>() {
            Ok(ip) => Some(ip),
            Err(_) if from == "node" => None,
            Err(_) => {
                let pods = self.handle.pods()?;
                let pod = find(&pods, from)?;
                let ips = pod.status.pod_ips.iter().filter_map(|ip| ip.ip.parse::<IpAddr>().ok());
                let mut ips = ips.filter(|ip| ip.is_ipv4() == to.at.is_ipv4());
                let ip = ips.next().ok_or_else(|| {
                    let why = format!("pod {}/{} has no address of the family of {}", pod.namespace, pod.name, to.at);
                    Failure::new(FailureKind::Invalid, why)
                })?;
                Some(ip)
            }
        };
        let tables = self.proxy.tables().map_err(proxy_failure)?;
        way::ways(&tables, source, &to).map(|ways| ways.to_string()).map_err(way_failure)
    }

    fn info(&self) -> Result<AgentInfo, Failure> {
        let pods = self.handle.pods()?;
        let images = self.images.list().map_err(images_failure)?;
        let (rss, anonymous) = memory();
        let text = |path: &Path| path.display().to_string();
        let running = pods.iter().flat_map(|p| &p.containers).filter(|c| c.current.as_ref().is_some_and(|a| a.running)).count();
        Ok(AgentInfo {
            version: self.facts.version.to_owned(),
            pid: nix::unistd::getpid().as_raw(),
            node: self.facts.node.clone(),
            instance: self.facts.instance.clone(),
            started_at: self.facts.started_at,
            manifests: text(&self.facts.manifests),
            run: text(&self.facts.roots.run),
            state: text(&self.facts.roots.state),
            kubelet: text(&self.facts.roots.kubelet),
            logs: text(&self.facts.roots.logs),
            cgroup_parent: self.facts.cgroup_parent.clone(),
            unit: unit(),
            pod_cidrs: self.facts.pod_cidrs.clone(),
            dns: self.dns.iter().flat_map(|dns| dns.servers()).map(|ip| ip.to_string()).collect(),
            dns_counters: self.dns.iter().flat_map(|dns| dns.counters().read()).map(|(name, n)| (name.to_owned(), n)).collect(),
            proxy: self.proxy.role().to_string(),
            pods: count(pods.len()),
            containers_running: count(running),
            images: count(images.len()),
            rss,
            anonymous,
        })
    }

    fn exec(&self, ask: &ExecAsk) -> Result<ExecProcess, Failure> {
        if ask.argv.is_empty() {
            return Err(Failure::new(FailureKind::Invalid, "exec needs a command: coracle exec POD -- COMMAND"));
        }
        let pods = self.handle.pods()?;
        let pod = find(&pods, &ask.pod)?;
        let container = pick(pod, &ask.container)?;
        let running = container.current.as_ref().filter(|attempt| attempt.running).ok_or_else(|| {
            Failure::new(
                FailureKind::NotFound,
                format!("container {} of pod {}/{} does not run now", container.name, pod.namespace, pod.name),
            )
        })?;
        let oci = self.runtime.container_spec(&pod.uid, &running.id).map_err(|e| runtime_failure(&e))?;
        let process = spec::exec_process(&oci, &ask.argv, ask.tty).map_err(|e| Failure::of(FailureKind::Invalid, &e))?;
        let exec =
            ExecSpec { uid: pod.uid.clone(), id: running.id.clone(), argv: ask.argv.clone(), tty: ask.tty, stdin: ask.stdin };
        let process = self.runtime.exec(&exec, &process).map_err(|e| runtime_failure(&e))?;
        if let (true, Some((rows, columns))) = (ask.tty, ask.size) {
            // A wrong size is no reason to lose the process; the client sends its size again.
            if let Err(error) = process.resize(rows, columns) {
                tracing::debug!(error = %crate::obs::chain(&error), "size of a new exec's terminal");
            }
        }
        Ok(process)
    }

    fn images(&self) -> Result<Vec<ImageView>, Failure> {
        Ok(self.images.list().map_err(images_failure)?.into_iter().map(image_view).collect())
    }

    fn pull(&self, reference: &str, username: &str, password: &str) -> Result<ImageView, Failure> {
        let auth = PullAuth { username: username.to_owned(), password: password.to_owned(), ..PullAuth::default() };
        let auth = if username.is_empty() { &[][..] } else { std::slice::from_ref(&auth) };
        let image = self.images.pull(reference, auth).map_err(images_failure)?;
        self.handle.images_changed()?;
        Ok(image_view(image))
    }

    fn import(&self, path: &str, name: Option<&str>) -> Result<Vec<ImageView>, Failure> {
        let options = ImportOptions { name: name.map(str::to_owned) };
        let images = self.images.import(Path::new(path), &options).map_err(images_failure)?;
        self.handle.images_changed()?;
        Ok(images.into_iter().map(image_view).collect())
    }

    fn stop_all(&self, bound: Duration, say: &mut dyn FnMut(String)) -> Result<(), Failure> {
        let began = Instant::now();
        say(format!("ending {} pods, within {} s", self.handle.pods()?.len(), bound.as_secs()));
        let report = self.handle.stop_all(bound)?;
        say(format!("{} pods ended in {:.1} s", report.stopped, began.elapsed().as_secs_f64()));
        match report.left.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(FailureKind::Failed, format!("not everything has ended: {}", report.left.join("; ")))),
        }
    }
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Failure {
        Failure::of(FailureKind::Busy, &error)
    }
}

fn view(pod: &handle::PodView) -> PodView {
    PodView {
        uid: pod.uid.to_string(),
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        origin: pod.origin.as_ref().map(Origin::to_string).unwrap_or_default(),
        deletion: pod.deletion.clone(),
        containers: pod.containers.iter().map(container_view).collect(),
        status: pod.status.clone(),
        warnings: pod.warnings.iter().map(|w| format!("{}: {}", w.field, w.message)).collect(),
        problems: pod.problems.clone(),
        monitor: None,
        manifest: None,
    }
}

fn processes(view: &mut PodView, state: &SandboxState) {
    view.monitor = Some(state.monitor);
    for attempt in view.containers.iter_mut().filter_map(|c| c.current.as_mut()) {
        attempt.pid = state.containers.iter().find(|c| c.id.as_str() == attempt.id).and_then(|c| match c.phase {
            ContainerPhase::Created { pid } | ContainerPhase::Running { pid, .. } => Some(pid),
            ContainerPhase::Exited(_) => None,
        });
    }
}

fn container_view(container: &handle::ContainerView) -> ContainerView {
    let attempt = |attempt: &handle::AttemptView| AttemptView {
        id: attempt.id.to_string(),
        number: attempt.number,
        log: attempt.log.clone(),
        pid: None,
        running: attempt.running,
    };
    ContainerView {
        name: container.name.clone(),
        init: container.init,
        tty: container.tty,
        stdin: container.stdin,
        current: container.current.as_ref().map(attempt),
        previous: container.previous.as_ref().map(attempt),
    }
}

fn manifest(raw: &[u8]) -> Result<Box<RawValue>, serde_json::Error> {
    serde_json::from_slice(raw)
}

fn problem(problem: Problem) -> ProblemView {
    let mut place = if problem.file.is_empty() { "manifests directory".to_owned() } else { problem.file };
    if problem.document > 0 {
        place.push_str(&format!(" document {}", problem.document));
    }
    if problem.line > 0 {
        place.push_str(&format!(" line {}:{}", problem.line, problem.column));
    }
    ProblemView {
        place,
        pod: problem.pod,
        object: problem.object,
        field: problem.field,
        message: problem.message,
        kept: problem.kept,
    }
}

/// `namespace/name`, `name` in the namespace default, or a uid.
fn find<'a>(pods: &'a [handle::PodView], name: &str) -> Result<&'a handle::PodView, Failure> {
    let (namespace, short) = name.split_once('/').unwrap_or(("default", name));
    pods.iter()
        .find(|p| p.namespace == namespace && p.name == short)
        .or_else(|| pods.iter().find(|p| p.uid.as_str() == name))
        .ok_or_else(|| Failure::new(FailureKind::NotFound, format!("no pod {namespace}/{short} on this node")))
}

/// The named container, or the first that is no init container.
fn pick<'a>(pod: &'a handle::PodView, name: &str) -> Result<&'a handle::ContainerView, Failure> {
    let found = match name {
        "" => pod.containers.iter().find(|c| !c.init),
        name => pod.containers.iter().find(|c| c.name == name),
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = pod.containers.iter().map(|c| c.name.as_str()).collect();
        Failure::new(
            FailureKind::NotFound,
            format!("pod {}/{} has no container \"{name}\"; it has {}", pod.namespace, pod.name, names.join(", ")),
        )
    })
}

fn runtime_failure(error: &RuntimeError) -> Failure {
    let kind = match error.start_failure() {
        Some((StartFailure::NoProgram, _)) => FailureKind::NoProgram,
        Some((StartFailure::NotExecutable, _)) => FailureKind::NotExecutable,
        _ => match error {
            RuntimeError::NoSandbox { .. } | RuntimeError::NoContainer { .. } | RuntimeError::WrongState { .. } => {
                FailureKind::NotFound
            }
            _ => FailureKind::Failed,
        },
    };
    Failure::of(kind, error)
}

fn proxy_failure(error: ProxyError) -> Failure {
    Failure::of(FailureKind::Failed, &error)
}

fn way_failure(error: WayError) -> Failure {
    let kind = match error {
        WayError::NoTable(_) | WayError::Families { .. } | WayError::NoRoute(_) => FailureKind::Invalid,
        WayError::Route(_) | WayError::Look(_) | WayError::Trace(_) => FailureKind::Failed,
    };
    Failure::of(kind, &error)
}

fn images_failure(error: ImageError) -> Failure {
    let kind = match error {
        ImageError::InvalidName { .. } => FailureKind::Invalid,
        ImageError::NotPresent(_) => FailureKind::NotFound,
        _ => FailureKind::Failed,
    };
    Failure::of(kind, &error)
}

fn image_view(image: Image) -> ImageView {
    ImageView { id: image.id, tags: image.tags, digests: image.digests, size: image.size, pinned: image.pinned }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// systemd's hierarchy is `0::` on cgroup v2 and `name=systemd` on v1.
fn unit() -> String {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let ours = groups.lines().filter(|line| line.starts_with("0::") || line.contains(":name=systemd:"));
    let unit = ours.flat_map(|line| line.split('/')).find(|part| part.ends_with(".service") && *part != "init.service");
    unit.unwrap_or_default().to_owned()
}

/// Resident and anonymous bytes of this process; 0 where /proc does not tell.
fn memory() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    (field("VmRSS:"), field("RssAnon:"))
}
