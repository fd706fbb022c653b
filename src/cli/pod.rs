//! `coracle pod plan`: what the planner would do, without doing any of it.

use std::path::Path;
use std::sync::Arc;

use super::args::{Body, Flag, Given, NO_OPERANDS, OUTPUT, Output, Verb};
use super::exit::{CliError, Exit};
use crate::api::pod::Pod;
use crate::api::yaml;
use crate::kubelet::model::{Desired, Now, Observed, SECOND};
use crate::kubelet::plan::{self, admit};
use crate::kubelet::status::render;
use crate::kubelet::{defaults, validate};
use crate::store::atomic;
use crate::store::ids::PodUid;

const DESIRED: Flag =
    Flag { long: "desired", short: None, value: Some("FILE"), help: "Pods that are wanted, YAML or JSON; may be left out" };
const OBSERVED: Flag =
    Flag { long: "observed", short: None, value: Some("FILE"), help: "what is there, as JSON (default: nothing)" };
const NOW: Flag =
    Flag { long: "now", short: None, value: Some("SECONDS"), help: "time since boot, fractions allowed (default: 0)" };
const STOPPING: Flag = Flag { long: "stopping", short: None, value: None, help: "the node was told to stop all pods" };
const INCOMPLETE: Flag =
    Flag { long: "incomplete", short: None, value: None, help: "the wanted set may lack pods, so nothing may end" };

pub const PLAN: Verb = Verb {
    name: "pod plan",
    operands: NO_OPERANDS,
    command: false,
    summary: "",
    about: "Prints the actions that are due for the given pods, observations and time, and the time of the next one. \
            Touches nothing. A wanted pod's uid is its metadata.uid, or its name.",
    flags: &[&DESIRED, &OBSERVED, &NOW, &STOPPING, &INCOMPLETE, &OUTPUT],
    examples: &["coracle pod plan --desired pod.yaml", "coracle pod plan --desired pod.yaml --observed obs.json --now 12.5"],
    body: Body::Parsed(run),
};

const MAX_FILE: u64 = 4 << 20;

fn run(given: &Given) -> Result<Exit, CliError> {
    let mut desired =
        Desired { complete: !given.has(&INCOMPLETE), stopping: given.has(&STOPPING), stop_grace: 60, ..Desired::default() };
    if let Some(path) = given.path(&DESIRED) {
        for pod in pods(path)? {
            let uid = if pod.metadata.uid.is_empty() { &pod.metadata.name } else { &pod.metadata.uid };
            let uid = PodUid::parse(uid).map_err(|e| CliError::because(format!("pod {}", pod.metadata.name), e))?;
            desired.pods.insert(uid, Arc::new(pod));
        }
    }
    let mut observed = match given.path(&OBSERVED) {
        Some(path) => serde_json::from_slice::<Observed>(&read(path)?)
            .map_err(|e| CliError::because(format!("read {}", path.display()), e))?,
        None => Observed::default(),
    };
    // A pod that is wanted as it is there need not be written down twice.
    for (uid, state) in &mut observed.pods {
        if state.pod.is_none() {
            state.pod = desired.pods.get(uid).map(Arc::clone);
        }
        if let (Some(pod), true) = (&state.pod, state.name.is_empty()) {
            state.name.clone_from(&pod.metadata.name);
            state.namespace.clone_from(&pod.metadata.namespace);
        }
    }
    let seconds: f64 = given.parse(&NOW, "seconds")?.unwrap_or(0.0);
    // Saturates, and NaN is 0.
    let boot = (seconds * SECOND as f64) as i64;
    let now = Now { boot, wall: boot };
    let plan = plan::plan(&desired, &observed, now);
    let wake = plan.wake.map(|at| at as f64 / SECOND as f64);
    let text = match given.output()? {
        Output::Json => {
            let actions: Vec<String> = plan.actions.iter().map(ToString::to_string).collect();
            let phases: std::collections::BTreeMap<String, _> = statuses(&desired, &observed, now).into_iter().collect();
            let value = serde_json::json!({ "actions": actions, "wake": wake, "statuses": phases });
            format!("{value}\n")
        }
        Output::Table | Output::Wide => {
            let mut text: String = plan.actions.iter().map(|action| format!("{action}\n")).collect();
            for (uid, verdict) in admit::verdicts(&desired, &observed) {
                match verdict {
                    admit::Verdict::Admit => {}
                    admit::Verdict::Wait { message } => text += &format!("# {uid} waits: {message}\n"),
                    admit::Verdict::Reject { reason, message } => text += &format!("# {uid} is rejected: {reason}: {message}\n"),
                }
            }
            match wake {
                Some(at) => text += &format!("# next at {at} s\n"),
                None => text += "# nothing is due by itself\n",
            }
            text
        }
    };
    super::print(&text)?;
    Ok(Exit::Ok)
}

fn statuses(desired: &Desired, observed: &Observed, now: Now) -> Vec<(String, crate::api::status::PodStatus)> {
    let here = observed.pods.iter().filter_map(|(uid, state)| {
        let pod = state.pod.as_deref()?;
        Some((uid.to_string(), render::pod_status(uid, pod, state, &desired.node, now)))
    });
    let there = admit::verdicts(desired, observed).into_iter().filter_map(|(uid, verdict)| {
        Some((uid.to_string(), render::unadmitted(desired.pods.get(uid)?, &verdict, &desired.node)))
    });
    here.chain(there).collect()
}

fn pods(path: &Path) -> Result<Vec<Pod>, CliError> {
    let text = read(path)?;
    let mut pods = Vec::new();
    for document in yaml::documents(&text, yaml::Limits::default()) {
        let node = document.map_err(|e| CliError::because(path.display().to_string(), e))?;
        if node.is_null() {
            continue;
        }
        let (mut pod, _) = node.read::<Pod>().map_err(|e| CliError::because(path.display().to_string(), e))?;
        defaults::pod(&mut pod);
        if let Some(first) = validate::pod(&pod).into_iter().next() {
            return Err(CliError::because(format!("{}: pod {}", path.display(), pod.metadata.name), first));
        }
        pods.push(pod);
    }
    Ok(pods)
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    atomic::read_bounded(path, MAX_FILE)
        .map_err(|e| CliError::because(format!("read {}", path.display()), e))?
        .ok_or_else(|| CliError::NotFound(format!("{}: no such file", path.display())))
}
