//! `coracle runtime run BUNDLE`: the program itself, and what it makes of the state that it was
//! started with.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::streams::wait_until;
use crate::world::able;

struct Bundle {
    dir: tempfile::TempDir,
    config: Value,
}

impl Bundle {
    /// What `runc spec` writes, in brief, with `script` to run.
    fn new(script: &str) -> Bundle {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("bundle/rootfs");
        for folder in ["bin", "dev", "proc", "sys", "tmp", "etc"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).unwrap();
        for name in ["sh", "cat", "sleep", "echo", "kill", "grep", "ionice", "ls"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        let mut config: Value = serde_json::from_str(include_str!("../bench/config.json")).unwrap();
        config["process"]["args"] = json!(["/bin/sh", "-c", script]);
        // Without a filter: what a seccomp profile forbids is not the question here.
        config["linux"]["maskedPaths"] = json!(["/proc/kcore"]);
        let bundle = Bundle { dir, config };
        bundle.save();
        bundle
    }

    fn save(&self) {
        fs::write(self.path().join("config.json"), self.config.to_string()).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("bundle")
    }

    /// Where its run directories are.
    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
        command.args(["runtime", "run", "--root"]).arg(self.root()).arg(self.path()).stdin(Stdio::null());
        command
    }

    fn run(&self) -> Output {
        self.command().output().unwrap()
    }

    fn left(&self) -> Vec<PathBuf> {
        let names = fs::read_dir(self.root()).into_iter().flatten().flatten().map(|e| e.path());
        names.filter(|path| path.to_string_lossy().contains("/run-run-")).collect()
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // Whatever a failed test has left, the next run removes.
        if !self.left().is_empty() {
            let _ = self.run();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn cgroups_of(pid: u32) -> Vec<PathBuf> {
    let mounts = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|e| e.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
    mounts.map(|mount| mount.join(format!("coracle-run-{pid}"))).filter(|dir| dir.exists()).collect()
}

#[test]
fn a_bundles_code_and_streams_are_ours_and_nothing_is_left() {
    if !able() {
        return;
    }
    let mut bundle = Bundle::new("cat; echo out; echo err >&2; cat /proc/self/oom_score_adj; exit 7");
    let mut child = bundle.command().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    child.stdin.take().unwrap().write_all(b"in\n").unwrap();
    let done = child.wait_with_output().unwrap();
    let own = fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    assert_eq!(
        (done.status.code(), text(&done.stdout), text(&done.stderr)),
        (Some(7), format!("in\nout\n{own}"), "err\n".into())
    );
    assert_eq!((bundle.left(), cgroups_of(pid)), (vec![], vec![]));
    // What cannot be executed has a shell's codes.
    for (program, code) in [("/bin/nope", 127), ("/etc", 126)] {
        bundle.config["process"]["args"] = json!([program]);
        bundle.save();
        assert_eq!(bundle.run().status.code(), Some(code), "{program}");
    }
    // The config's own limits hold.
    bundle.config["process"]["args"] = json!(["/bin/sh", "-c", "for i in 1 2 3 4 5 6; do sleep 3 & done; echo all"]);
    bundle.config["linux"]["resources"]["pids"]["limit"] = 4.into();
    bundle.save();
    let done = bundle.run();
    if !coracle::runtime::cgroup::Cgroups::detect("/").unwrap().lacks().iter().any(|lack| lack.what == "pids controller") {
        assert!(text(&done.stderr).contains("can't fork"), "{done:?}");
    }
    assert_eq!(bundle.left(), Vec::<PathBuf>::new());
}

#[test]
fn signals_reach_the_program_in_the_bundle() {
    if !able() {
        return;
    }
    let script = "trap 'exit 42' TERM; trap 'echo usr' USR1; echo ready; while :; do sleep 0.05; done";
    let mut bundle = Bundle::new(script);
    for (signal, code) in [(libc::SIGTERM, 42), (libc::SIGINT, 43)] {
        let out = bundle.dir.path().join("out");
        let mut child = bundle.command().stdout(fs::File::create(&out).unwrap()).spawn().unwrap();
        wait_until("it is ready", || fs::read_to_string(&out).unwrap().contains("ready"));
        send(&child, libc::SIGUSR1);
        wait_until("SIGUSR1 was passed on", || fs::read_to_string(&out).unwrap().contains("usr"));
        send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        // And the same with another signal.
        let script = script.replace("TERM", "INT").replace("42", "43");
        bundle.config["process"]["args"][2] = script.into();
        bundle.save();
    }
}

fn send(child: &Child, signal: i32) {
    let signal = nix::sys::signal::Signal::try_from(signal).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), signal).unwrap();
}

#[test]
fn a_bundle_that_cannot_be_run_is_told_by_name() {
    if !able() {
        return;
    }
    let mut bundle = Bundle::new("true");
    let config = bundle.path().join("config.json").canonicalize().unwrap();
    let refused = |bundle: &Bundle, words: &[&str]| {
        let done = bundle.run();
        let error = text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{error}");
        assert!(error.lines().count() == 1 && words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
        assert_eq!(bundle.left(), Vec::<PathBuf>::new());
    };
    let named = config.to_str().unwrap();
    fs::write(&config, "{\"ociVersion\": \"1.0.2\",\n \"process\": }").unwrap();
    refused(&bundle, &[named, "line 2 column 13"]);
    fs::write(&config, "{\"ociVersion\": 3}").unwrap();
    refused(&bundle, &[named, "expected a string"]);
    fs::remove_file(&config).unwrap();
    refused(&bundle, &[named, "No such file"]);
    bundle.config.as_object_mut().unwrap().remove("root");
    bundle.save();
    refused(&bundle, &["config.json has no root"]);
    bundle.config["root"] = json!({"path": "nowhere"});
    bundle.save();
    refused(&bundle, &["nowhere"]);
}

#[test]
fn what_a_killed_run_left_the_next_one_removes() {
    if !able() {
        return;
    }
    let mut bundle = Bundle::new("echo $$ >/tmp/started; exec sleep 1000");
    let mut child = bundle.command().spawn().unwrap();
    let pid = child.id();
    wait_until("it runs", || bundle.path().join("rootfs/tmp/started").exists());
    // Another one beside it leaves it alone.
    bundle.config["process"]["args"][2] = "exit 3".into();
    bundle.save();
    assert_eq!(bundle.run().status.code(), Some(3));
    assert!(!cgroups_of(pid).is_empty() && child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert_eq!(bundle.left().len(), 1, "it is killed, so it could remove nothing");
    assert_eq!(bundle.run().status.code(), Some(3));
    assert_eq!((bundle.left(), cgroups_of(pid)), (vec![], vec![]));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(bundle.root().to_str().unwrap()), "{mounts}");
    assert!(bundle.path().join("rootfs/bin/busybox").exists(), "the bundle is its owner's");
}

/// A container is the same whatever the agent was started with; only limits are handed on.
#[test]
fn a_container_inherits_limits_and_nothing_else() {
    if !able() {
        return;
    }
    let script = "cat /proc/self/limits /proc/self/status; echo personality: $(cat /proc/self/personality); \
                  echo slack: $(cat /proc/self/timerslack_ns); echo stat: $(cat /proc/self/stat); \
                  echo io: $(ionice -p $$); cat /proc/keys; umask";
    let bundle = Bundle::new(script);
    // Its output, and the name that the keyring of its container has.
    let run = |command: &mut Command| {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let ring = format!("_ses.{:064x}", child.id());
        let done = child.wait_with_output().unwrap();
        (text(&done.stdout), text(&done.stderr), ring)
    };
    let plain_run = run(&mut bundle.command());
    let plain = plain_run.0.clone();
    let ours = bundle.command();
    // Each of them executes the next.
    let chain = "--nofile=777:888 --core=0:0 nice -n7 ionice -c3 chrt -b 0 taskset -c 0 setarch --addr-no-randomize";
    let odd = run(Command::new("prlimit").args(chain.split(' ')).arg(ours.get_program()).args(ours.get_args()));
    let fact = |from: &str, key: &str| from.lines().find(|l| l.starts_with(key)).map(str::to_owned);
    assert!(fact(&odd.0, "Max open files").is_some_and(|l| l.contains("777") && l.contains("888")), "{odd:?}");
    for key in
        ["Cpus_allowed_list", "SigBlk", "SigIgn", "CapEff", "CapAmb", "THP_enabled", "personality:", "slack:", "io:", "Groups"]
    {
        assert_eq!(fact(&odd.0, key), fact(&plain, key), "{key}");
        assert!(fact(&plain, key).is_some(), "{key}: {plain}");
    }
    // proc_pid_stat(5): nice is the 19th, policy the 41st field.
    let stat = |from: &str, n: usize| {
        fact(from, "stat:").unwrap().rsplit_once(") ").unwrap().1.split(' ').nth(n - 3).unwrap().to_owned()
    };
    assert_eq!((stat(&odd.0, 19), stat(&odd.0, 41)), ("0".into(), "0".into()));
    assert_eq!(fact(&plain, "slack:").unwrap(), "slack: 50000");
    // A session keyring of its own, as runc makes it, in place of ours.
    for (seen, words, ring) in [&plain_run, &odd] {
        assert!(!fs::exists("/proc/keys").unwrap() || seen.contains(ring), "{ring}: {seen} {words}");
    }
}
