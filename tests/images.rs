//! The images room against the real kernel, with the real unpack child.

#[path = "images/crash.rs"]
mod crash;
#[path = "images/differential.rs"]
mod differential;
#[cfg(feature = "failpoints")]
#[path = "images/failpoints.rs"]
mod failpoints;
#[path = "images/hostile.rs"]
mod hostile;
#[path = "images/kit.rs"]
mod kit;
#[path = "images/layers.rs"]
mod layers;
#[path = "images/memory.rs"]
mod memory;
#[path = "images/registry.rs"]
mod registry;
#[path = "images/scripted.rs"]
mod scripted;
#[path = "support/registry.rs"]
mod support;

use std::path::Path;

use coracle::images::{Images, ImportOptions};
use kit::config;

#[test]
fn the_busybox_recipe_imports_and_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let tar = dir.path().join("busybox.tar");
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("images/busybox");
    assert!(std::process::Command::new(recipe).arg(&tar).status().unwrap().success());
    let images = Images::open(config(dir.path())).unwrap();
    let imported = images.import(&tar, &ImportOptions::default()).unwrap();
    let image = images.find("busybox:1.35").unwrap().unwrap();
    assert_eq!(imported.last().unwrap(), &image);
    assert_eq!(image.tags, ["docker.io/library/busybox:1.35", "docker.io/library/busybox:latest"]);
    assert!(image.pinned);
    assert_eq!(image.config.cmd, ["sh"]);
    assert!(image.layers[0].join("bin/sh").is_file());
    drop(images);
    let images = Images::open(config(dir.path())).unwrap();
    assert_eq!(images.list().unwrap(), std::slice::from_ref(&image));
    assert_eq!(images.find(&image.id).unwrap(), Some(image.clone()));

    std::fs::remove_dir_all(&image.layers[0]).unwrap();
    let mended = images.find("busybox").unwrap().unwrap();
    assert_ne!(mended.layers, image.layers);
    assert!(mended.layers[0].join("bin/sh").is_file());

    assert!(images.remove("busybox:latest").unwrap());
    assert!(images.find("busybox").unwrap().is_none());
    assert!(images.remove("busybox:1.35").unwrap());
    assert!(images.list().unwrap().is_empty());
    for part in ["blobs/sha256", "layers", "staging"] {
        assert_eq!(std::fs::read_dir(dir.path().join("images").join(part)).unwrap().count(), 0, "{part}");
    }
}
