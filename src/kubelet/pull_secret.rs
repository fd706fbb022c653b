//! Image pull secrets: docker's config as kubernetes.io/dockerconfigjson (`auths` below it) or the
//! older kubernetes.io/dockercfg (hosts at the top). Pure.
//!
//! Invariant: nothing of a secret is in an error.
#![deny(clippy::disallowed_methods)]

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::api::base64;
use crate::images::PullAuth;
use crate::volumes::model::Data;

#[derive(Debug, thiserror::Error)]
pub enum PullSecretError {
    #[error("it has neither .dockerconfigjson nor .dockercfg")]
    NoKey,
    #[error("its {0} is no docker config: expected {{\"auths\":{{\"host\":{{\"auth\":\"…\"}}}}}}")]
    Form(&'static str),
    #[error("auth of {0} is not base64 of user:password")]
    Auth(String),
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
#[serde(default, rename_all = "lowercase")]
#[derive(Default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

pub fn read(data: &Data) -> Result<Vec<PullAuth>, PullSecretError> {
    let (key, auths) = if let Some(json) = data.get(".dockerconfigjson") {
        (".dockerconfigjson", serde_json::from_slice::<Config>(json).map(|config| config.auths))
    } else if let Some(json) = data.get(".dockercfg") {
        (".dockercfg", serde_json::from_slice(json))
    } else {
        return Err(PullSecretError::NoKey);
    };
    // serde's message would quote what it read.
    let auths: BTreeMap<String, Entry> = auths.map_err(|_| PullSecretError::Form(key))?;
    auths.into_iter().map(|(host, entry)| auth(host, entry)).collect()
}

fn auth(host: String, entry: Entry) -> Result<PullAuth, PullSecretError> {
    let Entry { mut username, mut password, auth, identitytoken, registrytoken } = entry;
    if username.is_empty() && !auth.is_empty() {
        let bad = || PullSecretError::Auth(host.clone());
        let text = base64::decode(&auth).and_then(|bytes| String::from_utf8(bytes).ok()).ok_or_else(bad)?;
        let (user, pass) = text.split_once(':').ok_or_else(bad)?;
        username = user.to_owned();
        // Docker pads with NUL.
        password = pass.trim_end_matches('\0').to_owned();
    }
    Ok(PullAuth { host, username, password, identity_token: identitytoken, registry_token: registrytoken })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(key: &str, json: &str) -> Data {
        Data::from([(key.to_owned(), json.as_bytes().to_vec())])
    }

    #[test]
    fn both_forms_give_credentials_by_host() {
        let json = r#"{"auths":{"ghcr.io":{"auth":"dXNlcjpwOnc="},"r:5000":{"username":"u","password":"p","auth":"x"}}}"#;
        let auths = read(&data(".dockerconfigjson", json)).unwrap();
        let got: Vec<_> = auths.iter().map(|a| (a.host.as_str(), a.username.as_str(), a.password.as_str())).collect();
        assert_eq!(got, [("ghcr.io", "user", "p:w"), ("r:5000", "u", "p")]);
        let old = read(&data(".dockercfg", r#"{"h":{"identitytoken":"t"}}"#)).unwrap();
        assert_eq!((old[0].host.as_str(), old[0].identity_token.as_str()), ("h", "t"));
    }

    #[test]
    fn errors_name_the_place_and_not_the_secret() {
        for (key, json) in
            [("other", "{}"), (".dockercfg", "[\"hunter2\"]"), (".dockerconfigjson", r#"{"auths":{"h":{"auth":"hunter2"}}}"#)]
        {
            let error = read(&data(key, json)).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
