//! A whole pod's life with a cut at every failpoint of the program, once as an error and once as
//! SIGKILL: whoever reaches the point (agent, monitor or helper) fails or dies there. Afterwards
//! the pod runs, or is gone, and nothing is left over. Needs the cargo feature `failpoints`.
#![cfg(feature = "failpoints")]

#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use support::{Node, is_ready, pod, privileged};

/// Every name in the source, so that a new one is tested from its first day.
fn points() -> Vec<String> {
    fn walk(dir: &Path, into: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, into);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("sys/failpoint.rs") {
                let text = fs::read_to_string(&path).unwrap();
                for piece in text.split("hit(\"").skip(1) {
                    into.insert(piece.split('"').next().unwrap().to_owned());
                }
            }
        }
    }
    let mut names = BTreeSet::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
    // Images come before pods, and helpers are forks of one armed monitor that would die each
    // time: both have tests of their own.
    let elsewhere = |name: &str| name.starts_with("images.") || name.starts_with("runtime.helper.");
    names.into_iter().filter(|name| name.contains('.') && !elsewhere(name)).collect()
}

/// Until it is so, with an agent that is started anew when it has died. Gives the deaths.
fn until(node: &mut Node, what: &str, reached: impl Fn(&Node) -> bool) -> u32 {
    let begun = Instant::now();
    let limit = begun + Duration::from_secs(60);
    let mut deaths = 0;
    while !reached(node) {
        let died = node.agent_died();
        deaths += u32::from(died);
        // Monitors and helpers count from one in each process and fail there each time: from some
        // moment on all are unharmed.
        if !died && !node.env.is_empty() && begun.elapsed() > Duration::from_secs(3) {
            node.kill_agent();
        }
        if node.agent.is_none() {
            node.env.clear();
            node.spawn();
        }
        assert!(Instant::now() < limit, "not within 60 s: {what}\n{}", node.log_tail());
        std::thread::sleep(Duration::from_millis(20));
    }
    deaths
}

#[test]
fn a_pods_life_survives_a_cut_at_every_point() {
    if !privileged() {
        return;
    }
    let names = points();
    assert!(names.len() >= 40, "{names:?}");
    let mut node = Node::running();
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.put("cm.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cm}\ndata: {k: it}\n");
    let (mut deaths, mut cases) = (0, 0);
    for name in &names {
        for action in ["error", "kill"] {
            let begun = Instant::now();
            let case = format!("{name}={action}");
            let volumes =
                "  volumes: [{name: e, emptyDir: {}}, {name: m, emptyDir: {medium: Memory}}, {name: c, configMap: {name: cm}}]\n";
            let mounts =
                "volumeMounts: [{name: e, mountPath: /e}, {name: m, mountPath: /m}, {name: c, mountPath: /c}], imagePullPolicy";
            let stay = "cat /c/k; trap 'exit 0' TERM; while :; do sleep 0.05; done";
            let yaml = pod("p", "Always", &[("i", "exit 0")], &[("c", stay)], volumes).replace("imagePullPolicy", mounts);
            node.put("p.yaml", &yaml);
            node.env = vec![("CORACLE_FAILPOINTS", format!("{case}@1"))];
            node.spawn();
            deaths += until(&mut node, &format!("{case}: ready"), |n| is_ready(&n.status("p")));
            let uid = node.pod("p").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
            assert_eq!(node.monitors().len(), 1, "{case}");

            // And its end, from a fresh agent that counts from one again.
            node.kill_agent();
            node.env = vec![("CORACLE_FAILPOINTS", format!("{case}@1"))];
            node.spawn();
            node.take_away("p.yaml");
            deaths += until(&mut node, &format!("{case}: gone"), |n| {
                let out = n.cli(&["pods", "-o", "json"]);
                out.status.success() && !String::from_utf8_lossy(&out.stdout).contains("\"kind\":\"Pod\"")
            });
            node.env.clear();
            node.kill_agent();
            assert_eq!((node.pids(), node.monitors()), (vec![], vec![]), "{case}");
            for dir in ["log/pods", "log/containers", "kubelet/pods", "state/containers", "state/pods", "run/pods"] {
                let left: Vec<_> =
                    fs::read_dir(node.root().join(dir)).into_iter().flatten().flatten().map(|e| e.path()).collect();
                assert!(left.is_empty(), "{case}: {dir}: {left:?}");
            }
            let left: Vec<String> = node.mounts().into_iter().filter(|m| m.contains(&uid)).collect();
            assert!(left.is_empty(), "{case}: {left:?}");
            cases += 1;
            eprintln!("{case}: {:?}", begun.elapsed());
        }
    }
    eprintln!("{} points, {cases} cases, {deaths} deaths of the agent", names.len());
    assert!(deaths >= 20, "hardly anything was reached: {deaths} deaths");
}
