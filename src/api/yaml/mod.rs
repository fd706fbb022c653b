//! YAML (and JSON) as Kubernetes reads it: what Go's sigs.k8s.io/yaml makes of a text, with line
//! and column in every error.
//!
//! A text becomes one small tree of [`Node`]s a document (events of saphyr-parser, scalars by the
//! YAML 1.1 rules in `resolve`), and a tree becomes a typed object ([`Node::read`]) or canonical
//! JSON ([`Node::to_json`]). Stricter than Go: a key that stands twice is an error. Invariant: no
//! input panics, recurses without bound or grows by more than [`Limits`] allow. An error never
//! quotes the text of a value, since it may be a secret.

mod build;
mod de;
mod json;
mod node;
mod resolve;

use saphyr_parser::{Event, Parser, StrInput};

pub use de::Unknown;
pub use node::{Entry, Node, Value};

/// Where and why a text is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}:{column}: {}{message}", if .field.is_empty() { String::new() } else { format!("{}: ", .field) })]
pub struct YamlError {
    /// From 1; 0 where no place is known.
    pub line: u32,
    pub column: u32,
    /// `spec.containers[0].name`, or empty.
    pub field: String,
    pub message: String,
}

impl YamlError {
    pub(crate) fn at(line: u32, column: u32, message: impl Into<String>) -> YamlError {
        YamlError { line, column, field: String::new(), message: message.into() }
    }
}

/// How much one document may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Scalars and collections, those that aliases repeat included.
    pub nodes: usize,
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { nodes: 200_000, depth: 64 }
    }
}

/// The documents of a text, one after the other; nothing follows an error.
pub struct Documents<'a> {
    inner: Inner<'a>,
    limits: Limits,
}

enum Inner<'a> {
    Failed(YamlError),
    Json(json::Scanner<'a>),
    Yaml(Box<Parser<'a, StrInput<'a>>>),
    Done,
}

/// Reads `text` as JSON where it begins like JSON and is JSON to its end, else as YAML.
pub fn documents(text: &[u8], limits: Limits) -> Documents<'_> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let text = match std::str::from_utf8(text) {
        Ok(text) => text,
        Err(error) => {
            let good = text.get(..error.valid_up_to()).unwrap_or_default();
            let line = 1 + good.iter().filter(|b| **b == b'\n').count() as u32;
            let column = 1 + good.iter().rev().take_while(|b| **b != b'\n').count() as u32;
            let fault = YamlError::at(line, column, "not UTF-8: save the file as UTF-8 text");
            return Documents { inner: Inner::Failed(fault), limits };
        }
    };
    let inner = if text.trim_start().starts_with(['{', '[']) && json::Scanner::new(text, limits).all(|d| d.is_ok()) {
        Inner::Json(json::Scanner::new(text, limits))
    } else {
        Inner::Yaml(Box::new(Parser::new_from_str(text)))
    };
    Documents { inner, limits }
}

impl Iterator for Documents<'_> {
    type Item = Result<Node, YamlError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.inner {
            Inner::Json(scanner) => scanner.next(),
            Inner::Yaml(parser) => {
                let next = next_yaml(parser, self.limits).transpose();
                if !matches!(next, Some(Ok(_))) {
                    self.inner = Inner::Done;
                }
                next
            }
            Inner::Done => None,
            Inner::Failed(_) => match std::mem::replace(&mut self.inner, Inner::Done) {
                Inner::Failed(fault) => Some(Err(fault)),
                _ => None,
            },
        }
    }
}

/// One document's tree; None at the end of the stream.
fn next_yaml(parser: &mut Parser<'_, StrInput<'_>>, limits: Limits) -> Result<Option<Node>, YamlError> {
    let mut builder = build::Builder::new(limits);
    let mut root = None;
    while let Some(step) = parser.next_event() {
        let (event, span) = step.map_err(|e| {
            let mark = e.marker();
            YamlError::at(mark.line() as u32, mark.col() as u32 + 1, format!("{}: this is no YAML", e.info()))
        })?;
        match event {
            Event::DocumentEnd => return Ok(root),
            Event::StreamEnd => return Ok(None),
            Event::Nothing | Event::StreamStart | Event::DocumentStart(_) => {}
            event => {
                let start = span.start;
                root = builder.event(event, start.line() as u32, start.col() as u32 + 1)?.or(root);
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
