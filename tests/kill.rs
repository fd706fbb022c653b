//! The kill loop: the agent is ended with SIGKILL at random moments while 20 pods run, crash,
//! finish and talk, and while execs and pulls go on. Nothing may be lost and nothing may happen
//! twice: no container, exit code, log line, restart; and after all is deleted, no trace is left.
//!
//! 60 kills in `make test`; `CORACLE_KILLS=1000` in `make soak`. The seed is printed.

#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use support::{CORACLE, Node, privileged};

const STABLE: usize = 8;
const CRASHING: usize = 4;
const JOBS: usize = 6;
const CHATTY: usize = 2;

/// A small linear congruential generator: the seed makes a run repeatable in its choices.
struct Random(u64);
impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn manifest(name: &str, restart: &str, script: &str, data: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  restartPolicy: {restart}\n  terminationGracePeriodSeconds: 2\n  \
         volumes: [{{name: data, hostPath: {{path: {data}}}}}]\n  containers:\n  - name: c\n    image: busybox:1.35\n    \
         imagePullPolicy: IfNotPresent\n    command: [sh, -c, '{script}']\n    volumeMounts: [{{name: data, mountPath: /data}}]\n"
    )
}

fn status(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]
}

fn answers(node: &Node) {
    node.wait("the agent answers", 30, |n| n.cli(&["pods"]).status.success());
}

#[test]
fn nothing_is_lost_and_nothing_happens_twice_while_the_agent_is_killed_again_and_again() {
    if !privileged() {
        return;
    }
    let kills: usize = std::env::var("CORACLE_KILLS").ok().and_then(|t| t.parse().ok()).unwrap_or(60);
    let seed = std::env::var("CORACLE_SEED")
        .ok()
        .and_then(|t| t.parse().ok())
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into());
    println!("seed {seed}, {kills} kills");
    let mut random = Random(seed);
    let mut node = Node::new();
    let data = node.path("data");
    fs::create_dir_all(&data).unwrap();
    let data_text = data.to_str().unwrap().to_owned();
    let tar = node.path("busybox.tar");
    node.start();
    node.import();
    for n in 0..STABLE {
        node.put(
            &format!("stable{n}.yaml"),
            &manifest(&format!("stable{n}"), "Always", "echo up; exec sleep 100000", &data_text),
        );
    }
    for n in 0..CHATTY {
        let script = "i=0; while :; do echo line $i; i=$((i+1)); usleep 4000; done";
        node.put(&format!("chatty{n}.yaml"), &manifest(&format!("chatty{n}"), "Always", script, &data_text));
    }
    node.wait("the stable and chatty pods run", 60, |n| {
        n.pods().iter().filter(|p| p["status"]["phase"] == "Running").count() == STABLE + CHATTY
    });
    let ids: BTreeMap<String, String> = node
        .pods()
        .iter()
        .map(|p| (p["metadata"]["name"].as_str().unwrap().to_owned(), status(p)["containerID"].as_str().unwrap().to_owned()))
        .collect();

    // Execs go on all the while. Only an answer counts: an agent that is dead gives none.
    let stop = Arc::new(AtomicBool::new(false));
    let root = node.root();
    let mut probe = node.command(CORACLE);
    probe.arg("exec").arg("--root").arg(&root).args(["stable0", "--", "sh", "-c", "exit 5"]);
    let execs = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let (mut good, mut wrong) = (0, Vec::new());
            while !stop.load(Ordering::Relaxed) {
                let output = probe.output().unwrap();
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                match output.status.code() {
                    Some(5) => good += 1,
                    // The client says in words that the agent went away; any other end is wrong.
                    _ if !text.trim().is_empty() => {}
                    other => wrong.push(format!("{other:?}")),
                }
                std::thread::sleep(Duration::from_millis(30));
            }
            (good, wrong)
        }
    });
    // And so do imports, each of which unpacks layers in children.
    let mut import = node.command(CORACLE);
    import.arg("import").arg("--root").arg(&root).arg(&tar);
    let imports = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let mut good = 0;
            while !stop.load(Ordering::Relaxed) {
                good += usize::from(import.output().unwrap().status.success());
                std::thread::sleep(Duration::from_millis(300));
            }
            good
        }
    });

    for n in 0..CRASHING {
        let script = format!("echo run >>/data/crash{n}; sleep 0.2; exit 3");
        node.put(&format!("crash{n}.yaml"), &manifest(&format!("crash{n}"), "Always", &script, &data_text));
    }
    let jobs_every = (kills / JOBS).max(1);
    let mut jobs = 0;
    for kill in 0..kills {
        if kill % jobs_every == 0 && jobs < JOBS {
            let policy = if jobs % 2 == 0 { "Never" } else { "OnFailure" };
            let code = if policy == "OnFailure" { 0 } else { 10 + jobs };
            let script = format!("echo run >>/data/job{jobs}; sleep 0.{}; exit {code}", 1 + jobs * 2);
            node.put(&format!("job{jobs}.yaml"), &manifest(&format!("job{jobs}"), policy, &script, &data_text));
            jobs += 1;
        }
        std::thread::sleep(Duration::from_millis(20 + random.below(if kill % 3 == 0 { 150 } else { 1200 })));
        node.kill_agent();
        if random.below(4) == 0 {
            std::thread::sleep(Duration::from_millis(random.below(400)));
        }
        node.spawn();
    }
    answers(&node);
    node.wait("every job has ended", 60, |n| {
        n.pods().iter().filter(|p| matches!(p["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))).count() == JOBS
    });
    stop.store(true, Ordering::Relaxed);
    let (execs_good, execs_wrong) = execs.join().unwrap();
    let imports_good = imports.join().unwrap();
    println!("{execs_good} execs answered 5, {imports_good} imports were whole");
    assert!(execs_good > 0 && execs_wrong.is_empty(), "execs ended wrongly: {execs_wrong:?}");
    assert!(imports_good > 0, "no import ever got through");

    let pods: BTreeMap<String, Value> =
        node.pods().into_iter().map(|p| (p["metadata"]["name"].as_str().unwrap().to_owned(), p)).collect();
    assert_eq!(pods.len(), STABLE + CRASHING + JOBS + CHATTY, "pods were lost");
    for (name, id) in &ids {
        assert_eq!(status(&pods[name])["containerID"], id.as_str(), "{name} is another container");
        assert_eq!(status(&pods[name])["restartCount"], 0, "{name}");
    }
    for n in 0..JOBS {
        let (name, runs) = (format!("job{n}"), fs::read_to_string(data.join(format!("job{n}"))).unwrap_or_default());
        let code = if n % 2 == 0 { 10 + n } else { 0 };
        assert_eq!(runs.lines().count(), 1, "{name} ran more or less than once");
        assert_eq!(status(&pods[&name])["state"]["terminated"]["exitCode"], code, "{name}: {}", pods[&name]["status"]);
        assert_eq!(status(&pods[&name])["restartCount"], 0, "{name}");
    }
    for n in 0..CRASHING {
        let name = format!("crash{n}");
        // One line a run: a run that is under way or has just ended may be ahead of this view.
        let pod = node.pod(&name).unwrap();
        let runs = fs::read_to_string(data.join(&name)).unwrap().lines().count() as u64;
        let count = status(&pod)["restartCount"].as_u64().unwrap();
        assert!(runs == count + 1 || runs == count || runs == count + 2, "{name} ran {runs} times, restartCount {count}");
        let last =
            if status(&pod)["state"]["terminated"].is_object() { &status(&pod)["state"] } else { &status(&pod)["lastState"] };
        assert_eq!(last["terminated"]["exitCode"], 3, "{name}: {}", pod["status"]);
    }
    for n in 0..CHATTY {
        let text = node.ok(&["logs", &format!("chatty{n}")]);
        let seen: Vec<u64> = text.lines().map(|l| l.strip_prefix("line ").expect("a whole line").parse().unwrap()).collect();
        assert!(seen.len() > 100, "chatty{n} said only {} lines", seen.len());
        let first = seen[0];
        for (at, number) in seen.iter().enumerate() {
            assert_eq!(*number, first + at as u64, "chatty{n}: a line is lost or doubled");
        }
        assert_eq!(first, 0, "chatty{n}: the first lines are gone");
    }

    for entry in fs::read_dir(node.path("manifests")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    node.wait("every pod is gone", 60, |n| n.pods().is_empty());
    // What the agent itself needs: its process, table, link and mounts, the QoS tree.
    let link = format!("link {}0", node.instance);
    let of_pods: Vec<String> = node
        .left_over()
        .into_iter()
        .filter(|l| match l.split_once(' ').unwrap().0 {
            "process" => !l.contains(" agent "),
            "mount" => !l.ends_with("/root/run") && !l.ends_with("/root/run/skeleton") && !l.ends_with("/root/kubelet"),
            "link" => *l != link,
            "cgroup" => l.contains("/pod"),
            _ => false,
        })
        .collect();
    assert_eq!(of_pods, Vec::<String>::new(), "left over after deleting every pod");
    let fds = fs::read_dir(format!("/proc/{}/fd", node.agent_pid())).unwrap().count();
    assert!(fds < 60, "the agent holds {fds} fds with no pod left");
    node.ok(&["stop-all"]);
    node.kill_agent();
    node.ok(&["uninstall", "--yes"]);
    assert_eq!(node.left_over(), Vec::<String>::new(), "left over after uninstall");
}
