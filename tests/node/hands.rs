//! What a person's hand, a careless script or a card can break under a node, and what it makes of it.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Node, is_ready, pod, privileged};

fn sleeper(name: &str) -> String {
    pod(name, "Always", &[], &[("c", "trap 'exit 0' TERM; while :; do sleep 0.2; done")], "")
}

/// A node with a pod "a" that sleeps.
fn sleeping() -> Node {
    let node = Node::running();
    node.put("a.yaml", &sleeper("a"));
    node.wait_ready("a");
    node
}

fn stop(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

#[test]
fn nobody_but_root_gets_to_what_containers_write() {
    if !privileged() {
        return;
    }
    let node = sleeping();
    node.ok(&["exec", "a", "--", "sh", "-c", "cp /bin/busybox /tmp/root && chmod 4755 /tmp/root"]);
    let containers = node.root().join("state/containers");
    let upper = fs::read_dir(&containers).unwrap().next().unwrap().unwrap().path().join("upper/tmp/root");
    assert!(upper.exists(), "{}", upper.display());
    let nobody = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "test", "-e"])
        .arg(&upper)
        .status()
        .unwrap();
    assert!(!nobody.success(), "a setuid file of a container is within every user's reach");
}

#[test]
fn a_changed_stamp_or_an_emptied_run_directory_runs_nothing_twice() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("a.yaml", &sleeper("a"));
    node.put("b.yaml", &sleeper("b"));
    node.wait_ready("a");
    node.wait_ready("b");
    let (shells, monitors) = (node.shells(), node.monitors());
    for stamp in [&b""[..], b"\xff\xfe", b"another boot\n"] {
        node.kill_agent();
        fs::write(node.seen(&node.root().join("run/boot_id")), stamp).unwrap();
        node.start();
        node.wait_ready("a");
        assert_eq!((node.shells(), node.monitors()), (shells.clone(), monitors.clone()), "{stamp:?}");
    }
    // Without its run directory nobody can reach a pod: it ends, and runs anew, once.
    node.kill_agent();
    let pods = node.seen(&node.root().join("run/pods"));
    for entry in fs::read_dir(&pods).unwrap() {
        // What is mounted below stays; the files that name it are gone.
        let dir = entry.unwrap().path();
        for file in fs::read_dir(&dir).unwrap().flatten().filter(|f| f.path().is_file()) {
            fs::remove_file(file.path()).unwrap();
        }
    }
    node.start();
    node.wait("both run anew", 30, |node| {
        ["a", "b"].iter().all(|name| is_ready(&node.status(name))) && node.monitors().len() == 2
    });
    assert!(node.monitors().iter().all(|pid| !monitors.contains(pid)));
    assert_eq!(node.shells().len(), shells.len());
}

#[test]
fn a_damaged_run_file_costs_a_restart_and_no_more() {
    if !privileged() {
        return;
    }
    let mut node = sleeping();
    for file in ["monitor.json", "sandbox.json"] {
        let monitors = node.monitors();
        node.kill_agent();
        let path = {
            let pods = node.seen(&node.root().join("run/pods"));
            fs::read_dir(pods).unwrap().next().unwrap().unwrap().path().join(file)
        };
        fs::write(path, "xx{").unwrap();
        node.start();
        node.wait("it runs anew", 30, |node| {
            is_ready(&node.status("a")) && node.monitors().len() == 1 && node.monitors() != monitors
        });
    }
    node.take_away("a.yaml");
    node.wait_gone("a");
}

#[test]
fn one_instance_is_one_agents() {
    if !privileged() {
        return;
    }
    let node = sleeping();
    let ip = node.status("a")["podIP"].clone();
    let mut second = node.command(env!("CARGO_BIN_EXE_coracle"));
    second.args(["agent", "--instance", &node.instance]).arg("--manifests").arg(node.path("manifests"));
    let out = second.arg("--root").arg(node.path("other")).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && said.contains("is in use") && said.contains("--instance"), "{said}");
    assert_eq!(node.status("a")["podIP"], ip);
    node.ok(&["exec", "a", "--", "ip", "addr", "show", "eth0"]);
}

#[test]
fn a_link_that_somebody_deletes_comes_back() {
    if !privileged() {
        return;
    }
    let node = sleeping();
    let address = |node: &Node| {
        let out = node.cli(&["exec", "a", "--", "ip", "-o", "-4", "addr", "show", "eth0"]);
        String::from_utf8_lossy(&out.stdout).split_whitespace().nth(3).map(str::to_owned)
    };
    let before = address(&node);
    assert!(before.is_some());
    let alias = node.pod("a").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let all = node.command("ip").args(["-j", "-d", "link", "show", "type", "veth"]).output().unwrap();
    let links: serde_json::Value = serde_json::from_slice(&all.stdout).unwrap();
    let link = links.as_array().unwrap().iter().find(|l| l["ifalias"] == alias.as_str()).expect("its link");
    let link = link["ifname"].as_str().unwrap().to_owned();
    assert!(node.command("ip").args(["link", "del", &link]).status().unwrap().success());
    assert_eq!(address(&node), None);
    node.wait("the link is back", 90, |node| address(node) == before);
}

#[test]
fn an_exit_that_was_missed_while_the_monitor_was_stopped_ends_the_pod_all_the_same() {
    if !privileged() {
        return;
    }
    let mut node = sleeping();
    let monitor = node.monitors()[0];
    let shell = node.shells()[0];
    stop(monitor, Signal::SIGSTOP);
    node.kill_agent();
    stop(shell, Signal::SIGKILL);
    node.take_away("a.yaml");
    node.start();
    std::thread::sleep(Duration::from_secs(2));
    stop(monitor, Signal::SIGCONT);
    node.wait_gone("a");
}

#[test]
fn an_exec_that_has_not_begun_ends_with_the_first_signal() {
    if !privileged() {
        return;
    }
    let node = sleeping();
    let monitor = node.monitors()[0];
    stop(monitor, Signal::SIGSTOP);
    let mut command = node.command(env!("CARGO_BIN_EXE_coracle"));
    command.args(["exec", "a", "--root"]).arg(node.root()).args(["--", "true"]);
    let mut exec = command.stdin(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    stop(i32::try_from(exec.id()).unwrap(), Signal::SIGTERM);
    let status = exec.wait().unwrap();
    stop(monitor, Signal::SIGCONT);
    assert_eq!(status.code(), Some(128 + 15));
    assert!(began.elapsed() < Duration::from_secs(5));
    // What could not be written is said, and is no success.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = node.command(env!("CARGO_BIN_EXE_coracle"));
    command.args(["exec", "a", "--root"]).arg(node.root()).args(["--", "echo", "lost"]);
    let out = command.stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(out.status.code(), Some(125), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn many_execs_at_once_all_run() {
    if !privileged() {
        return;
    }
    let node = sleeping();
    let running: Vec<_> = (0..48)
        .map(|n| {
            let mut command = node.command(env!("CARGO_BIN_EXE_coracle"));
            command.args(["exec", "a", "--root"]).arg(node.root()).args(["--", "sh", "-c", &format!("exit {n}")]);
            (n, command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
        })
        .collect();
    for (n, exec) in running {
        let out = exec.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(n), "{}", String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn a_log_file_or_a_socket_that_is_removed_comes_back() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    node.put("a.yaml", &pod("a", "Always", &[], &[("c", "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.2; done")], ""));
    node.wait_ready("a");
    fs::remove_file(node.seen(&node.root().join("run/agent.sock"))).unwrap();
    let log = run_log(&node);
    fs::remove_file(&log).unwrap();
    node.wait("the log is written again", 20, |_| fs::metadata(&log).is_ok_and(|m| m.len() > 0));
    node.wait("the socket is back", 40, |node| node.cli(&["info"]).status.success());
    assert!(node.ok(&["logs", "a", "--tail", "1"]).contains("line"));
}

fn run_log(node: &Node) -> std::path::PathBuf {
    let pods = node.root().join("log/pods");
    let dir = fs::read_dir(&pods).unwrap().next().unwrap().unwrap().path();
    dir.join("c/0.log")
}

#[test]
fn a_bit_that_the_card_lost_costs_one_record() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put("done.yaml", &pod("done", "Never", &[], &[("c", "exit 7")], ""));
    node.wait_phase("done", "Failed");
    node.put("a.yaml", &sleeper("a"));
    node.wait_ready("a");
    node.kill_agent();
    for journal in ["state/images/journal", "state/pods.journal"] {
        let path = node.root().join(journal);
        let mut bytes = fs::read(&path).unwrap();
        // In the first record behind the base.
        bytes[20 + 30] ^= 0x04;
        fs::write(&path, bytes).unwrap();
    }
    node.start();
    node.wait_ready("a");
    assert_eq!(node.status("done")["phase"], "Failed", "{}", node.log_tail());
    assert!(node.ok(&["images"]).contains("busybox"));
}
