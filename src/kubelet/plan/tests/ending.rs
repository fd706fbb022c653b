//! What ends a pod and what does not: grace periods, a changed spec, an incomplete set, deadlines, a
//! node that stops.
#![deny(clippy::disallowed_methods)]

use crate::api::pod::RestartPolicy::*;
use crate::kubelet::model::SECOND;
use crate::kubelet::plan::admit::{self, Verdict};
use crate::kubelet::plan::world::{World, pod};

#[test]
fn ending_is_asked_for_first_and_enforced_after_the_grace_period() {
    let mut slow = pod("p", Always, &[], &["a", "b"]);
    slow.spec.termination_grace_period_seconds = Some(7);
    let mut w = World::with(slow.clone());
    w.settle();
    w.deaf = true;
    w.log.clear();
    w.unwant("u1");
    let due = w.settle().unwrap();
    assert_eq!(due - w.now.boot, 7 * SECOND);
    assert_eq!(w.log, ["end u1 Deleted grace=7s", "signal u1 a,b"]);
    w.live(7);
    assert!(w.log.contains(&"kill u1 a,b".to_owned()), "{:?}", w.log);
    assert_eq!(w.log.last().unwrap(), "remove u1");
    assert!(w.kernel.is_empty() && w.store.pods.is_empty() && w.observed.pods.is_empty());

    // A grace period of 0 still leaves two seconds.
    slow.spec.termination_grace_period_seconds = Some(0);
    let mut w = World::with(slow);
    w.settle();
    w.deaf = true;
    w.unwant("u1");
    assert_eq!(w.settle().unwrap() - w.now.boot, 2 * SECOND);
}

#[test]
fn a_changed_spec_waits_until_the_old_pod_is_gone() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    w.deaf = true;
    w.unwant("u1");
    w.want("u2", pod("p", Always, &[], &["c"]));
    w.settle();
    assert_eq!((w.running("u1").len(), w.running("u2").len()), (1, 0));
    let verdicts = admit::verdicts(&w.desired, &w.observed);
    assert!(matches!(verdicts[0].1, Verdict::Wait { .. }));
    w.live(30);
    assert_eq!((w.running("u1").len(), w.running("u2").len()), (0, 1));
}

#[test]
fn an_incomplete_set_ends_nothing_and_runs_what_is_known() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    w.desired.complete = false;
    w.unwant("u1");
    w.want("u2", pod("p", Always, &[], &["c"]));
    w.live(100);
    assert_eq!(w.running("u1"), ["c#0"]);
    w.reboot(10);
    w.live(100);
    assert_eq!(w.running("u1"), ["c#1"], "it runs again from what is on disk");
    w.desired.complete = true;
    w.live(1);
    assert_eq!((w.running("u1").len(), w.running("u2").len()), (0, 1));
}

#[test]
fn a_deadline_fails_the_pod_and_is_measured_since_boot() {
    let mut p = pod("p", Always, &[], &["c"]);
    p.spec.active_deadline_seconds = Some(100);
    let mut w = World::with(p);
    assert_eq!(w.settle().unwrap() - w.now.boot, 100 * SECOND);
    w.now.wall += 50 * 365 * 86_400 * SECOND; // the clock is set: from 1970 to now
    w.advance(60);
    w.settle();
    assert_eq!(w.running("u1").len(), 1);
    w.crash();
    assert_eq!(w.settle().unwrap() - w.now.boot, 40 * SECOND);
    w.live(40);
    let status = w.status("u1");
    assert_eq!(
        (status.phase.as_str(), status.reason.as_str(), status.message.as_str()),
        ("Failed", "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
    );
    assert!(w.kernel.is_empty());
    w.crash();
    w.live(100);
    assert_eq!(w.status("u1").reason, "DeadlineExceeded");
}

#[test]
fn stopping_the_node_ends_all_pods_until_the_next_start() {
    let mut w = World::with(pod("always", Always, &[], &["c"]));
    w.want("u2", pod("job", OnFailure, &[], &["c"]));
    w.want("u3", pod("once", Never, &[], &["c"]));
    w.settle();
    w.desired.stopping = true;
    w.live(1000);
    assert!(w.kernel.is_empty(), "{:?}", w.kernel.keys());
    assert!(w.store.pods.values().flat_map(|p| p.containers.values()).all(|c| c.attempts[0].exit.is_some()));
    let status = w.status("u3");
    assert_eq!((status.phase.as_str(), status.reason.as_str()), ("Failed", "Terminated"));
    w.desired.stopping = false;
    w.reboot(60);
    w.settle();
    assert_eq!((w.running("u1").len(), w.running("u2").len(), w.running("u3").len()), (1, 1, 0));
}
