//! What the owner of the tables writes down of itself: for metrics, and for the judgement whether
//! we are healthy. Plain numbers; the text is made by [`super::metrics`].
//!
//! Invariant: nothing here reads a clock, and nothing grows: so many numbers a family.
//! Names and meaning are kube-proxy's (pkg/proxy/metrics, pkg/proxy/healthcheck of 1.34).
#![deny(clippy::disallowed_methods)]

use std::sync::LazyLock;

const SECOND: i64 = 1_000_000_000;
/// Something asked for and not done for so long: kube-proxy's, two sync periods of 30 s.
pub const LATE: i64 = 60 * SECOND;

/// One instant, by both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    pub boot: i64,
    pub wall: i64,
}

/// From 1 ms, each twice the one before, up to 16 s.
static SYNC: LazyLock<Vec<f64>> = LazyLock::new(|| (0..15).map(|n| 0.001 * f64::from(1 << n)).collect());
/// 0.25, 0.5, 1 to 59 by 1, 60 to 115 by 5, 120 to 300 by 30.
static PROGRAMMING: LazyLock<Vec<f64>> = LazyLock::new(|| {
    let whole = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30)).map(f64::from);
    [0.25, 0.5].into_iter().chain(whole).collect()
});

#[derive(Clone, Debug)]
pub struct Histogram {
    pub bounds: &'static [f64],
    /// One more than bounds: what is beyond the last.
    pub counts: Box<[u64]>,
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len() + 1].into(), sum: 0.0 }
    }

    pub fn observe(&mut self, value: f64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(at) {
            *count += 1;
        }
        self.sum += value;
    }
}

/// One family's table.
#[derive(Clone, Debug)]
pub struct OfFamily {
    pub v4: bool,
    pub sync: Histogram,
    pub full: Histogram,
    pub partial: Histogram,
    pub programming: Histogram,
    pub forgetting: Histogram,
    /// Wall times; 0: never.
    pub last: i64,
    pub queued: i64,
    pub sync_failures: u64,
    pub cleanup_failures: u64,
    pub forgotten: u64,
    /// Ports of a Local policy that have endpoints, and none here.
    pub no_local_internal: u64,
    pub no_local_external: u64,
    /// Boot time since which something is asked for and not done.
    pub pending: Option<i64>,
}

/// Changes that came, and those not in the kernel yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub pending: u64,
    pub total: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Those that have tables.
    pub families: Vec<OfFamily>,
    pub services: Changes,
    pub endpoints: Changes,
    /// Answers 200 and 503 of `/healthz` and `/livez`.
    pub healthz: [u64; 2],
    pub livez: [u64; 2],
}

impl Record {
    pub fn of(families: impl Iterator<Item = bool>) -> Record {
        let family = |v4| OfFamily {
            v4,
            sync: Histogram::new(&SYNC),
            full: Histogram::new(&SYNC),
            partial: Histogram::new(&SYNC),
            programming: Histogram::new(&PROGRAMMING),
            forgetting: Histogram::new(&SYNC),
            last: 0,
            queued: 0,
            sync_failures: 0,
            cleanup_failures: 0,
            forgotten: 0,
            no_local_internal: 0,
            no_local_external: 0,
            pending: None,
        };
        Record { families: families.map(family).collect(), ..Record::default() }
    }

    pub fn family(&mut self, v4: bool) -> Option<&mut OfFamily> {
        self.families.iter_mut().find(|of| of.v4 == v4)
    }

    /// A change was asked of a family.
    pub fn queued(&mut self, v4: bool, now: Now) {
        if let Some(of) = self.family(v4) {
            of.queued = now.wall;
            of.pending.get_or_insert(now.boot);
        }
    }

    /// The kernel has acknowledged all that is wanted of a family.
    pub fn synced(&mut self, v4: bool, full: bool, seconds: f64, now: Now) {
        let Some(of) = self.family(v4) else { return };
        of.sync.observe(seconds);
        if full {
            of.full.observe(seconds)
        } else {
            of.partial.observe(seconds)
        }
        of.last = now.wall;
        self.settled(v4);
    }

    /// Nothing is asked of a family that is not done.
    pub fn settled(&mut self, v4: bool) {
        if let Some(of) = self.family(v4) {
            of.pending = None;
        }
        if self.families.iter().all(|of| of.pending.is_none()) {
            (self.services.pending, self.endpoints.pending) = (0, 0);
        }
    }

    pub fn failed(&mut self, v4: bool, now: Now) {
        if let Some(of) = self.family(v4) {
            of.sync_failures += 1;
            of.pending.get_or_insert(now.boot);
        }
    }

    pub fn health(&self, now: Now) -> Health {
        let families = self.families.iter().map(|of| OfOne {
            v4: of.v4,
            updated: of.last,
            healthy: of.pending.is_none_or(|since| now.boot - since < LATE),
        });
        Health { families: families.collect(), now: now.wall }
    }
}

/// What `/healthz` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    pub families: Vec<OfOne>,
    /// Wall time.
    pub now: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfOne {
    pub v4: bool,
    /// Wall time; 0: never.
    pub updated: i64,
    pub healthy: bool,
}

impl Health {
    /// Healthy at the start too, and while what was asked for is not late. Other than kube-proxy
    /// we are not while the very first of it is.
    pub fn is_good(&self) -> bool {
        self.families.iter().all(|of| of.healthy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Now {
        Now { boot: seconds * SECOND, wall: (1_000_000 + seconds) * SECOND }
    }

    #[test]
    fn healthy_until_something_asked_for_is_late_and_again_once_it_is_done() {
        let mut record = Record::of([true, false].into_iter());
        assert!(record.health(at(10_000)).is_good(), "nothing was asked for");
        record.queued(true, at(0));
        record.queued(true, at(50));
        assert!(record.health(at(59)).is_good());
        assert!(!record.health(at(60)).is_good(), "the oldest counts");
        assert!(record.health(at(60)).families[1].healthy, "each family by itself");
        record.failed(true, at(61));
        assert!(!record.health(at(61)).is_good());
        record.synced(true, false, 0.002, at(62));
        assert!(record.health(at(10_000)).is_good());
        assert_eq!(record.health(at(63)).families[0].updated, at(62).wall);
        // Somebody broke the table, and it cannot be mended.
        record.failed(false, at(100));
        assert!(record.health(at(159)).is_good() && !record.health(at(160)).is_good());
    }

    #[test]
    fn what_waits_is_counted_until_every_family_has_it() {
        let mut record = Record::of([true, false].into_iter());
        record.services = Changes { pending: 2, total: 2 };
        record.queued(true, at(0));
        record.queued(false, at(0));
        record.synced(true, true, 0.1, at(1));
        assert_eq!(record.services.pending, 2);
        record.synced(false, true, 0.1, at(1));
        assert_eq!(record.services, Changes { pending: 0, total: 2 });
        assert_eq!((record.families[0].full.counts.iter().sum::<u64>(), record.families[0].partial.sum), (1, 0.0));
    }

    #[test]
    fn a_value_is_counted_in_the_first_bucket_that_holds_it() {
        let mut h = Histogram::new(&SYNC);
        for value in [0.0, 0.001, 0.0011, 16.384, 17.0] {
            h.observe(value);
        }
        assert_eq!((h.counts[0], h.counts[1], h.counts[14], h.counts[15]), (2, 1, 1, 1));
        assert_eq!(PROGRAMMING.len(), 80);
        assert!(PROGRAMMING.is_sorted_by(|a, b| a < b));
    }
}
