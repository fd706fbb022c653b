//! The images that both sides run: Debian's static busybox as a docker archive, made here.

use std::io::Write;
use std::path::Path;

pub const PROBE: &str = "coracle.test/probe:1";
/// Runs as `app:audio`, with a working directory and environment of its own.
pub const PROBE_USER: &str = "coracle.test/probe-user:1";
pub const PAUSE: &str = "coracle.test/pause:1";

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:100:App:/home/app:/bin/sh\n";
const GROUP: &str = "root:x:0:\nusers:x:100:\naudio:x:29:app\nvideo:x:44:app,root\nwheel:x:10:root\n";
const APPLETS: [&str; 20] = [
    "sh", "cat", "stat", "sleep", "id", "ls", "head", "unshare", "chroot", "mknod", "mount", "tr", "grep", "pwd", "mkdir",
    "true", "sort", "touch", "find", "echo",
];

/// Writes all three images into one archive.
pub fn write_archive(path: &Path) {
    let layer = layer();
    let diff_id = format!("sha256:{}", hex(&layer));
    let busybox = serde_json::json!({"Env": ["PATH=/bin:/sbin", "IMAGE=yes"], "Cmd": ["/bin/sh"]});
    let user = serde_json::json!({
        "Env": ["PATH=/bin", "IMAGE=user", "OVER=image"], "User": "app:audio", "WorkingDir": "/home/app",
        "Entrypoint": ["/bin/sh", "-c"], "Cmd": ["exit 1"],
    });
    let pause = serde_json::json!({"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sleep", "1000000"]});

    let mut archive = tar::Builder::new(std::fs::File::create(path).unwrap());
    let mut manifest = Vec::new();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&layer).unwrap();
    add(&mut archive, "layer.tar", 0o644, &gzip.finish().unwrap());
    for (tag, config) in [(PROBE, busybox), (PROBE_USER, user), (PAUSE, pause)] {
        let config = serde_json::json!({
            "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" }, "os": "linux",
            "config": config, "rootfs": {"type": "layers", "diff_ids": [diff_id]}, "history": [{"created_by": "tests/stock"}],
        })
        .to_string();
        let name = format!("{}.json", hex(config.as_bytes()));
        add(&mut archive, &name, 0o644, config.as_bytes());
        manifest.push(serde_json::json!({"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}));
    }
    add(&mut archive, "manifest.json", 0o644, serde_json::Value::Array(manifest).to_string().as_bytes());
    archive.finish().unwrap();
}

fn layer() -> Vec<u8> {
    let busybox = std::fs::read("/bin/busybox").expect("Debian's busybox-static is needed: apt-get install busybox-static");
    let mut tar = tar::Builder::new(Vec::new());
    for (name, mode, owner) in [
        ("bin/", 0o755, 0),
        ("etc/", 0o755, 0),
        ("home/", 0o755, 0),
        ("home/app/", 0o755, 1000),
        ("root/", 0o700, 0),
        ("tmp/", 0o1777, 0),
    ] {
        let mut header = header(tar::EntryType::Directory, mode, 0);
        header.set_uid(owner);
        tar.append_data(&mut header, name, std::io::empty()).unwrap();
    }
    add(&mut tar, "bin/busybox", 0o755, &busybox);
    // This test itself, which is static: see syscalls.rs.
    add(&mut tar, "bin/probe", 0o755, &std::fs::read(std::env::current_exe().unwrap()).unwrap());
    for applet in APPLETS {
        tar.append_link(&mut header(tar::EntryType::Symlink, 0o777, 0), format!("bin/{applet}"), "busybox").unwrap();
    }
    add(&mut tar, "etc/passwd", 0o644, PASSWD.as_bytes());
    add(&mut tar, "etc/group", 0o644, GROUP.as_bytes());
    tar.into_inner().unwrap()
}

fn add<W: Write>(tar: &mut tar::Builder<W>, name: &str, mode: u32, bytes: &[u8]) {
    tar.append_data(&mut header(tar::EntryType::Regular, mode, bytes.len()), name, bytes).unwrap();
}

fn header(kind: tar::EntryType, mode: u32, size: usize) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size as u64);
    header
}

fn hex(bytes: &[u8]) -> String {
    ring::digest::digest(&ring::digest::SHA256, bytes).as_ref().iter().map(|b| format!("{b:02x}")).collect()
}
