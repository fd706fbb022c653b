//! What each path answers. Pure.
//!
//! Invariant: a request changes nothing, whatever it asks; forms and codes are kube-proxy's
//! (cmd/kube-proxy/app/server.go, pkg/proxy/healthcheck of 1.34).
#![deny(clippy::disallowed_methods)]

use serde_json::json;

use super::record::Health;
use crate::api::time::WallTime;

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: u16,
    pub kind: &'static str,
    pub body: String,
    /// X-Load-Balancing-Endpoint-Weight.
    pub weight: Option<usize>,
}

pub const TEXT: &str = "text/plain; charset=utf-8";
pub const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
pub const JSON: &str = "application/json";

impl Answer {
    pub fn new(code: u16, kind: &'static str, body: impl Into<String>) -> Answer {
        Answer { code, kind, body: body.into(), weight: None }
    }
    pub fn not_found() -> Answer {
        Answer::new(404, TEXT, "404 page not found\n")
    }
    pub fn not_allowed() -> Answer {
        Answer::new(405, TEXT, "only GET and HEAD are answered here\n")
    }
    pub fn is_good(&self) -> bool {
        self.code == 200
    }
}

/// Go's zero time where there was never one.
fn time(nanos: i64) -> String {
    if nanos == 0 { "0001-01-01T00:00:00Z".to_owned() } else { WallTime(nanos).nanos() }
}

fn health(health: &Health, node_eligible: Option<bool>) -> Answer {
    let good = health.is_good() && node_eligible.unwrap_or(true);
    let last = health.families.iter().map(|of| of.updated).max().unwrap_or(0);
    let mut body = json!({
        // While all is well this is always recent, whatever has changed: load balancers ask for it.
        "lastUpdated": time(if good { health.now } else { last }),
        "currentTime": time(health.now),
        "healthy": health.is_good(),
    });
    if let Some(object) = body.as_object_mut() {
        if let Some(eligible) = node_eligible {
            object.insert("nodeEligible".into(), eligible.into());
        }
        let status = health.families.iter().filter(|of| of.updated != 0 || !of.healthy).map(|of| {
            let name = if of.v4 { "IPv4" } else { "IPv6" };
            (name.to_owned(), json!({ "lastUpdated": time(of.updated), "healthy": of.healthy }))
        });
        let status: serde_json::Map<_, _> = status.collect();
        if !status.is_empty() {
            object.insert("status".into(), status.into());
        }
    }
    Answer::new(if good { 200 } else { 503 }, JSON, body.to_string())
}

/// A node that is alone is never marked for its end.
pub fn healthz(now: &Health) -> Answer {
    health(now, Some(true))
}

pub fn livez(now: &Health) -> Answer {
    health(now, None)
}

/// What a load balancer asks at a Service's healthCheckNodePort.
pub fn service(namespace: &str, name: &str, local: usize, healthy: bool) -> Answer {
    // Names as Go's %q gives them, which for names of objects is as JSON does.
    let (namespace, name) = (json!(namespace), json!(name));
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace},\n\t\t\"name\": {name}\n\t}},\n\t\"localEndpoints\": {local},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    );
    let code = if local > 0 && healthy { 200 } else { 503 };
    Answer { weight: Some(local), ..Answer::new(code, JSON, body) }
}

#[cfg(test)]
mod tests {
    use super::super::record::OfOne;
    use super::*;

    const NOW: i64 = 1_700_000_000_000_000_000;

    fn seen(v4: bool, v6: bool, updated: i64) -> Health {
        let of = |v4, healthy| OfOne { v4, updated, healthy };
        Health { families: vec![of(true, v4), of(false, v6)], now: NOW }
    }

    #[test]
    fn health_is_told_in_kube_proxys_form() {
        let good = healthz(&seen(true, true, NOW - 5));
        assert_eq!((good.code, good.kind, good.weight), (200, JSON, None));
        let body: serde_json::Value = serde_json::from_str(&good.body).unwrap();
        let expected = json!({
            "lastUpdated": "2023-11-14T22:13:20.000000000Z",
            "currentTime": "2023-11-14T22:13:20.000000000Z",
            "nodeEligible": true,
            "healthy": true,
            "status": {
                "IPv4": {"lastUpdated": "2023-11-14T22:13:19.999999995Z", "healthy": true},
                "IPv6": {"lastUpdated": "2023-11-14T22:13:19.999999995Z", "healthy": true},
            }
        });
        assert_eq!(body, expected);
        let bad = livez(&seen(true, false, NOW - 5));
        let body: serde_json::Value = serde_json::from_str(&bad.body).unwrap();
        assert_eq!((bad.code, &body["healthy"], body.get("nodeEligible")), (503, &json!(false), None));
        assert_eq!(body["lastUpdated"], "2023-11-14T22:13:19.999999995Z", "not fresh while it is bad");
        assert_eq!(body["status"]["IPv6"]["healthy"], false);
        let never = livez(&seen(true, true, 0));
        assert!(never.is_good() && !never.body.contains("status"), "{}", never.body);
    }

    #[test]
    fn a_services_health_is_local_endpoints_and_a_proxy_that_works() {
        let answer = service("shop", "web", 2, true);
        assert_eq!((answer.code, answer.weight), (200, Some(2)));
        assert_eq!(
            answer.body,
            "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}"
        );
        assert_eq!(service("shop", "web", 0, true).code, 503);
        assert_eq!((service("shop", "web", 2, false).code, service("shop", "web", 2, false).weight), (503, Some(2)));
    }
}
