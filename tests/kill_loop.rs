//! The agent is killed with SIGKILL at random moments over a node full of life: stable pods,
//! crash-looping pods, short jobs with known exit codes, chatty loggers, execs, imports and pulls
//! going on. Afterwards the books must balance (reliability S1), and after deleting all pods the
//! host is as it was (S2).
//!
//! `CORACLE_KILLS` (60) and `CORACLE_SEED` set how long and which; the seed is printed.

#[path = "node/harness.rs"]
#[allow(dead_code)]
mod harness;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::Duration;

use harness::{Node, container, is_ready, pod, privileged};

/// xorshift64*: the same seed gives the same moments.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// What must be as before once all pods are gone.
fn inventory(node: &Node) -> BTreeMap<&'static str, Vec<String>> {
    let lines = |program: &str, args: &[&str]| -> Vec<String> {
        let out = Command::new(program).args(args).output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        text.lines().filter(|l| l.contains(&node.instance)).map(str::to_owned).collect()
    };
    // Interfaces carry the pod's uid as alias and our bridge as master.
    let links = lines("ip", &["-o", "link"]).into_iter().map(|l| l.split(':').nth(1).unwrap().trim().to_owned());
    let links = links.map(|l| l.split('@').next().unwrap().to_owned()).collect();
    let pods = ["log/pods", "log/containers", "kubelet/pods", "state/containers", "state/pods", "run/pods"];
    let files = pods.iter().flat_map(|dir| fs::read_dir(node.root().join(dir)).into_iter().flatten().flatten());
    let mounts = node.mounts().into_iter().filter(|m| !m.ends_with("/run") && !m.ends_with("/run/skeleton")).collect();
    BTreeMap::from([
        ("links", links),
        ("mounts", mounts),
        ("files", files.map(|e| e.path().display().to_string()).collect()),
        ("processes", node.pids().iter().chain(&node.monitors()).map(i32::to_string).collect()),
        ("elements", lines("nft", &["list", "ruleset"]).into_iter().filter(|l| l.contains("dnat")).collect()),
    ])
}

#[test]
fn random_kills_of_the_agent_lose_nothing_and_run_nothing_twice() {
    if !privileged() {
        return;
    }
    let kills = setting("CORACLE_KILLS", 60);
    let seed = setting("CORACLE_SEED", u64::from(std::process::id()) * 2_654_435_761 + 1);
    eprintln!("kill loop: seed={seed} kills={kills}");
    let mut random = Random(seed | 1);
    let mut node = Node::running();
    let empty = inventory(&node);
    let book = node.path("book");
    fs::create_dir(&book).unwrap();
    let volume = format!("  volumes: [{{name: h, hostPath: {{path: {}}}}}]\n", book.display());
    let put = |node: &Node, name: &str, policy: &str, script: &str| {
        let yaml = pod(name, policy, &[], &[("c", script)], &volume);
        node.put(&format!("{name}.yaml"), &yaml.replace("imagePullPolicy", "volumeMounts: [{name: h, mountPath: /h}], imagePullPolicy"));
    };
    // Every run of every container signs the book once.
    let sign = |name: &str| format!("echo run >> /h/{name}; ");
    for n in 0..4 {
        let name = format!("stable{n}");
        put(&node, &name, "Always", &(sign(&name) + "trap 'exit 0' TERM; while :; do sleep 0.2; done"));
    }
    for n in 0..4 {
        let name = format!("chatty{n}");
        let talk = "trap 'exit 0' TERM; n=0; while :; do n=$((n+1)); echo line $n; sleep 0.01; done";
        put(&node, &name, "Always", &(sign(&name) + talk));
    }
    for n in 0..6 {
        let name = format!("crash{n}");
        put(&node, &name, "Always", &(sign(&name) + &format!("sleep 0.{n}; exit {}", n + 1)));
    }
    put(&node, "pulls", "Always", "true");
    let yaml = pod("pulls", "Always", &[], &[("c", "true")], "").replace("busybox:1.35", "127.0.0.1:1/nothing:1");
    node.put("pulls.yaml", &yaml);
    for n in 0..4 {
        node.wait_ready(&format!("stable{n}"));
        node.wait_ready(&format!("chatty{n}"));
    }
    let stable = stable_ids(&node);

    let mut jobs = 0;
    for kill in 0..kills {
        // A new short job now and then, with a known exit code.
        if kill % 3 == 0 {
            let name = format!("job{jobs}");
            put(&node, &name, "Never", &(sign(&name) + &format!("sleep 0.{}; exit {}", random.below(10), jobs % 100 + 1)));
            jobs += 1;
        }
        match random.below(3) {
            0 => drop(node.cli(&["exec", "stable0", "--", "sh", "-c", "echo hi"])),
            1 => drop(node.cli(&["import", node.path("busybox.tar").to_str().unwrap()])),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(50 + random.below(800)));
        node.kill_agent();
        if random.below(4) == 0 {
            std::thread::sleep(Duration::from_millis(random.below(1000)));
        }
        node.spawn();
    }
    node.wait("the agent answers", 20, |n| n.cli(&["info"]).status.success());
    for n in 0..jobs {
        let name = format!("job{n}");
        let status = node.wait_phase(&name, "Failed");
        let c = container(&status, "c");
        assert_eq!(c["state"]["terminated"]["exitCode"].as_i64(), Some(n as i64 % 100 + 1), "seed {seed}: {name}: {c}");
        assert_eq!(c["restartCount"], 0, "seed {seed}: {name}");
        assert_eq!(signed(&book, &name), 1, "seed {seed}: {name} ran more than once, or never");
    }
    assert_eq!(stable_ids(&node), stable, "seed {seed}: a stable container was lost");
    for n in 0..6 {
        let name = format!("crash{n}");
        node.wait(&format!("seed {seed}: the books of {name} balance"), 400, |node| {
            let c = container(&node.status(&name), "c");
            let ended = c["state"]["waiting"]["reason"] == "CrashLoopBackOff";
            if ended {
                assert_eq!(c["lastState"]["terminated"]["exitCode"].as_i64(), Some(n + 1), "seed {seed}: {name}");
                let runs = c["restartCount"].as_u64().unwrap() + 1;
                assert_eq!(signed(&book, &name) as u64, runs, "seed {seed}: {name}: runs and restartCount");
            }
            ended
        });
    }
    for n in 0..4 {
        let name = format!("chatty{n}");
        let uid = node.pod(&name).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
        let log = fs::read_to_string(node.root().join(format!("log/pods/default_{name}_{uid}/c/0.log"))).unwrap();
        let mut next = 1;
        for line in log.lines().filter(|l| l.contains(" line ")) {
            let number: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
            assert_eq!(number, next, "seed {seed}: {name}: a log line is lost or doubled");
            next += 1;
        }
        assert!(next > 100, "seed {seed}: {name} hardly spoke");
    }
    let files: Vec<_> = fs::read_dir(node.path("manifests")).unwrap().flatten().map(|e| e.path()).collect();
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
    node.wait("every pod is gone", 90, |n| n.ok(&["pods", "-o", "json"]).matches("\"kind\":\"Pod\"").count() == 0);
    let after = inventory(&node);
    assert_eq!(after, empty, "seed {seed}: something is left on the host");
    eprintln!("kill loop: seed={seed} kills={kills} jobs={jobs}: nothing lost, nothing twice, nothing left");
}

fn stable_ids(node: &Node) -> Vec<(String, String, u64)> {
    let all = (0..4).flat_map(|n| [format!("stable{n}"), format!("chatty{n}")]);
    all.map(|name| {
        let status = node.status(&name);
        assert!(is_ready(&status), "{name}: {status}");
        let c = container(&status, "c");
        (name, c["containerID"].as_str().unwrap().to_owned(), c["restartCount"].as_u64().unwrap())
    })
    .collect()
}

fn signed(book: &std::path::Path, name: &str) -> usize {
    fs::read_to_string(book.join(name)).unwrap_or_default().lines().count()
}
