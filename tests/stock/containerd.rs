//! The stock side: containerd and runc of our own building, driven by crictl with the sandbox and
//! container configs that a kubelet would send.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::image;

pub struct Containerd {
    process: Child,
    dir: PathBuf,
    bin: PathBuf,
    pub cgroup_parent: String,
}

/// Builds what is missing of containerd, its shim, ctr, crictl and runc; says where they are.
pub fn build() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster");
    let bin = std::env::var_os("CORACLE_STOCK_BIN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cluster"), PathBuf::from);
    let status = Command::new(tests.join("build-stock")).arg(&bin).stdout(Stdio::inherit()).status().unwrap();
    assert!(status.success(), "tests/cluster/build-stock failed: it needs Go 1.25, gcc, pkg-config and libseccomp-dev");
    bin
}

impl Containerd {
    pub fn start(bin: &Path, dir: &Path, archive: &Path) -> Containerd {
        std::fs::create_dir_all(dir.join("cni")).unwrap();
        let d = dir.display();
        let config = format!(
            r#"
version = 3
root = "{d}/containerd"
state = "{d}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{d}/containerd.sock"
[ttrpc]
  address = "{d}/containerd.sock.ttrpc"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  # Machines without CAP_SYS_RESOURCE refuse the -998 of the pause process.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{d}/cni-bin"]
    conf_dir = "{d}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{bin}/runc"
        SystemdCgroup = false
"#,
            pause = image::PAUSE,
            bin = bin.display(),
        );
        std::fs::write(dir.join("config.toml"), config).unwrap();
        write_cni(dir);
        let log = std::fs::File::create(dir.join("containerd.log")).unwrap();
        let process = Command::new(bin.join("containerd"))
            .args(["--config", &format!("{d}/config.toml"), "--log-level", "warn"])
            .env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let stock = Containerd {
            process,
            dir: dir.into(),
            bin: bin.into(),
            cgroup_parent: format!("/coracle-stock-{}", std::process::id()),
        };
        let start = Instant::now();
        while !stock.ctr(&["version"]).status().unwrap().success() {
            assert!(start.elapsed() < Duration::from_secs(60), "containerd does not start: see {d}/containerd.log");
            std::thread::sleep(Duration::from_millis(100));
        }
        let import = stock.ctr(&["-n", "k8s.io", "images", "import", &archive.display().to_string()]).output().unwrap();
        assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
        stock
    }

    fn ctr(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.bin.join("ctr"));
        command.arg("-a").arg(self.dir.join("containerd.sock")).args(args).stdout(Stdio::null()).stderr(Stdio::null());
        if args.contains(&"import") {
            command.stderr(Stdio::piped());
        }
        command
    }

    fn crictl(&self, args: &[&str]) -> Result<String, String> {
        let endpoint = format!("unix://{}/containerd.sock", self.dir.display());
        let output = Command::new(self.bin.join("crictl"))
            .args(["-r", &endpoint, "-i", &endpoint, "-t", "60s"])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Runs one pod; returns what its container logged up to `== end`, and what an exec printed.
    pub fn run(&self, name: &str, sandbox: Value, container: Value, script: &str) -> (String, String) {
        let dir = self.dir.join(name);
        std::fs::create_dir_all(dir.join("log")).unwrap();
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "attempt": 0},
            "hostname": name,
            "log_directory": dir.join("log"),
            "dns_config": {"servers": ["10.0.0.10"]},
            "linux": {
                "cgroup_parent": format!("{}/pod{name}", self.cgroup_parent),
                "security_context": {"namespace_options": {"pid": 1}, "seccomp": {"profile_type": 0}},
            },
        });
        merge(&mut pod, sandbox);
        let mut config = json!({
            "metadata": {"name": "c", "attempt": 0},
            "image": {"image": image::PROBE},
            "command": ["/bin/sh", "-c", format!("{script}\nexec sleep 1000000")],
            "log_path": "c.log",
            "mounts": self.kubelet_mounts(&dir),
            "linux": {
                "resources": {"cpu_period": 100_000, "cpu_shares": 2, "oom_score_adj": 1000},
                "security_context": {
                    "namespace_options": {"pid": 1},
                    "run_as_user": {"value": 0},
                    "seccomp": {"profile_type": 0},
                    "masked_paths": masked_paths(),
                    "readonly_paths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
                },
            },
        });
        merge(&mut config, container);
        if let Some(Value::Array(more)) = config.as_object_mut().unwrap().remove("more_mounts") {
            config["mounts"].as_array_mut().unwrap().extend(more);
        }
        let (pod_file, config_file) = (dir.join("pod.json"), dir.join("container.json"));
        std::fs::write(&pod_file, pod.to_string()).unwrap();
        std::fs::write(&config_file, config.to_string()).unwrap();

        let (pod_file, config_file) = (pod_file.display().to_string(), config_file.display().to_string());
        let pod_id = self.crictl(&["runp", &pod_file]).unwrap_or_else(|e| panic!("{name}: {e}"));
        let id =
            self.crictl(&["create", "--no-pull", &pod_id, &config_file, &pod_file]).unwrap_or_else(|e| panic!("{name}: {e}"));
        self.crictl(&["start", &id]).unwrap_or_else(|e| panic!("{name}: {e}"));
        let log = super::wait_for_log(name, &dir.join("log/c.log"));
        let exec = self.crictl(&["exec", "-s", &id, "/bin/sh", "-c", script]).unwrap_or_else(|e| panic!("{name}: exec: {e}"));
        self.crictl(&["rmp", "-f", &pod_id]).unwrap_or_else(|e| panic!("{name}: {e}"));
        (log, exec)
    }

    /// The kubelet's own mounts: the hosts file and the termination log.
    fn kubelet_mounts(&self, dir: &Path) -> Value {
        use std::os::unix::fs::PermissionsExt;
        for (file, mode) in [("hosts", 0o644), ("termination-log", 0o666)] {
            std::fs::write(dir.join(file), "").unwrap();
            std::fs::set_permissions(dir.join(file), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        json!([
            {"container_path": "/etc/hosts", "host_path": dir.join("hosts")},
            {"container_path": "/dev/termination-log", "host_path": dir.join("termination-log")},
        ])
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Err(e) = self.crictl(&["rmp", "-af"]) {
            eprintln!("stock: {e}");
        }
        // Ours to end, by pid; SIGTERM lets it unmount.
        super::stop(&mut self.process);
        super::clean_mounts(&self.dir);
        super::clean_cgroups(&self.cgroup_parent);
    }
}

/// As kubelet 1.34 sends them.
fn masked_paths() -> Vec<String> {
    let mut paths: Vec<String> = [
        "/proc/asound",
        "/proc/acpi",
        "/proc/interrupts",
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/timer_list",
        "/proc/timer_stats",
        "/proc/sched_debug",
        "/proc/scsi",
        "/sys/firmware",
        "/sys/devices/virtual/powercap",
    ]
    .map(str::to_owned)
    .to_vec();
    for cpu in 0..std::thread::available_parallelism().unwrap().get() {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/thermal_throttle");
        if Path::new(&path).exists() {
            paths.push(path);
        }
    }
    paths
}

/// Objects merge, all else is replaced.
pub fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}

/// containerd wants an address for a pod; which one plays no part here.
fn write_cni(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let bin = dir.join("cni-bin");
    std::fs::create_dir_all(&bin).unwrap();
    let plugin = "#!/bin/sh\ncase $CNI_COMMAND in\nVERSION) echo '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"1.0.0\"]}' ;;\n\
        ADD) echo \"{\\\"cniVersion\\\":\\\"1.0.0\\\",\\\"interfaces\\\":[{\\\"name\\\":\\\"$CNI_IFNAME\\\",\\\"sandbox\\\":\\\"$CNI_NETNS\\\"}],\
        \\\"ips\\\":[{\\\"address\\\":\\\"10.99.0.2/24\\\",\\\"interface\\\":0}]}\" ;;\nesac\n";
    for name in ["address", "loopback"] {
        std::fs::write(bin.join(name), plugin).unwrap();
        std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let conflist = r#"{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "address"}]}"#;
    std::fs::write(dir.join("cni/10-net.conflist"), conflist).unwrap();
}
