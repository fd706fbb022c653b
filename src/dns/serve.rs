//! The one thread: waits for questions, replies, connections and time, and carries out what
//! `answer` and `forward` decide.
//!
//! Invariant: nothing in it blocks but poll(2), and while nobody asks poll waits for ever: an idle
//! node is not woken. A port that somebody else holds is tried again every [`REBIND`].

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ring::rand::{SecureRandom, SystemRandom};

use super::answer::{self, Outcome};
use super::clients::Clients;
use super::files::Files;
use super::forward::{Client, Effect, Forwarder, To};
use super::links::{Heard, Links};
use super::model::{Config, Counters};
use super::wire::{Envelope, Query, Unfit};
use super::{Shared, holder};
use crate::sys::clock;

pub const REBIND: i64 = 5_000_000_000;
const PAUSE: i64 = 1_000_000_000;
/// Datagrams read of one socket before the others have their turn.
const BATCH: usize = 64;
/// No question is longer; what is comes cut off, and is no question.
const DATAGRAM: usize = 2048;

pub struct Server {
    config: Config,
    shared: Arc<Shared>,
    sockets: Vec<Sockets>,
    unbound: Vec<Unbound>,
    /// i64::MAX: all is bound.
    bind_at: i64,
    /// No connection is accepted before; i64::MIN: all are.
    accept_at: i64,
    clients: Clients,
    links: Links,
    forwarder: Forwarder,
    files: Files,
    random: SystemRandom,
    spin: u32,
}

struct Sockets {
    ip: IpAddr,
    udp: UdpSocket,
    tcp: TcpListener,
}

struct Unbound {
    ip: IpAddr,
    /// Said once.
    told: bool,
}

#[derive(Clone, Copy)]
enum Ready {
    Stop,
    Udp(usize),
    Tcp(usize),
    Client(u32),
    Link(u32),
}

impl Server {
    /// Binds what can be bound.
    pub fn new(config: Config, shared: Arc<Shared>) -> Server {
        let unbound = config.listen.iter().map(|ip| Unbound { ip: *ip, told: false }).collect();
        let ours = config.listen.iter().map(|ip| SocketAddr::new(*ip, config.port)).collect();
        let mut server = Server {
            forwarder: Forwarder::new(config.cache_bytes, Arc::clone(&shared.counters)),
            files: Files::new(config.resolv_conf.clone(), config.behind_stub.clone(), ours),
            config,
            shared,
            sockets: Vec::new(),
            unbound,
            bind_at: i64::MAX,
            accept_at: i64::MIN,
            clients: Clients::default(),
            links: Links::default(),
            random: SystemRandom::new(),
            spin: 0,
        };
        server.bind(clock::boot_nanos());
        server
    }

    /// Until the other end of `stop` is closed.
    pub fn run(mut self, stop: &UnixStream) {
        let mut ready = Vec::new();
        loop {
            if let Err(error) = self.wait(stop, &mut ready) {
                // Nothing to be done about it; without a pause it would be all that we do.
                tracing::error!(%error, "DNS: poll");
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
            let now = clock::boot_nanos();
            let mut out = VecDeque::new();
            for what in ready.drain(..) {
                match what {
                    Ready::Stop => return,
                    Ready::Udp(at) => self.datagrams(at, now, &mut out),
                    Ready::Tcp(at) => self.accept(at, now),
                    Ready::Client(number) => {
                        if let Some(question) = self.clients.ready(number, now) {
                            self.tcp_question(number, &question, now, &mut out);
                        }
                    }
                    Ready::Link(attempt) => self.link(attempt, now, &mut out),
                }
                self.carry_out(&mut out, now);
            }
            self.clients.pass(now);
            self.forward(&mut out, |forwarder, ids, effects| forwarder.pass(now, ids, effects));
            self.carry_out(&mut out, now);
            if now >= self.bind_at {
                self.bind(now);
            }
            if now >= self.accept_at {
                self.accept_at = i64::MIN;
            }
        }
    }

    fn wait(&self, stop: &UnixStream, ready: &mut Vec<Ready>) -> io::Result<()> {
        let mut what = vec![Ready::Stop];
        let mut fds = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        let mut add = |ready: Ready, fd, flags| {
            what.push(ready);
            fds.push(PollFd::new(fd, flags));
        };
        for (at, sockets) in self.sockets.iter().enumerate() {
            add(Ready::Udp(at), sockets.udp.as_fd(), PollFlags::POLLIN);
            if self.accept_at == i64::MIN {
                add(Ready::Tcp(at), sockets.tcp.as_fd(), PollFlags::POLLIN);
            }
        }
        let clients = self.clients.waits().map(|(number, fd, flags)| (Ready::Client(number), fd, flags));
        let links = self.links.waits().map(|(attempt, fd, flags)| (Ready::Link(attempt), fd, flags));
        clients.chain(links).for_each(|(ready, fd, flags): (Ready, BorrowedFd<'_>, PollFlags)| add(ready, fd, flags));
        let due = [self.clients.due(), self.forwarder.due(), Some(self.bind_at), Some(self.accept_at)];
        let due = due.into_iter().flatten().filter(|at| !matches!(*at, i64::MIN | i64::MAX));
        let timeout = due.min().map_or(PollTimeout::NONE, |at| {
            // Rounded up: waking before the time would only mean to wait again.
            let millis = (at - clock::boot_nanos()).max(0) / 1_000_000 + 1;
            PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let any = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        ready.extend(what.into_iter().zip(&fds).filter(|(_, fd)| any(fd)).map(|(what, _)| what));
        Ok(())
    }

    // ---- questions -------------------------------------------------------------------------

    fn datagrams(&mut self, at: usize, now: i64, out: &mut VecDeque<Effect>) {
        let mut buffer = [0; DATAGRAM];
        for _ in 0..BATCH {
            let Some(sockets) = self.sockets.get(at) else { return };
            // An error here is that of an earlier reply, which its asker no longer wants.
            let Ok((length, peer)) = sockets.udp.recv_from(&mut buffer) else { return };
            if !self.may_ask(peer.ip()) {
                continue;
            }
            Counters::add(&self.shared.counters.udp);
            let question = buffer.get(..length).unwrap_or_default();
            self.question(question, To::Udp(at, peer), peer.ip(), now, out);
            self.carry_out(out, now);
        }
    }

    fn accept(&mut self, at: usize, now: i64) {
        let Some(sockets) = self.sockets.get(at) else { return };
        let (stream, peer) = match sockets.tcp.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                // Gone again; or no descriptor is left, and asking at once would change nothing.
                if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
                    self.accept_at = now + PAUSE;
                }
                return;
            }
        };
        if self.may_ask(peer.ip())
            && let Err(error) = self.clients.add(stream, peer.ip().to_canonical(), now)
        {
            tracing::debug!(%peer, %error, "DNS: a connection is lost");
        }
    }

    fn tcp_question(&mut self, number: u32, question: &[u8], now: i64, out: &mut VecDeque<Effect>) {
        let Some(ip) = self.clients.ip(number) else { return };
        Counters::add(&self.shared.counters.tcp);
        self.question(question, To::Tcp(number), ip, now, out);
    }

    fn may_ask(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let may = self.config.allow.iter().any(|range| range.contains(ip));
        if !may {
            Counters::add(&self.shared.counters.strangers);
        }
        may
    }

    fn question(&mut self, bytes: &[u8], to: To, ip: IpAddr, now: i64, out: &mut VecDeque<Effect>) {
        let tcp = matches!(to, To::Tcp(_));
        let query = match Query::parse(bytes) {
            Ok(query) => query,
            Err(unfit) => {
                Counters::add(&self.shared.counters.malformed);
                match (unfit, to) {
                    (Unfit::Answer(message), _) => out.push_back(Effect::Reply { to, message }),
                    (Unfit::Silent, To::Tcp(number)) => self.clients.close(number),
                    (Unfit::Silent, To::Udp(..)) => {}
                }
                return;
            }
        };
        self.spin = self.spin.wrapping_add(1);
        let envelope = Envelope::of(&query, tcp);
        let zone = self.shared.zone();
        // Spread: a client that asks two things each time would else see every other order only.
        let spin = self.spin.wrapping_mul(0x9E37_79B9) >> 16;
        match answer::answer(zone.as_deref(), &self.config.domain, &envelope, &query, spin) {
            Outcome::Reply(message) => {
                Counters::add(&self.shared.counters.cluster);
                out.push_back(Effect::Reply { to, message: envelope.seal(message, true) });
            }
            Outcome::Forward { question, aliases } => {
                if let Some(servers) = self.files.servers(now) {
                    self.forwarder.set_servers(&servers);
                }
                let client = Client { to, ip, envelope, aliases };
                self.forward(out, |forwarder, ids, effects| forwarder.ask(question, client, now, ids, effects));
            }
        }
    }

    // ---- effects ---------------------------------------------------------------------------

    fn forward(
        &mut self,
        out: &mut VecDeque<Effect>,
        step: impl FnOnce(&mut Forwarder, &mut dyn FnMut() -> Option<u16>, &mut Vec<Effect>),
    ) {
        let random = &self.random;
        let mut ids = || {
            let mut id = [0; 2];
            random.fill(&mut id).ok()?; // it tells nothing but that there is none
            Some(u16::from_ne_bytes(id))
        };
        let mut effects = Vec::new();
        step(&mut self.forwarder, &mut ids, &mut effects);
        out.extend(effects);
    }

    /// Until nothing is left of it: an upstream that cannot be asked leads to the next one.
    fn carry_out(&mut self, out: &mut VecDeque<Effect>, now: i64) {
        while let Some(effect) = out.pop_front() {
            match effect {
                Effect::Reply { to: To::Udp(at, peer), message } => {
                    if let Some(sockets) = self.sockets.get(at)
                        && let Err(error) = sockets.udp.send_to(&message, peer)
                    {
                        // As if it was lost on its way: they ask again.
                        tracing::debug!(%peer, %error, "DNS: a reply is lost");
                    }
                }
                Effect::Reply { to: To::Tcp(number), message } => self.clients.reply(number, &message, now),
                Effect::Ask { attempt, server, tcp, message } => {
                    if let Err(error) = self.links.ask(attempt, server, tcp, &message) {
                        tracing::debug!(%server, %error, "DNS: an upstream cannot be asked");
                        self.forward(out, |forwarder, ids, effects| forwarder.failed(attempt, now, ids, effects));
                    }
                }
                Effect::Forget { attempt } => self.links.forget(attempt),
            }
        }
    }

    fn link(&mut self, attempt: u32, now: i64, out: &mut VecDeque<Effect>) {
        match self.links.ready(attempt) {
            Heard::Nothing => {}
            Heard::Message(bytes) => {
                self.forward(out, |forwarder, ids, effects| forwarder.told(attempt, &bytes, now, ids, effects));
            }
            Heard::Failed => self.forward(out, |forwarder, ids, effects| forwarder.failed(attempt, now, ids, effects)),
        }
    }

    // ---- sockets ---------------------------------------------------------------------------

    fn bind(&mut self, now: i64) {
        let port = self.config.port;
        for mut unbound in std::mem::take(&mut self.unbound) {
            match Sockets::bind(unbound.ip, port) {
                Ok(sockets) => {
                    if unbound.told {
                        tracing::info!(address = %unbound.ip, port, "DNS: the port is free now; new containers use this server");
                    }
                    self.sockets.push(sockets);
                }
                Err(error) => {
                    if !std::mem::replace(&mut unbound.told, true) {
                        let holder = holder::of_port(unbound.ip, port).unwrap_or_else(|| "nobody that we can see".to_owned());
                        tracing::warn!(
                            address = %unbound.ip,
                            port,
                            %error,
                            holder,
                            "DNS: cannot listen, it is tried again; as long as no address is served, new containers get the host's \
                             resolvers and no names of Services (end the holder, keep it off this address, or say --dns=off)"
                        );
                    }
                    self.unbound.push(unbound);
                }
            }
        }
        self.bind_at = if self.unbound.is_empty() { i64::MAX } else { now + REBIND };
        self.shared.set_bound(self.config.listen.iter().copied().filter(|ip| self.sockets.iter().any(|s| s.ip == *ip)).collect());
    }
}

impl Sockets {
    fn bind(ip: IpAddr, port: u16) -> io::Result<Sockets> {
        let udp = UdpSocket::bind((ip, port))?;
        let tcp = TcpListener::bind((ip, port))?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Sockets { ip, udp, tcp })
    }
}
