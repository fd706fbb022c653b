//! `coracle exec`: a command inside a running container, as if it ran here.
//!
//! The agent starts it and hands over the streams and the connection to the pod's monitor; from
//! then on only this process, the monitor and the kernel are in the game: an agent that dies
//! ends no exec.
//!
//! Invariant: the exit code is the command's own; the terminal is put back whatever happens; what
//! the command wrote before it ended is written out.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::args::{Body, CONTAINER, Flag, Given, INSTANCE, NAMESPACE, Operands, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::pods;
use crate::config::Roots;
use crate::kubelet::server::model::{Answer, Ask, ExecAsk, FailureKind, StreamKind};
use crate::runtime::{ExecParts, ExecProcess};
use crate::sys::tty;

const STDIN: Flag =
    Flag { long: "stdin", short: Some('i'), value: None, help: "pass our stdin to the command; its end is passed too" };
const TTY: Flag = Flag {
    long: "tty",
    short: Some('t'),
    value: None,
    help: "give the command a terminal; ours becomes raw and its size follows",
};

pub const VERB: Verb = Verb {
    name: "exec",
    operands: Operands { text: "POD", min: 1, max: 1 },
    command: true,
    summary: "run a command inside a running container",
    about: "Runs a command in a container of a running pod, with the container's user, environment, limits and seccomp filter. \
            The exit code is the command's own, 128 + N where signal N ended it, 126 or 127 where it cannot be executed or is not \
            there, 125 where coracle could not run it at all. Signals are passed on.",
    flags: &[&CONTAINER, &NAMESPACE, &STDIN, &TTY, &ROOT, &INSTANCE],
    examples: &[
        "coracle exec web -- cat /etc/hosts",
        "coracle exec -it kube-system/dns -c server -- sh",
        "coracle exec -i web -- sh -c 'cat > /data/seed'",
    ],
    body: Body::Parsed(run),
};

/// What came out of a container after its command has ended is waited for this long, each time:
/// a child that it left behind may hold the pipes for ever.
const QUIET: Duration = Duration::from_millis(250);

fn run(given: &Given) -> Result<Exit, CliError> {
    match attempt(given) {
        Ok(exit) => Ok(exit),
        Err(error) if matches!(error.exit(), Exit::Usage | Exit::Pipe | Exit::Passed(_)) => Err(error),
        // A code of ours must not look like one of the command's.
        Err(error) => {
            super::fail("coracle exec", &error);
            Ok(Exit::ExecFailed)
        }
    }
}

fn attempt(given: &Given) -> Result<Exit, CliError> {
    let (namespace, name) = pods::named(given)?;
    let mut argv = Vec::new();
    for arg in &given.command {
        argv.push(arg.to_str().ok_or_else(|| CliError::Usage(format!("{arg:?}: not UTF-8")))?.to_owned());
    }
    if argv.is_empty() {
        return Err(CliError::Usage("what is to be run? coracle exec POD -- COMMAND [ARG...]".into()));
    }
    let (stdin, tty) = (given.has(&STDIN), given.has(&TTY));
    let here = std::io::stdin();
    let terminal = tty && here.is_terminal();
    if tty && stdin && !terminal {
        eprintln!("coracle exec: our stdin is no terminal: its bytes are passed on as they are");
    }
    let size = if terminal { tty::size(here.as_fd()).ok() } else { None }; // a terminal without a size has none
    let ask = ExecAsk {
        pod: format!("{namespace}/{name}"),
        container: given.text(&CONTAINER)?.unwrap_or_default().to_owned(),
        argv,
        stdin,
        tty,
        size,
    };
    // Before there is a second thread, so that the signals come to the descriptor alone.
    let mut signals = Signals::take()?;
    let process = match start(&given.roots()?, &ask, &mut signals)? {
        Begun::Started(process) => process,
        // There is no command yet that the signal could be for, so it is for us.
        Begun::Signalled(number) => return Ok(Exit::Passed(u8::try_from(128 + number).unwrap_or(255))),
    };
    let raw = if terminal && stdin {
        Some(tty::Raw::enter(here.as_fd()).map_err(|e| CliError::because("make the terminal raw", e))?)
    } else {
        None
    };
    let code = Session { process, signals, follow_size: terminal }.run(stdin);
    drop(raw);
    code.map(Exit::Passed)
}

enum Begun {
    Started(ExecProcess),
    /// By a signal that would have ended us. The agent sees the closed connection and lets the
    /// command go.
    Signalled(i32),
}

/// An agent that serves others is asked again for this long.
const BUSY: Duration = Duration::from_secs(20);
const AGAIN: Duration = Duration::from_millis(100);

fn start(roots: &Roots, ask: &ExecAsk, signals: &mut Signals) -> Result<Begun, CliError> {
    let deadline = Instant::now() + BUSY;
    loop {
        match try_start(Client::connect(roots)?, ask.clone(), signals) {
            // Nothing was begun for us.
            Err(CliError::Refused(failure)) if failure.kind == FailureKind::Busy && Instant::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            other => return other,
        }
    }
}

/// A monitor that does not answer (stopped, or blocked by a slow card) may take minutes.
fn try_start(client: Client, ask: ExecAsk, signals: &mut Signals) -> Result<Begun, CliError> {
    let mut answers = client.ask(Ask::Exec(ask))?;
    loop {
        if let Some(number) = signals.before(answers.stream.as_fd())? {
            return Ok(Begun::Signalled(number));
        }
        match answers.next_with_fds()? {
            Some((Answer::Started { pid, streams }, fds)) => {
                return parts(pid, &streams, fds).map(|parts| Begun::Started(ExecProcess::from_parts(parts)));
            }
            Some(_) => {}
            None => return Err(CliError::Hangup),
        }
    }
}

fn parts(pid: i32, streams: &[StreamKind], fds: Vec<OwnedFd>) -> Result<ExecParts, CliError> {
    let count = fds.len();
    let mut fds = fds.into_iter();
    let connection = fds.next().filter(|_| count == streams.len() + 1);
    let Some(connection) = connection else {
        return Err(CliError::Failed(format!("the agent sent {count} descriptors for {} streams", streams.len())));
    };
    let mut parts = ExecParts { pid, connection, stdin: None, stdout: None, stderr: None, pty: None };
    for (kind, fd) in streams.iter().zip(fds) {
        match kind {
            StreamKind::Stdin => parts.stdin = Some(fd),
            StreamKind::Stdout => parts.stdout = Some(fd),
            StreamKind::Stderr => parts.stderr = Some(fd),
            StreamKind::Pty => parts.pty = Some(fd),
        }
    }
    Ok(parts)
}

/// The signals that are the command's business rather than ours.
struct Signals(SignalFd);

impl Signals {
    fn take() -> Result<Signals, CliError> {
        let mut set = SigSet::empty();
        set.extend([
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
            Signal::SIGWINCH,
        ]);
        let failed = |e: Errno| CliError::because("take signals", e);
        set.thread_block().map_err(failed)?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        Ok(Signals(fd))
    }

    /// Waits until `socket` can be read; a signal that comes first and that ends a process.
    fn before(&mut self, socket: BorrowedFd<'_>) -> Result<Option<i32>, CliError> {
        loop {
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN), PollFd::new(socket, PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(CliError::because("wait for the agent", e)),
            }
            let readable = fds[1].revents().is_some_and(|events| !events.is_empty());
            if let Some(number) = self.next().filter(|number| *number != libc::SIGWINCH) {
                return Ok(Some(number));
            }
            if readable {
                return Ok(None);
            }
        }
    }

    fn next(&mut self) -> Option<i32> {
        // Nothing there, or interrupted: poll tells when to look again.
        let info = self.0.read_signal().ok().flatten()?;
        i32::try_from(info.ssi_signo).ok()
    }
}

struct Session {
    process: ExecProcess,
    signals: Signals,
    /// Our terminal's size is the command's terminal's size.
    follow_size: bool,
}

/// A stream of the command and where it goes here.
struct Output {
    from: File,
    to_stderr: bool,
}

impl Session {
    fn run(mut self, stdin: bool) -> Result<u8, CliError> {
        let mut outputs = Vec::new();
        if let Some(pty) = &self.process.pty {
            let reader = pty.try_clone().map_err(|e| CliError::because("read the terminal", e))?;
            outputs.push(Output { from: reader.into(), to_stderr: false });
        }
        for (stream, to_stderr) in [(self.process.stdout.take(), false), (self.process.stderr.take(), true)] {
            outputs.extend(stream.map(|fd| Output { from: fd.into(), to_stderr }));
        }
        if stdin {
            self.feed()?;
        } else {
            self.process.stdin = None;
        }
        let (mut code, mut lost) = (None, None);
        let mut since_output = Instant::now();
        while code.is_none() || (!outputs.is_empty() && since_output.elapsed() < QUIET) {
            let ready = self.wait(&outputs, code.is_some())?;
            for (at, ready) in ready.outputs.iter().enumerate().rev() {
                if *ready {
                    since_output = Instant::now();
                    let open = outputs.get_mut(at).map_or(Ok(false), pass);
                    if !matches!(open, Ok(true)) {
                        outputs.remove(at);
                    }
                    // The command gets SIGPIPE for it; that its output was lost is told at the end.
                    if let Err(e) = open {
                        lost.get_or_insert(e);
                    }
                }
            }
            if ready.signal {
                self.signal()?;
            }
            if ready.ended && code.is_none() {
                code = self.ended()?;
                since_output = Instant::now();
            }
        }
        match lost {
            Some(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(CliError::because("pass the command's output on", e)),
            _ => Ok(code.unwrap_or_default()),
        }
    }

    /// Copies our stdin in a thread of its own: a command that does not read must not keep its
    /// output from being read.
    fn feed(&mut self) -> Result<(), CliError> {
        let terminal = self.process.pty.as_ref().map(OwnedFd::try_clone).transpose();
        let terminal = terminal.map_err(|e| CliError::because("write to the terminal", e))?;
        let is_terminal = terminal.is_some();
        let Some(into) = terminal.or(self.process.stdin.take()) else { return Ok(()) };
        let mut into = File::from(into);
        let copy = move || {
            let mut buffer = [0; 16 * 1024];
            let mut here = std::io::stdin().lock();
            loop {
                match here.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => {
                        if into.write_all(buffer.get(..n).unwrap_or_default()).is_err() {
                            return; // the command does not read any more
                        }
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => break, // our stdin is gone: that is its end
                }
            }
            if is_terminal {
                // A terminal has no half close; this is how a person ends input. A command that is
                // gone needs no end.
                let _ = into.write_all(&[4]);
            }
        };
        std::thread::Builder::new()
            .name("stdin".into())
            .stack_size(64 * 1024)
            .spawn(copy)
            .map(drop)
            .map_err(|e| CliError::because("start a thread for stdin", e))
    }

    fn wait(&self, outputs: &[Output], ended: bool) -> Result<Ready, CliError> {
        let mut fds = vec![PollFd::new(self.signals.0.as_fd(), PollFlags::POLLIN)];
        fds.extend(outputs.iter().map(|o| PollFd::new(o.from.as_fd(), PollFlags::POLLIN)));
        // Once it has told the end, the connection is readable for ever.
        if !ended {
            fds.push(PollFd::new(self.process.connection(), PollFlags::POLLIN));
        }
        let timeout = if ended { PollTimeout::try_from(QUIET).unwrap_or(PollTimeout::ZERO) } else { PollTimeout::NONE };
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(CliError::because("wait for the command", e)),
        }
        let mut ready = fds.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty()));
        Ok(Ready {
            signal: ready.next().unwrap_or(false),
            outputs: ready.by_ref().take(outputs.len()).collect(),
            ended: ready.next().unwrap_or(false),
        })
    }

    fn signal(&mut self) -> Result<(), CliError> {
        while let Some(number) = self.signals.next() {
            if number == libc::SIGWINCH {
                self.resize();
                continue;
            }
            self.process.signal(number).map_err(|e| CliError::because(format!("pass signal {number} on"), e))?;
        }
        Ok(())
    }

    fn resize(&self) {
        let (true, Some(pty)) = (self.follow_size, &self.process.pty) else { return };
        if let Ok((rows, columns)) = tty::size(std::io::stdin().as_fd()) {
            // Both ends may be closing just now.
            let _ = tty::set_size(pty.as_fd(), rows, columns);
        }
    }

    fn ended(&mut self) -> Result<Option<u8>, CliError> {
        let exit = self.process.wait(Some(Duration::ZERO)).map_err(|e| CliError::because("learn how the command ended", e))?;
        Ok(exit.map(|exit| u8::try_from(exit.code).unwrap_or(255)))
    }
}

struct Ready {
    signal: bool,
    outputs: Vec<bool>,
    ended: bool,
}

/// Copies what is there; false once the stream has ended, an error where nobody takes it here any
/// more (then the command gets SIGPIPE, as in a pipe here).
fn pass(output: &mut Output) -> std::io::Result<bool> {
    let mut buffer = [0; 16 * 1024];
    let n = match output.from.read(&mut buffer) {
        Ok(0) => return Ok(false),
        Ok(n) => n,
        Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Ok(true),
        // A terminal whose last process is gone says EIO.
        Err(_) => return Ok(false),
    };
    let bytes = buffer.get(..n).unwrap_or_default();
    if output.to_stderr {
        std::io::stderr().write_all(bytes)?;
    } else {
        let mut out = std::io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()?;
    }
    Ok(true)
}
