//! `coracle monitor NAMESPACE/POD`: started by the agent, in the pod's run directory.

use std::ffi::OsString;

use super::args::{Body, Operands, Verb};
use super::exit::Exit;
use crate::runtime::monitor;

pub const VERB: Verb = Verb {
    name: "monitor",
    operands: Operands { text: "NAMESPACE/POD", min: 1, max: 1 },
    command: false,
    summary: "",
    about: "The parent of all of a pod's processes. The agent starts it; nobody else can.",
    flags: &[],
    examples: &[],
    body: Body::Raw(run),
};

/// stderr is the pod's `monitor.err`.
fn run(_args: &[OsString]) -> i32 {
    match monitor::run() {
        Ok(()) => Exit::Ok.code(),
        Err(error) => {
            eprintln!("coracle monitor: {}", crate::obs::chain(&error));
            Exit::Failed.code()
        }
    }
}
