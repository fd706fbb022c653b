//! `coracle image make-demo` and `coracle demo`: an image made from this binary, and the small
//! programs that run in it. `make demo` and the tests need no other image then.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

use super::args::{Body, Flag, Given, Operands, Verb};
use super::exit::{CliError, Exit};
use crate::images::make;

pub const MAKE: Verb = Verb {
    name: "image make-demo",
    operands: Operands { text: "OUT.tar", min: 1, max: 1 },
    command: false,
    summary: "",
    about: "Writes an image made from this very program to OUT.tar: docker.io/library/coracle-demo:latest, an OCI layout \
            for `coracle import`. It runs `coracle demo`.",
    flags: &[],
    examples: &["coracle image make-demo demo.tar"],
    body: Body::Parsed(make_demo),
};

const PORT: Flag = Flag { long: "port", short: None, value: Some("N"), help: "port of `web` (default: 8080)" };
const COUNT: Flag = Flag { long: "count", short: None, value: Some("N"), help: "lines of `lines` (default: 3)" };
const EVERY: Flag = Flag { long: "every", short: None, value: Some("MS"), help: "milliseconds between them (default: 1000)" };
const EXIT: Flag = Flag { long: "exit", short: None, value: Some("CODE"), help: "exit code of `lines` (default: 0)" };

pub const DEMO: Verb = Verb {
    name: "demo",
    operands: Operands { text: "web|fetch|lines|write", min: 1, max: 3 },
    command: false,
    summary: "",
    about: "What the demo image runs. `web` answers HTTP with a line about itself (and the file INDEX, if given). `fetch HOST:PORT` \
            asks such a one and prints its answer. `lines` prints lines and exits. `write FILE TEXT` writes a file. All end at SIGTERM.",
    flags: &[&PORT, &COUNT, &EVERY, &EXIT],
    examples: &[
        "coracle demo web --port 8080",
        "coracle demo fetch web:80",
        "coracle demo lines --count 5 --exit 3",
        "coracle demo write /data/index.html hello",
    ],
    body: Body::Parsed(demo),
};

fn make_demo(given: &Given) -> Result<Exit, CliError> {
    let out = Path::new(given.operands.first().map_or("".as_ref(), |o| o.as_os_str()));
    make::demo(Path::new("/proc/self/exe"), out).map_err(CliError::io("write", out))?;
    Ok(Exit::Ok)
}

fn demo(given: &Given) -> Result<Exit, CliError> {
    end_at_sigterm().map_err(|e| CliError::because("cannot wait for signals", e))?;
    match given.operand(0)? {
        Some("web") => web(given.parse(&PORT, "a port")?.unwrap_or(8080), given.operand(1)?.map(Path::new)),
        Some("fetch") => fetch(given.operand(1)?.ok_or_else(|| CliError::Usage("fetch needs HOST:PORT".into()))?),
        Some("lines") => lines(given),
        Some("write") => {
            let (Some(path), Some(text)) = (given.operand(1)?.map(Path::new), given.operand(2)?) else {
                return Err(CliError::Usage("write needs a file and a text".into()));
            };
            std::fs::write(path, format!("{text}\n")).map_err(CliError::io("write", path))?;
            Ok(Exit::Ok)
        }
        _ => Err(CliError::Usage("expected web, fetch, lines or write".into())),
    }
}

/// PID 1 of a container ignores signals that it does not ask for.
fn end_at_sigterm() -> std::io::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    std::thread::Builder::new().name("signals".into()).stack_size(64 * 1024).spawn(move || {
        if let Ok(signal) = signals.wait() {
            // The line shows in `coracle logs` that the end was asked for.
            println!("got {signal}, bye");
            std::process::exit(0);
        }
    })?;
    Ok(())
}

fn web(port: u16, index: Option<&Path>) -> Result<Exit, CliError> {
    let host = nix::unistd::gethostname().map_or_else(|_| "?".into(), |h| h.to_string_lossy().into_owned());
    let listener = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
    let listener = listener.map_err(|e| CliError::because(format!("cannot listen on port {port}"), e))?;
    println!("{host} listens on port {port}");
    let mut served = 0u64;
    for stream in listener.incoming() {
        served += 1;
        match stream.and_then(|s| answer(s, &host, served, index)) {
            Ok(path) => println!("{served} {path}"),
            Err(error) => eprintln!("{served} {error}"),
        }
    }
    Ok(Exit::Ok)
}

fn answer(mut stream: TcpStream, host: &str, served: u64, index: Option<&Path>) -> std::io::Result<String> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut reader = BufReader::new(stream.try_clone()?.take(16 * 1024));
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut body = format!("hello from {host}, answer {served}\n");
    if let Some(index) = index {
        body.push_str(&std::fs::read_to_string(index)?);
    }
    write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())?;
    Ok(request.split(' ').nth(1).unwrap_or("?").chars().filter(|c| !c.is_control()).take(100).collect())
}

/// Exit code 1 where nobody answers within 3 s.
fn fetch(host: &str) -> Result<Exit, CliError> {
    const PATIENCE: Duration = Duration::from_secs(3);
    let no_answer = |e: std::io::Error| CliError::because(format!("no answer from {host}"), e);
    let addresses: Vec<SocketAddr> = host.to_socket_addrs().map_err(no_answer)?.collect();
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    for address in addresses {
        let mut stream = match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => stream,
            Err(error) => {
                last = error;
                continue;
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).map_err(no_answer)?;
        write!(stream, "GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").map_err(no_answer)?;
        let mut answer = String::new();
        stream.take(64 * 1024).read_to_string(&mut answer).map_err(no_answer)?;
        print!("{}", answer.split_once("\r\n\r\n").map_or(answer.as_str(), |(_, body)| body));
        return Ok(Exit::Ok);
    }
    Err(no_answer(last))
}

fn lines(given: &Given) -> Result<Exit, CliError> {
    let count: u64 = given.parse(&COUNT, "a number")?.unwrap_or(3);
    let every = Duration::from_millis(given.parse(&EVERY, "milliseconds")?.unwrap_or(1000));
    let code: u8 = given.parse(&EXIT, "an exit code (0 to 255)")?.unwrap_or(0);
    for n in 1..=count {
        println!("line {n} of {count}");
        if n < count {
            std::thread::sleep(every);
        }
    }
    std::io::stdout().flush().map_err(CliError::Stdout)?;
    Ok(Exit::Passed(code))
}
