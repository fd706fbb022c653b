//! A node alone, end to end: the shipped binary, real pods on the real kernel, deaths of every
//! kind. Each test has a node of its own (directories, instance, bridge, addresses) and leaves
//! nothing behind. Needs root and busybox-static.

#[path = "node/full.rs"]
mod full;
#[path = "node/hands.rs"]
mod hands;
#[path = "node/mounts.rs"]
mod mounts;
#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::{Node, STAY, condition, container, is_ready, pod, privileged};

fn waits(status: &serde_json::Value, name: &str) -> (String, String) {
    let waiting = &container(status, name)["state"]["waiting"];
    let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_owned();
    (text(&waiting["reason"]), text(&waiting["message"]))
}

#[test]
fn a_pod_runs_from_init_to_ready_with_full_status_and_logs() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    let one = "echo one >> /work/order; echo first";
    let two = "echo two >> /work/order";
    let main = "cat /work/order; echo $WHO; hostname; cat /etc/hosts | tail -1; trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let mut yaml = pod("web", "Always", &[("i1", one), ("i2", two)], &[("c", main)], "  volumes: [{name: work, emptyDir: {}}]\n");
    yaml = yaml.replace(
        "command: [sh",
        "env: [{name: WHO, value: \"$(MY)\"}], volumeMounts: [{name: work, mountPath: /work}], command: [sh",
    );
    node.put("web.yaml", &yaml);
    let status = node.wait_ready("web");
    assert_eq!(status["phase"], "Running");
    assert_eq!(status["hostIP"], "192.0.2.7");
    assert_eq!(status["qosClass"], "BestEffort");
    assert!(status["podIP"].as_str().unwrap().starts_with("10."), "{status}");
    for kind in ["PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"] {
        assert_eq!(condition(&status, kind)["status"], "True", "{kind}");
    }
    for init in ["i1", "i2"] {
        let ended = &container(&status, init)["state"]["terminated"];
        assert_eq!((ended["exitCode"].as_i64(), ended["reason"].as_str()), (Some(0), Some("Completed")), "{init}");
    }
    let c = container(&status, "c");
    assert!(c["state"]["running"]["startedAt"].is_string() && c["ready"] == true && c["restartCount"] == 0);
    let id = c["containerID"].as_str().unwrap().strip_prefix("coracle://").unwrap().to_owned();

    node.wait("its log", 10, |n| n.ok(&["logs", "web", "-c", "c"]).lines().count() >= 5);
    let log = node.ok(&["logs", "web", "-c", "c"]);
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(&lines[..4], ["one", "two", "$(MY)", "web"], "{log}");
    assert!(lines[4].ends_with("web") && lines[4].starts_with("10."), "{log}");
    let uid = node.pod("web").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let file = node.root().join(format!("log/pods/default_web_{uid}/c/0.log"));
    assert!(fs::read_to_string(&file).unwrap().contains(" stdout F one\n"));
    let link = node.root().join(format!("log/containers/web_default_c-{id}.log"));
    assert_eq!(fs::read_link(link).unwrap(), file);

    // Removed: nothing of it stays.
    node.take_away("web.yaml");
    node.wait_gone("web");
    assert_eq!(node.pids(), Vec::<i32>::new());
    assert_eq!(node.monitors(), Vec::<i32>::new());
    for dir in ["log/pods", "log/containers", "kubelet/pods", "state/containers", "state/pods", "run/pods"] {
        let left: Vec<_> = fs::read_dir(node.root().join(dir)).into_iter().flatten().flatten().map(|e| e.path()).collect();
        assert!(left.is_empty(), "{dir}: {left:?}");
    }
    let left: Vec<String> = node.mounts().into_iter().filter(|m| m.contains(&uid)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn ends_restarts_and_waiting_reasons_are_the_kubelets() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    node.put("ok.yaml", &pod("ok", "Never", &[], &[("c", "exit 0")], ""));
    node.put(
        "bad.yaml",
        &pod("bad", "Never", &[], &[("c", "echo the end; exit 7")], "")
            .replace("imagePullPolicy", "terminationMessagePolicy: FallbackToLogsOnError, imagePullPolicy"),
    );
    node.put("retry.yaml", &pod("retry", "OnFailure", &[], &[("c", "exit 4")], ""));
    node.put("crash.yaml", &pod("crash", "Always", &[], &[("c", "echo why > /dev/termination-log; exit 3")], ""));
    node.put("initbad.yaml", &pod("initbad", "Never", &[("i", "exit 9")], &[("c", STAY)], ""));
    node.put("nocmd.yaml", &pod("nocmd", "Never", &[], &[("c", "x")], "").replace("[sh, -c, \"x\"]", "[/no/such]"));
    node.put(
        "never.yaml",
        &pod("never", "Always", &[], &[("c", STAY)], "").replace("busybox:1.35", "nope:1").replace("IfNotPresent", "Never"),
    );
    node.put("nopull.yaml", &pod("nopull", "Always", &[], &[("c", STAY)], "").replace("busybox:1.35", "127.0.0.1:1/nope:1"));
    node.put("badname.yaml", &pod("badname", "Always", &[], &[("c", STAY)], "").replace("busybox:1.35", "UPPER//case"));
    let env = "env: [{name: A, valueFrom: {configMapKeyRef: {name: cm, key: k}}}], imagePullPolicy";
    node.put("nocfg.yaml", &pod("nocfg", "Always", &[], &[("c", "echo got $A; sleep 100")], "").replace("imagePullPolicy", env));
    node.put("deadline.yaml", &pod("deadline", "Always", &[], &[("c", STAY)], "  activeDeadlineSeconds: 2\n"));

    let limit = "resources: {limits: {memory: 24Mi}}, imagePullPolicy";
    node.put("oom.yaml", &pod("oom", "Never", &[], &[("c", "tail /dev/zero")], "").replace("imagePullPolicy", limit));

    let ended = |status: &serde_json::Value| {
        let t = container(status, "c")["state"]["terminated"].clone();
        (
            t["exitCode"].as_i64().unwrap_or(-1),
            t["reason"].as_str().unwrap_or_default().to_owned(),
            t["message"].as_str().unwrap_or_default().to_owned(),
        )
    };
    assert_eq!(ended(&node.wait_phase("ok", "Succeeded")), (0, "Completed".into(), String::new()));
    assert_eq!(ended(&node.wait_phase("bad", "Failed")), (7, "Error".into(), "the end\n".into()));
    let (code, reason, _) = ended(&node.wait_phase("oom", "Failed"));
    assert_eq!((code, reason.as_str()), (137, "OOMKilled"));
    let status = node.wait_phase("initbad", "Failed");
    assert_eq!(container(&status, "i")["state"]["terminated"]["exitCode"], 9);
    let (code, reason, message) = ended(&node.wait_phase("nocmd", "Failed"));
    assert_eq!((code, reason.as_str()), (128, "StartError"));
    assert!(message.contains("/no/such"), "{message}");

    for name in ["crash", "retry"] {
        let status = node.wait_pod(name, "backs off", |s| waits(s, "c").0 == "CrashLoopBackOff");
        let uid = node.pod(name).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
        assert_eq!(waits(&status, "c").1, format!("back-off 10s restarting failed container=c pod={name}_default({uid})"));
        assert_eq!(status["phase"], "Running");
        assert_eq!(container(&status, "c")["restartCount"], 1);
    }
    let status = node.status("crash");
    assert_eq!(container(&status, "c")["lastState"]["terminated"]["message"], "why\n");
    assert_eq!(container(&status, "c")["lastState"]["terminated"]["exitCode"], 3);
    assert_eq!(condition(&status, "Ready")["reason"], "ContainersNotReady");

    node.wait_pod("never", "ErrImageNeverPull", |s| {
        waits(s, "c")
            == ("ErrImageNeverPull".into(), "Container image \"nope:1\" is not present with pull policy of Never".into())
    });
    let status = node.wait_pod("nopull", "backs off", |s| waits(s, "c").0 == "ImagePullBackOff");
    assert!(waits(&status, "c").1.starts_with("Back-off pulling image \"127.0.0.1:1/nope:1\": "), "{status}");

    let status = node.wait_pod("nocfg", "misses its ConfigMap", |s| waits(s, "c").0 == "CreateContainerConfigError");
    assert_eq!(waits(&status, "c").1, "configmap \"cm\" not found");
    node.put("cm.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: cm}\ndata: {k: it}\n");
    node.wait_ready("nocfg");
    node.wait("the value", 10, |n| n.ok(&["logs", "nocfg"]).contains("got it"));

    let status = node.wait_phase("deadline", "Failed");
    assert_eq!(status["reason"], "DeadlineExceeded");
    assert_eq!(status["message"], "Pod was active on the node longer than the specified deadline");
    // A reference that is none: refused by the source, or InvalidImageName; never a pull.
    node.wait("badname is told", 10, |n| {
        waits(&n.status("badname"), "c").0 == "InvalidImageName"
            || String::from_utf8_lossy(&n.cli(&["pods"]).stdout).contains("badname")
    });
}

#[test]
fn ending_is_graceful_and_bounded_and_a_changed_spec_never_overlaps() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    let host = node.path("shared");
    fs::create_dir(&host).unwrap();
    let volume = format!("  volumes: [{{name: h, hostPath: {{path: {}}}}}]\n", host.display());
    let script = |version: &str, end: &str| {
        format!(
            "echo start {version} >> /h/log; trap 'sleep 0.5; echo end {version} >> /h/log; {end}' TERM; while :; do sleep 0.05; done"
        )
    };
    let yaml = |script: &str| {
        pod("p", "Always", &[], &[("c", script)], &volume)
            .replace("imagePullPolicy", "volumeMounts: [{name: h, mountPath: /h}], imagePullPolicy")
    };
    node.put("p.yaml", &yaml(&script("a", "exit 0")));
    node.wait_ready("p");
    let first = node.pod("p").unwrap()["metadata"]["uid"].clone();
    node.put("p.yaml", &yaml(&script("b", "exit 0")));
    node.wait("the second version runs", 30, |n| {
        n.pod("p").is_some_and(|p| p["metadata"]["uid"] != first && is_ready(&p["status"]))
    });
    node.wait("it has begun", 10, |_| fs::read_to_string(host.join("log")).unwrap().contains("start b"));
    assert_eq!(fs::read_to_string(host.join("log")).unwrap(), "start a\nend a\nstart b\n");

    // One that ignores the signal is killed after its grace period of 5 s, not before.
    node.put("deaf.yaml", &pod("deaf", "Always", &[], &[("c", "trap '' TERM; while :; do sleep 0.1; done")], ""));
    node.wait_ready("deaf");
    let begun = Instant::now();
    node.take_away("deaf.yaml");
    node.wait_gone("deaf");
    let took = begun.elapsed();
    assert!((Duration::from_millis(4900)..Duration::from_secs(12)).contains(&took), "{took:?}");
}

#[test]
fn the_agents_death_changes_nothing_for_pods_and_loses_no_exit() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("web.yaml", &pod("web", "Always", &[("i", "exit 0")], &[("a", STAY), ("b", STAY)], ""));
    node.put("job.yaml", &pod("job", "Never", &[], &[("c", "sleep 2; exit 42")], ""));
    node.put("loop.yaml", &pod("loop", "Always", &[], &[("c", "exit 1")], ""));
    node.put("gone.yaml", &pod("gone", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("web");
    node.wait_ready("gone");
    node.wait_pod("job", "runs", is_ready);
    node.wait_pod("loop", "backs off", |s| waits(s, "c").0 == "CrashLoopBackOff");
    let before = node.status("web");
    let restarts = container(&node.status("loop"), "c")["restartCount"].as_i64().unwrap();
    let shells = node.shells();
    node.kill_agent();
    node.take_away("gone.yaml");
    std::thread::sleep(Duration::from_millis(2500));
    let left = node.shells();
    assert!(left.iter().all(|pid| shells.contains(pid)) && left.len() >= 3, "{left:?} of {shells:?}");
    let took = node.start();
    eprintln!("agent answers after {took:?}");
    assert_eq!(node.status("web"), before, "a restart shows in the status");
    node.wait_gone("gone");
    let status = node.wait_phase("job", "Failed");
    assert_eq!(container(&status, "c")["state"]["terminated"]["exitCode"], 42);
    assert_eq!(container(&status, "c")["restartCount"], 0);
    assert!(container(&node.status("loop"), "c")["restartCount"].as_i64().unwrap() >= restarts);
    // It still gets its word in time: the back-off went on while nobody was there.
    node.wait("the loop goes on", 20, |n| container(&n.status("loop"), "c")["restartCount"].as_i64().unwrap() > restarts);

    // SIGTERM leaves pods as they are, too.
    node.take_away("loop.yaml");
    node.wait_gone("loop");
    let shells = node.shells();
    let status = node.signal_agent(Signal::SIGTERM);
    assert!(status.success(), "{status:?}");
    assert_eq!(node.shells(), shells, "SIGTERM ended something");
}

#[test]
fn a_killed_monitor_ends_its_pod_unknown_and_it_is_made_anew() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("web.yaml", &pod("web", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("web");
    for agent_lives in [true, false] {
        let restarts = container(&node.status("web"), "c")["restartCount"].as_i64().unwrap();
        let (monitors, pids) = (node.monitors(), node.pids());
        assert_eq!(
            monitors.len(),
            1,
            "{:?}",
            monitors.iter().map(|p| fs::read_to_string(format!("/proc/{p}/cmdline"))).collect::<Vec<_>>()
        );
        if !agent_lives {
            node.kill_agent();
        }
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(monitors[0]), Signal::SIGKILL).unwrap();
        if !agent_lives {
            node.start();
        }
        let status = node.wait_pod("web", "made anew", |s| is_ready(s) && container(s, "c")["restartCount"] == restarts + 1);
        let last = &container(&status, "c")["lastState"]["terminated"];
        assert_eq!((last["exitCode"].as_i64(), last["reason"].as_str()), (Some(137), Some("ContainerStatusUnknown")), "{last}");
        assert!(node.pids().iter().all(|pid| !pids.contains(pid)), "something of the old pod lives");
        // The next round's restart is then the first again, since the back-off is 10 s.
        node.wait("time for another restart", 15, |n| is_ready(&n.status("web")));
    }
}

#[test]
fn after_a_reboot_everything_runs_again_from_disk_but_what_had_ended() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("web.yaml", &pod("web", "Always", &[("i", "exit 0")], &[("c", STAY)], "").replace("IfNotPresent", "Always"));
    node.put("done.yaml", &pod("done", "Never", &[], &[("c", "exit 6")], ""));
    // Always cannot pull here: for its first start the image is used as it is by IfNotPresent.
    node.put("web.yaml", &pod("web", "Always", &[("i", "exit 0")], &[("c", STAY)], ""));
    node.put("cut.yaml", &pod("cut", "Never", &[], &[("c", STAY)], ""));
    node.wait_ready("web");
    node.wait_ready("cut");
    node.wait_phase("done", "Failed");
    node.power_off();
    node.set_boot(2);
    let begun = Instant::now();
    node.start();
    let status = node.wait_ready("web");
    eprintln!("ready {:?} after the start of the agent", begun.elapsed());
    assert_eq!(container(&status, "c")["restartCount"], 1);
    assert_eq!(container(&status, "c")["lastState"]["terminated"]["reason"], "ContainerStatusUnknown");
    node.wait_ready("cut");
    let done = node.status("done");
    assert_eq!((done["phase"].as_str(), container(&done, "c")["restartCount"].as_i64()), (Some("Failed"), Some(0)));
    assert_eq!(container(&done, "c")["state"]["terminated"]["exitCode"], 6);

    // And without the manifests directory, from the store alone.
    node.power_off();
    node.set_boot(3);
    fs::rename(node.path("manifests"), node.path("away")).unwrap();
    node.start();
    let status = node.wait_ready("web");
    assert_eq!(container(&status, "c")["restartCount"], 2);
    fs::rename(node.path("away"), node.path("manifests")).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(container(&node.status("web"), "c")["restartCount"], 2, "the directory is back: nothing changes");
}

#[test]
fn stop_all_ends_everything_with_its_exit_until_the_next_start() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("web.yaml", &pod("web", "Always", &[], &[("c", "trap 'exit 11' TERM; while :; do sleep 0.05; done")], ""));
    node.put("once.yaml", &pod("once", "Never", &[], &[("c", STAY)], ""));
    node.put("deaf.yaml", &pod("deaf", "Always", &[], &[("c", "trap '' TERM; while :; do sleep 0.1; done")], ""));
    for name in ["web", "once", "deaf"] {
        node.wait_ready(name);
    }
    let begun = Instant::now();
    node.ok(&["stop-all"]);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert_eq!((node.pids(), node.monitors()), (vec![], vec![]));
    let status = node.status("web");
    assert_eq!(container(&status, "c")["state"]["terminated"]["exitCode"], 11);
    let status = node.status("once");
    assert_eq!((status["phase"].as_str(), status["reason"].as_str()), (Some("Failed"), Some("Terminated")));
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(node.pids(), Vec::<i32>::new(), "nothing starts again");
    node.signal_agent(Signal::SIGTERM);
    node.start();
    let status = node.wait_ready("web");
    assert_eq!(container(&status, "c")["lastState"]["terminated"]["exitCode"], 11);
    assert_eq!(node.status("once")["phase"], "Failed");
    // Without an agent, as the service does it at host shutdown.
    node.wait_ready("deaf");
    node.signal_agent(Signal::SIGTERM);
    let out = node.cli(&["stop-all", "--within", "3", "--instance", &node.instance]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!((node.pids(), node.monitors()), (vec![], vec![]));
    node.start();
    let status = node.wait_ready("web");
    assert_eq!(container(&status, "c")["lastState"]["terminated"]["exitCode"], 11);
}

#[test]
fn an_incomplete_set_ends_nothing_and_two_claims_run_once() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    node.put("web.yaml", &pod("web", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("web");
    let before = node.status("web");
    fs::rename(node.path("manifests"), node.path("away")).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(node.status("web"), before);
    fs::rename(node.path("away"), node.path("manifests")).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(node.status("web"), before);
    // Half written: the last good version runs on.
    fs::write(node.path("manifests/web.yaml"), "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(node.status("web"), before);
    let out = node.cli(&["pods"]);
    let told = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(told.contains("web.yaml"), "{told}");
    node.put("web.yaml", &pod("web", "Always", &[], &[("c", STAY)], ""));

    // A host port that is taken: rejected with the kubelet's words, and begun once it is free.
    let port = "ports: [{containerPort: 80, hostPort: 18080}], imagePullPolicy";
    node.put("a.yaml", &pod("a", "Always", &[], &[("c", STAY)], "").replace("imagePullPolicy", port));
    node.wait_ready("a");
    node.put("b.yaml", &pod("b", "Always", &[], &[("c", STAY)], "").replace("imagePullPolicy", port));
    let status = node.wait_phase("b", "Failed");
    assert_eq!(status["reason"], "NodePorts");
    node.take_away("a.yaml");
    node.wait_ready("b");
}

#[test]
fn the_nodes_seccomp_default_holds_where_a_pod_says_nothing() {
    if !privileged() {
        return;
    }
    let mut node = Node::new();
    node.args = vec!["--seccomp-default=false".to_owned()];
    node.start();
    node.import();
    let say = "sed -n 's/^Seccomp:[^0-9]*//p' /proc/self/status";
    let named = "securityContext: {seccompProfile: {type: RuntimeDefault}}, imagePullPolicy";
    node.put("unnamed.yaml", &pod("unnamed", "Never", &[], &[("c", say)], ""));
    node.put("named.yaml", &pod("named", "Never", &[], &[("c", say)], "").replace("imagePullPolicy", named));
    for (name, mode) in [("unnamed", "0\n"), ("named", "2\n")] {
        node.wait_phase(name, "Succeeded");
        assert_eq!(node.ok(&["logs", name]), mode, "{name}");
    }
    // Without the flag the default is ours.
    node.signal_agent(Signal::SIGTERM);
    node.args.clear();
    node.start();
    node.put("default.yaml", &pod("default", "Never", &[], &[("c", say)], ""));
    node.wait_phase("default", "Succeeded");
    assert_eq!(node.ok(&["logs", "default"]), "2\n");
}

#[test]
fn a_pulls_back_off_outlives_the_agent() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("p.yaml", &pod("p", "Always", &[], &[("c", STAY)], "").replace("busybox:1.35", "127.0.0.1:1/nope:1"));
    let status = node.wait_pod("p", "backs off", |s| waits(s, "c").0 == "ImagePullBackOff");
    let uid = node.pod("p").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let begun = format!("pull {uid} c ");
    let pulls = |node: &Node| fs::read_to_string(node.path("agent.log")).unwrap().matches(&begun).count();
    let (said, asked) = (waits(&status, "c"), pulls(&node));
    node.kill_agent();
    node.start();
    assert_eq!(waits(&node.status("p"), "c"), said, "a new agent knows it at once");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(pulls(&node), asked, "and asks no earlier than the old one would have");
    node.wait("it is asked again in time", 20, |n| pulls(n) > asked);
    node.take_away("p.yaml");
    node.wait_gone("p");
    assert_eq!(fs::read_dir(node.seen(&node.root().join("run/pulls"))).unwrap().count(), 0, "what was kept goes with the pod");
}

#[test]
fn restart_is_quick_and_idle_is_idle() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    for n in 0..10 {
        let name = format!("p{n}");
        node.put(&format!("{name}.yaml"), &pod(&name, "Always", &[], &[("c", "echo up; exec sleep 100000")], ""));
    }
    for n in 0..10 {
        node.wait_ready(&format!("p{n}"));
    }
    let pids = node.pids();
    node.kill_agent();
    let took = node.start();
    eprintln!("10 pods: the agent answers {took:?} after its start");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(node.pids(), pids);
    // Idle: after its threads have gone home it neither writes nor works.
    std::thread::sleep(Duration::from_secs(5));
    let pid = node.agent_pid();
    let figures = || {
        let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
        let written = io.lines().find_map(|l| l.strip_prefix("write_bytes: ")).unwrap().parse::<u64>().unwrap();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let ticks: u64 =
            stat.rsplit(')').next().unwrap().split_whitespace().skip(11).take(2).map(|t| t.parse::<u64>().unwrap()).sum();
        (written, ticks)
    };
    let (written, ticks) = figures();
    std::thread::sleep(Duration::from_secs(10));
    let (written_later, ticks_later) = figures();
    assert_eq!(written_later, written, "an idle agent writes");
    assert!(ticks_later - ticks <= 5, "{} ticks in 10 s", ticks_later - ticks);
}

const SERVICES: &str = "apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{name: http, port: 80, targetPort: www}]}
---
apiVersion: v1
kind: Service
metadata: {name: far}
spec: {ports: [{port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: far-1, labels: {kubernetes.io/service-name: far}}
addressType: IPv4
endpoints: [{addresses: [198.51.100.7]}]
ports: [{port: 5433}]
";

#[test]
fn services_have_addresses_endpoints_and_variables_that_outlive_the_agent() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("services.yaml", SERVICES);
    let services =
        |node: &Node| -> Vec<serde_json::Value> { serde_json::from_str(&node.ok(&["services", "-o", "json"])).unwrap() };
    node.wait("both Services", 10, |n| services(n).len() == 2);
    let before = services(&node);
    let (far, web) = (&before[0], &before[1]);
    assert_eq!((far["name"].as_str(), web["name"].as_str()), (Some("far"), Some("web")));
    assert_eq!(far["ports"][0]["endpoints"], serde_json::json!(["198.51.100.7:5433"]));
    let ip = web["clusterIPs"][0].as_str().unwrap().to_owned();
    assert!(ip.starts_with("10.96.") && web["ports"][0]["nodePort"].as_i64().unwrap() >= 30_086, "{web}");
    assert_eq!(web["ports"][0]["endpoints"], serde_json::json!([]));

    // A pod is an endpoint from the moment it is ready, and finds the Services in its environment.
    let yaml = pod("web", "Always", &[], &[("c", "env | sort; trap 'exit 0' TERM; while :; do sleep 0.1; done")], "");
    let yaml = yaml
        .replace("name: web", "name: web, labels: {app: web}")
        .replace("command: [sh", "ports: [{name: www, containerPort: 8080}], command: [sh");
    node.put("web.yaml", &yaml);
    let status = node.wait_ready("web");
    let endpoint = serde_json::json!([format!("{}:8080", status["podIP"].as_str().unwrap())]);
    node.wait("the pod is an endpoint", 5, |n| services(n)[1]["ports"][0]["endpoints"] == endpoint);
    node.wait("its log", 10, |n| n.ok(&["logs", "web"]).contains("WEB_SERVICE_HOST"));
    let log = node.ok(&["logs", "web"]);
    for line in [
        format!("WEB_SERVICE_HOST={ip}"),
        "WEB_SERVICE_PORT_HTTP=80".into(),
        format!("WEB_PORT_80_TCP=tcp://{ip}:80"),
        "FAR_SERVICE_PORT=5432".into(),
    ] {
        assert!(log.lines().any(|l| l == line), "{line}\n{log}");
    }
    assert!(!log.contains("KUBERNETES_"), "{log}");
    assert!(node.ok(&["services"]).contains("NodePort"));

    // The agent dies; a file that breaks meanwhile keeps what it had, another's wish comes too late.
    let with_pod = services(&node);
    node.kill_agent();
    node.put("services.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: web\n");
    node.put(
        "0.yaml",
        &format!("apiVersion: v1\nkind: Service\nmetadata: {{name: aaa}}\nspec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}\n"),
    );
    node.start();
    node.wait("the third Service", 10, |n| services(n).len() == 3);
    let after = services(&node);
    assert_eq!(&after[1..], &with_pod[..]);
    assert_eq!(after[0]["clusterIPs"], serde_json::json!([]));
    assert!(after[0]["skipped"][0].as_str().unwrap().contains("belongs to Service default/web"), "{}", after[0]);
    assert!(node.ok(&["services"]).contains("belongs to Service default/web"));

    node.take_away("web.yaml");
    node.wait("no endpoint is left", 20, |n| services(n)[2]["ports"][0]["endpoints"] == serde_json::json!([]));
    node.take_away("services.yaml");
    node.take_away("0.yaml");
    node.wait("no Service is left", 10, |n| services(n).is_empty());
}
