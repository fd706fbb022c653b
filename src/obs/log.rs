//! The subscriber behind the `tracing` macros: filter, rate limit, one write(2) a line.
//!
//! Invariant: no lock is held while the line is written; a stderr that is gone or full loses the
//! line, never the agent.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::set_global_default;
use tracing::{Event, Level, Metadata, Subscriber};

use super::limit::{Limiter, Verdict};
use super::line::{self, Fields, Value};
use crate::api::time::WallTime;
use crate::sys::clock;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    pub level: Level,
    pub format: Format,
}

impl Default for LogOptions {
    fn default() -> LogOptions {
        LogOptions { level: Level::INFO, format: Format::Text }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("logging was set up already in this process")]
pub struct AlreadySet;

/// Sends events of this process to stderr. Once a process.
pub fn init(options: &LogOptions) -> Result<(), AlreadySet> {
    let subscriber =
        Stderr { level: options.level, format: options.format, journal: stderr_is_journal(), limiter: Mutex::default() };
    set_global_default(subscriber).map_err(|_| AlreadySet)
}

/// JOURNAL_STREAM is inherited by children whose stderr goes elsewhere, so its device and inode
/// are compared with what stderr is.
fn stderr_is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    match nix::sys::stat::fstat(2) {
        Ok(stat) => stream == format!("{}:{}", stat.st_dev, stat.st_ino),
        Err(_) => false, // no stderr: nobody reads the prefix
    }
}

struct Stderr {
    level: Level,
    format: Format,
    journal: bool,
    limiter: Mutex<Limiter>,
}

impl Stderr {
    fn line(&self, level: Level, target: &str, fields: &Fields) {
        let at = WallTime(clock::wall_nanos());
        let line = line::render(self.format, self.journal, at, level, target, fields);
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match nix::unistd::write(std::io::stderr().as_fd(), rest) {
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(nix::Error::EINTR) => {}
                Err(_) => return, // there is nowhere left to say it
            }
        }
    }
}

impl Subscriber for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        if metadata.is_span() {
            return false;
        }
        // What libraries tell as progress is debugging to a reader of our log.
        let ours = metadata.target().starts_with("coracle");
        let level = *metadata.level();
        level <= self.level && (ours || level <= Level::WARN || self.level == Level::TRACE)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level))
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut fields = Fields::of(event);
        let mut hasher = DefaultHasher::new();
        metadata.callsite().hash(&mut hasher);
        fields.pod().hash(&mut hasher);
        let now = clock::boot_nanos();
        let (verdict, overdue) = {
            let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
            (limiter.admit(hasher.finish(), now, || fields.message.clone()), limiter.overdue(now))
        };
        if let Some((what, count)) = overdue {
            let told = Fields {
                message: format!("lines like this one were left out: {what}"),
                rest: vec![("left_out", Value::Number(count.to_string()))],
            };
            self.line(Level::WARN, module_path!(), &told);
        }
        match verdict {
            Verdict::Drop => {}
            Verdict::Pass { left_out } => {
                if left_out > 0 {
                    fields.rest.push(("left_out", Value::Number(left_out.to_string())));
                }
                self.line(*metadata.level(), metadata.target(), &fields);
            }
        }
    }

    // Spans are not recorded; `enabled` refuses them, so these ids are never looked at.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
