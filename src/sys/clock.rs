//! Clocks. Durations are CLOCK_BOOTTIME (it counts suspend and never jumps) together with the
//! boot's id; wall time is only rendered. clock_gettime(2).

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds since 1970 by the wall clock. It may jump.
pub fn wall_nanos() -> i64 {
    nanos(ClockId::CLOCK_REALTIME)
}

/// Nanoseconds since boot, suspend included. Comparable only within one [`boot_id`].
pub fn boot_nanos() -> i64 {
    nanos(ClockId::CLOCK_BOOTTIME)
}

/// Both clocks exist on every kernel that we run on (2.6.39), so an error cannot happen; 0 then.
#[allow(clippy::unnecessary_cast)] // their width differs by target
fn nanos(clock: ClockId) -> i64 {
    clock_gettime(clock).map_or(0, |t| t.tv_sec() as i64 * 1_000_000_000 + t.tv_nsec() as i64)
}

/// The kernel's id of this boot; random(4).
pub fn boot_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
