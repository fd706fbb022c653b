//! Who a container runs as: `user[:group]` against the image's own passwd and group files.
use std::path::{Path, PathBuf};

use super::model::ResolvedUser;

#[derive(Debug, thiserror::Error)]
pub enum UserError {
    #[error("user \"{user}\": {why}")]
    Bad { user: String, why: String },
    #[error("reading {path} of the image")]
    Io { path: PathBuf, source: std::io::Error },
}

/// What was asked for: CRI's run_as_user, run_as_group, supplemental_groups and their policy over the image's User.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserRequest {
    /// The image's `User`, as written.
    pub image_user: String,
    pub run_as_user: Option<u32>,
    pub run_as_group: Option<u32>,
    pub supplemental_groups: Vec<u32>,
    /// SupplementalGroupsPolicy Strict: no groups out of the image's /etc/group.
    pub strict: bool,
}

/// Looks the request up below `rootfs` (symlinks stay inside it, files are read up to 1 MiB).
pub fn resolve(_rootfs: &Path, _request: &UserRequest) -> Result<ResolvedUser, UserError> {
    todo!()
}
