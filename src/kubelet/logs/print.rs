//! Log lines to what people read: skip, since, time stamps, parts put together.

use std::io::Write;

use super::record::{Record, parse};
use super::{LogError, LogReport, Opened, Source};
use crate::api::time::WallTime;

pub struct Printer {
    timestamps: bool,
    since: Option<i64>,
    skip: u64,
    /// The next part begins a line.
    at_start: bool,
    /// Time of the last record given out or passed over.
    last: i64,
    /// Records up to this time were seen in a file that is gone.
    seen: Option<i64>,
    report: LogReport,
}

impl Printer {
    pub fn new(timestamps: bool, since: Option<WallTime>) -> Printer {
        Printer {
            timestamps,
            since: since.map(|t| t.0),
            skip: 0,
            at_start: true,
            last: i64::MIN,
            seen: None,
            report: LogReport::default(),
        }
    }

    /// Passes over that many lines from here on.
    pub fn skip(&mut self, lines: u64) {
        self.skip = lines;
    }

    /// From here on only what is younger than the last record: the place in the files was lost.
    pub fn only_after_last(&mut self) {
        self.seen = Some(self.last);
    }

    pub fn report(&self) -> LogReport {
        self.report
    }

    /// One line of a file. `None`: it was longer than a record can be.
    pub fn record(&mut self, line: Option<&[u8]>, out: &mut dyn Write) -> Result<(), LogError> {
        let Some(Record { time, full, text }) = line.and_then(parse) else {
            self.report.unreadable += 1;
            return Ok(());
        };
        let Some(WallTime(at)) = WallTime::parse(time) else {
            self.report.unreadable += 1;
            return Ok(());
        };
        if self.seen.is_some_and(|seen| at <= seen) {
            return Ok(());
        }
        self.seen = None;
        self.last = at;
        if self.skip > 0 {
            self.skip -= u64::from(full);
            return Ok(());
        }
        // A line that began in time is given out whole.
        if self.at_start && self.since.is_some_and(|since| at < since) {
            return Ok(());
        }
        let stamp: &[&[u8]] = if self.timestamps && self.at_start { &[time.as_bytes(), b" "] } else { &[] };
        let end: &[u8] = if full { b"\n" } else { b"" };
        for part in stamp.iter().chain(&[text, end]) {
            out.write_all(part).map_err(LogError::Output)?;
        }
        self.at_start = full;
        self.report.lines += u64::from(full);
        Ok(())
    }
}

/// Whole lines of a file as it is now, without moving the place it is read from.
pub fn count_lines(part: &mut Opened) -> Result<u64, LogError> {
    let mut lines = 0;
    let mut again = part.again()?;
    again.feed(&mut |line| {
        lines += u64::from(line.and_then(parse).is_some_and(|r| r.full));
        Ok(())
    })?;
    Ok(lines)
}
