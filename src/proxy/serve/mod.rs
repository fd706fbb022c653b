//! kube-proxy's servers: metrics, health of the proxy, health of Services for load balancers.
//!
//! ```text
//! owner ──Shared: record, role, checks, addresses──> pages, metrics (pure) ──> answers
//!   └──told──> keeper ── ports (pure): what to listen on ──> one task a listener, one a connection
//! ```
//!
//! One thread runs all of it on smol's executor. Invariants: what is answered was true under one
//! lock, and no answer waits for the owner; a port that somebody else has is said once, with the
//! flag that moves it, tried again every 5 s, and never a reason to fail; connections are bounded,
//! the oldest makes room.

mod http;
mod metrics;
mod pages;
mod ports;
pub(super) mod record;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use async_executor::{LocalExecutor, Task};
use async_io::{Async, Timer};
use futures_lite::FutureExt;
use nix::errno::Errno;
use nix::sys::eventfd::EventFd;

use super::ProxyError;
use super::owner::Shared;
use crate::sys::clock;
use pages::Answer;
use ports::Room;
use record::Now;

const STACK: usize = 128 * 1024;
const AGAIN: Duration = Duration::from_secs(5);

/// Where to serve; None: not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServeConfig {
    pub metrics: Option<SocketAddr>,
    pub healthz: Option<SocketAddr>,
    /// What `/configz` answers: JSON.
    pub configz: String,
}

/// A Service whose endpoints on this node load balancers ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub port: u16,
    /// Ready endpoints on this node.
    pub ready: usize,
}

/// The running servers; dropping them closes all ports.
#[derive(Debug)]
pub struct Servers {
    told: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Servers {
    pub(super) fn start(config: ServeConfig, shared: Arc<Mutex<Shared>>, told: Arc<EventFd>) -> Result<Servers, ProxyError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (state, ended, woken) = (State { config, shared }, Arc::clone(&stop), Arc::clone(&told));
        let thread = std::thread::Builder::new().name("proxy-http".into()).stack_size(STACK);
        let thread = thread.spawn(move || {
            let executor = Rc::new(LocalExecutor::new());
            let keeper = keep(Rc::clone(&executor), Rc::new(state), woken, &ended);
            if let Err(e) = async_io::block_on(executor.run(keeper)) {
                tracing::error!(error = %e, "the proxy's metrics and health are not served any more");
            }
        });
        Ok(Servers { told, stop, thread: Some(thread.map_err(ProxyError::Start)?) })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Err(e) = self.told.write(1) {
            tracing::warn!(error = %e, "cannot end the proxy's servers");
            return;
        }
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::warn!("the proxy's servers had panicked");
        }
    }
}

struct State {
    config: ServeConfig,
    shared: Arc<Mutex<Shared>>,
}

impl State {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wanted(&self) -> BTreeMap<SocketAddr, Room> {
        let shared = self.shared();
        ports::wanted(&self.config, &shared.role, &shared.checks, &shared.node_ports)
    }

    fn answer(&self, room: &Room, path: &str) -> Answer {
        let now = Now { boot: clock::boot_nanos(), wall: clock::wall_nanos() };
        match (room, path) {
            (Room::Metrics, "/metrics") => {
                let record = self.shared().record.clone();
                Answer::new(200, pages::METRICS, metrics::text(&record))
            }
            (Room::Metrics, "/proxyMode") => Answer::new(200, pages::TEXT, "nftables"),
            (Room::Metrics, "/configz") => Answer::new(200, pages::JSON, self.config.configz.clone()),
            (Room::Metrics, "/healthz") => Answer::new(200, pages::TEXT, "ok"),
            (Room::Health, "/healthz") => {
                let mut shared = self.shared();
                let answer = pages::healthz(&shared.record.health(now));
                count(&mut shared.record.healthz, &answer);
                answer
            }
            (Room::Health, "/livez") => {
                let mut shared = self.shared();
                let answer = pages::livez(&shared.record.health(now));
                count(&mut shared.record.livez, &answer);
                answer
            }
            (Room::Service(name), _) => {
                let shared = self.shared();
                let ready = shared.checks.get(name).map_or(0, |check| check.ready);
                pages::service(&name.namespace, &name.name, ready, shared.record.health(now).is_good())
            }
            (Room::Metrics | Room::Health, _) => Answer::not_found(),
        }
    }
}

fn count([good, bad]: &mut [u64; 2], answer: &Answer) {
    *(if answer.is_good() { good } else { bad }) += 1;
}

type Executor = Rc<LocalExecutor<'static>>;

/// Listens where it should, until it is stopped.
async fn keep(executor: Executor, state: Rc<State>, told: Arc<EventFd>, stop: &AtomicBool) -> io::Result<()> {
    let told = Async::new(told)?;
    let mut open: BTreeMap<SocketAddr, (Room, Task<()>)> = BTreeMap::new();
    let mut failed: BTreeMap<SocketAddr, String> = BTreeMap::new();
    while !stop.load(Ordering::Acquire) {
        let wanted = state.wanted();
        // A port goes with its task, and with it who is connected.
        open.retain(|at, (room, _)| wanted.get(at) == Some(room));
        failed.retain(|at, _| wanted.contains_key(at));
        for (at, room) in wanted {
            if open.contains_key(&at) {
                continue;
            }
            match listen(at) {
                Ok(listener) => {
                    if failed.remove(&at).is_some() {
                        tracing::info!(address = %at, "the proxy's server listens now");
                    }
                    let task = accept(Rc::clone(&executor), Rc::clone(&state), room.clone(), listener);
                    open.insert(at, (room, executor.spawn(task)));
                }
                Err(e) => {
                    let said = e.to_string();
                    if failed.get(&at) != Some(&said) {
                        tracing::warn!(address = %at, error = said, cure = room.cure(), "the proxy cannot listen; trying again");
                        failed.insert(at, said);
                    }
                }
            }
        }
        let woken = async {
            told.readable().await?;
            match told.get_ref().read() {
                Ok(_) | Err(Errno::EAGAIN) => Ok::<(), io::Error>(()),
                Err(e) => Err(e.into()),
            }
        };
        let again = async {
            match failed.is_empty() {
                true => std::future::pending::<()>().await,
                false => drop(Timer::after(AGAIN).await),
            }
            Ok(())
        };
        woken.or(again).await?;
    }
    Ok(())
}

/// All addresses are those of both families.
fn listen(at: SocketAddr) -> io::Result<Async<TcpListener>> {
    if at.ip().is_unspecified() {
        match Async::<TcpListener>::bind((Ipv6Addr::UNSPECIFIED, at.port())) {
            Err(e) if matches!(e.raw_os_error().map(Errno::from_raw), Some(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL)) => {}
            done => return done,
        }
    }
    Async::<TcpListener>::bind(at)
}

async fn accept(executor: Executor, state: Rc<State>, room: Room, listener: Async<TcpListener>) {
    let room = Rc::new(room);
    let mut open: VecDeque<Task<()>> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                open.retain(|task| !task.is_finished());
                if open.len() >= room.most() {
                    // Who came long ago and is here still has been slow.
                    open.pop_front();
                }
                let (state, room) = (Rc::clone(&state), Rc::clone(&room));
                let task = async move { http::connection(stream, |path| state.answer(&room, path)).await };
                open.push_back(executor.spawn(task));
            }
            Err(e) => {
                tracing::debug!(error = %e, "cannot take a connection; trying again");
                Timer::after(Duration::from_millis(100)).await;
            }
        }
    }
}
