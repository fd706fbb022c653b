//! Network namespaces with clients and servers in them, as threads of the test: whoever asks hears
//! which server answered and whom it saw, or how it failed.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coracle::sys::netns;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, setsockopt, sockopt};

/// A network namespace: one of its own, that is gone with the value, or a process's.
pub struct Ns {
    pin: Option<PathBuf>,
    file: File,
}

impl Ns {
    pub fn pinned(path: PathBuf) -> Ns {
        File::create(&path).unwrap();
        let pin = path.clone();
        netns::throw_away(move || {
            mount(Some("/proc/thread-self/ns/net"), &pin, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        })
        .unwrap();
        let ns = Ns { file: File::open(&path).unwrap(), pin: Some(path) };
        ns.ip("link set lo up");
        ns
    }

    pub fn of_process(pid: u32) -> Ns {
        Ns { pin: None, file: File::open(format!("/proc/{pid}/ns/net")).unwrap() }
    }

    pub fn again(&self) -> Ns {
        Ns { pin: None, file: self.file.try_clone().unwrap() }
    }

    /// Where `ip` finds it.
    pub fn pin(&self) -> &Path {
        self.pin.as_deref().unwrap()
    }

    /// Runs in the namespace; threads and processes begun there stay in it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        netns::within(&self.file, work).unwrap()
    }

    pub fn ip(&self, args: &str) {
        let args: Vec<&str> = args.split(' ').collect();
        let out = self.run(|| Command::new("ip").args(&args).output().unwrap());
        assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }

    pub fn set(&self, sysctl: &str, value: &str) {
        let file = format!("/proc/sys/net/{sysctl}");
        self.run(|| std::fs::write(&file, value)).unwrap_or_else(|e| panic!("{file}: {e}"));
    }

    /// Answers `name` and whom it sees, at every address by TCP and at `addresses` by UDP.
    pub fn serve(&self, name: &str, port: u16, addresses: &[IpAddr]) -> Server {
        let name = name.to_owned();
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let (listener, sockets) = self.run(move || {
            let sockets = addresses.iter().map(|ip| UdpSocket::bind(SocketAddr::new(*ip, port)).unwrap());
            (TcpListener::bind(any).unwrap(), sockets.collect())
        });
        Server::start(listener, sockets, Some(name))
    }

    /// As [`Ns::serve`] by TCP; its name is the address that was asked.
    pub fn serve_all(&self, port: u16) -> Server {
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let listener = self.run(move || TcpListener::bind(any).unwrap());
        Server::start(listener, Vec::new(), None)
    }

    /// What a server answers to `from`, or how the connection failed.
    pub fn ask(&self, from: IpAddr, to: SocketAddr) -> String {
        self.run(move || ask(from, to))
    }

    pub fn ask_udp(&self, from: SocketAddr, to: SocketAddr) -> String {
        self.run(move || {
            let socket = UdpSocket::bind(from).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut bytes = [0; 64];
            // Connected, so that a refusal is heard of; one of our own output comes twice: as the
            // answer to sending, as is a drop's, and then as the refusal.
            let sent = socket.connect(to).and_then(|()| socket.send(b"?"));
            let denied = sent.as_ref().is_err_and(|e| e.kind() == ErrorKind::PermissionDenied);
            let answer = if denied { socket.recv(&mut bytes) } else { sent.and_then(|_| socket.recv(&mut bytes)) };
            answer.map(|n| String::from_utf8_lossy(&bytes[..n]).into_owned()).unwrap_or_else(|e| told(&e))
        })
    }
}

impl Drop for Ns {
    fn drop(&mut self) {
        if let Some(pin) = &self.pin
            && let Err(e) = umount2(pin, MntFlags::MNT_DETACH)
        {
            eprintln!("{}: {e}", pin.display());
        }
    }
}

/// In the namespace of the calling thread.
pub fn ask(from: IpAddr, to: SocketAddr) -> String {
    let socket = match connect(from, to) {
        Ok(socket) => socket,
        Err(e) => return told(&e),
    };
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).map(|_| text).unwrap_or_else(|e| told(&e))
}

/// Answers come in no time here; what is lost is told so before a first packet is sent again.
const PATIENCE_MICROS: u32 = 400_000;
const PATIENCE: Duration = Duration::from_micros(PATIENCE_MICROS as u64);

/// A TCP socket bound to `from`, connected.
fn connect(from: IpAddr, to: SocketAddr) -> std::io::Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::SendTimeout, &nix::sys::time::TimeVal::new(0, PATIENCE_MICROS.into()))?;
    socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(to))?;
    Ok(fd)
}

pub fn told(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => "rejected".to_owned(),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "dropped".to_owned(),
        // What a connect with a time limit ends with.
        _ if error.raw_os_error() == Some(nix::libc::EINPROGRESS) => "dropped".to_owned(),
        other => format!("{other:?}"),
    }
}

pub struct Server {
    stop: Arc<EventFd>,
    /// Connections so far.
    pub served: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// None: its name is the address that was asked.
    fn start(listener: TcpListener, sockets: Vec<UdpSocket>, name: Option<String>) -> Server {
        let (stop, served) = (Arc::new(EventFd::new().unwrap()), Arc::new(AtomicU64::new(0)));
        listener.set_nonblocking(true).unwrap();
        sockets.iter().for_each(|s| s.set_nonblocking(true).unwrap());
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&served));
        let thread = std::thread::spawn(move || {
            let named =
                |at: std::io::Result<SocketAddr>| name.clone().unwrap_or_else(|| at.unwrap().ip().to_canonical().to_string());
            loop {
                let all = [stopped.as_fd(), listener.as_fd()].into_iter().chain(sockets.iter().map(AsFd::as_fd));
                let mut fds: Vec<PollFd> = all.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
                poll(&mut fds, PollTimeout::NONE).unwrap();
                if fds[0].any() == Some(true) {
                    return;
                }
                while let Ok((mut stream, peer)) = listener.accept() {
                    count.fetch_add(1, Ordering::Relaxed);
                    // The client may be gone already.
                    let _ = write!(stream, "{} {}", named(stream.local_addr()), peer.ip().to_canonical());
                }
                for socket in &sockets {
                    while let Ok((_, peer)) = socket.recv_from(&mut [0; 64]) {
                        // Likewise.
                        let _ = socket.send_to(format!("{} {}", named(socket.local_addr()), peer.ip()).as_bytes(), peer);
                    }
                }
            }
        });
        Server { stop, served, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.write(1).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}
