//! What system calls answer inside a container. The test binary itself lies in the image; run
//! there as `probe --ignored --exact syscalls::seen_from_inside --nocapture` it prints one line a
//! call. Arguments are such that a call that passes the filter fails, or changes nothing.

#![allow(unsafe_code)]

use std::io::Error;

/// Name, number, arguments.
const CALLS: &[(&str, i64, [i64; 5])] = &[
    ("socket-inet", libc::SYS_socket, [2, 1, 0, 0, 0]),
    ("socket-unix", libc::SYS_socket, [1, 1, 0, 0, 0]),
    ("socket-netlink", libc::SYS_socket, [16, 3, 0, 0, 0]),
    ("socket-packet", libc::SYS_socket, [17, 3, 0, 0, 0]),
    ("socket-kcm-41", libc::SYS_socket, [41, 5, 0, 0, 0]),
    ("socket-alg", libc::SYS_socket, [38, 5, 0, 0, 0]),
    ("socket-nfc-39", libc::SYS_socket, [39, 3, 0, 0, 0]),
    ("socket-vsock", libc::SYS_socket, [40, 1, 0, 0, 0]),
    ("keyctl", libc::SYS_keyctl, [-1, 0, 0, 0, 0]),
    ("add_key", libc::SYS_add_key, [0, 0, 0, 0, 0]),
    ("request_key", libc::SYS_request_key, [0, 0, 0, 0, 0]),
    ("bpf", libc::SYS_bpf, [-1, 0, 0, 0, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0, 0, 0]),
    ("io_uring_enter", libc::SYS_io_uring_enter, [-1, 0, 0, 0, 0]),
    ("io_uring_register", libc::SYS_io_uring_register, [-1, 0, 0, 0, 0]),
    ("clone3", libc::SYS_clone3, [0, 0, 0, 0, 0]),
    // CLONE_NEWUSER with CLONE_FS: the kernel refuses it.
    ("clone-newuser", libc::SYS_clone, [0x1000_0000 | 0x200, 0, 0, 0, 0]),
    // CLONE_SIGHAND without CLONE_VM: the kernel refuses it.
    ("clone-plain", libc::SYS_clone, [0x800, 0, 0, 0, 0]),
    ("unshare", libc::SYS_unshare, [0, 0, 0, 0, 0]),
    ("setns", libc::SYS_setns, [-1, 0, 0, 0, 0]),
    ("mount", libc::SYS_mount, [0, 1, 0, 0, 0]),
    ("umount2", libc::SYS_umount2, [1, 0, 0, 0, 0]),
    ("pivot_root", libc::SYS_pivot_root, [1, 1, 0, 0, 0]),
    ("fsopen", libc::SYS_fsopen, [1, -1, 0, 0, 0]),
    ("fsmount", libc::SYS_fsmount, [-1, -1, 0, 0, 0]),
    ("open_tree", libc::SYS_open_tree, [-1, 1, -1, 0, 0]),
    ("move_mount", libc::SYS_move_mount, [-1, 1, -1, 1, -1]),
    ("mount_setattr", libc::SYS_mount_setattr, [-1, 1, -1, 0, 0]),
    ("chroot", libc::SYS_chroot, [1, 0, 0, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, [1, -1, -1, -1, -1]),
    ("init_module", libc::SYS_init_module, [1, 0, 1, 0, 0]),
    ("finit_module", libc::SYS_finit_module, [-1, 1, 0, 0, 0]),
    ("delete_module", libc::SYS_delete_module, [1, 0, 0, 0, 0]),
    ("kexec_load", libc::SYS_kexec_load, [0, 99, 0, -1, 0]),
    ("reboot", libc::SYS_reboot, [0, 0, 0, 0, 0]),
    ("swapon", libc::SYS_swapon, [1, -1, 0, 0, 0]),
    ("clock_settime", libc::SYS_clock_settime, [-99, 0, 0, 0, 0]),
    ("settimeofday", libc::SYS_settimeofday, [1, 0, 0, 0, 0]),
    ("adjtimex", libc::SYS_adjtimex, [1, 0, 0, 0, 0]),
    ("acct", libc::SYS_acct, [1, 0, 0, 0, 0]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [-1, 0, 0, 0, 0]),
    ("name_to_handle_at", libc::SYS_name_to_handle_at, [-1, 1, 0, 0, -1]),
    ("ptrace", libc::SYS_ptrace, [-1, -1, 0, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [-1, 0, 0, 0, 0]),
    ("kcmp", libc::SYS_kcmp, [-1, -1, -1, 0, 0]),
    ("pidfd_open", libc::SYS_pidfd_open, [-1, 0, 0, 0, 0]),
    ("pidfd_getfd", libc::SYS_pidfd_getfd, [-1, -1, 0, 0, 0]),
    ("process_madvise", libc::SYS_process_madvise, [-1, 0, 0, 0, 0]),
    ("get_mempolicy", libc::SYS_get_mempolicy, [0, 0, 0, 0, -1]),
    ("set_mempolicy", libc::SYS_set_mempolicy, [99, 0, 0, 0, 0]),
    ("mbind", libc::SYS_mbind, [1, 1, 99, 0, 0]),
    ("move_pages", libc::SYS_move_pages, [-1, 0, 0, 0, 0]),
    ("migrate_pages", libc::SYS_migrate_pages, [-1, 0, 0, 0, 0]),
    ("quotactl", libc::SYS_quotactl, [-1, 1, 0, 0, 0]),
    ("syslog", libc::SYS_syslog, [99, 0, 0, 0, 0]),
    ("sethostname", libc::SYS_sethostname, [1, -1, 0, 0, 0]),
    ("setdomainname", libc::SYS_setdomainname, [1, -1, 0, 0, 0]),
    ("personality-read", libc::SYS_personality, [0xffff_ffff, 0, 0, 0, 0]),
    ("personality-no-random", libc::SYS_personality, [0x0004_0000, 0, 0, 0, 0]),
    ("fanotify_init", libc::SYS_fanotify_init, [-1, -1, 0, 0, 0]),
    ("inotify_init1", libc::SYS_inotify_init1, [-1, 0, 0, 0, 0]),
    ("seccomp", libc::SYS_seccomp, [99, 0, 0, 0, 0]),
    ("memfd_create", libc::SYS_memfd_create, [1, 0, 0, 0, 0]),
    ("membarrier", libc::SYS_membarrier, [0, 0, 0, 0, 0]),
    ("landlock_create_ruleset", libc::SYS_landlock_create_ruleset, [0, 0, 1, 0, 0]),
    ("openat2", libc::SYS_openat2, [-1, 1, 0, 0, 0]),
    ("close_range", libc::SYS_close_range, [1000, 999, 0, 0, 0]),
    ("futex_waitv", libc::SYS_futex_waitv, [0, 0, 0, 0, 0]),
    ("epoll_pwait2", libc::SYS_epoll_pwait2, [-1, 0, 0, 0, 0]),
    ("copy_file_range", libc::SYS_copy_file_range, [-1, 0, -1, 0, 0]),
    ("nfsservctl", libc::SYS_nfsservctl, [0, 0, 0, 0, 0]),
    ("vserver", libc::SYS_vserver, [0, 0, 0, 0, 0]),
    ("process_mrelease", libc::SYS_process_mrelease, [-1, 0, 0, 0, 0]),
    ("quotactl_fd", libc::SYS_quotactl_fd, [-1, -1, 0, 0, 0]),
    // Newer than libseccomp 2.5.4: "not there", or libcs would not fall back.
    ("cachestat", 451, [-1, 0, 0, 0, 0]),
    ("fchmodat2", 452, [-1, 1, 0, 0, 0]),
    ("mseal", 462, [1, 0, -1, 0, 0]),
    ("no-such-call", 999, [0, 0, 0, 0, 0]),
];

/// Not a test of its own: see the head.
#[test]
#[ignore = "runs inside the containers of the comparison"]
fn seen_from_inside() {
    for (name, number, [a, b, c, d, e]) in CALLS {
        // SAFETY: pointers are null, 1 or absent, and so never read or written; flags and
        // descriptors are invalid; what can succeed opens a descriptor or reads a number.
        let rc = unsafe { libc::syscall(*number, *a, *b, *c, *d, *e, 0i64) };
        let answer = if rc < 0 { Error::last_os_error().raw_os_error().unwrap_or(0).to_string() } else { "passes".into() };
        println!("call {name} {answer}");
    }
}
