//! Who is connected, and who has to go when all places are taken.
//!
//! Invariant: at most `PLACES` connections; of these at most `LONG` are in verbs that take as long
//! as their work does, so that a short question always finds a place: the oldest client that has
//! not even asked yet makes room for it. The lock is not held over the last word to one that is put out.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::model::{Answer, Failure, FailureKind};

pub const PLACES: usize = 32;
pub const LONG: usize = 24;
/// A client that takes an answer slower than this may be put out for another.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Nothing was asked yet.
    Waiting,
    /// Answered from memory.
    Short,
    /// A pull, an import, stop-all.
    Long,
}

struct Slot {
    id: u64,
    socket: Arc<UnixStream>,
    since: Instant,
    doing: Doing,
}

#[derive(Default)]
pub struct Slots {
    taken: Mutex<(u64, Vec<Slot>)>,
}

impl Slots {
    /// A place for a new connection; None where everyone who holds one is at work.
    pub fn enter(self: &Arc<Slots>, socket: &Arc<UnixStream>, now: Instant) -> Option<Place> {
        let (place, out) = self.admit(socket, now)?;
        if let Some(out) = out {
            if out.doing == Doing::Waiting {
                // It has not asked yet, so it may come again; one that is gone needs no word.
                let _ = super::serve::answer(&out.socket, &Answer::Error(busy()), &[]);
            }
            // Its thread's read or write ends at once. An error means that it is gone already.
            let _ = out.socket.shutdown(Shutdown::Both);
        }
        Some(place)
    }

    /// The place, and who had to go for it.
    fn admit(self: &Arc<Slots>, socket: &Arc<UnixStream>, now: Instant) -> Option<(Place, Option<Slot>)> {
        let mut guard = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (next, slots) = &mut *guard;
        let out = if slots.len() >= PLACES { Some(slots.remove(pick(slots, now)?)) } else { None };
        *next += 1;
        slots.push(Slot { id: *next, socket: Arc::clone(socket), since: now, doing: Doing::Waiting });
        Some((Place { slots: Arc::clone(self), id: *next }, out))
    }
}

/// What one hears for whom there is no place: nothing was begun for it.
pub fn busy() -> Failure {
    Failure::new(FailureKind::Busy, "too many clients are being served; try again")
}

/// The oldest that waits, else the oldest short one that has lost our patience.
fn pick(slots: &[Slot], now: Instant) -> Option<usize> {
    let oldest = |may_go: &dyn Fn(&Slot) -> bool| {
        slots.iter().enumerate().filter(|(_, slot)| may_go(slot)).min_by_key(|(_, slot)| slot.since).map(|(at, _)| at)
    };
    oldest(&|slot| slot.doing == Doing::Waiting)
        .or_else(|| oldest(&|slot| slot.doing == Doing::Short && now.duration_since(slot.since) > PATIENCE))
}

/// One connection's place; dropping it gives it back.
pub struct Place {
    slots: Arc<Slots>,
    id: u64,
}

impl Place {
    /// False: too many long ones already, or it was put out.
    pub fn begins(&self, doing: Doing) -> bool {
        let mut guard = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let long = guard.1.iter().filter(|s| s.doing == Doing::Long).count();
        if doing == Doing::Long && long >= LONG {
            return false;
        }
        match guard.1.iter_mut().find(|s| s.id == self.id) {
            Some(slot) => {
                slot.doing = doing;
                true
            }
            None => false,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut guard = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        guard.1.retain(|s| s.id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> Arc<UnixStream> {
        Arc::new(UnixStream::pair().unwrap().0)
    }

    #[test]
    fn a_crowd_that_asks_nothing_makes_room_for_one_that_does() {
        let slots = Arc::new(Slots::default());
        let start = Instant::now();
        let crowd: Vec<_> =
            (0..PLACES as u64).map(|n| slots.enter(&socket(), start + Duration::from_millis(n)).unwrap()).collect();
        let late = slots.enter(&socket(), start + Duration::from_secs(1)).expect("the oldest goes");
        assert!(late.begins(Doing::Short));
        assert!(!crowd[0].begins(Doing::Short), "it was put out");
        assert!(crowd[1].begins(Doing::Short), "the others stay");
    }

    #[test]
    fn long_work_leaves_places_for_short_questions_and_is_never_put_out() {
        let slots = Arc::new(Slots::default());
        let start = Instant::now();
        let places: Vec<_> = (0..PLACES).map(|_| slots.enter(&socket(), start).unwrap()).collect();
        let long = places.iter().filter(|p| p.begins(Doing::Long)).count();
        assert_eq!(long, LONG);
        for place in &places[LONG..] {
            assert!(place.begins(Doing::Short));
        }
        assert!(slots.enter(&socket(), start + Duration::from_secs(1)).is_none(), "everyone is at work");
        assert!(slots.enter(&socket(), start + Duration::from_secs(60)).is_some(), "a short one has had its time");
        drop(places);
        assert!(slots.enter(&socket(), start).is_some());
    }
}
