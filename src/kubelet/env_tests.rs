//! Environments by example; the expansion table follows the cases of Kubernetes' own test.

use super::*;
use crate::api::yaml::{Limits, documents};

#[derive(Default)]
struct Objects {
    maps: BTreeMap<String, Data>,
    secrets: BTreeMap<String, Data>,
}

impl Contents for Objects {
    fn config_map(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.maps.get(name).filter(|_| namespace == "ns")
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.secrets.get(name).filter(|_| namespace == "ns")
    }
}

fn objects() -> Objects {
    let data = |pairs: &[(&str, &[u8])]| pairs.iter().map(|(k, v)| ((*k).to_owned(), v.to_vec())).collect();
    let mut objects = Objects::default();
    objects.maps.insert("m".into(), data(&[("A", b"map-a"), ("B", b"map-b"), ("bin", b"\xff")]));
    objects.secrets.insert("s".into(), data(&[("A", b"secret-a"), ("P", b"word")]));
    objects
}

fn resolved(container: &str) -> Result<Resolved, EnvError> {
    let text = format!(
        "metadata: {{name: p, namespace: ns, uid: u-1, labels: {{a/b: lab}}, annotations: {{x: note}}}}\nspec:\n  containers:\n  - {{name: other, resources: {{limits: {{cpu: 1500m}}}}}}\n  - {{name: c, {container}}}\n"
    );
    let (pod, _) = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap().read::<Pod>().unwrap();
    let facts = Facts {
        node_name: "node".into(),
        pod_ips: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        host_ips: vec!["192.0.2.1".parse().unwrap()],
        allocatable_milli_cpu: 3900,
        allocatable_memory: 1 << 30,
        allocatable_storage: 7,
        services: Vec::new(),
    };
    resolve(&pod, &pod.spec.containers[1], &facts, &objects())
}

fn env(container: &str) -> Vec<String> {
    resolved(container).unwrap().env.into_iter().map(|(k, v)| format!("{k}={v}")).collect()
}

#[test]
fn env_comes_after_env_from_and_a_later_name_wins() {
    let fields = "envFrom: [{configMapRef: {name: m}}, {prefix: S_, secretRef: {name: s}}, {secretRef: {name: none, optional: true}}], env: [{name: B, value: own}, {name: C, value: '$(A) $(S_P) $(B) $(later) $$(A)'}, {name: later, value: x}, {name: B, value: '$(B)2'}]";
    assert_eq!(env(fields), ["A=map-a", "B=own2", "C=map-a word own $(later) $(A)", "S_A=secret-a", "S_P=word", "later=x"]);
    assert_eq!(
        resolved(fields).unwrap().warnings,
        [
            "Keys [bin] from the EnvFrom configMap ns/m were skipped since they are considered invalid environment variable names or values."
        ]
    );
    assert!(!format!("{:?}", resolved(fields).unwrap()).contains("word"));
}

#[test]
fn values_come_from_fields_resources_and_keys() {
    let field = |path: &str| env(&format!("env: [{{name: V, valueFrom: {{fieldRef: {{fieldPath: \"{path}\"}}}}}}]")).remove(0);
    for (path, value) in [
        ("metadata.name", "p"),
        ("metadata.namespace", "ns"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['a/b']", "lab"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['x']", "note"),
        ("spec.nodeName", "node"),
        ("status.podIP", "10.0.0.2"),
        ("status.podIPs", "10.0.0.2,fd00::2"),
        ("status.hostIP", "192.0.2.1"),
    ] {
        assert_eq!(field(path), format!("V={value}"), "{path}");
    }
    let resource = |selector: &str| {
        let limits = "resources: {limits: {memory: 100Mi}, requests: {cpu: 250m}}";
        env(&format!("{limits}, env: [{{name: V, valueFrom: {{resourceFieldRef: {{{selector}}}}}}}]")).remove(0)
    };
    for (selector, value) in [
        ("resource: limits.cpu", "4"),
        ("resource: limits.cpu, divisor: 1m", "3900"),
        ("resource: limits.cpu, containerName: other", "2"),
        ("resource: requests.cpu, divisor: 1m", "250"),
        ("resource: requests.cpu", "1"),
        ("resource: limits.memory", "104857600"),
        ("resource: limits.memory, divisor: 1Mi", "100"),
        ("resource: requests.memory", "0"),
        ("resource: limits.ephemeral-storage, divisor: '0'", "7"),
    ] {
        assert_eq!(resource(selector), format!("V={value}"), "{selector}");
    }
    assert_eq!(env("env: [{name: V, valueFrom: {secretKeyRef: {name: s, key: P}}}]"), ["V=word"]);
    assert!(env("env: [{name: V, valueFrom: {secretKeyRef: {name: s, key: none, optional: true}}}]").is_empty());
    assert!(env("env: [{name: V, valueFrom: {configMapKeyRef: {name: none, key: k, optional: true}}}]").is_empty());
}

#[test]
fn what_is_missing_is_told_in_the_kubelets_words() {
    for (fields, words) in [
        ("env: [{name: V, valueFrom: {configMapKeyRef: {name: m, key: Z}}}]", "couldn't find key Z in ConfigMap ns/m"),
        ("env: [{name: V, valueFrom: {secretKeyRef: {name: s, key: Z}}}]", "couldn't find key Z in Secret ns/s"),
        ("env: [{name: V, valueFrom: {configMapKeyRef: {name: x, key: Z}}}]", "configmap \"x\" not found"),
        ("env: [{name: V, valueFrom: {secretKeyRef: {name: x, key: Z}}}]", "secret \"x\" not found"),
        ("envFrom: [{configMapRef: {name: x}}]", "configmap \"x\" not found"),
        ("envFrom: [{secretRef: {name: x}}]", "secret \"x\" not found"),
        (
            "env: [{name: V, valueFrom: {configMapKeyRef: {name: m, key: bin}}}]",
            "key bin in ConfigMap ns/m is no UTF-8 text without NUL bytes, so it cannot be an environment variable: mount it as a file",
        ),
    ] {
        assert_eq!(resolved(fields).unwrap_err().to_string(), words);
    }
}

#[test]
fn command_and_args_are_expanded_too() {
    let r = resolved("env: [{name: A, value: x}], command: [sh, '$(A)$(B)'], args: ['$$(A)', '$(A']").unwrap();
    assert_eq!((r.command, r.args), (vec!["sh".into(), "x$(B)".into()], vec!["$(A)".into(), "$(A".into()]));
}

#[test]
fn expansion_is_that_of_kubernetes() {
    let env = BTreeMap::from([("VAR_A".into(), "A".into()), ("VAR_B".into(), "B".into()), ("VAR_EMPTY".into(), String::new())]);
    for (input, wanted) in [
        ("$(VAR_A)", "A"),
        ("___$(VAR_B)___", "___B___"),
        ("$(VAR_A)-$(VAR_A)", "A-A"),
        ("$(VAR_C)", "$(VAR_C)"),
        ("x$(VAR_EMPTY)x", "xx"),
        ("$$(VAR_A)_$(VAR_A)", "$(VAR_A)_A"),
        ("$$$(VAR_A)", "$A"),
        ("$$$$(VAR_A)", "$$(VAR_A)"),
        ("$VAR_A", "$VAR_A"),
        ("foo$(VAR_A", "foo$(VAR_A"),
        ("$((VAR_A))", "$((VAR_A))"),
        ("$()", "$()"),
        ("$", "$"),
        ("a$$", "a$"),
        ("$é$(VAR_A)", "$éA"),
        ("\\$(VAR_A)", "\\A"),
        ("$(VAR_$(VAR_A))", "$(VAR_$(VAR_A))"),
    ] {
        assert_eq!(expand(input, &env), wanted, "{input}");
    }
}

#[test]
fn services_come_first_and_anything_else_goes_before_them() {
    let text = "metadata: {name: p}\nspec:\n  containers:\n  - {name: c, command: [$(WEB_SERVICE_HOST)], env: [{name: URL, value: 'http://$(WEB_SERVICE_HOST)'}, {name: WEB_SERVICE_PORT, value: '1'}]}\n";
    let (pod, _) = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap().read::<Pod>().unwrap();
    let services = [("WEB_SERVICE_HOST", "10.96.0.9"), ("WEB_SERVICE_PORT", "80")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    let facts = Facts { services: services.to_vec(), ..Facts::default() };
    let resolved = resolve(&pod, &pod.spec.containers[0], &facts, &objects()).unwrap();
    let env: Vec<String> = resolved.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(env, ["URL=http://10.96.0.9", "WEB_SERVICE_HOST=10.96.0.9", "WEB_SERVICE_PORT=1"]);
    assert_eq!(resolved.command, ["10.96.0.9"]);
    // Seven variables each of thousands of Services are more than execve takes.
    let many = (0..70_000).map(|n| (format!("SERVICE_{n}_PORT_80_TCP_ADDR"), "10.96.100.200".to_owned()));
    let facts = Facts { services: many.collect(), ..Facts::default() };
    let error = resolve(&pod, &pod.spec.containers[0], &facts, &objects()).unwrap_err();
    assert!(error.to_string().contains("70000 of its variables are of Services: set enableServiceLinks: false"), "{error}");
}
