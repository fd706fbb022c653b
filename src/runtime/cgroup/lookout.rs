//! What the kernel counts in a cgroup. Reads only; a cgroup that is gone counts nothing.

use std::path::Path;

use super::hierarchy::{Hierarchy, Kind, is_gone};
use super::{CgroupError, Usage};

pub fn oom_kills(hierarchies: &[Hierarchy], path: &str) -> Result<u64, CgroupError> {
    let Some(memory) = with(hierarchies, "memory") else { return Ok(0) };
    let file = if memory.kind == Kind::V2 { "memory.events" } else { "memory.oom_control" };
    Ok(keyed(&memory.dir(path).join(file), "oom_kill")?.unwrap_or(0))
}

pub fn usage(hierarchies: &[Hierarchy], path: &str) -> Result<Usage, CgroupError> {
    let mut usage = Usage::default();
    if let Some(memory) = with(hierarchies, "memory") {
        let file = if memory.kind == Kind::V2 { "memory.current" } else { "memory.usage_in_bytes" };
        usage.memory = number(&memory.dir(path).join(file))?;
    }
    if let Some(pids) = with(hierarchies, "pids") {
        usage.pids = number(&pids.dir(path).join("pids.current"))?;
    }
    usage.cpu_nanos = match hierarchies.iter().find(|h| h.kind == Kind::V2) {
        Some(unified) => keyed(&unified.dir(path).join("cpu.stat"), "usage_usec")?.map(|micros| micros.saturating_mul(1000)),
        None => match with(hierarchies, "cpuacct") {
            Some(cpuacct) => number(&cpuacct.dir(path).join("cpuacct.usage"))?,
            None => None,
        },
    };
    Ok(usage)
}

fn with<'a>(hierarchies: &'a [Hierarchy], controller: &str) -> Option<&'a Hierarchy> {
    hierarchies.iter().find(|h| h.controllers.iter().any(|c| c == controller))
}

fn number(file: &Path) -> Result<Option<u64>, CgroupError> {
    Ok(text(file)?.and_then(|t| t.trim().parse().ok()))
}

/// The value behind `key` in a flat keyed file.
fn keyed(file: &Path, key: &str) -> Result<Option<u64>, CgroupError> {
    Ok(text(file)?.and_then(|t| {
        t.lines().find_map(|line| line.split_once(' ').filter(|(k, _)| *k == key).and_then(|(_, v)| v.trim().parse().ok()))
    }))
}

fn text(file: &Path) -> Result<Option<String>, CgroupError> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(source) => Err(CgroupError::Io { operation: "read", path: file.into(), source }),
    }
}
