//! One file a verb; the only room that may wire all others together.
//!
//! A verb is a `const VERB: Verb` in its file and a line in [`VERBS`]: name, flags, examples and
//! body. The parser and the help read nothing else.

mod agent;
mod agent_proxy;
pub mod args;
mod check;
mod client;
mod demo;
mod dns;
mod exec;
pub mod exit;
pub mod help;
mod images;
mod info;
mod inspect;
mod logs;
mod monitor;
mod net;
mod pod;
mod pod_row;
mod pods;
mod policies;
mod proxy;
mod runtime;
mod services;
mod stop_all;
mod table;
mod uninstall;
mod unpack;
mod version;

use std::ffi::OsString;
use std::io::Write;

use args::{Asked, Body, Verb};
use exit::{CliError, Exit};

/// Every verb, in the order of the help.
#[rustfmt::skip]
pub const VERBS: &[&Verb] = &[
    &agent::VERB,
    &pods::VERB,
    &logs::VERB,
    &exec::VERB,
    &services::VERB,
    &policies::VERB,
    &proxy::TRACE,
    &proxy::PLAN,
    &images::IMAGES,
    &images::PULL,
    &images::IMPORT,
    &inspect::VERB,
    &info::VERB,
    &check::VERB,
    &stop_all::VERB,
    &uninstall::VERB,
    &pod::PLAN,
    &net::ADD,
    &net::DEL,
    &net::CHECK,
    &dns::SERVE,
    &demo::MAKE,
    &demo::DEMO,
    &runtime::RUN,
    &monitor::VERB,
    &unpack::VERB,
    &version::VERB,
];

/// Runs one command; returns the process's exit code.
pub fn run(args: Vec<OsString>) -> i32 {
    let args = args.get(1..).unwrap_or_default();
    let asked = match args::parse(VERBS, args) {
        Ok(asked) => asked,
        Err(error) => return fail("coracle", &error),
    };
    let (name, result) = match asked {
        Asked::Raw(run, args) => return run(&args),
        Asked::Help(None) => ("help", print(&help::overview(VERBS)).map(|()| Exit::Ok)),
        Asked::Help(Some(verb)) => ("help", print(&help::of(verb)).map(|()| Exit::Ok)),
        Asked::Version => ("version", print(&format!("coracle {}\n", version::VERSION)).map(|()| Exit::Ok)),
        Asked::Run(verb, given) => match verb.body {
            Body::Parsed(run) => (verb.name, run(&given)),
            Body::Raw(_) => return Exit::Usage.code(), // `parse` gives those as Asked::Raw
        },
    };
    match result {
        Ok(exit) => exit.code(),
        Err(error) => fail(&format!("coracle {name}"), &error),
    }
}

/// The one place where an error of a client verb is told.
fn fail(who: &str, error: &CliError) -> i32 {
    if error.exit() != Exit::Pipe {
        eprintln!("{who}: {}", table::clean(&crate::obs::chain(error).to_string()));
    }
    error.exit().code()
}

/// Writes a result to stdout.
fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Stdout)
}
