//! The real program, cut off at each journalled step by SIGKILL or failed there: whatever was
//! done by then is adopted or taken back, and nothing stays behind.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use coracle::net::model::L4::Tcp;

use crate::world::*;

const ENSURE: [&str; 5] =
    ["net.ensure.intent", "net.ensure.bridge", "net.ensure.sysctl", "proxy.table.intent", "proxy.table.install"];
const ATTACH: [&str; 7] = [
    "net.attach.lease",
    "net.attach.intent",
    "net.attach.veth",
    "net.attach.port",
    "net.attach.neighbour",
    "net.attach.inside",
    "net.attach.hostports",
];
const DETACH: [&str; 4] = ["net.detach.hostports", "net.detach.link", "net.detach.neighbour", "net.detach.flows"];

impl World {
    fn coracle(&self, verb: &str, pod: Option<&Ns>, failpoint: &str) -> Output {
        let root = self.dir.path().to_str().unwrap();
        let mut args = vec!["net", verb, "--root", root, "--instance", INSTANCE, "--pod-cidr", V4, "--pod-cidr", V6];
        if verb != "check" {
            args.extend(["--uid", "uid-p"]);
        }
        if let (Some(pod), "add") = (pod, verb) {
            args.extend([
                "--pod",
                "test/p",
                "--netns",
                pod.path.to_str().unwrap(),
                "--host-port",
                "8080:80",
                "--host-port",
                "53:53/udp",
            ]);
        }
        self.node.run(|| {
            Command::new(env!("CARGO_BIN_EXE_coracle")).args(&args).env("CORACLE_FAILPOINTS", failpoint).output().unwrap()
        })
    }

    fn must_coracle(&self, verb: &str, pod: Option<&Ns>) -> String {
        let out = self.coracle(verb, pod, "");
        assert!(out.status.success(), "{verb}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    /// What a pod could have left on the host.
    fn left(&self) -> (Vec<String>, bool, usize, Vec<String>) {
        let elements = self.nft("list ruleset").contains("elements");
        let neighbours = self.node.command("ip", &["-j", "neigh", "show", "dev", BRIDGE, "nud", "permanent"]).stdout;
        let neighbours: serde_json::Value = serde_json::from_slice(&neighbours).unwrap_or_default();
        let leases = std::fs::read_dir(self.run_dir().join("net")).into_iter().flatten();
        let leases = leases.map(|e| e.unwrap().file_name().into_string().unwrap()).filter(|n| n != "ipam.json").collect();
        (self.veths(), elements, neighbours.as_array().map_or(0, Vec::len), leases)
    }

    fn assert_nothing_left(&self, when: &str) {
        assert_eq!(self.left(), (Vec::new(), false, 0, Vec::new()), "{when}");
    }
}

#[test]
fn the_program_adds_checks_and_deletes() {
    let Some(world) = World::possible() else { return };
    let pod = world.pod("p");
    assert_eq!(world.must_coracle("add", Some(&pod)), "10.88.0.2 fd88::2 mtu 1460\n");
    assert_eq!(world.must_coracle("add", Some(&pod)), "10.88.0.2 fd88::2 mtu 1460\n");
    let _server = pod.tcp("p", "0.0.0.0:80");
    assert_eq!(world.outside.ask("192.0.2.1:8080"), "p 192.0.2.2");
    assert!(world.must_coracle("check", None).contains("as it should be"));
    for _ in 0..2 {
        world.must_coracle("del", None);
        world.assert_nothing_left("deleted");
    }
}

#[cfg(feature = "failpoints")]
mod cut_off {
    use super::*;

    fn assert_hit(out: &Output, failpoint: &str) {
        match failpoint.ends_with("kill") {
            true => assert_eq!(out.status.signal(), Some(9), "{failpoint}: {out:?}"),
            false => assert_eq!(out.status.code(), Some(1), "{failpoint}: {out:?}"),
        }
    }

    #[test]
    fn in_attach_the_pod_lives_and_gets_its_network_whole() {
        if !able() {
            return;
        }
        for point in ENSURE.iter().chain(&ATTACH) {
            let world = World::new();
            let pod = world.pod("p");
            let failpoint = format!("{point}=kill");
            assert_hit(&world.coracle("add", Some(&pod), &failpoint), &failpoint);
            let net = world.net();
            let living: [(String, PathBuf); 1] = [("uid-p".to_owned(), pod.path.clone())];
            let adopted = world.node.run(|| net.recover(&living).unwrap());
            assert!(adopted.len() <= 1, "{failpoint}");
            let got = world.attach(&net, "p", &pod, &[port(Tcp, "", 8080, 80)]);
            assert_eq!(got.addresses.len(), 2, "{failpoint}");
            assert_eq!(world.veths().len(), 1, "{failpoint}");
            let _server = pod.tcp("p", "[::]:80");
            assert_eq!(world.outside.ask("192.0.2.1:8080"), "p 192.0.2.2", "{failpoint}");
            assert_eq!(world.outside.ask("[2001:db8::1]:8080"), "p 2001:db8::2", "{failpoint}");
            world.detach(&net, "p");
            world.assert_nothing_left(&failpoint);
        }
    }

    #[test]
    fn in_attach_the_pod_is_gone_and_nothing_of_it_stays() {
        if !able() {
            return;
        }
        for point in ENSURE.iter().chain(&ATTACH) {
            let world = World::new();
            let before = crate::life::picture(&world);
            let pod = world.pod("p");
            let failpoint = format!("{point}=kill");
            assert_hit(&world.coracle("add", Some(&pod), &failpoint), &failpoint);
            let net = world.net();
            assert_eq!(world.node.run(|| net.recover(&[]).unwrap()), [], "{failpoint}");
            world.assert_nothing_left(&failpoint);
            world.remove_all(&net);
            assert_eq!(crate::life::picture(&world), before, "{failpoint}");
        }
    }

    #[test]
    fn a_step_that_fails_takes_back_what_was_done() {
        let Some(world) = World::possible() else { return };
        let pod = world.pod("p");
        for point in ENSURE.iter().chain(&ATTACH) {
            if point.starts_with("net.ensure") {
                // From nothing, so that they are met.
                let net = world.net();
                world.remove_all(&net);
            }
            if point.starts_with("proxy.table") {
                world.node.command("nft", &["delete", "table", "ip", INSTANCE]);
            }
            let failpoint = format!("{point}=error");
            assert_hit(&world.coracle("add", Some(&pod), &failpoint), &failpoint);
            world.assert_nothing_left(&failpoint);
            world.must_coracle("add", Some(&pod));
            world.must_coracle("del", None);
            world.assert_nothing_left(&failpoint);
        }
    }

    #[test]
    fn in_detach_the_next_one_ends_it() {
        let Some(world) = World::possible() else { return };
        let pod = world.pod("p");
        for point in DETACH {
            for action in ["kill", "error"] {
                world.must_coracle("add", Some(&pod));
                let failpoint = format!("{point}={action}");
                assert_hit(&world.coracle("del", None, &failpoint), &failpoint);
                world.must_coracle("del", None);
                world.assert_nothing_left(&failpoint);
                world.must_coracle("add", Some(&pod));
                assert_hit(&world.coracle("del", None, &failpoint), &failpoint);
                let net = world.net();
                world.node.run(|| net.recover(&[]).unwrap());
                world.assert_nothing_left(&failpoint);
            }
        }
    }

    #[test]
    fn in_uninstall_the_next_one_ends_it() {
        if !able() {
            return;
        }
        for point in ["net.remove.pods", "net.remove.tables", "net.remove.bridge"] {
            let world = World::new();
            let before = crate::life::picture(&world);
            let pod = world.pod("p");
            world.must_coracle("add", Some(&pod));
            assert_ne!(crate::life::picture(&world), before);
            let uninstall = |failpoint: &str| {
                let root = world.dir.path().to_str().unwrap();
                let args = ["uninstall", "--yes", "--root", root, "--instance", INSTANCE];
                world.node.run(|| {
                    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
                    command.args(args).env("CORACLE_FAILPOINTS", failpoint).output().unwrap()
                })
            };
            let failpoint = format!("{point}=kill");
            let out = uninstall(&failpoint);
            assert_hit(&out, &failpoint);
            let out = uninstall("");
            assert!(out.status.success(), "{point}: {out:?}");
            assert_eq!(crate::life::picture(&world), before, "{point}: {out:?}");
        }
    }
}
