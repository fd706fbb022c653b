//! The proxy's servers and its part on the host, asked from outside: the shipped binary in a
//! namespace of its own, a real HTTP client, the real kernel.

#[path = "support/node.rs"]
#[allow(dead_code)]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use support::{Node, privileged};

/// Does something in the node's network.
fn inside<T: Send>(node: &Node, work: impl FnOnce() -> T + Send) -> T {
    let namespace = fs::File::open(format!("/proc/{}/ns/net", node.agent_pid())).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

struct Page {
    code: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Page {
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

/// None: nobody listens, or not in time.
fn try_get(node: &Node, url: &str) -> Option<Page> {
    inside(node, || {
        let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(5)));
        let agent: ureq::Agent = config.build().into();
        let mut answer = agent.get(url).call().ok()?;
        let text = |value: &ureq::http::HeaderValue| value.to_str().unwrap().to_owned();
        let headers = answer.headers().iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        Some(Page { code: answer.status().as_u16(), headers, body: answer.body_mut().read_to_string().unwrap() })
    })
}

fn get(node: &Node, url: &str) -> Page {
    try_get(node, url).unwrap_or_else(|| panic!("no answer from {url}\n{}", node.log_tail()))
}

fn code(node: &Node, url: &str) -> Option<u16> {
    try_get(node, url).map(|page| page.code)
}

const METRICS: &str = "http://127.0.0.1:10249";
const HEALTH: &str = "http://192.0.2.7:10256";
const CHECK: &str = "http://192.0.2.7:31000/healthz";

const BALANCED: &str = "apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 31000
  externalIPs: [203.0.113.5]
  ports: [{port: 80, nodePort: 30080}]
";

/// `here`: last numbers of endpoints on this node; one more is elsewhere.
fn slice(here: &[u8]) -> String {
    let mut ends = vec!["{addresses: [10.9.9.9], nodeName: other, conditions: {ready: true}}".to_owned()];
    ends.extend(here.iter().map(|n| format!("{{addresses: [10.231.0.{n}], nodeName: testnode, conditions: {{ready: true}}}}")));
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: web-1, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nports: [{{port: 8080}}]\nendpoints: [{}]\n",
        ends.join(", ")
    )
}

/// A node with an address, as an uplink gives it.
fn node() -> Node {
    let node = Node::new();
    for line in ["link add up0 type bridge", "link set up0 up", "addr add 192.0.2.7/24 dev up0"] {
        assert!(node.command("ip").args(line.split(' ')).status().unwrap().success(), "{line}");
    }
    node
}

fn nft(node: &Node, line: &str) -> String {
    let out = node.command("nft").args(line.split(' ')).output().unwrap();
    assert!(out.status.success(), "nft {line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn ours(node: &Node) -> String {
    nft(node, &format!("list table ip {}", node.instance))
}

/// Series of a page of metrics, each checked for its form.
fn series(text: &str) -> BTreeMap<String, f64> {
    let mut told = BTreeSet::new();
    let mut found = BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let words: Vec<&str> = rest.splitn(3, ' ').collect();
            assert!(matches!(words[0], "HELP" | "TYPE") && words.len() == 3, "{line}");
            told.insert(words[1].to_owned());
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s)).filter(|b| told.contains(*b));
        assert!(told.contains(base.unwrap_or(name)), "{line}");
        assert!(found.insert(series.to_owned(), value.parse().unwrap()).is_none(), "{line}");
    }
    found
}

#[test]
fn metrics_health_and_service_checks_are_kube_proxys() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5, 6]));
    node.start();
    node.wait("the check's port", 10, |n| code(n, CHECK) == Some(200));
    let page = get(&node, CHECK);
    assert_eq!(page.headers["x-load-balancing-endpoint-weight"], "2");
    assert_eq!(
        (page.headers["content-type"].as_str(), page.headers["x-content-type-options"].as_str()),
        ("application/json", "nosniff")
    );
    let expected =
        serde_json::json!({"service": {"namespace": "default", "name": "web"}, "localEndpoints": 2, "serviceProxyHealthy": true});
    assert_eq!(page.json(), expected);

    assert_eq!(get(&node, &format!("{METRICS}/proxyMode")).body, "nftables");
    assert_eq!(get(&node, &format!("{METRICS}/healthz")).body, "ok");
    let configz = get(&node, &format!("{METRICS}/configz")).json();
    assert_eq!(configz["kubeproxy.config.k8s.io"]["healthzBindAddress"], "0.0.0.0:10256");
    assert_eq!(code(&node, &format!("{METRICS}/debug/pprof")), Some(404));
    let health = get(&node, &format!("{HEALTH}/healthz"));
    assert_eq!((health.code, &health.json()["nodeEligible"], &health.json()["healthy"]), (200, &true.into(), &true.into()));
    assert_eq!(health.json()["status"]["IPv4"]["healthy"], true);
    assert_eq!(get(&node, &format!("{HEALTH}/livez")).json().get("nodeEligible"), None);
    let posted = inside(&node, || {
        let mut stream = TcpStream::connect("127.0.0.1:10249").unwrap();
        stream.write_all(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    assert!(posted.starts_with("HTTP/1.1 405 "), "{posted}");

    let page = get(&node, &format!("{METRICS}/metrics"));
    assert_eq!(page.headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let first = series(&page.body);
    let of = |series: &BTreeMap<String, f64>, name: &str| {
        *series.get(&format!("kubeproxy_{name}")).unwrap_or_else(|| panic!("{name} in {series:?}"))
    };
    assert!(of(&first, "sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}") >= 1.0);
    assert_eq!(of(&first, "sync_proxy_rules_service_changes_total"), 1.0);
    assert_eq!(of(&first, "sync_proxy_rules_endpoint_changes_pending"), 0.0);
    assert_eq!(of(&first, "sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"external\"}"), 0.0);
    assert_eq!(of(&first, "proxy_healthz_total{code=\"200\"}"), 1.0);
    assert!(of(&first, "sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"}") > 1.7e9);

    // The last endpoint of this node goes.
    node.put("slice.yaml", &slice(&[]));
    node.wait("the check tells load balancers to go elsewhere", 10, |n| code(n, CHECK) == Some(503));
    assert_eq!(get(&node, CHECK).headers["x-load-balancing-endpoint-weight"], "0");
    let then = series(&get(&node, &format!("{METRICS}/metrics")).body);
    assert_eq!(of(&then, "sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"external\"}"), 1.0);
    assert!(of(&then, "sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}") >= 1.0);
    assert_eq!(of(&then, "network_programming_duration_seconds_count{ip_family=\"IPv4\"}"), 2.0);
    assert_eq!(of(&then, "sync_proxy_rules_endpoint_changes_total"), 2.0);
    // Neither a policy nor a port is for ever.
    node.put("web.yaml", &BALANCED.replace("31000", "31001"));
    node.wait("the new port", 10, |n| code(n, "http://192.0.2.7:31001/") == Some(503));
    assert_eq!(code(&node, CHECK), None, "the old one is closed");
    node.take_away("web.yaml");
    node.wait("no port", 10, |n| code(n, "http://192.0.2.7:31001/").is_none());
}

#[test]
fn a_port_that_somebody_else_has_is_named_with_its_flag_and_the_node_goes_on() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.args = ["--healthz-bind-address", ""].map(str::to_owned).to_vec();
    node.start();
    node.wait("metrics", 10, |n| code(n, &format!("{METRICS}/healthz")) == Some(200));
    assert_eq!(code(&node, &format!("{HEALTH}/healthz")), None, "it is off");
    // The namespace outlives the agent, and so does a listener in it.
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.args.clear();
    node.start();
    node.wait("health", 10, |n| code(n, &format!("{HEALTH}/healthz")) == Some(200));
    let taken = inside(&node, || TcpListener::bind("192.0.2.7:31000").unwrap());
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5]));
    node.wait("it is named", 10, |n| n.log_tail().contains("give Service default/web another healthCheckNodePort"));
    assert_eq!(code(&node, &format!("{HEALTH}/healthz")), Some(200));
    node.wait("the Service is served all the same", 10, |n| ours(n).contains("30080"));
    drop(taken);
    node.wait("it is taken up", 10, |n| code(n, CHECK) == Some(200));
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.args = ["--metrics-bind-address", "192.0.2.7:10256"].map(str::to_owned).to_vec();
    node.start();
    node.wait("both cannot be", 10, |n| n.log_tail().contains("-bind-address takes another port"));
}

#[test]
fn slow_clients_and_many_cost_nobody_an_answer() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.start();
    node.wait("health", 10, |n| code(n, &format!("{HEALTH}/healthz")) == Some(200));
    let descriptors = |n: &Node| fs::read_dir(format!("/proc/{}/fd", n.agent_pid())).unwrap().count();
    let before = descriptors(&node);
    // 200 who are all there before the first asks, and one request each, twice.
    inside(&node, || {
        let mut all: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect("192.0.2.7:10256").unwrap()).collect();
        for _ in 0..2 {
            all.iter_mut().for_each(|s| s.write_all(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n").unwrap());
            for stream in &mut all {
                let mut answer = [0; 1024];
                let count = stream.read(&mut answer).unwrap();
                assert!(answer[..count].starts_with(b"HTTP/1.1 200 OK\r\n"), "{}", String::from_utf8_lossy(&answer[..count]));
            }
        }
    });
    node.wait("who left costs nothing", 10, |n| descriptors(n) <= before + 1);
    // Half a request from more than may be here; whoever asks properly is answered at once.
    let slow: Vec<TcpStream> = inside(&node, || {
        let connect = || {
            let mut stream = TcpStream::connect("192.0.2.7:10256").unwrap();
            // An early one may have made room for a later one.
            let _ = stream.write_all(b"GET /livez HTT");
            stream
        };
        (0..400).map(|_| connect()).collect()
    });
    let begun = Instant::now();
    assert_eq!(code(&node, &format!("{HEALTH}/healthz")), Some(200));
    assert_eq!(code(&node, &format!("{METRICS}/metrics")), Some(200));
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(descriptors(&node) <= before + 260, "{}", descriptors(&node));
    node.wait("the slow are shown the door", 20, |n| descriptors(n) <= before + 1);
    drop(slow);
    // A head without an end.
    let huge = inside(&node, || {
        let mut stream = TcpStream::connect("192.0.2.7:10256").unwrap();
        let mut line = b"GET /livez HTTP/1.1\r\nX: ".to_vec();
        line.resize(1 << 20, b'x');
        let _ = stream.write_all(&line); // it may be cut off in the middle
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // and not gently
        String::from_utf8_lossy(&answer).into_owned()
    });
    assert!(huge.is_empty() || huge.starts_with("HTTP/1.1 431 "), "{huge}");
    assert_eq!(code(&node, &format!("{HEALTH}/healthz")), Some(200));
}

#[test]
fn health_turns_bad_once_a_change_has_waited_a_minute_and_good_when_it_is_written() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5]));
    node.env = vec![("CORACLE_FAILPOINTS", "proxy.table.change=sleep:68000".to_owned())];
    node.start();
    node.wait("the check", 10, |n| code(n, CHECK) == Some(200));
    node.put("slice.yaml", &slice(&[5, 6]));
    node.wait("the kernel hangs", 10, |n| n.log_tail().contains("failpoint proxy.table.change"));
    let hung = Instant::now();
    node.wait("health tells", 70, |n| {
        let now = code(n, &format!("{HEALTH}/healthz"));
        assert!(now == Some(200) || hung.elapsed() > Duration::from_secs(58), "{now:?} after {:?}", hung.elapsed());
        now == Some(503)
    });
    let page = get(&node, &format!("{HEALTH}/livez"));
    assert_eq!((page.code, &page.json()["status"]["IPv4"]["healthy"]), (503, &false.into()));
    let check = get(&node, CHECK);
    assert_eq!(
        (check.code, &check.json()["serviceProxyHealthy"], &check.json()["localEndpoints"]),
        (503, &false.into(), &2.into())
    );
    node.wait("it is written", 20, |n| code(n, &format!("{HEALTH}/healthz")) == Some(200));
    assert_eq!(code(&node, CHECK), Some(200));
    let metrics = get(&node, &format!("{METRICS}/metrics")).body;
    assert!(metrics.contains("kubeproxy_proxy_livez_total{code=\"503\"} 1"), "{metrics}");
}

#[test]
fn another_kube_proxy_is_left_alone_until_it_is_gone() {
    if !privileged() {
        return;
    }
    let mut node = node();
    nft(&node, "add table ip kube-proxy");
    nft(&node, "add chain ip kube-proxy services");
    let theirs = nft(&node, "list table ip kube-proxy");
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5]));
    node.start();
    let said = |n: &Node, what: &str| n.ok(&["info"]).lines().any(|l| l.starts_with("services ") && l.contains(what));
    node.wait("it yields", 10, |n| said(n, "off while another kube-proxy serves Services here (nftables table ip kube-proxy)"));
    assert_eq!(code(&node, &format!("{METRICS}/healthz")), None, "the ports are the other's");
    let nothing_of_services = |n: &Node| ["203.0.113.5", "30080", "10.96.0.0/16"].iter().all(|word| !ours(n).contains(word));
    assert!(nothing_of_services(&node) && ours(&node).contains("pods to the outside"), "{}", ours(&node));
    let check = String::from_utf8(node.cli(&["check"]).stdout).unwrap();
    assert!(check.contains("there is nftables table ip kube-proxy") && check.contains("--proxy=on"), "{check}");
    assert_eq!(nft(&node, "list table ip kube-proxy"), theirs);
    nft(&node, "delete table ip kube-proxy");
    let gone = Instant::now();
    node.wait("Services are served", 22, |n| said(n, "on") && code(n, CHECK) == Some(200));
    assert!(gone.elapsed() < Duration::from_secs(22), "{:?}", gone.elapsed());
    assert!(ours(&node).contains("203.0.113.5 . tcp . 80"));
    // It comes back, this time with iptables' chain, which nobody tells us of.
    nft(&node, "add table ip nat");
    nft(&node, "add chain ip nat KUBE-SERVICES");
    node.wait("it yields again", 22, |n| said(n, "chain KUBE-SERVICES of table ip nat"));
    assert!(nothing_of_services(&node), "nor is the Services' range ours to close: {}", ours(&node));
    assert_eq!(code(&node, CHECK), None);
    // Whoever says so serves them beside it; and whoever says off never does.
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.args = ["--proxy", "on"].map(str::to_owned).to_vec();
    node.start();
    node.wait("both", 10, |n| said(n, "on") && ours(n).contains("203.0.113.5"));
    nft(&node, "delete table ip nat");
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    node.args = ["--proxy", "off"].map(str::to_owned).to_vec();
    node.start();
    node.wait("what was served goes", 10, |n| said(n, "off, as --proxy=off says") && !ours(n).contains("203.0.113.5"));
    node.put("slice.yaml", &slice(&[5, 6]));
    std::thread::sleep(Duration::from_secs(1));
    assert!(!ours(&node).contains("30080") && ours(&node).contains("pods to the outside"), "{}", ours(&node));
}

#[test]
fn node_ports_and_external_addresses_follow_flags_and_the_hosts_addresses() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.args = ["--nodeport-addresses", "198.51.100.0/24,203.0.113.0/24", "--ignore-external-ips"].map(str::to_owned).to_vec();
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5]));
    node.start();
    node.wait("it is served", 10, |n| code(n, &format!("{METRICS}/healthz")) == Some(200) && ours(n).contains("30080"));
    let set = |n: &Node| nft(n, &format!("list set ip {} nodeport-ips", n.instance));
    assert!(!set(&node).contains("elements"), "{}", set(&node));
    assert_eq!(code(&node, CHECK), None);
    assert!(!ours(&node).contains("203.0.113.5"));
    assert!(
        node.ok(&["services"]).contains("--ignore-external-ips")
            || node.ok(&["services", "-o", "json"]).contains("--ignore-external-ips")
    );
    let ip = |line: &str| assert!(node.command("ip").args(line.split(' ')).status().unwrap().success(), "{line}");
    ip("addr add 198.51.100.9/24 dev up0");
    node.wait("NodePorts are there", 5, |n| set(n).contains("198.51.100.9"));
    node.wait("and the check", 5, |n| code(n, "http://198.51.100.9:31000/") == Some(200));
    // A lease with another address.
    ip("addr add 198.51.100.77/32 dev up0");
    ip("addr del 198.51.100.9/24 dev up0");
    node.wait("they follow", 5, |n| set(n).contains("198.51.100.77") && !set(n).contains("198.51.100.9"));
    node.wait("and the check", 5, |n| code(n, "http://198.51.100.77:31000/") == Some(200));
}

#[test]
fn connection_tracking_is_kube_proxys_unless_somebody_has_set_it() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.put("web.yaml", BALANCED);
    node.start();
    let read = |n: &Node, name: &str| {
        let out = n.command("cat").arg(format!("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{name}")).output().unwrap();
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    };
    node.wait("times", 10, |n| read(n, "established") == "86400" && read(n, "close_wait") == "3600");
    node.signal_agent(nix::sys::signal::Signal::SIGTERM);
    let set = "echo 200000 > /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established";
    assert!(node.command("sh").args(["-c", set]).status().unwrap().success());
    node.args = ["--conntrack-tcp-timeout-close-wait", "2h"].map(str::to_owned).to_vec();
    node.start();
    node.wait("what a flag says", 10, |n| read(n, "close_wait") == "7200");
    assert_eq!(read(&node, "established"), "200000", "the admin's stays");
}

#[test]
fn a_node_at_rest_does_not_read_its_table_again_and_again() {
    if !privileged() {
        return;
    }
    let mut node = node();
    node.put("web.yaml", BALANCED);
    node.put("slice.yaml", &slice(&[5]));
    node.start();
    node.wait("it serves", 10, |n| ours(n).contains("default/web"));
    let full = |node: &Node| {
        let all = series(&get(node, &format!("{METRICS}/metrics")).body);
        all["kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}"]
    };
    // It is looked after every 20 s; the first look compares.
    std::thread::sleep(Duration::from_secs(21));
    let before = full(&node);
    std::thread::sleep(Duration::from_secs(41));
    assert_eq!(full(&node), before, "nobody changed anything");
    nft(&node, &format!("flush table ip {}", node.instance));
    node.wait("it is whole again", 2, |n| ours(n).contains("jump services"));
}
