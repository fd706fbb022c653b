//! Parser events to a tree: anchors and aliases within a budget, `<<` merges, duplicate keys.
//! The stack is a Vec, so nesting costs heap and is counted, never call stack.
#![deny(clippy::disallowed_methods)]

use std::collections::HashMap;

use saphyr_parser::{Event, ScalarStyle, Tag};

use super::node::{Entry, Node, Value};
use super::{Limits, YamlError, resolve};

pub struct Builder {
    limits: Limits,
    nodes: usize,
    open: Vec<Open>,
    /// Anchored nodes and how many nodes each is.
    anchors: HashMap<usize, (Node, usize)>,
}

struct Open {
    line: u32,
    column: u32,
    anchor: usize,
    /// Count of nodes when it began.
    before: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Node>),
    Map { fields: Fields, key: Option<Key> },
}

struct Key {
    text: String,
    line: u32,
    column: u32,
    merge: bool,
}

impl Builder {
    pub fn new(limits: Limits) -> Builder {
        Builder { limits, nodes: 0, open: Vec::new(), anchors: HashMap::new() }
    }

    /// Takes one event of a document; gives the root once it is whole.
    pub fn event(&mut self, event: Event<'_>, line: u32, column: u32) -> Result<Option<Node>, YamlError> {
        let before = self.nodes;
        let open = |anchor, kind| Open { line, column, anchor, before, kind };
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.count(1, line, column)?;
                let merge = style == ScalarStyle::Plain && text == "<<" && tag.as_deref().is_none_or(is_merge);
                let value = scalar(&text, style, tag.as_deref()).map_err(|why| YamlError::at(line, column, why))?;
                self.complete(Node { line, column, value }, anchor, 1, merge)
            }
            Event::Alias(id) => {
                let Some((node, size)) = self.anchors.get(&id) else {
                    return Err(YamlError::at(line, column, "this alias stands inside its own anchor"));
                };
                let (mut node, size) = (node.clone(), *size);
                (node.line, node.column) = (line, column);
                self.count(size, line, column)?;
                self.complete(node, 0, size, false)
            }
            Event::SequenceStart(anchor, _) => self.begin(open(anchor, Kind::List(Vec::new()))),
            Event::MappingStart(anchor, _) => self.begin(open(anchor, Kind::Map { fields: Fields::default(), key: None })),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(done) = self.open.pop() else { return Ok(None) };
                let value = match done.kind {
                    Kind::List(items) => Value::List(items),
                    Kind::Map { fields, .. } => Value::Map(fields.entries),
                };
                let size = self.nodes - done.before;
                self.complete(Node { line: done.line, column: done.column, value }, done.anchor, size, false)
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => Ok(None),
        }
    }

    fn begin(&mut self, open: Open) -> Result<Option<Node>, YamlError> {
        self.count(1, open.line, open.column)?;
        if self.open.len() >= self.limits.depth {
            let why = format!("nested deeper than {} levels", self.limits.depth);
            return Err(YamlError::at(open.line, open.column, why));
        }
        self.open.push(open);
        Ok(None)
    }

    fn count(&mut self, more: usize, line: u32, column: u32) -> Result<(), YamlError> {
        self.nodes += more;
        if self.nodes > self.limits.nodes {
            let why = format!("more than {} values in one document, repeated ones included: split it", self.limits.nodes);
            return Err(YamlError::at(line, column, why));
        }
        Ok(())
    }

    /// Puts a whole node where it belongs: an anchor's store, the open collection, or the root.
    fn complete(&mut self, node: Node, anchor: usize, size: usize, merge: bool) -> Result<Option<Node>, YamlError> {
        if anchor > 0 {
            self.count(size, node.line, node.column)?;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        let Some(open) = self.open.last_mut() else { return Ok(Some(node)) };
        match &mut open.kind {
            Kind::List(items) => items.push(node),
            Kind::Map { key: key @ None, .. } => *key = Some(as_key(node, merge)?),
            Kind::Map { fields, key } => match key.take() {
                Some(key) if key.merge => fields.merge(node)?,
                Some(Key { text, line, column, .. }) => fields.insert(Entry { key: text, line, column, node })?,
                None => {}
            },
        }
        Ok(None)
    }
}

/// A mapping under construction: finds a key that stands twice without comparing all with all.
#[derive(Default)]
pub struct Fields {
    pub entries: Vec<Entry>,
    /// Whether an entry stands here itself; a merged one may be written over.
    explicit: Vec<bool>,
    /// Filled once a mapping is no longer small.
    index: HashMap<String, usize>,
}

const SMALL: usize = 24;

impl Fields {
    pub fn insert(&mut self, entry: Entry) -> Result<(), YamlError> {
        match self.find(&entry.key) {
            Some(at) if self.explicit.get(at) == Some(&true) => {
                let why = format!("key \"{}\" stands here a second time: remove one", shown(&entry.key));
                return Err(YamlError::at(entry.line, entry.column, why));
            }
            Some(at) => self.replace(at, entry, true),
            None => self.push(entry, true),
        }
        Ok(())
    }

    /// `<<: *a`, `<<: {…}` or a list of those, of which an earlier one wins; as in Go, a merge
    /// writes over what stands above it.
    fn merge(&mut self, node: Node) -> Result<(), YamlError> {
        let wrong = |n: &Node| YamlError::at(n.line, n.column, "a merge (<<) needs a mapping or a list of mappings");
        match node.value {
            Value::Map(entries) => {
                for entry in entries {
                    match self.find(&entry.key) {
                        Some(at) => self.replace(at, entry, false),
                        None => self.push(entry, false),
                    }
                }
                Ok(())
            }
            Value::List(items) => {
                for item in items.into_iter().rev() {
                    match &item.value {
                        Value::Map(_) => self.merge(item)?,
                        _ => return Err(wrong(&item)),
                    }
                }
                Ok(())
            }
            _ => Err(wrong(&node)),
        }
    }

    fn find(&self, key: &str) -> Option<usize> {
        if self.entries.len() <= SMALL { self.entries.iter().position(|e| e.key == key) } else { self.index.get(key).copied() }
    }

    fn replace(&mut self, at: usize, entry: Entry, explicit: bool) {
        if let (Some(old), Some(flag)) = (self.entries.get_mut(at), self.explicit.get_mut(at)) {
            *old = entry;
            *flag |= explicit;
        }
    }

    fn push(&mut self, entry: Entry, explicit: bool) {
        if self.entries.len() == SMALL {
            self.index = self.entries.iter().enumerate().map(|(at, e)| (e.key.clone(), at)).collect();
        }
        if self.entries.len() >= SMALL {
            self.index.insert(entry.key.clone(), self.entries.len());
        }
        self.entries.push(entry);
        self.explicit.push(explicit);
    }
}

/// At most 64 characters, so that an error stays a line.
pub fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

fn as_key(node: Node, merge: bool) -> Result<Key, YamlError> {
    let text = match node.value {
        Value::Text(text) => text,
        Value::Bool(b) => b.to_string(),
        Value::Int(i) => i.to_string(),
        Value::Uint(u) => u.to_string(),
        Value::Float(f) if f.is_nan() => ".nan".to_owned(),
        Value::Float(f) if f.is_infinite() => if f > 0.0 { ".inf" } else { "-.inf" }.to_owned(),
        Value::Float(f) => f.to_string(),
        Value::Null | Value::List(_) | Value::Map(_) => {
            return Err(YamlError::at(node.line, node.column, "a key must be a text, a number or a truth value"));
        }
    };
    Ok(Key { text, line: node.line, column: node.column, merge })
}

fn is_merge(tag: &Tag) -> bool {
    tag.is_yaml_core_schema() && tag.suffix == "merge"
}

/// A scalar's value by its style and tag.
fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Value, String> {
    let Some(tag) = tag else {
        return match style {
            ScalarStyle::Plain => Ok(resolve::plain(text)),
            _ => Ok(Value::Text(text.to_owned())),
        };
    };
    if !tag.is_yaml_core_schema() {
        return Ok(Value::Text(text.to_owned()));
    }
    let value = resolve::plain(text);
    let fits = match tag.suffix.as_str() {
        "str" | "timestamp" => return Ok(Value::Text(text.to_owned())),
        "int" => matches!(value, Value::Int(_) | Value::Uint(_)),
        "float" => matches!(value, Value::Int(_) | Value::Uint(_) | Value::Float(_)),
        "bool" => matches!(value, Value::Bool(_)),
        "null" => value == Value::Null,
        "binary" => return Err("!!binary is not supported: use binaryData or a Secret's data".to_owned()),
        other => return Err(format!("a scalar cannot be !!{}", shown(other))),
    };
    if fits { Ok(value) } else { Err(format!("this is no !!{}", tag.suffix)) }
}
