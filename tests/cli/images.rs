//! Images by the command line of a running agent: docker archives of every layout that docker and
//! podman ever wrote, pulls from a real registry, and the pods that run from both.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coracle::images::digest::Digest;
use serde_json::{Value, json};

use super::node::{Node, possible};
use super::support::{Registry, program};

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// An image before it is written down: its layers as plain tars, lowest first, and its config.
struct Made {
    layers: Vec<Vec<u8>>,
    config: Vec<u8>,
}

/// What stands in an archive under a name.
enum Part {
    File(Vec<u8>),
    Link(&'static str),
}

fn tar(parts: Vec<(String, Part)>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, part) in parts {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        match part {
            Part::File(bytes) => {
                header.set_size(bytes.len() as u64);
                builder.append_data(&mut header, name, bytes.as_slice()).unwrap();
            }
            Part::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                builder.append_link(&mut header, name, target).unwrap();
            }
        }
    }
    builder.into_inner().unwrap()
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn zstd(data: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
}

/// The one layer of the busybox recipe, unpacked, and its config.
fn busybox(dir: &Path) -> (Vec<u8>, Value) {
    let path = dir.join("recipe.tar");
    let recipe = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/images/busybox")).arg(&path).status().unwrap();
    assert!(recipe.success(), "images/busybox");
    let mut files = std::collections::BTreeMap::new();
    for entry in tar::Archive::new(fs::File::open(&path).unwrap()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.insert(entry.path().unwrap().to_str().unwrap().to_owned(), bytes);
    }
    let blob = |descriptor: &Value| &files[&format!("blobs/{}", descriptor["digest"].as_str().unwrap().replace(':', "/"))];
    let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let manifest = read(blob(&read(&files["index.json"])["manifests"][0]));
    let mut layer = Vec::new();
    flate2::read::GzDecoder::new(blob(&manifest["layers"][0]).as_slice()).read_to_end(&mut layer).unwrap();
    (layer, read(blob(&manifest["config"])))
}

impl Made {
    /// busybox, a layer that says who it is, and the same layer once more.
    fn of(busybox: &(Vec<u8>, Value), who: &str) -> Made {
        let marker = tar(vec![("etc/who".to_owned(), Part::File(who.as_bytes().to_vec()))]);
        let layers = vec![busybox.0.clone(), marker.clone(), marker];
        let mut config = busybox.1.clone();
        config["rootfs"]["diff_ids"] = layers.iter().map(|l| Digest::of(l).to_string()).collect();
        config["config"]["Cmd"] = json!(["cat", "/etc/who"]);
        Made { layers, config: config.to_string().into_bytes() }
    }

    /// Before docker 25: a directory a layer with its history beside it, equal layers linked to
    /// the first of them. The link comes first: it leads to what is not read yet.
    fn legacy(&self, tags: Value, packed: fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
        let config = format!("{}.json", Digest::of(&self.config).hex());
        let manifest = json!([{"Config": config, "RepoTags": tags, "Layers": ["aa/layer.tar", "bb/layer.tar", "cc/layer.tar"]}]);
        let mut parts = vec![("cc/layer.tar".to_owned(), Part::Link("../bb/layer.tar"))];
        for (id, layer) in ["aa", "bb"].iter().zip(&self.layers) {
            parts.push((format!("{id}/VERSION"), Part::File(b"1.0".to_vec())));
            parts.push((format!("{id}/json"), Part::File(format!(r#"{{"id":"{id}"}}"#).into_bytes())));
            parts.push((format!("{id}/layer.tar"), Part::File(packed(layer))));
        }
        parts.push((config, Part::File(self.config.clone())));
        parts.push(("manifest.json".to_owned(), Part::File(manifest.to_string().into_bytes())));
        parts.push(("repositories".to_owned(), Part::File(b"{}".to_vec())));
        tar(parts)
    }

    /// podman's and skopeo's: layers by digest, the legacy paths are links to them, of which one
    /// leads to another.
    fn podman(&self, tags: Value) -> Vec<u8> {
        let config = format!("{}.json", Digest::of(&self.config).hex());
        let manifest = json!([{"Config": config, "RepoTags": tags, "Layers": ["one.tar", "aa/layer.tar", "bb/layer.tar"]}]);
        tar(vec![
            ("one.tar".to_owned(), Part::File(self.layers[0].clone())),
            ("bb/layer.tar".to_owned(), Part::Link("../aa/layer.tar")),
            ("aa/layer.tar".to_owned(), Part::Link("../two.tar")),
            ("two.tar".to_owned(), Part::File(self.layers[1].clone())),
            (config, Part::File(self.config.clone())),
            ("manifest.json".to_owned(), Part::File(manifest.to_string().into_bytes())),
        ])
    }

    /// docker 25 and newer: an OCI layout with docker's manifest.json beside its index.
    fn layout(&self, tags: &[&str]) -> Vec<u8> {
        let path = |bytes: &[u8]| format!("blobs/sha256/{}", Digest::of(bytes).hex());
        let descriptor =
            |bytes: &[u8], kind: &str| json!({"mediaType": kind, "digest": Digest::of(bytes).to_string(), "size": bytes.len()});
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor(&self.config, "application/vnd.oci.image.config.v1+json"),
            "layers": self.layers.iter().map(|l| descriptor(l, "application/vnd.oci.image.layer.v1.tar")).collect::<Vec<_>>(),
        })
        .to_string()
        .into_bytes();
        let entries: Vec<Value> = tags
            .iter()
            .map(|tag| {
                let mut entry = descriptor(&manifest, "application/vnd.oci.image.manifest.v1+json");
                let short = tag.rsplit(':').next().unwrap();
                entry["annotations"] = json!({"io.containerd.image.name": tag, "org.opencontainers.image.ref.name": short});
                entry
            })
            .collect();
        let docker = json!([{
            "Config": path(&self.config), "RepoTags": tags,
            "Layers": self.layers.iter().map(|l| path(l)).collect::<Vec<_>>(), "LayerSources": {},
        }]);
        let mut parts = vec![(path(&self.config), Part::File(self.config.clone()))];
        parts.extend(self.layers[..2].iter().map(|l| (path(l), Part::File(l.clone()))));
        parts.push((path(&manifest), Part::File(manifest)));
        let index = json!({"schemaVersion": 2, "manifests": entries});
        parts.push(("index.json".to_owned(), Part::File(index.to_string().into_bytes())));
        parts.push(("manifest.json".to_owned(), Part::File(docker.to_string().into_bytes())));
        parts.push(("oci-layout".to_owned(), Part::File(br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec())));
        tar(parts)
    }
}

fn plain(data: &[u8]) -> Vec<u8> {
    data.to_vec()
}

fn write(node: &Node, name: &str, bytes: &[u8]) -> PathBuf {
    let path = node.root().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn import(node: &Node, path: &Path, more: &[&str]) -> Output {
    node.command("import").arg(path).args(more).output().unwrap()
}

/// A pod with a container for each image, whose own command says who it is.
fn run_all(node: &Node, images: &[(&str, &str)]) {
    let containers: Vec<Value> =
        images.iter().map(|(who, image)| json!({"name": who, "image": image, "imagePullPolicy": "Never"})).collect();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "all"},
                     "spec": {"restartPolicy": "Never", "containers": containers}});
    let hidden = node.root().join("manifests/.all");
    fs::write(&hidden, pod.to_string()).unwrap();
    fs::rename(hidden, node.root().join("manifests/all.json")).unwrap();
    node.until("every container has run", || {
        let list: Value = serde_json::from_slice(&node.run(&["pods", "all", "-o", "json"]).stdout).unwrap_or_default();
        let pod = list["items"].get(0).unwrap_or(&list);
        pod["status"]["phase"] == "Succeeded"
    });
    for (who, _) in images {
        assert_eq!(ok(&node.run(&["logs", "all", "-c", who])).trim_end(), *who);
    }
}

#[test]
fn docker_archives_of_every_age_are_taken_in_and_run() {
    if !possible() {
        return;
    }
    let node = Node::start();
    let busybox = busybox(node.root());
    let made = |who: &str| Made::of(&busybox, who);

    let two = json!(["legacy:1", "registry.example:5000/team/legacy:2"]);
    let path = write(&node, "legacy.tar", &made("legacy").legacy(two, plain));
    let table = ok(&import(&node, &path, &[]));
    assert!(table.contains("docker.io/library/legacy") && table.contains("registry.example:5000/team/legacy"), "{table}");

    // Packed inside and outside, and the repacked file is what counts, not its name.
    let path = write(&node, "packed.tar", &gzip(&made("packed").legacy(json!(["packed"]), gzip)));
    ok(&import(&node, &path, &[]));
    let path = write(&node, "inner.tar.gz", &made("inner").legacy(json!(["inner:1"]), zstd));
    ok(&import(&node, &path, &[]));

    let path = write(&node, "layout.tar", &zstd(&made("layout").layout(&["docker.io/library/layout:1", "docker.io/a/layout:2"])));
    ok(&import(&node, &path, &[]));
    let path = write(&node, "podman.tar", &made("podman").podman(json!(["localhost/podman:1"])));
    ok(&import(&node, &path, &[]));

    // `docker save ID` names nothing: it has a row without a name, and --name gives it one.
    let unnamed = made("unnamed");
    let id = Digest::of(&unnamed.config).hex();
    let path = write(&node, "unnamed.tar", &unnamed.legacy(Value::Null, plain));
    let table = ok(&import(&node, &path, &[]));
    assert!(table.lines().any(|l| l.starts_with("<none>") && l.contains(&id[..12])), "{table}");
    let table = ok(&import(&node, &path, &["--name", "example.com/named:3"]));
    assert!(table.lines().any(|l| l.starts_with("example.com/named") && l.contains(&id[..12])), "{table}");

    let list: Value = serde_json::from_str(&ok(&node.run(&["images", "-o", "json"]))).unwrap();
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 6, "one image each: {list:?}");
    assert!(list.iter().all(|image| image["pinned"] == true), "{list:?}");
    let legacy = list.iter().find(|i| i["tags"].to_string().contains("legacy:1")).unwrap();
    assert_eq!(legacy["tags"].as_array().unwrap().len(), 2, "{legacy}");
    run_all(
        &node,
        &[
            ("legacy", "registry.example:5000/team/legacy:2"),
            ("packed", "packed"),
            ("inner", "inner:1"),
            ("layout", "a/layout:2"),
            ("podman", "localhost/podman:1"),
            ("unnamed", "example.com/named:3"),
        ],
    );
}

#[test]
fn archives_that_are_not_whole_are_refused_by_name_and_leave_nothing() {
    if !possible() {
        return;
    }
    let node = Node::start();
    let busybox = busybox(node.root());
    let made = Made::of(&busybox, "bad");
    let whole = made.legacy(json!(["bad:1"]), plain);
    let packed = gzip(&whole);
    let other = Made { layers: made.layers.clone(), config: Made::of(&busybox, "other").config };
    let list = |value: Value| tar(vec![("manifest.json".to_owned(), Part::File(value.to_string().into_bytes()))]);
    let missing = list(json!([{"Config": "c.json", "RepoTags": ["bad:1"], "Layers": ["x/layer.tar"]}]));
    let outside = tar(vec![
        ("c.json".to_owned(), Part::Link("/etc/passwd")),
        (
            "manifest.json".to_owned(),
            Part::File(json!([{"Config": "c.json", "RepoTags": null, "Layers": []}]).to_string().into()),
        ),
    ]);
    let cases: &[(&[u8], &str)] = &[
        (&packed[..packed.len() / 2], "it could not be read"),
        (&whole[..whole.len() / 2], "read"),
        (&missing, "file c.json is missing"),
        (&outside, "file c.json is missing"),
        (&other.legacy(json!(["bad:1"]), plain), "but the image's config says sha256:"),
        (&made.legacy(json!(["BAD//name"]), plain), "BAD//name"),
        (&list(json!({"not": "a list"})), "manifest.json is not valid"),
        (&list(json!([])), "holds no image"),
        (&tar(vec![]), "neither an OCI layout (index.json) nor a docker archive (manifest.json)"),
        (b"what is this", "archive"),
    ];
    for (bytes, why) in cases {
        let path = write(&node, "bad.tar", bytes);
        let output = import(&node, &path, &[]);
        assert_eq!(output.status.code(), Some(1), "{why}: {}", said(&output));
        assert!(said(&output).contains(why) && said(&output).contains("bad.tar"), "{why}: {}", said(&output));
    }
    let output = import(&node, Path::new("/no/such.tar"), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("/no/such.tar"), "{}", said(&output));
    assert_eq!(ok(&node.run(&["images"])), "no images\n");
    for part in ["staging", "layers"] {
        let left = fs::read_dir(node.root().join("state/images").join(part)).unwrap().count();
        assert_eq!(left, 0, "{part}");
    }
}

#[test]
fn pulls_from_a_registry_and_what_it_refuses() {
    if !possible() {
        return;
    }
    let (Some(registry), Some(htpasswd)) = (program("docker-registry", "docker-registry"), program("htpasswd", "apache2-utils"))
    else {
        return;
    };
    let node = Node::start();
    let dir = tempfile::tempdir().unwrap();
    let made = Made::of(&busybox(node.root()), "pulled");
    let descriptor = |kind: &str, bytes: &[u8]| json!({"mediaType": format!("application/vnd.oci.image.{kind}"), "digest": Digest::of(bytes).to_string(), "size": bytes.len()});
    let packed: Vec<Vec<u8>> = made.layers.iter().map(|l| gzip(l)).collect();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("config.v1+json", &made.config),
        "layers": packed.iter().map(|l| descriptor("layer.v1.tar+gzip", l)).collect::<Vec<_>>(),
    })
    .to_string();
    let blobs: std::collections::BTreeMap<Digest, Vec<u8>> =
        packed.iter().chain([&made.config]).map(|b| (Digest::of(b), b.clone())).collect();

    let open = Registry::start(&registry, dir.path(), "");
    open.push("team/app", "1", &blobs, manifest.as_bytes());
    let name = format!("{}/team/app:1", open.host);
    assert_eq!(ok(&node.run(&["images"])), "no images\n");
    let table = ok(&node.run(&["pull", &name]));
    let row = table.lines().nth(1).unwrap();
    assert!(row.starts_with(&format!("{}/team/app ", open.host)) && row.contains(" 1 ") && row.ends_with("no"), "{table}");
    assert_eq!(ok(&node.run(&["images"])), table, "what pull printed is what is there");
    let again: Value = serde_json::from_str(&ok(&node.run(&["pull", &name, "-o", "json"]))).unwrap();
    assert_eq!(again[0]["id"], Digest::of(&made.config).to_string());
    assert_eq!(again[0]["digests"][0], format!("{}/team/app@{}", open.host, Digest::of(manifest.as_bytes())));
    run_all(&node, &[("pulled", &name)]);

    let refused = |command: &mut Command, code: i32, why: &[&str]| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{why:?}: {}", said(&output));
        assert!(output.stdout.is_empty() && said(&output).lines().count() == 1, "{}", said(&output));
        for part in why {
            assert!(said(&output).contains(part), "{why:?}: {}", said(&output));
        }
    };
    let host = open.host.clone();
    refused(node.command("pull").arg(format!("{host}/team/app:2")), 1, &["team/app:2", "not found"]);
    refused(node.command("pull").arg(format!("{host}/team/none:1")), 1, &["team/none", "not found"]);
    refused(node.command("pull").arg("UPPER//case"), 1, &["UPPER//case"]);
    refused(node.command("pull").args([&name, "--password-file", "/x"]), 2, &["--password-file needs --user"]);
    refused(node.command("pull").args([&name, "-u", "me"]).env_remove("CORACLE_PASSWORD"), 1, &["CORACLE_PASSWORD"]);
    drop(open);
    refused(node.command("pull").arg(&name), 1, &[&host, "unavailable"]);

    let hash = Command::new(htpasswd).args(["-nbB", "user", "secret"]).output().unwrap();
    fs::write(dir.path().join("htpasswd"), hash.stdout).unwrap();
    let auth = format!("auth: {{htpasswd: {{realm: test, path: {}/htpasswd}}}}\n", dir.path().display());
    let closed = Registry::start(&registry, dir.path(), &auth);
    let name = format!("{}/team/app:1", closed.host);
    refused(node.command("pull").arg(&name), 1, &[&name, "needs credentials", "--user"]);
    let wrong = &["does not accept the credentials"];
    refused(node.command("pull").args([&name, "-u", "user"]).env("CORACLE_PASSWORD", "wrong"), 1, wrong);
    let output = node.command("pull").args([&name, "-u", "user"]).env("CORACLE_PASSWORD", "secret").output().unwrap();
    assert!(ok(&output).contains(&closed.host), "{}", said(&output));
    fs::write(dir.path().join("password"), "secret\n").unwrap();
    let output = node.command("pull").args([&name, "-u", "user", "--password-file"]).arg(dir.path().join("password")).output();
    ok(&output.unwrap());
    assert!(!fs::read_to_string(node.root().join("agent.log")).unwrap().contains("secret"), "a password is in the log");
}
