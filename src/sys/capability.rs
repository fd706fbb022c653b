//! Capabilities of the calling thread. capset(2), prctl(2) PR_CAPBSET_DROP.

use std::io;

pub const CHOWN: u32 = 0;
pub const DAC_OVERRIDE: u32 = 1;
pub const FOWNER: u32 = 3;
pub const FSETID: u32 = 4;
pub const MKNOD: u32 = 27;
pub const SETFCAP: u32 = 31;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// _LINUX_CAPABILITY_VERSION_3: two words of 32 capabilities.
const VERSION: u32 = 0x2008_0522;

/// Gives up every capability but `keep`, for good: the bounding set loses the others too, so
/// nothing that is executed later gets them back.
pub fn keep_only(keep: &[u32]) -> io::Result<()> {
    for capability in 0..64u32 {
        if keep.contains(&capability) {
            continue;
        }
        // SAFETY: PR_CAPBSET_DROP takes plain integers.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // EINVAL: the kernel knows no capability of this number, nor any above it.
            if error.raw_os_error() == Some(libc::EINVAL) {
                break;
            }
            return Err(error);
        }
    }
    let mut header = Header { version: VERSION, pid: 0 };
    let mut data = [Data::default(); 2];
    for &capability in keep {
        let word = &mut data[(capability / 32) as usize & 1];
        word.effective |= 1 << (capability % 32);
        word.permitted |= 1 << (capability % 32);
    }
    // SAFETY: header and data have the layout that version 3 asks for, and outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
