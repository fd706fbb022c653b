//! R2: each failpoint of the store × {EIO, ENOSPC, SIGKILL}, in a child on a small file system of
//! its own. Whatever happens at the point, what the child was told is durable is there afterwards.
//!
//! `cargo test --features failpoints --test store killed`

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle::store::StoreError;
use coracle::store::effects::{Effect, Effects};
use coracle::store::pods::{PodStore, Sizes};
use coracle::store::records::PodsState;

use crate::kernel::{admitted, attempt, exit, fill, on_small_disk, tmpfs, uid};
use crate::points::failpoints;

const CHILD: &str = "CORACLE_TEST_KILLED_CHILD";
const SIZES: Sizes = Sizes { reserve: 256 << 10, floor: 2_000, step: 0 };
const RECORDS: u64 = 60;

/// As an agent would: what fails is tried again. Every acknowledged number goes into a file.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let again = |what: &mut dyn FnMut() -> Result<(), StoreError>| {
        let mut tries = 0;
        while let Err(e) = what() {
            tries += 1;
            assert!(tries < 4, "{e:?}");
        }
    };
    let (mut store, mut effects) = (None, None);
    again(&mut || PodStore::open_sized(&dir.join("state"), SIZES).map(|s| store = Some(s.0)));
    again(&mut || Effects::open(&dir.join("../run"), "boot").map(|e| effects = Some(e.0)));
    let (store, effects) = (store.unwrap(), effects.unwrap());
    let mut told = fs::OpenOptions::new().append(true).open(dir.join("../told")).unwrap();
    again(&mut || store.save_manifest(&uid(1), b"manifest").or_else(|e| if e.is_no_space() { Ok(()) } else { Err(e) }));
    for n in 1..=RECORDS {
        let link = Effect::Link { name: format!("l{n}") };
        again(&mut || effects.intent(&link));
        // Ends are urgent, so that on a full disk the reserve lets both through.
        again(&mut || store.append_all(&[admitted(1), attempt(1, n), exit(1, n, n as i32)]));
        writeln!(told, "{n}").unwrap();
        if n > 1 {
            again(&mut || effects.undone(&Effect::Link { name: format!("l{}", n - 1) }));
        }
    }
}

fn run(disk: &Path, point: &str, action: &str, at: u64) -> bool {
    let case = format!("{point}={action}@{at}");
    // The state lies on the small disk; /run, and what the test itself needs, beside it.
    let (state, beside) = (disk.join("state"), disk.parent().unwrap());
    let (run_dir, told, trace) = (beside.join("run"), beside.join("told"), beside.join("trace"));
    fs::create_dir(&run_dir).unwrap();
    fs::write(&told, "").unwrap();
    fs::write(&trace, "").unwrap();
    if point == "store.journal.cut" {
        // Only a journal without fsync is cut in place: one that ends in half a record.
        drop(Effects::open(&run_dir, "boot").unwrap());
        let mut journal = fs::OpenOptions::new().append(true).open(run_dir.join("effects.journal")).unwrap();
        journal.write_all(b"half a rec").unwrap();
    }
    let hog = (point == "store.reserve.release").then(|| {
        drop(PodStore::open_sized(&state, SIZES).unwrap());
        fill(disk)
    });
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["killed::child", "--exact", "--test-threads=1"])
        .env(CHILD, disk)
        .env("CORACLE_FAILPOINTS", &case)
        .env("CORACLE_FAILPOINTS_TRACE", &trace)
        .output()
        .unwrap();
    let reached = fs::read_to_string(&trace).unwrap().lines().filter(|l| l.ends_with(point)).count() as u64 >= at;
    let killed = status.status.signal() == Some(9);
    let text = String::from_utf8_lossy(&status.stderr).into_owned() + &String::from_utf8_lossy(&status.stdout);
    assert_eq!(killed, reached && action == "kill", "{case}: {}\n{text}", status.status);
    assert!(killed || status.status.success(), "{case}: {}\n{text}", status.status);
    if let Some(hog) = hog {
        fs::remove_file(hog).unwrap();
    }

    let told: u64 = fs::read_to_string(&told).unwrap().lines().last().map_or(0, |l| l.parse().unwrap());
    let (store, pods, report) = PodStore::open_sized(&state, SIZES).unwrap();
    assert!(report.lost.is_empty() || report.cut > 0, "{case}: {report:?}");
    let may_be = |n: u64| {
        let mut state = PodsState::default();
        for n in 1..=n {
            [admitted(1), attempt(1, n), exit(1, n, n as i32)].iter().for_each(|r| state.apply(r));
        }
        state
    };
    let mut next = may_be(told);
    let mut states = vec![next.clone()];
    for record in [admitted(1), attempt(1, told + 1), exit(1, told + 1, (told + 1) as i32)] {
        next.apply(&record);
        states.push(next.clone());
    }
    assert!(states.contains(&pods), "{case}: told {told}, there is {pods:#?}");
    if let Some(manifest) = store.load_manifest(&uid(1)).unwrap() {
        assert_eq!(manifest, b"manifest", "{case}");
    }
    let (_, standing) = Effects::open(&run_dir, "boot").unwrap();
    let newest = Effect::Link { name: format!("l{told}") };
    assert!(told == 0 || standing.contains(&newest), "{case}: {newest:?} is not in {standing:?}");
    assert!(standing.len() <= 3, "{case}: {standing:?}");
    assert!(!reached || killed || told == RECORDS, "{case}: told {told}");
    drop(store);
    fs::remove_dir_all(&state).unwrap();
    fs::remove_dir_all(&run_dir).unwrap();
    reached
}

#[test]
fn at_every_point_of_the_store() {
    on_small_disk(tmpfs, |disk| {
        let points: Vec<String> = failpoints().into_keys().filter(|p| p.starts_with("store.")).collect();
        let mut runs = 0;
        for point in &points {
            for action in ["error", "enospc", "kill"] {
                assert!(run(disk, point, action, 1), "{point} is never reached");
                // Later hits of it, as far as there are any: other records, a compaction.
                let later = [2, 3, 5, 8, 13, 21].iter().take_while(|at| run(disk, point, action, **at)).count();
                runs += 1 + later;
            }
        }
        println!("{} points of the store, {runs} runs, 0 bad ends", points.len());
    });
}
