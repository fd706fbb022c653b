//! Agents and monitors of different releases: what each release really said (captured from the
//! sockets of its own tests, paths shortened) is understood by this one, both ways round.
//!
//! `golden/wire/<release>.requests` and `.replies`, a frame a line, each shape once. A release adds
//! its pair of files and leaves the others as they are: monitors that speak them may still live.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use coracle::runtime::monitor::client::{CallError, Client};
use coracle::runtime::monitor::wire::{Frame, Hello, Kind, RELEASE, Reply, Request, Resize};
use coracle::sys::seqpacket;
use serde_json::Value;

use crate::world::*;

/// (release, frame) of every file that ends so.
fn golden(end: &str) -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wire");
    let mut frames = Vec::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if let Some(release) = entry.file_name().to_str().unwrap().strip_suffix(end) {
            let text = fs::read_to_string(entry.path()).unwrap();
            frames.extend(text.lines().map(|line| (release.to_owned(), line.to_owned())));
        }
    }
    frames
}

#[test]
fn what_every_release_said_is_understood() {
    let (mut requests, mut replies) = (BTreeSet::new(), BTreeSet::new());
    for (release, line) in golden(".requests") {
        let frame = Frame::parse(line.as_bytes()).unwrap();
        let request = Request::decode(&frame).unwrap_or_else(|e| panic!("{release}: {line}: {e}"));
        requests.insert((release.clone(), request.kind()));
        if release == RELEASE {
            assert_eq!(String::from_utf8(request.encode(frame.id).unwrap()).unwrap(), line, "the files are not of this release");
        }
    }
    for (release, line) in golden(".replies") {
        let frame = Frame::parse(line.as_bytes()).unwrap();
        let reply = Reply::decode(&frame).unwrap_or_else(|e| panic!("{release}: {line}: {e}"));
        replies.insert((release.clone(), reply.kind()));
        if release == RELEASE {
            assert_eq!(String::from_utf8(reply.encode(frame.id).unwrap()).unwrap(), line, "the files are not of this release");
        }
        // What a newer release may add is skipped.
        let mut newer: Value = serde_json::from_str(&line).unwrap();
        newer["v"] = 7.into();
        newer["trace"] = "x".into();
        newer["body"]["added_later"] = serde_json::json!({"by": [1, 2]});
        let newer = newer.to_string();
        assert_eq!(Reply::decode(&Frame::parse(newer.as_bytes()).unwrap()).unwrap(), reply, "{newer}");
    }
    let of = |all: &BTreeSet<(String, &'static str)>| all.iter().filter(|(release, _)| release == RELEASE).count();
    assert_eq!((of(&requests), of(&replies)), (14, 11), "every kind of frame of {RELEASE} has its line");
}

#[test]
fn an_older_agents_requests_are_obeyed_by_this_releases_monitor() {
    if !able() {
        return;
    }
    let world = World::new();
    world.run_sandbox(1);
    world.start(&world.container(1, 1, &["sleep", "1000"]));
    let dir = coracle::sys::file::open_dir_path(&world.run.join("pods").join(uid(1).as_str())).unwrap();
    // The container goes last, and the monitor after it.
    let late = |line: &str| line.contains("\"remove\"") as u8 + 2 * line.contains("\"quit\"") as u8;
    let mut requests = golden(".requests");
    requests.sort_by_key(|(_, line)| late(line));
    let mut quits = 0;
    for (release, line) in requests {
        let mut request: Value = serde_json::from_str(&line).unwrap();
        if !request["body"]["id"].is_null() {
            request["body"]["id"] = id(1).to_string().into();
        }
        // With one monitor to try on, the first to say so ends it.
        if request["type"] == "quit" {
            quits += 1;
            if quits > 1 {
                continue;
            }
        }
        request["body"]["added_later"] = true.into();
        let socket = seqpacket::connect(dir.as_fd(), "mon.sock").unwrap();
        let pipes: Vec<OwnedFd> = match request["type"].as_str().unwrap() {
            "exec" => (0..2).map(|_| coracle::sys::process::pipe().unwrap().1).collect(),
            "attach" => vec![coracle::sys::process::pipe().unwrap().0, coracle::sys::process::pipe().unwrap().1],
            _ => Vec::new(),
        };
        let fds: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
        seqpacket::send(socket.as_fd(), request.to_string().as_bytes(), &fds).unwrap();
        let reply = receive(&socket, request["id"].as_u64().unwrap());
        let kind = reply["body"]["kind"].as_str().unwrap_or_default();
        // A program to become is no part of a capture.
        let asks_for_more = request["type"] == "reexec";
        assert!(kind != "unknown_type" && (kind != "bad_request" || asks_for_more), "{release}: {line}: {reply}");
    }
    world.runtime().remove_sandbox(&uid(1)).unwrap();
    let left = world.inventory();
    assert!(left.processes.is_empty() && left.files.is_empty(), "{left:?}");
}

fn receive(socket: &OwnedFd, id: u64) -> Value {
    let mut buffer = vec![0; 65536];
    loop {
        assert!(seqpacket::wait(socket.as_fd(), Some(WAIT)).unwrap(), "no answer");
        match seqpacket::receive(socket.as_fd(), &mut buffer).unwrap() {
            seqpacket::Received::Message { len, .. } => {
                let reply: Value = serde_json::from_slice(&buffer[..len]).unwrap();
                if reply["id"] == id {
                    return reply;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// An older monitor does not know what a newer agent asks, a newer one tells what this agent does
/// not know: neither is the end of the conversation.
#[test]
fn a_monitor_of_another_release_is_lived_with() {
    let (ours, theirs) = seqpacket::pair().unwrap();
    let monitor = std::thread::spawn(move || {
        let mut seen = Vec::new();
        for answers in [
            vec![
                r#"{"v":9,"id":0,"type":"weather","body":{"wind":3}}"#,
                "no frame at all",
                r#"{"v":9,"id":ID,"type":"hello","body":{"release":"9.9.9","pod":"p","pid":7,"mood":"good"},"more":1}"#,
            ],
            vec![
                r#"{"v":0,"id":ID,"type":"error","body":{"kind":"unknown_type","message":"type \"resize\" is not known to version 0"}}"#,
            ],
            vec![r#"{"v":9,"id":ID,"type":"error","body":{"kind":"quota_exceeded","message":"later"}}"#],
            vec![r#"{"v":9,"id":ID,"type":"moved","body":{}}"#],
        ] {
            let mut buffer = vec![0; 65536];
            assert!(seqpacket::wait(theirs.as_fd(), Some(WAIT)).unwrap());
            let seqpacket::Received::Message { len, .. } = seqpacket::receive(theirs.as_fd(), &mut buffer).unwrap() else {
                panic!()
            };
            let asked: Value = serde_json::from_slice(&buffer[..len]).unwrap();
            for answer in answers {
                let answer = answer.replace("ID", &asked["id"].to_string());
                seqpacket::send(theirs.as_fd(), answer.as_bytes(), &[]).unwrap();
            }
            seen.push(asked["type"].as_str().unwrap().to_owned());
        }
        seen
    });
    let mut client = Client::from_fd(ours);
    let limit = Duration::from_secs(10);
    let Ok((Reply::Hello(hello), _)) = client.call(&Request::Hello(Hello::default()), &[], limit) else { panic!() };
    assert_eq!((hello.release.as_str(), hello.pid), ("9.9.9", 7));
    let resize = Request::Resize(Resize { id: id(1), rows: 1, columns: 1 });
    for kind in [Kind::UnknownType, Kind::Refused, Kind::UnknownType] {
        match client.call(&resize, &[], limit) {
            Err(CallError::Failed(failure)) => assert_eq!(failure.kind, kind, "{failure:?}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(monitor.join().unwrap(), ["hello", "resize", "resize", "resize"]);
}
