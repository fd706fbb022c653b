//! Who we are to a registry: challenges parsed, credentials chosen, and to whom they may go. Pure.
//!
//! Invariant: credentials are chosen by the host that is spoken to, and a token service gets them
//! only if it is that host, shares its parent domain, or has them by configuration (CVE-2020-15157,
//! CVE-2019-10214). RFC 9110 §11.6.1; distribution's token spec; kubelet's docker config keys.
#![deny(clippy::disallowed_methods)]

use super::model::{HostAuth, PullAuth};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Lower case: `basic`, `bearer`.
    pub scheme: String,
    /// Keys in lower case.
    pub params: Vec<(String, String)>,
}

impl Challenge {
    pub fn param(&self, key: &str) -> Option<&str> {
        self.params.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

/// Reads one WWW-Authenticate header; what does not parse ends the list.
pub fn challenges(header: &str) -> Vec<Challenge> {
    let mut found: Vec<Challenge> = Vec::new();
    let mut rest = header.get(..8192).unwrap_or(header);
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let word = token(rest);
        if word.is_empty() {
            return found;
        }
        let after = rest.get(word.len()..).unwrap_or_default();
        let value = after.trim_start_matches([' ', '\t']);
        // `key=value` belongs to the challenge before it; a token68 (`scheme abc==`) has no value.
        if let Some(value) = value.strip_prefix('=').filter(|v| !v.starts_with('=')) {
            let Some(challenge) = found.last_mut() else { return found };
            let value = value.trim_start_matches([' ', '\t']);
            let Some((text, tail)) = quoted(value) else { return found };
            challenge.params.push((word.to_ascii_lowercase(), text));
            rest = tail;
        } else if after.starts_with([' ', '\t', ',']) || after.is_empty() {
            found.push(Challenge { scheme: word.to_ascii_lowercase(), params: Vec::new() });
            rest = after;
        } else {
            return found;
        }
    }
}

fn token(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c))).unwrap_or(text.len());
    text.get(..end).unwrap_or_default()
}

/// A quoted string or a token, and what follows.
fn quoted(text: &str) -> Option<(String, &str)> {
    let Some(inner) = text.strip_prefix('"') else {
        // Some servers leave quotes out around URLs.
        let end = text.find([',', ' ', '\t', '"']).unwrap_or(text.len());
        return Some((text.get(..end)?.to_owned(), text.get(end..)?)).filter(|(t, _)| !t.is_empty());
    };
    let mut out = String::new();
    let mut chars = inner.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, inner.get(at + 1..)?)),
            '\\' => out.push(chars.next()?.1),
            c if c.is_control() => return None,
            c => out.push(c),
        }
    }
    None
}

/// What is presented to one host.
#[derive(Clone, PartialEq, Eq)]
pub enum Credentials {
    Basic {
        username: String,
        password: String,
    },
    /// An OAuth2 refresh token.
    Identity(String),
    /// Sent as it is.
    Bearer(String),
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials(…)")
    }
}

impl Credentials {
    fn of(username: &str, password: &str, identity: &str, bearer: &str) -> Option<Credentials> {
        if !bearer.is_empty() {
            return Some(Credentials::Bearer(bearer.to_owned()));
        }
        if !identity.is_empty() {
            return Some(Credentials::Identity(identity.to_owned()));
        }
        (!username.is_empty() || !password.is_empty())
            .then(|| Credentials::Basic { username: username.to_owned(), password: password.to_owned() })
    }

    pub fn configured(auth: &HostAuth) -> Option<Credentials> {
        if auth.username.is_empty() && auth.identity_token.is_empty() {
            let decoded = base64_decode(&auth.auth).and_then(|b| String::from_utf8(b).ok());
            let (username, password) = decoded.as_deref().and_then(|t| t.split_once(':'))?;
            return Credentials::of(username, password.trim_end_matches('\0'), "", "");
        }
        Credentials::of(&auth.username, &auth.password, &auth.identity_token, "")
    }
}

/// The names that Docker Hub goes by.
fn canonical(host: &str) -> &str {
    match host {
        "index.docker.io" | "registry-1.docker.io" | "registry.hub.docker.com" => "docker.io",
        other => other,
    }
}

/// Credentials for `host` (as in a URL, `own` if it is the image's own registry and no mirror) and
/// `repository`, best match first.
pub fn choose(auths: &[PullAuth], host: &str, own: bool, repository: &str) -> Vec<Credentials> {
    let mut matching: Vec<(usize, Credentials)> = Vec::new();
    for auth in auths {
        let Some(credentials) = Credentials::of(&auth.username, &auth.password, &auth.identity_token, &auth.registry_token)
        else {
            continue;
        };
        let length = if auth.host.is_empty() { own.then_some(0) } else { key_matches(&auth.host, host, repository) };
        if let Some(length) = length {
            matching.push((length, credentials));
        }
    }
    matching.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    matching.into_iter().map(|(_, credentials)| credentials).collect()
}

/// How much of a docker config's key matches; None: it is for another place.
fn key_matches(key: &str, host: &str, repository: &str) -> Option<usize> {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (key_host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = path.trim_end_matches('/');
    // Old keys end in the registry API's version: https://index.docker.io/v1/.
    let path = if matches!(path, "v1" | "v2") { "" } else { path };
    let in_path = path.is_empty() || repository.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    (in_path && host_matches(canonical(key_host), canonical(host))).then_some(key_host.len() + path.len())
}

/// Label by label, `*` for one whole or part of a label; ports must be equal.
fn host_matches(pattern: &str, host: &str) -> bool {
    let split = |h: &str| -> (String, String) {
        match h.rsplit_once(':').filter(|(_, port)| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit())) {
            Some((name, port)) => (name.to_ascii_lowercase(), port.to_owned()),
            None => (h.to_ascii_lowercase(), String::new()),
        }
    };
    let ((pattern, pattern_port), (host, port)) = (split(pattern), split(host));
    let (patterns, labels): (Vec<&str>, Vec<&str>) = (pattern.split('.').collect(), host.split('.').collect());
    pattern_port == port && patterns.len() == labels.len() && patterns.iter().zip(&labels).all(|(p, l)| label_matches(p, l))
}

/// What stands between the stars is looked for from left to right, so that no pattern takes long.
fn label_matches(pattern: &str, label: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('*') else { return pattern == label };
    let Some(mut left) = label.strip_prefix(before) else { return false };
    let (middle, after) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match left.split_once(part) {
            Some((_, behind)) => left = behind,
            None => return false,
        }
    }
    left.ends_with(after)
}

/// Whether the token service at `realm` (a host, with or without port) may have the credentials
/// of the registry at `registry`: the same machine, or one below the same domain.
pub fn may_have(realm: &str, registry: &str) -> bool {
    let bare = |h: &str| -> String {
        let h = match h.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => h,
        };
        h.to_ascii_lowercase()
    };
    let (realm, registry) = (bare(realm), bare(registry));
    if realm == registry {
        return true;
    }
    let address = |h: &str| h.starts_with('[') || h.parse::<std::net::Ipv4Addr>().is_ok();
    let parent = |h: &str| -> Option<String> {
        let labels: Vec<&str> = h.split('.').collect();
        let from = labels.len().checked_sub(2)?;
        Some(labels.get(from..)?.join("."))
    };
    !address(&realm) && !address(&registry) && parent(&realm).is_some() && parent(&realm) == parent(&registry)
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn base64(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |w, b| w << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for n in 0..4 {
            let six = (word >> (18 - 6 * n)) as usize & 63;
            out.push(if n > chunk.len() { '=' } else { ALPHABET.get(six).map_or('=', |b| char::from(*b)) });
        }
    }
    out
}

pub fn base64_decode(text: &str) -> Option<Vec<u8>> {
    let text = text.trim().trim_end_matches('=');
    let (mut word, mut bits, mut out) = (0u32, 0, Vec::new());
    for byte in text.bytes() {
        let six = ALPHABET.iter().position(|b| *b == byte)? as u32;
        word = (word << 6 | six) & 0xffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((word >> bits) as u8);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(header: &str) -> Vec<(String, Vec<(String, String)>)> {
        challenges(header).into_iter().map(|c| (c.scheme, c.params)).collect()
    }

    fn challenge(scheme: &str, params: &[(&str, &str)]) -> (String, Vec<(String, String)>) {
        (scheme.into(), params.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect())
    }

    #[test]
    fn golden_challenges() {
        for (header, want) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/busybox:pull,push""#,
                vec![challenge(
                    "bearer",
                    &[
                        ("realm", "https://auth.docker.io/token"),
                        ("service", "registry.docker.io"),
                        ("scope", "repository:library/busybox:pull,push"),
                    ],
                )],
            ),
            (r#"Basic realm="Registry Realm""#, vec![challenge("basic", &[("realm", "Registry Realm")])]),
            (
                r#"BEARER Realm = "a" , Service=b, Basic realm="x\"y""#,
                vec![challenge("bearer", &[("realm", "a"), ("service", "b")]), challenge("basic", &[("realm", "x\"y")])],
            ),
            ("Negotiate, Basic realm=z", vec![challenge("negotiate", &[]), challenge("basic", &[("realm", "z")])]),
            (
                "Bearer realm=https://x.io/token,service=y",
                vec![challenge("bearer", &[("realm", "https://x.io/token"), ("service", "y")])],
            ),
            ("", vec![]),
            (",,,", vec![]),
            ("realm=\"x\"", vec![]),
            ("Basic realm=\"unterminated", vec![challenge("basic", &[])]),
            ("Basic realm=\"a\nb\"", vec![challenge("basic", &[])]),
            ("Basic \u{e9}", vec![challenge("basic", &[])]),
        ] {
            assert_eq!(one(header), want, "{header}");
        }
    }

    fn auth(host: &str, username: &str) -> PullAuth {
        PullAuth { host: host.into(), username: username.into(), password: "p".into(), ..PullAuth::default() }
    }

    fn chosen(auths: &[PullAuth], host: &str, own: bool, repository: &str) -> Vec<String> {
        choose(auths, host, own, repository)
            .into_iter()
            .map(|c| match c {
                Credentials::Basic { username, .. } => username,
                other => format!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn credentials_go_by_host() {
        let auths = [
            auth("https://index.docker.io/v1/", "hub"),
            auth("ghcr.io", "gh"),
            auth("ghcr.io/team", "team"),
            auth("*.example.com", "star"),
            auth("reg:5000", "port"),
            auth("", "any"),
        ];
        assert_eq!(chosen(&auths, "registry-1.docker.io", true, "library/x"), ["hub", "any"]);
        assert_eq!(chosen(&auths, "ghcr.io", true, "team/app"), ["team", "gh", "any"]);
        assert_eq!(chosen(&auths, "ghcr.io", true, "teams/app"), ["gh", "any"]);
        assert_eq!(chosen(&auths, "a.example.com", false, "x"), ["star"]);
        assert_eq!(chosen(&auths, "example.com", false, "x"), [""; 0]);
        assert_eq!(chosen(&auths, "a.b.example.com", false, "x"), [""; 0]);
        assert_eq!(chosen(&auths, "reg:5000", false, "x"), ["port"]);
        assert_eq!(chosen(&auths, "reg", false, "x"), [""; 0]);
        assert_eq!(chosen(&auths, "reg:5001", true, "x"), ["any"]);
        assert_eq!(chosen(&auths, "evil.com", false, "ghcr.io/x"), [""; 0]);
        for (pattern, label, want) in [
            ("*", "", true),
            ("a*", "a", true),
            ("a*a", "a", false),
            ("a*a", "aba", true),
            ("*b*d", "abcd", true),
            ("*d*b", "abcd", false),
            ("a**b", "axb", true),
            // As often as it has ways to match, a search that goes back would take for ever.
            (&"a*".repeat(60), &("a".repeat(200) + "b"), true),
            (&("a*".repeat(60) + "c"), &"a".repeat(200), false),
        ] {
            assert_eq!(label_matches(pattern, label), want, "{pattern} {label}");
        }
    }

    #[test]
    fn token_services_that_may_have_them() {
        for (realm, registry, want) in [
            ("auth.docker.io", "registry-1.docker.io", true),
            ("gitlab.com", "registry.gitlab.com", true),
            ("127.0.0.1:9", "127.0.0.1:5000", true),
            ("127.0.0.2", "127.0.0.1", false),
            ("evil.com", "docker.io", false),
            ("docker.io.evil.com", "registry-1.docker.io", false),
            ("localhost", "registry", false),
            ("[::1]:1", "[::1]:2", true),
            ("[::2]", "[::1]", false),
        ] {
            assert_eq!(may_have(realm, registry), want, "{realm} {registry}");
        }
    }

    #[test]
    fn base64_both_ways() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("user:pä", "dXNlcjpww6Q=")] {
            assert_eq!(base64(plain.as_bytes()), coded);
            assert_eq!(base64_decode(coded).unwrap(), plain.as_bytes());
        }
        assert!(base64_decode("a-b").is_none());
        let configured = HostAuth { auth: "dXNlcjpww6Q=".into(), ..HostAuth::default() };
        assert_eq!(
            Credentials::configured(&configured),
            Some(Credentials::Basic { username: "user".into(), password: "pä".into() })
        );
    }
}
