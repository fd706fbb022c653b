//! The source's thread: when to look at the directory, and whom to tell.
//!
//! inotify says when; a poll every 20 s covers what inotify cannot see (links' targets, network
//! file systems, lost events). A file that is being written is not read until it is closed.
//! inotify(7).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tracing::{error, info, warn};

use super::directory::{Directory, Listing};
use super::identity::{Identity, Last, doubt};
use super::model::{NetworkChange, Problem, SourceUpdate};
use super::network::{self, Keep, Kind, MEMORY_MAX};
use super::plan::{Desired, Look};
use crate::api::namespace::Namespace;
use crate::api::network_policy::NetworkPolicy;
use crate::api::time::WallTime;
use crate::obs::chain;
use crate::store::atomic;
use crate::sys::clock;

/// Beside the file of the directory's identity.
const NETWORK_MEMORY: &str = "manifests-network.json";
const POLL: Duration = Duration::from_secs(20);
/// While the directory is gone, or a file moves.
const SOON: Duration = Duration::from_secs(1);
/// A rename may hide a file from one reading of the directory: it is gone when two say so.
const SECOND_LOOK: Duration = Duration::from_millis(60);
/// Events that belong together (a link swap, a copy) come within this.
const SETTLE: Duration = Duration::from_millis(4);
/// The small file is written at once, then at most this often, but for what policies are made of:
/// it is as large as all of them.
const KEEP: Duration = Duration::from_secs(30);
/// How long an open writer that has gone quiet is waited for; its close may have been missed.
const WRITER: Duration = Duration::from_secs(60);

pub struct Watcher<F> {
    pub directory: Directory,
    pub desired: Desired,
    pub memory: std::path::PathBuf,
    pub stop: UnixStream,
    pub deliver: F,
    state: State,
}

#[derive(Default)]
struct State {
    inotify: Option<Inotify>,
    watched: Option<(WatchDescriptor, u64, u64)>,
    /// Names with an open writer, and when it was last heard of.
    writers: BTreeMap<OsString, Instant>,
    seen: Option<Identity>,
    stored: Option<Identity>,
    /// Without what packets are served from.
    last: Option<SourceUpdate>,
    /// Something of the Services and policies is not in the small file yet.
    unkept: bool,
    kept: Option<Instant>,
    named_kinds: BTreeSet<String>,
    warned: BTreeSet<String>,
}

impl<F: FnMut(SourceUpdate) -> bool> Watcher<F> {
    pub fn new(directory: Directory, desired: Desired, memory: std::path::PathBuf, stop: UnixStream, deliver: F) -> Watcher<F> {
        Watcher { directory, desired, memory, stop, deliver, state: State::default() }
    }

    /// Until the other end of `stop` is closed or nobody listens.
    pub fn run(mut self) {
        self.state.stored = match atomic::read_bounded(&self.memory, 4096) {
            Ok(bytes) => {
                bytes.and_then(|b| serde_json::from_slice(&b).map_err(|e| warn!("{}: {e}: not used", self.memory.display())).ok())
            }
            Err(e) => {
                warn!("{}", chain(&e));
                None
            }
        };
        self.recall();
        self.state.inotify = match Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK) {
            Ok(inotify) => Some(inotify),
            Err(e) => {
                warn!("inotify: {e}: changes of the manifests are seen within {} s", POLL.as_secs());
                None
            }
        };
        loop {
            let (look, wait) = self.look();
            let update = self.desired.look(look, &WallTime(clock::wall_nanos()).seconds());
            self.tell(&update);
            self.state.unkept |= update.complete && !update.network.is_empty();
            if update.complete && update.network.iter().any(is_policys) {
                self.state.kept = None;
            }
            let last = SourceUpdate { network: Vec::new(), ..update.clone() };
            if !update.network.is_empty() || self.state.last.as_ref() != Some(&last) {
                self.state.last = Some(last);
                if !(self.deliver)(update) {
                    return;
                }
            }
            if !self.wait(wait) {
                self.keep();
                return;
            }
        }
    }

    /// When [`Watcher::keep`] has something to do.
    fn keeps_at(&self) -> Option<Instant> {
        self.state.unkept.then(|| self.state.kept.map_or_else(Instant::now, |at| at + KEEP))
    }

    /// What packets are served from outlives the agent: after a restart a broken file still has
    /// its last good version.
    fn keep(&mut self) {
        if !std::mem::take(&mut self.state.unkept) {
            return;
        }
        self.state.kept = Some(Instant::now());
        let policies = || {
            warn!("the manifests hold more Services than are remembered over a restart: policies alone are");
            self.desired.remember(Keep::Policies)
        };
        let Some(bytes) = self.desired.remember(Keep::All).or_else(policies) else {
            warn!("the manifests hold more policies than are remembered over a restart: none is");
            return;
        };
        let path = self.memory.with_file_name(NETWORK_MEMORY);
        // Where nothing has changed since the last life nothing is written either.
        match atomic::read_bounded(&path, MEMORY_MAX) {
            Ok(Some(old)) if old == bytes => return,
            Ok(None) if bytes == b"[]" => return,
            Ok(_) => {}
            Err(e) => warn!("{}", chain(&e)),
        }
        if let Err(e) = atomic::write(&path, &bytes, 0o600) {
            warn!("{}: a broken file has no last good version after a restart", chain(&e));
        }
    }

    fn recall(&mut self) {
        let path = self.memory.with_file_name(NETWORK_MEMORY);
        let known = match atomic::read_bounded(&path, MEMORY_MAX) {
            Ok(None) => return,
            Ok(Some(bytes)) => network::recall(&bytes).map_err(|e| e.to_string()),
            Err(e) => Err(chain(&e).to_string()),
        };
        match known {
            Ok(known) => self.desired = std::mem::take(&mut self.desired).recalling(known),
            Err(e) => warn!("{}: {e}: not used", path.display()),
        }
    }

    /// One look, and how long it is good for.
    fn look(&mut self) -> (Look, Duration) {
        self.watch();
        let now = Instant::now();
        self.state.writers.retain(|_, heard| now.duration_since(*heard) < WRITER);
        let mut listing = match self.list() {
            Ok(listing) => listing,
            Err(why) => {
                self.directory.forget();
                return (Err(why), SOON);
            }
        };
        if !self.desired.missing(&listing.found).is_empty() {
            std::thread::sleep(SECOND_LOOK);
            // The first reading's texts are dropped: the second must read them again.
            self.directory.forget();
            listing = match self.list() {
                Ok(listing) => listing,
                Err(why) => return (Err(why), SOON),
            };
        }
        let last = match &self.state.seen {
            Some(seen) => Last::Seen(seen),
            None => Last::Stored(self.state.stored.as_ref()),
        };
        if let Some(why) = doubt(&last, &listing.identity, listing.empty, self.desired.any_pod()) {
            self.directory.forget();
            return (Err(format!("{} {why}", self.directory.path().display())), SOON);
        }
        let wait = if listing.moving { SOON } else { POLL };
        self.remember(listing.identity);
        (Ok(listing.found), wait)
    }

    fn list(&mut self) -> Result<Listing, String> {
        let busy = self.state.writers.keys().cloned().collect();
        self.directory.look(&busy, clock::wall_nanos())
    }

    fn remember(&mut self, identity: Identity) {
        if self.state.stored.as_ref() != Some(&identity) {
            // Serializing three numbers and a text cannot fail; writing can, and is tried again
            // when the identity next changes: without it an emptied directory is doubted once.
            let bytes = serde_json::to_vec(&identity).unwrap_or_default();
            if let Err(e) = atomic::write(&self.memory, &bytes, 0o600) {
                warn!("{}", chain(&e));
            }
            self.state.stored = Some(identity.clone());
        }
        self.state.seen = Some(identity);
    }

    /// Puts the watch on the directory that stands at the path now.
    fn watch(&mut self) {
        use std::os::unix::fs::MetadataExt;
        let Some(inotify) = &self.state.inotify else { return };
        let at = std::fs::metadata(self.directory.path()).map(|m| (m.dev(), m.ino())).ok();
        if self.state.watched.map(|(_, dev, ino)| (dev, ino)) == at {
            return;
        }
        if let Some((old, ..)) = self.state.watched.take() {
            // The kernel may have dropped it together with its directory: nothing to undo then.
            let _ = inotify.rm_watch(old);
        }
        self.state.writers.clear();
        let Some((dev, ino)) = at else { return };
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        match inotify.add_watch(self.directory.path(), flags) {
            Ok(wd) => self.state.watched = Some((wd, dev, ino)),
            Err(e) => warn!("inotify on {}: {e}: changes are seen within {} s", self.directory.path().display(), POLL.as_secs()),
        }
    }

    /// Sleeps until something may have changed. False: the end.
    fn wait(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            if self.keeps_at().is_some_and(|at| at <= Instant::now()) {
                self.keep();
            }
            let now = Instant::now();
            let writer = self.state.writers.values().min().map(|heard| *heard + WRITER);
            let until = writer.map_or(deadline, |w| w.min(deadline));
            if now >= until {
                return true;
            }
            let until = self.keeps_at().map_or(until, |at| until.min(at)).max(now);
            let timeout = PollTimeout::try_from(until - now + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut fds = vec![PollFd::new(self.stop.as_fd(), PollFlags::POLLIN)];
            fds.extend(self.state.inotify.as_ref().map(|i| PollFd::new(i.as_fd(), PollFlags::POLLIN)));
            if let Err(e) = poll(&mut fds, timeout)
                && e != nix::errno::Errno::EINTR
            {
                error!("manifests: poll: {e}");
                std::thread::sleep(SOON);
                return true;
            }
            let ready = |at: usize| fds.get(at).is_some_and(|fd| fd.any() == Some(true));
            if ready(0) {
                return false;
            }
            if ready(1) {
                std::thread::sleep(SETTLE);
                if self.events() {
                    return true;
                }
            }
        }
    }

    /// Takes all waiting events; true where one asks for a look.
    fn events(&mut self) -> bool {
        let mut look = false;
        let Some(inotify) = &self.state.inotify else { return true };
        while let Ok(events) = inotify.read_events() {
            for event in events {
                let mask = event.mask;
                if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    self.state.writers.clear();
                    look = true;
                }
                if mask.intersects(AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_IGNORED) {
                    look = true;
                }
                let Some(name) = event.name else { continue };
                if mask.contains(AddWatchFlags::IN_MODIFY) {
                    self.state.writers.insert(name, Instant::now());
                } else if mask.contains(AddWatchFlags::IN_CREATE) {
                    // A new regular file is empty until its writer has written; a link is whole.
                    let path = self.directory.path().join(&name);
                    if std::fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() == 0) {
                        self.state.writers.insert(name, Instant::now());
                    } else {
                        look = true;
                    }
                } else {
                    if !mask.contains(AddWatchFlags::IN_ATTRIB) {
                        self.state.writers.remove(&name);
                    }
                    look = true;
                }
            }
        }
        look
    }

    /// One log line a change: problems that are new, problems that are gone, fields that we do
    /// not honour, kinds that are kept for later.
    fn tell(&mut self, update: &SourceUpdate) {
        let empty = Vec::new();
        let before = self.state.last.as_ref().map_or(&empty, |u| &u.problems);
        for problem in update.problems.iter().filter(|p| !before.contains(p)) {
            let kept = if problem.kept { "; what ran before runs on" } else { "" };
            warn!(file = %problem.file, pod = %problem.pod, "{problem}{kept}");
        }
        let mended = |old: &&Problem| !update.problems.iter().any(|p| p.file == old.file);
        let mended: BTreeSet<&str> = before.iter().filter(mended).map(|p| p.file.as_str()).collect();
        for file in mended {
            info!(file, "{}: mended", if file.is_empty() { "manifests directory" } else { file });
        }
        for pod in update.pods.iter().filter(|p| !p.warnings.is_empty()) {
            if self.state.warned.insert(format!("{}{}", pod.uid, pod.origin)) {
                let fields: Vec<String> =
                    pod.warnings.iter().map(|w| format!("{} (line {}: {})", w.field, w.line, w.message)).collect();
                let meta = &pod.pod.metadata;
                warn!(
                    file = %pod.origin.file, pod = %format!("{}/{}", meta.namespace, meta.name),
                    "{}, pod {}/{}: fields without effect: {}", pod.origin, meta.namespace, meta.name, fields.join(", ")
                );
            }
        }
        let alive: BTreeSet<String> = update.pods.iter().map(|p| format!("{}{}", p.uid, p.origin)).collect();
        self.state.warned.retain(|w| alive.contains(w));
        for (kind, file) in self.desired.others() {
            if self.state.named_kinds.insert(kind.to_owned()) {
                info!(file, "{kind} (first in {file}) is not acted on by this version; it is kept for later");
            }
        }
    }
}

/// A policy, or a namespace whose labels it may select.
fn is_policys(change: &NetworkChange) -> bool {
    [NetworkPolicy::KIND, Namespace::KIND].contains(&change.key.kind)
}
