//! A file system in memory that knows every state a power cut may leave.
//!
//! Its promises are those of POSIX and not more: data is on disk after fsync of the file, a name
//! after fsync of its directory. Until then each 512-byte block has any content that it ever had
//! since, the size any size, and each change of a name happened or did not, in any order. What a
//! failed fsync was to write may stay unwritten for ever, however often it is "synced" again.
//!
//! Source: research on ALICE (OSDI '14) and CrashMonkey (OSDI '18); fsync(2).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle::store::fs::Fs;
use nix::errno::Errno;

const BLOCK: usize = 512;

/// Deterministic numbers from a seed (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// A file that was not synced: its node, the lengths and the contents of blocks that it may have.
type Unsynced = (usize, (Vec<usize>, Vec<Versions>));

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n.max(1)
    }
}

#[derive(Clone, Debug)]
enum DataOp {
    Write { offset: usize, bytes: Arc<Vec<u8>> },
    SetLen(usize),
}

impl DataOp {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            DataOp::Write { offset, bytes } => {
                if content.len() < offset + bytes.len() {
                    content.resize(offset + bytes.len(), 0);
                }
                content[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            DataOp::SetLen(len) => content.resize(*len, 0),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Node {
    live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<DataOp>,
    /// An fsync of it failed: no later one makes anything durable.
    poisoned: bool,
}

/// A change of names in one directory, atomic in itself.
#[derive(Clone, Debug)]
enum NameOp {
    Set(OsString, usize),
    Remove(OsString),
    Rename(OsString, OsString, usize),
}

impl NameOp {
    fn apply(&self, names: &mut BTreeMap<OsString, usize>) {
        match self {
            NameOp::Set(name, node) => {
                names.insert(name.clone(), *node);
            }
            NameOp::Remove(name) => {
                names.remove(name);
            }
            NameOp::Rename(from, to, node) => {
                names.remove(from);
                names.insert(to.clone(), *node);
            }
        }
    }
    fn touches(&self, other: &NameOp) -> bool {
        let names = |op: &NameOp| match op {
            NameOp::Set(a, _) | NameOp::Remove(a) => vec![a.clone()],
            NameOp::Rename(a, b, _) => vec![a.clone(), b.clone()],
        };
        names(self).iter().any(|n| names(other).contains(n))
    }
}

#[derive(Clone, Debug, Default)]
struct Dir {
    live: BTreeMap<OsString, usize>,
    durable: BTreeMap<OsString, usize>,
    /// With each: whether an fsync failed to write it.
    pending: Vec<(NameOp, bool)>,
    /// Its own name in its parent is durable.
    named: bool,
}

#[derive(Clone, Debug, Default)]
pub struct World {
    nodes: Vec<Arc<Node>>,
    dirs: BTreeMap<PathBuf, Dir>,
    /// Bytes that all files may have.
    pub capacity: Option<usize>,
    /// Countdown to an injected error, which then hits once.
    pub fault: Option<(u64, Errno)>,
    pub faults_hit: u64,
    /// What the driver of the workload knows to be acknowledged; it only means something there.
    pub mark: usize,
    /// One world after every change, if recording.
    record: Option<Vec<World>>,
    /// What this file system claims to do and does not: to show that a judge can see it.
    lie: Option<Lie>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    FileSync,
    DirSync,
    /// A rename is a copy into the old file.
    Rename,
}

impl World {
    pub fn new(root: &str, lie: Option<Lie>) -> World {
        let mut world = World { lie, ..World::default() };
        world.dirs.insert(root.into(), Dir { named: true, ..Dir::default() });
        world
    }

    /// Also what stays after SIGKILL: the page cache with it.
    fn silent(&self) -> World {
        World { record: None, fault: None, ..self.clone() }
    }

    fn changed(&mut self) {
        if self.record.is_some() {
            let now = self.silent();
            if let Some(record) = &mut self.record {
                record.push(now);
            }
        }
    }

    /// Every injected error comes before the call has any effect, but for a write: see there.
    fn may_fail(&mut self) -> io::Result<()> {
        match &mut self.fault {
            Some((0, errno)) => {
                let errno = *errno;
                self.fault = None;
                self.faults_hit += 1;
                Err(errno.into())
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn used(&self) -> usize {
        let named: BTreeSet<usize> = self.dirs.values().flat_map(|d| d.live.values().copied()).collect();
        named.iter().map(|n| self.nodes[*n].live.len()).sum()
    }

    fn dir(&mut self, path: &Path) -> io::Result<&mut Dir> {
        self.dirs.get_mut(path).ok_or_else(|| Errno::ENOENT.into())
    }

    fn split(path: &Path) -> (PathBuf, OsString) {
        (path.parent().unwrap().to_owned(), path.file_name().unwrap().to_owned())
    }

    fn lookup(&mut self, path: &Path) -> io::Result<usize> {
        let (dir, name) = World::split(path);
        self.dir(&dir)?.live.get(&name).copied().ok_or_else(|| Errno::ENOENT.into())
    }

    fn change(&mut self, dir: &Path, op: NameOp) -> io::Result<()> {
        let dir = self.dir(dir)?;
        op.apply(&mut dir.live);
        dir.pending.push((op, false));
        self.changed();
        Ok(())
    }

    fn write(&mut self, node: usize, op: DataOp) {
        let node = Arc::make_mut(&mut self.nodes[node]);
        op.apply(&mut node.live);
        node.pending.push(op);
        self.changed();
    }

    /// Distinct states that a power cut may leave now, each with a digest of what is visible in it:
    /// all of them, or about `max` by random choice. First the names, then what they lead to.
    pub fn crash_states(&self, max: u64, random: &mut Random, each: &mut dyn FnMut(u64, World)) {
        let name_sizes: Vec<u64> = self
            .dirs
            .values()
            .flat_map(|d| std::iter::once(if d.named { 1 } else { 2 }).chain(d.pending.iter().map(|_| 2)))
            .collect();
        let mut seen = BTreeSet::new();
        let mut named = Vec::new();
        picks(&name_sizes, max.div_ceil(4), random, &mut |pick| {
            let dirs = self.names_after(pick);
            if seen.insert(dirs.iter().map(|(p, d)| (p.clone(), d.durable.clone())).collect::<Vec<_>>()) {
                named.push(dirs);
            }
        });
        let share = max.div_ceil(named.len() as u64).max(4);
        for dirs in named {
            let reachable: BTreeSet<usize> = dirs.values().flat_map(|d| d.durable.values().copied()).collect();
            let files: Vec<_> = reachable
                .iter()
                .filter(|n| !self.nodes[**n].pending.is_empty())
                .map(|n| (*n, versions(&self.nodes[*n])))
                .collect();
            let sizes: Vec<u64> = files
                .iter()
                .flat_map(|(_, (lens, blocks))| {
                    std::iter::once(lens.len() as u64).chain(blocks.iter().map(|b| b.contents.len() as u64))
                })
                .collect();
            picks(&sizes, share, random, &mut |pick| {
                let world = self.world_after(&dirs, &reachable, &files, pick);
                each(world.digest(), world);
            });
        }
    }

    fn names_after(&self, pick: &[u64]) -> BTreeMap<PathBuf, Dir> {
        let mut pick = pick.iter();
        let mut dirs: BTreeMap<PathBuf, Dir> = BTreeMap::new();
        for (path, dir) in &self.dirs {
            let there = pick.next() == Some(&1) || dir.named;
            let mut names = dir.durable.clone();
            for (op, _) in &dir.pending {
                if pick.next() == Some(&1) {
                    op.apply(&mut names);
                }
            }
            let parent_there = path.parent().is_none_or(|p| !self.dirs.contains_key(p) || dirs.contains_key(p));
            if there && parent_there {
                dirs.insert(path.clone(), Dir { live: names.clone(), durable: names, pending: Vec::new(), named: true });
            }
        }
        dirs
    }

    fn world_after(&self, dirs: &BTreeMap<PathBuf, Dir>, reachable: &BTreeSet<usize>, files: &[Unsynced], pick: &[u64]) -> World {
        let mut pick = pick.iter().map(|n| *n as usize);
        let mut world = World { capacity: self.capacity, mark: self.mark, dirs: dirs.clone(), ..World::default() };
        world.nodes = vec![Arc::default(); self.nodes.len()];
        for node in reachable {
            world.nodes[*node] = self.nodes[*node].clone();
        }
        for (node, (lens, blocks)) in files {
            let len = lens[pick.next().unwrap()];
            let mut content = self.nodes[*node].durable.clone();
            content.resize(content.len().max(len), 0);
            for versions in blocks {
                let block = &versions.contents[pick.next().unwrap()];
                let start = versions.block * BLOCK;
                if start < len {
                    content.resize(content.len().max(start + block.len()), 0);
                    content[start..start + block.len()].copy_from_slice(block);
                }
            }
            content.resize(len, 0);
            world.nodes[*node] = Arc::new(Node { live: content.clone(), durable: content, pending: Vec::new(), poisoned: false });
        }
        world
    }

    fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (path, dir) in &self.dirs {
            path.hash(&mut hasher);
            for (name, node) in &dir.durable {
                name.hash(&mut hasher);
                self.nodes[*node].durable.hash(&mut hasher);
            }
        }
        self.mark.hash(&mut hasher);
        hasher.finish()
    }
}

/// All picks of one number below each size, or `max` random ones where there are more.
fn picks(sizes: &[u64], max: u64, random: &mut Random, each: &mut dyn FnMut(&[u64])) {
    match sizes.iter().try_fold(1u64, |n, size| n.checked_mul(*size)) {
        Some(total) if total <= max => {
            for mut index in 0..total {
                let digit = |size: &u64| {
                    let n = index % size;
                    index /= size;
                    n
                };
                each(&sizes.iter().map(digit).collect::<Vec<_>>());
            }
        }
        _ => (0..max).for_each(|_| each(&sizes.iter().map(|size| random.below(*size)).collect::<Vec<_>>())),
    }
}

struct Versions {
    block: usize,
    contents: Vec<Vec<u8>>,
}

/// All sizes that a file had since it was last synced, and all contents of each of its blocks.
fn versions(node: &Node) -> (Vec<usize>, Vec<Versions>) {
    let mut content = node.durable.clone();
    let mut lens = vec![content.len()];
    let mut blocks: BTreeMap<usize, Vec<Vec<u8>>> = BTreeMap::new();
    let block = |content: &[u8], n: usize| {
        let mut block = content.get(n * BLOCK..).unwrap_or_default().to_vec();
        block.resize(BLOCK, 0);
        block
    };
    for op in &node.pending {
        let before = content.clone();
        op.apply(&mut content);
        if !lens.contains(&content.len()) {
            lens.push(content.len());
        }
        for n in 0..before.len().max(content.len()).div_ceil(BLOCK) {
            let (old, new) = (block(&before, n), block(&content, n));
            let known = blocks.entry(n).or_insert_with(|| vec![old]);
            if !known.contains(&new) {
                known.push(new);
            }
        }
    }
    let blocks = blocks.into_iter().filter(|(_, c)| c.len() > 1).map(|(block, contents)| Versions { block, contents });
    (lens, blocks.collect())
}

/// The world as [`Fs`].
#[derive(Clone, Debug)]
pub struct Model(Arc<Mutex<World>>);

impl Model {
    pub fn new(world: World) -> Model {
        Model(Arc::new(Mutex::new(world)))
    }
    pub fn with<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }
    /// From now on a world is kept after every change.
    pub fn start_recording(&self) {
        self.with(|w| {
            w.record = Some(Vec::new());
            w.changed();
        });
    }
    pub fn take_recording(&self) -> Vec<World> {
        self.with(|w| w.record.take().unwrap_or_default())
    }
}

impl Fs for Model {
    type File = usize;

    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        self.with(|w| {
            if w.dirs.contains_key(path) {
                return Ok(false);
            }
            if !path.parent().is_some_and(|p| w.dirs.contains_key(p)) {
                return Err(Errno::ENOENT.into());
            }
            w.may_fail()?;
            w.dirs.insert(path.to_owned(), Dir::default());
            w.changed();
            Ok(true)
        })
    }

    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        self.with(|w| {
            let mut names: Vec<OsString> = w.dir(dir)?.live.keys().cloned().collect();
            let below = |p: &&PathBuf| p.parent() == Some(dir);
            names.extend(w.dirs.keys().filter(below).filter_map(|p| p.file_name().map(OsStr::to_owned)));
            Ok(names)
        })
    }

    fn create(&self, path: &Path, _mode: u32) -> io::Result<usize> {
        self.with(|w| {
            let (dir, name) = World::split(path);
            if w.dir(&dir)?.live.contains_key(&name) {
                return Err(Errno::EEXIST.into());
            }
            w.may_fail()?;
            w.nodes.push(Arc::default());
            let node = w.nodes.len() - 1;
            w.change(&dir, NameOp::Set(name, node))?;
            Ok(node)
        })
    }

    fn open(&self, path: &Path) -> io::Result<usize> {
        self.with(|w| w.lookup(path))
    }

    fn len(&self, file: &usize) -> io::Result<u64> {
        self.with(|w| Ok(w.nodes[*file].live.len() as u64))
    }

    fn allocated(&self, file: &usize) -> io::Result<u64> {
        self.len(file)
    }

    fn read_at(&self, file: &usize, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with(|w| {
            let content = w.nodes[*file].live.get(offset as usize..).unwrap_or_default();
            let n = content.len().min(buffer.len());
            buffer[..n].copy_from_slice(&content[..n]);
            Ok(n)
        })
    }

    fn write_at(&self, file: &usize, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.with(|w| {
            let offset = offset as usize;
            let grows = (offset + bytes.len()).saturating_sub(w.nodes[*file].live.len());
            let room = w.capacity.map(|c| c.saturating_sub(w.used()));
            let (n, error) = match (w.may_fail(), room) {
                // Half of it, as a write that fails in the middle leaves it.
                (Err(e), _) => (bytes.len() / 2, Some(e)),
                (Ok(()), Some(room)) if grows > room => (bytes.len() - (grows - room), Some(Errno::ENOSPC.into())),
                (Ok(()), _) => (bytes.len(), None),
            };
            w.write(*file, DataOp::Write { offset, bytes: Arc::new(bytes[..n].to_vec()) });
            error.map_or(Ok(()), Err)
        })
    }

    fn set_len(&self, file: &usize, len: u64) -> io::Result<()> {
        self.with(|w| {
            w.may_fail()?;
            w.write(*file, DataOp::SetLen(len as usize));
            Ok(())
        })
    }

    fn allocate(&self, file: &usize, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        if keep_size {
            return Ok(()); // it promises nothing here, so that every append may meet a full disk
        }
        self.with(|w| {
            let end = (offset + len) as usize;
            let grows = end.saturating_sub(w.nodes[*file].live.len());
            if w.capacity.is_some_and(|c| c < w.used() + grows) {
                return Err(Errno::ENOSPC.into());
            }
            w.write(*file, DataOp::SetLen(end));
            Ok(())
        })
    }

    fn sync(&self, file: &usize) -> io::Result<()> {
        self.with(|w| {
            let failed = w.may_fail();
            let lie = w.lie == Some(Lie::FileSync);
            let node = Arc::make_mut(&mut w.nodes[*file]);
            node.poisoned |= failed.is_err();
            failed?;
            if !node.poisoned && !lie {
                node.durable = node.live.clone();
                node.pending.clear();
            }
            w.changed();
            Ok(())
        })
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|w| {
            w.may_fail()?;
            let node = w.lookup(from)?;
            let (dir, name) = World::split(to);
            w.change(&dir, NameOp::Set(name, node))
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.with(|w| {
            w.may_fail()?;
            let node = w.lookup(from)?;
            let ((from_dir, from), (to_dir, to)) = (World::split(from), World::split(to));
            if w.lie == Some(Lie::Rename)
                && let Some(old) = w.dir(&to_dir)?.live.get(&to).copied()
            {
                let bytes = Arc::new(w.nodes[node].live.clone());
                w.write(old, DataOp::SetLen(0));
                w.write(old, DataOp::Write { offset: 0, bytes });
                w.change(&from_dir, NameOp::Remove(from))?;
                let node = Arc::make_mut(&mut w.nodes[old]);
                node.durable = node.live.clone();
                node.pending.clear();
                return Ok(());
            }
            if from_dir == to_dir {
                return w.change(&from_dir, NameOp::Rename(from, to, node));
            }
            w.change(&to_dir, NameOp::Set(to, node))?;
            w.change(&from_dir, NameOp::Remove(from))
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.with(|w| {
            w.lookup(path)?;
            let (dir, name) = World::split(path);
            w.change(&dir, NameOp::Remove(name))
        })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.with(|w| {
            let failed = w.may_fail();
            if w.lie == Some(Lie::DirSync) {
                return Ok(());
            }
            let node = w.dir(dir)?;
            if let Err(e) = failed {
                node.pending.iter_mut().for_each(|(_, lost)| *lost = true);
                return Err(e);
            }
            let pending = std::mem::take(&mut node.pending);
            let (stuck, written): (Vec<_>, Vec<_>) = pending.into_iter().partition(|(_, lost)| *lost);
            written.iter().for_each(|(op, _)| op.apply(&mut node.durable));
            node.pending = stuck.into_iter().filter(|(op, _)| !written.iter().any(|(w, _)| w.touches(op))).collect();
            for (path, child) in &mut w.dirs {
                child.named |= path.parent() == Some(dir);
            }
            w.changed();
            Ok(())
        })
    }

    fn free(&self, _path: &Path) -> io::Result<u64> {
        self.with(|w| Ok(w.capacity.map_or(u64::MAX, |c| c.saturating_sub(w.used()) as u64)))
    }
}
