//! `coracle unpack`: the agent's own child, one a layer; not for people.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;

use super::args::{Body, NO_OPERANDS, Verb};
use crate::images::layer::DecodeLimits;
use crate::images::unpack::{Failure, UnpackArgs, run as unpack};

pub const VERB: Verb = Verb {
    name: "unpack",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Unpacks one image layer from stdin into a directory that becomes its root. The agent runs it; it is not for people.",
    flags: &[],
    examples: &[],
    body: Body::Raw(run),
};

/// Reads a layer on stdin and reports on stdout; `args` is what follows the verb.
fn run(args: &[OsString]) -> i32 {
    let result = match parse(args) {
        Ok(args) => match std::io::stdin().as_fd().try_clone_to_owned() {
            Ok(input) => unpack(&args, std::fs::File::from(input)).map_err(|e| e.failure()),
            Err(e) => Err(Failure { error: format!("cannot read stdin: {e}"), errno: e.raw_os_error() }),
        },
        Err(e) => Err(Failure { error: e.to_string(), errno: None }),
    };
    let (line, code) = match &result {
        Ok(report) => (serde_json::to_string(report), 0),
        Err(failure) => (serde_json::to_string(failure), 1),
    };
    // A parent that is gone needs no report; it sees our exit code otherwise.
    match line.map(|line| writeln!(std::io::stdout(), "{line}")) {
        Ok(Ok(())) => code,
        _ => 1,
    }
}

fn parse(args: &[OsString]) -> Result<UnpackArgs, lexopt::Error> {
    use lexopt::{Arg, ValueExt};
    let mut parser = lexopt::Parser::from_args(args);
    let mut dir = None;
    let mut unpack = UnpackArgs {
        dir: std::path::PathBuf::new(),
        base: false,
        entries: 0,
        limits: DecodeLimits { bytes: 0, ratio: 1, ratio_floor: 0, window: 0 },
    };
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("base") => unpack.base = true,
            Arg::Long("entries") => unpack.entries = parser.value()?.parse()?,
            Arg::Long("bytes") => unpack.limits.bytes = parser.value()?.parse()?,
            Arg::Long("ratio") => unpack.limits.ratio = parser.value()?.parse()?,
            Arg::Long("ratio-floor") => unpack.limits.ratio_floor = parser.value()?.parse()?,
            Arg::Long("window") => unpack.limits.window = parser.value()?.parse()?,
            Arg::Value(value) if dir.is_none() => dir = Some(value),
            other => return Err(other.unexpected()),
        }
    }
    unpack.dir = dir.ok_or("unpack needs a directory")?.into();
    Ok(unpack)
}
