//! The forms that names may have. Each check gives the reason where a text does not fit.
//! RFC 1123, k8s.io/apimachinery/pkg/util/validation.

fn lower(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit()
}

fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.chars().all(|c| lower(c) || c == '-')
        && text.starts_with(lower)
        && text.ends_with(lower)
}

/// A DNS label: container, volume and namespace names.
pub fn label(text: &str) -> Option<String> {
    if text.len() > 63 {
        return Some("must be no more than 63 characters".to_owned());
    }
    (!is_label(text)).then(|| {
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name' or '123-abc')".to_owned()
    })
}

/// RFC 1035: a Service's name.
pub fn service(text: &str) -> Option<String> {
    (!is_label(text) || !text.starts_with(|c: char| c.is_ascii_lowercase())).then(|| {
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name', or 'abc-123')".to_owned()
    })
}

/// Labels with dots between them: pod names, host names.
pub fn subdomain(text: &str) -> Option<String> {
    if text.len() > 253 {
        return Some("must be no more than 253 characters".to_owned());
    }
    let part = |p: &str| !p.is_empty() && p.chars().all(|c| lower(c) || c == '-') && p.starts_with(lower) && p.ends_with(lower);
    (!text.split('.').all(part)).then(|| {
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com')".to_owned()
    })
}

fn is_name_part(text: &str) -> bool {
    let edge = |c: char| c.is_ascii_alphanumeric();
    (1..=63).contains(&text.len())
        && text.chars().all(|c| edge(c) || matches!(c, '-' | '_' | '.'))
        && text.starts_with(edge)
        && text.ends_with(edge)
}

/// `name` or `prefix.example/name`: keys of labels and annotations.
pub fn qualified(text: &str) -> Option<String> {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(p, n)| (Some(p), n));
    let fits = prefix.is_none_or(|p| subdomain(p).is_none()) && is_name_part(name);
    (!fits).then(|| {
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character, with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')".to_owned()
    })
}

pub fn label_value(text: &str) -> Option<String> {
    (!text.is_empty() && !is_name_part(text)).then(|| {
        "a valid label must be an empty string or at most 63 characters of alphanumerics, '-', '_' or '.', and must start and end with an alphanumeric character".to_owned()
    })
}

/// A key of a ConfigMap or Secret; it becomes a file's name.
pub fn config_key(text: &str) -> Option<String> {
    let fits = (1..=253).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && text != "."
        && !text.starts_with("..");
    (!fits).then(|| {
        "a valid config key must consist of at most 253 alphanumeric characters, '-', '_' or '.', and must not be '.' or start with '..'".to_owned()
    })
}

/// The relaxed rule of Kubernetes 1.34.
pub fn env_name(text: &str) -> Option<String> {
    (text.is_empty() || !text.chars().all(|c| matches!(c, ' '..='~') && c != '='))
        .then(|| "a valid environment variable name must consist only of printable ASCII characters other than '='".to_owned())
}

/// Name of a container's port: RFC 6335.
pub fn port_name(text: &str) -> Option<String> {
    let fits = (1..=15).contains(&text.len())
        && text.chars().all(|c| lower(c) || c == '-')
        && text.contains(|c: char| c.is_ascii_lowercase())
        && !text.starts_with('-')
        && !text.ends_with('-')
        && !text.contains("--");
    (!fits).then(|| {
        "must be no more than 15 characters of a-z, 0-9 and '-', contain at least one letter, and neither begin nor end with '-' nor contain '--'".to_owned()
    })
}

pub fn ip(text: &str) -> Option<String> {
    text.parse::<std::net::IpAddr>().is_err().then(|| "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned())
}

fn climbs(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// Below something, and staying there.
pub fn relative_path(path: &str) -> Option<String> {
    if path.starts_with('/') {
        Some("must be a relative path".to_owned())
    } else if climbs(path) {
        Some("must not contain '..'".to_owned())
    } else if path.contains('\0') {
        Some("must not contain a NUL byte".to_owned())
    } else {
        None
    }
}

/// A place inside a container.
pub fn absolute_path(path: &str) -> Option<String> {
    if !path.starts_with('/') {
        Some("must be an absolute path".to_owned())
    } else if climbs(path) {
        Some("must not contain '..'".to_owned())
    } else if path.contains(['\0', '\n']) {
        Some("must not contain a line break or a NUL byte".to_owned())
    } else if path.len() > 4095 {
        Some("must be no more than 4095 bytes".to_owned())
    } else {
        None
    }
}
