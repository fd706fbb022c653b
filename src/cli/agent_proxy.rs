//! The flags of `coracle agent` that are about its proxy. Those of kube-proxy have its names.

use std::net::{IpAddr, SocketAddr};

use super::args::{Flag, Given};
use super::exit::CliError;
use crate::config::proxying::{Conntrack, HEALTHZ, METRICS, NodePorts, ProxyMode, Proxying};

const fn flag(long: &'static str, value: &'static str, help: &'static str) -> Flag {
    Flag { long, short: None, value: Some(value), help }
}
const fn switch(long: &'static str, help: &'static str) -> Flag {
    Flag { long, short: None, value: None, help }
}

pub const PROXY: Flag = flag(
    "proxy",
    "on|off|auto",
    "serve Services to this node's connections (default: auto, which is off while another kube-proxy's rules are here)",
);
pub const METRICS_BIND_ADDRESS: Flag = flag(
    "metrics-bind-address",
    "IP:PORT",
    "where the proxy's /metrics, /proxyMode and /configz are; \"\" or 0: nowhere (default: 127.0.0.1:10249)",
);
pub const HEALTHZ_BIND_ADDRESS: Flag = flag(
    "healthz-bind-address",
    "IP:PORT",
    "where the proxy's /healthz and /livez are; \"\" or 0: nowhere (default: 0.0.0.0:10256)",
);
pub const NODEPORT_ADDRESSES: Flag = flag(
    "nodeport-addresses",
    "LIST",
    "which of the node's addresses take NodePort connections: CIDRs with commas between, `all`, or `primary` (default)",
);
pub const IGNORE_EXTERNAL_IPS: Flag =
    switch("ignore-external-ips", "serve no externalIPs: whoever may write a Service could take any address's traffic by them");
pub const IGNORE_LOAD_BALANCER_IPS: Flag =
    switch("ignore-load-balancer-ips", "serve no addresses of load balancers that a Service's status names");
pub const CONNTRACK_MAX_PER_CORE: Flag = flag(
    "conntrack-max-per-core",
    "N",
    "room for N tracked connections a core; 0: as many as the kernel has (default: 32768, fewer with little memory)",
);
pub const CONNTRACK_MIN: Flag =
    flag("conntrack-min", "N", "room for N tracked connections at least (default: 131072, fewer with little memory)");
pub const CONNTRACK_ESTABLISHED: Flag = flag(
    "conntrack-tcp-timeout-established",
    "DURATION",
    "a quiet TCP connection is forgotten after it; 0: the kernel's (default: 24h, unless it was set by hand)",
);
pub const CONNTRACK_CLOSE_WAIT: Flag = flag(
    "conntrack-tcp-timeout-close-wait",
    "DURATION",
    "a TCP connection in CLOSE_WAIT is forgotten after it; 0: the kernel's (default: 1h, unless it was set by hand)",
);
pub const CONNTRACK_BE_LIBERAL: Flag =
    switch("conntrack-tcp-be-liberal", "packets outside a connection's window are not invalid");

pub fn proxying(given: &Given) -> Result<Proxying, CliError> {
    let usage =
        |flag: &Flag, text: &str, expected: &str| CliError::Usage(format!("--{} \"{text}\": expected {expected}", flag.long));
    let mut proxying = Proxying::default();
    if let Some(text) = given.text(&PROXY)? {
        proxying.mode = match text {
            "on" => ProxyMode::On,
            "off" => ProxyMode::Off,
            "auto" => ProxyMode::Auto,
            other => return Err(usage(&PROXY, other, "on, off or auto")),
        };
    }
    for (flag, usual, at) in
        [(&METRICS_BIND_ADDRESS, METRICS, &mut proxying.metrics), (&HEALTHZ_BIND_ADDRESS, HEALTHZ, &mut proxying.healthz)]
    {
        if let Some(text) = given.text(flag)? {
            let expected = || usage(flag, text, "an address such as 127.0.0.1:10249 or [::]:10249, or \"\"");
            *at = bind_address(text, usual.port()).map_err(|()| expected())?;
        }
    }
    let lists = given.all(&NODEPORT_ADDRESSES)?;
    if !lists.is_empty() {
        let words: Vec<&str> = lists.iter().flat_map(|list| list.split(',')).map(str::trim).filter(|w| !w.is_empty()).collect();
        proxying.node_ports = match words.as_slice() {
            ["primary"] => NodePorts::Primary,
            // As with kube-proxy no range at all means every address.
            [] | ["all"] => NodePorts::All,
            cidrs => NodePorts::Cidrs(
                cidrs
                    .iter()
                    .map(|text| {
                        text.parse().map_err(|_| usage(&NODEPORT_ADDRESSES, text, "primary, all, or CIDRs such as 192.0.2.0/24"))
                    })
                    .collect::<Result<_, _>>()?,
            ),
        };
    }
    proxying.ignore_external_ips = given.has(&IGNORE_EXTERNAL_IPS);
    proxying.ignore_load_balancer_ips = given.has(&IGNORE_LOAD_BALANCER_IPS);
    let time = |flag: &Flag| -> Result<Option<u64>, CliError> {
        let Some(text) = given.text(flag)? else { return Ok(None) };
        seconds(text).map(Some).ok_or_else(|| usage(flag, text, "a duration such as 24h, 1h30m or 0"))
    };
    proxying.conntrack = Conntrack {
        max_per_core: given.parse::<u32>(&CONNTRACK_MAX_PER_CORE, "a number")?.map(u64::from),
        min: given.parse::<u32>(&CONNTRACK_MIN, "a number")?.map(u64::from),
        established: time(&CONNTRACK_ESTABLISHED)?,
        close_wait: time(&CONNTRACK_CLOSE_WAIT)?,
        liberal: given.has(&CONNTRACK_BE_LIBERAL),
    };
    Ok(proxying)
}

/// `IP:PORT`, or an address alone with the usual port. None: off.
fn bind_address(text: &str, port: u16) -> Result<Option<SocketAddr>, ()> {
    match text {
        "" | "0" => Ok(None),
        text => match text.parse::<SocketAddr>() {
            Ok(at) if at.port() == 0 => Ok(None),
            Ok(at) => Ok(Some(at)),
            Err(_) => text.parse::<IpAddr>().map(|ip| Some(SocketAddr::new(ip, port))).map_err(drop),
        },
    }
}

/// Go's durations in whole seconds: `24h`, `1h30m`, `90s`, `0`.
fn seconds(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let mut rest = text;
    let mut total = 0_u64;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let (number, tail) = rest.split_at(end);
        let unit = tail.chars().next()?;
        let scale = match unit {
            'h' => 3600,
            'm' => 60,
            's' => 1,
            _ => return None,
        };
        total = total.checked_add(number.parse::<u64>().ok()?.checked_mul(scale)?)?;
        rest = tail.get(unit.len_utf8()..)?;
    }
    // What a kernel parameter of this kind can hold.
    (!text.is_empty() && total <= i32::MAX as u64).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_durations_are_read_as_kube_proxy_reads_them() {
        let at = |text| bind_address(text, 10249).map(|at| at.map(|at| at.to_string()));
        assert_eq!(at("127.0.0.1:9000"), Ok(Some("127.0.0.1:9000".into())));
        assert_eq!(at("[::]:9000"), Ok(Some("[::]:9000".into())));
        assert_eq!(at("192.0.2.1"), Ok(Some("192.0.2.1:10249".into())));
        for off in ["", "0", "127.0.0.1:0"] {
            assert_eq!(at(off), Ok(None), "{off}");
        }
        for bad in ["x", "1", "127.0.0.1:", "127.0.0.1:70000", ":10249"] {
            assert_eq!(at(bad), Err(()), "{bad}");
        }
        let good = [("0", 0), ("24h", 86_400), ("24h0m0s", 86_400), ("1h30m", 5_400), ("90s", 90)];
        good.into_iter().for_each(|(text, expected)| assert_eq!(seconds(text), Some(expected), "{text}"));
        for bad in ["", "1", "h", "1d", "-1s", "1.5h", "99999999999999999999s", "1000000h", "1é"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }
}
