//! `coracle exec` against a real container: pipes, exit codes, signals, a terminal, a dying agent.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coracle::sys::tty;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::node::{Node, possible};

fn exec(node: &Node, flags: &[&str], command: &[&str]) -> Command {
    let mut exec = node.command("exec");
    exec.args(flags).arg("shell").arg("--").args(command);
    exec
}

#[test]
fn exec_is_as_if_it_ran_here() {
    if !possible() {
        return;
    }
    let mut node = Node::start();
    node.shell_pod("shell");
    pipes(&node);
    half_close(&node);
    signals(&node);
    failures(&node);
    terminal(&node);
    outlives_the_agent(&mut node);
}

fn pipes(node: &Node) {
    let output = exec(node, &[], &["sh", "-c", "echo out; echo err >&2; exit 42"]).output().unwrap();
    assert_eq!(output.status.code(), Some(42), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"out\n");
    assert_eq!(output.stderr, b"err\n");
    // More than any pipe holds, to its last byte.
    let output = exec(node, &[], &["sh", "-c", "yes 0123456789abcde | head -n 200000"]).output().unwrap();
    assert!(output.status.success());
    assert_eq!(output.stdout.len(), 200_000 * 16);
    // A child that is left behind and holds the pipes keeps nobody waiting.
    let began = Instant::now();
    let output = exec(node, &[], &["sh", "-c", "sleep 30 & echo started"]).output().unwrap();
    assert_eq!(output.stdout, b"started\n");
    assert!(began.elapsed() < Duration::from_secs(10));
    let output = exec(node, &[], &["sh", "-c", "kill -9 $$"]).output().unwrap();
    assert_eq!(output.status.code(), Some(137));
}

fn half_close(node: &Node) {
    let mut child =
        exec(node, &["-i"], &["sh", "-c", "cat; echo end"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let sent = vec![b'x'; 300_000];
    stdin.write_all(&sent).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(output.stdout.len(), 300_000 + 4);
    assert!(output.stdout.ends_with(b"xend\n"));
    // Without -i the command sees an end at once.
    let output = exec(node, &[], &["sh", "-c", "cat; echo end"]).output().unwrap();
    assert_eq!(output.stdout, b"end\n");
}

fn signals(node: &Node) {
    let script = "trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.1; done";
    let mut child = exec(node, &[], &["sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut ready = [0; 6];
    stdout.read_exact(&mut ready).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!((rest.as_str(), child.wait().unwrap().code()), ("term\n", Some(9)));
}

fn failures(node: &Node) {
    let code = |flags: &[&str], command: &[&str]| {
        let output = exec(node, flags, command).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (exit, said) = code(&[], &["/no/such/program"]);
    assert_eq!(exit, Some(127), "{said}");
    let (exit, said) = code(&[], &["/etc"]);
    assert_eq!(exit, Some(126), "{said}");
    let (exit, said) = code(&["-c", "nobody"], &["true"]);
    assert_eq!(exit, Some(125), "{said}");
    assert!(said.contains("has no container \"nobody\"; it has sh"), "{said}");
    let output = node.command("exec").args(["nobody", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no pod default/nobody"));
}

/// A person at a terminal: sizes, raw keys, the terminal put back.
fn terminal(node: &Node) {
    let pty = openpty(None, None).unwrap();
    tty::set_size(pty.master.as_fd(), 33, 101).unwrap();
    let slave = || Stdio::from(pty.slave.try_clone().unwrap());
    let program = exec(node, &["-it"], &["sh"]);
    // A session of its own whose terminal this is, so that the kernel sends it SIGWINCH.
    let mut child = Command::new("setsid")
        .arg("--ctty")
        .arg(program.get_program())
        .args(program.get_args())
        .stdin(slave())
        .stdout(slave())
        .stderr(slave())
        .spawn()
        .unwrap();
    let mut screen = Screen::of(&pty.master);
    screen.until("# ");
    screen.type_keys("tty; stty size\n");
    screen.until("/dev/pts/");
    screen.until("33 101");
    tty::set_size(pty.master.as_fd(), 20, 60).unwrap();
    let began = Instant::now();
    loop {
        // What is typed is echoed: the mark must differ from it.
        screen.type_keys("stty size; echo do''ne\n");
        screen.until("done");
        if screen.seen.contains("20 60") {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "the new size does not arrive: {}", screen.seen);
    }
    // ^C is a key for the command, not a signal for us.
    screen.type_keys("sleep 1000\n");
    std::thread::sleep(Duration::from_millis(300));
    screen.type_keys("\x03");
    screen.type_keys("echo after-$((40+2))\n");
    screen.until("after-42");
    screen.type_keys("exit 7\n");
    assert_eq!(child.wait().unwrap().code(), Some(7));
    use nix::sys::termios::{LocalFlags, tcgetattr};
    assert!(tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ECHO | LocalFlags::ICANON), "the terminal stays raw");
    // With -t but no terminal here: a terminal there, bytes as they are, and an end.
    let mut child = exec(node, &["-it"], &["sh", "-c", "tty; cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"typed\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("/dev/pts/") && text.contains("typed"), "{text}");
    assert_eq!(output.status.code(), Some(0));
}

fn outlives_the_agent(node: &mut Node) {
    let mut child = exec(node, &["-i"], &["sh", "-c", "echo ready; read line; echo got $line; exit 5"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut ready = [0; 6];
    stdout.read_exact(&mut ready).unwrap();
    node.kill_agent();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!((rest.as_str(), child.wait().unwrap().code()), ("got hello\n", Some(5)));
    node.start_agent();
    let output = exec(node, &[], &["echo", "again"]).output().unwrap();
    assert_eq!(output.stdout, b"again\n");
}

struct Screen {
    master: File,
    /// Came, and was not asked for yet.
    fresh: String,
    /// What the last `until` went through.
    seen: String,
}

impl Screen {
    fn of(master: &OwnedFd) -> Screen {
        Screen { master: master.try_clone().unwrap().into(), fresh: String::new(), seen: String::new() }
    }
    fn type_keys(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }
    /// Reads on until `text` has come.
    fn until(&mut self, text: &str) {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut buffer = [0; 4096];
        loop {
            if let Some(at) = self.fresh.find(text) {
                let rest = self.fresh.split_off(at + text.len());
                self.seen = std::mem::replace(&mut self.fresh, rest);
                return;
            }
            let mut waits = [PollFd::new(self.master.as_fd(), PollFlags::POLLIN)];
            let ready = poll(&mut waits, PollTimeout::from(10_000u16)).unwrap();
            assert!(ready > 0, "no \"{text}\" on the terminal: {:?} then {:?}", self.seen, self.fresh);
            let n = self.master.read(&mut buffer).unwrap();
            self.fresh.push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
    }
}
