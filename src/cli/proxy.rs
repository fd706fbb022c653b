//! `coracle proxy --dry-run` and `coracle proxy trace`: what the agent wants of the kernel, and
//! where a connection goes.

use super::args::{Body, Flag, Given, INSTANCE, NO_OPERANDS, Operands, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::print;
use crate::kubelet::server::model::{Answer, Ask};

const DRY_RUN: Flag = Flag { long: "dry-run", short: None, value: None, help: "only show the tables" };

pub const PLAN: Verb = Verb {
    name: "proxy",
    operands: NO_OPERANDS,
    command: false,
    summary: "show the nftables tables that the agent keeps",
    about: "Prints the tables of Services, host ports and masquerading as the agent wants them, in nft's words: lay them beside \
            `nft list ruleset`. The agent writes them itself; nothing is changed here.",
    flags: &[&DRY_RUN, &ROOT, &INSTANCE],
    examples: &["coracle proxy --dry-run"],
    body: Body::Parsed(plan),
};

pub const TRACE: Verb = Verb {
    name: "proxy trace",
    operands: Operands { text: "SRC DST:PORT[/PROTOCOL]", min: 2, max: 2 },
    command: false,
    summary: "tell where a connection goes, and by which rule, Service and endpoint",
    about: "Walks the first packet of a connection through our tables as the kernel would and prints each rule that does \
            something. SRC is an address, a pod (NAMESPACE/NAME, or NAME in the namespace default) or `node`.",
    flags: &[&ROOT, &INSTANCE],
    examples: &["coracle proxy trace default/web 10.96.0.10:53/udp", "coracle proxy trace node '[fd96::10]:80'"],
    body: Body::Parsed(trace),
};

fn plan(given: &Given) -> Result<Exit, CliError> {
    if !given.has(&DRY_RUN) {
        return Err(CliError::Usage("the agent writes the tables itself; say --dry-run to see them".into()));
    }
    ask(given, Ask::Tables {})
}

fn trace(given: &Given) -> Result<Exit, CliError> {
    let operand = |n| Ok::<_, CliError>(given.operand(n)?.unwrap_or_default().to_owned());
    ask(given, Ask::Trace { from: operand(0)?, to: operand(1)? })
}

fn ask(given: &Given, ask: Ask) -> Result<Exit, CliError> {
    let mut answers = Client::connect(&given.roots()?)?.ask(ask)?;
    while let Some(answer) = answers.next()? {
        // A newer agent may tell more than was asked for.
        if let Answer::Text { text } = answer {
            print(&text)?;
        }
    }
    Ok(Exit::Ok)
}
