//! Who a container runs as: user and groups against the image's own passwd and group files.
//!
//! Invariants. A number is a number: it is never looked up as a name, and out of range it is an
//! error, never another user (CVE-2016-3697, CVE-2024-40635). The image's files are read below
//! the rootfs only, as regular files of at most 1 MiB (CVE-2026-47262). A passwd line that is
//! wrong names nobody, it does not name root.
//!
//! Rules: containerd's `WithUser`, `WithAdditionalGIDs`; supplementalGroupsPolicy is KEP-3619.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use super::model::ResolvedUser;
use crate::sys::file::{Resolve, openat2};

/// What was asked for: CRI's run_as_user, run_as_group, supplemental_groups and their policy, over
/// the image's User.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserRequest {
    /// The image's `User`, as written.
    pub image_user: String,
    pub run_as_user: Option<u32>,
    pub run_as_group: Option<u32>,
    pub supplemental_groups: Vec<u32>,
    /// SupplementalGroupsPolicy Strict: no groups out of the image's /etc/group.
    pub strict: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error("user \"{user}\": {why}")]
    Bad { user: String, why: &'static str },
    #[error("the image's /{file}: {why}")]
    File { file: &'static str, why: &'static str },
    #[error("cannot read the image's /{file} below {rootfs}")]
    Io { file: &'static str, rootfs: PathBuf, source: std::io::Error },
}

/// The API server's, runc's and containerd's bound.
const LAST_ID: u32 = i32::MAX as u32;
const LARGEST_FILE: u64 = 1 << 20;

/// Looks the request up below `rootfs`.
pub fn resolve(rootfs: &Path, request: &UserRequest) -> Result<ResolvedUser, UserError> {
    let passwd = read(rootfs, "etc/passwd")?.unwrap_or_default();
    choose(request, &passwd, || Ok(read(rootfs, "etc/group")?.unwrap_or_default()))
}

/// What the texts of both files make of the request; `group` is asked only where it counts.
pub fn choose(
    request: &UserRequest,
    passwd: &str,
    group: impl FnOnce() -> Result<String, UserError>,
) -> Result<ResolvedUser, UserError> {
    let who = match request.run_as_user {
        Some(uid) => Who::Id(uid),
        None => parse(&request.image_user)?,
    };
    let entry = match &who {
        Who::Id(uid) => entries(passwd).find(|e| e.uid == *uid),
        Who::Name(name) => Some(
            entries(passwd)
                .find(|e| e.name == *name)
                .ok_or_else(|| UserError::Bad { user: shown(name), why: "the image's /etc/passwd has no such user" })?,
        ),
    };
    let uid = match (&who, &entry) {
        (Who::Id(uid), _) => *uid,
        (Who::Name(_), Some(entry)) => entry.uid,
        // A name without an entry was an error above.
        (Who::Name(name), None) => return Err(UserError::Bad { user: shown(name), why: "no such user" }),
    };
    let gid = request.run_as_group.or(entry.as_ref().map(|e| e.gid)).unwrap_or(0);
    for id in [uid, gid].iter().chain(&request.supplemental_groups) {
        if *id > LAST_ID {
            return Err(UserError::Bad { user: id.to_string(), why: "ids go from 0 to 2147483647" });
        }
    }

    let mut groups = vec![gid];
    groups.extend(&request.supplemental_groups);
    if let (false, Some(entry)) = (request.strict, &entry) {
        groups.extend(member_of(&group()?, entry.name));
    }
    groups.sort_unstable();
    groups.dedup();
    // HOME of the uid, whoever's group is used.
    let home = entries(passwd).find(|e| e.uid == uid).map(|e| e.home).filter(|h| !h.is_empty()).unwrap_or("/");
    Ok(ResolvedUser { uid, gid, groups, home: home.to_owned() })
}

enum Who {
    Id(u32),
    Name(String),
}

/// `user[:group]` of an image. The group plays no part (kubelet hands on the user only), but a
/// wrong one is not passed over.
fn parse(text: &str) -> Result<Who, UserError> {
    let bad = |why| UserError::Bad { user: shown(text), why };
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    if group.contains(':') {
        return Err(bad("write user or user:group"));
    }
    number(group).map_err(|()| bad("the group is out of range: use 0 to 2147483647"))?;
    match number(user).map_err(|()| bad("the user is out of range: use 0 to 2147483647"))? {
        Some(uid) => Ok(Who::Id(uid)),
        None if user.is_empty() => Ok(Who::Id(0)),
        None => Ok(Who::Name(user.to_owned())),
    }
}

/// None: not a number. Err: a number that no id can have.
fn number(text: &str) -> Result<Option<u32>, ()> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    let value: u32 = digits.parse().map_err(|_| ())?;
    if value > LAST_ID || (text.starts_with('-') && value != 0) { Err(()) } else { Ok(Some(value)) }
}

fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// passwd(5): `name:password:uid:gid:gecos:home:shell`.
fn entries(passwd: &str) -> impl Iterator<Item = Entry<'_>> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.trim().split(':');
        let name = fields.next().filter(|n| !n.is_empty())?;
        let uid = number(fields.nth(1)?).ok()??;
        let gid = number(fields.next()?).ok()??;
        Some(Entry { name, uid, gid, home: fields.nth(1).unwrap_or_default() })
    })
}

/// group(5): `name:password:gid:member,member`. A user's own group of the same name is the
/// primary one already.
fn member_of(group: &str, user: &str) -> Vec<u32> {
    group
        .lines()
        .filter_map(|line| {
            let mut fields = line.trim().split(':');
            let name = fields.next()?;
            let gid = number(fields.nth(1)?).ok()??;
            let member = fields.next().unwrap_or_default().split(',').any(|m| m == user);
            (member && name != user).then_some(gid)
        })
        .collect()
}

/// None: the image has no such file.
fn read(rootfs: &Path, file: &'static str) -> Result<Option<String>, UserError> {
    let fail = |source| UserError::Io { file, rootfs: rootfs.into(), source };
    let root = crate::sys::file::open_dir_path(rootfs).map_err(fail)?;
    // O_PATH first: opening a FIFO would wait, opening a device may do things.
    let found = match openat2(root.as_fd(), Path::new(file), OFlag::O_PATH, 0, Resolve::InRoot) {
        Ok(found) => found,
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(None),
        Err(e) => return Err(fail(e)),
    };
    let same = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    let meta = std::fs::metadata(&same).map_err(fail)?;
    if !meta.is_file() {
        return Err(UserError::File { file, why: "it is no regular file" });
    }
    let mut bytes = Vec::new();
    std::fs::File::open(&same).and_then(|f| f.take(LARGEST_FILE + 1).read_to_end(&mut bytes)).map_err(fail)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(UserError::File { file, why: "it is larger than 1 MiB" });
    }
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:100:App:/home/app:/bin/sh\n123:x:5:5::/five:\n\
        broken:x:what:0::/:\nnohome:x:7:7\n";
    const GROUP: &str = "root:x:0:\naudio:x:29:app,root\nvideo:x:44:app\napp:x:1000:app\nwheel:x:10:root\nbad:x:no:app\n";

    fn rootfs(passwd: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        if let Some(passwd) = passwd {
            std::fs::write(dir.path().join("etc/passwd"), passwd).unwrap();
            std::fs::write(dir.path().join("etc/group"), GROUP).unwrap();
        }
        dir
    }

    fn image(user: &str) -> UserRequest {
        UserRequest { image_user: user.into(), ..UserRequest::default() }
    }

    #[test]
    fn an_images_user_is_a_number_or_a_name() {
        let dir = rootfs(Some(PASSWD));
        for (user, uid, gid, groups, home) in [
            ("", 0, 0, vec![0, 29, 10], "/root"),
            ("0000", 0, 0, vec![0, 29, 10], "/root"),
            ("root", 0, 0, vec![0, 29, 10], "/root"),
            ("app", 1000, 100, vec![100, 29, 44], "/home/app"),
            ("1000", 1000, 100, vec![100, 29, 44], "/home/app"),
            ("app:root", 1000, 100, vec![100, 29, 44], "/home/app"),
            ("1000:5", 1000, 100, vec![100, 29, 44], "/home/app"),
            ("2147483647", i32::MAX as u32, 0, vec![0], "/"),
            // A user named by digits is not that number.
            ("123", 123, 0, vec![0], "/"),
            ("nohome", 7, 7, vec![7], "/"),
        ] {
            let mut groups: Vec<u32> = groups;
            groups.sort();
            let want = ResolvedUser { uid, gid, groups, home: home.into() };
            assert_eq!(resolve(dir.path(), &image(user)).unwrap(), want, "{user:?}");
        }
    }

    #[test]
    fn out_of_range_is_an_error_and_never_a_name() {
        let dir = rootfs(Some("4294967296:x:0:0::/:\n-1:x:0:0::/:\n0x0:x:3:3::/:\n"));
        for user in ["4294967296", "2147483648", "-1", "1:4294967296", "18446744073709551616:0", "1:2:3", "nobody", "1:-2"] {
            assert!(matches!(resolve(dir.path(), &image(user)), Err(UserError::Bad { .. })), "{user}");
        }
        assert_eq!(resolve(dir.path(), &image("0x0")).unwrap().uid, 3);
        let request = UserRequest { supplemental_groups: vec![1 << 31], ..UserRequest::default() };
        assert!(resolve(dir.path(), &request).is_err());
    }

    #[test]
    fn the_pods_words_come_before_the_images() {
        let dir = rootfs(Some(PASSWD));
        let request =
            UserRequest { run_as_user: Some(1000), run_as_group: Some(3000), supplemental_groups: vec![50, 44], ..image("root") };
        let user = resolve(dir.path(), &request).unwrap();
        assert_eq!((user.uid, user.gid, user.groups.as_slice()), (1000, 3000, [29, 44, 50, 3000].as_slice()));
        let strict = resolve(dir.path(), &UserRequest { strict: true, ..request }).unwrap();
        assert_eq!(strict.groups, [44, 50, 3000]);
    }

    #[test]
    fn a_broken_line_names_nobody() {
        let dir = rootfs(Some(PASSWD));
        assert!(resolve(dir.path(), &image("broken")).is_err());
    }

    #[test]
    fn an_image_without_passwd_knows_numbers_only() {
        let dir = rootfs(None);
        assert_eq!(resolve(dir.path(), &image("9")).unwrap().uid, 9);
        assert!(resolve(dir.path(), &image("root")).is_err());
    }

    #[test]
    fn hostile_files_are_not_read() {
        let dir = rootfs(Some(PASSWD));
        let passwd = dir.path().join("etc/passwd");
        let replace = |with: &dyn Fn()| {
            std::fs::remove_file(&passwd).unwrap();
            with();
        };
        replace(&|| nix::unistd::mkfifo(&passwd, nix::sys::stat::Mode::from_bits_truncate(0o644)).unwrap());
        assert!(matches!(resolve(dir.path(), &image("0")), Err(UserError::File { why: "it is no regular file", .. })));
        replace(&|| std::fs::write(&passwd, vec![b'\n'; (1 << 20) + 1]).unwrap());
        assert!(matches!(resolve(dir.path(), &image("0")), Err(UserError::File { why: "it is larger than 1 MiB", .. })));
        // Links stay below the rootfs: the host's own passwd is not found through them.
        replace(&|| std::os::unix::fs::symlink("/../../../../etc/shadow", &passwd).unwrap());
        assert_eq!(resolve(dir.path(), &image("0")).unwrap().home, "/");
        replace(&|| std::os::unix::fs::symlink("/proc/self/environ", &passwd).unwrap());
        assert_eq!(resolve(dir.path(), &image("0")).unwrap().home, "/");
    }
}
