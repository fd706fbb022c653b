//! Wall-clock instants as data: nanoseconds since 1970-01-01 UTC, rendered as RFC 3339.
//! Nothing here reads a clock; `sys::clock` does.
#![deny(clippy::disallowed_methods)]

use std::fmt;

/// Nanoseconds since the Unix epoch. Only rendered or compared with other wall times; every
/// duration is measured on CLOCK_BOOTTIME instead, since wall time jumps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct WallTime(pub i64);

impl WallTime {
    /// `2026-11-30T10:23:01Z`: metav1.Time's form.
    pub fn seconds(self) -> String {
        let (y, mo, d, h, mi, s) = civil(self.0.div_euclid(1_000_000_000));
        format!("{y:04}-{mo:02}-{d:02}T{h:02}:{mi:02}:{s:02}Z")
    }

    /// `2026-11-30T10:23:01.123456789Z`: RFC3339Nano with all nine digits, as in CRI logs.
    pub fn nanos(self) -> String {
        let (y, mo, d, h, mi, s) = civil(self.0.div_euclid(1_000_000_000));
        let n = self.0.rem_euclid(1_000_000_000);
        format!("{y:04}-{mo:02}-{d:02}T{h:02}:{mi:02}:{s:02}.{n:09}Z")
    }

    /// Reads RFC 3339 with optional fraction and any offset; None where it is none.
    pub fn parse(text: &str) -> Option<WallTime> {
        let bytes = text.as_bytes();
        let number = |from: usize, to: usize| -> Option<i64> {
            let part = text.get(from..to)?;
            if !part.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            part.parse().ok()
        };
        let punct = |at: usize, set: &[u8]| bytes.get(at).is_some_and(|b| set.contains(b));
        if !(punct(4, b"-") && punct(7, b"-") && punct(10, b"Tt ") && punct(13, b":") && punct(16, b":")) {
            return None;
        }
        let (y, mo, d) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
        let (h, mi, s) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
        if !(1..=12).contains(&mo) || !(1..=31).contains(&d) || h > 23 || mi > 59 || s > 60 {
            return None;
        }
        let mut at = 19;
        let mut nanos = 0i64;
        if punct(at, b".") {
            let start = at + 1;
            at = start;
            let mut scale = 100_000_000;
            while bytes.get(at).is_some_and(u8::is_ascii_digit) {
                nanos += i64::from(bytes[at] - b'0') * scale;
                scale /= 10;
                at += 1;
            }
            if at == start {
                return None;
            }
        }
        let offset = match bytes.get(at)? {
            b'Z' | b'z' if at + 1 == bytes.len() => 0,
            sign @ (b'+' | b'-') if at + 6 == bytes.len() && punct(at + 3, b":") => {
                let minutes = number(at + 1, at + 3)? * 60 + number(at + 4, at + 6)?;
                if *sign == b'+' { minutes * 60 } else { -minutes * 60 }
            }
            _ => return None,
        };
        let seconds = days_from_civil(y, mo, d) * 86_400 + h * 3600 + mi * 60 + s - offset;
        seconds.checked_mul(1_000_000_000)?.checked_add(nanos).map(WallTime)
    }
}

impl fmt::Display for WallTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.seconds())
    }
}

/// Days since the epoch of a proleptic Gregorian date.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month, day, hour, minute, second of a Unix time.
fn civil(seconds: i64) -> (i64, i64, i64, i64, i64, i64) {
    let days = seconds.div_euclid(86_400) + 719_468;
    let rest = seconds.rem_euclid(86_400);
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day, rest / 3600, rest % 3600 / 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_and_reads_back_the_same_instant() {
        for seconds in [0, 951_782_399, 951_782_400, 1_796_034_181, 4_102_444_800, -1, -9_000_000_000_i64] {
            let t = WallTime(seconds * 1_000_000_000 + 5);
            assert_eq!(WallTime::parse(&t.nanos()), Some(t), "{}", t.nanos());
        }
        assert_eq!(WallTime(951_782_400_000_000_000).seconds(), "2000-02-29T00:00:00Z");
    }

    #[test]
    fn offsets_and_fractions_are_honoured_and_nonsense_is_refused() {
        assert_eq!(WallTime::parse("2026-11-30T12:23:01.5+02:00"), WallTime::parse("2026-11-30T10:23:01.500000000Z"));
        for bad in
            ["", "2026-11-30", "2026-13-30T10:23:01Z", "2026-11-30T10:23:01", "2026-11-30T10:23:01.Z", "2026-11-30T10:23:01+2"]
        {
            assert_eq!(WallTime::parse(bad), None, "{bad}");
        }
    }
}
