//! Replies of upstreams, kept as bytes: for as long as they hold, and longer for when the uplink
//! is gone.
//!
//! Pure. Invariant: it never weighs more than its limit, what it needs to find an entry included;
//! what was used longest ago goes first. RFC 2308 (negative), RFC 8767 (stale), RFC 9520
//! (failures).
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Seconds. An edge node's names change seldom; what is new has to be seen all the same.
pub const MOST_POSITIVE: u32 = 3600;
pub const MOST_NEGATIVE: u32 = 300;
/// RFC 8767 §4: one to three days.
pub const MOST_STALE: u32 = 3 * 86400;
/// What a stale record may be kept elsewhere. RFC 8767 §4.
pub const STALE_TTL: u32 = 30;
/// Pointers, counters and the tables' share of an entry.
const OVERHEAD: usize = 200;
const SECOND: i64 = 1_000_000_000;

/// Name in lower case, type, class, and what else makes an answer differ (DO, CD).
pub type Key = Arc<[u8]>;

pub fn key(question: &[u8], dnssec_ok: bool, checking_disabled: bool) -> Key {
    let mut key = question.to_ascii_lowercase();
    // Type and class are no letters; as bytes they may look like some.
    let tail = question.len().saturating_sub(4);
    if let (Some(to), Some(from)) = (key.get_mut(tail..), question.get(tail..)) {
        to.copy_from_slice(from);
    }
    key.push(u8::from(dnssec_ok) << 1 | u8::from(checking_disabled));
    key.into()
}

pub struct Cache {
    limit: usize,
    weight: usize,
    entries: HashMap<Key, Entry>,
    /// By last use.
    order: BTreeMap<u64, Key>,
    uses: u64,
}

struct Entry {
    message: Arc<[u8]>,
    /// Boot time in nanoseconds.
    since: i64,
    ttl: u32,
    used: u64,
}

/// What is known of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    No,
    /// Seconds since it came.
    Fresh(Arc<[u8]>, u32),
    Stale(Arc<[u8]>),
}

impl Cache {
    pub fn new(limit: usize) -> Cache {
        Cache { limit, weight: 0, entries: HashMap::new(), order: BTreeMap::new(), uses: 0 }
    }

    pub fn look(&mut self, key: &Key, now: i64) -> Known {
        let Some(entry) = self.entries.get_mut(key) else { return Known::No };
        let age = u32::try_from(now.saturating_sub(entry.since).max(0) / SECOND).unwrap_or(u32::MAX);
        if age >= entry.ttl.saturating_add(MOST_STALE) {
            self.remove(key);
            return Known::No;
        }
        self.uses += 1;
        let before = std::mem::replace(&mut entry.used, self.uses);
        if let Some(key) = self.order.remove(&before) {
            self.order.insert(self.uses, key);
        }
        let message = Arc::clone(&entry.message);
        if age < entry.ttl { Known::Fresh(message, age) } else { Known::Stale(message) }
    }

    /// `ttl` as the reply has it; the limits are ours.
    pub fn keep(&mut self, key: &Key, message: &[u8], ttl: u32, negative: bool, now: i64) {
        let weight = weight(key, message);
        if ttl == 0 || weight > self.limit / 8 {
            return;
        }
        self.remove(key);
        while self.weight + weight > self.limit {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.remove(&oldest);
        }
        self.uses += 1;
        let ttl = ttl.min(if negative { MOST_NEGATIVE } else { MOST_POSITIVE });
        self.entries.insert(Arc::clone(key), Entry { message: message.into(), since: now, ttl, used: self.uses });
        self.order.insert(self.uses, Arc::clone(key));
        self.weight += weight;
    }

    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.order.remove(&entry.used);
            self.weight -= weight(key, &entry.message);
        }
    }

    #[cfg(test)]
    fn weighs(&self) -> usize {
        self.weight
    }
}

fn weight(key: &Key, message: &[u8]) -> usize {
    key.len() + message.len() + OVERHEAD
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u32) -> Key {
        key(format!("\x05host{}\0\0\x01\0\x01", n % 10).as_bytes(), n >= 10, n >= 20)
    }

    #[test]
    fn an_entry_is_fresh_then_stale_then_gone() {
        let mut cache = Cache::new(1 << 20);
        cache.keep(&name(1), b"one", 60, false, 0);
        assert_eq!(cache.look(&name(1), 59 * SECOND), Known::Fresh(Arc::from(*b"one"), 59));
        assert_eq!(cache.look(&name(1), 60 * SECOND), Known::Stale(Arc::from(*b"one")));
        assert_eq!(cache.look(&name(1), i64::from(60 + MOST_STALE) * SECOND), Known::No);
        assert_eq!((cache.weighs(), cache.entries.len(), cache.order.len()), (0, 0, 0));
    }

    #[test]
    fn long_promises_are_cut_short_and_those_of_no_time_are_not_kept() {
        let mut cache = Cache::new(1 << 20);
        cache.keep(&name(1), b"one", u32::MAX, false, 0);
        cache.keep(&name(2), b"no", 86400, true, 0);
        cache.keep(&name(3), b"now", 0, false, 0);
        assert!(matches!(cache.look(&name(1), i64::from(MOST_POSITIVE) * SECOND), Known::Stale(_)));
        assert!(matches!(cache.look(&name(2), i64::from(MOST_NEGATIVE) * SECOND), Known::Stale(_)));
        assert_eq!(cache.look(&name(3), 0), Known::No);
    }

    #[test]
    fn upper_and_lower_case_are_one_name_and_types_are_not() {
        let ask = |text: &[u8]| key(text, false, false);
        assert_eq!(ask(b"\x02Ab\0\0\x01\0\x01"), ask(b"\x02aB\0\0\x01\0\x01"));
        // Type 65 (HTTPS) is the letter A, 97 the letter a.
        assert_ne!(ask(b"\x02ab\0\0\x41\0\x01"), ask(b"\x02ab\0\0\x61\0\x01"));
        assert_ne!(key(b"x\0\x01\0\x01", true, false), key(b"x\0\x01\0\x01", false, true));
    }

    #[test]
    fn it_never_weighs_more_than_its_limit_and_keeps_what_is_used() {
        let limit = 64 << 10;
        let mut cache = Cache::new(limit);
        cache.keep(&key(b"\x04used\0\0\x01\0\x01", false, false), &[7; 100], 60, false, 0);
        for n in 0..5000u32 {
            let other = key(format!("\x08{n:08}\0\0\x01\0\x01").as_bytes(), false, false);
            cache.keep(&other, &vec![1; (n % 900) as usize], 60, false, 0);
            assert!(cache.weighs() <= limit);
            let known = cache.look(&key(b"\x04used\0\0\x01\0\x01", false, false), 0);
            assert!(matches!(known, Known::Fresh(..)), "after {n}");
        }
        assert_eq!(cache.entries.len(), cache.order.len());
        assert!(cache.entries.len() > 20);
        cache.keep(&name(9), &vec![0; limit], 60, false, 0);
        assert_eq!(cache.look(&name(9), 0), Known::No, "one that pushes all others out is not kept");
    }
}
