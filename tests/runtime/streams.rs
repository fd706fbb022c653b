//! What goes in and out of containers: exec, logs, attach, terminals; and who cannot block it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use coracle::runtime::model::*;
use coracle::runtime::seccomp::{Machine, runtime_default};
use coracle::runtime::{ExecProcess, FailureKind, RuntimeError};
use coracle::store::records::ExitRecord;
use coracle::sys::seqpacket;

use crate::world::*;

fn exec_spec(pod: u32, n: u32, argv: &[&str], tty: bool, stdin: bool) -> ExecSpec {
    ExecSpec { uid: uid(pod), id: id(n), argv: argv.iter().map(|s| s.to_string()).collect(), tty, stdin }
}

fn process(world: &World, spec: &ExecSpec) -> oci_spec::runtime::Process {
    let mut process = world.runtime().container_spec(&spec.uid, &spec.id).unwrap().process().clone().unwrap();
    process.set_args(Some(spec.argv.clone()));
    process
}

fn exec(world: &World, spec: &ExecSpec) -> Result<ExecProcess, RuntimeError> {
    world.runtime().exec(spec, &process(world, spec))
}

fn text(fd: Option<OwnedFd>) -> String {
    let mut text = String::new();
    File::from(fd.unwrap()).read_to_string(&mut text).unwrap();
    text
}

fn run(world: &World, argv: &[&str]) -> (ExitRecord, String, String) {
    let mut process = exec(world, &exec_spec(1, 1, argv, false, false)).unwrap();
    let exit = process.wait(Some(WAIT)).unwrap().unwrap();
    (exit, text(process.stdout.take()), text(process.stderr.take()))
}

fn sleeper(world: &World) {
    world.run_sandbox(1);
    world.start(&world.container(1, 1, &["sleep", "1000"]));
}

#[test]
fn exec_passes_streams_and_code_and_keeps_the_containers_bounds() {
    if !able() {
        return;
    }
    let world = World::new();
    sleeper(&world);
    let (exit, out, err) = run(&world, &["sh", "-c", "echo out; echo err >&2; exit 9"]);
    assert_eq!((exit.code, exit.signal, out.as_str(), err.as_str()), (9, None, "out\n", "err\n"));
    let (_, status, _) = run(&world, &["cat", "/proc/self/status"]);
    let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().trim().to_owned();
    assert_eq!(field("Seccomp:"), "2");
    assert_eq!((field("SigBlk:").as_str(), field("SigIgn:").as_str()), ("0000000000000000", "0000000000000000"));
    assert_eq!(field("Groups:"), "");
    let (exit, _, _) = run(&world, &["mkdir", "/x"]);
    assert_eq!(exit.code, 1, "the seccomp profile denies mkdir");
    let (_, fds, _) = run(&world, &["ls", "/proc/self/fd"]);
    assert_eq!(fds.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3"], "3 is ls's own");
    // stdin goes in, and its end too.
    let mut process = exec(&world, &exec_spec(1, 1, &["wc", "-c"], false, true)).unwrap();
    File::from(process.stdin.take().unwrap()).write_all(&[b'x'; 100_000]).unwrap();
    assert_eq!(process.wait(Some(WAIT)).unwrap().unwrap().code, 0);
    assert_eq!(text(process.stdout.take()).trim(), "100000");
    // Killed by a signal from outside.
    let mut process = exec(&world, &exec_spec(1, 1, &["sleep", "100"], false, false)).unwrap();
    process.signal(libc::SIGKILL).unwrap();
    let exit = process.wait(Some(WAIT)).unwrap().unwrap();
    assert_eq!((exit.code, exit.signal), (137, Some(9)));
    // Whoever leaves has nobody to run for.
    let process = exec(&world, &exec_spec(1, 1, &["sleep", "777"], false, false)).unwrap();
    let pid = process.pid;
    drop(process);
    wait_until("the exec'd process is gone", || !fs::exists(format!("/proc/{pid}")).unwrap());
    // Nothing is left of any of it.
    let dir = world.run.join("pods").join(uid(1).as_str());
    let names: Vec<_> = fs::read_dir(dir.join("c").join(id(1).as_str())).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_str().unwrap().starts_with("exec-")), "{names:?}");
    let names: Vec<_> = fs::read_dir(dir.join("lc").join(id(1).as_str())).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_str().unwrap().starts_with("tenant-")), "{names:?}");
}

#[test]
fn every_process_is_in_its_cgroup_in_every_hierarchy_and_has_the_filter() {
    if !able() {
        return;
    }
    let world = World::new();
    let monitor = world.run_sandbox(1).monitor;
    assert_placed(&fs::read_to_string(format!("/proc/{monitor}/cgroup")).unwrap(), &format!("/{}-monitors/", world.name));
    // One filter that each call compiles for itself, and one that is compiled once.
    for (n, profile) in [(1, None), (2, Some(default_without("mkdir")))] {
        let mut spec = world.container(1, n, &["sleep", "1000"]);
        if let Some(profile) = profile {
            spec.oci.linux_mut().as_mut().unwrap().set_seccomp(Some(profile));
        }
        world.start(&spec);
        let main = world.pid(1, n);
        assert_placed(&fs::read_to_string(format!("/proc/{main}/cgroup")).unwrap(), &spec.cgroup);
        for _ in 0..2 {
            let script = ["sh", "-c", "cat /proc/self/cgroup /proc/self/status; mkdir /made"];
            let mut process = exec(&world, &exec_spec(1, n, &script, false, false)).unwrap();
            let exit = process.wait(Some(WAIT)).unwrap().unwrap();
            let (seen, words) = (text(process.stdout.take()), text(process.stderr.take()));
            assert_eq!((exit.code, words.contains("Operation not permitted")), (1, true), "{words}");
            assert_placed(&seen, &spec.cgroup);
            assert!(seen.contains("Seccomp:\t2") && seen.contains("Seccomp_filters:\t1"), "{seen}");
        }
    }
    let filters: Vec<_> = fs::read_dir(world.run.join("seccomp")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(filters.len(), 1, "{filters:?}");
}

fn default_without(call: &str) -> oci_spec::runtime::LinuxSeccomp {
    let mut profile = runtime_default(Machine::OWN, &Default::default());
    let mut rules = profile.syscalls().clone().unwrap();
    for rule in &mut rules {
        let names = rule.names().iter().filter(|name| !name.starts_with(call)).cloned().collect();
        rule.set_names(names);
    }
    profile.set_syscalls(Some(rules));
    profile
}

/// In the cgroup, or below it, of each hierarchy that is mounted.
fn assert_placed(table: &str, cgroup: &str) {
    let unified = ["/sys/fs/cgroup/cgroup.controllers", "/sys/fs/cgroup/unified"].iter().any(|path| fs::exists(path).unwrap());
    // "4:memory:/a/b" in /proc/PID/cgroup; the v2 side is listed even where nobody has mounted it.
    let places: Vec<&str> = table.lines().filter(|l| l.contains(":/") && (unified || !l.starts_with("0::"))).collect();
    assert!(
        !places.is_empty() && places.iter().all(|l| l.split(':').next_back().unwrap().starts_with(cgroup)),
        "{cgroup}: {table}"
    );
}

pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + WAIT;
    while !is() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn exec_that_fails_or_leaves_children_neither_hangs_nor_leaks() {
    if !able() {
        return;
    }
    let mut world = World::new();
    sleeper(&world);
    let monitor = world.runtime().sandbox(&uid(1)).unwrap().unwrap().monitor;
    let children = || fs::read_to_string(format!("/proc/{monitor}/task/{monitor}/children")).unwrap().split_whitespace().count();
    let fds = || fs::read_dir(format!("/proc/{monitor}/fd")).unwrap().count();
    let before = (children(), fds());
    for (program, kind) in [
        ("/nope", FailureKind::NoProgram),
        ("/data/plain", FailureKind::NotExecutable),
        ("/data/garbage", FailureKind::NotExecutable),
    ] {
        let failed = exec(&world, &exec_spec(1, 1, &[program], false, false)).unwrap_err();
        assert_eq!(failed.start_failure().unwrap().0, kind, "{failed:?}");
    }
    // A background child keeps the pipes: the end is told all the same.
    let mut process = exec(&world, &exec_spec(1, 1, &["sh", "-c", "sleep 1000 & echo done"], false, false)).unwrap();
    let began = Instant::now();
    assert_eq!(process.wait(Some(WAIT)).unwrap().unwrap().code, 0);
    assert!(began.elapsed() < Duration::from_secs(5));
    drop(process);
    // The connections of this test and the watch's were there before, or are gone since.
    wait_until("children and descriptors are back", || children() <= before.0 && fds() <= before.1);
    // Its container ends at once, whatever exec left in its pid namespace.
    world.runtime().kill_container(&uid(1), &id(1)).unwrap();
    assert_eq!(world.exit(1).code, 137);
    let gone = exec(&world, &exec_spec(1, 1, &["true"], false, false)).unwrap_err();
    assert!(matches!(gone, RuntimeError::WrongState { .. }), "{gone:?}");
}

#[test]
fn exec_with_a_terminal() {
    if !able() {
        return;
    }
    let world = World::new();
    sleeper(&world);
    let mut process = exec(&world, &exec_spec(1, 1, &["sh", "-c", "read go; stty size; tty; exit 5"], true, true)).unwrap();
    process.resize(33, 99).unwrap();
    let mut pty = File::from(process.pty.take().unwrap());
    pty.write_all(b"go\n").unwrap();
    assert_eq!(process.wait(Some(WAIT)).unwrap().unwrap().code, 5);
    let mut seen = Vec::new();
    let mut buffer = [0; 512];
    // A terminal whose programs have gone says EIO.
    while let Ok(n @ 1..) = pty.read(&mut buffer) {
        seen.extend_from_slice(&buffer[..n]);
    }
    let seen = String::from_utf8(seen).unwrap();
    assert!(seen.contains("33 99") && seen.contains("/dev/pts/0"), "{seen:?}");
}

#[test]
fn no_line_is_lost_at_the_end_and_rotation_keeps_order() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["sh", "-c", "seq 1 200000; printf last"]);
    spec.log.as_mut().unwrap().max_size = 1 << 20;
    spec.log.as_mut().unwrap().max_files = 100;
    world.start(&spec);
    assert_eq!(world.exit(1).code, 0);
    let rotated = || coracle::runtime::logs::rotated(&world.log(1)).unwrap();
    let compressed = |file: &std::path::PathBuf| file.extension().is_some_and(|e| e == "gz");
    assert!(rotated().len() > 5);
    // The agent compresses all but the newest rotated one.
    wait_until("all but one are compressed", || rotated().iter().filter(|file| !compressed(file)).count() == 1);
    let mut files = rotated();
    assert!(!compressed(files.last().unwrap()));
    files.push(world.log(1));
    let read = |file: &std::path::PathBuf| {
        let mut text = String::new();
        if compressed(file) {
            flate2::read::MultiGzDecoder::new(File::open(file).unwrap()).read_to_string(&mut text).unwrap();
        } else {
            text = fs::read_to_string(file).unwrap();
        }
        assert!(text.len() <= 1 << 20);
        text
    };
    let text: String = files.iter().map(read).collect();
    let mut n = 0;
    for line in text.lines() {
        let text = line.rsplit(' ').next().unwrap();
        n += 1;
        assert_eq!(text, if n == 200_001 { "last".to_owned() } else { n.to_string() });
    }
    assert_eq!(n, 200_001);
}

#[test]
fn a_log_that_cannot_be_written_blocks_nothing() {
    if !able() {
        return;
    }
    let world = World::new();
    world.run_sandbox(1);
    // A file system of its own, of 256 KiB.
    let dir = world.log(1).parent().unwrap().to_owned();
    fs::create_dir_all(&dir).unwrap();
    coracle::sys::mount::tmpfs("small", &dir, "size=256k").unwrap();
    let spec = world.container(1, 1, &["sh", "-c", "seq 1 100000; sleep 1000"]);
    world.start(&spec);
    wait_until("the disk is full", || fs::metadata(world.log(1)).is_ok_and(|m| m.len() > 200_000));
    wait_until("the container is past its output", || {
        let pid = world.pid(1, 1);
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).is_ok_and(|c| !c.is_empty())
            && fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.contains("seq"))
    });
    let held = fs::read_to_string(world.log(1)).unwrap();
    assert!(held.ends_with('\n') && held.lines().all(|l| l.contains(" stdout F ")), "only whole lines");
    let last: u32 = held.lines().last().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert_eq!(held.lines().count() as u32, last, "none of them out of order");
    fs::remove_file(world.log(1)).unwrap();
    world.runtime().remove_container(&uid(1), &id(1)).unwrap();
    coracle::sys::mount::detach(&dir).unwrap();
}

#[test]
fn attach_shares_streams_and_a_slow_reader_is_dropped() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["sh", "-c", "while read line; do echo got $line; done; seq 1 100000; exit 4"]);
    spec.stdin = true;
    spec.stdin_once = true;
    world.start(&spec);
    let slow = world.runtime().attach(&uid(1), &id(1)).unwrap();
    let other = world.runtime().attach(&uid(1), &id(1)).unwrap();
    assert!(slow.stdin.is_some() && other.stdin.is_none());
    // Clients that come and go while the container is silent cost nothing that stays.
    let monitor = world.runtime().sandbox(&uid(1)).unwrap().unwrap().monitor;
    let fds = || fs::read_dir(format!("/proc/{monitor}/fd")).unwrap().count();
    let before = fds();
    for _ in 0..200 {
        match world.runtime().attach(&uid(1), &id(1)) {
            Ok(attached) => drop(attached),
            Err(e) => assert!(e.to_string().contains("too many clients"), "{e:?}"),
        }
    }
    wait_until("the monitor has let go of them", || fds() <= before);
    let mut stdin = File::from(slow.stdin.unwrap());
    stdin.write_all(b"one\ntwo\n").unwrap();
    let mut seen = [0; 16];
    File::from(other.stdout).read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"got one\ngot two\n");
    drop(stdin);
    // `slow` is never read: 600 KB do not fit into its pipe.
    assert_eq!(world.exit(1).code, 4);
    assert_eq!(world.lines(1).len(), 100_002);
}

#[test]
fn a_container_with_a_terminal() {
    if !able() {
        return;
    }
    let mut world = World::new();
    world.run_sandbox(1);
    let mut spec = world.container(1, 1, &["sh", "-c", "tty; read x; stty size; echo bye $x"]);
    spec.oci.process_mut().as_mut().unwrap().set_terminal(Some(true));
    (spec.tty, spec.stdin) = (true, true);
    world.start(&spec);
    let attached = world.runtime().attach(&uid(1), &id(1)).unwrap();
    assert!(attached.stderr.is_none());
    world.runtime().resize(&uid(1), &id(1), 44, 132).unwrap();
    File::from(attached.stdin.unwrap()).write_all(b"joe\n").unwrap();
    assert_eq!(world.exit(1).code, 0);
    let log = fs::read_to_string(world.log(1)).unwrap();
    assert!(log.contains("/dev/pts/0") && log.contains("44 132") && log.contains("bye joe"), "{log}");
}

#[test]
fn older_and_newer_peers_and_rubbish_are_answered() {
    if !able() {
        return;
    }
    let world = World::new();
    sleeper(&world);
    let dir = coracle::sys::file::open_dir_path(&world.run.join("pods").join(uid(1).as_str())).unwrap();
    let connect = || seqpacket::connect(dir.as_fd(), "mon.sock").unwrap();
    let ask = |socket: &OwnedFd, bytes: &[u8]| -> serde_json::Value {
        seqpacket::send(socket.as_fd(), bytes, &[]).unwrap();
        let mut buffer = vec![0; 65536];
        assert!(seqpacket::wait(socket.as_fd(), Some(Duration::from_secs(5))).unwrap());
        match seqpacket::receive(socket.as_fd(), &mut buffer).unwrap() {
            seqpacket::Received::Message { len, .. } => serde_json::from_slice(&buffer[..len]).unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let socket = connect();
    let hello = ask(&socket, br#"{"v":2,"id":5,"type":"hello","trace":[1],"body":{"release":"9.9.9","shiny":true}}"#);
    assert_eq!((hello["v"].as_u64(), hello["id"].as_u64(), hello["type"].as_str()), (Some(1), Some(5), Some("hello")));
    let unknown = ask(&socket, br#"{"v":2,"id":6,"type":"checkpoint","body":{}}"#);
    assert_eq!((unknown["id"].as_u64(), unknown["body"]["kind"].as_str()), (Some(6), Some("unknown_type")));
    for rubbish in [&b"\0\x01rubbish"[..], b"{}", br#"{"v":1,"type":"signal","body":{"id":"../x","signal":9}}"#, &[b'['; 60_000]]
    {
        assert_eq!(ask(&socket, rubbish)["body"]["kind"], "bad_request");
    }
    // Longer than a frame may be.
    assert_eq!(ask(&socket, &vec![b' '; 70_000])["type"], "error");
    // Peers that never read, and too many of them, stop nobody.
    let crowd: Vec<OwnedFd> = (0..200).filter_map(|_| seqpacket::connect(dir.as_fd(), "mon.sock").ok()).collect();
    for peer in &crowd {
        for _ in 0..500 {
            if seqpacket::send(peer.as_fd(), br#"{"v":1,"id":1,"type":"state"}"#, &[]).is_err() {
                break;
            }
        }
    }
    drop(socket);
    drop(crowd);
    wait_until("the monitor answers", || world.runtime().sandbox(&uid(1)).unwrap().unwrap().answers);
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(world.run.join("pods/pod-1/mon.sock")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_process_started_by_exec_can_be_handed_on() {
    if !able() {
        return;
    }
    let world = World::new();
    sleeper(&world);
    let process = exec(&world, &exec_spec(1, 1, &["sh", "-c", "read x; exit $x"], false, true)).unwrap();
    let mut again = ExecProcess::from_parts(process.into_parts());
    assert_eq!(again.wait(Some(Duration::from_millis(50))).unwrap(), None);
    File::from(again.stdin.take().unwrap()).write_all(b"6\n").unwrap();
    assert!(seqpacket::wait(again.connection(), Some(WAIT)).unwrap());
    assert_eq!(again.wait(Some(WAIT)).unwrap().unwrap().code, 6);
    assert!(again.connection().as_raw_fd() > 2);
}
