//! RuntimeDefault's system calls, by purpose. Names of all machines stand together: one that a
//! machine does not have is skipped there. Names ending in 64, 32 or time64 are the 32-bit ABIs'.

/// Allowed for every container.
pub const ALWAYS: &[(&str, &str)] = &[
    (
        "files by path",
        "access chdir chmod chown chown32 creat faccessat faccessat2 fchdir fchmodat fchmodat2 fchownat fstatat64 \
         futimesat getcwd lchown lchown32 link linkat lstat lstat64 mkdir mkdirat mknod mknodat name_to_handle_at \
         newfstatat open openat openat2 readlink readlinkat rename renameat renameat2 rmdir stat stat64 statfs \
         statfs64 statx symlink symlinkat truncate truncate64 umask unlink unlinkat utime utimensat utimensat_time64 \
         utimes",
    ),
    (
        "files by descriptor",
        "_llseek close close_range copy_file_range dup dup2 dup3 fadvise64 fadvise64_64 fallocate fchmod fchown \
         fchown32 fcntl fcntl64 fdatasync flock fstat fstat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 getdents \
         getdents64 ioctl lseek pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readv sendfile \
         sendfile64 splice sync sync_file_range syncfs tee vmsplice write writev cachestat",
    ),
    (
        "extended attributes",
        "fgetxattr flistxattr fremovexattr fsetxattr getxattr getxattrat lgetxattr listxattr listxattrat llistxattr \
         lremovexattr lsetxattr removexattr removexattrat setxattr setxattrat",
    ),
    ("looking at mounts, not making them", "listmount statmount"),
    ("watching files", "fanotify_mark inotify_add_watch inotify_init inotify_init1 inotify_rm_watch"),
    (
        "asynchronous I/O of the old kind",
        "io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit",
    ),
    (
        "waiting for descriptors",
        "_newselect epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait \
         epoll_wait_old eventfd eventfd2 pipe pipe2 poll ppoll ppoll_time64 pselect6 pselect6_time64 select signalfd \
         signalfd4",
    ),
    (
        "memory",
        "brk madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap mmap2 \
         mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_mrelease \
         remap_file_pages",
    ),
    (
        "processes",
        "execve execveat exit exit_group fork getpgid getpgrp getpid getppid getsid gettid pidfd_open \
         pidfd_send_signal prctl setpgid setsid vfork wait4 waitid waitpid",
    ),
    ("debugging one's own: safe since 4.8 checks seccomp after ptrace", "process_vm_readv process_vm_writev ptrace"),
    (
        "threads",
        "futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake get_robust_list get_thread_area rseq \
         set_robust_list set_thread_area set_tid_address tgkill tkill",
    ),
    (
        "signals",
        "alarm kill pause restart_syscall rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn \
         rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sigaltstack sigprocmask sigreturn \
         uretprobe",
    ),
    (
        "who one is",
        "capget capset getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getresgid getresgid32 \
         getresuid getresuid32 getuid getuid32 setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups \
         setgroups32 setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setuid \
         setuid32",
    ),
    (
        "confining oneself further",
        "landlock_add_rule landlock_create_ruleset landlock_restrict_self lsm_get_self_attr lsm_list_modules \
         lsm_set_self_attr seccomp",
    ),
    (
        "scheduling and limits",
        "getcpu getpriority getrlimit getrusage ioprio_get ioprio_set prlimit64 sched_get_priority_max \
         sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler \
         sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam \
         sched_setscheduler sched_yield setpriority setrlimit ugetrlimit",
    ),
    (
        "clocks and timers; adjtimex reads, setting needs CAP_SYS_TIME",
        "adjtimex clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 \
         clock_nanosleep clock_nanosleep_time64 getitimer gettimeofday nanosleep setitimer time timer_create \
         timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create \
         timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times",
    ),
    (
        "sockets; socket itself is by family, see mod.rs",
        "accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg recvmmsg_time64 \
         recvmsg send sendmmsg sendmsg sendto setsockopt shutdown socketpair",
    ),
    (
        "System V and POSIX IPC",
        "ipc mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 \
         mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop semtimedop semtimedop_time64 shmat shmctl shmdt \
         shmget",
    ),
    ("the machine", "getrandom sysinfo uname"),
];

pub const X86: &str = "arch_prctl modify_ldt";

pub const ARM: &str = "arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2";

/// Allowed on top where the container holds the capability: the kernel checks it again.
pub const WITH_CAPABILITY: &[(&str, &str)] = &[
    (
        "SYS_ADMIN",
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr move_mount \
         open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2 unshare",
    ),
    ("DAC_READ_SEARCH", "open_by_handle_at"),
    ("SYS_BOOT", "reboot"),
    ("SYS_CHROOT", "chroot"),
    ("SYS_MODULE", "delete_module finit_module init_module"),
    ("SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("SYS_PACCT", "acct"),
    ("SYS_PTRACE", "kcmp pidfd_getfd process_madvise"),
    ("SYS_RAWIO", "ioperm iopl"),
    ("SYS_TIME", "clock_settime clock_settime64 settimeofday stime"),
    ("SYS_TTY_CONFIG", "vhangup"),
    ("SYSLOG", "syslog"),
    ("BPF", "bpf"),
    ("PERFMON", "perf_event_open"),
];

/// CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET: clone(2).
pub const CLONE_NAMESPACES: u64 = 0x7e02_0000;

/// PER_LINUX, PER_LINUX32, each with UNAME26, and "what is it now": personality(2).
pub const PERSONALITIES: [u64; 5] = [0x0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];
