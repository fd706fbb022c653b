//! Each failpoint of the volumes × {EIO, SIGKILL}, in a child that shares this thread's mounts.
//! Whatever was cut off, the next life makes the volumes whole and takes all of them away.
//!
//! `cargo test --features failpoints --test volumes killed`

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle::api::pod::Pod;
use coracle::store::effects::Effect;
use coracle::sys::mount_table;
use nix::mount::{MsFlags, mount};

use crate::world::{World, in_own_mounts, pod, read};

const CHILD: &str = "CORACLE_TEST_VOLUMES_CHILD";

fn everything(root: &Path) -> Pod {
    let shared = root.join("shared").display().to_string();
    pod(
        &format!(
            "{{name: e, emptyDir: {{}}}}, {{name: mem, emptyDir: {{medium: Memory}}}}, {{name: m, configMap: {{name: m}}}}, {{name: s, secret: {{secretName: s}}}}, {{name: h, hostPath: {{path: {shared}}}}}"
        ),
        "{name: e, mountPath: /a, subPath: x/y}, {name: m, mountPath: /b, subPath: conf}, {name: h, mountPath: /h, mountPropagation: Bidirectional}",
    )
}

fn version(w: &mut World, text: &str) {
    w.map("m", &[("conf", text), (text, "x")]);
    w.secret("s", &[("word", text)]);
}

/// A pod's whole life: made, refreshed, mounted again, taken away. Stops at the first error.
#[test]
fn child() {
    let Some(root) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let mut w = World::at(&root);
    let pod = everything(&root);
    let mut life = || -> Result<(), coracle::volumes::model::VolumeError> {
        w.volumes.share()?;
        version(&mut w, "one");
        w.setup(&pod)?;
        w.mounts(&pod)?;
        version(&mut w, "two");
        w.setup(&pod)?;
        w.mounts(&pod)?;
        w.volumes.teardown(&w.uid)
    };
    if let Err(e) = life() {
        println!("failed: {e}");
    }
}

fn run(root: &Path, point: &str, action: &str, at: u64) -> bool {
    let case = format!("{point}={action}@{at}");
    let trace = root.join("trace");
    fs::write(&trace, "").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["killed::child", "--exact", "--test-threads=1"])
        .env(CHILD, root)
        .env("CORACLE_FAILPOINTS", &case)
        .env("CORACLE_FAILPOINTS_TRACE", &trace)
        .output()
        .unwrap();
    let reached = fs::read_to_string(&trace).unwrap().lines().filter(|l| l.ends_with(point)).count() as u64 >= at;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal() == Some(9), reached && action == "kill", "{case}: {text}");
    assert!(reached || !text.contains("failed: "), "{case}: {text}");
    // The next life.
    let mut w = World::at(root);
    let pod = everything(root);
    let kubelet = w.root.join("kubelet");
    w.volumes.share().unwrap_or_else(|e| panic!("{case}: {e:?}"));
    let over = mount_table::below(&kubelet).unwrap().into_iter().filter(|m| *m == kubelet).count();
    assert!(over == 1 && mount_table::of(&kubelet).unwrap().unwrap().shared, "{case}");
    version(&mut w, "three");
    w.setup(&pod).unwrap_or_else(|e| panic!("{case}: {e:?}"));
    let plans = w.mounts(&pod).unwrap_or_else(|e| panic!("{case}: {e:?}"));
    assert_eq!(
        read(plans.iter().find(|p| p.destination == Path::new("/b")).map(|p| p.source.clone()).unwrap()),
        "three",
        "{case}"
    );
    for (kind, name, file) in [("configmap", "m", "conf"), ("secret", "s", "word")] {
        let volume = w.volume(kind, name);
        assert_eq!(read(volume.join(file)), "three", "{case}");
        let left: Vec<_> = fs::read_dir(&volume).unwrap().map(|e| e.unwrap().file_name()).collect();
        let generations = left.iter().filter(|n| n.to_str().unwrap().starts_with("..")).count();
        assert_eq!(generations, 2, "{case}: {left:?}");
        assert!(!volume.join("one").exists() && !volume.join("two").exists(), "{case}: {left:?}");
    }
    w.volumes.teardown(&w.uid).unwrap();
    // The next case begins on a private mount again.
    nix::mount::umount(&kubelet).unwrap();
    w.effects.undone(&Effect::Mount { target: kubelet }).unwrap();
    w.teardown();
    reached
}

#[test]
fn at_every_point_of_the_volumes() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("shared")).unwrap();
        mount(Some("tmpfs"), &root.join("shared"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &root.join("shared"), None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        let mut points = Vec::new();
        for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/volumes")).unwrap() {
            let text = fs::read_to_string(file.unwrap().path()).unwrap();
            let names = text.split("failpoint::hit(\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned());
            points.extend(names);
        }
        assert!(points.len() >= 9, "{points:?}");
        let mut runs = 0;
        for point in &points {
            for action in ["error", "kill"] {
                assert!(run(&root, point, action, 1), "{point} is never reached");
                runs += 1 + [2, 3, 4, 6].iter().take_while(|at| run(&root, point, action, **at)).count();
            }
        }
        println!("{} points of the volumes, {runs} runs, 0 bad ends", points.len());
        nix::mount::umount(&root.join("shared")).unwrap();
    });
}
