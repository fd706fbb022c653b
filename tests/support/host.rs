//! A host of its own for one test: fresh network and mount namespaces in which agent, clients and
//! whatever they reach run, held by a sleeping process. Cgroups and pids are the machine's; an
//! inventory of what carries the test's names shows what is left of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

pub struct Host {
    holder: Child,
    pub dir: tempfile::TempDir,
    pub instance: String,
    pub agent: Option<Child>,
    before: BTreeSet<String>,
    extra: Vec<String>,
}

impl Host {
    pub fn new(instance: &str, extra: &[&str]) -> Host {
        assert_eq!(own_uid(), 0, "these tests need root");
        let dir = tempfile::tempdir().unwrap();
        let holder = Command::new("unshare")
            .args([
                "--net",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                "ip link set lo up && echo up && exec sleep 100000",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut host = Host {
            holder,
            dir,
            instance: instance.to_owned(),
            agent: None,
            before: BTreeSet::new(),
            extra: extra.iter().map(|s| (*s).to_owned()).collect(),
        };
        let mut first = [0u8; 3];
        std::io::Read::read_exact(host.holder.stdout.as_mut().unwrap(), &mut first).unwrap();
        fs::create_dir_all(host.manifests()).unwrap();
        host.before = host.inventory();
        host
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }
    pub fn manifests(&self) -> PathBuf {
        self.dir.path().join("manifests")
    }
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("agent.log")).unwrap_or_default()
    }

    /// A command inside the host's namespaces.
    pub fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args([format!("--net=/proc/{}/ns/net", self.holder.id()), format!("--mount=/proc/{}/ns/mnt", self.holder.id())]);
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }

    pub fn start(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("agent.log")).unwrap();
        let mut command = self.inside(env!("CARGO_BIN_EXE_coracle"));
        command.arg("agent").arg("--manifests").arg(self.manifests()).arg("--root").arg(self.root());
        command.args(["--instance", &self.instance, "--pod-cidr", "10.231.0.0/16"]).args(&self.extra);
        self.agent = Some(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    }

    /// nsenter execs the agent without a fork, so its pid is the child's.
    pub fn kill(&mut self) {
        let mut agent = self.agent.take().expect("the agent runs");
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    pub fn client(&self, arguments: &[&str]) -> Output {
        let mut command = self.inside(env!("CARGO_BIN_EXE_coracle"));
        command.arg(arguments[0]).arg("--root").arg(self.root()).args(&arguments[1..]);
        command.output().unwrap()
    }

    pub fn ask(&self, arguments: &[&str]) -> String {
        let output = self.client(arguments);
        assert!(
            output.status.success(),
            "coracle {arguments:?}: {} {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr),
            self.tail()
        );
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn tail(&self) -> String {
        let log = self.log();
        log.lines().rev().take(40).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    pub fn ready(&self) {
        self.until("the agent answers", 30, || self.client(&["pods"]).status.success());
    }

    pub fn until(&self, what: &str, seconds: u64, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(seconds);
        while !done() {
            assert!(
                Instant::now() < end,
                "not within {seconds} s: {what}\n{}\n{}",
                self.client_text(&["pods", "-A"]),
                self.tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn client_text(&self, arguments: &[&str]) -> String {
        String::from_utf8_lossy(&self.client(arguments).stdout).into_owned()
    }

    pub fn pods(&self) -> Vec<Value> {
        let list: Value = serde_json::from_str(&self.ask(&["pods", "-A", "-o", "json"])).unwrap();
        list["items"].as_array().unwrap().clone()
    }

    pub fn pod(&self, name: &str) -> Value {
        self.pods().into_iter().find(|p| p["metadata"]["name"] == name).unwrap_or(Value::Null)
    }

    pub fn put(&self, name: &str, text: &str) {
        let part = self.manifests().join(format!(".{name}"));
        fs::write(&part, text).unwrap();
        fs::rename(part, self.manifests().join(format!("{name}.yaml"))).unwrap();
    }

    /// Links, mounts, cgroups, tables, namespaces and processes that carry this test's names.
    pub fn inventory(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let lines = |command: &mut Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
        for line in lines(self.inside("ip").args(["-o", "link"])).lines() {
            found.insert(format!("link {}", line.split(": ").nth(1).unwrap_or(line)));
        }
        for line in lines(self.inside("nft").args(["list", "tables"])).lines() {
            found.insert(format!("nft {line}"));
        }
        for line in fs::read_to_string(format!("/proc/{}/mounts", self.holder.id())).unwrap().lines() {
            if line.contains(self.dir.path().to_str().unwrap()) {
                found.insert(format!("mount {line}"));
            }
        }
        walk_cgroups(Path::new("/sys/fs/cgroup"), &self.instance, &mut found);
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            let alive = fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "));
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&words).replace('\0', " ");
            if alive && pid != self.holder.id() && namespace(pid).is_some() && namespace(pid) == namespace(self.holder.id()) {
                found.insert(format!("process {words}"));
            }
        }
        found
    }

    /// What is there now and was not there before anything ran.
    pub fn left_over(&self) -> Vec<String> {
        self.inventory().difference(&self.before).cloned().collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("CORACLE_KEEP").is_some() {
            eprintln!("kept for you: {}", self.dir.path().display());
        }
        self.client(&["stop-all"]);
        if let Some(mut agent) = self.agent.take() {
            // Both fail only when it is gone already.
            let _ = agent.kill();
            let _ = agent.wait();
        }
        self.client(&["uninstall", "--yes"]);
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

fn walk_cgroups(dir: &Path, instance: &str, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if entry.file_name().to_string_lossy().contains(instance) {
                into.insert(format!("cgroup {}", entry.path().display()));
            }
            walk_cgroups(&entry.path(), instance, into);
        }
    }
}

fn own_uid() -> u32 {
    fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m)).unwrap()
}
