//! Rate limit of log lines: a token bucket for each pair of (place in the code, pod), so that one
//! chatty pod hides neither another pod's lines nor other lines about itself.
//!
//! Invariant: what was left out is counted and told; the table holds at most `SLOTS` buckets.
//! Pure: time is an argument.

use std::collections::HashMap;

/// Lines let through at once.
pub const BURST: u32 = 60;
/// Nanoseconds for one more line.
const REFILL: i64 = 500_000_000;
const SLOTS: usize = 512;

#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// `left_out`: how many lines of this kind were dropped since the last one.
    Pass {
        left_out: u32,
    },
    Drop,
}

struct Bucket {
    tokens: u32,
    /// When `tokens` was last right.
    at: i64,
    left_out: u32,
    /// The first line that was left out, cut short: the trailing count needs a name.
    what: String,
}

impl Bucket {
    fn refill(&mut self, now: i64) {
        let grown = (now.saturating_sub(self.at) / REFILL).clamp(0, i64::from(BURST));
        if grown > 0 {
            self.tokens = BURST.min(self.tokens + grown as u32);
            self.at = if self.tokens == BURST { now } else { self.at + grown * REFILL };
        }
    }
}

#[derive(Default)]
pub struct Limiter {
    buckets: HashMap<u64, Bucket>,
    /// How many buckets have a count that was not told yet.
    owing: usize,
}

impl Limiter {
    /// Asks for one line of kind `key` at `now` (any steady nanoseconds).
    pub fn admit(&mut self, key: u64, now: i64, what: impl FnOnce() -> String) -> Verdict {
        if !self.buckets.contains_key(&key) && self.buckets.len() >= SLOTS {
            self.forget_full(now);
        }
        let bucket =
            self.buckets.entry(key).or_insert_with(|| Bucket { tokens: BURST, at: now, left_out: 0, what: String::new() });
        bucket.refill(now);
        if bucket.tokens == 0 {
            if bucket.left_out == 0 {
                bucket.what = what().chars().take(120).collect();
                self.owing += 1;
            }
            bucket.left_out = bucket.left_out.saturating_add(1);
            return Verdict::Drop;
        }
        bucket.tokens -= 1;
        let left_out = std::mem::take(&mut bucket.left_out);
        if left_out > 0 {
            self.owing -= 1;
        }
        Verdict::Pass { left_out }
    }

    /// One count that is owed by a kind of line that may speak again but did not.
    pub fn overdue(&mut self, now: i64) -> Option<(String, u32)> {
        if self.owing == 0 {
            return None;
        }
        let bucket = self.buckets.values_mut().find(|b| b.left_out > 0 && now.saturating_sub(b.at) >= 4 * REFILL)?;
        self.owing -= 1;
        Some((std::mem::take(&mut bucket.what), std::mem::take(&mut bucket.left_out)))
    }

    /// Makes room: buckets that are full again say nothing; if none is, the fullest goes.
    fn forget_full(&mut self, now: i64) {
        for bucket in self.buckets.values_mut() {
            bucket.refill(now);
        }
        self.buckets.retain(|_, b| b.tokens < BURST || b.left_out > 0);
        if self.buckets.len() >= SLOTS
            && let Some(key) = self.buckets.iter().max_by_key(|(_, b)| b.tokens).map(|(key, _)| *key)
            && let Some(gone) = self.buckets.remove(&key)
            && gone.left_out > 0
        {
            self.owing -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn a_flood_is_cut_counted_and_told_when_it_goes_on() {
        let mut limiter = Limiter::default();
        let passed = (0..1000).filter(|_| limiter.admit(1, 0, || "x".into()) != Verdict::Drop).count();
        assert_eq!(passed, BURST as usize);
        assert_eq!(limiter.admit(1, SECOND, || "x".into()), Verdict::Pass { left_out: 1000 - BURST });
        assert_eq!(limiter.admit(1, SECOND, || "x".into()), Verdict::Pass { left_out: 0 });
        assert_eq!(limiter.admit(1, SECOND, || "x".into()), Verdict::Drop);
    }

    #[test]
    fn a_flood_of_one_pod_does_not_touch_another() {
        let mut limiter = Limiter::default();
        for _ in 0..500 {
            limiter.admit(1, 0, || "x".into());
        }
        assert_eq!(limiter.admit(2, 0, || "y".into()), Verdict::Pass { left_out: 0 });
    }

    #[test]
    fn a_count_is_told_even_if_that_line_never_comes_again() {
        let mut limiter = Limiter::default();
        for _ in 0..BURST + 7 {
            limiter.admit(1, 0, || "pull failed".into());
        }
        assert_eq!(limiter.overdue(SECOND), None, "it may still speak for itself");
        assert_eq!(limiter.overdue(3 * SECOND), Some(("pull failed".into(), 7)));
        assert_eq!(limiter.overdue(4 * SECOND), None);
    }

    #[test]
    fn many_kinds_of_lines_keep_the_table_bounded() {
        let mut limiter = Limiter::default();
        for key in 0..100_000 {
            assert_eq!(limiter.admit(key, key as i64, || "x".into()), Verdict::Pass { left_out: 0 });
        }
        assert!(limiter.buckets.len() <= SLOTS);
    }
}
