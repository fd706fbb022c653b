//! One CRI log line, taken apart. Pure.
//!
//! `2026-11-30T10:44:08.123456789Z stdout F text`: time, stream, tags (the first is F for the end
//! of a line or P for a part of one), text. The text is any bytes but a newline.

#![deny(clippy::disallowed_methods)]

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub time: &'a str,
    /// The line ends here.
    pub full: bool,
    pub text: &'a [u8],
}

/// None where it is no CRI log line.
pub fn parse(line: &[u8]) -> Option<Record<'_>> {
    let mut fields = line.splitn(4, |b| *b == b' ');
    let time = std::str::from_utf8(fields.next()?).ok()?;
    let stream = fields.next()?;
    let tags = fields.next()?;
    // Some writers leave the last space out where there is no text.
    let text = fields.next().unwrap_or_default();
    if !matches!(stream, b"stdout" | b"stderr") || time.len() < 20 {
        return None;
    }
    let full = match tags.split(|b| *b == b':').next()? {
        b"F" => true,
        b"P" => false,
        _ => return None,
    };
    Some(Record { time, full, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: &str = "2026-11-30T10:44:08.123456789Z";

    #[test]
    fn the_format_and_nothing_else() {
        let line = |rest: &str| format!("{TIME} {rest}").into_bytes();
        assert_eq!(parse(&line("stdout F a  b ")), Some(Record { time: TIME, full: true, text: b"a  b " }));
        assert_eq!(parse(&line("stderr P:x ")), Some(Record { time: TIME, full: false, text: b"" }));
        assert_eq!(parse(&line("stdout F")), Some(Record { time: TIME, full: true, text: b"" }));
        for bad in ["stdin F a", "stdout X a", "stdout", "stdout  F a", ""] {
            assert_eq!(parse(&line(bad)), None, "{bad}");
        }
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"\xff\xfe stdout F a"), None);
    }
}
