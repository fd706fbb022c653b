//! A file system in memory for one process; `tests/store/model.rs` has the one that power cuts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use coracle::store::fs::Fs;

type Bytes = Arc<Mutex<Vec<u8>>>;

#[derive(Clone, Default)]
pub struct Memory(Arc<Mutex<BTreeMap<PathBuf, Bytes>>>);

impl Memory {
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        self.files(|files| files.insert(path.into(), Arc::new(Mutex::new(bytes))));
    }

    fn files<T>(&self, with: impl FnOnce(&mut BTreeMap<PathBuf, Bytes>) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn content<T>(file: &Bytes, with: impl FnOnce(&mut Vec<u8>) -> T) -> T {
    with(&mut file.lock().unwrap_or_else(PoisonError::into_inner))
}

fn absent() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Fs for Memory {
    type File = Bytes;

    fn make_dir(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let child = |path: &PathBuf| (path.parent() == Some(dir)).then(|| path.file_name().map(OsString::from)).flatten();
        Ok(self.files(|files| files.keys().filter_map(child).collect()))
    }
    fn create(&self, path: &Path, _: u32) -> io::Result<Bytes> {
        self.files(|files| match files.contains_key(path) {
            true => Err(io::ErrorKind::AlreadyExists.into()),
            false => Ok(files.entry(path.to_owned()).or_default().clone()),
        })
    }
    fn open(&self, path: &Path) -> io::Result<Bytes> {
        self.files(|files| files.get(path).cloned()).ok_or_else(absent)
    }
    fn len(&self, file: &Bytes) -> io::Result<u64> {
        Ok(content(file, |c| c.len() as u64))
    }
    fn allocated(&self, file: &Bytes) -> io::Result<u64> {
        self.len(file)
    }
    fn read_at(&self, file: &Bytes, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(content(file, |c| {
            let from = c.get(offset as usize..).unwrap_or_default();
            let n = from.len().min(buffer.len());
            buffer[..n].copy_from_slice(&from[..n]);
            n
        }))
    }
    fn write_at(&self, file: &Bytes, bytes: &[u8], offset: u64) -> io::Result<()> {
        content(file, |c| {
            let end = offset as usize + bytes.len();
            c.resize(c.len().max(end), 0);
            c[offset as usize..end].copy_from_slice(bytes);
        });
        Ok(())
    }
    fn set_len(&self, file: &Bytes, len: u64) -> io::Result<()> {
        content(file, |c| c.resize(len as usize, 0));
        Ok(())
    }
    fn allocate(&self, _: &Bytes, _: u64, _: u64, _: bool) -> io::Result<()> {
        Ok(())
    }
    fn sync(&self, _: &Bytes) -> io::Result<()> {
        Ok(())
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let file = self.open(from)?;
        self.files(|files| files.insert(to.to_owned(), file));
        Ok(())
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.files(|files| {
            let file = files.remove(from).ok_or_else(absent)?;
            files.insert(to.to_owned(), file);
            Ok(())
        })
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files(|files| files.remove(path)).map(drop).ok_or_else(absent)
    }
    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }
    fn free(&self, _: &Path) -> io::Result<u64> {
        Ok(1 << 30)
    }
}
