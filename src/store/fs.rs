//! What the store asks of a file system, and the real one.
//!
//! All store code runs on [`Fs`], so that `tests/store.rs` can run it on a file system in memory
//! that enumerates every state which a power cut may leave. A method promises no more than the
//! system call that it is named for: data is durable after `sync`, names after `sync_dir`.
//!
//! Sources: open(2), rename(2), fsync(2): "calling fsync() does not necessarily ensure that the
//! entry in the directory containing the file has also reached disk".

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crate::sys::file;

pub trait Fs: Send + Sync {
    type File: Send;

    /// One directory, 0700. True: it was made; false: it was there.
    fn make_dir(&self, path: &Path) -> io::Result<bool>;
    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>>;
    /// A new file for reading and writing; an error where the name is taken.
    fn create(&self, path: &Path, mode: u32) -> io::Result<Self::File>;
    /// A regular file that is there, for reading and writing; never through a symbolic link.
    fn open(&self, path: &Path) -> io::Result<Self::File>;
    fn len(&self, file: &Self::File) -> io::Result<u64>;
    /// Bytes that it takes on the file system.
    fn allocated(&self, file: &Self::File) -> io::Result<u64>;
    /// 0 at the end of the file.
    fn read_at(&self, file: &Self::File, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// All of `bytes`; after an error any part of them may be there.
    fn write_at(&self, file: &Self::File, bytes: &[u8], offset: u64) -> io::Result<()>;
    fn set_len(&self, file: &Self::File, len: u64) -> io::Result<()>;
    /// Blocks for that range; the file's size changes only without `keep_size`.
    fn allocate(&self, file: &Self::File, offset: u64, len: u64, keep_size: bool) -> io::Result<()>;
    fn sync(&self, file: &Self::File) -> io::Result<()>;
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Bytes that can still be written where `path` lies.
    fn free(&self, path: &Path) -> io::Result<u64>;
}

/// The file system of the host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Fs for Disk {
    type File = File;

    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        match fs::DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn create(&self, path: &Path, mode: u32) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(path)?;
        // Whatever the umask is, the file has the mode that it should have.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        Ok(file)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        // Not to hang on a FIFO that lies there instead.
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(nix::errno::Errno::EISDIR.into());
        }
        Ok(file)
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
    }

    fn allocated(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.blocks() * 512)
    }

    fn read_at(&self, file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match file.read_at(buffer, offset) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    fn set_len(&self, file: &File, len: u64) -> io::Result<()> {
        file.set_len(len)
    }

    fn allocate(&self, file: &File, offset: u64, len: u64, keep_size: bool) -> io::Result<()> {
        file::allocate(file, offset, len, keep_size)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        // The size counts as data here: fdatasync(2) writes what a later read needs.
        file.sync_data()
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        file::fsync_dir(dir)
    }

    fn free(&self, path: &Path) -> io::Result<u64> {
        file::free_bytes(path)
    }
}
