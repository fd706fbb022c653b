//! `coracle pods`: what runs here and why something does not.

use std::io::Write;

use serde_json::{Map, Value};

use super::args::{Body, Flag, Given, INSTANCE, NAMESPACE, OUTPUT, Operands, Output, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{pod_row, print, table};
use crate::api::time::WallTime;
use crate::kubelet::server::model::{Answer, Ask, PodView, PodsAsk, ProblemView};
use crate::sys::clock;

const ALL: Flag = Flag { long: "all-namespaces", short: Some('A'), value: None, help: "pods of every namespace (the default)" };

pub const VERB: Verb = Verb {
    name: "pods",
    operands: Operands { text: "[POD]", min: 0, max: 1 },
    command: false,
    summary: "list the pods of this node, their state and their troubles",
    about: "Lists pods with the columns of `kubectl get pods`; below the table stands why something waits or has failed, what \
            in the manifests cannot be read, and which fields are not honoured. `-o json` prints a v1 PodList with full status. \
            POD is a name, namespace/name or a uid; with one that is not here the exit code is 4.",
    flags: &[&NAMESPACE, &ALL, &OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle pods", "coracle pods -n kube-system -o wide", "coracle pods -o json default/web"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let filter = Filter::of(given)?;
    let ask = PodsAsk { manifests: output != Output::Table, processes: false };
    let (pods, problems) = fetch(Client::connect(&given.roots()?)?, ask)?;
    let pods: Vec<PodView> = pods.into_iter().filter(|pod| filter.takes(pod)).collect();
    if pods.is_empty() && filter.name.is_some() {
        return Err(CliError::NotFound(format!("no pod {} on this node", given.operand(0)?.unwrap_or_default())));
    }
    match output {
        Output::Table => print(&text(&pods, &problems, false, WallTime(clock::wall_nanos())))?,
        Output::Wide => print(&text(&pods, &problems, true, WallTime(clock::wall_nanos())))?,
        Output::Json => {
            json(pods)?;
            for problem in &problems {
                eprintln!("{}", table::clean(&problem_line(problem)));
            }
        }
    }
    Ok(Exit::Ok)
}

/// Every pod and problem that the agent knows of.
pub fn fetch(client: Client, ask: PodsAsk) -> Result<(Vec<PodView>, Vec<ProblemView>), CliError> {
    let mut answers = client.ask(Ask::Pods(ask))?;
    let (mut pods, mut problems) = (Vec::new(), Vec::new());
    while let Some(answer) = answers.next()? {
        match answer {
            Answer::Pod(pod) => pods.push(*pod),
            Answer::Problem(problem) => problems.push(problem),
            // A newer agent may tell more than was asked for.
            _ => {}
        }
    }
    Ok((pods, problems))
}

/// Which pods are meant.
pub struct Filter {
    namespace: Option<String>,
    name: Option<String>,
}

impl Filter {
    fn of(given: &Given) -> Result<Filter, CliError> {
        let mut namespace = given.text(&NAMESPACE)?.filter(|_| !given.has(&ALL)).map(str::to_owned);
        let mut name = given.operand(0)?.map(str::to_owned);
        if let Some((space, short)) = name.clone().as_deref().and_then(|n| n.split_once('/')) {
            namespace = Some(space.to_owned());
            name = Some(short.to_owned());
        }
        Ok(Filter { namespace, name })
    }

    fn takes(&self, pod: &PodView) -> bool {
        self.namespace.as_ref().is_none_or(|n| *n == pod.namespace)
            && self.name.as_ref().is_none_or(|n| *n == pod.name || *n == pod.uid)
    }
}

/// The pod that an operand and `-n` mean: namespace and name.
pub fn named(given: &Given) -> Result<(String, String), CliError> {
    let operand = given.operand(0)?.unwrap_or_default();
    let namespace = given.text(&NAMESPACE)?;
    let (space, name) = match operand.split_once('/') {
        Some((space, _)) if namespace.is_some_and(|n| n != space) => {
            return Err(CliError::Usage(format!("\"{operand}\" and --namespace {} differ", namespace.unwrap_or_default())));
        }
        Some(both) => both,
        None => (namespace.unwrap_or("default"), operand),
    };
    // These become path components when logs are read without the agent.
    let plain = |text: &str| !text.is_empty() && !text.starts_with('.') && !text.contains(['/', '_']);
    if !plain(space) || !plain(name) {
        return Err(CliError::Usage(format!("\"{operand}\" is no pod: expected NAME or NAMESPACE/NAME")));
    }
    Ok((space.to_owned(), name.to_owned()))
}

fn text(pods: &[PodView], problems: &[ProblemView], wide: bool, now: WallTime) -> String {
    let mut titles = vec!["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP"];
    if wide {
        titles.extend(["IPS", "QOS", "IMAGES", "FROM", "UID"]);
    }
    let rows: Vec<Vec<String>> = pods
        .iter()
        .map(|pod| {
            let row = pod_row::row(pod, now);
            let mut cells = vec![pod.namespace.clone(), pod.name.clone(), row.ready, row.status, row.restarts, row.age, row.ip];
            if wide {
                let list = |texts: Vec<&str>| texts.join(",");
                cells.push(list(pod.status.pod_ips.iter().map(|ip| ip.ip.as_str()).collect()));
                cells.push(pod.status.qos_class.clone());
                cells.push(list(pod.status.container_statuses.iter().map(|c| c.image.as_str()).collect()));
                cells.push(pod.origin.clone());
                cells.push(pod.uid.clone());
            }
            cells
        })
        .collect();
    let mut out = if pods.is_empty() { "no pods\n".to_owned() } else { table::render(&titles, &rows) };
    let notes: Vec<String> = pods
        .iter()
        .flat_map(|pod| pod_row::notes(pod).into_iter().map(move |note| format!("{}/{}: {note}", pod.namespace, pod.name)))
        .chain(problems.iter().map(problem_line))
        .collect();
    if !notes.is_empty() {
        out.push('\n');
    }
    for note in notes {
        out.push_str(&table::clean(&note));
        out.push('\n');
    }
    out
}

fn problem_line(problem: &ProblemView) -> String {
    let mut line = problem.place.clone();
    for part in [&problem.pod, &problem.object, &problem.field] {
        if !part.is_empty() {
            line.push_str(", ");
            line.push_str(part);
        }
    }
    line.push_str(": ");
    line.push_str(&problem.message);
    if problem.kept {
        line.push_str(" (the last good version runs on)");
    }
    line
}

/// A v1 PodList, one item a line.
fn json(pods: Vec<PodView>) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    let mut write = |text: &str| out.write_all(text.as_bytes()).map_err(CliError::Stdout);
    write("{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"metadata\":{},\"items\":[")?;
    for (n, pod) in pods.into_iter().enumerate() {
        write(if n == 0 { "\n" } else { ",\n" })?;
        write(&object(pod)?.to_string())?;
    }
    write("\n]}\n")?;
    out.flush().map_err(CliError::Stdout)
}

/// The v1 Pod: its manifest, what the node adds to its metadata, its status.
pub fn object(pod: PodView) -> Result<Value, CliError> {
    let manifest = pod.manifest.as_ref().map_or("{}", |raw| raw.get());
    let mut object: Map<String, Value> = serde_json::from_str(manifest).map_err(CliError::Answer)?;
    object.insert("apiVersion".into(), "v1".into());
    object.insert("kind".into(), "Pod".into());
    let metadata = object.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if let Value::Object(metadata) = metadata {
        metadata.insert("name".into(), pod.name.into());
        metadata.insert("namespace".into(), pod.namespace.into());
        metadata.insert("uid".into(), pod.uid.into());
        if let Some(start) = &pod.status.start_time {
            metadata.entry("creationTimestamp").or_insert_with(|| start.clone().into());
        }
        if let Some(deletion) = pod.deletion {
            metadata.insert("deletionTimestamp".into(), deletion.into());
        }
    }
    object.insert("status".into(), serde_json::to_value(&pod.status).map_err(CliError::Answer)?);
    Ok(Value::Object(object))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::server::model::ContainerView;

    fn web() -> PodView {
        PodView {
            uid: "0a".into(),
            namespace: "default".into(),
            name: "web".into(),
            containers: vec![ContainerView { name: "app".into(), ..ContainerView::default() }],
            manifest: Some(serde_json::from_str(r#"{"metadata":{"name":"web","labels":{"a":"b"}},"spec":{"containers":[{"name":"app","image":"x","livenessProbe":{}}]}}"#).unwrap()),
            status: serde_json::from_str(r#"{"phase":"Running","startTime":"2026-11-30T10:00:00Z","podIP":"10.88.0.2"}"#).unwrap(),
            ..PodView::default()
        }
    }

    #[test]
    fn the_table_and_the_troubles_below_it() {
        let problem = ProblemView {
            place: "bad.yaml document 1 line 7:3".into(),
            pod: "default/bad".into(),
            object: String::new(),
            field: "spec.containers[0].name".into(),
            message: "is required".into(),
            kept: true,
        };
        let now = WallTime::parse("2026-11-30T10:05:00Z").unwrap();
        assert_eq!(
            text(&[web()], &[problem], false, now),
            "NAMESPACE  NAME  READY  STATUS   RESTARTS  AGE  IP\n\
             default    web   0/1    Running  0         5m   10.88.0.2\n\
             \n\
             bad.yaml document 1 line 7:3, default/bad, spec.containers[0].name: is required (the last good version runs on)\n"
        );
    }

    #[test]
    fn an_item_is_a_v1_pod_with_every_field_of_its_manifest() {
        let object = object(web()).unwrap();
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(pod.metadata.uid.as_deref(), Some("0a"));
        assert_eq!(pod.status.unwrap().pod_ip.as_deref(), Some("10.88.0.2"));
        assert!(pod.metadata.creation_timestamp.is_some());
        assert_eq!(object["metadata"]["labels"]["a"], "b");
        assert!(object["spec"]["containers"][0]["livenessProbe"].is_object(), "a field that we do not honour is still shown");
    }
}
