//! Services, slices and policies: text → checked objects → addresses, slices and ports.

use std::collections::BTreeSet;
use std::sync::Arc;

use coracle::api::yaml::{self, Limits};
use coracle::kubelet::source::network::{self, NetworkObject};
use coracle::kubelet::source::object::{self, Body, Contents, Reader};
use coracle::proxy::alone::{self, Memory, Pod};
use coracle::proxy::model::{LocalPod, NodeFacts};
use coracle::proxy::service::{Cache, Name, address};
use coracle::store::ids::PodUid;

const LIMITS: Limits = Limits { nodes: 20_000, depth: 64 };

/// What is accepted is remembered as it is, and served without a panic, from fit addresses only;
/// no two ports have one address or node port.
pub fn network(data: &[u8]) {
    let seen = |_: &PodUid| String::new();
    let reader = Reader { node_name: "node", file: "f.yaml", seen: &seen };
    let mut found = Contents::default();
    for (n, tree) in yaml::documents(data, LIMITS).enumerate() {
        let Ok(tree) = tree else { break };
        object::read(&reader, n as u32, tree, &mut found);
    }
    assert!(found.broken.is_empty() || !found.problems.is_empty(), "refused without a word");
    let file = "f.yaml".to_owned();
    let bytes = network::remember(found.objects.iter().map(|o| (&file, o))).expect("small enough");
    let again = network::recall(&bytes).expect("what is remembered can be read");
    let bodies = |objects: &mut dyn Iterator<Item = &object::Object>| -> Vec<NetworkObject> {
        objects
            .filter_map(|o| match &o.body {
                Body::Network(body) => Some(body.clone()),
                Body::Pod(_) | Body::ConfigMap(_) | Body::Secret(_) => None,
            })
            .collect()
    };
    let objects = bodies(&mut found.objects.iter());
    assert_eq!(objects, bodies(&mut again.iter().map(|(_, o)| o)));

    let services: Vec<_> =
        objects.iter().filter_map(|o| if let NetworkObject::Service(s) = o { Some(Arc::clone(s)) } else { None }).collect();
    let ranges =
        [alone::service_ranges(&["10.96.0.0/24".to_owned(), "fd96::/120".to_owned()], &[]).expect("two ranges")].concat();
    let allotted = alone::allot(services.iter(), &ranges, &Memory::default());
    assert_eq!(alone::allot(services.iter(), &ranges, &allotted.memory).services, allotted.services, "addresses move");
    let node = NodeFacts { name: "node".into(), zone: Some("a".into()), ..NodeFacts::default() };
    let local = LocalPod {
        namespace: "default".into(),
        name: "p".into(),
        addresses: vec!["10.88.0.2".parse().expect("an address")],
        labels: [("app".to_owned(), "web".to_owned())].into(),
        ..LocalPod::default()
    };
    let pods = [Pod { local, ready: true, ..Pod::default() }];
    let mut cache = Cache::new(&node);
    for (name, service) in &allotted.services {
        cache.put_service(name, Some(service));
        for slice in alone::slices_of(name, service, &pods, &node).0 {
            cache.put_slice(&Name::new(&name.namespace, &slice.metadata.name), Some(&slice));
        }
    }
    for object in &objects {
        if let NetworkObject::Slice(slice) = object {
            cache.put_slice(&Name::new(&slice.metadata.namespace, &slice.metadata.name), Some(slice));
        }
    }
    let told: Vec<_> = cache.changes().into_iter().flat_map(|c| c.after).collect();
    assert_eq!(told, cache.all().collect::<Vec<_>>());
    let mut owned = BTreeSet::new();
    for port in &told {
        for end in port.cluster.iter().chain(&port.local) {
            assert!(address::unfit(end.ip).is_none() && end.port != 0, "{end:?}");
        }
        for ip in port.cluster_ip.iter().chain(&port.external_ips).chain(&port.load_balancer_ips) {
            assert!(address::unfit(*ip).is_none() && owned.insert((Some(*ip), port.protocol, port.port)), "{ip} twice");
        }
    }
    assert!(cache.all_skipped().all(|s| !s.why.is_empty()));
}
