//! What is mounted where, as the calling thread sees it: /proc/thread-self/mountinfo, proc(5).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One line of mountinfo, as far as we look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub target: PathBuf,
    /// `shared:N`: what is mounted below it is seen by its peers.
    pub shared: bool,
    /// `master:N`: it sees what its master gets.
    pub slave: bool,
}

/// Mounts at or below `dir` (absolute, without links), in the order they were made.
pub fn below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    each(|entry| {
        if entry.target.starts_with(dir) {
            found.push(entry.target);
        }
    })?;
    Ok(found)
}

/// The mount that `path` (absolute, without links) lies on; None only without any `/`.
pub fn of(path: &Path) -> io::Result<Option<Entry>> {
    let mut best: Option<Entry> = None;
    each(|entry| {
        // Of several at one place the last one counts.
        let longer = |b: &Entry| entry.target.as_os_str().len() >= b.target.as_os_str().len();
        if path.starts_with(&entry.target) && best.as_ref().is_none_or(longer) {
            best = Some(entry);
        }
    })?;
    Ok(best)
}

fn each(mut take: impl FnMut(Entry)) -> io::Result<()> {
    for line in BufReader::new(File::open("/proc/thread-self/mountinfo")?).split(b'\n') {
        if let Some(entry) = parse(&line?) {
            take(entry);
        }
    }
    Ok(())
}

/// `36 35 98:0 /root /target rw,noatime shared:1 master:2 - ext4 /dev/sda1 rw`
fn parse(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|b| *b == b' ');
    let target = unescape(fields.nth(4)?);
    let (mut shared, mut slave) = (false, false);
    for field in fields.skip(1).take_while(|f| *f != b"-") {
        shared |= field.starts_with(b"shared:");
        slave |= field.starts_with(b"master:");
    }
    Some(Entry { target, shared, slave })
}

/// Space, tab, line break and backslash stand as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match (byte, after) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..]) => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => out.push(byte),
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_their_escapes_and_propagation() {
        let entry = |target: &str, shared, slave| Some(Entry { target: target.into(), shared, slave });
        assert_eq!(
            parse(b"36 35 98:0 / /mnt/a\\040b\\134c rw,noatime shared:1 master:2 - ext4 /dev/root rw"),
            entry("/mnt/a b\\c", true, true)
        );
        assert_eq!(parse(b"36 35 98:0 / / rw - ext4 shared:9 rw"), entry("/", false, false));
        assert_eq!(parse(b""), None);
        assert_eq!(of(Path::new("/proc/self")).unwrap().unwrap().target, Path::new("/proc"));
    }
}
