//! One registry endpoint: manifests and blobs, with whatever log-in it asks for.
//!
//! Invariant: what comes back is not trusted: callers check sizes and digests. A download that
//! breaks off goes on where it stopped, as long as each attempt brings something.
//! distribution-spec spec.md; distribution/docs token authentication.

use std::io::Read;
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;

use super::auth::{self, Challenge, Credentials};
use super::blobs::BlobSource;
use super::endpoint::Endpoint;
use super::error::PullError;
use super::manifest::{DOCKER_INDEX, DOCKER_MANIFEST, Descriptor, MAX_DOCUMENT, OCI_INDEX, OCI_MANIFEST};
use super::model::RegistryConfig;
use super::stage::FeedError;
use super::transport::{self, Request, Response, Transport};

/// Attempts in a row that brought no byte.
const MAX_IDLE_TRIES: u32 = 5;
/// Of a token service's answer or an error's text.
const MAX_ANSWER: u64 = 1 << 20;

pub struct Registry<'a> {
    pub endpoint: Endpoint,
    registries: &'a RegistryConfig,
    transport: Transport<'a>,
    /// Best first; the one in use is in `login`.
    credentials: Vec<Credentials>,
    login: Mutex<Login>,
}

#[derive(Default)]
struct Login {
    /// Index into the credentials.
    at: usize,
    authorization: Option<String>,
}

/// A manifest as it came.
pub struct Fetched {
    pub bytes: Vec<u8>,
    pub content_type: Option<String>,
}

impl<'a> Registry<'a> {
    pub fn new(
        endpoint: Endpoint,
        registries: &'a RegistryConfig,
        transport: Transport<'a>,
        pull: &[super::PullAuth],
    ) -> Registry<'a> {
        let mut credentials = auth::choose(pull, &endpoint.authority, endpoint.own, &endpoint.repository);
        if credentials.is_empty() {
            let hub = if endpoint.authority == "registry-1.docker.io" { registries.configs.get("docker.io") } else { None };
            let configured = registries.configs.get(&endpoint.authority).or(hub).and_then(|c| c.auth.as_ref());
            credentials.extend(configured.and_then(Credentials::configured));
        }
        let authorization = match credentials.first() {
            Some(Credentials::Bearer(token)) => Some(format!("Bearer {token}")),
            _ => None,
        };
        Registry { endpoint, registries, transport, credentials, login: Mutex::new(Login { at: 0, authorization }) }
    }

    /// The manifest or index of a tag or digest.
    pub fn manifest(&self, reference: &str) -> Result<Fetched, PullError> {
        let accept = [OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST].join(", ");
        let url = self.endpoint.url(&format!("manifests/{reference}"));
        let mut response = self.get(&url, Some(&accept), None)?;
        if response.status != 200 {
            return Err(self.refusal(response, &format!("manifest {reference}")));
        }
        let content_type = response.header("content-type").map(|t| t.split(';').next().unwrap_or(t).trim().to_owned());
        let mut bytes = Vec::new();
        let read = response.body.as_reader().take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
        read.map_err(|e| PullError::Broken(format!("{}: {e}", self.endpoint.authority)))?;
        if bytes.len() as u64 > MAX_DOCUMENT {
            return Err(PullError::refused(format!("manifest {reference} is larger than {MAX_DOCUMENT} bytes")));
        }
        Ok(Fetched { bytes, content_type })
    }

    /// A GET that logs in where the registry asks for it, with each of our credentials in turn.
    fn get(&self, url: &str, accept: Option<&str>, range: Option<u64>) -> Result<Response, PullError> {
        for _ in 0..=self.credentials.len() + 1 {
            let (authorization, at) = {
                let login = self.lock();
                (login.authorization.clone(), login.at)
            };
            let request = Request { url: url.to_owned(), accept, authorization: authorization.clone(), range, form: None };
            let response = self.transport.send(&request)?;
            if response.status != 401 {
                return Ok(response);
            }
            let challenges = response.headers.get_all("www-authenticate").iter().filter_map(|v| v.to_str().ok());
            let challenges: Vec<Challenge> = challenges.flat_map(auth::challenges).collect();
            if !self.log_in(&challenges, authorization.as_deref(), at)? {
                return Ok(response);
            }
        }
        Err(PullError::refused(format!("{} asks for a log-in again and again", self.endpoint.authority)))
    }

    /// Gets an Authorization that was not tried yet; false: there is none.
    fn log_in(&self, challenges: &[Challenge], tried: Option<&str>, tried_at: usize) -> Result<bool, PullError> {
        {
            let login = self.lock();
            // Another thread of this pull logged in meanwhile.
            if login.authorization.as_deref() != tried {
                return Ok(true);
            }
        }
        let mut at = tried_at;
        // What was tried with these credentials failed: the next ones. A bearer token may just
        // have run out, so it is fetched once more first.
        if tried.is_some_and(|t| t.starts_with("Basic ")) || matches!(self.credentials.get(at), Some(Credentials::Bearer(_))) {
            at += 1;
        }
        while at <= self.credentials.len() {
            let credentials = self.credentials.get(at);
            if credentials.is_none() && at > 0 {
                return Ok(false);
            }
            if let Some(authorization) = self.authorization(challenges, credentials)?
                && Some(authorization.as_str()) != tried
            {
                *self.lock() = Login { at, authorization: Some(authorization) };
                return Ok(true);
            }
            at += 1;
        }
        Ok(false)
    }

    /// What to send for these challenges; None: these credentials do not help.
    fn authorization(&self, challenges: &[Challenge], credentials: Option<&Credentials>) -> Result<Option<String>, PullError> {
        if let Some(Credentials::Bearer(token)) = credentials {
            return Ok(Some(format!("Bearer {token}")));
        }
        if let Some(bearer) = challenges.iter().find(|c| c.scheme == "bearer") {
            return self.token(bearer, credentials);
        }
        let basic = challenges.iter().any(|c| c.scheme == "basic");
        match credentials {
            Some(Credentials::Basic { username, password }) if basic => Ok(Some(basic_header(username, password))),
            _ => Ok(None),
        }
    }

    /// Asks the token service that a challenge names; None: it refuses.
    fn token(&self, challenge: &Challenge, credentials: Option<&Credentials>) -> Result<Option<String>, PullError> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let host = &self.endpoint.authority;
        let Some(realm) = challenge.param("realm") else {
            return Err(PullError::refused(format!("{host} asks for a token and does not say where to get it")));
        };
        let place = transport::origin(realm)?;
        if self.endpoint.https && !place.https {
            return Err(PullError::refused(format!("{host} names a token service without TLS: {}", place.authority)));
        }
        // A service elsewhere gets only what is configured for it.
        let foreign = !auth::may_have(&place.authority, host);
        let configured =
            self.registries.configs.get(&place.authority).and_then(|c| c.auth.as_ref()).and_then(Credentials::configured);
        let credentials = if foreign { configured.as_ref() } else { credentials };
        if foreign && credentials.is_none() && !self.credentials.is_empty() {
            tracing::warn!(registry = %host, service = %place.authority, "the token service is another host and does not get the credentials; add it to the registries' configs to allow it");
        }
        let scope =
            challenge.param("scope").map_or_else(|| format!("repository:{}:pull", self.endpoint.repository), str::to_owned);
        let mut query = vec![("scope", scope.as_str())];
        if let Some(service) = challenge.param("service") {
            query.push(("service", service));
        }
        let mut request = Request { url: realm.to_owned(), accept: None, authorization: None, range: None, form: None };
        match credentials {
            Some(Credentials::Identity(token)) => {
                query.extend([("grant_type", "refresh_token"), ("refresh_token", token), ("client_id", "coracle")]);
                request.form = Some(encode(&query));
            }
            other => {
                if let Some(Credentials::Basic { username, password }) = other {
                    query.push(("account", username));
                    request.authorization = Some(basic_header(username, password));
                }
                let joint = if realm.contains('?') { '&' } else { '?' };
                request.url = format!("{realm}{joint}{}", encode(&query));
            }
        }
        let mut response = self.transport.send(&request)?;
        match response.status {
            200 => {}
            400 | 401 | 403 => return Ok(None),
            status => return Err(PullError::refused(format!("the token service {} answers {status}", place.authority))),
        }
        let mut bytes = Vec::new();
        let read = response.body.as_reader().take(MAX_ANSWER).read_to_end(&mut bytes);
        read.map_err(|e| PullError::Broken(format!("{}: {e}", place.authority)))?;
        let answer: Answer = serde_json::from_slice(&bytes)
            .map_err(|_| PullError::refused(format!("the token service {} sent no token", place.authority)))?;
        let token = answer.token.filter(|t| !t.is_empty()).or(answer.access_token).unwrap_or_default();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(PullError::refused(format!("the token service {} sent no usable token", place.authority)));
        }
        Ok(Some(format!("Bearer {token}")))
    }

    fn refusal(&self, mut response: Response, what: &str) -> PullError {
        #[derive(Deserialize)]
        struct Errors {
            errors: Vec<Item>,
        }
        #[derive(Deserialize)]
        struct Item {
            code: Option<String>,
            message: Option<String>,
        }
        let mut bytes = Vec::new();
        // An error's text is a help, not a need.
        let _ = response.body.as_reader().take(64 * 1024).read_to_end(&mut bytes);
        let said = serde_json::from_slice::<Errors>(&bytes).ok().and_then(|e| e.errors.into_iter().next());
        let said = said.map(|i| i.message.filter(|m| !m.is_empty()).or(i.code).unwrap_or_default()).unwrap_or_default();
        let said: String = said.chars().filter(|c| !c.is_control()).take(200).collect();
        let name = format!("{}/{}", self.endpoint.authority, self.endpoint.repository);
        let tail = if said.is_empty() { String::new() } else { format!(": {said}") };
        match response.status {
            401 if self.credentials.is_empty() => PullError::refused(format!(
                "{what}: {name} needs credentials (401 Unauthorized){tail}: give the pod an imagePullSecret, or `coracle pull` a --user"
            )),
            401 | 403 => {
                PullError::refused(format!("{what}: {name} does not accept the credentials ({}){tail}", response.status))
            }
            404 => PullError::refused(format!("{what} of {name}: not found{tail}")),
            429 => PullError::refused(format!("{what}: {name} asks to wait (429 Too Many Requests){tail}")),
            status if status >= 500 => {
                PullError::Unavailable { host: self.endpoint.authority.clone(), why: format!("it answers {status}{tail}") }
            }
            status => PullError::refused(format!("{what}: {name} answers {status}{tail}")),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Login> {
        self.login.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One attempt from `offset` on; gives how far it came, and why it stopped early.
    fn attempt(
        &self,
        blob: &Descriptor,
        offset: &mut u64,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
    ) -> Result<Option<String>, FeedError> {
        let source = FeedError::Source;
        let host = &self.endpoint.authority;
        let url = self.endpoint.url(&format!("blobs/{}", blob.digest));
        let mut response = match self.get(&url, None, (*offset > 0).then_some(*offset)) {
            Ok(response) => response,
            Err(PullError::Broken(why)) => return Ok(Some(why)),
            Err(e) => return Err(source(e)),
        };
        let mut skip = 0;
        match response.status {
            206 if *offset > 0 => {
                let starts =
                    response.header("content-range").and_then(|r| r.strip_prefix("bytes ")).and_then(|r| r.split('-').next());
                if starts.and_then(|s| s.trim().parse().ok()) != Some(*offset) {
                    return Err(source(PullError::refused(format!(
                        "{host} sent another range of blob {} than asked",
                        blob.digest
                    ))));
                }
            }
            // It does not know ranges: what we have is passed over; the digest covers both parts.
            200 => skip = *offset,
            _ => return Err(source(self.refusal(response, &format!("blob {}", blob.digest)))),
        }
        let mut reader = response.body.as_reader();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            self.transport.check().map_err(source)?;
            let n = match reader.read(&mut buffer) {
                Ok(0) => {
                    return Ok((*offset < blob.size)
                        .then(|| format!("{host} ended blob {} after {offset} of {} bytes", blob.digest, blob.size)));
                }
                Ok(n) => n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Ok(Some(format!("{host}: {e}"))),
            };
            let skipped = skip.min(n as u64);
            skip -= skipped;
            let bytes = buffer.get(skipped as usize..n).unwrap_or_default();
            if !bytes.is_empty() {
                sink(bytes)?;
                *offset += bytes.len() as u64;
            }
        }
    }
}

impl BlobSource for Registry<'_> {
    fn copy(
        &self,
        blob: &Descriptor,
        offset: u64,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FeedError>,
    ) -> Result<(), FeedError> {
        let mut at = offset;
        let mut idle = 0;
        loop {
            let before = at;
            let Some(why) = self.attempt(blob, &mut at, sink)? else { return Ok(()) };
            idle = if at > before { 0 } else { idle + 1 };
            if idle >= MAX_IDLE_TRIES {
                return Err(FeedError::Source(PullError::Broken(why)));
            }
            self.transport.sleep(transport::backoff(idle)).map_err(FeedError::Source)?;
        }
    }
}

fn basic_header(username: &str, password: &str) -> String {
    format!("Basic {}", auth::base64(format!("{username}:{password}").as_bytes()))
}

/// application/x-www-form-urlencoded.
fn encode(pairs: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for (key, value) in pairs {
        if !out.is_empty() {
            out.push('&');
        }
        out.push_str(key);
        out.push('=');
        for byte in value.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
                byte => out.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    out
}
