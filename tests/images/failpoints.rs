//! Every step of a pull and of a removal, made to fail and made to be the last:
//! `cargo test --features failpoints --test images failpoints`.

use std::path::Path;

use crate::crash::{assert_no_children, audit, helper_command};
use crate::kit::*;

/// The room's failpoints, read out of the source.
fn points() -> Vec<String> {
    fn walk(dir: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            found.extend(text.split("failpoint::hit(\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/images"), &mut found);
    found.sort();
    found
}

#[test]
fn a_step_that_fails_or_is_the_last() {
    let files = [("a", noise(300_000, 5)), ("b", noise(200_000, 6))];
    let image = layers(&files.iter().map(|(n, d)| vec![file(n, d)]).collect::<Vec<_>>());
    let server = Server::start(move |seen| serve_image(&image, seen));
    let name = format!("{}/x:1", server.host());
    let points = points();
    assert!(points.len() >= 13, "{points:?}");
    let mut reached = 0;
    for point in &points {
        for action in ["error", "enospc", "kill", "error@2", "kill@2"] {
            let dir = tempfile::tempdir().unwrap();
            let mut command = helper_command(dir.path(), &name, None);
            command.env("CORACLE_FAILPOINTS", format!("{point}={action}")).env("HELPER_REMOVE", "yes");
            let out = command.spawn().unwrap().wait_with_output().unwrap();
            assert_no_children(dir.path());
            let hit = !out.status.success();
            // The first hit of each is reached; a second one only of some.
            assert!(hit || action.ends_with("@2"), "{point}={action} was not reached");
            reached += u32::from(hit);
            let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
            assert!(!hit || action.starts_with("kill") || text.contains("Store {"), "{point}={action}: {text}");
            audit(dir.path(), &name, &files);
            let images = coracle::images::Images::open(config(dir.path())).unwrap();
            images.pull(&name, &[]).unwrap();
            drop(images);
            assert!(audit(dir.path(), &name, &files), "{point}={action}");
            assert_eq!(std::fs::read_dir(dir.path().join("images/staging")).unwrap().count(), 0, "{point}={action}");
        }
    }
    println!("{} points, {reached} failures and deaths", points.len());
}
