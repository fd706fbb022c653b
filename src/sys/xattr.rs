//! Extended attributes of open files. fsetxattr(2), fgetxattr(2), xattr(7).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Sets attribute `name` of an open file (not an O_PATH fd).
pub fn set(fd: impl AsFd, name: &CStr, value: &[u8]) -> io::Result<()> {
    // SAFETY: `name` is a C string and `value` is readable for its length; the kernel copies both.
    let result = unsafe { libc::fsetxattr(fd.as_fd().as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads attribute `name` of an open file into `value`; None: it has none, or the file system knows
/// no attributes. A value longer than the buffer is ERANGE.
pub fn read<'v>(fd: impl AsFd, name: &CStr, value: &'v mut [u8]) -> io::Result<Option<&'v [u8]>> {
    // SAFETY: `name` is a C string and `value` is writable for its length.
    let length = unsafe { libc::fgetxattr(fd.as_fd().as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    if length < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENODATA | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        };
    }
    // The kernel never writes more than it was given room for.
    Ok(value.get(..length as usize))
}
