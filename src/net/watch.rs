//! The thread that keeps an eye on the host: every 20 s, and when br_netfilter is loaded.
//!
//! Invariant: a quiet host costs one look in 20 s and no line in the log; a failure is said when
//! it begins and when it ends.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Net;
use super::model::NetError;
use crate::sys::chain::chain;
use crate::sys::netlink::Socket;
use crate::sys::uevent;

const EVERY: Duration = Duration::from_secs(20);
const STACK: usize = 256 * 1024;

/// The running watch; dropping it ends the thread.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<EventFd>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(net: Net) -> Result<Watch, NetError> {
        let io = |source: std::io::Error| NetError::Io { operation: "start", object: "the network's watch".into(), source };
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC).map_err(|e| io(e.into()))?);
        let ended = Arc::clone(&stop);
        // Without it, the look every 20 s has to do; it is opened before we return, so that nothing
        // that happens afterwards is missed.
        let devices = optional(uevent::listen(), "no word of br_netfilter being loaded");
        let eyes = Eyes { net, devices, last_failure: String::new() };
        let thread = std::thread::Builder::new().name("net-watch".into()).stack_size(STACK);
        let thread = thread.spawn(move || eyes.look(&ended)).map_err(io)?;
        Ok(Watch { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(e) = self.stop.write(1) {
            tracing::warn!(error = %e, "cannot end the network's watch");
            return;
        }
        if self.thread.take().is_some_and(|t| t.join().is_err()) {
            tracing::warn!("the network's watch had panicked");
        }
    }
}

fn optional(socket: Result<Socket, crate::sys::netlink::NetlinkError>, consequence: &str) -> Option<Socket> {
    match socket {
        Ok(socket) => Some(socket),
        Err(e) => {
            tracing::warn!(error = %chain(&e), "{consequence}; they are seen within 20 s");
            None
        }
    }
}

struct Eyes {
    net: Net,
    devices: Option<Socket>,
    last_failure: String,
}

impl Eyes {
    fn look(mut self, stop: &EventFd) {
        let mut next = Instant::now() + EVERY;
        loop {
            let mut fds = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
            fds.extend(self.devices.iter().map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN)));
            let left = next.saturating_duration_since(Instant::now());
            // A little too late rather than again and again too early.
            let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => {
                    tracing::error!(error = %e, "the network's watch ends");
                    return;
                }
            }
            if fds.first().and_then(|fd| fd.revents()).is_some_and(|events| !events.is_empty()) {
                return;
            }
            let loaded = drain(&mut self.devices, tells_of_br_netfilter);
            if next <= Instant::now() || loaded {
                next = Instant::now() + EVERY;
                let result = self.net.ensure();
                self.tell(result);
            }
        }
    }

    fn tell(&mut self, result: Result<(), NetError>) {
        let now = result.err().map(|e| chain(&e).to_string()).unwrap_or_default();
        if now != self.last_failure {
            match now.as_str() {
                "" => tracing::info!("the host's network is as it should be again"),
                error => tracing::warn!(error, "cannot keep the host's network as it should be; trying again"),
            }
            self.last_failure = now;
        }
    }
}

/// It is loaded (its parameters begin with 1), or taken away again.
fn tells_of_br_netfilter(datagram: &[u8]) -> bool {
    uevent::parse(datagram).is_some_and(|(action, path)| matches!(action, "add" | "remove") && path == "/module/br_netfilter")
}

/// Reads all that is there; true where one of them counts, or where some were lost.
fn drain(socket: &mut Option<Socket>, counts: impl Fn(&[u8]) -> bool) -> bool {
    let mut any = false;
    while let Some(open) = socket {
        match open.receive_now("hear of changes") {
            Ok(Some(datagram)) => any |= counts(&datagram),
            Ok(None) => break,
            Err(e) if e.errno() == Errno::ENOBUFS => any = true,
            Err(e) => {
                tracing::warn!(error = %chain(&e), "lost a socket that tells of changes; they are seen within 20 s");
                *socket = None;
                return true;
            }
        }
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_coming_and_going_of_br_netfilter_counts() {
        for (datagram, counts) in [
            (&b"add@/module/br_netfilter\0ACTION=add\0SUBSYSTEM=module\0"[..], true),
            (b"remove@/module/br_netfilter\0", true),
            (b"change@/module/br_netfilter\0", false),
            (b"add@/module/br_netfilter_x\0", false),
            (b"add@/module/bridge\0", false),
            (b"add@/devices/virtual/net/br_netfilter\0", false),
            (b"libudev\0\xfe\xed\xca\xfe", false),
            (b"", false),
        ] {
            assert_eq!(tells_of_br_netfilter(datagram), counts, "{}", String::from_utf8_lossy(datagram));
        }
    }
}
