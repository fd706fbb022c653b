//! Effects for one container beside its making: pull, start, signal, kill, remove.

use std::fs;

use super::create::start_error;
use super::pod::{absent_is_fine, remove_tree};
use super::{Failed, Job};
use crate::api::pod::Pod;
use crate::images::{ImageError, PullAuth};
use crate::kubelet::model::{FailReason, Now, Outcome};
use crate::kubelet::rooms::Rooms;
use crate::kubelet::{observe, pull_secret};
use crate::obs::chain;
use crate::runtime::RuntimeError;
use crate::store::ids::{ContainerId, PodUid};
use crate::sys::clock;
use crate::volumes::model::Contents;

pub(super) fn pull(
    rooms: &Rooms,
    job: &Job,
    uid: &PodUid,
    container: &str,
    reference: &str,
    delay: i64,
) -> Result<Outcome, Failed> {
    let auth = match job.pod.as_deref() {
        Some(pod) => pull_secrets(pod, job),
        None => Vec::new(),
    };
    let pulled = rooms.images.pull(reference, &auth).map_err(image_failed);
    let kept = match &pulled {
        Ok(_) => rooms.pulls.succeeded(uid, container),
        Err(failed) => {
            let now = Now { boot: clock::boot_nanos(), wall: clock::wall_nanos() };
            let failure = observe::pull_failure(delay, failed.reason, failed.message.clone(), now);
            rooms.pulls.failed(uid, container, &failure)
        }
    };
    if let Err(error) = kept {
        // This agent backs off all the same; the next one asks a little earlier.
        tracing::warn!(pod = %job.full_name(), container, error = %chain(&error), "a pull's back-off is not kept");
    }
    pulled.map(|_| Outcome::Done)
}

/// imagePullSecrets; one that is missing or cannot be read is left out, as the kubelet does it.
fn pull_secrets(pod: &Pod, job: &Job) -> Vec<PullAuth> {
    let mut auth = Vec::new();
    for reference in &pod.spec.image_pull_secrets {
        match job.configs.secret(&job.namespace, &reference.name).map(pull_secret::read) {
            Some(Ok(more)) => auth.extend(more),
            Some(Err(error)) => tracing::warn!(pod = %job.full_name(), secret = reference.name, error = %chain(&error),
                "an image pull secret is left out"),
            None => tracing::warn!(pod = %job.full_name(), secret = reference.name,
                "an image pull secret is not here; the pull may not succeed"),
        }
    }
    auth
}

pub(super) fn image_failed(error: ImageError) -> Failed {
    let reason = match &error {
        ImageError::InvalidName { .. } => FailReason::InvalidImageName,
        ImageError::Unavailable { .. } => FailReason::RegistryUnavailable,
        ImageError::Inspect { .. } => FailReason::ImageInspect,
        _ => FailReason::ImagePull,
    };
    Failed::new(reason, &error)
}

pub(super) fn start(rooms: &Rooms, job: &Job, uid: &PodUid, name: &str, id: &ContainerId) -> Result<Outcome, Failed> {
    match rooms.runtime.start_container(uid, id) {
        Ok(started_at) => Ok(Outcome::Started { started_at }),
        Err(error) => match error.start_failure() {
            Some((_, message)) => {
                Ok(Outcome::NotStarted { image: job.image_of(id), at: 0, exit: start_error(message.to_owned()) })
            }
            None => {
                tracing::debug!(pod = %uid, container = name, "start failed");
                Err(Failed::new(FailReason::Create, &error))
            }
        },
    }
}

/// Each by the stop signal of its own image.
pub(super) fn signal(rooms: &Rooms, job: &Job, uid: &PodUid, targets: &[(String, ContainerId)]) -> Result<Outcome, Failed> {
    let mut failed = None;
    for (_, id) in targets {
        let signal = stop_signal(rooms, &job.image_of(id));
        if let Err(error) = rooms.runtime.signal_container(uid, id, signal) {
            failed.get_or_insert(Failed::new(FailReason::Kill, &error));
        }
    }
    failed.map_or(Ok(Outcome::Done), Err)
}

fn stop_signal(rooms: &Rooms, image: &str) -> i32 {
    let config = match rooms.images.find(image) {
        Ok(Some(image)) => image.config.stop_signal,
        // Its image is gone: what it wished for is not known any more.
        Ok(None) => String::new(),
        Err(error) => {
            tracing::debug!(image, error = %chain(&error), "stop signal");
            String::new()
        }
    };
    signal_number(&config).unwrap_or(libc::SIGTERM)
}

/// `SIGTERM`, `TERM`, `15`, `SIGRTMIN+3`. None: empty, or no signal.
fn signal_number(text: &str) -> Option<i32> {
    if let Ok(number) = text.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    for (base, first) in [("RTMIN", 34), ("RTMAX", 64)] {
        if let Some(offset) = name.strip_prefix(base) {
            let offset: i32 = if offset.is_empty() { 0 } else { offset.parse().ok()? };
            let number = first + offset;
            return (34..=64).contains(&number).then_some(number);
        }
    }
    format!("SIG{name}").parse::<nix::sys::signal::Signal>().ok().map(|signal| signal as i32)
}

pub(super) fn kill(rooms: &Rooms, uid: &PodUid, targets: &[(String, ContainerId)]) -> Result<Outcome, Failed> {
    let mut failed = None;
    for (_, id) in targets {
        if let Err(error) = rooms.runtime.kill_container(uid, id) {
            failed.get_or_insert(Failed::new(FailReason::Kill, &error));
        }
    }
    failed.map_or(Ok(Outcome::Done), Err)
}

pub(super) fn remove(
    rooms: &Rooms,
    job: &Job,
    uid: &PodUid,
    name: &str,
    number: u32,
    id: &ContainerId,
) -> Result<Outcome, Failed> {
    match rooms.runtime.remove_container(uid, id) {
        // Its sandbox took it along.
        Ok(()) | Err(RuntimeError::NoSandbox { .. } | RuntimeError::NoContainer { .. }) => {}
        Err(error) => return Err(Failed::new(FailReason::Kill, &error)),
    }
    let roots = &rooms.config.roots;
    remove_tree(&roots.container_dir(id.as_str()))?;
    let link = roots.log_link(&job.namespace, &job.name, name, id.as_str());
    absent_is_fine("remove", &link, fs::remove_file(&link))?;
    let dir = roots.pod_logs(&job.namespace, &job.name, uid.as_str()).join(name);
    // The same attempt in a sandbox that was made anew goes on with the same log.
    let kept = job.attempts.iter().any(|a| a.container == name && a.number == number && a.id != *id);
    let Ok(entries) = fs::read_dir(&dir) else { return Ok(Outcome::Done) }; // it never wrote a log
    let prefix = format!("{number}.log");
    for entry in entries.flatten() {
        // The live file and its rotated ones: `3.log`, `3.log.20261130-102301`.
        let ours = entry.file_name().to_str().is_some_and(|n| n == prefix || n.starts_with(&format!("{prefix}.")));
        if ours && !kept {
            let path = entry.path();
            absent_is_fine("remove", &path, fs::remove_file(&path))?;
        }
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signals_are_read_in_every_form_that_images_use() {
        for (text, number) in
            [("SIGTERM", 15), ("15", 15), ("quit", 3), ("SIGRTMIN+3", 37), ("RTMAX", 64), ("SIGRTMAX-1", 63), ("SIGKILL", 9)]
        {
            assert_eq!(signal_number(text), Some(number), "{text}");
        }
        for bad in ["", "0", "65", "SIGNOPE", "RTMIN+99", "-1"] {
            assert_eq!(signal_number(bad), None, "{bad}");
        }
    }
}
