//! The agent's local socket: `<run>/agent.sock`, mode 0600, root or the agent's own user only.
//!
//! Invariant: clients cost the agent a bounded number of threads, bytes and seconds, however many
//! there are and whatever they send; an honest client is served beside hostile ones. What is
//! answered comes from [`Agent`]; this room decides nothing about pods.

mod door;
mod frame;
pub mod model;
mod serve;
mod slots;

use std::time::Duration;

pub use door::{Door, Facts};
pub use frame::{Frame, FrameError, MAX_ANSWER, MAX_REQUEST, receive, send};
pub use serve::{Server, ServerError};

use crate::runtime::ExecProcess;
use model::{AgentInfo, ExecAsk, Failure, ImageView, PodView, PodsAsk, PolicyView, ProblemView, ServiceView};

/// What the server asks of the agent; [`Door`] is the real one. Every call may block its own
/// thread, none the planner.
pub trait Agent: Send + Sync + 'static {
    /// All pods by namespace and name, each handed to `give`.
    fn pods(&self, ask: &PodsAsk, give: &mut dyn FnMut(PodView) -> Result<(), Failure>) -> Result<(), Failure>;
    fn problems(&self) -> Result<Vec<ProblemView>, Failure>;
    /// By namespace and name.
    fn services(&self) -> Result<Vec<ServiceView>, Failure>;
    /// What NetworkPolicies say of a pod.
    fn policies(&self, pod: &str) -> Result<PolicyView, Failure>;
    /// The proxy's tables, piece by piece.
    fn tables(&self, give: &mut dyn FnMut(String) -> Result<(), Failure>) -> Result<(), Failure>;
    fn trace(&self, from: &str, to: &str) -> Result<String, Failure>;
    fn info(&self) -> Result<AgentInfo, Failure>;
    /// Starts a process in a running container.
    fn exec(&self, ask: &ExecAsk) -> Result<ExecProcess, Failure>;
    fn images(&self) -> Result<Vec<ImageView>, Failure>;
    fn pull(&self, reference: &str, username: &str, password: &str) -> Result<ImageView, Failure>;
    fn import(&self, path: &str, name: Option<&str>) -> Result<Vec<ImageView>, Failure>;
    /// Ends all pods within `bound` and starts none from then on. `say` gets lines for people.
    fn stop_all(&self, bound: Duration, say: &mut dyn FnMut(String)) -> Result<(), Failure>;
}
