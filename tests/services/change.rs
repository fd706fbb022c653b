//! Services and pods that come, go and become something else.

use std::time::{Duration, Instant};

use super::Row;
use super::world::{By, LINGER, NODE, STAY, World, at, node_port, service, vip};

pub const ROWS: &[Row] = &[
    ("Services should be able to change the type from ClusterIP to ExternalName", types),
    (
        "Services should be able to change the type from ExternalName to ClusterIP, ExternalName to NodePort, NodePort to ExternalName",
        types,
    ),
    ("Services should be able to up and down services", up_and_down),
    ("Services should work after the service has been recreated", recreated),
    ("Services should implement service.kubernetes.io/service-proxy-name, service.kubernetes.io/headless", labels),
    ("Services should create endpoints for unready pods", unready),
    (
        "Services should fallback to terminating endpoints when there are no ready endpoints with internalTrafficPolicy=Cluster, externalTrafficPolicy=Cluster",
        terminating,
    ),
    (
        "Services should fallback to local terminating endpoints when there are no ready endpoints with internalTrafficPolicy=Local, externalTrafficPolicy=Local",
        terminating,
    ),
    ("Networking Granular Checks: Services should update endpoints: http, udp", endpoints_change),
];

const WEB: &str = "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]";

fn types(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    let nodes = at(NODE, node_port(n));
    let cluster = service("types", n, WEB);
    let name = "apiVersion: v1\nkind: Service\nmetadata: {name: types}\nspec: {type: ExternalName, externalName: real.default.svc.cluster.local}\n";
    let ports =
        format!("type: NodePort, selector: {{app: web}}, ports: [{{port: 80, targetPort: 8080, nodePort: {}}}]", node_port(n));
    let node = service("types", n, &ports);
    let real = w.number();
    w.put("real", &service("real", real, WEB));
    let lookup = |wanted: &str| {
        w.node.wait("the name follows the type", 5, |node| {
            let out = node.cli(&["exec", "c", "--", "nslookup", "types.default.svc.cluster.local"]);
            String::from_utf8_lossy(&out.stdout).contains(wanted)
        });
    };
    let own = format!("Address: {}", vip(n, 80)[0].ip());
    w.put("types", &cluster);
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    lookup(&own);
    w.put("types", name);
    w.hears(c, By::Tcp, vip(n, 80)[0], &["dropped"]);
    lookup("canonical name = real.default.svc.cluster.local");
    w.put("types", &cluster);
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    lookup(&own);
    w.put("types", name);
    lookup("canonical name = real.default.svc.cluster.local");
    w.put("types", &node);
    w.all_hear(w.outside(2), By::Tcp, nodes, &["a node", "b node"]);
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.put("types", name);
    w.all_hear(w.outside(2), By::Tcp, nodes, &["rejected"]);
    lookup("canonical name = real.default.svc.cluster.local");
    w.take("types");
    w.take("real");
}

fn up_and_down(w: &World) {
    let [one, two, three] = [w.number(), w.number(), w.number()];
    let c = w.pod("c").client();
    w.put("up1", &service("up1", one, WEB));
    w.put("up2", &service("up2", two, WEB));
    w.all_hear(c, By::Tcp, vip(one, 80), &["a kept", "b kept"]);
    w.all_hear(c, By::Tcp, vip(two, 80), &["a kept", "b kept"]);
    w.take("up1");
    w.all_hear(c, By::Tcp, vip(one, 80), &["dropped"]);
    w.all_hear(c, By::Tcp, vip(two, 80), &["a kept", "b kept"]);
    w.put("up3", &service("up3", three, WEB));
    w.all_hear(c, By::Tcp, vip(three, 80), &["a kept", "b kept"]);
    w.all_hear(c, By::Tcp, vip(two, 80), &["a kept", "b kept"]);
    w.take("up2");
    w.take("up3");
}

fn recreated(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    for _ in 0..2 {
        w.put("again", &service("again", n, WEB));
        w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
        w.take("again");
        w.hears(c, By::Tcp, vip(n, 80)[0], &["dropped"]);
    }
}

fn labels(w: &World) {
    let n = w.number();
    let c = w.pod("c").client();
    let plain = service("labelled", n, WEB);
    for label in ["service.kubernetes.io/headless: ''", "service.kubernetes.io/service-proxy-name: other"] {
        w.put("labelled", &plain);
        w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
        w.put("labelled", &plain.replace("{name: labelled}", &format!("{{name: labelled, labels: {{{label}}}}}")));
        w.hears(c, By::Tcp, vip(n, 80)[0], &["dropped"]);
    }
    w.put("labelled", &plain);
    w.all_hear(c, By::Tcp, vip(n, 80), &["a kept", "b kept"]);
    w.take("labelled");
}

fn unready(w: &World) {
    let [plain, early] = [w.number(), w.number()];
    let c = w.pod("c").client();
    let spec = |more: &str| format!("{more}selector: {{job: slow}}, ports: [{{port: 80, targetPort: 8080}}]");
    w.put("unready", &(service("plain", plain, &spec("")) + &service("early", early, &spec("publishNotReadyAddresses: true, "))));
    // Its init container runs until it is told.
    let init = ": pod-slow; while [ ! -e /dev/shm/go ]; do sleep 0.05; done";
    let yaml = crate::support::pod("slow", "Always", &[("i", init)], &[("c", STAY)], "  volumes: [{name: shm, emptyDir: {}}]\n");
    let yaml = yaml.replace("{name: slow}", "{name: slow, labels: {job: slow}}");
    w.put("pod-slow", &yaml.replace("name: i, ", "name: i, volumeMounts: [{name: shm, mountPath: /dev/shm}], "));
    let pod = w.enter_early("slow");
    w.all_hear(c, By::Tcp, vip(early, 80), &["slow kept"]);
    w.all_hear(c, By::Tcp, vip(plain, 80), &["rejected"]);
    w.node.ok(&["exec", "-c", "i", "slow", "--", "touch", "/dev/shm/go"]);
    w.all_hear(c, By::Tcp, vip(plain, 80), &["slow kept"]);
    w.all_hear(c, By::Tcp, vip(early, 80), &["slow kept"]);
    drop(pod);
    w.unmake("slow");
    w.take("unready");
}

fn terminating(w: &World) {
    let [cluster, local] = [w.number(), w.number()];
    let spec = |n: u16, policy: &str| {
        format!(
            "type: NodePort, internalTrafficPolicy: {policy}, externalTrafficPolicy: {policy}, selector: {{job: term}}, \
             ports: [{{port: 80, targetPort: 8080, nodePort: {}}}]",
            node_port(n)
        )
    };
    w.put("term", &(service("tc", cluster, &spec(cluster, "Cluster")) + &service("tl", local, &spec(local, "Local"))));
    let all = |server: &str| {
        for n in [cluster, local] {
            let kept = format!("{server} kept");
            let node = format!("{server} node");
            w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &[&kept]);
            w.all_hear(w.on_node(), By::Tcp, vip(n, 80), &[&node]);
            w.all_hear(w.outside(2), By::Tcp, at(NODE, node_port(n)), &[if n == local { &kept } else { &node }]);
        }
    };
    let one = w.make("term1", "job: term", LINGER, "");
    all("term1");
    w.unmake("term1");
    w.node.wait("the pod is ending", 5, |node| node.pod("term1").is_none_or(|p| !p["metadata"]["deletionTimestamp"].is_null()));
    let ends = Instant::now() + Duration::from_secs(5);
    // The only one there is, and it still serves.
    all("term1");
    // Somebody ready is there again: new connections go to that one alone.
    let two = w.make("term2", "job: term", STAY, "");
    assert!(Instant::now() < ends, "the second pod was not ready while the first one ended");
    all("term2");
    drop(one);
    w.node.wait_gone("term1");
    all("term2");
    drop(two);
    w.unmake("term2");
    w.node.wait_gone("term2");
    for n in [cluster, local] {
        w.all_hear(w.pod("c").client(), By::Tcp, vip(n, 80), &["rejected"]);
    }
    w.take("term");
}

fn endpoints_change(w: &World) {
    let n = w.number();
    let ports = "{name: t, port: 80, targetPort: 8080}, {name: u, port: 80, protocol: UDP, targetPort: 8080}";
    w.put("grows", &service("grows", n, &format!("selector: {{grows: here}}, ports: [{ports}]")));
    let from = w.pod("c").client();
    let both = |answers: &[&str]| {
        w.all_hear(from, By::Tcp, vip(n, 80), answers);
        w.all_hear(from, By::Udp, vip(n, 80), answers);
    };
    let _one = w.make("grow1", "grows: here", STAY, "");
    both(&["grow1 kept"]);
    let two = w.make("grow2", "grows: here", STAY, "");
    both(&["grow1 kept", "grow2 kept"]);
    // A label that goes takes the pod out of the Service; it runs on.
    w.put("grows", &service("grows", n, &format!("selector: {{grows: here, second: only}}, ports: [{ports}]")));
    both(&["rejected"]);
    w.put("grows", &service("grows", n, &format!("selector: {{grows: here}}, ports: [{ports}]")));
    both(&["grow1 kept", "grow2 kept"]);
    w.unmake("grow2");
    both(&["grow1 kept"]);
    drop(two);
    w.unmake("grow1");
    w.take("grows");
}
