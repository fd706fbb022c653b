//! One pod as a line of `coracle pods`: kubectl's READY, STATUS and RESTARTS, by its rules
//! (printPod in kubernetes/pkg/printers/internalversion). Pure.

use super::table;
use crate::api::status::{ContainerState, ContainerStatus, PodStatus};
use crate::api::time::WallTime;
use crate::kubelet::server::model::PodView;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub ready: String,
    pub status: String,
    pub restarts: String,
    pub age: String,
    pub ip: String,
}

pub fn row(pod: &PodView, now: WallTime) -> Row {
    let status = &pod.status;
    let mut restarts: u32 = status.init_container_statuses.iter().map(|c| c.restart_count).sum();
    let mut last = latest_end(&status.init_container_statuses);
    let init_total = pod.containers.iter().filter(|c| c.init).count();
    let mut text = first_of(&[&status.reason, &status.phase, "Unknown"]);
    let mut ready = 0;
    let initializing = init_status(status, init_total);
    let initialized = condition(status, "Initialized");
    match initializing {
        Some(init) if !initialized => text = init,
        _ => {
            restarts = status.container_statuses.iter().map(|c| c.restart_count).sum();
            last = latest_end(&status.container_statuses);
            let mut running = false;
            // From the last to the first, so that the first one that has something to say wins.
            for container in status.container_statuses.iter().rev() {
                match &container.state {
                    ContainerState { waiting: Some(waiting), .. } if !waiting.reason.is_empty() => text = waiting.reason.clone(),
                    ContainerState { terminated: Some(end), .. } => {
                        text = match (&end.reason, end.signal) {
                            (reason, _) if !reason.is_empty() => reason.clone(),
                            (_, Some(signal)) if signal != 0 => format!("Signal:{signal}"),
                            _ => format!("ExitCode:{}", end.exit_code),
                        };
                    }
                    ContainerState { running: Some(_), .. } if container.ready => {
                        running = true;
                        ready += 1;
                    }
                    _ => {}
                }
            }
            if text == "Completed" && running {
                text = if condition(status, "Ready") { "Running" } else { "NotReady" }.to_owned();
            }
        }
    }
    if pod.deletion.is_some() && !matches!(status.phase.as_str(), "Succeeded" | "Failed") {
        "Terminating".clone_into(&mut text);
    }
    let total = pod.containers.iter().filter(|c| !c.init).count();
    Row {
        ready: format!("{ready}/{total}"),
        status: text,
        restarts: match last {
            Some(at) if restarts > 0 => format!("{restarts} ({} ago)", table::age(now.0 - at.0)),
            _ => restarts.to_string(),
        },
        age: status.start_time.as_deref().and_then(WallTime::parse).map_or("<unknown>".into(), |at| table::age(now.0 - at.0)),
        ip: status.pod_ip.clone(),
    }
}

/// `Init:…` while an init container has not ended well.
fn init_status(status: &PodStatus, total: usize) -> Option<String> {
    for (n, container) in status.init_container_statuses.iter().enumerate() {
        return Some(match &container.state {
            ContainerState { terminated: Some(end), .. } if end.exit_code == 0 => continue,
            ContainerState { terminated: Some(end), .. } => match (&end.reason, end.signal) {
                (reason, _) if !reason.is_empty() => format!("Init:{reason}"),
                (_, Some(signal)) if signal != 0 => format!("Init:Signal:{signal}"),
                _ => format!("Init:ExitCode:{}", end.exit_code),
            },
            ContainerState { waiting: Some(waiting), .. } if !matches!(waiting.reason.as_str(), "" | "PodInitializing") => {
                format!("Init:{}", waiting.reason)
            }
            _ => format!("Init:{n}/{total}"),
        });
    }
    None
}

/// What people need to read below the table about this pod: why it waits, how it last ended, what
/// is not honoured.
pub fn notes(pod: &PodView) -> Vec<String> {
    let mut notes = Vec::new();
    let status = &pod.status;
    if !status.message.is_empty() {
        notes.push(format!("{}: {}", first_of(&[&status.reason, &status.phase]), status.message));
    }
    for container in status.init_container_statuses.iter().chain(&status.container_statuses) {
        if let Some(waiting) = &container.state.waiting
            && !waiting.message.is_empty()
        {
            notes.push(format!("container {}: {}: {}", container.name, waiting.reason, waiting.message));
        }
        if let Some(end) = container.state.terminated.as_ref().or(container.last_state.terminated.as_ref())
            && (end.exit_code != 0 || end.reason == "OOMKilled")
        {
            let message = if end.message.is_empty() { String::new() } else { format!(": {}", end.message.trim_end()) };
            notes.push(format!("container {}: ended with {} ({}){message}", container.name, end.exit_code, end.reason));
        }
    }
    notes.extend(pod.problems.iter().cloned());
    notes.extend(pod.warnings.iter().map(|warning| format!("warning: {warning}")));
    notes
}

fn condition(status: &PodStatus, kind: &str) -> bool {
    status.conditions.iter().any(|c| c.kind == kind && c.status == "True")
}

fn latest_end(containers: &[ContainerStatus]) -> Option<WallTime> {
    let ends = containers.iter().filter_map(|c| c.last_state.terminated.as_ref()?.finished_at.as_deref());
    ends.filter_map(WallTime::parse).max()
}

fn first_of(texts: &[&str]) -> String {
    texts.iter().find(|text| !text.is_empty()).copied().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::server::model::ContainerView;

    /// A pod with one container and, where the status has one, one init container.
    fn pod(status: &str) -> PodView {
        let status: PodStatus = serde_json::from_str(status).unwrap();
        let mut containers = vec![ContainerView { name: "app".into(), ..ContainerView::default() }];
        if !status.init_container_statuses.is_empty() {
            containers.insert(0, ContainerView { name: "init".into(), init: true, ..ContainerView::default() });
        }
        PodView { namespace: "default".into(), name: "web".into(), containers, status, ..PodView::default() }
    }

    fn shown(pod: &PodView) -> (String, String, String) {
        let row = row(pod, WallTime::parse("2026-11-30T10:10:00Z").unwrap());
        (row.ready, row.status, row.restarts)
    }

    fn is(status: &str, expected: (&str, &str, &str)) {
        let (ready, text, restarts) = shown(&pod(status));
        assert_eq!((ready.as_str(), text.as_str(), restarts.as_str()), expected, "{status}");
    }

    #[test]
    fn kubectls_words() {
        is(
            r#"{"phase":"Running","conditions":[{"type":"Ready","status":"True"}],
               "containerStatuses":[{"ready":true,"state":{"running":{}}}]}"#,
            ("1/1", "Running", "0"),
        );
        is(
            r#"{"phase":"Pending","containerStatuses":[{"state":{"waiting":{"reason":"ContainerCreating"}}}]}"#,
            ("0/1", "ContainerCreating", "0"),
        );
        is(
            r#"{"phase":"Running","containerStatuses":[{"restartCount":3,"state":{"waiting":{"reason":"CrashLoopBackOff"}},
               "lastState":{"terminated":{"exitCode":1,"finishedAt":"2026-11-30T10:05:00Z"}}}]}"#,
            ("0/1", "CrashLoopBackOff", "3 (5m ago)"),
        );
        is(
            r#"{"phase":"Succeeded","containerStatuses":[{"state":{"terminated":{"exitCode":0,"reason":"Completed"}}}]}"#,
            ("0/1", "Completed", "0"),
        );
        is(r#"{"phase":"Failed","reason":"DeadlineExceeded","containerStatuses":[]}"#, ("0/1", "DeadlineExceeded", "0"));
        is(
            r#"{"phase":"Failed","containerStatuses":[{"state":{"terminated":{"exitCode":137,"signal":9,"reason":""}}}]}"#,
            ("0/1", "Signal:9", "0"),
        );
    }

    #[test]
    fn init_containers_come_first() {
        let waiting = r#""containerStatuses":[{"state":{"waiting":{"reason":"PodInitializing"}}}]"#;
        is(
            &format!(r#"{{"phase":"Pending","initContainerStatuses":[{{"state":{{"running":{{}}}}}}],{waiting}}}"#),
            ("0/1", "Init:0/1", "0"),
        );
        is(
            &format!(
                r#"{{"phase":"Pending","initContainerStatuses":[{{"restartCount":2,"state":{{"waiting":{{"reason":"CrashLoopBackOff"}}}}}}],{waiting}}}"#
            ),
            ("0/1", "Init:CrashLoopBackOff", "2"),
        );
        is(
            &format!(
                r#"{{"phase":"Pending","initContainerStatuses":[{{"state":{{"terminated":{{"exitCode":1,"reason":"Error"}}}}}}],{waiting}}}"#
            ),
            ("0/1", "Init:Error", "0"),
        );
        is(
            &format!(
                r#"{{"phase":"Pending","initContainerStatuses":[{{"state":{{"terminated":{{"exitCode":0,"reason":"Completed"}}}}}}],{waiting}}}"#
            ),
            ("0/1", "PodInitializing", "0"),
        );
    }

    #[test]
    fn a_pod_that_ends_is_terminating_unless_it_has_ended() {
        let running = r#"{"phase":"Running","containerStatuses":[{"ready":true,"state":{"running":{}}}]}"#;
        let ending = PodView { deletion: Some("2026-11-30T10:09:00Z".into()), ..pod(running) };
        assert_eq!(shown(&ending).1, "Terminating");
        let done = r#"{"phase":"Succeeded","containerStatuses":[{"state":{"terminated":{"exitCode":0,"reason":"Completed"}}}]}"#;
        let ended = PodView { deletion: Some("2026-11-30T10:09:00Z".into()), ..pod(done) };
        assert_eq!(shown(&ended).1, "Completed");
    }

    #[test]
    fn notes_say_why_and_what_is_not_honoured() {
        let mut view = pod(r#"{"phase":"Pending","containerStatuses":[{"name":"app","state":{"waiting":
               {"reason":"ImagePullBackOff","message":"Back-off pulling image \"x\""}}}]}"#);
        view.warnings.push("spec.containers[0].livenessProbe: not honoured".into());
        assert_eq!(
            notes(&view),
            [
                "container app: ImagePullBackOff: Back-off pulling image \"x\"",
                "warning: spec.containers[0].livenessProbe: not honoured"
            ]
        );
    }
}
