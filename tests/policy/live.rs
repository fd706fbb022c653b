//! What truth tables do not show: a pod's first instruction, pods that come and go, flows that
//! end, the node and hostNetwork, names, what users are told, and agents that come after others.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use coracle::sys::netns;

use crate::field::{Field, L4, Probe, manifest};
use crate::support::{Node, STAY, pod, privileged};

fn policy(namespace: &str, name: &str, spec: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: \"{namespace}\"}}\nspec: {spec}\n---\n"
    )
}

impl Field {
    fn tcp(&self, from: (char, char), to: (char, char)) -> bool {
        let both = [false, true].map(|v6| Probe { from, to, l4: L4::Tcp, port: 80, v6 });
        let reached: Vec<bool> = self.reach(&both).into_values().collect();
        assert_eq!(reached[0], reached[1], "families differ: {both:?}");
        reached[0]
    }

    fn on_node<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        netns::within(&File::open(format!("/proc/{}/ns/net", self.node.agent_pid())).unwrap(), work).unwrap()
    }

    /// Connections and packets that x/a has had from there.
    fn came(&self, from: IpAddr) -> bool {
        self.arrived.lock().unwrap().iter().any(|(source, _)| source.ip().to_canonical() == from)
    }

    fn rules(&self) -> String {
        String::from_utf8(self.node.command("nft").args(["-a", "list", "ruleset"]).output().unwrap().stdout).unwrap()
    }
}

fn answers(to: SocketAddr) -> bool {
    TcpStream::connect_timeout(&to, Duration::from_millis(700)).is_ok()
}

#[test]
fn the_first_instruction_of_a_pod_meets_its_policies() {
    if !privileged() {
        return;
    }
    let mut field = Field::new();
    let target = field.pods[&('x', 'a')].addresses;
    let deny = policy("default", "deny", "{podSelector: {}, policyTypes: [Egress]}");
    field.say(&deny);
    let script = format!(
        "exec 2>/dev/null; nc -w 1 {0} 80 </dev/null && echo REACHED; while :; do nc -w 1 {0} 80 </dev/null && echo LATER; sleep 0.2; done",
        target[0]
    );
    let names: Vec<String> = (0..20).map(|n| format!("racer-{n}")).collect();
    for name in &names {
        field.node.put(
            &format!("{name}.yaml"),
            &pod(name, "Always", &[], &[("c", &script)], "  terminationGracePeriodSeconds: 0\n").replacen(
                "  terminationGracePeriodSeconds: 5\n",
                "",
                1,
            ),
        );
    }
    let ips: Vec<IpAddr> =
        names.iter().map(|name| field.node.wait_ready(name)["podIP"].as_str().unwrap().parse().unwrap()).collect();
    // Each has tried, and again.
    std::thread::sleep(Duration::from_secs(3));
    for (name, ip) in names.iter().zip(&ips) {
        assert!(!field.came(*ip), "{name} got through\n{}", field.rules());
        assert_eq!(field.node.ok(&["logs", name]), "", "{name}");
    }
    // They would have, and do.
    field.say("");
    for (name, ip) in names.iter().zip(&ips) {
        field.node.wait(&format!("{name} gets through"), 20, |_| field.came(*ip));
    }
}

#[test]
fn pods_come_and_go_and_flows_and_names_and_the_node() {
    if !privileged() {
        return;
    }
    let mut field = Field::new();
    // -- A connection that was allowed, and is not any more.
    let connect = |field: &Field, port: u16| {
        let at = SocketAddr::new(field.pods[&('x', 'a')].addresses[0], port);
        let listener = netns::within(&field.pods[&('x', 'a')].netns, || TcpListener::bind(at).unwrap()).unwrap();
        let client = netns::within(&field.pods[&('y', 'a')].netns, || TcpStream::connect(at).unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        (client, server)
    };
    let goes = |(client, server): &mut (TcpStream, TcpStream)| {
        client.write_all(b"x").unwrap();
        server.read(&mut [0; 64]).is_ok_and(|n| n > 0)
    };
    let (mut ended, mut kept) = (connect(&field, 90), connect(&field, 91));
    assert!(goes(&mut ended) && goes(&mut kept));
    field.say(&policy("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 91}]}]}"));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        assert!(!goes(&mut ended), "a flow outlives the policy that denies it\n{}", field.rules());
        assert!(goes(&mut kept), "one that is allowed ended");
    }

    // -- Peers and subjects that come and go.
    let selecting =
        policy("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}");
    field.say(&selecting);
    for round in 0..3 {
        for gone in [('x', 'b'), ('x', 'a')] {
            let file = format!("{}-{}.yaml", gone.0, gone.1);
            field.node.take_away(&file);
            field.node.wait("it is gone", 30, |_| field.object(gone).is_none());
            if gone == ('x', 'b') {
                let old = field.pods[&gone].addresses[0].to_string();
                assert!(
                    !field.rules().lines().any(|l| l.contains("elements") && l.contains(&format!("{old} "))),
                    "round {round}: {old} is still meant"
                );
                assert!(!field.tcp(('x', 'c'), ('x', 'a')));
            }
            field.node.put(&file, &manifest(gone, &format!("pod: {}", gone.1)));
            field.house(gone);
            assert!(field.tcp(('x', 'b'), ('x', 'a')), "round {round}: {gone:?} came back\n{}", field.rules());
            assert!(!field.tcp(('x', 'c'), ('x', 'a')) && !field.tcp(('y', 'b'), ('x', 'a')), "round {round}");
        }
    }
    // Other labels of a pod that runs.
    let address = field.pods[&('x', 'c')].addresses;
    field.node.put("x-c.yaml", &manifest(('x', 'c'), "pod: b"));
    field.node.wait("should allow ingress access from updated pod", 5, |_| field.tcp(('x', 'c'), ('x', 'a')));
    assert_eq!(field.object(('x', 'c')).unwrap()["status"]["podIP"], address[0].to_string());
    field.node.put("x-c.yaml", &manifest(('x', 'c'), "pod: c"));
    field.node.wait("and deny it again", 5, |_| !field.tcp(('x', 'c'), ('x', 'a')));

    // -- The node's own traffic, and hostNetwork.
    field.node.put(
        "host.yaml",
        &pod("host", "Always", &[], &[("c", "echo up; while :; do sleep 1; done")], "  hostNetwork: true\n")
            .replace("{name: host}", "{name: host, namespace: \"x\", labels: {pod: host}}"),
    );
    field.node.wait("x/host runs", 30, |node| String::from_utf8_lossy(&node.cli(&["logs", "x/host"]).stdout).contains("up"));
    field.say(
        &(policy("x", "deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}")
            + &policy("y", "some", "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}")),
    );
    let address = |field: &Field, pod| SocketAddr::new(field.pods[&pod].addresses[0], 80);
    let (xa, ya) = (address(&field, ('x', 'a')), address(&field, ('y', 'a')));
    assert!(field.on_node(|| answers(xa) && answers(ya)), "probes pass\n{}", field.rules());
    for to in [xa, ya] {
        field.node.ok(&["exec", "x/host", "--", "nc", "-w", "1", &to.ip().to_string(), "80"]);
    }
    let listener = field.on_node(|| TcpListener::bind("10.231.0.1:8000").unwrap());
    let reaches = |from| netns::within(&field.pods[&from].netns, || answers("10.231.0.1:8000".parse().unwrap())).unwrap();
    assert!(reaches(('y', 'a')) && !reaches(('x', 'a')));
    drop(listener);

    // -- What users are told.
    let told = field.node.ok(&["policies", "x/a"]);
    assert!(
        told.contains("ingress: nothing is allowed, isolated by x/deny\n") && told.contains("egress: nothing is allowed"),
        "{told}"
    );
    let told = field.node.ok(&["policies", "y/a"]);
    assert!(
        told.contains("  from pods of its namespace: every port (y/some)\n") && told.contains("egress: everything"),
        "{told}"
    );
    assert!(field.node.ok(&["policies", "x/host"]).contains("no policy is about it"));
    let json: serde_json::Value = serde_json::from_str(&field.node.ok(&["policies", "y/a", "-o", "json"])).unwrap();
    assert_eq!(
        (&json["ingress"]["isolated"], &json["ingress"]["policies"][0], &json["egress"]["isolated"]),
        (&true.into(), &"y/some".into(), &false.into())
    );
    assert!(!field.node.cli(&["policies", "x/nobody"]).status.success());
    let trace = field.node.ok(&["proxy", "trace", "x/b", &format!("{xa}/tcp")]);
    assert!(trace.contains("not allowed by x/deny: drop") && trace.ends_with("dropped\n"), "{trace}");
    let trace = field.node.ok(&["proxy", "trace", "y/b", &format!("{ya}/tcp")]);
    assert!(trace.contains("y/some ingress[0]: ") && trace.contains(" accept\n"), "{trace}");

    // -- Names, where port 53 is named.
    let lookup = |field: &Field, pod: &str| {
        let out = field.node.cli(&["exec", pod, "--", "nslookup", "10-231-0-1.default.pod.cluster.local"]);
        String::from_utf8_lossy(&out.stdout).contains("10.231.0.1")
    };
    assert!(lookup(&field, "z/a") && lookup(&field, "y/a") && !lookup(&field, "x/a"));
    let names = "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kube-system}}, podSelector: {matchLabels: {k8s-app: kube-dns}}}], ports: [{port: 53, protocol: UDP}, {port: 53}]}]}";
    field.say(&policy("x", "names", names));
    assert!(lookup(&field, "x/a"), "{}", field.rules());
    assert!(!reaches_port(&field, ('x', 'a'), "10.231.0.1:8000"));

    // -- The agent is killed: what it said stays, and is not made anew.
    field.say(&selecting);
    let before = field.rules();
    field.node.kill_agent();
    assert!(field.tcp(('x', 'b'), ('x', 'a')) && !field.tcp(('y', 'b'), ('x', 'a')), "without an agent");
    field.node.start();
    field.node.ok(&["proxy", "--dry-run"]);
    assert_eq!(field.rules(), before, "a start changed rules");
    assert!(field.tcp(('x', 'b'), ('x', 'a')) && !field.tcp(('y', 'b'), ('x', 'a')));
    // Somebody flushes them.
    field.node.command("nft").args(["flush", "ruleset"]).status().unwrap();
    let held = before.matches("policy-in-").count();
    field.node.wait("they are back", 3, |_| field.rules().matches("policy-in-").count() == held);
    assert!(!field.tcp(('y', 'b'), ('x', 'a')));
    // Another agent is told to leave policies alone.
    field.node.kill_agent();
    field.node.args.push("--policy=off".to_owned());
    field.node.start();
    field.node.wait("the chains go", 5, |_| !field.rules().contains("policy-"));
    assert!(field.tcp(('y', 'b'), ('x', 'a')));
    assert!(field.node.ok(&["policies", "x/a"]).contains("--policy=off"));
}

fn reaches_port(field: &Field, from: (char, char), to: &str) -> bool {
    let listener = field.on_node(|| TcpListener::bind(to).unwrap());
    let reached = netns::within(&field.pods[&from].netns, || answers(to.parse().unwrap())).unwrap();
    drop(listener);
    reached
}

/// Link-local addresses of IPv6 and their interfaces.
fn link_locals(netns: &File) -> Vec<(String, Ipv6Addr, u32)> {
    let all = netns::within(netns, || nix::ifaddrs::getifaddrs().map(|all| all.collect::<Vec<_>>())).unwrap().unwrap();
    let of_link = all.into_iter().filter_map(|i| {
        let at = *i.address.as_ref()?.as_sockaddr_in6()?;
        at.ip().is_unicast_link_local().then(|| (i.interface_name, at.ip(), at.scope_id()))
    });
    of_link.collect()
}

#[test]
fn link_local_addresses_lead_past_no_policy() {
    if !privileged() {
        return;
    }
    {
        // Where pods have no IPv6 nobody has one.
        let node = Node::running();
        node.put("web.yaml", &pod("web", "Always", &[], &[("c", STAY)], ""));
        node.wait_ready("web");
        let inside = File::open(format!("/proc/{}/ns/net", node.shells()[0])).unwrap();
        let outside = File::open(format!("/proc/{}/ns/net", node.agent_pid())).unwrap();
        let of_pods = |(name, ..): &(String, Ipv6Addr, u32)| *name == format!("{}0", node.instance);
        assert_eq!(link_locals(&inside), []);
        assert!(!link_locals(&outside).iter().any(of_pods));
    }
    let mut field = Field::new();
    let host = File::open(format!("/proc/{}/ns/net", field.node.agent_pid())).unwrap();
    let bridge = format!("{}0", field.node.instance);
    let of_node = link_locals(&host).into_iter().find(|(name, ..)| *name == bridge).unwrap().1;
    let of_pod = link_locals(&field.pods[&('y', 'b')].netns)[0].1;
    let scope = link_locals(&field.pods[&('x', 'a')].netns)[0].2;
    let reached = |field: &Field| {
        let served = [&host, &field.pods[&('y', 'b')].netns];
        let listeners = served.map(|ns| netns::within(ns, || TcpListener::bind("[::]:8000").unwrap()).unwrap());
        let to = [of_node, of_pod].map(|ip| SocketAddr::V6(SocketAddrV6::new(ip, 8000, 0, scope)));
        let reached = netns::within(&field.pods[&('x', 'a')].netns, || to.map(answers)).unwrap();
        drop(listeners);
        reached
    };
    let open = reached(&field);
    assert!(open[0], "a pod reaches the node by its link-local address where nobody is isolated");
    field.say(&policy("x", "deny", "{podSelector: {}, policyTypes: [Egress]}"));
    assert_eq!(reached(&field), [false; 2], "{}", field.rules());
    field.say(&policy("y", "deny", "{podSelector: {}}"));
    assert_eq!(reached(&field), [open[0], false], "{}", field.rules());
    // Neighbours are found all the same.
    field.say(&policy("x", "some", "{podSelector: {}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {}}]}]}"));
    assert!(field.tcp(('x', 'a'), ('y', 'a')) && field.tcp(('y', 'a'), ('x', 'a')));
}

#[test]
fn policies_that_cannot_be_read_open_nothing() {
    if !privileged() {
        return;
    }
    let mut field = Field::new();
    field.say(&policy("x", "deny", "{podSelector: {}}"));
    assert!(!field.tcp(('y', 'a'), ('x', 'a')));
    field.node.kill_agent();
    let (manifests, away) = (field.node.path("manifests"), field.node.path("away"));
    std::fs::rename(&manifests, &away).unwrap();
    std::fs::remove_file(field.node.root().join("state/manifests-network.json")).unwrap();
    field.node.start();
    field.node.ok(&["proxy", "--dry-run"]);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert!(!field.tcp(('y', 'a'), ('x', 'a')), "{}", field.rules());
    }
    std::fs::rename(&away, &manifests).unwrap();
    field.node.wait("they are read again", 10, |node| node.ok(&["policies", "x/a"]).contains("isolated by x/deny"));
    assert!(!field.tcp(('y', 'a'), ('x', 'a')) && field.tcp(('x', 'a'), ('y', 'a')));
    // And what is read counts.
    field.say("");
    field.node.wait("they are gone", 5, |_| field.tcp(('y', 'a'), ('x', 'a')));
}
