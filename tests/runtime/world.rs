//! A throw-away world: run root, layers, cgroups, one runtime; all of it gone when it is dropped.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use coracle::runtime::cgroup::Cgroups;
use coracle::runtime::model::*;
use coracle::runtime::{Runtime, RuntimeConfig, mount_run, unmount_run};
use coracle::store::effects::Effects;
use coracle::store::ids::{ContainerId, PodUid};
use coracle::store::records::ExitRecord;
use coracle::sys::{clock, exe};

pub const WAIT: Duration = Duration::from_secs(30);

/// False (and a loud word) where this machine cannot run containers.
pub fn able() -> bool {
    let lack = if !nix::unistd::geteuid().is_root() {
        "not root"
    } else if !Path::new("/bin/busybox").exists() {
        "no /bin/busybox (Debian: busybox-static)"
    } else {
        return true;
    };
    assert!(std::env::var_os("CI").is_none(), "{lack}");
    eprintln!("SKIP: {lack}");
    false
}

pub struct World {
    pub root: PathBuf,
    pub run: PathBuf,
    pub name: String,
    pub runtime: Option<Runtime>,
    pub events: mpsc::Receiver<RuntimeEvent>,
    seen: Vec<RuntimeEvent>,
    _dir: Option<tempfile::TempDir>,
}

pub fn uid(n: u32) -> PodUid {
    PodUid::parse(&format!("pod-{n}")).unwrap()
}

pub fn id(n: u32) -> ContainerId {
    ContainerId::parse(&format!("{n:064x}")).unwrap()
}

impl World {
    pub fn new() -> World {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let dir = tempfile::tempdir().unwrap();
        let name = format!("coracle-rt-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = dir.path().to_owned();
        make_layer(&root.join("layer"));
        let mut world = World::over(&root, &name);
        world._dir = Some(dir);
        world
    }

    /// A runtime over what is there: how an agent starts (again).
    pub fn over(root: &Path, name: &str) -> World {
        exe::use_program(Path::new(env!("CARGO_BIN_EXE_coracle"))).unwrap();
        let run = root.join("run");
        mount_run(&run).unwrap();
        let (runtime, events) = open(&run);
        World { root: root.to_owned(), run, name: name.to_owned(), runtime: Some(runtime), events, seen: Vec::new(), _dir: None }
    }

    pub fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    /// The agent dies and another comes; monitors live on.
    pub fn restart(&mut self) -> Vec<SandboxState> {
        self.runtime = None;
        let (runtime, events) = open(&self.run);
        self.runtime = Some(runtime);
        self.events = events;
        self.seen.clear();
        self.runtime().recover().unwrap()
    }

    pub fn cgroup(&self, n: u32) -> String {
        format!("/{}/pod{}", self.name, uid(n))
    }

    pub fn sandbox_spec(&self, n: u32) -> SandboxSpec {
        SandboxSpec {
            uid: uid(n),
            namespace: "default".into(),
            name: format!("test-{n}"),
            hostname: format!("host-{n}"),
            host_network: false,
            host_ipc: false,
            sysctls: Vec::new(),
            cgroup: self.cgroup(n),
            resources: CgroupResources::default(),
            monitor_cgroup: format!("/{}-monitors/{}", self.name, uid(n)),
            shm_size: 1 << 20,
        }
    }

    pub fn run_sandbox(&self, n: u32) -> SandboxState {
        self.runtime().run_sandbox(&self.sandbox_spec(n)).unwrap()
    }

    /// A container of pod `pod` that runs `argv`.
    pub fn container(&self, pod: u32, n: u32, argv: &[&str]) -> ContainerSpec {
        let pins = self.runtime().pins(&uid(pod)).unwrap();
        ContainerSpec {
            uid: uid(pod),
            id: id(n),
            name: format!("c{n}"),
            attempt: 0,
            oci: spec(&pins, argv),
            rootfs: Rootfs {
                lower: vec![self.root.join("layer")],
                upper: self.root.join(format!("upper/{n}/upper")),
                work: self.root.join(format!("upper/{n}/work")),
            },
            cgroup: format!("{}/{}", self.cgroup(pod), id(n)),
            resources: CgroupResources::default(),
            log: Some(LogSpec { path: self.log(n), max_size: 10 << 20, max_files: 5 }),
            stdin: false,
            stdin_once: false,
            tty: false,
        }
    }

    pub fn log(&self, n: u32) -> PathBuf {
        self.root.join(format!("log/c{n}/0.log"))
    }

    /// The texts of a container's log, without stamps.
    pub fn lines(&self, n: u32) -> Vec<String> {
        let text = fs::read_to_string(self.log(n)).unwrap_or_default();
        text.lines().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect()
    }

    pub fn start(&self, spec: &ContainerSpec) {
        self.runtime().create_container(spec).unwrap();
        self.runtime().start_container(&spec.uid, &spec.id).unwrap();
    }

    pub fn phase(&self, pod: u32, n: u32) -> Option<ContainerPhase> {
        let state = self.runtime().sandbox(&uid(pod)).unwrap()?;
        state.containers.into_iter().find(|c| c.id == id(n)).map(|c| c.phase)
    }

    pub fn pid(&self, pod: u32, n: u32) -> i32 {
        match self.phase(pod, n) {
            Some(ContainerPhase::Running { pid, .. } | ContainerPhase::Created { pid }) => pid,
            other => panic!("{other:?}"),
        }
    }

    /// The exit event of a container.
    pub fn exit(&mut self, n: u32) -> ExitRecord {
        let found = |e: &RuntimeEvent| match e {
            RuntimeEvent::Exited { id: of, exit, .. } if *of == id(n) => Some(exit.clone()),
            _ => None,
        };
        let deadline = Instant::now() + WAIT;
        loop {
            if let Some(exit) = self.seen.iter().find_map(found) {
                return exit;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.seen.push(self.events.recv_timeout(left).expect("no exit event"));
        }
    }

    pub fn monitor_died(&mut self, pod: u32) {
        let deadline = Instant::now() + WAIT;
        while !self.seen.iter().any(|e| matches!(e, RuntimeEvent::MonitorDied { uid: of } if *of == uid(pod))) {
            let left = deadline.saturating_duration_since(Instant::now());
            self.seen.push(self.events.recv_timeout(left).expect("no death event"));
        }
    }

    pub fn exit_file(&self, pod: u32, n: u32) -> PathBuf {
        self.run.join("pods").join(uid(pod).as_str()).join("exit").join(id(n).as_str())
    }

    /// What the kernel has of ours: mounts, cgroups, processes.
    pub fn inventory(&self) -> Inventory {
        Inventory::of(&self.run, &self.name)
    }
}

fn open(run: &Path) -> (Runtime, mpsc::Receiver<RuntimeEvent>) {
    let (effects, _) = Effects::open(run, &clock::boot_id().unwrap()).unwrap();
    let (send, events) = mpsc::channel();
    let config = RuntimeConfig { run: run.to_owned(), cgroups: Cgroups::detect("/").unwrap(), cgroup_parent: "/".to_owned() };
    (Runtime::open(config, Arc::new(effects), send).unwrap(), events)
}

impl Drop for World {
    fn drop(&mut self) {
        if self._dir.is_none() {
            return;
        }
        let runtime = self.runtime.take().unwrap_or_else(|| open(&self.run).0);
        if std::thread::panicking() {
            for entry in fs::read_dir(self.run.join("pods")).into_iter().flatten().flatten() {
                eprintln!("monitor.err: {}", fs::read_to_string(entry.path().join("monitor.err")).unwrap_or_default());
            }
        }
        for entry in fs::read_dir(self.run.join("pods")).into_iter().flatten().flatten() {
            let uid = PodUid::parse(entry.file_name().to_str().unwrap()).unwrap();
            if let Err(e) = runtime.remove_sandbox(&uid) {
                eprintln!("clean up of {uid}: {e:?}");
            }
        }
        drop(runtime);
        let cgroups = Cgroups::detect("/").unwrap();
        for parent in [format!("/{}", self.name), format!("/{}-monitors", self.name)] {
            let _ = cgroups.kill(&parent);
            let _ = cgroups.remove(&parent);
        }
        let _ = coracle::sys::mount::detach(&self.run.join("skeleton"));
        let _ = unmount_run(&self.run);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub processes: BTreeSet<String>,
    pub files: BTreeSet<String>,
}

impl Inventory {
    fn of(run: &Path, name: &str) -> Inventory {
        let mut found = Inventory::default();
        for line in fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
            let target = line.split(' ').nth(4).unwrap();
            if Path::new(target).starts_with(run) {
                found.mounts.insert(target.to_owned());
            }
        }
        let roots =
            ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/cpu"];
        for root in roots {
            for top in [name.to_owned(), format!("{name}-monitors")] {
                walk(&Path::new(root).join(top), &mut |path| {
                    if path.is_dir() {
                        found.cgroups.insert(path.display().to_string());
                    }
                });
            }
        }
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let cgroup = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
            if cgroup.contains(name) {
                let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
                if !stat.contains(") Z ") {
                    found.processes.insert(format!("{} {}", entry.file_name().to_str().unwrap(), comm.trim()));
                }
            }
        }
        walk(&run.join("pods"), &mut |path| {
            found.files.insert(path.display().to_string());
        });
        // The directory of all pods is the runtime's own.
        found.files.remove(&run.join("pods").display().to_string());
        found
    }
}

fn walk(path: &Path, see: &mut dyn FnMut(&Path)) {
    if fs::symlink_metadata(path).is_err() {
        return;
    }
    see(path);
    if fs::symlink_metadata(path).is_ok_and(|m| m.is_dir()) {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            walk(&entry.path(), see);
        }
    }
}

fn make_layer(layer: &Path) {
    for dir in ["bin", "tmp", "proc", "sys", "dev", "etc", "root", "data"] {
        fs::create_dir_all(layer.join(dir)).unwrap();
    }
    fs::copy("/bin/busybox", layer.join("bin/busybox")).unwrap();
    for name in [
        "sh", "sleep", "cat", "echo", "true", "false", "seq", "yes", "hostname", "id", "ls", "kill", "head", "stty", "tty",
        "test", "dd", "grep", "mkdir", "ip", "date", "wc", "readlink", "env", "touch", "tail",
    ] {
        symlink("busybox", layer.join("bin").join(name)).unwrap();
    }
    fs::write(layer.join("data/plain"), "not a program").unwrap();
    fs::write(layer.join("data/garbage"), [0u8, 1, 2, 3]).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(layer.join("data/garbage"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// What a plain pod's container has.
pub fn spec(pins: &Pins, argv: &[&str]) -> oci_spec::runtime::Spec {
    let ns = |kind: &str, path: &Option<PathBuf>| match path {
        Some(path) => serde_json::json!({"type": kind, "path": path}),
        None => serde_json::Value::Null,
    };
    let namespaces: Vec<_> = [
        serde_json::json!({"type": "pid"}),
        serde_json::json!({"type": "mount"}),
        ns("network", &pins.net),
        ns("ipc", &pins.ipc),
        ns("uts", &pins.uts),
    ]
    .into_iter()
    .filter(|ns| !ns.is_null())
    .collect();
    let caps = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETUID", "CAP_SETGID", "CAP_NET_BIND_SERVICE"];
    let spec = serde_json::json!({
        "ociVersion": "1.2.0",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": ["PATH=/bin", "HOME=/root"],
            "cwd": "/",
            "capabilities": {"bounding": caps, "effective": caps, "permitted": caps},
            "noNewPrivileges": false,
        },
        "root": {"path": "rootfs", "readonly": false},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "bind", "source": pins.shm, "options": ["rbind", "ro"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}
        ],
        "linux": {
            "namespaces": namespaces,
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "architectures": ["SCMP_ARCH_X86_64"],
                "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]
            },
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"]
        }
    });
    serde_json::from_value(spec).unwrap()
}
