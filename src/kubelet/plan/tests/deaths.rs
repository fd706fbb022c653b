//! Deaths of the agent, of monitors and of the machine: what lives is kept, what is lost is made anew
//! once.
#![deny(clippy::disallowed_methods)]

use super::{c, ended};
use crate::api::pod::RestartPolicy::*;
use crate::kubelet::plan::world::{World, pod};
use crate::store::records::ExitRecord;

#[test]
fn a_dead_monitor_ends_its_containers_unknown_and_the_pod_is_made_anew() {
    let mut w = World::with(pod("p", Always, &["i"], &["c"]));
    w.settle();
    w.exit("i", 0);
    w.settle();
    w.monitor_dies("u1");
    w.settle();
    assert_eq!(w.running("u1"), ["i#1"], "init containers run once a sandbox");
    w.exit("i", 0);
    w.settle();
    assert_eq!(w.running("u1"), ["c#1"]);
    let last = c(&w.status("u1"), "c").last_state.terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_str()), (137, "ContainerStatusUnknown"));

    let mut w = World::with(pod("p", Never, &[], &["c"]));
    w.settle();
    w.monitor_dies("u1");
    w.settle();
    assert_eq!(w.status("u1").phase, "Failed");
    assert_eq!(ended(&w.status("u1"), "c"), (137, "ContainerStatusUnknown".into()));
}

#[test]
fn an_exit_that_nobody_heard_of_is_found_by_asking_again() {
    let mut w = World::with(pod("p", OnFailure, &[], &["c"]));
    w.settle();
    w.exit_unheard("u1", "c", 0);
    w.live(100);
    assert_eq!(w.status("u1").phase, "Running");
    crate::kubelet::observe::listen_again(&mut w.observed);
    w.settle();
    assert_eq!(w.status("u1").phase, "Succeeded");
}

#[test]
fn a_missed_exit_of_an_ending_pod_is_asked_for_too() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    w.exit_unheard("u1", "c", 7);
    w.desired.pods.clear();
    crate::kubelet::observe::listen_again(&mut w.observed);
    w.live(60);
    assert!(w.kernel.is_empty() && w.observed.pods.is_empty(), "{:?}", w.log);
}

#[test]
fn a_monitor_that_hangs_is_killed_once_the_grace_of_its_ending_pod_is_long_over_and_not_before() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    w.hung = true;
    crate::kubelet::observe::listen_again(&mut w.observed);
    w.live(300);
    assert_eq!(w.running("u1"), ["c#0"], "a pod that nobody ends is left alone");
    w.desired.pods.clear();
    w.deaf = true;
    w.live(80);
    assert!(!w.kernel.is_empty(), "30 s of grace, then 60 s more");
    w.live(60);
    assert!(w.kernel.is_empty() && w.observed.pods.is_empty(), "{:?}", w.log);
}

#[test]
fn after_a_reboot_all_run_again_except_what_had_ended() {
    let mut w = World::with(pod("p", Always, &["i"], &["c"]));
    w.want("u2", pod("done", Never, &[], &["c"]));
    w.want("u3", pod("cut", Never, &[], &["c"]));
    w.settle();
    w.exit("i", 0);
    w.exit_of("u2", "c", ExitRecord { code: 5, ..ExitRecord::default() });
    w.settle();
    w.reboot(3600);
    w.settle();
    assert_eq!(w.running("u1"), ["i#1"]);
    w.exit("i", 0);
    w.settle();
    assert_eq!((w.running("u1"), w.running("u2"), w.running("u3")), (vec!["c#1".into()], vec![], vec!["c#1".into()]));
    assert_eq!(ended(&w.status("u2"), "c"), (5, "Error".into()));
}

#[test]
fn an_agents_death_changes_no_word_of_a_status() {
    let mut w = World::with(pod("p", Always, &["i"], &["a", "b"]));
    w.want("u2", pod("q", Never, &[], &["c"]));
    w.settle();
    w.advance(5);
    w.exit("i", 0);
    w.settle();
    w.advance(5);
    w.exit("a", 1);
    w.settle();
    w.advance(5);
    w.exit_of("u2", "c", ExitRecord::default());
    w.settle();
    let before = (w.status("u1"), w.status("u2"));
    for _ in 0..3 {
        w.advance(7);
        w.crash();
        w.settle();
        assert_eq!((w.status("u1"), w.status("u2")), before);
    }
}
