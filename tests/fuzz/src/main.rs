//! Parsers of bytes from outside under libFuzzer: one program, one target a run, named by
//! CORACLE_FUZZ. `tests/fuzz/run` builds it, makes the seeds and runs every target.
//!
//! A finding is a panic of the parser, or of a property that a target holds it to.
#![no_main]

mod image;
mod memory;
mod names;
mod network;
mod node;
mod object;
mod wire;

use std::sync::OnceLock;

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("pod", object::pod),
    ("network", network::network),
    ("yaml", object::yaml),
    ("spec", object::spec),
    ("pull_secret", object::pull_secret),
    ("quantity", object::quantity),
    ("time", object::time),
    ("expand", object::expand),
    ("reference", image::reference),
    ("registries", image::registries),
    ("challenge", image::challenge),
    ("manifest", image::manifest),
    ("image_config", image::config),
    ("layer", image::layer),
    ("inflate", image::inflate),
    ("tar", image::tar),
    ("marks", image::marks),
    ("monitor_frame", wire::monitor),
    ("socket_frame", wire::socket),
    ("netlink", wire::netlink),
    ("uevent", wire::uevent),
    ("dns_question", names::question),
    ("dns_reply", names::reply),
    ("log_lines", node::log_lines),
    ("log_writer", node::log_writer),
    ("resolv", node::resolv),
    ("hosts", node::hosts),
    ("user", node::user),
    ("seccomp", node::seccomp),
    ("journal", node::journal),
];

static TARGET: OnceLock<Target> = OnceLock::new();

fn chosen() -> Target {
    let name = std::env::var("CORACLE_FUZZ").unwrap_or_default();
    if name == "list" {
        TARGETS.iter().for_each(|(name, _)| println!("{name}"));
        std::process::exit(0);
    }
    match TARGETS.iter().find(|(known, _)| *known == name) {
        Some((_, target)) => *target,
        None => {
            eprintln!("CORACLE_FUZZ={name} is no target: say CORACLE_FUZZ=list");
            std::process::exit(2);
        }
    }
}

libfuzzer_sys::fuzz_target!(init: { TARGET.get_or_init(chosen); }, |data: &[u8]| {
    TARGET.get_or_init(chosen)(data);
});

/// Texts that a NUL separates, for targets of several arguments.
fn texts<const N: usize>(data: &[u8]) -> [String; N] {
    let mut parts = data.splitn(N, |b| *b == 0);
    std::array::from_fn(|_| String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned())
}
