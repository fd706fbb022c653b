//! The command line: verbs and flags as data, one parser that reads the data, one help text made
//! from the same data.
//!
//! Invariant: what the parser takes is what the help shows, since neither knows anything else.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::str::FromStr;

use super::exit::{CliError, Exit};
use crate::config::Roots;

pub struct Flag {
    pub long: &'static str,
    pub short: Option<char>,
    /// Name of its value in the help; None: a switch.
    pub value: Option<&'static str>,
    pub help: &'static str,
}

/// How many operands a verb takes, and how the help calls them.
pub struct Operands {
    pub text: &'static str,
    pub min: usize,
    pub max: usize,
}

pub const NO_OPERANDS: Operands = Operands { text: "", min: 0, max: 0 };

pub struct Verb {
    /// One word, or two: `pod plan`.
    pub name: &'static str,
    pub operands: Operands,
    /// Everything after `--` is a command.
    pub command: bool,
    /// One line for the list of verbs; empty: not listed there (its own help still works).
    pub summary: &'static str,
    pub about: &'static str,
    pub flags: &'static [&'static Flag],
    /// Whole command lines, each starting with `coracle`; a test parses them.
    pub examples: &'static [&'static str],
    pub body: Body,
}

pub enum Body {
    Parsed(fn(&Given) -> Result<Exit, CliError>),
    /// Our own processes (`monitor`, `unpack`): they read their arguments themselves.
    Raw(fn(&[OsString]) -> i32),
}

pub const HELP: Flag = Flag { long: "help", short: Some('h'), value: None, help: "show this help" };
pub const ROOT: Flag = Flag {
    long: "root",
    short: None,
    value: Some("DIR"),
    help: "all of one agent's directories lie below DIR (default: /run/coracle, /var/lib/coracle, /var/lib/kubelet, /var/log)",
};
pub const INSTANCE: Flag = Flag {
    long: "instance",
    short: None,
    value: Some("NAME"),
    help: "names this agent's bridge, nftables tables and cgroup on the host (default: coracle, or made from --root)",
};
pub const OUTPUT: Flag = Flag { long: "output", short: Some('o'), value: Some("FORMAT"), help: "table (default), wide or json" };
pub const NAMESPACE: Flag = Flag { long: "namespace", short: Some('n'), value: Some("NAME"), help: "namespace of the pod" };
pub const CONTAINER: Flag =
    Flag { long: "container", short: Some('c'), value: Some("NAME"), help: "which container of the pod (default: the first)" };
pub const LOG_LEVEL: Flag = Flag {
    long: "log-level",
    short: None,
    value: Some("LEVEL"),
    help: "error, warn, info (default), debug or trace; stderr gets what is told",
};
pub const LOG_FORMAT: Flag =
    Flag { long: "log-format", short: None, value: Some("FORMAT"), help: "text (default; made for the journal) or json" };
pub const YES: Flag = Flag { long: "yes", short: None, value: None, help: "do it; without, only show what would be done" };

/// How a result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Table,
    Wide,
    Json,
}

/// One parsed command line.
#[derive(Debug)]
pub struct Given {
    flags: Vec<(&'static str, OsString)>,
    pub operands: Vec<OsString>,
    /// What came after `--`, for verbs that take a command.
    pub command: Vec<OsString>,
}

impl Given {
    pub fn has(&self, flag: &Flag) -> bool {
        self.flags.iter().any(|(long, _)| *long == flag.long)
    }

    /// The last value given.
    pub fn os(&self, flag: &Flag) -> Option<&OsStr> {
        self.flags.iter().rev().find(|(long, _)| *long == flag.long).map(|(_, value)| value.as_os_str())
    }

    pub fn path(&self, flag: &Flag) -> Option<&Path> {
        self.os(flag).map(Path::new)
    }

    pub fn text(&self, flag: &Flag) -> Result<Option<&str>, CliError> {
        let Some(value) = self.os(flag) else { return Ok(None) };
        value.to_str().map(Some).ok_or_else(|| CliError::Usage(format!("--{} {value:?}: not UTF-8", flag.long)))
    }

    /// Every value of a flag that may be given many times.
    pub fn all(&self, flag: &Flag) -> Result<Vec<&str>, CliError> {
        let given = self.flags.iter().filter(|(long, _)| *long == flag.long);
        given.map(|(_, v)| v.to_str().ok_or_else(|| CliError::Usage(format!("--{} {v:?}: not UTF-8", flag.long)))).collect()
    }

    pub fn parse<T: FromStr>(&self, flag: &Flag, expected: &str) -> Result<Option<T>, CliError> {
        let Some(text) = self.text(flag)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| CliError::Usage(format!("--{} \"{text}\": expected {expected}", flag.long)))
    }

    /// The n-th operand as text; the parser has counted them.
    pub fn operand(&self, n: usize) -> Result<Option<&str>, CliError> {
        let Some(value) = self.operands.get(n) else { return Ok(None) };
        value.to_str().map(Some).ok_or_else(|| CliError::Usage(format!("{value:?}: not UTF-8")))
    }

    pub fn roots(&self) -> Result<Roots, CliError> {
        let root = self.path(&ROOT);
        let absolute = match root {
            Some(root) if root.as_os_str().is_empty() => return Err(CliError::Usage("--root is empty".into())),
            Some(root) => Some(std::path::absolute(root).map_err(CliError::io("resolve", root))?),
            None => None,
        };
        Ok(Roots::at(absolute.as_deref()))
    }

    pub fn output(&self) -> Result<Output, CliError> {
        match self.text(&OUTPUT)? {
            None | Some("table") => Ok(Output::Table),
            Some("wide") => Ok(Output::Wide),
            Some("json") => Ok(Output::Json),
            Some(other) => Err(CliError::Usage(format!("--output \"{other}\": expected table, wide or json"))),
        }
    }
}

/// What a whole command line asks for.
pub enum Asked {
    Run(&'static Verb, Given),
    Raw(fn(&[OsString]) -> i32, Vec<OsString>),
    Help(Option<&'static Verb>),
    Version,
}

/// Reads a command line, without the program's name.
pub fn parse(verbs: &'static [&'static Verb], args: &[OsString]) -> Result<Asked, CliError> {
    let word = |n: usize| args.get(n).and_then(|a| a.to_str());
    let Some(first) = args.first() else { return Ok(Asked::Help(None)) };
    match word(0) {
        Some("-h" | "--help") => return Ok(Asked::Help(None)),
        Some("-V" | "--version") => return Ok(Asked::Version),
        Some("help") => {
            let name = args.get(1..).unwrap_or_default().iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ");
            return match find(verbs, &name) {
                Some(verb) => Ok(Asked::Help(Some(verb))),
                None if name.is_empty() => Ok(Asked::Help(None)),
                None => Err(unknown(verbs, &name)),
            };
        }
        _ => {}
    }
    let two = word(0).zip(word(1)).map(|(a, b)| format!("{a} {b}"));
    let (verb, used) = match two.as_deref().and_then(|name| find(verbs, name)) {
        Some(verb) => (verb, 2),
        None => match word(0).and_then(|name| find(verbs, name)) {
            Some(verb) => (verb, 1),
            None => return Err(unknown(verbs, two.as_deref().filter(|t| group(verbs, t)).unwrap_or(&first.to_string_lossy()))),
        },
    };
    let rest = args.get(used..).unwrap_or_default();
    match verb.body {
        Body::Raw(run) => Ok(Asked::Raw(run, rest.to_vec())),
        Body::Parsed(_) => given(verb, rest),
    }
}

fn find(verbs: &'static [&'static Verb], name: &str) -> Option<&'static Verb> {
    verbs.iter().find(|v| v.name == name).copied()
}

/// Does the first word begin a two-word verb?
fn group(verbs: &[&Verb], two: &str) -> bool {
    let first = two.split(' ').next().unwrap_or_default();
    verbs.iter().any(|v| v.name.split_once(' ').is_some_and(|(head, _)| head == first))
}

fn given(verb: &'static Verb, args: &[OsString]) -> Result<Asked, CliError> {
    let (args, command) = match args.iter().position(|a| a == "--") {
        Some(at) if verb.command => (args.get(..at).unwrap_or_default(), args.get(at + 1..).unwrap_or_default()),
        _ => (args, &[][..]),
    };
    let mut given = Given { flags: Vec::new(), operands: Vec::new(), command: command.to_vec() };
    let mut parser = lexopt::Parser::from_args(args.iter().cloned());
    let usage = |e: lexopt::Error| CliError::Usage(format!("{e}; see `coracle help {}`", verb.name));
    while let Some(arg) = parser.next().map_err(usage)? {
        let flag = match &arg {
            lexopt::Arg::Value(value) => {
                given.operands.push(value.clone());
                continue;
            }
            lexopt::Arg::Long(long) => flags(verb).find(|f| f.long == *long),
            lexopt::Arg::Short(short) => flags(verb).find(|f| f.short == Some(*short)),
        };
        let Some(flag) = flag else { return Err(usage(arg.unexpected())) };
        if flag.long == HELP.long {
            return Ok(Asked::Help(Some(verb)));
        }
        let value = if flag.value.is_some() { parser.value().map_err(usage)? } else { OsString::new() };
        given.flags.push((flag.long, value));
    }
    let count = given.operands.len();
    if count < verb.operands.min || count > verb.operands.max {
        let expected = if verb.operands.text.is_empty() { "no operands" } else { verb.operands.text };
        return Err(CliError::Usage(format!("expected {expected}; see `coracle help {}`", verb.name)));
    }
    Ok(Asked::Run(verb, given))
}

/// All flags of a verb, `--help` included.
pub fn flags(verb: &Verb) -> impl Iterator<Item = &'static Flag> {
    verb.flags.iter().copied().chain(std::iter::once(&HELP))
}

fn unknown(verbs: &[&Verb], name: &str) -> CliError {
    let near = verbs.iter().filter(|v| !v.summary.is_empty()).map(|v| (distance(v.name, name), v.name)).min();
    let hint = match near {
        Some((d, near)) if d <= 2 && d < near.len() => format!("; did you mean `coracle {near}`?"),
        _ => "; `coracle help` lists all verbs".to_owned(),
    };
    CliError::Usage(format!("no verb \"{name}\"{hint}"))
}

/// Levenshtein's, for "did you mean".
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(40).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = i;
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
        for (j, y) in b.iter().enumerate() {
            let (Some(left), Some(up)) = (row.get(j).copied(), row.get(j + 1).copied()) else { continue };
            let new = if x == *y { corner } else { 1 + corner.min(left).min(up) };
            corner = up;
            if let Some(cell) = row.get_mut(j + 1) {
                *cell = new;
            }
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_typing_errors() {
        assert_eq!(distance("pods", "pods"), 0);
        assert_eq!(distance("pods", "pod"), 1);
        assert_eq!(distance("logs", "lgos"), 2);
        assert_eq!(distance("images", ""), 6);
    }
}
