//! Reads containers' CRI log files for people: across rotated and compressed files, from a tail
//! or a time on, and on and on while the container runs. Works on files alone; no agent needed.
//!
//! Invariant: a line is given out at most once and in order, whatever is rotated, compressed or
//! cut off meanwhile; nothing outside the pod's log directory is ever opened (a container with a
//! hostPath on /var/log may have put links there: TOB-K8S-026); memory is bounded.
//!
//! ```text
//! <logs>/pods/<ns>_<pod>_<uid>/<container>/<attempt>.log                       live
//!                                          <attempt>.log.<YYYYMMDD-hhmmss>     rotated
//!                                          <attempt>.log.<YYYYMMDD-hhmmss>.gz  compressed
//! ```
//!
//! Source: KEP-2411's log format; kubelet pkg/kubelet/logs (names, meaning of tail and since).

pub mod files;
mod print;
pub mod record;

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::api::time::WallTime;
pub use files::{LogDir, attempts};
use files::{Opened, Source};
use print::Printer;

/// What is wanted of one attempt's log.
#[derive(Clone, Debug, Default)]
pub struct LogQuery {
    pub attempt: u32,
    /// Only the last lines; a line is what the container wrote up to a newline.
    pub tail: Option<u64>,
    /// Only what was written at or after this time.
    pub since: Option<WallTime>,
    pub timestamps: bool,
    pub follow: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("{operation} {}", path.display())]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no regular file or lies behind a link: it is not a log that coracle wrote", .0.display())]
    NotALog(PathBuf),
    #[error("no log of attempt {attempt} in {}", dir.display())]
    NoLog { dir: PathBuf, attempt: u32 },
    #[error("write the log out")]
    Output(#[source] io::Error),
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogReport {
    pub lines: u64,
    /// Lines that are no CRI log lines and were left out.
    pub unreadable: u64,
}

/// How long a follower sleeps at most before it looks again whether the container has ended.
const LOOK: Duration = Duration::from_millis(500);

/// Writes the log to `out`. With `follow`, `ended` is asked now and then: once it says yes, what
/// is there is still read to its end.
pub fn read(dir: &LogDir, query: &LogQuery, out: &mut dyn Write, ended: &mut dyn FnMut() -> bool) -> Result<LogReport, LogError> {
    let watch = if query.follow { watch(dir) } else { None };
    let mut parts = dir.open_parts(query.attempt)?;
    if parts.is_empty() {
        return Err(LogError::NoLog { dir: dir.path().to_owned(), attempt: query.attempt });
    }
    let mut printer = Printer::new(query.timestamps, query.since);
    if let Some(tail) = query.tail {
        let skip = skip_to_tail(&mut parts, tail)?;
        printer.skip(skip);
    }
    let last = parts.len() - 1;
    for (n, part) in parts.iter_mut().enumerate() {
        part.feed(&mut |line| printer.record(line, out))?;
        if n < last || !query.follow {
            part.finish(&mut |line| printer.record(line, out))?;
        }
    }
    // What was not skipped by now is new and wanted.
    printer.skip(0);
    flush(out)?;
    if let (true, Some(current)) = (query.follow, parts.pop()) {
        drop(parts);
        follow(dir, query.attempt, current, &mut printer, out, ended, watch.as_ref())?;
    }
    Ok(printer.report())
}

/// Drops the files that lie wholly before the tail; returns how many lines of the first one left
/// to pass over.
fn skip_to_tail(parts: &mut Vec<Opened>, tail: u64) -> Result<u64, LogError> {
    let mut found = 0;
    for n in (0..parts.len()).rev() {
        let Some(part) = parts.get_mut(n) else { break };
        found += print::count_lines(part)?;
        // One line more than wanted: the first wanted one begins where that one ends, perhaps in
        // a part that another file holds.
        if found > tail {
            parts.drain(..n);
            break;
        }
    }
    Ok(found.saturating_sub(tail))
}

fn follow(
    dir: &LogDir,
    attempt: u32,
    mut current: Opened,
    printer: &mut Printer,
    out: &mut dyn Write,
    ended: &mut dyn FnMut() -> bool,
    watch: Option<&Inotify>,
) -> Result<(), LogError> {
    loop {
        // Asked before reading: what is written until the end is read after it.
        let over = ended();
        current.feed(&mut |line| printer.record(line, out))?;
        while let Some(next) = successor(dir, attempt, &current)? {
            // Nobody writes to the old file once there is a new one: now it can be finished.
            current.feed(&mut |line| printer.record(line, out))?;
            current.finish(&mut |line| printer.record(line, out))?;
            if next.lost {
                printer.only_after_last();
            }
            current = next.opened;
            current.feed(&mut |line| printer.record(line, out))?;
        }
        flush(out)?;
        if over {
            current.finish(&mut |line| printer.record(line, out))?;
            return flush(out);
        }
        sleep(watch);
    }
}

struct Next {
    opened: Opened,
    /// The file that was read is gone or compressed: this is the oldest that is left.
    lost: bool,
}

/// The file that follows `current`; None while `current` is the live one (or has just been renamed
/// and nothing follows yet).
fn successor(dir: &LogDir, attempt: u32, current: &Opened) -> Result<Option<Next>, LogError> {
    match dir.live_id(attempt)? {
        Some(id) if id != current.id() => {}
        _ => return Ok(None),
    }
    let mut parts = dir.open_parts(attempt)?;
    let at = parts.iter().position(|part| part.id() == current.id());
    let next = at.map_or(0, |at| at + 1);
    if next >= parts.len() {
        return Ok(None);
    }
    Ok(Some(Next { opened: parts.swap_remove(next), lost: at.is_none() }))
}

fn flush(out: &mut dyn Write) -> Result<(), LogError> {
    out.flush().map_err(LogError::Output)
}

/// Wakes the follower at once where inotify is to be had; else it looks often.
fn watch(dir: &LogDir) -> Option<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?; // limits may be used up
    let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVE;
    inotify.add_watch(&dir.proc_path(), flags).ok()?; // as above
    Some(inotify)
}

fn sleep(watch: Option<&Inotify>) {
    let Some(inotify) = watch else { return std::thread::sleep(LOOK / 4) };
    let mut waits = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
    // Whatever woke us, the files tell what is new; an interrupted poll is a wake-up too.
    let _ = poll(&mut waits, timeout);
    // Emptied so that the next poll sleeps; nothing to read is EAGAIN.
    let _ = inotify.read_events();
}

/// Where a pod's container logs: `<logs>/pods` and the path below it.
pub fn open_dir(pods: &Path, below: &Path) -> Result<LogDir, LogError> {
    LogDir::open(pods, below)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn line(second: u32, tag: &str, text: &str) -> String {
        format!("2026-11-30T10:00:{second:02}.000000000Z stdout {tag} {text}\n")
    }

    struct Pod {
        root: tempfile::TempDir,
    }

    impl Pod {
        fn new() -> Pod {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("default_web_u1/app")).unwrap();
            Pod { root }
        }
        fn path(&self, name: &str) -> PathBuf {
            self.root.path().join("default_web_u1/app").join(name)
        }
        fn dir(&self) -> LogDir {
            open_dir(self.root.path(), Path::new("default_web_u1/app")).unwrap()
        }
        fn read(&self, query: LogQuery) -> Result<(String, LogReport), LogError> {
            let mut out = Vec::new();
            let report = read(&self.dir(), &query, &mut out, &mut || true)?;
            Ok((String::from_utf8_lossy(&out).into_owned(), report))
        }
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn three_files(pod: &Pod) {
        fs::write(pod.path("0.log.20261130-100001.gz"), gzip(&(line(0, "F", "a") + &line(1, "F", "b")))).unwrap();
        fs::write(pod.path("0.log.20261130-100003"), line(2, "F", "c") + &line(3, "P", "d1")).unwrap();
        fs::write(pod.path("0.log"), line(4, "F", "d2") + &line(5, "F", "e")).unwrap();
        // Not of this log.
        fs::write(pod.path("1.log"), line(6, "F", "other attempt")).unwrap();
        fs::write(pod.path("0.log.20261130-100009.tmp"), line(6, "F", "half compressed")).unwrap();
    }

    #[test]
    fn rotated_and_compressed_files_read_as_one_log() {
        let pod = Pod::new();
        three_files(&pod);
        let (text, report) = pod.read(LogQuery::default()).unwrap();
        assert_eq!(text, "a\nb\nc\nd1d2\ne\n");
        assert_eq!(report, LogReport { lines: 5, unreadable: 0 });
    }

    #[test]
    fn tail_counts_whole_lines_across_files() {
        let pod = Pod::new();
        three_files(&pod);
        let tail = |n| pod.read(LogQuery { tail: Some(n), ..LogQuery::default() }).unwrap().0;
        assert_eq!(tail(0), "");
        assert_eq!(tail(1), "e\n");
        assert_eq!(tail(2), "d1d2\ne\n", "a line in two parts and two files is one line");
        assert_eq!(tail(3), "c\nd1d2\ne\n");
        assert_eq!(tail(4), "b\nc\nd1d2\ne\n");
        assert_eq!(tail(99), "a\nb\nc\nd1d2\ne\n");
    }

    #[test]
    fn since_and_timestamps() {
        let pod = Pod::new();
        three_files(&pod);
        let since = WallTime::parse("2026-11-30T10:00:02Z");
        assert_eq!(pod.read(LogQuery { since, ..LogQuery::default() }).unwrap().0, "c\nd1d2\ne\n");
        let query = LogQuery { tail: Some(2), timestamps: true, ..LogQuery::default() };
        assert_eq!(pod.read(query).unwrap().0, "2026-11-30T10:00:03.000000000Z d1d2\n2026-11-30T10:00:05.000000000Z e\n");
    }

    #[test]
    fn odd_bytes_come_through_and_odd_lines_are_counted() {
        let pod = Pod::new();
        let mut bytes = line(1, "F", "ok").into_bytes();
        bytes.extend_from_slice(b"2026-11-30T10:00:02.000000000Z stderr F \xff\x00\x1b[31m\r x\n");
        bytes.extend_from_slice(b"not a log line\n\n");
        bytes.extend_from_slice(b"2026-11-30T10:00:03.000000000Z stdout F \n");
        bytes.extend_from_slice(&vec![b'x'; 3_000_000]);
        bytes.extend_from_slice(b"\n");
        bytes.extend_from_slice(line(4, "F", "after").as_bytes());
        bytes.extend_from_slice(b"2026-11-30T10:00:05.000000000Z stdout F no newline yet");
        fs::write(pod.path("0.log"), &bytes).unwrap();
        let mut out = Vec::new();
        let report = read(&pod.dir(), &LogQuery::default(), &mut out, &mut || true).unwrap();
        assert_eq!(out, b"ok\n\xff\x00\x1b[31m\r x\n\nafter\nno newline yet\n");
        assert_eq!(report.unreadable, 3);
    }

    #[test]
    fn a_log_that_became_a_link_fifo_or_directory_is_refused() {
        let pod = Pod::new();
        fs::write(pod.root.path().join("secret"), line(1, "F", "secret")).unwrap();
        std::os::unix::fs::symlink(pod.root.path().join("secret"), pod.path("0.log")).unwrap();
        assert!(matches!(pod.read(LogQuery::default()), Err(LogError::NotALog(_))));
        fs::remove_file(pod.path("0.log")).unwrap();
        nix::unistd::mkfifo(&pod.path("0.log"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(matches!(pod.read(LogQuery::default()), Err(LogError::NotALog(_))));
        fs::remove_file(pod.path("0.log")).unwrap();
        fs::create_dir(pod.path("0.log")).unwrap();
        assert!(matches!(pod.read(LogQuery::default()), Err(LogError::NotALog(_))));
        // The directory itself behind a link.
        let other = Pod::new();
        fs::write(other.path("0.log"), line(1, "F", "other pod")).unwrap();
        fs::remove_dir_all(pod.path("")).unwrap();
        std::os::unix::fs::symlink(other.path(""), pod.root.path().join("default_web_u1/app")).unwrap();
        assert!(matches!(open_dir(pod.root.path(), Path::new("default_web_u1/app")), Err(LogError::NotALog(_))));
    }

    #[test]
    fn no_log_is_an_error_that_names_the_place() {
        let pod = Pod::new();
        assert!(matches!(pod.read(LogQuery { attempt: 7, ..LogQuery::default() }), Err(LogError::NoLog { attempt: 7, .. })));
    }

    /// Follows while a writer appends, rotates, compresses and drops, as a monitor does.
    #[test]
    fn following_loses_and_repeats_nothing_across_rotation() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let pod = Pod::new();
        let live = pod.path("0.log");
        let stamp = |n: u64| {
            format!("2026-11-30T10:{:02}:{:02}.{:09}Z stdout F {n}\n", n / 60_000 % 60, n / 1000 % 60, n % 1000 * 1_000_000)
        };
        fs::write(&live, stamp(0)).unwrap();
        let done = AtomicBool::new(false);
        let mut out = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = fs::OpenOptions::new().append(true).open(&live).unwrap();
                for n in 1..20_000u64 {
                    if n % 700 == 0 {
                        let name = pod.path(&format!("0.log.20261130-{:06}", n / 700));
                        fs::rename(&live, name).unwrap();
                        file = fs::File::create(&live).unwrap();
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    // A record that arrives in two writes.
                    let text = stamp(n);
                    let (a, b) = text.split_at(if n % 50 == 0 { 20 } else { text.len() });
                    file.write_all(a.as_bytes()).unwrap();
                    file.write_all(b.as_bytes()).unwrap();
                }
                done.store(true, Ordering::SeqCst);
            });
            let query = LogQuery { follow: true, ..LogQuery::default() };
            read(&pod.dir(), &query, &mut out, &mut || done.load(Ordering::SeqCst)).unwrap();
        });
        let got: Vec<u64> = String::from_utf8(out).unwrap().lines().map(|l| l.parse().unwrap()).collect();
        assert_eq!(got.len(), 20_000);
        assert!(got.iter().copied().eq(0..20_000));
    }

    #[test]
    fn a_follower_whose_file_was_compressed_meanwhile_goes_on_behind_its_last_line() {
        let pod = Pod::new();
        fs::write(pod.path("0.log"), line(1, "F", "a") + &line(2, "F", "b")).unwrap();
        let mut out = Vec::new();
        let mut rounds = 0;
        read(&pod.dir(), &LogQuery { follow: true, ..LogQuery::default() }, &mut out, &mut || {
            rounds += 1;
            if rounds == 2 {
                // Everything at once between two looks: written on, rotated, compressed, again.
                fs::remove_file(pod.path("0.log")).unwrap();
                let first = line(1, "F", "a") + &line(2, "F", "b") + &line(3, "F", "c");
                fs::write(pod.path("0.log.20261130-100003.gz"), gzip(&first)).unwrap();
                fs::write(pod.path("0.log.20261130-100004"), line(4, "F", "d")).unwrap();
                fs::write(pod.path("0.log"), line(5, "F", "e")).unwrap();
            }
            rounds == 4
        })
        .unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a\nb\nc\nd\ne\n");
    }

    #[test]
    fn lines_that_a_full_disk_took_back_are_not_read_on_in_the_middle() {
        let pod = Pod::new();
        let first = line(1, "F", "a");
        fs::write(pod.path("0.log"), first.clone() + "2026-11-30T10:00:02.0000").unwrap();
        let mut out = Vec::new();
        let mut rounds = 0;
        read(&pod.dir(), &LogQuery { follow: true, ..LogQuery::default() }, &mut out, &mut || {
            rounds += 1;
            if rounds == 2 {
                let file = fs::OpenOptions::new().write(true).open(pod.path("0.log")).unwrap();
                file.set_len(first.len() as u64).unwrap();
                let mut file = fs::OpenOptions::new().append(true).open(pod.path("0.log")).unwrap();
                file.write_all(line(3, "F", "b").as_bytes()).unwrap();
            }
            rounds == 4
        })
        .unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a\nb\n");
    }
}
