//! mountPropagation on a host whose `/` is private, as in a container or under an init that shares
//! nothing: volumes have peers, both ways; a hostPath on a private mount is refused with its cure.

use std::path::Path;

use super::support::{Node, container, is_ready, privileged};

fn mounted(node: &Node, program: &str, args: &[&str]) {
    let out = node.command(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn mounts_go_both_ways_where_asked_and_only_there() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    let host = node.path("host");
    std::fs::create_dir(&host).unwrap();
    let text = host.to_str().unwrap();
    let volumes = format!("  volumes: [{{name: h, hostPath: {{path: {text}}}}}, {{name: e, emptyDir: {{}}}}]\n");
    let container_of = |name: &str, propagation: &str, privileged: bool| {
        format!(
            "  - {{name: {name}, image: \"busybox:1.35\", imagePullPolicy: IfNotPresent, command: [sleep, \"100000\"], \
             securityContext: {{privileged: {privileged}}}, volumeMounts: [{{name: h, mountPath: /h, mountPropagation: {propagation}}}, \
             {{name: e, mountPath: /e, mountPropagation: {propagation}}}]}}\n"
        )
    };
    let whole = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec:\n  terminationGracePeriodSeconds: 1\n{volumes}  containers:\n{}{}{}",
        container_of("both", "Bidirectional", true),
        container_of("in", "HostToContainer", false),
        container_of("none", "None", false)
    );
    node.put("p.yaml", &whole);
    // The hostPath lies on a private mount, which is the operator's to change.
    let status = node.wait_pod("p", "is refused with the cure", |s| {
        container(s, "both")["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    });
    let said = container(&status, "both")["state"]["waiting"]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("is not a shared mount") && said.contains("mount --make-rshared"), "{said}");
    mounted(&node, "mount", &["--bind", text, text]);
    mounted(&node, "mount", &["--make-rshared", text]);
    node.wait_pod("p", "runs once it is shared", is_ready);

    let sees = |node: &Node, name: &str, path: &str| node.cli(&["exec", "p", "-c", name, "--", "cat", path]).status.success();
    let uid = node.pod("p").unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let empty = node.root().join(format!("kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/e"));
    for (inside, outside) in [("/h", host.as_path()), ("/e", empty.as_path())] {
        // From the node.
        let from_node = outside.join("from-node");
        mounted(&node, "mkdir", &[from_node.to_str().unwrap()]);
        mounted(&node, "mount", &["-t", "tmpfs", "node", from_node.to_str().unwrap()]);
        std::fs::write(node.seen(&from_node.join("f")), "x").unwrap();
        let path = format!("{inside}/from-node/f");
        assert!(sees(&node, "both", &path) && sees(&node, "in", &path), "{path}");
        assert!(!sees(&node, "none", &path), "{path}: a container that did not ask sees it");
        // From a container.
        let script = format!("mkdir {inside}/from-pod && mount -t tmpfs pod {inside}/from-pod && echo x > {inside}/from-pod/f");
        node.ok(&["exec", "p", "-c", "both", "--", "sh", "-c", &script]);
        let path = format!("{inside}/from-pod/f");
        assert!(node.seen(&outside.join("from-pod/f")).exists(), "{path}: the node does not see it");
        assert!(sees(&node, "in", &path) && !sees(&node, "none", &path), "{path}");
        // One that only listens cannot tell the node anything.
        let script = format!("mount -t tmpfs in {inside}/from-in");
        assert!(!node.cli(&["exec", "p", "-c", "in", "--", "sh", "-c", &script]).status.success());
    }
    // A new agent finds it shared and mounts nothing over it.
    let kubelet = node.root().join("kubelet");
    let count = |node: &Node| node.mounts().iter().filter(|m| Path::new(m) == kubelet).count();
    assert_eq!(count(&node), 1);
    node.kill_agent();
    node.start();
    assert_eq!(count(&node), 1);
    assert!(sees(&node, "both", "/h/from-node/f"));

    node.take_away("p.yaml");
    node.wait_gone("p");
    let left: Vec<String> = node.mounts().into_iter().filter(|m| m.contains(&uid)).collect();
    assert!(left.is_empty(), "what a pod or the node mounted in its volumes stays: {left:?}");
    // What lies on the operator's path is the operator's.
    assert!(node.seen(&host.join("from-pod/f")).exists());
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.ok(&["uninstall", "--yes"]);
    assert_eq!(count(&node), 0, "uninstall takes the mount away");
}
