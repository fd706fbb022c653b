//! One look at the host. What can be tried is tried for real, in namespaces and directories that
//! are gone afterwards; nothing is decided here.

use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MemFdCreateFlag, memfd_create};

use super::facts::{Facts, Place, Tried};
use crate::config::Roots;
use crate::runtime::cgroup::Cgroups;
use crate::sys::file::{self, Resolve};
use crate::sys::{clock, mount as mounts, mount_table, nftables, pidfd, sysctl};
use crate::{net, proxy};

pub fn facts(roots: &Roots) -> Facts {
    let mut state = place(&roots.state);
    let [mount_namespace, tmpfs, overlay, layers] = try_mounts(state.writable.is_ok().then(|| PathBuf::from(&state.at)));
    state.layers = layers;
    let own = || Some(Ok(()));
    Facts {
        uid: nix::unistd::geteuid().as_raw(),
        release: nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned()).unwrap_or_default(),
        cgroups: Cgroups::detect("/").map(|c| (c.layout(), c.lacks().to_vec())).map_err(|e| crate::obs::chain(&e).to_string()),
        command_line: ["/boot/firmware/cmdline.txt", "/boot/cmdline.txt"].into_iter().find(|path| Path::new(path).is_file()),
        mount_namespace: mount_namespace.or_else(own).unwrap_or(Ok(())),
        tmpfs: tmpfs.or_else(own).unwrap_or(Ok(())),
        overlay: overlay.or_else(own).unwrap_or(Ok(())),
        network: net::probe().map_err(|e| crate::obs::chain(&e).to_string()),
        packet_filter: proxy::lacks::probe().map_err(|e| e.to_string()),
        // Where they cannot be listed the finding above says why.
        foreign: nftables::open().and_then(|mut socket| proxy::observe::foreign(&mut socket)).unwrap_or_default(),
        tracking: proxy::tuning::seen(),
        tracking_writable: sysctl::is_writable(proxy::tuning::ESTABLISHED),
        bridge_netfilter: text("/proc/sys/net/bridge/bridge-nf-call-iptables").ok(),
        seccomp: text("/proc/sys/kernel/seccomp/actions_avail"),
        pidfd: tried(pidfd::open(nix::unistd::getpid().as_raw())),
        openat2: tried(file::open_dir_path(Path::new("/")).and_then(|root| {
            file::openat2(std::os::fd::AsFd::as_fd(&root), Path::new("proc"), OFlag::O_PATH, 0, Resolve::InRoot)
        })),
        mount_setattr: tried(mounts::read_only_clone(Path::new("/proc/self/exe"))),
        memfd: tried(
            memfd_create(c"probe", MemFdCreateFlag::MFD_CLOEXEC | MemFdCreateFlag::MFD_ALLOW_SEALING).map_err(io::Error::from),
        ),
        apparmor: text("/sys/module/apparmor/parameters/enabled").is_ok_and(|on| on == "Y"),
        capabilities: capabilities(),
        swap_devices: text("/proc/swaps").unwrap_or_default().lines().skip(1).count(),
        now: clock::wall_nanos(),
        inotify_instances: number("/proc/sys/fs/inotify/max_user_instances"),
        inotify_watches: number("/proc/sys/fs/inotify/max_user_watches"),
        state,
        logs: place(&roots.logs),
        kubelet_shared: shared(&roots.kubelet),
    }
}

fn tried<T>(result: io::Result<T>) -> Tried {
    result.map(drop).map_err(|e| e.to_string())
}

fn text(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|e| format!("{path}: {e}"))
}

fn number(path: &str) -> Option<u64> {
    text(path).ok()?.parse().ok()
}

fn capabilities() -> Option<u64> {
    let status = text("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// What exists of the way to `path`.
fn existing(path: &Path) -> PathBuf {
    let mut at = PathBuf::from(path);
    while !at.exists() && at.pop() {}
    at
}

fn place(path: &Path) -> Place {
    let at = existing(path);
    let writable = nix::unistd::access(&at, nix::unistd::AccessFlags::W_OK).map_err(|e| e.desc().to_owned());
    let inodes = nix::sys::statvfs::statvfs(&at).ok().filter(|v| v.files() > 0);
    // Its width differs by target.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
    let kind = nix::sys::statfs::statfs(&at).map_or(0, |s| s.filesystem_type().0 as i64);
    #[allow(clippy::useless_conversion)]
    let free_inodes = inodes.map(|v| u64::from(v.files_available()));
    Place {
        kind,
        free: file::free_bytes(&at).map_err(|e| e.to_string()),
        free_inodes,
        writable,
        layers: None,
        at: at.display().to_string(),
    }
}

fn shared(path: &Path) -> bool {
    let at = existing(path);
    let at = at.canonicalize().unwrap_or(at);
    mount_table::of(&at).ok().flatten().is_some_and(|mount| mount.shared)
}

/// In a mount namespace that ends with the thread that tried: the namespace itself, a tmpfs,
/// overlay on it, overlay on the state directory. None: what comes before did not work.
fn try_mounts(state: Option<PathBuf>) -> [Option<Tried>; 4] {
    let thread = std::thread::Builder::new().name("probe".into());
    match thread.spawn(move || try_mounts_here(state.as_deref())).map(std::thread::JoinHandle::join) {
        Ok(Ok(found)) => found,
        Ok(Err(_)) => [Some(Err("the probe panicked: this is a fault of coracle check".into())), None, None, None],
        Err(e) => [Some(Err(format!("no thread could be started: {e}"))), None, None, None],
    }
}

fn try_mounts_here(state: Option<&Path>) -> [Option<Tried>; 4] {
    let own = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>));
    if let Err(e) = own {
        return [Some(Err(e.desc().to_owned())), None, None, None];
    }
    // Before the tmpfs, which may hide it.
    let layers = state.map(|state| tried(in_directory(state, try_overlay)));
    let Some(base) = ["/tmp", "/run", "/var", "/dev"].into_iter().map(Path::new).find(|dir| dir.is_dir()) else {
        return [Some(Ok(())), Some(Err("no directory to mount it on: /tmp is missing".into())), None, layers];
    };
    if let Err(e) = mounts::tmpfs("probe", base, "mode=0700,size=1m") {
        return [Some(Ok(())), Some(Err(e.to_string())), None, layers];
    }
    [Some(Ok(())), Some(Ok(())), Some(tried(try_overlay(base))), layers]
}

/// Makes an own directory below `dir`, and takes it away again.
fn in_directory(dir: &Path, work: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let own = dir.join(format!(".coracle-check-{}", std::process::id()));
    std::fs::create_dir(&own)?;
    let result = work(&own);
    // Overlay's own work directory has no permissions for anybody, which root does not need.
    std::fs::remove_dir_all(&own)?;
    result
}

/// Writes through an overlay, and hides a directory of the lower layer behind a new one, which
/// takes what a file system for upper layers must be able to do (trusted.overlay attributes).
fn try_overlay(base: &Path) -> io::Result<()> {
    let dir = |name: &str| -> io::Result<PathBuf> {
        let path = base.join(name);
        std::fs::create_dir(&path)?;
        Ok(path)
    };
    let (low, upper, work, merged) = (dir("low")?, dir("upper")?, dir("work")?, dir("merged")?);
    std::fs::write(low.join("file"), "below")?;
    std::fs::create_dir(low.join("dir"))?;
    mounts::overlay(&[&low], &upper, &work, &merged)?;
    let write = || -> io::Result<()> {
        std::fs::write(merged.join("file"), "above")?;
        std::fs::remove_dir(merged.join("dir"))?;
        std::fs::create_dir(merged.join("dir"))?;
        let seen = std::fs::read_to_string(upper.join("file"))?;
        if seen == "above" { Ok(()) } else { Err(io::Error::other("what was written did not reach the upper layer")) }
    };
    let written = write();
    mounts::detach(&merged)?;
    written
}
