//! `coracle check`: what this host withholds, what follows from it, and the line that mends it.
//!
//! Invariant: what can be tried is tried for real (in namespaces and directories that are gone
//! afterwards), not guessed from version numbers or config files; nothing on the host is changed.
//! `probe` sees, `judge` decides.

mod facts;
mod judge;
mod probe;

use serde::Serialize;

use super::args::{Body, Given, INSTANCE, NO_OPERANDS, OUTPUT, Output, ROOT, Verb};
use super::exit::{CliError, Exit};
use super::{print, table};

pub const VERB: Verb = Verb {
    name: "check",
    operands: NO_OPERANDS,
    command: false,
    summary: "tell what this kernel and host lack, and the line that mends it",
    about: "Tries what pods need: cgroup controllers, overlay, bridge, veth, nftables with masquerade and fib, IPv6, seccomp, \
            the system calls that we rely on, capabilities, inotify limits, disks. `missing` means that ordinary pods cannot run, \
            `degraded` that something works less well, `note` is good to know. Needs no agent. The exit code is 1 if anything is \
            missing, else 0. Run it as root: otherwise most things cannot be tried.",
    flags: &[&OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle check", "coracle check -o json"],
    body: Body::Parsed(run),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    Note,
    Degraded,
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub state: State,
    /// What was seen.
    pub detail: String,
    /// What does not work because of it; empty where all is well.
    pub effect: String,
    /// What mends it; empty where nothing is to be done.
    pub cure: String,
}

impl Finding {
    fn ok(name: &'static str, detail: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, detail: detail.into(), effect: String::new(), cure: String::new() }
    }

    fn not(state: State, name: &'static str, detail: impl Into<String>, effect: &str, cure: &str) -> Finding {
        Finding { name, state, detail: detail.into(), effect: effect.to_owned(), cure: cure.to_owned() }
    }
}

fn run(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let roots = given.roots()?;
    let findings = judge::findings(&probe::facts(&roots));
    let worst = findings.iter().map(|f| f.state).max().unwrap_or(State::Ok);
    match output {
        Output::Json => {
            let value = serde_json::json!({ "ok": worst < State::Missing, "findings": findings });
            print(&format!("{value:#}\n"))?;
        }
        Output::Table | Output::Wide => print(&text(&findings))?,
    }
    Ok(if worst == State::Missing { Exit::Failed } else { Exit::Ok })
}

fn text(findings: &[Finding]) -> String {
    let word = |state: State| match state {
        State::Ok => "ok",
        State::Note => "note",
        State::Degraded => "degraded",
        State::Missing => "missing",
    };
    let rows: Vec<Vec<String>> =
        findings.iter().map(|f| vec![f.name.to_owned(), word(f.state).to_owned(), f.detail.clone()]).collect();
    let mut out = table::render(&["WHAT", "STATE", "SEEN"], &rows);
    for finding in findings.iter().filter(|f| f.state > State::Ok && !(f.effect.is_empty() && f.cure.is_empty())) {
        out.push_str(&format!("\n{} ({}): {}\n", finding.name, word(finding.state), finding.effect));
        if !finding.cure.is_empty() {
            out.push_str(&format!("    {}\n", finding.cure));
        }
    }
    let count = |state| findings.iter().filter(|f| f.state == state).count();
    match (count(State::Missing), count(State::Degraded)) {
        (0, 0) => out.push_str("\nthis host has all that pods need\n"),
        (missing, degraded) => out.push_str(&format!("\n{missing} missing, {degraded} degraded\n")),
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn troubles_stand_below_the_table_with_their_cure() {
        let findings = [
            Finding::ok("kernel", "6.1.0"),
            Finding::not(
                State::Missing,
                "memory",
                "no memory controller",
                "memory limits do not work",
                "add cgroup_enable=memory",
            ),
        ];
        assert_eq!(
            text(&findings),
            "WHAT    STATE    SEEN\n\
             kernel  ok       6.1.0\n\
             memory  missing  no memory controller\n\
             \n\
             memory (missing): memory limits do not work\n    add cgroup_enable=memory\n\
             \n\
             1 missing, 0 degraded\n"
        );
    }
}
