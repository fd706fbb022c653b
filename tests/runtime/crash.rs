//! Deaths: of the agent, of a monitor, of a helper, at any moment.

use std::fs;
use std::time::{Duration, Instant};

use coracle::runtime::model::*;

use crate::streams::wait_until;
use crate::world::*;

/// The signal is only on its way when kill(2) returns: what follows is about a process that is dead.
fn kill(pid: i32) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    wait_until("the killed process is dead", || coracle::sys::pidfd::is_dead(pid).unwrap());
}

#[test]
fn an_agent_that_comes_back_adopts_what_lives_and_learns_what_ended() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    for (n, argv) in [(1, "sleep 1000"), (2, "sleep 0.3; echo late; exit 5"), (3, "exit 3")] {
        world.start(&world.container(1, n, &["sh", "-c", argv]));
    }
    assert_eq!(world.exit(3).code, 3);
    world.runtime().create_container(&world.container(1, 4, &["sh", "-c", "exit 6"])).unwrap();
    let pids = (world.runtime().sandbox(&uid(1)).unwrap().unwrap().monitor, world.pid(1, 1), world.pid(1, 4));
    world.runtime = None;
    std::thread::sleep(Duration::from_millis(600));
    let states = world.restart();
    assert_eq!(states.len(), 1);
    let state = &states[0];
    assert!(state.alive && state.answers);
    let phase = |n| state.containers.iter().find(|c| c.id == id(n)).map(|c| c.phase.clone()).unwrap();
    assert!(matches!(phase(1), ContainerPhase::Running { pid, .. } if pid == pids.1));
    assert!(matches!(phase(2), ContainerPhase::Exited(exit) if exit.code == 5));
    assert!(matches!(phase(3), ContainerPhase::Exited(exit) if exit.code == 3));
    assert!(matches!(phase(4), ContainerPhase::Created { pid } if pid == pids.2));
    assert_eq!(state.monitor, pids.0);
    assert_eq!(world.lines(2), ["stdout F late"]);
    // What was only created can still be started, and events come again.
    world.runtime().start_container(&uid(1), &id(4)).unwrap();
    assert_eq!(world.exit(4).code, 6);
    let again = world.runtime().run_sandbox(&world.sandbox_spec(1)).unwrap();
    assert_eq!(again.monitor, pids.0);
}

#[test]
fn a_dead_monitor_ends_its_pod_and_every_exit_is_known() {
    if !able() {
        return;
    }
    for restart in [false, true] {
        let mut world = World::new();
        let monitor = world.run_sandbox(1).monitor;
        world.start(&world.container(1, 1, &["sleep", "1000"]));
        world.start(&world.container(1, 2, &["sh", "-c", "exit 7"]));
        world.runtime().create_container(&world.container(1, 3, &["true"])).unwrap();
        assert_eq!(world.exit(2).code, 7);
        let pid = world.pid(1, 1);
        if restart {
            world.runtime = None;
        }
        kill(monitor);
        let state = if restart {
            world.restart().remove(0)
        } else {
            world.monitor_died(1);
            world.runtime().sandbox(&uid(1)).unwrap().unwrap()
        };
        assert!(!state.alive);
        assert!(coracle::sys::pidfd::is_dead(pid).unwrap());
        let exit = |n| match state.containers.iter().find(|c| c.id == id(n)).map(|c| c.phase.clone()) {
            Some(ContainerPhase::Exited(exit)) => exit,
            other => panic!("{other:?}"),
        };
        assert_eq!((exit(1).code, exit(1).reason.as_str()), (137, "ContainerStatusUnknown"));
        assert!(exit(1).started_at > 0 && exit(3).started_at == 0);
        assert_eq!((exit(2).code, exit(2).reason.as_str()), (7, ""));
        assert!(world.exit_file(1, 1).exists());
        // The same again until it is taken away; then a new one.
        let again = world.runtime().sandbox(&uid(1)).unwrap().unwrap();
        assert_eq!(again.containers.len(), 3);
        let fresh = world.run_sandbox(1);
        assert!(fresh.alive && fresh.containers.is_empty() && fresh.monitor != monitor);
    }
}

/// A child of `parent` by the start of its name.
fn child(parent: i32, name: &str) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .find(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(name)))
}

#[test]
fn whatever_dies_in_the_middle_of_a_create_or_exec_leaves_nothing() {
    if !able() {
        return;
    }
    let world = World::new();
    let monitor = world.run_sandbox(1).monitor;
    world.start(&world.container(1, 0, &["sleep", "1000"]));
    let (mut failed, mut done) = (0, 0);
    let names = ["coracle helper", "youki:[1", "youki:[2"];
    for round in 0..36u32 {
        let name = names[round as usize % names.len()];
        let n = 100 + round;
        let result = std::thread::scope(|scope| {
            let hunter = scope.spawn(move || {
                let deadline = Instant::now() + Duration::from_millis(400);
                while Instant::now() < deadline {
                    if let Some(pid) = child(monitor, name) {
                        std::thread::sleep(Duration::from_micros(u64::from(round) * 150));
                        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
                        return;
                    }
                }
            });
            let spec = world.container(1, n, &["sleep", "1000"]);
            let result = if round % 2 == 0 {
                world
                    .runtime()
                    .create_container(&spec)
                    .and_then(|()| world.runtime().start_container(&spec.uid, &spec.id))
                    .map(|_| ())
            } else {
                let exec = ExecSpec { uid: uid(1), id: id(0), argv: vec!["true".into()], tty: false, stdin: false };
                let mut process = world.runtime().container_spec(&uid(1), &id(0)).unwrap().process().clone().unwrap();
                process.set_args(Some(exec.argv.clone()));
                world.runtime().exec(&exec, &process).map(|mut p| drop(p.wait(Some(WAIT)).unwrap().unwrap()))
            };
            hunter.join().unwrap();
            result
        });
        match result {
            Ok(()) => done += 1,
            Err(e) => {
                assert!(e.start_failure().is_some() || matches!(e, coracle::runtime::RuntimeError::WrongState { .. }), "{e:?}");
                failed += 1;
            }
        }
        world.runtime().remove_container(&uid(1), &id(n)).unwrap();
    }
    eprintln!("killed in the middle: {failed} failed, {done} came through");
    assert!(failed > 5, "{failed} failed, {done} came through");
    wait_until("only the first container is left", || {
        fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children")).unwrap().split_whitespace().count() == 1
    });
    let left = world.inventory();
    assert_eq!(left.processes.len(), 2, "{left:?}");
    assert!(!left.mounts.iter().any(|m| m.contains(id(100).as_str())), "{left:?}");
    assert_eq!(
        left.cgroups.iter().filter(|c| c.contains(&format!("pod{}/", uid(1)))).filter(|c| !c.ends_with(id(0).as_str())).count(),
        0,
        "{left:?}"
    );
    assert!(!left.files.iter().any(|f| f.contains("tenant-") || f.contains("exec")), "{left:?}");
}

#[test]
fn a_half_made_sandbox_or_container_is_undone() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    world.run_sandbox(2);
    // As if cut off before the last step; and a container that its monitor never heard of.
    fs::remove_file(world.run.join("pods/pod-1/ready")).unwrap();
    let spec = world.container(2, 5, &["true"]);
    world.runtime().prepare_rootfs(&spec.uid, &spec.id, &spec.rootfs).unwrap();
    let states = world.restart();
    assert_eq!(states.iter().map(|s| s.uid.clone()).collect::<Vec<_>>(), [uid(2)]);
    let left = world.inventory();
    assert!(!left.files.iter().any(|f| f.contains("pod-1") || f.contains(id(5).as_str())), "{left:?}");
    assert!(!left.mounts.iter().any(|f| f.contains("pod-1") || f.contains(id(5).as_str())), "{left:?}");
    assert_eq!(left.processes.len(), 1, "{left:?}");
}

#[test]
fn termination_signals_do_not_end_a_monitor() {
    if !able() {
        return;
    }
    let world = World::new();
    let monitor = world.run_sandbox(1).monitor;
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        let signal = nix::sys::signal::Signal::try_from(signal).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(monitor), signal).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert!(world.runtime().sandbox(&uid(1)).unwrap().unwrap().answers);
    let cmdline = fs::read_to_string(format!("/proc/{monitor}/cmdline")).unwrap();
    assert_eq!(cmdline.trim_end_matches('\0').split('\0').collect::<Vec<_>>(), ["coracle", "monitor", "default/test-1"]);
    assert_eq!(fs::read_to_string(format!("/proc/{monitor}/comm")).unwrap(), "coracle monitor\n");
    // Nothing of the agent's is open in it.
    let fds: Vec<_> = fs::read_dir(format!("/proc/{monitor}/fd"))
        .unwrap()
        .flatten()
        .map(|e| (e.file_name(), fs::read_link(e.path()).unwrap()))
        .collect();
    let names: Vec<String> = fds.iter().map(|(_, to)| to.display().to_string()).collect();
    assert!(
        names.iter().all(|n| n.starts_with("/dev/null")
            || n.starts_with("socket:")
            || n.starts_with("anon_inode:[signalfd]")
            || n.ends_with("monitor.err")),
        "{fds:?}"
    );
    let map = fs::read_to_string(format!("/proc/{monitor}/smaps_rollup")).unwrap();
    let kb = |name: &str| {
        map.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap()
    };
    // The release build has some 40 KB less; 150 KB are the bar there (make bench).
    assert!(kb("Anonymous:") <= 190, "{map}");
    eprintln!("idle monitor: anonymous {} kB, PSS {} kB, RSS {} kB", kb("Anonymous:"), kb("Pss:"), kb("Rss:"));
}

#[test]
fn a_monitor_goes_on_as_another_program_with_all_it_holds() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let monitor = world.run_sandbox(1).monitor;
    world.start(&world.container(1, 1, &["sh", "-c", "printf half; read x; echo ' and '$x; sleep 0.2; exit 7"]));
    let mut spec = world.container(1, 2, &["sh", "-c", "printf half; read x; echo -$x; exit 8"]);
    spec.stdin = true;
    world.start(&spec);
    world.start(&world.container(1, 3, &["sh", "-c", "exit 3"]));
    world.runtime().create_container(&world.container(1, 4, &["sh", "-c", "exit 4"])).unwrap();
    assert_eq!(world.exit(3).code, 3);
    wait_until("the half line has arrived", || world.runtime().renew_monitor(&uid(1), true).is_ok());
    assert!(!world.runtime().renew_monitor(&uid(1), false).unwrap());
    let state = world.runtime().sandbox(&uid(1)).unwrap().unwrap();
    assert_eq!((state.monitor, state.alive, state.containers.len()), (monitor, true, 4));
    assert_eq!(fs::read_to_string(format!("/proc/{monitor}/comm")).unwrap(), "coracle monitor\n");
    // The first had no stdin: its read ended at once. The second gets its line now.
    assert_eq!(world.exit(1).code, 7);
    let attached = world.runtime().attach(&uid(1), &id(2)).unwrap();
    std::io::Write::write_all(&mut fs::File::from(attached.stdin.unwrap()), b"whole\n").unwrap();
    assert_eq!(world.exit(2).code, 8);
    assert_eq!(world.lines(2), ["stdout F half-whole"]);
    world.runtime().start_container(&uid(1), &id(4)).unwrap();
    assert_eq!(world.exit(4).code, 4);
    assert!(matches!(world.phase(1, 3), Some(ContainerPhase::Exited(exit)) if exit.code == 3));
    // What is no program of ours changes nothing.
    let dir = coracle::sys::file::open_dir_path(&world.run.join("pods/pod-1")).unwrap();
    let socket = coracle::sys::seqpacket::connect(std::os::fd::AsFd::as_fd(&dir), "mon.sock").unwrap();
    let wrong = fs::File::open("/bin/busybox").unwrap();
    let ask = br#"{"v":1,"id":1,"type":"reexec"}"#;
    coracle::sys::seqpacket::send(std::os::fd::AsFd::as_fd(&socket), ask, &[std::os::fd::AsFd::as_fd(&wrong)]).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(world.runtime().sandbox(&uid(1)).unwrap().unwrap().answers);
}
