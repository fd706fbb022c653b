//! Seccomp profiles: our RuntimeDefault, and the parser of Localhost profiles.
use oci_spec::runtime::LinuxSeccomp;

#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("seccomp profile {name} cannot be used: {why}")]
    Bad { name: String, why: String },
}

/// Our RuntimeDefault for a container that holds `capabilities` (`CAP_…` names).
pub fn runtime_default(_capabilities: &[String]) -> LinuxSeccomp {
    todo!()
}

/// A Localhost profile's JSON. `name` is for the message.
pub fn parse(_name: &str, _json: &[u8]) -> Result<LinuxSeccomp, SeccompError> {
    todo!()
}
