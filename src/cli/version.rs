//! `coracle version`.

use super::args::{Given, NO_OPERANDS, OUTPUT, Output, Verb};
use super::exit::{CliError, Exit};
use super::{args::Body, print};

pub const VERB: Verb = Verb {
    name: "version",
    operands: NO_OPERANDS,
    command: false,
    summary: "which coracle this is",
    about: "Prints the version of this program. That of the running agent is in `coracle info`.",
    flags: &[&OUTPUT],
    examples: &["coracle version"],
    body: Body::Parsed(run),
};

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

fn run(given: &Given) -> Result<Exit, CliError> {
    match given.output()? {
        Output::Table | Output::Wide => print(&format!("coracle {VERSION}\n"))?,
        Output::Json => {
            print(&format!("{{\"version\":\"{VERSION}\",\"os\":\"linux\",\"arch\":\"{}\"}}\n", std::env::consts::ARCH))?;
        }
    }
    Ok(Exit::Ok)
}
