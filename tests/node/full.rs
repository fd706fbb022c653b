//! A node whose disk is full, of bytes or of inodes: pods run on, exits and deletes go through,
//! every verb answers, what cannot be done says why, and all goes on once there is room again.

use std::fs;
use std::io::Write;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::support::{Node, STAY, condition, container, pod, privileged};

/// What is filled, and how the file system for it is made.
#[derive(Clone, Copy)]
enum Lack {
    Space,
    Inodes,
}

impl Lack {
    fn options(self) -> &'static str {
        match self {
            Lack::Space => "size=64m",
            // The image and a few pods; empty files take no space.
            Lack::Inodes => "size=256m,nr_inodes=1200",
        }
    }

    /// Takes all that is left.
    fn fill(self, node: &Node) {
        let ballast = ballast(node);
        match self {
            Lack::Space => {
                let path = node.seen(&ballast.join("bytes"));
                let mut file = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
                while file.write_all(&[0; 4096]).is_ok() {}
            }
            Lack::Inodes => {
                let from = fs::read_dir(node.seen(&ballast)).unwrap().count();
                for n in from.. {
                    if fs::File::create(node.seen(&ballast.join(n.to_string()))).is_err() {
                        break;
                    }
                }
            }
        }
    }
}

fn ballast(node: &Node) -> std::path::PathBuf {
    node.root().join("state/ballast")
}

fn life(lack: Lack) {
    if !privileged() {
        return;
    }
    let mut node = Node::new();
    let state = node.root().join("state");
    fs::create_dir_all(&state).unwrap();
    let out = node.command("mount").args(["-t", "tmpfs", "-o", lack.options(), "tmpfs"]).arg(&state).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    node.start();
    node.import();
    node.put("stays.yaml", &pod("stays", "Always", &[], &[("c", STAY)], ""));
    node.put("goes.yaml", &pod("goes", "Always", &[], &[("c", STAY)], ""));
    node.put("job.yaml", &pod("job", "Never", &[], &[("c", "while :; do sleep 0.1; done; exit 33")], ""));
    for name in ["stays", "goes", "job"] {
        node.wait_ready(name);
    }
    let before = container(&node.status("stays"), "c");
    fs::create_dir(node.seen(&ballast(&node))).unwrap();
    lack.fill(&node);

    // Exits are journalled and published.
    let is_job = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("exit 33"));
    kill(Pid::from_raw(node.shells().into_iter().find(is_job).unwrap()), Signal::SIGKILL).unwrap();
    let status = node.wait_phase("job", "Failed");
    assert_eq!(container(&status, "c")["state"]["terminated"]["exitCode"], 137);
    lack.fill(&node);
    // Deletes go through.
    node.take_away("goes.yaml");
    node.wait_gone("goes");
    lack.fill(&node);
    // What is new waits and says for what.
    node.put("new.yaml", &pod("new", "Always", &[], &[("c", STAY)], ""));
    node.wait("the new pod says why it does not begin", 20, |n| {
        let out = n.cli(&["pods", "new", "-o", "wide"]);
        let told = format!("{}{}{}", String::from_utf8_lossy(&out.stdout), n.status("new"), n.ok(&["pods", "-o", "wide"]));
        told.contains("No space left on device")
    });
    // Every verb answers, and one that needs room says so.
    assert_eq!(node.ok(&["logs", "stays"]), "up\n");
    assert_eq!(node.ok(&["exec", "stays", "--", "echo", "hi"]), "hi\n");
    assert!(node.ok(&["images"]).contains("busybox"));
    for verb in [&["info"][..], &["inspect", "stays"], &["pods", "-o", "json"]] {
        node.ok(verb);
    }
    let out = node.cli(&["check"]);
    assert_eq!(out.status.code(), Some(1), "check: the disk is full");
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(said.contains("disk for images (missing)") && said.contains("--root DIR"), "{said}");
    fs::write(node.path("other.tar"), another_image()).unwrap();
    let out = node.cli(&["import", node.path("other.tar").to_str().unwrap()]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(1) && said.contains("No space left on device"), "{said}");
    assert_eq!(container(&node.status("stays"), "c"), before);

    // A new agent gets along with a full disk, too.
    node.kill_agent();
    lack.fill(&node);
    node.start();
    assert_eq!(container(&node.status("stays"), "c"), before);
    let status = node.status("job");
    assert_eq!(container(&status, "c")["state"]["terminated"]["exitCode"], 137, "{status}");

    // Room again: it goes on by itself, and nothing was lost.
    fs::remove_dir_all(node.seen(&ballast(&node))).unwrap();
    let status = node.wait_ready("new");
    assert_eq!(condition(&status, "Ready")["status"], "True");
    assert_eq!(container(&node.status("stays"), "c"), before);
    node.ok(&["import", node.path("other.tar").to_str().unwrap()]);
    node.kill_agent();
    node.start();
    assert_eq!(container(&node.status("stays"), "c"), before);
    assert_eq!(container(&node.status("job"), "c")["state"]["terminated"]["exitCode"], 137);
}

/// A docker archive of one layer that is on no node yet: a few files of noise.
fn another_image() -> Vec<u8> {
    use coracle::images::digest::Digest;
    let add = |to: &mut tar::Builder<Vec<u8>>, name: &str, bytes: &[u8]| {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        to.append_data(&mut header, name, bytes).unwrap();
    };
    let mut layer = tar::Builder::new(Vec::new());
    for n in 0..40u8 {
        add(&mut layer, &format!("file{n}"), &[n; 50_000]);
    }
    let layer = layer.into_inner().unwrap();
    let architecture = coracle::images::model::Platform::host().architecture;
    let config = serde_json::json!({
        "os": "linux", "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": [Digest::of(&layer).to_string()]},
    })
    .to_string();
    let mut archive = tar::Builder::new(Vec::new());
    add(&mut archive, "layer.tar", &layer);
    add(&mut archive, "config.json", config.as_bytes());
    add(&mut archive, "manifest.json", br#"[{"Config":"config.json","RepoTags":["other:1"],"Layers":["layer.tar"]}]"#);
    archive.into_inner().unwrap()
}

#[test]
fn without_space_pods_run_on_exits_and_deletes_go_through_and_it_recovers_by_itself() {
    life(Lack::Space);
}

#[test]
fn without_inodes_pods_run_on_exits_and_deletes_go_through_and_it_recovers_by_itself() {
    life(Lack::Inodes);
}
