//! The truth table was made by Go's sigs.k8s.io/yaml 1.6.0 (YAMLToJSON, YAMLToJSONStrict).
#![deny(clippy::disallowed_methods)]

use super::*;
use proptest::prelude::*;

fn read(text: &str) -> Result<Node, YamlError> {
    match documents(text.as_bytes(), Limits::default()).next() {
        None => Ok(Node { line: 1, column: 1, value: Value::Null }),
        Some(result) => result,
    }
}

/// Numbers compare by value: `-0` is 0 and `1e+21` is 1e21.
fn same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    use serde_json::Value as J;
    match (a, b) {
        (J::Number(a), J::Number(b)) => {
            let (x, y) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            a == b || (x - y).abs() <= x.abs() * 1e-15
        }
        (J::Array(a), J::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (J::Object(a), J::Object(b)) => a.len() == b.len() && a.iter().all(|(k, v)| b.get(k).is_some_and(|w| same(v, w))),
        _ => a == b,
    }
}

#[test]
fn values_are_those_of_go() {
    // Where we are stricter, or more lenient, than Go; each with its reason.
    let stricter = [
        "a: \"\\'\"\n",           // saphyr-parser knows no \' escape
        "a: !!binary aGVsbG8=\n", // never seen in a manifest
        "1: a\n\"1\": b\n",       // one key of an object twice
    ];
    let more_lenient = [
        "{\"a\":\"\\/\"}",                   // JSON, and read as JSON
        "{\"a\":\"\\u0041\\ud83d\\ude00\"}", // the same
        "%YAML 1.2\n---\na: 0o7\n",
    ];
    let mut wrong = Vec::new();
    for line in include_str!("../../../tests/golden/yaml-go.txt").lines() {
        let mut parts = line.splitn(3, '\t');
        let text: String = serde_json::from_str(parts.next().unwrap()).unwrap();
        let (go, strict) = (parts.next().unwrap(), parts.next());
        let ours = read(&text).and_then(|node| node.to_json());
        let fine = match (&ours, go) {
            (Err(_), "error") => true,
            (Ok(_), "error") => more_lenient.contains(&text.as_str()),
            // A duplicate key, or a merge that Go's strict mode takes for one.
            (Err(_), _) => strict.is_some() || stricter.contains(&text.as_str()),
            (Ok(json), go) => same(&serde_json::from_slice(json).unwrap(), &serde_json::from_str(go).unwrap()),
        };
        if !fine {
            wrong.push(format!("{text:?}: go {go}, we {:?}", ours.map(|j| String::from_utf8(j).unwrap())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn errors_name_line_column_and_field_and_quote_no_value() {
    let pod = |text: &str| read(text).and_then(|node| node.read::<crate::api::pod::Pod>().map(|(pod, _)| pod));
    for (text, wanted) in [
        (
            "spec:\n  containers:\n  - name: a\n    env:\n    - {name: X, value: 8080}\n",
            "line 5:24: spec.containers[0].env[0].value: expected a string, found a whole number: put it in quotes",
        ),
        (
            "spec:\n  restartPolicy: Sometimes\n",
            "line 2:18: spec.restartPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        ("spec:\n  containers: sesame\n", "line 2:15: spec.containers: expected a sequence, found a text"),
        (
            "spec: {containers: [{ports: [{containerPort: 70000}]}]}\n",
            "line 1:46: spec.containers[0].ports[0].containerPort: integer `70000` does not fit u16",
        ),
        (
            "metadata:\n  labels:\n    a.b/c: 1\n",
            "line 3:12: metadata.labels[a.b/c]: expected a string, found a whole number: put it in quotes",
        ),
        ("a: 1\nb: 2\na: 3\n", "line 3:1: key \"a\" stands here a second time: remove one"),
        (
            "spec: {containers: [{resources: {limits: {cpu: lots}}}]}\n",
            "line 1:48: spec.containers[0].resources.limits.cpu: \"lots\" is no quantity: write a number with an optional suffix, such as 500m, 64Mi, 2 or 1e3",
        ),
    ] {
        assert_eq!(pod(text).unwrap_err().to_string(), wanted);
    }
    assert_eq!(documents(b"a: 1\nb: \xff\n", Limits::default()).next().unwrap().unwrap_err().line, 2);
}

#[test]
fn null_leaves_a_field_at_its_zero_value_and_unknown_fields_are_collected() {
    let text = "metadata:\n  labels:\nspec:\n  restartPolicy: null\n  hostNetwork: ~\n  shape: round\n  containers:\n  - name: a\n    ports: [{containerPort: 1, protocol: }]\n    livenessProbe: {exec: {}}\n";
    let (pod, unknown) = read(text).unwrap().read::<crate::api::pod::Pod>().unwrap();
    assert_eq!((pod.spec.restart_policy, pod.spec.host_network), (None, false));
    let unknown: Vec<_> = unknown.iter().map(|u| (u.field.as_str(), u.line)).collect();
    assert_eq!(unknown, [("spec.shape", 6), ("spec.containers[0].livenessProbe", 10)]);
}

#[test]
fn bombs_stop_at_the_budget() {
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..30 {
        let list = vec![format!("*a{}", i - 1); 10].join(", ");
        bomb.push_str(&format!("a{i}: &a{i} [{list}]\n"));
    }
    assert!(read(&bomb).unwrap_err().message.contains("values in one document"));
    for deep in ["[".repeat(100_000), "{a: ".repeat(10_000), "- ".repeat(10_000), "{\"a\":".repeat(10_000)] {
        assert!(read(&deep).is_err());
    }
    let wide: String = (0..50_000).map(|i| format!("k{i}: v\n")).collect();
    assert!(matches!(read(&wide).unwrap().value, Value::Map(entries) if entries.len() == 50_000));
}

/// The longest file that the source reads, in forms that scanners have been slow on.
#[test]
fn hostile_texts_end_soon() {
    const SIZE: usize = 2 << 20;
    for pattern in [
        "[", "{", "- ", "? ", ": ", "a: ", "a: [", "\"", "'", "|\n ", "&a ", "*a ", "!t ", "#", "\t", "---\n", "%T x\n", "a\n",
        "[a,", "{a: b,", "a b ", "\\", "<<: ", ",", "]", "\u{feff}",
    ] {
        let text = pattern.repeat(SIZE / pattern.len());
        #[allow(clippy::disallowed_methods, reason = "the test, not the reader, measures")]
        let began = std::time::Instant::now();
        let count = documents(text.as_bytes(), Limits::default()).count();
        println!("{pattern:?}: {:?}", began.elapsed());
        assert!(began.elapsed().as_secs() < 20, "{pattern:?} took {:?} for {count} documents", began.elapsed());
    }
}

#[test]
fn documents_follow_each_other_and_fields_are_found_again() {
    let text = b"a: 1\n---\n# nothing\n---\nspec:\n  list:\n  - x: 1\n  - y: 2\n";
    let all: Vec<Node> = documents(text, Limits::default()).collect::<Result<_, _>>().unwrap();
    assert_eq!(all.len(), 3);
    assert!(all[1].is_null());
    assert_eq!(all[2].locate("spec.list[1].y"), (8, 5));
    assert_eq!(all[2].locate("spec.list[1].z"), (8, 5));
    assert_eq!(all[2].locate("spec.other.z"), (5, 1));
    let json: Vec<Node> = documents(b"{\"a\": 1}\n{\"b\": [2]}\n", Limits::default()).collect::<Result<_, _>>().unwrap();
    assert_eq!(json.iter().map(|n| n.to_json().unwrap()).collect::<Vec<_>>(), [b"{\"a\":1}".to_vec(), b"{\"b\":[2]}".to_vec()]);
}

fn any_value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
        "(0[xob]?)?[0-9_.eE+-]{1,6}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
            proptest::collection::btree_map(any::<String>(), inner, 0..5)
                .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
        ]
    })
}

/// Block YAML with every text in single quotes or, where it must be, in double ones.
fn as_yaml(value: &serde_json::Value, indent: usize, out: &mut String) {
    use serde_json::Value as J;
    let quoted = |text: &str| {
        if text.chars().all(|c| matches!(c, ' '..='~')) && !text.is_empty() {
            format!("'{}'", text.replace('\'', "''"))
        } else {
            let body: String = text.chars().map(|c| format!("\\U{:08x}", c as u32)).collect();
            format!("\"{body}\"")
        }
    };
    let pad = " ".repeat(indent);
    match value {
        J::Array(items) if !items.is_empty() => {
            for item in items {
                out.push_str(&format!("\n{pad}-"));
                as_yaml(item, indent + 2, out);
            }
        }
        J::Object(map) if !map.is_empty() => {
            for (key, item) in map {
                out.push_str(&format!("\n{pad}? {}\n{pad}:", quoted(key)));
                as_yaml(item, indent + 2, out);
            }
        }
        J::String(text) => out.push_str(&format!(" {}", quoted(text))),
        other => out.push_str(&format!(" {other}")),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_panics(text in any::<String>(), bytes in any::<Vec<u8>>(), yamlish in "[-a:{}\\[\\],&*!|> \n'\"#?%~<0-9]{0,80}") {
        for input in [text.as_bytes(), &bytes, yamlish.as_bytes()] {
            for node in documents(input, Limits::default()).flatten() {
                if let Ok(json) = node.to_json() {
                    prop_assert!(serde_json::from_slice::<serde_json::Value>(&json).is_ok());
                }
                if let Err(error) = node.read::<crate::api::pod::Pod>() {
                    prop_assert!(error.line > 0);
                }
            }
        }
    }

    #[test]
    fn yaml_and_json_of_one_object_are_one(value in any_value()) {
        let mut yaml = String::from("---");
        as_yaml(&value, 0, &mut yaml);
        let json = format!("[{value}]");
        let ours = read(&json).unwrap();
        let Value::List(items) = &ours.value else { panic!("a list") };
        let from_yaml = read(&format!("{yaml}\n")).unwrap_or_else(|e| panic!("{e}\n{yaml}"));
        prop_assert_eq!(from_yaml.to_json().unwrap(), items[0].to_json().unwrap());
        // Canonical JSON reads back to the same value by an independent reader.
        prop_assert!(same(&serde_json::from_slice(&items[0].to_json().unwrap()).unwrap(), &value));
    }
}
