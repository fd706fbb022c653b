//! `coracle info`: the running agent, its places and what it holds.

use super::args::{Body, Given, INSTANCE, NO_OPERANDS, OUTPUT, Output, ROOT, Verb};
use super::client::Client;
use super::exit::{CliError, Exit};
use super::{print, table};
use crate::api::time::WallTime;
use crate::kubelet::server::model::{AgentInfo, Answer, Ask};
use crate::sys::clock;

pub const VERB: Verb = Verb {
    name: "info",
    operands: NO_OPERANDS,
    command: false,
    summary: "tell about the running agent: version, places, memory, counts",
    about: "Tells the running agent's version, its directories, its memory and how many pods, containers and images it \
            holds, and what kernel it runs on. What the kernel lacks is told by `coracle check`.",
    flags: &[&OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle info", "coracle info -o json --root /srv/coracle"],
    body: Body::Parsed(run),
};

fn run(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let info = fetch(Client::connect(&given.roots()?)?)?;
    let kernel = nix::sys::utsname::uname().map_err(|e| CliError::because("ask the kernel its name", e))?;
    let kernel = format!("{} {}", kernel.release().to_string_lossy(), kernel.machine().to_string_lossy());
    match output {
        Output::Json => {
            let value = serde_json::json!({ "agent": info, "kernel": kernel });
            print(&format!("{value:#}\n"))?;
        }
        Output::Table | Output::Wide => print(&text(&info, &kernel, WallTime(clock::wall_nanos())))?,
    }
    Ok(Exit::Ok)
}

/// What the agent tells of itself.
pub fn fetch(client: Client) -> Result<AgentInfo, CliError> {
    let mut answers = client.ask(Ask::Info {})?;
    let mut info = None;
    while let Some(answer) = answers.next()? {
        if let Answer::Info(one) = answer {
            info = Some(*one);
        }
    }
    info.ok_or(CliError::Hangup)
}

/// Where names are answered, and how it goes.
fn names(info: &AgentInfo) -> String {
    if info.dns.is_empty() {
        return "no server".to_owned();
    }
    let count = |part: &str| info.dns_counters.iter().filter(|(name, _)| name.contains(part)).map(|(_, n)| n).sum::<u64>();
    format!(
        "{}: {} questions, {} answered from the cache, {} of them with old answers, {} failed",
        info.dns.join(", "),
        count("udp_requests") + count("tcp_requests"),
        count("cache_hits") + count("cache_stale"),
        count("cache_stale"),
        count("failures")
    )
}

fn text(info: &AgentInfo, kernel: &str, now: WallTime) -> String {
    let up = table::age(now.0 - info.started_at);
    let rows = [
        ("version", info.version.clone()),
        ("kernel", kernel.to_owned()),
        (
            "agent",
            format!(
                "pid {}, up {up}, {} resident, {} of it anonymous",
                info.pid,
                table::bytes(info.rss),
                table::bytes(info.anonymous)
            ),
        ),
        ("node", info.node.clone()),
        ("unit", info.unit.clone()),
        ("instance", if info.instance.is_empty() { "(default)".to_owned() } else { info.instance.clone() }),
        ("manifests", info.manifests.clone()),
        ("run", info.run.clone()),
        ("state", info.state.clone()),
        ("kubelet", info.kubelet.clone()),
        ("logs", info.logs.clone()),
        ("cgroups", info.cgroup_parent.clone()),
        ("pod ranges", info.pod_cidrs.join(", ")),
        ("dns", names(info)),
        ("services", info.proxy.clone()),
        ("pods", format!("{}, with {} running containers", info.pods, info.containers_running)),
        ("images", info.images.to_string()),
    ];
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:<width$}  {}\n", table::clean(value))).collect()
}
