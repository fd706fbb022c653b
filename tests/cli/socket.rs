//! The local socket: who may use it, and clients that mean no good.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use super::node::{Node, possible};

fn threads(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
}
fn fds(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}
fn rss(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend_from_slice(payload);
    frame
}

/// Sends bytes, reads the first answer.
fn say(node: &Node, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(node.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut payload = vec![0; u32::from_be_bytes(head) as usize];
    stream.read_exact(&mut payload).unwrap();
    String::from_utf8(payload).unwrap()
}

#[test]
fn hostile_clients_hurt_nobody() {
    if !possible() {
        return;
    }
    let node = Node::start();
    let pid = node.agent_pid();
    let meta = fs::symlink_metadata(node.socket()).unwrap();
    assert!(meta.file_type().is_socket());
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);

    // Everything that is no request has an answer that says so.
    for bad in
        [&frame(b"")[..], &frame(b"{}"), &frame(b"\xff\xfe"), &frame(br#"{"protocol":1,"ask":{"frobnicate":{}}}"#), &[0xff; 4]]
    {
        let answer = say(&node, bad);
        assert!(answer.contains(r#""error""#) && answer.contains(r#""invalid""#), "{answer}");
    }
    let deep = "[".repeat(100_000);
    assert!(say(&node, &frame(deep.as_bytes())).contains(r#""invalid""#));

    let before = (threads(pid), fds(pid), rss(pid));
    // Many that say nothing, many that say it slowly, many that do not read their answer.
    let mut idle: Vec<UnixStream> = (0..300).map(|_| UnixStream::connect(node.socket()).unwrap()).collect();
    for stream in idle.iter_mut().skip(200) {
        // It may have been put out already for the next one.
        let _ = stream.write_all(&[0, 0]);
    }
    let ask = frame(br#"{"protocol":1,"ask":{"pods":{"manifests":true}}}"#);
    let mut deaf: Vec<UnixStream> = (0..100).map(|_| UnixStream::connect(node.socket()).unwrap()).collect();
    for stream in &mut deaf {
        let _ = stream.write_all(&ask); // as above
    }
    let began = Instant::now();
    let honest = node.run(&["pods"]);
    assert!(honest.status.success(), "{}", String::from_utf8_lossy(&honest.stderr));
    assert!(began.elapsed() < Duration::from_secs(2), "an honest client waited {:?}", began.elapsed());
    assert!(threads(pid) <= before.0 + 40, "{} threads", threads(pid));
    assert!(fds(pid) <= before.1 + 80, "{} descriptors", fds(pid));
    assert!(rss(pid) < before.2 + (8 << 20), "grew by {} bytes", rss(pid) - before.2);
    drop((idle, deaf));
    node.until("threads and descriptors come back", || threads(pid) <= before.0 + 1 && fds(pid) <= before.1 + 1);
}

#[test]
fn another_user_is_refused_with_the_cure_whatever_the_modes_are() {
    if !possible() {
        return;
    }
    const NOBODY: u32 = 65534;
    let node = Node::start();
    // A copy that anybody may execute, wherever the tests were built.
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("coracle");
    fs::copy(env!("CARGO_BIN_EXE_coracle"), &program).unwrap();
    let mode = |path: &std::path::Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(home.path(), 0o755);
    mode(&program, 0o755);
    let ask = |verb: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.arg(verb[0]).arg("--root").arg(node.root()).args(&verb[1..]).uid(NOBODY).gid(NOBODY);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned(), output.stdout)
    };
    let (run, socket) = (node.root().join("run"), node.socket());
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o7777, 0o600);
    mode(node.root(), 0o711);
    mode(&run, 0o711);
    for verb in [&["pods"][..], &["info"], &["images"]] {
        let (code, said, out) = ask(verb);
        assert_eq!((code, out.len()), (Some(3), 0), "{verb:?}: {said}");
        assert!(said.contains("belongs to root") && said.contains("sudo coracle"), "{verb:?}: {said}");
    }
    // Now nothing but the agent itself is in the way.
    mode(&socket, 0o666);
    let (before, served) = (fds(node.agent_pid()), "the agent serves root only, not uid 65534");
    for verb in [&["pods"][..], &["info"], &["images"], &["pull", "x"], &["import", "/"], &["stop-all"]] {
        let (code, said, out) = ask(verb);
        assert_eq!((code, out.len()), (Some(3), 0), "{verb:?}: {said}");
        assert!(said.contains(served) && said.contains("sudo coracle"), "{verb:?}: {said}");
    }
    let (code, said, _) = ask(&["exec", "web", "--", "true"]);
    assert!(code == Some(125) && said.contains(served), "{code:?} {said}");
    assert!(node.run(&["pods"]).status.success(), "root is served");
    node.until("their descriptors are closed", || fds(node.agent_pid()) <= before);
}

#[test]
fn one_that_sends_a_byte_now_and_then_is_put_out() {
    if !possible() {
        return;
    }
    let node = Node::start();
    let mut stream = UnixStream::connect(node.socket()).unwrap();
    let began = Instant::now();
    // A byte each 500 ms would need minutes for this frame.
    let bytes = frame(&[b' '; 1000]);
    for byte in bytes {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "it still listens");
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(began.elapsed() >= Duration::from_secs(4));
}

#[test]
fn a_second_agent_of_one_root_is_refused_and_the_first_one_goes_on() {
    if !possible() {
        return;
    }
    let node = Node::start();
    let output = node.command("agent").arg("--manifests").arg(node.root().join("manifests")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(node.run(&["info"]).status.success(), "the first one still answers");
}
