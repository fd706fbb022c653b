//! Writes one container's log: frames lines, rotates by size, and outlasts a full disk.
//!
//! Invariant: [`LogWriter::write`] never fails and never waits for space: what cannot be written
//! is dropped in whole lines and counted, and one line says so once writing works again. A file
//! holds whole lines only: a write that was cut short is cut off again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use super::wire::Log;
use crate::runtime::logs::{MAX_LINE, push_line, rotated, rotation_stamp, stem};

/// The part of a stream's last line that has not ended yet.
#[derive(Debug, Default)]
pub struct Pending(pub Vec<u8>);

/// Turns bytes of a stream into log lines. With `end` an open line is finished.
pub fn frame(stream: &'static str, at: i64, bytes: &[u8], end: bool, pending: &mut Pending, out: &mut Vec<u8>) {
    let mut rest = bytes;
    while let Some(newline) = rest.iter().position(|b| *b == b'\n') {
        let (line, after) = rest.split_at(newline);
        push_text(stream, at, line, pending, out);
        push_line(out, at, stream, true, &pending.0);
        pending.0.clear();
        rest = after.get(1..).unwrap_or_default();
    }
    push_text(stream, at, rest, pending, out);
    if end && !pending.0.is_empty() {
        push_line(out, at, stream, true, &pending.0);
        pending.0.clear();
    }
    if pending.0.is_empty() {
        // An idle stream holds no memory.
        pending.0 = Vec::new();
    }
}

/// Adds text to the open line; what is over the limit goes out as parts.
fn push_text(stream: &'static str, at: i64, text: &[u8], pending: &mut Pending, out: &mut Vec<u8>) {
    let mut rest = text;
    while pending.0.len() + rest.len() > MAX_LINE {
        let (now, later) = rest.split_at(MAX_LINE - pending.0.len());
        pending.0.extend_from_slice(now);
        push_line(out, at, stream, false, &pending.0);
        pending.0.clear();
        rest = later;
    }
    pending.0.extend_from_slice(rest);
}

/// A write that stopped after `written` bytes of whole lines.
struct Cut {
    error: io::Error,
    written: usize,
}

impl From<io::Error> for Cut {
    fn from(error: io::Error) -> Cut {
        Cut { error, written: 0 }
    }
}

/// The file side.
#[derive(Debug)]
pub struct LogWriter {
    log: Log,
    file: Option<File>,
    size: u64,
    /// Lines dropped since writing last worked, and why.
    lost: u64,
    why: Option<io::ErrorKind>,
    lost_ever: u64,
    last_rotation: i64,
    rotated: bool,
    /// When it was last seen that the file still has its name.
    looked: i64,
}

/// A file whose name somebody took away (to make room) is written for nobody: seen this late.
const LOOK: i64 = 1_000_000_000;

impl LogWriter {
    pub fn new(log: Log) -> LogWriter {
        LogWriter { log, file: None, size: 0, lost: 0, why: None, lost_ever: 0, last_rotation: 0, rotated: false, looked: 0 }
    }

    /// Of a monitor that goes on as another program.
    pub fn resumed(log: Log, lost_ever: u64) -> LogWriter {
        LogWriter { lost_ever, ..LogWriter::new(log) }
    }

    pub fn lost_ever(&self) -> u64 {
        self.lost_ever
    }

    /// The log's path, if it was rotated since this was asked last.
    pub fn take_rotated(&mut self) -> Option<PathBuf> {
        std::mem::take(&mut self.rotated).then(|| self.log.path.clone())
    }

    /// Makes an empty file appear, as containers that print nothing have one too.
    pub fn touch(&mut self) {
        if let Err(e) = self.open() {
            self.why = Some(e.kind());
        }
    }

    /// Writes whole lines, in one write(2).
    pub fn write(&mut self, at: i64, lines: &[u8]) {
        if lines.is_empty() {
            return;
        }
        let marker = self.marker(at);
        let written = if marker.is_empty() { self.try_write(at, lines) } else { self.try_write(at, &[&marker, lines].concat()) };
        let (written, error) = match written {
            Ok(()) => (lines.len(), None),
            Err(Cut { error, written }) => (written.saturating_sub(marker.len()), Some((error, written >= marker.len()))),
        };
        match error {
            None => self.lost = 0,
            Some((error, told)) => {
                let rest = lines.get(written..).unwrap_or_default();
                let count = rest.iter().filter(|b| **b == b'\n').count() as u64;
                self.lost = count + if told { 0 } else { self.lost };
                self.lost_ever += count;
                self.why = Some(error.kind());
            }
        }
    }

    /// The line that says how many came before; empty where none are missing.
    fn marker(&self, at: i64) -> Vec<u8> {
        let mut line = Vec::new();
        if self.lost > 0 {
            let text = format!("coracle: {} log lines were lost: {}", self.lost, self.why.unwrap_or(io::ErrorKind::Other));
            push_line(&mut line, at, "stderr", true, text.as_bytes());
        }
        line
    }

    fn try_write(&mut self, at: i64, lines: &[u8]) -> Result<(), Cut> {
        if self.size > 0 && self.size + lines.len() as u64 > self.log.max_size {
            self.rotate(at)?;
        }
        self.look(at)?;
        let before = self.size;
        let file = self.open()?;
        let (written, error) = match file.write(lines) {
            Ok(n) if n == lines.len() => {
                self.size += n as u64;
                return Ok(());
            }
            Ok(n) => (n, io::ErrorKind::StorageFull.into()),
            Err(e) => (0, e),
        };
        // What came after the last newline is no line: it is cut off again.
        let whole = lines.get(..written).and_then(|l| l.iter().rposition(|b| *b == b'\n')).map_or(0, |at| at + 1);
        match file.set_len(before + whole as u64) {
            Ok(()) => self.size = before + whole as u64,
            // Go by what the file has from now on.
            Err(_) => self.file = None,
        }
        Err(Cut { error, written: whole })
    }

    fn look(&mut self, at: i64) -> io::Result<()> {
        // Also where the clock was set back.
        if (0..LOOK).contains(&(at - self.looked)) {
            return Ok(());
        }
        self.looked = at;
        if let Some(file) = &self.file
            && file.metadata()?.nlink() == 0
        {
            self.file = None;
        }
        Ok(())
    }

    fn open(&mut self) -> io::Result<&mut File> {
        if self.file.is_none() {
            let file = OpenOptions::new().create(true).append(true).mode(0o640).open(&self.log.path)?;
            self.size = file.metadata()?.len();
            self.file = Some(file);
        }
        self.file.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The full file gets its time as a last name; what is too old goes first, so that rotation
    /// also works on a full disk. Where renaming fails the old file grows on.
    fn rotate(&mut self, at: i64) -> io::Result<()> {
        let keep = usize::try_from(self.log.max_files).unwrap_or(usize::MAX).saturating_sub(1);
        let old = rotated(&self.log.path)?;
        let mut times: Vec<PathBuf> = old.iter().map(|path| stem(path)).collect();
        times.dedup();
        let too_many = (times.len() + 1).saturating_sub(keep.max(1));
        let oldest = times.get(..too_many).unwrap_or_default();
        for path in old.iter().filter(|path| oldest.contains(&stem(path))) {
            match fs::remove_file(path) {
                // The agent has compressed it just now: the next rotation finds the other name.
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        if keep == 0 {
            fs::remove_file(&self.log.path)?;
        } else {
            let name = self.free_name(at);
            fs::rename(&self.log.path, name)?;
        }
        self.file = None;
        self.size = 0;
        self.rotated = true;
        Ok(())
    }

    /// Names have seconds: a second rotation within one takes the next that is free, so that
    /// names stay in order and nothing is overwritten.
    fn free_name(&mut self, at: i64) -> PathBuf {
        const SECOND: i64 = 1_000_000_000;
        let ahead = self.last_rotation + SECOND - at;
        // A clock that was set back by more than that starts a new order.
        let mut at = if (0..3_600 * SECOND).contains(&ahead) { at + ahead } else { at };
        loop {
            let mut name = self.log.path.as_os_str().to_owned();
            name.push(".");
            name.push(rotation_stamp(at));
            let plain = PathBuf::from(&name);
            name.push(".gz");
            if !plain.exists() && !PathBuf::from(name).exists() {
                self.last_rotation = at;
                return plain;
            }
            at += SECOND;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::clock;

    fn framed(parts: &[&[u8]], end: bool) -> Vec<String> {
        let (mut pending, mut out) = (Pending::default(), Vec::new());
        for (n, part) in parts.iter().enumerate() {
            frame("stdout", 0, part, end && n + 1 == parts.len(), &mut pending, &mut out);
        }
        String::from_utf8(out)
            .unwrap()
            .lines()
            .map(|l| l.trim_start_matches("1970-01-01T00:00:00.000000000Z stdout ").to_owned())
            .collect()
    }

    #[test]
    fn lines_are_whole_however_they_arrive() {
        assert_eq!(framed(&[b"a\nb\n"], false), ["F a", "F b"]);
        assert_eq!(framed(&[b"a", b"b", b"c\n\nd"], false), ["F abc", "F "]);
        assert_eq!(framed(&[b"a\nopen"], true), ["F a", "F open"]);
        assert!(framed(&[b""], true).is_empty());
    }

    #[test]
    fn a_long_line_comes_in_parts() {
        let long = vec![b'x'; MAX_LINE * 2 + 5];
        let lines = framed(&[&long, b"\n"], false);
        assert_eq!(
            lines.iter().map(|l| (&l[..1], l.len() - 2)).collect::<Vec<_>>(),
            [("P", MAX_LINE), ("P", MAX_LINE), ("F", 5)]
        );
        let exact = vec![b'x'; MAX_LINE];
        assert_eq!(framed(&[&exact, b"\n"], false).len(), 1);
    }

    fn writer(dir: &std::path::Path, max_size: u64, max_files: u32) -> LogWriter {
        LogWriter::new(Log { path: dir.join("0.log"), max_size, max_files })
    }

    fn line(n: usize) -> Vec<u8> {
        let mut out = Vec::new();
        push_line(&mut out, 0, "stdout", true, format!("{n:04}").as_bytes());
        out
    }

    #[test]
    fn rotation_keeps_the_newest_files_and_every_line_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let size = line(0).len() as u64;
        let mut log = writer(dir.path(), size * 3, 4);
        for n in 0..20 {
            log.write(clock::wall_nanos(), &line(n));
        }
        let mut files = rotated(&dir.path().join("0.log")).unwrap();
        assert_eq!(files.len(), 3);
        files.push(dir.path().join("0.log"));
        let text: String = files.iter().map(|f| fs::read_to_string(f).unwrap()).collect();
        let seen: Vec<_> = text.lines().map(|l| l.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).collect();
        assert_eq!(seen, (9..20).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_disk_costs_lines_and_says_so_once() {
        let dir = tempfile::tempdir().unwrap();
        let log_dir = dir.path().join("gone");
        let mut log = writer(&log_dir, 1 << 20, 3);
        log.write(0, &line(1));
        log.write(0, &line(2));
        assert_eq!(log.lost_ever(), 2);
        fs::create_dir(&log_dir).unwrap();
        log.write(0, &line(3));
        log.write(0, &line(4));
        let text = fs::read_to_string(log_dir.join("0.log")).unwrap();
        let lines: Vec<_> = text.lines().map(|l| l.split_once("Z ").unwrap().1).collect();
        assert_eq!(lines, ["stderr F coracle: 2 log lines were lost: entity not found", "stdout F 0003", "stdout F 0004"]);
    }
}
