//! What the image tests share: tars byte by byte, images of them, canaries, a scripted server.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use coracle::images::digest::Digest;
use coracle::images::{Images, ImagesConfig, ImportOptions};

pub fn config(dir: &Path) -> ImagesConfig {
    ImagesConfig { program: env!("CARGO_BIN_EXE_coracle").into(), ..ImagesConfig::at(dir) }
}

/// One tar entry, as wrong as it likes to be.
#[derive(Clone)]
pub struct E {
    pub name: Vec<u8>,
    pub kind: u8,
    pub data: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: u64,
    pub device: (u32, u32),
    /// What the size field says, where that is not the data's length.
    pub size: Option<u64>,
    pub pax: Vec<(Vec<u8>, Vec<u8>)>,
}

pub fn e(name: impl AsRef<[u8]>, kind: u8) -> E {
    E {
        name: name.as_ref().to_vec(),
        kind,
        data: Vec::new(),
        link: Vec::new(),
        mode: if kind == b'5' { 0o755 } else { 0o644 },
        uid: 0,
        gid: 0,
        mtime: 1_000_000_000,
        device: (0, 0),
        size: None,
        pax: Vec::new(),
    }
}

pub fn file(name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> E {
    E { data: data.as_ref().to_vec(), ..e(name, b'0') }
}

pub fn dir(name: impl AsRef<[u8]>) -> E {
    e(name, b'5')
}

pub fn link(name: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> E {
    E { link: to.as_ref().to_vec(), ..e(name, b'2') }
}

pub fn hard(name: impl AsRef<[u8]>, to: impl AsRef<[u8]>) -> E {
    E { link: to.as_ref().to_vec(), ..e(name, b'1') }
}

impl E {
    pub fn mode(self, mode: u32) -> E {
        E { mode, ..self }
    }
    pub fn owner(self, uid: u32, gid: u32) -> E {
        E { uid, gid, ..self }
    }
    pub fn pax(mut self, key: &str, value: impl AsRef<[u8]>) -> E {
        self.pax.push((key.into(), value.as_ref().to_vec()));
        self
    }
}

pub fn header(entry: &E) -> [u8; 512] {
    let mut h = [0u8; 512];
    let mut put = |at: usize, bytes: &[u8]| h[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &entry.name[..entry.name.len().min(100)]);
    put(100, format!("{:07o}", entry.mode).as_bytes());
    put(108, format!("{:07o}", entry.uid).as_bytes());
    put(116, format!("{:07o}", entry.gid).as_bytes());
    put(124, format!("{:011o}", entry.size.unwrap_or(entry.data.len() as u64)).as_bytes());
    put(136, format!("{:011o}", entry.mtime).as_bytes());
    put(156, &[entry.kind]);
    put(157, &entry.link[..entry.link.len().min(100)]);
    put(257, b"ustar\x0000");
    put(329, format!("{:07o}", entry.device.0).as_bytes());
    put(337, format!("{:07o}", entry.device.1).as_bytes());
    seal(&mut h);
    h
}

pub fn seal(h: &mut [u8; 512]) {
    h[148..156].fill(b' ');
    let sum: u32 = h.iter().map(|b| u32::from(*b)).sum();
    h[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

pub fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(512), 0);
}

pub fn pax_records(pairs: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in pairs {
        let bare = key.len() + value.len() + 3;
        let mut length = bare;
        while length != bare + length.to_string().len() {
            length = bare + length.to_string().len();
        }
        out.extend(format!("{length} ").into_bytes());
        out.extend_from_slice(key);
        out.push(b'=');
        out.extend_from_slice(value);
        out.push(b'\n');
    }
    out
}

pub fn raw(entries: &[E]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        let mut pax = entry.pax.clone();
        if entry.name.len() > 100 {
            pax.push((b"path".to_vec(), entry.name.clone()));
        }
        if entry.link.len() > 100 {
            pax.push((b"linkpath".to_vec(), entry.link.clone()));
        }
        if !pax.is_empty() {
            let records = pax_records(&pax);
            out.extend(header(&file("pax", &records).kind_of(b'x')));
            out.extend(&records);
            pad(&mut out);
        }
        out.extend(header(entry));
        out.extend(&entry.data);
        pad(&mut out);
    }
    out
}

impl E {
    pub fn kind_of(self, kind: u8) -> E {
        E { kind, ..self }
    }
}

pub fn tar(entries: &[E]) -> Vec<u8> {
    let mut out = raw(entries);
    out.resize(out.len() + 1024, 0);
    out
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(data: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(data, ruzstd::encoding::CompressionLevel::Fastest)
}

/// An image as blobs: what a registry or a layout holds.
#[derive(Clone)]
pub struct Image {
    pub blobs: BTreeMap<Digest, Vec<u8>>,
    pub manifest: Vec<u8>,
    pub layers: Vec<Digest>,
}

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Layers as plain tars, lowest first, with how each is packed.
pub fn image(layers: &[(&[u8], &str)]) -> Image {
    let mut blobs = BTreeMap::new();
    let (mut descriptors, mut diff_ids, mut digests) = (Vec::new(), Vec::new(), Vec::new());
    for (plain, packing) in layers {
        let (blob, suffix) = match *packing {
            "gzip" => (gzip(plain), "+gzip"),
            "zstd" => (zstd(plain), "+zstd"),
            _ => (plain.to_vec(), ""),
        };
        diff_ids.push(format!("\"{}\"", Digest::of(plain)));
        let digest = Digest::of(&blob);
        descriptors.push(format!(
            r#"{{"mediaType":"application/vnd.oci.image.layer.v1.tar{suffix}","digest":"{digest}","size":{}}}"#,
            blob.len()
        ));
        digests.push(digest);
        blobs.insert(digest, blob);
    }
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Cmd":["/bin/true"]}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        diff_ids.join(",")
    );
    let config = config.replace("amd64", &coracle::images::model::Platform::host().architecture).into_bytes();
    let config_digest = Digest::of(&config);
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{config_digest}","size":{}}},"layers":[{}]}}"#,
        config.len(),
        descriptors.join(",")
    );
    blobs.insert(config_digest, config);
    Image { blobs, manifest: manifest.into_bytes(), layers: digests }
}

pub fn layers(layers: &[Vec<E>]) -> Image {
    let tars: Vec<Vec<u8>> = layers.iter().map(|l| tar(l)).collect();
    image(&tars.iter().map(|t| (t.as_slice(), "gzip")).collect::<Vec<_>>())
}

impl Image {
    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    /// Writes an OCI layout.
    pub fn layout(&self, dir: &Path, name: &str) {
        let blobs = dir.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for (digest, bytes) in &self.blobs {
            fs::write(blobs.join(digest.hex()), bytes).unwrap();
        }
        fs::write(blobs.join(self.digest().hex()), &self.manifest).unwrap();
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST}","digest":"{}","size":{},"annotations":{{"io.containerd.image.name":"{name}"}}}}]}}"#,
            self.digest(),
            self.manifest.len()
        );
        fs::write(dir.join("index.json"), index).unwrap();
    }
}

/// A fresh store with one imported image; the error's text otherwise.
pub struct World {
    pub dir: tempfile::TempDir,
    pub images: Images,
}

pub fn world() -> World {
    world_with(|_| {})
}

pub fn world_with(change: impl FnOnce(&mut ImagesConfig)) -> World {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    let images = Images::open(config).unwrap();
    World { dir, images }
}

impl World {
    pub fn import(&self, image: &Image) -> Result<coracle::images::Image, String> {
        let layout = tempfile::tempdir().unwrap();
        image.layout(layout.path(), "docker.io/test/image:1");
        match self.images.import(layout.path(), &ImportOptions::default()) {
            Ok(mut images) => Ok(images.remove(0)),
            Err(e) => Err(e.to_string()),
        }
    }

    pub fn count(&self, part: &str) -> usize {
        fs::read_dir(self.dir.path().join("images").join(part)).unwrap().count()
    }

    /// Nothing but what is recorded is on disk.
    pub fn assert_clean(&self) {
        assert_eq!(self.count("staging"), 0, "staging is not empty");
    }
}

/// Everything about a tree, to be compared before and after.
pub fn fingerprint(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    fn walk(root: &Path, here: &Path, into: &mut BTreeMap<PathBuf, String>) {
        let meta = fs::symlink_metadata(here).unwrap();
        let kind = meta.file_type();
        let content = if kind.is_file() {
            format!("{:?}", Digest::of(&fs::read(here).unwrap()))
        } else if kind.is_symlink() {
            format!("{:?}", fs::read_link(here).unwrap())
        } else {
            String::new()
        };
        let times = (meta.mtime(), meta.ctime(), meta.nlink());
        let line = format!("{:o} {} {} {} {:?} {content}", meta.mode(), meta.uid(), meta.gid(), meta.rdev(), times);
        into.insert(here.strip_prefix(root).unwrap().to_owned(), line);
        if kind.is_dir() {
            for entry in fs::read_dir(here).unwrap() {
                walk(root, &entry.unwrap().path(), into);
            }
        }
    }
    walk(dir, dir, &mut found);
    found
}

/// A tree outside of every store that nothing may touch.
pub struct Canary {
    pub dir: tempfile::TempDir,
    before: BTreeMap<PathBuf, String>,
}

pub fn canary() -> Canary {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "canary").unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    fs::write(dir.path().join("sub/deep"), "canary").unwrap();
    std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
    let before = fingerprint(dir.path());
    Canary { dir, before }
}

impl Canary {
    pub fn path(&self) -> String {
        self.dir.path().to_str().unwrap().to_owned()
    }
    pub fn assert_untouched(&self, after: &str) {
        assert_eq!(fingerprint(self.dir.path()), self.before, "the canary changed: {after}");
    }
}

/// One request as a scripted server saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }
}

/// What it answers: a head, then bytes, cut off after `cut` of them.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub cut: Option<usize>,
    /// Stays open without a byte for so long after `cut`.
    pub hang: std::time::Duration,
}

pub fn reply(status: u16, body: impl AsRef<[u8]>) -> Reply {
    Reply { status, headers: Vec::new(), body: body.as_ref().to_vec(), cut: None, hang: std::time::Duration::ZERO }
}

impl Reply {
    pub fn with(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.into(), value.into()));
        self
    }
    pub fn cut(self, at: usize) -> Reply {
        Reply { cut: Some(at), ..self }
    }
}

/// A scripted HTTP server on loopback; its threads end with the test process. Its HTTP is
/// tiny_http's, which knows nothing of ours; only a server that breaks off answers is written by
/// hand, since a library's never does.
pub struct Server {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    pub fn start(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        Server::start_at("127.0.0.1:0", script)
    }

    pub fn start_at(address: &str, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        let server = tiny_http::Server::http(address).unwrap();
        let address = server.server_addr().to_ip().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, script) = (seen.clone(), Arc::new(script));
        std::thread::spawn(move || {
            while let Ok(request) = server.recv() {
                let (log, script) = (log.clone(), script.clone());
                std::thread::spawn(move || answer(request, &log, &*script));
            }
        });
        Server { address, seen }
    }

    /// For scripts that cut answers off.
    pub fn breaking(script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, script) = (seen.clone(), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, script) = (log.clone(), script.clone());
                std::thread::spawn(move || serve(stream, &log, &*script));
            }
        });
        Server { address, seen }
    }

    pub fn host(&self) -> String {
        self.address.to_string()
    }

    pub fn requests(&self, path_part: &str) -> Vec<Seen> {
        self.seen.lock().unwrap().iter().filter(|s| s.path.contains(path_part)).cloned().collect()
    }
}

fn answer(mut request: tiny_http::Request, log: &Mutex<Vec<Seen>>, script: &dyn Fn(&Seen) -> Reply) {
    let mut body = String::new();
    request.as_reader().read_to_string(&mut body).unwrap();
    let header = |h: &tiny_http::Header| (h.field.as_str().as_str().to_ascii_lowercase(), h.value.as_str().to_owned());
    let headers = request.headers().iter().map(header).collect();
    let seen = Seen { method: request.method().to_string(), path: request.url().to_owned(), headers, body };
    log.lock().unwrap().push(seen.clone());
    let reply = script(&seen);
    assert!(reply.cut.is_none(), "Server::breaking is for that");
    let mut response = tiny_http::Response::from_data(reply.body).with_status_code(reply.status);
    for (name, value) in &reply.headers {
        response.add_header(tiny_http::Header::from_bytes(name.as_bytes(), value.as_bytes()).unwrap());
    }
    // The client may have gone.
    let _ = request.respond(response);
}

fn serve(stream: TcpStream, log: &Mutex<Vec<Seen>>, script: &dyn Fn(&Seen) -> Reply) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            match reader.read_line(&mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let mut first = lines[0].split(' ');
        let (method, path) = (first.next().unwrap().to_owned(), first.next().unwrap().to_owned());
        let headers: Vec<(String, String)> = lines[1..]
            .iter()
            .filter_map(|l| l.split_once(':'))
            .map(|(k, v)| (k.to_ascii_lowercase(), v.trim().to_owned()))
            .collect();
        let length = headers.iter().find(|(k, _)| k == "content-length").map_or(0, |(_, v)| v.parse::<u64>().unwrap());
        let mut body = String::new();
        (&mut reader).take(length).read_to_string(&mut body).unwrap();
        let seen = Seen { method, path, headers, body };
        log.lock().unwrap().push(seen.clone());
        let reply = script(&seen);
        let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
        for (name, value) in &reply.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", reply.body.len()));
        let bytes = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
        if stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(bytes)).is_err() {
            return;
        }
        if reply.cut.is_some() {
            std::thread::sleep(reply.hang);
            return;
        }
    }
}

/// Serves an image as `/v2/<repo>/…` at one tag, with Range.
pub fn serve_image(image: &Image, seen: &Seen) -> Reply {
    let path = seen.path.split('?').next().unwrap();
    if let Some((_, wanted)) = path.rsplit_once("/manifests/") {
        if wanted == "1" || wanted == image.digest().to_string() {
            return reply(200, &image.manifest).with("content-type", MANIFEST);
        }
        if let Some(blob) = Digest::parse(wanted).and_then(|d| image.blobs.get(&d)) {
            return reply(200, blob).with("content-type", MANIFEST);
        }
        return reply(404, r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}"#);
    }
    let Some(blob) = path.rsplit_once("/blobs/").and_then(|(_, d)| Digest::parse(d)).and_then(|d| image.blobs.get(&d)) else {
        return reply(404, "");
    };
    match seen.header("range").and_then(|r| r.strip_prefix("bytes=")).and_then(|r| r.trim_end_matches('-').parse::<usize>().ok())
    {
        Some(from) => reply(206, &blob[from..]).with("content-range", format!("bytes {from}-{}/{}", blob.len() - 1, blob.len())),
        None => reply(200, blob),
    }
}

/// Bytes that do not compress, the same each time.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(length);
    out
}
