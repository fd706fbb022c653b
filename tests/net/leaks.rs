//! The shipped agent after 200 pods have come and gone: what it holds is what it held before.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use crate::support::Node;
use crate::world::able;

const WAVE: usize = 10;
const WAVES: usize = 20;

/// What one process holds.
#[derive(Debug)]
struct Holds {
    /// By what they are, e.g. `socket`, `/run/…/effects.journal`.
    descriptors: BTreeMap<String, usize>,
    threads: usize,
    /// Memory of its own that is in use, KiB.
    anonymous: u64,
    children: usize,
}

fn holds(pid: i32) -> Holds {
    let mut descriptors = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        // One that is closed meanwhile is none.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let kind = target.to_string_lossy().split(":[").next().unwrap_or_default().to_owned();
        *descriptors.entry(kind).or_insert(0) += 1;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let number = |name: &str| -> u64 {
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
    };
    let mut children = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        children += fs::read_to_string(task.path().join("children")).unwrap_or_default().split_whitespace().count();
    }
    Holds { descriptors, threads: number("Threads") as usize, anonymous: number("RssAnon"), children }
}

/// Its worker threads go 3 s after the last work.
fn at_rest(node: &Node) -> Holds {
    std::thread::sleep(Duration::from_secs(5));
    holds(node.agent_pid())
}

fn wave(node: &Node, number: usize) {
    // Not the ports of the wave before, whose pods are leaving.
    let base = number % 2 * 100;
    for n in 0..WAVE {
        // UDP, so that flows are looked through too.
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: w{number}p{n}}}\nspec:\n  terminationGracePeriodSeconds: 0\n  containers:\n  \
             - name: c\n    image: busybox:1.35\n    imagePullPolicy: Never\n    command: [sleep, '1000']\n    \
             ports: [{{containerPort: 80, hostPort: {}}}, {{containerPort: 53, hostPort: {}, protocol: UDP}}]\n",
            8000 + base + n,
            5300 + base + n
        );
        node.put(&format!("p{n}.yaml"), &text);
    }
    node.wait("the wave runs", 60, |node| {
        let pods = node.pods();
        let of_wave =
            pods.iter().filter(|p| p["metadata"]["name"].as_str().is_some_and(|n| n.starts_with(&format!("w{number}p"))));
        of_wave.filter(|p| p["status"]["phase"] == "Running").count() == WAVE
    });
}

#[test]
fn after_two_hundred_pods_the_agent_holds_what_it_held_before() {
    if !able() {
        return;
    }
    let mut node = Node::new();
    node.rename("tnetw");
    node.start();
    node.import();
    let clear = |node: &Node| {
        for entry in fs::read_dir(node.path("manifests")).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        node.wait("every pod is gone", 60, |n| n.pods().is_empty());
    };
    // Whatever is made once and kept is made by these; a wave replaces the one before it.
    for number in 0..10 {
        wave(&node, number);
    }
    clear(&node);
    let before = at_rest(&node);
    let left = node.left_over();
    for number in 0..WAVES {
        wave(&node, number);
    }
    clear(&node);
    let after = at_rest(&node);
    println!("{} pods; before: {before:?}\nafter: {after:?}", WAVE * WAVES);
    assert_eq!(after.descriptors, before.descriptors);
    assert_eq!((after.threads, after.children), (before.threads, before.children));
    // Free pages that the allocator keeps come and go (620 KiB were seen, 300 pods later less than
    // 200 pods later); what is lost for each pod would add up.
    let most = before.anonymous + 4 * (WAVE * WAVES) as u64;
    assert!(after.anonymous <= most, "{} KiB more", after.anonymous - before.anonymous);
    assert_eq!(node.left_over(), left);
}
