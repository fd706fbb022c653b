//! sd_notify(3): readiness, status text and watchdog pings, one datagram each.
//!
//! Invariant: without NOTIFY_SOCKET every call does nothing; a manager that cannot be reached
//! never stops the agent. Ping from the thread whose life matters, after a whole pass of it, never
//! from a timer of its own.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager that started us, if one did.
#[derive(Debug, Default)]
pub struct Notifier {
    manager: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

#[derive(Debug, thiserror::Error)]
pub enum NotifyError {
    #[error("NOTIFY_SOCKET=\"{0}\" is neither an absolute path nor an abstract name (@…)")]
    Address(String),
    #[error("open a socket towards the service manager")]
    Socket(#[source] io::Error),
    #[error("tell the service manager {0}")]
    Send(String, #[source] io::Error),
}

impl Notifier {
    /// Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID.
    pub fn from_env() -> Result<Notifier, NotifyError> {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Notifier::default());
        };
        let bytes = name.as_bytes();
        let address = match bytes.first() {
            Some(b'@') => SocketAddr::from_abstract_name(bytes.get(1..).unwrap_or_default()),
            Some(b'/') => SocketAddr::from_pathname(&name),
            _ => return Err(NotifyError::Address(name.to_string_lossy().into_owned())),
        }
        .map_err(NotifyError::Socket)?;
        let socket = UnixDatagram::unbound().map_err(NotifyError::Socket)?;
        // A manager that does not read must not hold the planner up.
        socket.set_write_timeout(Some(Duration::from_secs(2))).map_err(NotifyError::Socket)?;
        Ok(Notifier { manager: Some((socket, address)), watchdog: watchdog_from_env() })
    }

    /// Is anybody listening?
    pub fn is_managed(&self) -> bool {
        self.manager.is_some()
    }

    /// How often [`Notifier::watchdog`] must be called at least: half of what the manager allows.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog.map(|limit| limit / 2)
    }

    /// The agent serves: every pod of the last run is adopted, the socket answers.
    pub fn ready(&self, status: &str) -> Result<(), NotifyError> {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)))
    }

    /// A line for `systemctl status`.
    pub fn status(&self, status: &str) -> Result<(), NotifyError> {
        self.send(&format!("STATUS={}", one_line(status)))
    }

    /// The caller made a whole pass: it lives.
    pub fn watchdog(&self) -> Result<(), NotifyError> {
        self.send("WATCHDOG=1")
    }

    pub fn stopping(&self) -> Result<(), NotifyError> {
        self.send("STOPPING=1")
    }

    fn send(&self, message: &str) -> Result<(), NotifyError> {
        let Some((socket, address)) = &self.manager else { return Ok(()) };
        socket.send_to_addr(message.as_bytes(), address).map(drop).map_err(|e| NotifyError::Send(message.replace('\n', " "), e))
    }
}

fn watchdog_from_env() -> Option<Duration> {
    let ours = std::env::var("WATCHDOG_PID").ok().is_none_or(|pid| pid == std::process::id().to_string());
    let limit = std::env::var("WATCHDOG_USEC").ok()?.parse().ok().filter(|usec| *usec > 0)?;
    ours.then(|| Duration::from_micros(limit))
}

/// A newline would begin another assignment.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(address: SocketAddr, receiver: &UnixDatagram) -> Vec<String> {
        let notifier = Notifier { manager: Some((UnixDatagram::unbound().unwrap(), address)), watchdog: None };
        notifier.ready("3 pods\nMAINPID=1").unwrap();
        notifier.watchdog().unwrap();
        let mut got = Vec::new();
        let mut buffer = [0; 256];
        for _ in 0..2 {
            let n = receiver.recv(&mut buffer).unwrap();
            got.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
        }
        got
    }

    #[test]
    fn one_datagram_a_message_on_path_and_abstract_sockets() {
        let expected = ["READY=1\nSTATUS=3 pods MAINPID=1", "WATCHDOG=1"];
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        assert_eq!(told(SocketAddr::from_pathname(&path).unwrap(), &receiver), expected);

        let name = format!("coracle-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name.as_bytes()).unwrap();
        let receiver = UnixDatagram::bind_addr(&address).unwrap();
        assert_eq!(told(address, &receiver), expected);
    }

    #[test]
    fn a_manager_that_is_gone_is_an_error_and_no_manager_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let gone = SocketAddr::from_pathname(dir.path().join("gone")).unwrap();
        let notifier = Notifier { manager: Some((UnixDatagram::unbound().unwrap(), gone)), watchdog: None };
        assert!(notifier.ready("").is_err());
        assert!(Notifier::default().ready("").is_ok());
    }
}
