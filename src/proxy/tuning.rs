//! Connection tracking for a node that serves Services: how many connections it can know, and how
//! long it keeps those that have gone quiet.
//!
//! The numbers are kube-proxy's (32768 entries a core, 131072 at least; established for a day,
//! close_wait for an hour), but on a small board the table takes no more than about 1/20 of the
//! memory. Invariant: the limit is only ever raised, and a time that somebody has set (it is not
//! the kernel's own any more) is left as it is, unless a flag says otherwise. What this host does
//! not let us write is told to `coracle check`, and nothing fails by it.
//! Documentation/networking/nf_conntrack-sysctl.rst.

use crate::sys::sysctl;

/// `--conntrack-*`; None: nobody said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub cores: u64,
    /// Bytes.
    pub memory: u64,
    /// 0: leave the limit as it is.
    pub max_per_core: Option<u64>,
    pub min: Option<u64>,
    /// Seconds; 0: leave them as they are.
    pub established: Option<u64>,
    pub close_wait: Option<u64>,
    pub liberal: bool,
}

const MAX_PER_CORE: u64 = 32_768;
const MIN: u64 = 131_072;
/// Bytes of memory for each entry that is allowed: an entry takes about 400.
const MEMORY_PER_ENTRY: u64 = 8 << 10;

pub const MAX: &str = "net/netfilter/nf_conntrack_max";
pub const ESTABLISHED: &str = "net/netfilter/nf_conntrack_tcp_timeout_established";
pub const CLOSE_WAIT: &str = "net/netfilter/nf_conntrack_tcp_timeout_close_wait";
const LIBERAL: &str = "net/netfilter/nf_conntrack_tcp_be_liberal";

/// What the kernel sets by itself.
const KERNEL_ESTABLISHED: u64 = 432_000;
const KERNEL_CLOSE_WAIT: u64 = 60;

/// What is there now; None: this kernel has no such parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub max: Option<u64>,
    pub established: Option<u64>,
    pub close_wait: Option<u64>,
    pub liberal: Option<u64>,
}

impl Limits {
    /// Entries that there should be room for. None: as many as there are.
    pub fn entries(&self) -> Option<u64> {
        let per_core = self.max_per_core.unwrap_or(MAX_PER_CORE);
        if per_core == 0 {
            return None;
        }
        let wanted = (per_core * self.cores.max(1)).max(self.min.unwrap_or(MIN));
        // Whoever names a number knows the board.
        let said = self.max_per_core.is_some() || self.min.is_some();
        Some(if said { wanted } else { wanted.min(self.memory / MEMORY_PER_ENTRY) })
    }

    /// Parameters that are to be written.
    pub fn plan(&self, seen: &Seen) -> Vec<(&'static str, u64)> {
        let mut plan = Vec::new();
        if let (Some(wanted), Some(now)) = (self.entries(), seen.max)
            && now < wanted
        {
            plan.push((MAX, wanted));
        }
        for (name, said, usual, kernel, now) in [
            (ESTABLISHED, self.established, 86_400, KERNEL_ESTABLISHED, seen.established),
            (CLOSE_WAIT, self.close_wait, 3_600, KERNEL_CLOSE_WAIT, seen.close_wait),
        ] {
            let Some(now) = now else { continue };
            let wanted = match said {
                Some(0) => None,
                Some(seconds) => Some(seconds),
                None => Some(usual).filter(|_| now == kernel),
            };
            plan.extend(wanted.filter(|seconds| *seconds != now).map(|seconds| (name, seconds)));
        }
        if self.liberal && seen.liberal == Some(0) {
            plan.push((LIBERAL, 1));
        }
        plan
    }
}

pub fn seen() -> Seen {
    // One that cannot be read is one that cannot be judged.
    let number = |name| sysctl::read(name).ok().flatten()?.parse().ok();
    Seen { max: number(MAX), established: number(ESTABLISHED), close_wait: number(CLOSE_WAIT), liberal: number(LIBERAL) }
}

/// In the network namespace of the calling thread, once connection tracking is there.
pub fn apply(limits: &Limits) {
    for (name, value) in limits.plan(&seen()) {
        match sysctl::write(name, &value.to_string()) {
            Ok(()) => tracing::info!(name, value, "set for the connections of Services"),
            Err(e) => tracing::debug!(name, value, error = %e, "this host does not let us set it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const KERNEL: Seen = Seen { max: Some(65_536), established: Some(432_000), close_wait: Some(60), liberal: Some(0) };

    fn board(cores: u64, memory: u64) -> Limits {
        Limits { cores, memory, ..Limits::default() }
    }

    #[test]
    fn as_many_entries_as_kube_proxy_unless_the_board_is_small() {
        assert_eq!(board(1, 8 * GIB).entries(), Some(131_072));
        assert_eq!(board(16, 8 * GIB).entries(), Some(524_288));
        assert_eq!(board(4, GIB / 2).entries(), Some(65_536));
        assert_eq!(board(4, GIB).entries(), Some(131_072));
        assert_eq!(Limits { min: Some(200_000), ..board(4, GIB / 2) }.entries(), Some(200_000));
        assert_eq!(Limits { max_per_core: Some(0), min: Some(200_000), ..board(4, GIB) }.entries(), None);
    }

    #[test]
    fn what_somebody_has_set_stays_unless_a_flag_says_otherwise() {
        let limits = board(2, 4 * GIB);
        assert_eq!(limits.plan(&KERNEL), [(MAX, 131_072), (ESTABLISHED, 86_400), (CLOSE_WAIT, 3_600)]);
        let set = Seen { max: Some(131_072), established: Some(86_400), close_wait: Some(3_600), liberal: Some(0) };
        assert_eq!(limits.plan(&set), [], "a second time nothing is to do");
        let higher = Seen { max: Some(1 << 20), established: Some(200_000), close_wait: Some(7_200), liberal: Some(1) };
        assert_eq!(limits.plan(&higher), []);
        let said = Limits { established: Some(600), close_wait: Some(0), liberal: true, max_per_core: Some(0), ..limits };
        assert_eq!(said.plan(&KERNEL), [(ESTABLISHED, 600), (LIBERAL, 1)]);
        assert_eq!(limits.plan(&Seen::default()), [], "without connection tracking there is nothing");
    }
}
