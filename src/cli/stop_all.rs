//! `coracle stop-all`: ends every pod gracefully. The agent does it, or, where none runs, this
//! process becomes one without a source of pods for as long as that takes.

use std::time::Duration;

use super::args::{Body, Flag, Given, INSTANCE, LOG_LEVEL, NO_OPERANDS, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{agent, table};
use crate::kubelet::agent::Agent;
use crate::kubelet::handle::{STOP_MARGIN, StopReport};
use crate::kubelet::server::model::{Answer, Ask};
use crate::obs;
use crate::store::pods::PodStore;

const WITHIN: Flag = Flag {
    long: "within",
    short: None,
    value: Some("SECONDS"),
    help: "the longest that a pod may take to end, whatever its terminationGracePeriodSeconds (default: 60)",
};
const DEFAULT_WITHIN: u32 = 60;

pub const VERB: Verb = Verb {
    name: "stop-all",
    operands: NO_OPERANDS,
    command: false,
    summary: "end every pod of this node gracefully",
    about: "Sends every container its stop signal, waits for its terminationGracePeriodSeconds (at most --within), then kills; \
            exit codes are journalled. A running agent starts no pod again until it is started anew. Works without an agent too: \
            coracle-pods.service calls it so when the host shuts down. What is on disk stays.",
    flags: &[&WITHIN, &ROOT, &INSTANCE, &agent::CGROUP_PARENT, &LOG_LEVEL],
    examples: &["coracle stop-all", "coracle stop-all --within 20 --root /srv/coracle"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let within: u32 = given.parse(&WITHIN, "a number of seconds")?.unwrap_or(DEFAULT_WITHIN);
    match Client::if_running(&given.roots()?)? {
        Some(client) => by_agent(client, within)?,
        None => {
            let report = alone(given, within)?;
            eprintln!("coracle stop-all: {} pods have ended", report.stopped);
        }
    }
    Ok(Exit::Ok)
}

/// Asks the agent; its lines are passed on.
pub fn by_agent(client: Client, within: u32) -> Result<(), CliError> {
    let mut answers = client.ask(Ask::StopAll { seconds: u64::from(within) })?;
    while let Some(answer) = answers.next()? {
        if let Answer::Said { text } = answer {
            eprintln!("coracle stop-all: {}", table::clean(&text));
        }
    }
    Ok(())
}

fn alone(given: &Given, within: u32) -> Result<StopReport, CliError> {
    let mut config = agent::remembered(given)?;
    let pods = PodStore::peek(&config.roots.state).map_err(|e| CliError::because("read the pods' journal", e))?.pods.len();
    if pods == 0 {
        return Ok(StopReport::default());
    }
    config.stop_grace = i64::from(within);
    obs::init(&agent::log_options(given)?).map_err(|e| CliError::because("set up logging", e))?;
    eprintln!("coracle stop-all: no agent runs: ending {pods} pods within {within} s");
    bounded(Duration::from_secs(u64::from(within)) + STOP_MARGIN, move || {
        Agent::open(config).map(Agent::stop_all).map_err(|e| CliError::because("take the pods over", e))
    })
}

/// A disk or a process that hangs must not hold a host's shutdown up: what is not done by then is
/// left to the kernel.
pub fn bounded<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, CliError> + Send + 'static,
) -> Result<T, CliError> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let spawned = std::thread::Builder::new().name("planner".into()).stack_size(1 << 20).spawn(move || {
        // Nobody waits any more when the time is over.
        let _ = sender.send(work());
    });
    spawned.map_err(|e| CliError::because("start a thread", e))?;
    match receiver.recv_timeout(limit) {
        Ok(result) => result,
        Err(_) => Err(CliError::Failed(format!("not done within {} s; what is left is left as it is", limit.as_secs()))),
    }
}
