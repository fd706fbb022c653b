//! `coracle logs`: reads the container's log files; the agent is asked which, if it is there.

use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::args::{Body, CONTAINER, Flag, Given, INSTANCE, NAMESPACE, Operands, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::pods;
use crate::api::time::WallTime;
use crate::config::Roots;
use crate::kubelet::logs::{self, LogError, LogQuery};
use crate::kubelet::server::model::{ContainerView, PodView, PodsAsk};
use crate::sys::clock;

const FOLLOW: Flag =
    Flag { long: "follow", short: Some('f'), value: None, help: "go on until the container ends, across rotation" };
const PREVIOUS: Flag = Flag { long: "previous", short: Some('p'), value: None, help: "the log of the run before this one" };
const TAIL: Flag = Flag { long: "tail", short: None, value: Some("N"), help: "only the last N lines" };
const SINCE: Flag = Flag {
    long: "since",
    short: None,
    value: Some("TIME"),
    help: "only lines from then on: a duration back from now (90s, 15m, 2h) or an RFC 3339 time",
};
const TIMESTAMPS: Flag =
    Flag { long: "timestamps", short: None, value: None, help: "begin each line with the time at which it was written" };

pub const VERB: Verb = Verb {
    name: "logs",
    operands: Operands { text: "POD [CONTAINER]", min: 1, max: 2 },
    command: false,
    summary: "print a container's log",
    about: "Prints what a container wrote to stdout and stderr, rotated and compressed files included. Works without the agent \
            too: then the newest log files of a pod of that name are read.",
    flags: &[&CONTAINER, &NAMESPACE, &FOLLOW, &PREVIOUS, &TAIL, &SINCE, &TIMESTAMPS, &ROOT, &INSTANCE],
    examples: &[
        "coracle logs web",
        "coracle logs -f --tail 20 --timestamps kube-system/dns -c server",
        "coracle logs -p --since 15m web",
    ],
    body: Body::Parsed(run),
};

/// One container's log directory and which attempt of it is meant.
struct Target {
    roots: Roots,
    /// `<ns>_<pod>_<uid>/<container>`
    below: PathBuf,
    uid: String,
    container: String,
    attempt: u32,
    /// Empty where no agent told it.
    id: String,
}

fn run(given: &Given) -> Result<Exit, CliError> {
    let roots = given.roots()?;
    let (namespace, name) = pods::named(given)?;
    let container = match (given.text(&CONTAINER)?, given.operand(1)?) {
        (Some(flag), Some(operand)) if flag != operand => {
            return Err(CliError::Usage(format!("two containers are named: {flag} and {operand}")));
        }
        (flag, operand) => flag.or(operand),
    };
    if container.is_some_and(|c| c.is_empty() || c.starts_with('.') || c.contains('/')) {
        return Err(CliError::Usage("a container's name has no slash and does not begin with a dot".into()));
    }
    let query = LogQuery {
        attempt: 0,
        tail: given.parse(&TAIL, "a number of lines")?,
        since: given.text(&SINCE)?.map(|text| since(text, clock::wall_nanos())).transpose()?,
        timestamps: given.has(&TIMESTAMPS),
        follow: given.has(&FOLLOW),
    };
    let previous = given.has(&PREVIOUS);
    let target = match Client::if_running(&roots)? {
        Some(client) => {
            let (all, _) = pods::fetch(client, PodsAsk::default())?;
            match all.iter().find(|p| p.namespace == namespace && p.name == name) {
                Some(pod) => from_agent(roots, pod, container, previous)?,
                // It may have been here: its files tell.
                None => from_files(roots, &namespace, &name, container, previous)?,
            }
        }
        None => from_files(roots, &namespace, &name, container, previous)?,
    };
    show(&target, &query)
}

fn show(target: &Target, query: &LogQuery) -> Result<Exit, CliError> {
    let query = LogQuery { attempt: target.attempt, ..query.clone() };
    let dir = logs::open_dir(&target.roots.logs.join("pods"), &target.below).map_err(error)?;
    let mut out = std::io::BufWriter::with_capacity(64 * 1024, std::io::stdout().lock());
    let mut ending = Ending { target, asked: None };
    let report = logs::read(&dir, &query, &mut out, &mut || stdout_is_gone() || ending.ended()).map_err(error)?;
    out.flush().map_err(CliError::Stdout)?;
    if report.unreadable > 0 {
        eprintln!("coracle logs: {} lines are no log lines and were left out", report.unreadable);
    }
    Ok(Exit::Ok)
}

fn error(error: LogError) -> CliError {
    match error {
        LogError::Output(source) => CliError::Stdout(source),
        LogError::NoLog { .. } => CliError::NotFound(error.to_string()),
        LogError::Io { ref source, .. } if source.kind() == std::io::ErrorKind::NotFound => CliError::NotFound(error.to_string()),
        other => CliError::because("read the log", other),
    }
}

fn from_agent(roots: Roots, pod: &PodView, container: Option<&str>, previous: bool) -> Result<Target, CliError> {
    let named = format!("{}/{}", pod.namespace, pod.name);
    let container = choose(pod, container)?;
    let attempt = if previous { &container.previous } else { &container.current };
    let Some(attempt) = attempt else {
        let why = if previous { "has not run before".to_owned() } else { waiting(pod, &container.name) };
        return Err(CliError::NotFound(format!("container {} of pod {named} {why}", container.name)));
    };
    let pods = roots.logs.join("pods");
    let below = attempt.log.strip_prefix(&pods).ok().and_then(Path::parent).map(Path::to_owned);
    let below = below.unwrap_or_else(|| below_pods(&pod.namespace, &pod.name, &pod.uid).join(&container.name));
    Ok(Target {
        roots,
        below,
        uid: pod.uid.clone(),
        container: container.name.clone(),
        attempt: attempt.number,
        id: attempt.id.clone(),
    })
}

/// The named container, or kubectl's default: the first that is no init container.
fn choose<'a>(pod: &'a PodView, name: Option<&str>) -> Result<&'a ContainerView, CliError> {
    let list = || pod.containers.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
    let Some(name) = name else {
        let first = pod.containers.iter().find(|c| !c.init);
        if let (Some(first), true) = (first, pod.containers.len() > 1) {
            eprintln!("coracle logs: container {} of {}", first.name, list());
        }
        return first.ok_or_else(|| CliError::NotFound(format!("pod {}/{} has no container", pod.namespace, pod.name)));
    };
    pod.containers.iter().find(|c| c.name == name).ok_or_else(|| {
        CliError::NotFound(format!("pod {}/{} has no container \"{name}\"; it has {}", pod.namespace, pod.name, list()))
    })
}

fn waiting(pod: &PodView, container: &str) -> String {
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let reason = statuses.filter(|s| s.name == container).find_map(|s| s.state.waiting.as_ref()).map(|w| w.reason.as_str());
    format!("is waiting to start: {}", reason.unwrap_or("it was not tried yet"))
}

fn below_pods(namespace: &str, name: &str, uid: &str) -> PathBuf {
    PathBuf::from(format!("{namespace}_{name}_{uid}"))
}

/// Without the agent: the pod directory of that name that was written to last.
fn from_files(roots: Roots, namespace: &str, name: &str, container: Option<&str>, previous: bool) -> Result<Target, CliError> {
    let pods = roots.logs.join("pods");
    let none = || CliError::NotFound(format!("no pod {namespace}/{name} on this node, and no log files of one"));
    let prefix = format!("{namespace}_{name}_");
    let mut found: Vec<(std::time::SystemTime, String)> = Vec::new();
    for (file, modified) in
        list(&pods).map_err(|e| if e.kind() == std::io::ErrorKind::NotFound { none() } else { CliError::io("list", &pods)(e) })?
    {
        if let Some(uid) = file.strip_prefix(&prefix) {
            found.push((modified, uid.to_owned()));
        }
    }
    let (_, uid) = found.into_iter().max().ok_or_else(none)?;
    let below = below_pods(namespace, name, &uid);
    let pod_dir = pods.join(&below);
    let mut containers: Vec<String> =
        list(&pod_dir).map_err(CliError::io("list", &pod_dir))?.into_iter().map(|(n, _)| n).collect();
    containers.sort();
    let container = match container {
        Some(name) => name.to_owned(),
        None => match containers.as_slice() {
            [] => return Err(none()),
            [one] => one.clone(),
            many => {
                return Err(CliError::Usage(format!("name one of the pod's containers with -c: {}", many.join(", "))));
            }
        },
    };
    let below = below.join(&container);
    let dir = logs::open_dir(&pods, &below).map_err(error)?;
    let attempts = logs::attempts(&dir).map_err(error)?;
    let attempt = attempts.iter().rev().nth(usize::from(previous)).copied();
    let attempt =
        attempt.ok_or_else(|| CliError::NotFound(format!("container {container} of pod {namespace}/{name} has no such log")))?;
    Ok(Target { roots, below, uid, container, attempt, id: String::new() })
}

fn list(dir: &Path) -> std::io::Result<Vec<(String, std::time::SystemTime)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        if let (true, Ok(name)) = (meta.is_dir(), entry.file_name().into_string()) {
            found.push((name, meta.modified()?));
        }
    }
    Ok(found)
}

/// `90s`, `15m`, `2h`, `1h30m`, or an RFC 3339 time.
fn since(text: &str, now: i64) -> Result<WallTime, CliError> {
    if let Some(at) = WallTime::parse(text) {
        return Ok(at);
    }
    let bad = || {
        CliError::Usage(format!("--since \"{text}\": expected a duration such as 15m, or a time such as 2026-11-30T10:00:00Z"))
    };
    let mut rest = text;
    let mut total = 0i64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let scale = match unit {
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(bad()),
        };
        let number: i64 = number.parse().map_err(|_| bad())?;
        total = number.checked_mul(scale).and_then(|n| n.checked_add(total)).ok_or_else(bad)?;
        rest = tail;
    }
    if text.is_empty() {
        return Err(bad());
    }
    Ok(WallTime(now.saturating_sub(total)))
}

/// Tells a follower that the run it follows is over, from whatever can be seen of it.
struct Ending<'a> {
    target: &'a Target,
    asked: Option<Instant>,
}

impl Ending<'_> {
    fn ended(&mut self) -> bool {
        if self.asked.is_some_and(|at| at.elapsed() < Duration::from_secs(1)) {
            return false;
        }
        self.asked = Some(Instant::now());
        let Target { roots, uid, id, attempt, .. } = self.target;
        if !id.is_empty() && roots.pod_run(uid).join("exit").join(id).exists() {
            return true;
        }
        let next = roots.logs.join("pods").join(&self.target.below).join(format!("{}.log", attempt + 1));
        if next.exists() {
            return true;
        }
        // A journalled exit has no file any more: the agent knows.
        match Client::if_running(roots) {
            Ok(Some(client)) => match pods::fetch(client, PodsAsk::default()) {
                Ok((all, _)) => !self.runs(&all),
                Err(_) => false, // it answers another time
            },
            _ => false, // it is down; its pods run on
        }
    }

    fn runs(&self, all: &[PodView]) -> bool {
        let pod = all.iter().find(|p| p.uid == self.target.uid);
        let container = pod.and_then(|p| p.containers.iter().find(|c| c.name == self.target.container));
        container.and_then(|c| c.current.as_ref()).is_some_and(|a| a.number == self.target.attempt && a.running)
    }
}

/// `coracle logs -f … | head`: nobody reads any more, and nothing may be written for a long time.
fn stdout_is_gone() -> bool {
    let out = std::io::stdout();
    let mut waits = [PollFd::new(out.as_fd(), PollFlags::empty())];
    // An error of poll tells nothing about stdout.
    let told = poll(&mut waits, PollTimeout::ZERO).unwrap_or(0);
    told > 0 && waits.iter().any(|w| w.revents().is_some_and(|e| e.intersects(PollFlags::POLLERR | PollFlags::POLLHUP)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_takes_durations_and_times() {
        let now = 1_000_000_000_000_000_000;
        let back = |text: &str| now - since(text, now).unwrap().0;
        assert_eq!(back("90s"), 90_000_000_000);
        assert_eq!(back("1h30m"), 5_400_000_000_000);
        assert_eq!(back("1500ms"), 1_500_000_000);
        assert_eq!(since("1970-01-01T00:00:01Z", now).unwrap(), WallTime(1_000_000_000));
        for bad in ["", "5", "m", "5x", "-5m", "99999999999999h", "yesterday"] {
            assert!(since(bad, now).is_err(), "{bad}");
        }
    }
}
