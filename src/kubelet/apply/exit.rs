//! Journals an exit, with its termination message: `terminationMessagePath`, or the end of the
//! log. Only then may the monitor's exit file go.
//!
//! Invariant: whatever a container wrote, a bounded part of it is read, from regular files only.
//! Limits: pkg/kubelet/container/runtime.go (4096 bytes a container, 12 KiB a pod, of a log the
//! last 2048 bytes or 80 lines).

use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::{Failed, Job, journal, stamp};
use crate::api::pod::TerminationMessagePolicy;
use crate::kubelet::model::Outcome;
use crate::kubelet::rooms::Rooms;
use crate::store::ids::{ContainerId, PodUid};
use crate::store::records::{ExitRecord, Record};

const MAX_MESSAGE: usize = 4096;
const MAX_POD: usize = 12 * 1024;
const LOG_BYTES: usize = 2048;
const LOG_LINES: usize = 80;

pub(super) fn record(
    rooms: &Rooms,
    job: &Job,
    uid: &PodUid,
    container: &str,
    number: u32,
    id: &ContainerId,
    exit: &ExitRecord,
) -> Result<Outcome, Failed> {
    let mut exit = exit.clone();
    if exit.message.is_empty() {
        exit.message = message(rooms, job, uid, container, number, &exit);
    }
    let record =
        Record::Exit { uid: uid.clone(), name: container.to_owned(), id: id.clone(), exit: exit.clone(), stamp: stamp(rooms) };
    journal(rooms, &record)?;
    // Journalled is what counts: a file that stays is told again at the next start, and known then.
    if let Err(error) = rooms.runtime.acknowledge_exit(uid, id) {
        tracing::debug!(pod = %uid, container, error = %crate::obs::chain(&error), "an exit file stays");
    }
    Ok(Outcome::Recorded { exit })
}

/// Never a reason to hold an exit back: what cannot be read is left out.
fn message(rooms: &Rooms, job: &Job, uid: &PodUid, container: &str, number: u32, exit: &ExitRecord) -> String {
    let mut text = rooms.volumes.termination_message(uid, container, number).unwrap_or_else(|error| {
        tracing::warn!(pod = %uid, container, error = %crate::obs::chain(&error), "the termination message cannot be read");
        String::new()
    });
    let pod = job.pod.as_deref();
    let containers = pod.map_or(1, |p| p.spec.containers.len() + p.spec.init_containers.len()).max(1);
    let policy = pod.and_then(|p| {
        let mut all = p.spec.init_containers.iter().chain(&p.spec.containers);
        all.find(|c| c.name == container)?.termination_message_policy
    });
    if text.is_empty() && exit.code != 0 && policy == Some(TerminationMessagePolicy::FallbackToLogsOnError) {
        let dir = rooms.config.roots.pod_logs(&job.namespace, &job.name, uid.as_str()).join(container);
        text = log_tail(&dir.join(format!("{number}.log"))).unwrap_or_else(|error| {
            tracing::debug!(pod = %uid, container, error = %error, "no log to take a termination message from");
            String::new()
        });
    }
    cut(text, MAX_MESSAGE.min(MAX_POD / containers))
}

/// The last lines of a CRI log file, `time stream F text` each.
fn log_tail(path: &Path) -> io::Result<String> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // A header is some 45 bytes a line; lines of one letter are the worst.
    let window = (LOG_BYTES + LOG_LINES * 64) as u64;
    file.seek(SeekFrom::Start(meta.len().saturating_sub(window)))?;
    let mut bytes = Vec::new();
    file.take(window).read_to_end(&mut bytes)?;
    Ok(tail(&bytes, meta.len() > window))
}

/// `cut_off`: the first line may be the rest of one.
fn tail(bytes: &[u8], cut_off: bool) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut lines: Vec<&str> = text.split_inclusive('\n').skip(usize::from(cut_off)).collect();
    lines.drain(..lines.len().saturating_sub(LOG_LINES));
    let mut out = String::new();
    for line in lines {
        let mut parts = line.splitn(4, ' ');
        let (Some(_), Some(_), Some(tag), Some(content)) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        // A partial record goes on in the next line.
        out.push_str(if tag == "P" { content.trim_end_matches('\n') } else { content });
    }
    let from = out.len().saturating_sub(LOG_BYTES);
    let from = (from..=out.len()).find(|at| out.is_char_boundary(*at)).unwrap_or(out.len());
    out.split_off(from)
}

fn cut(mut text: String, max: usize) -> String {
    let at = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.truncate(at);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_its_text_without_headers() {
        let log = b"2026-11-30T10:00:00.0Z stdout F one\n2026-11-30T10:00:00.0Z stderr P tw\n2026-11-30T10:00:00.0Z stderr F o\n";
        assert_eq!(tail(log, false), "one\ntwo\n");
        assert_eq!(tail(log, true), "two\n");
        assert_eq!(tail(b"garbage\n", false), "");
        let many: String = (0..200).map(|n| format!("t s F {n}\n")).collect();
        assert_eq!(tail(many.as_bytes(), false).lines().count(), 80);
        let long = format!("t s F {}\n", "é".repeat(3000));
        assert!(tail(long.as_bytes(), false).len() <= 2048);
    }

    #[test]
    fn messages_are_cut_at_a_character() {
        assert_eq!(cut("ééé".into(), 5), "éé");
        assert_eq!(cut("abc".into(), 5), "abc");
    }

    #[test]
    fn a_log_that_is_no_file_gives_no_message() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("0.log");
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        assert!(log_tail(&link).is_err());
        let fifo = dir.path().join("1.log");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(log_tail(&fifo).is_err());
    }
}
