//! Pulls from a scripted registry: log-ins, redirects, broken downloads, wrong bytes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use coracle::images::digest::Digest;
use coracle::images::model::{HostAuth, HostConfig, Mirror};
use coracle::images::{ImageError, PullAuth};

use crate::kit::*;

fn sample() -> Image {
    let (a, b) = (tar(&[file("a", noise(300_000, 1))]), tar(&[file("b", noise(200_000, 2))]));
    image(&[(&a, "gzip"), (&b, "zstd")])
}

fn auth(host: &str, username: &str) -> PullAuth {
    PullAuth { host: host.into(), username: username.into(), password: "secret".into(), ..PullAuth::default() }
}

fn basic(username: &str) -> String {
    use std::process::{Command, Stdio};
    let mut child = Command::new("base64").arg("-w0").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), format!("{username}:secret").as_bytes()).unwrap();
    format!("Basic {}", String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap())
}

fn why(result: Result<coracle::images::Image, ImageError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_pull_and_what_it_leaves() {
    let image = sample();
    let served = image.clone();
    let server = Server::start(move |seen| serve_image(&served, seen));
    let world = world();
    let name = format!("{}/team/app:1", server.host());
    let pulled = world.images.pull(&name, &[]).unwrap();
    assert_eq!(pulled.tags, std::slice::from_ref(&name));
    assert_eq!(pulled.digests, [format!("{}/team/app@{}", server.host(), image.digest())]);
    assert_eq!(pulled.size, image.blobs.values().map(Vec::len).sum::<usize>() as u64 + image.manifest.len() as u64);
    assert!(!pulled.pinned);
    assert!(pulled.layers[1].join("a").exists() && pulled.layers[0].join("b").exists());
    assert_eq!(world.images.find(&name).unwrap().as_ref(), Some(&pulled));
    assert_eq!(world.images.find(&pulled.digests[0]).unwrap().as_ref(), Some(&pulled));
    assert_eq!(world.count("blobs/sha256"), 4);
    // Again: only the manifest is asked for.
    world.images.pull(&name, &[]).unwrap();
    assert_eq!(server.requests("/manifests/").len(), 2);
    assert_eq!(server.requests("/blobs/").len(), 3);
    let by_digest = world.images.pull(&pulled.digests[0], &[]).unwrap();
    assert_eq!(by_digest.id, pulled.id);
    assert!(matches!(world.images.pull("docker.io/UPPER/case", &[]), Err(ImageError::InvalidName { .. })));
    let missing = why(world.images.pull(&format!("{}/team/app:2", server.host()), &[]));
    assert!(missing.contains("not found") && missing.contains("manifest unknown"), "{missing}");
    world.assert_clean();
}

#[test]
fn nobody_there_is_told_apart() {
    let world = world();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = world.images.pull(&format!("{closed}/x:1"), &[]).unwrap_err();
    assert!(matches!(&error, ImageError::Unavailable { host, .. } if *host == closed.to_string()), "{error}");
    let error = world.images.pull("no-such-host.invalid/x:1", &[]).unwrap_err();
    assert!(matches!(error, ImageError::Unavailable { .. }), "{error}");
}

#[test]
fn the_tag_that_moves_frees_what_it_left() {
    let (old, new) = (layers(&[vec![file("old", "1")]]), layers(&[vec![file("new", "2")]]));
    let turn = std::sync::Arc::new(AtomicUsize::new(0));
    let (served, at) = ([old, new], turn.clone());
    let server = Server::start(move |seen| serve_image(&served[at.load(Ordering::Relaxed)], seen));
    let world = world();
    let name = format!("{}/x:1", server.host());
    let first = world.images.pull(&name, &[]).unwrap();
    turn.store(1, Ordering::Relaxed);
    let second = world.images.pull(&name, &[]).unwrap();
    assert_ne!(first.id, second.id);
    // The old digest still names the old image, as with containerd.
    assert_eq!(world.images.list().unwrap().len(), 2);
    assert!(world.images.remove(&first.digests[0]).unwrap());
    assert_eq!(world.images.list().unwrap(), [second]);
    assert_eq!((world.count("layers"), world.count("blobs/sha256")), (1, 3));
}

#[test]
fn one_download_for_all_who_ask_at_once() {
    let image = sample();
    let served = image.clone();
    let server = Server::start(move |seen| {
        if seen.path.contains("/blobs/") {
            std::thread::sleep(Duration::from_millis(100));
        }
        serve_image(&served, seen)
    });
    let world = world();
    let names: Vec<String> = (0..8).map(|n| format!("{}/{}:1", server.host(), ["same", "other"][n % 2])).collect();
    std::thread::scope(|scope| {
        for name in &names {
            let images = world.images.clone();
            scope.spawn(move || images.pull(name, &[]).unwrap());
        }
    });
    // Two names, one image: the layers came once, whoever was first.
    assert_eq!(world.count("layers"), 2);
    for layer in &image.layers {
        assert_eq!(server.requests(&layer.hex()).len(), 1);
    }
    world.assert_clean();
}

#[test]
fn basic_credentials_go_to_their_host_only() {
    let image = sample();
    let served = image.clone();
    let cdn = Server::start_at("127.0.0.2:0", {
        let image = image.clone();
        move |seen| reply(200, image.blobs.get(&Digest::parse(seen.path.rsplit('/').next().unwrap()).unwrap()).unwrap())
    });
    let elsewhere = cdn.host();
    let server = Server::start(move |seen| {
        if seen.header("authorization") != Some(&basic("good")) {
            return reply(401, "").with("www-authenticate", "Basic realm=\"x\"");
        }
        match seen.path.rsplit_once("/blobs/") {
            Some((_, digest)) => reply(307, "").with("location", format!("http://{elsewhere}/{digest}")),
            None => serve_image(&served, seen),
        }
    });
    let world = world();
    let name = format!("{}/x:1", server.host());
    let error = why(world.images.pull(&name, &[]));
    assert!(error.contains("401") && error.contains("imagePullSecret"), "{error}");
    let error = why(world.images.pull(&name, &[auth("", "bad")]));
    assert!(error.contains("does not accept"), "{error}");
    let error = why(world.images.pull(&name, &[auth("other.example", "good")]));
    assert!(error.contains("401"), "{error}");
    // The wrong one first: the next is tried.
    world.images.pull(&name, &[auth("", "bad"), auth(&server.host(), "good")]).unwrap();
    assert_eq!(cdn.seen.lock().unwrap().len(), 3);
    for seen in cdn.seen.lock().unwrap().iter() {
        assert_eq!(seen.header("authorization"), None);
    }
    world.assert_clean();
}

#[test]
fn tokens_are_fetched_and_renewed() {
    let image = sample();
    let asked = std::sync::Arc::new(AtomicUsize::new(0));
    let service = Server::start({
        let asked = asked.clone();
        move |seen| {
            let n = asked.fetch_add(1, Ordering::Relaxed);
            if seen.method == "POST" {
                assert!(
                    seen.body.contains("grant_type=refresh_token") && seen.body.contains("refresh_token=id%2Ftoken"),
                    "{}",
                    seen.body
                );
                return reply(200, format!(r#"{{"access_token":"t{n}"}}"#));
            }
            if seen.header("authorization") != Some(&basic("good")) {
                return reply(401, "");
            }
            assert!(
                seen.path.contains("scope=repository%3Ateam%2Fapp%3Apull") && seen.path.contains("service=reg"),
                "{}",
                seen.path
            );
            reply(200, format!(r#"{{"token":"t{n}"}}"#))
        }
    });
    let realm = format!("http://{}/token", service.host());
    let uses = AtomicUsize::new(0);
    let server = Server::start(move |seen| {
        let token = format!("Bearer t{}", asked.load(Ordering::Relaxed).wrapping_sub(1));
        // Each token is good for two requests.
        if seen.header("authorization") != Some(&token) || uses.fetch_add(1, Ordering::Relaxed) % 3 == 2 {
            let challenge = format!(r#"Bearer realm="{realm}",service="reg",scope="repository:team/app:pull""#);
            return reply(401, "").with("www-authenticate", challenge);
        }
        serve_image(&image, seen)
    });
    let name = format!("{}/team/app:1", server.host());
    world_with(|c| c.limits.parallel = 1).images.pull(&name, &[auth("", "good")]).unwrap();
    let identity = PullAuth { identity_token: "id/token".into(), ..PullAuth::default() };
    world_with(|c| c.limits.parallel = 1).images.pull(&name, &[identity]).unwrap();
    let error = why(world().images.pull(&name, &[auth("", "bad")]));
    assert!(error.contains("401"), "{error}");
}

#[test]
fn a_token_service_elsewhere_gets_no_credentials() {
    let image = sample();
    let thief = Server::start_at("127.0.0.3:0", |_| reply(200, r#"{"token":"anonymous"}"#));
    let realm = format!("http://{}/token", thief.host());
    let server = Server::start(move |seen| {
        if seen.header("authorization") != Some("Bearer anonymous") {
            return reply(401, "").with("www-authenticate", format!(r#"Bearer realm="{realm}",service="x""#));
        }
        serve_image(&image, seen)
    });
    let name = format!("{}/x:1", server.host());
    world().images.pull(&name, &[auth("", "good")]).unwrap();
    assert!(thief.seen.lock().unwrap().iter().all(|s| s.header("authorization").is_none() && !s.path.contains("good")));
    // Configured for that host, they go there.
    let given = HostConfig {
        auth: Some(HostAuth { username: "svc".into(), password: "secret".into(), ..HostAuth::default() }),
        tls: None,
    };
    let host = thief.host();
    world_with(|c| drop(c.registries.configs.insert(host, given))).images.pull(&name, &[]).unwrap();
    assert_eq!(thief.seen.lock().unwrap().last().unwrap().header("authorization"), Some(basic("svc").as_str()));
}

#[test]
fn redirects_that_are_refused() {
    for (location, part) in [
        ("http://169.254.169.254/latest/meta-data".to_owned(), "169.254.169.254"),
        ("http://[fe80::1]/x".to_owned(), "fe80::1"),
        ("http://0.0.0.0:1/x".to_owned(), "0.0.0.0"),
        ("ftp://127.0.0.1/x".to_owned(), "redirects to"),
        ("file:///etc/passwd".to_owned(), "redirects to"),
        ("http://user:pw@127.0.0.1/x".to_owned(), "no plain host"),
        ("relative".to_owned(), "redirects to"),
        ("/v2/again".to_owned(), "more than 5 times"),
    ] {
        let to = location.clone();
        let server = Server::start(move |_| reply(302, "").with("location", to.clone()));
        let error = why(world().images.pull(&format!("{}/x:1", server.host()), &[]));
        assert!(error.contains(part), "{location}: {error}");
    }
}

#[test]
fn mirrors_are_asked_first_and_may_fail() {
    let image = sample();
    let served = image.clone();
    let mirror = Server::start(move |seen| serve_image(&served, seen));
    let broken = Server::start(|_| reply(404, ""));
    let endpoint = vec![format!("http://{}", broken.host()), format!("http://{}", mirror.host())];
    let rewrite = [("^library/(.*)".to_owned(), "hub/$1".to_owned())].into();
    let world = world_with(|c| drop(c.registries.mirrors.insert("docker.io".into(), Mirror { endpoint, rewrite })));
    let pulled = world.images.pull("busybox:1", &[auth("", "good")]).unwrap();
    assert_eq!(pulled.tags, ["docker.io/library/busybox:1"]);
    for seen in mirror.seen.lock().unwrap().iter() {
        assert!(seen.path.starts_with("/v2/hub/busybox/") && seen.path.ends_with("?ns=docker.io"), "{}", seen.path);
        assert_eq!(seen.header("authorization"), None);
    }
}

#[test]
fn a_download_that_breaks_off_goes_on() {
    let image = sample();
    let (served, ranges) = (image.clone(), std::sync::Arc::new(AtomicUsize::new(0)));
    let count = ranges.clone();
    let server = Server::breaking(move |seen| {
        let answer = serve_image(&served, seen);
        if !seen.path.contains("/blobs/") || answer.body.len() < 1000 {
            return answer;
        }
        count.fetch_add(usize::from(seen.header("range").is_some()), Ordering::Relaxed);
        // At most 60,000 bytes an answer; every second one hangs instead of closing.
        let cut = answer.body.len().min(60_000);
        if cut == answer.body.len() { answer } else { answer.cut(cut) }
    });
    let world = world();
    let pulled = world.images.pull(&format!("{}/x:1", server.host()), &[]).unwrap();
    assert_eq!(std::fs::read(pulled.layers[1].join("a")).unwrap(), noise(300_000, 1));
    assert!(ranges.load(Ordering::Relaxed) >= 6);
    world.assert_clean();
}

#[test]
fn a_server_without_ranges_and_one_that_hangs() {
    let image = sample();
    let (served, tries) = (image.clone(), AtomicUsize::new(0));
    let server = Server::breaking(move |seen| {
        let mut seen = seen.clone();
        seen.headers.retain(|(k, _)| k != "range");
        let answer = serve_image(&served, &seen);
        if answer.body.len() > 100_000 && tries.fetch_add(1, Ordering::Relaxed) < 2 {
            return Reply { hang: Duration::from_secs(5), ..answer.cut(50_000) };
        }
        answer
    });
    let world = world_with(|c| c.limits.stall_seconds = 1);
    let start = Instant::now();
    world.images.pull(&format!("{}/x:1", server.host()), &[]).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "waited for the server instead of giving up");
}

/// The bytes that came stay over a failed pull and a restart; the rest is asked for.
#[test]
fn a_download_goes_on_after_a_restart() {
    let image = sample();
    let down = std::sync::Arc::new(AtomicUsize::new(1));
    let (served, broken) = (image.clone(), down.clone());
    let big = image.layers[0];
    let server = Server::breaking(move |seen| {
        let answer = serve_image(&served, seen);
        if broken.load(Ordering::Relaxed) == 1 && seen.path.contains(&big.hex()) {
            return if seen.header("range").is_some() { answer.cut(0) } else { answer.cut(100_000) };
        }
        answer
    });
    let dir = tempfile::tempdir().unwrap();
    let name = format!("{}/x:1", server.host());
    let images = coracle::images::Images::open(config(dir.path())).unwrap();
    let error = why(images.pull(&name, &[]));
    assert!(error.contains("127.0.0.1"), "{error}");
    drop(images);
    down.store(0, Ordering::Relaxed);
    server.seen.lock().unwrap().clear();
    let images = coracle::images::Images::open(config(dir.path())).unwrap();
    images.pull(&name, &[]).unwrap();
    let asked: Vec<Option<String>> = server.requests(&big.hex()).iter().map(|s| s.header("range").map(str::to_owned)).collect();
    assert_eq!(asked, [Some("bytes=100000-".to_owned())]);
}

#[test]
fn wrong_bytes_are_never_kept() {
    let image = sample();
    let whole = &image.blobs[&image.layers[0]];
    let mut flipped = whole.clone();
    flipped[1000] ^= 1;
    let longer = [whole.as_slice(), b"x"].concat();
    for (what, bytes) in
        [("flipped", flipped), ("longer", longer), ("shorter", whole[..whole.len() - 1].to_vec()), ("empty", Vec::new())]
    {
        let (served, bad) = (image.clone(), image.layers[0]);
        let server = Server::start(
            move |seen| if seen.path.contains(&bad.hex()) { reply(200, &bytes) } else { serve_image(&served, seen) },
        );
        let world = world();
        let error = why(world.images.pull(&format!("{}/x:1", server.host()), &[]));
        assert!(error.contains("blob") || error.contains("layer"), "{what}: {error}");
        assert_eq!((world.count("layers"), world.count("blobs/sha256")), (0, 0), "{what}");
        assert!(world.images.list().unwrap().is_empty());
    }
    // A diffID that the layer does not have, a config and a manifest with another digest.
    let mut lie = image.clone();
    let config = lie.blobs.iter().find(|(_, b)| b.starts_with(b"{")).map(|(d, _)| *d).unwrap();
    let text = String::from_utf8(lie.blobs[&config].clone()).unwrap();
    let at = text.find("diff_ids").unwrap() + 20;
    let swapped = format!("{}{}{}", &text[..at + 8], if &text[at + 8..at + 9] == "0" { "1" } else { "0" }, &text[at + 9..]);
    let digest = Digest::of(swapped.as_bytes());
    lie.manifest = String::from_utf8(lie.manifest).unwrap().replace(&config.to_string(), &digest.to_string()).into_bytes();
    lie.blobs.insert(digest, swapped.into_bytes());
    let server = Server::start(move |seen| serve_image(&lie, seen));
    let world = world();
    let error = why(world.images.pull(&format!("{}/x:1", server.host()), &[]));
    assert!(error.contains("unpacks to"), "{error}");
    assert_eq!((world.count("layers"), world.count("blobs/sha256")), (0, 0));
    let served = image.clone();
    let server =
        Server::start(
            move |seen| if seen.path.contains("/manifests/") { reply(200, &served.manifest) } else { serve_image(&served, seen) },
        );
    let error = why(world.images.pull(&format!("{}/x@{}", server.host(), Digest::of(b"other")), &[]));
    assert!(error.contains("has the digest"), "{error}");
    for body in [vec![b' '; 5 << 20], b"<html>captive portal</html>".to_vec(), b"[".repeat(100_000), Vec::new()] {
        let server = Server::start(move |_| reply(200, &body));
        let start = Instant::now();
        why(world.images.pull(&format!("{}/x:1", server.host()), &[]));
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn a_server_that_asks_to_wait_is_obeyed() {
    let image = sample();
    let (served, tries) = (image.clone(), AtomicUsize::new(0));
    let server = Server::start(move |seen| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => reply(429, "").with("retry-after", "1"),
        1 => reply(503, "").with("retry-after", "1"),
        _ => serve_image(&served, seen),
    });
    let start = Instant::now();
    world().images.pull(&format!("{}/x:1", server.host()), &[]).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(2));
    let server = Server::start(|_| reply(429, "").with("retry-after", "3600"));
    let error = why(world().images.pull(&format!("{}/x:1", server.host()), &[]));
    assert!(error.contains("429"), "{error}");
}

#[test]
fn a_cancelled_pull_ends_soon() {
    let image = sample();
    let server = Server::breaking(move |seen| {
        let answer = serve_image(&image, seen);
        if seen.path.contains("/blobs/") && answer.body.len() > 1000 {
            Reply { hang: Duration::from_secs(30), ..answer.cut(1000) }
        } else {
            answer
        }
    });
    let world = world_with(|c| c.limits.stall_seconds = 2);
    let images = world.images.clone();
    let start = Instant::now();
    let name = format!("{}/x:1", server.host());
    let pull = std::thread::spawn(move || images.pull(&name, &[]));
    std::thread::sleep(Duration::from_millis(300));
    world.images.cancel();
    let error = why(pull.join().unwrap());
    assert!(error.contains("cancelled"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn an_index_gives_this_machines_image() {
    let image = sample();
    let arch = coracle::images::model::Platform::host().architecture;
    let entry = |digest: &str, arch: &str| {
        format!(
            r#"{{"mediaType":"{MANIFEST}","digest":"{digest}","size":1,"platform":{{"os":"linux","architecture":"{arch}"}}}}"#
        )
    };
    let other = Digest::of(b"other").to_string();
    let index = format!(
        r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{},{}]}}"#,
        entry(&other, "s390x"),
        entry(&image.digest().to_string(), &arch)
    );
    let digest = Digest::of(index.as_bytes());
    let served = index.clone();
    let server = Server::start(move |seen| {
        if seen.path.ends_with("/manifests/multi") {
            reply(200, &served).with("content-type", INDEX)
        } else {
            serve_image(&image, seen)
        }
    });
    let world = world();
    let pulled = world.images.pull(&format!("{}/x:multi", server.host()), &[]).unwrap();
    assert_eq!(pulled.digests, [format!("{}/x@{digest}", server.host())]);
    let foreign = Server::start(move |_| reply(200, index.replace(&arch, "mips")).with("content-type", INDEX));
    let error = why(world.images.pull(&format!("{}/x:1", foreign.host()), &[]));
    assert!(error.contains("no image for linux/"), "{error}");
}
