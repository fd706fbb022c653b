//! A packet's way in words: one line a rule that did something, then the end.
#![deny(clippy::disallowed_methods)]

use std::fmt;
use std::net::SocketAddr;

use super::ir::Reject;
use super::text::{hook_word, verdict_text};
use super::trace::{Did, End, Hop, Trace};

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for hop in &self.hops {
            writeln!(f, "{hop}")?;
        }
        f.write_str(&self.outcome())
    }
}

impl Trace {
    /// What became of the packet.
    pub fn outcome(&self) -> String {
        let to = SocketAddr::new(self.packet.destination, self.packet.destination_port);
        let to = match &self.end {
            End::Delivered => format!("to {to} on this node"),
            End::Sent(by) => format!("to {to} by {by}"),
            End::Dropped => return "dropped".to_owned(),
            End::Rejected(how) => return format!("refused: {}", refusal(*how)),
        };
        format!("{to}, source {}", if self.masqueraded { "masqueraded" } else { "kept" })
    }
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}: {}: ", hook_word(self.hook), self.chain, self.rule + 1, self.comment)?;
        if let Some((set, comment)) = &self.element {
            write!(f, "@{set} ")?;
            if let Some(comment) = comment {
                write!(f, "({comment}) ")?;
            }
        }
        match &self.did {
            Did::Went => write!(f, "goes on"),
            Did::Verdict(verdict) => f.write_str(&verdict_text(verdict)),
            Did::Translated(ip, port) => write!(f, "to {}", SocketAddr::new(*ip, *port)),
            Did::Masqueraded => f.write_str("masquerade"),
            Did::Rejected(how) => f.write_str(refusal(*how)),
        }
    }
}

fn refusal(how: Reject) -> &'static str {
    match how {
        Reject::TcpReset => "reset",
        Reject::PortUnreachable => "port unreachable",
        Reject::AdminProhibited => "prohibited",
    }
}
