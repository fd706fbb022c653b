//! What a container cannot reach, and what its pod sets for it.

use std::fs;
use std::os::unix::fs::symlink;

use coracle::runtime::model::*;

use crate::world::*;

fn output(world: &mut World, pod: u32, n: u32, script: &str) -> Vec<String> {
    let spec = world.container(pod, n, &["sh", "-c", script]);
    world.start(&spec);
    assert_eq!(world.exit(n).code, 0, "{:?}", world.lines(n));
    world.lines(n).iter().map(|line| line.splitn(3, ' ').nth(2).unwrap().to_owned()).collect()
}

#[test]
fn a_pods_namespaces_have_what_was_asked_for_and_nothing_leaks_in() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let mut sandbox = world.sandbox_spec(1);
    sandbox.sysctls = vec![("net.core.somaxconn".into(), "777".into()), ("kernel.shmmax".into(), "1048576".into())];
    world.runtime().run_sandbox(&sandbox).unwrap();
    let seen = output(
        &mut world,
        1,
        1,
        "cd /proc/sys; cat net/core/somaxconn kernel/shmmax net/ipv4/ip_unprivileged_port_start net/ipv4/ping_group_range; cd /; \
         hostname; ip -o addr show lo | wc -l; ls /proc/self/fd; wc -c < /proc/1/environ; readlink /proc/self/cwd; echo /proc/[0-9]*",
    );
    let expected = ["777", "1048576", "0", "0\t2147483647", "host-1", "2", "0", "1", "2", "3"];
    assert_eq!(&seen[..10], expected, "{seen:?}");
    assert_eq!(seen[11], "/");
    assert!(seen[12].split(' ').count() <= 2, "its own processes only: {seen:?}");
    // What would be the host's is refused, and leaves nothing.
    let mut sandbox = world.sandbox_spec(2);
    sandbox.sysctls = vec![("kernel.panic".into(), "1".into())];
    let refused = world.runtime().run_sandbox(&sandbox).unwrap_err().to_string();
    assert!(refused.contains("kernel.panic") && refused.contains("only sysctls of the pod's own"), "{refused}");
    let left = world.inventory();
    assert!(!left.files.iter().chain(&left.mounts).any(|f| f.contains("pod-2")), "{left:?}");
    assert_eq!(left.processes.len(), 1, "{left:?}");
}

#[test]
fn the_hosts_network_comes_with_the_hosts_name() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let mut sandbox = world.sandbox_spec(1);
    sandbox.host_network = true;
    let state = world.runtime().run_sandbox(&sandbox).unwrap();
    assert!(state.pins.net.is_none() && state.pins.uts.is_none() && state.pins.ipc.is_some());
    let seen = output(&mut world, 1, 1, "hostname; readlink /proc/self/ns/net");
    let ours = [
        nix::unistd::gethostname().unwrap().into_string().unwrap(),
        fs::read_link("/proc/self/ns/net").unwrap().display().to_string(),
    ];
    assert_eq!(seen, ours);
}

#[test]
fn a_container_that_takes_too_much_memory_is_told_from_one_that_was_killed() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["tail", "/dev/zero"]);
    spec.resources.memory_limit = Some(24 << 20);
    spec.resources.no_swap = true;
    // /dev is a fresh tmpfs: give it a zero device.
    let zero =
        serde_json::json!([{"path": "/dev/zero", "type": "c", "major": 1, "minor": 5, "fileMode": 438, "uid": 0, "gid": 0}]);
    let mut oci = serde_json::to_value(&spec.oci).unwrap();
    oci["linux"]["devices"] = zero;
    spec.oci = serde_json::from_value(oci).unwrap();
    world.start(&spec);
    let exit = world.exit(1);
    assert_eq!((exit.code, exit.oom), (137, true), "{exit:?}");
}

#[test]
fn an_image_with_links_for_directories_touches_nothing_of_the_hosts() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let outside = tempfile::tempdir().unwrap();
    for name in ["ptmx", "canary"] {
        fs::write(outside.path().join(name), "host").unwrap();
    }
    let evil = world.root.join("evil");
    fs::create_dir(&evil).unwrap();
    for name in ["dev", "proc", "sys", "etc"] {
        symlink(outside.path(), evil.join(name)).unwrap();
    }
    let mut spec = world.container(1, 1, &["sh", "-c", "test -c /dev/null && test -r /proc/self/status && echo fine"]);
    spec.rootfs.lower.insert(0, evil);
    // The working directory leads outside too: made inside the rootfs, whatever it is called.
    symlink("/../../../../tmp", world.root.join("layer/out")).unwrap();
    spec.oci.process_mut().as_mut().unwrap().set_cwd("/out/made-by-a-container".into());
    world.start(&spec);
    assert_eq!(world.exit(1).code, 0, "{:?}", world.lines(1));
    let mut names: Vec<_> =
        fs::read_dir(outside.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["canary", "ptmx"]);
    assert_eq!(fs::read_to_string(outside.path().join("ptmx")).unwrap(), "host");
    assert!(!fs::exists("/tmp/made-by-a-container").unwrap());
}

#[test]
fn without_a_pid_namespace_of_its_own_nothing_outlives_the_main_process() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["sh", "-c", "sleep 98765 & echo $!; exit 4"]);
    let linux = spec.oci.linux_mut().as_mut().unwrap();
    let kept =
        linux.namespaces().clone().unwrap().into_iter().filter(|ns| ns.typ() != oci_spec::runtime::LinuxNamespaceType::Pid);
    let kept = kept.collect();
    linux.set_namespaces(Some(kept));
    world.start(&spec);
    assert_eq!(world.exit(1).code, 4);
    let pid: i32 = world.lines(1)[0].rsplit(' ').next().unwrap().parse().unwrap();
    crate::streams::wait_until("the background process has ended", || coracle::sys::pidfd::is_dead(pid).unwrap());
}

#[test]
fn our_own_program_cannot_be_overwritten_from_inside() {
    if !able() {
        return;
    }
    let mut world = World::new();
    let program = env!("CARGO_BIN_EXE_coracle");
    let before = fs::read(program).unwrap();
    let monitor = world.run_sandbox(1).monitor;
    let attack = "while :; do for p in /proc/[0-9]*; do (echo x > $p/exe) 2>/dev/null; done; done";
    world.start(&world.container(1, 1, &["sh", "-c", attack]));
    fs::write(world.root.join("layer/data/evil"), "#!/proc/self/exe\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(world.root.join("layer/data/evil"), mode).unwrap();
    for n in 0..10 {
        let exec = ExecSpec { uid: uid(1), id: id(1), argv: vec!["/data/evil".into()], tty: false, stdin: false };
        let mut process = world.runtime().container_spec(&uid(1), &id(1)).unwrap().process().clone().unwrap();
        process.set_args(Some(exec.argv.clone()));
        // The kernel takes /proc/self/exe for the interpreter: our program, read-only for ever.
        match world.runtime().exec(&exec, &process) {
            Ok(mut process) => drop(process.wait(Some(WAIT)).unwrap().unwrap()),
            Err(e) => assert!(e.start_failure().is_some(), "{n}: {e:?}"),
        }
    }
    let exe = fs::OpenOptions::new().write(true).open(format!("/proc/{monitor}/exe"));
    assert!(matches!(exe.unwrap_err().raw_os_error(), Some(libc::EROFS | libc::ETXTBSY)));
    world.runtime().kill_container(&uid(1), &id(1)).unwrap();
    world.exit(1);
    assert!(fs::read(program).unwrap() == before);
}

#[test]
fn a_user_of_its_own_can_open_its_streams_again_and_has_no_groups_of_ours() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["sh", "-c", "id -u; id -G; echo out > /dev/stdout; echo err > /dev/stderr"]);
    let mut user = oci_spec::runtime::User::default();
    user.set_uid(1000).set_gid(1000);
    spec.oci.process_mut().as_mut().unwrap().set_user(user);
    world.start(&spec);
    assert_eq!(world.exit(1).code, 0, "{:?}", world.lines(1));
    let mut lines = world.lines(1);
    lines.sort();
    assert_eq!(lines, ["stderr F err", "stdout F 1000", "stdout F 1000", "stdout F out"]);
}

/// Of a read-only root only the image's volumes can be written to; each container has its own, made
/// of what the image has there, and no link leads out of the root.
#[test]
fn an_images_volumes_are_each_containers_own() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let layer = world.root.join("layer");
    symlink("/tmp", layer.join("to-tmp")).unwrap();
    symlink("../../../../../../etc", layer.join("out")).unwrap();
    symlink("/missing", layer.join("dangling")).unwrap();
    let script = "cat /data/plain; for dir in /data /fresh/deep /to-tmp /out; do echo new >$dir/new || echo $dir; done; \
                  echo over >/data/plain; cat /data/plain; ls /fresh/deep; touch /no 2>/dev/null && echo root";
    for n in 1..=2 {
        let mut spec = world.container(1, n, &["sh", "-c", &format!("{script}; true")]);
        spec.oci.root_mut().as_mut().unwrap().set_readonly(Some(true));
        world.runtime().prepare_rootfs(&uid(1), &id(n), &spec.rootfs).unwrap();
        let mut oci = serde_json::to_value(&spec.oci).unwrap();
        for path in ["/data", "/fresh/deep", "/to-tmp", "/out"] {
            let source = world.runtime().image_volume(&uid(1), &id(n), path.as_ref()).unwrap();
            assert!(source.starts_with(&world.run), "{path}: {source:?}");
            let mount = serde_json::json!({"destination": path, "type": "bind", "source": source, "options": ["rbind", "rprivate", "rw"]});
            oci["mounts"].as_array_mut().unwrap().push(mount);
        }
        for path in ["/bin/busybox", "/dangling", "/", "/data/plain/x"] {
            assert!(world.runtime().image_volume(&uid(1), &id(n), path.as_ref()).is_err(), "{path}");
        }
        spec.oci = serde_json::from_value(oci).unwrap();
        world.start(&spec);
        assert_eq!(world.exit(n).code, 0);
        let lines: Vec<String> = world.lines(n).iter().map(|line| line.splitn(3, ' ').nth(2).unwrap().to_owned()).collect();
        assert_eq!(lines, ["not a programover", "new"]);
        assert!(spec.rootfs.upper.join("data/new").exists() && spec.rootfs.upper.join("tmp/new").exists());
        world.runtime().remove_container(&uid(1), &id(n)).unwrap();
    }
    assert_eq!(fs::read_to_string(layer.join("data/plain")).unwrap(), "not a program");
    assert!(!fs::exists("/etc/new").unwrap() && !fs::exists("/tmp/new").unwrap());
}
