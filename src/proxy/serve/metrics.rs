//! The record as Prometheus text (exposition format 0.0.4).
//!
//! Invariant: names, types, labels and help texts are those of kube-proxy 1.34 in nftables mode,
//! so that its dashboards and alerts go on. An address family without a table has no series.
#![deny(clippy::disallowed_methods)]

use std::fmt::Write;

use super::record::{Histogram, OfFamily, Record};

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

struct Page {
    text: String,
}

// A String takes every write.
impl Page {
    fn head(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(self.text, "# HELP kubeproxy_{name} [ALPHA] {help}\n# TYPE kubeproxy_{name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = match labels {
            "" => writeln!(self.text, "kubeproxy_{name} {value}"),
            labels => writeln!(self.text, "kubeproxy_{name}{{{labels}}} {value}"),
        };
    }

    fn histogram(&mut self, name: &str, labels: &str, histogram: &Histogram) {
        let mut below = 0;
        let bounds = histogram.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            below += count;
            self.line(&format!("{name}_bucket"), &format!("{labels},le=\"{bound}\""), below);
        }
        self.line(&format!("{name}_sum"), labels, histogram.sum);
        self.line(&format!("{name}_count"), labels, below);
    }
}

fn family(of: &OfFamily) -> &'static str {
    if of.v4 { "ip_family=\"IPv4\"" } else { "ip_family=\"IPv6\"" }
}

/// A wall time in seconds, as Prometheus has them.
fn seconds(nanos: i64) -> f64 {
    nanos as f64 / 1e9
}

type Read<T> = fn(&OfFamily) -> T;
type ReadHistogram = fn(&OfFamily) -> &Histogram;

pub fn text(record: &Record) -> String {
    let mut page = Page { text: String::with_capacity(16 << 10) };
    let histograms: [(&str, &str, ReadHistogram); 5] = [
        ("conntrack_reconciler_sync_duration_seconds", "ReconcileConntrackFlowsLatency latency in seconds", |of| &of.forgetting),
        ("network_programming_duration_seconds", "In Cluster Network Programming Latency in seconds", |of| &of.programming),
        ("sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs", |of| &of.full),
        ("sync_partial_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for partial resyncs", |of| &of.partial),
        ("sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds", |of| &of.sync),
    ];
    for (name, help, read) in histograms {
        page.head(name, Kind::Histogram, help);
        record.families.iter().for_each(|of| page.histogram(name, family(of), read(of)));
    }
    let counters: [(&str, &str, Read<u64>); 3] = [
        ("conntrack_reconciler_deleted_entries_total", "Cumulative conntrack flows deleted by conntrack reconciler", |of| {
            of.forgotten
        }),
        ("sync_proxy_rules_nftables_cleanup_failures_total", "Cumulative proxy nftables cleanup failures", |of| {
            of.cleanup_failures
        }),
        ("sync_proxy_rules_nftables_sync_failures_total", "Cumulative proxy nftables sync failures", |of| of.sync_failures),
    ];
    for (name, help, read) in counters {
        page.head(name, Kind::Counter, help);
        record.families.iter().for_each(|of| page.line(name, family(of), read(of)));
    }
    let times: [(&str, &str, Read<i64>); 2] = [
        ("sync_proxy_rules_last_queued_timestamp_seconds", "The last time a sync of proxy rules was queued", |of| of.queued),
        ("sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced", |of| of.last),
    ];
    for (name, help, read) in times {
        page.head(name, Kind::Gauge, help);
        record.families.iter().for_each(|of| page.line(name, family(of), seconds(read(of))));
    }
    let name = "sync_proxy_rules_no_local_endpoints_total";
    page.head(name, Kind::Gauge, "Number of services with a Local traffic policy and no endpoints");
    for of in &record.families {
        page.line(name, &format!("{},traffic_policy=\"external\"", family(of)), of.no_local_external);
        page.line(name, &format!("{},traffic_policy=\"internal\"", family(of)), of.no_local_internal);
    }
    for (what, title, changes) in [("endpoint", "Endpoint", record.endpoints), ("service", "Service", record.services)] {
        let pending = format!("sync_proxy_rules_{what}_changes_pending");
        page.head(&pending, Kind::Gauge, &format!("Pending proxy rules {title} changes"));
        page.line(&pending, "", changes.pending);
        let total = format!("sync_proxy_rules_{what}_changes_total");
        page.head(&total, Kind::Counter, &format!("Cumulative proxy rules {title} changes"));
        page.line(&total, "", changes.total);
    }
    for (what, [good, bad]) in [("healthz", record.healthz), ("livez", record.livez)] {
        let name = format!("proxy_{what}_total");
        page.head(&name, Kind::Counter, &format!("Cumulative proxy {what} HTTP status"));
        page.line(&name, "code=\"200\"", good);
        page.line(&name, "code=\"503\"", bad);
    }
    page.text
}

#[cfg(test)]
mod tests {
    use super::super::record::Now;
    use super::*;

    #[test]
    fn the_page_is_kube_proxys() {
        let mut record = Record::of([true].into_iter());
        record.synced(true, false, 0.003, Now { boot: 5, wall: 1_700_000_000_500_000_000 });
        record.healthz = [3, 1];
        record.services.total = 4;
        let text = text(&record);
        for line in [
            "# HELP kubeproxy_sync_proxy_rules_duration_seconds [ALPHA] SyncProxyRules latency in seconds",
            "# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.002\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.004\"} 1",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family=\"IPv4\",le=\"+Inf\"} 1",
            "kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family=\"IPv4\"} 0.003",
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 0",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"0.25\"} 0",
            "kubeproxy_network_programming_duration_seconds_bucket{ip_family=\"IPv4\",le=\"300\"} 0",
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1700000000.5",
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"} 0",
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"internal\"} 0",
            "kubeproxy_sync_proxy_rules_service_changes_total 4",
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending 0",
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv4\"} 0",
            "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv4\"} 0",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "kubeproxy_proxy_livez_total{code=\"200\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
        assert!(!text.contains("IPv6"), "there is no such table");
        // Every series is of a name that was told, and told once.
        let mut names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            let known = |n: &&str| name == *n || ["_bucket", "_sum", "_count"].iter().any(|s| name == format!("{n}{s}"));
            assert!(names.iter().any(known), "{line}");
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!((names.len(), all), (17, 17));
    }
}
