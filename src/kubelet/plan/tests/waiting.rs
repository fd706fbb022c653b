//! What a container waits for: crash back-off, pulls and their back-off, configs that are missing.
#![deny(clippy::disallowed_methods)]

use super::{c, waiting};
use crate::api::pod::{ImagePullPolicy, RestartPolicy::*};
use crate::kubelet::model::{FailReason, SECOND};
use crate::kubelet::plan::restart;
use crate::kubelet::plan::world::{World, pod};

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
fn a_pulls_back_off_goes_on_over_an_agents_death_and_ends_with_a_reboot() {
    let mut w = World::with(pod("p", Always, &[], &["c"]));
    w.images.clear();
    w.registry = Err((FailReason::ImagePull, "not found".into()));
    for wait in [10, 20] {
        w.settle();
        w.advance(wait);
    }
    assert_eq!(w.settle().unwrap() - w.now.boot, 40 * SECOND);
    w.advance(15);
    let before = w.status("u1");
    assert_eq!(waiting(&before, "c").0, "ImagePullBackOff");
    for _ in 0..3 {
        w.crash();
        assert_eq!(w.settle().unwrap() - w.now.boot, 25 * SECOND, "no death brings the next try nearer");
        assert_eq!(w.status("u1"), before);
    }
    w.advance(25);
    assert_eq!(w.settle().unwrap() - w.now.boot, 80 * SECOND, "and it goes on doubling");
    assert_eq!(w.log.iter().filter(|l| l.starts_with("pull")).count(), 4);
    // Another boot may have another network: it is asked at once, and from ten seconds on.
    w.reboot(60);
    assert_eq!(w.settle().unwrap() - w.now.boot, 10 * SECOND);
    w.registry = Ok(());
    w.live(10);
    assert_eq!(w.running("u1"), ["c#0"]);
    w.crash();
    assert_eq!(w.settle(), None, "a pull that succeeded is over");
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
