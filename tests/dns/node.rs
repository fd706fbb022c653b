//! The server as the agent runs it: real pods with their resolv.conf, asked by busybox's nslookup.

use std::io::Read;
use std::process::Stdio;

use crate::support::{Node, STAY, pod, privileged};

/// The node's address on its bridge.
const GATEWAY: &str = "10.231.0.1";

impl Node {
    fn resolv_conf(&self, pod: &str) -> String {
        self.ok(&["exec", pod, "--", "cat", "/etc/resolv.conf"])
    }

    fn nameservers(&self, pod: &str) -> Vec<String> {
        let text = self.resolv_conf(pod);
        text.lines().filter_map(|l| l.strip_prefix("nameserver ")).map(str::to_owned).collect()
    }

    /// What nslookup of the pod's image finds; it tries search domains for names without a dot.
    fn lookup(&self, pod: &str, name: &str) -> String {
        let out = self.cli(&["exec", pod, "--", "nslookup", name]);
        String::from_utf8_lossy(&out.stdout).into_owned()
    }
}

#[test]
fn pods_ask_the_gateway_as_their_policy_says() {
    if !privileged() {
        return;
    }
    let node = Node::running();
    let policies = [
        ("first", ""),
        ("host-first", "  hostNetwork: true\n"),
        ("host-with", "  hostNetwork: true\n  dnsPolicy: ClusterFirstWithHostNet\n"),
        ("default", "  dnsPolicy: Default\n"),
        ("none", "  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1]}\n"),
    ];
    for (name, more) in policies {
        node.put(&format!("{name}.yaml"), &pod(name, "Always", &[], &[("c", STAY)], more));
    }
    for (name, _) in policies {
        node.wait_ready(name);
    }
    let text = node.resolv_conf("first");
    assert!(text.starts_with("search default.svc.cluster.local svc.cluster.local cluster.local"), "{text}");
    assert!(text.contains("options ndots:5\n"), "{text}");
    assert_eq!(node.nameservers("first"), [GATEWAY]);
    assert_eq!(node.nameservers("host-with"), [GATEWAY]);
    assert_eq!(node.nameservers("none"), ["192.0.2.1"]);
    for name in ["host-first", "default"] {
        assert!(!node.nameservers(name).contains(&GATEWAY.to_owned()), "{name}");
    }
    // A pod's name of its address, from a pod and from the node's own network.
    let ip = node.status("first")["podIP"].as_str().unwrap().to_owned();
    for asker in ["first", "host-with"] {
        let found = node.lookup(asker, &format!("{}.default.pod.cluster.local", ip.replace('.', "-")));
        assert!(found.contains(&format!("Address: {ip}")), "{asker}: {found}");
    }
    assert!(node.lookup("first", "nosuch.default.svc.cluster.local").contains("NXDOMAIN"));
    let info = node.ok(&["info"]);
    assert!(info.lines().any(|l| l.starts_with("dns ") && l.contains(GATEWAY)), "{info}");
}

#[test]
fn while_the_port_is_taken_and_with_dns_off_pods_have_the_host_s_resolvers() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.kill_agent();
    node.args = vec!["--dns=off".to_owned()];
    node.start();
    node.put("without.yaml", &pod("without", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("without");
    assert!(!node.nameservers("without").contains(&GATEWAY.to_owned()));
    let program = format!(
        "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('{GATEWAY}', 53)); \
         print('up', flush=True); time.sleep(1000)"
    );
    let mut holder = node.command("python3").args(["-c", &program]).stdout(Stdio::piped()).spawn().unwrap();
    holder.stdout.as_mut().unwrap().read_exact(&mut [0; 2]).unwrap();
    node.kill_agent();
    node.args.clear();
    node.start();
    node.put("taken.yaml", &pod("taken", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("taken");
    assert!(!node.nameservers("taken").contains(&GATEWAY.to_owned()));
    let log = std::fs::read_to_string(node.path("agent.log")).unwrap();
    assert!(log.contains("cannot listen") && log.contains(&format!("(pid {})", holder.id())), "{}", node.log_tail());
    holder.kill().unwrap();
    holder.wait().unwrap();
    node.wait("the server takes the port over", 15, |node| node.ok(&["info"]).contains(&format!("{GATEWAY}: ")));
    node.put("later.yaml", &pod("later", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("later");
    assert_eq!(node.nameservers("later"), [GATEWAY]);
    node.kill_agent();
    node.args = vec!["--cluster-dns=192.0.2.10".to_owned(), "--cluster-domain=edge.example".to_owned()];
    node.start();
    node.put("other.yaml", &pod("other", "Always", &[], &[("c", STAY)], ""));
    node.wait_ready("other");
    assert_eq!(node.nameservers("other"), ["192.0.2.10"]);
    assert!(node.resolv_conf("other").starts_with("search default.svc.edge.example"));
}

#[test]
fn a_service_of_a_manifest_is_resolved_by_a_pod_and_follows_its_pods() {
    if !privileged() {
        return;
    }
    let mut node = Node::running();
    node.put(
        "services.yaml",
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {name: peers}\nspec: {clusterIP: None, selector: {app: web}, ports: [{name: http, port: 8080}]}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {name: fixed, namespace: other}\nspec: {clusterIP: 10.96.3.4, ports: [{port: 80}]}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {name: alias}\nspec: {type: ExternalName, externalName: fixed.other.svc.cluster.local}\n",
    );
    node.put("asker.yaml", &pod("asker", "Always", &[], &[("c", STAY)], ""));
    let web = |name: &str| {
        pod(name, "Always", &[], &[("c", STAY)], &format!("  hostname: {name}\n  subdomain: peers\n"))
            .replace("metadata: {", "metadata: {labels: {app: web}, ")
    };
    node.put("w1.yaml", &web("w1"));
    node.put("w2.yaml", &web("w2"));
    for name in ["asker", "w1", "w2"] {
        node.wait_ready(name);
    }
    let ip = |node: &Node, name: &str| node.status(name)["podIP"].as_str().unwrap().to_owned();
    let (one, two) = (ip(&node, "w1"), ip(&node, "w2"));
    node.wait("both pods are peers", 10, |node| {
        let found = node.lookup("asker", "peers");
        found.contains(&format!("Address: {one}\n")) && found.contains(&format!("Address: {two}\n"))
    });
    assert!(node.lookup("asker", "w1.peers.default.svc.cluster.local").contains(&format!("Address: {one}\n")));
    assert!(node.lookup("asker", "fixed.other.svc.cluster.local").contains("Address: 10.96.3.4\n"));
    assert!(node.lookup("asker", "alias").contains("Address: 10.96.3.4\n"));
    let address = |node: &Node| {
        let found = node.lookup("asker", "web");
        let line = found.lines().filter_map(|l| l.strip_prefix("Address: ")).find(|a| a.starts_with("10.96."));
        line.unwrap_or_else(|| panic!("no address of the Service: {found}")).to_owned()
    };
    let before = address(&node);
    assert!(node.lookup("asker", &before).contains("web.default.svc.cluster.local"), "and back");
    node.take_away("w2.yaml");
    node.wait("the pod that ended is no peer any more", 20, |node| !node.lookup("asker", "peers").contains(&two));
    assert!(node.lookup("asker", "peers").contains(&one));
    node.kill_agent();
    node.start();
    node.wait("names are there again", 10, |node| node.lookup("asker", "peers").contains(&one));
    assert_eq!(address(&node), before, "a Service keeps its address");
    node.take_away("services.yaml");
    node.wait("a Service that is gone has no name", 10, |node| node.lookup("asker", "web").contains("NXDOMAIN"));
}
