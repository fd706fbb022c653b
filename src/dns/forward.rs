//! Questions whose answer others know: in flight, at which server, for whom.
//!
//! ```text
//! ask ─ known and valid ─────────────────────────────> reply from the cache
//!     └ else a flight (one for all who ask the same)
//!        ├ attempt 1: UDP ── no word for TRY, an error, a failure ──> next server, attempt 2 …
//!        │                └─ truncated ──> the same server by TCP
//!        ├ an answer ──> cache, reply to all who wait
//!        ├ STALE_AFTER, and the cache has an old one ──> they get that; the flight goes on
//!        └ GIVE_UP, or no server left ──> the old one, else SERVFAIL
//! ```
//!
//! Pure: what happens on the wire is told to it, what is to happen comes out as [`Effect`]s.
//! Invariant: everybody who waits gets exactly one reply, GIVE_UP after asking at the latest; the
//! number of flights, of those who wait and of attempts is bounded. A question that comes back
//! to us from an upstream (a loop) joins the flight that sent it, and so ends there.
//! RFC 5452 (port, id, question and source must fit), RFC 7766, RFC 8767, RFC 9520.
#![deny(clippy::disallowed_methods)]

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::answer::{self, Alias};
use super::cache::{self, Cache, Key, Known};
use super::model::Counters;
use super::upstreams::Upstreams;
use super::wire::{self, Envelope, rcode};

const MILLI: i64 = 1_000_000;
/// How long one server has before the next one is asked too. What it says later still counts.
pub const TRY: i64 = 1200 * MILLI;
/// Resolvers of C libraries wait five seconds.
pub const GIVE_UP: i64 = 4500 * MILLI;
/// RFC 8767 §5 has 1.8 s; a server on the network of an edge node answers within a second.
pub const STALE_AFTER: i64 = 1000 * MILLI;
/// RFC 9520 §3.2: at least a second; longer where an old answer is at hand.
const FAILED_FOR: i64 = 1000 * MILLI;
const STALE_FOR: i64 = 5000 * MILLI;

const FLIGHTS: usize = 128;
const WAITING: usize = 1024;
/// Of one address: no pod takes the places of all others.
const WAITING_EACH: usize = 64;
const FAILURES: usize = 512;

/// Where a reply goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// By which socket, to whom.
    Udp(usize, SocketAddr),
    Tcp(u32),
}

/// Somebody who asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    pub to: To,
    pub ip: IpAddr,
    pub envelope: Envelope,
    /// What led from their question to the one that is asked.
    pub aliases: Vec<Alias>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Reply {
        to: To,
        message: Vec<u8>,
    },
    /// From a fresh socket, so from a port that nobody can know.
    Ask {
        attempt: u32,
        server: SocketAddr,
        tcp: bool,
        message: Vec<u8>,
    },
    /// Whatever comes now is too late.
    Forget {
        attempt: u32,
    },
}

/// Random ids; None: the kernel gives none, and no question is asked with one that can be guessed.
pub type Ids<'a> = &'a mut dyn FnMut() -> Option<u16>;

pub struct Forwarder {
    flights: BTreeMap<u32, Flight>,
    by_key: HashMap<Key, u32>,
    /// Attempt → flight.
    attempts: HashMap<u32, u32>,
    waiting: HashMap<IpAddr, usize>,
    /// Questions that failed, until when nobody is asked again.
    failures: HashMap<Key, i64>,
    cache: Cache,
    upstreams: Upstreams,
    /// The last flight that ended heard nothing from anyone.
    down: bool,
    numbers: u32,
    counters: Arc<Counters>,
}

struct Flight {
    key: Key,
    question: Vec<u8>,
    dnssec_ok: bool,
    checking_disabled: bool,
    began: i64,
    attempts: Vec<Attempt>,
    /// When the next server is asked.
    next: i64,
    waiters: Vec<Client>,
    /// When an old answer has to do.
    stale_at: Option<i64>,
    /// All that UDP could carry.
    truncated: Option<Vec<u8>>,
    heard: bool,
}

struct Attempt {
    number: u32,
    server: SocketAddr,
    id: u16,
    edns: bool,
    tcp: bool,
    lives: bool,
}

impl Forwarder {
    pub fn new(cache_bytes: usize, counters: Arc<Counters>) -> Forwarder {
        Forwarder {
            flights: BTreeMap::new(),
            by_key: HashMap::new(),
            attempts: HashMap::new(),
            waiting: HashMap::new(),
            failures: HashMap::new(),
            cache: Cache::new(cache_bytes),
            upstreams: Upstreams::default(),
            down: false,
            numbers: 0,
            counters,
        }
    }

    pub fn set_servers(&mut self, servers: &[SocketAddr]) {
        self.upstreams.set(servers);
        // Another network may know what this one did not.
        self.failures.clear();
    }

    /// Somebody asks; `question` is name, type and class.
    pub fn ask(&mut self, question: Vec<u8>, client: Client, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let dnssec_ok = client.envelope.edns.is_some_and(|e| e.dnssec_ok);
        let checking_disabled = client.envelope.flags & wire::flag::CHECKING_DISABLED != 0;
        let key = cache::key(&question, dnssec_ok, checking_disabled);
        let failed = self.failures.get(&key).is_some_and(|until| now < *until);
        let known = self.cache.look(&key, now);
        match &known {
            Known::Fresh(message, age) => {
                Counters::add(&self.counters.hits);
                out.push(reply(&client, message, |ttl| ttl.saturating_sub(*age)));
                return;
            }
            Known::Stale(message) if failed || self.down => {
                self.reply_stale(&client, message, out);
                if !failed && !self.by_key.contains_key(&key) && self.flights.len() < FLIGHTS {
                    self.begin(key, question, dnssec_ok, checking_disabled, now, ids, out);
                }
                return;
            }
            Known::No if failed => return self.reply_failure(&client, out),
            Known::Stale(_) | Known::No => {}
        }
        let held = self.waiting.get(&client.ip).copied().unwrap_or(0);
        let flight = match self.by_key.get(&key).copied() {
            _ if held >= WAITING_EACH || self.waiting.values().sum::<usize>() >= WAITING => None,
            Some(number) => Some(number),
            None if self.flights.len() >= FLIGHTS => None,
            None => Some(self.add(key, question, dnssec_ok, checking_disabled, now)),
        };
        let flight = flight.and_then(|number| Some((number, self.flights.get_mut(&number)?)));
        let Some((number, flight)) = flight else {
            Counters::add(&self.counters.overload);
            return match known {
                Known::Stale(message) => self.reply_stale(&client, &message, out),
                Known::Fresh(..) | Known::No => self.reply_failure(&client, out),
            };
        };
        // The same datagram again: the asker grew impatient, and gets one reply.
        if !flight.waiters.iter().any(|w| w.to == client.to && w.envelope.id == client.envelope.id) {
            *self.waiting.entry(client.ip).or_default() += 1;
            flight.waiters.push(client);
        }
        if matches!(known, Known::Stale(_)) {
            flight.stale_at.get_or_insert(now + STALE_AFTER);
        }
        if flight.attempts.is_empty() {
            self.next_attempt(number, now, ids, out);
        }
    }

    /// A flight for nobody: the cache is to be fresh again.
    #[allow(clippy::too_many_arguments)] // what makes a flight, and the three that every step takes
    fn begin(&mut self, key: Key, question: Vec<u8>, dnssec_ok: bool, cd: bool, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let number = self.add(key, question, dnssec_ok, cd, now);
        self.next_attempt(number, now, ids, out);
    }

    fn add(&mut self, key: Key, question: Vec<u8>, dnssec_ok: bool, checking_disabled: bool, now: i64) -> u32 {
        let number = self.number();
        self.by_key.insert(Arc::clone(&key), number);
        let flight = Flight {
            key,
            question,
            dnssec_ok,
            checking_disabled,
            began: now,
            attempts: Vec::new(),
            next: i64::MAX,
            waiters: Vec::new(),
            stale_at: None,
            truncated: None,
            heard: false,
        };
        self.flights.insert(number, flight);
        number
    }

    /// Unique among what is in flight: at most a few hundred of 2³² are.
    fn number(&mut self) -> u32 {
        self.numbers = self.numbers.wrapping_add(1);
        self.numbers
    }

    /// Asks the next server; where none is left and none may still answer, the flight ends.
    fn next_attempt(&mut self, number: u32, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let Some(flight) = self.flights.get(&number) else { return };
        let most = if self.upstreams.count() == 1 { 3 } else { 2 };
        let tried = |server: &SocketAddr| flight.attempts.iter().filter(|a| a.server == *server && !a.tcp).count();
        let server = self.upstreams.order(now).into_iter().filter(|s| tried(s) < most).min_by_key(tried);
        match server {
            Some(server) => self.attempt(number, server, false, now, ids, out),
            None if flight.attempts.iter().any(|a| a.lives) => {
                if let Some(flight) = self.flights.get_mut(&number) {
                    flight.next = i64::MAX;
                }
            }
            None => self.give_up(number, now, out),
        }
    }

    fn attempt(&mut self, number: u32, server: SocketAddr, tcp: bool, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let Some(id) = ids() else { return self.give_up(number, now, out) };
        let attempt = self.number();
        let edns = self.upstreams.knows_edns(server, now);
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let message = wire::ask(id, &flight.question, flight.checking_disabled, edns.then_some(flight.dnssec_ok));
        flight.attempts.push(Attempt { number: attempt, server, id, edns, tcp, lives: true });
        flight.next = now + TRY;
        self.attempts.insert(attempt, number);
        Counters::add(&self.counters.asked);
        out.push(Effect::Ask { attempt, server, tcp, message });
    }

    /// Bytes came for an attempt, from the server that it went to.
    pub fn told(&mut self, attempt: u32, bytes: &[u8], now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let Some((number, flight)) = self.flight_of(attempt) else { return };
        let Some(asked) = flight.attempts.iter_mut().find(|a| a.number == attempt) else { return };
        let (server, tcp, edns) = (asked.server, asked.tcp, asked.edns);
        let Some(said) = wire::reply(bytes, asked.id, &flight.question) else {
            Counters::add(&self.counters.forged);
            // Over UDP somebody may guess; what is right may still come.
            if tcp {
                self.failed(attempt, now, ids, out);
            }
            return;
        };
        asked.lives = false;
        flight.heard = true;
        self.attempts.remove(&attempt);
        out.push(Effect::Forget { attempt });
        self.upstreams.answered(server);
        self.down = false;
        match said.rcode {
            rcode::OK | rcode::NO_NAME if said.truncated && !tcp => {
                if let Some(flight) = self.flights.get_mut(&number) {
                    flight.truncated = Some(said.message);
                }
                self.attempt(number, server, true, now, ids, out);
            }
            rcode::OK | rcode::NO_NAME => self.answered(number, &said, now, out),
            rcode::FORMAT | rcode::NOT_IMPLEMENTED if edns && self.upstreams.is_plain(server, now) => {
                self.attempt(number, server, tcp, now, ids, out);
            }
            _ => self.next_attempt(number, now, ids, out),
        }
    }

    /// An attempt cannot succeed any more: refused, unreachable, closed.
    pub fn failed(&mut self, attempt: u32, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let Some((number, flight)) = self.flight_of(attempt) else { return };
        let Some(asked) = flight.attempts.iter_mut().find(|a| a.number == attempt) else { return };
        asked.lives = false;
        let (server, tcp) = (asked.server, asked.tcp);
        self.attempts.remove(&attempt);
        out.push(Effect::Forget { attempt });
        let truncated = if tcp { self.flights.get_mut(&number).and_then(|f| f.truncated.take()) } else { None };
        match truncated {
            // The asker may have a way to TCP that we have not; a part is better than nothing.
            Some(message) => {
                let said = wire::Reply { message, rcode: rcode::OK, truncated: true, ttl: None, negative: false };
                self.answered(number, &said, now, out);
            }
            None => {
                self.upstreams.failed(server, now);
                self.next_attempt(number, now, ids, out);
            }
        }
    }

    fn flight_of(&mut self, attempt: u32) -> Option<(u32, &mut Flight)> {
        let number = *self.attempts.get(&attempt)?;
        Some((number, self.flights.get_mut(&number)?))
    }

    fn answered(&mut self, number: u32, said: &wire::Reply, now: i64, out: &mut Vec<Effect>) {
        let Some(flight) = self.end(number, out) else { return };
        self.failures.remove(&flight.key);
        let most = if said.negative { cache::MOST_NEGATIVE } else { cache::MOST_POSITIVE };
        let mut message = said.message.clone();
        wire::set_ttls(&mut message, |ttl| ttl.min(most));
        if let (Some(ttl), false) = (said.ttl, said.truncated) {
            self.cache.keep(&flight.key, &message, ttl, said.negative, now);
        }
        out.extend(flight.waiters.iter().map(|client| reply(client, &message, |ttl| ttl)));
    }

    fn give_up(&mut self, number: u32, now: i64, out: &mut Vec<Effect>) {
        let Some(flight) = self.end(number, out) else { return };
        for attempt in flight.attempts.iter().filter(|a| a.lives) {
            self.upstreams.failed(attempt.server, now);
        }
        self.down = !flight.heard;
        if self.failures.len() >= FAILURES {
            self.failures.retain(|_, until| now < *until);
        }
        let old = match self.cache.look(&flight.key, now) {
            Known::Stale(message) | Known::Fresh(message, _) => Some(message),
            Known::No => None,
        };
        if self.failures.len() < FAILURES {
            let until = now + if old.is_some() { STALE_FOR } else { FAILED_FOR };
            self.failures.insert(Arc::clone(&flight.key), until);
        }
        for client in &flight.waiters {
            match &old {
                Some(message) => self.reply_stale(client, message, out),
                None => self.reply_failure(client, out),
            }
        }
    }

    /// Takes the flight out of all tables; its waiters are the caller's.
    fn end(&mut self, number: u32, out: &mut Vec<Effect>) -> Option<Flight> {
        let flight = self.flights.remove(&number)?;
        self.by_key.remove(&flight.key);
        for attempt in flight.attempts.iter().filter(|a| a.lives) {
            self.attempts.remove(&attempt.number);
            out.push(Effect::Forget { attempt: attempt.number });
        }
        self.let_go(&flight.waiters);
        Some(flight)
    }

    fn let_go(&mut self, waiters: &[Client]) {
        for client in waiters {
            if let Some(held) = self.waiting.get_mut(&client.ip) {
                *held -= 1;
                if *held == 0 {
                    self.waiting.remove(&client.ip);
                }
            }
        }
    }

    /// When [`Forwarder::pass`] has something to do.
    pub fn due(&self) -> Option<i64> {
        self.flights.values().map(|f| f.next.min(f.began + GIVE_UP).min(f.stale_at.unwrap_or(i64::MAX))).min()
    }

    /// Time went by.
    pub fn pass(&mut self, now: i64, ids: Ids<'_>, out: &mut Vec<Effect>) {
        let due = |f: &Flight| now >= f.next.min(f.began + GIVE_UP).min(f.stale_at.unwrap_or(i64::MAX));
        let numbers: Vec<u32> = self.flights.iter().filter(|(_, f)| due(f)).map(|(number, _)| *number).collect();
        for number in numbers {
            let Some(flight) = self.flights.get_mut(&number) else { continue };
            if now >= flight.began + GIVE_UP {
                self.give_up(number, now, out);
                continue;
            }
            if flight.stale_at.is_some_and(|at| now >= at) {
                flight.stale_at = None;
                let key = Arc::clone(&flight.key);
                if let Known::Stale(message) = self.cache.look(&key, now) {
                    let waiters = self.flights.get_mut(&number).map(|f| std::mem::take(&mut f.waiters)).unwrap_or_default();
                    self.let_go(&waiters);
                    waiters.iter().for_each(|client| self.reply_stale(client, &message, out));
                }
            }
            let Some(flight) = self.flights.get_mut(&number) else { continue };
            if now >= flight.next {
                if let Some(slow) = flight.attempts.last().filter(|a| a.lives) {
                    self.upstreams.failed(slow.server, now);
                }
                self.next_attempt(number, now, ids, out);
            }
        }
    }

    fn reply_stale(&self, client: &Client, message: &[u8], out: &mut Vec<Effect>) {
        Counters::add(&self.counters.stale);
        out.push(reply(client, message, |_| cache::STALE_TTL));
    }

    fn reply_failure(&self, client: &Client, out: &mut Vec<Effect>) {
        Counters::add(&self.counters.failed);
        let message = client.envelope.seal(client.envelope.empty(rcode::FAILURE), false);
        out.push(Effect::Reply { to: client.to, message });
    }
}

fn reply(client: &Client, message: &[u8], ttl: impl Fn(u32) -> u32) -> Effect {
    let mut message = message.to_vec();
    wire::set_ttls(&mut message, ttl);
    let aliased = !client.aliases.is_empty();
    if aliased {
        message = answer::join(&client.envelope, &client.aliases, &message);
    }
    Effect::Reply { to: client.to, message: client.envelope.seal(message, aliased) }
}

#[cfg(test)]
#[path = "forward_tests.rs"]
mod tests;
