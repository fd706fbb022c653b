//! The tree of one document: values with the place where each stands.
#![deny(clippy::disallowed_methods)]

use super::YamlError;

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub line: u32,
    pub column: u32,
    pub value: Value,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Int(i64),
    /// Above `i64::MAX`.
    Uint(u64),
    /// With a fraction, or beyond 64 bits.
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub key: String,
    /// The key's place.
    pub line: u32,
    pub column: u32,
    pub node: Node,
}

impl Value {
    /// A float without fraction is an integer to JSON, and so to the objects (`08`, `1e3`, `1.0`).
    pub(super) fn from_float(value: f64) -> Value {
        if value.fract() != 0.0 {
            Value::Float(value)
        } else if (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&value) {
            Value::Int(value as i64)
        } else if (0.0..18_446_744_073_709_551_616.0).contains(&value) {
            Value::Uint(value as u64)
        } else {
            Value::Float(value)
        }
    }
}

impl Node {
    /// The value of a key of a mapping.
    pub fn field(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|e| e.key == key).map(|e| &e.node),
            _ => None,
        }
    }

    pub fn field_mut(&mut self, key: &str) -> Option<&mut Node> {
        match &mut self.value {
            Value::Map(entries) => entries.iter_mut().find(|e| e.key == key).map(|e| &mut e.node),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn is_null(&self) -> bool {
        self.value == Value::Null
    }

    /// Sets a key of a mapping; anything but a mapping becomes one.
    pub fn set(&mut self, key: &str, value: Value) {
        let node = Node { line: self.line, column: self.column, value };
        if let Some(old) = self.field_mut(key) {
            *old = node;
            return;
        }
        let entry = Entry { key: key.to_owned(), line: self.line, column: self.column, node };
        match &mut self.value {
            Value::Map(entries) => entries.push(entry),
            other => *other = Value::Map(vec![entry]),
        }
    }

    pub fn remove(&mut self, key: &str) {
        if let Value::Map(entries) = &mut self.value {
            entries.retain(|e| e.key != key);
        }
    }

    /// Line and column of `spec.containers[0].env[1].name`, or of the nearest part that exists.
    pub fn locate(&self, field: &str) -> (u32, u32) {
        let mut node = self;
        let mut place = (self.line, self.column);
        let mut rest = field;
        while !rest.is_empty() {
            let (part, after) = match rest.strip_prefix('[') {
                Some(inner) => match inner.split_once(']') {
                    Some((part, after)) => (part, after),
                    None => break,
                },
                None => rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len())),
            };
            rest = after.strip_prefix('.').unwrap_or(after);
            match &node.value {
                Value::Map(entries) => match entries.iter().find(|e| e.key == part) {
                    Some(entry) => {
                        place = (entry.line, entry.column);
                        node = &entry.node;
                    }
                    None => break,
                },
                Value::List(items) => match part.parse::<usize>().ok().and_then(|i| items.get(i)) {
                    Some(item) => {
                        place = (item.line, item.column);
                        node = item;
                    }
                    None => break,
                },
                _ => break,
            }
        }
        place
    }

    /// Canonical JSON: keys sorted, no spaces; the same object gives the same bytes whichever
    /// text it was read from. Fails where JSON has no word for a number (`.inf`, `.nan`).
    pub fn to_json(&self) -> Result<Vec<u8>, YamlError> {
        let mut out = Vec::new();
        self.write_json(&mut out)?;
        Ok(out)
    }

    fn write_json(&self, out: &mut Vec<u8>) -> Result<(), YamlError> {
        match &self.value {
            Value::Null => out.extend_from_slice(b"null"),
            Value::Bool(true) => out.extend_from_slice(b"true"),
            Value::Bool(false) => out.extend_from_slice(b"false"),
            Value::Int(i) => out.extend_from_slice(i.to_string().as_bytes()),
            Value::Uint(u) => out.extend_from_slice(u.to_string().as_bytes()),
            Value::Float(f) if !f.is_finite() => {
                return Err(YamlError::at(self.line, self.column, "JSON has no such number: put it in quotes"));
            }
            Value::Float(f) => out.extend_from_slice(format!("{f:?}").as_bytes()),
            Value::Text(text) => write_text(text, out),
            Value::List(items) => {
                out.push(b'[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push(b',');
                    }
                    item.write_json(out)?;
                }
                out.push(b']');
            }
            Value::Map(entries) => {
                let mut sorted: Vec<&Entry> = entries.iter().collect();
                sorted.sort_by(|a, b| a.key.cmp(&b.key));
                out.push(b'{');
                for (i, entry) in sorted.into_iter().enumerate() {
                    if i > 0 {
                        out.push(b',');
                    }
                    write_text(&entry.key, out);
                    out.push(b':');
                    entry.node.write_json(out)?;
                }
                out.push(b'}');
            }
        }
        Ok(())
    }

    /// Overwrites every text below: the tree of a Secret is wiped before it is dropped.
    pub fn wipe(&mut self) {
        match &mut self.value {
            Value::Text(text) => {
                let mut bytes = std::mem::take(text).into_bytes();
                bytes.fill(0);
                // Keeps the compiler from dropping the stores.
                std::hint::black_box(&bytes);
            }
            Value::List(items) => items.iter_mut().for_each(Node::wipe),
            Value::Map(entries) => entries.iter_mut().for_each(|e| e.node.wipe()),
            Value::Null | Value::Bool(_) | Value::Int(_) | Value::Uint(_) | Value::Float(_) => {}
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    for c in text.chars() {
        match c {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\r' => out.extend_from_slice(b"\\r"),
            '\t' => out.extend_from_slice(b"\\t"),
            c if (c as u32) < 0x20 => out.extend_from_slice(format!("\\u{:04x}", c as u32).as_bytes()),
            c => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out.push(b'"');
}
