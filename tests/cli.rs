//! The command line as people and scripts meet it: help against parser, exit codes, logs without
//! an agent, the local socket under hostile clients, exec with pipes and with a terminal.

#[path = "cli/check.rs"]
mod check;
#[path = "cli/exec.rs"]
mod exec;
#[path = "cli/files.rs"]
mod files;
#[path = "cli/images.rs"]
mod images;
#[path = "cli/leave.rs"]
mod leave;
#[path = "cli/node.rs"]
mod node;
#[path = "cli/service.rs"]
mod service;
#[path = "cli/socket.rs"]
mod socket;
#[path = "support/registry.rs"]
#[allow(dead_code)]
mod support;

use std::ffi::OsString;
use std::process::{Command, Stdio};

use coracle::cli::args::{self, Asked, Body};
use coracle::cli::{VERBS, help};

fn coracle(args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_coracle")).args(args).stdin(Stdio::null()).output().unwrap()
}

fn words(line: &str) -> Vec<OsString> {
    // As a shell splits: blanks, and single quotes around what has blanks.
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().unwrap().push(c),
        }
    }
    words.into_iter().map(OsString::from).collect()
}

#[test]
fn every_flag_in_the_help_is_taken_and_every_example_parses() {
    for verb in VERBS {
        let Body::Parsed(_) = verb.body else { continue };
        let text = help::of(verb);
        assert!(text.contains(verb.about.split(' ').next().unwrap()), "{}", verb.name);
        let operands = vec!["x"; verb.operands.min];
        for flag in args::flags(verb) {
            assert!(text.contains(&format!("--{}", flag.long)), "help of {} lacks --{}", verb.name, flag.long);
            if flag.long == "help" {
                continue;
            }
            let mut forms = vec![format!("--{}", flag.long)];
            forms.extend(flag.short.map(|c| format!("-{c}")));
            for form in forms {
                let mut line: Vec<OsString> = words(verb.name);
                line.push(form.clone().into());
                line.extend(flag.value.map(|_| "1".into()));
                line.extend(operands.iter().map(Into::into));
                match args::parse(VERBS, &line) {
                    Ok(Asked::Run(got, given)) => {
                        assert_eq!(got.name, verb.name);
                        assert!(given.has(flag), "{line:?}");
                    }
                    _ => panic!("the parser refuses what the help shows: {line:?}"),
                }
            }
        }
        assert!(!verb.examples.is_empty() || verb.summary.is_empty(), "{} has no example", verb.name);
        for example in verb.examples {
            let line = words(example);
            assert_eq!(line[0], "coracle", "{example}");
            match args::parse(VERBS, &line[1..]) {
                Ok(Asked::Run(got, _)) => assert_eq!(got.name, verb.name, "{example}"),
                Ok(_) => panic!("the example of {} asks for something else: {example}", verb.name),
                Err(e) => panic!("the example of {} does not parse: {example}: {e}", verb.name),
            }
        }
    }
}

#[test]
fn flags_of_one_verb_never_share_a_letter_or_name() {
    for verb in VERBS {
        let flags: Vec<_> = args::flags(verb).collect();
        for (n, a) in flags.iter().enumerate() {
            for b in &flags[..n] {
                assert!(
                    a.long != b.long && (a.short.is_none() || a.short != b.short),
                    "{}: --{} and --{}",
                    verb.name,
                    a.long,
                    b.long
                );
            }
        }
    }
}

#[test]
fn exit_codes_and_where_what_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["help"], 0, ""),
        (&["--version"], 0, ""),
        (&["version", "-o", "json"], 0, ""),
        (&["help", "exec"], 0, ""),
        (&["exec", "--help"], 0, ""),
        (&["lgos"], 2, "did you mean `coracle logs`?"),
        (&["logs"], 2, "expected POD [CONTAINER]"),
        (&["pods", "--frob"], 2, "--frob"),
        (&["pods", "-o", "yaml"], 2, "expected table, wide or json"),
        (&["exec", "web"], 2, "coracle exec POD -- COMMAND"),
        (&["logs", "--tail", "x", "web", "--root", root], 2, "a number of lines"),
        (&["logs", "../../etc/passwd", "--root", root], 2, "is no pod"),
        (&["pods", "--root", root], 3, "run/agent.sock"),
        (&["info", "--root", root], 3, "start it with `coracle agent`"),
        (&["logs", "web", "--root", root], 4, "no pod default/web"),
        (&["exec", "web", "--root", root, "--", "true"], 125, "run/agent.sock"),
        (&["stop-all", "--root", root], 0, "0 pods have ended"),
        (&["uninstall", "--root", root], 0, ""),
    ];
    for (args, code, said) in cases {
        let output = coracle(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(*code), "{args:?}: {err}");
        assert!(err.contains(said), "{args:?}: {err}");
        assert!(err.lines().count() <= 1, "an error is one line: {err}");
        assert_eq!(
            output.stdout.is_empty(),
            *code != 0 || args[0] == "stop-all",
            "{args:?}: results go to stdout, talk to stderr"
        );
    }
    assert_eq!(std::fs::read_dir(root).unwrap().count(), 0, "a question makes nothing");
}

#[test]
fn a_closed_stdout_is_no_error_message() {
    let mut child =
        Command::new(env!("CARGO_BIN_EXE_coracle")).arg("help").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(matches!(output.status.code(), Some(141 | 0)), "{:?}", output.status);
    assert!(output.stderr.is_empty());
}

#[test]
fn check_answers_for_programs_and_its_exit_code_is_its_answer() {
    let output = coracle(&["check", "-o", "json"]);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = value["findings"].as_array().unwrap();
    let names: Vec<&str> = findings.iter().map(|f| f["name"].as_str().unwrap()).collect();
    for name in
        ["kernel", "cgroups", "overlay", "bridge", "veth", "nftables", "masquerade IPv4", "nft_fib IPv4", "IPv6", "seccomp"]
    {
        assert!(names.contains(&name), "{names:?}");
    }
    let missing = findings.iter().any(|f| f["state"] == "missing");
    assert_eq!(value["ok"], !missing);
    assert_eq!(output.status.code(), Some(i32::from(missing)));
    for finding in findings.iter().filter(|f| f["state"] == "missing" || f["state"] == "degraded") {
        assert_ne!(finding["effect"], "", "{finding}");
    }
    let table = coracle(&["check"]);
    assert!(String::from_utf8_lossy(&table.stdout).starts_with("WHAT"));
    assert_eq!(table.status.code(), output.status.code());
}
