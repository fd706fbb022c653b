//! The truth tables: policies, and by hand what they let through. The titles are those of
//! sig-network's Netpol suite (test/e2e/network/netpol) where it has such a case.

use crate::field::{L4, Probe};

pub struct Case {
    pub title: &'static str,
    /// Namespace, name, spec of each.
    pub policies: &'static [(&'static str, &'static str, &'static str)],
    /// Labels of namespaces, where they are not `ns: <name>`.
    pub namespaces: Option<fn(char) -> String>,
    /// Written without looking at the implementation.
    pub allowed: fn(&Probe) -> bool,
}

const fn case(
    title: &'static str,
    policies: &'static [(&'static str, &'static str, &'static str)],
    allowed: fn(&Probe) -> bool,
) -> Case {
    Case { title, policies, namespaces: None, allowed }
}

const XA: (char, char) = ('x', 'a');

fn tcp(p: &Probe, port: u16) -> bool {
    p.l4 == L4::Tcp && p.port == port
}

/// Everything but what leads to x/a, of which this.
fn to_xa(p: &Probe, allowed: bool) -> bool {
    p.to != XA || allowed
}

fn from_xa(p: &Probe, allowed: bool) -> bool {
    p.from != XA || allowed
}

pub const CASES: &[Case] = &[
    case("no policy", &[], |_| true),
    case("should support a 'default-deny-ingress' policy", &[("x", "p", "{podSelector: {}, policyTypes: [Ingress]}")], |p| {
        p.to.0 != 'x'
    }),
    case("should support a 'default-deny-all' policy", &[("x", "p", "{podSelector: {}, policyTypes: [Ingress, Egress]}")], |p| {
        p.to.0 != 'x' && p.from.0 != 'x'
    }),
    case("default deny of egress alone", &[("x", "p", "{podSelector: {}, policyTypes: [Egress]}")], |p| p.from.0 != 'x'),
    case("without policyTypes an empty policy is about ingress", &[("x", "p", "{podSelector: {}}")], |p| p.to.0 != 'x'),
    case(
        "without policyTypes egress rules are about egress too",
        &[("x", "p", "{podSelector: {}, egress: [{ports: [{port: 80}]}]}")],
        |p| p.to.0 != 'x' && (p.from.0 != 'x' || tcp(p, 80)),
    ),
    case(
        "policyTypes Egress makes nothing of ingress rules",
        &[("x", "p", "{podSelector: {}, policyTypes: [Egress], ingress: [{ports: [{port: 80}]}]}")],
        |p| p.from.0 != 'x',
    ),
    case(
        "should enforce policy to allow traffic only from a pod in the same namespace, by PodSelector",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}]}")],
        |p| to_xa(p, p.from == ('x', 'b')),
    ),
    case(
        "an empty podSelector of a peer is the policy's namespace",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}]}]}")],
        |p| to_xa(p, p.from.0 == 'x'),
    ),
    case(
        "should enforce policy to allow traffic only from a different namespace, based on NamespaceSelector",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'y'),
    ),
    case(
        "should enforce policy based on PodSelector with MatchExpressions",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchExpressions: [{key: pod, operator: In, values: [b]}]}}]}]}",
        )],
        |p| to_xa(p, p.from == ('x', 'b')),
    ),
    case(
        "should enforce policy based on NamespaceSelector with MatchExpressions",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: In, values: [\"y\"]}]}}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'y'),
    ),
    case(
        "should enforce policy based on NamespaceSelector with MatchExpressions using default ns label",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [x]}]}}]}]}",
        )],
        |p| to_xa(p, p.from.0 != 'x'),
    ),
    case(
        "should enforce policy based on PodSelector or NamespaceSelector",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [x]}]}}, {podSelector: {matchLabels: {pod: b}}}]}]}",
        )],
        |p| to_xa(p, p.from.0 != 'x' || p.from.1 == 'b'),
    ),
    case(
        "should enforce policy based on PodSelector and NamespaceSelector",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [x]}]}, podSelector: {matchLabels: {pod: b}}}]}]}",
        )],
        |p| to_xa(p, p.from.0 != 'x' && p.from.1 == 'b'),
    ),
    case(
        "should enforce policy based on Multiple PodSelectors and NamespaceSelectors",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: ns, operator: NotIn, values: [x]}]}, podSelector: {matchExpressions: [{key: pod, operator: In, values: [b, c]}]}}]}]}",
        )],
        |p| to_xa(p, p.from.0 != 'x' && p.from.1 != 'a'),
    ),
    case(
        "should enforce policy based on any PodSelectors",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {}}, {podSelector: {matchLabels: {pod: c}}, namespaceSelector: {}}]}]}",
        )],
        |p| to_xa(p, p.from.1 != 'a'),
    ),
    case(
        "should enforce policy to allow traffic only from a pod in a different namespace based on PodSelector and NamespaceSelector",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}, podSelector: {matchLabels: {pod: a}}}]}]}",
        )],
        |p| to_xa(p, p.from == ('y', 'a')),
    ),
    case(
        "should enforce policy based on Ports",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}], ports: [{port: 81, protocol: TCP}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'y' && tcp(p, 81)),
    ),
    case(
        "should enforce multiple, stacked policies with overlapping podSelectors",
        &[
            (
                "x",
                "p80",
                "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}], ports: [{port: 80}]}]}",
            ),
            (
                "x",
                "p81",
                "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}], ports: [{port: 81}]}]}",
            ),
        ],
        |p| to_xa(p, p.from.0 == 'y' && p.l4 == L4::Tcp),
    ),
    case("should support allow-all policy", &[("x", "p", "{podSelector: {}, ingress: [{}], egress: [{}]}")], |_| true),
    case(
        "should allow ingress access on one named port",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: serve-81-tcp}]}]}")],
        |p| to_xa(p, tcp(p, 81)),
    ),
    case(
        "should allow ingress access from namespace on one named port",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}], ports: [{port: serve-80-udp, protocol: UDP}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'y' && p.l4 == L4::Udp && p.port == 80),
    ),
    case(
        "should allow egress access on one named port",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: serve-80-tcp}]}]}")],
        |p| from_xa(p, tcp(p, 80)),
    ),
    case(
        "a name of another protocol is none",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: serve-80-tcp, protocol: UDP}]}]}")],
        |p| to_xa(p, false),
    ),
    case(
        "a name that no pod has is none",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: nothing}]}]}")],
        |p| from_xa(p, false),
    ),
    case(
        "should allow ingress access from endPort range",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 81, endPort: 90}]}]}")],
        |p| to_xa(p, tcp(p, 81)),
    ),
    case(
        "should enforce policies with endPort on egress, over both ports",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: 80, endPort: 81}]}]}",
        )],
        |p| from_xa(p, p.l4 == L4::Tcp),
    ),
    case(
        "ranges that overlap and touch",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 1, endPort: 80}, {port: 70, endPort: 79}, {port: 82, endPort: 65535}, {port: 81, protocol: UDP}, {port: 1, endPort: 70, protocol: UDP}]}]}",
        )],
        |p| to_xa(p, tcp(p, 80) || (p.l4 == L4::Udp && p.port == 81)),
    ),
    case(
        "should enforce egress policy allowing traffic to a server in a different namespace based on PodSelector and NamespaceSelector",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {ns: \"y\"}}, podSelector: {matchLabels: {pod: a}}}]}]}",
        )],
        |p| from_xa(p, p.to == ('y', 'a')),
    ),
    case(
        "should enforce egress to pods of the same namespace",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{podSelector: {}}]}]}")],
        |p| from_xa(p, p.to.0 == 'x'),
    ),
    case(
        "should enforce ingress and egress of one policy",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress], ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}]}], egress: [{to: [{podSelector: {matchLabels: {pod: c}}}]}]}",
        )],
        |p| to_xa(p, p.from == ('x', 'b')) && from_xa(p, p.to == ('x', 'c')),
    ),
    case(
        "should ensure an IP overlapping both IPBlock.CIDR and IPBlock.Except is allowed when another rule allows it",
        &[
            (
                "x",
                "except",
                "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.231.0.0/16, except: [{x/b}/32]}}, {ipBlock: {cidr: \"fd00:231::/64\", except: [\"{x/b:6}/128\"]}}]}]}",
            ),
            (
                "x",
                "allow",
                "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: {x/b}/32}}, {ipBlock: {cidr: \"{x/b:6}/128\"}}]}]}",
            ),
        ],
        |_| true,
    ),
    case(
        "should allow egress access to server in CIDR block",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: {y/b}/32}}, {ipBlock: {cidr: \"{y/b:6}/128\"}}]}]}",
        )],
        |p| from_xa(p, p.to == ('y', 'b')),
    ),
    case(
        "should enforce except clause while egress access to server in CIDR block",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{ipBlock: {cidr: 10.231.0.0/16, except: [{y/b}/32, {z/c}/32]}}, {ipBlock: {cidr: \"fd00:231::/64\", except: [\"{y/b:6}/128\", \"{z/c:6}/128\"]}}]}]}",
        )],
        |p| from_xa(p, p.to != ('y', 'b') && p.to != ('z', 'c')),
    ),
    case(
        "ingress from a CIDR block, of IPv4 alone",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: {y/b}/32}}]}]}")],
        |p| to_xa(p, p.from == ('y', 'b') && !p.v6),
    ),
    case(
        "ingress from everywhere of IPv6 but one",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: \"::/0\", except: [\"{y/b:6}/128\"]}}]}]}",
        )],
        |p| to_xa(p, p.v6 && p.from != ('y', 'b')),
    ),
    case(
        "overlapping blocks, one with an exception that the other covers",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: 10.231.0.0/16, except: [10.231.0.0/24]}}, {ipBlock: {cidr: {y/a}/32}}, {ipBlock: {cidr: {y/a}/31}}, {ipBlock: {cidr: \"fd00::/16\", except: [\"fd00:231::/64\"]}}]}]}",
        )],
        |p| {
            // The /31 has another pod in it, or none. Of IPv6 nothing is left.
            to_xa(p, !p.v6 && (p.from == ('y', 'a') || SIBLING.with(std::cell::Cell::get) == Some(p.from)))
        },
    ),
    case(
        "a block and a selector of one rule",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{ipBlock: {cidr: {z/c}/32}}, {podSelector: {matchLabels: {pod: b}}}], ports: [{port: 80}, {port: 81, protocol: UDP}]}]}",
        )],
        |p| {
            to_xa(
                p,
                (p.from == ('x', 'b') || (p.from == ('z', 'c') && !p.v6)) && (tcp(p, 80) || (p.l4 == L4::Udp && p.port == 81)),
            )
        },
    ),
    case(
        "should work with Ingress, Egress specified together",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress, Egress], ingress: [{from: [{podSelector: {matchLabels: {pod: b}}}], ports: [{port: 80}]}], egress: [{to: [{namespaceSelector: {}}], ports: [{port: 80}]}]}",
        )],
        |p| to_xa(p, p.from == ('x', 'b') && tcp(p, 80)) && from_xa(p, tcp(p, 80)),
    ),
    case(
        "should support denying of egress traffic on the client side, even if the server explicitly allows this traffic",
        &[
            (
                "x",
                "client",
                "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {ns: \"y\"}}, podSelector: {matchLabels: {pod: a}}}]}]}",
            ),
            (
                "y",
                "server",
                "{podSelector: {matchLabels: {pod: b}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: x}}, podSelector: {matchLabels: {pod: a}}}]}]}",
            ),
        ],
        |p| from_xa(p, p.to == ('y', 'a')) && (p.to != ('y', 'b') || p.from == XA),
    ),
    case(
        "both sides have to allow it",
        &[
            (
                "x",
                "client",
                "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: 80}, {port: 81}]}]}",
            ),
            ("y", "server", "{podSelector: {}, ingress: [{ports: [{port: 81}, {port: 81, protocol: UDP}]}]}"),
        ],
        |p| from_xa(p, p.l4 == L4::Tcp) && (p.to.0 != 'y' || (p.port == 81 && p.l4 != L4::Sctp)),
    ),
    case(
        "should enforce policies that deny everything beside one that allows",
        &[
            ("x", "deny", "{podSelector: {}, policyTypes: [Ingress, Egress]}"),
            (
                "x",
                "allow",
                "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}]}]}",
            ),
        ],
        |p| p.from.0 != 'x' && (p.to.0 != 'x' || (p.to == XA && p.from.0 == 'y')),
    ),
    case(
        "should deny ingress from pods on other namespaces",
        &[
            ("x", "p", "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}"),
            ("y", "p", "{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}"),
        ],
        |p| p.to.0 == 'z' || p.from.0 == p.to.0,
    ),
    case(
        "should enforce policy of a protocol only",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{protocol: UDP}]}]}")],
        |p| to_xa(p, p.l4 == L4::Udp),
    ),
    case(
        "should support a 'default-deny-ingress' policy [Feature:UDP], opened on UDP 81",
        &[("x", "p", "{podSelector: {}, ingress: [{ports: [{port: 81, protocol: UDP}]}]}")],
        |p| p.to.0 != 'x' || (p.l4 == L4::Udp && p.port == 81),
    ),
    case(
        "should enforce policy based on Ports [Feature:SCTPConnectivity]",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}], ports: [{port: 81, protocol: SCTP}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'y' && p.l4 == L4::Sctp && p.port == 81),
    ),
    case(
        "should not allow access by TCP when a policy specifies only SCTP",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 81, protocol: SCTP}]}]}")],
        |p| to_xa(p, p.l4 == L4::Sctp && p.port == 81),
    ),
    case(
        "should not allow access by TCP when a policy specifies only UDP",
        &[("x", "p", "{podSelector: {matchLabels: {pod: a}}, ingress: [{ports: [{port: 81, protocol: UDP}]}]}")],
        |p| to_xa(p, p.l4 == L4::Udp && p.port == 81),
    ),
    case(
        "SCTP by name on egress",
        &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {ns: z}}}], ports: [{port: serve-80-sctp, protocol: SCTP}]}]}",
        )],
        |p| from_xa(p, p.to.0 == 'z' && p.l4 == L4::Sctp && p.port == 80),
    ),
    case(
        "a policy that selects nobody isolates nobody",
        &[("x", "p", "{podSelector: {matchLabels: {pod: nobody}}, policyTypes: [Ingress, Egress]}")],
        |_| true,
    ),
    case(
        "a policy of pods by DoesNotExist and Exists",
        &[(
            "x",
            "p",
            "{podSelector: {matchExpressions: [{key: pod, operator: Exists}, {key: none, operator: DoesNotExist}]}, ingress: [{from: [{podSelector: {matchExpressions: [{key: pod, operator: DoesNotExist}]}}]}]}",
        )],
        |p| p.to.0 != 'x',
    ),
    case(
        "NotIn takes pods that have another value, or none",
        &[(
            "x",
            "p",
            "{podSelector: {matchExpressions: [{key: pod, operator: NotIn, values: [b, c]}]}, ingress: [{from: [{podSelector: {matchExpressions: [{key: color, operator: NotIn, values: [red]}]}}]}]}",
        )],
        |p| to_xa(p, p.from.0 == 'x'),
    ),
    case(
        "a namespace that no object names matches nothing",
        &[("x", "p", "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: none}}}]}]}")],
        |p| p.to.0 != 'x',
    ),
    Case {
        title: "should enforce updated policy, after labels of a namespace",
        policies: &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}]}]}",
        )],
        namespaces: Some(|ns| if ns == 'z' { "team: blue".to_owned() } else { format!("ns: \"{ns}\"") }),
        allowed: |p| to_xa(p, p.from.0 == 'z'),
    },
    Case {
        title: "should allow ingress access from updated namespace: the same policy, other labels",
        policies: &[(
            "x",
            "p",
            "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: blue}}}]}]}",
        )],
        namespaces: Some(|ns| if ns == 'y' { "team: blue".to_owned() } else { String::new() }),
        allowed: |p| to_xa(p, p.from.0 == 'y'),
    },
    Case {
        title: "a namespace cannot lie about its name",
        policies: &[(
            "x",
            "p",
            "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: \"y\"}}}]}]}",
        )],
        namespaces: Some(|ns| if ns == 'z' { "kubernetes.io/metadata.name: \"y\"".to_owned() } else { String::new() }),
        allowed: |p| p.to.0 != 'x' || p.from.0 == 'y',
    },
    case("should enforce updated policy: from deny …", &[("x", "updated", "{podSelector: {}}")], |p| p.to.0 != 'x'),
    case("… to allow-all", &[("x", "updated", "{podSelector: {}, ingress: [{}]}")], |_| true),
    case("… and to a port", &[("x", "updated", "{podSelector: {}, ingress: [{ports: [{port: 80}]}]}")], |p| {
        p.to.0 != 'x' || tcp(p, 80)
    }),
    case(
        "three namespaces at once, each with its own rule",
        &[
            ("x", "p", "{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {ns: \"y\"}}}]}]}"),
            (
                "y",
                "p",
                "{podSelector: {matchLabels: {pod: b}}, policyTypes: [Egress], egress: [{to: [{namespaceSelector: {matchLabels: {ns: x}}}]}]}",
            ),
            (
                "z",
                "p",
                "{podSelector: {matchLabels: {pod: c}}, ingress: [{ports: [{port: 80}]}], egress: [{ports: [{port: 81}]}]}",
            ),
        ],
        |p| {
            (p.to.0 != 'x' || p.from.0 == 'y')
                && (p.from != ('y', 'b') || p.to.0 == 'x')
                && (p.to != ('z', 'c') || tcp(p, 80))
                && (p.from != ('z', 'c') || tcp(p, 81))
        },
    ),
    case("policies deleted", &[], |_| true),
];

thread_local! {
    /// The pod whose IPv4 address differs from y/a's in the last bit.
    pub static SIBLING: std::cell::Cell<Option<(char, char)>> = const { std::cell::Cell::new(None) };
}
