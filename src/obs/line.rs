//! One event to one line, as text or JSON. Pure.
//!
//! Invariant: the result holds exactly one newline, at its end, and no control characters,
//! whatever a pod, a registry or a file put into a value.

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use super::log::Format;
use crate::api::time::WallTime;

/// Longer values are cut: a line is for reading, and journald splits at 48 KiB.
const MAX_VALUE: usize = 4096;

pub enum Value {
    Text(String),
    Number(String),
    Bool(bool),
}

/// An event's fields, taken apart.
#[derive(Default)]
pub struct Fields {
    pub message: String,
    pub rest: Vec<(&'static str, Value)>,
}

impl Fields {
    pub fn of(event: &Event<'_>) -> Fields {
        let mut fields = Fields::default();
        event.record(&mut fields);
        fields
    }

    /// What the rate limit tells pods apart by.
    pub fn pod(&self) -> &str {
        let text = |name: &str| {
            self.rest.iter().find_map(|(key, value)| match value {
                Value::Text(text) if *key == name => Some(text.as_str()),
                _ => None,
            })
        };
        text("pod").or_else(|| text("uid")).unwrap_or_default()
    }

    fn put(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::Text(text) | Value::Number(text)) => self.message = text,
            (name, value) => self.rest.push((name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, Value::Text(cut(format!("{value:?}"))));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, Value::Text(cut(value.to_owned())));
    }
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, Value::Text(cut(super::chain(value).to_string())));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, Value::Number(value.to_string()));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, Value::Number(value.to_string()));
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no NaN and no infinity.
        let text = value.to_string();
        self.put(field, if value.is_finite() { Value::Number(text) } else { Value::Text(text) });
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, Value::Bool(value));
    }
}

fn cut(mut text: String) -> String {
    if text.len() > MAX_VALUE {
        let end = (0..=MAX_VALUE).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Renders one line. `journal`: stderr is a journal stream, which adds the time itself and reads
/// the priority from `<N>`.
pub fn render(format: Format, journal: bool, at: WallTime, level: Level, target: &str, fields: &Fields) -> String {
    let mut out = String::with_capacity(160);
    if journal {
        let _ = write!(out, "<{}>", priority(level)); // a String takes every write
    }
    match format {
        Format::Text => text(&mut out, journal, at, level, fields),
        Format::Json => json(&mut out, at, level, target, fields),
    }
    out.push('\n');
    out
}

/// syslog(3) priorities.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn text(out: &mut String, journal: bool, at: WallTime, level: Level, fields: &Fields) {
    if !journal {
        let stamp = at.nanos();
        // Milliseconds are what a reader needs: `2026-11-30T10:23:01.123` of the nine digits.
        let _ = write!(out, "{}Z {level:<5} ", stamp.get(..23).unwrap_or(&stamp));
    }
    plain(out, &fields.message);
    for (name, value) in &fields.rest {
        let _ = write!(out, " {name}=");
        match value {
            Value::Text(text) if text.is_empty() || text.contains([' ', '"', '=', '\\']) || text.contains(char::is_control) => {
                quoted(out, text);
            }
            Value::Text(text) | Value::Number(text) => out.push_str(text),
            Value::Bool(value) => {
                let _ = write!(out, "{value}");
            }
        }
    }
}

fn json(out: &mut String, at: WallTime, level: Level, target: &str, fields: &Fields) {
    let _ = write!(out, "{{\"time\":\"{}\",\"level\":\"{}\",\"target\":", at.nanos(), level.as_str().to_ascii_lowercase());
    quoted(out, target);
    out.push_str(",\"message\":");
    quoted(out, &fields.message);
    for (name, value) in &fields.rest {
        out.push(',');
        quoted(out, name);
        out.push(':');
        match value {
            Value::Text(text) => quoted(out, text),
            Value::Number(text) => out.push_str(text),
            Value::Bool(value) => {
                let _ = write!(out, "{value}");
            }
        }
    }
    out.push('}');
}

/// Text as it is, but for control characters.
fn plain(out: &mut String, text: &str) {
    for c in text.chars() {
        if c.is_control() {
            escape(out, c);
        } else {
            out.push(c);
        }
    }
}

/// A JSON string.
fn quoted(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => escape(out, c),
            c => out.push(c),
        }
    }
    out.push('"');
}

fn escape(out: &mut String, c: char) {
    match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c => {
            let _ = write!(out, "\\u{:04x}", c as u32); // control characters are below U+00A0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hostile() -> Fields {
        Fields {
            message: "pull failed\n<0>forged".into(),
            rest: vec![
                ("pod", Value::Text("default/web".into())),
                ("reason", Value::Text("a \"b\" \u{1b}[31m\u{9b}x".into())),
                ("attempt", Value::Number("3".into())),
                ("last", Value::Bool(true)),
            ],
        }
    }
    const AT: WallTime = WallTime(1_796_034_181_123_456_789);

    #[test]
    fn text_is_one_line_and_cannot_be_forged() {
        let line = render(Format::Text, false, AT, Level::WARN, "t", &hostile());
        assert_eq!(
            line,
            "2026-11-30T10:23:01.123Z WARN  pull failed\\n<0>forged pod=default/web \
             reason=\"a \\\"b\\\" \\u001b[31m\\u009bx\" attempt=3 last=true\n"
        );
        let line = render(Format::Text, true, AT, Level::WARN, "t", &hostile());
        assert!(line.starts_with("<4>pull failed\\n<0>forged pod="), "{line}");
    }

    #[test]
    fn json_reads_back() {
        let line = render(Format::Json, false, AT, Level::ERROR, "coracle::net", &hostile());
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["message"], "pull failed\n<0>forged");
        assert_eq!(value["reason"], "a \"b\" \u{1b}[31m\u{9b}x");
        assert_eq!(value["attempt"], 3);
        assert_eq!(value["last"], true);
        assert_eq!(value["level"], "error");
        assert_eq!(value["time"], "2026-11-30T10:23:01.123456789Z");
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn long_values_are_cut_at_a_character() {
        assert!(cut("é".repeat(MAX_VALUE)).len() <= MAX_VALUE + 3);
    }
}
