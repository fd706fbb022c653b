//! Sentences about what is wanted after one look follows another.

use super::*;

const T0: &str = "2026-11-30T10:00:00Z";
const T1: &str = "2026-11-30T11:00:00Z";

fn pod(name: &str, image: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: main\n    image: {image}\n")
}

fn found<const N: usize>(files: [(&str, &str); N]) -> BTreeMap<String, Found> {
    files.into_iter().map(|(name, text)| (name.to_owned(), Found::Text(text.as_bytes().to_vec()))).collect()
}

fn desired() -> Desired {
    Desired::new("node".to_owned(), Vec::new())
}

fn images(update: &SourceUpdate) -> Vec<(&str, &str, &str)> {
    update.pods.iter().map(|p| (&*p.pod.metadata.name, &*p.pod.spec.containers[0].image, &*p.origin.file)).collect()
}

fn messages(update: &SourceUpdate) -> Vec<String> {
    update.problems.iter().map(|p| format!("{p}{}", if p.kept { " [kept]" } else { "" })).collect()
}

#[test]
fn a_broken_file_keeps_its_last_good_pod_until_it_is_mended_or_removed() {
    let mut d = desired();
    let one = d.look(Ok(found([("a.yaml", &pod("web", "one"))])), T0);
    assert!(one.complete && one.problems.is_empty());
    let half = d.look(Ok(found([("a.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: web\n")])), T1);
    assert_eq!(images(&half), [("web", "one", "a.yaml")]);
    assert_eq!(half.pods[0].uid, one.pods[0].uid);
    assert!(half.complete && half.problems[0].kept && half.problems[0].line == 4, "{:?}", messages(&half));
    let invalid = d.look(Ok(found([("a.yaml", &pod("web", "''"))])), T1);
    assert_eq!(images(&invalid), [("web", "one", "a.yaml")]);
    assert_eq!(
        messages(&invalid),
        ["a.yaml document 1 line 8:5, pod default/web, spec.containers[0].image: Required value: name the image to run [kept]"]
    );
    let empty = d.look(Ok(found([("a.yaml", "")])), T1);
    assert_eq!(images(&empty), [("web", "one", "a.yaml")]);
    let busy = BTreeMap::from([("a.yaml".to_owned(), Found::Busy)]);
    assert_eq!(images(&d.look(Ok(busy), T1)), [("web", "one", "a.yaml")]);
    let mended = d.look(Ok(found([("a.yaml", &pod("web", "two"))])), T1);
    assert_eq!(images(&mended), [("web", "two", "a.yaml")]);
    assert!(mended.problems.is_empty() && mended.pods[0].uid != one.pods[0].uid);
    let gone = d.look(Ok(BTreeMap::new()), T1);
    assert!(gone.complete && gone.pods.is_empty() && gone.problems.is_empty());
}

#[test]
fn one_bad_document_holds_up_only_itself() {
    let mut d = desired();
    let good = format!("{}---\n{}", pod("a", "one"), pod("b", "one"));
    d.look(Ok(found([("f.yaml", &good)])), T0);
    let bad = format!(
        "{}---\n{}",
        pod("a", "two"),
        pod("b", "two").replace("image: two", "image: two\n    ports: [{containerPort: 99999}]")
    );
    let update = d.look(Ok(found([("f.yaml", &bad)])), T0);
    assert_eq!(images(&update), [("a", "two", "f.yaml"), ("b", "one", "f.yaml")]);
    assert_eq!(
        messages(&update),
        [
            "f.yaml document 2 line 18:29, pod default/b, spec.containers[0].ports[0].containerPort: integer `99999` does not fit u16 [kept]"
        ]
    );
    // A document that nobody can name may be any of those that stood there.
    let nameless = format!("{}---\nkind: Pod\n", pod("a", "two"));
    let update = d.look(Ok(found([("f.yaml", &nameless)])), T0);
    assert_eq!(images(&update), [("a", "two", "f.yaml"), ("b", "one", "f.yaml")]);
    let update = d.look(Ok(found([("f.yaml", &pod("a", "two"))])), T0);
    assert_eq!(images(&update), [("a", "two", "f.yaml")]);
}

#[test]
fn of_two_files_that_claim_a_name_the_running_one_stays_else_the_first() {
    let mut d = desired();
    let (one, two) = (pod("web", "one"), pod("web", "two"));
    let both = d.look(Ok(found([("a.yaml", &one), ("b.yaml", &two)])), T0);
    assert_eq!(images(&both), [("web", "one", "a.yaml")]);
    assert_eq!(
        messages(&both),
        [
            "b.yaml document 1 line 1:1, pod default/web, metadata.name: pod default/web is already defined in a.yaml (document 1, line 1), which counts: remove one of the two or rename this one"
        ]
    );
    // A new file that sorts first does not push the running pod out.
    let third = d.look(Ok(found([("0.yaml", &two), ("a.yaml", &one), ("b.yaml", &two)])), T0);
    assert_eq!(images(&third), [("web", "one", "a.yaml")]);
    assert_eq!(third.problems.len(), 2);
    // The holder's file goes: the first of the others.
    let next = d.look(Ok(found([("0.yaml", &two), ("b.yaml", &two)])), T0);
    assert_eq!(images(&next), [("web", "two", "0.yaml")]);
    // And where another file holds the same spec the instance goes on, whatever the order.
    let copy = d.look(Ok(found([("00.yaml", &one), ("b.yaml", &two)])), T0);
    assert_eq!(images(&copy), [("web", "two", "b.yaml")]);
    assert_eq!(copy.pods[0].uid, next.pods[0].uid);
}

#[test]
fn renaming_moving_and_rewriting_in_another_form_keep_the_instance() {
    let mut d = desired();
    let first = d.look(Ok(found([("a.yaml", &pod("web", "one"))])), T0);
    let json = r#"{"kind":"Pod","apiVersion":"v1","spec":{"containers":[{"image":"one","name":"main"}]},"metadata":{"labels":{"new":"label"},"namespace":"default","name":"web","uid":"from-elsewhere"},"status":{"phase":"Running"}}"#;
    let second = d.look(Ok(found([("z.json", json)])), T1);
    assert_eq!(first.pods[0].uid, second.pods[0].uid);
    assert_eq!(second.pods[0].pod.metadata.labels["new"], "label");
    // Since when it is wanted is remembered too, also over a restart of the agent.
    assert_eq!(second.pods[0].pod.metadata.creation_timestamp.as_deref(), Some(T0));
    let restored = crate::kubelet::source::restore(&second.pods[0].uid, &second.pods[0].raw).unwrap();
    assert_eq!((&restored.pod, &restored.origin), (&second.pods[0].pod, &second.pods[0].origin));
    let mut d = Desired::new("node".to_owned(), vec![restored]);
    let third = d.look(Ok(found([("z.json", json)])), T1);
    assert_eq!(third.pods, second.pods);
    // Another node, another instance.
    let other = Desired::new("other".to_owned(), Vec::new()).look(Ok(found([("z.json", json)])), T1);
    assert_ne!(other.pods[0].uid, third.pods[0].uid);
}

#[test]
fn a_directory_that_cannot_be_trusted_ends_nothing() {
    let mut d = desired();
    let good = d.look(Ok(found([("a.yaml", &pod("web", "one"))])), T0);
    let gone = d.look(Err("/m is gone".to_owned()), T1);
    assert!(!gone.complete);
    assert_eq!(gone.pods, good.pods);
    assert_eq!(messages(&gone), ["manifests directory: /m is gone [kept]"]);
    assert!(d.look(Ok(found([("a.yaml", &pod("web", "one"))])), T1).problems.is_empty());
    // After a restart what the store has is all that is known, and it is told.
    let mut d = Desired::new("node".to_owned(), good.pods.clone());
    let unknown = d.look(Err("/m is gone".to_owned()), T1);
    assert!(!unknown.complete);
    assert_eq!(unknown.pods, good.pods);
    assert!(d.look(Ok(BTreeMap::new()), T1).pods.is_empty());
}

#[test]
fn after_a_restart_a_broken_file_still_keeps_its_pod() {
    let stored = desired().look(Ok(found([("a.yaml", &pod("web", "one"))])), T0).pods;
    for name in ["a.yaml", "renamed.yaml"] {
        let mut d = Desired::new("node".to_owned(), stored.clone());
        let update = d.look(Ok(found([(name, "kind: [")])), T1);
        assert_eq!(update.pods, stored);
        assert!(update.complete && update.problems[0].kept);
        assert!(d.look(Ok(BTreeMap::new()), T1).pods.is_empty());
    }
    // ConfigMaps that stand before the break are there for it.
    let half = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {k: v}\n---\nkind: [";
    let update = Desired::new("node".to_owned(), stored.clone()).look(Ok(found([("a.yaml", half)])), T1);
    use crate::volumes::model::Contents as _;
    assert!(update.configs.config_map("default", "c").is_some() && update.pods == stored);
    // But a broken file beside the pod's own, good one keeps nothing that was removed.
    let mut d = Desired::new("node".to_owned(), stored);
    let update = d.look(Ok(found([("a.yaml", &pod("other", "one")), ("b.yaml", "kind: [")])), T1);
    assert_eq!(images(&update), [("other", "one", "a.yaml")]);
    assert!(!update.problems[0].kept);
    // The same while we run: a file renamed and broken at once.
    let mut d = desired();
    d.look(Ok(found([("a.yaml", &pod("web", "one"))])), T0);
    assert_eq!(images(&d.look(Ok(found([("b.yaml", "kind: [")])), T1)), [("web", "one", "a.yaml")]);
}

#[test]
fn lists_config_maps_and_secrets_are_read_and_other_kinds_named() {
    let list = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: ConfigMap\n  metadata: {name: c}\n  data: {a: '1'}\n  binaryData: {b: AAEC}\n- apiVersion: v1\n  kind: Secret\n  metadata: {name: s, namespace: other}\n  data: {u: dXNlcg==, p: b2xk}\n  stringData: {p: new}\n- apiVersion: apps/v1\n  kind: Deployment\n  metadata: {name: d}\n- apiVersion: v1\n  kind: Pod\n  metadata: {name: x}\n  spec: {containers: [{name: Bad_Name, image: i}]}\n";
    let pods = "apiVersion: v1\nkind: PodList\nitems:\n- metadata: {name: listed}\n  spec: {containers: [{name: c, image: i}]}\n";
    let mut d = desired();
    let update = d.look(Ok(found([("l.yaml", list), ("p.yaml", pods), ("x.yaml", "apiVersion: v1\nkind: Pood\n")])), T0);
    use crate::volumes::model::Contents as _;
    let map = update.configs.config_map("default", "c").unwrap();
    assert_eq!((map["a"].as_slice(), map["b"].as_slice()), (&b"1"[..], &[0u8, 1, 2][..]));
    let secret = update.configs.secret("other", "s").unwrap();
    assert_eq!((secret["u"].as_slice(), secret["p"].as_slice()), (&b"user"[..], &b"new"[..]));
    assert_eq!(update.configs.secret("default", "s"), None);
    assert_eq!(images(&update), [("listed", "i", "p.yaml")]);
    assert_eq!(d.others().into_iter().collect::<Vec<_>>(), [("apps/v1/Deployment", "l.yaml")]);
    let told = messages(&update);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told[0].starts_with(
            "l.yaml document 1 line 20:24, pod default/x, items[3].spec.containers[0].name: Invalid value: \"Bad_Name\""
        ),
        "{told:?}"
    );
    assert!(told[1].starts_with("x.yaml document 1 line 2:1, kind: unknown kind \"Pood\""), "{told:?}");
    assert!(!format!("{update:?}").contains("new"), "no secret is printed");
}

#[test]
fn fields_without_effect_are_named_and_dangerous_ones_refuse_the_pod() {
    let text = pod("web", "one") + "    livenessProbe: {exec: {command: [x]}}\n    imagee: two\n  tolerations: []\n";
    let update = desired().look(Ok(found([("a.yaml", &text)])), T0);
    let warned: Vec<_> = update.pods[0].warnings.iter().map(|w| format!("{}:{} {}", w.field, w.line, w.message)).collect();
    assert_eq!(
        warned,
        [
            "spec.containers[0].livenessProbe:9 not honoured by this version",
            "spec.containers[0].imagee:10 unknown field, ignored",
            "spec.tolerations:11 not honoured by this version"
        ]
    );
    let text = pod("web", "one") + "  volumes: [{name: v, persistentVolumeClaim: {claimName: c}}]\n";
    let update = desired().look(Ok(found([("a.yaml", &text)])), T0);
    assert!(update.pods.is_empty());
    assert!(messages(&update)[0].contains("spec.volumes[0].persistentVolumeClaim: not supported by this version: remove it"));
}
