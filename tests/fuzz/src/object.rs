//! Manifests: text → tree → typed object → validated, defaulted pod → OCI spec.

use std::path::Path;

use coracle::api::pod::Pod;
use coracle::api::quantity::Quantity;
use coracle::api::time::WallTime;
use coracle::api::yaml::{self, Limits};
use coracle::images::ImageConfig;
use coracle::kubelet::qos::{self, NodeCapacity, QosClass};
use coracle::kubelet::source::object::{self, Body, Contents, Reader};
use coracle::kubelet::{defaults, env, pull_secret, source, translate};
use coracle::runtime::model::{Pins, ResolvedUser};
use coracle::runtime::spec::{self as oci, HostFacts};
use coracle::store::ids::PodUid;
use coracle::volumes::model::Data;

const LIMITS: Limits = Limits { nodes: 20_000, depth: 64 };
const NODE: NodeCapacity = NodeCapacity { memory: 1 << 30, milli_cpu: 2000, pod_pids_limit: Some(4096) };

fn read(data: &[u8]) -> Contents {
    let seen = |_: &PodUid| "2026-01-01T00:00:00Z".to_owned();
    let reader = Reader { node_name: "node", file: "pod.yaml", seen: &seen };
    let mut out = Contents::default();
    for (n, tree) in yaml::documents(data, LIMITS).enumerate() {
        let Ok(tree) = tree else { break };
        object::read(&reader, n as u32, tree, &mut out);
    }
    out
}

/// What is accepted is complete, and comes back the same from what the store keeps of it.
pub fn pod(data: &[u8]) {
    let found = read(data);
    assert!(found.broken.is_empty() || !found.problems.is_empty(), "refused without a word");
    for object in found.objects {
        let Body::Pod(desired) = object.body else { continue };
        let pod = &*desired.pod;
        let again = source::restore(&desired.uid, &desired.raw).expect("what is stored can be read");
        assert_eq!(again.pod, desired.pod);
        assert_eq!(again.origin, desired.origin);
        let mut twice = Pod::clone(pod);
        defaults::pod(&mut twice);
        assert_eq!(&twice, pod, "defaults change a defaulted pod");
        QosClass::of(pod);
        let resources = qos::pod_resources(pod, &NODE);
        assert!(resources.cpu_shares.is_none_or(|s| (2..=262_144).contains(&s)));
        for container in &pod.spec.containers {
            let resources = qos::container_resources(pod, container);
            assert!(resources.cpu_quota.is_none_or(|q| q >= 1000));
            assert!((-1000..=1000).contains(&qos::oom_score_adj(pod, container, &NODE)));
        }
    }
}

/// Canonical JSON is JSON, is read as what it was, and is a fixed point.
pub fn yaml(data: &[u8]) {
    for tree in yaml::documents(data, LIMITS) {
        let Ok(tree) = tree else { return };
        let Ok(json) = tree.to_json() else { continue };
        serde_json::from_slice::<serde_json::Value>(&json).expect("canonical JSON is JSON");
        let again = yaml::documents(&json, LIMITS).next().expect("one document").expect("which is read again");
        assert_eq!(again.to_json().expect("as JSON"), json);
    }
}

struct Nothing;
impl coracle::volumes::model::Contents for Nothing {
    fn config_map(&self, _: &str, _: &str) -> Option<&Data> {
        None
    }
    fn secret(&self, _: &str, _: &str) -> Option<&Data> {
        None
    }
}

/// From an accepted pod and any image to the spec that the monitor reads.
pub fn spec(data: &[u8]) {
    let (config, manifest) = data.split_at(data.iter().position(|b| *b == 0).unwrap_or(0));
    let image = match coracle::images::manifest::parse_config(config) {
        Ok(parsed) => parsed.config,
        Err(_) => ImageConfig { cmd: vec!["sh".into()], ..ImageConfig::default() },
    };
    let facts = env::Facts { allocatable_memory: 1 << 30, allocatable_milli_cpu: 2000, ..env::Facts::default() };
    let host = HostFacts { capabilities: vec!["CHOWN".into(), "NET_ADMIN".into()], oom_floor: -500, cpus: 2, ..HostFacts::default() };
    for object in read(manifest.strip_prefix(&[0]).unwrap_or(manifest)).objects {
        let Body::Pod(desired) = object.body else { continue };
        let pod = &*desired.pod;
        for container in &pod.spec.containers {
            let Ok(resolved) = env::resolve(pod, container, &facts, &Nothing) else { continue };
            // Whether the image's user can be had is another question than what the spec is.
            drop(translate::user_request(pod, container, &image));
            let file = Path::new("/f");
            let input = translate::TranslateInput {
                pod,
                container,
                image: &image,
                user: ResolvedUser::default(),
                resolved,
                mounts: translate::node_files(container, file, file, file),
                hostname: "h",
                pins: Pins::default(),
                cgroup: "/kubepods/x".into(),
                localhost_profile: None,
                seccomp_default: true,
                node: NODE,
                host: host.clone(),
            };
            let Ok(input) = translate::translate(input) else { continue };
            let Ok(spec) = oci::container_spec(&input) else { continue };
            let process = spec.process().as_ref().expect("a process");
            assert!(process.args().as_ref().is_some_and(|a| !a.is_empty()));
            assert!(process.env().iter().flatten().all(|e| !e.contains('\0')), "a NUL in the environment");
            serde_json::to_vec(&spec).expect("a spec is JSON");
        }
    }
}

pub fn pull_secret(data: &[u8]) {
    let key = if data.first() == Some(&b'!') { ".dockercfg" } else { ".dockerconfigjson" };
    let data = data.strip_prefix(b"!").unwrap_or(data).to_vec();
    drop(pull_secret::read(&Data::from([(key.to_owned(), data)])));
}

/// Kept as written, within int64 whole units, rounded up.
pub fn quantity(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(quantity) = Quantity::parse(&text) else { return };
    assert_eq!(quantity.to_string(), text);
    assert_eq!(quantity.is_negative(), quantity.nano() < 0);
    assert!(i128::from(quantity.units()) * 1_000_000_000 >= quantity.nano().min(i128::from(i64::MAX) * 1_000_000_000));
    assert!(quantity.milli().unsigned_abs() >= quantity.units().unsigned_abs() || quantity.units() == 1);
    let json = serde_json::to_string(&quantity).expect("text");
    assert_eq!(serde_json::from_str::<Quantity>(&json).expect("and back"), quantity);
}

/// An instant that was read is rendered as one that reads the same.
pub fn time(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Some(time) = WallTime::parse(&text) else { return };
    assert_eq!(WallTime::parse(&time.nanos()), Some(time));
    let second = time.0.div_euclid(1_000_000_000);
    assert_eq!(WallTime::parse(&time.seconds()).map(|t| t.0.div_euclid(1_000_000_000)), Some(second));
}

/// Without `$` nothing changes, and `$$` stands for `$`.
pub fn expand(data: &[u8]) {
    let [text, value] = crate::texts(data);
    let known = std::collections::BTreeMap::from([("A".to_owned(), value), ("B".to_owned(), "b".to_owned())]);
    let expanded = env::expand(&text, &known);
    assert!(text.contains('$') || expanded == text);
    assert_eq!(env::expand(&text.replace('$', "$$"), &known), text);
}
