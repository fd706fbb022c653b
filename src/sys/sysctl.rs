//! Kernel parameters below `/proc/sys`, of the calling thread's namespaces.
//!
//! A name is the path below `/proc/sys`, with `/` between its parts: interface names may hold dots.
//! Source: proc_sys(5), Documentation/networking/ip-sysctl.rst.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

fn path(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

/// The value without its newline; None where this kernel has no such parameter.
pub fn read(name: &str) -> io::Result<Option<String>> {
    let mut text = String::new();
    match std::fs::File::open(path(name)).and_then(|file| file.take(4096).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text.trim_end().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether [`write`] would be let; nothing is written.
pub fn is_writable(name: &str) -> bool {
    std::fs::OpenOptions::new().write(true).open(path(name)).is_ok()
}

pub fn write(name: &str, value: &str) -> io::Result<()> {
    std::fs::write(path(name), value)
}
