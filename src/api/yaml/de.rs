//! A tree to a typed object, as Go's encoding/json would fill it: null leaves a field at its zero
//! value, a number is no string. A field that the type lacks is collected with its path and place.
//!
//! Recursion follows the target type and is bounded by the tree's depth.
#![deny(clippy::disallowed_methods)]

use std::cell::RefCell;
use std::fmt::{self, Write as _};

use serde::de::value::StrDeserializer;
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer, Unexpected, Visitor};

use super::YamlError;
use super::node::{Entry, Node, Value};

/// A field of the document that the target type does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// `spec.containers[0].livenessProbe`
    pub field: String,
    pub line: u32,
    pub column: u32,
}

impl Node {
    /// Reads the tree as a `T`, together with the fields that `T` does not know.
    pub fn read<'de, T: Deserialize<'de>>(&self) -> Result<(T, Vec<Unknown>), YamlError> {
        let unknown = RefCell::new(Vec::new());
        let value = T::deserialize(Reader { node: self, path: None, unknown: &unknown }).map_err(|fault| *fault.0)?;
        Ok((value, unknown.into_inner()))
    }
}

#[derive(Clone, Copy)]
struct Reader<'a> {
    node: &'a Node,
    path: Option<&'a Path<'a>>,
    unknown: &'a RefCell<Vec<Unknown>>,
}

struct Path<'a> {
    above: Option<&'a Path<'a>>,
    step: Step<'a>,
}

enum Step<'a> {
    Key(&'a str),
    Index(usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(above) = self.above {
            above.fmt(f)?;
        }
        match self.step {
            Step::Index(index) => write!(f, "[{index}]"),
            Step::Key(key) if key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') => {
                if self.above.is_some() {
                    f.write_char('.')?;
                }
                f.write_str(key)
            }
            Step::Key(key) => write!(f, "[{key}]"),
        }
    }
}

/// The error while it travels up: it learns its place from the innermost reader that sees it.
#[derive(Debug)]
struct Fault(Box<YamlError>);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Fault {}

/// Messages never hold a text value: it may be a secret.
impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Fault {
        Fault(Box::new(YamlError::at(0, 0, message.to_string())))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Fault {
        let cure = match found {
            Unexpected::Bool(_) | Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_)
                if expected.to_string().contains("string") =>
            {
                ": put it in quotes"
            }
            _ => "",
        };
        Fault::custom(format!("expected {expected}, found {}{cure}", kind(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Fault {
        match found {
            Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_) => {
                Fault::custom(format!("{found} does not fit {expected}"))
            }
            _ => Fault::custom(format!("{} does not fit {expected}", kind(found))),
        }
    }

    /// Enums stand only where no secret does; the words are the API server's.
    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Fault {
        let list: Vec<String> = expected.iter().map(|e| format!("\"{e}\"")).collect();
        Fault::custom(format!("Unsupported value: \"{}\": supported values: {}", super::build::shown(variant), list.join(", ")))
    }
}

fn kind(found: Unexpected<'_>) -> &'static str {
    match found {
        Unexpected::Bool(_) => "a truth value",
        Unexpected::Signed(_) | Unexpected::Unsigned(_) => "a whole number",
        Unexpected::Float(_) => "a number",
        Unexpected::Char(_) | Unexpected::Str(_) | Unexpected::Bytes(_) => "a text",
        Unexpected::Unit | Unexpected::Option => "nothing (null)",
        Unexpected::Seq => "a list",
        Unexpected::Map | Unexpected::StructVariant => "a mapping",
        _ => "something else",
    }
}

impl<'a> Reader<'a> {
    fn placed<T>(self, result: Result<T, Fault>) -> Result<T, Fault> {
        result.map_err(|mut fault| {
            if fault.0.line == 0 {
                fault.0.line = self.node.line;
                fault.0.column = self.node.column;
                fault.0.field = self.path.map(Path::to_string).unwrap_or_default();
            }
            fault
        })
    }

    fn wrong<'de, V: Visitor<'de>>(self, visitor: &V) -> Fault {
        let found = match &self.node.value {
            Value::Null => Unexpected::Unit,
            Value::Bool(b) => Unexpected::Bool(*b),
            Value::Int(i) => Unexpected::Signed(*i),
            Value::Uint(u) => Unexpected::Unsigned(*u),
            Value::Float(f) => Unexpected::Float(*f),
            Value::Text(_) => Unexpected::Str(""),
            Value::List(_) => Unexpected::Seq,
            Value::Map(_) => Unexpected::Map,
        };
        de::Error::invalid_type(found, visitor)
    }

    fn number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let result = match self.node.value {
            Value::Null => visitor.visit_i64(0),
            Value::Int(i) => visitor.visit_i64(i),
            Value::Uint(u) => visitor.visit_u64(u),
            Value::Float(f) => visitor.visit_f64(f),
            _ => Err(self.wrong(&visitor)),
        };
        self.placed(result)
    }

    fn map<'de, V: Visitor<'de>>(self, fields: Option<&'static [&'static str]>, visitor: V) -> Result<V::Value, Fault> {
        let entries: &[Entry] = match &self.node.value {
            Value::Null => &[],
            Value::Map(entries) => entries,
            _ => return self.placed(Err(self.wrong(&visitor))),
        };
        self.placed(visitor.visit_map(Fields { reader: self, rest: entries.iter(), fields, value: None }))
    }

    fn list<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let items: &[Node] = match &self.node.value {
            Value::Null => &[],
            Value::List(items) => items,
            _ => return self.placed(Err(self.wrong(&visitor))),
        };
        self.placed(visitor.visit_seq(Items { reader: self, items, next: 0 }))
    }
}

macro_rules! numbers {
    ($($method:ident)*) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            self.number(visitor)
        })*
    };
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null => self.placed(visitor.visit_unit()),
            Value::Bool(b) => self.placed(visitor.visit_bool(*b)),
            Value::Int(_) | Value::Uint(_) | Value::Float(_) => self.number(visitor),
            Value::Text(text) => self.placed(visitor.visit_str(text)),
            Value::List(_) => self.list(visitor),
            Value::Map(_) => self.map(None, visitor),
        }
    }

    numbers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.placed(match self.node.value {
            Value::Null => visitor.visit_bool(false),
            Value::Bool(b) => visitor.visit_bool(b),
            _ => Err(self.wrong(&visitor)),
        })
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.placed(match &self.node.value {
            Value::Null => visitor.visit_str(""),
            Value::Text(text) => visitor.visit_str(text),
            _ => Err(self.wrong(&visitor)),
        })
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if self.node.is_null() { self.placed(visitor.visit_none()) } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.list(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.map(None, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.map(Some(fields), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.placed(match &self.node.value {
            Value::Text(text) => {
                let text: StrDeserializer<'_, Fault> = text.as_str().into_deserializer();
                visitor.visit_enum(text)
            }
            _ => Err(self.wrong(&visitor)),
        })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

struct Fields<'a> {
    reader: Reader<'a>,
    rest: std::slice::Iter<'a, Entry>,
    /// Names of a struct; None for a map.
    fields: Option<&'static [&'static str]>,
    value: Option<&'a Entry>,
}

impl<'de> de::MapAccess<'de> for Fields<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        for entry in self.rest.by_ref() {
            if let Some(fields) = self.fields {
                if !fields.contains(&entry.key.as_str()) {
                    let path = Path { above: self.reader.path, step: Step::Key(&entry.key) };
                    let unknown = Unknown { field: path.to_string(), line: entry.line, column: entry.column };
                    self.reader.unknown.borrow_mut().push(unknown);
                    continue;
                }
                // As in Go: null says nothing about a field.
                if entry.node.is_null() {
                    continue;
                }
            }
            self.value = Some(entry);
            let key: StrDeserializer<'_, Fault> = entry.key.as_str().into_deserializer();
            return seed.deserialize(key).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Fault> {
        let Some(entry) = self.value.take() else {
            return Err(de::Error::custom("a value was asked for before its key"));
        };
        let path = Path { above: self.reader.path, step: Step::Key(&entry.key) };
        let reader = Reader { node: &entry.node, path: Some(&path), unknown: self.reader.unknown };
        reader.placed(seed.deserialize(reader))
    }
}

struct Items<'a> {
    reader: Reader<'a>,
    items: &'a [Node],
    next: usize,
}

impl<'de> de::SeqAccess<'de> for Items<'_> {
    type Error = Fault;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Fault> {
        let Some(node) = self.items.get(self.next) else { return Ok(None) };
        let path = Path { above: self.reader.path, step: Step::Index(self.next) };
        self.next += 1;
        let reader = Reader { node, path: Some(&path), unknown: self.reader.unknown };
        reader.placed(seed.deserialize(reader)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len().saturating_sub(self.next))
    }
}
