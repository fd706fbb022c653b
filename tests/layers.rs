//! The module map, held by a machine: every `crate::` path in `src/` must be an edge that the
//! table in `src/lib.rs` lists, `unsafe` stays in `sys`, libcontainer in `runtime/monitor`, and
//! files that decide carry the lint that keeps clocks, files and processes out of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// room → rooms it may use. A room may always use itself.
const EDGES: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("cli", &["api", "config", "dns", "images", "kubelet", "net", "obs", "proxy", "runtime", "store", "sys", "volumes"]),
    ("config", &["api"]),
    ("kubelet", &["api", "config", "dns", "images", "net", "obs", "proxy", "runtime", "store", "sys", "volumes"]),
    ("runtime", &["store", "sys"]),
    ("net", &["api", "store", "sys"]),
    ("proxy", &["api", "store", "sys"]),
    ("dns", &["api", "proxy", "sys"]),
    ("images", &["store", "sys"]),
    ("volumes", &["api", "store", "sys"]),
    ("store", &["sys"]),
    ("api", &[]),
    ("obs", &["api", "sys"]),
    ("sys", &[]),
];

/// Files (or folders) whose every decision must follow from their arguments.
const PURE: &[&str] = &[
    "api/",
    "kubelet/plan/",
    "kubelet/status/render.rs",
    "kubelet/translate.rs",
    "kubelet/qos.rs",
    "kubelet/env.rs",
    "kubelet/services/env.rs",
    "kubelet/validate.rs",
    "kubelet/defaults.rs",
    "runtime/spec.rs",
    "runtime/seccomp.rs",
    "net/plan.rs",
    "net/ipam.rs",
    "net/texts.rs",
    "proxy/mode.rs",
    "proxy/model.rs",
    "proxy/serve/metrics.rs",
    "proxy/serve/pages.rs",
    "proxy/serve/ports.rs",
    "proxy/serve/record.rs",
    "proxy/service/",
    "proxy/alone/",
    "proxy/layout/",
    "proxy/policy/",
    "proxy/table/",
    "dns/answer.rs",
    "dns/cache.rs",
    "dns/forward.rs",
    "dns/model.rs",
    "dns/upstreams.rs",
    "dns/wire/",
    "dns/zone/",
    "images/reference.rs",
    "images/manifest.rs",
];

fn sources() -> Vec<(String, String)> {
    fn walk(dir: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, into);
            } else if path.extension().is_some_and(|e| e == "rs") {
                into.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    files.sort();
    files
        .into_iter()
        .map(|path| (path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap()))
        .collect()
}

/// `kubelet/plan/pod.rs` → `kubelet`, `config.rs` → `config`.
fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

/// The rooms that `crate::…` and `coracle::…` paths of a line name, `crate::{a, b}` included.
fn named(line: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for prefix in ["crate::", "coracle::"] {
        for (at, _) in line.match_indices(prefix) {
            let before = line[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '"' || c == '/') {
                continue;
            }
            let rest = &line[at + prefix.len()..];
            let word =
                |text: &str| text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
            if let Some(group) = rest.strip_prefix('{') {
                let mut depth = 0;
                let mut start = 0;
                for (i, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => {
                            rooms.push(word(&group[start..i]));
                            break;
                        }
                        '}' => depth -= 1,
                        ',' if depth == 0 => {
                            rooms.push(word(&group[start..i]));
                            start = i + 1;
                        }
                        _ => {}
                    }
                }
            } else {
                rooms.push(word(rest));
            }
        }
    }
    rooms.retain(|r| !r.is_empty());
    rooms
}

fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(n, l)| (n + 1, l)).filter(|(_, l)| !l.trim_start().starts_with("//"))
}

#[test]
fn every_path_is_an_edge_of_the_map() {
    let edges: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        if file == "lib.rs" {
            continue;
        }
        let from = room(&file).to_owned();
        let Some(allowed) = edges.get(from.as_str()) else {
            wrong.push(format!("src/{file}: the room \"{from}\" is not in the map"));
            continue;
        };
        for (line, code) in code_lines(&text) {
            for to in named(code) {
                if to != from && edges.contains_key(to.as_str()) && !allowed.contains(&to.as_str()) {
                    wrong.push(format!("src/{file}:{line}: {from} may not use {to}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "edges that the map does not list:\n{}", wrong.join("\n"));
}

/// Names are served of the same plain types as packets; what the proxy does with them is its own.
#[test]
fn of_the_proxy_dns_sees_the_model() {
    for (file, text) in sources() {
        if file.starts_with("dns/") {
            for (line, code) in code_lines(&text) {
                let code = code.replace("crate::proxy::model", "");
                assert!(!code.contains("crate::proxy"), "src/{file}:{line}: dns may use proxy::model only");
            }
        }
    }
}

#[test]
fn unsafe_stays_in_sys() {
    for (file, text) in sources() {
        if file.starts_with("sys/") {
            continue;
        }
        for (line, code) in code_lines(&text) {
            let bare = code.split("//").next().unwrap();
            assert!(
                !bare.contains("unsafe {") && !bare.contains("unsafe fn") && !bare.contains("allow(unsafe_code)"),
                "src/{file}:{line}: unsafe outside src/sys"
            );
        }
    }
}

#[test]
fn libcontainer_stays_in_the_monitor() {
    for (file, text) in sources() {
        if file.starts_with("runtime/monitor") {
            continue;
        }
        for (line, code) in code_lines(&text) {
            assert!(
                !code.contains("libcontainer::") && !code.contains("libcgroups::"),
                "src/{file}:{line}: libcontainer may only run in a monitor's helper"
            );
        }
    }
}

#[test]
fn files_that_decide_say_so_to_clippy() {
    for (file, text) in sources() {
        if PURE.iter().any(|p| file.starts_with(p))
            && !file.ends_with("/mod.rs")
            && !file.contains("/tests/")
            && text.lines().count() > 3
        {
            assert!(
                text.contains("#![deny(clippy::disallowed_methods)]"),
                "src/{file} decides: give it #![deny(clippy::disallowed_methods)] below its header"
            );
        }
    }
}

#[test]
fn every_file_opens_with_its_job() {
    for (file, text) in sources() {
        assert!(text.starts_with("//!"), "src/{file}: open with a //! header: its job, its invariant, its source");
    }
}

#[test]
fn the_reader_of_paths_sees_groups_and_ignores_names_inside_words() {
    assert_eq!(named("use crate::{api::pod, store::{a, b}, sys};"), ["api", "store", "sys"]);
    assert_eq!(named("let x = crate::net::Net::open(crate::sys::clock::boot_id());"), ["net", "sys"]);
    assert_eq!(named("\"coracle://id\" mycrate::x"), Vec::<String>::new());
}
