//! Services and policies of the manifests from look to look, and over a restart.

use super::super::model::NetworkObjects;
use super::super::network::{Keep, MEMORY_MAX, recall};
use super::*;

const T: &str = "2026-11-30T10:00:00Z";

fn found<const N: usize>(files: [(&str, &str); N]) -> BTreeMap<String, Found> {
    files.into_iter().map(|(name, text)| (name.to_owned(), Found::Text(text.as_bytes().to_vec()))).collect()
}

/// A source, and what its updates say together.
#[derive(Default)]
struct Told {
    desired: Desired,
    network: NetworkObjects,
}

impl Told {
    fn look(&mut self, look: Look) -> SourceUpdate {
        let update = self.desired.look(look, T);
        update.network.iter().cloned().for_each(|change| self.network.take(change));
        update
    }
    fn ports(&self) -> Vec<String> {
        self.network.services.iter().map(|((ns, name), s)| format!("{ns}/{name}:{}", s.spec.ports[0].port)).collect()
    }
}

fn desired() -> Told {
    Told { desired: Desired::new("node".to_owned(), Vec::new()), ..Told::default() }
}

fn service(name: &str, port: i32) -> String {
    format!("apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  ports: [{{port: {port}}}]\n")
}

fn policy(name: &str, more: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: prod}}\nspec:\n  podSelector: {{}}\n{more}"
    )
}

fn messages(update: &SourceUpdate) -> Vec<String> {
    update.problems.iter().map(|p| format!("{p}{}", if p.kept { " [kept]" } else { "" })).collect()
}

#[test]
fn all_four_kinds_are_read_and_the_rest_of_them_is_told() {
    let text = format!(
        "{}---\n{}---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: s, labels: {{kubernetes.io/service-name: web}}}}\naddressType: IPv4\nendpoints: [{{addresses: [10.0.0.1]}}]\nports: [{{port: 80, appProtocol: http}}]\n---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: prod, labels: {{tier: gold}}}}\nspec: {{finalizers: [kubernetes]}}\n",
        service("web", 80) + "  loadBalancerIP: 10.0.0.1\n  selectr: {a: b}\nstatus: {conditions: []}\n",
        policy("deny", "")
    );
    let mut d = desired();
    let update = d.look(Ok(found([("n.yaml", &text)])));
    let network = &d.network;
    assert_eq!(d.ports(), ["default/web:80"]);
    assert!(network.policies.contains_key(&("prod".into(), "deny".into())));
    assert_eq!(network.slices[&("default".into(), "s".into())].service(), Some("web"));
    assert_eq!(network.namespaces["prod"].metadata.labels["tier"], "gold");
    assert_eq!(
        messages(&update),
        [
            "n.yaml document 1 line 6:3, Service default/web, spec.loadBalancerIP: not honoured by this version",
            "n.yaml document 1 line 7:3, Service default/web, spec.selectr: unknown field, ignored"
        ]
    );
    // What has not changed is not told again, also where its file is another one.
    let config = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n";
    assert_eq!(d.look(Ok(found([("n.yaml", &text), ("c.yaml", config)]))).network, []);
    assert_eq!(d.look(Ok(found([("moved.yaml", &text), ("c.yaml", config)]))).network, []);
    let more = text.replace("port: 80}]\n", "port: 81}]\n");
    let update = d.look(Ok(found([("moved.yaml", &more), ("c.yaml", config)])));
    assert_eq!(update.network.iter().map(|c| c.key.named()).collect::<Vec<_>>(), ["default/web"]);
}

#[test]
fn a_wrong_object_keeps_its_last_good_version_and_is_named() {
    let mut d = desired();
    let good = format!("{}---\n{}", service("web", 80), policy("deny", ""));
    d.look(Ok(found([("a.yaml", &good)])));
    let bad = format!("{}---\n{}", service("web", 99_999), policy("deny", "  policyTypes: [Ingress]\n  ingres: []\n"));
    let update = d.look(Ok(found([("a.yaml", &bad)])));
    assert_eq!(d.ports(), ["default/web:80"]);
    assert!(d.network.policies[&("prod".into(), "deny".into())].spec.policy_types.is_empty());
    assert_eq!(
        messages(&update),
        [
            "a.yaml document 1 line 5:12, Service default/web, spec.ports[0].port: Invalid value: \"99999\": must be between 1 and 65535, inclusive [kept]",
            "a.yaml document 2 line 13:3, NetworkPolicy prod/deny, spec.ingres: unknown field: without it this would mean something else, so it is refused: correct or remove it [kept]"
        ]
    );
    for look in [Ok(found([("a.yaml", "kind: [")])), Err("gone".to_owned())] {
        assert_eq!(d.look(look).network, []);
    }
    let wrong = service("web", 80).replace("apiVersion: v1", "apiVersion: v1beta1")
        + "---\n"
        + &policy("x", "").replace("networking.k8s.io/v1", "extensions/v1beta1");
    let update = desired().look(Ok(found([("a.yaml", &wrong)])));
    assert_eq!(
        messages(&update),
        [
            "a.yaml document 1 line 1:1, apiVersion: no kind \"Service\" is registered for version \"v1beta1\": write apiVersion: v1",
            "a.yaml document 2 line 7:1, apiVersion: no kind \"NetworkPolicy\" is registered for version \"extensions/v1beta1\": write apiVersion: networking.k8s.io/v1"
        ]
    );
    let twice = d.look(Ok(found([("a.yaml", &service("web", 80)), ("b.yaml", &service("web", 81))])));
    assert_eq!(d.ports(), ["default/web:80"]);
    assert!(
        messages(&twice)[0].contains(
            "b.yaml document 1 line 1:1, Service default/web, metadata.name: service default/web is already defined in a.yaml"
        ),
        "{:?}",
        messages(&twice)
    );
    let gone = d.look(Ok(BTreeMap::new()));
    assert!(gone.complete && d.network == NetworkObjects::default());
}

#[test]
fn after_a_restart_a_broken_file_still_has_its_services_and_policies() {
    let mut d = desired();
    let text = format!("{}---\n{}", service("web", 80), policy("deny", ""));
    d.look(Ok(found([("a.yaml", &text)])));
    let memory = d.desired.remember(Keep::All).unwrap();
    let again = || Told { desired: desired().desired.recalling(recall(&memory).unwrap()), ..Told::default() };
    for name in ["a.yaml", "renamed.yaml"] {
        let mut next = again();
        let update = next.look(Ok(found([(name, "kind: [")])));
        assert_eq!(next.network, d.network, "{name}");
        assert!(update.complete && update.problems[0].kept);
    }
    let mut unseen = again();
    assert!(!unseen.look(Err("gone".to_owned())).complete && unseen.network == d.network);
    assert_eq!(unseen.look(Err("gone".to_owned())).network, []);
    // Of a file that is whole what stands in it counts, also what has left it.
    for told in [&mut again(), &mut unseen] {
        told.look(Ok(found([("a.yaml", &service("other", 1))])));
        assert_eq!(told.ports(), ["default/other:1"]);
        assert_eq!(told.network.policies.len(), 0);
    }
    let mut empty = again();
    empty.look(Ok(BTreeMap::new()));
    assert_eq!(empty.network, NetworkObjects::default());
    let mut same = again();
    same.look(Ok(found([("a.yaml", &text)])));
    assert_eq!(same.network, d.network);
    assert!(recall(b"[{").is_err());
}

#[test]
fn of_more_than_is_remembered_policies_still_are() {
    let mut d = desired();
    let mut text =
        format!("{}---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: prod, labels: {{tier: gold}}}}\n", policy("deny", ""));
    let note = "x".repeat(200_000);
    for n in 0..MEMORY_MAX / 200_000 + 1 {
        let service = service(&format!("s{n}"), 80);
        text += &format!("---\n{}", service.replace("{name:", &format!("{{annotations: {{a: {note}}}, name:")));
    }
    let files: Vec<String> = text.split("---\n").collect::<Vec<_>>().chunks(5).map(|some| some.join("---\n")).collect();
    let look = files.iter().enumerate().map(|(at, text)| (format!("{at}.yaml"), Found::Text(text.clone().into_bytes())));
    d.look(Ok(look.collect()));
    assert!(d.network.services.len() > 80 && d.desired.remember(Keep::All).is_none());
    let memory = d.desired.remember(Keep::Policies).unwrap();
    let mut next = Told { desired: desired().desired.recalling(recall(&memory).unwrap()), ..Told::default() };
    next.look(Ok(found([("0.yaml", "kind: [")])));
    assert_eq!((&next.network.policies, &next.network.namespaces), (&d.network.policies, &d.network.namespaces));
    assert!(next.network.services.is_empty() && !next.network.policies.is_empty());
}
