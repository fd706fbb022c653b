//! `coracle services`: what each Service is, and where its connections go now.

use std::collections::BTreeSet;

use super::args::{Body, Given, INSTANCE, NO_OPERANDS, OUTPUT, Output, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{print, table};
use crate::kubelet::server::model::{Answer, Ask, PortView, ServiceView};

pub const VERB: Verb = Verb {
    name: "services",
    operands: NO_OPERANDS,
    command: false,
    summary: "list the Services of this node and where their connections go",
    about: "Lists every Service with its addresses, its ports and the endpoints that take its connections now. Below the \
            table stands what is not served, and why.",
    flags: &[&OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle services", "coracle services -o wide", "coracle services -o json"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let mut answers = Client::connect(&given.roots()?)?.ask(Ask::Services {})?;
    let mut services = Vec::new();
    while let Some(answer) = answers.next()? {
        // A newer agent may tell more than was asked for.
        if let Answer::Service(service) = answer {
            services.push(*service);
        }
    }
    match output {
        Output::Json => print(&format!("{}\n", serde_json::to_string_pretty(&services).map_err(CliError::Answer)?))?,
        Output::Table | Output::Wide => print(&text(&services, output == Output::Wide))?,
    }
    Ok(Exit::Ok)
}

/// Endpoints that a row shows before it only counts them.
const SHOWN: usize = 3;

fn text(services: &[ServiceView], wide: bool) -> String {
    if services.is_empty() {
        return "no services\n".to_owned();
    }
    let rows: Vec<Vec<String>> = services.iter().map(|service| row(service, wide)).collect();
    let mut out = table::render(&["NAMESPACE", "NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "ENDPOINTS"], &rows);
    let mut notes = services.iter().flat_map(|s| &s.skipped).peekable();
    if notes.peek().is_some() {
        out.push('\n');
    }
    for note in notes {
        out.push_str(&table::clean(note));
        out.push('\n');
    }
    out
}

fn row(service: &ServiceView, wide: bool) -> Vec<String> {
    let external = if service.external_name.is_empty() { service.external_ips.join(",") } else { service.external_name.clone() };
    vec![
        service.namespace.clone(),
        service.name.clone(),
        service.kind.clone(),
        service.cluster_ips.join(","),
        external,
        service.ports.iter().map(port).collect::<Vec<_>>().join(","),
        endpoints(&service.ports, wide),
    ]
}

/// `80:30080/TCP`, as kubectl writes it.
fn port(port: &PortView) -> String {
    let node = if port.node_port == 0 { String::new() } else { format!(":{}", port.node_port) };
    format!("{}{node}/{}", port.port, port.protocol)
}

fn endpoints(ports: &[PortView], wide: bool) -> String {
    let mut seen = BTreeSet::new();
    let all: Vec<&str> = ports.iter().flat_map(|p| &p.endpoints).map(String::as_str).filter(|e| seen.insert(*e)).collect();
    let shown = if wide { all.len() } else { SHOWN };
    let more = all.len().saturating_sub(shown);
    let mut text = all.iter().take(shown).copied().collect::<Vec<_>>().join(",");
    if more > 0 {
        text.push_str(&format!(" + {more} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_a_service_and_what_is_not_served_below() {
        let port = |port, node_port, endpoints: &[&str]| PortView {
            protocol: "TCP".into(),
            port,
            node_port,
            endpoints: endpoints.iter().map(|e| (*e).to_owned()).collect(),
            ..PortView::default()
        };
        let web = ServiceView {
            namespace: "default".into(),
            name: "web".into(),
            kind: "NodePort".into(),
            cluster_ips: vec!["10.96.9.9".into()],
            ports: vec![port(80, 30080, &["10.88.0.2:80", "10.88.0.3:80", "10.88.0.4:80", "10.88.0.5:80"]), port(81, 0, &[])],
            skipped: vec!["Service default/web, spec.ports[1].targetPort: pod default/a has no TCP port named \"x\"".into()],
            ..ServiceView::default()
        };
        let far = ServiceView {
            namespace: "default".into(),
            name: "far".into(),
            kind: "ExternalName".into(),
            external_name: "example.com".into(),
            ..ServiceView::default()
        };
        assert_eq!(
            text(&[far, web.clone()], false),
            "NAMESPACE  NAME  TYPE          CLUSTER-IP  EXTERNAL-IP  PORT(S)              ENDPOINTS\n\
             default    far   ExternalName  <none>      example.com  <none>               <none>\n\
             default    web   NodePort      10.96.9.9   <none>       80:30080/TCP,81/TCP  10.88.0.2:80,10.88.0.3:80,10.88.0.4:80 + 1 more\n\
             \n\
             Service default/web, spec.ports[1].targetPort: pod default/a has no TCP port named \"x\"\n"
        );
        assert!(text(&[web], true).contains("10.88.0.4:80,10.88.0.5:80\n"));
        // As many as a Service of 100 ports and 1,000 endpoints has, in no more time than they take.
        let many = ServiceView {
            ports: (0..100)
                .map(|n| PortView { endpoints: (0..1000).map(|i| format!("10.88.{n}.{i}:80")).collect(), ..port(n, 0, &[]) })
                .collect(),
            ..ServiceView::default()
        };
        assert!(text(&[many], false).contains("10.88.0.2:80 + 99997 more"));
        assert_eq!(text(&[], false), "no services\n");
    }
}
