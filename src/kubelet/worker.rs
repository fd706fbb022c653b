//! The pool that carries out effects: a bounded number of threads that come when there is work
//! and go when there has been none for a while, so that an idle agent has none of them.
//!
//! Invariant: every job that was taken is run to its end exactly once; a job that panics ends the
//! agent, and the next start repairs what it left (the planner would wait for its report for ever).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

const IDLE: Duration = Duration::from_secs(3);

/// Threads called `name`, at most `max` of them. Cheap to clone.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    max: usize,
    stack: usize,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl Pool {
    pub fn new(name: &'static str, max: usize, stack: usize) -> Pool {
        Pool { shared: Arc::new(Shared { name, max, stack, state: Mutex::default(), work: Condvar::new() }) }
    }

    /// Never blocks; jobs begin in the order in which they came.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        state.queue.push_back(Box::new(job));
        if state.idle >= state.queue.len() {
            self.shared.work.notify_one();
            return;
        }
        if state.threads >= self.shared.max {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.shared);
        let spawned = Builder::new().name(self.shared.name.to_owned()).stack_size(self.shared.stack).spawn(move || shared.work());
        if let Err(error) = spawned {
            let left = {
                let mut state = self.shared.lock();
                state.threads -= 1;
                state.threads
            };
            // With another thread there the job is only late.
            if left == 0 {
                tracing::error!(error = %error, "no thread can be started, and there is none to carry on with");
                std::process::abort();
            }
        }
    }
}

impl Shared {
    /// A poisoned lock is a panic that ends the process anyway.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let _guard = AbortOnPanic;
        loop {
            let mut state = self.lock();
            let job = loop {
                if let Some(job) = state.queue.pop_front() {
                    break job;
                }
                state.idle += 1;
                let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.queue.is_empty() {
                    state.threads -= 1;
                    return;
                }
            };
            drop(state);
            job();
        }
    }
}

/// A panic in a job must not look like a job that takes long.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    #[test]
    fn every_job_runs_once_and_no_more_threads_than_allowed_at_once() {
        let pool = Pool::new("test", 3, 64 * 1024);
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all) = channel();
        for n in 0..200 {
            let (now, most, done) = (Arc::clone(&now), Arc::clone(&most), done.clone());
            pool.submit(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(200));
                now.fetch_sub(1, Ordering::SeqCst);
                done.send(n).unwrap();
            });
        }
        drop(done);
        let mut seen: Vec<i32> = all.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
    }
}
