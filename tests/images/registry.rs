//! Pulls from Debian's docker-registry: plain, with TLS of an own CA, htpasswd, and signed tokens.

use std::fs;
use std::process::Command;

use coracle::images::model::{HostConfig, HostTls};
use coracle::images::{ImageError, PullAuth};

use crate::kit::*;
use crate::support::{Registry, certificates, openssl, program};

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
    plain.push("team/app", "1", &image.blobs, &image.manifest);
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
    plain.push("team/app", "1", &image.blobs, &image.manifest);
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
