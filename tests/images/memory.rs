//! What a pull of 200 MB costs in memory, agent and children together.

use std::io::Read;
use std::time::Instant;

use crate::crash::helper;
use crate::kit::*;

/// Half of the bytes compress, as in real layers.
fn half_noise(length: usize, seed: u64) -> Vec<u8> {
    let mut out = noise(length / 2, seed);
    out.resize(length, b'x');
    out
}

#[test]
fn a_pull_of_200_mb_stays_below_24_mb() {
    let layers: Vec<Vec<E>> =
        (0..4).map(|l| (0..50).map(|f| file(format!("l{l}/f{f}"), half_noise(1 << 20, l * 50 + f))).collect()).collect();
    let image = layers_of(&layers);
    let size: usize = image.blobs.values().map(Vec::len).sum();
    let server = Server::start(move |seen| serve_image(&image, seen));
    let dir = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let mut child = helper(dir.path(), &format!("{}/big:1", server.host()), None);
    let pid = child.id();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        // Of a page that agent and children share, each counts its part.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let all: Vec<String> = threads.map(|t| std::fs::read_to_string(t.path().join("children")).unwrap_or_default()).collect();
        let pids = all.iter().flat_map(|c| c.split_whitespace().map(str::to_owned));
        let total: u64 = pids.chain([pid.to_string()]).map(|p| pss(&p)).sum();
        peak = peak.max(total);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    println!(
        "200 MB unpacked, {size} bytes sent: {:?}, peak PSS of agent and children {peak} KB; {}",
        start.elapsed(),
        said.trim()
    );
    assert!(peak > 1000 && peak <= 24 * 1024, "{peak} KB");
}

fn pss(pid: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("Pss:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

fn layers_of(stack: &[Vec<E>]) -> Image {
    layers(stack)
}
