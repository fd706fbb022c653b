//! The agent as a service: what it tells the service manager and the journal.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::node::{Node, possible};

#[test]
fn ready_watchdog_stopping_and_lines_for_the_journal() {
    if !possible() {
        return;
    }
    let mut node = Node::start();
    node.kill_agent();
    let manager = node.root().join("notify");
    let socket = UnixDatagram::bind(&manager).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let told = || {
        let mut buffer = [0; 1024];
        let n = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..n]).into_owned()
    };
    let journal = fs::File::create(node.root().join("journal")).unwrap();
    let meta = journal.metadata().unwrap();
    let mut agent = node
        .command("agent")
        .arg("--manifests")
        .arg(node.root().join("manifests"))
        .args(["--log-format", "json", "--pod-cidr", ""])
        .env("NOTIFY_SOCKET", &manager)
        .env("WATCHDOG_USEC", "400000")
        .env("JOURNAL_STREAM", format!("{}:{}", meta.dev(), meta.ino()))
        .stderr(journal)
        .spawn()
        .unwrap();
    assert!(told().starts_with("READY=1\nSTATUS="), "the first word");
    for _ in 0..3 {
        assert_eq!(told(), "WATCHDOG=1", "from an idle planner too");
    }
    kill(Pid::from_raw(agent.id() as i32), Signal::SIGTERM).unwrap();
    let last = (0..50).map(|_| told()).find(|word| word != "WATCHDOG=1").unwrap();
    assert_eq!(last, "STOPPING=1");
    assert_eq!(agent.wait().unwrap().code(), Some(0));
    let lines = fs::read_to_string(node.root().join("journal")).unwrap();
    assert!(!lines.is_empty());
    for line in lines.lines() {
        let (priority, json) = line.split_once('>').unwrap();
        assert!(matches!(priority, "<3" | "<4" | "<6" | "<7"), "{line}");
        let value: serde_json::Value = serde_json::from_str(json).unwrap();
        assert!(value["message"].is_string() && value["time"].is_string(), "{line}");
    }
}
