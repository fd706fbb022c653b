//! T5: our reader against Go's archive/tar, the one that docker and containerd use: the same list
//! of the same files, or refused. Mutants are made from a fixed seed, which is printed.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use coracle::images::archive::{Archive, Entry, Kind};
use coracle::images::digest::Digest;

use crate::kit::*;

/// The oracle as a program, or None where there is no Go.
fn oracle(dir: &std::path::Path) -> Option<std::path::PathBuf> {
    let go = ["/usr/local/go/bin/go", "/usr/bin/go", "/usr/lib/go/bin/go"].iter().find(|p| std::path::Path::new(p).exists());
    let Some(go) = go else {
        assert!(std::env::var_os("CI").is_none(), "go is needed: apt-get install golang-go");
        eprintln!("SKIP: no go on this machine");
        return None;
    };
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/images/oracle/main.go");
    let out = dir.join("oracle");
    let built =
        Command::new(go).arg("build").arg("-o").arg(&out).arg(source).env("CGO_ENABLED", "0").env("GO111MODULE", "off").status();
    assert!(built.unwrap().success());
    Some(out)
}

/// Our view in the oracle's form.
fn ours(data: &[u8]) -> String {
    let mut archive = Archive::new(data);
    let mut out = Vec::new();
    loop {
        let entry = match archive.next_entry() {
            Ok(Some(entry)) => entry,
            Ok(None) => return format!("ok {}", out.join(";")),
            Err(_) => return "error".into(),
        };
        let mut bytes = Vec::new();
        if archive.read_to_end(&mut bytes).is_err() {
            return "error".into();
        }
        out.push(line(&entry, &bytes));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn line(entry: &Entry, data: &[u8]) -> String {
    let kind = match entry.kind {
        Kind::File => '0',
        Kind::HardLink => '1',
        Kind::Symlink => '2',
        Kind::Char => '3',
        Kind::Block => '4',
        Kind::Dir => '5',
        Kind::Fifo => '6',
    };
    let mut xattrs: Vec<String> = entry.xattrs.iter().map(|(k, v)| format!("{}={}", hex(k), hex(v))).collect();
    xattrs.sort();
    let (name, link, sum) = (hex(&entry.name), hex(&entry.link), &Digest::of(data).hex()[..16]);
    format!(
        "{name},{link},{kind},{},{:o},{},{},{},{sum},{}",
        data.len(),
        entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime.0,
        xattrs.join("+")
    )
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }
}

fn extension(kind: u8, data: &[u8]) -> Vec<u8> {
    raw(&[file("ext", data).kind_of(kind)])
}

/// Archives that two readers could take differently.
fn corpus() -> Vec<Vec<u8>> {
    let f = |name: &str| raw(&[file(name, "content of a file")]);
    let end = vec![0; 1024];
    let x = |pairs: &[(&str, &str)]| {
        extension(
            b'x',
            &pax_records(&pairs.iter().map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec())).collect::<Vec<_>>()),
        )
    };
    let g = |pairs: &[(&str, &str)]| {
        extension(
            b'g',
            &pax_records(&pairs.iter().map(|(k, v)| (k.as_bytes().to_vec(), v.as_bytes().to_vec())).collect::<Vec<_>>()),
        )
    };
    let inner = tar(&[file("smuggled", "x")]);
    let lie = |size: u64, data: &[u8]| raw(&[E { size: Some(size), ..file("lie", data) }]);
    let mut negative = header(&file("negative", ""));
    negative[124..136].fill(0xff);
    seal(&mut negative);
    let mut base256 = header(&file("base256", ""));
    base256[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    seal(&mut base256);
    let mut prefix = header(&file("name", ""));
    prefix[345..352].copy_from_slice(b"pre/fix");
    seal(&mut prefix);
    let mut gnu = header(&file("name", ""));
    gnu[257..265].copy_from_slice(b"ustar  \0");
    seal(&mut gnu);
    let mut v7 = header(&file("name/", ""));
    v7[257..265].fill(0);
    v7[156] = 0;
    seal(&mut v7);
    let mut spaces = header(&file("spaces", "ab"));
    spaces[124..136].copy_from_slice(b"         2 \0");
    seal(&mut spaces);
    [
        vec![f("a"), f("b"), end.clone()],
        vec![f("a")],
        vec![f("a"), vec![0; 512]],
        vec![f("a"), vec![0; 512], f("b")],
        vec![f("a"), end.clone(), f("b"), end.clone()],
        vec![x(&[("size", "0")]), f("a"), f("b"), end.clone()],
        vec![x(&[("size", "17")]), lie(0, b"content of a file"), end.clone()],
        vec![x(&[("size", "1024")]), lie(0, &inner[..1024]), f("b"), end.clone()],
        vec![x(&[("size", "99999999999")]), f("a"), end.clone()],
        vec![x(&[("size", "-1")]), f("a"), end.clone()],
        vec![x(&[("size", "1"), ("size", "17")]), f("a"), end.clone()],
        vec![x(&[("path", "one"), ("path", "two")]), f("a"), end.clone()],
        vec![x(&[("path", "")]), f("a"), end.clone()],
        vec![x(&[("path", "pax")]), extension(b'L', b"gnu\0"), f("a"), end.clone()],
        vec![extension(b'L', b"gnu\0"), x(&[("path", "pax")]), f("a"), end.clone()],
        vec![extension(b'L', b"gnu\0"), x(&[("mtime", "5.5")]), f("a"), end.clone()],
        vec![extension(b'L', b"one\0"), extension(b'L', b"two\0"), f("a"), end.clone()],
        vec![extension(b'L', b"gnu\0"), end.clone()],
        vec![x(&[("path", "p")]), end.clone()],
        vec![x(&[("path", "p")]), x(&[("path", "q")]), f("a"), end.clone()],
        vec![g(&[("comment", "c")]), f("a"), end.clone()],
        vec![g(&[("path", "everywhere")]), f("a"), f("b"), end.clone()],
        vec![x(&[("path", "p")]), g(&[("comment", "c")]), f("a"), end.clone()],
        vec![x(&[("SCHILY.xattr.user.a", "1\n2")]), f("a"), end.clone()],
        vec![x(&[("uid", "4294967296")]), f("a"), end.clone()],
        vec![x(&[("mtime", "-1.5"), ("uid", "7")]), f("a"), end.clone()],
        vec![x(&[("GNU.sparse.major", "1")]), f("a"), end.clone()],
        vec![extension(b'x', b"11 path=ab\n12 path=abc"), f("a"), end.clone()],
        vec![extension(b'x', b"5 a\n"), f("a"), end.clone()],
        vec![extension(b'x', b"99 path=a\n"), f("a"), end.clone()],
        vec![lie(1 << 40, b""), end.clone()],
        vec![lie(5, b""), inner.clone()],
        vec![raw(&[E { size: Some(1024), ..dir("d") }]), inner.clone()],
        vec![raw(&[E { size: Some(512), ..link("l", "t") }]), f("b"), end.clone()],
        vec![raw(&[E { size: Some(512), ..hard("l", "t") }]), f("b"), end.clone()],
        vec![negative.to_vec(), end.clone()],
        vec![base256.to_vec(), b"abc".to_vec(), vec![0; 509], end.clone()],
        vec![prefix.to_vec(), gnu.to_vec(), v7.to_vec(), end.clone()],
        vec![spaces.to_vec(), b"ab".to_vec(), vec![0; 510], end.clone()],
        vec![raw(&[e("cont", b'7'), e("dump", b'D'), e("vol", b'V')]), end.clone()],
        vec![raw(&[dir("d"), link("l", "t"), hard("h", "d/f"), e("c", b'3'), e("b", b'4'), e("p", b'6')]), end.clone()],
        vec![raw(&[file("x".repeat(150), "long"), link("y".repeat(150), "z".repeat(150))]), end],
    ]
    .into_iter()
    .map(|parts| parts.concat())
    .collect()
}

/// Changes some bytes, lengths or blocks; usually mends the checksums so that it is read on.
fn mutate(archive: &[u8], random: &mut Random) -> Vec<u8> {
    let mut out = archive.to_vec();
    for _ in 0..=random.below(3) {
        let blocks = out.len() / 512;
        match random.below(7) {
            0 | 1 => {
                let at = random.below(out.len());
                out[at] = [0, b' ', b'0', b'7', b'/', b'.', 0xff, 0x80, random.below(256) as u8][random.below(9)];
            }
            2 => {
                // A field of a header.
                let at =
                    random.below(blocks) * 512 + [0, 100, 108, 124, 136, 156, 157, 257, 345][random.below(9)] + random.below(8);
                if at < out.len() {
                    out[at] = random.below(256) as u8;
                }
            }
            3 => {
                let kind = random.below(blocks) * 512 + 156;
                if kind < out.len() {
                    out[kind] = *b"01234567xgLKSD\0".get(random.below(15)).unwrap();
                }
            }
            4 => out.truncate(random.below(out.len()).max(1)),
            5 => {
                let (from, to) = (random.below(blocks) * 512, random.below(blocks) * 512);
                let block = out[from..from + 512].to_vec();
                out.splice(to..to, block);
            }
            _ => {
                let at = random.below(blocks) * 512;
                out.drain(at..at + 512);
            }
        }
        if out.len() < 512 {
            return out;
        }
    }
    if random.below(4) != 0 {
        for at in (0..out.len() / 512).map(|b| b * 512) {
            let block: &mut [u8; 512] = (&mut out[at..at + 512]).try_into().unwrap();
            if block[257..262] == *b"ustar" {
                seal(block);
            }
        }
    }
    out
}

#[test]
fn the_same_files_as_go_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(oracle) = oracle(dir.path()) else { return };
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed_u64);
    let mutants = std::env::var("MUTANTS").ok().and_then(|s| s.parse().ok()).unwrap_or(10_000);
    println!("seed {seed}, {mutants} mutants");
    let corpus = corpus();
    let mut random = Random(seed | 1);
    let mut archives = corpus.clone();
    for n in 0..mutants {
        archives.push(mutate(&corpus[n % corpus.len()], &mut random));
    }
    let mut child = Command::new(oracle).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let sent = archives.clone();
    let writer = std::thread::spawn(move || {
        for archive in &sent {
            stdin.write_all(&(archive.len() as u32).to_le_bytes()).unwrap();
            stdin.write_all(archive).unwrap();
        }
    });
    let answers = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    writer.join().unwrap();
    let answers: Vec<&str> = answers.lines().collect();
    assert_eq!(answers.len(), archives.len());
    let (mut same, mut refused, mut both) = (0, 0, 0);
    for (n, (archive, go)) in archives.iter().zip(&answers).enumerate() {
        let own = ours(archive);
        match (own.as_str(), *go) {
            ("error", "error") => both += 1,
            ("error", _) => refused += 1,
            (own, go) if own == go => same += 1,
            (own, go) => {
                std::fs::write(std::env::temp_dir().join("different.tar"), archive).unwrap();
                panic!("archive {n} (kept as different.tar in the temporary directory):\nours {own}\ngo   {go}");
            }
        }
    }
    println!("{same} the same, {both} refused by both, {refused} only by us");
    // It must not be that we refuse all.
    assert!(same > mutants / 10, "{same} of {mutants}");
}
