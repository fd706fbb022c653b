//! One agent of a test: its own root and instance, taken away again with all it made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub struct Node {
    root: tempfile::TempDir,
    instance: String,
    agent: Option<Child>,
    number: u32,
}

/// Root and a kernel that runs pods; else a loud skip, which CI does not accept.
pub fn possible() -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "CI must run this as root");
    eprintln!("SKIP: needs root");
    false
}

impl Node {
    pub fn start() -> Node {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = tempfile::Builder::new().prefix("coracle-cli.").tempdir().unwrap();
        fs::create_dir(root.path().join("manifests")).unwrap();
        let mut node = Node { root, instance: format!("t{}x{number}", std::process::id() % 1_000_000), agent: None, number };
        node.start_agent();
        node
    }

    pub fn start_agent(&mut self) {
        // A range of its own for each test process and node.
        let pid = std::process::id();
        let cidr = format!("10.{}.{}.{}/28", 200 + pid % 50, pid / 50 % 256, self.number % 16 * 16);
        let log = fs::File::options().create(true).append(true).open(self.root.path().join("agent.log")).unwrap();
        let child = self
            .command("agent")
            .arg("--manifests")
            .arg(self.root.path().join("manifests"))
            .args(["--pod-cidr", &cidr, "--log-level", "debug"])
            .stderr(log)
            .spawn()
            .unwrap();
        self.agent = Some(child);
        self.until("the agent answers", || self.run(&["info"]).status.success());
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }
    pub fn instance(&self) -> &str {
        &self.instance
    }
    pub fn socket(&self) -> PathBuf {
        self.root.path().join("run/agent.sock")
    }
    pub fn agent_pid(&self) -> i32 {
        self.agent.as_ref().unwrap().id() as i32
    }

    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
        command.args(verb.split(' ')).arg("--root").arg(self.root.path()).args(["--instance", &self.instance]);
        command.stdin(Stdio::null());
        command
    }

    /// The first word is the verb.
    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args[0]).args(&args[1..]).output().unwrap()
    }

    pub fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    pub fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            if began.elapsed() > Duration::from_secs(60) {
                let log = fs::read_to_string(self.root.path().join("agent.log")).unwrap_or_default();
                let pods = self.run(&["pods"]);
                let tail: Vec<&str> = log.lines().rev().take(40).collect();
                panic!(
                    "not within 60 s: {what}\n{}\n{}",
                    String::from_utf8_lossy(&pods.stdout),
                    tail.into_iter().rev().collect::<Vec<_>>().join("\n")
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A pod of busybox's shell that runs on, imported image included.
    pub fn shell_pod(&self, name: &str) {
        self.import_busybox();
        self.pod(name, "Always", "echo up; exec sleep 100000");
        self.until("the pod runs", || String::from_utf8_lossy(&self.run(&["pods", name]).stdout).contains("Running"));
    }

    pub fn pod(&self, name: &str, restart: &str, script: &str) {
        let manifest = format!(
            r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{name}"}},"spec":{{"terminationGracePeriodSeconds":1,
               "restartPolicy":"{restart}","containers":[
               {{"name":"sh","image":"busybox","imagePullPolicy":"IfNotPresent","command":["sh","-c","{script}"]}}]}}}}"#
        );
        let file = self.root.path().join("manifests").join(format!("{name}.json"));
        fs::write(file.with_file_name(format!(".{name}")), manifest).unwrap();
        fs::rename(file.with_file_name(format!(".{name}")), &file).unwrap();
    }

    fn import_busybox(&self) {
        let archive = self.root.path().join("busybox.tar");
        let made = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/images/busybox")).arg(&archive).status().unwrap();
        assert!(made.success(), "images/busybox");
        let output = self.command("import").arg(&archive).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let undone = self.run(&["uninstall", "--yes"]);
        if let Some(mut agent) = self.agent.take() {
            // Its own process: after a failed uninstall it may still live.
            let _ = agent.kill();
            let _ = agent.wait();
        }
        if !undone.status.success() && !std::thread::panicking() {
            panic!("uninstall: {}", String::from_utf8_lossy(&undone.stderr));
        }
    }
}
