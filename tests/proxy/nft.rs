//! nft programs to read our tables with: the host's, and Debian 13's where a package client
//! reaches one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

/// Root with network namespaces, or a loud word; in CI it must be there.
pub fn able() -> bool {
    let able = nix::unistd::geteuid().is_root() && coracle::sys::netns::throw_away(|| ()).is_ok();
    if !able {
        assert!(std::env::var_os("CI").is_none(), "CI needs root and network namespaces");
        eprintln!("SKIP: no root, or no network namespaces");
    }
    able
}

/// An nft program: what runs it, and its version.
#[derive(Clone, Debug)]
pub struct Nft {
    command: Vec<String>,
    pub version: String,
}

impl Nft {
    pub fn host() -> Nft {
        Nft::at(vec!["nft".to_owned()]).expect("the host has nft")
    }

    fn at(command: Vec<String>) -> Option<Nft> {
        let out = Command::new(&command[0]).args(&command[1..]).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&out.stdout).split_whitespace().nth(1)?.to_owned();
        out.status.success().then_some(Nft { command, version })
    }

    pub fn run(&self, args: &[&str]) -> Output {
        Command::new(&self.command[0]).args(&self.command[1..]).args(args).output().unwrap()
    }

    pub fn must(&self, args: &[&str]) -> String {
        let out = self.run(args);
        assert!(out.status.success(), "nft {} {args:?}: {out:?}", self.version);
        String::from_utf8(out.stdout).unwrap()
    }

    /// The host's, and the one of Debian 13.
    pub fn all() -> Vec<Nft> {
        let host = Nft::host();
        let mut all = vec![host.clone()];
        match debian_13() {
            Ok(other) if other.version != host.version => all.push(other),
            Ok(_) => {}
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "CI needs Debian 13's nft: {why}");
                eprintln!("SKIP: Debian 13's nft is not here ({why}); only {} has read our tables", host.version);
            }
        }
        all
    }
}

const PACKAGES: [&str; 11] = [
    "nftables",
    "libnftables1",
    "libnftnl11",
    "libmnl0",
    "libjansson4",
    "libgmp10",
    "libedit2",
    "libc6",
    "libxtables12",
    "libtinfo6",
    "libbsd0",
];

/// From the package client's own sources, with the release's name changed; unpacked, not installed.
fn debian_13() -> Result<Nft, String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nft-debian-13");
    let root = dir.join("root");
    if !root.join("usr/sbin/nft").exists() {
        fetch(&dir)?;
    }
    let libraries: Vec<PathBuf> = std::fs::read_dir(root.join("usr/lib"))
        .map_err(|e| e.to_string())?
        .map(|e| e.unwrap().path())
        .filter(|p| p.join("libnftables.so.1").exists())
        .collect();
    let library = libraries.first().ok_or("the package has no library")?;
    let loader = std::fs::read_dir(library).map_err(|e| e.to_string())?.map(|e| e.unwrap().path());
    let loader = loader.filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("ld-linux")).min().ok_or("no loader")?;
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let command = vec![text(&loader), "--library-path".to_owned(), text(library), text(&root.join("usr/sbin/nft"))];
    let nft = Nft::at(command).ok_or("it does not run here")?;
    if nft.version.starts_with("v1.1.") { Ok(nft) } else { Err(format!("it is {}", nft.version)) }
}

fn fetch(dir: &Path) -> Result<(), String> {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = release.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).ok_or("this host is no Debian")?.to_owned();
    for sub in ["etc", "state/lists/partial", "cache/archives/partial", "root"] {
        std::fs::create_dir_all(dir.join(sub)).map_err(|e| e.to_string())?;
    }
    let mut sources = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten();
    sources.extend(parts.map(|e| e.unwrap().path()).filter(|p| p.to_string_lossy().contains("debian")));
    for source in sources.iter().filter(|s| s.exists()) {
        let text = std::fs::read_to_string(source).map_err(|e| e.to_string())?.replace(&codename, "trixie");
        std::fs::write(dir.join("etc").join(source.file_name().unwrap()), text).map_err(|e| e.to_string())?;
    }
    let here = dir.display();
    let options = format!(
        "Dir::Etc::SourceList \"{here}/etc/sources.list\";\nDir::Etc::SourceParts \"{here}/etc/\";\nDir::State \"{here}/state\";\n\
         Dir::State::status \"/dev/null\";\nDir::Cache \"{here}/cache\";\nAcquire::Retries \"3\";\nAcquire::http::Timeout \"20\";\n\
         APT::Update::Error-Mode \"any\";\n"
    );
    let file = dir.join("options");
    std::fs::write(&file, options).map_err(|e| e.to_string())?;
    let apt = |args: &[&str]| {
        let out = Command::new("apt-get").arg("-c").arg(&file).args(args).current_dir(dir.join("cache")).output();
        let out = out.map_err(|e| format!("apt-get: {e}"))?;
        if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()) }
    };
    // A mirror that is being renewed has no list for a moment.
    let whole = || apt(&["update"]).and_then(|()| apt(&[&["download"][..], &PACKAGES[..]].concat()));
    let again = |_| {
        std::thread::sleep(std::time::Duration::from_secs(3));
        whole()
    };
    whole().or_else(again).or_else(again)?;
    for package in std::fs::read_dir(dir.join("cache")).map_err(|e| e.to_string())?.map(|e| e.unwrap().path()) {
        if package.extension().is_some_and(|e| e == "deb") {
            let out =
                Command::new("dpkg-deb").arg("-x").arg(&package).arg(dir.join("root")).output().map_err(|e| e.to_string())?;
            if !out.status.success() {
                return Err(format!("{}: {}", package.display(), String::from_utf8_lossy(&out.stderr)));
            }
        }
    }
    Ok(())
}
