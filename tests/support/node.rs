//! A node of its own for a test: the shipped binary with own directories, instance and cgroups in
//! network and mount namespaces that a sleeping process holds, with a boot id that a test can set,
//! and an image made on the spot. Cgroups and pids are the machine's; an inventory of what carries
//! the test's names shows what is left of them. Dropping it removes all of that, whatever happened.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

pub const CORACLE: &str = env!("CARGO_BIN_EXE_coracle");

static COUNT: AtomicU32 = AtomicU32::new(0);
/// Two nodes at once are enough for two cores; one keeps figures steady.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Root, or the test says loudly that it was skipped (never in CI).
pub fn privileged() -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "these tests need root");
    eprintln!("SKIP: these tests need root");
    false
}

pub struct Node {
    pub dir: tempfile::TempDir,
    pub instance: String,
    /// Names that it had before.
    former: Vec<String>,
    pub agent: Option<Child>,
    /// Environment of the next agent that is started.
    pub env: Vec<(&'static str, String)>,
    /// More arguments of the next agent that is started.
    pub args: Vec<String>,
    /// Holds the namespaces in which agent, clients and whatever they reach run.
    holder: Child,
    before: BTreeSet<String>,
    _turn: std::sync::MutexGuard<'static, ()>,
}

impl Node {
    /// Directories, namespaces and the image; the agent is started with [`Node::start`].
    pub fn new() -> Node {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = tempfile::Builder::new().prefix("coracle-node-").tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        fs::write(dir.path().join("boot_id"), boot_id(1)).unwrap();
        let script = format!(
            "ip link set lo up && mount --bind {} /proc/sys/kernel/random/boot_id && echo ready && exec sleep 100000",
            dir.path().join("boot_id").display()
        );
        let mut holder = Command::new("unshare")
            .args(["--net", "--mount", "--propagation", "private", "sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut word = [0; 5];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut word).unwrap();
        let mut node = Node {
            dir,
            instance: format!("n{:x}x{n}", std::process::id() & 0xf_ffff),
            former: Vec::new(),
            agent: None,
            env: Vec::new(),
            args: Vec::new(),
            holder,
            before: BTreeSet::new(),
            _turn: turn,
        };
        node.make_image();
        node.before = node.inventory();
        node
    }

    /// Another name of the next agent that is started.
    pub fn rename(&mut self, instance: &str) {
        self.former.push(std::mem::replace(&mut self.instance, instance.to_owned()));
    }

    /// Another boot id: what is in /run is void from the next start of an agent on.
    pub fn set_boot(&self, n: u32) {
        // In place: the file itself is what is mounted.
        fs::write(self.path("boot_id"), boot_id(n)).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn root(&self) -> PathBuf {
        self.path("root")
    }

    /// A path of the node, also of what is mounted in its namespace, as this process reaches it.
    pub fn seen(&self, path: &Path) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.holder.id())).join(path.strip_prefix("/").unwrap())
    }

    fn make_image(&self) {
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("images/busybox");
        let out = Command::new(recipe).arg(self.path("busybox.tar")).output().unwrap();
        assert!(out.status.success(), "image recipe: {}", String::from_utf8_lossy(&out.stderr));
    }

    /// Who holds the node's namespaces.
    pub fn holder(&self) -> u32 {
        self.holder.id()
    }

    /// A command inside the node's namespaces. nsenter execs it without a fork: the pid is the
    /// child's own.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holder.id().to_string(), "-n", "-m", "--"]).arg(program).stdin(Stdio::null());
        command
    }

    /// Starts the agent and waits until its socket answers.
    pub fn start(&mut self) -> Duration {
        let begun = Instant::now();
        self.spawn();
        self.wait("the agent answers", 20, |node| node.cli(&["info"]).status.success());
        begun.elapsed()
    }

    pub fn spawn(&mut self) {
        assert!(self.agent.is_none());
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("agent.log")).unwrap();
        let mut command = self.command(CORACLE);
        command.args(["agent", "--log-level", "debug", "--node-name", "testnode", "--node-ip", "192.0.2.7"]);
        command.args(["--pod-cidr", "10.231.0.0/16", "--instance", &self.instance, "--stop-grace", "5"]);
        command.args(&self.args);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.arg("--manifests").arg(self.path("manifests")).arg("--root").arg(self.root());
        self.agent = Some(command.stdin(Stdio::null()).stderr(log).spawn().unwrap());
    }

    /// A node that runs, with busybox on it.
    pub fn running() -> Node {
        let mut node = Node::new();
        node.start();
        node.import();
        node
    }

    pub fn import(&self) {
        self.ok(&["import", self.path("busybox.tar").to_str().unwrap()]);
    }

    pub fn cli(&self, args: &[&str]) -> Output {
        let mut command = self.command(CORACLE);
        command.args(args.iter().take_while(|a| **a != "--")).arg("--root").arg(self.root());
        command.args(args.iter().skip_while(|a| **a != "--"));
        command.output().unwrap()
    }

    pub fn ok(&self, args: &[&str]) -> String {
        let out = self.cli(args);
        assert!(out.status.success(), "coracle {args:?}: {}\n{}", String::from_utf8_lossy(&out.stderr), self.log_tail());
        String::from_utf8(out.stdout).unwrap()
    }

    pub fn agent_pid(&self) -> i32 {
        self.agent.as_ref().unwrap().id() as i32
    }

    pub fn signal_agent(&mut self, signal: nix::sys::signal::Signal) -> std::process::ExitStatus {
        let mut agent = self.agent.take().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(agent.id() as i32), signal).unwrap();
        agent.wait().unwrap()
    }

    pub fn kill_agent(&mut self) {
        self.signal_agent(nix::sys::signal::Signal::SIGKILL);
    }

    /// Puts a manifest into the directory, whole at once.
    pub fn put(&self, file: &str, yaml: &str) {
        let temp = self.path("manifests").join(format!(".{file}"));
        fs::write(&temp, yaml).unwrap();
        fs::rename(temp, self.path("manifests").join(file)).unwrap();
    }

    pub fn take_away(&self, file: &str) {
        fs::remove_file(self.path("manifests").join(file)).unwrap();
    }

    /// None: no answer.
    fn list(&self) -> Option<Vec<Value>> {
        let out = self.cli(&["pods", "-A", "-o", "json"]);
        let list: Value = serde_json::from_slice(&out.stdout).ok()?;
        list["items"].as_array().cloned()
    }

    pub fn pods(&self) -> Vec<Value> {
        self.list().unwrap_or_else(|| panic!("the agent does not list its pods\n{}", self.log_tail()))
    }

    pub fn pod(&self, name: &str) -> Option<Value> {
        self.list()?.into_iter().find(|p| p["metadata"]["name"] == name)
    }

    pub fn status(&self, name: &str) -> Value {
        self.pod(name).map_or(Value::Null, |p| p["status"].clone())
    }

    pub fn wait(&self, what: &str, seconds: u64, mut until: impl FnMut(&Node) -> bool) {
        let limit = Instant::now() + Duration::from_secs(seconds);
        while !until(self) {
            if Instant::now() > limit {
                let table = self.cli(&["pods", "-o", "wide"]);
                panic!(
                    "not within {seconds} s: {what}\n{}{}\n--- the agent's log\n{}",
                    String::from_utf8_lossy(&table.stdout),
                    String::from_utf8_lossy(&table.stderr),
                    self.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Waits for a pod's status to fit and gives it.
    pub fn wait_pod(&self, name: &str, what: &str, until: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        self.wait(&format!("{name}: {what}"), 30, |node| {
            last = node.status(name);
            until(&last)
        });
        last
    }

    pub fn wait_ready(&self, name: &str) -> Value {
        self.wait_pod(name, "ready", is_ready)
    }

    pub fn wait_phase(&self, name: &str, phase: &str) -> Value {
        self.wait_pod(name, phase, |s| s["phase"] == phase)
    }

    pub fn wait_gone(&self, name: &str) {
        let named = format!("\"name\":\"{name}\"");
        self.wait(&format!("{name} is gone"), 40, |node| {
            let out = node.cli(&["pods", "-o", "json"]);
            // An agent that does not answer proves nothing.
            out.status.success() && !String::from_utf8_lossy(&out.stdout).contains(&named)
        });
    }

    /// Host pids of every process in this node's pods, by cgroup.
    pub fn pids(&self) -> Vec<i32> {
        self.members(true)
    }

    pub fn monitors(&self) -> Vec<i32> {
        self.members(false)
    }

    /// Shells among them: the main processes of [`pod`]'s containers, without what they start.
    pub fn shells(&self) -> Vec<i32> {
        let is_shell = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sh");
        self.pids().into_iter().filter(is_shell).collect()
    }

    /// True once the agent has died by itself.
    pub fn agent_died(&mut self) -> bool {
        let died = self.agent.as_mut().is_some_and(|agent| agent.try_wait().unwrap().is_some());
        if died {
            self.agent = None;
        }
        died
    }

    /// By the one hierarchy that says it: v2, or v1's pids.
    fn members(&self, of_pods: bool) -> Vec<i32> {
        let v1 = Path::new("/sys/fs/cgroup/pids");
        let base = if v1.is_dir() { v1 } else { Path::new("/sys/fs/cgroup") };
        let mut pids = Vec::new();
        for dir in self.cgroups().into_iter().filter(|dir| dir.starts_with(base)) {
            if of_pods == dir.components().any(|c| c.as_os_str() == "kubepods") {
                let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
                pids.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()));
            }
        }
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.former.iter().chain([&self.instance])
    }

    /// Every cgroup of this instance, in every hierarchy, deepest first.
    fn cgroups(&self) -> Vec<PathBuf> {
        fn walk(dir: &Path, into: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    walk(&entry.path(), into);
                }
            }
            into.push(dir.to_owned());
        }
        let mut found = Vec::new();
        let base = Path::new("/sys/fs/cgroup");
        let mut tops = vec![base.to_owned()];
        tops.extend(fs::read_dir(base).into_iter().flatten().flatten().map(|e| e.path()));
        for ours in tops.iter().flat_map(|top| self.names().map(|name| top.join(name))) {
            if ours.is_dir() && !ours.is_symlink() {
                walk(&ours, &mut found);
            }
        }
        found
    }

    /// Mounts below our directory, in the node's mount namespace.
    pub fn mounts(&self) -> Vec<String> {
        let prefix = self.dir.path().to_str().unwrap();
        let text = fs::read_to_string(format!("/proc/{}/mountinfo", self.holder.id())).unwrap();
        text.lines().filter_map(|l| l.split(' ').nth(4)).filter(|m| m.starts_with(prefix)).map(str::to_owned).collect()
    }

    /// What is there now and was not there before anything ran: links, mounts, cgroups, tables and
    /// processes.
    pub fn left_over(&self) -> Vec<String> {
        self.inventory().difference(&self.before).cloned().collect()
    }

    fn inventory(&self) -> BTreeSet<String> {
        let lines = |command: &mut Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
        let mut found = BTreeSet::new();
        for line in lines(self.command("ip").args(["-o", "link"])).lines() {
            found.insert(format!("link {}", line.split(": ").nth(1).unwrap_or(line)));
        }
        for line in lines(self.command("nft").args(["list", "tables"])).lines() {
            found.insert(format!("nft {line}"));
        }
        found.extend(self.mounts().into_iter().map(|mount| format!("mount {mount}")));
        found.extend(self.cgroups().into_iter().map(|dir| format!("cgroup {}", dir.display())));
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let own = namespace(self.holder.id());
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let alive = fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "));
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if alive && pid != self.holder.id() && own.is_some() && namespace(pid) == own {
                found.insert(format!("process {}", String::from_utf8_lossy(&words).replace('\0', " ")));
            }
        }
        found
    }

    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.path("agent.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// As a power cut: every process, mount and link of the node is gone, the disk stays.
    pub fn power_off(&mut self) {
        if self.agent.is_some() {
            self.kill_agent();
        }
        self.kill_all();
        for mount in self.mounts().iter().rev() {
            let out = self.command("umount").args(["-l", mount]).output().unwrap();
            assert!(out.status.success() || !self.mounts().contains(mount), "{}", String::from_utf8_lossy(&out.stderr));
        }
        self.remove_network();
        self.remove_cgroups();
    }

    fn kill_all(&self) {
        for _ in 0..50 {
            let mut pids = self.monitors();
            pids.extend(self.pids());
            if pids.is_empty() {
                return;
            }
            for pid in pids {
                // It may have ended meanwhile.
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn remove_network(&self) {
        // What is not there cannot be removed, and that is fine.
        let _ = self.command("ip").args(["link", "del", &format!("{}0", self.instance)]).stderr(Stdio::null()).status();
        for family in ["ip", "ip6", "inet"] {
            let _ = self.command("nft").args(["delete", "table", family, &self.instance]).stderr(Stdio::null()).status();
        }
    }

    fn remove_cgroups(&self) {
        for _ in 0..40 {
            for dir in self.cgroups() {
                // Busy for a moment after its last process.
                let _ = fs::remove_dir(dir);
            }
            if self.cgroups().is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        self.kill_all();
        for mount in self.mounts().iter().rev() {
            let _ = self.command("umount").args(["-l", mount]).stderr(Stdio::null()).status();
        }
        self.remove_cgroups();
        // Links, tables and what mounts are left go with the namespaces.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

fn boot_id(n: u32) -> String {
    format!("00000000-0000-4000-8000-{n:012}\n")
}

pub fn container(status: &Value, name: &str) -> Value {
    let all = ["initContainerStatuses", "containerStatuses"].into_iter();
    let mut all = all.flat_map(|key| status[key].as_array().cloned().unwrap_or_default());
    all.find(|c| c["name"] == name).unwrap_or(Value::Null)
}

pub fn is_ready(status: &Value) -> bool {
    condition(status, "Ready")["status"] == "True"
}

pub fn condition(status: &Value, kind: &str) -> Value {
    let all = status["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|c| c["type"] == kind).unwrap_or(Value::Null)
}

/// A pod of shell scripts: `(name, script)` each.
pub fn pod(name: &str, policy: &str, init: &[(&str, &str)], main: &[(&str, &str)], more: &str) -> String {
    let list = |containers: &[(&str, &str)]| {
        let one = |(name, script): &(&str, &str)| {
            let script = serde_json::to_string(script).unwrap();
            format!("  - {{name: {name}, image: \"busybox:1.35\", imagePullPolicy: IfNotPresent, command: [sh, -c, {script}]}}\n")
        };
        containers.iter().map(one).collect::<String>()
    };
    let init = if init.is_empty() { String::new() } else { format!("  initContainers:\n{}", list(init)) };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  restartPolicy: {policy}\n  terminationGracePeriodSeconds: 5\n{more}{init}  containers:\n{}",
        list(main)
    )
}

/// Ends by itself at the first SIGTERM.
pub const STAY: &str = "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done";
