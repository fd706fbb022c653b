//! Every named step of the room × {error, SIGKILL}: a driver process plays the agent, dies or
//! fails there, and the next one must bring the pod to its end with nothing left.
//!
//! `cargo test --features failpoints --test runtime points`

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use coracle::runtime::RuntimeError;
use coracle::runtime::model::*;

use crate::world::*;

/// All names in the sources of the room.
fn points() -> Vec<String> {
    fn read(dir: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            if entry.path().is_dir() {
                read(&entry.path(), found);
            } else {
                let text = fs::read_to_string(entry.path()).unwrap();
                found.extend(
                    text.split('"')
                        .filter(|word| word.starts_with("runtime.") && word.split('.').count() == 3)
                        .map(str::to_owned),
                );
            }
        }
    }
    let mut found = Vec::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/runtime"), &mut found);
    found.sort();
    found
}

/// The whole life of a pod, from wherever an earlier driver left it.
fn whole_life(world: &mut World) -> Result<(), RuntimeError> {
    world.runtime().recover()?;
    let sandbox = world.runtime().run_sandbox(&world.sandbox_spec(1))?;
    let spec = world.container(1, 1, &["sh", "-c", "echo once; exit 3"]);
    let phase = sandbox.containers.into_iter().find(|c| c.id == spec.id).map(|c| c.phase);
    if phase.is_none() {
        world.runtime().create_container(&spec)?;
    }
    if phase.is_none() || matches!(phase, Some(ContainerPhase::Created { .. })) {
        world.runtime().start_container(&uid(1), &id(1))?;
    }
    loop {
        match world.runtime().sandbox(&uid(1))?.filter(|s| s.alive) {
            None => break,
            Some(state) => match state.containers.into_iter().find(|c| c.id == id(1)).map(|c| c.phase) {
                Some(ContainerPhase::Exited(exit)) => {
                    assert_eq!(exit.code, 3, "{exit:?}");
                    break;
                }
                None => break,
                Some(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
            },
        }
    }
    world.runtime().acknowledge_exit(&uid(1), &id(1))?;
    world.runtime().remove_container(&uid(1), &id(1))?;
    world.runtime().remove_sandbox(&uid(1))
}

/// The agent of the tests below; does nothing by itself.
#[test]
#[ignore = "a driver process of the tests in this file"]
fn driver() {
    let Some(root) = std::env::var_os("CORACLE_TEST_ROOT") else { return };
    let name = std::env::var("CORACLE_TEST_NAME").unwrap();
    let mut world = World::over(Path::new(&root), &name);
    for round in 0..3 {
        if round > 0 {
            // Its monitor may be one that fails at each of its calls: the next is not armed any more.
            world.runtime().remove_sandbox(&uid(1)).unwrap_or_else(|e| eprintln!("driver: {e:?}"));
        }
        match whole_life(&mut world) {
            Ok(()) => return,
            Err(e) => eprintln!("driver: {e:?}"),
        }
    }
    panic!("three tries were not enough");
}

fn drive(world: &World, armed: &str) -> std::process::ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "points::driver", "--ignored", "--nocapture"]).stdout(Stdio::null());
    command.env("CORACLE_TEST_ROOT", &world.root).env("CORACLE_TEST_NAME", &world.name).env("CORACLE_FAILPOINTS", armed);
    command.status().unwrap()
}

#[test]
fn a_death_or_error_at_any_step_leaves_a_pod_that_comes_to_its_end() {
    if !able() {
        return;
    }
    let points = points();
    assert!(points.len() > 20, "{points:?}");
    for point in &points {
        for action in ["kill", "error"] {
            let mut world = World::new();
            // The drivers are the agents; what this one made (the skeleton) is kept.
            world.runtime = None;
            let first = drive(&world, &format!("{point}={action}"));
            let second = drive(&world, "");
            assert!(second.success(), "{point}={action}: first {first:?}, second {second:?}");
            let left = world.inventory();
            assert!(left.processes.is_empty() && left.files.is_empty(), "{point}={action}: {left:?}");
            assert!(left.mounts.iter().all(|m| m.ends_with("/run") || m.ends_with("/skeleton")), "{point}={action}: {left:?}");
            assert!(!left.cgroups.iter().any(|c| c.contains("pod-1")), "{point}={action}: {left:?}");
        }
    }
}
