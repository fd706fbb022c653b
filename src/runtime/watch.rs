//! One thread that hears all monitors: exits as they are told, and monitors that die.
//!
//! Invariant: it only listens. A pod is watched from before its first container is made or
//! asked for, so that between what was asked and what is heard nothing is missed; something may
//! be told twice.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::layout::PodRun;
use super::logs::compress_rotated;
use super::model::RuntimeEvent;
use super::monitor::client::Client;
use super::monitor::wire::{Empty, Frame, MAX_FRAME, Reply, Request};
use crate::store::ids::PodUid;
use crate::sys::{pidfd, seqpacket};

#[derive(Clone)]
pub struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    epoll: Epoll,
    pods: Mutex<Pods>,
    /// Logs that wait for the thread that compresses; None while there is none.
    compressing: Arc<Mutex<Option<BTreeSet<PathBuf>>>>,
}

#[derive(Default)]
struct Pods {
    next: u64,
    by_token: HashMap<u64, Arc<Pod>>,
}

struct Pod {
    uid: PodUid,
    run: PodRun,
    pid: i32,
    pidfd: OwnedFd,
    /// None while it is being made again.
    connection: Mutex<Option<Client>>,
}

/// The lowest bit of a token says which of a pod's two descriptors is meant.
const DEATH: u64 = 1;

impl Watch {
    pub fn start(events: mpsc::Sender<RuntimeEvent>) -> io::Result<Watch> {
        let shared = Arc::new(Shared {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            pods: Mutex::default(),
            compressing: Arc::default(),
        });
        let (thread, weak) = (std::thread::Builder::new(), Arc::downgrade(&shared));
        thread.name("runtime-watch".to_owned()).stack_size(128 * 1024).spawn(move || {
            let mut buffer = vec![0; MAX_FRAME];
            // Ends with the runtime: nobody would hear any more.
            while let Some(shared) = weak.upgrade() {
                if !shared.turn(&events, &mut buffer) {
                    return;
                }
            }
        })?;
        Ok(Watch { shared })
    }

    /// Again for a pod that is watched: nothing.
    pub fn add(&self, uid: &PodUid, run: &PodRun, pid: i32, pidfd: OwnedFd) -> io::Result<()> {
        if self.shared.lock().by_token.values().any(|pod| pod.uid == *uid && pod.pid == pid) {
            return Ok(());
        }
        self.forget(uid);
        let client = subscribe(run)?;
        let pod = Pod { uid: uid.clone(), run: run.clone(), pid, pidfd, connection: Mutex::new(None) };
        let (token, pod) = {
            let mut pods = self.shared.lock();
            pods.next += 2;
            let (token, pod) = (pods.next, Arc::new(pod));
            pods.by_token.insert(token, pod.clone());
            (token, pod)
        };
        self.shared.epoll.add(pod.pidfd.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, token | DEATH))?;
        self.shared.epoll.add(client.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        *lock(&pod.connection) = Some(client);
        Ok(())
    }

    /// Hears nothing of the pod any more.
    pub fn forget(&self, uid: &PodUid) {
        let mut pods = self.shared.lock();
        let tokens: Vec<u64> = pods.by_token.iter().filter(|(_, pod)| pod.uid == *uid).map(|(token, _)| *token).collect();
        for token in tokens {
            if let Some(pod) = pods.by_token.remove(&token) {
                // Closing takes it out of the set too, unless a fork holds a copy for a moment.
                let _ = self.shared.epoll.delete(pod.pidfd.as_fd());
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn subscribe(run: &PodRun) -> io::Result<Client> {
    let mut client = Client::connect(run)?;
    // The answer comes with the events and is skipped there.
    client.ask(&Request::Subscribe(Empty {}), &[]).map_err(io::Error::other)?;
    Ok(client)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Pods> {
        lock(&self.pods)
    }

    /// False once nobody listens.
    fn turn(&self, events: &mpsc::Sender<RuntimeEvent>, buffer: &mut [u8]) -> bool {
        let mut ready = [EpollEvent::empty(); 16];
        // A limit, so that the thread notices when the runtime has gone.
        let n = match self.epoll.wait(&mut ready, EpollTimeout::from(60_000u16)) {
            Ok(n) => n,
            Err(nix::errno::Errno::EINTR) => 0,
            // The set is ours and lives: nothing else can be wrong with the call.
            Err(_) => return false,
        };
        for event in ready.iter().take(n) {
            let token = event.data() & !DEATH;
            let Some(pod) = self.lock().by_token.get(&token).cloned() else { continue };
            let told =
                if event.data() & DEATH != 0 { self.died(token, &pod, events) } else { self.hear(token, &pod, events, buffer) };
            if !told {
                return false;
            }
        }
        true
    }

    fn died(&self, token: u64, pod: &Pod, events: &mpsc::Sender<RuntimeEvent>) -> bool {
        // Forgotten in the meantime: its end was asked for.
        if self.lock().by_token.remove(&token).is_none() {
            return true;
        }
        pidfd::reap(pod.pid);
        events.send(RuntimeEvent::MonitorDied { uid: pod.uid.clone() }).is_ok()
    }

    fn hear(&self, token: u64, pod: &Pod, events: &mpsc::Sender<RuntimeEvent>, buffer: &mut [u8]) -> bool {
        loop {
            let received = match &*lock(&pod.connection) {
                // A connection that fails is a connection that is gone. Nothing here waits.
                Some(client) => seqpacket::receive(client.as_fd(), buffer).unwrap_or(seqpacket::Received::Closed),
                None => return true,
            };
            match received {
                seqpacket::Received::Nothing => return true,
                seqpacket::Received::TooLong => {}
                seqpacket::Received::Closed => {
                    self.subscribe_again(token, pod);
                    return true;
                }
                seqpacket::Received::Message { len, .. } => {
                    let Ok(frame) = Frame::parse(buffer.get(..len).unwrap_or_default()) else { continue };
                    let exits = match Reply::decode(&frame) {
                        Ok(Reply::Exited(exited)) => vec![(exited.id, exited.exit)],
                        // Asked for after a gap.
                        Ok(Reply::State(state)) => {
                            state.containers.into_iter().filter_map(|c| c.exit.map(|exit| (c.id, exit))).collect()
                        }
                        Ok(Reply::Rotated(rotated)) => {
                            self.compress(rotated.path);
                            continue;
                        }
                        // Answers, and what a newer monitor tells.
                        Ok(_) | Err(_) => continue,
                    };
                    for (id, exit) in exits {
                        if events.send(RuntimeEvent::Exited { uid: pod.uid.clone(), id, exit }).is_err() {
                            return false;
                        }
                    }
                }
            }
        }
    }

    /// In a thread for as long as there is something to compress. What is not compressed (no thread,
    /// no space, no agent at that time) is met again at the next rotation.
    fn compress(&self, log: PathBuf) {
        let mut waiting = lock(&self.compressing);
        if let Some(queue) = waiting.as_mut() {
            queue.insert(log);
            return;
        }
        let all = Arc::clone(&self.compressing);
        let work = move || {
            let mut next = Some(log);
            while let Some(log) = next {
                // Said above; a full disk is the log's trouble already, and told there.
                let _ = compress_rotated(&log);
                let mut waiting = lock(&all);
                next = waiting.as_mut().and_then(BTreeSet::pop_first);
                if next.is_none() {
                    *waiting = None;
                }
            }
        };
        if std::thread::Builder::new().name("compress-logs".to_owned()).stack_size(128 * 1024).spawn(work).is_ok() {
            *waiting = Some(BTreeSet::new());
        }
    }

    /// The monitor lives (its pidfd says otherwise if not) but has dropped us, as one too slow:
    /// what was missed is asked for.
    fn subscribe_again(&self, token: u64, pod: &Pod) {
        *lock(&pod.connection) = None;
        let again = subscribe(&pod.run).and_then(|mut client| {
            client.ask(&Request::State(Empty {}), &[]).map_err(io::Error::other)?;
            self.epoll.add(client.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, token))?;
            Ok(client)
        });
        if let Ok(client) = again {
            *lock(&pod.connection) = Some(client);
        }
    }
}
