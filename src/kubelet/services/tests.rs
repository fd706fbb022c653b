//! From manifests and pods to what is served, and what pods are told of it.

use super::*;
use crate::kubelet::model::{AttemptState, ContainerState, Node, Phase, PodState};
use crate::kubelet::source::SourceUpdate;
use crate::store::ids::PodUid;

fn objects(text: &str) -> Vec<NetworkChange> {
    let (sender, updates) = std::sync::mpsc::channel::<SourceUpdate>();
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("m");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("all.yaml"), text).unwrap();
    let config = crate::kubelet::source::SourceConfig {
        dir,
        node: "here".into(),
        memory: root.path().join("memory"),
        boot_id: "boot".into(),
        known: Vec::new(),
    };
    let _source = crate::kubelet::source::Source::start(config, move |update| sender.send(update).is_ok()).unwrap();
    let update = updates.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
    assert_eq!(update.problems, []);
    update.network
}

fn alone(ranges: &[&str]) -> Services {
    let node = NodeFacts { name: "here".into(), addresses: vec!["192.0.2.10".parse().unwrap()], ..NodeFacts::default() };
    Services::new(node, ranges.iter().map(|r| r.parse().unwrap()).collect(), Memory::default())
}

/// A pod as the planner sees it; `running` of its two containers run.
fn world(pods: &[(&str, usize)]) -> (Desired, Observed) {
    let node = Node { name: "here".into(), ips: vec!["192.0.2.10".parse().unwrap()], ..Node::default() };
    let mut observed = Observed::default();
    for (index, (name, running)) in pods.iter().enumerate() {
        let spec = format!(
            "{{\"metadata\":{{\"name\":\"{name}\",\"namespace\":\"default\",\"labels\":{{\"app\":\"web\"}}}},\"spec\":{{\"containers\":[{{\"name\":\"a\",\"ports\":[{{\"name\":\"http\",\"containerPort\":8080}}]}},{{\"name\":\"b\"}}]}}}}"
        );
        let attempt = |number: usize| AttemptState {
            number: 0,
            id: crate::store::ids::ContainerId::parse(&format!("{number:064x}")).unwrap(),
            image: String::new(),
            at: 0,
            at_boot: 0,
            sandbox: 1,
            backoff: 0,
            phase: if number < *running { Phase::Running { started_at: 1 } } else { Phase::Created },
            signalled: None,
            killed: None,
        };
        let containers = ["a", "b"]
            .iter()
            .enumerate()
            .map(|(n, c)| ((*c).to_owned(), ContainerState { attempts: vec![attempt(n)], ..Default::default() }));
        let state = PodState {
            namespace: "default".into(),
            name: (*name).into(),
            pod: Some(Arc::new(serde_json::from_str(&spec).unwrap())),
            sandbox: Sandbox::Up {
                created_at: 1,
                attached: true,
                addresses: vec![format!("10.88.0.{}", index + 2).parse().unwrap()],
            },
            containers: containers.collect(),
            ..PodState::default()
        };
        observed.pods.insert(PodUid::parse(&format!("{index:032x}")).unwrap(), state);
    }
    (Desired { node, ..Desired::default() }, observed)
}

const WEB: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.9, selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}\n";

fn endpoints(services: &Services) -> Vec<String> {
    services.views().iter().flat_map(|v| &v.ports).flat_map(|p| p.endpoints.clone()).collect()
}

#[test]
fn services_follow_the_pods_that_are_ready() {
    let mut services = alone(&["10.96.0.0/16"]);
    let memory = services.objects(objects(WEB)).unwrap();
    assert_eq!(memory.cluster_ips["default/web"], ["10.96.0.9".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(services.changes().len(), 1);
    let tell = |services: &mut Services, pods: &[(&str, usize)]| {
        let (desired, observed) = world(pods);
        services.pods(super::pods(&desired, &observed));
    };
    tell(&mut services, &[("a", 2), ("b", 1)]);
    assert_eq!(endpoints(&services), ["10.88.0.2:8080"]);
    assert_eq!(services.changes().len(), 1);
    tell(&mut services, &[("a", 2), ("b", 1)]);
    assert_eq!(services.changes(), []);
    tell(&mut services, &[("a", 2), ("b", 2)]);
    assert_eq!(endpoints(&services), ["10.88.0.2:8080", "10.88.0.3:8080"]);
    // One ends: it takes no new connections while another is there.
    let (desired, mut observed) = world(&[("a", 2), ("b", 2)]);
    let ending = crate::kubelet::model::Ending { why: crate::kubelet::model::EndReason::Deleted, since: 0, at: 0, grace: 30 };
    observed.pods.values_mut().next().unwrap().ending = Some(ending);
    services.pods(super::pods(&desired, &observed));
    assert_eq!(endpoints(&services), ["10.88.0.3:8080"]);
    // The last one that ends is better than nobody.
    observed.pods.values_mut().for_each(|p| p.ending = Some(ending));
    services.pods(super::pods(&desired, &observed));
    assert_eq!(endpoints(&services), ["10.88.0.2:8080", "10.88.0.3:8080"]);
    observed.pods.values_mut().for_each(|p| p.sandbox = Sandbox::Dead);
    services.pods(super::pods(&desired, &observed));
    assert!(endpoints(&services).is_empty() && services.made.is_empty());
    // The Service goes, and nothing of it stays.
    services.changes();
    let gone = objects(WEB).into_iter().map(|change| NetworkChange { object: None, ..change });
    assert_eq!(services.objects(gone.collect()), Some(Memory::default()));
    assert!(services.changes()[0].after.is_empty() && services.views().is_empty());
}

#[test]
fn without_selector_the_slices_of_the_manifests_count() {
    let mut services = alone(&["10.96.0.0/16", "fd96::/112"]);
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: db}\nspec: {ports: [{port: 5432}]}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: names}\nspec: {clusterIP: None, ports: [{name: p, port: 1}]}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: db-1, labels: {kubernetes.io/service-name: db}}\naddressType: IPv4\nendpoints: [{addresses: [198.51.100.7]}]\nports: [{port: 5433}]\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: n-1, labels: {kubernetes.io/service-name: names}}\naddressType: IPv4\nendpoints: [{addresses: [198.51.100.8]}, {addresses: [198.51.100.9], conditions: {ready: false}}]\nports: [{name: p, port: 2}]\n";
    services.objects(objects(text));
    let views = services.views();
    assert_eq!(endpoints(&services), ["198.51.100.7:5433", "198.51.100.8:2"]);
    assert!(views[0].cluster_ips[0].starts_with("10.96.") && views[1].cluster_ips == ["None"] && views[1].headless);
    assert_eq!(services.ports().count(), 1);
    services.objects(objects(&text.replace("198.51.100.7", "198.51.100.6")));
    assert_eq!(endpoints(&services), ["198.51.100.6:5433", "198.51.100.8:2"]);
    // What cannot be served is told with the Service.
    let mut none = alone(&[]);
    none.objects(objects(WEB));
    assert!(
        none.views()[0].skipped[0].starts_with("Service default/web, spec.clusterIP: 10.96.0.9 is in no range")
            || none.views()[0].skipped[0].contains("give --service-cidr"),
        "{:?}",
        none.views()
    );
}

#[test]
fn pods_find_services_in_their_environment() {
    let mut services = alone(&["10.96.0.0/16", "fd96::/112"]);
    let service = |namespace: &str, name: &str, spec: &str| {
        format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {{{spec}}}\n---\n")
    };
    let text = [
        service(
            "default",
            "web-ui",
            "clusterIP: 10.96.0.9, ports: [{name: http-alt, port: 80}, {name: dns, port: 53, protocol: UDP}]",
        ),
        service("default", "six", "clusterIP: 'fd96::9', ports: [{port: 1}]"),
        service("default", "none", "clusterIP: None, ports: [{port: 1}]"),
        service("default", "kubernetes", "clusterIP: 10.96.0.1, ports: [{name: https, port: 443}]"),
        service("other", "far", "clusterIP: 10.96.0.8, ports: [{port: 1}]"),
    ]
    .concat();
    services.objects(objects(&text));
    let env = |pod: &str| env::of(&serde_json::from_str(pod).unwrap(), services.services());
    let lines = |pod: &str| env(pod).into_iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>();
    assert_eq!(
        lines(r#"{"metadata":{"name":"p","namespace":"default"},"spec":{"containers":[]}}"#),
        [
            "KUBERNETES_SERVICE_HOST=10.96.0.1",
            "KUBERNETES_SERVICE_PORT=443",
            "KUBERNETES_SERVICE_PORT_HTTPS=443",
            "KUBERNETES_PORT=tcp://10.96.0.1:443",
            "KUBERNETES_PORT_443_TCP=tcp://10.96.0.1:443",
            "KUBERNETES_PORT_443_TCP_PROTO=tcp",
            "KUBERNETES_PORT_443_TCP_PORT=443",
            "KUBERNETES_PORT_443_TCP_ADDR=10.96.0.1",
            "SIX_SERVICE_HOST=fd96::9",
            "SIX_SERVICE_PORT=1",
            "SIX_PORT=tcp://[fd96::9]:1",
            "SIX_PORT_1_TCP=tcp://[fd96::9]:1",
            "SIX_PORT_1_TCP_PROTO=tcp",
            "SIX_PORT_1_TCP_PORT=1",
            "SIX_PORT_1_TCP_ADDR=fd96::9",
            "WEB_UI_SERVICE_HOST=10.96.0.9",
            "WEB_UI_SERVICE_PORT=80",
            "WEB_UI_SERVICE_PORT_HTTP_ALT=80",
            "WEB_UI_SERVICE_PORT_DNS=53",
            "WEB_UI_PORT=tcp://10.96.0.9:80",
            "WEB_UI_PORT_80_TCP=tcp://10.96.0.9:80",
            "WEB_UI_PORT_80_TCP_PROTO=tcp",
            "WEB_UI_PORT_80_TCP_PORT=80",
            "WEB_UI_PORT_80_TCP_ADDR=10.96.0.9",
            "WEB_UI_PORT_53_UDP=udp://10.96.0.9:53",
            "WEB_UI_PORT_53_UDP_PROTO=udp",
            "WEB_UI_PORT_53_UDP_PORT=53",
            "WEB_UI_PORT_53_UDP_ADDR=10.96.0.9",
        ]
    );
    let names =
        |pod: &str| env(pod).into_iter().filter(|(k, _)| k.ends_with("_SERVICE_HOST")).map(|(k, _)| k).collect::<Vec<_>>();
    assert_eq!(names(r#"{"metadata":{"namespace":"other"}}"#), ["FAR_SERVICE_HOST", "KUBERNETES_SERVICE_HOST"]);
    assert_eq!(names(r#"{"metadata":{"namespace":"default"},"spec":{"enableServiceLinks":false}}"#), ["KUBERNETES_SERVICE_HOST"]);
    // No such Service, no such variable.
    let mut bare = alone(&["10.96.0.0/16"]);
    bare.objects(objects(WEB));
    assert_eq!(env::of(&serde_json::from_str(r#"{"metadata":{"namespace":"other"}}"#).unwrap(), bare.services()), []);
}
