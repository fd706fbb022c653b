//! `coracle inspect`: one pod, container or image as JSON.

use serde_json::{Value, json};

use super::args::{Body, Given, INSTANCE, NAMESPACE, Operands, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{pods, print};
use crate::kubelet::server::model::{Answer, Ask, AttemptView, ContainerView, ImageView, PodView, PodsAsk};

pub const VERB: Verb = Verb {
    name: "inspect",
    operands: Operands { text: "POD|CONTAINER|IMAGE", min: 1, max: 1 },
    command: false,
    summary: "tell everything about a pod, a container or an image",
    about: "Prints JSON: of a pod its v1 object, its monitor's pid and its containers' pids, ids and log files; of a container \
            (id, or the first digits of it, coracle:// or not) the same for that one; of an image its names, digests and size. A \
            name is looked for in this order: pod, container id, image.",
    flags: &[&NAMESPACE, &ROOT, &INSTANCE],
    examples: &["coracle inspect web", "coracle inspect coracle://3f2a", "coracle inspect busybox:1.36"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let roots = given.roots()?;
    let name = given.operand(0)?.unwrap_or_default();
    let namespace = given.text(&NAMESPACE)?;
    let ask = PodsAsk { manifests: true, processes: true };
    let (all, _) = pods::fetch(Client::connect(&roots)?, ask)?;
    let found = match pod(&all, name, namespace)? {
        Some(pod) => Some(of_pod(pod.clone())?),
        None => match container(&all, name)? {
            Some((pod, container, attempt)) => Some(of_container(pod, container, attempt)),
            None => image(Client::connect(&roots)?, name)?.map(|image| json!({ "image": image })),
        },
    };
    let Some(found) = found else {
        return Err(CliError::NotFound(format!("no pod, container or image \"{name}\" on this node")));
    };
    print(&format!("{found:#}\n"))?;
    Ok(Exit::Ok)
}

fn pod<'a>(all: &'a [PodView], name: &str, namespace: Option<&str>) -> Result<Option<&'a PodView>, CliError> {
    let (space, short) = match name.split_once('/') {
        Some((space, short)) => (Some(space), short),
        None => (namespace, name),
    };
    let hits: Vec<&PodView> =
        all.iter().filter(|p| space.is_none_or(|s| s == p.namespace) && p.name == short || p.uid == name).collect();
    match hits.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        many => {
            let names: Vec<String> = many.iter().map(|p| format!("{}/{}", p.namespace, p.name)).collect();
            Err(CliError::Usage(format!("\"{name}\" may be {}: name one", names.join(" or "))))
        }
    }
}

type Found<'a> = (&'a PodView, &'a ContainerView, &'a AttemptView);

fn container<'a>(all: &'a [PodView], name: &str) -> Result<Option<Found<'a>>, CliError> {
    let id = name.strip_prefix("coracle://").unwrap_or(name);
    if id.len() < 4 || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(None);
    }
    let mut hits = all.iter().flat_map(|pod| {
        pod.containers.iter().flat_map(move |container| {
            [&container.current, &container.previous].into_iter().flatten().map(move |attempt| (pod, container, attempt))
        })
    });
    let mut hits = hits.by_ref().filter(|(_, _, attempt)| attempt.id.starts_with(id));
    let first = hits.next();
    if hits.next().is_some() {
        return Err(CliError::Usage(format!("more than one container id begins with {id}: give more of it")));
    }
    Ok(first)
}

fn image(client: Client, name: &str) -> Result<Option<ImageView>, CliError> {
    let wanted = crate::images::reference::normalize(name).map(|r| r.to_string()).unwrap_or_default();
    let mut answers = client.ask(Ask::Images {})?;
    let mut found = None;
    while let Some(answer) = answers.next()? {
        if let Answer::Image(image) = answer {
            let id = image.id.trim_start_matches("sha256:");
            let short = name.trim_start_matches("sha256:");
            if image.tags.contains(&wanted) || image.digests.contains(&wanted) || (short.len() >= 4 && id.starts_with(short)) {
                found = Some(image);
            }
        }
    }
    Ok(found)
}

fn of_pod(mut pod: PodView) -> Result<Value, CliError> {
    let containers = std::mem::take(&mut pod.containers);
    let (monitor, origin) = (pod.monitor, pod.origin.clone());
    let (warnings, problems) = (std::mem::take(&mut pod.warnings), std::mem::take(&mut pod.problems));
    Ok(json!({
        "pod": pods::object(pod)?,
        "origin": origin,
        "monitor": monitor,
        "containers": containers,
        "warnings": warnings,
        "problems": problems,
    }))
}

fn of_container(pod: &PodView, container: &ContainerView, attempt: &AttemptView) -> Value {
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let status = statuses.filter(|s| s.name == container.name).map(|s| json!(s)).next();
    json!({
        "pod": format!("{}/{}", pod.namespace, pod.name),
        "podUid": pod.uid,
        "name": container.name,
        "init": container.init,
        "attempt": attempt,
        "status": status,
    })
}
