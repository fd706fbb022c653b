//! A real registry for a test: Debian's docker-registry, with the packages and certificates that it
//! takes.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle::images::digest::Digest;

/// The package, installed where it is missing; None: it cannot be had.
pub fn program(name: &str, package: &str) -> Option<PathBuf> {
    let find = || ["/usr/bin", "/bin", "/usr/sbin"].iter().map(|d| Path::new(d).join(name)).find(|p| p.exists());
    if let Some(path) = find() {
        return Some(path);
    }
    eprintln!("installing {package} for the tests");
    let installed =
        Command::new("apt-get").args(["install", "-y", "--no-install-recommends", package]).stdout(Stdio::null()).status();
    if !installed.is_ok_and(|s| s.success()) || find().is_none() {
        assert!(std::env::var_os("CI").is_none(), "{package} is needed and cannot be installed");
        eprintln!("SKIP: {package} is not here and cannot be installed");
    }
    find()
}

/// Debian's docker-registry on loopback; it ends with the value.
pub struct Registry {
    child: Child,
    pub host: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    /// `extra`: more of its configuration, such as `auth: …`.
    pub fn start(program: &Path, dir: &Path, extra: &str) -> Registry {
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let host = format!("127.0.0.1:{port}");
            let config = dir.join(format!("registry-{port}.yml"));
            let text = format!(
                "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}/data}}}}\nhttp:\n  addr: {host}\n  secret: test\n{extra}",
                dir.display()
            );
            fs::write(&config, text).unwrap();
            let log = fs::File::create(dir.join("registry.log")).unwrap();
            let mut child = Command::new(program).arg("serve").arg(&config).stdout(Stdio::null()).stderr(log).spawn().unwrap();
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(10) && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(&host).is_ok() {
                    return Registry { child, host };
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("docker-registry does not start: {}", fs::read_to_string(dir.join("registry.log")).unwrap());
    }

    /// Our own tiny pusher: blobs by one PUT each, then the manifest.
    pub fn push<'a>(
        &self,
        repository: &str,
        tag: &str,
        blobs: impl IntoIterator<Item = (&'a Digest, &'a Vec<u8>)>,
        manifest: &[u8],
    ) {
        let base = format!("http://{}/v2/{repository}", self.host);
        for (digest, bytes) in blobs {
            let started = ureq::post(format!("{base}/blobs/uploads/")).send_empty().unwrap();
            let location = started.headers()["location"].to_str().unwrap().to_owned();
            let joint = if location.contains('?') { '&' } else { '?' };
            let put = ureq::put(format!("{location}{joint}digest={digest}")).header("content-type", "application/octet-stream");
            assert_eq!(put.send(bytes.as_slice()).unwrap().status(), 201);
        }
        let put =
            ureq::put(format!("{base}/manifests/{tag}")).header("content-type", "application/vnd.oci.image.manifest.v1+json");
        assert_eq!(put.send(manifest).unwrap().status(), 201);
    }
}

pub fn openssl(dir: &Path, args: &[&str]) -> Vec<u8> {
    let out = Command::new("openssl").current_dir(dir).args(args).stderr(Stdio::piped()).output().expect("openssl");
    assert!(out.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}

/// ca.pem, and cert.pem with key.pem for 127.0.0.1 signed by it.
pub fn certificates(dir: &Path) {
    let key = |what: &[&str], out: &str, subject: &str| {
        openssl(dir, &[what, &["-newkey", "rsa:2048", "-nodes", "-keyout", out, "-subj", subject]].concat());
    };
    key(&["req", "-x509", "-days", "2", "-out", "ca.pem"], "ca.key", "/CN=test ca");
    key(&["req", "-new", "-out", "csr.pem"], "key.pem", "/CN=127.0.0.1");
    fs::write(dir.join("san"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    openssl(
        dir,
        &[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            "csr.pem",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "san",
            "-out",
            "cert.pem",
        ],
    );
}
