//! The texts a pod's network view consists of: `/etc/hosts`, `/etc/resolv.conf`, its hostname.
//!
//! Pure. Invariant: byte for byte what the kubelet writes for the same input, so that images and
//! scripts that look for a line find it; and no value of a manifest can add a line of its own.
//! Sources: kubelet's pkg/kubelet/kubelet_pods.go and network/dns/dns.go, resolv.conf(5), hosts(5).
#![deny(clippy::disallowed_methods)]

use std::net::IpAddr;

/// glibc's and musl's MAXNS.
const NAMESERVERS_MAX: usize = 3;
/// Limits of the API, KEP-2595.
const SEARCHES_MAX: usize = 32;
const SEARCH_CHARS_MAX: usize = 2048;
/// A DNS name; glibc before 2.26 aborts on longer search entries.
const NAME_MAX: usize = 253;
/// One DNS label, and the longest hostname that we give.
const LABEL_MAX: usize = 63;
/// `__NEW_UTS_LEN`: what sethostname(2) takes.
const KERNEL_HOSTNAME_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    #[error("{field} \"{}\" holds white space or a control character: write it without", .value.escape_debug())]
    Unprintable { field: &'static str, value: String },
    #[error(
        "hostname \"{0}\" has nothing left after it is cut to 63 characters and freed of trailing - and .: choose another name"
    )]
    EmptyHostname(String),
    #[error("the FQDN {fqdn} is too long: the kernel takes 64 characters, this has {}: shorten hostname or subdomain, or leave setHostnameAsFQDN out", .fqdn.len())]
    FqdnTooLong { fqdn: String },
}

// ---- /etc/hosts ----------------------------------------------------------------------------

/// `spec.hostAliases[]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAlias {
    pub ip: String,
    pub hostnames: Vec<String>,
}

/// `/etc/hosts` of a pod with a network of its own. `domain` is that of [`Hostname`].
pub fn hosts(hostname: &str, domain: Option<&str>, addresses: &[IpAddr], aliases: &[HostAlias]) -> Result<String, TextError> {
    word("hostname", hostname)?;
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n\
         127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\n\
         fe00::1\tip6-allnodes\n\
         fe00::2\tip6-allrouters\n",
    );
    for address in addresses {
        match domain {
            Some(domain) => {
                word("subdomain", domain)?;
                text += &format!("{address}\t{hostname}.{domain}\t{hostname}\n");
            }
            None => text += &format!("{address}\t{hostname}\n"),
        }
    }
    push_aliases(&mut text, aliases)?;
    Ok(text)
}

/// `/etc/hosts` of a pod with hostNetwork: the node's own file and the pod's aliases.
pub fn hosts_of_node(node_file: &str, aliases: &[HostAlias]) -> Result<String, TextError> {
    let mut text = String::from("# Kubernetes-managed hosts file (host network).\n");
    text += node_file;
    push_aliases(&mut text, aliases)?;
    Ok(text)
}

fn push_aliases(text: &mut String, aliases: &[HostAlias]) -> Result<(), TextError> {
    if aliases.is_empty() {
        return Ok(());
    }
    *text += "\n# Entries added by HostAliases.\n";
    for alias in aliases {
        word("hostAliases.ip", &alias.ip)?;
        for name in &alias.hostnames {
            word("hostAliases.hostnames", name)?;
        }
        *text += &format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t"));
    }
    Ok(())
}

// ---- hostname ------------------------------------------------------------------------------

/// A pod's name in its own eyes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hostname {
    /// First label; what /etc/hosts shows.
    pub hostname: String,
    /// `<subdomain>.<namespace>.svc.<cluster domain>`, where the pod has a subdomain.
    pub domain: Option<String>,
    /// What sethostname(2) gets: the hostname, or the whole FQDN with setHostnameAsFQDN.
    pub kernel: String,
}

/// What [`hostname`] decides from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostnameInput<'a> {
    pub pod: &'a str,
    pub namespace: &'a str,
    /// `spec.hostname`, `spec.subdomain`, `spec.setHostnameAsFQDN`.
    pub hostname: Option<&'a str>,
    pub subdomain: Option<&'a str>,
    pub as_fqdn: bool,
    pub cluster_domain: &'a str,
}

pub fn hostname(input: &HostnameInput<'_>) -> Result<Hostname, TextError> {
    let wanted = input.hostname.filter(|h| !h.is_empty()).unwrap_or(input.pod);
    word("hostname", wanted)?;
    let cut = wanted.char_indices().nth(LABEL_MAX).map_or(wanted, |(at, _)| &wanted[..at]);
    let hostname = cut.trim_end_matches(['-', '.']).to_owned();
    if hostname.is_empty() {
        return Err(TextError::EmptyHostname(wanted.to_owned()));
    }
    let domain = match input.subdomain.filter(|s| !s.is_empty()) {
        None => None,
        Some(subdomain) => {
            word("subdomain", subdomain)?;
            Some(format!("{subdomain}.{}.svc.{}", input.namespace, input.cluster_domain))
        }
    };
    let kernel = match &domain {
        Some(domain) if input.as_fqdn => {
            let fqdn = format!("{hostname}.{domain}");
            if fqdn.len() > KERNEL_HOSTNAME_MAX {
                return Err(TextError::FqdnTooLong { fqdn });
            }
            fqdn
        }
        _ => hostname.clone(),
    };
    Ok(Hostname { hostname, domain, kernel })
}

// ---- /etc/resolv.conf ----------------------------------------------------------------------

/// The three kinds of lines that resolv.conf has; also `spec.dnsConfig`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    pub nameservers: Vec<String>,
    pub searches: Vec<String>,
    pub options: Vec<DnsOption>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsOption {
    pub name: String,
    pub value: Option<String>,
}

/// `spec.dnsPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DnsPolicy {
    #[default]
    ClusterFirst,
    ClusterFirstWithHostNet,
    Default,
    None,
}

/// The cluster's name service; a node that is alone has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterDns {
    pub servers: Vec<String>,
    pub domain: String,
}

/// What [`resolv_conf`] decides from.
#[derive(Clone, Copy, Debug)]
pub struct ResolvInput<'a> {
    pub policy: DnsPolicy,
    pub host_network: bool,
    pub namespace: &'a str,
    /// Of [`host_dns`] for pods with a network of their own; of [`parse_resolv_conf`] for others.
    pub host: &'a Dns,
    pub cluster: Option<&'a ClusterDns>,
    /// `spec.dnsConfig`.
    pub pod: Option<&'a Dns>,
}

/// Something that was asked for and is not in the text; a warning of the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DnsProblem {
    #[error(
        "dnsPolicy ClusterFirst acts as Default: this node knows no cluster DNS; say dnsPolicy: Default, or name servers in dnsConfig"
    )]
    NoClusterDns,
    #[error("only the first 3 nameservers are used, left out: {}", .0.join(" "))]
    Nameservers(Vec<String>),
    #[error("search domains beyond 32 entries, 2048 characters in all or 253 in one are left out: {}", .0.join(" "))]
    Searches(Vec<String>),
    #[error("{} cannot be reached from a pod and no file names the server behind it: pods get no such nameserver; write real ones into /etc/resolv.conf or dnsConfig", .0.join(" "))]
    LoopbackOnly(Vec<String>),
    #[error("the pod has no nameserver at all: write some into /etc/resolv.conf or dnsConfig")]
    NoNameserver,
}

/// The text, and what of the wish it leaves out.
pub fn resolv_conf(input: &ResolvInput<'_>) -> Result<(String, Vec<DnsProblem>), TextError> {
    let mut problems = Vec::new();
    let wants_cluster = match input.policy {
        DnsPolicy::ClusterFirstWithHostNet => true,
        DnsPolicy::ClusterFirst => !input.host_network,
        DnsPolicy::Default | DnsPolicy::None => false,
    };
    let mut dns = match (input.policy, input.cluster.filter(|c| !c.servers.is_empty())) {
        (DnsPolicy::None, _) => Dns::default(),
        (_, Some(cluster)) if wants_cluster => {
            let domain = &cluster.domain;
            let mut searches = vec![format!("{}.svc.{domain}", input.namespace), format!("svc.{domain}"), domain.clone()];
            searches.extend(input.host.searches.iter().cloned());
            let ndots = DnsOption { name: "ndots".into(), value: Some("5".into()) };
            Dns { nameservers: cluster.servers.clone(), searches, options: vec![ndots] }
        }
        (_, _) => {
            if wants_cluster {
                problems.push(DnsProblem::NoClusterDns);
            }
            input.host.clone()
        }
    };
    if let Some(pod) = input.pod {
        merge(&mut dns, pod);
    }
    dedup(&mut dns.nameservers);
    dedup(&mut dns.searches);
    problems.extend(fit(&mut dns));
    if dns.nameservers.is_empty() {
        problems.push(DnsProblem::NoNameserver);
    }
    Ok((render(&dns)?, problems))
}

/// dnsConfig adds servers and searches; an option of it replaces the one of the same name.
fn merge(dns: &mut Dns, pod: &Dns) {
    dns.nameservers.extend(pod.nameservers.iter().cloned());
    dns.searches.extend(pod.searches.iter().cloned());
    for option in &pod.options {
        match dns.options.iter_mut().find(|o| o.name == option.name) {
            Some(old) => old.value.clone_from(&option.value),
            None => dns.options.push(option.clone()),
        }
    }
}

fn dedup(entries: &mut Vec<String>) {
    let mut seen = std::collections::BTreeSet::new();
    entries.retain(|entry| seen.insert(entry.clone()));
}

/// Cuts to the limits, from the end.
fn fit(dns: &mut Dns) -> Vec<DnsProblem> {
    let mut problems = Vec::new();
    if dns.nameservers.len() > NAMESERVERS_MAX {
        problems.push(DnsProblem::Nameservers(dns.nameservers.split_off(NAMESERVERS_MAX)));
    }
    let mut left_out = if dns.searches.len() > SEARCHES_MAX { dns.searches.split_off(SEARCHES_MAX) } else { Vec::new() };
    let (fitting, long) = std::mem::take(&mut dns.searches).into_iter().partition(|s| s.len() <= NAME_MAX);
    dns.searches = fitting;
    left_out.extend::<Vec<String>>(long);
    while dns.searches.iter().map(|s| s.len() + 1).sum::<usize>() > SEARCH_CHARS_MAX + 1 {
        left_out.extend(dns.searches.pop());
    }
    if !left_out.is_empty() {
        problems.push(DnsProblem::Searches(left_out));
    }
    problems
}

/// The order in which containerd writes the lines.
fn render(dns: &Dns) -> Result<String, TextError> {
    let mut text = String::new();
    for search in &dns.searches {
        word("dnsConfig.searches", search)?;
    }
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.nameservers {
        word("dnsConfig.nameservers", server)?;
        text += &format!("nameserver {server}\n");
    }
    let mut options = Vec::new();
    for option in &dns.options {
        word("dnsConfig.options", &option.name)?;
        options.push(match option.value.as_deref().filter(|v| !v.is_empty()) {
            Some(value) => {
                word("dnsConfig.options", value)?;
                format!("{}:{value}", option.name)
            }
            None => option.name.clone(),
        });
    }
    if !options.is_empty() {
        text += &format!("options {}\n", options.join(" "));
    }
    Ok(text)
}

/// Reads a resolv.conf as the kubelet does: the last `search` wins, options add up, the rest of
/// a line that it does not know is left out.
pub fn parse_resolv_conf(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines() {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("nameserver") => dns.nameservers.extend(fields.next().map(str::to_owned)),
            Some("search") => {
                dns.searches = fields.map(|s| if s == "." { s } else { s.trim_end_matches('.') }.to_owned()).collect();
            }
            Some("options") => {
                for field in fields {
                    let (name, value) = field.split_once(':').map_or((field, None), |(n, v)| (n, Some(v.to_owned())));
                    match dns.options.iter_mut().find(|o| o.name == name) {
                        Some(old) => old.value = value,
                        None => dns.options.push(DnsOption { name: name.to_owned(), value }),
                    }
                }
            }
            _ => {}
        }
    }
    dns
}

/// What the node's resolv.conf means to a pod with a network of its own: a stub on the node's
/// loopback (systemd-resolved, dnsmasq) is out of its reach, so the servers behind the stub take
/// its place. `upstreams`: the texts of the files that may name those, best first.
pub fn host_dns(node: &str, upstreams: &[&str]) -> (Dns, Vec<DnsProblem>) {
    let dns = parse_resolv_conf(node);
    let (local, reachable): (Vec<String>, Vec<String>) = dns.nameservers.iter().cloned().partition(|s| is_loopback(s));
    if local.is_empty() {
        return (dns, Vec::new());
    }
    for upstream in upstreams {
        let mut other = parse_resolv_conf(upstream);
        other.nameservers.retain(|s| !is_loopback(s));
        if !other.nameservers.is_empty() {
            return (other, Vec::new());
        }
    }
    let problems = if reachable.is_empty() { vec![DnsProblem::LoopbackOnly(local)] } else { Vec::new() };
    (Dns { nameservers: reachable, ..dns }, problems)
}

fn is_loopback(server: &str) -> bool {
    let address = server.split('%').next().unwrap_or(server);
    address.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// A value that stands between two separators of a line.
fn word(field: &'static str, value: &str) -> Result<(), TextError> {
    if value.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(TextError::Unprintable { field, value: value.chars().take(80).collect() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(nameservers: &[&str], searches: &[&str], options: &[(&str, Option<&str>)]) -> Dns {
        Dns {
            nameservers: nameservers.iter().map(|s| s.to_string()).collect(),
            searches: searches.iter().map(|s| s.to_string()).collect(),
            options: options.iter().map(|(n, v)| DnsOption { name: n.to_string(), value: v.map(str::to_owned) }).collect(),
        }
    }

    fn input(policy: DnsPolicy, host: &Dns) -> ResolvInput<'_> {
        ResolvInput { policy, host_network: false, namespace: "shop", host, cluster: None, pod: None }
    }

    #[test]
    fn hosts_of_a_pod_with_two_addresses_a_subdomain_and_aliases() {
        let addresses = ["10.88.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let aliases = [HostAlias { ip: "10.1.2.3".into(), hostnames: vec!["db".into(), "db.lan".into()] }];
        let text = hosts("web", Some("sub.shop.svc.cluster.local"), &addresses, &aliases).unwrap();
        assert_eq!(
            text,
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n\
             10.88.0.2\tweb.sub.shop.svc.cluster.local\tweb\nfd00::2\tweb.sub.shop.svc.cluster.local\tweb\n\
             \n# Entries added by HostAliases.\n10.1.2.3\tdb\tdb.lan\n"
        );
        assert!(hosts("web", None, &addresses[..1], &[]).unwrap().ends_with("ip6-allrouters\n10.88.0.2\tweb\n"));
    }

    #[test]
    fn hosts_with_host_network_is_the_nodes_file_below_its_header() {
        let text = hosts_of_node("127.0.0.1 localhost\n", &[]).unwrap();
        assert_eq!(text, "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n");
    }

    #[test]
    fn no_value_adds_a_line() {
        let alias = HostAlias { ip: "10.0.0.1\n8.8.8.8".into(), hostnames: vec!["x".into()] };
        assert!(matches!(hosts("web", None, &[], &[alias]), Err(TextError::Unprintable { field: "hostAliases.ip", .. })));
        let host = Dns::default();
        let pod = dns(&["1.1.1.1\noptions x"], &[], &[]);
        assert!(resolv_conf(&ResolvInput { pod: Some(&pod), ..input(DnsPolicy::None, &host) }).is_err());
    }

    #[test]
    fn hostname_is_cut_to_63_and_keeps_no_trailing_dash() {
        let pod = format!("{}-{}", "a".repeat(62), "tail");
        let base = HostnameInput {
            pod: &pod,
            namespace: "shop",
            hostname: None,
            subdomain: None,
            as_fqdn: false,
            cluster_domain: "cluster.local",
        };
        let name = hostname(&base).unwrap();
        assert_eq!((name.hostname.as_str(), name.domain), ("a".repeat(62).as_str(), None));
        let name = hostname(&HostnameInput { hostname: Some("web"), subdomain: Some("sub"), as_fqdn: true, ..base }).unwrap();
        assert_eq!(name.domain.as_deref(), Some("sub.shop.svc.cluster.local"));
        assert_eq!(name.kernel, "web.sub.shop.svc.cluster.local");
        let long = HostnameInput { hostname: Some("web"), subdomain: Some(&pod[..50]), as_fqdn: true, ..base };
        assert!(matches!(hostname(&long), Err(TextError::FqdnTooLong { .. })));
        assert_eq!(hostname(&HostnameInput { as_fqdn: true, hostname: Some("web"), ..base }).unwrap().kernel, "web");
        assert!(matches!(hostname(&HostnameInput { hostname: Some("--"), ..base }), Err(TextError::EmptyHostname(_))));
    }

    #[test]
    fn cluster_first_without_a_cluster_is_default_and_says_so() {
        let host = parse_resolv_conf("nameserver 9.9.9.9\nsearch lan. corp\noptions ndots:2 edns0\n");
        let (text, problems) = resolv_conf(&input(DnsPolicy::ClusterFirst, &host)).unwrap();
        assert_eq!(text, "search lan corp\nnameserver 9.9.9.9\noptions ndots:2 edns0\n");
        assert_eq!(problems, [DnsProblem::NoClusterDns]);
        assert_eq!(resolv_conf(&input(DnsPolicy::Default, &host)).unwrap(), (text, vec![]));
    }

    #[test]
    fn cluster_first_puts_the_clusters_domains_before_the_nodes() {
        let host = parse_resolv_conf("nameserver 9.9.9.9\nsearch lan\n");
        let cluster = ClusterDns { servers: vec!["10.96.0.10".into()], domain: "cluster.local".into() };
        let with = ResolvInput { cluster: Some(&cluster), ..input(DnsPolicy::ClusterFirst, &host) };
        let wanted =
            "search shop.svc.cluster.local svc.cluster.local cluster.local lan\nnameserver 10.96.0.10\noptions ndots:5\n";
        assert_eq!(resolv_conf(&with).unwrap(), (wanted.to_owned(), vec![]));
        let host_net = ResolvInput { host_network: true, ..with };
        assert_eq!(resolv_conf(&host_net).unwrap().0, "search lan\nnameserver 9.9.9.9\n");
        let both = ResolvInput { policy: DnsPolicy::ClusterFirstWithHostNet, ..host_net };
        assert_eq!(resolv_conf(&both).unwrap().0, wanted);
    }

    #[test]
    fn dns_config_adds_and_replaces_without_doubles() {
        let host = parse_resolv_conf("nameserver 9.9.9.9\nsearch lan\noptions ndots:2 rotate\n");
        let pod = dns(&["9.9.9.9", "1.1.1.1"], &["lan", "corp"], &[("ndots", Some("1")), ("edns0", None)]);
        let (text, problems) = resolv_conf(&ResolvInput { pod: Some(&pod), ..input(DnsPolicy::Default, &host) }).unwrap();
        assert_eq!(text, "search lan corp\nnameserver 9.9.9.9\nnameserver 1.1.1.1\noptions ndots:1 rotate edns0\n");
        assert_eq!(problems, []);
        let (text, problems) = resolv_conf(&input(DnsPolicy::None, &host)).unwrap();
        assert_eq!((text.as_str(), problems), ("", vec![DnsProblem::NoNameserver]));
    }

    #[test]
    fn limits_cut_from_the_end_and_name_what_they_cut() {
        let host = Dns::default();
        let mut pod = dns(&["1.1.1.1", "2.2.2.2", "3.3.3.3", "4.4.4.4"], &[], &[]);
        pod.searches = (0..33).map(|n| format!("d{n}")).collect();
        let (text, problems) = resolv_conf(&ResolvInput { pod: Some(&pod), ..input(DnsPolicy::None, &host) }).unwrap();
        assert_eq!(text.lines().filter(|l| l.starts_with("nameserver")).count(), 3);
        assert_eq!(problems, [DnsProblem::Nameservers(vec!["4.4.4.4".into()]), DnsProblem::Searches(vec!["d32".into()])]);
        // 11 × 200 characters with a space between: ten fit into 2048.
        pod = dns(&["1.1.1.1"], &[], &[]);
        pod.searches = (0..11).map(|n| format!("{n:0>200}")).collect();
        let (text, problems) = resolv_conf(&ResolvInput { pod: Some(&pod), ..input(DnsPolicy::None, &host) }).unwrap();
        assert_eq!(text.lines().next().unwrap().split(' ').count(), 11);
        assert!(matches!(&problems[..], [DnsProblem::Searches(cut)] if cut.len() == 1));
        // 2048 exactly is allowed.
        pod.searches = (0..8).map(|n| format!("{n:0>199}")).chain([format!("{:0>248}", 8), format!("{:0>199}", 9)]).collect();
        assert_eq!(pod.searches.join(" ").len(), 2048);
        assert_eq!(resolv_conf(&ResolvInput { pod: Some(&pod), ..input(DnsPolicy::None, &host) }).unwrap().1, []);
    }

    #[test]
    fn a_stub_on_loopback_is_replaced_by_what_is_behind_it() {
        let stub = "nameserver 127.0.0.53\noptions edns0\nsearch lan\n";
        let (found, problems) = host_dns(stub, &["nameserver ::1\n", "nameserver 192.0.2.1\nsearch lan\n"]);
        assert_eq!((found, problems), (dns(&["192.0.2.1"], &["lan"], &[]), vec![]));
        let (found, problems) = host_dns(stub, &[]);
        assert_eq!(found.nameservers, Vec::<String>::new());
        assert_eq!(problems, [DnsProblem::LoopbackOnly(vec!["127.0.0.53".into()])]);
        let (found, problems) = host_dns("nameserver 127.0.0.1\nnameserver 192.0.2.7\n", &[]);
        assert_eq!((found.nameservers, problems), (vec!["192.0.2.7".to_owned()], vec![]));
        let (found, _) = host_dns("nameserver fe80::1%eth0\n", &["nameserver 192.0.2.1\n"]);
        assert_eq!(found.nameservers, ["fe80::1%eth0"]);
    }
}
