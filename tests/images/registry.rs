//! Pulls from Debian's docker-registry: plain, with TLS of an own CA, htpasswd, and signed tokens.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle::images::model::{HostConfig, HostTls};
use coracle::images::{ImageError, PullAuth};

use crate::kit::*;

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

struct Registry {
    child: Child,
    host: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    fn start(program: &Path, dir: &Path, extra: &str) -> Registry {
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
    fn push(&self, repository: &str, tag: &str, image: &Image) {
        let base = format!("http://{}/v2/{repository}", self.host);
        for (digest, bytes) in &image.blobs {
            let started = ureq::post(format!("{base}/blobs/uploads/")).send_empty().unwrap();
            let location = started.headers()["location"].to_str().unwrap().to_owned();
            let joint = if location.contains('?') { '&' } else { '?' };
            let put = ureq::put(format!("{location}{joint}digest={digest}")).header("content-type", "application/octet-stream");
            assert_eq!(put.send(bytes.as_slice()).unwrap().status(), 201);
        }
        let put = ureq::put(format!("{base}/manifests/{tag}")).header("content-type", MANIFEST);
        assert_eq!(put.send(image.manifest.as_slice()).unwrap().status(), 201);
    }
}

fn openssl(dir: &Path, args: &[&str]) -> Vec<u8> {
    let out = Command::new("openssl").current_dir(dir).args(args).stderr(Stdio::piped()).output().expect("openssl");
    assert!(out.status.success(), "openssl {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    out.stdout
}

/// ca.pem, and cert.pem with key.pem for 127.0.0.1 signed by it.
fn certificates(dir: &Path) {
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

fn sample() -> Image {
    let (a, b) = (tar(&[dir("bin"), file("bin/true", noise(200_000, 3)).mode(0o755)]), tar(&[file("b", "b")]));
    image(&[(&a, "gzip"), (&b, "zstd"), (&b, "tar")])
}

fn good() -> PullAuth {
    PullAuth { username: "user".into(), password: "secret".into(), ..PullAuth::default() }
}

#[test]
fn plain_tls_and_passwords() {
    let (Some(registry), Some(htpasswd)) = (program("docker-registry", "docker-registry"), program("htpasswd", "apache2-utils"))
    else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let image = sample();
    let plain = Registry::start(&registry, dir.path(), "");
    plain.push("team/app", "1", &image);
    let pulled = world().images.pull(&format!("{}/team/app:1", plain.host), &[]).unwrap();
    assert_eq!(pulled.layers.len(), 3);
    drop(plain);

    certificates(dir.path());
    let hash = Command::new(htpasswd).args(["-nbB", "user", "secret"]).output().unwrap();
    fs::write(dir.path().join("htpasswd"), hash.stdout).unwrap();
    let path = dir.path().display();
    let tls = format!("  tls: {{certificate: {path}/cert.pem, key: {path}/key.pem}}\n");
    let auth = format!("auth: {{htpasswd: {{realm: test, path: {path}/htpasswd}}}}\n");
    let secure = Registry::start(&registry, dir.path(), &(tls + &auth));
    let name = format!("{}/team/app:1", secure.host);
    let with_tls = |tls: HostTls| {
        let host = secure.host.clone();
        world_with(move |c| drop(c.registries.configs.insert(host, HostConfig { auth: None, tls: Some(tls) })))
    };
    let error = with_tls(HostTls::default()).images.pull(&name, &[good()]).unwrap_err();
    assert!(matches!(error, ImageError::Pull { .. }) && error.to_string().contains("UnknownIssuer"), "{error}");
    let own = HostTls { ca_file: Some(dir.path().join("ca.pem")), ..HostTls::default() };
    let world = with_tls(own.clone());
    let error = world.images.pull(&name, &[]).unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
    let bad = PullAuth { password: "wrong".into(), ..good() };
    let error = world.images.pull(&name, &[bad]).unwrap_err().to_string();
    assert!(error.contains("does not accept"), "{error}");
    assert_eq!(world.images.pull(&name, &[good()]).unwrap().id, pulled.id);
    let unverified = HostTls { insecure_skip_verify: true, ..HostTls::default() };
    with_tls(unverified).images.pull(&name, &[good()]).unwrap();
    let no_file = HostTls { ca_file: Some("/nowhere/ca.pem".into()), ..HostTls::default() };
    let error = with_tls(no_file).images.pull(&name, &[good()]).unwrap_err().to_string();
    assert!(error.contains("/nowhere/ca.pem"), "{error}");
}

#[test]
fn tokens_that_the_registry_checks() {
    let Some(registry) = program("docker-registry", "docker-registry") else { return };
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let image = sample();
    let plain = Registry::start(&registry, dir.path(), "");
    plain.push("team/app", "1", &image);
    drop(plain);
    let keys = dir.path().to_owned();
    let service = Server::start(move |seen| {
        if seen.header("authorization") != Some("Basic dXNlcjpzZWNyZXQ=") {
            return reply(401, "");
        }
        let pem = fs::read_to_string(keys.join("cert.pem")).unwrap();
        let der: String = pem.lines().filter(|l| !l.starts_with('-')).collect();
        let url = |bytes: &[u8]| {
            let file = tempfile::NamedTempFile::new_in(&keys).unwrap();
            fs::write(file.path(), bytes).unwrap();
            let text = openssl(&keys, &["base64", "-A", "-in", file.path().to_str().unwrap()]);
            String::from_utf8(text).unwrap().trim().trim_end_matches('=').replace('+', "-").replace('/', "_")
        };
        let now = coracle::sys::clock::wall_nanos() / 1_000_000_000;
        let claims = format!(
            r#"{{"iss":"tests","sub":"user","aud":"reg","exp":{},"nbf":{},"iat":{now},"jti":"1","access":[{{"type":"repository","name":"team/app","actions":["pull"]}}]}}"#,
            now + 60,
            now - 60
        );
        let signed =
            format!("{}.{}", url(format!(r#"{{"typ":"JWT","alg":"RS256","x5c":["{der}"]}}"#).as_bytes()), url(claims.as_bytes()));
        let file = tempfile::NamedTempFile::new_in(&keys).unwrap();
        fs::write(file.path(), &signed).unwrap();
        let signature = openssl(&keys, &["dgst", "-sha256", "-sign", "key.pem", file.path().to_str().unwrap()]);
        reply(200, format!(r#"{{"token":"{signed}.{}"}}"#, url(&signature)))
    });
    let auth = format!(
        "auth: {{token: {{realm: \"http://{}/token\", service: reg, issuer: tests, rootcertbundle: {}/ca.pem}}}}\n",
        service.host(),
        dir.path().display()
    );
    let secure = Registry::start(&registry, dir.path(), &auth);
    let name = format!("{}/team/app:1", secure.host);
    world().images.pull(&name, &[good()]).unwrap();
    assert!(service.requests("account=user").len() == 1, "{:?}", service.seen.lock().unwrap());
    let error = world().images.pull(&name, &[]).unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
    let error = world().images.pull(&format!("{}/other/app:1", secure.host), &[good()]).unwrap_err().to_string();
    assert!(error.contains("401") || error.contains("denied") || error.contains("again"), "{error}");
}
