//! Terminals: raw mode that is always undone, window sizes. termios(3), ioctl_tty(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// Raw mode of a terminal; dropping it puts back what was.
pub struct Raw {
    terminal: OwnedFd,
    was: Termios,
}

impl Raw {
    pub fn enter(terminal: BorrowedFd<'_>) -> io::Result<Raw> {
        let terminal = terminal.try_clone_to_owned()?;
        let was = tcgetattr(&terminal)?;
        let mut raw = was.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&terminal, SetArg::TCSADRAIN, &raw)?;
        Ok(Raw { terminal, was })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that has hung up has no mode to put back.
        let _ = tcsetattr(&self.terminal, SetArg::TCSADRAIN, &self.was);
    }
}

/// Rows and columns.
pub fn size(terminal: BorrowedFd<'_>) -> io::Result<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes one winsize, which `size` is.
    let result = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok((size.ws_row, size.ws_col)) }
}

/// Sets it; the foreground processes get SIGWINCH if it is another one.
pub fn set_size(terminal: BorrowedFd<'_>, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, which `size` is.
    let result = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::pty::openpty;
    use nix::sys::termios::LocalFlags;

    #[test]
    fn raw_mode_is_undone_and_sizes_travel() {
        let pty = openpty(None, None).unwrap();
        let echoes = || tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ECHO);
        assert!(echoes());
        let raw = Raw::enter(pty.slave.as_fd()).unwrap();
        assert!(!echoes());
        drop(raw);
        assert!(echoes());
        set_size(pty.master.as_fd(), 41, 97).unwrap();
        assert_eq!(size(pty.slave.as_fd()).unwrap(), (41, 97));
        let file = tempfile::tempfile().unwrap();
        assert!(size(file.as_fd()).is_err());
        assert!(Raw::enter(file.as_fd()).is_err());
    }
}
