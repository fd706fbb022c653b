//! Container log files: their lines, their names, and what is done with rotated ones.
//!
//! A line is `2026-11-30T10:44:08.123456789Z stdout F text`: the CRI format, which kubelet,
//! crictl and fluent-bit read. `P` marks a part of a line longer than 16 KiB. The monitor writes
//! `<attempt>.log` and renames a full one to `<attempt>.log.<YYYYMMDD-hhmmss>` as the kubelet
//! does; the agent compresses all of those but the newest, which a reader may still follow.
//!
//! Source: kubelet pkg/kubelet/logs/container_log_manager.go, CRI's log format in KEP-2411.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest text of one log line; containerd's `max_container_log_line_size`.
pub const MAX_LINE: usize = 16 * 1024;

/// Appends one line of the log. `text` has at most [`MAX_LINE`] bytes and no newline.
pub fn push_line(out: &mut Vec<u8>, at: i64, stream: &str, full: bool, text: &[u8]) {
    push_stamp(out, at);
    out.push(b' ');
    out.extend_from_slice(stream.as_bytes());
    out.extend_from_slice(if full { b" F " } else { b" P " });
    out.extend_from_slice(text);
    out.push(b'\n');
}

/// RFC 3339 with nanoseconds, UTC.
fn push_stamp(out: &mut Vec<u8>, at: i64) {
    let Civil { year, month, day, hour, minute, second, nanos } = civil(at);
    let text = format_args!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z").to_string();
    out.extend_from_slice(text.as_bytes());
}

/// What a rotated file's name ends with.
pub fn rotation_stamp(at: i64) -> String {
    let Civil { year, month, day, hour, minute, second, .. } = civil(at);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

struct Civil {
    year: i64,
    month: i64,
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    nanos: i64,
}

/// The Gregorian calendar for nanoseconds since 1970: days are counted from the 1st of March of
/// year 0 in eras of 400 years (146,097 days), so that leap days come last.
fn civil(at: i64) -> Civil {
    let seconds = at.div_euclid(1_000_000_000);
    let days = seconds.div_euclid(86_400) + 719_468;
    let of_day = seconds.rem_euclid(86_400);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    Civil {
        year: year_of_era + days.div_euclid(146_097) * 400 + i64::from(month <= 2),
        month,
        day: of_year - (153 * shifted + 2) / 5 + 1,
        hour: of_day / 3_600,
        minute: of_day / 60 % 60,
        second: of_day % 60,
        nanos: at.rem_euclid(1_000_000_000),
    }
}

/// Rotated files of `log`, oldest first, compressed ones among them.
pub fn rotated(log: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> =
        siblings(log)?.into_iter().filter(|(_, end)| end.is_empty() || end == "gz").map(|(path, _)| path).collect();
    found.sort();
    Ok(found)
}

/// Everything that rotation makes, with what follows the time in its name (`gz`, `tmp` or nothing).
fn siblings(log: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let rest = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix(name)).and_then(|n| n.strip_prefix('.'));
        let Some((stamp, end)) = rest.map(|rest| rest.split_once('.').unwrap_or((rest, ""))) else { continue };
        if stamp.len() == 15 && stamp.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
            let end = end.to_owned();
            found.push((path, end));
        }
    }
    Ok(found)
}

/// The file without what compression adds to its name: two that are equal are one log.
pub fn stem(rotated: &Path) -> PathBuf {
    if rotated.extension().is_some_and(|e| e == "gz") { rotated.with_extension("") } else { rotated.to_owned() }
}

/// Compresses what was rotated away from `log`, all but the newest; leftovers of a compression
/// that was cut off are removed. Returns how many files it compressed.
///
/// The monitor may take the oldest away at the same time: what is gone needs no compression.
pub fn compress_rotated(log: &Path) -> io::Result<usize> {
    let mut files = rotated(log)?;
    files.pop();
    let mut done = 0;
    for path in files.iter().filter(|path| path.extension().is_none_or(|e| e != "gz")) {
        let with = |end: &str| {
            let mut name = path.as_os_str().to_owned();
            name.push(end);
            PathBuf::from(name)
        };
        match compress(path, &with(".tmp")).and_then(|()| fs::rename(with(".tmp"), with(".gz"))) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => {
                // It takes space that is just what lacks; the error that counts is the first one.
                let _ = fs::remove_file(with(".tmp"));
                return Err(e);
            }
        }
        // Cut off here, both are there: the next pass writes the same bytes again.
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => done += 1,
        }
    }
    for (path, _) in siblings(log)?.into_iter().filter(|(path, end)| end == "tmp" && !path.with_extension("").exists()) {
        fs::remove_file(path)?;
    }
    Ok(done)
}

fn compress(from: &Path, to: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    // Logs may hold anything: who may not read the one may not read the other.
    let target = File::options().write(true).create(true).truncate(true).mode(0o640).open(to)?;
    let mut encoder = flate2::write::GzEncoder::new(target, flate2::Compression::default());
    io::copy(&mut source, &mut encoder)?;
    encoder.finish()?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn stamps_are_rfc_3339_with_nanoseconds() {
        let mut out = Vec::new();
        push_line(&mut out, 1_764_499_448_120_000_001, "stdout", true, b"hello");
        assert_eq!(String::from_utf8(out).unwrap(), "2025-11-30T10:44:08.120000001Z stdout F hello\n");
        assert_eq!(rotation_stamp(0), "19700101-000000");
        assert_eq!(rotation_stamp(951_782_400 * 1_000_000_000), "20000229-000000");
        assert_eq!(rotation_stamp(-1), "19691231-235959");
    }

    #[test]
    fn all_but_the_newest_are_compressed() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        for name in [
            "0.log",
            "0.log.20251231-000000.tmp",
            "0.log.20260101-000000",
            "0.log.20260102-000000",
            "0.log.20260103-000000",
            "10.log.20260101-000000",
        ] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        assert_eq!(compress_rotated(&log).unwrap(), 2);
        assert_eq!(compress_rotated(&log).unwrap(), 0);
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let expected =
            ["0.log", "0.log.20260101-000000.gz", "0.log.20260102-000000.gz", "0.log.20260103-000000", "10.log.20260101-000000"];
        assert_eq!(names, expected);
        let mut text = String::new();
        let file = File::open(dir.path().join("0.log.20260101-000000.gz")).unwrap();
        flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
        assert_eq!(text, "0.log.20260101-000000");
    }
}
