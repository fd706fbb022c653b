//! `coracle logs` from files alone: the agent is down.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Root {
        Root(tempfile::tempdir().unwrap())
    }
    fn container(&self, pod: &str, container: &str) -> PathBuf {
        let dir = self.0.path().join("log/pods").join(pod).join(container);
        fs::create_dir_all(&dir).unwrap();
        dir
    }
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
        command.arg("logs").args(args).arg("--root").arg(self.0.path()).stdin(Stdio::null());
        command
    }
    fn logs(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }
    fn text(&self, args: &[&str]) -> String {
        let output = self.logs(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

fn line(second: u32, text: &str) -> String {
    format!("2026-11-30T10:00:{second:02}.000000000Z stdout F {text}\n")
}

#[test]
fn the_newest_attempt_the_previous_one_and_the_newest_pod_of_a_name() {
    let root = Root::new();
    let old = root.container("default_web_old", "app");
    fs::write(old.join("0.log"), line(1, "of an older pod")).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let dir = root.container("default_web_new", "app");
    fs::write(dir.join("3.log"), line(1, "third")).unwrap();
    fs::write(dir.join("4.log"), line(2, "fourth") + &line(3, "and more")).unwrap();
    assert_eq!(root.text(&["web"]), "fourth\nand more\n");
    assert_eq!(root.text(&["default/web", "--tail", "1"]), "and more\n");
    assert_eq!(root.text(&["-n", "default", "web", "-p"]), "third\n");
    assert_eq!(
        root.text(&["web", "app", "--since", "2026-11-30T10:00:03Z", "--timestamps"]),
        "2026-11-30T10:00:03.000000000Z and more\n"
    );
    assert_eq!(root.logs(&["web", "-n", "other"]).status.code(), Some(4));
}

#[test]
fn several_containers_need_a_name() {
    let root = Root::new();
    fs::write(root.container("default_web_u", "a").join("0.log"), line(1, "of a")).unwrap();
    fs::write(root.container("default_web_u", "b").join("0.log"), line(1, "of b")).unwrap();
    let output = root.logs(&["web"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("a, b"));
    assert_eq!(root.text(&["web", "-c", "b"]), "of b\n");
    assert_eq!(root.logs(&["web", "-c", "../a"]).status.code(), Some(2));
}

#[test]
fn a_log_replaced_by_a_link_is_refused() {
    let root = Root::new();
    let dir = root.container("default_web_u", "app");
    std::os::unix::fs::symlink("/etc/passwd", dir.join("0.log")).unwrap();
    let output = root.logs(&["web"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("0.log"));
}

#[test]
fn following_goes_across_rotation_and_ends_with_the_run() {
    let root = Root::new();
    let dir = root.container("default_web_u", "app");
    fs::write(dir.join("0.log"), line(1, "a")).unwrap();
    let child = root.command(&["-f", "web"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fs::rename(dir.join("0.log"), dir.join("0.log.20261130-100002")).unwrap();
    fs::write(dir.join("0.log"), line(2, "b")).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let mut file = fs::OpenOptions::new().append(true).open(dir.join("0.log")).unwrap();
    file.write_all(line(3, "c").as_bytes()).unwrap();
    // The next run begins: this one is over.
    fs::write(dir.join("1.log"), line(4, "of the next run")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "a\nb\nc\n");
}

#[test]
fn a_follower_ends_when_nobody_reads_it_any_more() {
    let root = Root::new();
    let dir = root.container("default_web_u", "app");
    fs::write(dir.join("0.log"), line(1, "a")).unwrap();
    let mut child = root.command(&["-f", "web"]).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    drop(child.stdout.take());
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(10), "it follows for nobody");
        std::thread::sleep(Duration::from_millis(50));
    }
}
