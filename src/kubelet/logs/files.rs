//! The files of a log: found by name below the pod's directory, opened without following links,
//! read by position.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::LogError;
use crate::sys::file::{Resolve, open_dir_path, openat2};

/// A record is at most 16 KiB of text with its head; longer lines are not ours.
const MAX_LINE: usize = 64 * 1024;
const CHUNK: usize = 64 * 1024;

/// Device and inode: what a file is, whatever its name.
pub type FileId = (u64, u64);

/// Takes one line without its newline, or None for one that is too long to be a record.
pub type Each<'a> = &'a mut dyn FnMut(Option<&[u8]>) -> Result<(), LogError>;

/// `<logs>/pods/<pod>/<container>`, opened beneath `<logs>/pods` without any link.
pub struct LogDir {
    dir: OwnedFd,
    path: PathBuf,
}

impl LogDir {
    pub fn open(pods: &Path, below: &Path) -> Result<LogDir, LogError> {
        let path = pods.join(below);
        let root = open_dir_path(pods).map_err(|source| LogError::Io { operation: "open", path: pods.to_owned(), source })?;
        let dir = openat2(root.as_fd(), below, OFlag::O_RDONLY | OFlag::O_DIRECTORY, 0, Resolve::BeneathNoSymlinks)
            .map_err(|source| open_error(&path, source))?;
        Ok(LogDir { dir, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For calls that want a path: it means this directory whatever is renamed.
    pub fn proc_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.dir.as_raw_fd()).into()
    }

    fn names(&self) -> Result<Vec<String>, LogError> {
        let failed = |source| LogError::Io { operation: "list", path: self.path.clone(), source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.proc_path()).map_err(failed)? {
            // A name that is not UTF-8 is none of ours.
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    /// What the live file is now; None where it has just been renamed.
    pub fn live_id(&self, attempt: u32) -> Result<Option<FileId>, LogError> {
        Ok(self.open_name(&format!("{attempt}.log"))?.map(|file| file.id))
    }

    /// All files of one attempt, oldest first, the live one last, as they are at one moment.
    pub fn open_parts(&self, attempt: u32) -> Result<Vec<Opened>, LogError> {
        loop {
            let names = parts(&self.names()?, attempt);
            let mut opened = Vec::new();
            for name in &names {
                opened.extend(self.open_name(name)?);
            }
            // A rotation in between would have hidden a file: look until nothing has changed.
            if opened.len() == names.len() && parts(&self.names()?, attempt) == names {
                return Ok(opened);
            }
        }
    }

    fn open_name(&self, name: &str) -> Result<Option<Opened>, LogError> {
        let path = self.path.join(name);
        // O_NONBLOCK: a FIFO must not hold us up.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY;
        let file = match openat2(self.dir.as_fd(), Path::new(name), flags, 0, Resolve::BeneathNoSymlinks) {
            Ok(fd) => File::from(fd),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(open_error(&path, e)),
        };
        let meta = file.metadata().map_err(|source| LogError::Io { operation: "look at", path: path.clone(), source })?;
        if !meta.is_file() {
            return Err(LogError::NotALog(path));
        }
        let id = (meta.dev(), meta.ino());
        Ok(Some(Opened::new(file, path, id, name.ends_with(".gz"))))
    }
}

fn open_error(path: &Path, source: io::Error) -> LogError {
    match source.raw_os_error().map(Errno::from_raw) {
        // ENXIO: a socket. ENOTDIR: a link or file where a directory must be.
        Some(Errno::ELOOP | Errno::EXDEV | Errno::ENXIO | Errno::ENOTDIR) => LogError::NotALog(path.to_owned()),
        _ => LogError::Io { operation: "open", path: path.to_owned(), source },
    }
}

/// Names of one attempt's files, oldest first, the live one last. Of a file and its compressed
/// form only the file (compression was cut off).
fn parts(names: &[String], attempt: u32) -> Vec<String> {
    let live = format!("{attempt}.log");
    let stamp = |name: &str| -> Option<String> {
        let stamp = name.strip_prefix(&live)?.strip_prefix('.')?;
        let stamp = stamp.strip_suffix(".gz").unwrap_or(stamp);
        let ok = stamp.len() == 15 && stamp.bytes().all(|b| b.is_ascii_digit() || b == b'-');
        ok.then(|| stamp.to_owned())
    };
    let mut found: Vec<(String, &String)> = names.iter().filter_map(|n| stamp(n).map(|s| (s, n))).collect();
    // The plain name sorts before the same with .gz.
    found.sort();
    found.dedup_by(|later, first| later.0 == first.0);
    let mut parts: Vec<String> = found.into_iter().map(|(_, name)| name.clone()).collect();
    if names.contains(&live) {
        parts.push(live);
    }
    parts
}

/// Attempts that have a log in this directory, in order.
pub fn attempts(dir: &LogDir) -> Result<Vec<u32>, LogError> {
    let mut found: Vec<u32> = dir.names()?.iter().filter_map(|n| n.split_once(".log")?.0.parse().ok()).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Something that gives its lines from where it was left.
pub trait Source {
    /// Gives every whole line that is there.
    fn feed(&mut self, each: Each<'_>) -> Result<(), LogError>;
    /// Gives what stands behind the last newline: nothing more will come.
    fn finish(&mut self, each: Each<'_>) -> Result<(), LogError>;
}

/// One open log file and the place up to which it was read.
pub struct Opened {
    file: File,
    path: PathBuf,
    id: FileId,
    gzip: bool,
    /// A plain file: bytes consumed, always at the start of a line.
    at: u64,
    /// A compressed file: it is read once, from start to end.
    done: bool,
}

impl Opened {
    fn new(file: File, path: PathBuf, id: FileId, gzip: bool) -> Opened {
        Opened { file, path, id, gzip, at: 0, done: false }
    }

    pub fn id(&self) -> FileId {
        self.id
    }

    /// The same file, to be read from its start.
    pub fn again(&self) -> Result<Opened, LogError> {
        let file = self.file.try_clone().map_err(|e| self.failed(e))?;
        Ok(Opened::new(file, self.path.clone(), self.id, self.gzip))
    }

    fn failed(&self, source: io::Error) -> LogError {
        LogError::Io { operation: "read", path: self.path.clone(), source }
    }

    fn plain(&mut self, each: Each<'_>) -> Result<Lines, LogError> {
        let size = self.file.metadata().map_err(|e| self.failed(e))?.len();
        // A full disk made the writer take its last lines back.
        self.at = self.at.min(size);
        let mut lines = Lines::default();
        let mut chunk = vec![0; CHUNK];
        let mut position = self.at;
        loop {
            let n = match self.file.read_at(&mut chunk, position) {
                Ok(0) => break,
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.failed(e)),
            };
            position += n as u64;
            lines.push(chunk.get(..n).unwrap_or_default(), each)?;
            self.at = position - lines.open();
        }
        Ok(lines)
    }
}

impl Source for Opened {
    fn feed(&mut self, each: Each<'_>) -> Result<(), LogError> {
        if !self.gzip {
            return self.plain(each).map(drop);
        }
        if std::mem::replace(&mut self.done, true) {
            return Ok(());
        }
        let mut lines = Lines::default();
        let mut chunk = vec![0; CHUNK];
        let mut source = MultiGzDecoder::new(At { file: &self.file, at: 0 });
        loop {
            match source.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => lines.push(chunk.get(..n).unwrap_or_default(), each)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        lines.rest(each)
    }

    fn finish(&mut self, each: Each<'_>) -> Result<(), LogError> {
        if self.gzip {
            return self.feed(each);
        }
        let lines = self.plain(each)?;
        self.at += lines.open();
        lines.rest(each)
    }
}

/// Reads by position, so that two readers of one open file do not disturb each other.
struct At<'a> {
    file: &'a File,
    at: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// Splits chunks into lines, holding at most `MAX_LINE` bytes.
#[derive(Default)]
pub struct Lines {
    held: Vec<u8>,
    /// Bytes of a line that is too long, already dropped.
    dropped: u64,
}

impl Lines {
    pub fn push(&mut self, mut chunk: &[u8], each: Each<'_>) -> Result<(), LogError> {
        while let Some(end) = chunk.iter().position(|b| *b == b'\n') {
            let (line, rest) = chunk.split_at(end);
            if self.held.is_empty() && self.dropped == 0 && line.len() <= MAX_LINE {
                each(Some(line))?;
            } else {
                self.hold(line);
                let line = std::mem::take(&mut self.held);
                let too_long = std::mem::take(&mut self.dropped) > 0;
                each((!too_long).then_some(line.as_slice()))?;
            }
            chunk = rest.get(1..).unwrap_or_default();
        }
        self.hold(chunk);
        Ok(())
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.dropped > 0 || self.held.len() + bytes.len() > MAX_LINE {
            self.dropped += (self.held.len() + bytes.len()) as u64;
            self.held = Vec::new();
        } else {
            self.held.extend_from_slice(bytes);
        }
    }

    /// Bytes of the line that has not ended yet.
    fn open(&self) -> u64 {
        self.dropped + self.held.len() as u64
    }

    /// Gives what stands behind the last newline.
    pub fn rest(self, each: Each<'_>) -> Result<(), LogError> {
        if self.dropped > 0 {
            each(None)
        } else if !self.held.is_empty() {
            each(Some(&self.held))
        } else {
            Ok(())
        }
    }
}
