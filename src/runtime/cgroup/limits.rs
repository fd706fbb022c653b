//! Limits of one directory, in v1's and v2's files.
//!
//! Invariant: a limit is written before a process can be inside, and a limit that this host has
//! no controller for is left out (see `hierarchy::lacks`), never an error.

use std::io::ErrorKind;
use std::path::Path;

use super::super::model::CgroupResources;
use super::CgroupError;
use super::hierarchy::{Kind, is_gone, write};

impl CgroupResources {
    /// Whether any controller is needed for it.
    pub(super) fn asks_for_anything(&self) -> bool {
        CgroupResources { devices: None, ..self.clone() } != CgroupResources::default()
    }

    /// kubelet's conversion of cpu.shares; newer runc has another curve.
    fn weight(shares: u64) -> u64 {
        1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
    }
}

const PERIOD: u64 = 100_000;

pub fn write_v2(dir: &Path, controllers: &[String], limits: &CgroupResources) -> Result<(), CgroupError> {
    let has = |name: &str| controllers.iter().any(|c| c == name);
    // Without limits of its own its parents hand no controllers on: there is nothing to write to.
    if !limits.asks_for_anything() && !dir.join("memory.max").exists() && !dir.join("pids.max").exists() {
        return Ok(());
    }
    if has("cpu") {
        let weight = limits.cpu_shares.map_or(100, CgroupResources::weight);
        write(&dir.join("cpu.weight"), &weight.to_string())?;
        let quota = limits.cpu_quota.map_or("max".to_owned(), |q| q.to_string());
        // Absent in kernels without CONFIG_CFS_BANDWIDTH.
        write_if_there(&dir.join("cpu.max"), &format!("{quota} {}", limits.cpu_period.unwrap_or(PERIOD)))?;
    }
    if has("memory") {
        write(&dir.join("memory.max"), &or_max(limits.memory_limit))?;
        // These two: absent without swap accounting; since 4.19.
        write_if_there(&dir.join("memory.swap.max"), if limits.no_swap { "0" } else { "max" })?;
        write_if_there(&dir.join("memory.oom.group"), if limits.oom_group { "1" } else { "0" })?;
    }
    if has("pids") {
        write(&dir.join("pids.max"), &or_max(limits.pids_limit))?;
    }
    Ok(())
}

pub fn write_v1(dir: &Path, controllers: &[String], limits: &CgroupResources) -> Result<(), CgroupError> {
    let has = |name: &str| controllers.iter().any(|c| c == name);
    if has("cpu") {
        write(&dir.join("cpu.shares"), &limits.cpu_shares.unwrap_or(1024).to_string())?;
        // Absent in kernels without CONFIG_CFS_BANDWIDTH.
        write_if_there(&dir.join("cpu.cfs_period_us"), &limits.cpu_period.unwrap_or(PERIOD).to_string())?;
        write_if_there(&dir.join("cpu.cfs_quota_us"), &limits.cpu_quota.unwrap_or(-1).to_string())?;
    }
    if has("memory") {
        let limit = limits.memory_limit.unwrap_or(-1).to_string();
        let swap = if limits.no_swap { limit.as_str() } else { "-1" };
        // memory + swap may never be below memory: raising needs it first, lowering last. It is
        // absent without swap accounting.
        let (memory, both) = (dir.join("memory.limit_in_bytes"), dir.join("memory.memsw.limit_in_bytes"));
        if write(&memory, &limit).is_ok() {
            write_if_there(&both, swap)?;
        } else {
            write_if_there(&both, swap)?;
            write(&memory, &limit)?;
        }
    }
    if has("pids") {
        write(&dir.join("pids.max"), &or_max(limits.pids_limit))?;
    }
    Ok(())
}

/// cpu.shares of a directory, or what its weight amounts to; None: it is gone, or counts none.
pub fn shares_of(dir: &Path, kind: Kind) -> Result<Option<u64>, CgroupError> {
    let file = dir.join(if kind == Kind::V2 { "cpu.weight" } else { "cpu.shares" });
    let value = match std::fs::read_to_string(&file) {
        Ok(text) => text.trim().parse::<u64>().ok(),
        Err(e) if is_gone(&e) => None,
        Err(source) => return Err(CgroupError::Io { operation: "read", path: file, source }),
    };
    Ok(value.map(|v| if kind == Kind::V2 { 2 + v.saturating_sub(1) * 262_142 / 9999 } else { v }))
}

/// Absent is fine: the directory is gone, or nothing in it was ever limited.
pub fn write_shares(dir: &Path, kind: Kind, shares: u64) -> Result<(), CgroupError> {
    let shares = shares.clamp(2, 262_144);
    if kind == Kind::V2 {
        write_if_there(&dir.join("cpu.weight"), &CgroupResources::weight(shares).to_string())
    } else {
        write_if_there(&dir.join("cpu.shares"), &shares.to_string())
    }
}

fn or_max(limit: Option<i64>) -> String {
    limit.map_or("max".to_owned(), |n| n.to_string())
}

fn write_if_there(path: &Path, value: &str) -> Result<(), CgroupError> {
    match write(path, value) {
        Err(CgroupError::Write { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_become_weights_by_the_kubelets_formula() {
        for (shares, weight) in
            [(0, 1), (2, 1), (102, 4), (512, 20), (1024, 39), (2048, 79), (262_144, 10_000), (u64::MAX, 10_000)]
        {
            assert_eq!(CgroupResources::weight(shares), weight, "{shares}");
        }
    }

    #[test]
    fn device_rules_alone_need_no_controller() {
        assert!(!CgroupResources { devices: Some(Vec::new()), ..CgroupResources::default() }.asks_for_anything());
        assert!(CgroupResources { pids_limit: Some(1), ..CgroupResources::default() }.asks_for_anything());
    }
}
