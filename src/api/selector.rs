//! Label selectors (meta/v1 LabelSelector) and IntOrString.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::meta::null_default;

/// Empty: everything. An absent selector is another thing; its holder says what.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    #[serde(deserialize_with = "null_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Requirement {
    pub key: String,
    pub operator: Operator,
    #[serde(deserialize_with = "null_default", skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Operator {
    In,
    NotIn,
    #[default]
    Exists,
    DoesNotExist,
}

impl LabelSelector {
    /// NotIn and DoesNotExist hold for an object without the key (apimachinery's labels.Requirement).
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|r| {
                let value = labels.get(&r.key);
                match r.operator {
                    Operator::In => value.is_some_and(|v| r.values.contains(v)),
                    Operator::NotIn => value.is_none_or(|v| !r.values.contains(v)),
                    Operator::Exists => value.is_some(),
                    Operator::DoesNotExist => value.is_none(),
                }
            })
    }
}

/// A port by number or by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IntOrString {
    Int(i32),
    Text(String),
}

impl fmt::Display for IntOrString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IntOrString::Int(number) => number.fmt(f),
            IntOrString::Text(text) => text.fmt(f),
        }
    }
}

impl Serialize for IntOrString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            IntOrString::Int(number) => serializer.serialize_i32(*number),
            IntOrString::Text(text) => serializer.serialize_str(text),
        }
    }
}

impl<'de> Deserialize<'de> for IntOrString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<IntOrString, D::Error> {
        struct Either;
        impl de::Visitor<'_> for Either {
            type Value = IntOrString;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a name")
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<IntOrString, E> {
                let number = i32::try_from(number).map_err(|_| E::custom(format!("integer `{number}` does not fit i32")))?;
                Ok(IntOrString::Int(number))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<IntOrString, E> {
                let number = i32::try_from(number).map_err(|_| E::custom(format!("integer `{number}` does not fit i32")))?;
                Ok(IntOrString::Int(number))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<IntOrString, E> {
                Ok(IntOrString::Text(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &str) -> BTreeMap<String, String> {
        text.split_whitespace().filter_map(|l| l.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    #[test]
    fn all_parts_of_a_selector_must_hold() {
        let selector = |json: &str| serde_json::from_str::<LabelSelector>(json).unwrap();
        for (json, held, not) in [
            ("{}", "", None),
            (r#"{"matchLabels":null}"#, "a=1", None),
            (r#"{"matchLabels":{"a":"1","b":""}}"#, "a=1 b= c=3", Some("a=1")),
            (r#"{"matchExpressions":[{"key":"a","operator":"In","values":["1","2"]}]}"#, "a=2", Some("b=1")),
            (r#"{"matchExpressions":[{"key":"a","operator":"NotIn","values":["1","2"]}]}"#, "b=1", Some("a=1")),
            (r#"{"matchExpressions":[{"key":"a","operator":"Exists"}]}"#, "a=", Some("b=1")),
            (r#"{"matchExpressions":[{"key":"a","operator":"DoesNotExist"}]}"#, "b=1", Some("a=")),
            (r#"{"matchLabels":{"a":"1"},"matchExpressions":[{"key":"b","operator":"Exists"}]}"#, "a=1 b=2", Some("a=1")),
        ] {
            assert!(selector(json).matches(&labels(held)), "{json} {held}");
            if let Some(not) = not {
                assert!(!selector(json).matches(&labels(not)), "{json} {not}");
            }
        }
        assert!(serde_json::from_str::<LabelSelector>(r#"{"matchExpressions":[{"key":"a","operator":"Is"}]}"#).is_err());
    }

    #[test]
    fn ports_are_numbers_or_names() {
        let port = |json: &str| serde_json::from_str::<IntOrString>(json);
        assert_eq!(port("80").unwrap(), IntOrString::Int(80));
        assert_eq!(port("-1").unwrap(), IntOrString::Int(-1));
        assert_eq!(port("\"80\"").unwrap(), IntOrString::Text("80".to_owned()));
        assert!(port("99999999999").is_err() && port("true").is_err() && port("[]").is_err());
        assert_eq!(
            serde_json::to_string(&[IntOrString::Int(80), IntOrString::Text("http".to_owned())]).unwrap(),
            r#"[80,"http"]"#
        );
    }
}
