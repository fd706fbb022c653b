//! `coracle uninstall`: takes from the host what we made, by what the journals say, and nothing
//! else.
//!
//! Order: the agent ends (its unit, so that systemd does not start it again), pods are removed as
//! if the manifests directory were empty, then the network, then whatever the effects journal
//! still names in reverse order, then our directories. Each step may be repeated: a second run
//! goes on where the first was cut off.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::args::{Body, Given, INSTANCE, LOG_LEVEL, NO_OPERANDS, ROOT, Verb, YES};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{agent, info, print, stop_all, table};
use crate::config::Config;
use crate::kubelet::agent::{Agent, Emptied};
use crate::kubelet::rooms::Rooms;
use crate::kubelet::server::model::AgentInfo;
use crate::obs;
use crate::runtime::{cgroup::Cgroups, unmount_run};
use crate::store::effects::{Effect, Effects};
use crate::store::pods::PodStore;
use crate::sys::{mount, pidfd};

pub const VERB: Verb = Verb {
    name: "uninstall",
    operands: NO_OPERANDS,
    command: false,
    summary: "remove from this host what coracle made, and nothing else",
    about: "Ends the agent and every pod, then removes what the journals say that we made: pods with their volumes and logs, \
            images, mounts, cgroups, links, nftables tables, changed sysctls, our directories. Without --yes it only lists that. \
            Manifests, this program and unit files are not ours: they stay.",
    flags: &[&YES, &ROOT, &INSTANCE, &agent::CGROUP_PARENT, &LOG_LEVEL],
    examples: &["coracle uninstall", "coracle uninstall --yes --root /srv/coracle"],
    body: Body::Parsed(run),
};

/// How long pods may take to go: the longest usual grace, and room for slow disks.
const PODS: Duration = Duration::from_secs(120);
const AGENT: Duration = Duration::from_secs(20);

fn run(given: &Given) -> Result<Exit, CliError> {
    let mut config = agent::remembered(given)?;
    let running = match Client::if_running(&config.roots)? {
        Some(client) => Some(info::fetch(client)?),
        None => None,
    };
    if let Some(info) = &running {
        // The same names, whatever flags it was started with.
        config.cgroup_parent.clone_from(&info.cgroup_parent);
        config.instance.clone_from(&info.instance);
    }
    let list = list(&config, running.as_ref())?;
    if list.is_empty() {
        print("nothing of coracle is here\n")?;
        return Ok(Exit::Ok);
    }
    if !given.has(&YES) {
        print(&list.iter().map(|line| format!("{}\n", table::clean(line))).collect::<String>())?;
        eprintln!("coracle uninstall: nothing was changed; --yes removes all of this");
        return Ok(Exit::Ok);
    }
    obs::init(&agent::log_options(given)?).map_err(|e| CliError::because("set up logging", e))?;
    if let Some(info) = &running {
        end_agent(info)?;
    }
    let left = stop_all::bounded(PODS + AGENT, move || remove(config))?;
    if let Some(info) = running.filter(|info| !info.unit.is_empty()) {
        eprintln!("coracle uninstall: {} is disabled; its unit files and this program are yours to remove", info.unit);
    }
    for line in &left {
        eprintln!("coracle uninstall: left: {}", table::clean(line));
    }
    Ok(if left.is_empty() { Exit::Ok } else { Exit::Failed })
}

/// What would be removed, one thing a line.
fn list(config: &Config, running: Option<&AgentInfo>) -> Result<Vec<String>, CliError> {
    let mut list = Vec::new();
    if let Some(info) = running {
        let unit = if info.unit.is_empty() { String::new() } else { format!(", unit {}", info.unit) };
        list.push(format!("process   agent {}{unit}", info.pid));
    }
    let because = |e| CliError::because("read the journals", e);
    for (uid, pod) in &PodStore::peek(&config.roots.state).map_err(because)?.pods {
        list.push(format!("pod       {}/{} (uid {uid}), its volumes and logs", pod.namespace, pod.name));
    }
    for standing in Effects::peek(&config.roots.run).map_err(because)? {
        list.push(match standing.effect {
            Effect::Mount { target } => format!("mount     {}", target.display()),
            Effect::Cgroup { path } => format!("cgroup    {path}"),
            Effect::NsPin { path } => format!("namespace {}", path.display()),
            Effect::Link { name } => format!("link      {name}"),
            Effect::NftTable { family, name } => format!("nftables  table {family} {name}"),
            Effect::Sysctl { name, was } => format!("sysctl    {name} back to {was}"),
            Effect::Dir { path } => format!("directory {}", path.display()),
            Effect::File { path } => format!("file      {}", path.display()),
            Effect::Monitor { uid, pid, .. } => format!("process   monitor {pid} of pod {uid}"),
            Effect::Container { uid, id } => format!("container {id} of pod {uid}"),
        });
    }
    for dir in [&config.roots.run, &config.roots.state] {
        if dir.exists() {
            list.push(format!("directory {}", dir.display()));
        }
    }
    Ok(list)
}

/// A unit is stopped by its manager, which would start it again otherwise.
fn end_agent(info: &AgentInfo) -> Result<(), CliError> {
    let pid = pidfd::open(info.pid).map_err(|e| CliError::because(format!("find the agent, process {}", info.pid), e))?;
    if info.unit.is_empty() {
        pidfd::send_signal(&pid, libc::SIGTERM)
            .map_err(|e| CliError::because(format!("end the agent, process {}", info.pid), e))?;
    } else {
        let pods = info.unit.replace(".service", "-pods.service");
        systemctl(&["disable", "--now", &info.unit, &pods])?;
    }
    let ended = pidfd::ended(std::os::fd::AsFd::as_fd(&pid), u16::try_from(AGENT.as_millis()).unwrap_or(u16::MAX));
    match ended {
        Ok(true) => Ok(()),
        Ok(false) => Err(CliError::Failed(format!("the agent, process {}, does not end", info.pid))),
        Err(e) => Err(CliError::because(format!("wait for the agent, process {}", info.pid), e)),
    }
}

fn systemctl(args: &[&str]) -> Result<(), CliError> {
    let output = Command::new("systemctl")
        .args(args)
        .output()
        .map_err(|e| CliError::because("run systemctl, since the agent is a unit of it", e))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(CliError::Failed(format!("systemctl {}: {}: {}", args.join(" "), output.status, said.trim())))
}

/// Returns what could not be removed.
fn remove(config: Config) -> Result<Vec<String>, CliError> {
    let roots = config.roots.clone();
    let agent = Agent::open(config).map_err(|e| CliError::because("take the pods over", e))?;
    let Emptied { rooms, left } = agent.remove_all(Instant::now() + PODS);
    if !left.is_empty() {
        // Their journal must stay, or nobody would know of them any more.
        return Ok(left.into_iter().map(|pod| format!("pod {pod} does not go")).collect());
    }
    let mut left = Vec::new();
    if let Err(error) = rooms.net.remove_all() {
        left.push(format!("network: {}", obs::chain(&error)));
    }
    left.extend(undo_rest(&rooms, &roots.run)?);
    left.extend(remove_cgroups(&rooms.config.cgroup_parent));
    if !left.is_empty() {
        return Ok(left);
    }
    unmount_run(&roots.run).map_err(|e| CliError::because("remove the run directory", e))?;
    left.extend(remove_tree(&roots.state));
    // Empty ones tell nothing of who made them; with anything in them they stay.
    for dir in [roots.kubelet.join("pods"), roots.kubelet.clone(), roots.logs.join("pods"), roots.logs.join("containers")] {
        left.extend(remove_empty(&dir));
    }
    if roots.logs != Path::new("/var/log") {
        left.extend(remove_empty(&roots.logs));
    }
    Ok(left)
}

/// What the journal names after every room has undone its own: made by a version or in a moment
/// that no room knows of any more.
fn undo_rest(rooms: &Rooms, run: &Path) -> Result<Vec<String>, CliError> {
    let mut standing = Effects::peek(run).map_err(|e| CliError::because("read the effects journal", e))?;
    standing.reverse();
    let mut left = Vec::new();
    for standing in standing {
        let undone = match &standing.effect {
            // It holds the journal that is being read.
            Effect::Mount { target } if target == run => Ok(()),
            Effect::Mount { target } => mount::detach(target).map(drop),
            Effect::NsPin { path } => mount::detach(path).and_then(|_| absent_is_fine(fs::remove_file(path))),
            Effect::File { path } => absent_is_fine(fs::remove_file(path)),
            Effect::Dir { path } => match remove_tree(path) {
                None => Ok(()),
                Some(why) => Err(io::Error::other(why)),
            },
            Effect::Cgroup { path } => {
                Cgroups::detect(&rooms.config.cgroup_parent).and_then(|c| c.remove(path)).map_err(io::Error::other)
            }
            // Net removes and puts back all that the journal names; it has said why it could not.
            Effect::Link { .. } | Effect::NftTable { .. } | Effect::Sysctl { .. } => {
                Err(io::Error::other("the network did not take it away"))
            }
            // Gone with their sandbox.
            Effect::Monitor { .. } | Effect::Container { .. } => Ok(()),
        };
        if let Err(error) = undone {
            left.push(format!("{:?}: {error}", standing.effect));
        }
    }
    Ok(left)
}

/// The levels between the delegated parent and the pods: no pod's own, so no journal names them.
/// One that still has anything below it is somebody else's too.
fn remove_cgroups(parent: &str) -> Vec<String> {
    let cgroups = match Cgroups::detect(parent) {
        Ok(cgroups) => cgroups,
        Err(error) => return vec![format!("cgroups: {}", obs::chain(&error))],
    };
    let base = parent.trim_end_matches('/');
    let paths = ["/kubepods/burstable", "/kubepods/besteffort", "/kubepods", "/coracle"].map(|path| format!("{base}{path}"));
    let mut left = Vec::new();
    let mut remove = |cgroups: &Cgroups, path: &str| {
        let empty = cgroups.children(path).is_ok_and(|c| c.is_empty()) && cgroups.pids(path).is_ok_and(|p| p.is_empty());
        if empty && let Err(error) = cgroups.remove(path) {
            left.push(obs::chain(&error).to_string());
        }
    };
    for path in paths {
        remove(&cgroups, &path);
    }
    // A parent below a unit is the unit's.
    if !base.is_empty() && !base.contains(".service") && !base.contains(".slice") {
        match Cgroups::detect("/") {
            Ok(all) => remove(&all, base),
            Err(error) => left.push(format!("cgroups: {}", obs::chain(&error))),
        }
    }
    left
}

/// A tree of ours on one file system. Something mounted inside is not ours and stops it.
fn remove_tree(path: &Path) -> Option<String> {
    let device = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => meta.dev(),
        Ok(_) => return Some(format!("{} is no directory", path.display())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
        Err(e) => return Some(format!("{}: {e}", path.display())),
    };
    if let Some(inside) = foreign(path, device) {
        return Some(format!("{}: something is mounted at {}", path.display(), inside.display()));
    }
    absent_is_fine(fs::remove_dir_all(path)).err().map(|e| format!("{}: {e}", path.display()))
}

/// A mount below `path`, by its device number.
fn foreign(path: &Path, device: u64) -> Option<PathBuf> {
    for entry in fs::read_dir(path).ok()?.flatten() {
        let meta = entry.metadata().ok()?;
        if meta.dev() != device {
            return Some(entry.path());
        }
        if meta.is_dir()
            && let Some(inside) = foreign(&entry.path(), device)
        {
            return Some(inside);
        }
    }
    None
}

fn remove_empty(path: &Path) -> Option<String> {
    match fs::remove_dir(path) {
        Err(e) if e.raw_os_error() == Some(libc::ENOTEMPTY) => None,
        result => absent_is_fine(result).err().map(|e| format!("{}: {e}", path.display())),
    }
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
