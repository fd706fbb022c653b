//! A table in nft's words, for people: `coracle proxy --dry-run` and traces.
//!
//! Invariant: each step has one wording, nft(8)'s as far as nft has words for it, so that what
//! this prints and what `nft list table` prints can be laid side by side.
#![deny(clippy::disallowed_methods)]

use std::fmt;

use super::ir::{
    Bytes, Chain, ChainType, CtStates, Data, DataSpec, Element, Family, Field, Hook, Key, Reject, SetSpec, Step, Table, Type,
    Value, Verdict,
};

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {} {{", self.family.name(), self.name)?;
        for (name, spec) in &self.sets {
            self.print_set(f, name, spec)?;
        }
        for (name, chain) in &self.chains {
            self.print_chain(f, name, chain)?;
        }
        writeln!(f, "}}")
    }
}

impl Table {
    fn print_set(&self, f: &mut fmt::Formatter<'_>, name: &str, spec: &SetSpec) -> fmt::Result {
        let words = |types: &[Type]| types.iter().map(|t| type_word(*t, self.family)).collect::<Vec<_>>().join(" . ");
        let (kind, data, none) = match &spec.data {
            DataSpec::None => ("set", String::new(), Vec::new()),
            DataSpec::Fields(types) => ("map", format!(" : {}", words(types)), types.clone()),
            DataSpec::Verdict => ("map", " : verdict".to_owned(), Vec::new()),
        };
        writeln!(f, "\t{kind} {name} {{\n\t\ttype {}{data}", words(&spec.key))?;
        if spec.interval {
            writeln!(f, "\t\tflags interval")?;
        }
        if let Some(dynamic) = spec.dynamic {
            let (size, timeout) = (dynamic.size, dynamic.timeout.as_secs());
            writeln!(f, "\t\tsize {size}\n\t\tflags dynamic,timeout\n\t\ttimeout {timeout}s")?;
        }
        for (at, (key, element)) in self.elements.get(name).into_iter().flatten().enumerate() {
            write!(f, "{}", if at == 0 { "\t\telements = { " } else { ",\n\t\t\t     " })?;
            write!(f, "{}", self.element_text(key, element, spec, &none))?;
        }
        let any = self.elements.get(name).is_some_and(|e| !e.is_empty());
        writeln!(f, "{}\t}}\n", if any { " }\n" } else { "" })
    }

    fn element_text(&self, key: &Key, element: &Element, spec: &SetSpec, data: &[Type]) -> String {
        let start = self.values(&key.start, &spec.key);
        let mut text = match &key.end {
            None => start.join(" . "),
            Some(end) => {
                let ends = self.values(end, &spec.key);
                let ranges = start.iter().zip(&ends).map(|(a, b)| if a == b { a.clone() } else { format!("{a}-{b}") });
                ranges.collect::<Vec<_>>().join(" . ")
            }
        };
        if let Some(comment) = &element.comment {
            text += &format!(" comment \"{comment}\"");
        }
        match &element.data {
            Data::None => {}
            Data::Fields(bytes) => text += &format!(" : {}", self.values(bytes, data).join(" . ")),
            Data::Verdict(verdict) => text += &format!(" : {}", verdict_text(verdict)),
        }
        text
    }

    fn values(&self, bytes: &Bytes, types: &[Type]) -> Vec<String> {
        match bytes.values(types, self.family) {
            Some(values) => values.iter().map(value_text).collect(),
            None => vec![format!("0x{bytes:?}")],
        }
    }

    fn print_chain(&self, f: &mut fmt::Formatter<'_>, name: &str, chain: &Chain) -> fmt::Result {
        writeln!(f, "\tchain {name} {{")?;
        if let Some(base) = chain.base {
            let kind = match base.kind {
                ChainType::Filter => "filter",
                ChainType::Nat => "nat",
                ChainType::Route => "route",
            };
            writeln!(f, "\t\ttype {kind} hook {} priority {}; policy accept;", hook_word(base.hook), base.priority)?;
        }
        for rule in &chain.rules {
            let steps: Vec<String> = rule.steps.iter().map(|step| step_text(step, self.family)).collect();
            writeln!(f, "\t\t{} comment \"{}\"", steps.join(" "), rule.comment)?;
        }
        writeln!(f, "\t}}\n")
    }
}

pub fn hook_word(hook: Hook) -> &'static str {
    match hook {
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::Postrouting => "postrouting",
    }
}

pub fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Return => "return".to_owned(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

fn type_word(field: Type, family: Family) -> &'static str {
    match (field, family) {
        (Type::Address, Family::Ip) => "ipv4_addr",
        (Type::Address, Family::Ip6) => "ipv6_addr",
        (Type::Protocol, _) => "inet_proto",
        (Type::Port, _) => "inet_service",
        (Type::Index, _) => "mark",
    }
}

fn value_text(value: &Value) -> String {
    match value {
        Value::Address(ip) => ip.to_string(),
        Value::Protocol(6) => "tcp".to_owned(),
        Value::Protocol(17) => "udp".to_owned(),
        Value::Protocol(132) => "sctp".to_owned(),
        Value::Protocol(number) => number.to_string(),
        Value::Port(port) => port.to_string(),
        Value::Index(index) => format!("{index:#010x}"),
    }
}

fn key_text(fields: &[Field], family: Family) -> String {
    let ip = family.name();
    let word = |field: &Field| match field {
        Field::Source => format!("{ip} saddr"),
        Field::Destination => format!("{ip} daddr"),
        Field::Protocol => "meta l4proto".to_owned(),
        Field::SourcePort => "th sport".to_owned(),
        Field::DestinationPort => "th dport".to_owned(),
        Field::OriginalDestination => format!("ct original {ip} daddr"),
        Field::Random { modulus, offset: 0 } => format!("numgen random mod {modulus}"),
        Field::Random { modulus, offset } => format!("numgen random mod {modulus} offset {offset}"),
    };
    fields.iter().map(word).collect::<Vec<_>>().join(" . ")
}

pub fn step_text(step: &Step, family: Family) -> String {
    let ip = family.name();
    let no = |not: &bool| if *not { "!= " } else { "" };
    match step {
        Step::DestinationIsLocal { not } => format!("fib daddr type {}local", no(not)),
        Step::SourceIsLocal { not } => format!("fib saddr type {}local", no(not)),
        Step::SourceIn { cidr, not } => format!("{ip} saddr {}{cidr}", no(not)),
        Step::DestinationIn { cidr, not } => format!("{ip} daddr {}{cidr}", no(not)),
        Step::InInterface { name, not } => format!("iifname {}\"{name}\"", no(not)),
        Step::OutInterface { name, not } => format!("oifname {}\"{name}\"", no(not)),
        Step::Protocol { number, not } => format!("meta l4proto {}{}", no(not), value_text(&Value::Protocol(*number))),
        Step::DestinationPorts { first, last, not } if first == last => format!("th dport {}{first}", no(not)),
        Step::DestinationPorts { first, last, not } => format!("th dport {}{first}-{last}", no(not)),
        Step::TcpOpens { not } => format!("tcp flags & (fin | syn | rst | ack) {} syn", if *not { "!=" } else { "==" }),
        Step::InSet { key, set, not } => format!("{} {}@{set}", key_text(key, family), no(not)),
        Step::CtState { states, not } => format!("ct state {}{}", no(not), states_text(*states)),
        Step::CtStatusDnat { not } => format!("ct status {}dnat", if *not { "! " } else { "" }),
        Step::MarkHas { bits, not } => format!("meta mark & {bits:#010x} {} {bits:#010x}", if *not { "!=" } else { "==" }),
        Step::MarkOr { bits } => format!("meta mark set meta mark | {bits:#010x}"),
        Step::MarkXor { bits } => format!("meta mark set meta mark ^ {bits:#010x}"),
        Step::Update { key, set } => format!("update @{set} {{ {} }}", key_text(key, family)),
        Step::Delete { key, set } => format!("delete @{set} {{ {} }}", key_text(key, family)),
        Step::Verdict(verdict) => verdict_text(verdict),
        Step::VerdictMap { key, map } => format!("{} vmap @{map}", key_text(key, family)),
        Step::Dnat { address, port } if address.is_ipv6() => format!("dnat to [{address}]:{port}"),
        Step::Dnat { address, port } => format!("dnat to {address}:{port}"),
        Step::DnatMap { key, map } => format!("dnat {ip} to {} map @{map}", key_text(key, family)),
        Step::Masquerade { fully_random: true } => "masquerade fully-random".to_owned(),
        Step::Masquerade { fully_random: false } => "masquerade".to_owned(),
        Step::Reject(how) => reject_text(*how, family).to_owned(),
    }
}

pub fn reject_text(how: Reject, family: Family) -> &'static str {
    match (how, family) {
        (Reject::TcpReset, _) => "reject with tcp reset",
        (Reject::PortUnreachable, _) => "reject",
        (Reject::AdminProhibited, Family::Ip) => "reject with icmp admin-prohibited",
        (Reject::AdminProhibited, Family::Ip6) => "reject with icmpv6 admin-prohibited",
    }
}

fn states_text(states: CtStates) -> String {
    let CtStates { new, established, related, invalid, untracked } = states;
    let words =
        [(invalid, "invalid"), (established, "established"), (related, "related"), (new, "new"), (untracked, "untracked")];
    words.iter().filter(|(has, _)| *has).map(|(_, word)| *word).collect::<Vec<_>>().join(",")
}
