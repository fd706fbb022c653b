//! A whole machine: Debian 12's cloud kernel and systemd, pure cgroup v2, emulated. The shipped
//! binary with its two units goes through restart, kill -9, daemon-reload, stop, upgrade, reboot,
//! reset and uninstall with five pods running; limits really hold there. `tests/vm/guest` holds
//! the checks, each of which prints one line on the serial console.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Lines that a whole run prints at least; a guest that stops early must not pass.
const CHECKS: usize = 60;

#[test]
fn a_machine_with_systemd_restarts_upgrades_reboots_and_uninstalls() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let images = top.join("target/vm");
    let folder = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let status = command.stdin(Stdio::null()).status().unwrap();
        assert!(status.success(), "{command:?}: {status}");
    };
    run(Command::new(top.join("tests/vm/build")).arg(&images));
    run(Command::new(top.join("images/busybox")).arg(folder.path().join("busybox.tar")));
    // Debug lines would double the file that the guest's emulated disk has to read.
    run(Command::new("objcopy").arg("--strip-debug").arg(env!("CARGO_BIN_EXE_coracle")).arg(folder.path().join("coracle")));
    fs::copy(top.join("tests/vm/guest"), folder.path().join("guest")).unwrap();
    for unit in fs::read_dir(top.join("images/systemd")).unwrap() {
        let unit = unit.unwrap();
        fs::copy(unit.path(), folder.path().join(unit.file_name())).unwrap();
    }
    let output =
        Command::new(top.join("tests/vm/boot")).arg(&images).arg(folder.path()).arg("900").stdin(Stdio::null()).output().unwrap();
    let console = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let (mut good, mut bad) = (0, Vec::new());
    for line in console.lines() {
        // The firmware's cursor codes may stand before a line.
        if let Some(at) = line.find("not ok - ") {
            bad.push(line[at..].to_owned());
        } else if line.contains("ok - ") {
            good += 1;
        }
    }
    println!("virtual machine: {good} checks passed, {} failed", bad.len());
    let tail: String = console.lines().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n");
    assert!(bad.is_empty(), "in the guest:\n{}\nconsole:\n{tail}", bad.join("\n"));
    assert!(
        good >= CHECKS,
        "the guest printed only {good} of {CHECKS} checks; {}\nconsole:\n{tail}",
        String::from_utf8_lossy(&output.stderr)
    );
}
