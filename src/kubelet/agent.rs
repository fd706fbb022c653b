//! The planner thread: the one owner of DESIRED and OBSERVED.

use super::handle::Request;
use super::model::{Action, Outcome};
use super::source::SourceUpdate;
use crate::runtime::model::RuntimeEvent;

/// Everything that can wake the planner.
pub enum Message {
    Source(SourceUpdate),
    Runtime(RuntimeEvent),
    Report { action: Action, outcome: Outcome },
    Request(Request),
}
