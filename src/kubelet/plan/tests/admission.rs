//! Whether a pod may begin at all, judged by what is there.
#![deny(clippy::disallowed_methods)]

use crate::api::pod::{ContainerPort, RestartPolicy::*};
use crate::api::quantity::Quantity;
use crate::kubelet::plan::admit::{self, Verdict};
use crate::kubelet::plan::world::{World, pod};

#[test]
fn host_ports_and_sizes_are_judged_by_what_is_there() {
    let mut a = pod("a", Always, &[], &["c"]);
    a.spec.containers[0].ports = vec![ContainerPort { container_port: 80, host_port: Some(8080), ..ContainerPort::default() }];
    let mut b = a.clone();
    b.metadata.name = "b".into();
    b.spec.containers[0].ports[0].host_ip = Some("127.0.0.1".into());
    let mut w = World::with(a);
    w.want("u2", b);
    w.settle();
    let Verdict::Reject { reason, message } = admit::verdicts(&w.desired, &w.observed)[0].1.clone() else { panic!() };
    assert_eq!(reason, "NodePorts");
    assert!(message.contains("didn't have free ports for the requested pod ports"));
    w.unwant("u1");
    w.live(1);
    assert_eq!(w.running("u2").len(), 1, "the reason is gone, so it begins");

    let mut big = pod("big", Always, &[], &["c"]);
    big.spec.containers[0].resources.requests.insert("cpu".into(), Quantity::parse("3").unwrap());
    let mut w = World::with(big);
    w.desired.node.milli_cpu = 2000;
    w.settle();
    let Verdict::Reject { reason, message } = admit::verdicts(&w.desired, &w.observed)[0].1.clone() else { panic!() };
    assert_eq!(reason, "OutOfcpu");
    assert_eq!(message, "Pod was rejected: Node didn't have enough resource: cpu, requested: 3000, used: 0, capacity: 2000");
}
