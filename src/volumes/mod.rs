//! Volumes: contents to files and mounts. They emit mounts as plain data; the runtime consumes them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::api::pod::{Container, Pod};
use crate::store::effects::Effects;
use crate::store::ids::PodUid;

pub mod model;

use model::{Contents, MountPlan, VolumeError};

/// The front door; cheap to clone. Calls for one pod must not overlap; pods are independent.
#[derive(Clone)]
pub struct Volumes {
    /// `<kubelet>/pods`.
    pods: PathBuf,
    effects: Arc<Effects>,
}

impl Volumes {
    pub fn open(kubelet: &Path, effects: Arc<Effects>) -> Result<Volumes, VolumeError> {
        Ok(Volumes { pods: kubelet.join("pods"), effects })
    }

    /// Makes every volume of the pod, or brings it up to date: a second call on an unchanged
    /// world writes nothing. Also what refreshes ConfigMaps and Secrets in running pods.
    pub fn setup(&self, _uid: &PodUid, _pod: &Pod, _contents: &dyn Contents) -> Result<(), VolumeError> {
        Ok(())
    }

    /// The mounts of one container, subPaths prepared; `setup` must have succeeded. Call it again
    /// for each start of the container.
    pub fn mounts(&self, _uid: &PodUid, _pod: &Pod, _container: &Container) -> Result<Vec<MountPlan>, VolumeError> {
        Ok(Vec::new())
    }

    /// Writes the pod's /etc/hosts in place (same inode) and gives its path.
    pub fn hosts_file(&self, uid: &PodUid, _text: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pods.join(uid.as_str()).join("etc-hosts"))
    }

    /// A fresh, empty file (0666) for the termination message of one attempt of a container.
    pub fn termination_log(&self, uid: &PodUid, container: &str, attempt: u32) -> Result<PathBuf, VolumeError> {
        Ok(self.pods.join(uid.as_str()).join("containers").join(container).join(attempt.to_string()))
    }

    /// What the container wrote there, 4096 bytes at most; empty where nothing was.
    pub fn termination_message(&self, _uid: &PodUid, _container: &str, _attempt: u32) -> Result<String, VolumeError> {
        Ok(String::new())
    }

    /// Takes everything away: mounts first, then files, following no link and crossing no mount.
    /// Idempotent, at any point of an earlier teardown or setup.
    pub fn teardown(&self, _uid: &PodUid) -> Result<(), VolumeError> {
        let _ = &self.effects;
        Ok(())
    }
}
