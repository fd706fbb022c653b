//! Random lives with every kind of death in them: all comes to rest where it should.
#![deny(clippy::disallowed_methods)]

use proptest::prelude::*;

use crate::api::pod::RestartPolicy::*;
use crate::kubelet::model::FailReason;
use crate::kubelet::plan::world::{World, pod};
use crate::store::records::ExitRecord;

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
