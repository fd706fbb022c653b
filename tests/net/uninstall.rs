//! The shipped agent is cut off at any moment of its start, and `coracle uninstall`, which is told
//! nothing but the root, leaves the node as it was. (Once a link and a table stayed: the agent's
//! flags were not to be had, so that `uninstall` looked for another instance's things and said
//! that all was well.)

use std::fs;
use std::time::{Duration, Instant};

use crate::support::{CORACLE, Node};
use crate::world::able;

/// Round after round on one node, the agent killed a little later each time, so that the whole
/// start is swept: 30 in `make test`, 200 with `CORACLE_SOAK`.
#[test]
fn an_agent_cut_off_at_any_moment_of_its_start_is_uninstalled_without_a_trace() {
    if !able() {
        return;
    }
    let rounds: u32 = if std::env::var_os("CORACLE_SOAK").is_some() { 200 } else { 30 };
    let mut node = Node::new();
    node.rename("tnetu");
    // How long a start takes here, until the socket answers.
    let begun = Instant::now();
    node.start();
    let start = begun.elapsed().min(Duration::from_secs(2));
    node.kill_agent();
    node.ok(&["uninstall", "--yes"]);
    assert_eq!(node.left_over(), Vec::<String>::new(), "after a whole start");
    for round in 0..rounds {
        node.spawn();
        let cut = start.mul_f64(f64::from(round) * 1.1 / f64::from(rounds));
        std::thread::sleep(cut);
        node.kill_agent();
        // Sometimes the next start meets what the first left, and is cut off too.
        if round % 3 == 2 {
            node.spawn();
            std::thread::sleep(cut / 2);
            node.kill_agent();
        }
        node.ok(&["uninstall", "--yes"]);
        assert_eq!(node.left_over(), Vec::<String>::new(), "round {round}, cut off after {cut:?}\n{}", node.log_tail());
    }
    println!("{rounds} starts of {start:?} cut off, nothing left");
}

#[test]
fn what_the_journal_names_goes_whatever_the_agent_was_called() {
    if !able() {
        return;
    }
    let mut node = Node::new();
    node.rename("tnetj");
    node.start();
    node.kill_agent();
    let links = node.left_over();
    assert!(links.contains(&"link tnetj0".to_owned()) && links.contains(&"nft table ip tnetj".to_owned()), "{links:?}");
    // Without these `uninstall` takes the name that the root gives.
    assert!(node.command("rm").arg(node.root().join("run/agent.json")).status().unwrap().success());
    node.ok(&["uninstall", "--yes"]);
    let left: Vec<String> = node.left_over().into_iter().filter(|l| !l.starts_with("cgroup ")).collect();
    assert_eq!(left, Vec::<String>::new());
    drop(node);

    // An agent that comes back under another name takes its old name's things along.
    let mut node = Node::new();
    node.rename("tnetk");
    node.start();
    node.kill_agent();
    node.rename("tnetl");
    node.start();
    let there = node.left_over();
    assert!(there.contains(&"link tnetl0".to_owned()) && there.contains(&"nft table ip tnetl".to_owned()), "{there:?}");
    assert!(!there.iter().any(|l| l.contains("tnetk0") || l.contains("ip tnetk")), "{there:?}");
}

#[test]
fn another_agents_things_stay_though_they_bear_the_name_that_is_given() {
    if !able() {
        return;
    }
    let mut node = Node::new();
    node.rename("tnetm");
    node.start();
    let before = node.left_over();
    // Another root, never used by an agent, and the name of the one that runs.
    let other = node.path("other");
    fs::create_dir_all(other.join("state")).unwrap();
    let mut command = node.command(CORACLE);
    let output = command.args(["uninstall", "--yes", "--instance", "tnetm", "--root"]).arg(&other).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(node.left_over(), before);
    assert!(!other.join("run").exists() && !other.join("state").exists());
}
