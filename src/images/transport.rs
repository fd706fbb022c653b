//! HTTP to one registry host: TLS roots, redirects, waits that a server asks for, time-outs by
//! progress.
//!
//! Invariant: an Authorization header is sent to the scheme, host and port that it is for and to no
//! redirect's target. A redirect leads to neither plain HTTP nor a link-local or loopback address
//! unless the registry lies there itself or the target is configured (T10). Nothing waits longer
//! than `stall` for a byte.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ureq::http::{HeaderMap, Uri};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};

use super::endpoint::is_loopback_name;
use super::error::PullError;
use super::model::{HostTls, RegistryConfig};

const MAX_REDIRECTS: usize = 5;
const MAX_TRIES: u32 = 4;
/// The longest that a Retry-After is obeyed within one pull; the kubelet's back-off waits longer.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Where distributions keep the CA bundle that they maintain.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];

pub struct Transport<'a> {
    registries: &'a RegistryConfig,
    stall: Duration,
    cancelled: &'a AtomicBool,
    /// The registry's own host may lie on loopback or link-local; others only if configured.
    origin_local: bool,
    agents: std::sync::Mutex<Vec<(String, Agent)>>,
}

pub struct Request<'r> {
    pub url: String,
    pub accept: Option<&'r str>,
    /// For the URL's host alone.
    pub authorization: Option<String>,
    pub range: Option<u64>,
    /// A form to POST; None: GET.
    pub form: Option<String>,
}

pub struct Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Body,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }
}

impl<'a> Transport<'a> {
    pub fn new(registries: &'a RegistryConfig, origin: &str, stall: Duration, cancelled: &'a AtomicBool) -> Transport<'a> {
        let origin_local = is_loopback_name(origin) || registries.configs.contains_key(origin);
        Transport { registries, stall, cancelled, origin_local, agents: std::sync::Mutex::new(Vec::new()) }
    }

    /// Sends a request, follows redirects, and tries again after 429, 5xx and Retry-After.
    pub fn send(&self, request: &Request<'_>) -> Result<Response, PullError> {
        let mut tries = 0;
        loop {
            self.check()?;
            tries += 1;
            let answer = self.follow(request);
            let wait = match &answer {
                Ok(r) if matches!(r.status, 429 | 500 | 502 | 503 | 504) && tries < MAX_TRIES => retry_after(r, tries),
                Err(PullError::Broken(_)) if tries < MAX_TRIES => Some(backoff(tries)),
                _ => None,
            };
            match wait.filter(|w| *w <= MAX_WAIT) {
                Some(wait) => self.sleep(wait)?,
                None => return answer,
            }
        }
    }

    fn follow(&self, request: &Request<'_>) -> Result<Response, PullError> {
        let mut url = request.url.clone();
        let first = origin(&url)?;
        for hop in 0..=MAX_REDIRECTS {
            let here = origin(&url)?;
            let authorization = request.authorization.as_deref().filter(|_| here == first);
            let response = self.once(&url, &here, authorization, request, hop > 0)?;
            if !matches!(response.status, 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let Some(location) = response.header("location") else {
                return Err(PullError::refused(format!("{} sent a redirect to nowhere", here.authority)));
            };
            let next = join(&here, location)?;
            let target = origin(&next)?;
            if here.https && !target.https && !is_loopback_name(&target.authority) && !self.is_configured(&target.authority) {
                return Err(PullError::refused(format!("{} redirects to plain HTTP at {}", here.authority, target.authority)));
            }
            url = next;
        }
        Err(PullError::refused(format!("{} redirects more than {MAX_REDIRECTS} times", first.authority)))
    }

    fn once(
        &self,
        url: &str,
        here: &Origin,
        authorization: Option<&str>,
        request: &Request<'_>,
        redirected: bool,
    ) -> Result<Response, PullError> {
        let local =
            self.is_configured(&here.authority) || (self.origin_local && is_loopback_name(&here.authority)) || !redirected;
        let agent = self.agent(&here.authority, local)?;
        let uri: Uri = url.parse().map_err(|e| PullError::refused(format!("\"{url}\" is no URL: {e}")))?;
        let answer = match &request.form {
            Some(form) if !redirected => {
                let mut post = agent.post(uri).header("content-type", "application/x-www-form-urlencoded");
                if let Some(value) = authorization {
                    post = post.header("authorization", value);
                }
                post.send(form.as_str())
            }
            Some(_) => return Err(PullError::refused(format!("the token service redirects to {}", here.authority))),
            None => {
                let mut get = agent.get(uri);
                if let Some(accept) = request.accept {
                    get = get.header("accept", accept);
                }
                if let Some(value) = authorization {
                    get = get.header("authorization", value);
                }
                if let Some(from) = request.range {
                    get = get.header("range", format!("bytes={from}-"));
                }
                get.call()
            }
        };
        let (parts, body) = answer.map_err(|e| failure(&here.authority, &e))?.into_parts();
        Ok(Response { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    fn is_configured(&self, authority: &str) -> bool {
        self.registries.configs.contains_key(authority)
    }

    /// One agent (and pool of connections) a host: TLS settings are a host's.
    fn agent(&self, authority: &str, local: bool) -> Result<Agent, PullError> {
        let key = format!("{authority} {local}");
        let mut agents = self.agents.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, agent)) = agents.iter().find(|(k, _)| *k == key) {
            return Ok(agent.clone());
        }
        let hub = if authority == "registry-1.docker.io" { self.registries.configs.get("docker.io") } else { None };
        let tls = self.registries.configs.get(authority).or(hub).and_then(|c| c.tls.as_ref());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(Duration::from_secs(10)))
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(self.stall.max(Duration::from_secs(1)) * 2))
            .timeout_per_read(Some(self.stall))
            .timeout_per_write(Some(self.stall))
            .input_buffer_size(64 * 1024)
            .output_buffer_size(8 * 1024)
            .max_idle_connections_per_host(2)
            .tls_config(tls_config(tls)?)
            .build();
        let agent = Agent::with_parts(config, DefaultConnector::default(), Guard { local, inner: DefaultResolver::default() });
        agents.push((key, agent.clone()));
        Ok(agent)
    }

    pub fn check(&self) -> Result<(), PullError> {
        if self.cancelled.load(Ordering::Relaxed) { Err(PullError::Cancelled) } else { Ok(()) }
    }

    /// Sleeps in steps, so that a cancelled pull ends soon.
    pub fn sleep(&self, wait: Duration) -> Result<(), PullError> {
        let step = Duration::from_millis(100);
        let mut left = wait;
        while !left.is_zero() {
            self.check()?;
            let now = left.min(step);
            std::thread::sleep(now);
            left -= now;
        }
        self.check()
    }
}

pub fn backoff(tries: u32) -> Duration {
    Duration::from_millis(250 << tries.min(6))
}

/// What the server asks for, in seconds; dates are answered with our own back-off.
fn retry_after(response: &Response, tries: u32) -> Option<Duration> {
    let asked = response.header("retry-after").and_then(|v| v.trim().parse::<u64>().ok()).map(Duration::from_secs);
    Some(asked.unwrap_or_else(|| backoff(tries)))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub https: bool,
    pub authority: String,
}

/// Scheme, host and port of a URL; user names in URLs are refused.
pub fn origin(url: &str) -> Result<Origin, PullError> {
    let shown: String = url.chars().take(200).collect();
    let uri: Uri = url.parse().map_err(|e| PullError::refused(format!("\"{shown}\" is no URL: {e}")))?;
    let https = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(PullError::refused(format!("\"{shown}\" is neither http nor https"))),
    };
    match uri.authority() {
        Some(authority) if !authority.as_str().contains('@') && !authority.host().is_empty() => {
            Ok(Origin { https, authority: authority.as_str().to_ascii_lowercase() })
        }
        _ => Err(PullError::refused(format!("\"{shown}\" has no plain host"))),
    }
}

fn join(base: &Origin, location: &str) -> Result<String, PullError> {
    let scheme = if base.https { "https" } else { "http" };
    if location.starts_with("http://") || location.starts_with("https://") {
        return Ok(location.to_owned());
    }
    if location.starts_with("//") {
        return Ok(format!("{scheme}:{location}"));
    }
    if location.starts_with('/') {
        return Ok(format!("{scheme}://{}{location}", base.authority));
    }
    Err(PullError::refused(format!("{} redirects to \"{}\"", base.authority, location.chars().take(200).collect::<String>())))
}

/// Connecting failed: the registry is unavailable. Later: the exchange broke off.
fn failure(host: &str, error: &ureq::Error) -> PullError {
    use ureq::Timeout;
    let why = || error.to_string();
    match error {
        ureq::Error::HostNotFound => PullError::Unavailable { host: host.to_owned(), why: "its name has no address".into() },
        ureq::Error::ConnectionFailed | ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
            PullError::Unavailable { host: host.to_owned(), why: why() }
        }
        ureq::Error::Io(e) => match e.kind() {
            std::io::ErrorKind::PermissionDenied if e.get_ref().is_some() => PullError::refused(e.to_string()),
            std::io::ErrorKind::ConnectionRefused
            | std::io::ErrorKind::HostUnreachable
            | std::io::ErrorKind::NetworkUnreachable
            | std::io::ErrorKind::NetworkDown
            | std::io::ErrorKind::AddrNotAvailable => PullError::Unavailable { host: host.to_owned(), why: e.to_string() },
            std::io::ErrorKind::InvalidData => PullError::refused(format!("{host}: {e}")),
            // getaddrinfo's errors have no kind.
            _ if e.raw_os_error().is_none() && e.to_string().contains("lookup") => {
                PullError::Unavailable { host: host.to_owned(), why: e.to_string() }
            }
            _ => PullError::Broken(format!("{host}: {e}")),
        },
        ureq::Error::Timeout(_) => PullError::Broken(format!("{host}: {error}")),
        ureq::Error::Protocol(_) => PullError::refused(format!("{host} does not speak HTTP as expected: {error}")),
        _ => PullError::refused(format!("{host}: {error}")),
    }
}

/// Refuses addresses that only this machine or its link knows, where they were not asked for.
#[derive(Debug)]
struct Guard {
    local: bool,
    inner: DefaultResolver,
}

impl Resolver for Guard {
    fn resolve(
        &self,
        uri: &Uri,
        config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let addresses = self.inner.resolve(uri, config, timeout)?;
        if !self.local
            && let Some(bad) = addresses.iter().map(SocketAddr::ip).find(is_local)
        {
            let host = uri.host().unwrap_or_default();
            let why = format!("a redirect to {host} ({bad}) is refused: add {host} to the registries' configs to allow it");
            return Err(ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, why)));
        }
        Ok(addresses)
    }
}

/// Loopback, link-local (with the clouds' metadata service), unspecified and multicast.
fn is_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local() || a.is_unspecified() || a.is_multicast() || a.is_broadcast(),
        IpAddr::V6(a) => match a.to_ipv4_mapped() {
            Some(mapped) => is_local(&IpAddr::V4(mapped)),
            None => a.is_loopback() || a.is_unspecified() || a.is_multicast() || a.is_unicast_link_local(),
        },
    }
}

fn tls_config(tls: Option<&HostTls>) -> Result<TlsConfig, PullError> {
    let mut roots = Vec::new();
    let unverified = tls.is_some_and(|t| t.insecure_skip_verify);
    if !unverified {
        if let Some(bundle) = BUNDLES.iter().map(Path::new).find(|p| p.exists()) {
            certificates(bundle, &mut roots)?;
        }
        if let Some(file) = tls.and_then(|t| t.ca_file.as_deref()) {
            certificates(file, &mut roots)?;
        }
    }
    let mut config = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots))
        .disable_verification(unverified)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
    if let Some(HostTls { cert_file: Some(cert), key_file: Some(key), .. }) = tls {
        let mut chain = Vec::new();
        certificates(cert, &mut chain)?;
        let bad = |e: ureq::Error| PullError::refused(format!("{}: {e}", key.display()));
        let key = PrivateKey::from_pem(&read_pem(key)?).map_err(bad)?;
        config = config.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    Ok(config.build())
}

fn certificates(path: &Path, into: &mut Vec<Certificate<'static>>) -> Result<(), PullError> {
    let pem = read_pem(path)?;
    for item in ureq::tls::parse_pem(&pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => into.push(certificate),
            Ok(_) => {}
            Err(e) => return Err(PullError::refused(format!("{} is no PEM file of certificates: {e}", path.display()))),
        }
    }
    Ok(())
}

/// CA bundles are about 200 KB.
fn read_pem(path: &Path) -> Result<Vec<u8>, PullError> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| PullError::refused(format!("cannot read {}: {e}", path.display())))?;
    file.take(8 << 20).read_to_end(&mut bytes).map_err(|e| PullError::refused(format!("cannot read {}: {e}", path.display())))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses() {
        for (text, want) in [
            ("127.0.0.1", true),
            ("169.254.169.254", true),
            ("0.0.0.0", true),
            ("::1", true),
            ("fe80::1", true),
            ("::ffff:169.254.169.254", true),
            ("10.0.0.1", false),
            ("1.1.1.1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_local(&text.parse().unwrap()), want, "{text}");
        }
    }

    #[test]
    fn redirects_are_joined() {
        let base = Origin { https: true, authority: "r.io:5000".into() };
        assert_eq!(join(&base, "/x?y=1").unwrap(), "https://r.io:5000/x?y=1");
        assert_eq!(join(&base, "//cdn.io/x").unwrap(), "https://cdn.io/x");
        assert_eq!(join(&base, "http://cdn.io/x").unwrap(), "http://cdn.io/x");
        for bad in ["x", "ftp://x/y", "file:///etc/passwd", ""] {
            assert!(join(&base, bad).is_err(), "{bad}");
        }
        for bad in ["https://user:secret@host/x", "ftp://x/", "https:///x", "x"] {
            assert!(origin(bad).is_err(), "{bad}");
        }
    }
}
