//! Our side: the agent itself, with a manifests directory, driven by its own command line.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::cases::Case;
use super::containerd::merge;
use super::{facts, image};

pub struct Coracle {
    agent: Child,
    dir: PathBuf,
}

impl Coracle {
    pub fn start(dir: &Path, archive: &Path) -> Coracle {
        std::fs::create_dir_all(dir.join("manifests")).unwrap();
        let log = std::fs::File::create(dir.join("agent.log")).unwrap();
        let agent = program()
            .args(["agent", "--pod-cidr", "10.97.96.0/24", "--manifests"])
            .arg(dir.join("manifests"))
            .arg("--root")
            .arg(dir.join("root"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let ours = Coracle { agent, dir: dir.into() };
        let start = Instant::now();
        while ours.verb(&["info"]).is_err() {
            assert!(start.elapsed() < Duration::from_secs(60), "the agent does not answer: {}", ours.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        ours.verb(&["import", &archive.display().to_string()]).unwrap();
        ours
    }

    /// Puts every pod's manifest in place.
    pub fn submit(&self, cases: &[Case]) {
        for case in cases {
            let mut container = json!({
                "name": "c", "image": image::PROBE, "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", format!("{}\nexec sleep 1000000", literal(facts::SCRIPT))],
            });
            merge(&mut container, case.container_spec.clone());
            let mut spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]});
            merge(&mut spec, case.pod_spec.clone());
            let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": case.name}, "spec": spec});
            let hidden = self.dir.join("manifests").join(format!(".{}", case.name));
            std::fs::write(&hidden, pod.to_string()).unwrap();
            std::fs::rename(&hidden, self.dir.join("manifests").join(format!("{}.json", case.name))).unwrap();
        }
    }

    /// What the pod's container logged up to `== end`, and what an exec printed.
    pub fn read(&self, case: &Case) -> (String, String) {
        let start = Instant::now();
        let pods = self.dir.join("root/log/pods");
        let prefix = format!("default_{}_", case.name);
        let log = loop {
            let entries = std::fs::read_dir(&pods).into_iter().flatten().flatten();
            let found = entries
                .map(|e| e.path().join("c/0.log"))
                .find(|p| p.exists() && p.components().any(|c| c.as_os_str().to_string_lossy().starts_with(&prefix)));
            if let Some(found) = found {
                break found;
            }
            let pods = || self.verb(&["pods"]).unwrap_or_default();
            assert!(start.elapsed() < Duration::from_secs(60), "{}: no log:\n{}\n{}", case.name, pods(), self.log());
            std::thread::sleep(Duration::from_millis(50));
        };
        let log = super::wait_for_log(case.name, &log);
        (log, self.exec(case.name, facts::SCRIPT).unwrap_or_else(|e| panic!("{}: exec: {e}", case.name)))
    }

    pub fn exec(&self, pod: &str, script: &str) -> Result<String, String> {
        self.verb(&["exec", pod, "--", "/bin/sh", "-c", script])
    }

    fn verb(&self, args: &[&str]) -> Result<String, String> {
        let mut command = program();
        // The flag goes behind the verb, before a `--`.
        command.arg(args[0]).arg("--root").arg(self.dir.join("root")).args(&args[1..]).stdin(Stdio::null());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() { Ok(text) } else { Err(text + &String::from_utf8_lossy(&output.stderr)) }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default()
    }
}

impl Drop for Coracle {
    fn drop(&mut self) {
        if let Err(e) = self.verb(&["stop-all"]) {
            eprintln!("stop-all: {e}");
        }
        super::stop(&mut self.agent);
        if let Err(e) = self.verb(&["uninstall", "--yes"]) {
            eprintln!("uninstall: {e}");
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// As a manifest has to write it, so that nothing in it is expanded.
pub fn literal(script: &str) -> String {
    script.replace('$', "$$")
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_coracle"))
}
