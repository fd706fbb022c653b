//! `coracle policies`: which NetworkPolicies isolate a pod, and what they allow.

use super::args::{Body, Given, INSTANCE, OUTPUT, Operands, Output, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{print, table};
use crate::kubelet::server::model::{Answer, Ask, DirectionView, PolicyView};

pub const VERB: Verb = Verb {
    name: "policies",
    operands: Operands { text: "POD", min: 1, max: 1 },
    command: false,
    summary: "tell which NetworkPolicies isolate a pod, and what they allow",
    about: "Prints for ingress and egress whether the pod is isolated, by which NetworkPolicies, and every rule that allows \
            something. POD is NAMESPACE/NAME, or NAME in the namespace default.",
    flags: &[&OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle policies web", "coracle policies shop/web -o json"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let pod = given.operand(0)?.unwrap_or_default().to_owned();
    let mut answers = Client::connect(&given.roots()?)?.ask(Ask::Policies { pod })?;
    while let Some(answer) = answers.next()? {
        // A newer agent may tell more than was asked for.
        if let Answer::Policies(view) = answer {
            match output {
                Output::Json => print(&format!("{}\n", serde_json::to_string_pretty(&view).map_err(CliError::Answer)?))?,
                Output::Table | Output::Wide => print(&text(&view))?,
            }
        }
    }
    Ok(Exit::Ok)
}

fn text(view: &PolicyView) -> String {
    let mut out = format!("pod {}/{}\n", view.namespace, view.name);
    if view.host_network {
        out += "hostNetwork: no policy is about it; to other pods it is the node\n";
    } else {
        for (word, direction) in [("ingress", &view.ingress), ("egress", &view.egress)] {
            out += &lines(word, direction);
        }
    }
    if view.off {
        out += "none of this is enforced: the agent runs with --policy=off\n";
    }
    for note in &view.skipped {
        out += &format!("{note}\n");
    }
    out.lines().map(|line| format!("{}\n", table::clean(line))).collect()
}

fn lines(word: &str, direction: &DirectionView) -> String {
    if !direction.isolated {
        return format!("{word}: everything is allowed, no policy isolates the pod\n");
    }
    let by = direction.policies.join(", ");
    if direction.allowed.is_empty() {
        return format!("{word}: nothing is allowed, isolated by {by}\n");
    }
    let mut out = format!("{word}: isolated by {by}; allowed is\n");
    for allowed in &direction.allowed {
        out += &format!("  {} ({})\n", allowed.rule, allowed.policy);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::server::model::AllowedView;

    #[test]
    fn a_line_a_rule_and_what_cannot_be_read_below() {
        let allowed = AllowedView { policy: "shop/web".into(), rule: "from pods app=front of its namespace: TCP 80".into() };
        let view = PolicyView {
            namespace: "shop".into(),
            name: "web".into(),
            ingress: DirectionView {
                isolated: true,
                policies: vec!["shop/deny".into(), "shop/web".into()],
                allowed: vec![allowed],
            },
            skipped: vec!["NetworkPolicy shop/deny, spec.ingress[0].from[0]: no peer\u{1b}[1m".into()],
            ..PolicyView::default()
        };
        assert_eq!(
            text(&view),
            "pod shop/web\n\
             ingress: isolated by shop/deny, shop/web; allowed is\n  from pods app=front of its namespace: TCP 80 (shop/web)\n\
             egress: everything is allowed, no policy isolates the pod\n\
             NetworkPolicy shop/deny, spec.ingress[0].from[0]: no peer\u{fffd}[1m\n"
        );
        let closed = DirectionView { isolated: true, policies: vec!["shop/deny".into()], allowed: vec![] };
        let view = PolicyView { egress: closed, off: true, ..view };
        assert!(text(&view).contains("egress: nothing is allowed, isolated by shop/deny\n"));
        assert!(text(&view).contains("--policy=off"));
        assert!(text(&PolicyView { host_network: true, ..view }).contains("the node"));
    }
}
