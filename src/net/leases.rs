//! Leases: what was given to each pod, in `<run>/net/<uid>.json`, and the allocator's memory.
//!
//! Written before anything is made in the kernel and removed after all of it is gone, so that a
//! lease is there for whatever may be there. A file is whole or absent to whoever reads it after
//! a kill; nothing is synced, because a power cut destroys the objects too. Invariant: a lease
//! that cannot be read stops nothing; the kernel still says which links are ours.

use std::fs;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::ipam::Memory;
use super::model::HostPort;

const LEASE_MAX: u64 = 256 * 1024;
const MEMORY: &str = "ipam.json";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub uid: String,
    /// `namespace/name`.
    pub pod: String,
    pub netns: PathBuf,
    pub addresses: Vec<IpAddr>,
    #[serde(default)]
    pub host_ports: Vec<HostPort>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamped {
    /// Times in it are of this boot.
    boot_id: String,
    memory: Memory,
}

/// The directory of one agent's leases.
#[derive(Clone, Debug)]
pub struct Leases {
    dir: PathBuf,
}

impl Leases {
    pub fn at(run: &Path) -> Leases {
        Leases { dir: run.join("net") }
    }
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// uids come from outside; what is no single path component gets none.
    fn path(&self, uid: &str) -> io::Result<PathBuf> {
        let ok = !uid.is_empty() && uid.len() <= 128 && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if !ok {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a uid is 1 to 128 of A-Z, a-z, 0-9, - and _"));
        }
        Ok(self.dir.join(format!("{uid}.json")))
    }

    pub fn save(&self, lease: &Lease) -> io::Result<()> {
        self.write(&self.path(&lease.uid)?, lease)
    }

    /// None where there is none, or none that can be read.
    pub fn load(&self, uid: &str) -> io::Result<Option<Lease>> {
        let lease: Option<Lease> = read(&self.path(uid)?)?;
        Ok(lease.filter(|l| l.uid == uid))
    }

    /// True where there was one.
    pub fn remove(&self, uid: &str) -> io::Result<bool> {
        match fs::remove_file(self.path(uid)?) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// All that can be read. Files that cannot, and leftovers of a write, are removed: whatever
    /// they were for is found in the kernel.
    pub fn all(&self) -> io::Result<Vec<Lease>> {
        let mut leases = Vec::new();
        let entries = match fs::read_dir(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(leases),
            other => other?,
        };
        for entry in entries {
            let path = entry?.path();
            let Some(uid) = path.file_name().and_then(|n| n.to_str()) else { continue };
            if uid == MEMORY {
                continue;
            }
            match uid.strip_suffix(".json").map(|uid| self.load(uid)) {
                Some(Ok(Some(lease))) => leases.push(lease),
                Some(Err(e)) if e.kind() != io::ErrorKind::InvalidInput => return Err(e),
                Some(_) | None => {
                    tracing::warn!(file = %path.display(), "a lease that cannot be read is removed");
                    fs::remove_file(&path)?;
                }
            }
        }
        leases.sort_by(|a, b| a.uid.cmp(&b.uid));
        Ok(leases)
    }

    pub fn save_memory(&self, boot_id: &str, memory: Memory) -> io::Result<()> {
        self.write(&self.dir.join(MEMORY), &Stamped { boot_id: boot_id.to_owned(), memory })
    }

    /// None where there is none of this boot.
    pub fn memory(&self, boot_id: &str) -> io::Result<Option<Memory>> {
        let stamped: Option<Stamped> = read(&self.dir.join(MEMORY))?;
        Ok(stamped.filter(|s| s.boot_id == boot_id).map(|s| s.memory))
    }

    /// All of it, the directory too.
    pub fn remove_all(&self) -> io::Result<()> {
        match fs::remove_dir_all(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn write(&self, path: &Path, value: &impl Serialize) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let bytes = serde_json::to_vec(value).map_err(io::Error::other)?;
        let temporary = path.with_extension("new");
        fs::write(&temporary, bytes)?;
        fs::rename(&temporary, path)
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let file = match fs::File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut bytes = Vec::new();
    file.take(LEASE_MAX).read_to_end(&mut bytes)?;
    // Not ours, or of another version: as good as none.
    Ok(serde_json::from_slice(&bytes).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(uid: &str) -> Lease {
        Lease {
            uid: uid.into(),
            pod: "a/b".into(),
            netns: "/x".into(),
            addresses: vec!["10.0.0.2".parse().unwrap()],
            host_ports: vec![],
        }
    }

    #[test]
    fn a_torn_or_foreign_file_is_no_lease_and_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::at(dir.path());
        assert_eq!(leases.all().unwrap(), []);
        leases.save(&lease("u-1")).unwrap();
        leases.save(&lease("u-2")).unwrap();
        let whole = fs::read(dir.path().join("net/u-1.json")).unwrap();
        fs::write(dir.path().join("net/u-3.json"), &whole[..whole.len() / 2]).unwrap();
        fs::write(dir.path().join("net/u-4.json"), &whole).unwrap();
        fs::write(dir.path().join("net/u-5.new"), &whole).unwrap();
        assert_eq!(leases.all().unwrap(), [lease("u-1"), lease("u-2")]);
        assert_eq!(fs::read_dir(dir.path().join("net")).unwrap().count(), 2);
        assert!(leases.remove("u-1").unwrap() && !leases.remove("u-1").unwrap());
    }

    #[test]
    fn no_uid_leaves_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        for bad in ["", "../x", "a/b", "a.b"] {
            assert!(Leases::at(dir.path()).save(&lease(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_counts_within_one_boot() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::at(dir.path());
        let memory = Memory { cursors: vec!["10.0.0.9".parse().unwrap()], freed: vec![("10.0.0.3".parse().unwrap(), 7)] };
        leases.save_memory("boot-1", memory.clone()).unwrap();
        assert_eq!(leases.memory("boot-1").unwrap(), Some(memory));
        assert_eq!(leases.memory("boot-2").unwrap(), None);
    }
}
