//! A pod's life, sentence by sentence, and random lives with every kind of death in them.
#![deny(clippy::disallowed_methods)]

use proptest::prelude::*;

use super::restart;
use super::world::{World, pod, uid};
use crate::api::pod::{ContainerPort, ImagePullPolicy, RestartPolicy::*};
use crate::api::quantity::Quantity;
use crate::api::status::{ContainerStatus, PodStatus};
use crate::kubelet::model::{FailReason, SECOND};
use crate::kubelet::plan::admit::{self, Verdict};
use crate::store::records::ExitRecord;

fn c(status: &PodStatus, name: &str) -> ContainerStatus {
    status.container_statuses.iter().chain(&status.init_container_statuses).find(|c| c.name == name).unwrap().clone()
}

fn waiting(status: &PodStatus, name: &str) -> (String, String) {
    let waiting = c(status, name).state.waiting.unwrap_or_else(|| panic!("{name} does not wait: {:?}", c(status, name).state));
    (waiting.reason, waiting.message)
}

fn ended(status: &PodStatus, name: &str) -> (i32, String) {
    let ended = c(status, name).state.terminated.unwrap_or_else(|| panic!("{name} has not ended: {:?}", c(status, name).state));
    (ended.exit_code, ended.reason)
}

fn condition(status: &PodStatus, kind: &str) -> (String, String, String) {
    let c = status.conditions.iter().find(|c| c.kind == kind).unwrap();
    (c.status.clone(), c.reason.clone(), c.message.clone())
}

fn t(status: &str, reason: &str, message: &str) -> (String, String, String) {
    (status.into(), reason.into(), message.into())
}

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
fn the_crash_back_off_doubles_from_ten_seconds_to_five_minutes() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    w.exit("c", 1);
    w.settle();
    for (n, wait) in [10, 20, 40, 80, 160, 300, 300].into_iter().enumerate() {
        let number = n as u32 + 1;
        assert_eq!(w.running("u1"), [format!("c#{number}")]);
        w.advance(3);
        w.exit("c", 1);
        let due = w.settle().unwrap();
        assert_eq!(due - w.now.boot, wait * SECOND, "restart {number}");
        let (reason, message) = waiting(&w.status("u1"), "c");
        let text = restart::duration(wait as u32);
        assert_eq!(reason, "CrashLoopBackOff");
        assert_eq!(message, format!("back-off {text} restarting failed container=c pod=p_default(u1)"));
        assert_eq!(c(&w.status("u1"), "c").last_state.terminated.unwrap().exit_code, 1);
        w.advance(wait - 1);
        w.settle();
        assert_eq!(w.running("u1"), Vec::<String>::new());
        w.advance(1);
        w.settle();
    }
    assert_eq!(restart::duration(300), "5m0s");
    // Ten minutes of life later the count begins anew.
    w.advance(601);
    w.exit("c", 1);
    w.settle();
    assert_eq!(w.running("u1"), ["c#9"]);
    w.advance(1);
    w.exit("c", 1);
    assert_eq!(w.settle().unwrap() - w.now.boot, 10 * SECOND);
}

#[test]
fn a_back_off_goes_on_over_an_agents_death_and_a_reboot() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.settle();
    for _ in 0..3 {
        w.exit("c", 1);
        w.live(0);
        if w.running("u1").is_empty() {
            w.live(60);
        }
    }
    w.exit("c", 1);
    w.settle();
    let due = w.settle().unwrap() - w.now.boot;
    assert_eq!(due, 40 * SECOND);
    w.advance(15);
    w.crash();
    assert_eq!(w.settle().unwrap() - w.now.boot, 25 * SECOND, "the agent's death changes nothing");
    // Five seconds of the new boot have passed; what the journal proves of the old one is nothing
    // after the exit, its last record.
    w.reboot(3600);
    assert_eq!(w.settle().unwrap() - w.now.boot, 35 * SECOND);
    assert_eq!(waiting(&w.status("u1"), "c").0, "CrashLoopBackOff");
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
fn pulls_back_off_from_ten_seconds_to_five_minutes_with_the_kubelets_words() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.images.clear();
    w.registry = Err((FailReason::ImagePull, "not found".into()));
    for wait in [10, 20, 40, 80, 160, 300, 300] {
        assert_eq!(w.settle().unwrap() - w.now.boot, wait * SECOND);
        assert_eq!(waiting(&w.status("u1"), "c"), ("ErrImagePull".into(), "not found".into()));
        w.advance(5);
        assert_eq!(
            waiting(&w.status("u1"), "c"),
            ("ImagePullBackOff".into(), "Back-off pulling image \"busybox\": ErrImagePull: not found".into())
        );
        w.advance(wait - 5);
    }
    w.registry = Ok(());
    w.settle();
    assert_eq!(w.running("u1"), ["c#0"]);
    let pulls = w.log.iter().filter(|l| l.starts_with("pull")).count();
    assert_eq!(pulls, 8);
}

#[test]
fn pull_policies() {
    // Never, and not here: no pull; an import mends it at once.
    let mut never = pod("p", Always, &[], &["c"]);
    never.spec.containers[0].image_pull_policy = Some(ImagePullPolicy::Never);
    let mut w = World::with(never);
    w.images.clear();
    w.settle();
    assert_eq!(
        waiting(&w.status("u1"), "c"),
        ("ErrImageNeverPull".into(), "Container image \"busybox\" is not present with pull policy of Never".into())
    );
    w.images.insert("busybox".into());
    crate::kubelet::observe::images_changed(&mut w.observed);
    w.settle();
    assert_eq!(w.running("u1"), ["c#0"]);
    assert!(!w.log.iter().any(|l| l.starts_with("pull")));

    // Always asks for each attempt, but not for the first one after a reboot.
    let mut always = pod("p", Always, &[], &["c"]);
    always.spec.containers[0].image_pull_policy = Some(ImagePullPolicy::Always);
    let mut w = World::with(always);
    let pulls = |w: &World| w.log.iter().filter(|l| l.starts_with("pull")).count();
    w.settle();
    assert_eq!(pulls(&w), 1);
    w.exit("c", 1);
    w.settle();
    assert_eq!(pulls(&w), 2);
    w.registry = Err((FailReason::RegistryUnavailable, "no route".into()));
    w.reboot(60);
    w.settle();
    assert_eq!((pulls(&w), w.running("u1")), (2, vec!["c#2".to_owned()]));
    w.exit("c", 1);
    w.live(30);
    assert_eq!(waiting(&w.status("u1"), "c").0, "ImagePullBackOff");
}

#[test]
fn a_missing_config_map_is_waited_for_and_seen_at_once() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.unconfigured.insert("c".into());
    w.live(100);
    assert_eq!(waiting(&w.status("u1"), "c"), ("CreateContainerConfigError".into(), "configmap \"c\" not found".into()));
    assert_eq!(c(&w.status("u1"), "c").restart_count, 0);
    w.unconfigured.clear();
    w.desired.configs += 1;
    crate::kubelet::observe::configs_changed(&mut w.observed);
    w.settle();
    assert_eq!(w.running("u1"), ["c#0"]);
}

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

/// What may happen at any moment.
#[derive(Clone, Debug)]
enum Event {
    Want(usize),
    Unwant(usize),
    Complete(bool),
    Exit(usize, i32),
    Advance(i64),
    /// The agent dies; of what is under way so many actions were carried out, none has reported.
    Crash(usize),
    MonitorDies(usize),
    Reboot,
    /// So many actions go on, in this order.
    Steps(Vec<usize>),
    Deaf(bool),
    Registry(bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (0..PODS).prop_map(Event::Want),
        2 => (0..PODS).prop_map(Event::Unwant),
        1 => any::<bool>().prop_map(Event::Complete),
        4 => (0..PODS, 0..2i32).prop_map(|(p, code)| Event::Exit(p, code)),
        3 => (0..400i64).prop_map(Event::Advance),
        2 => (0..4usize).prop_map(Event::Crash),
        1 => (0..PODS).prop_map(Event::MonitorDies),
        1 => Just(Event::Reboot),
        8 => prop::collection::vec(0..8usize, 0..12).prop_map(Event::Steps),
        1 => any::<bool>().prop_map(Event::Deaf),
        1 => any::<bool>().prop_map(Event::Registry),
    ]
}

/// Names: 0 and 1 share one, so do 2 and 3.
const PODS: usize = 5;

fn wanted(n: usize) -> (String, crate::api::pod::Pod) {
    let name = ["a", "a", "b", "b", "c"][n];
    let policy = [Always, OnFailure, Never, Always, OnFailure][n];
    let init: &[&str] = if n.is_multiple_of(2) { &["i"] } else { &[] };
    (format!("u{n}"), pod(name, policy, init, &["x", "y"]))
}

fn happen(w: &mut World, event: Event) {
    match event {
        Event::Want(n) => {
            let (id, pod) = wanted(n);
            // A directory holds one pod a name.
            let rival = ["u1", "u0", "u3", "u2", "none"][n];
            w.unwant(rival);
            w.want(&id, pod);
        }
        Event::Unwant(n) => w.unwant(&wanted(n).0),
        Event::Complete(complete) => w.desired.complete = complete,
        Event::Exit(n, code) => {
            let id = wanted(n).0;
            if let Some(running) = w.running(&id).first() {
                let name = running.split('#').next().unwrap().to_owned();
                w.exit_of(&id, &name, ExitRecord { code, ..ExitRecord::default() });
            }
        }
        Event::Advance(seconds) => w.advance(seconds),
        Event::Crash(done) => {
            for _ in 0..done.min(w.under_way.len()) {
                w.finish_one(0, false);
            }
            w.crash();
        }
        Event::MonitorDies(n) => w.monitor_dies(&wanted(n).0),
        Event::Reboot => w.reboot(100),
        Event::Steps(order) => {
            for at in order {
                w.begin();
                if !w.under_way.is_empty() {
                    w.finish_one(at % w.under_way.len(), true);
                }
            }
        }
        Event::Deaf(deaf) => w.deaf = deaf,
        Event::Registry(works) => {
            w.images.clear();
            w.registry = if works { Ok(()) } else { Err((FailReason::ImagePull, "no".into())) };
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// World checks on the way that nothing is made twice; here that all comes to rest where it should.
    #[test]
    fn whatever_happens_the_wanted_runs_and_the_rest_is_gone(events in prop::collection::vec(event(), 1..60)) {
        let mut w = World::new();
        for event in events {
            let lives: Vec<_> = w.kernel.keys().cloned().collect();
            let incomplete = !w.desired.complete && w.observed.pods.values().all(|s| s.ending.is_none());
            happen(&mut w, event.clone());
            w.begin();
            if incomplete && !w.desired.complete && !matches!(event, Event::Reboot | Event::MonitorDies(_)) {
                for uid in &lives {
                    let ending = w.observed.pods.get(uid).is_some_and(|s| s.ending.is_some());
                    prop_assert!(!ending, "an incomplete set ended {uid}");
                }
            }
        }
        w.desired.complete = true;
        w.registry = Ok(());
        while !w.under_way.is_empty() {
            w.finish_one(0, true);
        }
        w.live(2000);
        prop_assert_eq!(w.settle(), None);
        let wanted: Vec<_> = w.desired.pods.keys().cloned().collect();
        let stored: Vec<_> = w.store.pods.keys().cloned().collect();
        prop_assert_eq!(&stored, &wanted);
        for (id, pod) in &w.desired.pods {
            let status = w.status(id.as_str());
            let init = pod.spec.init_containers.len();
            match status.phase.as_str() {
                "Running" | "Pending" => prop_assert!(!w.running(id.as_str()).is_empty() && status.pod_ip == "10.88.0.2", "{status:?} {init}"),
                "Succeeded" | "Failed" => prop_assert!(!w.kernel.contains_key(id)),
                other => prop_assert!(false, "{other}"),
            }
            let known: usize = w.kernel.get(id).map_or(0, |s| s.containers.len());
            prop_assert!(known <= 2 * (2 + init), "{known} containers are kept");
        }
        for id in w.kernel.keys() {
            prop_assert!(wanted.contains(id));
        }
        // And once more from what is written down.
        let before: Vec<_> = wanted.iter().map(|id| w.status(id.as_str())).collect();
        w.crash();
        w.settle();
        let after: Vec<_> = wanted.iter().map(|id| w.status(id.as_str())).collect();
        prop_assert_eq!(before, after);
    }
}
