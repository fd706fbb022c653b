//! One container as its monitor knows it: process, streams, log, end.
//!
//! ```text
//! create ─> Created ─start─> Running ─main process ends─> Draining ─streams empty─> Exited
//!              └───────────── killed before start ──────────┘
//! ```
//!
//! Invariant: `exit` is set only after the exit file lies in its place, and the file is written
//! only after every byte that the container's processes left in the pipes is in the log.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use super::attach::Tees;
use super::log_writer::{LogWriter, Pending, frame};
use super::peers::Asker;
use super::wire::Create;
use crate::runtime::layout::PodRun;
use crate::store::records::ExitRecord;
use crate::sys::process::Ended;
use crate::sys::{clock, process};

/// How long output is awaited from a process that outlives the container's main process.
const DRAIN_NANOS: i64 = 2_000_000_000;

/// Bytes taken from a stream at a time.
const READ: usize = 16 * 1024;
/// Bytes of log lines that go out in one write, about.
const LINES: usize = 64 * 1024;

/// One direction out of the container.
#[derive(Debug)]
pub struct Stream {
    pub name: &'static str,
    /// None at its end.
    pub fd: Option<OwnedFd>,
    pub pending: Pending,
    pub tees: Tees,
}

impl Stream {
    fn new(name: &'static str, fd: OwnedFd) -> Stream {
        Stream { name, fd: Some(fd), pending: Pending::default(), tees: Tees::default() }
    }
}

#[derive(Debug)]
pub struct Container {
    pub asked: Create,
    pub pid: i32,
    pub pidfd: Option<OwnedFd>,
    /// Read end of the program's report; closes once the program runs.
    pub report: Option<OwnedFd>,
    pub started_at: i64,
    /// Who waits for the start.
    pub starting: Option<Asker>,
    /// How and when the main process ended, and when waiting for its output is over.
    pub ended: Option<(Ended, i64)>,
    pub drain_until: i64,
    pub exit: Option<ExitRecord>,
    /// Who waits for it to be gone.
    pub removing: Vec<Asker>,
    /// stdout and stderr, or the terminal.
    pub streams: Vec<Stream>,
    /// The container's stdin, or the terminal again.
    pub stdin: super::attach::Stdin,
    pub log: Option<LogWriter>,
}

/// The container's ends of its streams.
#[derive(Debug, Default)]
pub struct Ends {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub report: Option<OwnedFd>,
}

impl Container {
    /// Pipes are made, nothing runs. `given`: the container's ends, where the asker made them.
    pub fn prepare(asked: Create, given: Vec<OwnedFd>) -> io::Result<(Container, Ends)> {
        let (report, their_report) = process::pipe()?;
        process::set_nonblocking(report.as_fd())?;
        let mut ends = Ends { report: Some(their_report), ..Ends::default() };
        let mut streams = Vec::new();
        let mut stdin = None;
        if asked.own_streams {
            let mut given = given.into_iter();
            (ends.stdin, ends.stdout, ends.stderr) = (given.next(), given.next(), given.next());
        } else if !asked.tty {
            let owner = Some(nix::unistd::Uid::from_raw(asked.user));
            for (name, end) in [("stdout", &mut ends.stdout), ("stderr", &mut ends.stderr)] {
                let (read, write) = process::pipe()?;
                process::set_nonblocking(read.as_fd())?;
                nix::unistd::fchown(write.as_raw_fd(), owner, None)?;
                *end = Some(write);
                streams.push(Stream::new(name, read));
            }
            if asked.stdin {
                let (read, write) = process::pipe()?;
                process::set_nonblocking(write.as_fd())?;
                nix::unistd::fchown(read.as_raw_fd(), owner, None)?;
                ends.stdin = Some(read);
                stdin = Some(write);
            }
        }
        let mut log = asked.log.clone().map(LogWriter::new);
        if let Some(log) = &mut log {
            log.touch();
        }
        let container = Container {
            pid: 0,
            pidfd: None,
            report: Some(report),
            started_at: 0,
            starting: None,
            ended: None,
            drain_until: 0,
            exit: None,
            removing: Vec::new(),
            streams,
            stdin: super::attach::Stdin::new(stdin, asked.stdin_once),
            log,
            asked,
        };
        Ok((container, ends))
    }

    /// The terminal's master side is both output and input.
    pub fn take_terminal(&mut self, master: OwnedFd) -> io::Result<()> {
        process::set_nonblocking(master.as_fd())?;
        if self.asked.stdin {
            self.stdin = super::attach::Stdin::new(Some(master.try_clone()?), self.asked.stdin_once);
        }
        self.streams = vec![Stream::new("stdout", master)];
        Ok(())
    }

    pub fn lives(&self) -> bool {
        self.pid != 0 && self.ended.is_none()
    }

    /// Reads what is there of one stream, once, into its log and to who is attached.
    /// True while there may be more.
    pub fn pump(&mut self, index: usize, buffer: &mut [u8], lines: &mut Vec<u8>) -> bool {
        let Some(stream) = self.streams.get_mut(index) else { return false };
        let Some(fd) = &stream.fd else { return false };
        let buffer = buffer.get_mut(..READ).unwrap_or_default();
        let read = nix::unistd::read(fd.as_raw_fd(), buffer);
        let at = clock::wall_nanos();
        let more = match read {
            Ok(n) if n > 0 => {
                let bytes = buffer.get(..n).unwrap_or_default();
                stream.tees.write(bytes);
                // Short lines grow 40-fold by their stamps: what becomes too much goes out early.
                for part in bytes.chunks(512) {
                    frame(stream.name, at, part, false, &mut stream.pending, lines);
                    if lines.len() >= LINES {
                        if let Some(log) = &mut self.log {
                            log.write(at, lines);
                        }
                        lines.clear();
                    }
                }
                true
            }
            Err(nix::errno::Errno::EAGAIN) => false,
            Err(nix::errno::Errno::EINTR) => true,
            // The end. A terminal whose last program has gone says EIO.
            Ok(_) | Err(_) => {
                stream.fd = None;
                stream.tees = Tees::default();
                frame(stream.name, at, &[], true, &mut stream.pending, lines);
                false
            }
        };
        if let Some(log) = &mut self.log {
            log.write(at, lines);
        }
        lines.clear();
        more
    }

    /// The main process has ended.
    pub fn note_end(&mut self, how: Ended) {
        self.ended = Some((how, clock::wall_nanos()));
        self.drain_until = clock::boot_nanos() + DRAIN_NANOS;
        self.pidfd = None;
    }

    /// Empties the streams; true once they have ended or nothing more is awaited.
    pub fn drained(&mut self, buffer: &mut [u8], lines: &mut Vec<u8>) -> bool {
        for index in 0..self.streams.len() {
            while self.pump(index, buffer, lines) && clock::boot_nanos() < self.drain_until {}
        }
        let over = clock::boot_nanos() >= self.drain_until;
        if over {
            // Whoever still holds the other end writes to nobody.
            for index in 0..self.streams.len() {
                if let Some(stream) = self.streams.get_mut(index).filter(|stream| stream.fd.is_some()) {
                    stream.fd = None;
                    let at = clock::wall_nanos();
                    frame(stream.name, at, &[], true, &mut stream.pending, lines);
                    if let Some(log) = &mut self.log {
                        log.write(at, lines);
                    }
                    lines.clear();
                }
            }
        }
        over || self.streams.iter().all(|stream| stream.fd.is_none())
    }

    /// The record of its end, once it is known.
    pub fn record(&self, oom: bool) -> Option<ExitRecord> {
        let (how, at) = self.ended?;
        let (code, signal) = match how {
            Ended::Exited(code) => (code, None),
            Ended::Signaled(signal) => (128 + signal, Some(signal)),
        };
        Some(ExitRecord { code, signal, oom, started_at: self.started_at, finished_at: at, ..ExitRecord::default() })
    }
}

/// Temp and rename: whoever finds the file finds all of it. /run is memory: no fsync.
pub fn write_exit(run: &PodRun, container: &Container, record: &ExitRecord) -> io::Result<()> {
    write_whole(&run.exit(&container.asked.id), &serde_json::to_vec(record)?)
}

pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temp = path.as_os_str().to_owned();
    temp.push(".tmp");
    std::fs::write(&temp, bytes)?;
    std::fs::rename(&temp, path)
}
