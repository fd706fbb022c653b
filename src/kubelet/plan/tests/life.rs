//! A pod's life from its first container to its last: order, restart policy, phases, conditions.
#![deny(clippy::disallowed_methods)]

use super::{c, condition, ended, t, waiting};
use crate::api::pod::RestartPolicy::*;
use crate::kubelet::plan::world::{World, pod, uid};
use crate::store::records::ExitRecord;

#[test]
fn a_pod_comes_up_step_by_step_and_says_so() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.begin();
    w.finish_one(0, true);
    let status = w.status("u1");
    assert_eq!(status.phase, "Pending");
    assert_eq!(waiting(&status, "c"), ("ContainerCreating".into(), String::new()));
    assert_eq!(condition(&status, "Ready"), t("False", "ContainersNotReady", "containers with unready status: [c]"));
    assert_eq!(condition(&status, "PodReadyToStartContainers"), t("False", "", ""));
    assert_eq!(condition(&status, "Initialized"), t("True", "", ""));
    assert_eq!(condition(&status, "PodScheduled"), t("True", "", ""));
    w.settle();
    assert_eq!(
        w.log,
        [
            "admit u1",
            "set-up-volumes u1 configs=0",
            "run-sandbox u1",
            "attach u1",
            "create u1 c attempt=0 backoff=0s",
            "start u1 c"
        ]
    );
    let status = w.status("u1");
    assert_eq!((status.phase.as_str(), status.pod_ip.as_str(), status.host_ip.as_str()), ("Running", "10.88.0.2", "192.0.2.1"));
    assert_eq!(condition(&status, "Ready"), t("True", "", ""));
    assert!(c(&status, "c").ready && c(&status, "c").started == Some(true) && c(&status, "c").restart_count == 0);
    assert_eq!(w.settle(), None, "an idle pod needs no timer");
}

#[test]
fn init_containers_run_in_order_each_to_its_end() {
    let mut w = World::with(pod("p", Always, &["i1", "i2"], &["c"]));
    w.settle();
    assert_eq!(w.running("u1"), ["i1#0"]);
    let status = w.status("u1");
    assert_eq!(waiting(&status, "c").0, "PodInitializing");
    assert_eq!(
        condition(&status, "Initialized"),
        t("False", "ContainersNotInitialized", "containers with incomplete status: [i1 i2]")
    );
    w.exit("i1", 0);
    w.settle();
    assert_eq!(w.running("u1"), ["i2#0"]);
    assert_eq!(ended(&w.status("u1"), "i1"), (0, "Completed".into()));
    w.exit("i2", 0);
    w.settle();
    assert_eq!(w.running("u1"), ["c#0"]);
    assert_eq!(condition(&w.status("u1"), "Initialized"), t("True", "", ""));
    // Later ends of the main container do not run them again.
    w.exit("c", 1);
    w.settle();
    assert_eq!(w.running("u1"), ["c#1"]);
}

#[test]
fn a_failed_init_container_ends_a_never_pod_and_is_tried_again_in_others() {
    let mut w = World::with(pod("p", Never, &["i"], &["c"]));
    w.settle();
    w.exit("i", 3);
    w.settle();
    let status = w.status("u1");
    assert_eq!(status.phase, "Failed");
    assert_eq!(ended(&status, "i"), (3, "Error".into()));
    assert_eq!(condition(&status, "Ready").1, "PodFailed");
    assert!(w.kernel.is_empty(), "a finished pod holds nothing");

    let mut w = World::with(pod("p", OnFailure, &["i"], &["c"]));
    w.settle();
    w.exit("i", 3);
    w.settle();
    assert_eq!(w.running("u1"), ["i#1"], "the first restart is immediate");
    w.exit("i", 3);
    w.settle();
    assert_eq!(waiting(&w.status("u1"), "i").0, "CrashLoopBackOff");
    assert_eq!(w.status("u1").phase, "Pending");
}

#[test]
fn restart_policies_decide_after_an_end() {
    for (policy, code, phase, again) in [
        (Always, 0, "Running", true),
        (Always, 1, "Running", true),
        (OnFailure, 0, "Succeeded", false),
        (OnFailure, 1, "Running", true),
        (Never, 0, "Succeeded", false),
        (Never, 1, "Failed", false),
    ] {
        let mut w = World::with(pod("p", policy, &[], &["c"]));
        w.settle();
        w.exit("c", code);
        w.settle();
        assert_eq!((w.status("u1").phase.as_str(), !w.running("u1").is_empty()), (phase, again), "{policy:?} {code}");
    }
}

#[test]
fn a_pod_ends_when_its_last_container_does() {
    let mut w = World::with(pod("p", Never, &[], &["a", "b"]));
    w.settle();
    w.exit("a", 0);
    w.settle();
    assert_eq!(w.status("u1").phase, "Running");
    w.exit("b", 2);
    w.settle();
    let status = w.status("u1");
    assert_eq!(status.phase, "Failed");
    assert_eq!((ended(&status, "a").1, ended(&status, "b").1), ("Completed".into(), "Error".into()));
}

#[test]
fn out_of_memory_is_told_apart() {
    let mut w = World::with(pod("p", Never, &[], &["c"]));
    w.settle();
    w.exit_of("u1", "c", ExitRecord { code: 137, signal: Some(9), oom: true, ..ExitRecord::default() });
    w.settle();
    assert_eq!(ended(&w.status("u1"), "c"), (137, "OOMKilled".into()));
}

#[test]
fn a_program_that_cannot_start_is_an_attempt_that_ended() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.unstartable.insert("c".into());
    w.settle();
    let status = w.status("u1");
    assert_eq!(waiting(&status, "c"), ("RunContainerError".into(), "exec: \"nope\": not found".into()));
    assert_eq!(c(&status, "c").restart_count, 1, "the first restart was immediate");
    w.advance(3);
    assert_eq!(waiting(&w.status("u1"), "c").0, "CrashLoopBackOff");
    let last = c(&w.status("u1"), "c").last_state.terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_str()), (128, "StartError"));

    let mut w = World::with(pod("p", Never, &[], &["c"]));
    w.unstartable.insert("c".into());
    w.settle();
    assert_eq!(w.status("u1").phase, "Failed");
    assert_eq!(ended(&w.status("u1"), "c"), (128, "StartError".into()));
}

#[test]
fn two_dead_containers_at_most_are_kept_of_each() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    for _ in 0..5 {
        w.exit("c", 1);
        w.live(400);
    }
    assert_eq!(w.kernel[&uid("u1")].containers.len(), 2);
    assert_eq!(w.log.iter().filter(|l| l.starts_with("remove-container")).count(), 4);
}
