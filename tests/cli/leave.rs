//! What is seen of a node, and how it leaves: stop-all without an agent, uninstall.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use k8s_openapi::api::core::v1::Pod;

use super::node::{Node, possible};

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_str(&text(output)).unwrap()
}

#[test]
fn a_node_is_seen_in_tables_and_by_programs() {
    if !possible() {
        return;
    }
    let node = Node::start();
    node.shell_pod("shell");
    fs::write(node.root().join("manifests/bad.yaml"), "apiVersion: v1\nkind: Pod\nmetadata:\n  name: [oops\n").unwrap();
    node.until("the bad file is told", || text(&node.run(&["pods"])).contains("bad.yaml"));
    let table = text(&node.run(&["pods", "-A"]));
    assert!(table.starts_with("NAMESPACE  NAME   READY  STATUS   RESTARTS  AGE"), "{table}");
    assert!(table.lines().any(|l| l.starts_with("bad.yaml") && l.contains("line ")), "{table}");

    let list: serde_json::Value = json(&node.run(&["pods", "-o", "json"]));
    assert_eq!((&list["kind"], &list["apiVersion"]), (&"PodList".into(), &"v1".into()));
    let pods: Vec<Pod> = serde_json::from_value(list["items"].clone()).unwrap();
    let pod = pods.iter().find(|p| p.metadata.name.as_deref() == Some("shell")).unwrap();
    let status = pod.status.as_ref().unwrap();
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert!(container.container_id.as_ref().unwrap().starts_with("coracle://"));
    assert!(container.ready && status.pod_ip.is_some() && status.start_time.is_some());
    assert_eq!(pod.spec.as_ref().unwrap().containers[0].command.as_ref().unwrap()[0], "sh");

    assert_eq!(text(&node.run(&["logs", "shell"])), "up\n");
    let links = fs::read_dir(node.root().join("log/containers")).unwrap().count();
    assert_eq!(links, 1, "a link for log shippers");

    let inspected = json(&node.run(&["inspect", "shell"]));
    let pid = inspected["containers"][0]["current"]["pid"].as_i64().unwrap();
    assert!(fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap().contains("sleep"));
    let id = container.container_id.clone().unwrap();
    assert_eq!(json(&node.run(&["inspect", &id]))["attempt"]["pid"], pid);
    assert_eq!(json(&node.run(&["inspect", "busybox:1.35"]))["image"]["pinned"], true);
    assert_eq!(node.run(&["inspect", "nothing"]).status.code(), Some(4));
    assert_eq!(node.run(&["pods", "nothing"]).status.code(), Some(4));

    // Followed to the end of its run, while it runs, from its first line.
    node.pod("counter", "Never", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; exit 3");
    node.until("counter runs", || node.run(&["logs", "counter"]).status.success());
    let begun = std::time::Instant::now();
    assert_eq!(text(&node.run(&["logs", "-f", "counter"])), "1\n2\n3\n4\n5\n6\n");
    assert!(begun.elapsed() < std::time::Duration::from_secs(15), "it ends with its run");

    let info = json(&node.run(&["info", "-o", "json"]));
    assert_eq!(info["agent"]["containers_running"], 1);
    assert_eq!(info["agent"]["pid"], node.agent_pid());
    assert!(!json(&node.run(&["images", "-o", "json"])).as_array().unwrap().is_empty());
}

#[test]
fn stop_all_with_and_without_an_agent_ends_pods_and_the_next_agent_runs_them_again() {
    if !possible() {
        return;
    }
    let mut node = Node::start();
    node.shell_pod("shell");
    let by_agent = node.run(&["stop-all", "--within", "5"]);
    let said = String::from_utf8_lossy(&by_agent.stderr).into_owned();
    assert!(by_agent.status.success(), "{said}");
    assert!(said.contains("1 pods ended"), "{said}");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(!text(&node.run(&["pods", "shell"])).contains("Running"), "the agent starts none again");
    node.kill_agent();
    node.start_agent();
    node.until("the pod runs again", || text(&node.run(&["pods", "shell"])).contains("Running"));
    let pid = json(&node.run(&["inspect", "shell"]))["containers"][0]["current"]["pid"].as_i64().unwrap();
    node.kill_agent();
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "the pod outlives the agent");
    let output = node.run(&["stop-all", "--within", "5"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 pods have ended"), "{said}");
    assert!(!said.contains("gateway"), "it must not touch the network: {said}");
    assert!(!Path::new(&format!("/proc/{pid}/exe")).exists(), "the container is gone");
    assert_eq!(text(&node.run(&["logs", "shell"])), "up\n", "its log stays");
    node.start_agent();
    node.until("the pod runs again", || {
        text(&node.run(&["logs", "shell"])) == "up\n" && text(&node.run(&["pods", "shell"])).contains("Running")
    });
}

#[test]
fn uninstall_lists_then_takes_what_is_ours_and_nothing_else() {
    if !possible() {
        return;
    }
    let node = Node::start();
    node.shell_pod("shell");
    let foreign = node.root().join("kubelet/pods/of-another-node");
    fs::create_dir_all(&foreign).unwrap();
    fs::write(foreign.join("file"), "kept").unwrap();
    let list = text(&node.run(&["uninstall"]));
    for part in ["process   agent", "pod       default/shell", "link      ", "nftables  table ip ", "mount     ", "cgroup    "] {
        assert!(list.contains(part), "{list}");
    }
    assert!(text(&node.run(&["pods", "shell"])).contains("Running"), "a list changes nothing");

    let output = node.run(&["uninstall", "--yes"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(foreign.join("file")).unwrap(), "kept");
    fs::remove_dir_all(node.root().join("kubelet")).unwrap();
    let mut left: Vec<_> = fs::read_dir(node.root()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["agent.log", "busybox.tar", "manifests"], "a test's own files");
    let root = node.root().to_str().unwrap();
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(root), "mounts are left");
    let said =
        |program: &str, args: &[&str]| String::from_utf8(Command::new(program).args(args).output().unwrap().stdout).unwrap();
    let instance = node.instance();
    assert!(!said("ip", &["-o", "link"]).contains(instance), "links are left");
    assert!(!said("nft", &["list", "tables"]).contains(instance), "tables are left");
    assert!(!said("find", &["/sys/fs/cgroup", "-type", "d"]).contains(instance), "cgroups are left");
    assert_eq!(text(&node.run(&["uninstall", "--yes"])), "nothing of coracle is here\n");
}
