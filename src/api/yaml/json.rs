//! JSON to the same tree, line and column included; several objects may follow each other.
//! RFC 8259, with its own scanner since YAML's takes no surrogate pairs.
#![deny(clippy::disallowed_methods)]

use super::build::{Fields, shown};
use super::node::{Entry, Node, Value};
use super::{Limits, YamlError};

pub struct Scanner<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    /// Byte offset of the line's first byte.
    line_start: usize,
    limits: Limits,
    nodes: usize,
    failed: bool,
}

impl<'a> Scanner<'a> {
    pub fn new(text: &'a str, limits: Limits) -> Scanner<'a> {
        Scanner { text, at: 0, line: 1, line_start: 0, limits, nodes: 0, failed: false }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn place(&self) -> (u32, u32) {
        let line = self.text.get(self.line_start..self.at).unwrap_or_default();
        (self.line, line.chars().count() as u32 + 1)
    }

    fn error(&self, why: impl Into<String>) -> YamlError {
        let (line, column) = self.place();
        YamlError::at(line, column, why)
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\r' | b'\n') = self.peek() {
            self.at += 1;
            if self.text.as_bytes().get(self.at - 1) == Some(&b'\n') {
                self.line += 1;
                self.line_start = self.at;
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), YamlError> {
        self.space();
        if self.peek() != Some(byte) {
            return Err(self.error(format!("expected '{}'", char::from(byte))));
        }
        self.at += 1;
        Ok(())
    }

    /// Recursion is bounded by `limits.depth`.
    fn value(&mut self, depth: usize) -> Result<Node, YamlError> {
        self.space();
        let (line, column) = self.place();
        self.nodes += 1;
        if self.nodes > self.limits.nodes {
            return Err(self.error(format!("more than {} values in one document: split it", self.limits.nodes)));
        }
        if depth > self.limits.depth {
            return Err(self.error(format!("nested deeper than {} levels", self.limits.depth)));
        }
        let value = match self.peek() {
            Some(b'{') => self.map(depth)?,
            Some(b'[') => self.list(depth)?,
            Some(b'"') => Value::Text(self.string()?),
            Some(b'-' | b'0'..=b'9') => self.number()?,
            _ => self.word()?,
        };
        Ok(Node { line, column, value })
    }

    fn map(&mut self, depth: usize) -> Result<Value, YamlError> {
        self.at += 1;
        let mut fields = Fields::default();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Map(fields.entries));
        }
        loop {
            self.space();
            let (line, column) = self.place();
            if self.peek() != Some(b'"') {
                return Err(self.error("expected a key in double quotes"));
            }
            let key = self.string()?;
            self.expect(b':')?;
            let node = self.value(depth + 1)?;
            fields.insert(Entry { key, line, column, node })?;
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Map(fields.entries));
                }
                _ => return Err(self.error("expected ',' or '}'")),
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value, YamlError> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::List(items));
                }
                _ => return Err(self.error("expected ',' or ']'")),
            }
        }
    }

    fn word(&mut self) -> Result<Value, YamlError> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        for (word, value) in [("null", Value::Null), ("true", Value::Bool(true)), ("false", Value::Bool(false))] {
            if rest.starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        let first: String = rest.chars().take(1).collect();
        Err(self.error(if first.is_empty() {
            "the text ends too early".to_owned()
        } else {
            format!("unexpected '{}'", shown(&first))
        }))
    }

    fn number(&mut self) -> Result<Value, YamlError> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let end = rest.find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E')).unwrap_or(rest.len());
        let text = rest.get(..end).unwrap_or_default();
        let value = serde_json::from_str::<serde_json::Number>(text).ok().and_then(|n| {
            n.as_i64().map(Value::Int).or_else(|| n.as_u64().map(Value::Uint)).or_else(|| n.as_f64().map(Value::from_float))
        });
        let value = value.ok_or_else(|| self.error("this is no number"))?;
        self.at += end;
        Ok(value)
    }

    /// serde_json knows the escapes; here only the closing quote is found.
    fn string(&mut self) -> Result<String, YamlError> {
        let bytes = self.text.as_bytes();
        let mut end = self.at + 1;
        loop {
            match bytes.get(end) {
                Some(b'\\') => end += 2,
                Some(b'"') => break,
                Some(b'\n') | None => return Err(self.error("this text has no closing quote")),
                Some(_) => end += 1,
            }
        }
        let quoted = self.text.get(self.at..=end).unwrap_or_default();
        let text = serde_json::from_str(quoted).map_err(|_| self.error("a bad escape or control character in this text"))?;
        self.at = end + 1;
        Ok(text)
    }
}

impl Iterator for Scanner<'_> {
    type Item = Result<Node, YamlError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.space();
        if self.failed || self.at >= self.text.len() {
            return None;
        }
        self.nodes = 0;
        let next = self.value(1);
        self.failed = next.is_err();
        Some(next)
    }
}
