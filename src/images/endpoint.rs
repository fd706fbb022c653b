//! Where a registry's images are asked for: mirrors in their order, then the registry. Pure.
//!
//! k3s `registries.yaml`: mirrors by host or `*`, rewrites of the repository. A registry is spoken
//! to by HTTPS, except on loopback or where an endpoint says `http://`.
#![deny(clippy::disallowed_methods)]

use super::model::RegistryConfig;
use super::reference::Reference;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub https: bool,
    /// `host` or `host:port`.
    pub authority: String,
    /// `/v2`.
    pub path: String,
    /// Repository as this endpoint calls it.
    pub repository: String,
    /// The image's own registry, no mirror.
    pub own: bool,
    /// A mirror is told whose images it is asked for.
    pub namespace: Option<String>,
}

impl Endpoint {
    pub fn url(&self, rest: &str) -> String {
        let scheme = if self.https { "https" } else { "http" };
        let query = self.namespace.as_ref().map(|n| format!("?ns={n}")).unwrap_or_default();
        format!("{scheme}://{}{}/{}/{rest}{query}", self.authority, self.path, self.repository)
    }
}

pub fn endpoints(reference: &Reference, config: &RegistryConfig) -> Result<Vec<Endpoint>, String> {
    let mut found = Vec::new();
    let mirror = config.mirrors.get(&reference.host).or_else(|| config.mirrors.get("*"));
    if let Some(mirror) = mirror {
        let mut repository = reference.repository.clone();
        for (pattern, replacement) in &mirror.rewrite {
            let pattern = Pattern::parse(pattern)?;
            if let Some(rewritten) = pattern.rewrite(&repository, replacement) {
                if rewritten.is_empty() || !is_plain(&rewritten) {
                    return Err(format!("rewrite to \"{replacement}\" makes no repository of {repository}"));
                }
                repository = rewritten;
                break;
            }
        }
        for url in &mirror.endpoint {
            let (https, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
                (Some(rest), _) => (true, rest),
                (_, Some(rest)) => (false, rest),
                _ => return Err(format!("mirror endpoint \"{url}\" needs http:// or https:// before it")),
            };
            let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
            if authority.is_empty() || authority.contains('@') || !is_plain(authority) || !is_plain(path) {
                return Err(format!("mirror endpoint \"{url}\" is no plain URL"));
            }
            let path = path.trim_matches('/');
            found.push(Endpoint {
                https,
                authority: authority.to_owned(),
                path: if path.is_empty() { "/v2".to_owned() } else { format!("/{path}") },
                repository: repository.clone(),
                own: authority == reference.host,
                namespace: (authority != reference.host).then(|| reference.host.clone()),
            });
        }
    }
    let authority = if reference.host == "docker.io" { "registry-1.docker.io" } else { &reference.host };
    if !found.iter().any(|e| e.authority == authority && e.repository == reference.repository) {
        let tls = config.configs.get(&reference.host).or_else(|| config.configs.get(authority)).is_some_and(|c| c.tls.is_some());
        found.push(Endpoint {
            https: tls || !is_loopback_name(authority),
            authority: authority.to_owned(),
            path: "/v2".to_owned(),
            repository: reference.repository.clone(),
            own: true,
            namespace: None,
        });
    }
    Ok(found)
}

/// Nothing that ends a URL's path, or that no URL may hold.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_graphic() && !b"?#\\\"<>^`{|}".contains(&b))
}

/// `localhost`, `127.…` and `[::1]`, with or without port.
pub fn is_loopback_name(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost") || host.parse::<std::net::IpAddr>().is_ok_and(|a| a.is_loopback())
}

/// The part of regular expressions that rewrites are written in: text, `.`, `.*`, `.+`, groups
/// around those, `^` and `$`.
struct Pattern {
    start: bool,
    end: bool,
    pieces: Vec<Piece>,
}

enum Piece {
    Text(char),
    /// At least so many of any character.
    Any {
        least: usize,
        once: bool,
    },
    Open,
    Close,
}

impl Pattern {
    fn parse(text: &str) -> Result<Pattern, String> {
        let bad = || format!("rewrite \"{text}\": only text, ., .*, .+, groups of these, ^ and $ are supported");
        let (start, inner) = text.strip_prefix('^').map_or((false, text), |t| (true, t));
        let (end, inner) = inner.strip_suffix('$').filter(|t| !t.ends_with('\\')).map_or((false, inner), |t| (true, t));
        let mut pieces = Vec::new();
        let mut chars = inner.chars().peekable();
        let mut depth = 0;
        while let Some(c) = chars.next() {
            match c {
                '\\' => pieces.push(Piece::Text(chars.next().filter(|c| !c.is_alphanumeric()).ok_or_else(bad)?)),
                '.' => {
                    let (least, once) = match chars.peek() {
                        Some('*') => (0, false),
                        Some('+') => (1, false),
                        _ => (1, true),
                    };
                    if !once {
                        chars.next();
                    }
                    pieces.push(Piece::Any { least, once });
                }
                '(' if depth == 0 && chars.peek() != Some(&'?') => {
                    depth = 1;
                    pieces.push(Piece::Open);
                }
                ')' if depth == 1 => {
                    depth = 0;
                    pieces.push(Piece::Close);
                }
                '*' | '+' | '?' | '[' | ']' | '{' | '}' | '|' | '(' | ')' | '^' | '$' => return Err(bad()),
                c => pieces.push(Piece::Text(c)),
            }
            if matches!(chars.peek(), Some('*' | '+' | '?' | '{')) {
                return Err(bad());
            }
        }
        if depth != 0 || pieces.len() > 256 {
            return Err(bad());
        }
        Ok(Pattern { start, end, pieces })
    }

    /// The first, longest match replaced; None: it does not match.
    fn rewrite(&self, text: &str, replacement: &str) -> Option<String> {
        let chars: Vec<char> = text.chars().collect();
        let starts = if self.start { 0..=0 } else { 0..=chars.len() };
        let mut steps = 0;
        for at in starts {
            let mut groups = Vec::new();
            if let Some(end) = self.matches(&chars, at, 0, &mut groups, &mut steps) {
                let mut out: String = chars.get(..at)?.iter().collect();
                out.push_str(&expand(replacement, &chars, (at, end), &groups));
                out.extend(chars.get(end..)?);
                return Some(out);
            }
        }
        None
    }

    fn matches(
        &self,
        text: &[char],
        at: usize,
        piece: usize,
        groups: &mut Vec<(usize, usize)>,
        steps: &mut u32,
    ) -> Option<usize> {
        *steps += 1;
        if *steps > 100_000 {
            return None;
        }
        match self.pieces.get(piece) {
            None => (!self.end || at == text.len()).then_some(at),
            Some(Piece::Text(c)) => (text.get(at) == Some(c)).then(|| self.matches(text, at + 1, piece + 1, groups, steps))?,
            Some(Piece::Any { least, once }) => {
                let most = if *once { (at + 1).min(text.len()) } else { text.len() };
                let mut end = most;
                while end >= at + least {
                    if let Some(found) = self.matches(text, end, piece + 1, groups, steps) {
                        return Some(found);
                    }
                    end = end.checked_sub(1)?;
                }
                None
            }
            Some(Piece::Open) => {
                groups.push((at, at));
                self.matches(text, at, piece + 1, groups, steps).or_else(|| {
                    groups.pop();
                    None
                })
            }
            Some(Piece::Close) => {
                let was = groups.last().copied();
                if let Some(last) = groups.last_mut() {
                    last.1 = at;
                }
                self.matches(text, at, piece + 1, groups, steps).or_else(|| {
                    if let (Some(last), Some(was)) = (groups.last_mut(), was) {
                        *last = was;
                    }
                    None
                })
            }
        }
    }
}

/// `$1`, `${1}` and `$0`; `$$` is a dollar.
fn expand(replacement: &str, text: &[char], whole: (usize, usize), groups: &[(usize, usize)]) -> String {
    let mut out = String::new();
    let mut chars = replacement.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '$' {
            out.push(c);
            continue;
        }
        let braced = chars.next_if_eq(&'{').is_some();
        let mut number = String::new();
        while let Some(digit) = chars.next_if(char::is_ascii_digit) {
            number.push(digit);
        }
        if braced {
            chars.next_if_eq(&'}');
        }
        match number.parse::<usize>() {
            Ok(n) => {
                let range = if n == 0 { Some(whole) } else { groups.get(n - 1).copied() };
                out.extend(range.and_then(|(a, b)| text.get(a..b)).unwrap_or_default());
            }
            Err(_) => {
                chars.next_if_eq(&'$');
                out.push('$');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::model::{HostConfig, HostTls, Mirror};
    use crate::images::reference::normalize;

    fn urls(reference: &str, config: &RegistryConfig) -> Vec<String> {
        endpoints(&normalize(reference).unwrap(), config).unwrap().iter().map(|e| e.url("tags")).collect()
    }

    #[test]
    fn https_but_on_loopback() {
        let none = RegistryConfig::default();
        assert_eq!(urls("busybox", &none), ["https://registry-1.docker.io/v2/library/busybox/tags"]);
        assert_eq!(urls("x.io:5000/a/b", &none), ["https://x.io:5000/v2/a/b/tags"]);
        assert_eq!(urls("localhost:5000/a", &none), ["http://localhost:5000/v2/a/tags"]);
        assert_eq!(urls("[::1]:5000/a", &none), ["http://[::1]:5000/v2/a/tags"]);
        assert_eq!(urls("127.0.0.1.evil.com/a", &none), ["https://127.0.0.1.evil.com/v2/a/tags"]);
        let tls = HostConfig { tls: Some(HostTls::default()), ..HostConfig::default() };
        let config = RegistryConfig { configs: [("localhost:5000".to_owned(), tls)].into(), ..RegistryConfig::default() };
        assert_eq!(urls("localhost:5000/a", &config), ["https://localhost:5000/v2/a/tags"]);
    }

    #[test]
    fn mirrors_come_first_and_are_told_whose_image() {
        let mirror = Mirror {
            endpoint: vec!["http://10.0.0.1:5000".into(), "https://m.io/v2/proxy/".into()],
            rewrite: [("^library/(.*)".to_owned(), "hub/$1".to_owned())].into(),
        };
        let config = RegistryConfig { mirrors: [("docker.io".to_owned(), mirror.clone())].into(), ..RegistryConfig::default() };
        assert_eq!(
            urls("busybox", &config),
            [
                "http://10.0.0.1:5000/v2/hub/busybox/tags?ns=docker.io",
                "https://m.io/v2/proxy/hub/busybox/tags?ns=docker.io",
                "https://registry-1.docker.io/v2/library/busybox/tags",
            ]
        );
        assert_eq!(urls("x.io/a", &config).len(), 1);
        let all = RegistryConfig { mirrors: [("*".to_owned(), mirror)].into(), ..RegistryConfig::default() };
        assert_eq!(urls("x.io/a", &all).len(), 3);
        for (url, rewritten) in
            [("m.io", "a"), ("https://m.io\n/x", "a"), ("https://m.io", "b?c"), ("https://m.io", "b c"), ("https://m.io", "")]
        {
            let bad = Mirror { endpoint: vec![url.into()], rewrite: [("a".to_owned(), rewritten.to_owned())].into() };
            let bad = RegistryConfig { mirrors: [("x.io".to_owned(), bad)].into(), ..RegistryConfig::default() };
            assert!(endpoints(&normalize("x.io/a").unwrap(), &bad).is_err(), "{url} {rewritten}");
        }
    }

    #[test]
    fn rewrites() {
        for (pattern, replacement, text, want) in [
            ("^rancher/(.*)", "mirror/$1", "rancher/a/b", Some("mirror/a/b")),
            ("^rancher/(.*)", "mirror/$1", "other/a", None),
            ("(.*)/(.*)$", "${2}-$1", "a/b/c", Some("c-a/b")),
            ("(.*)", "p/$1", "a", Some("p/a")),
            ("^a\\.b/(.+)", "$1", "a.b/c", Some("c")),
            ("^a\\.b/(.+)", "$1", "axb/c", None),
            ("b", "x$$", "abc", Some("ax$c")),
        ] {
            let pattern = Pattern::parse(pattern).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(pattern.rewrite(text, replacement).as_deref(), want, "{text}");
        }
        for pattern in ["[a-z]+", "a|b", "(a", "a)", "a*", "(?i)a", "\\d"] {
            assert!(Pattern::parse(pattern).is_err(), "{pattern}");
        }
        let slow = Pattern::parse(&".*".repeat(40).replace(".*", ".*x")).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(slow.rewrite(&"y".repeat(200), ""), None);
    }
}
