//! Files of images, pods and of the node itself.

use std::net::IpAddr;
use std::path::Path;

use coracle::kubelet::logs::files::Lines;
use coracle::kubelet::logs::record;
use coracle::net::texts;
use coracle::runtime::logs::MAX_LINE;
use coracle::runtime::monitor::log_writer::{Pending, frame};
use coracle::runtime::seccomp as profiles;
use coracle::runtime::user::{UserRequest, choose};
use coracle::store::frame::{self as records, Entry};
use coracle::store::pods::{PodStore, Sizes};
use coracle::store::records::Record;

use crate::memory::Memory;

fn lines(chunks: impl Iterator<Item = impl AsRef<[u8]>>) -> Vec<Option<Vec<u8>>> {
    let mut found = Vec::new();
    let mut each = |line: Option<&[u8]>| {
        found.push(line.map(<[u8]>::to_vec));
        Ok(())
    };
    let mut lines = Lines::default();
    for chunk in chunks {
        lines.push(chunk.as_ref(), &mut each).expect("memory");
    }
    lines.rest(&mut each).expect("memory");
    found
}

/// Lines do not depend on how the file was cut into reads; a record is a part of its line.
pub fn log_lines(data: &[u8]) {
    let whole = lines(std::iter::once(data));
    let size = 1 + data.first().map_or(0, |b| usize::from(*b));
    assert_eq!(lines(data.chunks(size)), whole);
    for line in whole.iter().flatten() {
        assert!(!line.contains(&b'\n'));
        if let Some(record) = record::parse(line) {
            assert!(line.ends_with(record.text) && record.time.len() + record.text.len() <= line.len());
        }
    }
}

/// What a container wrote, cut into reads anyhow, is what the reader puts together again.
pub fn log_writer(data: &[u8]) {
    let size = 1 + data.first().map_or(0, |b| usize::from(*b) * 97);
    let (mut log, mut pending) = (Vec::new(), Pending::default());
    for chunk in data.chunks(size) {
        frame("stdout", 1_764_499_448_120_000_001, chunk, false, &mut pending, &mut log);
    }
    frame("stdout", 1, &[], true, &mut pending, &mut log);
    let mut again = Vec::new();
    for line in lines(std::iter::once(&log)) {
        let line = line.expect("our own lines are short");
        let record = record::parse(&line).expect("our own line");
        assert!(record.text.len() <= MAX_LINE);
        again.extend_from_slice(record.text);
        if record.full {
            again.push(b'\n');
        }
    }
    let mut want = data.to_vec();
    if !want.is_empty() && want.last() != Some(&b'\n') {
        want.push(b'\n');
    }
    assert_eq!(again, want);
}

/// What a pod gets has the kubelet's limits and is read as it was meant.
pub fn resolv(data: &[u8]) {
    let [node, stub, pod] = crate::texts(data);
    let (host, _) = texts::host_dns(&node, &[&stub]);
    let own = texts::parse_resolv_conf(&pod);
    let cluster = texts::ClusterDns { servers: vec!["10.96.0.10".into()], domain: "cluster.local".into() };
    for (policy, cluster) in [(texts::DnsPolicy::Default, None), (texts::DnsPolicy::ClusterFirst, Some(&cluster))] {
        let input = texts::ResolvInput { policy, host_network: false, namespace: "ns", host: &host, cluster, pod: Some(&own) };
        let Ok((text, _)) = texts::resolv_conf(&input) else { continue };
        assert!(text.lines().all(|l| ["search ", "nameserver ", "options "].iter().any(|k| l.starts_with(k))), "{text}");
        let read = texts::parse_resolv_conf(&text);
        assert!(read.nameservers.len() <= 3 && read.searches.len() <= 32);
        assert!(read.searches.join(" ").len() <= 2048 && read.searches.iter().all(|s| s.len() <= 253));
    }
}

/// No value adds a line of its own.
pub fn hosts(data: &[u8]) {
    let [pod, hostname, subdomain, ip, alias] = crate::texts(data);
    let input = texts::HostnameInput {
        pod: &pod,
        namespace: "ns",
        hostname: Some(&hostname),
        subdomain: Some(&subdomain),
        as_fqdn: data.len() % 2 == 0,
        cluster_domain: "cluster.local",
    };
    let Ok(name) = texts::hostname(&input) else { return };
    assert!(!name.hostname.is_empty() && name.hostname.chars().count() <= 63);
    let aliases = [texts::HostAlias { ip, hostnames: alias.split(' ').map(str::to_owned).collect() }];
    let own: [IpAddr; 1] = [IpAddr::from([10, 0, 0, 1])];
    if let Ok(text) = texts::hosts(&name.hostname, name.domain.as_deref(), &own, &aliases) {
        assert_eq!(text.lines().count(), 11, "{text}");
        assert!(!text.contains(['\0', '\r']));
    }
}

/// Ids are in range and come from the request or a well-formed line, never from a name that is a number.
pub fn user(data: &[u8]) {
    let [image_user, passwd, group] = crate::texts(data);
    let request = UserRequest { image_user, strict: data.len() % 5 == 0, ..UserRequest::default() };
    let Ok(user) = choose(&request, &passwd, || Ok(group)) else { return };
    assert!(user.uid <= i32::MAX as u32 && user.groups.iter().all(|g| *g <= i32::MAX as u32));
    assert!(user.groups.contains(&user.gid) && !user.home.is_empty());
    let named = request.image_user.split(':').next().unwrap_or_default();
    if let Ok(number) = named.parse::<u32>() {
        assert_eq!(user.uid, number);
    }
}

/// An accepted profile asks for no supervisor, and means the same after it was written down.
pub fn seccomp(data: &[u8]) {
    let profile = match profiles::parse("fuzz.json", data) {
        Ok((profile, _)) => profile,
        Err(e) => return assert!(e.to_string().len() < 2000, "a message of {} bytes", e.to_string().len()),
    };
    let json = serde_json::to_vec(&profile).expect("a profile is JSON");
    let (again, ignored) = profiles::parse("fuzz.json", &json).expect("its own text is accepted");
    assert_eq!(again, profile);
    assert!(ignored.is_empty(), "{ignored:?}");
}

/// Any bytes as a journal: it opens, what it gave once it gives again, and it takes records.
///
/// The input is bytes of a file (`!` first), or lines that become payloads of well-formed records
/// with, at the end, damage at a place that the last line chooses.
pub fn journal(data: &[u8]) {
    let file = match data.strip_prefix(b"!") {
        Some(bytes) => bytes.to_vec(),
        None => framed(data),
    };
    let memory = Memory::default();
    memory.put("/s/pods.journal", file);
    let open = || {
        let sizes = Sizes { reserve: 0, floor: 2_000, step: 0 };
        PodStore::open_on(memory.clone(), Path::new("/s"), sizes, None).expect("any journal opens")
    };
    let (store, first, _) = open();
    drop(store);
    let (store, second, report) = open();
    assert_eq!(first, second, "two opens disagree");
    assert!(report.cut == 0 && report.lost.is_empty(), "the first open left something to mend");
    for uid in first.pods.keys().take(1) {
        store.append(&Record::Removed { uid: uid.clone() }).expect("an append");
        let (_, third, _) = open();
        assert!(!third.pods.contains_key(uid) && third.pods.len() + 1 == first.pods.len());
    }
    let now = coracle::store::records::BootStamp { boot: "b".into(), nanos: 1 };
    assert!(first.pods.values().all(|pod| pod.age.elapsed(&now) >= 0));
}

fn framed(data: &[u8]) -> Vec<u8> {
    let (mut file, mut seq) = (Vec::new(), 1);
    let payloads: Vec<&[u8]> = data.split(|b| *b == b'\n').collect();
    let kind = |payload: &[u8]| match payload.get(2..5) {
        Some(b"Adm") => 1,
        Some(b"Att") => 2,
        Some(b"Exi") => 3,
        Some(b"Fin") => 4,
        Some(b"Rem") => 5,
        Some(b"Age") => 6,
        _ => u16::from(payload.first().copied().unwrap_or(9)),
    };
    let entries: Vec<Entry> =
        payloads.iter().map(|p| Entry { kind: kind(p), version: 1, payload: p.to_vec() }).collect();
    records::encode_all(&mut file, &mut seq, std::iter::once(&Entry::base()).chain(&entries));
    if let Some([a, b, bit]) = payloads.last().and_then(|p| p.first_chunk::<3>())
        && payloads.len() > 1
    {
        let at = usize::from(u16::from_be_bytes([*a, *b])) % file.len();
        file[at] ^= bit;
    }
    file
}
