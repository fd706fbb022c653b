//! Sandboxes and containers from first to last.

use std::fs;

use coracle::runtime::model::*;
use coracle::runtime::{FailureKind, RuntimeError};

use crate::world::*;

#[test]
fn a_container_runs_logs_and_ends_with_its_code() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let before = world.inventory();
    let state = world.run_sandbox(1);
    assert!(state.alive && state.answers && state.containers.is_empty());
    assert!(state.pins.net.as_ref().unwrap().exists());
    let spec = world.container(1, 7, &["sh", "-c", "echo out; echo err >&2; hostname; printf open; exit 7"]);
    world.runtime().create_container(&spec).unwrap();
    assert!(matches!(world.phase(1, 7), Some(ContainerPhase::Created { .. })));
    assert!(world.lines(7).is_empty());
    let started = world.runtime().start_container(&uid(1), &id(7)).unwrap();
    let exit = world.exit(7);
    assert_eq!((exit.code, exit.signal, exit.oom, exit.started_at), (7, None, false, started));
    assert!(exit.finished_at >= started);
    let file: coracle::store::records::ExitRecord = serde_json::from_slice(&fs::read(world.exit_file(1, 7)).unwrap()).unwrap();
    assert_eq!(file, exit);
    let mut lines = world.lines(7);
    lines.sort();
    assert_eq!(lines, ["stderr F err", "stdout F host-1", "stdout F open", "stdout F out"]);
    assert_eq!(world.phase(1, 7), Some(ContainerPhase::Exited(exit)));
    world.runtime().acknowledge_exit(&uid(1), &id(7)).unwrap();
    assert!(!world.exit_file(1, 7).exists());
    for _ in 0..2 {
        world.runtime().remove_container(&uid(1), &id(7)).unwrap();
    }
    assert_eq!(world.phase(1, 7), None);
    for _ in 0..2 {
        world.runtime().remove_sandbox(&uid(1)).unwrap();
    }
    let mut after = world.inventory();
    // Parents of the pods' cgroups are their maker's to remove.
    after.cgroups.retain(|path| path.contains("pod-"));
    assert_eq!(after, before);
}

#[test]
fn a_program_that_cannot_run_is_the_containers_own_failure() {
    if !able() {
        return;
    }
    let world = World::new();
    world.run_sandbox(1);
    let cases = [
        ("/nope", FailureKind::NoProgram, "exec: \"/nope\": stat /nope: no such file or directory"),
        ("nope", FailureKind::NoProgram, "exec: \"nope\": executable file not found in $PATH"),
        ("/data/plain", FailureKind::NotExecutable, "exec: \"/data/plain\": permission denied"),
        ("/data/garbage", FailureKind::NotExecutable, "exec /data/garbage: exec format error"),
    ];
    for (n, (program, kind, words)) in cases.into_iter().enumerate() {
        let spec = world.container(1, n as u32, &[program]);
        let created = world.runtime().create_container(&spec);
        let failed = created.and_then(|()| world.runtime().start_container(&spec.uid, &spec.id)).unwrap_err();
        assert_eq!(failed.start_failure(), Some((kind, words)), "{failed:?}");
        assert_eq!(world.phase(1, n as u32), None);
        world.runtime().remove_container(&spec.uid, &spec.id).unwrap();
    }
    let left = world.inventory();
    assert_eq!(left.processes.len(), 1, "{left:?}");
    assert!(!left.cgroups.iter().any(|path| path.contains(id(0).as_str())), "{left:?}");
    let missing = world.runtime().start_container(&uid(1), &id(99)).unwrap_err();
    assert!(matches!(missing, RuntimeError::NoContainer { .. }), "{missing:?}");
}

#[test]
fn signals_kills_and_removal_end_a_container() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let trap = "trap 'exit 3' TERM; while :; do sleep 1 & wait; done";
    for n in [1, 2, 3] {
        let spec = world.container(1, n, &["sh", "-c", trap]);
        world.start(&spec);
    }
    world.runtime().signal_container(&uid(1), &id(1), libc::SIGTERM).unwrap();
    let exit = world.exit(1);
    assert_eq!((exit.code, exit.signal), (3, None));
    world.runtime().signal_container(&uid(1), &id(1), libc::SIGTERM).unwrap();
    world.runtime().kill_container(&uid(1), &id(2)).unwrap();
    let exit = world.exit(2);
    assert_eq!((exit.code, exit.signal), (137, Some(9)));
    world.runtime().remove_container(&uid(1), &id(3)).unwrap();
    assert_eq!(world.phase(1, 3), None);
    // One that was created only.
    let spec = world.container(1, 4, &["true"]);
    world.runtime().create_container(&spec).unwrap();
    world.runtime().remove_container(&uid(1), &id(4)).unwrap();
    assert_eq!(world.phase(1, 4), None);
}

/// `cargo test --release --test runtime -- --ignored --nocapture how_long`: figures, no verdict.
#[test]
#[ignore = "a measurement"]
fn how_long_the_verbs_take() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let mut taken: std::collections::BTreeMap<&str, Vec<f64>> = Default::default();
    for n in 1..=20 {
        let mut time = |name, run: &mut dyn FnMut()| {
            let began = std::time::Instant::now();
            run();
            taken.entry(name).or_default().push(began.elapsed().as_secs_f64() * 1000.0);
        };
        time("1 sandbox", &mut || drop(world.run_sandbox(n)));
        let spec = world.container(n, n, &["sleep", "1000"]);
        time("2 create", &mut || world.runtime().create_container(&spec).unwrap());
        time("3 start", &mut || {
            world.runtime().start_container(&spec.uid, &spec.id).unwrap();
        });
        let exec = ExecSpec { uid: uid(n), id: id(n), argv: vec!["true".into()], tty: false, stdin: false };
        let mut process = spec.oci.process().clone().unwrap();
        process.set_args(Some(exec.argv.clone()));
        time("4 exec true", &mut || {
            let mut process = world.runtime().exec(&exec, &process).unwrap();
            assert_eq!(process.wait(Some(WAIT)).unwrap().unwrap().code, 0);
        });
    }
    let began = std::time::Instant::now();
    assert_eq!(world.restart().len(), 20);
    eprintln!("recover 20 pods: {:.1} ms", began.elapsed().as_secs_f64() * 1000.0);
    for n in 1..=20 {
        let began = std::time::Instant::now();
        world.runtime().remove_container(&uid(n), &id(n)).unwrap();
        taken.entry("5 remove").or_default().push(began.elapsed().as_secs_f64() * 1000.0);
        let began = std::time::Instant::now();
        world.runtime().remove_sandbox(&uid(n)).unwrap();
        taken.entry("6 remove sandbox").or_default().push(began.elapsed().as_secs_f64() * 1000.0);
    }
    for (name, mut times) in taken {
        times.sort_by(f64::total_cmp);
        eprintln!(
            "{name}: {:.1} / {:.1} / {:.1} ms (min, median, max)",
            times[0],
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}
