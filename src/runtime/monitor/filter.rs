//! Seccomp filters in the kernel's form, compiled once a profile and not once a process.
//!
//! libseccomp takes several milliseconds for a profile of some hundred calls, and a node's pods
//! share two or three profiles. Each is a file in the run directory (8 KiB, in memory), named by
//! what went into it: the profile's text, and the program that compiled it.
//!
//! Invariant: it is a cache. Whatever is wrong with it (no space, a file cut off), the profile is
//! compiled as if it were not there; a wrong filter is never loaded, since only root can write
//! below the run directory and a file appears whole.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::engine;

/// BPF_MAXINSNS.
const MAX_INSTRUCTIONS: usize = 4096;
/// Profiles kept. A node that has more throws all away now and then.
const KEPT: usize = 32;
/// Of a config.json; the agent wrote it.
const MAX_CONFIG: u64 = 4 << 20;

#[derive(Deserialize)]
struct Config<'a> {
    #[serde(borrow, default)]
    linux: Option<Linux<'a>>,
}

#[derive(Deserialize)]
struct Linux<'a> {
    #[serde(borrow, default)]
    seccomp: Option<&'a RawValue>,
}

/// The filter of the bundle's profile; None where it has none, or one that has to be compiled by
/// the call itself.
pub fn ready(cache: &Path, bundle: &Path) -> Option<Vec<libc::sock_filter>> {
    let mut text = Vec::new();
    // Unreadable: the call says so better.
    fs::File::open(bundle.join("config.json")).ok()?.take(MAX_CONFIG).read_to_end(&mut text).ok()?;
    let config: Config<'_> = serde_json::from_slice(&text).ok()?;
    let profile = config.linux?.seccomp?.get();
    let file = cache.join(name(profile).ok()?);
    if let Some(found) = read(&file) {
        return Some(found);
    }
    let made = engine::compile(profile)?;
    // A cache that cannot be written costs time, nothing else.
    let _ = keep(cache, &file, &made);
    Some(made)
}

fn name(profile: &str) -> io::Result<String> {
    let program = fs::metadata("/proc/self/exe")?;
    let mut context = Context::new(&SHA256);
    for number in [program.dev(), program.ino(), program.size(), program.mtime() as u64, program.mtime_nsec() as u64] {
        context.update(&number.to_le_bytes());
    }
    context.update(profile.as_bytes());
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn read(file: &Path) -> Option<Vec<libc::sock_filter>> {
    let bytes = fs::read(file).ok()?;
    let whole = !bytes.is_empty() && bytes.len() % 8 == 0 && bytes.len() / 8 <= MAX_INSTRUCTIONS;
    whole.then(|| bytes.chunks_exact(8).filter_map(instruction).collect())
}

fn instruction(bytes: &[u8]) -> Option<libc::sock_filter> {
    let &[c0, c1, jt, jf, k0, k1, k2, k3] = bytes else { return None };
    Some(libc::sock_filter { code: u16::from_ne_bytes([c0, c1]), jt, jf, k: u32::from_ne_bytes([k0, k1, k2, k3]) })
}

fn keep(cache: &Path, file: &Path, filter: &[libc::sock_filter]) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(cache)?;
    let others: Vec<PathBuf> = fs::read_dir(cache)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    if others.len() >= KEPT {
        // Another helper may have been quicker.
        others.iter().for_each(|old| drop(fs::remove_file(old)));
    }
    let mut bytes = Vec::with_capacity(filter.len() * 8);
    for ins in filter {
        bytes.extend(ins.code.to_ne_bytes());
        bytes.extend([ins.jt, ins.jf]);
        bytes.extend(ins.k.to_ne_bytes());
    }
    let temp = file.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temp);
    written.and_then(|mut f| f.write_all(&bytes)).and_then(|()| fs::rename(&temp, file)).inspect_err(|_| {
        // Where there is no space, half a file takes some.
        let _ = fs::remove_file(&temp);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"process":{},"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","architectures":["ARCH"],
        "syscalls":[{"names":["read","write","exit_group"],"action":"SCMP_ACT_ALLOW"}]}}}"#;

    fn plain(filter: &[libc::sock_filter]) -> Vec<(u16, u8, u8, u32)> {
        filter.iter().map(|i| (i.code, i.jt, i.jf, i.k)).collect()
    }

    #[test]
    fn a_profile_is_compiled_once_and_read_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, bundle) = (dir.path().join("seccomp"), dir.path());
        let arch = if cfg!(target_arch = "x86_64") { "SCMP_ARCH_X86_64" } else { "SCMP_ARCH_NATIVE" };
        fs::write(bundle.join("config.json"), CONFIG.replace("ARCH", arch)).unwrap();
        let made = ready(&cache, bundle).unwrap();
        let files: Vec<_> = fs::read_dir(&cache).unwrap().map(|e| e.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        assert_eq!(plain(&read(&files[0]).unwrap()), plain(&made));
        let stamp = fs::metadata(&files[0]).unwrap().ino();
        assert_eq!(plain(&ready(&cache, bundle).unwrap()), plain(&made));
        assert_eq!(fs::metadata(&files[0]).unwrap().ino(), stamp, "it was compiled again");
        // Cut off: it is made again.
        fs::write(&files[0], [0; 13]).unwrap();
        assert_eq!(plain(&ready(&cache, bundle).unwrap()), plain(&made));
        assert_eq!(plain(&read(&files[0]).unwrap()), plain(&made));
    }

    #[test]
    fn no_profile_and_one_with_flags_are_the_calls_own_business() {
        let dir = tempfile::tempdir().unwrap();
        for config in [
            "{}",
            r#"{"linux":{}}"#,
            r#"{"linux":{"seccomp":null}}"#,
            "garbage",
            r#"{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ALLOW"}}}"#,
            r#"{"linux":{"seccomp":{"defaultAction":"SCMP_ACT_ERRNO","flags":["SECCOMP_FILTER_FLAG_LOG"]}}}"#,
        ] {
            fs::write(dir.path().join("config.json"), config).unwrap();
            assert!(ready(&dir.path().join("seccomp"), dir.path()).is_none(), "{config}");
        }
        assert!(!dir.path().join("seccomp").exists());
    }

    #[test]
    fn the_cache_has_an_end() {
        let dir = tempfile::tempdir().unwrap();
        let filter = vec![libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 }];
        for n in 0..3 * KEPT {
            keep(dir.path(), &dir.path().join(format!("{n}")), &filter).unwrap();
        }
        assert!(fs::read_dir(dir.path()).unwrap().count() <= KEPT);
    }
}
